"""From overrides and YAML files to a checked configuration: what loads, what follows what, and how faults read."""

import copy
import re
import typing
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from config.load import (
    CONFIG_DIR,
    UNBOUNDED,
    ConfigFaults,
    check_values,
    compose_values,
    flatten,
    load_config,
    open_mappings,
    overrides_of,
    read_yaml,
    to_plain,
    to_yaml,
    unknown_key_text,
    walk_keys,
)
from config.schema import GovernorConfig, PoolConfig

POOLS = "trainer.resource_pools"
EXPERIMENTS = sorted(path.stem for path in (CONFIG_DIR / "experiment").glob("*.yaml"))
# Where the files of a group are put, as the defaults lists say.
PACKAGES = {
    "data": ["data"],
    "model": ["actor_rollout_ref.model"],
    "actor": ["actor_rollout_ref.actor"],
    "ref": ["actor_rollout_ref.ref"],
    "rollout": ["actor_rollout_ref.rollout"],
    "critic": ["critic"],
    "optim": ["actor_rollout_ref.actor.optim", "critic.optim"],
    "engine": ["actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.ref.fsdp_config", "critic.fsdp_config"],
    "algorithm": ["algorithm"],
    "reward": ["reward"],
    "trainer": ["trainer"],
}
PLACES = [
    (group, group if package == group else f"{group}@{package}")
    for group, packages in PACKAGES.items()
    for package in packages
]
# Keys without a comment of their own, with the reason.
UNCOMMENTED = {
    ("model/default.yaml", "random_init.intermediate_size"): "explained with hidden_size",
    ("model/default.yaml", "random_init.num_hidden_layers"): "explained with hidden_size",
    ("model/default.yaml", "random_init.num_attention_heads"): "explained with hidden_size",
    ("model/default.yaml", "random_init.num_key_value_heads"): "explained with hidden_size",
    ("critic/default.yaml", "optim.lr"): "explained in optim/adamw.yaml",
    ("critic/default.yaml", "fsdp_config.dtype"): "explained in engine/fsdp.yaml",
    ("ref/default.yaml", "fsdp_config.dtype"): "explained in engine/fsdp.yaml",
    ("rollout/default.yaml", "response_length"): "explained with prompt_length",
    ("rollout/default.yaml", "val_kwargs.top_p"): "explained with val_kwargs.top_k",
    ("rollout/default.yaml", "val_kwargs.min_p"): "explained with val_kwargs.top_k",
    ("ppo_trainer.yaml", "hydra.output_subdir"): "Hydra's, not a user's",
    ("ppo_trainer.yaml", "hydra.run.dir"): "Hydra's, not a user's",
}


@cache
def _default_values() -> dict[str, Any]:
    return compose_values()


def default_values(**changes: Any) -> dict[str, Any]:
    """The composed default as plain values, with keys changed (`__` for a dot)."""
    values = copy.deepcopy(_default_values())
    for key, value in changes.items():
        set_value(values, key.replace("__", "."), value)
    return values


def set_value(values: dict[str, Any], key: str, value: Any) -> None:
    *groups, name = key.split(".")
    for group in groups:
        values = values[group]
    values[name] = value


def get_value(config: GovernorConfig, key: str) -> Any:
    return flatten(to_plain(config))[key]


def faults(*overrides: str, **options: Any) -> list[str]:
    """The lines of the refusal of some overrides."""
    with pytest.raises(ConfigFaults) as caught:
        load_config(overrides, **options)
    return lines(caught.value)


def value_faults(values: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigFaults) as caught:
        check_values(values)
    return lines(caught.value)


def lines(error: ConfigFaults) -> list[str]:
    head, *rest = str(error).splitlines()
    noun = "1 fault" if len(rest) == 1 else f"{len(rest)} faults"
    assert head == f"The configuration has {noun}; nothing was started."
    return [line.removeprefix("  ") for line in rest]


