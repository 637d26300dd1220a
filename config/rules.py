"""Rules over several keys, checked before Ray starts, and the notices about settings that are legal but odd."""

import ast
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from config.gym_tasks import GYM_TASKS
from config.pools import GLOBAL_POOL, devices_of, pool_key, pools_of, role_pools
from config.schema import GovernorConfig, RolloutConfig, RolloutCorrectionConfig, bounds_of

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
POOL_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")  # it stands in keys and in names of files
# Arguments of apply_chat_template that decide what comes back, which is settled here.
RESERVED_TEMPLATE_KWARGS = {
    "conversation", "add_generation_prompt", "continue_final_message", "tokenize", "padding", "truncation", "max_length",
    "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
}  # fmt: skip
# Keys of rollout that the back end vllm alone reads.
VLLM_KEYS = (
    "tensor_model_parallel_size", "gpu_memory_utilization", "enforce_eager", "free_cache_engine", "enable_prefix_caching",
    "max_model_len", "max_num_batched_tokens",
)  # fmt: skip
# Arguments of vLLM's engine that follow from other keys, or from how it is run here.
RESERVED_ENGINE_KWARGS = {
    "model": "actor_rollout_ref.model.path",
    "tokenizer": "actor_rollout_ref.model.tokenizer_path",
    "trust_remote_code": "actor_rollout_ref.model.trust_remote_code",
    "hf_overrides": "actor_rollout_ref.model.override_config",
    "seed": "data.seed",
    "enable_sleep_mode": "actor_rollout_ref.rollout.free_cache_engine",
    "tensor_parallel_size": "actor_rollout_ref.rollout.tensor_model_parallel_size",
    **{
        name: f"actor_rollout_ref.rollout.{name}"
        for name in (
            "dtype", "max_num_seqs", "max_model_len", "max_num_batched_tokens", "enforce_eager", "enable_prefix_caching",
            "gpu_memory_utilization",
        )
    },
    **dict.fromkeys(
        (
            "distributed_executor_backend", "generation_config", "load_format", "logprobs_mode", "skip_tokenizer_init",
            "data_parallel_size", "pipeline_parallel_size", "runner", "worker_cls",
        )
    ),
}  # fmt: skip
GROUP_ESTIMATORS = ("grpo", "rloo", "reinforce_plus_plus_baseline")


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong: full key, value, and the rule with its way out."""

    key: str
    value: Any  # None where there is none to show
    text: str

    def __str__(self) -> str:
        if self.value is None:
            return f"{self.key}: {self.text}"
        value = shown(self.value)
        return f"{self.key}={value if len(value) <= 200 else f'{value[:199]}…'}: {self.text}"


def shown(value: Any) -> str:
    """A value as a user writes it in an override."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case list():
            return f"[{','.join(map(shown, value))}]"
        case dict():
            return f"{{{','.join(f'{key}:{shown(item)}' for key, item in value.items())}}}"
        case _:
            return str(value)


def check_rules(config: GovernorConfig) -> list[Fault]:
    """All faults of a configuration whose values have the right types."""
    pool_faults = list(_pool_rules(config))
    return [
        *pool_faults,
        *([] if pool_faults else _share_rules(config)),
        *_batch_rules(config),
        *_data_rules(config),
        *_model_rules(config),
        *_memory_rules(config),
        *_lora_rules(config),
        *_sampling_rules(config),
        *_correction_rules(config),
        *_engine_rules(config),
        *_limiter_rules(config),
        *_reward_rules(config),
        *_run_rules(config),
    ]


