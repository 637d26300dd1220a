"""`governor replay` on a batch of a real run."""

import json
from pathlib import Path

import pytest

from config.load import compose_values, load_config, overrides_of, to_plain
from trainer.errors import CheckpointError, ConfigError, DataError
from trainer.main_ppo import run
from trainer.replay import replay, to_markdown

pytestmark = pytest.mark.usefixtures("ray_session")

RECORDED = [
    "experiment=copy_grpo",
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.rollout.dtype=bfloat16",
    "actor_rollout_ref.actor.clip_ratio=0.3",
    "algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.horizon=100",
    "trainer.total_training_steps=3",
    "trainer.save_freq=1",
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
    "trainer.limiter_probe_freq=1",
    "trainer.rollout_data_dir=true",
    "trainer.resource_pools.aside.nnodes=1",  # a replay opens the actor's pool alone
    "trainer.resource_pools.aside.n_gpus_per_node=1",
    "trainer.role_pools.ref=aside",
]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("recorded")
    assert run(load_config([*RECORDED, f"trainer.default_local_dir={root}"])) == 0
    return root


def test_the_first_row_equals_what_the_run_logged_and_a_setting_changes_it(recorded):
    table = replay(
        recorded / "rollouts/step_3",
        recorded / "checkpoints/global_step_2",
        ["actor_rollout_ref.actor.clip_ratio=0.01"],
    )
    logged = json.loads((recorded / "metrics.jsonl").read_text().splitlines()[-1])
    first, second = json.loads((recorded / "rollouts/step_3/replay.json").read_text())
    shared = {name for name in first if name in logged}
    assert len(shared) > 35
    assert {name: first[name] for name in shared} == {name: logged[name] for name in shared}
    assert second["actor/pg_clipfrac"] > first["actor/pg_clipfrac"]
    assert first["replay/distance"] > 0
    assert len(table.splitlines()) == 4
    assert "clip_ratio=0.01" in table


def test_the_rollout_correction_of_a_kept_batch_can_be_varied(recorded):
    key = "algorithm.rollout_correction"
    reject = [f"{key}.rollout_rs=null,seq_sum_k1", f"{key}.rollout_rs_threshold=1.003"]
    table = replay(recorded / "rollouts/step_1", None, [f"{key}.rollout_is=null,sequence", *reject])
    recorded_row, *rows = json.loads((recorded / "rollouts/step_1/replay.json").read_text())
    plain, rejected, weighted, both = rows  # as the grid goes: the last key is the quickest
    assert plain["actor/grad_norm"] == recorded_row["actor/grad_norm"]
    assert len({row["actor/grad_norm"] for row in rows}) == 4
    assert 0 < rejected["rollout_corr/rollout_rs_masked_fraction"] < 1
    assert rejected["rollout_corr/rollout_rs_masked_fraction"] == both["rollout_corr/rollout_rs_masked_fraction"]
    assert weighted["rollout_corr/rollout_is_mean"] != 1
    assert "| IS weight | rejected |" in table


def test_step_1_starts_from_the_runs_first_weights(recorded):
    replay(recorded / "rollouts/step_1", None, [])
    logged = json.loads((recorded / "metrics.jsonl").read_text().splitlines()[0])
    (first,) = json.loads((recorded / "rollouts/step_1/replay.json").read_text())
    assert first["actor/grad_norm"] == logged["actor/grad_norm"]


@pytest.mark.parametrize("step", [1, 3])
def test_a_checkpoint_of_another_step_is_refused(recorded, step):
    with pytest.raises(CheckpointError, match=rf"is of step {step}; .* started from step 2"):
        replay(recorded / "rollouts/step_3", recorded / f"checkpoints/global_step_{step}", [])


def test_no_checkpoint_is_refused_but_for_step_1(recorded):
    with pytest.raises(CheckpointError, match="name the checkpoint of step 2"):
        replay(recorded / "rollouts/step_3", None, [])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.adv_estimator=gae", "needs values"),
        ("data.seed=2", "a replay varies"),
        ("algorithm.rollout_correction.bypass_mode=true", "decides stage 4, which the kept batch has behind it"),
        ("actor_rollout_ref.actor.clip_ratio=-1", "must be greater than 0"),
        ("actor_rollout_ref.actor.clip_rato=0.1", "did you mean actor_rollout_ref.actor.clip_ratio"),
    ],
)
def test_a_setting_that_cannot_be_replayed_is_refused_before_anything_starts(recorded, override, message):
    with pytest.raises(ConfigError, match=message):
        replay(recorded / "rollouts/step_3", recorded / "checkpoints/global_step_2", [override])


def test_a_kl_needs_a_recorded_reference(tmp_path):
    short = [*RECORDED, "algorithm.use_kl_in_reward=false", "trainer.total_training_steps=1", "trainer.save_freq=-1"]
    assert run(load_config([*short, f"trainer.default_local_dir={tmp_path}"])) == 0
    with pytest.raises(ConfigError, match="needs ref_log_prob"):
        replay(tmp_path / "rollouts/step_1", None, ["actor_rollout_ref.actor.use_kl_loss=true"])


def test_a_folder_that_is_no_batch_is_told(tmp_path):
    with pytest.raises(DataError, match="is not a saved batch"):
        replay(tmp_path, None, [])


@pytest.mark.parametrize("experiment", ["copy_ppo", "copy_grpo", "gsm8k_smollm2"])
def test_the_overrides_of_a_recorded_configuration_give_it_back_and_let_keys_follow(experiment):
    changes = ["actor_rollout_ref.actor.clip_ratio=0.3", "actor_rollout_ref.actor.entropy_coeff=0.0"]
    plain = to_plain(load_config([f"experiment={experiment}", *changes]))
    overrides = overrides_of(plain)
    assert to_plain(load_config(overrides)) == plain
    assert not any(text.startswith("actor_rollout_ref.actor.clip_ratio_low") for text in overrides)
    changed = compose_values([*overrides, "actor_rollout_ref.actor.clip_ratio=0.1"])
    assert changed["actor_rollout_ref"]["actor"]["clip_ratio_high"] == 0.1


def test_the_table_leaves_out_what_no_setting_has():
    assert to_markdown([("a", {"actor/loss": 1.0}), ("b", {"actor/grad_norm": 2.0})]) == (
        "| setting | loss | grad norm |\n|---|---|---|\n| a | 1 | – |\n| b | – | 2 |\n"
    )
