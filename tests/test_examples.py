"""The commands of the examples' READMEs, shortened to two steps, after those that prepare something."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.cli import main

ROOT = Path(__file__).parents[1]
COMMANDS = [
    (path.parent.name, line.strip())
    for path in sorted((ROOT / "examples").glob("*/README.md"))
    for line in re.findall(r"^ {4}(governor train .*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
]


def preparations(name: str) -> list[list[str]]:
    """The `python examples/…` lines of an example's README, as arguments."""
    text = (ROOT / "examples" / name / "README.md").read_text(encoding="utf-8")
    return [shlex.split(line) for line in re.findall(r"^ {4}python (examples/.*)$", text, re.MULTILINE)]


def test_every_example_has_a_command():
    folders = {path.name for path in (ROOT / "examples").iterdir() if path.is_dir()}
    assert folders == {name for name, _ in COMMANDS}


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize(("name", "command"), COMMANDS)
def test_an_example_runs(name, command, tmp_path, monkeypatch):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    for arguments in preparations(name):
        subprocess.run([sys.executable, *arguments], check=True)
    overrides = ["trainer.total_training_steps=2", f"trainer.default_local_dir={tmp_path}/run", "trainer.save_freq=-1"]
    assert main([*shlex.split(command)[1:], *overrides]) == 0
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 3
