"""The losses of actor and critic: signs, names, masks, and that no cut of the mini-batch shows in any figure."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from config.load import load_config
from config.schema import ActorConfig, CriticConfig, GovernorConfig
from trainer.ppo.core_algos import KL_PENALTIES, LOSS_AGG_MODES, LossCounts
from workers.losses import LossShare, ppo_loss, value_loss

NAN, INF = float("nan"), float("inf")
EXACT = 1e-12  # float64: tens of operations on numbers near 1, each off by 1e-16
repeatable = settings(deadline=None, derandomize=True, database=None, max_examples=40)


@cache
def default_config() -> GovernorConfig:
    return load_config(["experiment=copy_ppo"])


def actor_config(**changes: Any) -> ActorConfig:
    everything_on = {
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.3,
        "clip_ratio_c": 3.0,
        "loss_agg_mode": "token-mean",
        "loss_scale_factor": 5.0,
        "entropy_coeff": 0.01,
        "use_kl_loss": True,
        "kl_loss_coef": 0.1,
        "kl_loss_type": "low_var_kl",
    }
    return replace(default_config().actor_rollout_ref.actor, **(everything_on | changes))


def critic_config(**changes: Any) -> CriticConfig:
    return replace(default_config().critic, **({"cliprange_value": 0.5, "loss_agg_mode": "token-mean"} | changes))


@dataclass
class Tokens:
    """What an actor's piece is made of. All [B, R]; a stray number for each masked place can be put in by `poison`."""

    log_prob: Tensor
    entropy: Tensor
    old_log_probs: Tensor
    ref_log_prob: Tensor
    advantages: Tensor
    mask: Tensor

    @staticmethod
    def random(mask: Tensor, seed: int = 0) -> "Tokens":
        """Ratios far enough from 1, and policies far enough from the reference, for every limiter to act."""

        def draw(stream: int) -> Tensor:
            return torch.randn(mask.shape, generator=torch.Generator().manual_seed(10 * seed + stream)).double()

        old = -2 + draw(0)
        return Tokens(old + draw(1), draw(2).abs(), old, old + 3 * draw(3), draw(4), mask)

    def rows(self, rows: list[int]) -> "Tokens":
        return Tokens(*(getattr(self, field.name)[rows] for field in fields(self)))

    def poison(self, junk: float) -> "Tokens":
        parts = [getattr(self, field.name) for field in fields(self)][:-1]
        return Tokens(*(torch.where(self.mask, x, junk) for x in parts), self.mask)


def run_actor(
    tokens: Tokens, config: ActorConfig, counts: LossCounts | None = None, rollout_is_weights: Tensor | None = None
) -> LossShare:
    return ppo_loss(
        log_prob=tokens.log_prob,
        entropy=tokens.entropy,
        old_log_probs=tokens.old_log_probs,
        ref_log_prob=tokens.ref_log_prob,
        advantages=tokens.advantages,
        loss_mask=tokens.mask,
        counts=counts or LossCounts.of(tokens.mask),
        config=config,
        rollout_is_weights=rollout_is_weights,
    )


def gradients(tokens: Tokens, loss: Callable[[Tokens], Tensor]) -> tuple[Tensor, Tensor]:
    """d loss / d log_prob and d loss / d entropy, [B, R] each."""
    leaves = [x.clone().requires_grad_() for x in (tokens.log_prob, tokens.entropy)]
    loss(replace(tokens, log_prob=leaves[0], entropy=leaves[1])).backward()
    first, second = (torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)
    return first, second


def assert_equal(got: Any, wanted: Any, tolerance: float = EXACT) -> None:
    wanted = torch.as_tensor(wanted, dtype=torch.float64)
    torch.testing.assert_close(torch.as_tensor(got, dtype=torch.float64), wanted, rtol=tolerance, atol=tolerance)


def add_up(shares: Iterable[LossShare]) -> dict[str, Tensor]:
    totals: dict[str, Tensor] = {}
    for share in shares:
        for name, value in share.metrics.items():
            totals[name] = totals.get(name, torch.zeros(())) + value
    return totals


