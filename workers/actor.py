"""The actor role: the policy that is trained, and where it is not in a pool of its own, the copy that decodes."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from config.schema import ActorRolloutRefConfig, FSDPConfig, OptimConfig
from trainer.batch import PPOBatch, require, require_finite
from trainer.ppo.core_algos import LossCounts
from trainer.ppo.limiters import LimiterProbe
from workers.engine.flops import ModelSize, model_size, peak_flops
from workers.engine.fsdp import DeviceContext, FSDPEngine, UpdateOutcome
from workers.engine.lora import LoraEngine, attach_adapters
from workers.engine.models import PolicyModel, PolicySpec, load_model, master_dtype
from workers.engine.pieces import LocalUpdate, Piece, make_piece
from workers.engine.recompute import recompute_layers
from workers.losses import LossShare, ppo_loss
from workers.rollout.buckets import Bucket, in_buckets
from workers.rollout.sampling import RolloutRequest
from workers.rollout.worker import Rollout


def load_policy(
    spec: PolicySpec, config: ActorRolloutRefConfig, context: DeviceContext, fsdp: FSDPConfig, optim: OptimConfig | None
) -> FSDPEngine:
    """An engine over the policy's weights, trained (`optim`) or not (None)."""
    model = load_model(
        AutoModelForCausalLM,
        spec.path,
        dtype=master_dtype(fsdp),
        override_config=config.model.override_config,
        trust_remote_code=config.model.trust_remote_code,
    )
    if spec.adapter is not None:
        attach_adapters(model, spec.adapter)
    policy = PolicyModel(model, logits_chunk_size=config.model.logits_chunk_size)
    if optim is not None and config.model.enable_gradient_checkpointing:
        recompute_layers(policy)
    if spec.adapter is not None:
        return LoraEngine(policy, spec.adapter, base=spec.path, context=context, config=fsdp, optim=optim)
    return FSDPEngine(policy, context=context, config=fsdp, optim=optim)


@torch.no_grad()
def score_tokens(
    engine: FSDPEngine, batch: PPOBatch, micro_batches: Sequence[np.ndarray], *, temperature: float, with_entropy: bool
) -> dict[str, Tensor]:
    """`log_prob`, and `entropy` if asked, of the batch's responses by the engine's policy: each [B, R] float32 on CPU."""
    (responses,) = require(batch, "responses")
    names = ("log_prob", "entropy") if with_entropy else ("log_prob",)
    dtype = torch.float64 if next(engine.module.parameters()).dtype == torch.float64 else torch.float32
    out = {name: torch.zeros(responses.shape, dtype=dtype) for name in names}
    with engine.loaded():
        for rows in micro_batches:
            piece = make_piece(batch, rows, engine.context.device)
            output = engine.module(
                piece.input_ids, piece.positions, piece.labels, temperature, with_entropy=with_entropy
            )
            if len(rows):
                for name in names:
                    out[name][torch.from_numpy(rows)] = piece.widen(getattr(output, name)).cpu()
    return out


