"""`RayPPOTrainer`: the controller that runs PPO step by step over its worker groups."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from config.pools import all_devices, devices_of
from config.schema import GovernorConfig, OptimConfig
from trainer.batch import PPOBatch, require, require_finite
from trainer.checkpoint import Checkpoint, CheckpointStore
from trainer.data.dataset import PromptDataset, batch_indexes
from trainer.metrics import Metrics, Timer, data_metrics, extra_metrics, part_metrics, timing_metrics, update_metrics
from trainer.ppo.advantages import AdvantageResult, compute_advantages
from trainer.ppo.core_algos import apply_kl_penalty, get_kl_controller
from trainer.ppo.limiters import entropy_metrics, probe_metrics, reward_kl_metrics
from trainer.ppo.rollout_correction import correct_rollout
from trainer.ppo.validation import ValSample, validation_metrics
from trainer.samples import choose_rows
from workers.engine.schedule import lr_multiplier
from workers.groups import ActorRolloutGroup, CriticGroup, ReferenceGroup, UpdateContext
from workers.reward.group import RewardGroup, ScoredText
from workers.rollout.sampling import TRAIN, VALIDATION, RolloutRequest, SamplingParams

MAX_PROBE_ROWS = 64


@dataclass(slots=True)
class WorkerGroups:
    """The roles of a run; None for one that its configuration does not use."""

    actor_rollout: ActorRolloutGroup
    reward: RewardGroup
    reference: ReferenceGroup | None
    critic: CriticGroup | None


class RunRecord(Protocol):
    """Where a run's figures go: files, trackers, the terminal."""

    def updates(self, step: int, role: str, updates: list[Metrics]) -> None:
        """Each update of a role in a step."""

    def samples(self, step: int, batch: PPOBatch, scored: list[ScoredText], new_log_probs: Tensor) -> None:
        """Some responses of a step, and their tokens' log-probabilities [b, R] after its updates."""

    def metrics(self, step: int, metrics: Metrics) -> None:
        """A finished step's metrics."""

    def validation(self, step: int, metrics: Metrics) -> None:
        """A validation by itself, of a run that has taken steps."""

    def batch(self, step: int, batch: PPOBatch, kl_coef: float) -> None:
        """A step's whole batch before stage 7, and the KL controller's coefficient then."""


