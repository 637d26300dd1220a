"""The controller with fake groups and no Ray: the order of a step, and what is passed on."""

from typing import Any

import pytest
import torch

from config.load import load_config
from trainer.batch import PPOBatch
from trainer.checkpoint import CheckpointStore
from trainer.data.dataset import PromptDataset
from trainer.data.rows import Row
from trainer.errors import DivergedError
from trainer.metrics import update_metrics
from trainer.ppo.core_algos import place_scores
from trainer.ppo.ray_trainer import RayPPOTrainer, WorkerGroups
from workers.reward.function import Reward
from workers.reward.group import ScoredText
from workers.rollout.sampling import TRAIN, RolloutRequest

RESPONSE_TOKENS = 3
SMALL = [
    "data.train_batch_size=2",
    "data.max_response_length=3",
    "actor_rollout_ref.actor.ppo_mini_batch_size=1",
    "actor_rollout_ref.rollout.n=2",
    "trainer.total_training_steps=4",
    "trainer.save_freq=2",
    "trainer.test_freq=2",
    "trainer.sample_freq=-1",
]


class FakeGroups:
    """All roles in one object; writes down each call."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.batches: dict[str, PPOBatch] = {}
        self.fill: dict[str, float] = {
            "rollout_log_probs": -1.0, "old_log_probs": -1.0, "ref_log_prob": -1.5, "values": 0.25
        }  # fmt: skip
        self.learning_rates: list[tuple[str, float]] = []

    def note(self, name: str, batch: PPOBatch | None = None) -> None:
        self.calls.append(name)
        if batch is not None:
            self.batches[name] = batch

    def generate(self, batch: PPOBatch, request: RolloutRequest) -> PPOBatch:
        self.note("generate" if request.stream == TRAIN else "validate", batch)
        batch.responses = torch.ones(len(batch), RESPONSE_TOKENS, dtype=torch.long)
        batch.response_mask = torch.ones(len(batch), RESPONSE_TOKENS, dtype=torch.bool)
        batch.loss_mask = batch.response_mask.clone()
        batch.attention_mask = torch.cat([batch.prompt_mask, batch.response_mask], dim=1)
        return self.constant(batch, "rollout_log_probs")

    def compute_scores(self, batch: PPOBatch) -> list[ScoredText]:
        self.note("reward")
        scores = [float(i % 2) for i in range(len(batch))]
        assert batch.response_mask is not None
        batch.token_level_scores = place_scores(scores, batch.response_mask)
        return [ScoredText("x", True, Reward(score=score, extra={"acc": score})) for score in scores]

    def constant(self, batch: PPOBatch, name: str) -> PPOBatch:
        setattr(batch, name, torch.full((len(batch), RESPONSE_TOKENS), self.fill[name]))
        return batch

    def compute_log_prob(self, batch: PPOBatch) -> PPOBatch:
        self.note("old_log_prob")
        batch.entropys = torch.zeros(len(batch), RESPONSE_TOKENS)
        return self.constant(batch, "old_log_probs")

    def compute_ref_log_prob(self, batch: PPOBatch) -> PPOBatch:
        self.note("ref")
        return self.constant(batch, "ref_log_prob")

    def compute_values(self, batch: PPOBatch) -> PPOBatch:
        self.note("values")
        return self.constant(batch, "values")

    def update_critic(self, batch: PPOBatch, context: Any) -> list[dict[str, float]]:
        self.note("update_critic", batch)
        self.learning_rates.append(("critic", context.lr))
        return [{"critic/vf_loss": 1.0}, {"critic/vf_loss": 3.0}]

    def update_actor(self, batch: PPOBatch, context: Any) -> list[dict[str, float]]:
        self.note("update_actor", batch)
        self.learning_rates.append(("actor", context.lr))
        return [{"actor/ppo_kl": 1.0}, {"actor/ppo_kl": 3.0}]

    def update_weights(self) -> None:
        self.note("update_weights")

    def save(self, folder: str) -> None:
        self.note("save")

    def load_optimizer(self, folder: str) -> None:
        self.note("load_optimizer")


class FakeRecord:
    """Keeps what is recorded."""

    def __init__(self, groups: FakeGroups) -> None:
        self.groups = groups
        self.lines: dict[int, dict[str, float]] = {}

    def updates(self, step: int, role: str, updates: list[dict[str, float]]) -> None:
        pass

    def samples(self, step: int, batch: PPOBatch, scored: list[ScoredText], new_log_probs: torch.Tensor) -> None:
        self.groups.note("samples")

    def metrics(self, step: int, metrics: dict[str, float]) -> None:
        self.groups.note("metrics")
        self.lines[step] = metrics


def make_trainer(tmp_path, overrides: list[str], **options: Any) -> tuple[RayPPOTrainer, FakeGroups, FakeRecord]:
    config = load_config([*SMALL, *overrides])
    groups = FakeGroups()
    record = FakeRecord(groups)
    row = {"prompt": "x", "data_source": "copy", "ground_truth": "1", "extra_info": {}}
    rows = [Row(where=f"row {i}", **row) for i in range(5)]
    dataset = PromptDataset(rows, [[i + 1] for i in range(5)], 0, 0)
    trainer = RayPPOTrainer(
        config,
        groups=WorkerGroups(
            actor_rollout=groups,
            reward=groups,
            reference=groups if config.uses_reference else None,
            critic=groups if config.uses_critic else None,
        ),
        train_set=dataset,
        val_set=dataset,
        pad_token_id=0,
        num_steps=4,
        record=record,
        checkpoints=CheckpointStore(tmp_path / "checkpoints", max_to_keep=None),
        **options,
    )
    return trainer, groups, record


def test_a_step_runs_its_stages_in_the_order_of_the_design(tmp_path):
    trainer, groups, _ = make_trainer(tmp_path, ["algorithm.use_kl_in_reward=true", "trainer.val_before_train=false"])
    trainer.fit()
    step = ["generate", "reward", "old_log_prob", "ref", "values", "update_critic", "update_actor"]
    plain = [*step, "update_weights", "metrics"]
    full = [*step, "save", "save", "update_weights", "validate", "reward", "metrics"]  # actor and critic are saved
    assert groups.calls == [*plain, *full, *plain, *full]


def test_the_reference_runs_only_with_a_kl_and_the_critic_only_with_gae(tmp_path):
    _, groups, _ = make_trainer(tmp_path, ["algorithm.adv_estimator=grpo"])
    trainer, groups, _ = make_trainer(tmp_path, ["algorithm.adv_estimator=grpo"])
    trainer.step = 1
    trainer.train_step()
    assert groups.calls == ["generate", "reward", "old_log_prob", "update_actor"]
    trainer, groups, _ = make_trainer(
        tmp_path, ["algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.use_kl_loss=true"]
    )
    trainer.step = 1
    trainer.train_step()
    assert groups.calls == ["generate", "reward", "old_log_prob", "ref", "update_actor"]


def test_in_bypass_mode_the_samplers_log_probabilities_stand_for_the_policys(tmp_path):
    bypass = ["algorithm.rollout_correction.bypass_mode=true", "trainer.limiter_probe_freq=1", "trainer.sample_freq=1"]
    trainer, groups, record = make_trainer(tmp_path, bypass)
    groups.fill["old_log_probs"] = -3.0  # of the policy after its updates, to which only samples and probe look
    trainer.fit()
    assert groups.calls.count("old_log_prob") == 2 * 4
    batch = groups.batches["update_actor"]
    assert torch.equal(batch.old_log_probs, batch.rollout_log_probs)
    assert torch.equal(batch.loss_mask, batch.response_mask)
    assert batch.rollout_is_weights is None
    assert not [name for line in record.lines.values() for name in line if name.startswith("rollout_corr/")]
    assert "limiter/probe/kl" in record.lines[1]
    assert "limiter/entropy/mean" not in record.lines[1]


def test_a_sampler_that_is_far_off_is_weighted_down_and_rejected(tmp_path):
    key = "algorithm.rollout_correction"
    reject = [f"{key}.rollout_rs=token_k1", f"{key}.rollout_rs_threshold=0.5_2.0"]
    trainer, groups, record = make_trainer(tmp_path, [f"{key}.rollout_is=sequence", *reject])
    groups.fill["old_log_probs"] = -1.5
    trainer.fit()
    batch = groups.batches["update_actor"]
    assert torch.allclose(batch.rollout_is_weights, torch.full((4, RESPONSE_TOKENS), float(torch.tensor(-1.5).exp())))
    assert batch.loss_mask.all()
    assert record.lines[1]["rollout_corr/kl"] == pytest.approx(0.5)
    groups.fill["old_log_probs"] = -2.0  # exp(-1) is below the band
    trainer.num_steps = 5
    trainer.fit()
    assert not groups.batches["update_actor"].loss_mask.any()
    assert record.lines[5]["rollout_corr/rollout_rs_masked_fraction"] == 1
    assert groups.batches["update_actor"].response_mask.all()


def test_the_kl_is_taken_off_the_reward_and_the_coefficient_that_was_used_is_logged(tmp_path):
    adaptive = ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.kl_coef=0.5"]
    trainer, groups, _ = make_trainer(tmp_path, [*adaptive, "algorithm.kl_ctrl.horizon=100"])
    trainer.step = 1
    metrics = trainer.train_step()
    rewards = groups.batches["update_actor"].token_level_rewards
    assert rewards is not None
    # KL per token is -1.0 - -1.5 = 0.5; at 0.5 each token loses 0.25, the second row's last gains its score of 1.
    torch.testing.assert_close(rewards[:2], torch.tensor([[-0.25, -0.25, -0.25], [-0.25, -0.25, 0.75]]))
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.5)
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.5
    # target 0.1: the error 0.5/0.1 - 1 is cut to 0.2, times 4 rows over 100.
    assert trainer.kl_ctrl.value == pytest.approx(0.5 * (1 + 0.2 * 4 / 100))


def test_critic_warmup_leaves_the_actor_alone_and_still_checkpoints(tmp_path):
    trainer, groups, record = make_trainer(tmp_path, ["trainer.critic_warmup=2", "trainer.val_before_train=false"])
    trainer.fit()
    assert groups.calls.count("update_critic") == 4
    assert groups.calls.count("update_actor") == 2
    assert groups.calls.index("save") < groups.calls.index("update_actor")
    assert "actor/lr" not in record.lines[2]
    assert "actor/lr" in record.lines[3]


def test_the_actors_schedule_begins_after_the_warmup_and_moves_once_a_step(tmp_path):
    cosine = [
        f"{role}.optim.{key}"
        for role in ("actor_rollout_ref.actor", "critic")
        for key in ("lr=1.0", "lr_warmup_steps=2")
    ]
    trainer, groups, _ = make_trainer(tmp_path, ["trainer.critic_warmup=1", *cosine])
    trainer.fit()
    assert [lr for role, lr in groups.learning_rates if role == "critic"] == [0.0, 0.5, 1.0, 1.0]
    assert [lr for role, lr in groups.learning_rates if role == "actor"] == [0.0, 0.5, 1.0]


def test_a_steps_figure_is_the_mean_over_its_updates_with_the_last_beside_it(tmp_path):
    trainer, _, _ = make_trainer(tmp_path, [])
    trainer.step = 1
    metrics = trainer.train_step()
    assert metrics["actor/ppo_kl"] == 2.0
    assert metrics["actor/ppo_kl_last"] == 3.0
    assert metrics["critic/vf_loss"] == 2.0


def test_a_metric_that_only_some_updates_have_is_averaged_over_those():
    updates = [{"actor/loss": 1.0, "limiter/push_cosine": 0.5}, {"actor/loss": 3.0}, {"actor/loss": 2.0}]
    for order in (updates, updates[::-1]):
        assert update_metrics(order) == {"actor/loss": 2.0, "limiter/push_cosine": 0.5}


def test_the_line_of_step_0_holds_validation_only(tmp_path):
    trainer, _, record = make_trainer(tmp_path, [])
    trainer.fit()
    assert record.lines[0] == {
        "val-core/copy/acc/mean@1": pytest.approx(0.4),
        "val-core/copy/acc/pass@1": pytest.approx(0.4),
        "val-aux/copy/reward/mean@1": pytest.approx(0.4),
    }
    assert "val-core/copy/acc/mean@1" not in record.lines[1]
    assert "val-core/copy/acc/mean@1" in record.lines[4]


def test_test_freq_minus_one_turns_the_final_validation_off_too(tmp_path):
    trainer, groups, _ = make_trainer(tmp_path, ["trainer.test_freq=-1", "trainer.val_before_train=false"])
    trainer.fit()
    assert "validate" not in groups.calls


def test_the_last_incomplete_batch_is_dropped_and_no_prompt_comes_twice_in_an_epoch(tmp_path):
    trainer, _, _ = make_trainer(tmp_path, [])
    seen = []
    for step in (1, 2):  # five prompts, two a step: two steps an epoch
        trainer.step = step
        seen += [row["prompt_index"] for row in trainer.next_prompts().extras]
    assert len(seen) == 8
    assert len(set(seen)) == 4
    trainer.step = 3
    assert trainer.epoch() == 1


def test_responses_to_a_prompt_share_its_uid_and_are_numbered(tmp_path):
    trainer, _, _ = make_trainer(tmp_path, [])
    trainer.step = 3
    batch = trainer.next_prompts()
    assert batch.uid[0] == batch.uid[1] != batch.uid[2]
    assert [row["sample_index"] for row in batch.extras] == [0, 1, 0, 1]


@pytest.mark.parametrize("name", ["rollout_log_probs", "old_log_probs", "values"])
def test_a_nan_under_the_mask_stops_the_run_and_names_field_step_and_row(tmp_path, name):
    trainer, groups, _ = make_trainer(tmp_path, [])
    groups.fill[name] = float("nan")
    trainer.step = 2
    with pytest.raises(
        DivergedError, match=rf"step 2: {name} is nan at token 0 of a response to prompt 2-\d+ \(data row \d\)"
    ):
        trainer.train_step()


def test_a_stop_finishes_the_step_saves_and_ends(tmp_path):
    stop = []
    trainer, groups, record = make_trainer(tmp_path, [], should_stop=lambda: bool(stop))
    update_actor = groups.update_actor
    groups.update_actor = lambda *arguments: (stop.append(1), update_actor(*arguments))[1]  # a signal in step 1
    assert trainer.fit() is False
    assert trainer.step == 1
    assert trainer.checkpoints.steps() == [1]
    assert record.lines.keys() == {0, 1}


def test_a_resume_writes_the_metrics_that_a_kill_behind_the_checkpoint_lost(tmp_path):
    trainer, _, record = make_trainer(tmp_path, [])
    trainer.fit()
    checkpoint, _ = trainer.checkpoints.newest_valid()
    assert checkpoint is not None
    again, groups, new = make_trainer(tmp_path, [])
    again.resume(checkpoint, last_recorded_step=3)
    assert groups.calls[:2] == ["load_optimizer", "load_optimizer"]
    without_time = {k: v for k, v in record.lines[4].items() if not k.startswith(("timing", "perf"))}
    assert {k: v for k, v in new.lines[4].items() if not k.startswith(("timing", "perf"))} == without_time
    again, _, new = make_trainer(tmp_path, [])
    again.resume(checkpoint, last_recorded_step=4)
    assert new.lines == {}
    assert again.step == 4


def test_a_resumed_kl_controller_goes_on_from_its_coefficient(tmp_path):
    adaptive = ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon=100"]
    trainer, _, _ = make_trainer(tmp_path, adaptive)
    trainer.fit()
    checkpoint, _ = trainer.checkpoints.newest_valid()
    assert checkpoint is not None
    again, _, _ = make_trainer(tmp_path, adaptive)
    again.resume(checkpoint, last_recorded_step=4)
    assert again.kl_ctrl.value == trainer.kl_ctrl.value != 0.001
