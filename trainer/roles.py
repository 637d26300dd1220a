"""The processes of a run and what lives in them: pools of devices, and the roles' worker groups. Ray must run."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import ray

from config.pools import pools_of, role_pools
from config.schema import GovernorConfig
from trainer.ppo.ray_trainer import WorkerGroups
from trainer.prepare import RunParts, absolute
from workers.engine.models import AdapterSpec, PolicySpec
from workers.groups import ActorRolloutGroup, CriticGroup, ReferenceGroup
from workers.placement import PoolSpec
from workers.pool import Pools
from workers.reward.group import RewardFunctions, RewardGroup
from workers.reward.model_group import RewardModelGroup


def open_pools(config: GovernorConfig, log_dir: Path, names: Collection[str] | None = None) -> Pools:
    """The processes on devices that the configuration asks for, of the pools of these names or of all."""
    trainer, device = config.trainer, _device(config)
    return Pools(
        [
            PoolSpec(
                name=name,
                nnodes=pool.nnodes,
                devices_per_node=pool.n_gpus_per_node,
                device=device,
                cpu_threads=trainer.cpu_threads,
                timeout_s=config.actor_rollout_ref.nccl_timeout,
                placement_timeout_s=trainer.placement_timeout_s,
                log_dir=str(log_dir),
            )
            for name, pool in pools_of(config).items()
            if names is None or name in names
        ]
    )


def worker_groups(parts: RunParts, pools: Pools, functions: RewardFunctions | None) -> WorkerGroups:
    """The roles of the run, built one after another in their pools' processes."""
    config, tokenizer = parts.config, parts.tokenizer
    roles, reference, critic, reward_model = config.actor_rollout_ref, None, None, None
    pool_of = {role: pools[name] for role, name in role_pools(config).items()}
    policy, first_policy = _policies(parts)
    actor = ActorRolloutGroup(pool_of["actor"], roles, policy, rollout_pool=pool_of["rollout"])
    if config.uses_reference:
        reference = ReferenceGroup(pool_of["ref"], roles, first_policy)
    if config.uses_critic:
        critic = CriticGroup(
            pool_of["critic"],
            config.critic,
            _critic_path(parts),
            seed=config.data.seed,
            max_response_length=config.data.max_response_length,
        )
    if config.reward.reward_model.enable:
        reward_model = RewardModelGroup(pool_of["reward_model"], config.reward.reward_model)
    reward = RewardGroup(
        config.reward,
        tokenizer.tokenizer,
        tokenizer.eos_token_ids,
        max_response_length=config.data.max_response_length,
        functions=functions,
        model=reward_model,
    )
    return WorkerGroups(actor_rollout=actor, reward=reward, reference=reference, critic=critic)


def _policies(parts: RunParts) -> tuple[PolicySpec, PolicySpec]:
    """The policy that is trained, as it goes on, and the run's first, which is the reference."""
    tokens = parts.tokenizer
    first = PolicySpec(path=parts.model_path, eos_token_ids=tokens.eos_token_ids, pad_token_id=tokens.pad_token_id)
    here = None if parts.checkpoint is None else str(parts.checkpoint.folder / "actor")
    if parts.adapter is None:
        return (first if here is None else replace(first, path=here)), first
    # A fresh adapter changes nothing: without it stands the reference. A trained one is kept as it was at the start.
    trained = parts.config.actor_rollout_ref.model.lora_adapter_path is not None
    kept = parts.adapter.path if trained and parts.config.uses_reference else None
    policy = replace(first, adapter=AdapterSpec(path=here or parts.adapter.path, reference=kept))
    return policy, policy


def _critic_path(parts: RunParts) -> str:
    """The folder that the critic goes on from, or begins with."""
    if parts.checkpoint is not None:
        return str(parts.checkpoint.folder / "critic")
    path = parts.config.critic.model.path
    return parts.model_path if path is None else absolute(path)


def _device(config: GovernorConfig) -> str:
    if config.trainer.device != "auto":
        return config.trainer.device
    return "cuda" if ray.cluster_resources().get("GPU", 0) > 0 else "cpu"