def _pool_rules(config: GovernorConfig) -> Iterator[Fault]:
    pools, placed = config.trainer.resource_pools, config.trainer.role_pools
    roles = {role: getattr(placed, role) for role in placed.__slots__}
    for name in pools:
        key = f"trainer.resource_pools.{name}"
        if name == GLOBAL_POOL:
            yield Fault(
                key, None, "is the pool of trainer.nnodes and trainer.n_gpus_per_node, where the actor lives: set those"
            )
        elif not POOL_PATTERN.fullmatch(name):
            yield Fault(
                key, None, "a pool's name is at most 32 letters, digits, '_' and '-', the first a letter or digit"
            )
        elif name not in roles.values():
            yield Fault(
                key,
                None,
                f"no role lives in it: drop it, or send a role there, as in trainer.role_pools.rollout={name}",
            )
    for role, name in roles.items():
        if name != GLOBAL_POOL and name not in pools:
            known = ", ".join([GLOBAL_POOL, *pools])
            yield Fault(
                f"trainer.role_pools.{role}",
                name,
                f"no such pool (there are: {known}); a new one needs trainer.resource_pools.{name or 'NAME'}.nnodes=… and "
                f"trainer.resource_pools.{name or 'NAME'}.n_gpus_per_node=…",
            )


def _share_rules(config: GovernorConfig) -> Iterator[Fault]:
    """What is trained is shared equally by the devices of its role's pool."""
    n = config.actor_rollout_ref.rollout.n
    roles = [("actor", "actor_rollout_ref.actor", config.actor_rollout_ref.actor.ppo_mini_batch_size)]
    if config.uses_critic:
        roles.append(("critic", "critic", config.critic.ppo_mini_batch_size))
    for role, group, size in roles:
        devices = devices_of(config, role)
        if size * n % devices:
            pool = role_pools(config)[role]
            where = "" if pool == GLOBAL_POOL else f" of trainer.resource_pools.{pool}"
            yield Fault(
                f"{group}.ppo_mini_batch_size",
                size,
                f"{size} prompts x rollout.n={n} are {size * n} rows, which {devices} devices{where} cannot share equally",
            )


def _batch_rules(config: GovernorConfig) -> Iterator[Fault]:
    data, actor = config.data, config.actor_rollout_ref.actor
    roles = [("actor_rollout_ref.actor", actor)] + ([("critic", config.critic)] if config.uses_critic else [])
    for name, role in roles:
        key, size = f"{name}.ppo_mini_batch_size", role.ppo_mini_batch_size
        if data.train_batch_size % size:
            yield Fault(key, size, f"must divide data.train_batch_size={data.train_batch_size}, the prompts of a step")
    longest = data.max_prompt_length + data.max_response_length
    rollout, ref = config.actor_rollout_ref.rollout, config.actor_rollout_ref.ref
    budgets = [(f"{name}.", role.use_dynamic_bsz, role.ppo_max_token_len_per_gpu, "ppo") for name, role in roles]
    budgets += [
        (f"actor_rollout_ref.{name}.", role.log_prob_use_dynamic_bsz, role.log_prob_max_token_len_per_gpu, "log_prob")
        for name, role in (("rollout", rollout), *([("ref", ref)] if config.uses_reference else []))
    ]
    for prefix, dynamic, budget, kind in budgets:
        if dynamic and budget < longest:
            yield Fault(
                f"{prefix}{kind}_max_token_len_per_gpu",
                budget,
                f"must hold the longest row, data.max_prompt_length + data.max_response_length = {longest} tokens",
            )


def _data_rules(config: GovernorConfig) -> Iterator[Fault]:
    data = config.data
    if not (data.train_files or data.generator.name):
        yield Fault("data.train_files", "[]", "name a file to train on, or choose a task with data.generator.name")
    if data.train_files and data.generator.name:
        yield Fault(
            "data.generator.name",
            data.generator.name,
            "excludes data.train_files: set the one to null or the other to []",
        )
    task = data.generator.task
    if data.generator.name == "reasoning_gym" and task not in GYM_TASKS:
        yield Fault("data.generator.task", task or "null", f"must be one of {', '.join(GYM_TASKS)}")
    if data.generator.name != "reasoning_gym":
        for key, value in (("task", task), ("task_kwargs", data.generator.task_kwargs)):
            if value:
                yield Fault(f"data.generator.{key}", value, "needs data.generator.name=reasoning_gym")
    for key in ("train_max_samples", "val_max_samples"):
        if getattr(data, key) == 0:
            yield Fault(f"data.{key}", 0, "leaves no row: use -1 for all, or a number above 0")
    yield from _template_faults("data", data.apply_chat_template_kwargs)
    if data.seed >= 2**63:  # torch.manual_seed takes no more than 64 bits
        yield Fault("data.seed", data.seed, "must be below 2**63")


