"""Advantage estimators against slow references, by hand, and by what must not matter to them."""

import math
from collections.abc import Callable
from typing import get_args, get_type_hints

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from config.rollout_rules import GROUP_ESTIMATORS
from config.schema import AlgorithmConfig
from trainer.ppo.advantages import (
    ADV_ESTIMATORS,
    AdvantageResult,
    compute_advantages,
    compute_gae,
    compute_grpo,
    compute_reinforce_plus_plus,
    compute_reinforce_plus_plus_baseline,
    compute_rloo,
)

NAN = float("nan")
EXACT = 1e-12  # float64: tens of operations on numbers near 1, each off by 1e-16
repeatable = settings(deadline=None, derandomize=True, database=None, max_examples=100)


def f64(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def assert_equal(got: Tensor, wanted: Tensor, tolerance: float = EXACT) -> None:
    torch.testing.assert_close(got, wanted.to(got.dtype), rtol=tolerance, atol=tolerance)


@st.composite
def masks(draw: st.DrawFn) -> Tensor:
    """[B, R] with holes, padding on either side, and rows without a token."""
    num_rows, num_columns = draw(st.integers(1, 5)), draw(st.integers(1, 8))
    cells = draw(st.lists(st.booleans(), min_size=num_rows * num_columns, max_size=num_rows * num_columns))
    return torch.tensor(cells).view(num_rows, num_columns)


# --- GAE -------------------------------------------------------------------------------------------------------------


def slow_gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Raw advantages and returns by definition, on valid tokens: A_t = sum over l of (gamma·lam)^l · delta_{t+l}."""
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    for row in range(len(mask)):
        valid = mask[row].nonzero().squeeze(-1).tolist()
        v = [float(values[row, t]) for t in valid] + [0.0]
        delta = [float(rewards[row, t]) + gamma * v[i + 1] - v[i] for i, t in enumerate(valid)]
        for i, t in enumerate(valid):
            advantages[row, t] = sum((gamma * lam) ** step * d for step, d in enumerate(delta[i:]))
            returns[row, t] = advantages[row, t] + v[i]
    return advantages, returns


def slow_whiten(values: Tensor, mask: Tensor) -> Tensor:
    valid = [float(x) for x in values[mask]]
    if not valid:
        return torch.zeros_like(values)
    mean = sum(valid) / len(valid)
    scale = 1.0
    if len(valid) > 1:
        scale = 1 / math.sqrt(sum((x - mean) ** 2 for x in valid) / (len(valid) - 1) + 1e-8)
    return torch.where(mask, (values - mean) * scale, 0.0)


@repeatable
@given(
    mask=masks(), seed=st.integers(0, 99), gamma=st.sampled_from([1.0, 0.9, 0.0]), lam=st.sampled_from([1.0, 0.95, 0.0])
)
def test_gae_equals_its_definition_over_the_valid_tokens(mask: Tensor, seed: int, gamma: float, lam: float) -> None:
    rewards, values = random(*mask.shape, seed=seed), random(*mask.shape, seed=seed + 100)
    rewards, values = torch.where(mask, rewards, NAN), torch.where(mask, values, NAN)
    got = compute_gae(token_level_rewards=rewards, values=values, response_mask=mask, gamma=gamma, lam=lam)
    raw, returns = slow_gae(rewards, values, mask, gamma, lam)
    assert_equal(got.returns, returns)
    # Whitening divides by a deviation that may be as small as rounding allows: 1e-16 / sqrt(1e-8).
    assert_equal(got.advantages, slow_whiten(raw, mask), 1e-9)


def test_gae_in_float32_is_right_to_single_precision() -> None:
    mask = torch.rand(8, 64, generator=torch.Generator().manual_seed(0)) < 0.8
    rewards, values = random(8, 64, seed=1), random(8, 64, seed=2)
    settings_ = {"response_mask": mask, "gamma": 0.99, "lam": 0.95}
    single = compute_gae(token_level_rewards=rewards.float(), values=values.float(), **settings_)
    double = compute_gae(token_level_rewards=rewards, values=values, **settings_)
    # 1e-5: float32's 6e-8 over sums of at most 64 terms.
    assert_equal(single.returns, double.returns, 1e-5)
    assert_equal(single.advantages, double.advantages, 1e-5)
    assert single.advantages.dtype == torch.float32


def run_gae(rewards: object, values: object, mask: object, *, gamma: float = 1.0, lam: float = 1.0) -> AdvantageResult:
    mask = torch.tensor(mask)
    return compute_gae(token_level_rewards=f64(rewards), values=f64(values), response_mask=mask, gamma=gamma, lam=lam)


def test_returns_with_gamma_and_lambda_1_are_the_reward_to_go() -> None:
    got = run_gae([[1.0, 2.0, 4.0]], [[0.3, -0.7, 9.0]], [[1, 1, 1]])
    assert_equal(got.returns, f64([[7.0, 6.0, 4.0]]))


def test_returns_with_lambda_0_are_the_one_step_target() -> None:
    # r_t + gamma · V_{t+1}, with the value after the last token 0.
    got = run_gae([[1.0, 2.0, 4.0]], [[0.3, -0.7, 9.0]], [[1, 1, 1]], gamma=0.5, lam=0.0)
    assert_equal(got.returns, f64([[1 + 0.5 * -0.7, 2 + 0.5 * 9, 4.0]]))


def test_value_and_advantage_carry_over_a_tool_token_which_gets_nothing() -> None:
    got = run_gae([[1.0, 50.0, 2.0]], [[0.5, -80.0, 0.25]], [[1, 0, 1]], gamma=0.5, lam=0.5)
    # delta = 2 - 0.25 at the end and 1 + 0.5 · 0.25 - 0.5 at the start, plus a quarter of the former.
    raw_last = 1.75
    raw_first = 0.625 + 0.25 * raw_last
    assert_equal(got.returns, f64([[raw_first + 0.5, 0.0, raw_last + 0.25]]))
    root = math.sqrt(0.5)
    assert_equal(got.advantages, f64([[-root, 0.0, root]]), 1e-7)  # epsilon: 1e-8 / 0.24 variance / 2


def test_a_response_that_was_cut_at_its_limit_is_terminal() -> None:
    # No token of padding follows, and no reward was given: what the critic hoped for is lost.
    got = run_gae([[0.0, 0.0]], [[0.5, 0.5]], [[1, 1]])
    assert_equal(got.returns, f64([[0.0, 0.0]]))


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_whitened_advantages_have_mean_0_and_variance_1_over_the_valid_tokens(name: str) -> None:
    mask = torch.rand(6, 9, generator=torch.Generator().manual_seed(3)) < 0.6
    got = estimate(name, random(6, 9, seed=4), mask, ["a", "b", "a", "b", "a", "b"]).advantages
    assert float(got[mask].mean()) == pytest.approx(0, abs=EXACT)
    assert float(got[mask].var()) == pytest.approx(1, abs=1e-6)  # epsilon 1e-8 against variances above 0.01
    assert got[~mask].abs().max() == 0


@pytest.mark.parametrize("mask", [[[0, 0], [0, 0]], [[0, 1], [0, 0]]], ids=["no token", "one token"])
def test_gae_of_fewer_than_two_tokens_is_finite(mask: list[list[int]]) -> None:
    got = run_gae([[NAN, 1.0], [NAN, NAN]], [[NAN, 0.25], [NAN, NAN]], mask)
    assert got.advantages.abs().max() == 0
    assert_equal(got.returns, f64(mask))  # the one token's return is its reward, 1


# --- all estimators --------------------------------------------------------------------------------------------------


def estimate(name: str, rewards: Tensor, mask: Tensor, uid: list[str], **changes: object) -> AdvantageResult:
    values = random(*mask.shape, seed=77, dtype=rewards.dtype)
    arguments = {"values": values, "gamma": 0.9, "lam": 0.8, "norm_by_std": True} | changes
    return compute_advantages(name, token_level_rewards=rewards, response_mask=mask, uid=uid, **arguments)


def test_every_estimator_is_the_function_of_its_name() -> None:
    rewards, values = random(4, 3, seed=1), random(4, 3, seed=2)
    mask, uid = torch.tensor([[1, 1, 0], [1, 0, 1], [1, 1, 1], [1, 0, 0]]), ["a", "a", "b", "b"]
    common = {"token_level_rewards": rewards, "response_mask": mask}
    wanted = {
        "gae": compute_gae(**common, values=values, gamma=0.9, lam=0.8),
        "grpo": compute_grpo(**common, uid=uid, norm_by_std=False),
        "rloo": compute_rloo(**common, uid=uid),
        "reinforce_plus_plus": compute_reinforce_plus_plus(**common, gamma=0.9),
        "reinforce_plus_plus_baseline": compute_reinforce_plus_plus_baseline(**common, uid=uid),
    }
    assert tuple(wanted) == ADV_ESTIMATORS
    for name, result in wanted.items():
        got = estimate(name, rewards, mask, uid, values=values, norm_by_std=False)
        assert got.advantages.equal(result.advantages)
        assert got.returns.equal(result.returns)
    assert len({tuple(result.advantages.flatten().tolist()) for result in wanted.values()}) == len(wanted)


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(ValueError, match=r"adv_estimator must be one of gae, .*; got 'gea'"):
        estimate("gea", torch.zeros(1, 1), torch.ones(1, 1), ["a"])


def test_the_configuration_offers_the_estimators_that_exist() -> None:
    assert get_args(get_type_hints(AlgorithmConfig)["adv_estimator"]) == ADV_ESTIMATORS
    assert set(GROUP_ESTIMATORS) < set(ADV_ESTIMATORS)


@pytest.mark.parametrize("name", ADV_ESTIMATORS)
def test_outputs_are_0_under_mask_0_and_what_stands_there_does_not_matter(name: str) -> None:
    mask = torch.tensor([[True, True, False], [False, True, True], [False, False, False], [True, False, True]])
    rewards, values, uid = random(4, 3, seed=5), random(4, 3, seed=6), ["a", "a", "a", "a"]
    clean, dirty = (
        estimate(name, torch.where(mask, rewards, junk), mask, uid, values=torch.where(mask, values, junk))
        for junk in (0.0, NAN)
    )
    for got, same in zip(dirty, clean, strict=True):
        assert got.equal(same)
        assert got[~mask].abs().max() == 0
        assert got[mask].abs().min() > 0


@pytest.mark.parametrize("name", ADV_ESTIMATORS)
def test_padding_columns_change_nothing(name: str) -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 1], [1, 1, 1], [1, 0, 0]])
    rewards, values, uid = random(4, 3, seed=7), random(4, 3, seed=8), ["a", "b", "a", "b"]
    narrow = estimate(name, rewards, mask, uid, values=values)
    pad = torch.nn.functional.pad
    wide = estimate(name, pad(rewards, (0, 6), value=3.0), pad(mask, (0, 6)), uid, values=pad(values, (0, 6)))
    for got, wanted in zip(wide, narrow, strict=True):
        assert_equal(got, pad(wanted, (0, 6)))


# --- groups ----------------------------------------------------------------------------------------------------------


def run_group(
    name: str, scores: list[float], uid: list[str], mask: object = None, **changes: object
) -> AdvantageResult:
    """Each row's score as the reward of its first column, of two."""
    rewards = torch.nn.functional.pad(f64(scores).unsqueeze(-1), (0, 1))
    return estimate(name, rewards, torch.ones(len(scores), 2) if mask is None else torch.tensor(mask), uid, **changes)


# A group with rewards 1, 2 and 6, mean 3, squared deviations 4 + 1 + 9, and one with 0 and 10.
SCORES, UID = [1.0, 0.0, 2.0, 10.0, 6.0], ["a", "b", "a", "b", "a"]


@pytest.mark.parametrize(
    ("name", "norm_by_std", "per_row"),
    [
        ("grpo", False, [-2.0, -5.0, -1.0, 5.0, 3.0]),
        ("grpo", True, [-2 / math.sqrt(7), -math.sqrt(0.5), -1 / math.sqrt(7), math.sqrt(0.5), 3 / math.sqrt(7)]),
        ("rloo", False, [1 - 4, 0 - 10, 2 - 3.5, 10 - 0, 6 - 1.5]),
    ],
)
def test_group_baselines_by_hand_stand_on_every_token(name: str, norm_by_std: bool, per_row: list[float]) -> None:
    got = run_group(name, SCORES, UID, norm_by_std=norm_by_std)
    tolerance = 1e-6 if norm_by_std else EXACT  # the group's epsilon, 1e-6 on deviations above 2.6
    assert_equal(got.advantages, f64(per_row).unsqueeze(-1).expand(-1, 2), tolerance)
    assert got.returns.equal(got.advantages)


def test_a_rows_reward_is_the_sum_over_its_tokens() -> None:
    rewards, mask = f64([[1.0, 0.5, 90.0], [0.25, 70.0, -1.0]]), torch.tensor([[1, 1, 0], [1, 0, 1]])
    got = estimate("rloo", rewards, mask, ["a", "a"]).advantages
    assert_equal(got, f64([[2.25, 2.25, 0.0], [-2.25, 0.0, -2.25]]))  # 1.5 against -0.75


def test_reinforce_plus_plus_baseline_by_hand() -> None:
    mask = [[1, 0], [1, 1], [1, 0], [1, 0], [1, 1]]
    got = run_group("reinforce_plus_plus_baseline", SCORES, UID, mask)
    raw = f64([-2.0, -5.0, -1.0, 5.0, 3.0]).unsqueeze(-1) * f64(mask)
    assert_equal(got.returns, raw)
    # Over the seven tokens: mean (-2 - 5 - 5 - 1 + 5 + 3 + 3) / 7 = -2/7.
    squares = 4 + 25 + 25 + 1 + 25 + 9 + 9 - 7 * (2 / 7) ** 2
    assert_equal(got.advantages[:, 0], (raw[:, 0] + 2 / 7) / math.sqrt(squares / 6), 1e-9)  # epsilon: 1e-8 / 16 / 2


def test_reinforce_plus_plus_by_hand() -> None:
    rewards, mask = f64([[1.0, 9.0, 2.0, 9.0], [4.0, 0.0, 9.0, 9.0]]), torch.tensor([[1, 0, 1, 0], [1, 1, 0, 0]])
    got = compute_reinforce_plus_plus(token_level_rewards=rewards, response_mask=mask, gamma=0.5)
    # The masked token in the middle neither discounts nor pays: 1 + 0.5 · 2.
    assert_equal(got.returns, f64([[2.0, 0.0, 2.0, 0.0], [4.0, 0.0, 0.0, 0.0]]))
    # Over 2, 2, 4, 0: mean 2, variance 8 / 3.
    scale = math.sqrt(3 / 8)
    assert_equal(got.advantages, f64([[0.0] * 4, [2 * scale, -2 * scale, 0.0, 0.0]]), 1e-8)  # epsilon: 1e-8 / 2.7 / 2


ORDERED: list[tuple[str, Callable[[AdvantageResult], Tensor]]] = [
    ("grpo", lambda result: result.advantages),
    ("rloo", lambda result: result.advantages),
    ("reinforce_plus_plus_baseline", lambda result: result.returns),  # before the whitening over the batch
]


@pytest.mark.parametrize(("name", "figure"), ORDERED, ids=[name for name, _ in ORDERED])
def test_groups_follow_the_uid_to_the_last_bit_whatever_the_row_order(
    name: str, figure: Callable[[AdvantageResult], Tensor]
) -> None:
    num_rows = 24
    rewards = random(num_rows, 5, seed=9, dtype=torch.float32)
    mask = torch.rand(num_rows, 5, generator=torch.Generator().manual_seed(10)) < 0.7
    uid = [f"prompt {row % 5}" for row in range(num_rows)]
    wanted = figure(estimate(name, rewards, mask, uid))
    assert wanted.abs().max() > 0
    for seed in range(20):
        order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed))
        got = figure(estimate(name, rewards[order], mask[order], [uid[row] for row in order.tolist()]))
        assert got.equal(wanted[order])


