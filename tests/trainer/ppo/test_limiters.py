"""What each limiter did: pushes, shares and token classes against autograd on real logits, and independent of the split.

The oracle `Figures` is written from the formulas on logits [B, R, V] and shares no code with the trainer.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from config.load import load_config
from config.schema import ActorConfig
from trainer.ppo.core_algos import LOSS_AGG_MODES, LossCounts, entropy_from_logits, log_prob_from_logits
from trainer.ppo.limiters import (
    TOKEN_CLASSES,
    LimiterProbe,
    entropy_metrics,
    finish,
    logit_geometry,
    logit_norm,
    probe_metrics,
    reward_kl_metrics,
)
from workers.losses import LossShare, ppo_loss

NAN = float("nan")
EXACT = 1e-10  # float64: sums of some hundred terms, each off by 1e-16
PER_TOKEN = 1e-5  # of confident tokens 1 - p itself has no more digits: 1e-8 beside logits of 30 is known to 4e-7
SINGLE = 1e-5  # float32, design 5.2
K3_LOW, K3_HIGH = -2.6108686381498756, 10.999983298020258  # where k3 is 10
TEMPERATURES = [0.6, 1.0, 1.5]


# --- one token -------------------------------------------------------------------------------------------------------


def flat(rows: int, vocabulary: int) -> Tensor:
    return 1e-3 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(1)).double()


def spread(rows: int, vocabulary: int) -> Tensor:
    return 3 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(2)).double()


def confident(rows: int, vocabulary: int) -> Tensor:
    """The label, token 0, at 1 - p from 1e-1 to 1e-8."""
    logits = spread(rows, vocabulary)
    others = torch.logsumexp(logits[:, 1:], -1)
    logits[:, 0] = others + math.log(10) * torch.linspace(1, 8, rows).double()
    return logits


def holding_minus_infinity(rows: int, vocabulary: int) -> Tensor:
    logits = spread(rows, vocabulary)
    logits[:, 1::3] = -math.inf
    return logits


DISTRIBUTIONS = [flat, spread, confident, holding_minus_infinity]


def gradient_norms(scalars: Tensor, logits: Tensor) -> Tensor:
    """‖∂ scalar_t / ∂ logits_t‖ per token, by autograd."""
    return torch.autograd.grad(scalars.sum(), logits)[0].norm(dim=-1)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_norm_of_a_tokens_log_probability_at_the_logits_is_autograds(
    distribution: Callable[[int, int], Tensor], temperature: float
) -> None:
    logits = (temperature * distribution(8, 50)).requires_grad_()
    labels = torch.zeros(8, dtype=torch.long)
    log_prob = torch.log_softmax(logits / temperature, -1)[:, 0]
    geometry = logit_geometry(logits, labels, temperature, with_entropy=False)
    norm = logit_norm(log_prob.detach(), geometry, temperature).sqrt()
    torch.testing.assert_close(norm, gradient_norms(log_prob, logits), rtol=PER_TOKEN, atol=0)
    assert geometry.entropy is None


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_norm_of_a_tokens_entropy_at_the_logits_is_autograds(
    distribution: Callable[[int, int], Tensor], temperature: float
) -> None:
    logits = (temperature * distribution(8, 50)).requires_grad_()
    log_p = torch.log_softmax(logits / temperature, -1)
    entropy = -(log_p.exp() * log_p.masked_fill(torch.isneginf(log_p), 0.0)).sum(-1)
    known = gradient_norms(entropy, logits)
    geometry = logit_geometry(logits, torch.zeros(8, dtype=torch.long), temperature, with_entropy=True)
    assert geometry.entropy is not None
    torch.testing.assert_close(geometry.entropy.sqrt() / temperature, known, rtol=PER_TOKEN, atol=0)


def test_the_push_of_a_vocabulary_of_two_by_hand() -> None:
    # p = 3/4, 1/4; the label is the first. The norm at T = 2 is 1/2 · sqrt((1/4)² + (1/4)²).
    logits = 2 * torch.tensor([[3 / 4, 1 / 4]]).double().log()
    geometry = logit_geometry(logits, torch.tensor([0]), 2.0, with_entropy=True)
    norm = logit_norm(torch.tensor([0.75]).double().log(), geometry, 2.0)
    assert float(geometry.others) == pytest.approx(1 / 16, rel=EXACT)
    assert float(norm) == pytest.approx(2 / 16 / 4, rel=EXACT)
    # For two tokens p (log p + H) is ±p(1-p) · log(p / (1-p)).
    assert geometry.entropy is not None
    assert float(geometry.entropy) == pytest.approx(2 * (3 / 16 * math.log(3)) ** 2, rel=EXACT)


def test_a_certain_token_has_no_push() -> None:
    logits = torch.tensor([[0.0, -math.inf, -math.inf]])
    geometry = logit_geometry(logits, torch.tensor([0]), 1.0, with_entropy=True)
    assert geometry.entropy is not None
    assert (float(geometry.others), float(geometry.entropy)) == (0.0, 0.0)
    assert float(logit_norm(torch.zeros(1), geometry, 1.0)) == 0.0


@pytest.mark.parametrize("shape", [(0,), (1,), (3, 5), (2, 0), (1, 300), (7, 43)])
def test_the_sums_of_a_token_do_not_depend_on_its_neighbours(shape: tuple[int, ...]) -> None:
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(*shape, 33, generator=random)
    labels = torch.randint(33, shape, generator=random)
    whole = logit_geometry(logits, labels, 0.7, with_entropy=True)
    alone = [
        logit_geometry(row, label, 0.7, with_entropy=True)
        for row, label in zip(logits.reshape(-1, 33), labels.flatten(), strict=True)
    ]
    assert whole.entropy is not None
    assert whole.others.shape == whole.entropy.shape == shape
    for index, one in enumerate(alone):
        torch.testing.assert_close(whole.others.flatten()[index], one.others, rtol=1e-6, atol=0)
        torch.testing.assert_close(whole.entropy.flatten()[index], one.entropy, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_large_vocabulary_in_single_precision(dtype: torch.dtype) -> None:
    # SmolLM2's vocabulary, in which a plain running sum in float32 is off by 1e-4.
    random = torch.Generator().manual_seed(5)
    logits = (3 * torch.randn(40, 49152, generator=random)).to(dtype)
    before, labels = logits.clone(), torch.randint(49152, (40,), generator=random)
    geometry = logit_geometry(logits, labels, 0.9, with_entropy=True)
    exact = logit_geometry(logits.double(), labels, 0.9, with_entropy=True)
    assert geometry.entropy is not None
    assert exact.entropy is not None
    assert geometry.others.dtype == torch.float32
    torch.testing.assert_close(geometry.others.double(), exact.others, rtol=SINGLE, atol=0)
    torch.testing.assert_close(geometry.entropy.double(), exact.entropy, rtol=SINGLE, atol=0)
    assert torch.equal(logits, before), "the model's own logits are only read"


# --- a mini-batch ----------------------------------------------------------------------------------------------------


@cache
def default_actor() -> ActorConfig:
    return load_config(["experiment=copy_ppo"]).actor_rollout_ref.actor


def actor_config(**changes: Any) -> ActorConfig:
    everything_on = {
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.3,
        "clip_ratio_c": 3.0,
        "loss_agg_mode": "token-mean",
        "loss_scale_factor": 5.0,
        "entropy_coeff": 0.02,
        "use_kl_loss": True,
        "kl_loss_coef": 0.1,
        "kl_loss_type": "low_var_kl",
    }
    return replace(default_actor(), **(everything_on | changes))


@dataclass
class Tokens:
    """A mini-batch from its logits on. [B, R], but for the logits [B, R, V]."""

    logits: Tensor
    labels: Tensor
    old_log_probs: Tensor
    ref_log_prob: Tensor
    advantages: Tensor
    kl_advantages: Tensor
    mask: Tensor
    rollout_is_weights: Tensor | None = None

    @staticmethod
    def random(temperature: float, *, dtype: torch.dtype = torch.float64, vocabulary: int = 37) -> "Tokens":
        """Rows of different lengths, one empty, in which every class of token occurs and k3 is capped on both sides."""
        random = torch.Generator().manual_seed(3)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=random).double()

        rows, width = 6, 9
        logits = 2 * draw(rows, width, vocabulary)
        labels = torch.randint(vocabulary, (rows, width), generator=random)
        log_prob = torch.log_softmax(logits / temperature, -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        old, ref = log_prob + draw(rows, width), log_prob + 4 * draw(rows, width)
        advantages = draw(rows, width)
        advantages[1, :3] = 0.0
        old[0, :2] = log_prob[0, :2] - torch.tensor(
            [21.0, 25.0]
        )  # at the ratio bound: clipped where A > 0, dual where A < 0
        old[0, 2:4] = log_prob[0, 2:4] + torch.tensor(
            [21.0, 25.0]
        )  # no clip where A > 0: the bound alone takes the gradient
        advantages[0, :4] = torch.tensor([1.0, -1.0, 1.0, -1.0])
        ref[2, :2] = log_prob[2, :2] + torch.tensor([4.0, -12.0])
        mask = torch.arange(width) < torch.tensor([9, 7, 9, 3, 0, 1]).unsqueeze(-1)
        mask[2, 4] = False  # a token that rejection took out
        values = (logits, labels, old, ref, advantages, 0.3 * draw(rows, width), mask)
        return Tokens(*(value.to(dtype) if value.is_floating_point() else value for value in values))

    def rows(self, rows: list[int]) -> "Tokens":
        values = [getattr(self, field.name) for field in fields(self)]
        return Tokens(*(None if value is None else value[rows] for value in values))

    def double(self) -> "Tokens":
        values = [getattr(self, field.name) for field in fields(self)]
        return Tokens(
            *(value if value is None or not value.is_floating_point() else value.double() for value in values)
        )


def loss_of(
    tokens: Tokens,
    config: ActorConfig,
    temperature: float,
    *,
    counts: LossCounts | None = None,
    probe: bool = True,
    reward_kl: bool = True,
    calculate_entropy: bool = False,
) -> tuple[LossShare, Tensor]:
    """The share of a piece as the actor computes it, and the gradient of its loss at the logits."""
    logits = tokens.logits.clone().requires_grad_()
    with_entropy = calculate_entropy or config.entropy_coeff != 0
    geometry = logit_geometry(logits, tokens.labels, temperature, with_entropy=with_entropy)
    kl_advantages = tokens.kl_advantages if reward_kl else None
    share = ppo_loss(
        log_prob=log_prob_from_logits(logits, tokens.labels, temperature),
        entropy=entropy_from_logits(logits, temperature) if with_entropy else None,
        old_log_probs=tokens.old_log_probs,
        ref_log_prob=tokens.ref_log_prob if config.use_kl_loss else None,
        advantages=tokens.advantages,
        loss_mask=tokens.mask,
        counts=counts or LossCounts.of(tokens.mask),
        config=config,
        rollout_is_weights=tokens.rollout_is_weights,
        probe=LimiterProbe(geometry, temperature, kl_advantages) if probe else None,
    )
    share.loss.backward()
    assert logits.grad is not None
    return share, logits.grad


def measured(tokens: Tokens, config: ActorConfig, temperature: float, **options: Any) -> dict[str, float]:
    share, _ = loss_of(tokens, config, temperature, **options)
    return finish({name: float(value) for name, value in share.metrics.items()})


def weights(mask: Tensor, config: ActorConfig) -> Tensor:
    """What a token counts in the loss, by the table of `agg_loss`."""
    lengths = mask.sum(-1, keepdim=True).double()
    num_rows = (lengths > 0).sum()
    divisor = {
        "token-mean": mask.sum(),
        "token-sum": 1.0,
        "seq-mean-token-sum": num_rows,
        "seq-mean-token-mean": num_rows * lengths.clamp(min=1),
        "seq-mean-token-sum-norm": num_rows * config.loss_scale_factor,
    }[config.loss_agg_mode]
    return mask.double() / divisor


def by_hand(tokens: Tokens, config: ActorConfig, temperature: float) -> dict[str, float]:
    """All figures of a mini-batch, each gradient by autograd through the softmax; float64."""
    tokens = tokens.double()
    logits = tokens.logits.clone().requires_grad_()
    log_p = torch.log_softmax(logits / temperature, -1)
    log_prob = log_p.gather(-1, tokens.labels.unsqueeze(-1)).squeeze(-1)
    weight, advantages, mask = weights(tokens.mask, config), tokens.advantages, tokens.mask
    low, high, cap = config.clip_ratio_low, config.clip_ratio_high, config.clip_ratio_c
    assert cap is not None
    log_ratio = log_prob - tokens.old_log_probs
    bound = log_ratio.abs() > 20
    ratio = log_ratio.clamp(-20, 20).exp()
    # The clip as a case distinction: which tokens it holds, and at which loss.
    is_high = (advantages > 0) & (ratio > 1 + high)
    is_dual = (advantages < 0) & (ratio > cap)
    is_low = (advantages < 0) & (ratio < 1 - low)
    surrogate_weight = 1.0 if tokens.rollout_is_weights is None else tokens.rollout_is_weights
    unclipped = -advantages * ratio
    pg = torch.where(is_high, -advantages * (1 + high), unclipped)
    pg = torch.where(is_low, -advantages * (1 - low), pg)
    pg = torch.where(is_dual, -advantages * cap, pg)
    pg, unclipped = surrogate_weight * pg, surrogate_weight * unclipped
    distance = log_prob - tokens.ref_log_prob
    inside = distance.clamp(K3_LOW, K3_HIGH)
    k3 = (-inside).exp() + inside - 1
    edge = (1 - (-inside).exp()).detach()
    kl_pull = k3 + edge * (distance - inside)  # its gradient is that of the edge beyond the cap
    entropy = torch.special.entr(log_p.exp()).sum(-1)

    def at_logits(per_token: Tensor) -> Tensor:
        return torch.autograd.grad((weight * per_token).sum(), logits, retain_graph=True)[0]

    gradients = {
        "pg": at_logits(pg),
        "pg_unclipped": at_logits(unclipped),
        "clip": at_logits(unclipped - pg),
        "entropy": at_logits(-config.entropy_coeff * entropy),
        "kl": at_logits(config.kl_loss_coef * kl_pull),
        "reward_kl": at_logits(-tokens.kl_advantages * ratio * surrogate_weight),
    }
    push = {name: float(gradient.norm()) for name, gradient in gradients.items()}
    figures = {f"limiter/push/{name}": value for name, value in push.items()}
    whole = push["pg"] + push["entropy"] + push["kl"]
    figures |= {f"limiter/push_share/{name}": push[name] / whole for name in ("pg", "entropy", "kl")}
    figures["limiter/push_cosine"] = float((gradients["pg"] * gradients["kl"]).sum()) / (push["pg"] * push["kl"])
    size = (advantages * ratio * surrogate_weight).abs().detach()
    clipped = is_high | is_low | is_dual
    figures["limiter/clip/removed"] = float(size[mask & clipped].sum() / size[mask].sum())
    zero = advantages == 0
    classes = {
        "active": ~clipped & ~zero & ~bound,
        "high": is_high,
        "low": is_low,
        "dual": is_dual,
        "zero_advantage": zero,
        "ratio_bound": bound & ~clipped & ~zero,
    }
    figures |= {f"limiter/tokens/{name}": float(members[mask].double().mean()) for name, members in classes.items()}
    figures["limiter/ratio/mean"] = float(ratio[mask].detach().mean())
    figures["limiter/ratio/deviation"] = float((ratio[mask].detach() - 1).abs().mean())
    figures["limiter/loss/pg"] = float((weight * pg).detach().sum())
    figures["limiter/loss/entropy"] = -config.entropy_coeff * float((weight * entropy).detach().sum())
    figures["limiter/loss/kl"] = config.kl_loss_coef * float((weight * k3).detach().sum())
    sampled = (tokens.old_log_probs - tokens.ref_log_prob).clamp(K3_LOW, K3_HIGH)
    figures["limiter/kl/sampling_policy"] = float((weight * ((-sampled).exp() + sampled - 1)).sum())
    return figures


def of_limiters(figures: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in figures.items() if name.startswith("limiter/")}


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_every_figure_equals_autograd_on_the_logits(mode: str, temperature: float) -> None:
    tokens, config = Tokens.random(temperature), actor_config(loss_agg_mode=mode)
    expected = by_hand(tokens, config, temperature)
    assert all(expected[f"limiter/tokens/{name}"] > 0 for name in TOKEN_CLASSES), "every class of token is tried"
    assert of_limiters(measured(tokens, config, temperature)) == pytest.approx(expected, rel=EXACT)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_every_figure_equals_autograd_under_the_weights_of_the_rollout_correction(mode: str) -> None:
    plain, config = Tokens.random(0.9), actor_config(loss_agg_mode=mode)
    random = torch.Generator().manual_seed(3)
    weights = (0.5 * torch.randn(plain.mask.shape, generator=random)).exp().double()
    tokens = replace(plain, rollout_is_weights=torch.where(plain.mask, weights, NAN))
    figures = of_limiters(measured(tokens, config, 0.9))
    assert figures == pytest.approx(by_hand(replace(plain, rollout_is_weights=weights), config, 0.9), rel=EXACT)
    unweighted = of_limiters(measured(plain, config, 0.9))
    of_the_surrogate = {"limiter/loss/pg", "limiter/push_cosine", "limiter/clip/removed"}
    of_the_surrogate |= {f"limiter/push/{name}" for name in ("pg", "pg_unclipped", "clip", "reward_kl")}
    of_the_surrogate |= {f"limiter/push_share/{name}" for name in ("pg", "entropy", "kl")}
    assert {name for name in figures if figures[name] != unweighted[name]} == of_the_surrogate


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_every_figure_equals_autograd_in_single_precision(temperature: float) -> None:
    tokens, config = Tokens.random(temperature, dtype=torch.float32, vocabulary=2000), actor_config()
    expected = by_hand(tokens, config, temperature)
    assert of_limiters(measured(tokens, config, temperature)) == pytest.approx(expected, rel=SINGLE)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("cut", [[[0, 1, 2, 3, 4, 5]], [[5], [3, 0], [4], [1, 2]], [[4], [0], [1], [2], [3], [5]]])
def test_no_figure_depends_on_the_split(mode: str, cut: list[list[int]]) -> None:
    tokens, config = Tokens.random(0.9), actor_config(loss_agg_mode=mode)
    counts = LossCounts.of(tokens.mask)
    totals: dict[str, float] = {}
    for rows in cut:
        share, _ = loss_of(tokens.rows(rows), config, 0.9, counts=counts)
        totals = {name: totals.get(name, 0.0) + float(value) for name, value in share.metrics.items()}
    assert finish(totals) == pytest.approx(measured(tokens, config, 0.9), rel=EXACT)


def test_junk_in_masked_places_reaches_no_figure() -> None:
    tokens, config = Tokens.random(1.0), actor_config()
    clean = measured(tokens, config, 1.0)
    values = [getattr(tokens, field.name) for field in fields(tokens)][:-1]  # without weights
    junk = Tokens(*(torch.where(tokens.mask, x, NAN) if x.is_floating_point() and x.dim() == 2 else x for x in values))
    junk.logits = torch.where(tokens.mask.unsqueeze(-1), tokens.logits, NAN)
    assert measured(junk, config, 1.0) == clean


def test_shares_and_classes_add_up() -> None:
    figures = measured(Tokens.random(0.8), actor_config(), 0.8)

    def total(prefix: str) -> float:
        return sum(value for name, value in figures.items() if name.startswith(prefix))

    assert total("limiter/loss/") == pytest.approx(figures["actor/loss"], rel=EXACT)
    assert total("limiter/tokens/") == pytest.approx(1, rel=EXACT)
    assert total("limiter/push_share/") == pytest.approx(1, rel=EXACT)
    assert figures["limiter/tokens/high"] == figures["actor/pg_clipfrac_pos_adv"]
    assert figures["limiter/tokens/low"] == figures["actor/pg_clipfrac_neg_adv"]
    assert figures["limiter/tokens/dual"] == figures["actor/pg_clipfrac_lower"]


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "dual_clip", "expected"),
    [
        (0.0, 1.0, 3.0, "active"),
        (0.0, 0.0, 3.0, "zero_advantage"),
        (25.0, 0.0, 3.0, "zero_advantage"),  # the advantage alone decides: no ratio would give this token a gradient
        (1.0, 1.0, 3.0, "high"),
        (1.0, -1.0, 3.0, "active"),
        (-1.0, -1.0, 3.0, "low"),
        (-1.0, 1.0, 3.0, "active"),
        (2.0, -1.0, 3.0, "dual"),
        (25.0, 1.0, 3.0, "high"),
        (25.0, -1.0, 3.0, "dual"),
        (25.0, -1.0, None, "ratio_bound"),
        (-25.0, 1.0, 3.0, "ratio_bound"),
        (-25.0, -1.0, 3.0, "low"),
    ],
)
def test_a_token_is_in_one_class(log_ratio: float, advantage: float, dual_clip: float | None, expected: str) -> None:
    logits = torch.zeros(1, 1, 4).double()
    log_prob = torch.full((1, 1), -math.log(4)).double()
    one = torch.ones(1, 1).double()
    tokens = Tokens(
        logits, torch.zeros(1, 1, dtype=torch.long), log_prob - log_ratio, log_prob, advantage * one, one, one.bool()
    )
    figures = measured(tokens, actor_config(clip_ratio_c=dual_clip, entropy_coeff=0.0, use_kl_loss=False), 1.0)
    members = {name: figures[f"limiter/tokens/{name}"] for name in TOKEN_CLASSES}
    assert members == {name: float(name == expected) for name in TOKEN_CLASSES}
    # A token has a gradient exactly if its class says so.
    assert (figures["limiter/push/pg"] > 0) == (expected == "active")


@pytest.mark.parametrize(
    ("changes", "options", "absent"),
    [
        ({"entropy_coeff": 0.0}, {}, "entropy"),
        ({"entropy_coeff": 0.0}, {"calculate_entropy": True}, "entropy"),
        ({"use_kl_loss": False}, {}, "kl"),
        ({}, {"reward_kl": False}, "reward_kl"),
    ],
    ids=["entropy", "entropy calculated only", "KL loss", "KL in the reward"],
)
def test_a_limiter_that_is_off_has_no_figures(changes: dict, options: dict, absent: str) -> None:
    tokens = Tokens.random(1.0)
    figures = of_limiters(measured(tokens, actor_config(**changes), 1.0, **options))
    named = {f"limiter/{part}/{absent}" for part in ("loss", "push", "push_share")}
    if absent == "kl":
        named |= {"limiter/push_cosine", "limiter/kl/sampling_policy"}
    everything = by_hand(tokens, actor_config(), 1.0)
    assert figures.keys() == everything.keys() - named


def test_a_mini_batch_without_any_push_has_the_same_figures_all_zero() -> None:
    """The names depend on the configuration alone: a step's figure is the mean over updates that all have it."""
    tokens, config = Tokens.random(1.0), actor_config(entropy_coeff=0.0, kl_loss_coef=0.0)
    dead = replace(tokens, advantages=torch.zeros_like(tokens.advantages))
    figures = of_limiters(measured(dead, config, 1.0, reward_kl=False))
    assert figures.keys() == of_limiters(measured(tokens, config, 1.0, reward_kl=False)).keys()
    nonzero = {name for name, value in figures.items() if value}
    ratios = {"limiter/ratio/mean", "limiter/ratio/deviation"}
    assert nonzero == {"limiter/tokens/zero_advantage", "limiter/kl/sampling_policy"} | ratios


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("changes", [{}, {"entropy_coeff": 0.0}, {"use_kl_loss": False}], ids=str)
def test_measuring_changes_no_bit_of_the_loss_its_gradient_or_its_metrics(dtype: torch.dtype, changes: dict) -> None:
    tokens, config = Tokens.random(0.7, dtype=dtype), actor_config(**changes)
    (plain, plain_gradient), (share, gradient) = (loss_of(tokens, config, 0.7, probe=on) for on in (False, True))
    assert torch.equal(plain.loss, share.loss)
    assert torch.equal(plain_gradient, gradient)
    assert all(torch.equal(value, share.metrics[name]) for name, value in plain.metrics.items())
    assert not any(name.startswith(("limiter/", "sum/")) for name in plain.metrics)
    assert not any(value.requires_grad for value in share.metrics.values())


