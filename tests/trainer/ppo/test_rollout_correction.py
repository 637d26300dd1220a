"""Rollout correction: figures by hand, and what reaches neither weight nor mask."""

import math
import typing
from typing import Any

import pytest
import torch
from torch import Tensor

from config.schema import RejectionMode, RolloutCorrectionConfig
from trainer.ppo.rollout_correction import Correction, correct_rollout

EXACT, NAN = 1e-12, float("nan")
SINGLE = 1e-6  # the weights are float32
OFF: dict[str, Any] = {
    "rollout_is": None,
    "rollout_is_threshold": 2.0,
    "rollout_is_batch_normalize": False,
    "rollout_rs": None,
    "rollout_rs_threshold": None,
    "bypass_mode": False,
}
# Ratios policy / sampler of each token; the second row has two tokens, the third none.
RATIOS = torch.tensor([[1.0, 4.0, 0.55], [1.5, 1.2, 9.0], [9.0, 9.0, 9.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, True], [True, True, False], [False, False, False]])
SAMPLER = torch.tensor([[-1.0, -2.0, -0.5], [-3.0, -0.1, -1.0], [-1.0, -1.0, -1.0]], dtype=torch.float64)


TOKEN_BAND = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0"}


def correct(ratios: Tensor = RATIOS, mask: Tensor = MASK, sampler: Tensor = SAMPLER, **changes: Any) -> Correction:
    return correct_rollout(
        old_log_probs=sampler + ratios.log(),
        rollout_log_probs=sampler,
        response_mask=mask,
        config=RolloutCorrectionConfig(**(OFF | changes)),
    )


def test_without_a_correction_the_loss_mask_is_the_response_mask_and_nothing_is_weighted() -> None:
    correction = correct()
    assert torch.equal(correction.loss_mask, MASK)
    assert correction.weights is None


def test_the_mismatch_by_hand() -> None:
    metrics = correct().metrics
    ratios = [1.0, 4.0, 0.55, 1.5, 1.2]
    logs = [math.log(ratio) for ratio in ratios]
    old = [[-1.0, -2.0 + math.log(4), -0.5 + math.log(0.55)], [-3.0 + math.log(1.5), -0.1 + math.log(1.2)]]
    training = sum(math.exp(-sum(row) / len(row)) for row in old) / 2
    rollout = (math.exp(3.5 / 3) + math.exp(3.1 / 2)) / 2
    assert metrics == pytest.approx(
        {
            "rollout_corr/kl": -sum(logs) / 5,
            "rollout_corr/k3_kl": sum(ratio - log - 1 for ratio, log in zip(ratios, logs, strict=True)) / 5,
            "rollout_corr/log_prob_diff_mean": sum(abs(log) for log in logs) / 5,
            "rollout_corr/log_prob_diff_max": math.log(4),
            "rollout_corr/training_ppl": training,
            "rollout_corr/rollout_ppl": rollout,
            "rollout_corr/ppl_ratio": (math.exp(-math.log(2.2) / 3) + math.exp(-math.log(1.8) / 2)) / 2,
            "rollout_corr/eff_sample_size": sum(ratios) ** 2 / (5 * sum(ratio**2 for ratio in ratios)),
            "rollout_corr/seq_eff_sample_size": (2.2 + 1.8) ** 2 / (2 * (2.2**2 + 1.8**2)),
        },
        rel=EXACT,
    )


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [[1.0, 2.0, 0.55], [1.5, 1.2, 1.0], [1.0, 1.0, 1.0]]),
        # 1 · 4 · 0.55 = 2.2, cut; 1.5 · 1.2 = 1.8.
        ("sequence", [[2.0, 2.0, 2.0], [1.8, 1.8, 1.0], [1.0, 1.0, 1.0]]),
    ],
)
def test_weights_are_ratios_cut_from_above(level: str, expected: list[list[float]]) -> None:
    weights = correct(rollout_is=level).weights
    torch.testing.assert_close(weights, torch.tensor(expected), rtol=SINGLE, atol=0)


def test_figures_of_the_weights_are_of_the_cut_ones_by_hand() -> None:
    metrics = correct(rollout_is="token").metrics
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx((1 + 2 + 0.55 + 1.5 + 1.2) / 5, rel=EXACT)
    assert metrics["rollout_corr/rollout_is_ratio_fraction_high"] == pytest.approx(1 / 5, rel=EXACT)
    squares = 1 + 4 + 0.55**2 + 1.5**2 + 1.2**2
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(6.25**2 / (5 * squares), rel=EXACT)


def test_normalized_weights_have_mean_1_over_the_tokens_of_the_loss() -> None:
    correction = correct(rollout_is="token", rollout_is_batch_normalize=True, **TOKEN_BAND)
    assert correction.weights is not None
    assert correction.loss_mask.tolist() == [[True, False, True], [True, True, False], [False, False, False]]
    assert float(correction.weights[correction.loss_mask].mean()) == pytest.approx(1, rel=SINGLE)


FIRST, SECOND = [[True] * 3, [False] * 3], [[False] * 3, [True, True, False]]
BOTH, NEITHER = [[True] * 3, [True, True, False]], [[False] * 3, [False] * 3]
LOG_4 = math.log(4)  # far above the other tokens' |d|, of which the second row's largest is log 1.5


