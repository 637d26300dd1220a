"""METRICS.md against what runs log."""

import itertools
import json
import re
from pathlib import Path

import pytest

from config.load import load_config
from trainer.main_ppo import run

GLOSSARY = (Path(__file__).parents[2] / "METRICS.md").read_text(encoding="utf-8")


def names() -> list[str]:
    """Names of the glossary, `{a,b}` spelled out, `{x}` kept."""
    found = []
    for cell in re.findall(r"^\| \**`([^`]+)`\** \|", GLOSSARY, re.MULTILINE):
        parts = re.split(r"(\{[^}]*,[^}]*\})", cell)
        choices = [part[1:-1].split(",") if part.startswith("{") and "," in part else [part] for part in parts]
        found += ["".join(chosen) for chosen in itertools.product(*choices)]
    return found


def matches(name: str, metric: str) -> bool:
    pattern = re.escape(name)
    return re.fullmatch(re.sub(r"\\\{\w+\\\}", "[^/]+", pattern), metric) is not None


@pytest.mark.usefixtures("ray_session")
def test_every_metric_that_a_run_logs_stands_in_the_glossary_and_the_other_way_round(tmp_path):
    overrides = [
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.rollout_correction.rollout_is=token",
        "algorithm.rollout_correction.rollout_rs=token_k1",
        "algorithm.rollout_correction.rollout_rs_threshold=0.5_2.0",
        "trainer.limiter_probe_freq=1",
        "reward.reward_manager.name=dapo",
        "reward.reward_kwargs.overlong_buffer_cfg.enable=true",
        "reward.reward_kwargs.overlong_buffer_cfg.len=3",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "trainer.total_training_steps=1",
        "actor_rollout_ref.rollout.val_kwargs.n=2",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
        f"trainer.default_local_dir={tmp_path}",
    ]
    assert run(load_config(overrides)) == 0
    lines = [
        json.loads(line)
        for name in ("metrics.jsonl", "updates.jsonl")
        for line in (tmp_path / name).read_text().splitlines()
    ]
    logged = {key for line in lines for key in line} - {"step", "role", "update"}
    known = names()
    unexplained = {metric for metric in logged if not any(matches(name, metric) for name in known)}
    assert not unexplained
    elsewhere = (
        "perf/max_memory", "perf/mfu/actor", "reward/model_score", "val-core/{source}/reward", "val-core/{source}/acc/maj",
    )  # fmt: skip
    unseen = {name for name in known if not any(matches(name, metric) for metric in logged)}
    assert {name for name in unseen if not name.startswith(elsewhere)} == set()
