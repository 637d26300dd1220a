"""`governor submit`: what is checked and sent, read without a cluster; jobs on a real head are in test_ray_jobs.py."""

import asyncio
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from trainer.cli import main
from trainer.errors import ConfigError
from trainer.ray_job import ENTRYPOINT_VARIABLE, JobEnd, read_end, say_end
from trainer.submit import JobLog, Submission, _copy_to_the_end, _pack, check, files_to_send, how_it_ended

SHARED = "trainer.default_local_dir=/shared/runs/a"
NOWHERE = "http://127.0.0.1:1"


def submission(folder: Path, *overrides: str, **options: Any) -> Submission:
    defaults: dict[str, Any] = {"config_name": "ppo_trainer", "config_dir": None, "stop_wait_s": 60}
    return Submission(overrides=overrides, working_dir=folder, **{**defaults, **options})


def write(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x = 1\n")
    return folder


# --- the configuration -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["data.sed=3", SHARED], "data.sed=3: no such key; did you mean data.seed?"),
        (["experiment=copy_grpo"], "for example trainer.default_local_dir=/shared/outputs/governor/copy_grpo"),
        ([SHARED, "trainer.rollout_data_dir=kept"], "trainer.rollout_data_dir=kept: is relative to the job's working"),
        ([SHARED, "actor_rollout_ref.model.path=models/m"], "actor_rollout_ref.model.path=models/m: is not among the"),
        ([SHARED, "actor_rollout_ref.model.path=outputs/m"], "outputs/m: is not among the files that are sent"),
        ([SHARED, "data.val_files=[../rows.jsonl]"], "data.val_files=../rows.jsonl: is not among the files"),
        ([SHARED, "reward.custom_reward_function.path=no.py"], "path=no.py: no such file"),
    ],
)
def test_a_fault_is_told_with_exit_2_before_any_address_is_asked(tmp_path, capsys, overrides, text):
    write(tmp_path, "outputs/m/config.json")
    assert main(["submit", "--address", NOWHERE, "--working-dir", str(tmp_path), "--", *overrides]) == 2
    assert text in capsys.readouterr().err


def test_files_of_the_cluster_need_not_be_here(tmp_path):
    absolute = [
        "reward.custom_reward_function.path=/shared/reward.py",
        "reward.custom_reward_function.batched=true",
        "reward.reward_model.enable=true",
        "reward.reward_model.model_path=/shared/judge",
        "reward.reward_model.combine=add",
        "actor_rollout_ref.model.path=/shared/model",
        "data.generator.name=null",
        "data.train_files=[/shared/rows.jsonl]",
        "data.val_files=[]",
    ]
    assert check(submission(tmp_path, SHARED, *absolute)) == []
    (tmp_path / "reward.py").write_text("def score(): ...\n")
    here = [*absolute, f"reward.custom_reward_function.path={tmp_path}/reward.py", "data.seed=-1"]
    with pytest.raises(ConfigError, match=r"data\.seed=-1: must be"):
        check(submission(tmp_path, SHARED, *here))
    with pytest.raises(ConfigError, match=r"has 1 fault(.|\n)*defines no such function; it has score"):
        check(submission(tmp_path, SHARED, *here[:-1]))


def test_relative_paths_mean_files_that_are_sent(tmp_path):
    write(tmp_path, "reward.py", "models/m/config.json", "mine/experiment/e.yaml")
    (tmp_path / "reward.py").write_text("def compute_score(): ...\n")
    (tmp_path / "mine/experiment/e.yaml").write_text(
        "# @package _global_\ndefaults: [copy_grpo, _self_]\ndata: {seed: 7}\n"
    )
    overrides = [
        "experiment=e",
        SHARED,
        "reward.custom_reward_function.path=reward.py",
        "actor_rollout_ref.model.path=./models/m",
    ]
    files = check(submission(tmp_path, *overrides, config_dir="mine"))
    assert files == ["mine/experiment/e.yaml", "models/m/config.json", "reward.py"]
    with pytest.raises(ConfigError, match=r"--config-dir=mine: is not among the files"):
        check(submission(tmp_path, *overrides, config_dir="mine", exclude=["mine"]))


