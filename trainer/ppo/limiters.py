"""What each limiter did in an update: how hard each loss term pushes the logits, and what the clip took away.

One unit for all: the norm, at the raw logits, of a term's gradient over the mini-batch's loss tokens. It needs no
backward through the model. A term that reaches the logits z through the token's log-probability, with g its derivative
there, has the gradient g/T · (onehot - p) at the logits; the entropy has its own. Everything is a sum over tokens, so
pieces and ranks add up, and `finish` takes the roots once per mini-batch.

Tensors are [B, R] unless said otherwise; T is the sampling temperature; nothing here carries a gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.ppo.core_algos import LOG_RATIO_BOUND, PolicyLossTerms, kl_penalty, masked_mean, masked_sum

Sums = dict[str, Tensor]  # scalars, shares or sums, that add up over pieces and ranks
Metrics = dict[str, float]

SUM_PREFIX = "sum/"  # of a sum that `finish` turns into a metric
PUSHES = ("pg", "pg_unclipped", "clip", "entropy", "kl", "reward_kl")
SHARED_PUSHES = ("pg", "entropy", "kl")  # the terms of the loss; the others are parts of pg
# Logits that `logit_geometry` takes at a time: in float32 2 MiB, a core's cache, and 256 MiB on a GPU.
CPU_CHUNK, GPU_CHUNK = 2**19, 2**26
TOKEN_CLASSES = ("active", "high", "low", "dual", "zero_advantage", "ratio_bound")


class LogitGeometry(NamedTuple):
    """What the push of a loss needs of a token's distribution p over the vocabulary: two sums per token."""

    others: Tensor  # Σ over j ≠ y of p_j²
    entropy: Tensor | None  # Σ over j of p_j² · (log p_j + H)²; None without an entropy term

    def map(self, change: Callable[[Tensor], Tensor]) -> "LogitGeometry":
        """Both sums changed alike."""
        return LogitGeometry(change(self.others), None if self.entropy is None else change(self.entropy))


@torch.no_grad()
def logit_geometry(logits: Tensor, labels: Tensor, temperature: float, *, with_entropy: bool) -> LogitGeometry:
    """The sums for tokens y = labels [...] under softmax(logits / temperature), logits [..., V].

    A few tokens at a time: their logits stay in a CPU's cache, and no second matrix of all logits is made.
    """
    flat, chosen = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1, 1)
    size = rows_in_cache(logits)
    chunks = zip(flat.split(size), chosen.split(size), strict=True)
    parts = [_chunk_geometry(*chunk, temperature, with_entropy=with_entropy) for chunk in chunks]
    others = torch.cat([part.others for part in parts]).view(labels.shape)
    entropies = [part.entropy for part in parts if part.entropy is not None]
    return LogitGeometry(others, torch.cat(entropies).view(labels.shape) if with_entropy else None)


