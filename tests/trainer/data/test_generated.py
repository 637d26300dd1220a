"""The generated tasks: what a row says, which problems a split holds, and that nothing but the arguments matters."""

import re
from collections import Counter
from typing import Any

import numpy as np
import pytest

from trainer.data.generated import GENERATORS, generate_rows


def rows(name: str = "copy", **changes: Any) -> list[dict[str, Any]]:
    defaults = {"split": "train", "num_rows": 200, "num_digits": 3, "max_digit": 4, "seed": 0}
    return generate_rows(name, **(defaults | changes))


def contents(made: list[dict[str, Any]]) -> list[str]:
    return [row["prompt"][0]["content"] for row in made]


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("split", ["train", "val"])
def test_a_row_has_the_fields_of_verl(name: str, split: str) -> None:
    made = rows(name, split=split, num_rows=10)
    assert len(made) == 10
    for index, row in enumerate(made):
        assert row == {
            "data_source": name,
            "prompt": [{"role": "user", "content": row["prompt"][0]["content"]}],
            "reward_model": {"style": "rule", "ground_truth": row["reward_model"]["ground_truth"]},
            "extra_info": {"index": index, "split": split},
        }


def test_copy_asks_for_its_own_digits_within_the_alphabet() -> None:
    for row in rows():
        content = row["prompt"][0]["content"]
        assert re.fullmatch(r"[0-4]{3}", content)
        assert row["reward_model"]["ground_truth"] == content


def test_addition_states_the_sum_of_its_operands() -> None:
    for row in rows("addition", num_digits=2):
        match = re.fullmatch(r"What is (\d+) \+ (\d+)\? Reply with the number only\.", row["prompt"][0]["content"])
        assert match is not None
        for operand in match.groups():
            assert re.fullmatch(r"0|[1-4][0-4]?", operand)  # no leading zero, no digit above 4
        assert row["reward_model"]["ground_truth"] == str(int(match[1]) + int(match[2]))


def test_equal_arguments_give_equal_rows_and_leave_the_global_generator_alone() -> None:
    np.random.seed(1)
    first = {split: rows(split=split) for split in ("train", "val")}
    assert np.random.random() == 0.417022004702574  # what follows seed 1 when nothing was drawn in between
    assert {split: rows(split=split) for split in ("train", "val")} == first


@pytest.mark.parametrize("change", [{"seed": 1}, {"split": "val"}])
def test_seed_and_split_give_other_rows(change: dict[str, Any]) -> None:
    assert contents(rows(num_digits=8, **change)) != contents(rows(num_digits=8))


def test_a_longer_training_list_begins_with_the_shorter_one() -> None:
    assert rows(num_rows=200)[:50] == rows(num_rows=50)


def test_training_problems_are_uniform_with_replacement() -> None:
    counts = Counter(contents(rows(num_digits=1, num_rows=5000)))
    assert set(counts) == set("01234")
    # Expected 1000 each; the standard deviation is sqrt(5000 * 0.2 * 0.8) = 28, and five of them are 141.
    assert all(abs(count - 1000) < 141 for count in counts.values())


@pytest.mark.parametrize("num_rows", [1, 31, 32, 100, 125])  # 32 and more: over a quarter of the 125 problems
def test_validation_problems_are_distinct(num_rows: int) -> None:
    made = contents(rows(split="val", num_rows=num_rows))
    assert len(made) == len(set(made)) == num_rows


@pytest.mark.parametrize("num_rows", [3, 30])
def test_validation_covers_every_place_without_bias(num_rows: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(1000):
        counts.update(contents(rows(split="val", num_rows=num_rows, num_digits=2, seed=seed)))
    # Each of the 25 problems (capped at all of them for 30) is in with probability p: mean 1000 p.
    share = min(num_rows, 25) / 25
    bound = 5 * (1000 * share * (1 - share)) ** 0.5
    assert len(counts) == 25
    assert all(abs(count - 1000 * share) <= bound for count in counts.values())


@pytest.mark.parametrize(("name", "num_problems"), [("copy", 25), ("addition", 625)])
def test_validation_is_all_problems_when_more_are_asked_for(name: str, num_problems: int) -> None:
    made = contents(rows(name, split="val", num_rows=10_000, num_digits=2))
    assert len(made) == len(set(made)) == num_problems


@pytest.mark.parametrize("split", ["train", "val"])
def test_operands_may_be_longer_than_a_machine_integer(split: str) -> None:
    made = rows("addition", split=split, num_rows=20, num_digits=40, max_digit=9)
    assert max(len(row["reward_model"]["ground_truth"]) for row in made) >= 40


def test_one_possible_problem_is_not_an_endless_search() -> None:
    assert contents(rows(split="val", max_digit=0)) == ["000"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "sorting"}, "name='sorting': must be one of addition, copy"),
        ({"split": "test"}, "split='test': must be one of train, val"),
        ({"num_rows": 0}, "num_rows=0: must be >= 1"),
        ({"num_digits": 0}, "num_digits=0: must be >= 1"),
        ({"max_digit": 10}, "max_digit=10: must be 0 to 9"),
        ({"max_digit": -1}, "max_digit=-1: must be 0 to 9"),
        ({"seed": -1}, "seed=-1: must be >= 0"),
    ],
)
def test_a_wrong_argument_is_named_with_its_rule(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        rows(**changes)
    assert str(caught.value) == message