def _model_rules(config: GovernorConfig) -> Iterator[Fault]:
    """Rules of the random model, which is built where `model.path` is null."""
    model, generator = config.actor_rollout_ref.model, config.data.generator
    if model.path is not None:
        return
    random, prefix = model.random_init, "actor_rollout_ref.model.random_init"
    if random.num_attention_heads % random.num_key_value_heads:
        yield Fault(
            f"{prefix}.num_key_value_heads",
            random.num_key_value_heads,
            f"must divide num_attention_heads={random.num_attention_heads}",
        )
    if random.head_dim % 2:
        yield Fault(f"{prefix}.head_dim", random.head_dim, "must be even, since rotary positions turn pairs")
    # Sums of operands up to 4 hold larger digits, so addition needs all of them.
    largest = {"copy": generator.max_digit, "addition": 9}.get(generator.name or "", -1)
    missing = [str(digit) for digit in range(largest + 1) if str(digit) not in random.alphabet]
    if missing:
        yield Fault(
            f"{prefix}.alphabet",
            random.alphabet,
            f"lacks {', '.join(missing)}, which data.generator.name={generator.name} asks for: add them",
        )
    others = {
        "actor_rollout_ref.model.tokenizer_path": model.tokenizer_path,
        "critic.model.path": config.critic.model.path,
    }
    for key, path in others.items():
        if path is not None:
            yield Fault(key, path, "needs actor_rollout_ref.model.path: the random model has its own vocabulary")


def _memory_rules(config: GovernorConfig) -> Iterator[Fault]:
    if config.actor_rollout_ref.ref.fsdp_config.optimizer_offload:
        yield Fault(
            "actor_rollout_ref.ref.fsdp_config.optimizer_offload",
            True,
            "the reference has no optimizer: set it to false",
        )


def _lora_rules(config: GovernorConfig) -> Iterator[Fault]:
    model, prefix = config.actor_rollout_ref.model, "actor_rollout_ref.model"
    if model.lora_rank == 0:
        if model.lora_adapter_path is not None:
            rule = f"needs {prefix}.lora_rank, the adapter's own: r in its adapter_config.json"
            yield Fault(f"{prefix}.lora_adapter_path", model.lora_adapter_path, rule)
        return
    if not model.target_modules:
        yield Fault(
            f"{prefix}.target_modules", model.target_modules, "names no layer: use all-linear, or a list of names"
        )
    pools = role_pools(config)
    if config.uses_reference and pools["ref"] != pools["actor"]:
        yield Fault(
            "trainer.role_pools.ref",
            pools["ref"],
            f"with LoRA the reference is the actor's model without its adapter: set it to {pools['actor']}, the actor's",
        )
    actor, ref = config.actor_rollout_ref.actor.fsdp_config, config.actor_rollout_ref.ref.fsdp_config
    for field in fields(ref) if config.uses_reference else ():
        wanted, value = getattr(actor, field.name), getattr(ref, field.name)
        if value != wanted:
            yield Fault(
                f"actor_rollout_ref.ref.fsdp_config.{field.name}",
                value,
                "with LoRA the reference is the actor's model without its adapter: drop it, or set it to "
                f"actor_rollout_ref.actor.fsdp_config.{field.name}={shown(wanted)}",
            )


