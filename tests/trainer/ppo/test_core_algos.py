"""PPO's formulas against numbers worked out by hand, gradients by autograd, and invariances."""

import math
from collections.abc import Callable
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from config.schema import KLPenalty, LossAggMode
from trainer.ppo.core_algos import (
    K3_CAP_HIGH,
    K3_CAP_LOW,
    KL_PENALTIES,
    LOSS_AGG_MODES,
    AdaptiveKLController,
    FixedKLController,
    LossCounts,
    agg_loss,
    apply_kl_penalty,
    compute_entropy_loss,
    compute_policy_loss_vanilla,
    compute_value_loss,
    entropy_from_logits,
    get_kl_controller,
    kl_is_capped,
    kl_penalty,
    log_prob_from_logits,
    masked_mean,
    masked_sum,
    masked_whiten,
    place_scores,
)

NAN, INF = float("nan"), float("inf")
EXACT = 1e-12  # float64: a handful of operations on numbers near 1, each off by 1e-16
K3_NAMES = ("k3", "low_var_kl")
repeatable = settings(deadline=None, derandomize=True, database=None, max_examples=60)


def f64(*values: object) -> Tensor:
    return torch.tensor(values[0] if len(values) == 1 else values, dtype=torch.float64)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def gradient(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """d sum(function(x)) / dx."""
    x = at.clone().requires_grad_()
    function(x).sum().backward()
    assert x.grad is not None
    return x.grad


def assert_equal(got: Tensor, wanted: Tensor, tolerance: float = EXACT) -> None:
    torch.testing.assert_close(got, wanted.to(got.dtype), rtol=tolerance, atol=tolerance)


# --- masks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("junk", [NAN, INF, -INF])
def test_masked_sum_and_mean_drop_what_stands_under_mask_0(junk: float) -> None:
    values, mask = f64([1.0, junk, 3.0]), torch.tensor([1, 0, 1])
    assert float(masked_sum(values, mask)) == 4.0
    assert float(masked_mean(values, mask)) == 2.0


def test_masked_mean_of_no_token_is_0() -> None:
    assert float(masked_mean(f64([NAN, NAN]), torch.tensor([0, 0]))) == 0.0


def test_masked_whiten_divides_by_n_minus_1() -> None:
    # Mean 3, squared deviations 4 + 0 + 4, variance 8 / 2 = 4.
    whitened = masked_whiten(f64([[1.0, 3.0], [NAN, 5.0]]), torch.tensor([[1, 1], [0, 1]]))
    assert_equal(whitened, f64([[-1.0, 0.0], [0.0, 1.0]]), 1e-8)  # epsilon under the root: 1e-8 / 4 / 2


def test_masked_whiten_of_two_tokens_gives_plus_and_minus_the_root_of_a_half() -> None:
    root = math.sqrt(0.5)
    assert_equal(masked_whiten(f64([2.0, 6.0]), torch.ones(2)), f64([-root, root]), 1e-8)  # as above


@pytest.mark.parametrize("mask", [[0, 0, 0], [0, 1, 0]], ids=["no token", "one token"])
def test_masked_whiten_only_centres_fewer_than_two_tokens(mask: list[int]) -> None:
    assert masked_whiten(f64([NAN, 0.75, INF]), torch.tensor(mask)).tolist() == [0.0, 0.0, 0.0]


# --- aggregation -----------------------------------------------------------------------------------------------------

# Rows with 3, 1 and no tokens; sums 6, 4 and nothing, means 2, 4 and none.
LOSSES = [[1.0, 2.0, 3.0], [NAN, 4.0, INF], [NAN, NAN, NAN]]
MASK = torch.tensor([[1, 1, 1], [0, 1, 0], [0, 0, 0]])
SCALE = 5.0
BY_HAND = {
    "token-mean": 10 / 4,
    "token-sum": 10.0,
    "seq-mean-token-sum": 10 / 2,
    "seq-mean-token-mean": (2 + 4) / 2,
    "seq-mean-token-sum-norm": 10 / (2 * 5),
}
WEIGHTS_BY_HAND = {  # of a token of the first row, and of the second
    "token-mean": (1 / 4, 1 / 4),
    "token-sum": (1.0, 1.0),
    "seq-mean-token-sum": (1 / 2, 1 / 2),
    "seq-mean-token-mean": (1 / 6, 1 / 2),
    "seq-mean-token-sum-norm": (1 / 10, 1 / 10),
}


def share(losses: Tensor, mask: Tensor, mode: str, counts: LossCounts) -> Tensor:
    return agg_loss(losses, mask, mode, counts=counts, loss_scale_factor=SCALE)


def test_counts_are_tokens_and_rows_with_tokens() -> None:
    assert LossCounts.of(MASK) == LossCounts(num_tokens=4, num_rows=2)
    assert LossCounts.of(torch.zeros(2, 3)) == LossCounts(num_tokens=0, num_rows=0)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_agg_loss_by_hand_leaves_out_empty_rows_and_masked_nan(mode: str) -> None:
    assert_equal(share(f64(LOSSES), MASK, mode, LossCounts.of(MASK)), f64(BY_HAND[mode]))


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_each_token_weighs_what_the_mode_says_and_a_masked_one_nothing(mode: str) -> None:
    weights = gradient(lambda losses: share(losses, MASK, mode, LossCounts.of(MASK)), f64(LOSSES))
    first, second = WEIGHTS_BY_HAND[mode]
    assert_equal(weights, f64([[first] * 3, [0.0, second, 0.0], [0.0] * 3]))


@st.composite
def masks_and_pieces(draw: st.DrawFn) -> tuple[Tensor, list[list[int]]]:
    """A mask [B, R] with holes and empty rows, and its rows dealt out to pieces, some of them empty."""
    num_rows, num_columns = draw(st.integers(1, 7)), draw(st.integers(1, 6))
    cells = draw(st.lists(st.booleans(), min_size=num_rows * num_columns, max_size=num_rows * num_columns))
    owners = draw(st.lists(st.integers(0, 3), min_size=num_rows, max_size=num_rows))
    pieces = [[row for row, owner in enumerate(owners) if owner == piece] for piece in range(4)]
    return torch.tensor(cells).view(num_rows, num_columns), pieces


@repeatable
@given(case=masks_and_pieces())
def test_shares_of_any_split_add_up_to_the_whole_in_value_and_gradient(case: tuple[Tensor, list[list[int]]]) -> None:
    mask, pieces = case
    counts, losses = LossCounts.of(mask), random(*mask.shape)
    for mode in LOSS_AGG_MODES:
        whole = share(losses, mask, mode, counts)
        split = lambda x, mode=mode: sum(share(x[rows], mask[rows], mode, counts) for rows in pieces)  # noqa: E731
        assert_equal(split(losses), whole)
        assert_equal(gradient(split, losses), gradient(lambda x, mode=mode: share(x, mask, mode, counts), losses))


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_padding_columns_do_not_change_the_loss(mode: str) -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 1]])
    losses = random(2, 3)
    wider = torch.nn.functional.pad(losses, (0, 5), value=NAN)
    narrow, wide = (
        share(x, torch.nn.functional.pad(mask, (0, x.shape[1] - 3)), mode, LossCounts.of(mask)) for x in (losses, wider)
    )
    assert_equal(wide, narrow)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize(
    "counts", [LossCounts(num_tokens=7, num_rows=3), LossCounts(num_tokens=0, num_rows=0)], ids=str
)
def test_a_piece_without_a_token_gives_0_and_gradient_0(mode: str, counts: LossCounts) -> None:
    losses = f64([[NAN, INF], [1.0, -INF]])
    assert float(share(losses, torch.zeros(2, 2), mode, counts)) == 0.0
    assert gradient(lambda x: share(x, torch.zeros(2, 2), mode, counts), losses).tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_agg_loss_refuses_an_unknown_mode_and_a_missing_factor() -> None:
    counts = LossCounts(num_tokens=1, num_rows=1)
    with pytest.raises(ValueError, match="got 'mean'"):
        agg_loss(f64([[1.0]]), torch.ones(1, 1), "mean", counts=counts)
    with pytest.raises(ValueError, match="needs loss_scale_factor"):
        agg_loss(f64([[1.0]]), torch.ones(1, 1), "seq-mean-token-sum-norm", counts=counts)


