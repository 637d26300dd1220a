"""INT and TERM while a run goes."""

import signal
import sys
import threading
from collections.abc import Callable
from typing import Any


class StopSignals:
    """INT and TERM: the first asks the run to stop after its step, the second ends the process at once."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.received: int | None = None
        self.ended_by: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        self._before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        self.install()
        return self

    def install(self) -> None:
        """Take the signals; to be called again after ray.init, which takes TERM for itself and aborts on it."""
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handler
            for number in self._before:
                signal.signal(number, self._handle)

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, _: Any) -> None:
        if self.received is not None:
            self.ended_by = number
            sys.exit(128 + number)
        self.received = number
        self.say(
            f"{signal.Signals(number).name}: this step is finished and saved, then the run stops; once more ends it at once"
        )