class RayPPOTrainer:
    """Runs the steps: rollout, reward, log-probabilities, KL, advantages, updates, records."""

    def __init__(
        self,
        config: GovernorConfig,
        *,
        groups: WorkerGroups,
        train_set: PromptDataset,
        val_set: PromptDataset | None,
        pad_token_id: int,
        num_steps: int,
        record: RunRecord,
        checkpoints: CheckpointStore,
        save_beside: Callable[[str], None] = lambda folder: None,
        memory: Callable[[], dict[str, float]] = dict,
        mfu: Callable[[PPOBatch, float], Metrics] = lambda batch, seconds: {},
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.config = config
        self.groups = groups
        self.train_set, self.val_set = train_set, val_set
        self.pad_token_id = pad_token_id
        self.num_steps = num_steps
        self.record = record
        self.checkpoints = checkpoints
        self.save_beside = save_beside
        self.memory = memory
        self.mfu = mfu
        self.should_stop = should_stop
        kl_ctrl = config.algorithm.kl_ctrl
        self.kl_ctrl = get_kl_controller(
            type=kl_ctrl.type, kl_coef=kl_ctrl.kl_coef, target_kl=kl_ctrl.target_kl, horizon=kl_ctrl.horizon
        )
        self.mean_kl = 0.0  # of this step's batch to the reference, where the KL is in the reward
        self.step = 0

    # --- the run -----------------------------------------------------------------------------------------------------

    def fit(self) -> bool:
        """Run the steps that are left; False if a signal asked to stop before the last, True at the end."""
        trainer = self.config.trainer
        if trainer.val_only and self.step > 0:
            self.record.validation(self.step, self.validate())
        elif self.step == 0 and self.val_set is not None and (trainer.val_before_train or trainer.val_only):
            self.record.metrics(0, self.validate())
        if trainer.val_only:
            return True
        while self.step < self.num_steps:
            self.step += 1
            metrics = self.train_step()
            last, stopping = self.step == self.num_steps, self.should_stop()
            save_due = trainer.save_freq > 0 and (last or _due(self.step, trainer.save_freq))
            self.finish_step(metrics, save=save_due or (stopping and not last))
            if stopping and not last:
                return False
        return True

    def train_step(self) -> Metrics:
        """Stages 1 to 9: one batch from prompts to updated policy; what happened, as metrics."""
        config, groups, timer = self.config, self.groups, Timer()
        metrics: Metrics = {}
        with timer.part("step"):
            # 1. Prompts, each rollout.n times.
            batch = self.next_prompts()
            # 2. Responses.
            with timer.part("gen"):
                batch = groups.actor_rollout.generate(batch, self.request(self.sampling(), TRAIN))
            # 3. Rewards.
            with timer.part("reward"):
                scored = groups.reward.compute_scores(batch)
            # 4. Log-probabilities of the policy that is about to change.
            with timer.part("old_log_prob"):
                batch = self.compute_old_log_prob(batch)
            # 5. The reference's.
            if groups.reference is not None:
                with timer.part("ref"):
                    batch = groups.reference.compute_ref_log_prob(batch)
                    self.require_finite(batch, "ref_log_prob")
            # 6. Values.
            if groups.critic is not None:
                with timer.part("values"):
                    batch = groups.critic.compute_values(batch)
                    self.require_finite(batch, "values")
            if config.trainer.rollout_data_dir:
                self.record.batch(self.step, batch, self.kl_ctrl.value)
            with timer.part("adv"):
                # 7. KL in the reward.
                metrics |= self.apply_kl(batch)
                # 8. Rollout correction, advantages and returns.
                metrics |= self.correct_rollout(batch)
                metrics |= self.compute_advantages(batch)
            # 9. Updates.
            if groups.critic is not None:
                with timer.part("update_critic"):
                    metrics |= self.update_critic(batch, groups.critic)
            if self.step > config.trainer.critic_warmup:
                with timer.part("update_actor"):
                    metrics |= self.update_actor(batch)
                metrics |= self.mfu(batch, timer.seconds["update_actor"])
        with timer.part("probe"):
            metrics |= self.look_back(batch, scored)
        metrics |= data_metrics(
            batch,
            max_prompt_length=config.data.max_prompt_length,
            ended=[item.ended for item in scored],
        )
        if batch.entropys is not None:
            metrics |= entropy_metrics(*require(batch, "entropys", "response_mask"))
        metrics |= extra_metrics([item.reward.extra for item in scored])
        metrics |= part_metrics([item.parts for item in scored])
        metrics |= timing_metrics(timer, batch, num_devices=all_devices(config))
        metrics |= {"training/global_step": self.step, "training/epoch": self.epoch()}
        return metrics

    def finish_step(self, metrics: Metrics, *, save: bool) -> None:
        """Stage 10: checkpoint if due, weights to the rollout, validation if due, metrics out."""
        test_freq, timer, last = self.config.trainer.test_freq, Timer(), self.step == self.num_steps
        if save:
            with timer.part("save_checkpoint"):
                self.save_checkpoint(metrics)
        with timer.part("update_weights"):
            self.groups.actor_rollout.update_weights()
        if self.val_set is not None and test_freq > 0 and (last or _due(self.step, test_freq)):
            with timer.part("testing"):
                metrics = metrics | self.validate()
        memory = {f"perf/{name}": value for name, value in self.memory().items()}
        self.record.metrics(self.step, metrics | memory | {f"timing_s/{name}": s for name, s in timer.seconds.items()})

    # --- stages ------------------------------------------------------------------------------------------------------

    def next_prompts(self) -> PPOBatch:
        """Stage 1: the step's prompts, in the order of (seed, epoch, position)."""
        data = self.config.data
        indexes = batch_indexes(
            self.step,
            num_rows=len(self.train_set),
            batch_size=data.train_batch_size,
            seed=data.seed,
            shuffle=data.shuffle,
        )
        samples = self.config.actor_rollout_ref.rollout.n
        return self.train_set.batch(indexes.tolist(), step=self.step, samples=samples, pad_token_id=self.pad_token_id)

    def sampling(self) -> SamplingParams:
        """How training samples."""
        rollout = self.config.actor_rollout_ref.rollout
        return SamplingParams(
            temperature=rollout.temperature, top_k=rollout.top_k, top_p=rollout.top_p, min_p=rollout.min_p
        )

    def request(self, params: SamplingParams, stream: int) -> RolloutRequest:
        """What this step asks of the rollout."""
        data = self.config.data
        return RolloutRequest(
            params=params, max_tokens=data.max_response_length, seed=data.seed, step=self.step, stream=stream
        )

    def compute_old_log_prob(self, batch: PPOBatch) -> PPOBatch:
        """Stage 4: `old_log_probs` and `entropys`; in bypass mode the sampler's log-probabilities, and no entropy."""
        if self.config.algorithm.rollout_correction.bypass_mode:
            (rollout_log_probs,) = require(batch, "rollout_log_probs")
            batch.old_log_probs = rollout_log_probs.clone()
        else:
            batch = self.groups.actor_rollout.compute_log_prob(batch)
        self.require_finite(batch, "old_log_probs")
        return batch

    def apply_kl(self, batch: PPOBatch) -> Metrics:
        """Stage 7: `token_level_rewards`, with the KL to the reference taken off if asked; moves the KL controller."""
        (scores,) = require(batch, "token_level_scores")
        algorithm = self.config.algorithm
        if not algorithm.use_kl_in_reward:
            batch.token_level_rewards = scores
            return {}
        old_log_probs, ref_log_prob, mask = require(batch, "old_log_probs", "ref_log_prob", "response_mask")
        beta = self.kl_ctrl.value
        result = apply_kl_penalty(
            token_level_scores=scores,
            old_log_probs=old_log_probs,
            ref_log_prob=ref_log_prob,
            response_mask=mask,
            beta=beta,
            penalty=algorithm.kl_penalty,
        )
        batch.token_level_rewards = result.token_level_rewards
        self.kl_ctrl.update(result.mean_kl, result.num_rows)
        self.mean_kl = result.mean_kl
        return {"actor/reward_kl_penalty": result.mean_kl, "actor/reward_kl_penalty_coeff": beta}

    def correct_rollout(self, batch: PPOBatch) -> Metrics:
        """Stage 8, before the advantages: `loss_mask` and `rollout_is_weights`, and how far the sampler is from the policy."""
        config = self.config.algorithm.rollout_correction
        if config.bypass_mode:  # the two are the same
            return {}
        old, sampler, mask = require(batch, "old_log_probs", "rollout_log_probs", "response_mask")
        self.require_finite(batch, "rollout_log_probs")
        correction = correct_rollout(old_log_probs=old, rollout_log_probs=sampler, response_mask=mask, config=config)
        batch.loss_mask, batch.rollout_is_weights = correction.loss_mask, correction.weights
        return correction.metrics

    def compute_advantages(self, batch: PPOBatch) -> Metrics:
        """Stage 8: `advantages` and `returns`; with the KL in the reward also what it made of the advantages."""
        scores, rewards, mask = require(batch, "token_level_scores", "token_level_rewards", "response_mask")
        algorithm = self.config.algorithm

        def estimate(token_level_rewards: Tensor) -> AdvantageResult:
            return compute_advantages(
                algorithm.adv_estimator,
                token_level_rewards=token_level_rewards,
                response_mask=mask,
                uid=batch.uid,
                values=batch.values,
                gamma=algorithm.gamma,
                lam=algorithm.lam,
                norm_by_std=algorithm.norm_adv_by_std_in_grpo,
            )

        advantages, batch.returns = estimate(rewards)
        batch.advantages = advantages
        self.require_finite(batch, "advantages")
        self.require_finite(batch, "returns")
        if not algorithm.use_kl_in_reward:
            return {}
        without_kl = estimate(scores).advantages
        batch.kl_advantages = advantages - without_kl
        adaptive = algorithm.kl_ctrl.type == "adaptive"
        return reward_kl_metrics(
            token_level_scores=scores,
            token_level_rewards=rewards,
            advantages=advantages,
            advantages_without_kl=without_kl,
            mask=mask,
            mean_kl=self.mean_kl,
            target_kl=algorithm.kl_ctrl.target_kl if adaptive else None,
        )

    def update_critic(self, batch: PPOBatch, critic: CriticGroup) -> Metrics:
        """Stage 9, critic."""
        lr = self.learning_rate(self.config.critic.optim, first_step=0)
        updates = critic.update_critic(batch, UpdateContext(seed=self.config.data.seed, step=self.step, lr=lr))
        self.record.updates(self.step, "critic", updates)
        return update_metrics(updates) | {"critic/lr": lr}

    def update_actor(self, batch: PPOBatch) -> Metrics:
        """Stage 9, actor."""
        actor = self.config.actor_rollout_ref.actor
        lr = self.learning_rate(actor.optim, first_step=self.config.trainer.critic_warmup)
        context = UpdateContext(seed=self.config.data.seed, step=self.step, lr=lr)
        updates = self.groups.actor_rollout.update_actor(batch, context)
        self.record.updates(self.step, "actor", updates)
        metrics = update_metrics(updates) | {"actor/num_updates": len(updates), "actor/lr": lr}
        return metrics | {"actor/kl_coef": actor.kl_loss_coef} if actor.use_kl_loss else metrics

    def look_back(self, batch: PPOBatch, scored: list[ScoredText]) -> Metrics:
        """Samples if due, and the limiter probe if due: both score some of the step's tokens with the new policy."""
        trainer = self.config.trainer
        if _due(self.step, trainer.sample_freq):
            rows = choose_rows([item.reward.score for item in scored])
            shown, after = self.rescore(batch, rows)
            (new_log_probs,) = require(after, "old_log_probs")
            self.record.samples(self.step, shown, [scored[row] for row in rows], new_log_probs)
        return self.probe(batch) if _due(self.step, trainer.limiter_probe_freq) else {}

    def probe(self, batch: PPOBatch) -> Metrics:
        """What the step's updates moved, on at most 64 of its responses."""
        count = min(MAX_PROBE_ROWS, len(batch))
        before, after = self.rescore(batch, [row * len(batch) // count for row in range(count)])
        old, mask = require(before, "old_log_probs", "response_mask")
        new, new_entropy = require(after, "old_log_probs", "entropys")
        return probe_metrics(
            old_log_probs=old,
            new_log_probs=new,
            ref_log_prob=before.ref_log_prob,
            entropy_before=before.entropys,
            entropy_after=new_entropy,
            mask=mask,
        )

    def rescore(self, batch: PPOBatch, rows: list[int]) -> tuple[PPOBatch, PPOBatch]:
        """Some rows as they are, and with `old_log_probs` and `entropys` of the policy after the updates."""
        taken = batch[torch.tensor(rows)]
        return taken, self.groups.actor_rollout.compute_log_prob(taken.clone(recurse=False))

    def learning_rate(self, optim: OptimConfig, *, first_step: int) -> float:
        """The rate of this step; the schedule begins after `first_step` steps."""
        step, total = self.step - 1 - first_step, self.num_steps - first_step
        return optim.lr * lr_multiplier(step, total_steps=total, optim=optim)

    def epoch(self) -> int:
        """The epoch of this step, from 0."""
        return (self.step - 1) // (len(self.train_set) // self.config.data.train_batch_size)

    def require_finite(self, batch: PPOBatch, field: str) -> None:
        """Check a field under the response mask.

        Raises:
            DivergedError: a value is NaN or infinite; names field, step and prompt.
        """
        values, mask = require(batch, field, "response_mask")
        require_finite(batch, values, mask, what=f"step {self.step}: {field}")

    # --- validation --------------------------------------------------------------------------------------------------

    def validate(self) -> Metrics:
        """Figures of the whole validation set; no row is dropped or counted twice."""
        assert self.val_set is not None
        data, kwargs = self.config.data, self.config.actor_rollout_ref.rollout.val_kwargs
        params = SamplingParams(
            temperature=kwargs.temperature if kwargs.do_sample else 0.0,
            top_k=kwargs.top_k,
            top_p=kwargs.top_p,
            min_p=kwargs.min_p,
        )
        size = data.val_batch_size or len(self.val_set)
        samples: list[ValSample] = []
        for start in range(0, len(self.val_set), size):
            indexes = range(start, min(start + size, len(self.val_set)))
            batch = self.val_set.batch(indexes, step=self.step, samples=kwargs.n, pad_token_id=self.pad_token_id)
            batch = self.groups.actor_rollout.generate(batch, self.request(params, VALIDATION))
            scored = self.groups.reward.compute_scores(batch)
            samples += [
                ValSample(
                    data_source=extras["data_source"],
                    uid=uid,
                    score=item.reward.score,
                    extra=item.parts | item.reward.extra,
                )
                for uid, extras, item in zip(batch.uid, batch.extras, scored, strict=True)
            ]
        return validation_metrics(samples)

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def save_checkpoint(self, metrics: Metrics) -> None:
        """Write all that the next step depends on. `metrics` are of the step so far, for a resume before they are out."""

        def write(folder: Path) -> None:
            self.groups.actor_rollout.save(str(folder))
            if self.groups.critic is not None:
                self.groups.critic.save(str(folder))
            self.save_beside(str(folder))

        state = {
            "step": self.step,
            "kl_ctrl": self.kl_ctrl.state_dict(),
            "data": {"fingerprint": self.train_set.fingerprint(), "seed": self.config.data.seed},
            "metrics": metrics,
        }
        self.checkpoints.save(self.step, write, state, {"world_size": devices_of(self.config, "actor")})

    def resume(self, checkpoint: Checkpoint, *, last_recorded_step: int) -> None:
        """Go on from a checkpoint whose weights the groups were built from.

        A kill between checkpoint and metrics leaves the step's record open: its stage 10 is done again.
        """
        folder, state = str(checkpoint.folder), checkpoint.state()
        self.step = checkpoint.step
        self.kl_ctrl.load_state_dict(state["kl_ctrl"])
        self.groups.actor_rollout.load_optimizer(folder)
        if self.groups.critic is not None:
            self.groups.critic.load_optimizer(folder)
        if last_recorded_step < self.step:
            self.finish_step(state["metrics"], save=False)


def _due(step: int, frequency: int) -> bool:
    return frequency > 0 and step % frequency == 0
