"""The losses of actor and critic on one piece (micro-batch) of a mini-batch.

A loss and each of its metrics is this piece's share of the mini-batch's figure: it is divided by the counts of the whole
mini-batch, which are passed in, so that the shares of all pieces, on all ranks, add up to a figure that does not depend
on how the mini-batch was cut.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from config.schema import ActorConfig, CriticConfig
from trainer.ppo.core_algos import (
    LossCounts,
    agg_loss,
    compute_entropy_loss,
    compute_policy_loss_vanilla,
    compute_value_loss,
    kl_is_capped,
    kl_penalty,
    masked_sum,
)
from trainer.ppo.limiters import LimiterProbe, LossTerms, Sums, measure


@dataclass(slots=True)
class LossShare:
    """This piece's share of a loss and of its metrics."""

    loss: Tensor  # scalar, to be differentiated
    metrics: Sums


def ppo_loss(
    *,
    log_prob: Tensor,
    entropy: Tensor | None,
    old_log_probs: Tensor,
    ref_log_prob: Tensor | None,
    advantages: Tensor,
    loss_mask: Tensor,
    counts: LossCounts,
    config: ActorConfig,
    rollout_is_weights: Tensor | None = None,
    probe: LimiterProbe | None = None,
) -> LossShare:
    """The actor's loss: clipped surrogate - entropy_coeff · entropy + kl_loss_coef · KL(policy, reference).

    Tensors are [B, R]; `log_prob` and `entropy` (nats) carry the gradient. The reference is read with `use_kl_loss`
    only, the entropy whenever it is given. `rollout_is_weights` (at least 0) weight the surrogate, token by token. With a
    `probe` the metrics say what each limiter did.

    Source: PPO (arXiv:1707.06347, eq. 9); the KL in the loss as in GRPO (arXiv:2402.03300, eq. 3).
    """
    mask = loss_mask.bool()
    # Selected before the formulas: a NaN in a masked place would come back through their gradients as 0 · NaN.
    log_prob, old_log_probs, advantages = (torch.where(mask, x, 0.0) for x in (log_prob, old_log_probs, advantages))
    if rollout_is_weights is not None:
        # The surrogate, clips included, is homogeneous in the advantage: its weight may stand there.
        advantages = advantages * torch.where(mask, rollout_is_weights, 0.0)
        if probe is not None and probe.kl_advantages is not None:
            probe = replace(probe, kl_advantages=probe.kl_advantages * rollout_is_weights)
    tokens = max(counts.num_tokens, 1)

    def aggregate(matrix: Tensor) -> Tensor:
        return agg_loss(matrix, mask, config.loss_agg_mode, counts=counts, loss_scale_factor=config.loss_scale_factor)

    def share_of_tokens(condition: Tensor) -> Tensor:
        return masked_sum(condition.to(log_prob.dtype), mask) / tokens

    surrogate = compute_policy_loss_vanilla(
        log_prob=log_prob,
        old_log_probs=old_log_probs,
        advantages=advantages,
        clip_ratio_low=config.clip_ratio_low,
        clip_ratio_high=config.clip_ratio_high,
        clip_ratio_c=config.clip_ratio_c,
    )
    terms = LossTerms(pg=aggregate(surrogate.loss))
    high, low = share_of_tokens(surrogate.clipped_high), share_of_tokens(surrogate.clipped_low)
    metrics = {
        "actor/pg_loss": terms.pg,
        "actor/ppo_kl": masked_sum(old_log_probs - log_prob, mask) / tokens,
        "actor/pg_clipfrac": high + low,
        "actor/pg_clipfrac_pos_adv": high,
        "actor/pg_clipfrac_neg_adv": low,
        "actor/pg_clipfrac_lower": share_of_tokens(surrogate.clipped_dual),
    }
    if entropy is not None:
        entropy = torch.where(mask, entropy, 0.0)
        entropy_loss = compute_entropy_loss(
            entropy, mask, config.loss_agg_mode, counts=counts, loss_scale_factor=config.loss_scale_factor
        )
        metrics["actor/entropy_loss"] = entropy_loss
        if config.entropy_coeff:
            terms.entropy = -config.entropy_coeff * entropy_loss
    if config.use_kl_loss:
        assert ref_log_prob is not None, "use_kl_loss reads ref_log_prob"
        ref_log_prob = torch.where(mask, ref_log_prob, 0.0)
        kl_loss = aggregate(kl_penalty(log_prob, ref_log_prob, config.kl_loss_type))
        terms.kl = config.kl_loss_coef * kl_loss
        metrics["actor/kl_loss"] = kl_loss
        capped = kl_is_capped(log_prob, ref_log_prob, config.kl_loss_type)
        metrics["actor/kl_loss_capped_frac"] = share_of_tokens(capped)
        if probe is not None:
            sampling_kl = kl_penalty(old_log_probs, ref_log_prob, config.kl_loss_type)
            metrics["limiter/kl/sampling_policy"] = aggregate(sampling_kl)
    loss = terms.total()
    metrics["actor/loss"] = loss
    if probe is not None:
        metrics |= measure(
            log_prob=log_prob,
            old_log_probs=old_log_probs,
            advantages=advantages,
            mask=mask,
            terms=terms,
            surrogate=surrogate,
            entropy_coeff=config.entropy_coeff,
            aggregate=aggregate,
            share_of_tokens=share_of_tokens,
            probe=probe,
        )
    return LossShare(loss, {name: value.detach() for name, value in metrics.items()})


def value_loss(
    *,
    vpreds: Tensor,
    values: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    counts: LossCounts,
    config: CriticConfig,
    scale: float,
) -> LossShare:
    """The critic's loss: clipped squared error of the values to the returns. Tensors are [B, R].

    `scale` is the divisor of seq-mean-token-sum-norm, in tokens.
    """
    mask = response_mask.bool()
    vpreds, values, returns = (torch.where(mask, x, 0.0) for x in (vpreds, values, returns))
    terms = compute_value_loss(vpreds=vpreds, values=values, returns=returns, cliprange_value=config.cliprange_value)
    loss = agg_loss(terms.loss, mask, config.loss_agg_mode, counts=counts, loss_scale_factor=scale)
    tokens = max(counts.num_tokens, 1)
    return LossShare(
        loss,
        {
            "critic/vf_loss": loss.detach(),
            "critic/vf_clipfrac": masked_sum(terms.clipped.to(vpreds.dtype), mask) / tokens,
            "critic/vpred_mean": masked_sum(vpreds.detach(), mask) / tokens,
        },
    )
