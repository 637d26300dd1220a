"""Procedural tasks: rows of data sets that need no file, as a pure function of their numbers.

A row has verl's format, the same as a row of a parquet file:
`{"data_source", "prompt": [{"role", "content"}], "reward_model": {"style", "ground_truth"}, "extra_info": {"index",
"split"}}`.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

Split = Literal["train", "val"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A task whose problems are tuples of digit strings."""

    num_operands: int
    problem: Callable[..., tuple[str, str]]  # the operands, digit strings, to (user message, ground truth)


def copy_problem(digits: str) -> tuple[str, str]:
    """The digits as the message, and the same digits as the answer."""
    return digits, digits


def addition_problem(left: str, right: str) -> tuple[str, str]:
    """The question for a sum, and the sum. Leading zeros of the operands are dropped."""
    a, b = int(left), int(right)
    return f"What is {a} + {b}? Reply with the number only.", str(a + b)


GENERATORS: dict[str, Task] = {
    "copy": Task(num_operands=1, problem=copy_problem),
    "addition": Task(num_operands=2, problem=addition_problem),
}


def generate_rows(
    name: str, *, split: Split, num_rows: int, num_digits: int, max_digit: int, seed: int
) -> list[dict[str, Any]]:
    """The rows of one split of a generated task; equal arguments give equal rows.

    Every digit is uniform over 0..max_digit. Training rows are drawn with replacement, and a longer list begins with
    the shorter one. Validation rows are distinct problems from a random stream of their own: num_rows of them, or all
    where there are fewer. They are not kept out of the training rows.

    Args:
        num_rows: rows to make.
        num_digits: digits of an operand; addition drops leading zeros, so there it is the most digits.
        max_digit: the largest digit, 0 to 9.

    Raises:
        ValueError: an unknown name or split, or a number out of its range.
    """
    _check(name, split=split, num_rows=num_rows, num_digits=num_digits, max_digit=max_digit, seed=seed)
    task = GENERATORS[name]
    num_draws = task.num_operands * num_digits
    # A hash of the name, not its place in the table: a new task must not change the rows of the others.
    stream = [seed, zlib.crc32(name.encode()), get_args(Split).index(split)]
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(stream)))
    if split == "train":
        problems = _draw(rng, num_rows, num_draws, max_digit)
    else:
        problems = _draw_distinct(rng, num_rows, num_draws, max_digit)
    rows = []
    for index, digits in enumerate(problems):
        operands = [digits[start : start + num_digits] for start in range(0, num_draws, num_digits)]
        content, ground_truth = task.problem(*operands)
        rows.append(
            {
                "data_source": name,
                "prompt": [{"role": "user", "content": content}],
                "reward_model": {"style": "rule", "ground_truth": ground_truth},
                "extra_info": {"index": index, "split": split},
            }
        )
    return rows


def _draw(rng: np.random.Generator, num_rows: int, num_draws: int, max_digit: int) -> list[str]:
    """Digit strings of length num_draws, uniform and with replacement."""
    digits = rng.integers(0, max_digit + 1, size=(num_rows, num_draws))
    return ["".join(map(str, row)) for row in digits.tolist()]


def _draw_distinct(rng: np.random.Generator, num_rows: int, num_draws: int, max_digit: int) -> list[str]:
    """Distinct digit strings in random order: num_rows of them, or all where there are fewer."""
    base = max_digit + 1
    num_problems = base**num_draws
    num_rows = min(num_rows, num_problems)
    if num_problems <= 4 * num_rows:
        chosen = rng.permutation(num_problems)[:num_rows]
        places = [base**place for place in range(num_draws)]
        return ["".join(str(problem // place % base) for place in places) for problem in chosen.tolist()]
    # More than three in four draws are new, and numbers past 64 bits never occur.
    found: dict[str, None] = {}
    while len(found) < num_rows:
        found.update(dict.fromkeys(_draw(rng, num_rows - len(found), num_draws, max_digit)))
    return list(found)


def _check(name: str, *, split: str, num_rows: int, num_digits: int, max_digit: int, seed: int) -> None:
    if name not in GENERATORS:
        raise ValueError(f"name={name!r}: must be one of {', '.join(sorted(GENERATORS))}")
    if split not in get_args(Split):
        raise ValueError(f"split={split!r}: must be one of {', '.join(get_args(Split))}")
    for key, value, low, high in (
        ("num_rows", num_rows, 1, None),
        ("num_digits", num_digits, 1, None),
        ("max_digit", max_digit, 0, 9),
        ("seed", seed, 0, None),
    ):
        if value < low or (high is not None and value > high):
            raise ValueError(f"{key}={value}: must be " + (f"{low} to {high}" if high is not None else f">= {low}"))
