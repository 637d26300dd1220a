"""Typed clients of the roles: what `RayPPOTrainer` calls.

A call deals the batch's rows out over the ranks, and puts the results back in the order of the rows. Everything that
depends on the whole batch (shares, micro-batches, counts) is decided here, on the driver, by pure functions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from config.schema import ActorConfig, ActorRolloutRefConfig, CriticConfig, RefConfig, RolloutConfig
from trainer.batch import PPOBatch, real_lengths, require
from trainer.errors import CheckpointError, WorkerLostError
from trainer.ppo.limiters import finish
from trainer.ppo.minibatch import MicroBatching, Rows, Update, plan_micro_batches, plan_updates
from workers.actor import Actor, ActorRollout
from workers.critic import Critic
from workers.engine.flops import ModelSize, actor_mfu
from workers.engine.fsdp import UpdateOutcome
from workers.engine.models import PolicySpec
from workers.engine.pieces import LocalUpdate
from workers.pool import ResourcePool
from workers.reference import Reference
from workers.rollout.apart import RolloutApart
from workers.rollout.sampling import RolloutRequest

UpdateMetrics = dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateContext:
    """What an update depends on besides its batch."""

    seed: int
    step: int
    lr: float


def micro_batching(*, dynamic: bool, max_rows: int | None, max_tokens: int) -> MicroBatching:
    """The bound that a role's configuration sets."""
    return MicroBatching(max_tokens=max_tokens) if dynamic else MicroBatching(max_rows=max_rows)


class ActorRolloutGroup:
    """The policy: generates, scores, is updated. Its sampler lives in the actor's processes, or in another pool's."""

    NAME, ROLLOUT = "actor_rollout", "rollout"

    def __init__(
        self,
        pool: ResourcePool,
        config: ActorRolloutRefConfig,
        spec: PolicySpec,
        *,
        rollout_pool: ResourcePool | None = None,
    ) -> None:
        self.pool = pool
        self.rollout_pool = rollout_pool or pool
        self.config = config
        self._sampler_is_current = False
        if self.rollout_pool is pool:
            pool.build(self.NAME, ActorRollout, config, spec)
        else:
            pool.build(self.NAME, Actor, config, spec)
            self.rollout_pool.build(self.ROLLOUT, RolloutApart, config, spec)
        self.update_weights()

    def generate(self, batch: PPOBatch, request: RolloutRequest) -> PPOBatch:
        """Fill `responses`, `response_mask`, `loss_mask`, `attention_mask`, `rollout_log_probs`.

        Raises:
            WorkerLostError: the last push of weights failed, so that the sampler's are not the actor's.
        """
        if not self._sampler_is_current:
            raise WorkerLostError("the last push of weights to the rollout failed: its weights are not the actor's")
        # Contiguous shares, so that the responses to one prompt mostly meet on one device, which then reads it once.
        pool = self.rollout_pool
        shares = np.array_split(np.arange(len(batch)), pool.size)
        name = self.NAME if pool is self.pool else self.ROLLOUT
        answers = pool.call(name, "generate", [(_take(batch, rows), request) for rows in shares])
        _fill(batch, shares, answers)
        (mask,) = require(batch, "response_mask")
        batch.loss_mask = mask.clone()
        batch.attention_mask = torch.cat([batch.prompt_mask, mask], dim=1)
        return batch

    def compute_log_prob(self, batch: PPOBatch) -> PPOBatch:
        """Fill `old_log_probs` and `entropys`."""
        return _score(self.pool, self.NAME, "compute_log_prob", batch, _log_prob_bound(self.config.rollout))

    def update_actor(self, batch: PPOBatch, context: UpdateContext) -> list[UpdateMetrics]:
        """Update the policy; the metrics of each update, in order."""
        mask, *_ = require(batch, "loss_mask", "responses", "old_log_probs", "advantages")
        updates = _plan(batch, mask, self.config.actor, context, num_ranks=self.pool.size)
        return _run_updates(self.pool, self.NAME, batch, updates, context.lr, "actor/grad_norm")

    def mfu(self, batch: PPOBatch, seconds: float) -> dict[str, float]:
        """`perf/mfu/actor` of a step's updates that took so long; nothing where a device's peak is not known."""
        size, peak = self._speed
        (mask,) = require(batch, "response_mask")
        return actor_mfu(
            size,
            lengths=real_lengths(batch).tolist(),
            num_response_tokens=int(mask.sum()),
            epochs=self.config.actor.ppo_epochs,
            seconds=seconds,
            num_devices=self.pool.size,
            peak=peak,
        )

    @cached_property
    def _speed(self) -> tuple[ModelSize, float | None]:
        """The policy's size and a device's peak, which stay what they are."""
        return self.pool.call_all(self.NAME, "speed")[0]

    def update_weights(self) -> None:
        """Bring the trained weights into the samplers."""
        self._sampler_is_current = False
        if self.rollout_pool is self.pool:
            self.pool.call_all(self.NAME, "update_weights")
        else:
            self._push_weights()
        self._sampler_is_current = True

    def _push_weights(self) -> None:
        """The weights to the other pool, bucket by bucket through the object store; the next is gathered meanwhile.

        Only the actor's rank 0 keeps a bucket, in host memory; no bucket passes through the driver.
        """
        actor, rollout = self.pool, self.rollout_pool
        actor.call_all(self.NAME, "open_weights", int(self.config.rollout.update_weights_bucket_megabytes * 1e6))
        rollout.call_all(self.ROLLOUT, "open_weights")
        drawn = actor.start_and_keep(self.NAME, "next_weights")
        while bucket := actor.gather(drawn, "update_weights")[0]:
            drawn = actor.start_and_keep(self.NAME, "next_weights")
            rollout.call_all(self.ROLLOUT, "take_weights", *bucket)
        rollout.call_all(self.ROLLOUT, "close_weights")

    def save(self, folder: str) -> None:
        """Write the policy and its optimizer into a checkpoint's folder."""
        _save(self.pool, self.NAME, folder, "actor")

    def load_optimizer(self, folder: str) -> None:
        """Go on from a checkpoint's optimizer."""
        self.pool.call_all(self.NAME, "load_optimizer", folder)


