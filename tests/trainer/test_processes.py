"""Runs in processes of their own: signals, two nodes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "trainer.cli", "train"]
SMALL = [
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
    "trainer.sample_freq=-1",
]


def start(root: Path, *overrides: str, **environment: str) -> subprocess.Popen[str]:
    command = [*COMMAND, *SMALL, f"trainer.default_local_dir={root}", *overrides]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def wait_for_step(root: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    path = root / "metrics.jsonl"
    while time.monotonic() < deadline:
        if path.exists() and len(path.read_text().splitlines()) >= step:
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    pytest.fail(f"step {step} was not reached in time")


def lines(path: Path) -> list[dict[str, float]]:
    timed = ("timing", "perf")
    return [
        {key: value for key, value in json.loads(line).items() if not key.startswith(timed)}
        for line in path.read_text().splitlines()
    ]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_finishes_the_step_saves_and_the_same_command_goes_on(tmp_path, number, code):
    process = start(tmp_path, "trainer.total_training_steps=200")
    wait_for_step(tmp_path, 2, process)
    # A terminal sends INT to the whole group, Ray's own processes included; kill and ray job stop send TERM to one.
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert "Stopped and saved" in out
    steps = len(lines(tmp_path / "metrics.jsonl"))
    assert [path.name for path in (tmp_path / "checkpoints").glob("global_step_*")] == [f"global_step_{steps}"]
    state = json.loads((tmp_path / "run.json").read_text())
    assert (state["state"], state["exit_code"]) == ("stopped", code)
    again = start(tmp_path, f"trainer.total_training_steps={steps + 1}")
    out, err = again.communicate(timeout=120)
    assert again.returncode == 0, err
    assert f"Going on from step {steps}" in out
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == list(range(1, steps + 2))


def test_the_second_signal_ends_the_run_at_once_with_the_code_of_signals(tmp_path):
    """While the driver waits for Ray, as it does nearly always."""
    here = tmp_path / "here"
    function = f"import pathlib, time\n\ndef compute_score(**_):\n    pathlib.Path({str(here)!r}).touch()\n    time.sleep(100)\n"
    (tmp_path / "slow.py").write_text(function)
    reward = f"reward.custom_reward_function.path={tmp_path / 'slow.py'}"
    process = start(tmp_path / "run", reward, "reward.timeout_s=200", "trainer.total_training_steps=2")
    deadline = time.monotonic() + 120
    while not here.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert "once more ends it at once" in out + err
    state = json.loads((tmp_path / "run/run.json").read_text())
    assert (state["state"], state["exit_code"], state["reason"]) == ("failed", 143, "SIGTERM, twice")


def places(root: Path, prefix: str = "") -> set[str]:
    """The nodes that a pool's two processes ran on."""
    logs = [(root / f"logs/{prefix}device_{rank}.log").read_text() for rank in (0, 1)]
    return {next(word for word in log.split() if word.startswith("node_id=")) for log in logs}


def test_two_nodes_of_a_cluster_train_like_two_devices_of_one(tmp_path, monkeypatch):
    """Both nodes in one pool, and each with a pool of its own, the second for the rollout."""
    from ray.cluster_utils import Cluster

    for name in [name for name in os.environ if name.startswith("RAY_") and "AUTH" not in name]:
        monkeypatch.delenv(name)
    short = "trainer.total_training_steps=2"
    one_pool = ["trainer.nnodes=2"]
    sampling = "trainer.resource_pools.sampling"
    two_pools = ["trainer.n_gpus_per_node=2", f"{sampling}.nnodes=1", f"{sampling}.n_gpus_per_node=2"]
    two_pools += ["trainer.role_pools.rollout=sampling"]
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        for name, overrides in (("nodes", one_pool), ("pools", two_pools)):
            process = start(tmp_path / name, *overrides, short, RAY_ADDRESS=cluster.address)
            out, err = process.communicate(timeout=240)
            assert process.returncode == 0, err + out
    finally:
        cluster.shutdown()
    assert len(places(tmp_path / "nodes")) == 2
    training, rollout = places(tmp_path / "pools"), places(tmp_path / "pools", "sampling_")
    assert (len(training), len(rollout), len(training | rollout)) == (1, 1, 2)
    process = start(tmp_path / "devices", "trainer.n_gpus_per_node=2", short)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err + out
    expected = lines(tmp_path / "devices/metrics.jsonl")
    assert lines(tmp_path / "nodes/metrics.jsonl") == expected
    assert lines(tmp_path / "pools/metrics.jsonl") == expected