# --- the actor's loss ------------------------------------------------------------------------------------------------


def one_token(**changes: float) -> Tokens:
    """One token with ratio 1 and advantage -0.5, so loss 0.5; entropy 1.2; 0.3 more likely than in the reference."""
    values = {"log_prob": -1.0, "entropy": 1.2, "old_log_probs": -1.0, "ref_log_prob": -1.3, "advantages": -0.5}
    return Tokens(
        **{k: torch.tensor([[v]]).double() for k, v in (values | changes).items()}, mask=torch.tensor([[True]])
    )


def test_rollout_weights_weight_each_tokens_surrogate_and_nothing_else() -> None:
    mask = torch.tensor([[True, True, False], [True, True, True]])
    tokens, config = Tokens.random(mask), actor_config(entropy_coeff=0.0, use_kl_loss=False, loss_agg_mode="token-sum")
    weights = torch.tensor([[0.5, 2.0, NAN], [1.0, 0.0, 1.5]]).double()
    alone = torch.zeros(mask.shape).double()
    for row, column in mask.nonzero().tolist():
        one = torch.zeros_like(mask)
        one[row, column] = True
        alone[row, column] = run_actor(replace(tokens, mask=one), config).loss
    weighted = run_actor(tokens, config, rollout_is_weights=weights)
    assert_equal(weighted.loss, (alone * weights)[mask].sum())
    plain = gradients(tokens, lambda x: run_actor(x, config).loss)[0]
    assert_equal(
        gradients(tokens, lambda x: run_actor(x, config, rollout_is_weights=weights).loss)[0],
        torch.where(mask, plain * weights, 0.0),
    )
    with_limiters = actor_config()
    unweighted = run_actor(tokens, with_limiters)
    both = run_actor(tokens, with_limiters, rollout_is_weights=torch.ones_like(weights))
    assert {name: value.item() for name, value in both.metrics.items()} == {
        name: value.item() for name, value in unweighted.metrics.items()
    }


def test_entropy_is_subtracted_and_the_kl_is_added() -> None:
    share = run_actor(one_token(), actor_config(entropy_coeff=0.01, kl_loss_coef=0.1, kl_loss_type="k1"))
    assert_equal(share.loss, 0.5 - 0.01 * 1.2 + 0.1 * 0.3, 1e-7)  # the inputs are float32 numbers
    assert_equal(share.metrics["actor/pg_loss"], 0.5)
    assert_equal(share.metrics["actor/entropy_loss"], 1.2, 1e-7)
    assert_equal(share.metrics["actor/kl_loss"], 0.3, 1e-7)
    assert_equal(share.metrics["actor/loss"], share.loss.item())


def test_a_step_down_the_gradient_raises_entropy_and_pulls_towards_the_reference() -> None:
    config = actor_config(entropy_coeff=0.5, kl_loss_coef=2.0, kl_loss_type="k2")
    tokens = one_token(advantages=0.0)
    by_log_prob, by_entropy = gradients(tokens, lambda x: run_actor(x, config).loss)
    assert_equal(by_entropy, [[-0.5]])
    assert_equal(by_log_prob, [[2.0 * 0.3]], 1e-7)  # the policy is above the reference: its probability is to fall


@pytest.mark.parametrize(
    ("config", "extra"),
    [
        ({"entropy_coeff": 0.0, "use_kl_loss": False}, set()),
        ({"entropy_coeff": 0.0, "use_kl_loss": True}, {"actor/kl_loss", "actor/kl_loss_capped_frac"}),
    ],
)
@pytest.mark.parametrize("with_entropy", [True, False])
def test_the_actor_logs_what_its_limiters_did(config: dict[str, Any], extra: set[str], with_entropy: bool) -> None:
    tokens = one_token()
    share = ppo_loss(
        log_prob=tokens.log_prob,
        entropy=tokens.entropy if with_entropy else None,
        old_log_probs=tokens.old_log_probs,
        ref_log_prob=tokens.ref_log_prob if config["use_kl_loss"] else None,
        advantages=tokens.advantages,
        loss_mask=tokens.mask,
        counts=LossCounts.of(tokens.mask),
        config=actor_config(**config),
    )
    always = {
        "loss",
        "pg_loss",
        "ppo_kl",
        "pg_clipfrac",
        "pg_clipfrac_pos_adv",
        "pg_clipfrac_neg_adv",
        "pg_clipfrac_lower",
    }
    wanted = {f"actor/{name}" for name in always} | extra | ({"actor/entropy_loss"} if with_entropy else set())
    assert share.metrics.keys() == wanted
    assert not any(value.requires_grad for value in share.metrics.values())