def leaves(cls: type = GovernorConfig, prefix: str = "") -> Iterator[tuple[str, set[Any]]]:
    """Full keys of the schema's leaves, each with all the types and choices that its annotation names."""
    for name, hint in typing.get_type_hints(cls).items():
        if isinstance(hint, type) and hasattr(hint, "__dataclass_fields__"):
            yield from leaves(hint, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", set(_named(hint))


def _named(hint: Any) -> Iterator[Any]:
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) in (list, dict):
        yield typing.get_origin(hint)
    elif typing.get_origin(hint) is typing.Literal:
        yield from arguments
    elif arguments:
        for argument in arguments:
            yield from _named(argument)
    else:
        yield hint


LEAVES = dict(leaves())
FLOATS = [key for key, named in LEAVES.items() if float in named] + [
    "actor_rollout_ref.actor.optim.betas",
    "critic.optim.betas",
]
NUMBERS = [key for key, named in LEAVES.items() if named & {int, float}]
CHOICES = {key: {item for item in named if isinstance(item, str)} for key, named in LEAVES.items()}
CHOICES = {key: choices for key, choices in CHOICES.items() if choices}


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_loads(name: str) -> None:
    assert load_config([f"experiment={name}"]).trainer.experiment_name == name


def test_every_group_folder_has_a_place() -> None:
    folders = {path.parent.name for path in CONFIG_DIR.glob("*/*.yaml")}
    assert folders - {"experiment", "ablation"} == set(PACKAGES)


def test_every_group_file_loads_in_every_place() -> None:
    files = {group: sorted(path.stem for path in (CONFIG_DIR / group).glob("*.yaml")) for group in PACKAGES}
    for turn in range(max(map(len, files.values()))):  # the first file of each group, then the second …
        chosen = [(place, files[group][min(turn, len(files[group]) - 1)]) for group, place in PLACES]
        assert load_config([f"{place}={name}" for place, name in chosen]) is not None


def test_defaults_give_every_key_of_the_schema_and_no_other() -> None:
    assert set(flatten(compose_values(["experiment=null"]))) == set(LEAVES)


def test_walk_keys_lists_groups_and_leaves() -> None:
    keys = list(walk_keys())
    assert len(keys) == len(set(keys))
    groups = {key.rpartition(".")[0] for key in keys} - {""}
    assert set(keys) == set(LEAVES) | groups


def uncommented(path: Path) -> Iterator[str]:
    """Leaf keys of a YAML file without a comment line directly above, at the same indentation."""
    above: list[tuple[int, str]] = []
    before = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if match := re.match(r"( *)([A-Za-z_]\w*):(.*)", line):
            indent, name, value = len(match[1]), match[2], match[3].strip()
            above = [(column, group) for column, group in above if column < indent] + [(indent, name)]
            if value and not before.startswith(f"{match[1]}# "):
                yield ".".join(group for _, group in above)
        before = line


def test_every_key_in_the_yaml_files_has_a_comment_above() -> None:
    files = [path for path in CONFIG_DIR.rglob("*.yaml") if path.parent.name not in ("experiment", "ablation")]
    bare = {(path.relative_to(CONFIG_DIR).as_posix(), key) for path in files for key in uncommented(path)}
    assert bare == set(UNCOMMENTED)


# --- what follows what -----------------------------------------------------------------------------------------------


def test_clip_ratio_alone_moves_both_sides() -> None:
    actor = load_config(["actor_rollout_ref.actor.clip_ratio=0.35"]).actor_rollout_ref.actor
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (0.35, 0.35)


def test_one_side_of_the_clip_can_be_set_alone() -> None:
    overrides = ["actor_rollout_ref.actor.clip_ratio=0.3", "actor_rollout_ref.actor.clip_ratio_high=0.5"]
    actor = load_config(overrides).actor_rollout_ref.actor
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (0.3, 0.5)


ACTOR, CRITIC = "actor_rollout_ref.actor", "critic"
ROLLOUT, REF = "actor_rollout_ref.rollout.log_prob", "actor_rollout_ref.ref.log_prob"


