"""PPO's formulas on tensors: KL estimators, the KL in the reward and its controllers, losses and their aggregation.

Everything here takes tensors and numbers, needs torch alone, and is called by the losses and the trainer. Tensors are
[B, R] (rows, response tokens) unless said otherwise; log-probabilities are in nats. Masks select and never multiply, so
that a NaN under mask 0 cannot reach a sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

LOSS_AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
KL_PENALTIES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "k1+", "kl+", "abs+", "low_var_kl+", "k3+")

LOG_RATIO_BOUND = 20.0  # exp(20) = 4.9e8: beyond it a ratio says nothing more, and float32 overflows at 88
KL_VALUE_CAP = 10.0
# The two solutions of exp(-d) + d - 1 = 10 in d = log_prob - ref_log_prob: k3 is capped outside of them.
K3_CAP_LOW, K3_CAP_HIGH = -2.6108686381498756, 10.999983298020258


# --- masks -----------------------------------------------------------------------------------------------------------


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of the values under mask 1; a masked value is dropped whatever it holds."""
    return torch.where(mask.bool(), values, 0.0).sum(dim)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of the values under mask 1; 0 where there are none."""
    return masked_sum(values, mask) / mask.sum().clamp(min=1)


def masked_whiten(values: Tensor, mask: Tensor, *, epsilon: float = 1e-8) -> Tensor:
    """Values with mean 0 and variance 1 over mask 1 (divisor n-1), and 0 under mask 0.

    With fewer than two valid values the variance is undefined: they are only centred.
    """
    mask = mask.bool()
    num_valid = int(mask.sum())
    centred = torch.where(mask, values - masked_mean(values, mask), 0.0)
    if num_valid < 2:
        return centred
    variance = centred.square().sum() / (num_valid - 1)
    return centred * torch.rsqrt(variance + epsilon)


# --- aggregation -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class LossCounts:
    """What a loss divides by: counts of the whole mini-batch, over all micro-batches and ranks."""

    num_tokens: int  # tokens under the loss mask
    num_rows: int  # rows that have at least one

    @staticmethod
    def of(mask: Tensor) -> "LossCounts":
        """Counts of a mask [B, R]."""
        return LossCounts(num_tokens=int(mask.sum()), num_rows=int(mask.bool().any(-1).sum()))


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    *,
    counts: LossCounts,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """This piece's share of the mini-batch's loss; the shares of all pieces add up to the loss.

    | mode | sum over | divided by |
    |---|---|---|
    | token-mean | tokens | tokens of the mini-batch |
    | token-sum | tokens | 1 |
    | seq-mean-token-sum | tokens | rows with tokens |
    | seq-mean-token-mean | each row's token mean | rows with tokens |
    | seq-mean-token-sum-norm | tokens | rows with tokens · loss_scale_factor |

    A piece without a token gives 0 with gradient 0. `loss_scale_factor` is the run's longest response, a constant, so
    that padding cannot change the loss (Dr. GRPO, arXiv:2503.20783).

    Raises:
        ValueError: an unknown mode, or `seq-mean-token-sum-norm` without a factor.
    """
    if loss_agg_mode == "seq-mean-token-mean":
        tokens = loss_mask.sum(-1, keepdim=True).clamp(min=1)
        return masked_sum(loss_mat / tokens, loss_mask) / max(counts.num_rows, 1)
    total = masked_sum(loss_mat, loss_mask)
    if loss_agg_mode == "token-mean":
        return total / max(counts.num_tokens, 1)
    if loss_agg_mode == "token-sum":
        return total
    if loss_agg_mode == "seq-mean-token-sum":
        return total / max(counts.num_rows, 1)
    if loss_agg_mode == "seq-mean-token-sum-norm":
        if not loss_scale_factor:
            raise ValueError("seq-mean-token-sum-norm needs loss_scale_factor, the longest response of the run")
        return total / (max(counts.num_rows, 1) * loss_scale_factor)
    raise ValueError(f"loss_agg_mode must be one of {', '.join(LOSS_AGG_MODES)}; got {loss_agg_mode!r}")


# --- KL estimators ---------------------------------------------------------------------------------------------------


class _CappedK3(torch.autograd.Function):
    """k3 with its value capped at 10 and its gradient held at the cap's edge beyond it.

    Capping by `clamp` would give gradient 0 there: the penalty would let go exactly where the drift is largest.
    """

    @staticmethod
    def forward(ctx, difference: Tensor) -> Tensor:
        inside = difference.clamp(K3_CAP_LOW, K3_CAP_HIGH)
        ctx.save_for_backward(inside)
        return (torch.expm1(-inside) + inside).clamp(max=KL_VALUE_CAP)  # expm1: exp(-d) - 1 would cancel near 0

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> Tensor:  # pyright: ignore
        (inside,) = ctx.saved_tensors
        return grad_output * -torch.expm1(-inside)


def kl_penalty(log_prob: Tensor, ref_log_prob: Tensor, kl_penalty: str) -> Tensor:
    """Per-token estimate of KL(policy ‖ reference) from tokens that the policy sampled, in nats; nothing is masked.

    With d = log_prob - ref_log_prob: `kl`/`k1` = d; `abs` = |d|; `mse`/`k2` = d²/2; `low_var_kl`/`k3` = exp(-d) + d - 1,
    value at most 10, its gradient beyond the cap that of the cap's edge. A trailing `+` keeps the value and takes the
    gradient of k2, whose expectation is that of the KL (straight through).

    Source: J. Schulman, "Approximating KL divergence" (2020).

    Raises:
        ValueError: an unknown estimator.
    """
    if kl_penalty.endswith("+"):
        value = _kl_value(log_prob, ref_log_prob, kl_penalty[:-1])
        k2 = 0.5 * (log_prob - ref_log_prob).square()
        return value.detach() + (k2 - k2.detach())  # in this order the value keeps its bits
    return _kl_value(log_prob, ref_log_prob, kl_penalty)


def _kl_value(log_prob: Tensor, ref_log_prob: Tensor, name: str) -> Tensor:
    difference = log_prob - ref_log_prob
    if name in ("kl", "k1"):
        return difference
    if name == "abs":
        return difference.abs()
    if name in ("mse", "k2"):
        return 0.5 * difference.square()
    if name in ("low_var_kl", "k3"):
        return _CappedK3.apply(difference)  # pyright: ignore[reportReturnType]
    raise ValueError(f"kl_penalty must be one of {', '.join(KL_PENALTIES)}; got {name!r}")


def kl_is_capped(log_prob: Tensor, ref_log_prob: Tensor, kl_penalty: str) -> Tensor:
    """Where the estimator's value is capped: bool [B, R]. Only k3 has a cap."""
    difference = log_prob - ref_log_prob
    if kl_penalty.rstrip("+") not in ("low_var_kl", "k3"):
        return torch.zeros_like(difference, dtype=torch.bool)
    return (difference < K3_CAP_LOW) | (difference > K3_CAP_HIGH)