# --- once per step ---------------------------------------------------------------------------------------------------


def reward_kl(**changes: Any) -> dict[str, float]:
    """Scores 1 and -1 on the last of two tokens; the KL took 0.5 and 0.25 in the first row, 0.25 in the second."""
    scores = torch.tensor([[0.0, 1.0], [-1.0, 99.0]])
    rewards = torch.tensor([[-0.5, 0.75], [-1.25, NAN]])
    arguments = {
        "token_level_scores": scores,
        "token_level_rewards": rewards,
        "advantages": torch.tensor([[1.0, 2.0], [3.0, NAN]]),
        "advantages_without_kl": torch.tensor([[1.0, 3.0], [2.0, NAN]]),
        "mask": torch.tensor([[True, True], [True, False]]),
        "mean_kl": 0.11,
        "target_kl": 0.1,
    }
    return reward_kl_metrics(**(arguments | changes))


def test_kl_in_the_reward_by_hand() -> None:
    figures = reward_kl()
    assert figures["limiter/reward_kl/share"] == pytest.approx(1 / 3)  # 1 of 2 + 1
    # Deviations -1, 0, 1 and -1, 1, 0.
    assert figures["limiter/reward_kl/advantage_correlation"] == pytest.approx(0.5)
    assert figures["limiter/reward_kl/over_target"] == pytest.approx(1.1)


