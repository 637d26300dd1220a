"""Rules over several keys, checked before Ray starts."""

import re
from collections.abc import Iterator
from dataclasses import asdict, fields

from config.faults import Fault, shown
from config.gym_tasks import GYM_TASKS
from config.pools import GLOBAL_POOL, devices_of, role_pools
from config.reward_rules import reward_rules
from config.rollout_rules import correction_rules, engine_rules, sampling_rules
from config.schema import GovernorConfig
from config.secrets import secrets_in

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
POOL_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")  # it stands in keys and in names of files
# Arguments of apply_chat_template that decide what comes back, which is settled here.
RESERVED_TEMPLATE_KWARGS = {
    "conversation", "add_generation_prompt", "continue_final_message", "tokenize", "padding", "truncation", "max_length",
    "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
}  # fmt: skip


def check_rules(config: GovernorConfig) -> list[Fault]:
    """All faults of a configuration whose values have the right types."""
    pool_faults = list(_pool_rules(config))
    return [
        *pool_faults,
        *([] if pool_faults else _share_rules(config)),
        *_batch_rules(config),
        *_data_rules(config),
        *_template_rules(config),
        *_model_rules(config),
        *_memory_rules(config),
        *_lora_rules(config),
        *sampling_rules(config),
        *correction_rules(config),
        *engine_rules(config),
        *_training_rules(config),
        *reward_rules(config),
        *_run_rules(config),
        *_secret_rules(config),
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
    if data.seed >= 2**63:  # torch.manual_seed takes no more than 64 bits
        yield Fault("data.seed", data.seed, "must be below 2**63")


def _template_rules(config: GovernorConfig) -> Iterator[Fault]:
    groups = [("data", config.data.apply_chat_template_kwargs)]
    if config.reward.reward_model.enable:
        groups.append(("reward.reward_model", config.reward.reward_model.apply_chat_template_kwargs))
    for group, kwargs in groups:
        for name in sorted(RESERVED_TEMPLATE_KWARGS & set(kwargs)):
            yield Fault(f"{group}.apply_chat_template_kwargs.{name}", kwargs[name], "is set by Governor; drop it")


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


def _training_rules(config: GovernorConfig) -> Iterator[Fault]:
    """Rules of the KL controller, the critic's warm-up and the optimizers."""
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


def _secret_rules(config: GovernorConfig) -> Iterator[Fault]:
    for key in secrets_in(asdict(config)):
        yield Fault(
            key,
            None,  # not shown again
            "looks like a secret, and the configuration is written to disk and shown by Ray and trackers: read it from the "
            "environment where it is used (governor submit takes a variable along with --env NAME)",
        )


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
