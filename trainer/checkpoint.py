"""Checkpoints: written aside, described by a manifest with hashes, published by one rename.

There is no pointer to the latest: the newest folder whose manifest holds is it. A folder that does not hold is passed
over with the reason, and never deleted. safetensors and JSON only.
"""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from trainer.errors import CheckpointError

SCHEMA_VERSION = 1
MANIFEST, STATE = "manifest.json", "trainer_state.json"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A published checkpoint whose files were found whole."""

    step: int
    folder: Path

    def state(self) -> dict[str, Any]:
        """The trainer's own state."""
        return json.loads((self.folder / STATE).read_text(encoding="utf-8"))


class CheckpointStore:
    """The checkpoints of one run, in `root`."""

    def __init__(self, root: Path, *, max_to_keep: int | None) -> None:
        """Make the folder and try to write in it.

        Raises:
            CheckpointError: it cannot be written.
        """
        self.root = root
        self.max_to_keep = max_to_keep
        try:
            root.mkdir(parents=True, exist_ok=True)
            probe = root / f".probe-{uuid.uuid4().hex}"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise CheckpointError(
                f"{root}: checkpoints cannot be written here: {error}. Change trainer.default_local_dir."
            ) from None

    def save(
        self, step: int, write: Callable[[Path], None], state: dict[str, Any], about: dict[str, Any]
    ) -> Checkpoint:
        """Publish a checkpoint: `write` fills a folder aside, then state and manifest are added and it is renamed.

        Raises:
            CheckpointError: the disk refused; older checkpoints are as they were.
        """
        final = self.root / f"global_step_{step}"
        aside = self.root / f".tmp-global_step_{step}-{uuid.uuid4().hex}"
        try:
            aside.mkdir()
            write(aside)
            _write_synced(aside / STATE, state)
            files = {name: _describe(aside / name) for name in _file_names(aside)}
            _write_synced(aside / MANIFEST, {"schema_version": SCHEMA_VERSION, "step": step, **about, "files": files})
            _sync_folder(aside)
            if final.exists():  # a folder that did not hold, or the run went back before it
                os.rename(final, self.root / f".replaced-global_step_{step}-{uuid.uuid4().hex}")
            os.rename(aside, final)
            _sync_folder(self.root)
        except BaseException as error:
            shutil.rmtree(aside, ignore_errors=True)
            if not isinstance(error, OSError | SafetensorError):
                raise
            raise CheckpointError(
                f"{final}: the checkpoint could not be written: {error}. Older ones are intact."
            ) from error
        self.prune(step)
        return Checkpoint(step, final)

    def prune(self, newest: int) -> None:
        """Remove published checkpoints beyond the newest `max_to_keep`, oldest first.

        Those of later steps than `newest`, which was just written, do not hold: the run went back before them. They do
        not count, and stay.
        """
        if self.max_to_keep is not None:
            for step in [step for step in self.steps() if step <= newest][: -self.max_to_keep]:
                shutil.rmtree(self.root / f"global_step_{step}")

    def steps(self) -> list[int]:
        """Steps of the published checkpoints, ascending; whether they hold is not looked at."""
        names = [path.name.removeprefix("global_step_") for path in self.root.glob("global_step_*")]
        return sorted(int(name) for name in names if name.isdigit())

    def newest_valid(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint that holds, and why newer ones do not.

        Raises:
            CheckpointError: there are checkpoints and none holds.
        """
        reasons = []
        for step in reversed(self.steps()):
            folder = self.root / f"global_step_{step}"
            reason = why_invalid(folder)
            if reason is None:
                return Checkpoint(step, folder), reasons
            reasons.append(f"{folder}: {reason}")
        if reasons:
            listed = "\n".join(f"  {reason}" for reason in reasons)
            raise CheckpointError(
                f"No checkpoint can be used:\n{listed}\nNothing was touched. Repair one, or start anew with another "
                "trainer.experiment_name or trainer.resume_mode=disable."
            )
        return None, reasons


def why_invalid(folder: Path) -> str | None:
    """What is wrong with a checkpoint's files, or None: each must be there with its size and hash, and no other."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError) as error:
        return f"{MANIFEST} cannot be read: {error}"
    if not isinstance(manifest, dict):
        return f"{MANIFEST} is not a mapping"
    if manifest.get("schema_version") != SCHEMA_VERSION:
        return f"schema version {manifest.get('schema_version')}, this version of Governor reads {SCHEMA_VERSION}"
    if not isinstance(manifest.get("files"), dict) or folder.name != f"global_step_{manifest.get('step')}":
        return f"{MANIFEST} lists no files, or is of step {manifest.get('step')}"
    listed, there = manifest["files"], set(_file_names(folder)) - {MANIFEST}
    if missing := sorted(set(listed) - there):
        return f"{missing[0]} is missing"
    if extra := sorted(there - set(listed)):
        return f"{extra[0]} is not in the manifest"
    for name, wanted in listed.items():
        size = (folder / name).stat().st_size
        if size != wanted["size"]:
            return f"{name} has {size} bytes, the manifest says {wanted['size']}"
        if _describe(folder / name)["sha256"] != wanted["sha256"]:
            return f"{name} does not have the hash of the manifest"
    return None


def _file_names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _describe(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _write_synced(path: Path, value: dict[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
