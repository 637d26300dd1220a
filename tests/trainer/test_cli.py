"""The console script: commands, exit codes, and what goes to stdout and stderr, all before Ray starts."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest

from config.load import check_values, load_config, read_yaml
from trainer.cli import main

GOVERNOR = str(Path(sys.executable).with_name("governor"))
# One process runs many commands, so that importing torch is paid once; each ends before Ray starts.
RUN_ALL = """
import contextlib, io, json, runpy, sys
from pathlib import Path
from trainer.cli import main

def run_module(argv):
    sys.argv = argv
    runpy.run_module(argv[0], run_name="__main__")

results = []
for argv in json.loads(sys.stdin.read()):
    before = set(Path().rglob("*"))
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = run_module(argv) if argv[:1] == ["trainer.main_ppo"] else main(argv)
        except SystemExit as end:
            code = end.code
    made = sorted(str(path) for path in set(Path().rglob("*")) - before)
    ray = sys.modules.get("ray")
    results.append([code, out.getvalue(), err.getvalue(), made, ray is not None and ray.is_initialized()])
sys.stdout.write(json.dumps(results))
"""


@dataclass(frozen=True)
class Result:
    """What a command did."""

    code: int
    out: str
    err: str
    made: list[str]  # paths that it made below its working folder
    ray_started: bool


COMMANDS = {
    "module": ["trainer.main_ppo", "data.sed=3"],  # first, while it is not imported yet
    "nothing": [],
    "version": ["--version"],
    "unknown command": ["trian"],
    "unknown option": ["train", "--fast"],
    "unknown key": ["train", "data.sed=3"],
    "two faults": ["train", "data.sed=3", "trainer.tset_freq=3"],
    "wrong value": ["train", "data.seed=-1"],
    "missing experiment": ["train", "experiment=nope"],
    "name outside": ["train", "trainer.experiment_name=../x"],
    "no data file": ["train", "data.generator.name=null", "data.train_files=[no.parquet]", "trainer.experiment_name=d"],
    "no model": ["train", "actor_rollout_ref.model.path=folder", "trainer.experiment_name=m"],
    "no critic model": [
        "train",
        "actor_rollout_ref.model.path=model",
        "critic.model.path=folder",
        "trainer.experiment_name=c",
    ],
    "no folder for the run": ["train", "trainer.default_local_dir=file/run"],
    "no reward file": ["train", "reward.custom_reward_function.path=no.py"],
    "markup": ["train", "data.seed='[bold]x[/bold]'"],
    "config": ["config", "experiment=copy_grpo"],
    "config refused": ["config", "data.sed=3"],
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """All commands, each run in one folder with a text file, an empty folder and the start of a model."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "file").write_text("x")
    (folder / "folder").mkdir()
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL],
        input=json.dumps(list(COMMANDS.values())),
        cwd=folder,
        env=environment(COLUMNS="40"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {name: Result(*result) for name, result in zip(COMMANDS, json.loads(done.stdout), strict=True)}


def environment(**changes: str) -> dict[str, str]:
    unwanted = ("COLUMNS", "NO_COLOR", "FORCE_COLOR", "PYTHONUNBUFFERED")  # the last hides what a late flush does
    kept = {name: value for name, value in os.environ.items() if name not in unwanted}
    return {**kept, "OMP_NUM_THREADS": "1", **changes}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_does_not_train_starts_no_ray(results: dict[str, Result], name: str) -> None:
    assert not results[name].ray_started


def test_without_a_command_the_usage_is_shown_with_exit_2(results: dict[str, Result]) -> None:
    result = results["nothing"]
    assert result.code == 2
    assert "governor train" in result.out + result.err


def test_version_is_that_of_the_package(results: dict[str, Result]) -> None:
    assert (results["version"].code, results["version"].out) == (0, metadata.version("governor-rl") + "\n")


@pytest.mark.parametrize("name", ["unknown command", "unknown option"])
def test_a_wrong_command_line_ends_with_exit_2_and_the_usage_on_stderr(results: dict[str, Result], name: str) -> None:
    assert (results[name].code, results[name].out) == (2, "")
    assert "usage:" in results[name].err
    assert COMMANDS[name][-1] in results[name].err


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("unknown key", "data.sed=3: no such key; did you mean data.seed?"),
        ("two faults", "trainer.tset_freq=3: no such key; did you mean trainer.test_freq?"),
        ("wrong value", "data.seed=-1: must be greater than or equal to 0"),
        ("missing experiment", "experiment=nope: no such file; there are "),
        ("name outside", "trainer.experiment_name=../x: must be at most 100 letters"),
        ("no reward file", "reward.custom_reward_function.path=no.py: no such file"),
        ("markup", "data.seed=[bold]x[/bold]: must be a whole number"),
        ("config refused", "data.sed=3: no such key; did you mean data.seed?"),
        ("module", "data.sed=3: no such key; did you mean data.seed?"),
    ],
)
def test_a_refused_configuration_ends_with_exit_2_on_stderr_and_makes_nothing(
    results: dict[str, Result], name: str, text: str
) -> None:
    result = results[name]
    assert (result.code, result.out, result.made) == (2, "", [])
    assert result.err.startswith("Error: The configuration has ")
    assert text in result.err  # whole, though the terminal has 40 columns