def rows_in_cache(logits: Tensor) -> int:
    """How many rows of logits [..., V] to take at a time."""
    return max((CPU_CHUNK if logits.device.type == "cpu" else GPU_CHUNK) // logits.shape[-1], 1)


def _chunk_geometry(logits: Tensor, labels: Tensor, temperature: float, *, with_entropy: bool) -> LogitGeometry:
    """`logit_geometry` of logits [N, V] and labels [N, 1]."""
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    softmax = shifted_softmax_(scaled)
    return geometry_of_(softmax, labels, softmax.mean() if with_entropy else None)


class ShiftedSoftmax(NamedTuple):
    """p = weight / z over the vocabulary, with weight = exp(u): one exponential per logit."""

    top: Tensor  # [N, 1], the maximum of the scaled logits
    u: Tensor  # [N, V], the scaled logits less it
    weight: Tensor  # [N, V]
    z: Tensor  # [N]

    def mean(self) -> Tensor:
        """Σ p u, [N]: log p + H = u - Σ p u."""
        return torch.linalg.vecdot(self.weight, self.u) / self.z


def shifted_softmax_(scaled: Tensor) -> ShiftedSoftmax:
    """The softmax of scaled logits [N, V], which are overwritten."""
    top = scaled.amax(-1, keepdim=True)
    # exp(-1000) is 0 in every precision, and 0 times it is 0; a logit of -inf would make NaN.
    u = scaled.sub_(top).clamp_(min=-1000.0)
    weight = u.exp()
    return ShiftedSoftmax(top, u, weight, weight.sum(-1))


def geometry_of_(softmax: ShiftedSoftmax, labels: Tensor, mean: Tensor | None) -> LogitGeometry:
    """Both sums for labels [N, 1], the entropy's with the softmax's `mean`; u and weight are overwritten."""
    entropy, square = None, softmax.z.square()
    if mean is not None:
        # Formed token by token: for a nearly flat p, multiplying the square out would cancel.
        deviation = softmax.u.sub_(mean.unsqueeze(-1)).mul_(softmax.weight)
        entropy = torch.linalg.vecdot(deviation, deviation) / square
    others = softmax.weight.scatter_(-1, labels, 0.0)
    return LogitGeometry(torch.linalg.vecdot(others, others) / square, entropy)


def logit_norm(log_prob: Tensor, geometry: LogitGeometry, temperature: float) -> Tensor:
    """‖onehot - p‖² / T² per token. 1 - p as -expm1(log p), so that confident tokens keep their digits."""
    return (torch.expm1(log_prob).square() + geometry.others) / temperature**2


@dataclass(frozen=True, slots=True)
class LimiterProbe:
    """What measuring needs besides the loss's own inputs."""

    geometry: LogitGeometry
    temperature: float
    kl_advantages: Tensor | None  # the part of the advantages that the KL in the reward made


@dataclass(slots=True)
class LossTerms:
    """The terms of the actor's loss with their coefficients, scalars; None for one that is off."""

    pg: Tensor
    entropy: Tensor | None = None
    kl: Tensor | None = None

    def total(self) -> Tensor:
        """The loss."""
        return sum((term for term in (self.entropy, self.kl) if term is not None), self.pg)


def measure(
    *,
    log_prob: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    terms: LossTerms,
    surrogate: PolicyLossTerms,
    entropy_coeff: float,
    aggregate: Callable[[Tensor], Tensor],
    share_of_tokens: Callable[[Tensor], Tensor],
    probe: LimiterProbe,
) -> Sums:
    """This piece's shares and sums of what the limiters did; `finish` makes the metrics of them.

    `log_prob` carries the gradient of the terms; `aggregate` is the loss's own aggregation of a [B, R] matrix.
    """
    token_weight = aggregation_weight(aggregate, log_prob)
    # Derivatives by the log-probability; autograd stops there, so the model is not run backward.
    pg = _derivative(terms.pg, log_prob)
    kl = None if terms.kl is None else _derivative(terms.kl, log_prob)
    log_prob = log_prob.detach()
    ratio_slope = ratio_and_slope(log_prob - old_log_probs)
    unclipped = -advantages * ratio_slope.slope * token_weight
    geometry, temperature = probe.geometry, probe.temperature
    norm = logit_norm(log_prob, geometry, temperature)
    pushes = {
        "pg": pg.square() * norm,
        "pg_unclipped": unclipped.square() * norm,
        "clip": (unclipped - pg).square() * norm,
    }
    dot = None
    if kl is not None:
        pushes["kl"] = kl.square() * norm
        dot = masked_sum(pg * kl * norm, mask)
    if probe.kl_advantages is not None:
        pushes["reward_kl"] = (probe.kl_advantages * ratio_slope.slope * token_weight).square() * norm
    if terms.entropy is not None and geometry.entropy is not None:
        pushes["entropy"] = (entropy_coeff * token_weight / temperature).square() * geometry.entropy

    sums = {f"{SUM_PREFIX}push_{name}": masked_sum(square, mask) for name, square in pushes.items()}
    if dot is not None:
        sums[f"{SUM_PREFIX}push_dot"] = dot
    clipped = surrogate.clipped_high | surrogate.clipped_low | surrogate.clipped_dual
    weight = (advantages * ratio_slope.ratio).abs()
    sums[f"{SUM_PREFIX}weight"] = masked_sum(weight, mask)
    sums[f"{SUM_PREFIX}weight_clipped"] = masked_sum(torch.where(clipped, weight, 0.0), mask)
    sums["limiter/ratio/mean"] = share_of_tokens(ratio_slope.ratio)
    sums["limiter/ratio/deviation"] = share_of_tokens((ratio_slope.ratio - 1).abs())
    named = {"pg": terms.pg, "entropy": terms.entropy, "kl": terms.kl}
    sums |= {f"limiter/loss/{name}": term for name, term in named.items() if term is not None}
    classes = token_classes(log_ratio=log_prob - old_log_probs, advantages=advantages, surrogate=surrogate)
    return sums | {f"limiter/tokens/{name}": share_of_tokens(members) for name, members in classes.items()}


class RatioAndSlope(NamedTuple):
    """The ratio r with its bound, and dr/dlog_prob, which is 0 beyond the bound; both [B, R]."""

    ratio: Tensor
    slope: Tensor


def ratio_and_slope(log_ratio: Tensor) -> RatioAndSlope:
    """Both, of a log-ratio in nats."""
    ratio = torch.exp(log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND))
    return RatioAndSlope(ratio, torch.where(log_ratio.abs() > LOG_RATIO_BOUND, 0.0, ratio))


