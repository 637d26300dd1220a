"""Advantage estimators on tensors. [B, R] in, [B, R] out; outputs are 0 under mask 0.

Statistics of a group follow the `uid`, whatever the order of the rows. Rows without a token are in no group.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.ppo.core_algos import masked_whiten

GROUP_EPSILON = 1e-6  # as in the source; keeps a group of nearly equal rewards finite


class AdvantageResult(NamedTuple):
    """What an estimator gives."""

    advantages: Tensor  # [B, R]
    returns: Tensor  # [B, R], what the critic learns; for estimators without one the advantages' raw form


def compute_gae(
    *, token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float
) -> AdvantageResult:
    """Generalized advantage estimation over the trainable tokens, whitened over the batch; returns use the raw one.

    δ_t = r_t + γ·V_{t+1} - V_t and A_t = δ_t + γλ·A_{t+1}, where t+1 is the next token with mask 1: value and advantage
    carry over padding and tool tokens. The value after the last token is 0, also for a response cut at its length limit.

    Source: arXiv:1506.02438, eq. 11 and 16.
    """
    mask = response_mask.bool()
    rewards = torch.where(mask, token_level_rewards, 0.0)
    next_value = torch.zeros_like(rewards[:, 0])
    next_advantage = torch.zeros_like(next_value)
    columns = []
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        valid = mask[:, t]
        next_value = torch.where(valid, values[:, t], next_value)
        next_advantage = torch.where(valid, advantage, next_advantage)
        columns.append(torch.where(valid, advantage, 0.0))
    raw = torch.stack(columns[::-1], dim=1)
    returns = torch.where(mask, raw + values, 0.0)
    return AdvantageResult(masked_whiten(raw, mask), returns)


def compute_grpo(
    *, token_level_rewards: Tensor, response_mask: Tensor, uid: Sequence[str], norm_by_std: bool
) -> AdvantageResult:
    """Each response's reward less its group's mean, over the group's standard deviation (n-1) if asked, on every token.

    A group left with one row, or with equal rewards, has advantage exactly 0.

    Source: GRPO (arXiv:2402.03300, section 4.1.2); without the deviation Dr. GRPO (arXiv:2503.20783).
    """

    def centre(scores: Tensor) -> Tensor:
        centred = scores - scores.mean()
        return centred / (scores.std() + GROUP_EPSILON) if norm_by_std else centred

    return _spread(_per_group(token_level_rewards, response_mask, uid, centre), response_mask)


def compute_rloo(*, token_level_rewards: Tensor, response_mask: Tensor, uid: Sequence[str]) -> AdvantageResult:
    """Each response's reward less the mean of the others in its group, on every token.

    Source: RLOO (arXiv:2402.14740, section 3.2).
    """
    rewards = _per_group(
        token_level_rewards,
        response_mask,
        uid,
        lambda scores: (scores - scores.mean()) * (len(scores) / (len(scores) - 1)),
    )
    return _spread(rewards, response_mask)


def compute_reinforce_plus_plus(*, token_level_rewards: Tensor, response_mask: Tensor, gamma: float) -> AdvantageResult:
    """Discounted reward-to-go over the trainable tokens, whitened over the batch. A masked token does not discount.

    Source: REINFORCE++ (arXiv:2501.03262).
    """
    mask = response_mask.bool()
    rewards = torch.where(mask, token_level_rewards, 0.0)
    running = torch.zeros_like(rewards[:, 0])
    columns = []
    for t in reversed(range(rewards.shape[1])):
        running = torch.where(mask[:, t], rewards[:, t] + gamma * running, running)
        columns.append(torch.where(mask[:, t], running, 0.0))
    returns = torch.stack(columns[::-1], dim=1)
    return AdvantageResult(masked_whiten(returns, mask), returns)


def compute_reinforce_plus_plus_baseline(
    *, token_level_rewards: Tensor, response_mask: Tensor, uid: Sequence[str]
) -> AdvantageResult:
    """Each response's reward less its group's mean, on every token, then whitened over the batch.

    Source: REINFORCE++ with baseline (arXiv:2501.03262).
    """
    rewards = _per_group(token_level_rewards, response_mask, uid, lambda scores: scores - scores.mean())
    raw = _spread(rewards, response_mask).advantages
    return AdvantageResult(masked_whiten(raw, response_mask), raw)


def _per_group(
    token_level_rewards: Tensor, response_mask: Tensor, uid: Sequence[str], estimate: Callable[[Tensor], Tensor]
) -> Tensor:
    """A scalar per row [B]: `estimate` of its group's summed rewards; 0 for a lone row, equal rewards, or no token."""
    mask = response_mask.bool()
    scores = torch.where(mask, token_level_rewards, 0.0).sum(-1)
    has_tokens = mask.any(-1).tolist()
    groups: dict[str, list[int]] = {}
    for row, key in enumerate(uid):
        if has_tokens[row]:
            groups.setdefault(key, []).append(row)
    out = torch.zeros_like(scores)
    for rows in groups.values():
        group = scores[rows]
        # Tested, not computed: the mean of equal floats need not equal them, and their deviation would blow that up.
        if len(rows) > 1 and bool((group != group[0]).any()):
            # Sorted, so that the sums, and with them the bits, do not depend on the order of the rows.
            order = torch.argsort(group)
            out[torch.tensor(rows)[order]] = estimate(group[order])
    return out


def _spread(scalar: Tensor, response_mask: Tensor) -> AdvantageResult:
    tokens = torch.where(response_mask.bool(), scalar.unsqueeze(-1), 0.0)
    return AdvantageResult(tokens, tokens)


ADV_ESTIMATORS = ("gae", "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")


def compute_advantages(
    name: str,
    *,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    uid: Sequence[str],
    values: Tensor | None,
    gamma: float,
    lam: float,
    norm_by_std: bool,
) -> AdvantageResult:
    """Advantages by the estimator of `algorithm.adv_estimator`.

    Raises:
        ValueError: an unknown name.
    """
    rewards, mask = token_level_rewards, response_mask
    if name == "gae":
        assert values is not None, "gae reads the critic's values"
        return compute_gae(token_level_rewards=rewards, values=values, response_mask=mask, gamma=gamma, lam=lam)
    if name == "grpo":
        return compute_grpo(token_level_rewards=rewards, response_mask=mask, uid=uid, norm_by_std=norm_by_std)
    if name == "rloo":
        return compute_rloo(token_level_rewards=rewards, response_mask=mask, uid=uid)
    if name == "reinforce_plus_plus":
        return compute_reinforce_plus_plus(token_level_rewards=rewards, response_mask=mask, gamma=gamma)
    if name == "reinforce_plus_plus_baseline":
        return compute_reinforce_plus_plus_baseline(token_level_rewards=rewards, response_mask=mask, uid=uid)
    raise ValueError(f"adv_estimator must be one of {', '.join(ADV_ESTIMATORS)}; got {name!r}")
