"""The table of verl's keys that this trainer does not have, and its place in the README."""

import importlib.util
import re
import shlex
import types
from pathlib import Path

import pytest

from config.foreign_keys import FOREIGN_KEYS, WHAT_TO_DO, reason_for
from config.load import ConfigFaults, load_config, open_mappings, walk_keys

ROOT = Path(__file__).parents[2]
KNOWN = set(walk_keys())
VERL_KEYS = [
    line
    for line in (Path(__file__).parent / "verl_0_8_keys.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
]


def load_script() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("readme_tables", ROOT / "scripts" / "readme_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


readme_tables = load_script()


def test_no_foreign_key_is_a_key_of_the_schema_or_a_prefix_of_one() -> None:
    anywhere = {key.removeprefix("*.") for key in FOREIGN_KEYS if key.startswith("*.")}
    assert not [known for known in KNOWN if anywhere & set(known.split("."))]
    prefixes = [key for key in FOREIGN_KEYS if not key.startswith("*.")]
    assert not [(key, known) for key in prefixes for known in KNOWN if f"{known}.".startswith(f"{key}.")]


def test_no_foreign_key_lies_below_an_open_mapping() -> None:
    assert not [key for key in FOREIGN_KEYS for name in open_mappings() if key.startswith(f"{name}.")]


def test_no_foreign_key_is_listed_twice_or_hidden_by_a_shorter_one() -> None:
    keys = [key for keys in WHAT_TO_DO.values() for key in keys]
    assert len(keys) == len(set(keys)) == len(FOREIGN_KEYS)
    assert not [key for key in keys for other in keys if key.startswith(f"{other}.")]


@pytest.mark.parametrize("text", WHAT_TO_DO)
def test_every_new_name_is_a_key_of_the_schema(text: str) -> None:
    names = re.findall(r"\b(?:data|actor_rollout_ref|critic|algorithm|reward|trainer|ray_kwargs)(?:\.\w+)+", text)
    names += re.findall(r"\b(?:use|see) ([\w.]+)", text)
    assert set(names) <= KNOWN
    assert names or text.endswith("; drop it")


def test_every_key_of_verl_is_known_or_refused_with_what_to_do() -> None:
    below_open = tuple(f"{name}." for name in open_mappings())
    ways = {key: (key in KNOWN) + key.startswith(below_open) + (reason_for(key) is not None) for key in VERL_KEYS}
    assert len(ways) > 350
    assert [key for key, count in ways.items() if count != 1] == []


def test_every_foreign_key_is_told_on_the_command_line() -> None:
    keys = [key.replace("*.", "critic.") for key in FOREIGN_KEYS]
    with pytest.raises(ConfigFaults) as caught:
        load_config([f"{key}.x=1" for key in keys] + [f"+{key}=1" for key in keys])
    lines = str(caught.value).splitlines()[1:]
    expected = [
        f"  {key}{end}=1: {text}" for end in (".x", "") for key, text in zip(keys, FOREIGN_KEYS.values(), strict=True)
    ]
    assert lines == expected


def test_the_longest_prefix_decides() -> None:
    assert reason_for("critic.optim.warmup_style") == "use critic.optim.lr_scheduler_type"
    assert reason_for("critic.fsdp.param_offload") == "use critic.fsdp_config"  # a prefix before a name anywhere
    assert reason_for("critic.fsdp_config.offload_policy") == "not supported yet; drop it"
    assert reason_for("reward_model.model.path") == reason_for("reward_model")
    for key in ("reward_models", "critic", "critic.optim", "data.tokenizers", "lora_ranks"):
        assert reason_for(key) is None


def test_a_command_for_verl_is_refused_line_by_line_with_what_to_do() -> None:
    command = shlex.split("""
        algorithm.adv_estimator=grpo data.train_files=[train.parquet] data.val_files=[test.parquet]
        data.train_batch_size=1024 data.max_prompt_length=512 data.max_response_length=1024
        data.filter_overlong_prompts=True data.truncation='error' actor_rollout_ref.model.path=Qwen/Qwen3-8B
        actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.model.use_remove_padding=True
        actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32
        actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001
        actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.actor.entropy_coeff=0
        actor_rollout_ref.model.enable_gradient_checkpointing=True
        actor_rollout_ref.actor.fsdp_config.param_offload=False
        actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
        actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32
        actor_rollout_ref.rollout.name=vllm
        actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.gpu_memory_utilization=0.6
        actor_rollout_ref.rollout.n=5 actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32
        actor_rollout_ref.ref.fsdp_config.param_offload=True algorithm.use_kl_in_reward=False trainer.critic_warmup=0
        trainer.logger='["console","wandb"]' trainer.project_name='verl_grpo_example_gsm8k'
        trainer.experiment_name='qwen3_8b_function_rm' trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=20
        trainer.test_freq=5 trainer.total_epochs=15 data.generator.name=null
    """)
    with pytest.raises(ConfigFaults) as caught:
        load_config(command)
    refused = [line.strip().split("=")[0] for line in str(caught.value).splitlines()[1:]]
    assert "did you mean" not in str(caught.value)
    config = load_config([text for text in command if text.split("=")[0] not in refused])
    assert (config.actor_rollout_ref.rollout.n, config.algorithm.adv_estimator) == (5, "grpo")
    assert refused == ["actor_rollout_ref.model.use_remove_padding"]


# --- README ----------------------------------------------------------------------------------------------------------


def test_the_table_has_two_columns_and_every_key_once() -> None:
    head, rule, *lines = readme_tables.foreign_keys_table().splitlines()
    assert (head, rule) == ("| key of verl | what to do |", "|---|---|")
    found: dict[str, str] = {}
    for line in lines:
        match = re.fullmatch(r"\| (`[^|]+`) \| ([^|]+) \|", line)
        assert match is not None
        for key in match[1].split(", "):
            assert found.setdefault(key.strip("`"), match[2]) == match[2]
    assert found == FOREIGN_KEYS


def test_readme_has_the_table_as_it_is() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme_tables.with_tables(text) == text, "run python scripts/readme_tables.py --write"


def test_write_replaces_what_lies_between_the_markers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "README.md"
    monkeypatch.setattr(readme_tables, "README", path)
    path.write_text("# A\n<!-- foreign-keys:begin -->\nold ö\n<!-- foreign-keys:end -->\n# B\n", encoding="utf-8")
    assert readme_tables.main(["--write"]) == 0
    made = path.read_text(encoding="utf-8")
    table = readme_tables.foreign_keys_table()
    assert made == f"# A\n<!-- foreign-keys:begin -->\n{table}<!-- foreign-keys:end -->\n# B\n"
    assert readme_tables.main(["--write"]) == 0
    assert path.read_text(encoding="utf-8") == made


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("", "<!-- foreign-keys:begin -->"),
        ("<!-- foreign-keys:begin -->", "<!-- foreign-keys:end --> after"),
        ("<!-- foreign-keys:end --><!-- foreign-keys:begin -->", "<!-- foreign-keys:end --> after"),
    ],
)
def test_write_leaves_a_readme_without_markers_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, missing: str
) -> None:
    path = tmp_path / "README.md"
    monkeypatch.setattr(readme_tables, "README", path)
    path.write_text(text)
    assert readme_tables.main(["--write"]) == 2
    assert path.read_text() == text
    assert capsys.readouterr().err.startswith(f"README.md has no {missing}")


def test_without_write_the_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert readme_tables.main([]) == 0
    assert capsys.readouterr().out == readme_tables.foreign_keys_table()
