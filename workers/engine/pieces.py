"""Rows of a batch as the input of a model: padding removed, responses found by position.

On the wire a prompt is left-padded and a response right-padded. In an engine a row starts at column 0 and only its end
is padded. A causal model never looks ahead, so real tokens never see that padding: no attention mask is needed, position
ids are 0, 1, 2, …, and a row's numbers do not depend on its neighbours' lengths beyond rounding.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.batch import PPOBatch, per_row, require
from trainer.ppo.core_algos import LossCounts


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalUpdate:
    """One update as a rank sees it: its micro-batches of rows of its own batch, and the whole mini-batch's counts."""

    counts: LossCounts
    micro_batches: list[np.ndarray]


@dataclass(slots=True)
class Piece:
    """A micro-batch. b rows, L the longest row, T the longest response."""

    batch: PPOBatch  # its rows, all fields on the device
    input_ids: Tensor  # [b, L] int64, right-padded with 0
    positions: Tensor  # [b, T] int64, the column that predicts each response token: the one before it
    labels: Tensor  # [b, T] int64, the response tokens

    def widen(self, values: Tensor) -> Tensor:
        """Per-token values [b, T] as [b, R], the wire's width, with zeros on the right."""
        (responses,) = require(self.batch, "responses")
        return torch.nn.functional.pad(values, (0, responses.shape[1] - values.shape[1]))


def make_piece(batch: PPOBatch, rows: np.ndarray, device: torch.device) -> Piece:
    """The rows of a batch as a piece. No rows: one blank row, so that a rank without work joins the collectives."""
    taken = batch[torch.from_numpy(rows)] if len(rows) else _blank_row(batch)
    taken = taken.to(device)
    responses, attention_mask = require(taken, "responses", "attention_mask")
    width = taken.prompts.shape[1]
    prompt_lengths = taken.prompt_mask.sum(-1, keepdim=True)
    response_lengths = attention_mask[:, width:].sum(-1, keepdim=True)
    longest = int((prompt_lengths + response_lengths).max())
    num_response = max(int(response_lengths.max()), 1)

    # Column c of a row is column c + (left padding) of the wire; clamped past the end and zeroed there.
    wire = torch.cat([taken.prompts, responses], dim=1)
    columns = torch.arange(longest, device=device) + (width - prompt_lengths)
    input_ids = wire.gather(1, columns.clamp(max=wire.shape[1] - 1))
    real = torch.arange(longest, device=device) < prompt_lengths + response_lengths
    input_ids = torch.where(real, input_ids, 0)

    steps = torch.arange(num_response, device=device)
    positions = (prompt_lengths - 1 + steps).clamp(max=longest - 1)
    return Piece(taken, input_ids, positions, wire[:, width : width + num_response])


def _blank_row(batch: PPOBatch) -> PPOBatch:
    """One row of one prompt and one response token, under no mask but the attention's; float fields are 0."""
    values = {field.name: getattr(batch, field.name) for field in dataclasses.fields(PPOBatch)}  # pyright: ignore
    fields: dict[str, Any] = {
        name: torch.zeros(1, *value.shape[1:], dtype=value.dtype)
        for name, value in values.items()
        if isinstance(value, Tensor)
    }
    width = batch.prompts.shape[1]
    fields["prompt_mask"][:, -1] = True
    fields["attention_mask"][:, width - 1 : width + 1] = True
    return PPOBatch(**fields, uid=per_row([""]), extras=per_row([{}]), batch_size=[1])
