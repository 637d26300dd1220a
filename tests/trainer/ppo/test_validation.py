"""Validation figures against enumeration and by hand."""

import random
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.metrics import extra_metrics
from trainer.ppo.validation import ValSample, majority_score, pass_at_k, validation_metrics

EXACT = 1e-12  # float64: means of a few numbers between 0 and 1
repeatable = settings(deadline=None, derandomize=True, database=None, max_examples=100)


def sample(uid: str, score: float, source: str = "s", **extra: Any) -> ValSample:
    return ValSample(data_source=source, uid=uid, score=score, extra=extra)


def group(uid: str, scores: list[float], source: str = "s") -> list[ValSample]:
    return [sample(uid, score, source) for score in scores]


# --- pass@k ----------------------------------------------------------------------------------------------------------


@repeatable
@given(outcomes=st.lists(st.booleans(), min_size=1, max_size=8), data=st.data())
def test_pass_at_k_is_the_share_of_subsets_of_k_samples_that_hold_a_correct_one(
    outcomes: list[bool], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(outcomes)))
    subsets = list(combinations(outcomes, k))
    wanted = sum(any(subset) for subset in subsets) / len(subsets)
    assert pass_at_k(len(outcomes), sum(outcomes), k) == pytest.approx(wanted, abs=EXACT)


def test_pass_at_k_by_hand_is_not_1_minus_the_power_of_the_failure_rate() -> None:
    # Of the 6 pairs among 4 samples with 1 correct, 3 hold it; the biased estimate would be 1 - 0.75² = 0.4375.
    assert pass_at_k(4, 1, 2) == 0.5
    assert pass_at_k(4, 1, 1) == 0.25
    assert pass_at_k(4, 1, 4) == 1.0
    assert pass_at_k(4, 0, 4) == 0.0


@pytest.mark.parametrize(
    ("n", "ks"),
    [
        (1, [1]),
        (2, [1, 2]),
        (3, [1, 2, 3]),
        (4, [1, 2, 4]),
        (5, [1, 2, 4, 5]),
        (8, [1, 2, 4, 8]),
        (12, [1, 2, 4, 8, 12]),
    ],
)
def test_k_doubles_from_1_and_ends_at_n(n: int, ks: list[int]) -> None:
    names = [name for name in validation_metrics(group("a", [0.0] * n)) if "/pass@" in name]
    assert names == [f"val-core/s/reward/pass@{k}" for k in ks]


def test_pass_at_k_is_the_mean_over_prompts() -> None:
    metrics = validation_metrics(group("a", [1, 0, 0, 0]) + group("b", [1, 1, 0, 1]))
    # 1/4 and 3/4; 3/6 and 6/6; 1 and 1.
    assert metrics["val-core/s/reward/pass@1"] == pytest.approx(0.5, abs=EXACT)
    assert metrics["val-core/s/reward/pass@2"] == pytest.approx(0.75, abs=EXACT)
    assert metrics["val-core/s/reward/pass@4"] == pytest.approx(1.0, abs=EXACT)


def test_success_is_acc_where_it_was_returned_and_else_a_score_of_1_or_more() -> None:
    by_score = validation_metrics(group("a", [0.99, 0.2]) + group("b", [1.0, 7.0]))
    assert by_score["val-core/s/reward/pass@1"] == pytest.approx(0.5, abs=EXACT)
    rows = [sample("a", 5.0, acc=0), sample("a", 5.0, acc=False), sample("b", 0.0, acc=1.0), sample("b", 0.0, acc=True)]
    by_acc = validation_metrics(rows)
    assert by_acc["val-core/s/acc/pass@1"] == pytest.approx(0.5, abs=EXACT)


# --- mean@n ----------------------------------------------------------------------------------------------------------


def test_mean_at_n_is_per_source_and_no_global_mean_hides_one() -> None:
    metrics = validation_metrics(
        group("a", [1, 0.5], "easy") + group("b", [1, 1], "easy") + group("c", [0, 0.25], "hard")
    )
    assert metrics["val-core/easy/reward/mean@2"] == pytest.approx(0.875, abs=EXACT)
    assert metrics["val-core/hard/reward/mean@2"] == pytest.approx(0.125, abs=EXACT)
    assert {name.split("/")[1] for name in metrics} == {"easy", "hard"}


def test_acc_is_the_core_figure_only_where_all_rows_of_the_source_have_it() -> None:
    rows = [
        sample("a", 0.5, "all", acc=1),
        sample("b", 1.5, "all", acc=0),
        sample("c", 0.5, "some", acc=1),
        sample("d", 0.1, "some"),
    ]
    assert validation_metrics(rows) == {
        "val-core/all/acc/mean@1": 0.5,
        "val-core/all/acc/pass@1": 0.5,
        "val-aux/all/reward/mean@1": 1.0,
        "val-core/some/reward/mean@1": pytest.approx(0.3, abs=EXACT),
        "val-core/some/reward/pass@1": 0.5,  # by acc where a row has it
    }


def test_other_numeric_fields_are_averaged_over_the_rows_that_have_them() -> None:
    rows = [
        sample("a", 1, length=3, note="x"),
        sample("b", 0, length=5),
        sample("c", 0, note="y"),
        sample("d", 0, note=None, length=float("nan")),
    ]
    metrics = validation_metrics(rows)
    assert extra_metrics([row.extra for row in rows]) == {"reward_extra/length/mean": 4.0}
    assert metrics["val-aux/s/length/mean@1"] == 4.0
    assert metrics.keys() == {"val-core/s/reward/mean@1", "val-core/s/reward/pass@1", "val-aux/s/length/mean@1"}


def test_the_order_of_the_samples_does_not_matter() -> None:
    rows = group("a", [1, 0, 0.5, 0]) + group("b", [1, 1, 0, 1]) + group("c", [0, 0, 1, 0], "t")
    wanted = validation_metrics(rows)
    for seed in range(10):
        shuffled = random.Random(seed).sample(rows, len(rows))
        assert validation_metrics(shuffled) == pytest.approx(wanted, abs=EXACT)


# --- maj@n -----------------------------------------------------------------------------------------------------------


def votes(uid: str, *preds: Any, right: Any) -> list[ValSample]:
    return [sample(uid, float(pred == right), acc=float(pred == right), pred=pred) for pred in preds]


@pytest.mark.parametrize(
    ("preds", "score"),
    [
        (("7", "7", "3"), 1.0),
        (("3", "3", "7"), 0.0),  # one of three is right, the majority is not
        (("5", "7", "7", "3", "3", "7"), 1.0),
        (("7", "3"), 1.0),  # a tie goes to the first to come
        (("3", "7"), 0.0),
        (("", "", "7"), 0.0),  # no answer is an answer
    ],
)
def test_maj_by_hand(preds: tuple[str, ...], score: float) -> None:
    rows = votes("a", *preds, right="7")
    assert majority_score(rows) == score
    assert validation_metrics(rows)[f"val-core/s/acc/maj@{len(preds)}"] == score


def test_maj_is_the_mean_over_prompts_and_needs_pred_in_all_rows_and_n_above_1() -> None:
    both = votes("a", "7", "7", "3", right="7") + votes("b", "3", "3", "7", right="7")
    assert validation_metrics(both)["val-core/s/acc/maj@3"] == 0.5
    partly = [*votes("a", "7", "7", right="7"), sample("b", 1.0, acc=1.0), sample("b", 1.0, acc=1.0, pred="7")]
    single = votes("a", "7", right="7")
    for rows in (partly, single):
        assert not [name for name in validation_metrics(rows) if "/maj@" in name]
