"""Before any update the policy is the old policy and the reference, to the bit at equal widths."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from config.schema import ActorRolloutRefConfig
from trainer.batch import PPOBatch
from workers.engine.models import PolicySpec
from workers.groups import ActorRolloutGroup, ReferenceGroup, UpdateContext
from workers.pool import ResourcePool
from workers.rollout.sampling import TRAIN, RolloutRequest, SamplingParams

ACTOR = "actor_rollout_ref.actor"
MAX_TOKENS = 8
PROMPTS = [3, 1, 6, 2, 7, 4]


@pytest.fixture(scope="module", params=[1, 2], ids=["1 process", "2 processes"])
def pool(request: pytest.FixtureRequest, open_pool: Callable) -> Iterator[ResourcePool]:
    with open_pool(request.param) as opened:
        yield opened


@pytest.fixture(scope="module")
def roles(configure: Callable) -> Callable[..., ActorRolloutRefConfig]:
    base = configure(
        f"{ACTOR}.use_kl_loss=true", "actor_rollout_ref.rollout.n=2", f"{ACTOR}.entropy_coeff=0.01"
    ).actor_rollout_ref

    def change(
        temperature: float, micro: int | None, log_prob_micro: int | None, chunk_size: int | None = None
    ) -> ActorRolloutRefConfig:
        return replace(
            base,
            model=replace(base.model, logits_chunk_size=chunk_size),
            actor=replace(base.actor, ppo_micro_batch_size_per_gpu=micro),
            rollout=replace(base.rollout, temperature=temperature, log_prob_micro_batch_size_per_gpu=log_prob_micro),
            ref=replace(base.ref, log_prob_micro_batch_size_per_gpu=log_prob_micro),
        )

    return change


def first_update(
    pool: ResourcePool, roles: ActorRolloutRefConfig, path: str, batch: PPOBatch
) -> tuple[PPOBatch, dict[str, float]]:
    """A sampled batch with all that an update reads, and the metrics of the first update with it."""
    spec = PolicySpec(path=path, eos_token_ids=[1, 3, 4, 7, 9], pad_token_id=0)
    actor, reference = ActorRolloutGroup(pool, roles, spec), ReferenceGroup(pool, roles, spec)
    params = SamplingParams(temperature=roles.rollout.temperature)
    request = RolloutRequest(params=params, max_tokens=MAX_TOKENS, seed=0, step=1, stream=TRAIN)
    batch = actor.generate(batch, request)
    batch = reference.compute_ref_log_prob(actor.compute_log_prob(batch))
    batch.advantages = torch.randn(batch.responses.shape, generator=torch.Generator().manual_seed(0))
    (metrics,) = actor.update_actor(batch, UpdateContext(seed=0, step=1, lr=1e-3))
    return batch, metrics


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("micro", [None, 1], ids=["all rows at once", "one row at a time"])
@pytest.mark.parametrize("chunk_size", [None, 5], ids=["whole logits", "5 tokens' logits at a time"])
def test_the_ratio_is_1_and_the_kl_0_to_the_bit_at_equal_widths(
    pool: ResourcePool,
    roles: Callable[..., ActorRolloutRefConfig],
    write_model: Callable[..., str],
    prompts_of: Callable[..., PPOBatch],
    temperature: float,
    micro: int | None,
    chunk_size: int | None,
) -> None:
    batch = prompts_of(PROMPTS, samples=2)
    batch, metrics = first_update(pool, roles(temperature, micro, micro, chunk_size), write_model("qwen3"), batch)
    mask = batch.response_mask
    assert 2 * len(batch) < int(mask.sum()) < MAX_TOKENS * len(batch), "responses of uneven lengths"
    assert torch.equal(batch.old_log_probs[mask], batch.ref_log_prob[mask])
    for name in ("ppo_kl", "pg_clipfrac", "pg_clipfrac_lower", "kl_loss", "kl_loss_capped_frac"):
        assert metrics[f"actor/{name}"] == 0.0, name
    # With a ratio of 1 the surrogate is minus the mean advantage.
    assert metrics["actor/pg_loss"] == pytest.approx(-float(batch.advantages[mask].mean()), rel=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_log_ratio_is_within_1e_5_at_other_widths(
    pool: ResourcePool,
    roles: Callable[..., ActorRolloutRefConfig],
    write_model: Callable[..., str],
    prompts_of: Callable[..., PPOBatch],
    temperature: float,
) -> None:
    batch = prompts_of(PROMPTS, samples=2)
    batch, metrics = first_update(pool, roles(temperature, 3, 5), write_model("qwen3"), batch)
    assert abs(metrics["actor/ppo_kl"]) <= 1e-5
    assert metrics["actor/pg_clipfrac"] == 0.0
    assert metrics["actor/kl_loss"] == pytest.approx(0.0, abs=1e-9)  # quadratic in a log-ratio of 1e-5


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_old_log_probs_are_those_that_the_sampler_drew_with(
    pool: ResourcePool,
    roles: Callable[..., ActorRolloutRefConfig],
    write_model: Callable[..., str],
    prompts_of: Callable[..., PPOBatch],
    temperature: float,
) -> None:
    batch = prompts_of(PROMPTS, samples=2)
    batch, _ = first_update(pool, roles(temperature, None, None), write_model("llama"), batch)
    mask = batch.response_mask
    assert torch.allclose(batch.old_log_probs[mask], batch.rollout_log_probs[mask], rtol=0, atol=1e-5)