@pytest.mark.parametrize(
    ("mean_kl", "saturated"), [(0.11, 0), (0.119, 0), (0.121, 1), (0.081, 0), (0.079, 1), (0.0, 1)]
)
def test_the_controller_is_saturated_beyond_a_fifth_of_its_target(mean_kl: float, saturated: int) -> None:
    assert reward_kl(mean_kl=mean_kl)["limiter/reward_kl/saturated"] == saturated


def test_a_fixed_coefficient_has_no_target() -> None:
    assert reward_kl(target_kl=None).keys() == {"limiter/reward_kl/share", "limiter/reward_kl/advantage_correlation"}


@pytest.mark.parametrize("constant", ["advantages", "advantages_without_kl"])
def test_a_constant_advantage_has_no_correlation(constant: str) -> None:
    assert "limiter/reward_kl/advantage_correlation" not in reward_kl(**{constant: torch.zeros(2, 2)})


def test_an_empty_step_has_a_share_of_zero() -> None:
    figures = reward_kl(mask=torch.zeros(2, 2, dtype=torch.bool), target_kl=None)
    assert figures == {"limiter/reward_kl/share": 0.0}


def test_entropy_by_hand() -> None:
    # Eleven tokens 0.0, 0.1 … 1.0 under the mask: the deciles are the second and the last but one.
    entropys = torch.tensor([[i / 10 for i in range(11)] + [NAN]])
    figures = entropy_metrics(entropys, ~torch.isnan(entropys))
    expected = {"limiter/entropy/mean": 0.5, "limiter/entropy/p10": 0.1, "limiter/entropy/p90": 0.9}
    assert figures == pytest.approx(expected, rel=1e-6)
    assert entropy_metrics(entropys, torch.zeros(1, 12, dtype=torch.bool)) == {}


