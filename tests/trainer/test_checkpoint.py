"""Checkpoints: published whole or not at all, and never used when a byte is off."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer.checkpoint import Checkpoint, CheckpointStore, why_invalid
from trainer.errors import CheckpointError

FILES = {
    "actor/model.safetensors": b"weights" * 100,
    "actor/config.json": b"{}",
    "actor_optimizer.safetensors": b"moments",
    "critic/deep/er.bin": b"",
}
ALL_FILES = [*FILES, "trainer_state.json"]


def write_files(folder: Path) -> None:
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def save(store: CheckpointStore, step: int, write: Callable[[Path], None] = write_files, **state: Any) -> Checkpoint:
    return store.save(step, write, {"step": step, **state}, {"world_size": 2})


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", max_to_keep=None)


def tree(folder: Path) -> dict[str, bytes]:
    """All files below a folder, by name and content."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- publishing ------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_published_whole_with_its_state(store: CheckpointStore) -> None:
    made = save(store, 3, kl_ctrl={"value": 0.1})
    assert made == Checkpoint(3, store.root / "global_step_3")
    assert made.state() == {"step": 3, "kl_ctrl": {"value": 0.1}}
    assert {name: content for name, content in tree(made.folder).items() if name in FILES} == FILES
    assert [path.name for path in store.root.iterdir()] == ["global_step_3"]


def test_the_manifest_lists_every_file_with_size_and_sha256(store: CheckpointStore) -> None:
    folder = save(store, 3).folder
    manifest = json.loads((folder / "manifest.json").read_text())
    assert {key: manifest[key] for key in ("schema_version", "step", "world_size")} == {
        "schema_version": 1,
        "step": 3,
        "world_size": 2,
    }
    assert set(manifest["files"]) == set(ALL_FILES)
    for name, content in FILES.items():
        assert manifest["files"][name] == {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def test_nothing_is_under_the_final_name_while_it_is_written(store: CheckpointStore) -> None:
    seen = []

    def write(folder: Path) -> None:
        write_files(folder)
        seen.extend([store.steps(), folder.parent == store.root, folder.name.startswith(".tmp-")])

    save(store, 1, write)
    assert seen == [[], True, True]


def test_saving_a_step_again_replaces_it_and_keeps_the_old_one_aside(store: CheckpointStore) -> None:
    save(store, 1, note="old")
    assert save(store, 1, note="new").state()["note"] == "new"
    assert store.steps() == [1]
    (old,) = store.root.glob(".replaced-*")
    assert json.loads((old / "trainer_state.json").read_text())["note"] == "old"


# --- choosing --------------------------------------------------------------------------------------------------------


def test_an_empty_store_has_none(store: CheckpointStore) -> None:
    assert store.newest_valid() == (None, [])
    assert store.steps() == []


def test_the_newest_is_the_one_with_the_largest_step(store: CheckpointStore) -> None:
    for step in (10, 9, 100):  # neither in order of writing nor of names
        save(store, step)
    assert store.steps() == [9, 10, 100]
    assert store.newest_valid() == (Checkpoint(100, store.root / "global_step_100"), [])


def test_other_folders_are_no_checkpoints(store: CheckpointStore) -> None:
    save(store, 1)
    for name in (".tmp-global_step_9-x", "global_step_x", "global_step_", "step_5", ".replaced-global_step_7-x"):
        (store.root / name).mkdir()
    assert store.steps() == [1]
    assert store.newest_valid()[0] == Checkpoint(1, store.root / "global_step_1")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def make_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (truncate, " bytes, the manifest says "),
    "emptied": (empty, " has 0 bytes, the manifest says "),
    "one bit flipped": (flip_a_bit, " does not have the hash of the manifest"),
    "lengthened": (lengthen, " bytes, the manifest says "),
    "deleted": (Path.unlink, " is missing"),
    "a folder in its place": (make_a_folder, " is missing"),
}