FOLLOWED: list[tuple[str, Any, list[str]]] = [
    (f"{ACTOR}.ppo_mini_batch_size", 32, [f"{CRITIC}.ppo_mini_batch_size"]),
    (
        f"{ACTOR}.ppo_micro_batch_size_per_gpu",
        3,
        [f"{role}_micro_batch_size_per_gpu" for role in (f"{CRITIC}.ppo", ROLLOUT, REF)],
    ),
    (
        f"{ACTOR}.use_dynamic_bsz",
        True,
        [f"{role}use_dynamic_bsz" for role in ("critic.", f"{ROLLOUT}_", f"{REF}_")],
    ),
    (
        f"{ACTOR}.ppo_max_token_len_per_gpu",
        777,
        [f"{role}_max_token_len_per_gpu" for role in (f"{CRITIC}.ppo", ROLLOUT, REF)],
    ),
    (f"{ACTOR}.ppo_epochs", 3, [f"{CRITIC}.ppo_epochs"]),
    (f"{ACTOR}.loss_agg_mode", "token-sum", [f"{CRITIC}.loss_agg_mode"]),
    (
        f"{ACTOR}.fsdp_config.dtype",
        "float64",
        ["critic.fsdp_config.dtype", "actor_rollout_ref.ref.fsdp_config.dtype"],
    ),
    ("actor_rollout_ref.model.path", "/some/model", ["critic.model.path"]),
    ("actor_rollout_ref.model.trust_remote_code", True, ["critic.model.trust_remote_code"]),
    ("data.max_response_length", 9, [f"{ACTOR}.loss_scale_factor"]),
]


def test_sizes_of_the_other_roles_follow_the_actor() -> None:
    before, config = load_config(), load_config([f"{key}={value}" for key, value, _ in FOLLOWED])
    for _, value, followers in FOLLOWED:
        assert {name: get_value(config, name) for name in followers} == dict.fromkeys(followers, value)
        assert value not in [get_value(before, name) for name in followers]


def test_a_follower_can_be_set_apart() -> None:
    config = load_config(
        ["data.train_batch_size=256", f"{ACTOR}.ppo_mini_batch_size=64", "critic.ppo_mini_batch_size=128"]
    )
    assert (config.critic.ppo_mini_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size) == (128, 64)


def test_run_directory_follows_project_and_experiment() -> None:
    config = load_config(["trainer.project_name=p", "trainer.experiment_name=e"])
    assert config.trainer.default_local_dir == "outputs/p/e"


# --- what is refused -------------------------------------------------------------------------------------------------


def test_all_faults_of_overrides_come_in_one_message() -> None:
    found = faults("data.sed=3", "trainer.tset_freq=1", "foo", "+data.seed=4", "actor_rollout_ref.hybrid_engine=true")
    assert found == [
        "data.sed=3: no such key; did you mean data.seed?",
        "trainer.tset_freq=1: no such key; did you mean trainer.test_freq?",
        "foo: is not an override of the form key=value (special signs in a value need quotes): "
        "missing EQUAL at '<EOF>'",
        "data.seed: is a key of the schema: write data.seed=…, without the leading +",
        "actor_rollout_ref.hybrid_engine=true: the rollout shares the actor's devices unless it has a pool: use "
        "trainer.role_pools.rollout",
    ]


def test_all_faults_of_values_come_in_one_message_with_key_value_and_rule() -> None:
    found = faults(
        "data.seed=-1", "data.truncation=middle", "trainer.logger=console", "data.shuffle=yes", "algorithm.lam=2"
    )
    assert sorted(found) == [
        "algorithm.lam=2: must be less than or equal to 1",
        "data.seed=-1: must be greater than or equal to 0",
        "data.shuffle=yes: must be true or false",
        "data.truncation=middle: must be 'error', 'left' or 'right'",
        "trainer.logger=console: must be a list, as in [console]",
    ]


