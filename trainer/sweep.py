"""`governor train --multirun`: the members of a sweep one after another, each a process and a run directory of its own.

A member that fails does not stop the others. Starting the sweep again passes over what is finished and goes on with what
was cut. `sweep.json` in the sweep's folder says how each member ended; what a member printed to stderr lies beside its
folder.
"""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config.load import ConfigFaults, load_config, read_yaml
from config.schema import GovernorConfig
from config.sweep import FOLDER_KEY, NAME_KEY, SWEEP_FOLDER_KEY, SweepPlan, plan_sweep, quoted_override, safe_name
from trainer.display import Display
from trainer.errors import ConfigError, ResourceError
from trainer.run_dir import RATE_KEYS, SAFE_KEYS, RunDir, last_step

SHOWN_ERROR_LINES = 20
SCORE, SCORE_WINDOW = "critic/score/mean", 10
POLL_S = 0.5


@dataclass(slots=True)
class Job:
    """A member with its run directory, and how it went."""

    name: str
    folder: Path
    overrides: list[str]
    config: GovernorConfig
    state: str = "not started"  # done, done before, failed, stopped
    exit_code: int | None = None
    reason: str | None = None
    seconds: float | None = None

    @property
    def errors(self) -> Path:
        """What the member's process writes to stderr."""
        return self.folder.with_name(f"{self.folder.name}.stderr.txt")

    def command(self) -> list[str]:
        """The command line of its process."""
        return [sys.executable, "-m", "trainer.cli", "train", *self.overrides]

    def end(self, code: int, *, stopped: bool, started: float) -> None:
        """Note how its process ended."""
        self.exit_code, self.seconds = code, round(time.time() - started, 1)
        self.state = "done" if code == 0 else "stopped" if stopped or code in (130, 143) else "failed"
        self.reason = None if code == 0 else self._reason(code, started)

    def _reason(self, code: int, started: float) -> str:
        record = self.folder / "run.json"
        if record.exists() and record.stat().st_mtime >= started:
            known = json.loads(record.read_text(encoding="utf-8"))
            if known["state"] in ("failed", "stopped") and known.get("reason"):
                return short_reason(str(known["reason"]))
        if self.state == "failed" and (lines := self.last_errors()):
            return lines[-1]
        return f"{signal.Signals(code - 128).name}" if code > 128 else f"exit code {code}"

    def last_errors(self) -> list[str]:
        """The end of what it wrote to stderr, without empty lines."""
        if not self.errors.exists():
            return []
        text = self.errors.read_text(encoding="utf-8", errors="replace")
        return [line.rstrip() for line in text.splitlines() if line.strip()][-SHOWN_ERROR_LINES:]


def short_reason(reason: str) -> str:
    """The line of an error's text that says most: the first, and of an error that Ray brought from a worker the last."""
    lines = [line for line in reason.splitlines() if line.strip()] or [""]
    return lines[-1 if "ray::" in lines[0] else 0].strip()


def run_sweep(overrides: Sequence[str], *, config_name: str = "ppo_trainer", config_dir: str | None = None) -> int:
    """Run all members, and return 0, 1 if one failed, or 130 and 143 when a signal stopped the sweep.

    INT and TERM go on to the member that runs, which finishes its step and saves; no other is started.

    Raises:
        ConfigError: a fault in the configuration of any member, before the first one starts.
        ResourceError: another sweep runs in the folder.
    """
    try:
        plan = plan_sweep(overrides, config_dir=config_dir)
    except ConfigFaults as faults:
        raise ConfigError(str(faults)) from None
    root, jobs = _jobs(plan, config_name, config_dir)
    display = Display(num_steps=0, console=True)
    with _only_sweep_in(root):
        for job in jobs:
            if _is_finished(job):
                job.state, job.exit_code = "done before", 0
        waiting = [job for job in jobs if job.exit_code is None]
        display.say(f"Sweep of {len(jobs)} runs in {root}, {len(jobs) - len(waiting)} of them done before")
        _write_record(root, jobs)
        if plan.launcher:
            from trainer.sweep_launcher import launch

            received = launch(waiting, plan.launcher, root)
        else:
            received = _run_one_by_one(waiting, jobs, root, display)
        _write_record(root, jobs)
    _show_end(root, jobs, display)
    if received is not None:
        return 128 + received
    return 0 if all(job.exit_code == 0 for job in jobs) else 1