def test_the_schema_offers_the_modes_and_estimators_that_exist() -> None:
    assert set(get_args(LossAggMode)) == set(LOSS_AGG_MODES)
    assert set(get_args(KLPenalty)) == set(KL_PENALTIES)


# --- KL estimators ---------------------------------------------------------------------------------------------------

E = math.e
ESTIMATORS = {  # at d = 1, 0, -1: values, gradients
    "k1": ([1.0, 0.0, -1.0], [1.0, 1.0, 1.0]),
    "abs": ([1.0, 0.0, 1.0], [1.0, 0.0, -1.0]),
    "k2": ([0.5, 0.0, 0.5], [1.0, 0.0, -1.0]),
    "k3": ([1 / E, 0.0, E - 2], [1 - 1 / E, 0.0, 1 - E]),
    "k1+": ([1.0, 0.0, -1.0], [1.0, 0.0, -1.0]),
    "abs+": ([1.0, 0.0, 1.0], [1.0, 0.0, -1.0]),
    "k3+": ([1 / E, 0.0, E - 2], [1.0, 0.0, -1.0]),
}
ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3", "kl+": "k1+", "low_var_kl+": "k3+"}


@pytest.mark.parametrize("name", KL_PENALTIES)
def test_kl_estimator_by_hand_in_value_and_gradient(name: str) -> None:
    values, gradients = ESTIMATORS[ALIASES.get(name, name)]
    log_prob, reference = f64(-1.0, -2.0, -3.0), f64(-2.0, -2.0, -2.0)
    assert_equal(kl_penalty(log_prob, reference, name), f64(values))
    assert_equal(gradient(lambda x: kl_penalty(x, reference, name), log_prob), f64(gradients))


