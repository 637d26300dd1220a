"""Sentences about settings that are legal but odd."""

from collections.abc import Iterator

from config.faults import shown
from config.pools import pools_of
from config.rollout_rules import cuts_of
from config.schema import GovernorConfig


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
    correction, cuts = algorithm.rollout_correction, cuts_of(config.actor_rollout_ref.rollout)
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