def _sampling_rules(config: GovernorConfig) -> Iterator[Fault]:
    algorithm, rollout = config.algorithm, config.actor_rollout_ref.rollout
    if algorithm.adv_estimator in GROUP_ESTIMATORS and rollout.n == 1:
        yield Fault(
            "actor_rollout_ref.rollout.n",
            1,
            f"algorithm.adv_estimator={algorithm.adv_estimator} compares the responses to a prompt: use n of 2 or more",
        )
    val = rollout.val_kwargs
    if val.n > 1 and (not val.do_sample or val.temperature == 0 or val.top_k == 1):
        yield Fault(
            "actor_rollout_ref.rollout.val_kwargs.n",
            val.n,
            "greedy decoding gives the same response each time: use n=1, or do_sample=true with a temperature above 0 "
            "and a top_k other than 1",
        )


def _correction_rules(config: GovernorConfig) -> Iterator[Fault]:
    correction, rollout = config.algorithm.rollout_correction, config.actor_rollout_ref.rollout
    key = "algorithm.rollout_correction"
    if correction.bypass_mode:
        for name in ("rollout_is", "rollout_rs"):
            if getattr(correction, name) is not None:
                yield Fault(
                    f"{key}.{name}",
                    getattr(correction, name),
                    f"compares the policy with the sampler, which {key}.bypass_mode=true takes for the policy: set one of them off",
                )
        cuts = _cuts(rollout)
        if cuts:
            yield Fault(
                f"{key}.bypass_mode",
                True,
                f"takes the sampler's log-probabilities for the policy's, and they are not with {cuts}: set bypass_mode=false",
            )
    if correction.rollout_rs is not None and (text := _threshold_fault(correction, correction.rollout_rs)):
        yield Fault(f"{key}.rollout_rs_threshold", correction.rollout_rs_threshold, text)
    if correction.rollout_is is None and correction.rollout_is_batch_normalize:
        yield Fault(f"{key}.rollout_is_batch_normalize", True, f"needs weights: set {key}.rollout_is=token or sequence")


def _threshold_fault(correction: RolloutCorrectionConfig, mode: str) -> str | None:
    """What is wrong with the bounds of a rejection that is on."""
    if correction.rollout_rs_threshold is None:
        bounds = (
            "a band of sampler over policy, as in 0.5_2.0"
            if mode.endswith("k1")
            else "the largest value that stays, as in 0.01"
        )
        return f"rollout_rs={mode} needs {bounds}"
    try:
        lower, upper = bounds_of(correction.rollout_rs_threshold)
    except ValueError:
        return "must be a number, or two joined by an underscore, as in 0.5_2.0"
    if not mode.endswith("k1"):
        good = lower is None and 0 < upper < math.inf
        return None if good else f"must be one number above 0 with rollout_rs={mode}"
    # 0.5_2 is the number 0.52 to Hydra: the point after the 2 makes a band of it.
    good = 1 < upper < math.inf and (lower is None or 0 < lower < 1)
    return None if good else "must be a band around 1, where sampler and policy agree, as in 0.5_2.0"


def _cuts(rollout: RolloutConfig) -> str:
    """The settings that cut the distribution that is sampled from, as overrides; empty for none."""
    cuts = {"top_k": rollout.top_k > 0, "top_p": rollout.top_p < 1, "min_p": rollout.min_p > 0}
    return " ".join(
        f"actor_rollout_ref.rollout.{name}={shown(getattr(rollout, name))}" for name, cut in cuts.items() if cut
    )


def _engine_rules(config: GovernorConfig) -> Iterator[Fault]:
    """Rules of the rollout's back end."""
    rollout, prefix = config.actor_rollout_ref.rollout, "actor_rollout_ref.rollout"
    for key, source, value in (
        ("prompt_length", "max_prompt_length", config.data.max_prompt_length),
        ("response_length", "max_response_length", config.data.max_response_length),
    ):
        if getattr(rollout, key) != value:
            yield Fault(f"{prefix}.{key}", getattr(rollout, key), f"follows data.{source}={value}: set that one")
    if rollout.name != "vllm":
        shipped = _shipped_rollout()
        changed = {
            f"{prefix}.{key}": getattr(rollout, key) for key in VLLM_KEYS if getattr(rollout, key) != shipped[key]
        }
        changed |= {f"{prefix}.engine_kwargs.vllm.{key}": value for key, value in rollout.engine_kwargs.vllm.items()}
        for key, value in changed.items():
            yield Fault(key, value, f"is read by vllm alone: drop it, or choose {prefix}.name=vllm")
        return
    yield from _vllm_rules(config, rollout, prefix)