@pytest.mark.parametrize("name", KL_PENALTIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_kl_estimator_is_exactly_0_where_policy_and_reference_agree(name: str, dtype: torch.dtype) -> None:
    log_prob = -random(100, dtype=dtype).abs() * 10
    assert kl_penalty(log_prob, log_prob, name).abs().max() == 0


@pytest.mark.parametrize("name", ["full", "k4", "+", "k1++", "K3", ""])
def test_an_unknown_estimator_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="kl_penalty must be one of"):
        kl_penalty(f64(0.0), f64(0.0), name)


@pytest.mark.parametrize("edge", [K3_CAP_LOW, K3_CAP_HIGH])
def test_k3_is_capped_where_its_value_is_10(edge: float) -> None:
    assert math.exp(-edge) + edge - 1 == pytest.approx(10, abs=1e-13)  # a few roundings of numbers near 10


@pytest.mark.parametrize("name", K3_NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("differences", "slope"),
    [([-2.62, -3.0, -11.0, -100.0, -1e4], -12.610868638), ([11.0, 12.0, 100.0, 1e4], 0.999983298)],
)
def test_k3_beyond_its_cap_has_value_10_and_the_slope_of_the_edge(
    name: str, dtype: torch.dtype, differences: list[float], slope: float
) -> None:
    log_prob = torch.tensor(differences, dtype=dtype)
    zero = torch.zeros_like(log_prob)
    # 2e-6: float32 rounds numbers near 10 by up to 5e-7, and the edge itself by as much.
    assert_equal(kl_penalty(log_prob, zero, name), zero + 10, 2e-6)
    assert kl_penalty(log_prob, zero, name).max() <= 10
    assert_equal(gradient(lambda x: kl_penalty(x, zero, name), log_prob), zero + slope, 2e-6)


@pytest.mark.parametrize("edge", [K3_CAP_LOW, K3_CAP_HIGH])
def test_k3_has_no_jump_at_its_cap_in_value_or_gradient(edge: float) -> None:
    near = f64(edge - 1e-9, edge + 1e-9)
    value = kl_penalty(near, torch.zeros(2), "k3")
    slope = gradient(lambda x: kl_penalty(x, torch.zeros(2), "k3"), near)
    # The steepest slope, 12.6, and curvature, 13.6, times a distance of 2e-9.
    assert float(value.diff().abs()) < 3e-8
    assert float(slope.diff().abs()) < 3e-8


