"""How rows become mini-batches, devices' shares and micro-batches: pure functions, called by the driver.

The driver knows every row's length and mask, so it cuts everything, and the devices need not talk to agree: each gets
the same number of micro-batches, some of them empty where token budgets come out unevenly.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainer.ppo.core_algos import LossCounts

Rows = np.ndarray  # int64, row indexes
MINI_BATCH_STREAM = 2  # keeps these random numbers apart from those of the data order


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatching:
    """The bound on a micro-batch: rows, or tokens when `max_tokens` is set. Both None: all rows at once."""

    max_rows: int | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """One optimizer update: which rows each rank takes, in which micro-batches, and what the loss divides by."""

    counts: LossCounts
    micro_batches: list[list[Rows]]  # [rank][micro-batch], the same number on every rank


def cut_mini_batches(uid: Sequence[str], *, mini_batch_prompts: int, seed: int, step: int, epoch: int) -> list[Rows]:
    """Rows of each mini-batch: whole groups of one uid, in an order that is a function of (seed, step, epoch) alone."""
    groups: dict[str, list[int]] = {}
    for row, key in enumerate(uid):
        groups.setdefault(key, []).append(row)
    keys = sorted(groups)
    order = np.random.Generator(np.random.PCG64([MINI_BATCH_STREAM, seed, step, epoch])).permutation(len(keys))
    return [
        np.array([row for key in order[start : start + mini_batch_prompts] for row in groups[keys[key]]])
        for start in range(0, len(keys), mini_batch_prompts)
    ]


def split_over_ranks(rows: Rows, lengths: np.ndarray, num_ranks: int) -> list[Rows]:
    """The rows of each rank, as equal in number as can be and balanced in tokens.

    Rows are dealt out from the longest to the shortest, back and forth over the ranks. `lengths` [B] are of all rows.
    """
    ordered = rows[np.argsort(-lengths[rows], kind="stable")]
    lap, seat = np.divmod(np.arange(len(ordered)), num_ranks)
    rank = np.where(lap % 2 == 0, seat, num_ranks - 1 - seat)
    return [ordered[rank == r] for r in range(num_ranks)]


def cut_micro_batches(rows: Rows, lengths: np.ndarray, bound: MicroBatching) -> list[Rows]:
    """Micro-batches of one rank's rows, each within the bound, rows of like length together.

    A micro-batch costs its rows times its longest row, padding included; a row above the budget stands alone.
    """
    ordered = rows[np.argsort(-lengths[rows], kind="stable")]
    size = bound.max_rows or max(len(ordered), 1)
    pieces: list[Rows] = []
    start = 0
    while start < len(ordered):
        if bound.max_tokens is not None:
            size = max(bound.max_tokens // max(int(lengths[ordered[start]]), 1), 1)
        pieces.append(ordered[start : start + size])
        start += size
    return pieces


def plan_micro_batches(rows: Rows, lengths: np.ndarray, *, num_ranks: int, bound: MicroBatching) -> list[list[Rows]]:
    """Micro-batches [rank][micro-batch] of the rows; ranks with fewer get empty ones, so that all have as many."""
    ranks = [cut_micro_batches(share, lengths, bound) for share in split_over_ranks(rows, lengths, num_ranks)]
    most = max(len(pieces) for pieces in ranks)
    empty = np.zeros(0, dtype=np.int64)
    return [pieces + [empty] * (most - len(pieces)) for pieces in ranks]


def plan_updates(
    *,
    uid: Sequence[str],
    lengths: np.ndarray,
    mask: np.ndarray,
    mini_batch_prompts: int,
    epochs: int,
    seed: int,
    step: int,
    num_ranks: int,
    bound: MicroBatching,
) -> list[Update]:
    """All updates of a step, in order. lengths [B] in tokens; mask [B, R] bool, the tokens that the loss counts.

    A mini-batch without such a token is no update: its gradient is 0, and the optimizer's momentum and weight decay would
    move the weights all the same.
    """
    tokens = mask.sum(-1)
    updates = []
    for epoch in range(epochs):
        for rows in cut_mini_batches(uid, mini_batch_prompts=mini_batch_prompts, seed=seed, step=step, epoch=epoch):
            counts = LossCounts(num_tokens=int(tokens[rows].sum()), num_rows=int((tokens[rows] > 0).sum()))
            if counts.num_tokens == 0:
                continue
            pieces = plan_micro_batches(rows, lengths, num_ranks=num_ranks, bound=bound)
            updates.append(Update(counts=counts, micro_batches=pieces))
    return updates
