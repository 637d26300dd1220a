"""The one container: whatever is done to its rows, what belongs to a row stays with it."""

import dataclasses
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from trainer.batch import PRODUCERS, PPOBatch, per_row, real_lengths, require

NUM_ROWS, PROMPT, RESPONSE = 6, 3, 4
BOOLEAN = ("response_mask", "loss_mask", "attention_mask")
ALWAYS = ("uid", "extras", "prompts", "prompt_mask")


def make_batch(num_rows: int = NUM_ROWS, *, complete: bool = True) -> PPOBatch:
    """Every number of row i, in every field, is i; masks of row i are true in its first columns, i of them."""

    def numbers(width: int, dtype: torch.dtype) -> Tensor:
        return torch.arange(num_rows).unsqueeze(-1).expand(-1, width).clone().to(dtype)

    def mask(width: int) -> Tensor:
        return torch.arange(width) < torch.arange(num_rows).unsqueeze(-1)

    later = {}
    if complete:
        for name in PRODUCERS.keys() - set(ALWAYS):
            width = PROMPT + RESPONSE if name == "attention_mask" else RESPONSE
            later[name] = mask(width) if name in BOOLEAN else numbers(width, torch.float32)
        later["responses"] = numbers(RESPONSE, torch.long)
    return PPOBatch(
        uid=per_row([f"2-{row // 2}" for row in range(num_rows)]),
        extras=per_row(
            [{"prompt_index": row // 2, "sample_index": row % 2, "extra_info": {"row": row}} for row in range(num_rows)]
        ),
        prompts=numbers(PROMPT, torch.long),
        prompt_mask=mask(PROMPT),
        batch_size=[num_rows],
        **later,
    )


def assert_rows(batch: PPOBatch, rows: list[int], *, complete: bool = True) -> None:
    """Each field holds the rows given, in this order."""
    source = make_batch(max(rows) + 1, complete=complete)
    assert len(batch) == len(rows)
    assert list(batch.uid) == [f"2-{row // 2}" for row in rows]
    assert [extras["extra_info"]["row"] for extras in batch.extras] == rows
    assert [extras["sample_index"] for extras in batch.extras] == [row % 2 for row in rows]
    for field in dataclasses.fields(PPOBatch):
        if field.name in ("uid", "extras", "batch_size"):
            continue
        value, wanted = getattr(batch, field.name), getattr(source, field.name)
        if wanted is None:
            assert value is None, field.name
        else:
            assert value.equal(wanted[torch.tensor(rows)]), field.name
            assert value.dtype == wanted.dtype, field.name


MOVES: dict[str, tuple[Callable[[PPOBatch], PPOBatch], list[int]]] = {
    "slice": (lambda batch: batch[1:4], [1, 2, 3]),
    "stride": (lambda batch: batch[::2], [0, 2, 4]),
    "permutation": (lambda batch: batch[torch.tensor([5, 0, 3, 1, 4, 2])], [5, 0, 3, 1, 4, 2]),
    "selection by numpy's indexes": (lambda batch: batch[torch.from_numpy(np.array([4, 4, 0]))], [4, 4, 0]),
    "mask": (lambda batch: batch[torch.tensor([True, False, False, True, False, True])], [0, 3, 5]),
    "cat": (lambda batch: torch.cat([batch[4:], batch[:1], batch[2:3]]), [4, 5, 0, 2]),
    "cat of a permutation's chunks": (
        lambda batch: torch.cat(batch[torch.tensor([5, 0, 3, 1, 4, 2])].chunk(4)),
        [5, 0, 3, 1, 4, 2],
    ),
    "pickle": (lambda batch: pickle.loads(pickle.dumps(batch)), [0, 1, 2, 3, 4, 5]),
    "pickle of a permuted slice": (
        lambda batch: pickle.loads(pickle.dumps(batch[torch.tensor([3, 1, 5])][1:])),
        [1, 5],
    ),
    "move to a device": (lambda batch: batch[2:].to("cpu"), [2, 3, 4, 5]),
    "clone": (lambda batch: batch[:2].clone(), [0, 1]),
}


@pytest.mark.parametrize("complete", [True, False], ids=["complete", "of stage 1"])
@pytest.mark.parametrize("name", MOVES)
def test_uid_extras_and_every_field_stay_with_their_row(name: str, complete: bool) -> None:
    move, rows = MOVES[name]
    assert_rows(move(make_batch(complete=complete)), rows, complete=complete)


def test_chunks_hold_consecutive_rows() -> None:
    chunks = make_batch().chunk(4)
    assert [len(chunk) for chunk in chunks] == [2, 2, 2]
    for index, chunk in enumerate(chunks):
        assert_rows(chunk, [2 * index, 2 * index + 1])


def test_a_permutation_and_its_inverse_give_the_batch_back() -> None:
    order = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(0))
    assert_rows(make_batch()[order][torch.argsort(order)], list(range(NUM_ROWS)))


def test_a_copy_of_some_rows_does_not_share_the_originals_numbers() -> None:
    batch = make_batch()
    part = batch[torch.tensor([1, 2])]
    part.advantages[:] = 99.0
    assert_rows(batch, list(range(NUM_ROWS)))


# --- missing fields --------------------------------------------------------------------------------------------------


def test_every_field_has_its_producer_named() -> None:
    fields = {field.name for field in dataclasses.fields(PPOBatch)} - {"batch_size"}
    assert fields - {"uid", "extras", "prompt_mask"} == PRODUCERS.keys()


@pytest.mark.parametrize("name", [name for name in PRODUCERS if name not in ALWAYS])
def test_a_missing_field_is_refused_by_the_name_of_the_stage_that_fills_it(name: str) -> None:
    batch = make_batch()
    require(batch, *PRODUCERS)
    setattr(batch, name, None)
    with pytest.raises(ValueError, match="batch has no") as error:
        require(batch, "prompts", name)
    assert str(error.value) == f"batch has no {name!r}: it is filled by {PRODUCERS[name]}"


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("responses", "stage 2 (generate)"),
        ("token_level_scores", "stage 3 (reward)"),
        ("ref_log_prob", "stage 5 (reference), which runs only if a KL is on"),
        ("values", "stage 6 (critic), which runs only with algorithm.adv_estimator=gae"),
    ],
)
def test_the_stages_are_those_of_the_design(name: str, stage: str) -> None:
    assert PRODUCERS[name] == stage


# --- lengths ---------------------------------------------------------------------------------------------------------


def test_real_lengths_are_those_of_prompts_until_there_are_responses() -> None:
    prompts_only, complete = make_batch(complete=False), make_batch()
    assert real_lengths(prompts_only).tolist() == [0, 1, 2, 3, 3, 3]
    assert real_lengths(complete).tolist() == [0, 1, 2, 3, 4, 5]
    assert real_lengths(complete).dtype == np.int64
