"""Runs whose sampler is bfloat16 beside a float32 policy: the two differ for real, and the correction acts."""

import json
from pathlib import Path
from typing import Any

import pytest

from config.load import load_config
from trainer.main_ppo import run

pytestmark = pytest.mark.usefixtures("ray_session")

KEY = "algorithm.rollout_correction"
SHORT = [
    "experiment=copy_grpo",
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.dtype=bfloat16",
    "trainer.total_training_steps=2",
    "trainer.save_freq=-1",
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
    "trainer.sample_freq=2",
    "trainer.limiter_probe_freq=2",
]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def train(root: Path, *overrides: str) -> list[dict[str, float]]:
    assert run(load_config([*SHORT, *overrides, f"trainer.default_local_dir={root}"])) == 0
    return lines_of(root / "metrics.jsonl")


def test_weights_and_rejection_act_and_the_samples_show_both(tmp_path: Path) -> None:
    reject = [f"{KEY}.rollout_rs=token_k1", f"{KEY}.rollout_rs_threshold=0.999_1.001"]
    for line in train(tmp_path, f"{KEY}.rollout_is=token", *reject):
        assert 1e-3 < line["rollout_corr/log_prob_diff_max"] < 1
        assert 0 < line["rollout_corr/k3_kl"] < 1e-2
        assert line["rollout_corr/ppl_ratio"] == pytest.approx(1, abs=0.02)
        assert 0 < line["rollout_corr/rollout_rs_masked_fraction"] < 1
        assert line["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=0.05)
        tokens = ("active", "high", "low", "dual", "zero_advantage", "ratio_bound")
        assert sum(line[f"limiter/tokens/{name}"] for name in tokens) == pytest.approx(1)
        assert line["limiter/loss/pg"] + line["limiter/loss/entropy"] == pytest.approx(line["actor/loss"])
    samples = lines_of(tmp_path / "samples.jsonl")
    acted = [
        (name, weight) for row in samples for name, weight in zip(row["acted"], row["rollout_is_weights"], strict=True)
    ]
    assert {abs(weight - 1) > 0.0009 for name, weight in acted if name == "rejected"} == {True}
    assert all(abs(weight - 1) < 0.0011 for name, weight in acted if name != "rejected")


def test_a_step_whose_tokens_are_all_rejected_is_a_step_without_an_update(tmp_path: Path) -> None:
    reject = [f"{KEY}.rollout_rs=seq_max_k2", f"{KEY}.rollout_rs_threshold=1e-18"]
    for line in train(tmp_path, f"{KEY}.rollout_is=sequence", f"{KEY}.rollout_is_batch_normalize=true", *reject):
        assert line["rollout_corr/rollout_rs_seq_masked_fraction"] == 1
        assert line["actor/num_updates"] == 0
        assert not {"actor/loss", "actor/grad_norm", "limiter/tokens/active"} & set(line)
        assert line["critic/score/max"] >= line["critic/score/mean"]


def test_bypass_mode_skips_stage_4_and_the_ratio_is_to_the_sampler(tmp_path: Path) -> None:
    lines = train(tmp_path, f"{KEY}.bypass_mode=true", "actor_rollout_ref.actor.ppo_mini_batch_size=8")
    for line in lines:
        # One update a step: to the policy before it, the ratio would be 1.
        assert 1e-4 < line["limiter/ratio/deviation"] < 0.1
        assert not {"actor/entropy", "limiter/entropy/mean"} & line.keys()
        assert not [name for name in line if name.startswith("rollout_corr/")]
    assert {"limiter/probe/kl", "limiter/probe/entropy_after"} <= lines[-1].keys()
    assert "limiter/probe/entropy_before" not in lines[-1]
    samples = lines_of(tmp_path / "samples.jsonl")
    assert all(row["old_log_probs"] == row["rollout_log_probs"] and "entropys" not in row for row in samples)
    assert "The four limiters" in (tmp_path / "report.html").read_text()
