"""The critic role: the value of the state before each response token."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from config.schema import CriticConfig
from trainer.batch import PPOBatch, require, require_finite
from workers.engine.fsdp import DeviceContext, FSDPEngine, UpdateOutcome
from workers.engine.models import ValueModel, master_dtype
from workers.engine.pieces import LocalUpdate, make_piece
from workers.engine.recompute import recompute_layers
from workers.losses import LossShare, value_loss


class Critic:
    """One rank of the critic role."""

    def __init__(
        self, context: DeviceContext, config: CriticConfig, path: str, seed: int, max_response_length: int
    ) -> None:
        self.context = context
        self.config = config
        self.max_response_length = max_response_length
        with torch.random.fork_rng():
            torch.manual_seed(seed)  # of the new value head; the same on all ranks
            module = ValueModel.load(
                path,
                dtype=master_dtype(config.fsdp_config),
                override_config=config.model.override_config,
                trust_remote_code=config.model.trust_remote_code,
            )
        if config.model.enable_gradient_checkpointing:
            recompute_layers(module)
        self.engine = FSDPEngine(module, context=context, config=config.fsdp_config, optim=config.optim)

    @torch.no_grad()
    def compute_values(self, batch: PPOBatch, micro_batches: list[np.ndarray]) -> dict[str, Tensor]:
        """`values` [B, R] of the states before the batch's response tokens."""
        (responses,) = require(batch, "responses")
        values = torch.zeros(responses.shape, dtype=next(self.engine.module.parameters()).dtype)
        with self.engine.loaded():
            for rows in micro_batches:
                piece = make_piece(batch, rows, self.context.device)
                out = self.engine.module(piece.input_ids, piece.positions)
                if len(rows):
                    values[torch.from_numpy(rows)] = piece.widen(out).cpu()
        return {"values": values}

    def update(self, batch: PPOBatch, updates: list[LocalUpdate], lr: float) -> list[UpdateOutcome]:
        """The updates, in order."""
        with self.engine.loaded(optimizer=True):
            return [
                self.engine.update(self._shares(batch, update), lr=lr, grad_clip=self.config.grad_clip)
                for update in updates
            ]

    def _shares(self, batch: PPOBatch, update: LocalUpdate) -> Iterator[LossShare]:
        for indexes in update.micro_batches:
            piece = make_piece(batch, indexes, self.context.device)
            rows = piece.batch
            values, returns, mask = require(rows, "values", "returns", "response_mask")
            vpreds = piece.widen(self.engine.module(piece.input_ids, piece.positions))
            require_finite(rows, vpreds.detach(), mask, what="the critic's value")
            yield value_loss(
                vpreds=vpreds,
                values=values,
                returns=returns,
                response_mask=mask,
                counts=update.counts,
                config=self.config,
                scale=float(self.max_response_length),
            )

    def save(self, folder: str) -> None:
        """Write `critic/` and its optimizer into a checkpoint's folder. A collective; rank 0 writes."""
        self.engine.save(Path(folder), "critic")

    def load_optimizer(self, folder: str) -> None:
        """Go on from a checkpoint's optimizer; its weights are what `path` named."""
        self.engine.load_optimizer(Path(folder), "critic")
