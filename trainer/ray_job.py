"""`governor train` as the entrypoint of a Ray job: what it refuses there, and the last line that carries its end.

`ray job submit` has one status for every failure. So the entrypoint's last line is `governor: exit CODE: reason`, which
`governor submit` reads from the job's log.
"""

import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config.faults import Fault
from trainer.errors import ConfigError

ENTRYPOINT_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # Ray sets it for a job's entrypoint, and for no worker
END_LINE = re.compile(r"^governor: exit (\d+): (.*)$", re.MULTILINE)
MAX_REASON = 2000  # characters; a list of many faults is cut there
ENDS = {0: "done", 130: "stopped by SIGINT", 143: "stopped by SIGTERM"}
FOLDERS = ("trainer.default_local_dir", "trainer.rollout_data_dir")


@dataclass(frozen=True, slots=True)
class JobEnd:
    """How a job ended."""

    code: int
    reason: str


def in_ray_job() -> bool:
    """Whether this process is the entrypoint of a Ray job, or was started by it."""
    return ENTRYPOINT_VARIABLE in os.environ


def say_end(end: JobEnd) -> None:
    """Print the last line, to stderr; without a reason the code's own."""
    text = " ".join(end.reason.split()) or ENDS.get(end.code, "see the log")
    sys.stdout.flush()
    sys.stderr.write(f"governor: exit {end.code}: {text[:MAX_REASON]}\n")
    sys.stderr.flush()


def read_end(log: str) -> JobEnd | None:
    """The end that a log tells: its last such line, since later libraries may print something behind it."""
    lines = END_LINE.findall(log.replace("\r\n", "\n"))
    return JobEnd(int(lines[-1][0]), lines[-1][1].rstrip()) if lines else None


def folder_faults(values: dict[str, Any], *, working_dir: Path | None = None) -> Iterator[Fault]:
    """Folders of a run that would vanish with the job: relative ones, and those inside the job's working directory.

    `values` holds full keys.
    """
    for key in FOLDERS:
        if not isinstance(values[key], str):
            continue
        path = Path(values[key])
        inside = working_dir is not None and path.is_relative_to(working_dir)
        if path.is_absolute() and not inside:
            continue
        name = path.relative_to(working_dir) if inside and working_dir is not None else path
        yield Fault(
            key,
            values[key],
            f"{'lies in' if inside else 'is relative to'} the job's working directory, which is deleted with the job: "
            f"name a folder on storage that all nodes see, for example {key}=/shared/{name}",
        )


def check_folders(values: dict[str, Any]) -> None:
    """Refuse, inside a job, a run whose results would vanish with it.

    Raises:
        ConfigError: a folder of the run is relative, or lies in the job's working directory.
    """
    if not in_ray_job():
        return
    sent = json.loads(os.environ[ENTRYPOINT_VARIABLE]).get("runtime_env", {}).get("working_dir")
    faults = list(folder_faults(values, working_dir=Path.cwd() if sent else None))
    if faults:
        raise ConfigError(
            "\n".join(["A Ray job cannot run so; nothing was started.", *(f"  {fault}" for fault in faults)])
        )