@pytest.mark.parametrize("name", [*K3_NAMES, "k3+", "low_var_kl+"])
def test_capped_tokens_are_those_strictly_beyond_the_edges(name: str) -> None:
    differences = f64(-2.62, K3_CAP_LOW, -2.6, 0.0, 10.9, K3_CAP_HIGH, 11.1)
    assert kl_is_capped(differences, torch.zeros(7), name).tolist() == [True, False, False, False, False, False, True]


@pytest.mark.parametrize("name", [name for name in KL_PENALTIES if name.rstrip("+") not in K3_NAMES])
def test_only_k3_is_ever_capped(name: str) -> None:
    assert not kl_is_capped(f64(-1e3, 1e3), torch.zeros(2), name).any()
    assert float(kl_penalty(f64(1e3), f64(0.0), name)) > 10


@pytest.mark.parametrize("name", ["k1", "abs", "k3"])
def test_a_plus_keeps_the_value_to_the_last_bit_and_takes_the_gradient_of_k2(name: str) -> None:
    log_prob, reference = (-20 * random(1000, seed=seed, dtype=torch.float32).abs() for seed in (1, 2))
    value = kl_penalty(log_prob, reference, f"{name}+")
    assert gradient(lambda x: kl_penalty(x, reference, f"{name}+"), log_prob).equal(log_prob - reference)
    assert value.equal(kl_penalty(log_prob, reference, name))


def test_k3_of_small_differences_keeps_its_digits_in_float32() -> None:
    # Early in training d is about 1e-3 and k3 about d²/2 = 5e-7, less than float32's rounding of exp(-d), 6e-8, allows.
    difference = 1e-3 * random(1000, dtype=torch.float32)
    value = kl_penalty(difference, torch.zeros(1000), "k3")
    assert float(value.min()) >= 0
    exact = torch.expm1(-difference.double()) + difference.double()
    # 1e-3 of the mean, from errors of 1e-10 (float32's rounding of d) in numbers of 5e-7 on average.
    assert float(value.double().mean()) == pytest.approx(float(exact.mean()), rel=1e-3)


POLICY_LOGITS, REFERENCE = f64([0.9, -0.4, 0.1, 0.3]), torch.log_softmax(f64([0.0, 0.5, -0.2, 0.4]), -1)


def exact_kl(logits: Tensor) -> Tensor:
    log_p = torch.log_softmax(logits, -1)
    return (log_p.exp() * (log_p - REFERENCE)).sum()


def expected_estimate(logits: Tensor, name: str) -> Tensor:
    """The estimator's mean over tokens sampled from the policy, whose gradient is that of the sampled loss."""
    log_p = torch.log_softmax(logits, -1)
    return (log_p.detach().exp() * kl_penalty(log_p, REFERENCE, name)).sum()


@pytest.mark.parametrize("name", ["k1", "k3", "k1+", "k3+"])
def test_k1_and_k3_are_unbiased(name: str) -> None:
    assert_equal(expected_estimate(POLICY_LOGITS, name), exact_kl(POLICY_LOGITS))


@pytest.mark.parametrize("name", ["k2", "k1+", "abs+", "k3+"])
def test_the_expected_gradient_of_k2_and_of_a_plus_is_that_of_the_kl(name: str) -> None:
    got = gradient(lambda logits: expected_estimate(logits, name), POLICY_LOGITS)
    assert_equal(got, gradient(exact_kl, POLICY_LOGITS))


def test_the_expected_gradient_of_k1_is_0_so_it_cannot_pull() -> None:
    assert_equal(gradient(lambda logits: expected_estimate(logits, "k1"), POLICY_LOGITS), torch.zeros(4))


# --- scores and the KL in the reward ---------------------------------------------------------------------------------


def test_a_score_stands_on_the_last_token_with_mask_1_and_an_empty_row_gets_none() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0], [0, 1, 0, 0]])
    scores = place_scores([1.0, -2.0, 0.5, 100.0, 3.0], mask)
    assert scores.tolist() == [[0, 1, 0, 0], [0, 0, -2, 0], [0, 0, 0, 0.5], [0, 0, 0, 0], [0, 3, 0, 0]]
    assert scores.dtype == torch.float32


