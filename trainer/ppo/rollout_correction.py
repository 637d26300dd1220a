"""Correction for a sampler that is not quite the policy: another precision, other kernels, another engine.

With d = old_log_probs - rollout_log_probs, the ratio exp(d) is what a token of the sampler is worth to the policy. It weights
the policy's loss (truncated importance sampling) or takes what lies far off out of it (rejection). Tensors are [B, R], log-probabilities
in nats; only tokens under the response mask are read.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from config.schema import RolloutCorrectionConfig, bounds_of
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

    Rejection (`rollout_rs`) is what `kept_tokens` says. Weights (`rollout_is`) are the token's ratio, or the product over
    its response, cut at the threshold from above; normalized, their mean over the tokens of the loss is 1. They stand
    where the ratio of proximal to behaviour policy stands in the decoupled objective of arXiv:2110.00641.

    Source: truncated importance sampling, Ionides, Journal of Computational and Graphical Statistics 17 (2008) 295-311.
    """
    mask = response_mask.bool()
    log_ratio = torch.where(mask, old_log_probs.double() - rollout_log_probs.double(), 0.0)
    metrics = mismatch_metrics(old_log_probs, rollout_log_probs, mask)
    loss_mask = mask
    if config.rollout_rs is not None:
        assert config.rollout_rs_threshold is not None, "config.rollout_rules asks for it"
        lower, upper = bounds_of(config.rollout_rs_threshold)
        loss_mask = mask & kept_tokens(log_ratio, mask, mode=config.rollout_rs, lower=lower, upper=upper)
        rejected = mask & ~loss_mask
        metrics["rollout_corr/rollout_rs_masked_fraction"] = _share(rejected, mask)
        metrics["rollout_corr/rollout_rs_seq_masked_fraction"] = _share(rejected.any(-1), mask.any(-1))
    weights = None
    if config.rollout_is is not None:
        ratio = _ratio(log_ratio, config.rollout_is)
        cut = ratio > config.rollout_is_threshold
        weights = ratio.clamp(max=config.rollout_is_threshold)
        metrics["rollout_corr/rollout_is_mean"] = _mean(weights, mask)
        metrics["rollout_corr/rollout_is_ratio_fraction_high"] = _share(cut & mask, mask)
        metrics["rollout_corr/rollout_is_eff_sample_size"] = effective_share(weights[mask])
        if config.rollout_is_batch_normalize and bool(loss_mask.any()):
            weights = weights / weights[loss_mask].mean()
        weights = torch.where(mask, weights, 1.0).float()
    return Correction(loss_mask, weights, metrics)


def kept_tokens(log_ratio: Tensor, mask: Tensor, *, mode: str, lower: float | None, upper: float) -> Tensor:
    """Which tokens stay in the loss, bool [B, R]; a mode is a level and an estimator. `log_ratio` d is 0 outside the mask.

    | level | what is judged |
    |---|---|
    | token | each token by its value |
    | seq_sum, seq_mean, seq_max | each response, whole, by the sum, mean or maximum of its tokens' values |

    | estimator | value | stays if |
    |---|---|---|
    | k1 | -d | lower ≤ exp(value) ≤ upper; `lower` None is 1 / upper |
    | k2 | d² / 2 | value ≤ upper |
    | k3 | exp(d) - 1 - d | value ≤ upper |

    They estimate KL(sampler, policy), so the band of k1 is one of sampler over policy, as in verl. exp of the seq_mean of k1 is
    a geometric mean of ratios, as in GSPO (arXiv:2507.18071).
    """
    level, _, estimator = mode.rpartition("_")
    value = {
        "k1": lambda: -log_ratio,
        "k2": lambda: log_ratio.square() / 2,
        "k3": lambda: _bounded_exp(log_ratio) - 1 - log_ratio,
    }[estimator]()
    lengths = mask.sum(-1, keepdim=True).clamp(min=1)
    judged = {
        "token": lambda: value,
        "seq_sum": lambda: value.sum(-1, keepdim=True),
        "seq_mean": lambda: value.sum(-1, keepdim=True) / lengths,
        "seq_max": lambda: value.amax(-1, keepdim=True),
    }[level]()
    inside = judged <= (math.log(upper) if estimator == "k1" else upper)
    if estimator == "k1":
        inside &= judged >= math.log(1 / upper if lower is None else lower)
    return inside.expand_as(mask)


def mismatch_metrics(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> Metrics:
    """How far the sampler is from the policy on its own tokens; nothing for a batch without a token.

    KL(sampler, policy) as the mean of -d and as k3 (J. Schulman, "Approximating KL divergence", 2020); effective sample
    sizes of the ratios of tokens and of responses; perplexities are means over responses.
    """
    if not bool(mask.any()):
        return {}
    old, sampler = (torch.where(mask, values.double(), 0.0) for values in (old_log_probs, rollout_log_probs))
    log_ratio = old - sampler
    ratio = _bounded_exp(log_ratio)
    lengths = mask.sum(-1)
    rows = lengths > 0
    old_mean, sampler_mean = (values.sum(-1)[rows] / lengths[rows] for values in (old, sampler))
    return {
        "rollout_corr/kl": -_mean(log_ratio, mask),
        "rollout_corr/k3_kl": _mean(ratio - log_ratio - 1, mask),
        "rollout_corr/log_prob_diff_mean": _mean(log_ratio.abs(), mask),
        "rollout_corr/log_prob_diff_max": float(log_ratio[mask].abs().max()),
        "rollout_corr/training_ppl": float((-old_mean).exp().mean()),
        "rollout_corr/rollout_ppl": float((-sampler_mean).exp().mean()),
        "rollout_corr/ppl_ratio": float((sampler_mean - old_mean).exp().mean()),
        "rollout_corr/eff_sample_size": effective_share(ratio[mask]),
        "rollout_corr/seq_eff_sample_size": effective_share(_bounded_exp(log_ratio.sum(-1)[rows])),
    }


def effective_share(weights: Tensor) -> float:
    """Effective sample size of n weights as a share of n: (Σ w)² / (n Σ w²), from 1 / n to 1; 1 without any.

    Source: Kong, Liu and Wong, Journal of the American Statistical Association 89 (1994) 278-288.
    """
    return float(weights.sum().square() / (len(weights) * weights.square().sum())) if len(weights) else 1.0


def _ratio(log_ratio: Tensor, level: str) -> Tensor:
    """The ratio that weights a token, [B, R]: its own, or the product over its response."""
    return _bounded_exp(log_ratio if level == "token" else log_ratio.sum(-1, keepdim=True).expand_as(log_ratio))


def _bounded_exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def _mean(values: Tensor, mask: Tensor) -> float:
    return float(values[mask].mean()) if bool(mask.any()) else 0.0


def _share(part: Tensor, whole: Tensor) -> float:
    return int(part.sum()) / max(int(whole.sum()), 1)
