"""Whole runs over real Ray actors: learning, resuming in the same bits, what a run leaves behind, how it fails."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from config.load import load_config
from trainer.errors import ConfigError, ResourceError, RewardError
from trainer.main_ppo import run

pytestmark = pytest.mark.usefixtures("ray_session")

TIMED = ("timing_s/", "timing_per_token_ms/", "perf/")
SMALL = [
    "data.train_batch_size=8",
    "data.generator.num_train=24",
    "data.generator.num_val=6",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "trainer.total_training_steps=6",
    "trainer.total_epochs=3",
    "trainer.save_freq=2",
    "trainer.test_freq=3",
    "trainer.sample_freq=2",
]


def train(root: Path, *overrides: str) -> list[dict[str, float]]:
    """Run to the end; the lines of metrics.jsonl."""
    assert run(load_config([*SMALL, f"trainer.default_local_dir={root}", *overrides])) == 0
    return lines(root / "metrics.jsonl")


def lines(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def untimed(path: Path, *besides: str) -> list[dict[str, float]]:
    return [
        {key: value for key, value in line.items() if not key.startswith((*TIMED, *besides))} for line in lines(path)
    ]


def assert_same_bits(one: Path, other: Path, step: int, *besides: str) -> None:
    """Equal weights, optimizer states, controller, metrics, updates and samples, metrics named `besides` left out."""
    for name in (
        "actor/model.safetensors",
        "actor_optimizer.safetensors",
        "critic/model.safetensors",
        "critic_optimizer.safetensors",
    ):
        first, second = (load_file(root / f"checkpoints/global_step_{step}" / name) for root in (one, other))
        assert first.keys() == second.keys()
        assert all(first[key].equal(second[key]) for key in first), name
    for name in ("metrics.jsonl", "updates.jsonl", "samples.jsonl"):
        assert untimed(one / name, *besides) == untimed(other / name, *besides)
    states = [
        json.loads((root / f"checkpoints/global_step_{step}/trainer_state.json").read_text()) for root in (one, other)
    ]
    assert states[0]["kl_ctrl"] == states[1]["kl_ctrl"]


@pytest.fixture(scope="module")
def full_run(tmp_path_factory):
    """Six steps in one go, three an epoch, with every limiter on."""
    root = tmp_path_factory.mktemp("full")
    train(root, *ALL_LIMITERS)
    return root


ALL_LIMITERS = [
    "algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.horizon=100",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.entropy_coeff=0.01",
]


@pytest.mark.parametrize("cut", [1, 3, 5], ids=["first step", "epoch's edge", "mid-epoch"])
def test_a_stopped_and_resumed_run_ends_in_the_same_bits(full_run, tmp_path, cut):
    train(tmp_path, *ALL_LIMITERS, f"trainer.total_training_steps={cut}", "trainer.test_freq=-1")
    train(tmp_path, *ALL_LIMITERS)
    assert_same_bits(full_run, tmp_path, 6, "val-")  # the short run did not validate


def test_a_run_killed_behind_its_last_checkpoint_repeats_those_steps_in_the_same_bits(full_run, tmp_path):
    train(tmp_path, *ALL_LIMITERS)
    for step in (6, 4):  # as after a kill in step 4, between its records and its checkpoint
        (tmp_path / f"checkpoints/global_step_{step}").rename(tmp_path / f"global_step_{step}")
    train(tmp_path, *ALL_LIMITERS)
    assert_same_bits(full_run, tmp_path, step=6)


def test_the_policy_of_a_checkpoint_opens_with_from_pretrained(full_run):
    folder = full_run / "checkpoints/global_step_6/actor"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.generation_config.eos_token_id == 2
    assert (folder / "tokenizer.json").exists()


def test_a_run_directory_holds_what_the_design_says(full_run):
    names = {path.name for path in full_run.iterdir()}
    assert names >= {
        "run.json",
        "config.yaml",
        "metrics.jsonl",
        "updates.jsonl",
        "samples.jsonl",
        "checkpoints",
        "logs",
    }
    state = json.loads((full_run / "run.json").read_text())
    assert (state["state"], state["exit_code"], state["seed"]) == ("done", 0, 1)
    assert [line["step"] for line in lines(full_run / "metrics.jsonl")] == [0, 1, 2, 3, 4, 5, 6]
    assert len(lines(full_run / "updates.jsonl")) == 6 * 2 * 2  # steps, updates a step, roles
    sample = lines(full_run / "samples.jsonl")[0]
    assert len(sample["tokens"]) == len(sample["advantages"]) == len(sample["old_log_probs"]) > 0  # pyright: ignore


def test_a_finished_run_says_so_and_ends_with_0(full_run, capsys):
    before = (full_run / "metrics.jsonl").read_bytes()
    train(full_run, *ALL_LIMITERS)
    assert "has its 6 steps already" in capsys.readouterr().out
    assert (full_run / "metrics.jsonl").read_bytes() == before


def test_a_resume_with_another_seed_is_refused_and_touches_nothing(full_run):
    before = {name: (full_run / name).read_bytes() for name in ("metrics.jsonl", "run.json", "config.yaml")}
    with pytest.raises(ConfigError, match=r"data\.seed: the run has 1, now 2"):
        train(full_run, *ALL_LIMITERS, "data.seed=2", "trainer.total_training_steps=8")
    assert {name: (full_run / name).read_bytes() for name in before} == before
    assert not (full_run / "checkpoints/global_step_8").exists()


def test_a_resume_from_other_weights_of_the_reference_is_refused_unless_allowed(full_run, tmp_path):
    key, model = "actor_rollout_ref.model.path", tmp_path / "model"
    shutil.copytree(full_run / "model", model)
    settings = [f"{key}={model}", *ALL_LIMITERS, "trainer.total_training_steps=1"]
    train(tmp_path / "run", *settings)
    weights = load_file(model / "model.safetensors")
    save_file({**weights, "model.norm.weight": weights["model.norm.weight"] + 0.5}, model / "model.safetensors")
    longer = [*settings, "trainer.total_training_steps=2"]
    with pytest.raises(
        ConfigError, match=rf"^{key}={model}: the folder holds other weights than when this run began; "
    ):
        train(tmp_path / "run", *longer)
    allowed = f"trainer.resume_allow_changes=[{key}]"
    assert train(tmp_path / "run", *longer, allowed)[-1]["step"] == 2
    assert train(tmp_path / "run", *longer, "trainer.total_training_steps=3")[-1]["step"] == 3, (
        "the new ones are now known"
    )


def test_resume_mode_disable_moves_the_old_run_aside(tmp_path):
    root = tmp_path / "run"
    train(root, "trainer.total_training_steps=1")
    old = (root / "metrics.jsonl").read_text()
    train(root, "trainer.total_training_steps=1", "trainer.resume_mode=disable", "data.seed=5")
    assert (tmp_path / "run.old1/metrics.jsonl").read_text() == old
    assert (root / "metrics.jsonl").read_text() != old


def test_val_only_validates_once_and_trains_nothing(tmp_path):
    metrics = train(tmp_path, "trainer.val_only=true")
    assert len(metrics) == 1
    assert "val-core/copy/acc/mean@1" in metrics[0]


def test_val_only_on_a_run_shows_its_newest_checkpoint_and_changes_nothing(full_run, capsys):
    before = {name: (full_run / name).read_bytes() for name in ("metrics.jsonl", "run.json", "config.yaml")}
    train(full_run, *ALL_LIMITERS, "trainer.val_only=true")
    assert "validation after step 6: copy/acc/mean@1" in capsys.readouterr().out
    assert {name: (full_run / name).read_bytes() for name in before} == before


def test_validation_with_samples_gives_mean_pass_and_majority(tmp_path):
    sampled = ["n=4", "do_sample=true", "temperature=0.7", "top_k=5", "top_p=0.9", "min_p=0.01"]
    overrides = [f"actor_rollout_ref.rollout.val_kwargs.{setting}" for setting in sampled]
    metrics = train(tmp_path, "trainer.val_only=true", *overrides)[0]
    core = {key.rsplit("/", 1)[1] for key in metrics if key.startswith("val-core/copy/acc/")}
    assert core == {"mean@4", "pass@1", "pass@2", "pass@4", "maj@4"}


def test_reward_results_do_not_depend_on_the_number_of_workers_or_their_speed(tmp_path):
    slow = tmp_path / "slow.py"
    slow.write_text(
        "import time\n"
        "def score(data_source, solution_str, ground_truth, extra_info, factor):\n"
        "    time.sleep(hash(ground_truth) % 7 / 1000)\n"
        "    return {'score': factor * len(solution_str), 'digits': sum(c.isdigit() for c in solution_str)}\n"
    )
    key = "reward.custom_reward_function"
    custom = [f"{key}.path={slow}", f"{key}.name=score", f"+{key}.reward_kwargs.factor=0.5"]
    short = ["trainer.total_training_steps=2", "trainer.test_freq=-1", "trainer.val_before_train=false"]
    train(tmp_path / "one", *custom, *short, "reward.num_workers=1")
    train(tmp_path / "three", *custom, *short, "reward.num_workers=3")
    assert untimed(tmp_path / "one/metrics.jsonl") == untimed(tmp_path / "three/metrics.jsonl")
    assert "reward_extra/digits/mean" in lines(tmp_path / "one/metrics.jsonl")[0]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return None", r"bad\.py:compute_score returned None \(NoneType\) for response 0 to prompt 1-\d+"),
        ("return float('nan')", "returned nan"),
        ("return {'acc': 1}", "mapping without 'score'"),
        ("raise KeyError('oops')", r"(?s)raised for response 0 to prompt 1-\d+.*KeyError: 'oops'"),
        ("import time; time.sleep(60)", r"longer than reward\.timeout_s=1 s for response 0 to prompt 1-\d+"),
        ("import os; os._exit(3)", r"ended its process \(exit 3\)"),
    ],
    ids=["none", "nan", "no score", "raises", "hangs", "exits"],
)
def test_a_bad_reward_ends_the_run_with_exit_8_and_names_function_and_row(tmp_path, body, message):
    path = tmp_path / "bad.py"
    path.write_text(f"def compute_score(data_source, solution_str, ground_truth, extra_info):\n    {body}\n")
    with pytest.raises(RewardError, match=message) as raised:
        train(
            tmp_path / "run",
            f"reward.custom_reward_function.path={path}",
            "reward.timeout_s=1",
            "trainer.val_before_train=false",
        )
    assert raised.value.exit_code == 8
    state = json.loads((tmp_path / "run/run.json").read_text())
    assert (state["state"], state["exit_code"]) == ("failed", 8), "also where no step was finished"


def test_a_reward_file_that_cannot_be_imported_ends_with_exit_8_and_its_traceback(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("import no_such_module\ndef compute_score(**kwargs): return 0\n")
    with pytest.raises(RewardError, match=r"(?s)cannot be imported.*No module named 'no_such_module'"):
        train(tmp_path / "run", f"reward.custom_reward_function.path={path}")


@pytest.mark.parametrize(
    "overrides",
    [["trainer.nnodes=4"], ["trainer.device=cuda"], ["trainer.nnodes=2", "trainer.n_gpus_per_node=2"]],
    ids=["nodes", "gpu", "both"],
)
def test_devices_that_the_cluster_does_not_have_end_in_exit_4_with_a_table(tmp_path, overrides):
    with pytest.raises(ResourceError, match="wanted") as raised:
        train(tmp_path, *overrides, "trainer.placement_timeout_s=2")
    assert raised.value.exit_code == 4


def test_devices_that_others_hold_are_waited_for_and_then_refused(tmp_path):
    from ray.util.placement_group import placement_group, remove_placement_group

    held = placement_group([{"CPU": 3}])
    assert held.wait(30)
    try:
        with pytest.raises(ResourceError, match=r"placement_timeout_s=2 s"):
            train(tmp_path, "trainer.placement_timeout_s=2")
    finally:
        remove_placement_group(held)


def test_two_processes_train_with_token_budgets_and_uneven_validation(tmp_path):
    overrides = [
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "data.generator.num_val=5",
    ]
    metrics = train(tmp_path, *overrides, "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=40")
    assert len(metrics) == 7
    assert (tmp_path / "checkpoints/global_step_6/rng_rank_1.json").exists()


def test_two_processes_stopped_and_resumed_end_in_the_same_bits(tmp_path):
    two = ["trainer.n_gpus_per_node=2", "trainer.test_freq=-1", "trainer.val_before_train=false"]
    train(tmp_path / "full", *two, "trainer.total_training_steps=4")
    train(tmp_path / "cut", *two, "trainer.total_training_steps=2")
    train(tmp_path / "cut", *two, "trainer.total_training_steps=4")
    assert_same_bits(tmp_path / "full", tmp_path / "cut", 4)


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_every_estimator_without_a_critic_trains(tmp_path, estimator):
    short = [
        "trainer.total_training_steps=1",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
    ]
    metrics = train(tmp_path, f"algorithm.adv_estimator={estimator}", "actor_rollout_ref.rollout.n=2", *short)
    assert metrics[0]["actor/grad_norm"] > 0
    assert not any(key.startswith("critic/vf_") for key in metrics[0])


def test_bfloat16_compute_and_a_bfloat16_rollout_run_on_the_cpu(tmp_path):
    overrides = ["actor_rollout_ref.actor.fsdp_config.dtype=bfloat16", "actor_rollout_ref.rollout.dtype=bfloat16"]
    metrics = train(tmp_path, *overrides, "trainer.total_training_steps=2")
    assert metrics[-1]["actor/grad_norm"] > 0
    weights = load_file(tmp_path / "checkpoints/global_step_2/actor/model.safetensors")
    assert {str(weight.dtype) for weight in weights.values()} == {"torch.float32"}


def test_the_default_job_learns_to_copy(tmp_path):
    overrides = [
        "experiment=copy_ppo",
        f"trainer.default_local_dir={tmp_path}",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
    ]
    assert run(load_config(overrides)) == 0
    scores = [line["critic/score/mean"] for line in lines(tmp_path / "metrics.jsonl") if line["step"] > 0]
    assert sum(scores[:5]) / 5 < 0.3
    assert sum(scores[-10:]) / 10 >= 0.9
