"""An update does not depend on how its mini-batch was cut, ordered, padded or spread over processes.

Every way of running the update is held against one written here by hand over plain transformers models: row by row,
without padding, masks, micro-batches or ranks.
"""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from config.schema import ActorConfig, ActorRolloutRefConfig, CriticConfig, GovernorConfig
from trainer.batch import PPOBatch, real_lengths
from trainer.ppo.core_algos import LOSS_AGG_MODES, LossCounts
from trainer.ppo.minibatch import MicroBatching, plan_micro_batches
from workers.actor import ActorRollout
from workers.engine.fsdp import DeviceContext
from workers.engine.models import PolicySpec, ValueModel
from workers.engine.pieces import LocalUpdate
from workers.groups import ActorRolloutGroup, CriticGroup, UpdateContext
from workers.pool import ResourcePool

ACTOR, CRITIC = "actor_rollout_ref.actor", "critic"
TEMPERATURE = 0.7
MAX_RESPONSE = 9
PROMPTS = [3, 1, 6, 2, 7, 4, 5, 2]
#            two rows to a prompt; 0 is a row without a response, and the last prompt has no token at all
RESPONSES = [9, 2, 5, 0, 1, 7, 3, 4, 8, 1, 6, 2, 9, 3, 0, 0]
REJECTED, HOLE = 5, 6  # a row whose tokens the loss does not count, and one with tool tokens in its middle

LIMITERS = [
    f"actor_rollout_ref.rollout.temperature={TEMPERATURE}",
    f"{ACTOR}.entropy_coeff=0.05",
    f"{ACTOR}.use_kl_loss=true",
    f"{ACTOR}.kl_loss_coef=0.2",
    f"{ACTOR}.kl_loss_type=low_var_kl",
    f"{ACTOR}.clip_ratio_high=0.28",
    "data.max_prompt_length=8",
    f"data.max_response_length={MAX_RESPONSE}",
    "actor_rollout_ref.rollout.n=2",
]
# The step is large against the tolerance: weights of 0.1 move by 1e-4, and may differ by 1e-6.
ADAMW = [
    f"{role}.optim.{key}" for role in (ACTOR, CRITIC) for key in ("optimizer=AdamW", "lr=1e-4", "weight_decay=0.01")
]
SGD = [
    f"{role}.{key}"
    for role in (ACTOR, CRITIC)
    for key in ("optim.optimizer=SGD", "optim.lr=0.5", "optim.weight_decay=0.01", "fsdp_config.dtype=float64")
]
# Longest rows hold 15 tokens; so few fit that the ranks need different numbers of pieces.
BUDGET = 28
Arrange = Callable[[PPOBatch], PPOBatch]
WAYS: dict[str, tuple[dict[str, Any], Arrange]] = {
    "all rows at once": ({"ppo_micro_batch_size_per_gpu": None}, lambda batch: batch),
    "one row at a time": ({"ppo_micro_batch_size_per_gpu": 1}, lambda batch: batch),
    "two rows at a time": ({"ppo_micro_batch_size_per_gpu": 2}, lambda batch: batch),
    "four rows at a time": ({"ppo_micro_batch_size_per_gpu": 4}, lambda batch: batch),
    "token budget": ({"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": BUDGET}, lambda batch: batch),
    "other row order": ({"ppo_micro_batch_size_per_gpu": 4}, lambda batch: reordered(batch)),
    "wider padding": ({"ppo_micro_batch_size_per_gpu": 4}, lambda batch: widened(batch)),
}
CONTEXT = {"seed": 3, "step": 1}
TOKENS = {"eos_token_ids": [1], "pad_token_id": 0}


def reordered(batch: PPOBatch) -> PPOBatch:
    return batch[torch.from_numpy(np.random.default_rng(5).permutation(len(batch)))]