# Rows with 2 tokens (KL 0.5 and -0.1), 1 token (KL 0.3) and none.
SCORES = f64([[0.0, 1.0, NAN], [2.0, 7.0, 7.0], [9.0, 9.0, 9.0]])
OLD = f64([[-1.0, -2.0, NAN], [-0.7, NAN, 0.0], [NAN, -INF, 0.0]])
REF = f64([[-1.5, -1.9, -1.0], [-1.0, 0.0, NAN], [0.0, NAN, -50.0]])
RESPONSES = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])


def penalise(*, beta: float, penalty: str = "kl", scores: Tensor = SCORES) -> tuple[Tensor, float, int]:
    return apply_kl_penalty(
        token_level_scores=scores,
        old_log_probs=OLD,
        ref_log_prob=REF,
        response_mask=RESPONSES,
        beta=beta,
        penalty=penalty,
    )


def test_kl_in_the_reward_by_hand() -> None:
    rewards, mean_kl, num_rows = penalise(beta=0.1)
    assert_equal(rewards, f64([[-0.05, 1.01, 0.0], [1.97, 0.0, 0.0], [0.0, 0.0, 0.0]]))
    assert mean_kl == pytest.approx((0.2 + 0.3) / 2, abs=EXACT)  # over the two rows with tokens
    assert num_rows == 3  # the controller counts all rows


def test_kl_in_the_reward_uses_the_chosen_estimator() -> None:
    rewards, mean_kl, _ = penalise(beta=2.0, penalty="mse")
    assert_equal(rewards, f64([[-0.25, 0.99, 0.0], [1.91, 0.0, 0.0], [0.0, 0.0, 0.0]]))
    assert mean_kl == pytest.approx(((0.125 + 0.005) / 2 + 0.045) / 2, abs=EXACT)


