"""`governor submit`: a run as a Ray job on a cluster, from the checks here to the exit code that comes back.

The job gets this Governor (its three packages, as Ray's `py_modules`) and the working directory, so the nodes need
Governor's dependencies and nothing else. Relative paths in the configuration mean files of the working directory, which
must be among those that are sent; absolute ones are the cluster's and are not looked for here.
"""

import asyncio
import contextlib
import fnmatch
import logging
import os
import shlex
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from config.faults import Fault
from config.load import ConfigFaults, check_values, compose_values, flatten, walk_keys
from trainer.errors import ConfigError, ResourceError, first_line
from trainer.ray_job import JobEnd, folder_faults, read_end

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

PACKAGES = tuple(Path(__file__).parents[1] / name for name in ("config", "trainer", "workers"))
NOT_SENT = (".*", "__pycache__", "*.egg-info", "outputs", "checkpoints", "wandb", "venv", "node_modules")
MAX_BYTES = 100 * 1024**2  # Ray's dashboard takes no larger package
SHOWN_LARGEST = 5
STOP_WAIT_VARIABLE = "RAY_JOB_STOP_WAIT_TIME_S"  # read by the job's supervisor, from the job's own environment
# Keys of files that the rules of a configuration look into.
READ_AT_START = ("reward.custom_reward_function.path", "reward.reward_model.model_path")
TAIL_CHARACTERS = 20_000
MAX_TRIES, RETRY_S, POLL_S = 30, 2.0, 0.5
AGENT_WAIT_S = 60.0
KILLED = JobEnd(137, "stopped, and killed before it had saved; the same command goes on from its newest checkpoint")


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """What the user asks for. Paths in it are relative to `working_dir`."""

    overrides: Sequence[str]
    config_name: str
    config_dir: str | None
    working_dir: Path
    exclude: Sequence[str] = ()  # further names or patterns that are not sent
    env: Sequence[str] = ()  # names of environment variables that go with the job
    stop_wait_s: int

    def entrypoint(self) -> str:
        """The job's command line for a POSIX shell, which `exec` replaces, so that a stop signal meets Python alone."""
        options = [] if self.config_name == "ppo_trainer" else ["--config-name", self.config_name]
        options += ["--config-dir", self.config_dir] if self.config_dir else []
        return "exec " + shlex.join(["python", "-m", "trainer.cli", "train", *options, *self.overrides])


# --- commands --------------------------------------------------------------------------------------------------------


def submit(submission: Submission, *, address: str | None, wait: bool) -> int:
    """Check, send and follow a job; its exit code, or with `wait` false 0 once it is accepted.

    Raises:
        ConfigError: a fault in the configuration, a file that would be missing, or too much to send; nothing was sent.
        ResourceError: the cluster cannot be reached, or it refuses the job.
    """
    files = check(submission)
    environment = _environment(submission)
    address, client = _connect(address)
    with tempfile.TemporaryDirectory() as folder:
        runtime_env = {
            "working_dir": str(_pack(submission.working_dir, files, Path(folder))),
            "py_modules": [str(path) for path in PACKAGES],
            "excludes": ["__pycache__"],
            "env_vars": environment,
        }
        with _requests_to(address):
            job_id = _send(client, submission.entrypoint(), runtime_env)
    say(f"Job {job_id} is sent to {address} with {len(files)} files of {submission.working_dir.resolve()}")
    if not wait:
        say(_hints(address, job_id))
        return 0
    return _follow(client, address, job_id)


def _send(client: "JobSubmissionClient", entrypoint: str, runtime_env: dict[str, Any]) -> str:
    """Send the job; its id. A head that has just started has no agent yet that takes jobs, and is asked again."""
    deadline = time.monotonic() + AGENT_WAIT_S
    while True:
        try:
            return client.submit_job(entrypoint=entrypoint, runtime_env=runtime_env)
        except RuntimeError as error:
            if "No available agent" not in str(error) or time.monotonic() > deadline:
                raise
        time.sleep(RETRY_S)


def follow(job_id: str, *, address: str | None) -> int:
    """Print a job's log from its beginning, follow it, and return the job's exit code."""
    address, client = _connect(address)
    with _requests_to(address):
        _info(client, job_id)
    return _follow(client, address, job_id)


def stop(job_id: str, *, address: str | None) -> int:
    """Stop a job: TERM, with which it finishes its step and saves, then Ray's KILL. 0 once it has ended."""
    address, client = _connect(address)
    with _requests_to(address):
        if not _info(client, job_id).status.is_terminal():
            client.stop_job(job_id)
            say(f"Job {job_id} gets TERM: it finishes its step and saves, as far as its --stop-wait allows …")
        while not (info := _info(client, job_id)).status.is_terminal():
            time.sleep(POLL_S)
        end = how_it_ended(info, client.get_job_logs(job_id)[-TAIL_CHARACTERS:])
    say(f"Job {job_id}: exit {end.code}: {end.reason}")
    return 0