def _vllm_rules(config: GovernorConfig, rollout: RolloutConfig, prefix: str) -> Iterator[Fault]:
    for name, key in RESERVED_ENGINE_KWARGS.items():
        if name in rollout.engine_kwargs.vllm:
            way_out = f"use {key}" if key else "is set by Governor; drop it"
            yield Fault(f"{prefix}.engine_kwargs.vllm.{name}", rollout.engine_kwargs.vllm[name], way_out)
    longest = rollout.prompt_length + rollout.response_length
    if rollout.max_model_len is not None and rollout.max_model_len < longest:
        yield Fault(
            f"{prefix}.max_model_len",
            rollout.max_model_len,
            f"must hold data.max_prompt_length + data.max_response_length = {longest} tokens",
        )
    if rollout.max_num_batched_tokens < rollout.max_num_seqs:
        yield Fault(
            f"{prefix}.max_num_batched_tokens",
            rollout.max_num_batched_tokens,
            f"must hold a token of each of {prefix}.max_num_seqs={rollout.max_num_seqs} responses",
        )
    for key, temperature in (
        ("temperature", rollout.temperature),
        ("val_kwargs.temperature", rollout.val_kwargs.temperature),
    ):
        if 0 < temperature < 0.01:
            yield Fault(f"{prefix}.{key}", temperature, "vLLM samples at 0.01 below that: use 0.01 or more, or name=hf")
    name, size = role_pools(config)["rollout"], rollout.tensor_model_parallel_size
    pool = pools_of(config).get(name)  # none if there is a fault about it
    if pool is not None and pool.n_gpus_per_node % size:
        yield Fault(
            f"{prefix}.tensor_model_parallel_size",
            size,
            f"must divide {pool_key(name)}.n_gpus_per_node={pool.n_gpus_per_node}, a node's devices",
        )
    if (
        config.trainer.device == "cpu"
        and rollout.gpu_memory_utilization != _shipped_rollout()["gpu_memory_utilization"]
    ):
        yield Fault(
            f"{prefix}.gpu_memory_utilization",
            rollout.gpu_memory_utilization,
            f"has no effect with trainer.device=cpu: use {prefix}.engine_kwargs.vllm.kv_cache_memory_bytes",
        )


@cache
def _shipped_rollout() -> dict[str, Any]:
    return yaml.safe_load((Path(__file__).parent / "rollout" / "default.yaml").read_text(encoding="utf-8"))


def _limiter_rules(config: GovernorConfig) -> Iterator[Fault]:
    algorithm = config.algorithm
    rows = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    if algorithm.use_kl_in_reward and algorithm.kl_ctrl.type == "adaptive" and rows >= 5 * algorithm.kl_ctrl.horizon:
        yield Fault(
            "algorithm.kl_ctrl.horizon",
            algorithm.kl_ctrl.horizon,
            f"must be above {rows / 5:g}, a fifth of the {rows} rows of a step, "
            "or one step could bring the coefficient to 0",
        )
    if config.trainer.critic_warmup and not config.uses_critic:
        yield Fault(
            "trainer.critic_warmup",
            config.trainer.critic_warmup,
            f"algorithm.adv_estimator={algorithm.adv_estimator} has no critic to warm up: set it to 0",
        )
    actor, critic = config.actor_rollout_ref.actor, config.critic
    for name, optim in (("actor_rollout_ref.actor", actor.optim), ("critic", critic.optim)):
        if len(optim.betas) != 2:
            yield Fault(f"{name}.optim.betas", optim.betas, "needs two numbers")


