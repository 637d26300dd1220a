"""Short runs over real processes: a reward model in place of a rule and beside one, batched functions, missing scorers."""

import json
from pathlib import Path

import pytest

from config.load import load_config
from trainer.errors import ConfigError, DataError
from trainer.main_ppo import run
from workers.reward import verifiers
from workers.reward.group import RewardFunctions

pytestmark = pytest.mark.usefixtures("ray_session")

SMALL = [
    "data.train_batch_size=4",
    "data.generator.num_train=8",
    "data.generator.num_val=3",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=2",
    "trainer.total_training_steps=1",
    "trainer.save_freq=-1",
]
TIMED = ("timing_s/", "timing_per_token_ms/", "perf/")


def train(root: Path, *overrides: str) -> list[dict[str, float]]:
    """Run to the end; the lines of metrics.jsonl without times."""
    assert run(load_config([*SMALL, f"trainer.default_local_dir={root}", *overrides])) == 0
    lines = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith(TIMED)} for line in lines]


def reward_model(path: str, *overrides: str) -> list[str]:
    return [f"reward.reward_model.{setting}" for setting in ("enable=true", f"model_path={path}", *overrides)]


def test_a_run_adds_rule_model_and_penalty_up_wherever_the_model_lives(tmp_path, write_reward_model):
    overlong = "reward.reward_kwargs.overlong_buffer_cfg"
    overrides = [
        *reward_model(write_reward_model(), "combine=add", "coef=0.5", "micro_batch_size_per_gpu=3"),
        "reward.reward_manager.name=dapo",
        f"{overlong}.enable=true",
        f"{overlong}.len=4",
    ]
    validation, step = train(tmp_path / "one", *overrides)
    assert step["response/empty_ratio"] == 0
    parts = [step[f"reward/{name}/mean"] for name in ("rule_score", "model_score", "overlong_penalty")]
    assert step["critic/score/mean"] == pytest.approx(parts[0] + 0.5 * parts[1] + parts[2], abs=1e-6)
    assert parts[2] < 0
    assert step["reward/model_score/max"] > step["reward/model_score/min"]
    assert "val-aux/copy/model_score/mean@1" in validation
    _, two = train(tmp_path / "two", *overrides, "trainer.n_gpus_per_node=2")
    assert two["reward/model_score/mean"] == pytest.approx(step["reward/model_score/mean"], abs=1e-5)
    pool = ["+trainer.resource_pools.judge={nnodes:1,n_gpus_per_node:1}", "trainer.role_pools.reward_model=judge"]
    offload = "reward.reward_model.fsdp_config.param_offload=true"
    assert train(tmp_path / "apart", *overrides, *pool, offload) == [validation, step]


def test_a_reward_model_in_place_of_a_rule_needs_no_scorer(tmp_path, write_reward_model):
    rows = tmp_path / "rows.jsonl"
    row = {"data_source": "preferences", "prompt": [{"role": "user", "content": "12"}]}
    rows.write_text((json.dumps(row) + "\n") * 8)
    files = ["data.generator.name=null", f"data.train_files=[{rows}]"]
    with pytest.raises(DataError, match=r"no built-in scorer for data source 'preferences'.*combine=replace"):
        train(tmp_path / "rule", *files)
    with pytest.raises(DataError, match="no built-in scorer"):
        train(tmp_path / "add", *files, *reward_model(write_reward_model(), "combine=add"))
    (step,) = train(tmp_path / "model", *files, *reward_model(write_reward_model("qwen3")))
    assert step["critic/score/mean"] == pytest.approx(step["reward/model_score/mean"], abs=1e-6)
    assert not any(key.startswith("reward/rule_score") for key in step)
    assert not list((tmp_path / "model/logs").glob("reward_*"))  # no process for a function that nobody calls


def test_a_batched_function_sees_the_whole_step_in_order_and_gives_the_run_of_one_by_row(tmp_path):
    path = tmp_path / "rewards.py"
    path.write_text(
        "def by_row(solution_str, ground_truth, **rest):\n"
        "    return {'score': solution_str[:1] == ground_truth[:1], 'length': len(solution_str)}\n"
        "def batched(data_sources, solution_strs, ground_truths, extra_infos):\n"
        "    assert len(data_sources) in (3, 8), len(data_sources)\n"  # validation, and 4 prompts x 2
        "    assert ground_truths[0::2] == ground_truths[1::2] or len(ground_truths) == 3\n"
        "    return [by_row(*pair) for pair in zip(solution_strs, ground_truths)]\n"
    )
    key = "reward.custom_reward_function"
    one, other = (
        train(tmp_path / name, f"{key}.path={path}", f"{key}.name={name}", f"{key}.batched={str(name == 'batched').lower()}")
        for name in ("by_row", "batched")
    )  # fmt: skip
    assert one == other
    assert "reward_extra/length/mean" in one[1]


def test_rewards_stand_in_the_order_of_the_rows_whatever_the_number_of_workers(tmp_path, reward_rows):
    path = tmp_path / "rewards.py"
    path.write_text("def compute_score(solution_str, **rest):\n    return float(solution_str)\n")
    config = load_config([f"reward.custom_reward_function.path={path}", "reward.num_workers=3"]).reward
    functions = RewardFunctions(config, [], log_dir=str(tmp_path))
    for count in (2, 7):  # fewer rows than workers, and shares of unequal length
        rows = reward_rows([str(number) for number in range(count)])
        assert [reward.score for reward in functions.score(rows)] == list(range(count))
    functions.shutdown()


def test_a_missing_extra_is_told_before_anything_starts(tmp_path, monkeypatch):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"data_source": "math", "prompt": "1+1=", "reward_model": {"ground_truth": "2"}}) + "\n")
    monkeypatch.setattr(verifiers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"rows\.jsonl row 1: data source 'math' .*pip install 'governor-rl\[math\]'"):
        train(tmp_path / "run", "data.generator.name=null", f"data.train_files=[{rows}]")