def test_all_faults_of_rules_come_in_one_message() -> None:
    found = faults(
        "trainer.experiment_name=a b", "trainer.val_only=true", "data.train_batch_size=255", "data.seed=1e30"
    )
    assert len(found) == 1  # a number with a point or an exponent is no whole number, and rules wait for the types
    found = faults("trainer.experiment_name=a b", "data.train_batch_size=255", "trainer.n_gpus_per_node=3")
    assert sorted({line.split("=")[0] for line in found}) == [
        "actor_rollout_ref.actor.ppo_mini_batch_size",
        "critic.ppo_mini_batch_size",
        "trainer.experiment_name",
    ]
    assert len(found) == 5  # both rules of each mini-batch


@pytest.mark.parametrize("change", ["drop", "swap"])
def test_a_key_with_one_letter_wrong_gets_the_right_suggestion(change: str) -> None:
    right, wrong = 0, []
    for key in LEAVES:
        group, _, name = key.rpartition(".")
        for place in sorted({0, len(name) // 2, len(name) - 2}):
            if change == "drop":
                typo = name[:place] + name[place + 1 :]
            else:
                typo = name[:place] + name[place + 1 : place + 2] + name[place : place + 1] + name[place + 2 :]
            if place < 0 or typo in ("", name) or f"{group}.{typo}" in LEAVES:
                continue
            if unknown_key_text(f"{group}.{typo}") == f"no such key; did you mean {key}?":
                right += 1
            else:
                wrong.append(f"{group}.{typo}")
    assert right > 250
    assert right / (right + len(wrong)) >= 0.9, wrong


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("actor_rollout_ref.actr.clip_ratio_c", "actor_rollout_ref.actor.clip_ratio_c"),
        ("kl_coef", "algorithm.kl_ctrl.kl_coef"),
        ("actor.entropy_coef", "actor_rollout_ref.actor.entropy_coeff"),
        ("critic.learning.lr", "critic.optim.lr"),
        ("data.generator.nme", "data.generator.name"),
        ("rollout.temprature", "actor_rollout_ref.rollout.temperature"),
    ],
)
def test_a_key_in_the_wrong_group_gets_the_right_suggestion(key: str, meant: str) -> None:
    assert unknown_key_text(key) == f"no such key; did you mean {meant}?"


def test_a_key_like_no_other_gets_no_suggestion() -> None:
    assert unknown_key_text("quantum.flux") == "no such key; `governor config` prints all keys"


@pytest.mark.parametrize("sign", ["", "+", "++", "~"])
def test_a_new_key_is_refused_with_every_sign(sign: str) -> None:
    (line,) = faults(f"{sign}new.key=1")
    assert re.fullmatch(r"new\.key=1: no such key.*", line)


@pytest.mark.parametrize("sign", ["+", "++", "~"])
@pytest.mark.parametrize("key", ["data.seed", "data.generator", "actor_rollout_ref", "ray_kwargs"])
def test_a_known_key_takes_no_sign(sign: str, key: str) -> None:
    (line,) = faults(f"{sign}{key}=1")
    assert line == f"{key}: is a key of the schema: write {key}=…, without the leading {sign}"


@pytest.mark.parametrize(
    "text", ["seed", "data.seed 3", "=3", "@data=3", "data.seed=[1", "data..seed=3", "data.seed=~/x"]
)
def test_what_is_no_override_is_named_as_it_was_written(text: str) -> None:
    (line,) = faults(text)
    assert line.startswith(f"{text}: is not an override of the form key=value")


@pytest.mark.parametrize("text", ["data.seed=1,2", "data.seed=choice(1,2)", "data.seed=range(1,3)"])
def test_a_sweep_is_refused(text: str) -> None:
    (line,) = faults(text)
    assert line.startswith(f"{text}: is several values; give one")


@pytest.mark.parametrize("text", ["hydra.run.dir=x", "hydra.mode=MULTIRUN", "hydra=x", "+hydra.searchpath=[/x]"])
def test_settings_of_hydra_are_refused(text: str) -> None:
    (line,) = faults(text)
    assert "Hydra's own settings have no effect here" in line


