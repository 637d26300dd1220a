"""Whole runs with LoRA: the KL at the start, resuming in the same bits, starting from a trained adapter, replay."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from config.load import load_config
from trainer.cli import main
from trainer.errors import ConfigError
from trainer.main_ppo import run
from trainer.replay import replay
from workers.engine.lora import ADAPTER_FILES, CONFIG_FILE, WEIGHTS_FILE

pytestmark = pytest.mark.usefixtures("ray_session")

ROOT = Path(__file__).parents[2]
MODEL = "actor_rollout_ref.model"
TIMED = ("timing_s/", "timing_per_token_ms/", "perf/")
SMALL = [
    "data.train_batch_size=8",
    "data.generator.num_train=24",
    "data.generator.num_val=6",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "algorithm.use_kl_in_reward=true",
    f"{MODEL}.lora_rank=4",
    "trainer.total_training_steps=4",
    "trainer.total_epochs=3",
    "trainer.save_freq=2",
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
    "trainer.rollout_data_dir=true",
]


def train(root: Path, *overrides: str) -> None:
    assert run(load_config([*SMALL, f"trainer.default_local_dir={root}", *overrides])) == 0


def untimed(path: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith(TIMED)} for line in lines]


def assert_same_bits(one: Path, other: Path) -> None:
    for name in (
        f"actor/{WEIGHTS_FILE}",
        "actor_optimizer.safetensors",
        "critic/model.safetensors",
        "critic_optimizer.safetensors",
    ):
        first, second = (load_file(root / "checkpoints/global_step_4" / name) for root in (one, other))
        assert first.keys() == second.keys()
        assert all(first[key].equal(second[key]) for key in first), name
    for name in ("metrics.jsonl", "updates.jsonl"):
        assert untimed(one / name) == untimed(other / name)


def assert_starts_at_kl_0(root: Path) -> None:
    """And leaves it: the reference is the start and not the policy itself."""
    metrics = untimed(root / "metrics.jsonl")
    updates = [line for line in untimed(root / "updates.jsonl") if line["role"] == "actor"]
    assert metrics[0]["actor/reward_kl_penalty"] == updates[0]["actor/kl_loss"] == updates[0]["actor/ppo_kl"] == 0.0
    assert metrics[-1]["actor/reward_kl_penalty"] != 0  # k1, of either sign
    assert updates[-1]["actor/kl_loss"] > 0


@pytest.fixture(scope="module")
def fresh_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps in one go from a fresh adapter, with a critic."""
    root = tmp_path_factory.mktemp("fresh")
    train(root)
    return root


@pytest.fixture(scope="module")
def second_start(fresh_run: Path) -> list[str]:
    """The overrides of a run that starts where the first ended."""
    return [
        f"{MODEL}.path={fresh_run / 'model'}",
        f"{MODEL}.lora_adapter_path={fresh_run / 'checkpoints/global_step_4/actor'}",
    ]


@pytest.fixture(scope="module")
def second_run(second_start: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("second")
    train(root, *second_start)
    return root


def test_a_run_from_a_fresh_adapter_starts_at_kl_0(fresh_run: Path) -> None:
    assert_starts_at_kl_0(fresh_run)


def test_a_run_from_a_trained_adapter_starts_at_kl_0_to_that_adapter(second_run: Path) -> None:
    assert_starts_at_kl_0(second_run)


def test_a_run_from_a_trained_adapter_begins_with_its_weights(
    fresh_run: Path, second_start: list[str], tmp_path: Path
) -> None:
    train(tmp_path, *second_start, "trainer.total_training_steps=1", "actor_rollout_ref.actor.optim.lr=0.0")
    before, after = (
        load_file(root / "actor" / WEIGHTS_FILE)
        for root in (fresh_run / "checkpoints/global_step_4", tmp_path / "checkpoints/global_step_1")
    )
    assert all(before[name].equal(after[name]) for name in before)


@pytest.mark.parametrize("start", ["fresh", "trained"])
def test_a_stopped_and_resumed_run_ends_in_the_same_bits(
    fresh_run: Path, second_run: Path, second_start: list[str], tmp_path: Path, start: str
) -> None:
    overrides, whole = ([], fresh_run) if start == "fresh" else (second_start, second_run)
    train(tmp_path, *overrides, "trainer.total_training_steps=2")
    train(tmp_path, *overrides)
    assert_same_bits(whole, tmp_path)


def test_a_checkpoint_holds_the_adapter_and_no_weight_of_the_base(fresh_run: Path) -> None:
    folder = fresh_run / "checkpoints/global_step_4"
    assert {path.name for path in (folder / "actor").glob("*")} >= {*ADAPTER_FILES, "tokenizer.json"}
    assert [path.name for path in (folder / "actor").glob("*.safetensors")] == [WEIGHTS_FILE]
    for name in (f"actor/{WEIGHTS_FILE}", "actor_optimizer.safetensors"):
        assert all(".lora_A." in key or ".lora_B." in key for key in load_file(folder / name))
    assert (folder / "critic/model.safetensors").exists()


def test_the_plan_says_how_much_is_trained_and_the_critic_is_spoken_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, "trainer.total_training_steps=1", "trainer.save_freq=-1", f"{MODEL}.target_modules=[q_proj,v_proj]")
    said = capsys.readouterr()
    text = " ".join((said.out + said.err).split())
    # q: 4·(64 + 64), v: 4·(64 + 32), in two layers
    assert "trained parameters: 1,792 (LoRA of rank 4, alpha 16, on 4 layers (q_proj, v_proj); 1.76% of the" in text
    assert "LoRA is the policy's: the critic is trained whole" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("lora_rank=8", r"lora_rank=8: the adapter in .*global_step_4/actor has 4"),
        ("lora_rank=0", r"lora_rank=0: .*global_step_4/actor holds a LoRA adapter; a run cannot change over"),
    ],
)
def test_a_run_cannot_change_its_adapters_rank_even_where_it_is_allowed(
    fresh_run: Path, change: str, message: str
) -> None:
    key = f"{MODEL}.{change.split('=')[0]}"
    longer = ["trainer.total_training_steps=5", f"trainer.resume_allow_changes=[{key}]"]
    before = (fresh_run / "adapter" / WEIGHTS_FILE).read_bytes()
    with pytest.raises(ConfigError, match=message):
        train(fresh_run, f"{MODEL}.{change}", *longer)
    assert (fresh_run / "adapter" / WEIGHTS_FILE).read_bytes() == before


