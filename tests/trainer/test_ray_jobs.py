"""Jobs on a real Ray head on loopback, which these tests start and end: sent, followed, failed, stopped, resumed."""

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from config.load import load_config, read_yaml, to_plain

pytest.importorskip("aiohttp", reason="needs the extra cluster")
ROOT = Path(__file__).parents[2]
MARK = "GOVERNOR_TEST_HEAD"  # in the environment of every process of the head
STEPS = 6
SMALL = [
    "experiment=copy_grpo",
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.rollout.n=2",
    "trainer.device=cpu",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.sample_freq=-1",
    f"trainer.total_training_steps={STEPS}",
]
# Written into the working directory. Each of two processes scores four responses a step: from the third step of a process
# on it waits, where it is told so, until there is a file `go`.
REWARD = """
import os
import time
from pathlib import Path

calls = 0


def compute_score(data_source, solution_str, ground_truth, extra_info, folder, wait=False, fail=False, **texts):
    global calls
    calls += 1
    if fail:
        raise ValueError("this reward never works")
    Path(folder, "secret").write_text(os.environ.get("GOVERNOR_TEST_SECRET", "none"))
    while wait and calls > 8 and not Path(folder, "go").exists():
        time.sleep(0.05)
    return 1.0 if "1" in solution_str else 0.0
"""
HARD = {
    "spaces": "two  spaces, a comma; a [list] and {a: mapping}",
    "quotes": """it's "quoted" and `ticked`""",
    "shell": "a=b $HOME $(id) !x *.py ~ \\n # > /dev/null & |",
    "unicode": "größer als 3 €, 語",
    "lines": "one\ntwo",
    "list": ["a b", "c,d", "e='f'"],
    "number": "007",
}