@pytest.mark.parametrize("key", LEAVES)
def test_every_leaf_refuses_a_value_of_another_type(key: str) -> None:
    values = default_values()
    set_value(values, key, "text" if dict in LEAVES[key] else {"a": 1})
    assert any(line.startswith(f"{key}=") for line in value_faults(values))


@pytest.mark.parametrize("key", LEAVES)
def test_every_leaf_takes_null_only_where_the_schema_says_so(key: str) -> None:
    values = default_values()
    set_value(values, key, None)
    if type(None) not in LEAVES[key]:
        assert any(line.startswith(f"{key}=null: must be ") for line in value_faults(values))
        return
    # A rule over several keys may need a value; it asks for one in other words.
    assert not any("must be" in line for line in value_faults(values | {"unknown": 1}))


@pytest.mark.parametrize("key", CHOICES)
def test_every_choice_is_listed_when_another_is_asked_for(key: str) -> None:
    values = default_values()
    set_value(values, key, "nope")
    (line,) = [line for line in value_faults(values) if line.startswith(f"{key}=nope: must be ")]
    assert all(f"'{choice}'" in line for choice in CHOICES[key])


@pytest.mark.parametrize("key", NUMBERS)
def test_every_number_has_a_lower_bound(key: str) -> None:
    values = default_values()
    set_value(values, key, -2)
    assert any(line.startswith(f"{key}=-2: must be greater than ") for line in value_faults(values))


@pytest.mark.parametrize("key", FLOATS)
@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
def test_every_float_refuses_nan_and_infinity_where_it_means_nothing(key: str, number: str) -> None:
    values = default_values()
    is_list = list in LEAVES[key]
    set_value(values, key, [float(number), 0.9] if is_list else float(number))
    if number == "inf" and key in UNBOUNDED:
        assert get_value(check_values(values), key) == float("inf")
        return
    name, rule = (
        f"{key}.0" if is_list else key,
        "must be greater than 0" if key in UNBOUNDED else "must be a finite number",
    )
    rule = "must be a finite number" if number == "nan" else rule
    assert [line for line in value_faults(values) if line.startswith(f"{name}=")] == [f"{name}={number}: {rule}"]


def test_nan_is_refused_on_the_command_line_too() -> None:
    (line,) = faults("actor_rollout_ref.actor.optim.lr=nan")
    assert line == "actor_rollout_ref.actor.optim.lr=nan: must be a finite number"


def test_a_text_that_reads_as_a_number_is_told_how_to_be_quoted() -> None:
    (line,) = faults("trainer.experiment_name=7")
    way_out = re.search(r"'(.*)'$", line)
    assert way_out is not None
    assert load_config([way_out[1]]).trainer.experiment_name == "7"


def test_a_group_of_keys_refuses_a_value_and_names_a_key() -> None:
    (line,) = faults("data.generator=copy")
    assert line == "data.generator=copy: is a group of keys; set them one by one, as in data.generator.name=…"


def test_a_mapping_is_checked_key_by_key() -> None:
    assert load_config(["data.generator={name:addition,num_digits:2}"]).data.generator.num_digits == 2
    assert faults("data.generator={name:copy,num_digts:3}") == [
        "data.generator.num_digts=3: no such key; did you mean data.generator.num_digits?"
    ]
    assert load_config(["data={seed:3}"]).data.seed == 3
    assert faults("data={sed:3}") == ["data.sed=3: no such key; did you mean data.seed?"]


def test_an_interpolation_of_an_unknown_key_names_the_key_that_holds_it() -> None:
    assert faults("trainer.project_name=${nope}") == ["trainer.project_name: Interpolation key 'nope' not found"]


# --- open mappings ---------------------------------------------------------------------------------------------------


def test_the_open_mappings_are_those_of_the_design() -> None:
    assert set(open_mappings()) == {
        "data.apply_chat_template_kwargs",
        "data.generator.task_kwargs",
        "actor_rollout_ref.model.override_config",
        "actor_rollout_ref.rollout.engine_kwargs.vllm",
        "critic.model.override_config",
        "reward.reward_model.apply_chat_template_kwargs",
        "reward.reward_model.override_config",
        "reward.custom_reward_function.reward_kwargs",
        "ray_kwargs.ray_init",
        POOLS,
    }


