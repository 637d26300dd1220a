"""How rows are cut: none lost, none twice, groups whole, devices in step, and the same for the same seed."""

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.ppo.core_algos import LossCounts
from trainer.ppo.minibatch import (
    MicroBatching,
    Rows,
    cut_micro_batches,
    cut_mini_batches,
    plan_micro_batches,
    plan_updates,
    split_over_ranks,
)

repeatable = settings(deadline=None, derandomize=True, database=None, max_examples=100)
lengths_of_rows = st.lists(st.integers(1, 40), min_size=1, max_size=40).map(lambda lengths: np.array(lengths))
num_ranks_of = st.integers(1, 5)


def as_lists(batches: list[Rows]) -> list[list[int]]:
    return [rows.tolist() for rows in batches]


# --- mini-batches ----------------------------------------------------------------------------------------------------


@st.composite
def uids(draw: st.DrawFn) -> list[str]:
    """Up to 12 prompts with one to four responses each, in any order of rows."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=12))
    return draw(st.permutations([f"7-{prompt}" for prompt, size in enumerate(sizes) for _ in range(size)]))


def cut(uid: list[str], **changes: int) -> list[Rows]:
    return cut_mini_batches(uid, **({"mini_batch_prompts": 3, "seed": 1, "step": 2, "epoch": 0} | changes))


@repeatable
@given(uid=uids(), mini_batch_prompts=st.integers(1, 13), seed=st.integers(0, 9))
def test_a_mini_batch_holds_whole_groups_and_an_epoch_each_row_once(
    uid: list[str], mini_batch_prompts: int, seed: int
) -> None:
    batches = cut(uid, mini_batch_prompts=mini_batch_prompts, seed=seed)
    assert sorted(row for rows in batches for row in rows.tolist()) == list(range(len(uid)))
    prompts = [{uid[row] for row in rows} for rows in batches]
    assert sum(len(group) for group in prompts) == len(set(uid))  # no prompt in two mini-batches
    full, rest = divmod(len(set(uid)), mini_batch_prompts)
    assert [len(group) for group in prompts] == [mini_batch_prompts] * full + [rest] * (rest > 0)


@repeatable
@given(uid=uids(), data=st.data())
def test_the_row_order_does_not_change_which_prompts_meet(uid: list[str], data: st.DataObject) -> None:
    other = data.draw(st.permutations(uid))
    assert [Counter(uid[row] for row in rows) for rows in cut(uid)] == [
        Counter(other[row] for row in rows) for rows in cut(other)
    ]


def test_the_cut_is_a_function_of_seed_step_and_epoch_and_of_each_of_them() -> None:
    uid = [f"3-{prompt}" for prompt in range(8) for _ in range(2)]
    cuts = {
        (seed, step, epoch): tuple(map(tuple, as_lists(cut(uid, seed=seed, step=step, epoch=epoch))))
        for seed in (0, 1)
        for step in (1, 2)
        for epoch in (0, 1)
    }
    assert len(set(cuts.values())) == 8
    before = np.random.get_state()[1].copy()
    for (seed, step, epoch), wanted in cuts.items():
        assert tuple(map(tuple, as_lists(cut(uid, seed=seed, step=step, epoch=epoch)))) == wanted
    assert np.array_equal(before, np.random.get_state()[1])  # the global generator is left alone


# --- shares of ranks -------------------------------------------------------------------------------------------------


@repeatable
@given(lengths=lengths_of_rows, num_ranks=num_ranks_of, data=st.data())
def test_ranks_share_each_row_once_and_evenly_in_rows_and_tokens(
    lengths: np.ndarray, num_ranks: int, data: st.DataObject
) -> None:
    rows = np.array(data.draw(st.lists(st.integers(0, len(lengths) - 1), unique=True, min_size=1)))
    shares = split_over_ranks(rows, lengths, num_ranks)
    assert sorted(np.concatenate(shares).tolist()) == sorted(rows.tolist())
    sizes, tokens = [len(share) for share in shares], [int(lengths[share].sum()) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    # Dealt back and forth, two ranks differ by a sum of disjoint stretches of the sorted lengths: never by more than
    # the longest less the shortest row, or the longest where some ranks have one row more.
    even = len(rows) % num_ranks == 0
    assert max(tokens) - min(tokens) <= lengths[rows].max() - (lengths[rows].min() if even else 0)


def test_rows_are_dealt_back_and_forth_from_the_longest() -> None:
    shares = split_over_ranks(np.arange(7), np.array([10, 70, 30, 60, 40, 50, 20]), 2)
    # 70 60 | 50 40 turned round | 30 20 | 10 turned round.
    assert as_lists(shares) == [[1, 4, 2], [3, 5, 6, 0]]


# --- micro-batches ---------------------------------------------------------------------------------------------------


@repeatable
@given(lengths=lengths_of_rows, max_rows=st.one_of(st.none(), st.integers(1, 45)))
def test_micro_batches_keep_the_bound_on_rows(lengths: np.ndarray, max_rows: int | None) -> None:
    pieces = cut_micro_batches(np.arange(len(lengths)), lengths, MicroBatching(max_rows=max_rows))
    assert sorted(np.concatenate(pieces).tolist()) == list(range(len(lengths)))
    assert len(pieces) == -(-len(lengths) // (max_rows or len(lengths)))
    assert all(1 <= len(piece) <= (max_rows or len(lengths)) for piece in pieces)


@repeatable
@given(lengths=lengths_of_rows, max_tokens=st.integers(1, 200))
def test_micro_batches_keep_the_token_budget_with_padding_and_a_longer_row_stands_alone(
    lengths: np.ndarray, max_tokens: int
) -> None:
    pieces = cut_micro_batches(np.arange(len(lengths)), lengths, MicroBatching(max_tokens=max_tokens))
    assert sorted(np.concatenate(pieces).tolist()) == list(range(len(lengths)))
    costs = [len(piece) * int(lengths[piece].max()) for piece in pieces]
    assert all(cost <= max_tokens or len(piece) == 1 for cost, piece in zip(costs, pieces, strict=True))
    # As few as there can be of rows in this order: the next row would not have fitted.
    for piece, following in pairwise(pieces):
        assert (len(piece) + 1) * int(lengths[piece].max()) > max_tokens
        assert lengths[piece].min() >= lengths[following].max()


def test_the_token_budget_by_hand() -> None:
    # 90 alone above the budget of 60; 30 30 cost 60; 20 10 and 10 cost 60; 5 is left.
    lengths = np.array([10, 30, 5, 90, 20, 30, 10])
    pieces = cut_micro_batches(np.arange(7), lengths, MicroBatching(max_tokens=60))
    assert as_lists(pieces) == [[3], [1, 5], [4, 0, 6], [2]]


@repeatable
@given(
    lengths=lengths_of_rows,
    num_ranks=num_ranks_of,
    bound=st.one_of(
        st.builds(MicroBatching),
        st.builds(MicroBatching, max_rows=st.integers(1, 9)),
        st.builds(MicroBatching, max_tokens=st.integers(1, 120)),
    ),
)
def test_every_rank_has_as_many_micro_batches_and_each_row_is_in_one(
    lengths: np.ndarray, num_ranks: int, bound: MicroBatching
) -> None:
    ranks = plan_micro_batches(np.arange(len(lengths)), lengths, num_ranks=num_ranks, bound=bound)
    assert len(ranks) == num_ranks
    assert len({len(pieces) for pieces in ranks}) == 1
    assert sorted(np.concatenate([np.concatenate(pieces) for pieces in ranks]).tolist()) == list(range(len(lengths)))
    assert all(piece.dtype == np.int64 for pieces in ranks for piece in pieces)
    assert any(len(pieces[-1]) for pieces in ranks)  # none is empty on every rank


# --- the updates of a step -------------------------------------------------------------------------------------------


def plan(**changes: Any) -> list:
    """Six prompts with two rows each; row 4 has no token that counts."""
    mask = np.ones((12, 3), dtype=bool)
    mask[4] = False
    mask[5:, 2] = False
    arguments = {
        "uid": [f"1-{row // 2}" for row in range(12)],
        "lengths": np.arange(12) + 3,
        "mask": mask,
        "mini_batch_prompts": 2,
        "epochs": 2,
        "seed": 0,
        "step": 1,
        "num_ranks": 2,
        "bound": MicroBatching(max_rows=1),
    }
    return plan_updates(**(arguments | changes))


def rows_of(update: Any) -> list[int]:
    return sorted(row for pieces in update.micro_batches for piece in pieces for row in piece.tolist())


def test_a_step_has_one_update_per_mini_batch_and_epoch_and_each_epoch_holds_each_row_once() -> None:
    updates = plan()
    assert len(updates) == 6
    for epoch in (updates[:3], updates[3:]):
        assert sorted(row for update in epoch for row in rows_of(update)) == list(range(12))
    assert [rows_of(update) for update in updates[:3]] != [rows_of(update) for update in updates[3:]]


def test_an_update_divides_by_the_tokens_and_rows_of_its_whole_mini_batch() -> None:
    tokens = np.array([3, 3, 3, 3, 0, 2, 2, 2, 2, 2, 2, 2])
    updates = plan()
    for update in updates:
        rows = rows_of(update)
        wanted = LossCounts(num_tokens=int(tokens[rows].sum()), num_rows=sum(tokens[row] > 0 for row in rows))
        assert update.counts == wanted
    assert sum(update.counts.num_tokens for update in updates) == 2 * tokens.sum()
    assert sum(update.counts.num_rows for update in updates) == 2 * 11


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("bound", [MicroBatching(), MicroBatching(max_rows=3), MicroBatching(max_tokens=20)], ids=str)
def test_ranks_and_micro_batches_do_not_change_which_rows_an_update_holds(num_ranks: int, bound: MicroBatching) -> None:
    got, wanted = plan(num_ranks=num_ranks, bound=bound), plan()
    assert [rows_of(update) for update in got] == [rows_of(update) for update in wanted]
    assert [update.counts for update in got] == [update.counts for update in wanted]


def test_a_mini_batch_without_a_token_is_no_update() -> None:
    assert plan(mask=np.zeros((12, 4), dtype=bool)) == []
    mask = np.zeros((12, 4), dtype=bool)
    mask[5, 1] = True
    updates = plan(mask=mask)
    assert [5 in rows_of(update) for update in updates] == [True, True], "one for each epoch"