def _run_rules(config: GovernorConfig) -> Iterator[Fault]:
    trainer = config.trainer
    for key in ("project_name", "experiment_name"):
        value = getattr(trainer, key)
        if not NAME_PATTERN.fullmatch(value):
            yield Fault(
                f"trainer.{key}",
                value,
                "must be at most 100 letters, digits, '.', '_' and '-', the first a letter or digit",
            )
    if not trainer.default_local_dir.strip():
        yield Fault("trainer.default_local_dir", "", "must name a folder")
    if trainer.total_training_steps is not None and trainer.critic_warmup >= trainer.total_training_steps:
        yield Fault(
            "trainer.critic_warmup",
            trainer.critic_warmup,
            f"leaves no step of trainer.total_training_steps={trainer.total_training_steps} for the actor",
        )
    if trainer.val_only and not (config.data.val_files or config.data.generator.name):
        yield Fault("trainer.val_only", True, "needs data.val_files")


def _reward_rules(config: GovernorConfig) -> Iterator[Fault]:
    custom, model = config.reward.custom_reward_function, config.reward.reward_model
    if custom.path is not None:
        yield from _reward_function_faults(Path(custom.path), custom.name, batched=custom.batched)
    elif custom.batched:
        yield Fault("reward.custom_reward_function.batched", True, "needs reward.custom_reward_function.path")
    overlong, limit = config.reward.reward_kwargs.overlong_buffer_cfg, config.data.max_response_length
    key = "reward.reward_kwargs.overlong_buffer_cfg"
    if overlong.enable and config.reward.reward_manager.name != "dapo":
        yield Fault(f"{key}.enable", True, "needs reward.reward_manager.name=dapo")
    if overlong.enable and not (overlong.len and overlong.len <= limit):
        value = "null" if overlong.len is None else overlong.len
        yield Fault(f"{key}.len", value, f"must be from 1 to data.max_response_length={limit} tokens")
    if model.enable:
        yield from _reward_model_rules(config)


def _reward_model_rules(config: GovernorConfig) -> Iterator[Fault]:
    custom, model, key = config.reward.custom_reward_function, config.reward.reward_model, "reward.reward_model"
    if model.model_path is None or not (Path(model.model_path) / "config.json").is_file():
        yield Fault(
            f"{key}.model_path",
            model.model_path or "null",
            "must be the folder of a Hugging Face sequence-classification model (with a config.json); nothing is downloaded",
        )
    if model.combine == "replace" and custom.path is not None:
        yield Fault(
            f"{key}.combine",
            "replace",
            f"would leave reward.custom_reward_function.path={custom.path} without effect: set it to null, or combine=add",
        )
    if model.coef == 0 and model.combine == "replace":
        yield Fault(f"{key}.coef", 0, "leaves no reward with combine=replace")
    if model.fsdp_config.optimizer_offload:
        yield Fault(f"{key}.fsdp_config.optimizer_offload", True, "the reward model is never trained: set it to false")
    if model.use_dynamic_bsz and model.max_length and model.forward_max_token_len_per_gpu < model.max_length:
        yield Fault(
            f"{key}.forward_max_token_len_per_gpu",
            model.forward_max_token_len_per_gpu,
            f"must hold the longest conversation, reward.reward_model.max_length={model.max_length} tokens",
        )
    yield from _template_faults(key, model.apply_chat_template_kwargs)


def _template_faults(group: str, kwargs: dict[str, Any]) -> Iterator[Fault]:
    for name in sorted(RESERVED_TEMPLATE_KWARGS & set(kwargs)):
        yield Fault(f"{group}.apply_chat_template_kwargs.{name}", kwargs[name], "is set by Governor; drop it")


