"""Which pools of devices a run opens, and which of them each role lives in."""

from config.schema import GovernorConfig, PoolConfig

GLOBAL_POOL = "global"


def role_pools(config: GovernorConfig) -> dict[str, str]:
    """The name of its pool, for each role that the run has."""
    placed = config.trainer.role_pools
    pools = {"actor": placed.actor, "rollout": placed.rollout}
    if config.uses_reference:
        pools["ref"] = placed.ref
    if config.uses_critic:
        pools["critic"] = placed.critic
    if config.reward.reward_model.enable:
        pools["reward_model"] = placed.reward_model
    return pools


def pools_of(config: GovernorConfig) -> dict[str, PoolConfig]:
    """The pools that the run opens, by name, the global one first: those that a role of the run lives in."""
    trainer, used = config.trainer, set(role_pools(config).values())
    pools = {GLOBAL_POOL: PoolConfig(nnodes=trainer.nnodes, n_gpus_per_node=trainer.n_gpus_per_node)}
    return pools | {name: pool for name, pool in trainer.resource_pools.items() if name in used}


def pool_key(name: str) -> str:
    """The group of keys that sets the devices of the pool."""
    return "trainer" if name == GLOBAL_POOL else f"trainer.resource_pools.{name}"


def devices_of(config: GovernorConfig, role: str) -> int:
    """Devices of the role's pool, which are the ranks of its process group."""
    return num_devices(pools_of(config)[role_pools(config)[role]])


def all_devices(config: GovernorConfig) -> int:
    """Devices of all pools of the run."""
    return sum(num_devices(pool) for pool in pools_of(config).values())


def num_devices(pool: PoolConfig) -> int:
    """Devices of a pool."""
    return pool.nnodes * pool.n_gpus_per_node
