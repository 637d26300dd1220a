"""A sampler in another precision, in real processes: what the correction sees of it, and what it does."""

from collections.abc import Callable, Iterator

import pytest
import torch

from config.schema import GovernorConfig
from trainer.batch import PPOBatch
from trainer.ppo.rollout_correction import correct_rollout
from workers.engine.models import PolicySpec
from workers.groups import ActorRolloutGroup, UpdateContext
from workers.pool import ResourcePool
from workers.rollout.sampling import TRAIN, RolloutRequest, SamplingParams

KEY = "algorithm.rollout_correction"
PROMPTS = [5, 2, 8, 3]


@pytest.fixture(scope="module")
def pool(open_pool: Callable) -> Iterator[ResourcePool]:
    with open_pool(2) as opened:
        yield opened


def sampled(
    pool: ResourcePool, config: GovernorConfig, path: str, prompts_of: Callable[..., PPOBatch]
) -> tuple[ActorRolloutGroup, PPOBatch]:
    """A group, and a batch after stage 4."""
    roles = config.actor_rollout_ref
    group = ActorRolloutGroup(pool, roles, PolicySpec(path=path, eos_token_ids=[1, 3, 4], pad_token_id=0))
    params = SamplingParams(temperature=roles.rollout.temperature)
    request = RolloutRequest(params=params, max_tokens=12, seed=0, step=1, stream=TRAIN)
    return group, group.compute_log_prob(group.generate(prompts_of(PROMPTS, samples=8), request))


@pytest.mark.parametrize(("dtype", "least", "most"), [("float32", 0.0, 1e-5), ("bfloat16", 1e-3, 1.0)])
def test_a_bfloat16_sampler_differs_from_the_policy_and_a_float32_one_does_not(
    pool: ResourcePool,
    configure: Callable[..., GovernorConfig],
    write_model: Callable[..., str],
    prompts_of: Callable[..., PPOBatch],
    dtype: str,
    least: float,
    most: float,
) -> None:
    config = configure(
        f"actor_rollout_ref.rollout.dtype={dtype}",
        "actor_rollout_ref.rollout.temperature=0.8",
        f"{KEY}.rollout_is=token",
    )
    _, batch = sampled(pool, config, write_model("qwen3"), prompts_of)
    correction = correct_rollout(
        old_log_probs=batch.old_log_probs,
        rollout_log_probs=batch.rollout_log_probs,
        response_mask=batch.response_mask,
        config=config.algorithm.rollout_correction,
    )
    difference = correction.metrics["rollout_corr/log_prob_diff_max"]
    assert least <= difference <= most
    assert correction.metrics["rollout_corr/k3_kl"] <= difference**2
    log_weights = correction.weights[batch.response_mask].log()
    assert float(log_weights.abs().max()) == pytest.approx(difference, rel=1e-3, abs=1e-6)


def test_rejected_responses_change_an_update_as_if_they_had_not_been_there(
    pool: ResourcePool,
    configure: Callable[..., GovernorConfig],
    write_model: Callable[..., str],
    prompts_of: Callable[..., PPOBatch],
) -> None:
    """Masks are real: two updates, one with the rejected rows' figures spoilt, give the same metrics; so do weights."""
    metrics = []
    for junk in (0.0, 1e6):
        config = configure("actor_rollout_ref.rollout.dtype=bfloat16", "actor_rollout_ref.actor.ppo_epochs=2")
        group, batch = sampled(pool, config, write_model("qwen3"), prompts_of)
        rejected = torch.zeros(len(batch), 1, dtype=torch.bool)
        rejected[::3] = True
        batch.loss_mask = batch.response_mask & ~rejected
        batch.rollout_is_weights = torch.linspace(0.5, 2.0, batch.responses.numel()).view(batch.responses.shape)
        generator = torch.Generator().manual_seed(0)
        batch.advantages = torch.randn(batch.responses.shape, generator=generator) + junk * rejected
        metrics.append(group.update_actor(batch, UpdateContext(seed=0, step=1, lr=1e-3)))
    assert metrics[0] == metrics[1]
    assert len(metrics[0]) == 2