class Actor:
    """One rank of the actor role."""

    def __init__(self, context: DeviceContext, config: ActorRolloutRefConfig, spec: PolicySpec) -> None:
        self.context = context
        self.config = config
        self.engine = load_policy(spec, config, context, config.actor.fsdp_config, config.actor.optim)
        self._buckets: Iterator[Bucket] = iter(())

    def compute_log_prob(self, batch: PPOBatch, micro_batches: list[np.ndarray]) -> dict[str, Tensor]:
        """`old_log_probs` and `entropys` [B, R] of the batch's responses by the policy as it is."""
        out = score_tokens(
            self.engine, batch, micro_batches, temperature=self.config.rollout.temperature, with_entropy=True
        )
        return {"old_log_probs": out["log_prob"], "entropys": out["entropy"]}

    def compute_ref_log_prob(self, batch: PPOBatch, micro_batches: list[np.ndarray]) -> dict[str, Tensor]:
        """With LoRA, `ref_log_prob` [B, R] by the policy at the start of the run, which needs no second model."""
        assert isinstance(self.engine, LoraEngine), "the reference is a role of its own"
        with self.engine.reference():
            out = score_tokens(
                self.engine, batch, micro_batches, temperature=self.config.rollout.temperature, with_entropy=False
            )
        return {"ref_log_prob": out["log_prob"]}

    def update(self, batch: PPOBatch, updates: list[LocalUpdate], lr: float) -> list[UpdateOutcome]:
        """The updates, in order."""
        with self.engine.loaded(optimizer=True):
            return [
                self.engine.update(self._shares(batch, update), lr=lr, grad_clip=self.config.actor.grad_clip)
                for update in updates
            ]

    def _shares(self, batch: PPOBatch, update: LocalUpdate) -> Iterator[LossShare]:
        for rows in update.micro_batches:
            yield self._loss(make_piece(batch, rows, self.context.device), update.counts)

    def _loss(self, piece: Piece, counts: LossCounts) -> LossShare:
        actor, temperature = self.config.actor, self.config.rollout.temperature
        with_entropy = actor.calculate_entropy or actor.entropy_coeff != 0
        output = self.engine.module(
            piece.input_ids, piece.positions, piece.labels, temperature, with_entropy=with_entropy, with_geometry=True
        )
        rows = piece.batch
        old_log_probs, advantages, loss_mask = require(rows, "old_log_probs", "advantages", "loss_mask")
        log_prob = piece.widen(output.log_prob)
        require_finite(rows, log_prob.detach(), loss_mask, what="the policy's log-probability")
        return ppo_loss(
            log_prob=log_prob,
            entropy=None if output.entropy is None else piece.widen(output.entropy),
            old_log_probs=old_log_probs,
            ref_log_prob=rows.ref_log_prob,
            advantages=advantages,
            loss_mask=loss_mask,
            counts=counts,
            config=actor,
            rollout_is_weights=rows.rollout_is_weights,
            probe=LimiterProbe(output.geometry.map(piece.widen), temperature, rows.kl_advantages),
        )

    def open_weights(self, max_bytes: int) -> None:
        """Begin to give the weights away in buckets of at most so many bytes, from the first on."""
        self._buckets = in_buckets(self.engine.full_weights(), max_bytes=max_bytes, keep=self.context.rank == 0)

    def next_weights(self) -> Bucket | None:
        """The next bucket on rank 0; None at the end, and on other ranks, which only take part. A collective."""
        return next(self._buckets, None) or None

    def speed(self) -> tuple[ModelSize, float | None]:
        """The policy's size, and the device's peak in FLOP/s where it is known."""
        on_gpu = self.context.device.type == "cuda"
        peak = peak_flops(torch.cuda.get_device_name(self.context.device)) if on_gpu else None
        return model_size(self.engine.hf_model), peak

    def save(self, folder: str) -> None:
        """Write `actor/` and its optimizer into a checkpoint's folder. A collective; rank 0 writes."""
        self.engine.save(Path(folder), "actor")

    def load_optimizer(self, folder: str) -> None:
        """Go on from a checkpoint's optimizer; its weights are what `PolicySpec.path` named."""
        self.engine.load_optimizer(Path(folder), "actor")


class ActorRollout(Actor):
    """One rank of the actor with its sampler in the same process."""

    def __init__(self, context: DeviceContext, config: ActorRolloutRefConfig, spec: PolicySpec) -> None:
        super().__init__(context, config, spec)
        self.rollout = Rollout(context, config, spec)

    def generate(self, batch: PPOBatch, request: RolloutRequest) -> dict[str, Tensor]:
        """What `Rollout.generate` says."""
        return self.rollout.generate(batch, request)

    def update_weights(self) -> None:
        """Bring the trained weights into the sampler. A collective."""
        self.rollout.load_weights(self.engine.full_weights())
