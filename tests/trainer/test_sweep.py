"""Sweeps: from overrides to members, all checked before the first starts, and how members end and go on."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from config.load import ConfigFaults, load_config
from config.sweep import ablation_names, plan_sweep, quoted_override, safe_name
from trainer.errors import ConfigError, ResourceError
from trainer.run_dir import RunDir
from trainer.sweep import Job, run_sweep

ABLATIONS = ["clip_ratio", "entropy", "kl_placement", "limiters", "loss_agg"]
LR = "actor_rollout_ref.actor.optim.lr"


def members(*overrides: str, config_dir: str | None = None) -> list[tuple[str, tuple[str, ...]]]:
    return [(member.name, member.overrides) for member in plan_sweep(overrides, config_dir=config_dir).members]


def write_ablation(folder: Path, text: str, name: str = "mine") -> str:
    (folder / "ablation").mkdir(parents=True, exist_ok=True)
    (folder / f"ablation/{name}.yaml").write_text(text)
    return str(folder)


def faults(*overrides: str, config_dir: str | None = None) -> str:
    with pytest.raises(ConfigFaults) as raised:
        plan_sweep(overrides, config_dir=config_dir)
    return "\n".join(str(raised.value).splitlines()[1:])


# --- ablation files --------------------------------------------------------------------------------------------------


def test_the_ablations_are_those_that_are_documented() -> None:
    assert ablation_names() == ABLATIONS


@pytest.mark.parametrize("name", ABLATIONS)
def test_every_member_of_every_ablation_loads_and_has_three_seeds(name: str) -> None:
    found = members(f"ablation={name}")
    names = list(dict.fromkeys(member for member, _ in found))
    assert len(found) == 3 * len(names) >= 12
    configs = [load_config(overrides) for _, overrides in found[: len(names)]]
    assert all(left != right for i, left in enumerate(configs) for right in configs[:i])


def limiters_on(overrides: tuple[str, ...]) -> set[str]:
    config = load_config(overrides)
    actor = config.actor_rollout_ref.actor
    never_clips = actor.clip_ratio_low == 1 and actor.clip_ratio_high == float("inf") and actor.clip_ratio_c is None
    on = {
        "clip": not never_clips,
        "entropy": actor.entropy_coeff > 0,
        "kl_loss": actor.use_kl_loss,
        "kl_reward": config.algorithm.use_kl_in_reward,
    }
    return {name for name, is_on in on.items() if is_on}


def test_the_members_of_limiters_are_none_each_alone_and_all() -> None:
    found = dict(members("ablation=limiters", "data.seed=1"))
    assert {name: limiters_on(overrides) for name, overrides in found.items()} == {
        "none": set(),
        "clip": {"clip"},
        "entropy": {"entropy"},
        "kl_loss": {"kl_loss"},
        "kl_reward": {"kl_reward"},
        "all": {"clip", "entropy", "kl_loss", "kl_reward"},
    }


MINE = """
seeds: [7, 8]
base: [data.train_batch_size=8, actor_rollout_ref.actor.ppo_mini_batch_size=8]
members:
  none: []
  strong: [actor_rollout_ref.actor.entropy_coeff=0.1]
