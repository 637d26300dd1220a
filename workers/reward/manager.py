"""Reward managers: how the parts of a response's score become one. Pure functions of numbers."""

from dataclasses import dataclass, field

from config.schema import RewardConfig
from workers.reward.function import Reward


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """A response's reward, and the parts that it was made of where it is not the reward function's alone."""

    reward: Reward
    parts: dict[str, float] = field(default_factory=dict)


def uses_functions(config: RewardConfig) -> bool:
    """Whether reward functions run: always, unless a reward model replaces them."""
    return not config.reward_model.enable or config.reward_model.combine == "add"


def overlong_penalty(length: int, *, max_length: int, buffer: int, factor: float) -> float:
    """The soft punishment of a response of `length` tokens: 0 up to max_length - buffer, then linear to -factor.

    Source: DAPO (arXiv:2503.14476, eq. 13), times factor.
    """
    excess = length - (max_length - buffer)
    return 0.0 - factor * min(max(excess / buffer, 0.0), 1.0)


def combine(
    config: RewardConfig, *, rule: Reward | None, model_score: float | None, length: int, max_length: int
) -> Scored:
    """One response's score from its parts, as `reward_manager` and `reward_model.combine` say.

    A part is None where the configuration has none of it; one of the two is there. `length` is the response's tokens,
    and one without tokens scores 0, whatever its parts.
    """
    if length == 0:
        return Scored(reward=Reward(score=0.0, extra={}))
    overlong = config.reward_kwargs.overlong_buffer_cfg
    punishes = config.reward_manager.name == "dapo" and overlong.enable
    if rule is not None and model_score is None and not punishes:
        return Scored(reward=rule)
    score, extra, parts = 0.0, {}, {}
    if rule is not None:
        score, extra, parts["rule_score"] = rule.score, rule.extra, rule.score
    if model_score is not None:
        score += config.reward_model.coef * model_score
        parts["model_score"] = model_score
    if punishes:
        assert overlong.len is not None, "config.reward_rules asks for it"
        penalty = overlong_penalty(length, max_length=max_length, buffer=overlong.len, factor=overlong.penalty_factor)
        score += penalty
        if overlong.log:
            parts["overlong_penalty"] = penalty
    return Scored(reward=Reward(score=score, extra=extra), parts=parts)