def test_the_probe_by_hand() -> None:
    # k3 of d is exp(-d) + d - 1; d is log 2 or 0.
    two, mask = math.log(2), torch.tensor([[True, True, False]])
    old = torch.tensor([[-1.0, -2.0, NAN]]).double()
    new = old - torch.tensor([[two, 0.0, 0.0]], dtype=torch.float64)
    ref = old - torch.tensor([[two, two, 0.0]], dtype=torch.float64)
    entropy = torch.tensor([[1.0, 3.0, NAN]]).double()
    arguments: dict[str, Any] = {
        "old_log_probs": old, "new_log_probs": new, "entropy_before": entropy, "entropy_after": entropy / 2, "mask": mask,
    }  # fmt: skip
    k3 = two - 0.5
    expected = {"kl": k3 / 2, "entropy_before": 2, "entropy_after": 1, "ref_kl_before": k3, "ref_kl_after": k3 / 2}
    figures = probe_metrics(ref_log_prob=ref, **arguments)
    assert figures == pytest.approx({f"limiter/probe/{name}": value for name, value in expected.items()}, rel=EXACT)
    assert probe_metrics(ref_log_prob=None, **arguments).keys() == figures.keys() - {
        "limiter/probe/ref_kl_before",
        "limiter/probe/ref_kl_after",
    }