def say(text: str) -> None:
    """A line about the job, to stderr: stdout is the job's log."""
    sys.stdout.flush()
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


# --- checks before anything is sent ----------------------------------------------------------------------------------


def check(submission: Submission) -> list[str]:
    """Check the configuration as `governor train` would on the cluster; the names of the files to send.

    Raises:
        ConfigError: with every fault found.
    """
    if not submission.working_dir.is_dir():
        raise ConfigError(f"--working-dir={submission.working_dir}: no such folder")
    files = files_to_send(submission.working_dir, submission.exclude)
    with contextlib.chdir(submission.working_dir):
        try:
            values = compose_values(
                submission.overrides, config_name=submission.config_name, config_dir=submission.config_dir
            )
            flat = flatten(values)
            with _without_faults_of_absent_files():
                check_values(values)
        except ConfigFaults as faults:
            raise ConfigError(str(faults)) from None
        faults = [
            *folder_faults(flat),
            *_path_faults(flat, submission.config_dir, files),
            *_package_faults(files),
        ]
    if faults:
        raise ConfigError(str(ConfigFaults(faults)))
    _check_size(submission.working_dir, files)
    return files


@contextlib.contextmanager
def _without_faults_of_absent_files() -> Iterator[None]:
    """Let pass that an absolute path is not there: it is the cluster's."""
    try:
        yield
    except ConfigFaults as error:
        faults = [fault for fault in error.faults if fault.key not in READ_AT_START or not _is_absent(fault.value)]
        if faults:
            raise ConfigFaults(faults) from error


def _is_absent(path: Any) -> bool:
    return Path(str(path)).is_absolute() and not Path(str(path)).exists()


def _path_faults(flat: dict[str, Any], config_dir: str | None, files: Sequence[str]) -> Iterator[Fault]:
    """Relative paths that name nothing among the files that are sent."""
    known = set(walk_keys())  # below open mappings nobody but the user's code knows what is a path
    named = [(key, value) for key, value in flat.items() if key in known and key.endswith(("path", "_files"))]
    for key, value in [*named, ("--config-dir", config_dir)]:
        for path in value if isinstance(value, list) else [value]:
            if not isinstance(path, str) or Path(path).is_absolute():
                continue
            name = os.path.normpath(path)
            if not any(name == "." or file == name or file.startswith(f"{name}/") for file in files):
                yield Fault(
                    key,
                    path,
                    "is not among the files that are sent from the working directory: name a file there that is not "
                    "excluded, or the absolute path of one that all nodes see",
                )


def _package_faults(files: Sequence[str]) -> Iterator[Fault]:
    """Packages in the working directory that Python would import instead of Governor's."""
    if Path.cwd() == PACKAGES[0].parent:
        return
    for package in PACKAGES:
        for name in (f"{package.name}.py", f"{package.name}/__init__.py"):
            if name in files:
                yield Fault(
                    "--working-dir",
                    name,
                    f"would be imported instead of Governor's package {package.name}: rename it, or leave it out with "
                    f"--exclude {name}",
                )


def _environment(submission: Submission) -> dict[str, str]:
    """The job's environment variables; values never appear in a message or on a command line."""
    if submission.stop_wait_s < 1:
        raise ConfigError(f"--stop-wait={submission.stop_wait_s}: must be at least 1 second")
    variables = {STOP_WAIT_VARIABLE: str(submission.stop_wait_s)}
    for name in submission.env:
        if not name.isidentifier():
            raise ConfigError(
                f"--env {name.split('=', 1)[0]}: takes the name of an environment variable alone; its value is read "
                "from here, so that it stands in no command line"
            )
        if name not in os.environ:
            raise ConfigError(f"--env {name}: no such environment variable here; set it, or leave the option out")
        variables[name] = os.environ[name]
    return variables


# --- the working directory -------------------------------------------------------------------------------------------


def files_to_send(folder: Path, exclude: Sequence[str] = ()) -> list[str]:
    """Names of the folder's files, relative and sorted: all of them, or in a Git work tree those that Git does not ignore.

    Left out are hidden files, virtual environments, and what a pattern of `NOT_SENT` or `exclude` matches: the name of
    a file or folder anywhere, or a whole relative path.
    """
    patterns = (*NOT_SENT, *(pattern.rstrip("/") for pattern in exclude))
    names = _git_files(folder)
    if names is None:
        names = list(_walk(folder, patterns))
    environments = tuple(name.removesuffix("pyvenv.cfg") for name in names if name.endswith("/pyvenv.cfg"))
    return sorted(
        name
        for name in set(names)  # Git lists a file with merge conflicts once for each side
        if (folder / name).is_file() and not _is_left_out(name, patterns) and not name.startswith(environments)
    )