class ReferenceGroup:
    """The policy at the start of the run: a role of its own, or with LoRA the actor's model, which must be there."""

    NAME = "reference"

    def __init__(self, pool: ResourcePool, config: ActorRolloutRefConfig, spec: PolicySpec) -> None:
        self.pool = pool
        self.config = config
        self.role = self.NAME if spec.adapter is None else ActorRolloutGroup.NAME
        if spec.adapter is None:
            pool.build(self.NAME, Reference, config, spec)

    def compute_ref_log_prob(self, batch: PPOBatch) -> PPOBatch:
        """Fill `ref_log_prob`."""
        return _score(self.pool, self.role, "compute_ref_log_prob", batch, _log_prob_bound(self.config.ref))


class CriticGroup:
    """The value model."""

    NAME = "critic"

    def __init__(
        self, pool: ResourcePool, config: CriticConfig, path: str, *, seed: int, max_response_length: int
    ) -> None:
        self.pool = pool
        self.config = config
        pool.build(self.NAME, Critic, config, path, seed, max_response_length)

    def compute_values(self, batch: PPOBatch) -> PPOBatch:
        """Fill `values`."""
        return _score(self.pool, self.NAME, "compute_values", batch, _update_bound(self.config))

    def update_critic(self, batch: PPOBatch, context: UpdateContext) -> list[UpdateMetrics]:
        """Update the value model; the metrics of each update, in order."""
        mask, *_ = require(batch, "response_mask", "responses", "values", "returns")
        updates = _plan(batch, mask, self.config, context, num_ranks=self.pool.size)
        return _run_updates(self.pool, self.NAME, batch, updates, context.lr, "critic/grad_norm")

    def save(self, folder: str) -> None:
        """Write the value model and its optimizer into a checkpoint's folder."""
        _save(self.pool, self.NAME, folder, "critic")

    def load_optimizer(self, folder: str) -> None:
        """Go on from a checkpoint's optimizer."""
        self.pool.call_all(self.NAME, "load_optimizer", folder)


