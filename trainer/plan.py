"""What a configuration means in rows, updates, micro-batches and tokens, shown as a table at start."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from config.pools import devices_of, num_devices, pools_of, role_pools
from config.schema import GovernorConfig, ModelConfig

if TYPE_CHECKING:
    from workers.engine.lora import StartAdapter


@dataclass(frozen=True, slots=True)
class PlanLine:
    """One line of the table."""

    what: str
    figure: str
    how: str


def batch_plan(config: GovernorConfig, *, num_train_rows: int, num_steps: int) -> list[PlanLine]:
    """The lines of the batch plan."""
    return list(_lines(config, num_train_rows, num_steps))


def _lines(config: GovernorConfig, num_train_rows: int, num_steps: int) -> Iterator[PlanLine]:
    data, rollout, actor = config.data, config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    rows = data.train_batch_size * rollout.n
    epochs = num_steps * data.train_batch_size / num_train_rows
    yield PlanLine("training steps", str(num_steps), f"{num_train_rows} prompts, {epochs:.3g} epochs of them")
    yield PlanLine("responses per step", str(rows), f"train_batch_size {data.train_batch_size} x rollout.n {rollout.n}")
    pools, homes = pools_of(config), role_pools(config)
    for pool_name, pool in pools.items():
        how = f"nnodes {pool.nnodes} x n_gpus_per_node {pool.n_gpus_per_node}"
        roles = ", ".join(role for role, home in homes.items() if home == pool_name)
        yield PlanLine(
            "devices" if len(pools) == 1 else f"devices of pool {pool_name}",
            str(num_devices(pool)),
            how if len(pools) == 1 else f"{how}: {roles}",
        )
    longest = data.max_prompt_length + data.max_response_length
    yield PlanLine(
        "longest row", f"{longest} tokens", f"prompt {data.max_prompt_length} + response {data.max_response_length}"
    )
    trained = [("actor", actor)] + ([("critic", config.critic)] if config.uses_critic else [])
    for name, role in trained:
        updates = data.train_batch_size // role.ppo_mini_batch_size * role.ppo_epochs
        share = role.ppo_mini_batch_size * rollout.n // devices_of(config, name)
        yield PlanLine(
            f"{name} updates per step",
            str(updates),
            f"mini-batches of {role.ppo_mini_batch_size} prompts, {role.ppo_mini_batch_size * rollout.n} rows; ppo_epochs {role.ppo_epochs}",
        )
        if role.use_dynamic_bsz:
            budget = role.ppo_max_token_len_per_gpu
            micro = f"{-(-share * longest // budget)} or fewer" if share else "0"
            how = f"{share} rows per device, at most {budget} tokens each"
        else:
            size = min(role.ppo_micro_batch_size_per_gpu or share, share)
            micro = str(-(-share // size))
            how = f"{share} rows per device, at most {size} each ({size * longest} tokens)"
        yield PlanLine(f"{name} micro-batches per update", micro, how)


def adapter_line(model: ModelConfig, adapter: "StartAdapter") -> PlanLine:
    """What a LoRA adapter trains of the policy."""
    kinds = sorted({name.rsplit(".", 1)[-1] for name in adapter.layers})
    return PlanLine(
        "trained parameters",
        f"{adapter.num_trained:,}",
        f"LoRA of rank {model.lora_rank}, alpha {model.lora_alpha}, on {len(adapter.layers)} layers ({', '.join(kinds)}); "
        f"{adapter.num_trained / adapter.num_base:.2%} of the policy's {adapter.num_base:,}",
    )