def _git_files(folder: Path) -> list[str] | None:
    """Files that Git tracks or would add; None where the folder is in no work tree.

    Raises:
        ConfigError: it is in one, and Git cannot say what it ignores.
    """
    command = ["git", "-C", str(folder), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        if not any((place / ".git").exists() for place in (folder.resolve(), *folder.resolve().parents)):
            return None
        told = getattr(error, "stderr", b"").decode(errors="replace").strip() or str(error)
        raise ConfigError(
            f"--working-dir={folder}: Git cannot say which files it ignores, which must not be sent: {told}. Mend that, or "
            "name a folder that is in no work tree."
        ) from None
    return [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]


def _walk(folder: Path, patterns: Sequence[str]) -> Iterator[str]:
    for root, folders, names in os.walk(folder):
        above = Path(root).relative_to(folder)
        folders[:] = [name for name in folders if not _is_left_out((above / name).as_posix(), patterns)]
        yield from ((above / name).as_posix() for name in names)


def _is_left_out(name: str, patterns: Sequence[str]) -> bool:
    parts = name.split("/")
    heads = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
    return any(fnmatch.fnmatchcase(text, pattern) for pattern in patterns for text in (*parts, *heads))


def _check_size(folder: Path, files: Sequence[str]) -> None:
    sizes = {name: (folder / name).stat().st_size for name in files}
    total = sum(sizes.values())
    if total > MAX_BYTES:
        largest = sorted(sizes, key=lambda name: -sizes[name])[:SHOWN_LARGEST]
        lines = [f"  {sizes[name] / 1024**2:.0f} MiB {name}" for name in largest]
        raise ConfigError(
            "\n".join(
                [
                    f"--working-dir={folder}: {len(files)} files of {total / 1024**2:.0f} MiB would be sent, and Ray "
                    f"takes {MAX_BYTES // 1024**2} MiB. The largest:",
                    *lines,
                    "Leave files out with --exclude NAME, or submit from a smaller folder with --working-dir; models "
                    "and data belong on storage that all nodes see, named by absolute paths.",
                ]
            )
        )


def _pack(folder: Path, files: Sequence[str], out: Path) -> Path:
    """A zip file of the files. The same files make the same bytes, which Ray keeps under their hash and takes once.

    Raises:
        ConfigError: a file that cannot be read, or whose name is no text.
    """
    path = out / "working_dir.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as package:
        for name in files:
            about = zipfile.ZipInfo(name)  # with a fixed date
            about.compress_type = zipfile.ZIP_DEFLATED
            try:
                about.external_attr = (folder / name).stat().st_mode << 16
                package.writestr(about, (folder / name).read_bytes())
            except (OSError, UnicodeEncodeError) as error:
                raise ConfigError(
                    f"--working-dir={folder}: {name!r} cannot be sent ({error}); leave it out with --exclude"
                ) from None
    return path


# --- the cluster -----------------------------------------------------------------------------------------------------


def _connect(option: str | None) -> tuple[str, "JobSubmissionClient"]:
    """The address of the cluster's dashboard, and a client of its jobs.

    Raises:
        ConfigError: no address, or the extra is missing.
        ResourceError: nothing answers there, or it wants a token that is not here.
    """
    variables = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
    given = {"--address": option, **{name: os.environ.get(name) for name in variables}}
    source, address = next((item for item in given.items() if item[1]), ("--address", ""))
    if not address or not address.startswith(("http://", "https://")):
        raise ConfigError(
            f"{source}={address}: name the cluster's dashboard, for example --address http://HEAD:8265 (or "
            "RAY_API_SERVER_ADDRESS)"
        )
    try:
        import aiohttp  # noqa: F401
        import requests  # noqa: F401
        from ray.exceptions import AuthenticationError
        from ray.job_submission import JobSubmissionClient
    except ImportError as error:
        raise ConfigError(f"governor submit needs Ray's job client ({error}): pip install '.[cluster]'") from None
    for module in ("dashboard.modules.dashboard_sdk", "dashboard.modules.job.sdk", "_private.runtime_env.packaging"):
        logging.getLogger(f"ray.{module}").setLevel(logging.WARNING)
    with _requests_to(address):
        try:
            return address, JobSubmissionClient(address)
        except AuthenticationError as error:
            token = _token()
            if token is None:
                raise ResourceError(
                    f"{address} wants a token. Put the cluster's into RAY_AUTH_TOKEN or ~/.ray/auth_token; it is not "
                    f"shown here. Ray says: {first_line(error)}"
                ) from None
        return address, JobSubmissionClient(address, headers={"Authorization": f"Bearer {token}"})


def _token() -> str | None:
    """The token that Ray's own commands would send, which they do only with RAY_AUTH_MODE=token."""
    if os.environ.get("RAY_AUTH_MODE"):
        return None
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return token
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    return path.read_text(encoding="utf-8").strip() if path.is_file() else None


@contextlib.contextmanager
def _requests_to(address: str) -> Iterator[None]:
    """Errors of Ray's client in our words; and this address, over which Ray would prefer one of the environment."""
    from ray.exceptions import AuthenticationError

    names = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    except AuthenticationError as error:
        raise ResourceError(f"{address} refuses the token: {first_line(error)}") from None
    except OSError as error:
        raise ResourceError(
            f"No answer from {address}: {error}. Is the dashboard there, as in http://HEAD:8265?"
        ) from None
    except RuntimeError as error:
        raise ResourceError(f"{address} refuses: {str(error).strip().splitlines()[-1]}") from error
    finally:
        os.environ.update(before)


def _info(client: "JobSubmissionClient", job_id: str) -> Any:
    try:
        return client.get_job_info(job_id)
    except RuntimeError as error:
        if "404" in str(error):
            raise ConfigError(f"{job_id}: the cluster has no such job; `ray job list` shows those it has") from None
        raise


@dataclass(slots=True)
class JobLog:
    """A job's log, copied to stdout as it grows. A connection that broke goes on where it was."""

    length: int = 0
    tail: str = ""

    async def copy(self, client: "JobSubmissionClient", job_id: str) -> None:
        """Copy until the job ends or the connection does."""
        known = self.length
        async for text in client.tail_job_logs(job_id):
            new, known = text[known:], max(known - len(text), 0)
            if new:
                self.length += len(new)
                self.tail = (self.tail + new)[-TAIL_CHARACTERS:]
                sys.stdout.write(new)
                sys.stdout.flush()


def _follow(client: "JobSubmissionClient", address: str, job_id: str) -> int:
    """Copy the log until the job has ended, and return its exit code."""
    try:
        info, log = _copy_to_the_end(client, job_id)
    except KeyboardInterrupt:
        say(f"\nThe job goes on. {_hints(address, job_id)}")
        return 130
    except _Lost as error:
        raise ResourceError(
            f"No answer from {address}: {error}. The job may go on. {_hints(address, job_id)}"
        ) from None
    end = how_it_ended(info, log.tail)
    say(f"Job {job_id}: exit {end.code}: {end.reason}")
    return end.code


class _Lost(Exception):
    """The cluster did not answer for too long."""


def _copy_to_the_end(client: "JobSubmissionClient", job_id: str) -> tuple[Any, JobLog]:
    import aiohttp
    import requests

    log, tries = JobLog(), 0
    while True:
        length = log.length
        try:
            asyncio.run(log.copy(client, job_id))
            info = client.get_job_info(job_id)
            if info.status.is_terminal():
                return info, log
        except BrokenPipeError:  # of stdout: nobody reads the log any more
            raise
        except (aiohttp.ClientError, requests.RequestException, OSError, RuntimeError) as error:
            tries = 1 if log.length > length else tries + 1
            if tries >= MAX_TRIES:
                raise _Lost(str(error)) from error
        time.sleep(RETRY_S if tries else POLL_S)


def how_it_ended(info: Any, log: str) -> JobEnd:
    """The exit code and reason of a job that has ended, from what Ray knows and the end of its log.

    Ray's code is that of the entrypoint; a stopped job has none, and one that never started has neither.
    """
    told, status, code = read_end(log), str(info.status.value), info.driver_exit_code
    if status == "SUCCEEDED":
        return JobEnd(0, "done")
    if status == "STOPPED":
        return told or KILLED
    if code is None:
        reason = " ".join((info.message or "Ray gives no reason").split())
        return JobEnd(7 if "DIED" in (info.error_type or "") else 4, f"the cluster could not run the job: {reason}")
    code = 128 - code if code < 0 else code
    if told is not None and told.code == code:
        return told
    return JobEnd(code, "the entrypoint gave no reason; see the log")


def _hints(address: str, job_id: str) -> str:
    return (
        f"Follow it: governor submit --address {address} --follow {job_id}; stop it: "
        f"governor submit --address {address} --stop {job_id}"
    )
