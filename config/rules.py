"""Rules over several keys, checked before Ray starts, and the notices about settings that are legal but odd."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config.schema import GovernorConfig

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
GROUP_ESTIMATORS = ("grpo", "rloo", "reinforce_plus_plus_baseline")


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong: full key, value, and the rule with its way out."""

    key: str
    value: Any
    text: str

    def __str__(self) -> str:
        return f"{self.key}: {self.text}" if self.value is None else f"{self.key}={self.value}: {self.text}"


def check_rules(config: GovernorConfig) -> list[Fault]:
    """All faults of a configuration whose values have the right types."""
    return [
        *_batch_rules(config),
        *_sampling_rules(config),
        *_limiter_rules(config),
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
                key, size, f"{size} prompts x rollout.n={n} are {size * n} rows, which {devices} devices cannot share equally"
            )
    if not (data.train_files or data.generator.name):
        yield Fault("data.train_files", "[]", "name a file to train on, or choose a task with data.generator.name")
    if data.train_files and data.generator.name:
        yield Fault("data.generator.name", data.generator.name, "excludes data.train_files; set one of the two to null or []")
    longest = data.max_prompt_length + data.max_response_length
    rollout, ref = config.actor_rollout_ref.rollout, config.actor_rollout_ref.ref
    budgets = [(f"{name}.", role.use_dynamic_bsz, role.ppo_max_token_len_per_gpu, "ppo") for name, role in roles]
    budgets += [
        (f"actor_rollout_ref.{name}.", role.log_prob_use_dynamic_bsz, role.log_prob_max_token_len_per_gpu, "log_prob")
        for name, role in (("rollout", rollout), ("ref", ref))
    ]
    for prefix, dynamic, budget, kind in budgets:
        if dynamic and budget < longest:
            yield Fault(
                f"{prefix}{kind}_max_token_len_per_gpu",
                budget,
                f"must hold the longest row, data.max_prompt_length + data.max_response_length = {longest} tokens",
            )


def _sampling_rules(config: GovernorConfig) -> Iterator[Fault]:
    algorithm, rollout = config.algorithm, config.actor_rollout_ref.rollout
    if algorithm.adv_estimator in GROUP_ESTIMATORS and rollout.n == 1:
        yield Fault(
            "actor_rollout_ref.rollout.n",
            1,
            f"algorithm.adv_estimator={algorithm.adv_estimator} compares the responses to one prompt: use n of 2 or more",
        )
    val = rollout.val_kwargs
    if val.n > 1 and (not val.do_sample or val.temperature == 0):
        yield Fault(
            "actor_rollout_ref.rollout.val_kwargs.n",
            val.n,
            "greedy decoding gives the same response each time: use n=1, or do_sample=true with a temperature above 0",
        )


def _limiter_rules(config: GovernorConfig) -> Iterator[Fault]:
    algorithm = config.algorithm
    rows = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    if algorithm.use_kl_in_reward and algorithm.kl_ctrl.type == "adaptive" and rows >= 5 * algorithm.kl_ctrl.horizon:
        yield Fault(
            "algorithm.kl_ctrl.horizon",
            algorithm.kl_ctrl.horizon,
            f"must be above {rows / 5:g}, a fifth of the {rows} rows of a step, or one step could bring the coefficient to 0",
        )
    if config.trainer.critic_warmup and not config.uses_critic:
        yield Fault(
            "trainer.critic_warmup",
            config.trainer.critic_warmup,
            f"algorithm.adv_estimator={algorithm.adv_estimator} has no critic to warm up: set it to 0",
        )
    for name, optim in (("actor_rollout_ref.actor", config.actor_rollout_ref.actor.optim), ("critic", config.critic.optim)):
        if len(optim.betas) != 2:
            yield Fault(f"{name}.optim.betas", optim.betas, "needs two numbers")


def _run_rules(config: GovernorConfig) -> Iterator[Fault]:
    trainer = config.trainer
    for key in ("project_name", "experiment_name"):
        value = getattr(trainer, key)
        if not NAME_PATTERN.fullmatch(value):
            yield Fault(f"trainer.{key}", value, "must be letters, digits, '.', '_' and '-', at most 100, not first '.', '_', '-'")
    if trainer.total_training_steps is not None and trainer.critic_warmup >= trainer.total_training_steps:
        yield Fault("trainer.critic_warmup", trainer.critic_warmup, "leaves no step of trainer.total_training_steps for the actor")
    if trainer.val_only and not (config.data.val_files or config.data.generator.name):
        yield Fault("trainer.val_only", True, "needs data.val_files")
    custom = config.reward.custom_reward_function
    if custom.path is not None:
        yield from _reward_function_faults(Path(custom.path), custom.name)


def _reward_function_faults(path: Path, name: str) -> Iterator[Fault]:
    key = "reward.custom_reward_function"
    if not path.is_file():
        yield Fault(f"{key}.path", path, "no such file")
        return
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError) as error:
        yield Fault(f"{key}.path", path, f"is not Python: {error}")
        return
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    bound = {target.id for node in tree.body if isinstance(node, ast.Assign) for target in node.targets if isinstance(target, ast.Name)}
    imported = {
        (alias.asname or alias.name) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names
    }
    if name not in names | bound | imported:
        yield Fault(f"{key}.name", name, f"{path} defines no such function; it has {', '.join(sorted(names)) or 'none'}")


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
            f"actor_rollout_ref.actor.kl_loss_type={actor.kl_loss_type} has an expected gradient of 0: it is logged but "
            "cannot pull the policy back. Use low_var_kl, k2 or k1+."
        )
    if actor.use_kl_loss and actor.kl_loss_coef == 0:
        yield "actor_rollout_ref.actor.kl_loss_coef=0 pays for a reference policy and does nothing."
    updates = config.data.train_batch_size // actor.ppo_mini_batch_size * actor.ppo_epochs
    if updates == 1:
        yield (
            "A step has one actor update, so the ratio is 1 and PPO's clip cannot act. Lower "
            "actor_rollout_ref.actor.ppo_mini_batch_size or raise actor_rollout_ref.actor.ppo_epochs for it to."
        )
