"""The commands of the examples' READMEs: runs shortened to two steps, after those that prepare something; sweeps composed.

The files for clusters are checked as far as they can be without one.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from config.load import load_config
from config.schema import GovernorConfig
from config.sweep import plan_sweep
from trainer.cli import main
from trainer.submit import Submission, check

ROOT = Path(__file__).parents[1]
COMMANDS = [
    (path.parent.name, line.strip())
    for path in sorted((ROOT / "examples").glob("*/README.md"))
    for line in re.findall(r"^ {4}(governor train .*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
]
RUNS = [(name, command) for name, command in COMMANDS if "--multirun" not in command]
SWEEPS = [(name, command) for name, command in COMMANDS if "--multirun" in command]


def preparations(name: str) -> list[list[str]]:
    """The `python examples/…` lines of an example's README, as arguments."""
    text = (ROOT / "examples" / name / "README.md").read_text(encoding="utf-8")
    return [shlex.split(line) for line in re.findall(r"^ {4}python (examples/.*)$", text, re.MULTILINE)]


def test_every_example_has_a_command():
    folders = {path.name for path in (ROOT / "examples").iterdir() if path.is_dir()}
    assert folders == {name for name, _ in COMMANDS}


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize(("name", "command"), RUNS)
def test_an_example_runs(name, command, tmp_path, monkeypatch, request):
    if name == "vllm":
        request.getfixturevalue("needs_vllm")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    for arguments in preparations(name):
        subprocess.run([sys.executable, *arguments], check=True)
    overrides = ["trainer.total_training_steps=2", f"trainer.default_local_dir={tmp_path}/run", "trainer.save_freq=-1"]
    assert main([*shlex.split(command)[1:], *overrides]) == 0
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize(("name", "command"), SWEEPS)
def test_an_examples_sweep_has_configurations_that_can_run(name, command):
    members = plan_sweep([word for word in shlex.split(command)[2:] if not word.startswith("-")]).members
    assert len(members) > 1
    for member in members:
        load_config(member.overrides)


def checked(overrides: list[str], tmp_path: Path) -> GovernorConfig:
    """The configuration of a command for a cluster, which must also be one that `governor submit` would send."""
    check(
        Submission(overrides=overrides, config_name="ppo_trainer", config_dir=None, working_dir=tmp_path, stop_wait_s=1)
    )
    return load_config(overrides)


def test_the_commands_that_submit_are_accepted(tmp_path):
    text = (ROOT / "examples/cluster/README.md").read_text(encoding="utf-8")
    commands = re.findall(r"^ {4}governor submit .*-- (.*)$", text, re.MULTILINE)
    assert commands
    for command in commands:
        checked(shlex.split(command), tmp_path)


def test_the_kuberay_job_asks_for_the_devices_that_its_cluster_has(tmp_path):
    spec = yaml.safe_load((ROOT / "examples/cluster/rayjob.yaml").read_text(encoding="utf-8"))["spec"]
    program, command, *overrides = shlex.split(spec["entrypoint"])
    assert (program, command) == ("governor", "train")
    config = checked(overrides, tmp_path)
    cluster = spec["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert config.trainer.nnodes == workers["replicas"]
    assert config.trainer.n_gpus_per_node == int(limits["nvidia.com/gpu"])
    for group in (cluster["headGroupSpec"], workers):
        pod = group["template"]["spec"]
        (volume,), (mount,) = pod["volumes"], pod["containers"][0]["volumeMounts"]
        assert mount["name"] == volume["name"]
        assert Path(config.trainer.default_local_dir).is_relative_to(mount["mountPath"])
    assert int(yaml.safe_load(spec["runtimeEnvYAML"])["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]) > 3


def test_the_slurm_script_is_sound_and_its_command_is_accepted(tmp_path):
    script = ROOT / "examples/cluster/train.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True)
    linter = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([str(linter), str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    text = script.read_text(encoding="utf-8").replace("\\\n", " ")
    (command,) = re.findall(r"^governor train (.*) &$", text, re.MULTILINE)
    (usage,) = re.findall(r"^# +sbatch .* train.sbatch (.*)$", text, re.MULTILINE)
    values = {'"$@"': usage, '"$SLURM_NNODES"': "2", '"$SLURM_GPUS_ON_NODE"': "8"}
    for name, value in values.items():
        assert name in command
        command = command.replace(name, value)
    overrides = shlex.split(command)
    trainer = checked(overrides, tmp_path).trainer
    assert (trainer.nnodes, trainer.n_gpus_per_node) == (2, 8)
    in_readme = re.findall(
        r"^ {4}sbatch examples/cluster/train.sbatch (.*)$", (script.parent / "README.md").read_text(), re.M
    )
    assert in_readme == [usage]


# Stand-ins for the commands of the script: what they are called with goes to the file `calls`, a line each.
STAND_INS = {
    "hostname": "echo 10.0.0.1 fd00::1",
    "sleep": "exit",
    "ray": "exit",
    "srun": 'echo "srun $SRUN_CPUS_PER_TASK $*" >>calls',
    # The token; then how many nodes have joined, which are all from the third question on.
    "python": '[[ $2 == *secrets* ]] && exec echo token\necho "python $(grep -c ^python calls)" >>calls\n'
    "(($(grep -c ^python calls) < 3)) && exec echo 1\necho 2",
    "governor": 'echo "governor $*" >>calls\ntrap "exit 143" TERM\nfor _ in $(seq 300); do /bin/sleep 0.1; done',
}


def test_the_slurm_script_trains_once_all_nodes_have_joined_and_passes_a_signal_and_the_exit_code_on(tmp_path):
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    calls = tmp_path / "calls"
    calls.touch()
    slurm = {
        "SLURM_JOB_ID": "7",
        "SLURMD_NODENAME": "n0",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_CPUS_PER_TASK": "64",
    }
    process = subprocess.Popen(
        ["bash", str(ROOT / "examples/cluster/train.sbatch"), "data.seed=3"],
        cwd=tmp_path,
        env={**os.environ, **slurm, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )
    try:
        deadline = time.monotonic() + 30
        while "governor" not in calls.read_text():
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.1)
        time.sleep(0.5)  # for its trap and the script's
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 143
    finally:
        process.kill()
    lines = calls.read_text().splitlines()
    assert [line.split()[:2] for line in lines if line.startswith("srun")] == [["srun", "64"]] * 2
    asked = [index for index, line in enumerate(lines) if line.startswith("python")]
    assert len(asked) == 3
    train = next(index for index, line in enumerate(lines) if line.startswith("governor"))
    assert train > asked[-1]
    assert lines[train].split()[:4] == ["governor", "train", "data.seed=3", "trainer.nnodes=2"]