def widened(batch: PPOBatch) -> PPOBatch:
    """Five more columns of prompt and four of response; numbers there are NaN, tokens are 7."""
    wider = batch.clone()
    pad = torch.nn.functional.pad
    for name in (
        "responses",
        "response_mask",
        "loss_mask",
        "old_log_probs",
        "ref_log_prob",
        "advantages",
        "kl_advantages",
        "rollout_is_weights",
        "values",
        "returns",
    ):
        tensor = getattr(batch, name)
        fill = math.nan if tensor.is_floating_point() else (0 if tensor.dtype == torch.bool else 7)
        setattr(wider, name, pad(tensor, (0, 4), value=fill))
    wider.prompts, wider.prompt_mask = pad(batch.prompts, (5, 0), value=7), pad(batch.prompt_mask, (5, 0))
    wider.attention_mask = pad(batch.attention_mask, (5, 4))
    return wider


# --- the batch -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def policy(write_model: Callable[..., str]) -> str:
    return write_model("qwen3")


@pytest.fixture(scope="module")
def critic(policy: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A critic with a head, so that all ways start from the same one."""
    folder = tmp_path_factory.mktemp("critic")
    with torch.random.fork_rng():
        torch.manual_seed(2)
        ValueModel.load(policy, dtype=torch.float32, override_config={}, trust_remote_code=False).model.save_pretrained(
            folder
        )
    return str(folder)


@pytest.fixture(scope="module")
def batch(answered: Callable[..., PPOBatch], policy: str, critic: str, row_ids: Callable) -> PPOBatch:
    """A mini-batch of 16 rows in which every limiter acts. What no mask counts is NaN."""
    batch = answered(PROMPTS, RESPONSES, samples=2)
    batch.loss_mask[REJECTED] = False
    batch.response_mask[HOLE, 1] = batch.loss_mask[HOLE, 1] = False
    random = torch.Generator().manual_seed(4)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(batch.responses.shape, generator=random)

    log_prob, value = torch.zeros_like(noise(1)), torch.zeros_like(noise(1))
    plain = AutoModelForCausalLM.from_pretrained(policy).eval()
    valuer = AutoModelForTokenClassification.from_pretrained(critic).eval()
    with torch.no_grad():
        for row, length in enumerate(RESPONSES):
            ids = torch.tensor(row_ids(batch, row))
            log_p = torch.log_softmax(plain(input_ids=ids[None]).logits[0, :-1] / TEMPERATURE, -1).gather(
                -1, ids[1:, None]
            )
            log_prob[row, :length] = log_p[len(log_p) - length :, 0]
            value[row, :length] = valuer(input_ids=ids[None]).logits[0, len(ids) - length - 1 : -1, 0]
    # Not centred: a loss that nearly cancels out has no relative accuracy in float32.
    batch.advantages = noise(1) + 0.4
    batch.advantages[0, 0] = 0.0
    batch.kl_advantages = 0.3 * batch.advantages + 0.1
    batch.rollout_is_weights = noise(0.4).exp().clamp(max=1.5)
    # Off far enough that both sides of the clip act, and in some tokens the dual clip (a ratio above 3).
    batch.old_log_probs = log_prob + noise(0.5) - 1.6 * (noise(1) > 0.7)
    # Far in a few tokens, where k3 is capped.
    batch.ref_log_prob = log_prob + noise(0.3) + 4.0 * (noise(1) > 1.6)
    batch.values, batch.returns = value + noise(0.5), value + noise(1)
    for name in ("advantages", "kl_advantages", "rollout_is_weights", "old_log_probs", "ref_log_prob"):
        setattr(batch, name, getattr(batch, name).masked_fill(~batch.loss_mask, math.nan))
    for name in ("values", "returns"):
        setattr(batch, name, getattr(batch, name).masked_fill(~batch.response_mask, math.nan))
    return batch


def in_float64(batch: PPOBatch) -> PPOBatch:
    wide = batch.clone()
    for name in (
        "advantages",
        "kl_advantages",
        "rollout_is_weights",
        "old_log_probs",
        "ref_log_prob",
        "values",
        "returns",
    ):
        setattr(wide, name, getattr(batch, name).double())
    return wide


# --- by hand ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Outcome:
    metrics: dict[str, float]
    weights: dict[str, Tensor]


def aggregate(rows: list[Tensor], mode: str) -> Tensor:
    """The loss of per-token values, one tensor per row."""
    rows = [row for row in rows if len(row)]
    total = sum(row.sum() for row in rows)
    return {
        "token-mean": lambda: total / sum(len(row) for row in rows),
        "token-sum": lambda: total,
        "seq-mean-token-sum": lambda: total / len(rows),
        "seq-mean-token-mean": lambda: sum(row.mean() for row in rows) / len(rows),
        "seq-mean-token-sum-norm": lambda: total / len(rows) / MAX_RESPONSE,
    }[mode]()


def step_by_hand(model: Any, loss: Tensor, role: ActorConfig | CriticConfig) -> tuple[float, dict[str, Tensor]]:
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), role.grad_clip)
    optim = role.optim
    if optim.optimizer == "SGD":
        torch.optim.SGD(model.parameters(), lr=optim.lr, weight_decay=optim.weight_decay).step()
    else:
        torch.optim.AdamW(model.parameters(), lr=optim.lr, weight_decay=optim.weight_decay).step()
    return float(norm), {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def k3_held_at_its_cap(d: Tensor) -> Tensor:
    """exp(-d) + d - 1, at most 10; the slope below d = -2.6109 stays the one there, 1 - exp(2.6109) = -12.611."""
    edge = -2.6108686381498756
    return torch.where(d < edge, 10 + (1 - math.exp(-edge)) * (d - d.detach()), torch.exp(-d) + d - 1)


def actor_by_hand(folder: str, batch: PPOBatch, actor: ActorConfig, row_ids: Callable, dtype: torch.dtype) -> Outcome:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    surrogate, entropy, kl, log_ratio, high, low, dual, capped = ([] for _ in range(8))
    raw, unclipped, from_kl, weights, sampling_kl, zero = ([] for _ in range(6))
    for row, length in enumerate(RESPONSES):
        mask = batch.loss_mask[row, :length]
        ids = torch.tensor(row_ids(batch, row))
        raw.append(model(input_ids=ids[None]).logits[0, len(ids) - length - 1 : len(ids) - 1])
        logits = raw[-1] / TEMPERATURE
        log_p = logits - torch.logsumexp(logits, -1, keepdim=True)
        log_prob = log_p[torch.arange(length), ids[len(ids) - length :]][mask]
        names = ("advantages", "old_log_probs", "ref_log_prob", "kl_advantages", "rollout_is_weights")
        a, old, ref, kl_a, w = (getattr(batch, name)[row, :length][mask] for name in names)
        ratio = torch.exp(log_prob - old)
        plain, clipped = -a * ratio, -a * ratio.clamp(1 - actor.clip_ratio_low, 1 + actor.clip_ratio_high)
        worse = torch.maximum(plain, clipped)
        at_dual = (a < 0) & (worse > -actor.clip_ratio_c * a)
        surrogate.append(w * torch.where(at_dual, -actor.clip_ratio_c * a, worse))
        high.append((a > 0) & (ratio > 1 + actor.clip_ratio_high))
        low.append((a < 0) & (ratio < 1 - actor.clip_ratio_low))
        dual.append(at_dual)
        entropy.append(-(log_p.exp() * log_p).sum(-1)[mask])
        kl.append(k3_held_at_its_cap(log_prob - ref))
        capped.append(log_prob - ref < -2.6108686381498756)
        log_ratio.append(old - log_prob)
        unclipped.append(w * plain)
        from_kl.append(-w * kl_a * ratio)
        weights.append((w * a * ratio).abs())
        sampling_kl.append(k3_held_at_its_cap(old - ref))
        zero.append(a == 0)
    mode = actor.loss_agg_mode
    pg_loss, entropy_loss, kl_loss = (aggregate(rows, mode) for rows in (surrogate, entropy, kl))
    loss = pg_loss - actor.entropy_coeff * entropy_loss + actor.kl_loss_coef * kl_loss
    share = {
        name: float(torch.cat(rows).detach().double().mean())
        for name, rows in {"high": high, "low": low, "dual": dual, "capped": capped, "kl": log_ratio}.items()
    }
    limiter_metrics = limiters_by_hand(
        raw,
        {
            "pg": pg_loss,
            "entropy": -actor.entropy_coeff * entropy_loss,
            "kl": actor.kl_loss_coef * kl_loss,
            "pg_unclipped": aggregate(unclipped, mode),
            "reward_kl": aggregate(from_kl, mode),
        },
    )
    clipped_tokens = torch.cat(high) | torch.cat(low) | torch.cat(dual)
    all_weights = torch.cat(weights).detach().double()
    ratios = (-torch.cat(log_ratio)).exp().detach().double()
    limiter_metrics |= {
        "limiter/ratio/mean": float(ratios.mean()),
        "limiter/ratio/deviation": float((ratios - 1).abs().mean()),
        "limiter/clip/removed": float(all_weights[clipped_tokens].sum() / all_weights.sum()),
        "limiter/kl/sampling_policy": float(aggregate(sampling_kl, mode)),
    }
    classes = {"high": high, "low": low, "dual": dual, "zero_advantage": zero}
    limiter_metrics |= {
        f"limiter/tokens/{name}": float(torch.cat(rows).double().mean()) for name, rows in classes.items()
    }
    limiter_metrics["limiter/tokens/ratio_bound"] = 0.0
    limiter_metrics["limiter/tokens/active"] = 1 - float((clipped_tokens | torch.cat(zero)).double().mean())
    norm, weights = step_by_hand(model, loss, actor)
    metrics = limiter_metrics | {
        "actor/loss": loss.item(),
        "actor/pg_loss": pg_loss.item(),
        "actor/entropy_loss": entropy_loss.item(),
        "actor/kl_loss": kl_loss.item(),
        "actor/kl_loss_capped_frac": share["capped"],
        "actor/ppo_kl": share["kl"],
        "actor/pg_clipfrac": share["high"] + share["low"],
        "actor/pg_clipfrac_pos_adv": share["high"],
        "actor/pg_clipfrac_neg_adv": share["low"],
        "actor/pg_clipfrac_lower": share["dual"],
        "actor/grad_norm": norm,
    }
    return Outcome(metrics, weights)


def limiters_by_hand(raw: list[Tensor], terms: dict[str, Tensor]) -> dict[str, float]:
    """Pushes by autograd: the norm of each term's gradient at the raw logits, before temperature."""

    def gradient(term: Tensor) -> Tensor:
        parts = torch.autograd.grad(term, raw, retain_graph=True, allow_unused=True, materialize_grads=True)
        return torch.cat([part.flatten() for part in parts]).double()

    gradients = {name: gradient(term) for name, term in terms.items()}
    gradients["clip"] = gradients["pg_unclipped"] - gradients["pg"]
    pushes = {name: float(values.norm()) for name, values in gradients.items()}
    metrics = {f"limiter/push/{name}": value for name, value in pushes.items()}
    loss_terms = ("pg", "entropy", "kl")
    metrics |= {f"limiter/loss/{name}": terms[name].item() for name in loss_terms}
    whole = sum(pushes[name] for name in loss_terms)
    metrics |= {f"limiter/push_share/{name}": pushes[name] / whole for name in loss_terms}
    metrics["limiter/push_cosine"] = float(
        torch.nn.functional.cosine_similarity(gradients["pg"], gradients["kl"], dim=0)
    )
    return metrics


def critic_by_hand(
    folder: str, batch: PPOBatch, critic: CriticConfig, row_ids: Callable, dtype: torch.dtype
) -> Outcome:
    model = AutoModelForTokenClassification.from_pretrained(folder, dtype=dtype).eval()
    errors, clipped, values = [], [], []
    for row, length in enumerate(RESPONSES):
        mask = batch.response_mask[row, :length]
        ids = torch.tensor(row_ids(batch, row))
        value = model(input_ids=ids[None]).logits[0, len(ids) - length - 1 : len(ids) - 1, 0][mask]
        old, target = batch.values[row, :length][mask], batch.returns[row, :length][mask]
        near = old + (value - old).clamp(-critic.cliprange_value, critic.cliprange_value)
        errors.append(0.5 * torch.maximum((value - target) ** 2, (near - target) ** 2))
        clipped.append((near - target) ** 2 > (value - target) ** 2)
        values.append(value.detach())
    loss = aggregate(errors, critic.loss_agg_mode)
    norm, weights = step_by_hand(model, loss, critic)
    metrics = {
        "critic/vf_loss": loss.item(),
        "critic/vf_clipfrac": float(torch.cat(clipped).double().mean()),
        "critic/vpred_mean": float(torch.cat(values).double().mean()),
        "critic/grad_norm": norm,
    }
    return Outcome(metrics, weights)


# --- over processes --------------------------------------------------------------------------------------------------


Configs = tuple[ActorRolloutRefConfig, CriticConfig]


@pytest.fixture(scope="module")
def configs(configure: Callable[..., GovernorConfig]) -> Callable[..., Configs]:
    """configs(optimizer, mode, **changes): all limiters on, both roles aggregating by `mode`, with these fields changed."""
    base = {"AdamW": configure(*LIMITERS, *ADAMW), "SGD": configure(*LIMITERS, *SGD)}

    def change(optimizer: str, mode: str = "token-mean", **changes: Any) -> Configs:
        roles, critic = base[optimizer].actor_rollout_ref, base[optimizer].critic
        changes |= {"loss_agg_mode": mode}
        return replace(roles, actor=replace(roles.actor, **changes)), replace(critic, **changes)

    return change


@pytest.fixture(scope="module")
def by_hand(
    configs: Callable[..., Configs], policy: str, critic: str, batch: PPOBatch, row_ids: Callable
) -> Callable[..., Outcome]:
    """by_hand(role, optimizer, mode): float32 with AdamW, float64 with SGD."""

    @functools.cache
    def compute(role: str, optimizer: str, mode: str) -> Outcome:
        roles, critic_config = configs(optimizer, mode)
        rows, dtype = (batch, torch.float32) if optimizer == "AdamW" else (in_float64(batch), torch.float64)
        if role == ACTOR:
            return actor_by_hand(policy, rows, roles.actor, row_ids, dtype)
        return critic_by_hand(critic, rows, critic_config, row_ids, dtype)

    return compute


@pytest.fixture(scope="module", params=[1, 2], ids=["1 process", "2 processes"])
def pool(request: pytest.FixtureRequest, open_pool: Callable) -> Iterator[ResourcePool]:
    with open_pool(request.param) as opened:
        yield opened


Update = Callable[[PPOBatch, Configs], Outcome]


@pytest.fixture
def update_actor(pool: ResourcePool, policy: str, tmp_path: Path, read_weights: Callable) -> Update:
    def run(batch: PPOBatch, configs: Configs) -> Outcome:
        roles = configs[0]
        group = ActorRolloutGroup(pool, roles, PolicySpec(path=policy, **TOKENS))
        (metrics,) = group.update_actor(batch, UpdateContext(**CONTEXT, lr=roles.actor.optim.lr))
        group.save(str(tmp_path))
        return Outcome(metrics, read_weights(tmp_path / "actor"))

    return run


@pytest.fixture
def update_critic(pool: ResourcePool, critic: str, tmp_path: Path, read_weights: Callable) -> Update:
    def run(batch: PPOBatch, configs: Configs) -> Outcome:
        config = configs[1]
        group = CriticGroup(pool, config, critic, seed=0, max_response_length=MAX_RESPONSE)
        (metrics,) = group.update_critic(batch, UpdateContext(**CONTEXT, lr=config.optim.lr))
        group.save(str(tmp_path))
        return Outcome(metrics, read_weights(tmp_path / "critic"))

    return run


def assert_equal_metrics(
    metrics: dict[str, float], expected: dict[str, float], *, rel: float = 1e-5, absolute: float = 1e-7
) -> None:
    assert metrics.keys() == expected.keys()
    for name in expected:
        assert metrics[name] == pytest.approx(expected[name], rel=rel, abs=absolute), name


def assert_equal_weights(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """‖Δ‖/‖w‖ at most 1e-5 in every tensor: AdamW turns rounding near a zero gradient into whole steps."""
    for name, weight in expected.items():
        assert float((weights[name] - weight).norm()) <= 1e-5 * float(weight.norm()), name


def assert_equal_elements(weights: dict[str, Tensor], expected: dict[str, Tensor], *, atol: float = 1e-12) -> None:
    for name, weight in expected.items():
        torch.testing.assert_close(
            weights[name], weight, rtol=0.0, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


# --- the claims ------------------------------------------------------------------------------------------------------


def test_the_batch_makes_every_limiter_act(configs: Callable[..., Configs], by_hand: Callable[..., Outcome]) -> None:
    """Guards the tests below: without clipped, dual-clipped and capped tokens they would prove little."""
    metrics = by_hand(ACTOR, "AdamW", "token-mean").metrics
    for name in ("pg_clipfrac_pos_adv", "pg_clipfrac_neg_adv", "pg_clipfrac_lower", "kl_loss_capped_frac"):
        assert 0.02 < metrics[f"actor/{name}"] < 0.5, name
    assert metrics["actor/grad_norm"] > configs("AdamW")[0].actor.grad_clip
    assert 0.02 < by_hand(CRITIC, "AdamW", "token-mean").metrics["critic/vf_clipfrac"] < 0.5


def test_the_token_budget_leaves_a_rank_with_an_empty_piece(batch: PPOBatch) -> None:
    """Guards the tests below: a rank without work joins the collectives with a blank row."""
    bound = MicroBatching(max_tokens=BUDGET)
    pieces = plan_micro_batches(np.arange(len(batch)), real_lengths(batch), num_ranks=2, bound=bound)
    assert min(len(piece) for rank in pieces for piece in rank) == 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_an_actor_update_is_the_same_however_it_is_cut(
    configs: Callable[..., Configs],
    by_hand: Callable[..., Outcome],
    update_actor: Update,
    batch: PPOBatch,
    mode: str,
    way: str,
) -> None:
    changes, arrange = WAYS[way]
    outcome, expected = update_actor(arrange(batch), configs("AdamW", mode, **changes)), by_hand(ACTOR, "AdamW", mode)
    assert_equal_metrics(outcome.metrics, expected.metrics)
    assert_equal_weights(outcome.weights, expected.weights)


@pytest.mark.parametrize("way", WAYS)
def test_a_critic_update_is_the_same_however_it_is_cut(
    configs: Callable[..., Configs], by_hand: Callable[..., Outcome], update_critic: Update, batch: PPOBatch, way: str
) -> None:
    changes, arrange = WAYS[way]
    mode = "seq-mean-token-mean"
    outcome, expected = update_critic(arrange(batch), configs("AdamW", mode, **changes)), by_hand(CRITIC, "AdamW", mode)
    assert_equal_metrics(outcome.metrics, expected.metrics)
    assert_equal_weights(outcome.weights, expected.weights)


EVERY_MODE_AND_WAY = [(mode, "token budget") for mode in LOSS_AGG_MODES] + [
    ("seq-mean-token-mean", way) for way in WAYS if way != "token budget"
]


@pytest.mark.parametrize(("mode", "way"), EVERY_MODE_AND_WAY)
def test_in_float64_every_weight_of_an_actor_update_is_the_same(
    configs: Callable[..., Configs],
    by_hand: Callable[..., Outcome],
    update_actor: Update,
    batch: PPOBatch,
    mode: str,
    way: str,
) -> None:
    changes, arrange = WAYS[way]
    outcome = update_actor(arrange(in_float64(batch)), configs("SGD", mode, **changes))
    expected = by_hand(ACTOR, "SGD", mode)
    # Clip fractions are counted in float32, whose rounding is 6e-8.
    assert_equal_metrics(outcome.metrics, expected.metrics, rel=1e-6, absolute=1e-12)
    assert_equal_elements(outcome.weights, expected.weights)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_in_float64_every_weight_of_a_critic_update_is_the_same(
    configs: Callable[..., Configs], by_hand: Callable[..., Outcome], update_critic: Update, batch: PPOBatch, mode: str
) -> None:
    changes, arrange = WAYS["token budget"]
    outcome = update_critic(arrange(in_float64(batch)), configs("SGD", mode, **changes))
    expected = by_hand(CRITIC, "SGD", mode)
    assert_equal_metrics(outcome.metrics, expected.metrics, rel=1e-6, absolute=1e-12)
    assert_equal_elements(outcome.weights, expected.weights)


def test_a_mini_batch_without_a_token_is_no_update(
    configs: Callable[..., Configs],
    pool: ResourcePool,
    policy: str,
    batch: PPOBatch,
    tmp_path: Path,
    read_weights: Callable,
) -> None:
    """Neither the momentum of the update before nor weight decay moves a weight. Single empty pieces occur in the tests above."""
    roles, _ = configs("AdamW")
    group = ActorRolloutGroup(pool, roles, PolicySpec(path=policy, **TOKENS))
    empty = batch.clone()
    empty.loss_mask = torch.zeros_like(batch.loss_mask)
    weights = []
    for name, given, num_updates in (("moved", batch, 1), ("rested", empty, 0)):
        assert len(group.update_actor(given, UpdateContext(**CONTEXT, lr=1e-2))) == num_updates
        group.save(str(tmp_path / name))
        weights.append(read_weights(tmp_path / name / "actor"))
    assert roles.actor.optim.weight_decay > 0
    for name, weight in weights[0].items():
        assert torch.equal(weights[1][name], weight), name


def test_the_updates_of_a_step_take_the_same_rows_in_any_cut(
    configs: Callable[..., Configs],
    pool: ResourcePool,
    policy: str,
    batch: PPOBatch,
    tmp_path: Path,
    read_weights: Callable,
) -> None:
    """Two mini-batches, twice: which rows meet in which update does not depend on the cut either."""
    outcomes = []
    for way in ("all rows at once", "token budget", "other row order"):
        changes, arrange = WAYS[way]
        roles, _ = configs("SGD", ppo_mini_batch_size=4, ppo_epochs=2, **changes)
        group = ActorRolloutGroup(pool, roles, PolicySpec(path=policy, **TOKENS))
        metrics = group.update_actor(arrange(in_float64(batch)), UpdateContext(**CONTEXT, lr=0.05))
        group.save(str(tmp_path / way))
        outcomes.append((metrics, read_weights(tmp_path / way / "actor")))
    first_metrics, first_weights = outcomes[0]
    assert len(first_metrics) == 4
    for metrics, weights in outcomes[1:]:
        for update, expected in zip(metrics, first_metrics, strict=True):
            assert_equal_metrics(update, expected, rel=1e-6, absolute=1e-9)
        assert_equal_elements(weights, first_weights, atol=1e-11)


def test_what_any_number_of_processes_saved_goes_on_in_one(
    configs: Callable[..., Configs],
    pool: ResourcePool,
    device_context: DeviceContext,
    policy: str,
    batch: PPOBatch,
    tmp_path: Path,
    read_weights: Callable,
) -> None:
    roles, _ = configs("AdamW")
    context = UpdateContext(**CONTEXT, lr=1e-4)
    group = ActorRolloutGroup(pool, roles, PolicySpec(path=policy, **TOKENS))
    group.update_actor(batch, context)
    group.save(str(tmp_path / "first"))
    group.update_actor(batch, context)
    group.save(str(tmp_path / "second"))

    alone = ActorRollout(device_context, roles, PolicySpec(path=str(tmp_path / "first" / "actor"), **TOKENS))
    alone.load_optimizer(str(tmp_path / "first"))
    alone.update(
        batch, [LocalUpdate(counts=LossCounts.of(batch.loss_mask), micro_batches=[np.arange(len(batch))])], 1e-4
    )
    goes_on = {name: value.clone() for name, value in alone.engine.full_weights()}
    assert_equal_weights(read_weights(tmp_path / "second" / "actor"), goes_on)


def test_a_tied_policy_is_saved_once_by_any_number_of_processes(
    update_actor: Update, configs: Callable, batch: PPOBatch
) -> None:
    """The head shares the embedding's weights: a second copy would double the file of a small model."""
    weights = update_actor(batch, configs("AdamW")).weights
    assert "model.embed_tokens.weight" in weights
    assert "lm_head.weight" not in weights