def test_a_weight_of_0_logs_the_entropy_and_leaves_the_loss_alone() -> None:
    share = run_actor(one_token(), actor_config(entropy_coeff=0.0, use_kl_loss=False))
    assert_equal(share.metrics["actor/entropy_loss"], 1.2, 1e-7)
    assert share.loss.item() == 0.5


def test_clip_fractions_by_hand() -> None:
    # Ratios e, e^-1, e^2 = 7.4, 1, e; the last token does not count. Range 0.8 to 1.3, dual clip at 3.
    log_ratio = torch.tensor([[1.0, -1.0, 2.0, 0.0, 1.0]]).double()
    advantages = torch.tensor([[1.0, -1.0, -1.0, 1.0, 1.0]]).double()
    zero, mask = torch.zeros(1, 5).double(), torch.tensor([[1, 1, 1, 1, 0]]).bool()
    metrics = run_actor(Tokens(log_ratio, zero, zero, zero, advantages, mask), actor_config()).metrics
    assert_equal(metrics["actor/pg_clipfrac_pos_adv"], 1 / 4)
    assert_equal(metrics["actor/pg_clipfrac_neg_adv"], 1 / 4)
    assert_equal(metrics["actor/pg_clipfrac"], 2 / 4)
    assert_equal(metrics["actor/pg_clipfrac_lower"], 1 / 4)
    assert_equal(metrics["actor/ppo_kl"], -(1 - 1 + 2 + 0) / 4)


def test_the_sides_add_up_to_the_clip_fraction() -> None:
    tokens = Tokens.random(torch.ones(40, 10).bool())
    metrics = run_actor(tokens, actor_config()).metrics
    sides = [metrics[f"actor/pg_clipfrac_{side}_adv"] for side in ("pos", "neg")]
    assert_equal(sum(sides), metrics["actor/pg_clipfrac"])
    assert all(float(side) > 0.05 for side in [*sides, metrics["actor/pg_clipfrac_lower"]])


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_ppo_kl_and_clip_fractions_are_token_means_whatever_the_aggregation(mode: str) -> None:
    tokens = Tokens.random(torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]]).bool())
    metrics = run_actor(tokens, actor_config(loss_agg_mode=mode)).metrics
    wanted = run_actor(tokens, actor_config(loss_agg_mode="token-mean")).metrics
    for name in ("ppo_kl", "pg_clipfrac", "pg_clipfrac_pos_adv", "pg_clipfrac_neg_adv", "pg_clipfrac_lower"):
        assert metrics[f"actor/{name}"].equal(wanted[f"actor/{name}"])
    assert_equal(metrics["actor/ppo_kl"], (tokens.old_log_probs - tokens.log_prob)[tokens.mask].mean())


@pytest.mark.parametrize("name", KL_PENALTIES)
def test_capped_fraction_counts_the_tokens_that_k3_caps(name: str) -> None:
    # Differences to the reference -3, -2, 5 and 12; k3 is capped below -2.61 and above 10.99.
    difference, zero = torch.tensor([[-3.0, -2.0, 5.0, 12.0, 99.0]]).double(), torch.zeros(1, 5).double()
    mask = torch.tensor([[1, 1, 1, 1, 0]]).bool()
    metrics = run_actor(Tokens(zero, zero, zero, -difference, zero, mask), actor_config(kl_loss_type=name)).metrics
    is_k3 = name.rstrip("+") in ("k3", "low_var_kl")
    assert_equal(metrics["actor/kl_loss_capped_frac"], 2 / 4 if is_k3 else 0.0)