@pytest.mark.parametrize(
    ("mode", "threshold", "kept"),
    [
        ("token_k1", "0.5_2.0", [[True, False, True], [True, True, False]]),
        ("token_k1", 2.0, [[True, False, True], [True, True, False]]),
        ("token_k1", "0.9_2.0", [[True, False, True], [False, False, False]]),  # 1 / 1.2 is below 0.9, 1 / 0.55 is 1.8
        ("token_k1", 1.6, [[True, False, False], [True, True, False]]),  # 1 / 0.55 is above
        # k2 of 4 is 0.96, of 0.55 0.18, of 1.5 0.08; k3 of them 1.61, 0.15, 0.09.
        ("token_k2", 0.9, [[True, False, True], [True, True, False]]),
        ("token_k2", "0.1", [[True, False, False], [True, True, False]]),
        ("token_k3", 0.12, [[True, False, False], [True, True, False]]),
        # Products 2.2 and 1.8, geometric means 2.2^(1/3) = 1.30 and 1.8^(1/2) = 1.34.
        ("seq_sum_k1", 1.9, SECOND),
        ("seq_sum_k1", "0.1_2.3", BOTH),
        ("seq_mean_k1", 1.32, FIRST),
        ("seq_mean_k1", "0.9_1.1", NEITHER),
        # Sums of k2 are 1.14 and 0.10, their means 0.38 and 0.05; of k3 1.76 and 0.11, 0.59 and 0.06.
        ("seq_sum_k2", 1.1, SECOND),
        ("seq_sum_k2", 1.2, BOTH),
        ("seq_mean_k2", 0.35, SECOND),
        ("seq_mean_k2", 0.4, BOTH),
        ("seq_sum_k3", 1.7, SECOND),
        ("seq_mean_k3", 0.6, BOTH),
        ("seq_mean_k3", 0.05, NEITHER),
        ("seq_max_k2", LOG_4**2 / 2 + 1e-9, BOTH),
        ("seq_max_k2", LOG_4**2 / 2 - 1e-9, SECOND),
        ("seq_max_k3", 4 - 1 - LOG_4 - 1e-9, SECOND),
    ],
)
def test_rejection_keeps_what_lies_within_the_bounds(mode: str, threshold: str | float, kept: list[list[bool]]) -> None:
    correction = correct(rollout_rs=mode, rollout_rs_threshold=threshold)
    assert correction.loss_mask.tolist() == [*kept, [False, False, False]]
    masked = 5 - sum(map(sum, kept))
    assert correction.metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(masked / 5, rel=EXACT)
    touched = (sum(kept[0]) < 3) + (sum(kept[1]) < 2)
    assert correction.metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(touched / 2, rel=EXACT)


@pytest.mark.parametrize("mode", typing.get_args(RejectionMode))
def test_where_sampler_and_policy_agree_every_rejection_keeps_every_token(mode: str) -> None:
    correction = correct(torch.ones_like(RATIOS), rollout_rs=mode, rollout_rs_threshold=1.0001)
    assert torch.equal(correction.loss_mask, MASK)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_row_depends_on_nothing_but_itself(level: str) -> None:
    rejection = {"rollout_rs": {"token": "token_k1", "sequence": "seq_sum_k1"}[level], "rollout_rs_threshold": 2.0}
    whole = correct(rollout_is=level, **rejection)
    order = [2, 0, 1]
    other = correct(RATIOS[order], MASK[order], SAMPLER[order], rollout_is=level, **rejection)
    assert whole.weights is not None
    assert other.weights is not None
    assert torch.equal(other.weights, whole.weights[order])
    assert torch.equal(other.loss_mask, whole.loss_mask[order])
    assert other.metrics == pytest.approx(whole.metrics, rel=EXACT)


@pytest.mark.parametrize("mode", typing.get_args(RejectionMode))
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_what_stands_outside_the_mask_reaches_nothing(level: str, mode: str) -> None:
    rejection = {"rollout_rs": mode, "rollout_rs_threshold": 1.5}
    settings = {"rollout_is": level, "rollout_is_batch_normalize": True, **rejection}
    clean = correct(**settings)
    junk = correct(torch.where(MASK, RATIOS, NAN), sampler=torch.where(MASK, SAMPLER, NAN), **settings)
    assert torch.equal(junk.weights, clean.weights)
    assert torch.equal(junk.loss_mask, clean.loss_mask)
    assert junk.metrics == clean.metrics


def test_a_batch_without_a_token_has_no_figures_of_the_mismatch() -> None:
    correction = correct(mask=torch.zeros_like(MASK), rollout_is="token", **TOKEN_BAND)
    assert not correction.loss_mask.any()
    assert not {name for name in correction.metrics if not name.startswith("rollout_corr/rollout_")}


def test_a_long_response_overflows_nothing() -> None:
    ratios = torch.full((1, 4000), math.exp(5.0), dtype=torch.float64)
    correction = correct(
        ratios, torch.ones(1, 4000, dtype=torch.bool), torch.full((1, 4000), -6.0), rollout_is="sequence"
    )
    assert bool((correction.weights == 2.0).all())
    assert all(math.isfinite(value) for value in correction.metrics.values())
