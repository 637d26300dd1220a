"""One reward worker: a Ray actor with the child process that it feeds, watches and can kill."""

import contextlib
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.errors import RewardError
from workers.reward.function import Reward, RewardFunctionSpec, RewardRow

IMPORT_TIMEOUT_S = 120.0  # a user's file may import torch


class RewardWorker:
    """Scores rows one after another; made a Ray actor by `RewardGroup`."""

    def __init__(self, spec: RewardFunctionSpec, timeout_s: float, log_path: str) -> None:
        self.spec = spec
        self.timeout_s = timeout_s
        self.pipe, theirs = multiprocessing.Pipe()
        Path(log_path).parent.mkdir(parents=True, exist_ok=True)
        with open(log_path, "ab") as output:
            self.child = subprocess.Popen(
                [sys.executable, "-m", "workers.reward.child", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        theirs.close()
        self.pipe.send(spec)

    def ready(self) -> None:
        """Wait until the child has imported the function.

        Raises:
            RewardError: the import failed.
        """
        self._answer(IMPORT_TIMEOUT_S, "the import")

    def score(self, rows: Sequence[RewardRow]) -> list[Reward]:
        """The rows' rewards, in their order.

        Raises:
            RewardError: a call raised, took longer than the limit, ended the child, or returned what is not a reward.
        """
        rewards = []
        for row in rows:
            with contextlib.suppress(OSError):  # a dead child is told by the answer
                self.pipe.send(row)
            rewards.append(self._answer(self.timeout_s, row.row))
        return rewards

    def _answer(self, timeout_s: float, what: str) -> Any:
        if not self.pipe.poll(timeout_s):
            self.child.kill()
            raise RewardError(
                f"{self.spec.label} took longer than reward.timeout_s={timeout_s:g} s for {what}; its process was killed"
            )
        try:
            fine, value = self.pipe.recv()
        except (EOFError, OSError):
            raise RewardError(f"{self.spec.label} ended its process (exit {self.child.wait(5)}) at {what}") from None
        if not fine:
            raise RewardError(value)
        return value

    def __ray_shutdown__(self) -> None:
        """End the child with the actor."""
        self.child.kill()