# What reads data.generator.task_kwargs, and engine_kwargs.vllm.
READERS = ["data.generator.name=reasoning_gym", "data.generator.task=gcd", "actor_rollout_ref.rollout.name=vllm"]


def test_every_open_mapping_takes_new_keys() -> None:
    keys = [key for key in open_mappings() if key != POOLS]
    config = load_config([*READERS, *(f"{key}.new.deep=1" for key in keys)])
    assert {get_value(config, f"{key}.new.deep") for key in keys} == {1}


def test_an_open_mapping_takes_every_form() -> None:
    keys, texts = [key for key in open_mappings() if key != POOLS], [".a=1", "={b:1}"]
    overrides = [f"{sign}{key}{text}" for key, text in zip(keys, texts * 2, strict=False) for sign in ("", "+", "++")]
    config = load_config([*READERS, *overrides])
    assert [get_value(config, f"{key}.{name}") for key, name in zip(keys, "abab", strict=False)] == [1] * 4


@pytest.mark.parametrize(
    "pools",
    [[f"{POOLS}.a.nnodes=1", f"{POOLS}.a.n_gpus_per_node=2"], [f"+{POOLS}={{a:{{nnodes:1,n_gpus_per_node:2}}}}"]],
    ids=["keys", "mapping"],
)
def test_a_pool_is_given_key_by_key_or_as_a_mapping_and_survives_the_way_through_overrides(pools: list[str]) -> None:
    config = load_config([*pools, "trainer.role_pools.critic=a"])
    assert config.trainer.resource_pools == {"a": PoolConfig(nnodes=1, n_gpus_per_node=2)}
    assert load_config(overrides_of(to_plain(config))) == config


@pytest.mark.parametrize("template", ["it's", "ends in \\", "a\\'b\n", "${cost} is \\${cost}", "{{ x }}\\\n"])
def test_any_text_survives_the_way_through_overrides(template: str) -> None:
    plain = to_plain(load_config())
    plain["actor_rollout_ref"]["model"]["custom_chat_template"] = template
    plain["data"]["val_files"] = [template, "a,b.parquet"]
    assert to_plain(load_config(overrides_of(plain))) == plain


def test_what_is_wrong_inside_a_pool_is_told_with_its_full_key() -> None:
    assert faults(f"{POOLS}.a.nnodes=0", f"{POOLS}.a.n_gpus_per_node=many", f"{POOLS}.a.gpus=3", f"{POOLS}.b=2") == [
        f"{POOLS}.a.gpus=3: no such key; each of {POOLS} has nnodes and n_gpus_per_node",
        f"{POOLS}.a.nnodes=0: must be greater than 0",
        f"{POOLS}.a.n_gpus_per_node=many: must be a whole number",
        f"{POOLS}.b=2: is a group of keys; set them one by one, as in {POOLS}.b.nnodes=…",
    ]
    assert faults(f"{POOLS}.a.nnodes=1") == [f"{POOLS}.a.n_gpus_per_node: has no value"]


@pytest.mark.parametrize("value", ["3", "null"])
def test_an_open_mapping_must_stay_a_mapping(value: str) -> None:
    assert faults(f"ray_kwargs.ray_init={value}") == [
        f"ray_kwargs.ray_init={value}: must be a mapping, as in {{name:value}}"
    ]


def test_an_open_mapping_cannot_be_deleted_but_an_entry_can(tmp_path: Path) -> None:
    (line,) = faults("~ray_kwargs.ray_init")
    assert "without the leading ~" in line
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\ndefaults: [copy_ppo]\nray_kwargs: {ray_init: {num_cpus: 2, address: x}}\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    config = load_config(["experiment=mine", "~ray_kwargs.ray_init.address"], config_dir=str(tmp_path))
    assert config.ray_kwargs.ray_init == {"num_cpus": 2}


# --- experiments and files of the user's -----------------------------------------------------------------------------


