"""Reward managers: the penalty of over-long responses at its edges, and how parts become one score."""

import pytest

from config.load import load_config
from config.schema import RewardConfig
from workers.reward.function import Reward
from workers.reward.manager import combine, overlong_penalty, uses_functions

RULE = Reward(score=0.5, extra={"acc": 1.0})


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the rules ask of a model's folder."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text("{}")
    return str(folder)


@pytest.mark.parametrize(
    ("length", "penalty"),
    [(1, 0.0), (59, 0.0), (60, 0.0), (61, -0.025), (80, -0.5), (99, -0.975), (100, -1.0), (101, -1.0), (500, -1.0)],
)
def test_the_overlong_penalty_is_exact_at_its_edges(length: int, penalty: float) -> None:
    """Limit 100, buffer 40: it begins after token 60 and is whole at 100 (arXiv:2503.14476, eq. 13)."""
    assert overlong_penalty(length, max_length=100, buffer=40, factor=1.0) == penalty
    assert overlong_penalty(length, max_length=100, buffer=40, factor=4.0) == 4 * penalty


def test_a_buffer_as_long_as_the_limit_punishes_from_the_first_token() -> None:
    assert [overlong_penalty(n, max_length=4, buffer=4, factor=2.0) for n in (1, 2, 4)] == [-0.5, -1.0, -2.0]


def dapo(*overrides: str) -> RewardConfig:
    overlong = "reward.reward_kwargs.overlong_buffer_cfg"
    return load_config(
        ["data.max_response_length=10", "reward.reward_manager.name=dapo", f"{overlong}.enable=true", f"{overlong}.len=4", *overrides]
    ).reward  # fmt: skip


def test_by_default_a_reward_is_the_functions_and_has_no_parts() -> None:
    scored = combine(load_config([]).reward, rule=RULE, model_score=None, length=3, max_length=10)
    assert scored.reward is RULE
    assert scored.parts == {}


@pytest.mark.parametrize(("length", "score"), [(6, 0.5), (8, 0.0), (10, -0.5)])
def test_dapo_takes_the_penalty_off_the_rule_and_shows_both(length: int, score: float) -> None:
    scored = combine(dapo(), rule=RULE, model_score=None, length=length, max_length=10)
    assert scored.reward == Reward(score=score, extra={"acc": 1.0})
    assert scored.parts == {"rule_score": 0.5, "overlong_penalty": score - 0.5}


def test_dapo_logs_no_penalty_when_told_so() -> None:
    config = dapo("reward.reward_kwargs.overlong_buffer_cfg.log=false")
    scored = combine(config, rule=RULE, model_score=None, length=10, max_length=10)
    assert (scored.reward.score, scored.parts) == (-0.5, {"rule_score": 0.5})


def test_a_model_replaces_or_joins_the_rule_with_its_coefficient(model_path: str) -> None:
    model = ["reward.reward_model.enable=true", f"reward.reward_model.model_path={model_path}", "reward.reward_model.coef=0.25"]  # fmt: skip
    replace = load_config(model).reward
    scored = combine(replace, rule=None, model_score=-3.0, length=1, max_length=10)
    assert (scored.reward, scored.parts) == (Reward(score=-0.75, extra={}), {"model_score": -3.0})
    assert not uses_functions(replace)
    add = dapo(*model, "reward.reward_model.combine=add")
    scored = combine(add, rule=RULE, model_score=-3.0, length=8, max_length=10)
    assert scored.reward == Reward(score=0.5 - 0.75 - 0.5, extra={"acc": 1.0})
    assert scored.parts == {"rule_score": 0.5, "model_score": -3.0, "overlong_penalty": -0.5}
    assert uses_functions(add)


def test_a_response_without_a_token_scores_0_whatever_its_parts() -> None:
    scored = combine(dapo(), rule=RULE, model_score=2.0, length=0, max_length=10)
    assert (scored.reward.score, scored.parts) == (0.0, {})