@pytest.mark.parametrize("name", [name for name in ALL_FILES if FILES.get(name) != b""])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_named_and_the_older_checkpoint_used(store: CheckpointStore, name: str, damage: str) -> None:
    save(store, 1)
    folder = save(store, 2).folder
    change, message = DAMAGE[damage]
    change(folder / name)
    before = tree(store.root)
    found, (reason,) = store.newest_valid()
    assert found == Checkpoint(1, store.root / "global_step_1")
    assert reason.startswith(f"{folder}: {name}")
    assert message in reason
    assert tree(store.root) == before  # passed over, never repaired nor deleted


@pytest.mark.parametrize("change", [lengthen, Path.unlink])
def test_an_empty_file_counts_like_any_other(store: CheckpointStore, change: Callable[[Path], Any]) -> None:
    save(store, 1)
    folder = save(store, 2).folder
    change(folder / "critic/deep/er.bin")
    found, (reason,) = store.newest_valid()
    assert found is not None
    assert (found.step, "critic/deep/er.bin" in reason) == (1, True)


@pytest.mark.parametrize("name", ["extra.bin", "actor/extra.bin", ".hidden", "actor/manifest.json"])
def test_an_extra_file_is_named_and_the_older_checkpoint_used(store: CheckpointStore, name: str) -> None:
    save(store, 1)
    folder = save(store, 2).folder
    (folder / name).write_bytes(b"")
    found, reasons = store.newest_valid()
    assert found == Checkpoint(1, store.root / "global_step_1")
    assert reasons == [f"{folder}: {name} is not in the manifest"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "manifest.json is missing"),
        (b"", "manifest.json cannot be read"),
        (b"{", "manifest.json cannot be read"),
        (b"\xff", "manifest.json cannot be read"),
        (b'{"schema_version": 2, "files": {}}', "schema version 2, this version of Governor reads 1"),
        (b"{}", "schema version None"),
        (b"[]", "manifest.json"),
        (b'{"schema_version": 1}', "manifest.json"),
        (b'{"schema_version": 1, "files": []}', "manifest.json"),
        (b'{"schema_version": 1, "step": 2, "files": {}}', "is not in the manifest"),
    ],
)
def test_a_manifest_that_does_not_hold_is_named_and_the_older_checkpoint_used(
    store: CheckpointStore, content: bytes | None, message: str
) -> None:
    save(store, 1)
    folder = save(store, 2).folder
    if content is None:
        (folder / "manifest.json").unlink()
    else:
        (folder / "manifest.json").write_bytes(content)
    found, (reason,) = store.newest_valid()
    assert found == Checkpoint(1, store.root / "global_step_1")
    assert reason.startswith(f"{folder}: ")
    assert message in reason


def test_a_checkpoint_under_another_steps_name_is_passed_over(store: CheckpointStore) -> None:
    save(store, 1)
    save(store, 2).folder.rename(store.root / "global_step_7")
    found, reasons = store.newest_valid()
    assert (found.step if found else None, len(reasons)) == (1, 1)


def test_a_file_in_a_checkpoints_place_is_passed_over(store: CheckpointStore) -> None:
    save(store, 1)
    (store.root / "global_step_2").write_bytes(b"x")
    found, (reason,) = store.newest_valid()
    assert found == Checkpoint(1, store.root / "global_step_1")
    assert "global_step_2" in reason


def test_several_bad_ones_are_all_named_newest_first(store: CheckpointStore) -> None:
    for step in (1, 2, 3):
        save(store, step)
    (store.root / "global_step_3" / "manifest.json").unlink()
    (store.root / "global_step_2" / "actor" / "config.json").unlink()
    found, reasons = store.newest_valid()
    assert found == Checkpoint(1, store.root / "global_step_1")
    assert reasons == [
        f"{store.root}/global_step_3: manifest.json is missing",
        f"{store.root}/global_step_2: actor/config.json is missing",
    ]