def test_a_missing_experiment_lists_the_choices() -> None:
    assert faults("experiment=nope") == [f"experiment=nope: no such file; there are {', '.join(EXPERIMENTS)}"]


@pytest.mark.parametrize("group", ["data", "trainer", "algorithm"])
def test_a_missing_group_file_lists_the_choices(group: str) -> None:
    assert faults(f"{group}=nope") == [f"{group}=nope: no such file; there are default"]


@pytest.mark.parametrize("value", ["3", "true"])
def test_a_choice_of_a_file_must_be_a_name(value: str) -> None:
    assert faults(f"experiment={value}") == [f"experiment={value}: must be the name of a file of config/experiment/"]
    assert faults(f"data={value}") == [f"data={value}: must be the name of a file of config/data/"]


@pytest.mark.parametrize("sign", ["+", "++"])
def test_an_experiment_is_chosen_without_a_sign(sign: str) -> None:
    assert faults(f"{sign}experiment=copy_grpo") == [f"experiment: write experiment=…, without the leading {sign}"]


@pytest.mark.parametrize("text", ["experiment=null", "~experiment"])
def test_no_experiment_leaves_the_groups_defaults(text: str) -> None:
    config = load_config([text, "data.generator.name=copy"])
    assert (config.data.train_batch_size, config.trainer.experiment_name) == (1024, "default")


def test_no_ablation_is_a_choice_too() -> None:
    assert load_config(["ablation=null"]) == load_config()


def test_a_group_that_has_a_package_is_named_with_it() -> None:
    (line,) = faults("actor=default")
    assert line == "actor: Could not override 'actor'. Did you mean to override actor@actor_rollout_ref.actor?"


def write_experiment(folder: Path, name: str, text: str, *, header: str = "# @package _global_\n") -> str:
    (folder / "experiment").mkdir(parents=True, exist_ok=True)
    (folder / "experiment" / f"{name}.yaml").write_text(header + text, encoding="utf-8")
    return str(folder)


@pytest.mark.parametrize("folder", ["with space, [and] it's", "$HOME ${x}"])
def test_an_experiment_of_the_users_own_works_from_any_folder(tmp_path: Path, folder: str) -> None:
    path = write_experiment(tmp_path / folder, "mine", "defaults: [copy_grpo]\ndata: {seed: 11}\n")
    config = load_config(["experiment=mine", "data.max_response_length=7"], config_dir=path)
    assert (config.data.seed, config.data.max_response_length, config.algorithm.adv_estimator) == (11, 7, "grpo")


def test_a_group_file_of_the_users_own_works(tmp_path: Path) -> None:
    (tmp_path / "optim").mkdir()
    (tmp_path / "optim" / "fast.yaml").write_text("defaults: [adamw]\nbetas: [0.8, 0.9]\n")
    config = load_config(["optim@critic.optim=fast"], config_dir=str(tmp_path))
    assert (config.critic.optim.betas, config.actor_rollout_ref.actor.optim.betas) == ([0.8, 0.9], [0.9, 0.999])


def test_the_users_experiments_are_among_the_choices(tmp_path: Path) -> None:
    path = write_experiment(tmp_path, "mine", "data: {seed: 1}\n")
    (line,) = faults("experiment=nope", config_dir=path)
    assert line == f"experiment=nope: no such file; there are {', '.join(sorted([*EXPERIMENTS, 'mine']))}"


def test_unknown_keys_of_a_users_file_are_refused_with_their_values(tmp_path: Path) -> None:
    text = "defaults: [copy_ppo]\ndata: {sed: 3, generator: {nme: copy}}\nreward_model: {enable: true}\n"
    found = faults("experiment=mine", config_dir=write_experiment(tmp_path, "mine", text))
    assert sorted(found) == [
        "data.generator.nme=copy: no such key; did you mean data.generator.name?",
        "data.sed=3: no such key; did you mean data.seed?",
        "reward_model={enable:true}: its parts are in reward: use reward.reward_model, reward.reward_manager.name and "
        "reward.reward_kwargs",
    ]