@pytest.mark.parametrize("junk", [NAN, INF, -INF])
@pytest.mark.parametrize("kl_loss_type", KL_PENALTIES)
def test_nothing_under_mask_0_reaches_the_actors_loss_its_gradient_or_a_metric(junk: float, kl_loss_type: str) -> None:
    mask = torch.tensor([[1, 1, 0, 0], [0, 1, 0, 1], [0, 0, 0, 0]]).bool()
    clean = Tokens.random(mask)
    dirty, config = clean.poison(junk), actor_config(kl_loss_type=kl_loss_type)
    got, wanted = run_actor(dirty, config), run_actor(clean.poison(0.0), config)
    assert got.loss.equal(wanted.loss)
    assert all(got.metrics[name].equal(value) for name, value in wanted.metrics.items())
    for got_gradient, wanted_gradient in zip(
        gradients(dirty, lambda x: run_actor(x, config).loss),
        gradients(clean.poison(0.0), lambda x: run_actor(x, config).loss),
        strict=True,
    ):
        assert got_gradient.equal(wanted_gradient)
        assert got_gradient[~mask].abs().max() == 0


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_an_actors_piece_without_tokens_gives_0_and_gradient_0(mode: str) -> None:
    tokens, config = Tokens.random(torch.zeros(1, 3).bool()).poison(NAN), actor_config(loss_agg_mode=mode)
    counts = LossCounts(num_tokens=7, num_rows=3)
    share = run_actor(tokens, config, counts)
    assert share.loss.item() == 0
    assert {float(value) for value in share.metrics.values()} == {0.0}
    for gradient in gradients(tokens, lambda x: run_actor(x, config, counts).loss):
        assert gradient.tolist() == [[0.0, 0.0, 0.0]]


# --- no cut shows ----------------------------------------------------------------------------------------------------

NUM_ROWS = 8
MASK = torch.rand(NUM_ROWS, 5, generator=torch.Generator().manual_seed(0)) < 0.7
MASK[3] = False
owners = st.lists(st.integers(0, 4), min_size=NUM_ROWS, max_size=NUM_ROWS)


def pieces_of(owner: list[int]) -> list[list[int]]:
    """The rows dealt out to five micro-batches; some of them may be empty, or hold the row without tokens alone."""
    return [[row for row, piece in enumerate(owner) if piece == wanted] for wanted in range(5)]


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@repeatable
@given(owner=owners)
def test_no_cut_into_micro_batches_shows_in_the_actors_loss_gradient_or_metrics(mode: str, owner: list[int]) -> None:
    tokens, config, counts = Tokens.random(MASK), actor_config(loss_agg_mode=mode), LossCounts.of(MASK)
    pieces = pieces_of(owner)

    def split(x: Tokens) -> list[LossShare]:
        return [run_actor(x.rows(rows), config, counts) for rows in pieces]

    whole = run_actor(tokens, config, counts)
    totals = add_up(split(tokens))
    assert totals.keys() == whole.metrics.keys()
    for name, value in whole.metrics.items():
        assert_equal(totals[name], value)
    wanted = gradients(tokens, lambda x: run_actor(x, config, counts).loss)
    for got, want in zip(gradients(tokens, lambda x: sum(s.loss for s in split(x))), wanted, strict=True):
        assert_equal(got, want)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@repeatable
