"""Correction for a sampler that is not quite the policy: another precision, other kernels, another engine.

With d = old_log_probs - rollout_log_probs, the ratio exp(d) is what a token of the sampler is worth to the policy. It weights
the policy's loss (truncated importance sampling) or takes what lies far off out of it (rejection). Tensors are [B, R], log-probabilities
in nats; only tokens under the response mask are read.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from config.schema import RolloutCorrectionConfig
from trainer.ppo.core_algos import LOG_RATIO_BOUND

Metrics = dict[str, float]


@dataclass(frozen=True, slots=True)
class Correction:
    """What the actor's loss takes from it."""

    loss_mask: Tensor  # [B, R] bool, the response tokens that are not rejected
    weights: Tensor | None  # [B, R] float32, of the policy's loss; 1 outside the response mask
    metrics: Metrics


def correct_rollout(
    *, old_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor, config: RolloutCorrectionConfig
) -> Correction:
    """Rejection, weights and `rollout_corr/…` metrics of a batch.

    Rejection (`rollout_rs`) keeps the tokens whose ratio lies in [lower, upper], or the responses whose product (sequence) or
    geometric mean (geometric) of the ratios does. Weights (`rollout_is`) are the token's ratio, or the product over
    its response, cut at the threshold from above; normalized, their mean over the tokens of the loss is 1.

    Source: truncated importance sampling, Ionides, Journal of Computational and Graphical Statistics 17 (2008) 295-311.
    """
    mask = response_mask.bool()
    log_ratio = torch.where(mask, old_log_probs.double() - rollout_log_probs.double(), 0.0)
    metrics = mismatch_metrics(old_log_probs, rollout_log_probs, mask)
    loss_mask = mask
    if config.rollout_rs is not None:
        upper = config.rollout_rs_threshold
        lower = 1 / upper if config.rollout_rs_threshold_lower is None else config.rollout_rs_threshold_lower
        ratio = _ratio(log_ratio, mask, config.rollout_rs)
        loss_mask = mask & (ratio >= lower) & (ratio <= upper)
        had, has = mask.any(-1), loss_mask.any(-1)
        metrics["rollout_corr/rollout_rs_masked_fraction"] = _share(mask & ~loss_mask, mask)
        metrics["rollout_corr/rollout_rs_seq_masked_fraction"] = _share(had & ~has, had)
    weights = None
    if config.rollout_is is not None:
        ratio = _ratio(log_ratio, mask, config.rollout_is)
        cut = ratio > config.rollout_is_threshold
        weights = ratio.clamp(max=config.rollout_is_threshold)
        metrics["rollout_corr/rollout_is_mean"] = _mean(weights, mask)
        metrics["rollout_corr/rollout_is_truncated_fraction"] = _share(cut & mask, mask)
        if config.rollout_is_batch_normalize and bool(loss_mask.any()):
            weights = weights / weights[loss_mask].mean()
        weights = torch.where(mask, weights, 1.0).float()
    return Correction(loss_mask, weights, metrics)


def mismatch_metrics(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> Metrics:
    """How far the sampler is from the policy on its own tokens; nothing for a batch without a token.

    KL(sampler, policy) as the mean of -d and as k3 (http://joschu.net/blog/kl-approx.html); the effective sample size
    (Σ w)² / (n Σ w²) of the tokens' ratios w; perplexities are means over responses.
    """
    if not bool(mask.any()):
        return {}
    old, sampler = (torch.where(mask, values.double(), 0.0) for values in (old_log_probs, rollout_log_probs))
    log_ratio = old - sampler
    ratio = _bounded_exp(log_ratio)
    weights = ratio[mask]
    lengths = mask.sum(-1)
    rows = lengths > 0
    old_mean, sampler_mean = (values.sum(-1)[rows] / lengths[rows] for values in (old, sampler))
    return {
        "rollout_corr/kl": -_mean(log_ratio, mask),
        "rollout_corr/k3_kl": _mean(ratio - log_ratio - 1, mask),
        "rollout_corr/log_prob_diff_max": float(log_ratio[mask].abs().max()),
        "rollout_corr/training_ppl": float((-old_mean).exp().mean()),
        "rollout_corr/rollout_ppl": float((-sampler_mean).exp().mean()),
        "rollout_corr/ppl_ratio": float((sampler_mean - old_mean).exp().mean()),
        "rollout_corr/eff_sample_size": float(weights.sum().square() / (len(weights) * weights.square().sum())),
    }


def _ratio(log_ratio: Tensor, mask: Tensor, level: str) -> Tensor:
    """The ratio that a token is judged by, [B, R]: its own, or its response's product or geometric mean."""
    if level != "token":
        total = log_ratio.sum(-1, keepdim=True)
        if level == "geometric":
            total = total / mask.sum(-1, keepdim=True).clamp(min=1)
        log_ratio = total.expand_as(log_ratio)
    return _bounded_exp(log_ratio)


def _bounded_exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def _mean(values: Tensor, mask: Tensor) -> float:
    return float(values[mask].mean()) if bool(mask.any()) else 0.0


def _share(part: Tensor, whole: Tensor) -> float:
    return int(part.sum()) / max(int(whole.sum()), 1)