def test_beta_0_leaves_the_scores_and_still_measures_the_kl() -> None:
    rewards, mean_kl, _ = penalise(beta=0.0)
    assert rewards.tolist() == [[0.0, 1.0, 0.0], [2.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    assert mean_kl == pytest.approx(0.25, abs=EXACT)


def test_kl_in_the_reward_of_a_batch_without_tokens_is_0() -> None:
    result = apply_kl_penalty(
        token_level_scores=SCORES,
        old_log_probs=OLD,
        ref_log_prob=REF,
        response_mask=torch.zeros(3, 3),
        beta=0.1,
        penalty="kl",
    )
    assert result.token_level_rewards.abs().max() == 0
    assert (result.mean_kl, result.num_rows) == (0.0, 3)


# --- KL controllers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kl", "factor"),
    [
        (6.6, 1 + 0.1 * 256 / 1e4),
        (5.7, 1 - 0.05 * 256 / 1e4),
        (6.0, 1.0),
        (7.3, 1 + 0.2 * 256 / 1e4),  # 7.3 / 6 - 1 = 0.217 is clipped
        (4.7, 1 - 0.2 * 256 / 1e4),
        (-3.0, 1 - 0.2 * 256 / 1e4),
        (1e9, 1 + 0.2 * 256 / 1e4),
    ],
)
def test_adaptive_controller_moves_by_the_clipped_error_times_rows_over_horizon(kl: float, factor: float) -> None:
    controller = AdaptiveKLController(0.5, target_kl=6.0, horizon=1e4)
    controller.update(kl, 256)
    assert controller.value == pytest.approx(0.5 * factor, rel=EXACT)


def test_adaptive_controller_goes_on_from_a_checkpoint() -> None:
    first, second = (AdaptiveKLController(0.5, target_kl=6.0, horizon=1e3) for _ in range(2))
    first.update(9.0, 64)
    second.load_state_dict(first.state_dict())
    assert second.value == first.value != 0.5
    for controller in (first, second):
        controller.update(5.0, 64)
    assert second.value == first.value


@pytest.mark.parametrize(("target_kl", "horizon"), [(0.0, 1.0), (-1.0, 1.0), (1.0, 0.0), (1.0, -5.0)])
def test_adaptive_controller_refuses_a_target_or_horizon_that_is_not_positive(target_kl: float, horizon: float) -> None:
    with pytest.raises(ValueError, match="needs target_kl > 0 and horizon > 0"):
        AdaptiveKLController(0.1, target_kl=target_kl, horizon=horizon)


def test_five_horizons_of_rows_are_refused_and_fewer_keep_the_coefficient_positive() -> None:
    controller = AdaptiveKLController(0.1, target_kl=1.0, horizon=100)
    with pytest.raises(ValueError, match="500 rows per step need horizon > 100; got 100"):
        controller.update(0.0, 500)
    assert controller.value == 0.1
    controller.update(0.0, 499)
    assert controller.value == pytest.approx(0.1 * (1 - 0.2 * 4.99), rel=1e-9)  # 0.002 left of 1: digits are lost


def test_the_fixed_controller_never_moves_and_keeps_the_configured_value_on_resume() -> None:
    controller = FixedKLController(0.3)
    controller.update(1e3, 64)
    controller.load_state_dict({"value": 0.7})
    assert controller.value == 0.3
    assert controller.state_dict() == {"value": 0.3}


def test_get_kl_controller_gives_the_type_asked_for() -> None:
    fixed = get_kl_controller(type="fixed", kl_coef=0.2, target_kl=0.1, horizon=10)
    adaptive = get_kl_controller(type="adaptive", kl_coef=0.2, target_kl=0.1, horizon=10)
    assert type(fixed) is FixedKLController
    assert isinstance(adaptive, AdaptiveKLController)
    assert (adaptive.value, adaptive.target_kl, adaptive.horizon) == (0.2, 0.1, 10)


# --- policy loss -----------------------------------------------------------------------------------------------------


def surrogate(ratios: Tensor, advantages: Tensor, *, c: float | None = 3.0, low: float = 0.2, high: float = 0.3):
    old = torch.full_like(ratios, -1.0)
    return compute_policy_loss_vanilla(
        log_prob=old + ratios.log(),
        old_log_probs=old,
        advantages=advantages,
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=c,
    )


NONE, HIGH, LOW, DUAL = (False, False, False), (True, False, False), (False, True, False), (False, False, True)


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "slope", "clipped"),
    [
        # The range is 0.8 to 1.3, dual clip at 3.
        (2.0, 0.5, -1.0, -1.0, NONE),  # below the range, but the surrogate only falls: nothing to clip
        (2.0, 1.0, -2.0, -2.0, NONE),
        (2.0, 1.25, -2.5, -2.5, NONE),
        (2.0, 1.4, -2.6, 0.0, HIGH),
        (2.0, 9.0, -2.6, 0.0, HIGH),  # dual clip acts only where A < 0
        (-2.0, 0.5, 1.6, 0.0, LOW),
        (-2.0, 0.9, 1.8, 1.8, NONE),
        (-2.0, 1.0, 2.0, 2.0, NONE),
        (-2.0, 2.0, 4.0, 4.0, NONE),  # above the range the loss grows on
        (-2.0, 5.0, 6.0, 0.0, DUAL),
        (0.0, 0.1, 0.0, 0.0, NONE),
        (0.0, 9.0, 0.0, 0.0, NONE),
    ],
)
def test_clipped_surrogate_by_hand(
    advantage: float, ratio: float, loss: float, slope: float, clipped: tuple[bool, bool, bool]
) -> None:
    terms = surrogate(f64([ratio]), f64([advantage]))
    assert_equal(terms.loss, f64([loss]))
    assert (bool(terms.clipped_high), bool(terms.clipped_low), bool(terms.clipped_dual)) == clipped
    # d loss / d log_prob is ratio · d loss / d ratio.
    assert_equal(ratio * gradient(lambda r: surrogate(r, f64([advantage])).loss, f64([ratio])), f64([slope]))


def test_without_dual_clip_the_loss_of_a_negative_advantage_grows_with_the_ratio() -> None:
    terms = surrogate(f64([50.0]), f64([-2.0]), c=None)
    assert_equal(terms.loss, f64([100.0]))
    assert not terms.clipped_dual.any()


def test_dual_clip_caps_loss_at_c_times_advantage_and_leaves_other_advantages_alone() -> None:
    ratios, advantages = (2 * random(1000, seed=1)).exp(), random(1000, seed=2)
    with_dual, without = surrogate(ratios, advantages), surrogate(ratios, advantages, c=None)
    negative = advantages < 0
    bound = 3.0 * advantages.abs()
    assert bool((with_dual.loss <= bound)[negative].all())
    assert with_dual.loss[~negative].equal(without.loss[~negative])
    assert with_dual.loss[negative].equal(torch.minimum(without.loss, bound)[negative])
    assert with_dual.clipped_dual.equal(negative & (without.loss > bound))
    assert 0 < int(with_dual.clipped_dual.sum()) < 1000


