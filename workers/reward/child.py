"""The process that runs a reward function, so that a call that hangs can be killed from outside.

Started by `workers.reward.worker` as `python -m workers.reward.child FD`; it talks over the inherited pipe FD. What the
function prints goes to the process's own stdout and disturbs nothing.

It is sent the function first, then lists of rows. Its answers are tuples: `("ready",)` once; then for each row
`("started", index)` and `("scored", index, reward)`, in any order; or `("failed", text)`, after which it is of no use.
"""

import asyncio
import inspect
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from trainer.errors import RewardError
from workers.reward.function import (
    RewardFunctionSpec,
    RewardRow,
    call_async,
    call_batched,
    call_function,
    load_function,
    span,
)


class Server:
    """Answers lists of rows with the function's rewards, in the way that the function wants to be called."""

    def __init__(self, pipe: Connection, spec: RewardFunctionSpec, function: Callable[..., Any]) -> None:
        self.pipe, self.spec, self.function = pipe, spec, function

    def serve(self) -> None:
        """Until the other end closes."""
        is_async = inspect.iscoroutinefunction(self.function)
        with asyncio.Runner() as runner:  # one loop for good, since a function may keep a client that belongs to it
            while True:
                try:
                    rows = self.pipe.recv()
                except EOFError:
                    return
                if self.spec.batched:
                    self.score_batch(rows)
                elif is_async:
                    runner.run(self.score_together(rows))
                else:
                    self.score_in_turn(rows)

    def score_in_turn(self, rows: Sequence[RewardRow]) -> None:
        """Row by row."""
        for index, row in enumerate(rows):
            self.pipe.send(("started", index))
            try:
                answer = ("scored", index, call_function(self.function, self.spec, row))
            except Exception as error:
                answer = self.failure(error, row.row)
            self.pipe.send(answer)

    async def score_together(self, rows: Sequence[RewardRow]) -> None:
        """`max_concurrency` rows at once."""
        free = asyncio.Semaphore(self.spec.max_concurrency)

        async def score(index: int, row: RewardRow) -> None:
            async with free:
                self.pipe.send(("started", index))
                try:
                    answer = ("scored", index, await call_async(self.function, self.spec, row))
                except Exception as error:
                    answer = self.failure(error, row.row)
                self.pipe.send(answer)

        await asyncio.gather(*(score(index, row) for index, row in enumerate(rows)))

    def score_batch(self, rows: Sequence[RewardRow]) -> None:
        """All rows in one call."""
        self.pipe.send(("started", 0))
        try:
            answers = [
                ("scored", index, reward) for index, reward in enumerate(call_batched(self.function, self.spec, rows))
            ]
        except Exception as error:
            answers = [self.failure(error, span(rows))]
        for answer in answers:
            self.pipe.send(answer)

    def failure(self, error: Exception, what: str) -> tuple[str, str]:
        """The answer for a call that raised; called while the exception is handled."""
        if isinstance(error, RewardError):
            return "failed", str(error)
        return "failed", f"{self.spec.label} raised for {what}:\n{traceback.format_exc()}"


def main(descriptor: int) -> None:
    """Load the function that comes first through the pipe, then serve."""
    pipe = Connection(descriptor)
    spec = pipe.recv()
    try:
        function = load_function(spec)
    except BaseException:
        pipe.send(("failed", f"{spec.label} cannot be imported:\n{traceback.format_exc()}"))
        return
    pipe.send(("ready",))
    Server(pipe, spec, function).serve()


if __name__ == "__main__":
    main(int(sys.argv[1]))
