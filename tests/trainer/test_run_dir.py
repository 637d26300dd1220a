"""The run directory: its lock, what a resumed run may change, and its records."""

import copy
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from config.load import check_values, compose_values, load_config, read_yaml
from config.schema import GovernorConfig
from trainer.errors import ConfigError, ResourceError
from trainer.run_dir import SAFE_KEYS, RunDir, last_step, versions

HOLD = """
import sys
from pathlib import Path
from trainer.run_dir import RunDir
run_dir = RunDir(Path(sys.argv[1]))
run_dir.acquire()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[RunDir]:
    found = RunDir(tmp_path / "run")
    found.acquire()
    yield found
    found.release()


@cache
def default_values() -> dict[str, Any]:
    return compose_values(["experiment=copy_ppo"])


def configured(**changes: Any) -> GovernorConfig:
    """The default with keys changed (`__` for a dot)."""
    values = copy.deepcopy(default_values())
    for key, value in changes.items():
        *groups, name = key.split("__")
        group = values
        for part in groups:
            group = group[part]
        group[name] = value
    return check_values(values)


# --- lock ------------------------------------------------------------------------------------------------------------


def test_a_second_process_is_refused_with_the_owner_named_and_takes_over_after_its_end(tmp_path: Path) -> None:
    root = tmp_path / "run"
    command = [sys.executable, "-c", HOLD, str(root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "held\n"
        with pytest.raises(ResourceError) as caught:
            RunDir(root).acquire()
        assert str(caught.value) == (
            f"{root} is in use by process {owner.pid} on {platform.node()}. Wait for it, or give this run "
            "another trainer.experiment_name, or another trainer.default_local_dir where that is given."
        )
        owner.kill()  # without a chance to clean up
        owner.wait()
    taken = RunDir(root)
    taken.acquire()
    assert (root / ".lock").read_text() == f"process {os.getpid()} on {platform.node()}"
    taken.release()


def test_a_released_lock_can_be_taken_again(tmp_path: Path) -> None:
    first, second = RunDir(tmp_path), RunDir(tmp_path)
    first.acquire()
    with pytest.raises(ResourceError, match=f"process {os.getpid()} on "):
        second.acquire()
    first.release()
    second.acquire()
    with pytest.raises(ResourceError):
        first.acquire()
    second.release()


def test_a_refused_process_leaves_the_owner_named(tmp_path: Path) -> None:
    first = RunDir(tmp_path)
    first.acquire()
    for _ in range(2):
        with pytest.raises(ResourceError, match=f"process {os.getpid()} on "):
            RunDir(tmp_path).acquire()
    first.release()


@pytest.mark.parametrize("name", ["file", "file/run"])
def test_a_folder_that_cannot_be_made_is_refused_with_its_key(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"^trainer\.default_local_dir=.*file.*: the run directory cannot be made: "):
        RunDir(tmp_path / name).acquire()


# --- an old run ------------------------------------------------------------------------------------------------------


def test_a_folder_has_a_run_once_it_has_a_configuration_and_a_step_or_a_checkpoint(run_dir: RunDir) -> None:
    assert not run_dir.has_run()
    run_dir.append("metrics.jsonl", [{"step": 0}])
    assert not run_dir.has_run()
    run_dir.write_config(configured())
    assert run_dir.has_run()
    (run_dir.root / "metrics.jsonl").unlink()
    assert not run_dir.has_run()
    (run_dir.root / "checkpoints" / "global_step_1").mkdir(parents=True)
    assert run_dir.has_run()


def test_moving_aside_keeps_old_runs_under_free_names_and_the_lock_on_the_new_folder(run_dir: RunDir) -> None:
    targets = []
    for number in range(3):
        run_dir.append("metrics.jsonl", [{"step": number}])
        targets.append(run_dir.move_aside())
        assert run_dir.read("metrics.jsonl") == []
        assert (run_dir.root / "logs").is_dir()
    assert [target.name for target in targets] == ["run.old1", "run.old2", "run.old3"]
    assert [RunDir(target).read("metrics.jsonl") for target in targets] == [[{"step": number}] for number in range(3)]
    with pytest.raises(ResourceError):
        RunDir(run_dir.root).acquire()


# --- changes ---------------------------------------------------------------------------------------------------------

SAFE = {
    "trainer__project_name": "other",
    "trainer__experiment_name": "other",
    "trainer__default_local_dir": "elsewhere",
    "trainer__logger": ["console", "wandb"],
    "trainer__test_freq": 3,
    "trainer__save_freq": 3,
    "trainer__sample_freq": 3,
    "trainer__total_epochs": 9,
    "trainer__total_training_steps": 999,
    "trainer__val_before_train": False,
    "trainer__val_only": True,
    "trainer__max_ckpt_to_keep": 2,
    "trainer__resume_allow_changes": ["x"],
    "trainer__placement_timeout_s": 5.0,
    "trainer__cpu_threads": 2,
    "actor_rollout_ref__actor__optim__lr": 0.5,
    "actor_rollout_ref__actor__optim__lr_warmup_steps": 3,
    "critic__optim__lr_scheduler_type": "cosine",
    "critic__optim__min_lr_ratio": 0.1,
    "critic__optim__num_cycles": 1.5,
    "data__val_batch_size": 7,
    "data__val_files": ["v.parquet"],
    "actor_rollout_ref__rollout__val_kwargs__temperature": 0.5,
    "actor_rollout_ref__nccl_timeout": 5,
    "actor_rollout_ref__rollout__update_weights_bucket_megabytes": 1.0,
    "reward__num_workers": 1,
    "reward__timeout_s": 1.0,
    "ray_kwargs__ray_init": {"num_cpus": 2},
}
UNSAFE = {
    "data__seed": 77,
    "data__train_batch_size": 128,
    "data__truncation": "left",
    "data__shuffle": False,
    "data__generator__num_train": 1024,
    "actor_rollout_ref__actor__clip_ratio_high": 0.3,
    "actor_rollout_ref__actor__optim__weight_decay": 0.5,
    "actor_rollout_ref__actor__optim__betas": [0.5, 0.5],
    "actor_rollout_ref__actor__fsdp_config__dtype": "float64",
    "actor_rollout_ref__rollout__temperature": 0.9,
    "actor_rollout_ref__model__random_init__hidden_size": 128,
    "actor_rollout_ref__model__override_config": {"a": 1},
    "algorithm__gamma": 0.9,
    "algorithm__kl_ctrl__kl_coef": 0.5,
    "critic__cliprange_value": 0.1,
    "reward__custom_reward_function__reward_kwargs": {"a": 1},
    "trainer__critic_warmup": 1,
    "trainer__n_gpus_per_node": 2,
}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """The directory of a run that was started with the default."""
    found = RunDir(tmp_path_factory.mktemp("started"))
    found.write_config(configured())
    return found


@pytest.mark.parametrize("key", SAFE)
def test_a_safe_key_may_change(started: RunDir, key: str) -> None:
    config = configured(**{key: SAFE[key]})
    assert config != configured()
    started.check_changes(config)


def test_all_safe_keys_may_change_at_once(started: RunDir) -> None:
    started.check_changes(configured(**SAFE))


@pytest.mark.parametrize("key", UNSAFE)
def test_an_unsafe_key_is_refused_with_both_values(started: RunDir, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        started.check_changes(configured(**{key: UNSAFE[key]}))
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{started.root} holds a run with another configuration:"
    assert any(line.startswith(f"  {key.replace('__', '.')}") and ": the run has " in line for line in lines[1:-1])


def test_all_unsafe_changes_are_listed_with_three_ways_out_that_work(started: RunDir) -> None:
    changes = {"data__seed": 77, "algorithm__gamma": 0.5, "trainer__logger": []}
    with pytest.raises(ConfigError) as caught:
        started.check_changes(configured(**changes))
    assert str(caught.value).splitlines() == [
        f"{started.root} holds a run with another configuration:",
        "  algorithm.gamma: the run has 1.0, now 0.5",
        f"  data.seed: the run has {configured().data.seed}, now 77",
        "Three ways out: a new run with another trainer.experiment_name, or another trainer.default_local_dir where that is "
        "given; trainer.resume_mode=disable, which moves the old run aside; or trainer.resume_allow_changes=[algorithm.gamma,data.seed] to go on all the same.",
    ]
    way_out = "trainer.resume_allow_changes=[algorithm.gamma,data.seed]"
    started.check_changes(load_config(["experiment=copy_ppo", "data.seed=77", "algorithm.gamma=0.5", way_out]))


def test_allowing_one_change_does_not_allow_another(started: RunDir) -> None:
    config = configured(data__seed=77, algorithm__gamma=0.5, trainer__resume_allow_changes=["data.seed"])
    with pytest.raises(ConfigError) as caught:
        started.check_changes(config)
    assert "data.seed" not in str(caught.value)
    assert "algorithm.gamma" in str(caught.value)


def test_a_key_that_an_older_version_wrote_can_be_allowed(tmp_path: Path) -> None:
    old = RunDir(tmp_path)
    old.write_config(configured())
    path = tmp_path / "config.yaml"
    path.write_text(path.read_text() + "retired:\n  key: 3\n")
    with pytest.raises(ConfigError, match=r"  retired\.key: the run has 3, now None"):
        old.check_changes(configured())
    old.check_changes(configured(trainer__resume_allow_changes=["retired.key"]))


def test_the_same_configuration_read_back_has_no_change(started: RunDir) -> None:
    started.check_changes(configured())
    assert check_values(read_yaml(started.root / "config.yaml")) == configured()


def test_every_safe_pattern_holds_for_some_key() -> None:
    from fnmatch import fnmatchcase

    from config.load import walk_keys

    keys = [*walk_keys(), "ray_kwargs.ray_init.x"]
    assert [pattern for pattern in SAFE_KEYS if not any(fnmatchcase(key, pattern) for key in keys)] == []


# --- records ---------------------------------------------------------------------------------------------------------


def test_lines_come_back_as_they_were_added(run_dir: RunDir) -> None:
    lines = [{"step": 1, "text": "a\nb \u2028 é"}, {"step": 2, "x": 0.1}]
    run_dir.append("samples.jsonl", lines[:1])
    run_dir.append("samples.jsonl", lines[1:])
    assert run_dir.read("samples.jsonl") == lines
    assert len((run_dir.root / "samples.jsonl").read_bytes().splitlines()) == 2
    assert run_dir.read("updates.jsonl") == []


def test_a_ground_truth_that_json_does_not_know_stands_as_text(run_dir: RunDir) -> None:
    """Parquet has dates and decimals."""
    run_dir.append("samples.jsonl", [{"step": 1, "ground_truth": date(2026, 1, 2)}])
    assert run_dir.read("samples.jsonl") == [{"step": 1, "ground_truth": "datetime.date(2026, 1, 2)"}]


@pytest.mark.parametrize("rest", ['{"step": 3, "x"', '{"step": 3}', "{", "\x00" * 10])
def test_a_last_line_that_a_kill_cut_short_is_left_out(run_dir: RunDir, rest: str) -> None:
    run_dir.append("metrics.jsonl", [{"step": 1}, {"step": 2}])
    with (run_dir.root / "metrics.jsonl").open("a") as file:
        file.write(rest)
    assert run_dir.read("metrics.jsonl") == [{"step": 1}, {"step": 2}]
    assert last_step(run_dir.read("metrics.jsonl")) == 2
    run_dir.cut_back(2)
    run_dir.append("metrics.jsonl", [{"step": 3}])
    assert run_dir.read("metrics.jsonl") == [{"step": 1}, {"step": 2}, {"step": 3}]


@pytest.mark.parametrize(("step", "kept"), [(0, [0]), (1, [0, 1, 1]), (2, [0, 1, 1, 2]), (9, [0, 1, 1, 2, 3])])
def test_cutting_back_drops_later_steps_of_all_series(run_dir: RunDir, step: int, kept: list[int]) -> None:
    for name in ("metrics.jsonl", "updates.jsonl", "samples.jsonl"):
        run_dir.append(name, [{"step": number} for number in (0, 1, 1, 2, 3)])
    run_dir.cut_back(step)
    for name in ("metrics.jsonl", "updates.jsonl", "samples.jsonl"):
        assert [line["step"] for line in run_dir.read(name)] == kept


def test_cutting_back_makes_no_series_and_leaves_nothing_aside(run_dir: RunDir) -> None:
    run_dir.append("metrics.jsonl", [{"step": 1}])
    before = sorted(path.name for path in run_dir.root.iterdir())
    run_dir.cut_back(0)
    assert sorted(path.name for path in run_dir.root.iterdir()) == before


def test_the_last_step_of_nothing_is_minus_one() -> None:
    assert last_step([]) == -1


def test_the_state_keeps_what_it_held_and_is_dated(run_dir: RunDir) -> None:
    run_dir.write_state("running", exit_code=None, seed=3)
    run_dir.write_state("done", exit_code=0, tracker_ids={"wandb": "x"})
    state = json.loads((run_dir.root / "run.json").read_text())
    assert {key: state[key] for key in ("state", "exit_code", "seed", "tracker_ids")} == {
        "state": "done",
        "exit_code": 0,
        "seed": 3,
        "tracker_ids": {"wandb": "x"},
    }
    assert state["versions"] == versions()
    assert state["time"]


def test_versions_name_python_and_the_packages_that_decide_numbers() -> None:
    found = versions()
    assert found["python"] == platform.python_version()
    assert {"torch", "ray", "transformers", "governor-rl"} <= set(found)
    assert "not installed" not in found.values()