def test_the_working_directory_itself_can_be_the_folder_of_ones_own_files(tmp_path):
    write(tmp_path, "experiment/e.yaml")
    (tmp_path / "experiment/e.yaml").write_text("# @package _global_\ndefaults: [copy_grpo, _self_]\n")
    assert check(submission(tmp_path, "experiment=e", SHARED, config_dir=".")) == ["experiment/e.yaml"]


def test_what_a_reward_functions_own_arguments_mean_is_not_guessed(tmp_path):
    assert check(submission(tmp_path, SHARED, "reward.custom_reward_function.reward_kwargs.json_path=a.b")) == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--multirun", "--", "ablation=limiters"], "--multirun: a sweep cannot be submitted"),
        (["--", "--multirun", "ablation=limiters"], "ablation=limiters: a sweep cannot be submitted"),
        (["--", "-m", "data.seed=1,2"], "-m: a sweep cannot be submitted"),
        (["--", "ablation=limiters"], "ablation=limiters: a sweep cannot be submitted"),
        (["--", "data.seed=1", "--config-name", "x"], "--config-name: options of governor submit stand before the --"),
    ],
)
def test_a_sweep_or_an_option_behind_the_dashes_is_told_as_such(capsys, arguments, text):
    assert main(["submit", "--address", NOWHERE, *arguments, SHARED]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("name", ["workers/__init__.py", "trainer.py"])
def test_a_package_that_would_hide_governors_is_refused(tmp_path, name):
    write(tmp_path, name, "config/experiment/mine.yaml")
    with pytest.raises(ConfigError, match=rf"--working-dir={name}: would be imported instead of Governor's package"):
        check(submission(tmp_path, SHARED))
    assert check(submission(tmp_path, SHARED, exclude=[name])) == ["config/experiment/mine.yaml"]


def test_governors_own_checkout_can_be_the_working_directory():
    assert "trainer/submit.py" in check(submission(Path(__file__).parents[2], SHARED))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--env", "GOVERNOR_NO_SUCH"], "--env GOVERNOR_NO_SUCH: no such environment variable here"),
        (["--env", "KEY=s3cret"], "--env KEY: takes the name of an environment variable alone"),
        (["--working-dir", "no/folder"], "--working-dir=no/folder: no such folder"),
        (
            ["--address", "head:6379"],
            "--address=head:6379: name the cluster's dashboard, for example --address http://",
        ),
        (["--address", "ray://head:10001"], "--address=ray://head:10001: name the cluster's dashboard"),
        ([], "RAY_ADDRESS=head:6379: name the cluster's dashboard"),
        (["--stop-wait", "-3"], "--stop-wait=-3: must be at least 1 second"),
        (["--follow", "raysubmit_1"], "raysubmit_1 is sent already and takes no overrides"),
    ],
)
def test_a_wrong_option_ends_with_exit_2_and_shows_no_secret(tmp_path, monkeypatch, capsys, options, text):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert main(["submit", *options, "--", SHARED]) == 2
    out, err = capsys.readouterr()
    assert text in err
    assert "s3cret" not in out + err


