"""Which function scores a row, and what may come back from it. Imports nothing heavy: reward processes are small."""

import importlib.util
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import RewardError
from workers.reward.scorers import SCORERS
from workers.reward.verifiers import prepare


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardFunctionSpec:
    """The user's function, or (path None) the built-in scorer of each row's data source."""

    path: str | None
    name: str
    kwargs: dict[str, Any]
    batched: bool  # takes lists, all rows in one call
    max_concurrency: int  # rows that an `async def` function scores at once
    packages: list[str]  # what the built-in scorers of the run's data sources import

    @property
    def label(self) -> str:
        """How messages call it."""
        return f"{self.path}:{self.name}" if self.path else "the built-in scorer"


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardRow:
    """The arguments of one call, and the row's name for messages."""

    row: str
    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reward:
    """A score, and the fields that came with it."""

    score: float
    extra: dict[str, Any]


def load_function(spec: RewardFunctionSpec) -> Callable[..., Any]:
    """The function to call; importing the user's file runs its code."""
    if spec.path is None:
        prepare(spec.packages)
        return lambda data_source, **arguments: SCORERS[data_source](data_source, **arguments)  # pyright: ignore[reportCallIssue]
    path = Path(spec.path).resolve()
    sys.path.insert(0, str(path.parent))  # so that the file can import its neighbours
    module_spec = importlib.util.spec_from_file_location(path.stem, path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[path.stem] = module
    module_spec.loader.exec_module(module)
    return getattr(module, spec.name)


def call_function(function: Callable[..., Any], spec: RewardFunctionSpec, row: RewardRow) -> Reward:
    """One row's reward.

    Raises:
        RewardError: what came back is not a reward. What the function itself raises goes through.
    """
    return as_reward(function(**_arguments(row), **spec.kwargs), spec.label, row.row)


async def call_async(function: Callable[..., Any], spec: RewardFunctionSpec, row: RewardRow) -> Reward:
    """The same of an `async def` function."""
    return as_reward(await function(**_arguments(row), **spec.kwargs), spec.label, row.row)


def call_batched(function: Callable[..., Any], spec: RewardFunctionSpec, rows: Sequence[RewardRow]) -> list[Reward]:
    """The rewards of all rows, from one call with lists.

    Raises:
        RewardError: not one reward per row came back.
    """
    values = function(
        data_sources=[row.data_source for row in rows],
        solution_strs=[row.solution_str for row in rows],
        ground_truths=[row.ground_truth for row in rows],
        extra_infos=[row.extra_info for row in rows],
        **spec.kwargs,
    )
    if isinstance(values, str | Mapping) or not isinstance(values, Iterable):
        raise RewardError(
            f"{spec.label} returned {type(values).__name__} for {span(rows)}; with "
            "reward.custom_reward_function.batched=true it returns a list of rewards"
        )
    values = list(values)
    if len(values) != len(rows):
        raise RewardError(f"{spec.label} returned {len(values)} rewards for {span(rows)}; one per row is wanted")
    return [as_reward(value, spec.label, row.row) for value, row in zip(values, rows, strict=True)]


def span(rows: Sequence[RewardRow]) -> str:
    """How messages call several rows."""
    return rows[0].row if len(rows) == 1 else f"{len(rows)} rows, from {rows[0].row} to {rows[-1].row}"


def _arguments(row: RewardRow) -> dict[str, Any]:
    return {
        "data_source": row.data_source,
        "solution_str": row.solution_str,
        "ground_truth": row.ground_truth,
        "extra_info": row.extra_info,
    }


def as_reward(value: Any, function: str, row: str) -> Reward:
    """A returned value as a reward: a finite number, or a mapping with `score`.

    Raises:
        RewardError: anything else; the message names the function, the row and the value.
    """
    extra: dict[str, Any] = {}
    score = value
    if isinstance(value, Mapping):
        if "score" not in value:
            raise RewardError(f"{function} returned a mapping without 'score' for {row}: {dict(value)!r}")
        score = value["score"]
        extra = {str(key): _plain(field) for key, field in value.items() if key != "score"}
    number = _finite(score)
    if number is None:
        raise RewardError(
            f"{function} returned {score!r} ({type(score).__name__}) for {row}; a reward is a finite number, or a mapping "
            "with a finite number under 'score'"
        )
    if "acc" in extra and _finite(extra["acc"]) is None:
        raise RewardError(
            f"{function} returned acc={extra['acc']!r} for {row}; 'acc' is a finite number, 1 for a success"
        )
    return Reward(score=number, extra=extra)


def _finite(value: Any) -> float | None:
    """The value as a finite float, or None."""
    number = _plain(value)
    if not isinstance(number, int | float):
        return None
    try:
        return float(number) if math.isfinite(number) else None
    except OverflowError:  # an integer beyond float's range
        return None


def _plain(value: Any) -> Any:
    """Numbers of numpy and torch as Python's; None, text and Python numbers as they are; anything else as text.

    Nothing keeps a type of the user's, an enum's for example: only the child could read it.
    """
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    for kind in (int, float):
        if isinstance(value, kind):
            return kind(value)
    return repr(value)
