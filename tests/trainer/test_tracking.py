"""Trackers: where they write, what they are told, and that none of them can end a run."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from trainer.tracking import Trackers

# A process of its own: wandb keeps global state and a service process, and reads its variables on import.
USE_WANDB = """
import json, sys
from pathlib import Path
from trainer.tracking import Trackers
run_id, warnings = sys.argv[2] or None, []
trackers = Trackers(
    ["console", "wandb"], project="governor", name="tracked", root=Path(sys.argv[1]),
    run_ids={"wandb": run_id} if run_id else {}, config={"data": {"seed": 3}}, warn=warnings.append,
)
ids = trackers.run_ids()
trackers.log({"actor/pg_loss": 0.5}, 1)
trackers.log({"actor/pg_loss": 0.25, "val-core/copy/reward/mean@1": 1.0}, 2)
trackers.close()
sys.stderr.write("\\n" + json.dumps([ids, warnings]))
"""


class Recorder:
    """A tracker that keeps what it gets, and may fail."""

    run_id = "recorded"

    def __init__(self, *, fail_at: int | None = None, fail_on_close: bool = False) -> None:
        self.fail_at, self.fail_on_close = fail_at, fail_on_close
        self.steps: list[tuple[int, dict[str, float]]] = []
        self.closed = False

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if step == self.fail_at:
            raise RuntimeError("the service is down")
        self.steps.append((step, dict(metrics)))

    def close(self) -> None:
        if self.fail_on_close:
            raise OSError("the disk is full")
        self.closed = True


def trackers(root: Path, names: list[str], warnings: list[str]) -> Trackers:
    return Trackers(names, project="p", name="n", root=root, run_ids={}, config={"a": 1}, warn=warnings.append)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


# --- wandb -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wandb_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path], Any]:
    """The run directory, all files made elsewhere, and what the process reported; no key, no mode, an empty home."""
    base = tmp_path_factory.mktemp("wandb")
    for name in ("home", "work", "run", "temporary"):
        (base / name).mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "XDG_", "NETRC"))}
    done = subprocess.run(
        [sys.executable, "-c", USE_WANDB, str(base / "run"), ""],
        cwd=base / "work",
        env=kept | {"HOME": str(base / "home"), "TMPDIR": str(base / "temporary"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    elsewhere = [path for name in ("home", "work", "temporary") for path in files(base / name)]
    return base / "run", elsewhere, json.loads(done.stderr.splitlines()[-1])


def test_wandb_without_a_key_writes_its_run_offline_into_the_run_directory(wandb_run: Any) -> None:
    root, _, (ids, warnings) = wandb_run
    assert warnings == []
    (found,) = root.glob(f"wandb/offline-run-*/run-{ids['wandb']}.wandb")
    content = found.read_bytes()
    for text in (b"actor/pg_loss", b"val-core/copy/reward/mean@1", b"tracked", b"governor"):
        assert text in content


def test_wandb_writes_nowhere_else(wandb_run: Any) -> None:
    _, elsewhere, _ = wandb_run
    assert elsewhere == []


# --- tensorboard -----------------------------------------------------------------------------------------------------


def test_tensorboard_writes_events_that_read_back(tmp_path: Path) -> None:
    warnings: list[str] = []
    found = trackers(tmp_path, ["tensorboard"], warnings)
    found.log({"actor/pg_loss": 0.5, "critic/vf_loss": 2.0}, 1)
    found.log({"actor/pg_loss": 0.25}, 2)
    found.close()
    assert warnings == []
    assert all(path.parent == tmp_path / "tensorboard" for path in files(tmp_path))
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("actor/pg_loss")] == [(1, 0.5), (2, 0.25)]
    assert [(event.step, event.value) for event in events.Scalars("critic/vf_loss")] == [(1, 2.0)]


def test_tensorboard_has_no_run_id(tmp_path: Path) -> None:
    found = trackers(tmp_path, ["tensorboard"], [])
    assert found.run_ids() == {}
    found.close()


def test_a_tracker_that_cannot_start_is_left_out_with_one_warning(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("in the way")
    warnings: list[str] = []
    found = trackers(tmp_path, ["tensorboard"], warnings)
    found.log({"a": 1.0}, 1)
    found.close()
    assert found.active == {}
    (warning,) = warnings
    assert warning.startswith("The tracker tensorboard failed and is left out from here on; metrics.jsonl has all: ")


def test_a_missing_extra_is_told_with_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # as if it were not installed
    warnings: list[str] = []
    trackers(tmp_path, ["tensorboard"], warnings)
    (warning,) = warnings
    assert warning.endswith("install the extra: pip install 'governor-rl[tensorboard]'")


# --- failing ---------------------------------------------------------------------------------------------------------


def test_a_tracker_that_fails_is_dropped_with_one_warning_and_the_others_go_on(tmp_path: Path) -> None:
    warnings: list[str] = []
    found = trackers(tmp_path, [], warnings)
    one, bad, other = Recorder(), Recorder(fail_at=2), Recorder()
    found.active.update({"one": one, "bad": bad, "other": other})
    for step in (1, 2, 3, 4):
        found.log({"x": float(step)}, step)
    found.close()
    assert warnings == [
        "The tracker bad failed and is left out from here on; metrics.jsonl has all: the service is down"
    ]
    assert [step for step, _ in bad.steps] == [1]
    for recorder in (one, other):
        assert recorder.steps == [(step, {"x": float(step)}) for step in (1, 2, 3, 4)]
        assert recorder.closed
    assert not bad.closed


def test_a_tracker_that_fails_to_close_does_not_keep_the_others_open(tmp_path: Path) -> None:
    warnings: list[str] = []
    found = trackers(tmp_path, [], warnings)
    bad, other = Recorder(fail_on_close=True), Recorder()
    found.active.update({"bad": bad, "other": other})
    found.close()
    assert other.closed
    assert len(warnings) == 1
    assert "the disk is full" in warnings[0]


def test_an_interrupt_is_not_swallowed(tmp_path: Path) -> None:
    class Interrupted(Recorder):
        def log(self, metrics: Mapping[str, float], step: int) -> None:
            raise KeyboardInterrupt

    found = trackers(tmp_path, [], [])
    found.active["x"] = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        found.log({}, 1)


def test_run_ids_are_those_of_the_active_trackers(tmp_path: Path) -> None:
    found = trackers(tmp_path, [], [])
    found.active["x"] = Recorder()
    assert found.run_ids() == {"x": "recorded"}


@pytest.mark.parametrize("names", [[], ["console"]])
def test_the_console_is_no_tracker(tmp_path: Path, names: list[str]) -> None:
    assert trackers(tmp_path, names, []).active == {}
    assert files(tmp_path) == []