def test_a_run_whose_base_was_replaced_is_refused(fresh_run: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    shutil.copytree(fresh_run, root)
    weights = load_file(root / "model/model.safetensors")
    save_file({**weights, "model.norm.weight": weights["model.norm.weight"] + 0.5}, root / "model/model.safetensors")
    with pytest.raises(ConfigError, match="made for a base with other weights"):
        train(root, "trainer.total_training_steps=5")


@pytest.mark.parametrize(("start", "step"), [("fresh", 1), ("trained", 3)])
def test_a_kept_batch_is_replayed_in_the_same_bits(fresh_run: Path, second_run: Path, start: str, step: int) -> None:
    root = fresh_run if start == "fresh" else second_run
    checkpoint = None if step == 1 else root / f"checkpoints/global_step_{step - 1}"
    replay(root / f"rollouts/step_{step}", checkpoint, [])
    logged = untimed(root / "metrics.jsonl")[step - 1]
    (first,) = json.loads((root / f"rollouts/step_{step}/replay.json").read_text())
    shared = {name for name in first if name in logged}
    assert len(shared) > 35
    assert {name: first[name] for name in shared} == {name: logged[name] for name in shared}
    assert first["replay/distance"] > 0


def test_two_processes_in_bfloat16_train_and_resume(tmp_path: Path) -> None:
    overrides = [
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.actor.fsdp_config.dtype=bfloat16",
        "actor_rollout_ref.rollout.dtype=bfloat16",
    ]
    train(tmp_path / "whole", *overrides)
    train(tmp_path / "cut", *overrides, "trainer.total_training_steps=2")
    train(tmp_path / "cut", *overrides)
    assert_same_bits(tmp_path / "whole", tmp_path / "cut")
    assert_starts_at_kl_0(tmp_path / "whole")


def test_the_examples_second_command_runs_on_what_the_first_would_have_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is run by test_examples.py; here a base of the same make stands for its result."""
    readme = (ROOT / "examples/lora/README.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^governor train (.*lora_rank.*)$", readme.replace("\\\n", " "), re.MULTILINE)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    whole = [
        "experiment=copy_grpo",
        "trainer.total_training_steps=1",
        f"{MODEL}.lora_rank=0",
        "trainer.rollout_data_dir=false",
    ]
    train(tmp_path / "base", *whole)
    (base,) = re.findall(rf"{MODEL}\.path=(\S+)", command)
    assert main(["export", "base", "--out", base]) == 0
    short = ["trainer.total_training_steps=2", "trainer.default_local_dir=run", "data.train_batch_size=8"]
    short += ["trainer.test_freq=-1", "trainer.val_before_train=false"]
    short += [f"{MODEL}.path={tmp_path / base}"]  # the processes of this session's Ray run in another folder
    assert main(["train", *shlex.split(command), *short]) == 0
    assert json.loads((tmp_path / "run/checkpoints/global_step_2/actor" / CONFIG_FILE).read_text())["r"] == 16