def _save(pool: ResourcePool, role: str, folder: str, saved_as: str) -> None:
    """Let the role write its part of a checkpoint.

    Raises:
        CheckpointError: it did, on the disk of another machine.
    """
    pool.call_all(role, "save", folder)
    if not (Path(folder) / saved_as).is_dir():
        raise CheckpointError(
            f"{folder}: pool {pool.spec.name} has written {saved_as}/ where the driver cannot see it. All nodes must share the "
            "disk of trainer.default_local_dir."
        )


# --- dealing out and putting together --------------------------------------------------------------------------------


def _log_prob_bound(config: RolloutConfig | RefConfig) -> MicroBatching:
    return micro_batching(
        dynamic=config.log_prob_use_dynamic_bsz,
        max_rows=config.log_prob_micro_batch_size_per_gpu,
        max_tokens=config.log_prob_max_token_len_per_gpu,
    )


def _update_bound(config: ActorConfig | CriticConfig) -> MicroBatching:
    return micro_batching(
        dynamic=config.use_dynamic_bsz,
        max_rows=config.ppo_micro_batch_size_per_gpu,
        max_tokens=config.ppo_max_token_len_per_gpu,
    )


def _plan(
    batch: PPOBatch, mask: Tensor, config: ActorConfig | CriticConfig, context: UpdateContext, *, num_ranks: int
) -> list[Update]:
    """The updates of a step on the tokens of the mask."""
    return plan_updates(
        uid=batch.uid,
        lengths=real_lengths(batch),
        mask=mask.numpy(),
        mini_batch_prompts=config.ppo_mini_batch_size,
        epochs=config.ppo_epochs,
        seed=context.seed,
        step=context.step,
        num_ranks=num_ranks,
        bound=_update_bound(config),
    )


def _take(batch: PPOBatch, rows: Rows) -> PPOBatch:
    return batch[torch.from_numpy(rows)]


def _fill(batch: PPOBatch, shares: Sequence[Rows], results: Sequence[dict[str, Tensor]]) -> None:
    """Put per-rank results [rows of the rank, R] into the batch, each row in its place."""
    order = torch.from_numpy(np.argsort(np.concatenate(shares), kind="stable"))
    for name in results[0]:
        setattr(batch, name, torch.cat([result[name] for result in results])[order])


def _score(pool: ResourcePool, role: str, method: str, batch: PPOBatch, bound: MicroBatching) -> PPOBatch:
    """A forward pass over all rows; the role's method fills its fields."""
    require(batch, "responses", "attention_mask")
    pieces = plan_micro_batches(np.arange(len(batch)), real_lengths(batch), num_ranks=pool.size, bound=bound)
    shares, local = zip(*(_localise(rank) for rank in pieces), strict=True)
    calls = [(_take(batch, rows), micro) for rows, micro in zip(shares, local, strict=True)]
    _fill(batch, shares, pool.call(role, method, calls))
    return batch


def _localise(pieces: Sequence[Rows]) -> tuple[Rows, list[Rows]]:
    """The rows that the pieces name, each once, and the pieces as indexes into them."""
    rows = np.unique(np.concatenate(pieces))
    return rows, [np.searchsorted(rows, piece) for piece in pieces]


def _run_updates(
    pool: ResourcePool, role: str, batch: PPOBatch, updates: Sequence[Update], lr: float, grad_norm_key: str
) -> list[UpdateMetrics]:
    """Run the updates on all ranks and add their metric shares up."""
    if not updates:
        return []
    calls = []
    for rank in range(pool.size):
        rows, local = _localise([piece for update in updates for piece in update.micro_batches[rank]])
        pieces = iter(local)
        plan = [
            LocalUpdate(counts=update.counts, micro_batches=[next(pieces) for _ in update.micro_batches[rank]])
            for update in updates
        ]
        calls.append((_take(batch, rows), plan, lr))
    by_rank: list[list[UpdateOutcome]] = pool.call(role, "update", calls)
    metrics = []
    for outcomes in zip(*by_rank, strict=True):
        total = {name: sum(outcome.metrics[name] for outcome in outcomes) + 0.0 for name in outcomes[0].metrics}
        metrics.append({**finish(total), grad_norm_key: outcomes[0].grad_norm})
    return metrics