@given(owner=owners)
def test_no_cut_into_micro_batches_shows_in_the_critics_loss_gradient_or_metrics(mode: str, owner: list[int]) -> None:
    config, counts, pieces = critic_config(loss_agg_mode=mode), LossCounts.of(MASK), pieces_of(owner)
    vpreds, values, returns = (random_values(seed) for seed in range(3))

    def run(x: Tensor, rows: list[int]) -> LossShare:
        return run_critic(x[rows], values[rows], returns[rows], MASK[rows], config, counts)

    leaf, split_leaf = vpreds.clone().requires_grad_(), vpreds.clone().requires_grad_()
    whole, shares = run(leaf, list(range(NUM_ROWS))), [run(split_leaf, rows) for rows in pieces]
    totals = add_up(shares)
    assert totals.keys() == whole.metrics.keys()
    for name, value in whole.metrics.items():
        assert_equal(totals[name], value)
    whole.loss.backward()
    sum(share.loss for share in shares).backward()
    assert_equal(split_leaf.grad, leaf.grad)


def test_the_pieces_are_cut_from_tokens_on_which_every_limiter_acts() -> None:
    metrics = run_actor(Tokens.random(MASK), actor_config()).metrics
    assert all(float(value) != 0 for value in metrics.values()), metrics


# --- the critic's loss -----------------------------------------------------------------------------------------------


def random_values(seed: int) -> Tensor:
    return torch.randn(MASK.shape, generator=torch.Generator().manual_seed(seed)).double()


def run_critic(
    vpreds: Tensor,
    values: Tensor,
    returns: Tensor,
    mask: Tensor,
    config: CriticConfig,
    counts: LossCounts | None = None,
) -> LossShare:
    return value_loss(
        vpreds=vpreds,
        values=values,
        returns=returns,
        response_mask=mask,
        counts=counts or LossCounts.of(mask),
        config=config,
        scale=5.0,
    )


# Token losses 0.5 · 1, 0.5 · 2.25 (clipped to 0.5 where the return is 2) and 0.5 · 0.25; the last place is masked.
VPREDS, VALUES = (
    torch.tensor([[1.0, 1.0, NAN], [0.5, NAN, NAN]]).double(),
    torch.tensor([[0.8, 0.0, NAN], [0.5, NAN, 1.0]]).double(),
)
RETURNS = torch.tensor([[2.0, 2.0, INF], [0.0, -INF, NAN]]).double()
VALUE_MASK = torch.tensor([[1, 1, 0], [1, 0, 0]])


@pytest.mark.parametrize(
    ("mode", "loss"),
    [
        ("token-mean", (0.5 + 1.125 + 0.125) / 3),
        ("token-sum", 1.75),
        ("seq-mean-token-sum", 1.75 / 2),
        ("seq-mean-token-mean", (1.625 / 2 + 0.125) / 2),
        ("seq-mean-token-sum-norm", 1.75 / (2 * 5)),
    ],
)
def test_the_critics_loss_and_metrics_by_hand(mode: str, loss: float) -> None:
    share = run_critic(VPREDS, VALUES, RETURNS, VALUE_MASK, critic_config(loss_agg_mode=mode))
    assert_equal(share.loss, loss)
    assert share.metrics.keys() == {"critic/vf_loss", "critic/vf_clipfrac", "critic/vpred_mean"}
    assert_equal(share.metrics["critic/vf_loss"], loss)
    assert_equal(share.metrics["critic/vf_clipfrac"], 1 / 3)
    assert_equal(share.metrics["critic/vpred_mean"], 2.5 / 3)
    assert not any(value.requires_grad for value in share.metrics.values())


def test_the_critics_gradient_by_hand_is_0_where_clipped_or_masked() -> None:
    vpreds = VPREDS.clone().requires_grad_()
    run_critic(vpreds, VALUES, RETURNS, VALUE_MASK, critic_config()).loss.backward()
    assert_equal(vpreds.grad, [[-1 / 3, 0.0, 0.0], [0.5 / 3, 0.0, 0.0]])


def test_a_critics_piece_without_tokens_gives_0_and_gradient_0() -> None:
    vpreds = VPREDS.clone().requires_grad_()
    counts = LossCounts(num_tokens=7, num_rows=3)
    share = run_critic(vpreds, VALUES, RETURNS, torch.zeros(2, 3), critic_config(), counts)
    share.loss.backward()
    assert share.loss.item() == 0
    assert {float(value) for value in share.metrics.values()} == {0.0}
    assert vpreds.grad.abs().max() == 0