def test_a_users_file_without_its_package_line_is_told_so(tmp_path: Path) -> None:
    found = faults("experiment=mine", config_dir=write_experiment(tmp_path, "mine", "data: {seed: 3}\n", header=""))
    assert found[0].startswith(
        "experiment={data:{seed:3}}: its file does not begin with the line '# @package _global_'"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data: [1\n", "line 3: is not YAML: expected"),
        ("data:\n  seed: 1\n  seed: 2\n", "line 4: is not YAML: found dup"),
    ],
)
def test_a_users_file_that_is_not_yaml_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = write_experiment(tmp_path, "mine", text)
    (line,) = faults("experiment=mine", config_dir=path)
    assert line.startswith(f"{path}/experiment/mine.yaml {message}")


def test_a_users_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = write_experiment(tmp_path, "mine", "")
    (tmp_path / "experiment" / "mine.yaml").write_bytes(b"# @package _global_\ndata: {seed: \xff}\n")
    (line,) = faults("experiment=mine", config_dir=path)
    assert line.startswith(f"--config-dir={path}: holds a file that is not UTF-8")


def test_a_users_file_that_would_be_passed_over_is_refused(tmp_path: Path) -> None:
    path = write_experiment(tmp_path, "copy_ppo", "data: {seed: 11}\n")
    assert faults("experiment=copy_ppo", config_dir=path) == [
        f"--config-dir={path}/experiment/copy_ppo.yaml: has the name of a file of Governor's: rename it"
    ]


def test_a_config_dir_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    assert faults(config_dir=str(tmp_path / "no")) == [f"--config-dir={tmp_path / 'no'}: no such folder"]


def test_a_missing_main_file_lists_the_choices() -> None:
    assert faults(config_name="nope") == ["--config-name=nope: no such file; there are ppo_trainer"]


def test_a_main_file_of_the_users_own_works_from_any_folder(tmp_path: Path) -> None:
    folder = tmp_path / "its, own"
    folder.mkdir()
    (folder / "mine.yaml").write_text("defaults: [ppo_trainer, _self_]\ndata: {seed: 12}\n")
    config = load_config(["data.max_response_length=7"], config_name="mine", config_dir=str(folder))
    assert (config.data.seed, config.data.max_response_length, config.data.generator.name) == (12, 7, "copy")


def test_a_main_file_of_the_users_own_must_have_all_keys(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text("data: {seed: 1}\nalgorithm: {gamma: 2.0}\n")
    found = faults(config_name="small", config_dir=str(tmp_path))
    assert {"data.train_files: has no value", "trainer: has no value"} < set(found)
    assert "algorithm.gamma=2.0: must be less than or equal to 1" in found


# --- plain forms -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["1e5", "null", "${", r"a\${x}", r"\\${", "{{ a }} # b '\"", "ä\u202e\n x"])
def test_yaml_of_a_configuration_loads_back_equal(tmp_path: Path, text: str) -> None:
    values = default_values(
        actor_rollout_ref__model__custom_chat_template=text, actor_rollout_ref__actor__grad_clip=1e-7
    )
    values["data"]["apply_chat_template_kwargs"] = {"a": [text, None, {"b": text}]}
    config = check_values(values)
    path = write_experiment(tmp_path, "again", to_yaml(config))
    assert check_values(read_yaml(Path(path) / "experiment" / "again.yaml")) == config
    assert load_config(["experiment=again"], config_dir=path) == config  # as an experiment, where interpolations act


def test_reading_a_runs_yaml_interpolates_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "s3cret")
    path = tmp_path / "config.yaml"
    path.write_text("a: ${oc.env:SECRET}\nb: ${nope}\n")
    assert read_yaml(path) == {"a": "${oc.env:SECRET}", "b": "${nope}"}


def test_flatten_keeps_empty_mappings_as_leaves() -> None:
    assert flatten({"a": {"b": 1, "c": {}}, "d": [1]}) == {"a.b": 1, "a.c": {}, "d": [1]}