def test_a_cluster_that_does_not_answer_ends_with_exit_4(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:2")  # which Ray itself would prefer
    assert main(["submit", "--address", NOWHERE, "--", SHARED]) == 4
    assert f"No answer from {NOWHERE}" in capsys.readouterr().err


# --- the files -------------------------------------------------------------------------------------------------------


LEFT_OUT = [
    ".env",
    ".git2/x",
    "outputs/run/metrics.jsonl",
    "a/checkpoints/m",
    "a/__pycache__/m.pyc",
    "my env/pyvenv.cfg",
    "my env/lib/m.py",
]


def test_outputs_checkpoints_environments_and_hidden_files_are_not_sent(tmp_path):
    write(tmp_path, "b.py", "a/c.py", *LEFT_OUT)
    assert files_to_send(tmp_path) == ["a/c.py", "b.py"]


def test_excludes_are_names_anywhere_or_relative_paths(tmp_path):
    write(tmp_path, "data/x.parquet", "a/data/y", "a/z.log", "a/b/z", "b/z")
    assert files_to_send(tmp_path, ["data", "*.log", "a/b/"]) == ["b/z"]


def test_what_git_ignores_is_not_sent(tmp_path):
    write(tmp_path, "tracked.py", "new.py", "secret.txt", "sub/x.bin", "sub/y.py", "outputs/z")
    (tmp_path / ".gitignore").write_text("secret.txt\n*.bin\n")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    subprocess.run(["git", "-C", str(tmp_path), "add", "tracked.py"], check=True)
    assert files_to_send(tmp_path) == ["new.py", "sub/y.py", "tracked.py"]
    assert files_to_send(tmp_path / "sub") == ["y.py"]


def test_where_git_cannot_say_what_it_ignores_nothing_is_sent(tmp_path):
    write(tmp_path, "secret.txt", "sub/a.py")
    (tmp_path / ".git").write_text("gitdir: nowhere\n")
    with pytest.raises(ConfigError, match=r"--working-dir=.*: Git cannot say which files it ignores, .*nowhere"):
        files_to_send(tmp_path / "sub")


def test_too_much_to_send_is_told_with_the_largest_files(tmp_path):
    write(tmp_path, "small.py", "data/big.bin")
    with (tmp_path / "data/big.bin").open("wb") as file:
        file.truncate(101 * 1024**2)
    with pytest.raises(
        ConfigError, match=r"2 files of 101 MiB would be sent, and Ray takes 100 MiB(.|\n)*101 MiB data/big"
    ):
        check(submission(tmp_path, SHARED))
    assert check(submission(tmp_path, SHARED, exclude=["data"])) == ["small.py"]


def test_the_same_files_make_the_same_package(tmp_path):
    folder = write(tmp_path / "w", "a.py", "ä b/c.py")
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one = _pack(folder, files_to_send(folder), tmp_path / "one")
    write(folder, "a.py")  # touched, and not changed
    two = _pack(folder, files_to_send(folder), tmp_path / "two")
    assert one.read_bytes() == two.read_bytes()
    assert zipfile.ZipFile(one).namelist() == ["a.py", "ä b/c.py"]


def test_a_file_that_cannot_be_packed_is_named_with_the_way_out(tmp_path):
    name = os.fsdecode(b"caf\xe9.py")
    write(tmp_path, name)
    with pytest.raises(ConfigError, match=r"'caf\\udce9.py' cannot be sent .*leave it out with --exclude"):
        _pack(tmp_path, files_to_send(tmp_path), tmp_path)


def test_a_file_with_merge_conflicts_is_sent_once(tmp_path):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "init", "-q", "-b", "main", str(tmp_path)], check=True)
    for branch, text in (("main", "0"), ("other", "1"), ("main", "2")):
        subprocess.run([*git, "checkout", "-q", *([branch] if text == "2" else ["-B", branch])], check=True)
        (tmp_path / "a.py").write_text(text)
        subprocess.run([*git, "add", "a.py"], check=True)
        subprocess.run([*git, "commit", "-q", "-m", text], check=True)
    assert subprocess.run([*git, "merge", "-q", "other"], capture_output=True, check=False).returncode == 1
    assert files_to_send(tmp_path) == ["a.py"]


# --- the end of a job ------------------------------------------------------------------------------------------------


def test_the_last_line_is_one_line_and_is_read_back(capsys):
    say_end(JobEnd(8, "reward.py:\n  raised  ValueError"))
    line = capsys.readouterr().err
    assert line == "governor: exit 8: reward.py: raised ValueError\n"
    assert read_end(f"step 1\ngovernor: exit 0: forged\n{line}wandb: bye\n") == JobEnd(
        8, "reward.py: raised ValueError"
    )
    assert read_end("step 1\n say governor: exit 0: no\n") is None