def _reward_function_faults(path: Path, name: str, *, batched: bool) -> Iterator[Fault]:
    key = "reward.custom_reward_function"
    if not path.is_file():
        yield Fault(f"{key}.path", path, "no such file")
        return
    try:
        body = ast.parse(path.read_bytes()).body
        names = _module_names(body)
    except (SyntaxError, ValueError) as error:
        yield Fault(f"{key}.path", path, f"is not Python: {error}")
        return
    if name not in names and "*" not in names:
        functions = sorted(found for found, is_function in names.items() if is_function)
        yield Fault(f"{key}.name", name, f"{path} defines no such function; it has {', '.join(functions) or 'none'}")
    if batched and any(isinstance(node, ast.AsyncFunctionDef) and node.name == name for node in body):
        yield Fault(
            f"{key}.batched", True, f"{name} is an async def, which scores row by row: set it to false, or use def"
        )


def _module_names(body: Sequence[ast.stmt]) -> dict[str, bool]:
    """Names that a module's statements bind, those in `if`, `try` and `with` too, and whether each is a function."""
    names: dict[str, bool] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names[node.name] = True
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name): False for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {part.id: False for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
        else:
            inner = [getattr(node, field, []) for field in ("body", "orelse", "finalbody")]
            inner += [handler.body for handler in getattr(node, "handlers", [])]
            for statements in inner:
                names |= _module_names(statements)
    return names


def notices(config: GovernorConfig) -> Iterator[str]:
    """Sentences about settings that are allowed and that a user should know of, shown once at start."""
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    if actor.use_kl_loss and algorithm.use_kl_in_reward:
        yield (
            "Two KL penalties are on: algorithm.use_kl_in_reward=true and actor_rollout_ref.actor.use_kl_loss=true. "
            "Both pull towards the reference."
        )
    if actor.use_kl_loss and actor.kl_loss_type in ("k1", "kl"):
        yield (
            f"actor_rollout_ref.actor.kl_loss_type={actor.kl_loss_type} has an expected gradient of 0: it is logged "
            "but cannot pull the policy back. Use low_var_kl, k2 or k1+."
        )
    if actor.use_kl_loss and actor.kl_loss_coef == 0:
        yield "actor_rollout_ref.actor.kl_loss_coef=0 pays for a reference policy and does nothing."
    if algorithm.use_kl_in_reward and algorithm.kl_ctrl.kl_coef == 0:
        yield (
            "algorithm.kl_ctrl.kl_coef=0 pays for a reference policy and does nothing; it stays 0 with the adaptive "
            "controller too, which multiplies it."
        )
    correction, cuts = algorithm.rollout_correction, _cuts(config.actor_rollout_ref.rollout)
    if cuts and (correction.rollout_is or correction.rollout_rs):
        yield (
            f"algorithm.rollout_correction compares whole distributions, and {cuts} samples from a cut one: every ratio "
            "is smaller by the share of what was kept."
        )
    if correction.rollout_rs is None and correction.rollout_rs_threshold is not None:
        key = "algorithm.rollout_correction.rollout_rs"
        yield f"{key}_threshold={shown(correction.rollout_rs_threshold)} rejects nothing without {key}."
    for name in config.trainer.resource_pools:
        if name not in pools_of(config):
            yield f"trainer.resource_pools.{name} is not opened: none of the roles that it is for is in this run."
    if (
        config.actor_rollout_ref.rollout.name == "vllm"
        and config.trainer.device != "cuda"
        and config.trainer.cpu_threads > 1
    ):
        yield (
            f"trainer.cpu_threads={config.trainer.cpu_threads} with vLLM on CPU: threads that wait for each other in turn "
            "can slow a busy machine down many times. Start with OMP_WAIT_POLICY=PASSIVE in the environment, or use 1."
        )
    if config.actor_rollout_ref.model.lora_rank and config.uses_critic:
        yield "LoRA is the policy's: the critic is trained whole, as a second model with an optimizer of its full size."
    updates = config.data.train_batch_size // actor.ppo_mini_batch_size * actor.ppo_epochs
    if updates == 1 and not correction.bypass_mode:  # in bypass mode the ratio is to the sampler
        yield (
            "A step has one actor update, so the ratio is 1 and PPO's clip cannot act. Lower "
            "actor_rollout_ref.actor.ppo_mini_batch_size or raise actor_rollout_ref.actor.ppo_epochs for it to."
        )