def _run_one_by_one(waiting: Sequence[Job], jobs: Sequence[Job], root: Path, display: Display) -> int | None:
    """Run the jobs on this machine; the signal that stopped them, if one did."""
    with MemberProcess() as process:
        for number, job in enumerate(waiting, 1):
            _wait_until_free(job.folder, process, display)
            if process.received is not None:
                break
            display.say(f"\n[{number}/{len(waiting)}] {job.name}, seed {job.config.data.seed}: {job.folder}")
            started = time.time()
            code = process.run(job.command(), job.errors)
            job.end(code, stopped=process.received is not None, started=started)
            _write_record(root, jobs)
            if job.state == "failed":
                display.notice(f"{job.name}, seed {job.config.data.seed} failed with exit code {code}:")
                for line in job.last_errors():
                    display.notice(f"  {line}")
        return process.received


class MemberProcess:
    """Runs members, one at a time, and passes INT and TERM on to the one that runs.

    A member has a session of its own: a terminal sends INT to all of its processes, and a second one would end the member
    at once.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._passed_on = False
        self._process: subprocess.Popen[bytes] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "MemberProcess":
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handler
            self._before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def run(self, command: Sequence[str], errors: Path) -> int:
        """The exit code of a command, 128 + n where signal n ended it; its stderr goes to the file."""
        if self.received is not None:
            return 128 + self.received
        errors.parent.mkdir(parents=True, exist_ok=True)
        with errors.open("wb") as file:
            self._process = subprocess.Popen(command, stderr=file, start_new_session=True)
        if self.received is not None and not self._passed_on:  # it came while the process was being made
            self._process.send_signal(self.received)
        code = self._process.wait()
        self._process = None
        return code if code >= 0 else 128 - code

    def _handle(self, number: int, _: Any) -> None:
        self.received = number
        if self._process is not None:
            self._process.send_signal(number)
            self._passed_on = True


# --- before the start ------------------------------------------------------------------------------------------------


def _jobs(plan: SweepPlan, config_name: str, config_dir: str | None) -> tuple[Path, list[Job]]:
    """The sweep's folder, and its members with their folders, all checked.

    Raises:
        ConfigError: with all faults of all members.
    """
    faults: dict[str, list[str]] = {}
    configs: list[GovernorConfig | None] = []
    for member in plan.members:
        try:
            configs.append(load_config(member.overrides, config_name=config_name, config_dir=config_dir))
        except ConfigFaults as error:
            configs.append(None)
            for line in str(error).splitlines()[1:]:
                faults.setdefault(line.strip(), []).append(member.name)
    num_members = len({member.name for member in plan.members})
    _raise_faults(faults, num_members=num_members)
    found = [config for config in configs if config is not None]
    names = {config.trainer.experiment_name for config in found}
    sweep_name = plan.name or (names.pop() if len(names) == 1 else "sweep")
    root = Path(plan.folder or f"outputs/{found[0].trainer.project_name}/sweeps/{sweep_name}")
    options = [f"--config-name={config_name}", *([f"--config-dir={config_dir}"] if config_dir else [])]
    jobs: list[Job] = []
    for member, config in zip(plan.members, found, strict=True):
        folder = root / member.name / f"seed={config.data.seed}"
        run_name = _run_name(f"{sweep_name}-{member.name}-seed{config.data.seed}")
        texts = [*member.overrides, quoted_override(FOLDER_KEY, str(folder)), quoted_override(NAME_KEY, run_name)]
        jobs.append(Job(member.name, folder, [*options, *texts], config))
        for line in _folder_faults(folder, config):
            faults.setdefault(line, []).append(member.name)
    _raise_faults(faults, num_members=num_members)
    return root, jobs


def _run_name(text: str) -> str:
    """A text as `trainer.experiment_name`, which allows fewer signs than a folder."""
    return safe_name(re.sub("[=,+]+", "-", text), signs="._-", max_length=100)


def _raise_faults(faults: dict[str, list[str]], *, num_members: int) -> None:
    if not faults:
        return
    lines = [f"The sweep has {len(faults)} fault{'s' if len(faults) > 1 else ''}; nothing was started."]
    for text, where in faults.items():
        names = list(dict.fromkeys(where))
        lines.append(f"  {'all members' if len(names) == num_members else ', '.join(names)}: {text}")
    raise ConfigError("\n".join(lines))


def _folder_faults(folder: Path, config: GovernorConfig) -> Iterator[str]:
    """A run of another configuration in a member's folder, which could neither be passed over nor gone on with."""
    run_dir = RunDir(folder)
    if config.trainer.resume_mode == "disable" or not run_dir.has_run():
        return
    # A run may go on at another learning rate; a member of a sweep that did would be two experiments in one.
    changed = run_dir.changes(config, safe=[pattern for pattern in SAFE_KEYS if pattern not in RATE_KEYS])
    if changed:
        shown = ", ".join(f"{key}: it has {before!r}, now {now!r}" for key, (before, now) in changed.items())
        yield (
            f"{folder} holds a run with another configuration ({shown}). Ways out: another {SWEEP_FOLDER_KEY}; "
            "trainer.resume_mode=disable, which moves old runs aside and runs every member anew; or "
            f"trainer.resume_allow_changes=[{','.join(changed)}]"
        )


