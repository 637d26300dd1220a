"""Rules over several keys, checked before Ray starts, and the notices about settings that are legal but odd."""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config.gym_tasks import GYM_TASKS
from config.schema import GovernorConfig

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
# Arguments of apply_chat_template that decide what comes back, which is settled here.
RESERVED_TEMPLATE_KWARGS = {
    "conversation", "add_generation_prompt", "continue_final_message", "tokenize", "padding", "truncation", "max_length",
    "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
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
    return [
        *_batch_rules(config),
        *_data_rules(config),
        *_model_rules(config),
        *_sampling_rules(config),
        *_limiter_rules(config),
        *_reward_rules(config),
        *_run_rules(config),
    ]


def _batch_rules(config: GovernorConfig) -> Iterator[Fault]:
    data, n, devices = config.data, config.actor_rollout_ref.rollout.n, config.num_devices
    actor = config.actor_rollout_ref.actor
    roles = [("actor_rollout_ref.actor", actor)] + ([("critic", config.critic)] if config.uses_critic else [])
    for name, role in roles:
        key, size = f"{name}.ppo_mini_batch_size", role.ppo_mini_batch_size
        if data.train_batch_size % size:
            yield Fault(key, size, f"must divide data.train_batch_size={data.train_batch_size}, the prompts of a step")
        if size * n % devices:
            yield Fault(
                key,
                size,
                f"{size} prompts x rollout.n={n} are {size * n} rows, which {devices} devices cannot share equally",
            )
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
    for name in sorted(RESERVED_TEMPLATE_KWARGS & set(data.apply_chat_template_kwargs)):
        value = data.apply_chat_template_kwargs[name]
        yield Fault(f"data.apply_chat_template_kwargs.{name}", value, "is set by Governor; drop it")
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
        yield from _reward_function_faults(Path(custom.path), custom.name)
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
    if model.use_dynamic_bsz and model.max_length and model.forward_max_token_len_per_gpu < model.max_length:
        yield Fault(
            f"{key}.forward_max_token_len_per_gpu",
            model.forward_max_token_len_per_gpu,
            f"must hold the longest conversation, reward.reward_model.max_length={model.max_length} tokens",
        )
    for name in sorted(RESERVED_TEMPLATE_KWARGS & set(model.apply_chat_template_kwargs)):
        value = model.apply_chat_template_kwargs[name]
        yield Fault(f"{key}.apply_chat_template_kwargs.{name}", value, "is set by Governor; drop it")


def _reward_function_faults(path: Path, name: str) -> Iterator[Fault]:
    key = "reward.custom_reward_function"
    if not path.is_file():
        yield Fault(f"{key}.path", path, "no such file")
        return
    try:
        names = _module_names(ast.parse(path.read_bytes()).body)
    except (SyntaxError, ValueError) as error:
        yield Fault(f"{key}.path", path, f"is not Python: {error}")
        return
    if name not in names and "*" not in names:
        functions = sorted(found for found, is_function in names.items() if is_function)
        yield Fault(f"{key}.name", name, f"{path} defines no such function; it has {', '.join(functions) or 'none'}")


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
    updates = config.data.train_batch_size // actor.ppo_mini_batch_size * actor.ppo_epochs
    if updates == 1:
        yield (
            "A step has one actor update, so the ratio is 1 and PPO's clip cannot act. Lower "
            "actor_rollout_ref.actor.ppo_mini_batch_size or raise actor_rollout_ref.actor.ppo_epochs for it to."
        )