# --- scores ----------------------------------------------------------------------------------------------------------


def place_scores(scores: Sequence[float], response_mask: Tensor) -> Tensor:
    """Each row's score on its last token with mask 1: [B, R] float32. A row without a token has no place, and gets none."""
    assert len(scores) == len(response_mask), "one score per row"
    mask = response_mask.bool()
    columns = torch.arange(mask.shape[1])
    last = torch.where(mask, columns, -1).amax(-1, keepdim=True)
    return torch.where(columns == last, torch.tensor(scores, dtype=torch.float32).unsqueeze(-1), 0.0)


# --- KL in the reward ------------------------------------------------------------------------------------------------


class FixedKLController:
    """A coefficient that stays."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Nothing: the coefficient is fixed."""

    def state_dict(self) -> dict[str, float]:
        """The state that a checkpoint keeps."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from a checkpoint's state; the fixed coefficient is the configured one."""


class AdaptiveKLController(FixedKLController):
    """A coefficient that is moved so that the KL goes to its target.

    β ← β · (1 + clip(kl/target - 1, ±0.2) · n/horizon), n the number of rows.

    Source: Ziegler et al., arXiv:1909.08593, section 2.2.

    Raises:
        ValueError: `target_kl` or `horizon` is not positive.
    """

    def __init__(self, kl_coef: float, *, target_kl: float, horizon: float) -> None:
        if target_kl <= 0 or horizon <= 0:
            raise ValueError(
                f"the adaptive KL controller needs target_kl > 0 and horizon > 0; got {target_kl}, {horizon}"
            )
        super().__init__(kl_coef)
        self.target_kl = target_kl
        self.horizon = horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """Move the coefficient after a batch of `n_steps` rows whose mean KL was `current_kl`.

        Raises:
            ValueError: n_steps >= 5 · horizon, where one update could bring the coefficient to 0 or below.
        """
        if n_steps >= 5 * self.horizon:
            raise ValueError(f"{n_steps} rows per step need horizon > {n_steps / 5:g}; got {self.horizon:g}")
        error = min(max(current_kl / self.target_kl - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from a checkpoint's coefficient."""
        self.value = float(state["value"])


def get_kl_controller(*, type: str, kl_coef: float, target_kl: float, horizon: float) -> FixedKLController:
    """The controller of `algorithm.kl_ctrl`: `fixed` or `adaptive`."""
    if type == "adaptive":
        return AdaptiveKLController(kl_coef, target_kl=target_kl, horizon=horizon)
    return FixedKLController(kl_coef)


class KLPenaltyResult(NamedTuple):
    """What the KL in the reward did to a batch."""

    token_level_rewards: Tensor  # [B, R], 0 under mask 0
    mean_kl: float  # mean over rows with tokens of the row's token mean, in nats: what moves the controller
    num_rows: int  # all rows of the batch, which is what the controller counts


def apply_kl_penalty(
    *,
    token_level_scores: Tensor,
    old_log_probs: Tensor,
    ref_log_prob: Tensor,
    response_mask: Tensor,
    beta: float,
    penalty: str,
) -> KLPenaltyResult:
    """Scores less β times the per-token KL of the sampling policy to the reference, on the tokens of the mask.

    token_level_rewards = token_level_scores - β · KL(old, ref).

    Source: Ziegler et al., arXiv:1909.08593, eq. 2; per token as in Stiennon et al., arXiv:2009.01325.
    """
    mask = response_mask.bool()
    kl = torch.where(mask, kl_penalty(old_log_probs, ref_log_prob, penalty), 0.0)
    scores = torch.where(mask, token_level_scores, 0.0)
    tokens = mask.sum(-1)
    rows = tokens > 0
    mean_kl = float((kl.sum(-1) / tokens.clamp(min=1))[rows].mean()) if bool(rows.any()) else 0.0
    return KLPenaltyResult(scores - beta * kl, mean_kl, len(kl))


# --- losses ----------------------------------------------------------------------------------------------------------


class PolicyLossTerms(NamedTuple):
    """The surrogate per token and what the clip did to it; all [B, R], nothing masked."""

    loss: Tensor
    clipped_high: Tensor  # bool: A > 0 and the ratio's clip took over
    clipped_low: Tensor  # bool: A < 0 and the ratio's clip took over, dual clip not
    clipped_dual: Tensor  # bool: A < 0 and the loss stands at c·|A|


def compute_policy_loss_vanilla(
    *,
    log_prob: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float | None,
) -> PolicyLossTerms:
    """PPO's clipped surrogate with dual clip per token, to be minimised. Nothing is masked: `agg_loss` does that.

    r = exp(clamp(log_prob - old_log_probs, ±20)); L = max(-A·r, -A·clip(r, 1-low, 1+high)); where A < 0 also
    min(L, c·|A|). Clipped means that the clipped branch is strictly larger, so a token with A = 0 never is.

    Source: PPO (arXiv:1707.06347, eq. 7); dual clip (arXiv:1912.09729, eq. 5).

    Raises:
        ValueError: clip_ratio_c <= 1, which would cut into the ordinary clip range.
    """
    if clip_ratio_c is not None and clip_ratio_c <= 1:
        raise ValueError(f"clip_ratio_c must be > 1, or null for no dual clip; got {clip_ratio_c}")
    ratio = torch.exp((log_prob - old_log_probs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND))
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    loss = torch.maximum(unclipped, clipped)
    is_clipped = clipped > unclipped
    is_dual = torch.zeros_like(is_clipped)
    if clip_ratio_c is not None:
        bound = -clip_ratio_c * advantages
        is_dual = (advantages < 0) & (loss > bound)
        loss = torch.where(advantages < 0, torch.minimum(loss, bound), loss)
    return PolicyLossTerms(
        loss=loss,
        clipped_high=is_clipped & (advantages > 0),
        clipped_low=is_clipped & (advantages < 0) & ~is_dual,
        clipped_dual=is_dual,
    )


def compute_entropy_loss(
    entropy: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    *,
    counts: LossCounts,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """This piece's share of the policy's entropy in nats, aggregated like the policy loss. A bonus: it is subtracted."""
    return agg_loss(entropy, loss_mask, loss_agg_mode, counts=counts, loss_scale_factor=loss_scale_factor)


class ValueLossTerms(NamedTuple):
    """The value loss per token and where the clip took over; both [B, R], nothing masked."""

    loss: Tensor
    clipped: Tensor  # bool


def compute_value_loss(*, vpreds: Tensor, values: Tensor, returns: Tensor, cliprange_value: float) -> ValueLossTerms:
    """Clipped squared error of the critic per token: 0.5 · max((v - R)², (clip(v, v_old ± cliprange_value) - R)²).

    Source: the value clipping of OpenAI baselines' PPO2; named in arXiv:2005.12729, section 3.
    """
    clipped_preds = torch.clamp(vpreds, values - cliprange_value, values + cliprange_value)
    error = (vpreds - returns).square()
    clipped_error = (clipped_preds - returns).square()
    return ValueLossTerms(loss=0.5 * torch.maximum(error, clipped_error), clipped=clipped_error > error)


# --- log-probabilities from logits -----------------------------------------------------------------------------------


def log_prob_from_logits(logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Log-probability of each label under softmax(logits / temperature), in float32 at least. logits [..., V]."""
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    return scaled.gather(-1, labels.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(scaled, dim=-1)


def entropy_from_logits(logits: Tensor, temperature: float) -> Tensor:
    """Entropy of softmax(logits / temperature) in nats, finite also where logits are -inf. logits [..., V]."""
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    log_p = scaled - torch.logsumexp(scaled, dim=-1, keepdim=True)
    log_p = log_p.masked_fill(torch.isneginf(scaled), 0.0)
    p = torch.softmax(scaled, dim=-1)
    return -(p * log_p).sum(-1)