@pytest.mark.parametrize(("name", "figure"), ORDERED, ids=[name for name, _ in ORDERED])
@pytest.mark.parametrize("norm_by_std", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_group_of_one_or_of_equal_rewards_has_advantage_exactly_0(
    name: str, figure: Callable[[AdvantageResult], Tensor], norm_by_std: bool, dtype: torch.dtype
) -> None:
    # The mean of seven times 0.1 is not 0.1 in floating point; the last two rows keep a group with a signal beside it.
    scores = torch.tensor([0.7] + [0.1] * 7 + [1.0, 3.0], dtype=dtype).unsqueeze(-1)
    uid = ["lone"] + ["equal"] * 7 + ["signal"] * 2
    got = figure(estimate(name, scores, torch.ones(10, 1), uid, norm_by_std=norm_by_std)).squeeze(-1)
    assert got[:8].tolist() == [0.0] * 8
    assert float(got[8]) == -float(got[9]) != 0.0


@pytest.mark.parametrize(("name", "figure"), ORDERED, ids=[name for name, _ in ORDERED])
def test_rows_without_tokens_are_in_no_group(name: str, figure: Callable[[AdvantageResult], Tensor]) -> None:
    # The row without a token would pull the mean to 34; a group that keeps only one row with tokens has no signal.
    scores, uid = [100.0, 1.0, 3.0, 5.0, 6.0], ["a", "a", "a", "b", "b"]
    mask = [[0, 0], [1, 1], [1, 1], [1, 1], [0, 0]]
    got = figure(run_group(name, scores, uid, mask, norm_by_std=False))
    step = 2.0 if name == "rloo" else 1.0
    assert_equal(got[:, 0], f64([0.0, -step, step, 0.0, 0.0]))