@pytest.mark.parametrize("c", [1.05, 1.25, 3.0, None])
def test_the_three_ways_to_be_clipped_exclude_each_other(c: float | None) -> None:
    terms = surrogate((2 * random(2000, seed=3)).exp(), random(2000, seed=4), c=c)
    ways = torch.stack([terms.clipped_high, terms.clipped_low, terms.clipped_dual])
    assert int(ways.sum(0).max()) == 1
    assert ways.any(1).tolist() == [True, True, c is not None]


def reference_loss(log_ratio: float, advantage: float, low: float, high: float, c: float) -> float:
    """The textbook form, maximised: min(rA, clip(r)A), and max(that, cA) where A < 0."""
    ratio = math.exp(max(-20.0, min(20.0, log_ratio)))
    objective = min(ratio * advantage, max(1 - low, min(1 + high, ratio)) * advantage)
    return -max(objective, c * advantage) if advantage < 0 else -objective


@repeatable
@given(
    log_ratio=st.floats(-30, 30),
    advantage=st.floats(-5, 5),
    low=st.floats(0.01, 1),
    high=st.floats(0.01, 2),
    c=st.floats(1.01, 10),
)
def test_surrogate_equals_the_textbook_form(
    log_ratio: float, advantage: float, low: float, high: float, c: float
) -> None:
    terms = compute_policy_loss_vanilla(
        log_prob=f64([log_ratio]),
        old_log_probs=f64([0.0]),
        advantages=f64([advantage]),
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=c,
    )
    assert float(terms.loss) == pytest.approx(reference_loss(log_ratio, advantage, low, high, c), rel=EXACT, abs=EXACT)


def test_before_any_update_the_gradient_is_the_plain_policy_gradient() -> None:
    log_prob, advantages = -random(50, seed=5).abs(), random(50, seed=6)

    def loss(x: Tensor) -> Tensor:
        return compute_policy_loss_vanilla(
            log_prob=x,
            old_log_probs=log_prob,
            advantages=advantages,
            clip_ratio_low=0.2,
            clip_ratio_high=0.2,
            clip_ratio_c=3.0,
        ).loss

    assert loss(log_prob).equal(-advantages)
    assert gradient(loss, log_prob).equal(-advantages)


@pytest.mark.parametrize(
    ("log_ratio", "loss", "slope"), [(19.0, math.exp(19), math.exp(19)), (88.9, math.exp(20), 0.0)]
)
def test_the_ratio_is_bounded_at_exp_20_in_float32(log_ratio: float, loss: float, slope: float) -> None:
    def run(x: Tensor) -> Tensor:
        zero = torch.zeros(1)
        clip = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": None}
        return compute_policy_loss_vanilla(log_prob=x, old_log_probs=zero, advantages=zero - 1, **clip).loss

    at = torch.tensor([log_ratio])
    # 1e-5: float32's exp is right to 6e-8 relative, times the exponent's own rounding of 1e-6.
    assert_equal(run(at), torch.tensor([loss]), 1e-5)
    assert_equal(gradient(run, at), torch.tensor([slope]), 1e-5)


@pytest.mark.parametrize("c", [1.0, 0.9, 0.0, -3.0])
def test_a_dual_clip_that_would_cut_into_the_clip_range_is_refused(c: float) -> None:
    with pytest.raises(ValueError, match=r"clip_ratio_c must be > 1, or null for no dual clip; got"):
        surrogate(f64([1.0]), f64([1.0]), c=c)