"""


def test_a_file_of_the_users_own_runs_every_member_with_every_seed(tmp_path: Path) -> None:
    base = ("data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8")
    strong = (*base, "actor_rollout_ref.actor.entropy_coeff=0.1")
    assert members("ablation=mine", config_dir=write_ablation(tmp_path, MINE)) == [
        ("none", (*base, "data.seed=7")),
        ("strong", (*strong, "data.seed=7")),
        ("none", (*base, "data.seed=8")),
        ("strong", (*strong, "data.seed=8")),
    ]


def test_the_command_line_replaces_base_and_seeds_and_makes_a_grid_over_the_members(tmp_path: Path) -> None:
    folder = write_ablation(tmp_path, MINE)
    found = members("ablation=mine", "data.train_batch_size=16", f"{LR}=1,2", "data.seed=3", config_dir=folder)
    assert [name for name, _ in found] == [f"none,{LR}=1", f"none,{LR}=2", f"strong,{LR}=1", f"strong,{LR}=2"]
    assert found[0][1] == (
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "data.train_batch_size=16",
        f"{LR}=1",
        "data.seed=3",
    )


def test_an_experiment_on_the_command_line_replaces_that_of_the_file() -> None:
    (_, overrides), *_ = members("ablation=entropy", "experiment=copy_ppo")
    assert [text for text in overrides if text.startswith("experiment")] == ["experiment=copy_ppo"]
    assert load_config(overrides).algorithm.adv_estimator == "gae"


def test_a_key_in_which_the_members_differ_is_refused_on_the_command_line(tmp_path: Path) -> None:
    text = faults(
        "ablation=mine", "actor_rollout_ref.actor.entropy_coeff=0.5", config_dir=write_ablation(tmp_path, MINE)
    )
    assert "entropy_coeff: is what the members of ablation=mine differ in" in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a", "must be a mapping with the keys seeds, base, members"),
        ("{seeds: [1], members: {a: []}, steps: 3}", "steps: no such key; an ablation has seeds, base, members"),
        ("{seeds: [], members: {a: []}}", "seeds=[]: must be a list of whole numbers"),
        ("{seeds: [1, 1], members: {a: []}}", "seeds=[1,1]: must be a list of whole numbers, each once"),
        ("{seeds: 3, members: {a: []}}", "seeds=3: must be a list"),
        ("{seeds: [1]}", "members: must be a mapping from a name"),
        ("{seeds: [1], members: {a: data.shuffle=false}}", "members.a: must be a list of overrides"),
        ("{seeds: [1], members: {0.1: []}}", "members.0.1: is not a name"),
        ("{seeds: [1], members: {../x: []}}", "members.../x: is not a name"),
        ("{seeds: [1], base: [data.shuffle], members: {a: []}}", "base: data.shuffle: is not an override"),
        ("{seeds: [1], base: 3, members: {a: []}}", "base: must be a list of overrides"),
        ("{seeds: [1], members: {a: [data.seed=4]}}", "members.a: data.seed=4: stands under seeds"),
        ("{seeds: [1], members: {a: ['data.seed=4,5']}}", "several values"),
        ("{seeds: [1], members: {a: [trainer.default_local_dir=x]}}", "is set for each member by the sweep"),
        ("{seeds: [1], members: {a: [hydra.sweep.dir=x]}}", "is set for each member by the sweep"),
        ("{seeds: [1", "is not YAML"),
    ],
)
def test_a_file_that_does_not_hold_what_it_must_says_so(tmp_path: Path, text: str, message: str) -> None:
    assert message in faults("ablation=mine", config_dir=write_ablation(tmp_path, text))


def test_an_ablation_that_does_not_exist_names_those_that_do(tmp_path: Path) -> None:
    text = faults("ablation=nope", config_dir=write_ablation(tmp_path, MINE))
    assert (
        text == "  ablation=nope: no such file; there are clip_ratio, entropy, kl_placement, limiters, loss_agg, mine"
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("ablation=limiters,entropy", "ablation: takes the name of one file"),
        ("ablation=[limiters]", "ablation: takes the name of one file"),
        ("data.seed=interval(0,1)", "data.seed=interval(0,1): cannot be enumerated"),
        ("experiment=glob(*)", "experiment=glob(*): cannot be enumerated"),
        ("trainer.default_local_dir=x", "trainer.default_local_dir: is set for each member: use hydra.sweep.dir"),
        ("trainer.experiment_name=a,b", "trainer.experiment_name: names the whole sweep: give one"),
        ("hydra/sweeper=optuna", "hydra/sweeper=optuna: has no effect here"),
        ("hydra.sweep.dir=a,b", "hydra.sweep.dir: takes one value"),
        ("hydra.sweep.dir=x/${now:%Y}", "must be a plain folder"),
        ("hydra.launcher.n_jobs=2", "needs hydra/launcher=NAME"),
        ("hydra.launcher._target_=os.system", "names code to run: choose a launcher that is installed"),
        ("hydra.launcher.x={_target_:os.system}", "names code to run: choose a launcher that is installed"),
        ("data.seed", "data.seed: is not an override of the form key=value"),
    ],
)
def test_what_a_sweep_cannot_do_is_refused(override: str, message: str) -> None:
    assert message in faults(override)


# --- plain sweeps ----------------------------------------------------------------------------------------------------


def test_several_values_make_a_grid_and_seeds_vary_slowest() -> None:
    key = "actor_rollout_ref.actor.clip_ratio"
    assert members(f"{key}=0.1,0.2", "data.seed=range(1,3)") == [
        (f"{key}=0.1", (f"{key}=0.1", "data.seed=1")),
        (f"{key}=0.2", (f"{key}=0.2", "data.seed=1")),
        (f"{key}=0.1", (f"{key}=0.1", "data.seed=2")),
        (f"{key}=0.2", (f"{key}=0.2", "data.seed=2")),
    ]


def test_lists_and_choices_are_read_by_hydras_grammar() -> None:
    found = members("data.train_files=[a,b],[c]", "experiment=choice(copy_ppo,copy_grpo)")
    assert [overrides for _, overrides in found] == [
        (f"data.train_files={files}", f"experiment={experiment}")
        for files in ("[a,b]", "[c]")
        for experiment in ("copy_ppo", "copy_grpo")
    ]


def test_a_members_name_has_its_overrides_sorted_without_seed_and_lengths() -> None:
    found = members("experiment=copy_grpo", f"{LR}=1,2", "data.seed=4", "trainer.total_training_steps=3")
    assert [name for name, _ in found] == [f"{LR}=1,experiment=copy_grpo", f"{LR}=2,experiment=copy_grpo"]
    assert found[0][1] == ("experiment=copy_grpo", "trainer.total_training_steps=3", f"{LR}=1", "data.seed=4")


def test_a_swept_length_is_in_the_name() -> None:
    assert [name for name, _ in members("trainer.total_training_steps=3,4")] == [
        "trainer.total_training_steps=3",
        "trainer.total_training_steps=4",
    ]


def test_without_overrides_there_is_one_member_with_a_name() -> None:
    assert members() == [("default", ())]


def test_the_sweep_is_named_after_the_experiments_name_else_the_ablation() -> None:
    assert plan_sweep(["ablation=entropy"]).name == "entropy"
    named = plan_sweep(["ablation=entropy", "trainer.experiment_name=mine", "hydra.sweep.dir=/tmp/x"])
    assert (named.name, named.folder) == ("mine", "/tmp/x")
    assert plan_sweep(["data.seed=1,2"]).name is None


# --- names -----------------------------------------------------------------------------------------------------------


@given(st.text(min_size=1, max_size=400))
def test_a_name_is_safe_for_file_systems(text: str) -> None:
    name = safe_name(text)
    assert re.fullmatch(r"[A-Za-z0-9_=,+-][A-Za-z0-9._=,+-]{0,149}", name)


def test_names_that_had_to_be_changed_stay_apart() -> None:
    texts = ["a/b", "a\\b", "a b", "a_b", "a" * 200, "a" * 201, "..", "."]
    assert len({safe_name(text) for text in texts}) == len(texts)
    assert safe_name("a.b=0.1,c=x") == "a.b=0.1,c=x"


@given(st.text(st.characters(exclude_characters="\0\r\n", exclude_categories=["Cs"]), max_size=40))
def test_a_quoted_override_gives_its_text_back(text: str) -> None:
    assert OverridesParser.create().parse_override(quoted_override("a.b", text)).value() == text


# --- with members that only pretend to train -------------------------------------------------------------------------

# By its learning rate a member does its steps, fails, or waits for a signal; it notes each start and each signal.
PRETEND = """
import signal, sys, time
from pathlib import Path
from config.load import load_config
from trainer.run_dir import RunDir, last_step

