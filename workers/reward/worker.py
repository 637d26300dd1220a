"""One reward worker: a Ray actor with the child process that it feeds, watches and can kill."""

import contextlib
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.errors import RewardError
from workers.reward.function import Reward, RewardFunctionSpec, RewardRow, as_reward, span
from workers.reward.verifiers import UNSCORED, package_of

IMPORT_TIMEOUT_S = 120.0  # a user's file may import torch


class RewardWorker:
    """Scores rows; made a Ray actor by `RewardGroup`."""

    def __init__(self, spec: RewardFunctionSpec, timeout_s: float, log_path: str) -> None:
        self.spec = spec
        self.timeout_s = timeout_s
        self.log_path = Path(log_path)
        self._start()

    def _start(self) -> None:
        """A new child, which begins to import the function."""
        self.pipe, theirs = multiprocessing.Pipe()
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as output:
            self.child = subprocess.Popen(
                [sys.executable, "-m", "workers.reward.child", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        theirs.close()
        self.pipe.send(self.spec)

    def ready(self) -> None:
        """Wait until the child has imported the function.

        Raises:
            RewardError: the import failed.
        """
        self._answer(IMPORT_TIMEOUT_S, f"{IMPORT_TIMEOUT_S:g} s", "the import")

    def score(self, rows: Sequence[RewardRow]) -> list[Reward]:
        """The rows' rewards, in their order.

        A row on which a verifier of another package (`workers.reward.verifiers`) hangs or dies scores 0, `unscored`.

        Raises:
            RewardError: a call raised, took longer than the limit, ended the child, or returned what is not a reward.
        """
        rewards: dict[int, Reward] = {}
        while len(rewards) < len(rows):
            todo = [index for index in range(len(rows)) if index not in rewards]
            try:
                self._score(rows, todo, rewards)
            except _ChildLost as lost:
                if self.spec.path is not None or package_of(rows[lost.index].data_source) is None:
                    raise RewardError(str(lost)) from None
                rewards[lost.index] = as_reward(UNSCORED, self.spec.label, rows[lost.index].row)
                self._start()
                self.ready()
        return [rewards[index] for index in range(len(rows))]

    def _score(self, rows: Sequence[RewardRow], todo: Sequence[int], rewards: dict[int, Reward]) -> None:
        """Fill the rewards of the rows `todo`.

        A row's time runs from when its call starts: the calls of an `async def` function overlap.
        """
        with contextlib.suppress(OSError):  # `_answer` says that the child is dead
            self.pipe.send([rows[index] for index in todo])
        limit, limit_text = self.timeout_s, f"reward.timeout_s={self.timeout_s:g} s"
        if self.spec.batched:
            limit, limit_text = limit * len(todo), f"{limit_text} x {len(todo)} rows"
        running: dict[int, float] = {}  # rows whose calls have started, and when
        while not all(index in rewards for index in todo):
            first = next(iter(running), next(index for index in todo if index not in rewards))
            left = running.get(first, time.monotonic()) + limit - time.monotonic()
            what = span([rows[index] for index in todo]) if self.spec.batched else rows[first].row
            try:
                kind, place, *value = self._answer(max(left, 0.0), limit_text, what)
            except _Silent as silent:
                raise _ChildLost(first, str(silent)) from None
            if kind == "started":
                running[todo[place]] = time.monotonic()
            else:
                running.pop(todo[place], None)
                rewards[todo[place]] = value[0]

    def _answer(self, timeout_s: float, limit: str, what: str) -> Any:
        """The child's next answer; a child that gives none, or failed, is ended."""
        if not self.pipe.poll(timeout_s):
            self._end_child()
            raise _Silent(f"{self.spec.label} took longer than {limit} for {what}; its process was killed")
        try:
            answer = self.pipe.recv()
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):  # it may live on with its end of the pipe closed
                self.child.wait(5)
            self._end_child()
            raise _Silent(f"{self.spec.label} ended its process (exit {self.child.returncode}) at {what}") from None
        if answer[0] == "failed":
            self._end_child()
            raise RewardError(answer[1])
        return answer

    def _end_child(self) -> None:
        self.child.kill()
        self.child.wait()

    def __ray_shutdown__(self) -> None:
        """End the child with the actor."""
        self._end_child()


class _Silent(RewardError):
    """The child answers no more."""


class _ChildLost(Exception):
    """The child was lost while it scored a row."""

    def __init__(self, index: int, text: str) -> None:
        super().__init__(text)
        self.index = index