def test_when_none_holds_all_reasons_come_with_exit_6_and_nothing_is_touched(store: CheckpointStore) -> None:
    for step in (1, 2):
        (save(store, step).folder / "actor" / "config.json").unlink()
    before = tree(store.root)
    with pytest.raises(CheckpointError) as caught:
        store.newest_valid()
    assert caught.value.exit_code == 6
    lines = str(caught.value).splitlines()
    assert lines[:3] == [
        "No checkpoint can be used:",
        f"  {store.root}/global_step_2: actor/config.json is missing",
        f"  {store.root}/global_step_1: actor/config.json is missing",
    ]
    assert "trainer.experiment_name" in lines[3]
    assert "trainer.resume_mode=disable" in lines[3]
    assert tree(store.root) == before


def test_a_whole_checkpoint_has_nothing_wrong(store: CheckpointStore) -> None:
    assert why_invalid(save(store, 1).folder) is None


# --- pruning ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("keep", "left"), [(1, [5]), (2, [4, 5]), (9, [1, 2, 3, 4, 5]), (None, [1, 2, 3, 4, 5])])
def test_the_newest_are_kept(tmp_path: Path, keep: int | None, left: list[int]) -> None:
    store = CheckpointStore(tmp_path, max_to_keep=keep)
    for step in (1, 2, 3, 4, 5):
        save(store, step)
    assert store.steps() == left
    assert all(why_invalid(store.root / f"global_step_{step}") is None for step in left)


def test_pruning_counts_steps_as_numbers_and_leaves_other_folders(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, max_to_keep=2)
    (tmp_path / "global_step_x").mkdir()
    for step in (9, 10, 100):
        save(store, step)
    assert store.steps() == [10, 100]
    assert (tmp_path / "global_step_x").is_dir()


def test_pruning_spares_the_one_just_written_though_a_newer_one_that_does_not_hold_lies_there(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, max_to_keep=1)
    save(store, 10)
    (tmp_path / "aside").mkdir()
    later = CheckpointStore(tmp_path / "aside", max_to_keep=None)
    save(later, 30).folder.rename(tmp_path / "global_step_30")
    truncate(tmp_path / "global_step_30" / "actor" / "config.json")
    found, _ = store.newest_valid()
    assert found is not None
    assert found.step == 10
    made = save(store, 20)  # the run went on from step 10
    assert why_invalid(made.folder) is None
    assert store.newest_valid()[0] == made


# --- failing ---------------------------------------------------------------------------------------------------------


def test_a_disk_that_refuses_leaves_older_ones_intact_and_nothing_aside(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, max_to_keep=1)
    save(store, 1)
    before = tree(tmp_path)

    def write(folder: Path) -> None:
        write_files(folder)
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError) as caught:
        save(store, 2, write)
    assert str(caught.value).startswith(f"{tmp_path}/global_step_2: the checkpoint could not be written: ")
    assert "No space left on device" in str(caught.value)
    assert caught.value.exit_code == 6
    assert tree(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["global_step_1"]
    assert save(store, 2).step == 2  # with space again


def test_another_error_while_writing_rises_as_it_is_and_publishes_nothing(store: CheckpointStore) -> None:
    save(store, 1)

    def write(folder: Path) -> None:
        write_files(folder)
        raise RuntimeError("a worker died")

    with pytest.raises(RuntimeError, match="a worker died"):
        save(store, 2, write)
    assert store.steps() == [1]
    assert [path.name for path in store.root.iterdir()] == ["global_step_1"]


def test_a_state_that_is_not_json_publishes_nothing(store: CheckpointStore) -> None:
    with pytest.raises(TypeError):
        save(store, 1, bad=object())
    assert list(store.root.iterdir()) == []


@pytest.mark.parametrize("name", ["file", "file/checkpoints"])
def test_a_place_that_cannot_be_written_is_refused_at_construction(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError) as caught:
        CheckpointStore(tmp_path / name, max_to_keep=None)
    assert str(caught.value).startswith(f"{tmp_path / name}: checkpoints cannot be written here: ")
    assert str(caught.value).endswith("Change trainer.default_local_dir.")
    assert (tmp_path / "file").read_text() == "x"


def test_the_probe_of_the_place_leaves_nothing(tmp_path: Path) -> None:
    CheckpointStore(tmp_path / "a" / "b", max_to_keep=None)
    assert list((tmp_path / "a" / "b").iterdir()) == []
