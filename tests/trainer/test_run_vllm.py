"""Whole runs of `governor train` with vLLM as the sampler, each with a Ray of its own, as a user's has."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.usefixtures("needs_vllm"), pytest.mark.timeout(600)]


def train(root: Path, *overrides: str) -> list[dict[str, float]]:
    """Run to the end; the lines of metrics.jsonl."""
    command = [
        sys.executable,
        "-m",
        "trainer.cli",
        "train",
        "experiment=copy_grpo",
        "actor_rollout_ref.rollout.name=vllm",
        f"trainer.default_local_dir={root}",
        *overrides,
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=540, cwd=Path(__file__).parents[2], check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    limits = ["trainer.total_training_steps=60", "trainer.test_freq=60", "trainer.save_freq=60"]
    return train(tmp_path_factory.mktemp("learnt"), *limits)


def test_the_copy_task_is_learnt(learnt: list[dict[str, float]]) -> None:
    """Seen: a mean score of 0.975 over steps 51 to 60."""
    scores = [line["critic/score/mean"] for line in learnt if line["step"] > 0]
    assert len(scores) == 60
    assert sum(scores[:10]) / 10 < 0.1
    assert sum(scores[-10:]) / 10 > 0.9


def test_with_lora_the_engine_decodes_with_the_merged_weights(tmp_path: Path) -> None:
    """The adapter moves in each step, and sampler and trainer agree in each."""
    lora = ["actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.actor.use_kl_loss=true"]
    limits = ["actor_rollout_ref.actor.optim.lr=1e-2", "trainer.total_training_steps=3", "trainer.test_freq=-1"]
    lines = [line for line in train(tmp_path, *lora, *limits) if line["step"] > 0]
    assert max(line["rollout_corr/log_prob_diff_max"] for line in lines) < 1e-3
    assert [line["actor/kl_loss_last"] > 0.01 for line in lines] == [True] * 3


def test_an_engine_in_a_pool_of_its_own_gives_the_run_the_same_numbers(
    learnt: list[dict[str, float]], tmp_path: Path
) -> None:
    """The weights, 0.4 MB, reach it in several buckets after each of three steps."""
    key = "trainer.resource_pools.sampling"
    pool = [f"{key}.nnodes=1", f"{key}.n_gpus_per_node=1", "trainer.role_pools.rollout=sampling"]
    buckets = "actor_rollout_ref.rollout.update_weights_bucket_megabytes=0.1"
    lines = train(tmp_path, *pool, buckets, "trainer.total_training_steps=3", "trainer.test_freq=-1")
    timed = ("timing_s/", "timing_per_token_ms/", "perf/")
    for apart, together in zip(lines, learnt, strict=False):
        assert apart.items() <= together.items() | {(key, apart[key]) for key in apart if key.startswith(timed)}
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