def test_all_faults_are_shown_at_once(results: dict[str, Result]) -> None:
    assert results["two faults"].err.splitlines()[0] == "Error: The configuration has 2 faults; nothing was started."
    assert len(results["two faults"].err.splitlines()) == 3


def test_a_missing_data_file_ends_with_exit_3(results: dict[str, Result]) -> None:
    result = results["no data file"]
    assert (result.code, result.err) == (3, "Error: no.parquet: no such file\n")


@pytest.mark.parametrize(
    ("name", "key"), [("no model", "actor_rollout_ref.model.path"), ("no critic model", "critic.model.path")]
)
def test_a_folder_without_a_model_ends_with_exit_2(results: dict[str, Result], name: str, key: str) -> None:
    result = results[name]
    assert result.code == 2
    assert result.err.startswith(f"Error: {key}=folder: no Hugging Face model there (config.json is missing)")


def test_a_run_directory_that_cannot_be_made_ends_with_exit_2(results: dict[str, Result]) -> None:
    result = results["no folder for the run"]
    assert (result.code, result.made) == (2, [])
    assert result.err.startswith("Error: trainer.default_local_dir=")


@pytest.mark.parametrize("name", ["no data file", "no model"])
def test_a_run_that_never_began_leaves_no_record(results: dict[str, Result], name: str) -> None:
    names = {Path(path).name for path in results[name].made}
    assert "config.yaml" not in names
    assert "metrics.jsonl" not in names


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_shows_a_traceback_or_writes_outside_outputs(results: dict[str, Result], name: str) -> None:
    assert "Traceback" not in results[name].err
    assert all(path.startswith("outputs") for path in results[name].made)


def test_config_prints_yaml_that_loads_back_equal(results: dict[str, Result], tmp_path: Path) -> None:
    result = results["config"]
    assert (result.code, result.err, result.made) == (0, "", [])
    path = tmp_path / "config.yaml"
    path.write_text(result.out, encoding="utf-8")
    assert check_values(read_yaml(path)) == load_config(["experiment=copy_grpo"])


def test_config_takes_files_of_the_users_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\ndefaults: [copy_ppo]\ndata: {seed: 11}\n")
    (tmp_path / "whole.yaml").write_text("defaults: [ppo_trainer, _self_]\ndata: {seed: 12}\n")
    assert main(["config", "--config-dir", str(tmp_path), "experiment=mine"]) == 0
    assert "\n  seed: 11\n" in capsys.readouterr().out
    assert main(["config", "--config-dir", str(tmp_path), "--config-name", "whole", "data.max_response_length=9"]) == 0
    assert "\n  seed: 12\n" in capsys.readouterr().out
    assert main(["config", "--config-dir", str(tmp_path / "no")]) == 2
    assert "--config-dir=" in capsys.readouterr().err


def test_overrides_and_options_may_come_in_any_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\ndefaults: [copy_ppo]\n")
    assert main(["config", "data.seed=3", "-cd", str(tmp_path), "experiment=mine", "trainer.nnodes=2"]) == 0
    out = capsys.readouterr().out
    assert "\n  seed: 3\n" in out
    assert "\n  nnodes: 2\n" in out


# --- as a process ----------------------------------------------------------------------------------------------------


def governor(*argv: str, cwd: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [GOVERNOR, *argv], cwd=cwd, env=environment(**changes), capture_output=True, text=True, check=False
    )


def test_the_script_works_from_any_folder_and_writes_plain_text_into_a_pipe(tmp_path: Path) -> None:
    for name in ("config", "trainer", "workers"):  # folders of these names must not shadow the packages
        (tmp_path / name).mkdir()
    done = governor("config", "data.sed=3", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "\x1b" not in done.stderr


def test_no_color_is_obeyed_and_a_narrow_terminal_breaks_no_key(tmp_path: Path) -> None:
    key = "actor_rollout_ref.actor.fsdp_config.reshard_after_froward"
    terminal = {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "40"}
    colored = governor("config", f"{key}=1", cwd=tmp_path, **terminal)
    plain = governor("config", f"{key}=1", cwd=tmp_path, **terminal, NO_COLOR="1")
    line = f"  {key}=1: no such key; did you mean actor_rollout_ref.actor.fsdp_config.reshard_after_forward?"
    for done in (colored, plain):
        assert line in done.stderr.splitlines()
    assert "\x1b[1;31mError:" in colored.stderr
    assert "\x1b[1;31m" not in plain.stderr


@pytest.mark.parametrize("command", [["config"], ["--version"], ["--help"]])
def test_a_closed_stdout_ends_the_command_without_noise(tmp_path: Path, command: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)  # as after `| head -1` has read its line
    try:
        done = subprocess.run(
            [GOVERNOR, *command], cwd=tmp_path, env=environment(), stdout=writer, stderr=subprocess.PIPE, check=False
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) in ((0, b""), (141, b""))