config = load_config([text for text in sys.argv[1:] if not text.startswith("--config-name=")])
root, lr, steps = Path(config.trainer.default_local_dir), config.actor_rollout_ref.actor.optim.lr, config.trainer.total_training_steps
run_dir = RunDir(root)
run_dir.acquire()
signals = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: signals.append(number))
with (root.parents[1] / "starts.txt").open("a") as file:
    file.write(f"{root.parent.name} {root.name}\\n")
if lr == 3:
    sys.exit("Error: it fell over")
run_dir.write_config(config)
run_dir.write_state("running")
if lr == 4:
    while not signals:
        time.sleep(0.02)
    time.sleep(0.3)  # for a second one that should not come
    (root / "signals.txt").write_text(str(signals))
    run_dir.write_state("stopped", exit_code=128 + signals[0], reason=signal.Signals(signals[0]).name)
    sys.exit(128 + signals[0])
done = max(last_step(run_dir.read("metrics.jsonl")), 0)
run_dir.append("metrics.jsonl", [{"step": step, "critic/score/mean": lr / 10} for step in range(done + 1, steps + 1)])
run_dir.write_state("done", exit_code=0, reason=None)
"""


@pytest.fixture
def pretend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to sweep in, with members of two steps that pretend."""
    script = tmp_path / "pretend.py"
    script.write_text(PRETEND)
    monkeypatch.setattr(Job, "command", lambda job: [sys.executable, str(script), *job.overrides])
    return tmp_path / "sweep"