@dataclass(frozen=True, slots=True)
class Head:
    """A running head: the address of its dashboard, its token, and a folder with the reward file to submit from."""

    address: str
    token: str
    folder: Path

    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        own = {"RAY_AUTH_TOKEN": self.token, "GOVERNOR_TEST_SECRET": "s3cret-value"}
        return {**kept, **own, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def start(self, *arguments: str) -> "Submitter":
        """`governor submit` in a process of its own."""
        return Submitter(
            [sys.executable, "-m", "trainer.cli", "submit", "--address", self.address, *arguments],
            cwd=self.folder,
            env=self.environment(),
        )

    def submit(self, *arguments: str, code: int) -> tuple[str, str]:
        """`governor submit` to its end, which must have this exit code; stdout and stderr."""
        return self.start(*arguments).end(code)


class Submitter:
    """A process of `governor submit`, whose output can be read while it runs."""

    def __init__(self, command: list[str], *, cwd: Path, env: dict[str, str]) -> None:
        self.files = [tempfile.TemporaryFile("w+") for _ in range(2)]  # noqa: SIM115
        self.process = subprocess.Popen(command, cwd=cwd, env=env, stdout=self.files[0], stderr=self.files[1])

    def output(self) -> tuple[str, str]:
        """Stdout and stderr so far."""
        for file in self.files:
            file.seek(0)
        return self.files[0].read(), self.files[1].read()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that its job does."""
        deadline = time.monotonic() + 150
        while time.monotonic() < deadline and self.process.poll() is None:
            if condition():
                return
            time.sleep(0.1)
        self.process.kill()
        pytest.fail(f"did not come: {self.output()}")

    def end(self, code: int) -> tuple[str, str]:
        """Wait for its end, which must have this exit code; stdout and stderr."""
        try:
            found = self.process.wait(200)
        finally:
            self.process.kill()
        out, err = self.output()
        assert found == code, err + out
        return out, err

    def job_id(self) -> str:
        """The id of the job that it has sent."""
        self.wait_until(lambda: "raysubmit_" in self.output()[1])
        return job_id_in(self.output()[1])


def job_id_in(text: str) -> str:
    return next(word for word in text.split() if word.startswith("raysubmit_"))


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    """A head with an address, ports and temporary files of its own, beside the tests' other Ray session."""
    port = free_port()
    folder = tmp_path_factory.mktemp("submitted_from")
    (folder / "reward.py").write_text(REWARD)
    # Ray's sockets lie below it, and their paths must be short.
    with tempfile.TemporaryDirectory(prefix="gov", ignore_cleanup_errors=True) as scratch:
        options = ["--head", "--port=0", f"--dashboard-port={port}", "--include-dashboard=true", "--num-cpus=2"]
        # The agent's port is a fixed one, which the agent of another head on this machine has; without it no job starts.
        options += [f"--dashboard-agent-listen-port={free_port()}"]
        options += ["--dashboard-host=127.0.0.1", f"--temp-dir={scratch}", "--disable-usage-stats", "--block"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        environment.pop("PYTHONPATH", None)
        token = secrets.token_hex(32)
        environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
        environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        with Path(scratch, "out").open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "ray.scripts.scripts", "start", *options],
                env={**environment, MARK: scratch},
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            wait_for_dashboard(port, process, Path(scratch, "out"))
            yield Head(f"http://127.0.0.1:{port}", token, folder)
        finally:
            end_processes_with(MARK, scratch)
            process.wait(10)


def free_port() -> int:
    """A port below those that the system gives to whoever asks for any, which Ray's other processes do meanwhile."""
    while True:
        port = 20_000 + secrets.randbelow(10_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def wait_for_dashboard(port: int, process: subprocess.Popen[bytes], out: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/api/version", timeout=5)
            return
        except urllib.error.HTTPError:  # it answers, and wants a token
            return
        except OSError:
            time.sleep(0.2)
    pytest.fail(f"no dashboard: {out.read_text()}")


def end_processes_with(name: str, value: str) -> None:
    """End the processes that have inherited this environment variable, and no other."""
    wanted = f"{name}={value}".encode()
    for number in (signal.SIGTERM, signal.SIGKILL):
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if wanted in (path / "environ").read_bytes().split(b"\0"):
                    os.kill(int(path.name), number)
            except (OSError, ValueError):
                continue
        time.sleep(1)


def steps(root: Path) -> list[int]:
    path = root / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line)["step"] for line in text.splitlines(keepends=True) if line.endswith("\n")]


def checkpoints(root: Path) -> set[int]:
    return {int(path.name.split("_")[-1]) for path in (root / "checkpoints").glob("global_step_*")}


def reward(folder: Path, **more: object) -> list[str]:
    key = "reward.custom_reward_function"
    values = {"folder": str(folder), **more}
    return [
        f"{key}.path=reward.py",
        "reward.timeout_s=100",
        *(f"{key}.reward_kwargs.{name}={in_hydra(value)}" for name, value in values.items()),
    ]


def in_hydra(value: object) -> str:
    """A value in Hydra's override grammar."""
    match value:
        case str():
            return "'" + value.replace("\\'", "\\\\'").replace("'", "\\'") + "'"
        case list():
            return f"[{','.join(map(in_hydra, value))}]"
        case _:
            return json.dumps(value)


def test_a_job_runs_what_was_submitted_and_ends_with_0(head, tmp_path, monkeypatch):
    root = tmp_path / "run"
    overrides = [
        *SMALL,
        *reward(tmp_path, **HARD),
        f"trainer.default_local_dir={root}",
        "trainer.total_training_steps=2",
    ]
    out, err = head.submit("--env", "GOVERNOR_TEST_SECRET", "--", *overrides, code=0)
    assert out.splitlines()[-1] == "governor: exit 0: done"
    assert "step 2/2" in out
    assert "exit 0: done" in err
    state = json.loads((root / "run.json").read_text())
    assert (state["state"], state["exit_code"]) == ("done", 0)
    assert steps(root) == [1, 2]
    assert {path.name for path in root.iterdir()} >= {"config.yaml", "updates.jsonl", "logs", "report.html"}
    resolved = read_yaml(root / "config.yaml")
    kwargs = resolved["reward"]["custom_reward_function"]["reward_kwargs"]
    assert {name: kwargs[name] for name in HARD} == HARD
    monkeypatch.chdir(head.folder)
    assert resolved == to_plain(load_config(overrides))
    assert (tmp_path / "secret").read_text() == "s3cret-value"
    assert "s3cret" not in out + err
    assert head.token not in out + err


def test_a_failure_on_the_cluster_comes_back_with_its_own_code(head, tmp_path):
    root = tmp_path / "run"
    overrides = [*SMALL, *reward(tmp_path, fail=True), f"trainer.default_local_dir={root}"]
    _, err = head.submit("--no-wait", "--", *overrides, code=0)
    job_id = job_id_in(err)
    assert f"--follow {job_id}" in err
    assert f"--stop {job_id}" in err
    missing = "actor_rollout_ref.model.path=/no/such/model"
    out, _ = head.submit("--", *SMALL, missing, f"trainer.default_local_dir={tmp_path / 'missing'}", code=2)
    assert out.splitlines()[-1].startswith(f"governor: exit 2: {missing}: no Hugging Face model there")
    out, err = head.submit("--follow", job_id, code=8)
    assert "this reward never works" in out.splitlines()[-1]
    assert "exit 8: " in err
    _, err = head.submit("--stop", job_id, code=0)  # which has ended
    assert "exit 8: " in err
    _, err = head.submit("--follow", "raysubmit_none", code=2)
    assert "the cluster has no such job" in err


def test_a_stopped_job_keeps_its_newest_checkpoint_and_the_same_command_goes_on(head, tmp_path):
    root = tmp_path / "run"
    command = ["--", *SMALL, *reward(tmp_path, wait=True), "trainer.save_freq=2", f"trainer.default_local_dir={root}"]

    # Its third step waits, so that Ray kills it before it can save: what save_freq has kept stays.
    submitter = head.start("--stop-wait", "1", *command)
    submitter.wait_until(lambda: steps(root) == [1, 2] and checkpoints(root) == {2})
    job_id = submitter.job_id()
    submitter.process.send_signal(signal.SIGINT)
    _, err = submitter.end(130)
    assert "The job goes on. Follow it: governor submit --address" in err
    _, err = head.submit("--stop", job_id, code=0)
    assert "exit 137: stopped, and killed before it had saved" in err
    assert checkpoints(root) == {2}

    # On from step 2. Its own third step, the fifth, waits until the signal is there, which saves it.
    submitter = head.start(*command)
    submitter.wait_until(lambda: steps(root) == [1, 2, 3, 4])
    stopper = head.start("--stop", submitter.job_id())
    submitter.wait_until(lambda: "SIGTERM" in submitter.output()[0])
    (tmp_path / "go").touch()
    out, _ = submitter.end(143)
    assert "Going on from step 2" in out
    assert out.splitlines()[-1] == "governor: exit 143: stopped by SIGTERM"
    stopper.end(0)
    assert checkpoints(root) == {2, 4, 5}

    out, _ = head.submit(*command, code=0)
    assert "Going on from step 5" in out
    assert steps(root) == list(range(1, STEPS + 1))
    assert checkpoints(root) == {2, 4, 5, 6}


def test_rays_own_command_flattens_the_code_and_the_last_line_keeps_it(head):
    command = [sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--address", head.address]
    command += ["--working-dir", str(ROOT), "--", "python", "-m", "trainer.cli", "train"]
    done = subprocess.run(
        command, env={**head.environment(), "RAY_AUTH_MODE": "token"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("governor: "))
    assert line.startswith("governor: exit 2: A Ray job cannot run so; nothing was started. trainer.default_local_dir=")