def aggregation_weight(aggregate: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
    """How much one token counts in an aggregated loss: d aggregate(x)/dx, [B, R]."""
    ones = torch.ones_like(like, requires_grad=True)
    return _derivative(aggregate(ones), ones)


def token_classes(*, log_ratio: Tensor, advantages: Tensor, surrogate: PolicyLossTerms) -> dict[str, Tensor]:
    """Each token's one class, as bool [B, R] per class: zero advantage, clip high, low or dual, ratio bound, active.

    At the ratio bound the clamp of the log-ratio has taken the gradient although no clip did.
    """
    zero = advantages == 0
    clipped = surrogate.clipped_high | surrogate.clipped_low | surrogate.clipped_dual
    bound = (log_ratio.abs() > LOG_RATIO_BOUND) & ~zero & ~clipped
    return {
        "active": ~(zero | clipped | bound),
        "high": surrogate.clipped_high,
        "low": surrogate.clipped_low,
        "dual": surrogate.clipped_dual,
        "zero_advantage": zero,
        "ratio_bound": bound,
    }


def _derivative(scalar: Tensor, by: Tensor) -> Tensor:
    return torch.autograd.grad(scalar, by, retain_graph=True)[0]


def finish(totals: Metrics) -> Metrics:
    """A mini-batch's metrics from its added-up shares and sums: roots, shares and ratios are taken here, once."""
    metrics = {name: value for name, value in totals.items() if not name.startswith(SUM_PREFIX)}
    sums = {name.removeprefix(SUM_PREFIX): value for name, value in totals.items() if name.startswith(SUM_PREFIX)}
    pushes = {name: max(sums[f"push_{name}"], 0.0) ** 0.5 for name in PUSHES if f"push_{name}" in sums}
    metrics |= {f"limiter/push/{name}": value for name, value in pushes.items()}
    # Which names there are depends on the configuration alone: where nothing pushes, shares and cosine are 0.
    whole = sum(pushes[name] for name in SHARED_PUSHES if name in pushes)
    metrics |= {f"limiter/push_share/{name}": _over(pushes[name], whole) for name in SHARED_PUSHES if name in pushes}
    if "push_dot" in sums:
        metrics["limiter/push_cosine"] = _over(sums["push_dot"], pushes["pg"] * pushes["kl"])
    if "weight" in sums:
        metrics["limiter/clip/removed"] = _over(sums["weight_clipped"], sums["weight"])
    return metrics


def _over(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


# --- once per step, on the driver ------------------------------------------------------------------------------------


def reward_kl_metrics(
    *,
    token_level_scores: Tensor,
    token_level_rewards: Tensor,
    advantages: Tensor,
    advantages_without_kl: Tensor,
    mask: Tensor,
    mean_kl: float,
    target_kl: float | None,
) -> Metrics:
    """How much of the reward the KL took, and whether the advantages still follow the score.

    `target_kl` is the adaptive controller's; it is saturated where its error stands at the clamp of ±0.2.
    """
    penalty = float(masked_sum((token_level_scores - token_level_rewards).abs(), mask))
    score = float(masked_sum(token_level_scores.abs(), mask))
    metrics = {"limiter/reward_kl/share": penalty / (score + penalty) if score + penalty > 0 else 0.0}
    pair = torch.stack([advantages[mask], advantages_without_kl[mask]]).double()
    if pair.shape[1] > 1 and bool((pair.std(-1) > 0).all()):
        metrics["limiter/reward_kl/advantage_correlation"] = float(torch.corrcoef(pair)[0, 1])
    if target_kl is not None:
        metrics["limiter/reward_kl/over_target"] = mean_kl / target_kl
        metrics["limiter/reward_kl/saturated"] = float(abs(mean_kl / target_kl - 1) >= 0.2)
    return metrics


def entropy_metrics(entropys: Tensor, mask: Tensor) -> Metrics:
    """Mean and outer deciles of the tokens' entropies before the update, in nats."""
    values = entropys[mask].double()
    if values.numel() == 0:
        return {}
    low, high = torch.quantile(values, torch.tensor([0.1, 0.9], dtype=torch.float64)).tolist()
    return {"limiter/entropy/mean": float(values.mean()), "limiter/entropy/p10": low, "limiter/entropy/p90": high}


def probe_metrics(
    *,
    old_log_probs: Tensor,
    new_log_probs: Tensor,
    ref_log_prob: Tensor | None,
    entropy_before: Tensor | None,
    entropy_after: Tensor,
    mask: Tensor,
) -> Metrics:
    """The same tokens before and after the step's updates: KL moved (k3), entropy, and KL to the reference (k3)."""
    metrics = {
        "kl": kl_penalty(old_log_probs, new_log_probs, "k3"),
        "entropy_after": entropy_after,
    }
    if entropy_before is not None:
        metrics["entropy_before"] = entropy_before
    if ref_log_prob is not None:
        metrics["ref_kl_before"] = kl_penalty(old_log_probs, ref_log_prob, "k3")
        metrics["ref_kl_after"] = kl_penalty(new_log_probs, ref_log_prob, "k3")
    return {f"limiter/probe/{name}": float(masked_mean(values, mask)) for name, values in metrics.items()}