def sweep(root: Path, *overrides: str) -> int:
    return run_sweep([f"hydra.sweep.dir={root}", "trainer.total_training_steps=2", *overrides])


def record(root: Path) -> list[tuple[str, int, str, int | None]]:
    found = json.loads((root / "sweep.json").read_text())["members"]
    return [(member["name"], member["seed"], member["state"], member["exit_code"]) for member in found]


def starts(root: Path) -> list[str]:
    return (root / "starts.txt").read_text().splitlines()


def test_a_member_that_fails_does_not_lose_the_others(pretend: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep(pretend, f"{LR}=3,1") == 1
    assert record(pretend) == [(f"{LR}=3", 1, "failed", 1), (f"{LR}=1", 1, "done", 0)]
    out, err = capsys.readouterr()
    assert re.search(rf"{LR}=3 +1 +failed \(1\) +0 +\d+ +Error: it fell over\n{LR}=1 +1 +done +2 +0\.1 ", out)
    assert "1 failed, 0 not finished. The same command goes on with those." in out
    assert "it fell over" in err
    assert (pretend / f"{LR}=3/seed=1.stderr.txt").read_text() == "Error: it fell over\n"


def test_starting_again_passes_over_what_is_done_and_tries_the_rest(pretend: Path) -> None:
    sweep(pretend, f"{LR}=3,1", "data.seed=1,2")
    assert sweep(pretend, f"{LR}=3,1", "data.seed=1,2") == 1
    assert [state for _, _, state, _ in record(pretend)] == ["failed", "done before", "failed", "done before"]
    assert starts(pretend) == [
        *(f"{LR}=3 seed=1", f"{LR}=1 seed=1", f"{LR}=3 seed=2", f"{LR}=1 seed=2"),
        *(f"{LR}=3 seed=1", f"{LR}=3 seed=2"),
    ]


def test_a_longer_sweep_goes_on_with_all_and_a_shorter_one_with_none(pretend: Path) -> None:
    assert sweep(pretend, f"{LR}=1,2") == 0
    assert sweep(pretend, f"{LR}=1,2", "trainer.total_training_steps=5") == 0
    assert len(starts(pretend)) == 4
    assert len(RunDir(pretend / f"{LR}=2/seed=1").read("metrics.jsonl")) == 5
    assert sweep(pretend, f"{LR}=1,2", "trainer.total_training_steps=3") == 0
    assert len(starts(pretend)) == 4


def test_resume_mode_disable_runs_all_anew(pretend: Path) -> None:
    for _ in range(2):
        assert sweep(pretend, f"{LR}=1", "trainer.resume_mode=disable") == 0
    assert len(starts(pretend)) == 2


@pytest.mark.parametrize(
    ("first", "then", "key"),
    [
        ("trainer.n_gpus_per_node=1", "trainer.n_gpus_per_node=2", "trainer.n_gpus_per_node: it has 1, now 2"),
        ("ablation=loss_agg", f"{LR}=5", f"{LR}: it has 0.001, now 5.0"),  # a run may change it, a sweep may not
    ],
)
def test_a_folder_with_a_run_of_another_configuration_is_refused_before_the_start(pretend, first, then, key) -> None:
    overrides = [first, "data.seed=1"]
    assert sweep(pretend, *overrides) == 0
    before = starts(pretend)
    with pytest.raises(ConfigError, match="holds a run with another configuration") as raised:
        sweep(pretend, *overrides, then)
    assert key in str(raised.value)
    assert starts(pretend) == before
    assert sweep(pretend, *overrides, then, f"trainer.resume_allow_changes=[{key.split(':')[0]}]") == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_goes_on_to_the_member_once_and_stops_the_sweep(pretend: Path, number: int, code: int) -> None:
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    waiting = pretend / f"{LR}=4/seed=1"

    def send() -> None:
        while not (waiting / "run.json").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        assert sweep(pretend, f"{LR}=1,4,2") == code
    finally:
        thread.join()
    assert record(pretend) == [
        (f"{LR}=1", 1, "done", 0),
        (f"{LR}=4", 1, "stopped", code),
        (f"{LR}=2", 1, "not started", None),
    ]
    assert (waiting / "signals.txt").read_text() == str([int(number)])
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers


def test_two_sweeps_do_not_run_in_one_folder(pretend: Path) -> None:
    pretend.mkdir()
    with (pretend / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ResourceError, match="another sweep runs there"):
            sweep(pretend, f"{LR}=1")
    assert sweep(pretend, f"{LR}=1") == 0


def test_a_member_that_another_process_still_runs_is_waited_for(pretend: Path, capsys) -> None:
    folder = pretend / f"{LR}=1/seed=1"
    folder.mkdir(parents=True)
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        timer = threading.Timer(1.0, lambda: fcntl.flock(file, fcntl.LOCK_UN))
        timer.start()
        assert sweep(pretend, f"{LR}=1") == 0
        timer.join()
    assert "is in use by another process; waiting for it to end" in capsys.readouterr().err


def test_hydras_basic_launcher_runs_the_members_and_keeps_a_failed_one_apart(pretend: Path) -> None:
    before = Path.cwd()
    assert sweep(pretend, f"{LR}=3,1", "hydra/launcher=basic") == 1
    assert record(pretend) == [(f"{LR}=3", 1, "failed", 1), (f"{LR}=1", 1, "done", 0)]
    assert sweep(pretend, f"{LR}=1", "hydra/launcher=basic") == 0
    assert starts(pretend) == [f"{LR}=3 seed=1", f"{LR}=1 seed=1"]
    assert Path.cwd() == before


def test_a_launcher_that_is_not_installed_is_refused(pretend: Path) -> None:
    with pytest.raises(ConfigError, match="Could not find 'hydra/launcher/nope'"):
        sweep(pretend, f"{LR}=1", "hydra/launcher=nope")


def test_all_members_are_checked_before_the_first_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as raised:
        run_sweep(["data.train_batch_size=256,250", "data.sed=3"])
    text = str(raised.value)
    assert text.startswith("The sweep has 1 fault; nothing was started.\n  all members: data.sed=3: no such key")
    with pytest.raises(
        ConfigError, match=r"data\.train_batch_size=250: actor_rollout_ref\.actor\.ppo_mini_batch_size=64"
    ):
        run_sweep(["data.train_batch_size=256,250"])
    assert list(tmp_path.iterdir()) == []


def test_the_default_folder_and_the_members_names(pretend: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_sweep([f"{LR}=1", "trainer.total_training_steps=1", "trainer.project_name=p", "data.seed=5"]) == 0
    config = load_config([]).trainer
    folder = tmp_path / f"outputs/p/sweeps/{config.experiment_name}/{LR}=1/seed=5"
    assert f"experiment_name: copy_ppo-{LR}-1-seed5\n" in (folder / "config.yaml").read_text()


# --- with real members -----------------------------------------------------------------------------------------------

REAL = """
seeds: [1]
base:
  - data.train_batch_size=8
  - actor_rollout_ref.actor.ppo_mini_batch_size=4
  - trainer.val_before_train=false
  - trainer.test_freq=-1
  - trainer.save_freq=-1
  - trainer.sample_freq=-1
members:
  broken: [data.generator.name=null, "data.train_files=[no.parquet]"]
  good: []
"""
START = "import sys; from trainer.sweep import run_sweep; sys.exit(run_sweep(sys.argv[2:], config_dir=sys.argv[1]))"


@pytest.mark.timeout(600)  # three starts of torch and Ray, on a machine that others use too
def test_a_sweep_that_is_stopped_in_the_middle_and_started_again_ends_complete(tmp_path: Path) -> None:
    root, steps = tmp_path / "sweep", 40
    overrides = ["ablation=real", f"hydra.sweep.dir={root}", f"trainer.total_training_steps={steps}"]
    command = [sys.executable, "-c", START, write_ablation(tmp_path, REAL, "real"), *overrides]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, **options, start_new_session=True)
    metrics, deadline = RunDir(root / "good/seed=1"), time.monotonic() + 180
    while not metrics.read("metrics.jsonl"):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.terminate()
    out, err = process.communicate(timeout=120)
    assert process.returncode == 143, out + err
    assert record(root) == [("broken", 1, "failed", 3), ("good", 1, "stopped", 143)]
    assert "no.parquet: no such file" in out
    assert 0 < len(metrics.read("metrics.jsonl")) < steps

    again = subprocess.run(command, **options, timeout=280)
    assert again.returncode == 1, again.stdout + again.stderr  # for the broken one
    assert record(root) == [("broken", 1, "failed", 3), ("good", 1, "done", 0)], again.stderr
    assert [line["step"] for line in metrics.read("metrics.jsonl")] == list(range(1, steps + 1))
    assert "Going on from step" in again.stdout
