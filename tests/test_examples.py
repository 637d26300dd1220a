"""The commands of the examples' READMEs: runs shortened to two steps, sweeps composed, which a test of their own runs."""

import re
import shlex
from pathlib import Path

import pytest

from config.load import load_config
from config.sweep import plan_sweep
from trainer.cli import main

ROOT = Path(__file__).parents[1]
COMMANDS = [
    (path.parent.name, line.strip())
    for path in sorted((ROOT / "examples").glob("*/README.md"))
    for line in re.findall(r"^ {4}(governor train .*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
]
RUNS = [(name, command) for name, command in COMMANDS if "--multirun" not in command]
SWEEPS = [(name, command) for name, command in COMMANDS if "--multirun" in command]


def test_every_example_has_a_command():
    folders = {path.name for path in (ROOT / "examples").iterdir() if path.is_dir()}
    assert folders == {name for name, _ in COMMANDS}


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize(("name", "command"), RUNS)
def test_an_example_runs(name, command, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    overrides = ["trainer.total_training_steps=2", f"trainer.default_local_dir={tmp_path}", "trainer.save_freq=-1"]
    assert main([*shlex.split(command)[1:], *overrides]) == 0
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize(("name", "command"), SWEEPS)
def test_an_examples_sweep_has_configurations_that_can_run(name, command):
    members = plan_sweep([word for word in shlex.split(command)[2:] if not word.startswith("-")]).members
    assert len(members) > 1
    for member in members:
        load_config(member.overrides)