LINE = "governor: exit 2: no such key\n"


@pytest.mark.parametrize(
    ("status", "code", "error", "log", "end"),
    [
        ("SUCCEEDED", 0, None, "", (0, "done")),
        ("FAILED", 2, "JOB_ENTRYPOINT_COMMAND_ERROR", LINE, (2, "no such key")),
        ("FAILED", 127, "JOB_ENTRYPOINT_COMMAND_ERROR", "python: not found", (127, "gave no reason")),
        ("FAILED", -9, "JOB_ENTRYPOINT_COMMAND_ERROR", LINE, (137, "gave no reason")),
        ("FAILED", None, "RUNTIME_ENV_SETUP_FAILURE", "", (4, "could not run the job: why")),
        ("FAILED", None, "JOB_SUPERVISOR_ACTOR_DIED", "", (7, "could not run the job: why")),
        ("STOPPED", None, None, "governor: exit 143: stopped by SIGTERM\n", (143, "stopped by SIGTERM")),
        ("STOPPED", None, None, "step 3/9\n", (137, "killed before it had saved")),
    ],
)
def test_the_exit_code_that_comes_back(status, code, error, log, end):
    pydantic_models = pytest.importorskip("ray.dashboard.modules.job.pydantic_models")
    info = pydantic_models.JobDetails(
        type="SUBMISSION", status=status, entrypoint="x", driver_exit_code=code, error_type=error, message="why"
    )
    found = how_it_ended(info, log)
    assert found.code == end[0]
    assert end[1] in found.reason


def test_a_log_whose_connection_broke_goes_on_where_it_was(capsys):
    class Cluster:
        """A log that can be read from its start, as Ray's can."""

        parts = ("ab\n", "cd\n", LINE)
        whole = 2

        async def tail_job_logs(self, job_id: str) -> AsyncIterator[str]:
            for part in self.parts[: self.whole]:
                yield part

    cluster, log = Cluster(), JobLog()
    asyncio.run(log.copy(cluster, "id"))  # pyright: ignore[reportArgumentType]
    cluster.whole, cluster.parts = 2, ("ab\ncd\ngov", LINE[3:])
    asyncio.run(log.copy(cluster, "id"))  # pyright: ignore[reportArgumentType]
    assert capsys.readouterr().out == "ab\ncd\n" + LINE
    assert read_end(log.tail) == JobEnd(2, "no such key")


def test_a_log_that_nobody_reads_any_more_ends_the_following(monkeypatch):
    class Closed:
        def write(self, text: str) -> None:
            raise BrokenPipeError

    class Cluster:
        async def tail_job_logs(self, job_id: str) -> AsyncIterator[str]:
            yield "step 1\n"

    monkeypatch.setattr(sys, "stdout", Closed())
    with pytest.raises(BrokenPipeError):
        _copy_to_the_end(Cluster(), "id")  # pyright: ignore[reportArgumentType]


# --- governor train inside a job -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("folder", "text"),
    [
        ("runs/a", "is relative to the job's working directory, which is deleted with the job"),
        ("{cwd}/runs/a", "lies in the job's working directory"),
    ],
)
def test_train_refuses_a_folder_that_vanishes_with_the_job(tmp_path, monkeypatch, capsys, folder, text):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(ENTRYPOINT_VARIABLE, json.dumps({"runtime_env": {"working_dir": "gcs://x.zip"}}))
    assert main(["train", f"trainer.default_local_dir={folder.format(cwd=tmp_path)}"]) == 2
    err = capsys.readouterr().err
    assert text in err
    assert "for example trainer.default_local_dir=/shared/runs/a" in err
    assert err.splitlines()[-1].startswith("governor: exit 2: A Ray job cannot run so")
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_code_is_the_last_line_too_behind_its_traceback(monkeypatch, capsys):
    monkeypatch.setenv(ENTRYPOINT_VARIABLE, "no json")
    assert main(["train", "trainer.default_local_dir=/shared/a"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[-1].startswith("governor: exit 1: JSONDecodeError: ")
