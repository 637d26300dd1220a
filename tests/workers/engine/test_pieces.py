"""The layout of a micro-batch: padding removed, responses found by position."""

from collections.abc import Callable

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.batch import PPOBatch, per_row
from workers.engine.pieces import make_piece

CPU = torch.device("cpu")

Rows = list[tuple[int, int]]  # prompt and response length of each row


def wire(rows: Rows, *, extra_prompt: int = 0, extra_response: int = 0) -> PPOBatch:
    """A batch whose real tokens are 1000·(row+1) + column, and whose padding is -1, which no embedding holds."""
    num_prompt = max(prompt for prompt, _ in rows) + extra_prompt
    num_response = max(max(response for _, response in rows), 1) + extra_response
    prompts = torch.full((len(rows), num_prompt), -1)
    responses = torch.full((len(rows), num_response), -1)
    for row, (prompt, response) in enumerate(rows):
        ids = 1000 * (row + 1) + torch.arange(prompt + response)
        prompts[row, num_prompt - prompt :] = ids[:prompt]
        responses[row, :response] = ids[prompt:]
    response_mask = responses >= 0
    return PPOBatch(
        uid=per_row([str(row) for row in range(len(rows))]),
        extras=per_row([{} for _ in rows]),
        prompts=prompts,
        prompt_mask=prompts >= 0,
        responses=responses,
        response_mask=response_mask,
        loss_mask=response_mask,
        attention_mask=torch.cat([prompts >= 0, response_mask], dim=1),
        old_log_probs=torch.arange(len(rows) * num_response, dtype=torch.float32).view(len(rows), num_response),
        batch_size=[len(rows)],
    )


def test_a_row_starts_at_column_0_and_its_response_is_predicted_one_column_earlier() -> None:
    piece = make_piece(wire([(2, 3), (4, 1)]), np.array([0, 1]), CPU)
    assert piece.input_ids.tolist() == [[1000, 1001, 1002, 1003, 1004], [2000, 2001, 2002, 2003, 2004]]
    assert piece.positions.tolist() == [[1, 2, 3], [3, 4, 4]]
    assert piece.labels.tolist() == [[1002, 1003, 1004], [2004, -1, -1]]


def test_the_end_of_a_shorter_row_is_padded_with_0() -> None:
    piece = make_piece(wire([(1, 1), (2, 3)]), np.array([0, 1]), CPU)
    assert piece.input_ids[0].tolist() == [1000, 1001, 0, 0, 0]


def test_a_piece_is_as_wide_as_its_own_longest_row_not_as_the_batch() -> None:
    batch = wire([(2, 2), (9, 9)], extra_prompt=4, extra_response=6)
    piece = make_piece(batch, np.array([0]), CPU)
    assert piece.input_ids.tolist() == [[1000, 1001, 1002, 1003]]
    assert piece.labels.shape == (1, 2)


def test_a_row_without_a_response_has_a_place_and_no_token() -> None:
    piece = make_piece(wire([(3, 0)]), np.array([0]), CPU)
    assert piece.input_ids.tolist() == [[1000, 1001, 1002]]
    assert piece.positions.tolist() == [[2]]
    assert not piece.batch.loss_mask.any()


def test_a_masked_token_inside_a_response_stays_in_the_input() -> None:
    batch = wire([(2, 3)])
    batch.response_mask = batch.loss_mask = torch.tensor([[True, False, True]])
    piece = make_piece(batch, np.array([0]), CPU)
    assert piece.input_ids.tolist() == [[1000, 1001, 1002, 1003, 1004]]


def test_no_rows_make_one_blank_row_that_no_mask_counts() -> None:
    batch = wire([(3, 2), (2, 4)])
    piece = make_piece(batch, np.zeros(0, dtype=np.int64), CPU)
    assert piece.input_ids.tolist() == [[0, 0]]
    assert piece.positions.tolist() == [[0]]
    assert not piece.batch.response_mask.any()
    assert not piece.batch.loss_mask.any()
    assert piece.batch.old_log_probs.tolist() == [[0.0] * 4]
    assert piece.batch.ref_log_prob is None


def test_a_blank_row_can_be_made_from_a_batch_without_rows() -> None:
    batch = wire([(3, 2)])[torch.zeros(0, dtype=torch.long)]
    assert make_piece(batch, np.zeros(0, dtype=np.int64), CPU).input_ids.tolist() == [[0, 0]]


def test_the_rows_of_a_piece_keep_the_order_asked_for() -> None:
    piece = make_piece(wire([(1, 1), (1, 1), (1, 1)]), np.array([2, 0]), CPU)
    assert piece.input_ids[:, 0].tolist() == [3000, 1000]
    assert list(piece.batch.uid) == ["2", "0"]


def test_widen_gives_the_wires_width_with_zeros_on_the_right() -> None:
    piece = make_piece(wire([(1, 2)], extra_response=3), np.array([0]), CPU)
    assert piece.widen(torch.tensor([[5.0, 6.0]])).tolist() == [[5.0, 6.0, 0.0, 0.0, 0.0]]


lengths = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    rows=lengths,
    extra_prompt=st.integers(0, 4),
    extra_response=st.integers(0, 4),
    choice=st.randoms(use_true_random=False),
)
def test_any_lengths_and_padding_give_the_real_tokens_their_positions_and_labels(
    rows: Rows, extra_prompt: int, extra_response: int, choice: Callable
) -> None:
    batch = wire(rows, extra_prompt=extra_prompt, extra_response=extra_response)
    chosen = [row for row in range(len(rows)) if choice.random() < 0.7] or [0]
    piece = make_piece(batch, np.array(chosen), CPU)
    assert piece.input_ids.shape[1] == max(sum(rows[row]) for row in chosen)
    assert piece.labels.shape == piece.positions.shape == (len(chosen), max(1, *(rows[row][1] for row in chosen)))
    assert int(piece.positions.min()) >= 0
    assert int(piece.positions.max()) < piece.input_ids.shape[1]
    for place, row in enumerate(chosen):
        prompt, response = rows[row]
        real = [1000 * (row + 1) + column for column in range(prompt + response)]
        padding = [0] * (piece.input_ids.shape[1] - len(real))
        assert piece.input_ids[place].tolist() == real + padding
        assert piece.labels[place, :response].tolist() == real[prompt:]
        # The column of each position holds the token just before the label.
        assert (
            piece.input_ids[place].gather(0, piece.positions[place, :response]).tolist()
            == real[prompt - 1 : -1][:response]
        )