# --- value loss ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pred", "old", "target", "loss", "slope", "clipped"),
    [
        (1.0, 0.8, 2.0, 0.5, -1.0, False),  # moved by 0.2, within 0.5
        (1.0, 0.0, 2.0, 0.5 * 1.5**2, 0.0, True),  # counts as 0.5
        (-1.0, 0.0, -2.0, 0.5 * 1.5**2, 0.0, True),  # counts as -0.5
        (1.0, 0.0, 0.0, 0.5, 1.0, False),  # counts as 0.5, but that is the smaller error
        (2.0, 2.0, 2.0, 0.0, 0.0, False),
    ],
)
def test_value_loss_by_hand(pred: float, old: float, target: float, loss: float, slope: float, clipped: bool) -> None:
    def run(vpreds: Tensor):
        return compute_value_loss(vpreds=vpreds, values=f64([old]), returns=f64([target]), cliprange_value=0.5)

    terms = run(f64([pred]))
    assert_equal(terms.loss, f64([loss]))
    assert bool(terms.clipped) is clipped
    assert_equal(gradient(lambda x: run(x).loss, f64([pred])), f64([slope]))


# --- entropy and log-probabilities -----------------------------------------------------------------------------------


def test_entropy_by_hand() -> None:
    logits = f64([[0.0, 0.0, 0.0, 0.0], [math.log(3.0), 0.0, -INF, -INF], [5.0, -INF, -INF, -INF]])
    three_to_one = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert_equal(entropy_from_logits(logits, 1.0), f64([math.log(4), three_to_one, 0.0]))


def test_a_logit_of_minus_infinity_changes_neither_entropy_nor_gradient_of_the_others() -> None:
    with_hole, without = f64([1.0, -INF, 0.5, -2.0]), f64([1.0, 0.5, -2.0])
    assert_equal(entropy_from_logits(with_hole, 0.7), entropy_from_logits(without, 0.7))
    got = gradient(lambda x: entropy_from_logits(x, 0.7), with_hole)
    wanted = gradient(lambda x: entropy_from_logits(x, 0.7), without)
    assert got[1] == 0
    assert_equal(got[[0, 2, 3]], wanted)


def test_the_gradient_of_the_entropy_is_right() -> None:
    # d H / d logit_i = -p_i · (log p_i + H) / T.
    logits, temperature = random(3, 7), 0.6
    log_p = torch.log_softmax(logits / temperature, -1)
    entropy = -(log_p.exp() * log_p).sum(-1, keepdim=True)
    got = gradient(lambda x: entropy_from_logits(x, temperature), logits)
    assert_equal(got, -log_p.exp() * (log_p + entropy) / temperature)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_log_prob_and_entropy_are_those_of_the_sampled_distribution(temperature: float) -> None:
    logits = random(1, 5)
    p = [math.exp(float(x) / temperature) for x in logits[0]]
    p = [x / sum(p) for x in p]
    labels = torch.arange(5)
    log_prob = log_prob_from_logits(logits.expand(5, 5), labels, temperature)
    assert_equal(log_prob, f64([math.log(x) for x in p]))
    assert_equal(entropy_from_logits(logits, temperature), f64([-sum(x * math.log(x) for x in p)]))


def test_log_prob_is_finite_in_value_and_gradient_beside_logits_of_minus_infinity() -> None:
    logits, labels = f64([[0.0, -INF, 0.0]]), torch.tensor([0])
    assert_equal(log_prob_from_logits(logits, labels, 1.0), f64([-math.log(2)]))
    assert_equal(gradient(lambda x: log_prob_from_logits(x, labels, 1.0), logits), f64([[0.5, 0.0, -0.5]]))


def test_bfloat16_logits_give_float32_results() -> None:
    logits = random(4, 100, dtype=torch.bfloat16)
    labels = torch.arange(4)
    for got, wanted in (
        (log_prob_from_logits(logits, labels, 0.8), log_prob_from_logits(logits.double(), labels, 0.8)),
        (entropy_from_logits(logits, 0.8), entropy_from_logits(logits.double(), 0.8)),
    ):
        assert got.dtype == torch.float32
        assert_equal(got, wanted, 1e-5)  # float32's 6e-8 over sums of 100 terms; bfloat16 would be off by 4e-3


def test_entropy_loss_is_aggregated_like_the_policy_loss() -> None:
    entropy, counts = f64(LOSSES), LossCounts.of(MASK)
    for mode in LOSS_AGG_MODES:
        got = compute_entropy_loss(entropy, MASK, mode, counts=counts, loss_scale_factor=SCALE)
        assert_equal(got, f64(BY_HAND[mode]))