def _is_finished(job: Job) -> bool:
    """Whether the member's folder holds a run that is done and as long as asked; `_folder_faults` found none."""
    trainer, record = job.config.trainer, job.folder / "run.json"
    if trainer.resume_mode == "disable" or trainer.val_only or not record.exists():
        return False
    if json.loads(record.read_text(encoding="utf-8"))["state"] != "done":
        return False
    if trainer.total_training_steps is not None:
        return last_step(RunDir(job.folder).read("metrics.jsonl")) >= trainer.total_training_steps
    before = read_yaml(job.folder / "config.yaml")["trainer"]
    return before["total_training_steps"] is None and before["total_epochs"] >= trainer.total_epochs


@contextmanager
def _only_sweep_in(root: Path) -> Iterator[None]:
    """Hold the lock of the sweep's folder.

    Raises:
        ConfigError: the folder cannot be made.
        ResourceError: another sweep holds it.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        file = (root / ".lock").open("a+")
    except OSError as error:
        raise ConfigError(f"{SWEEP_FOLDER_KEY}={root}: the folder cannot be made: {error}") from None
    with file:
        if not _lock(file):
            raise ResourceError(
                f"{root}: another sweep runs there. Wait for it, or give this one another {SWEEP_FOLDER_KEY}."
            )
        yield


def _wait_until_free(folder: Path, process: MemberProcess, display: Display) -> None:
    """Wait for a run in the folder that this sweep did not start, as after a sweep that was killed alone."""
    if not (folder / ".lock").exists():
        return
    with (folder / ".lock").open("a+") as file:
        told = False
        while process.received is None and not _lock(file):
            if not told:
                display.notice(f"{folder} is in use by another process; waiting for it to end")
                told = True
            time.sleep(POLL_S)


def _lock(file: Any) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


# --- at the end ------------------------------------------------------------------------------------------------------


def _write_record(root: Path, jobs: Sequence[Job]) -> None:
    """`sweep.json`: members in their order, with overrides, folder and how they ended."""
    members = [
        {
            "name": job.name,
            "seed": job.config.data.seed,
            "folder": os.path.relpath(job.folder, root),
            "overrides": job.overrides,
            "state": job.state,
            "exit_code": job.exit_code,
            "reason": job.reason,
            "seconds": job.seconds,
        }
        for job in jobs
    ]
    aside = root / ".tmp-sweep.json"
    aside.write_text(json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "members": members}, indent=1) + "\n")
    os.replace(aside, root / "sweep.json")


def _show_end(root: Path, jobs: Sequence[Job], display: Display) -> None:
    """A plain table of how the members ended, and what to do next."""
    rows = [["member", "seed", "state", "steps", f"score, last {SCORE_WINDOW}", "s", ""]]
    for job in jobs:
        lines = RunDir(job.folder).read("metrics.jsonl")
        scores = [line[SCORE] for line in lines if SCORE in line][-SCORE_WINDOW:]
        rows.append(
            [
                job.name,
                str(job.config.data.seed),
                f"{job.state} ({job.exit_code})" if job.exit_code else job.state,
                str(max(last_step(lines), 0)),
                f"{sum(scores) / len(scores):.4g}" if scores else "",
                "" if job.seconds is None else f"{job.seconds:.0f}",
                (job.reason or "")[:200],
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    display.say("")
    for row in rows:
        display.say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    failed = sum(job.state == "failed" for job in jobs)
    cut = sum(job.state in ("stopped", "not started") for job in jobs)
    if failed or cut:
        display.say(f"{failed} failed, {cut} not finished. The same command goes on with those.")
    display.say(f"Compare: governor compare {root}")
