"""The worker groups: rows come back in their order, whatever the number of processes and rows."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from trainer.batch import PPOBatch
from trainer.errors import CheckpointError, DivergedError
from workers.actor import ActorRollout
from workers.critic import Critic
from workers.engine.fsdp import DeviceContext
from workers.engine.models import PolicySpec
from workers.groups import ActorRolloutGroup, CriticGroup, ReferenceGroup, UpdateContext
from workers.pool import ResourcePool
from workers.rollout.sampling import TRAIN, RolloutRequest, SamplingParams

PROMPTS, RESPONSES = [3, 1, 6, 2, 7], [2, 5, 1, 7, 4]
REQUEST = RolloutRequest(params=SamplingParams(temperature=1.0), max_tokens=6, seed=0, step=1, stream=TRAIN)


@pytest.fixture(scope="module")
def pool(open_pool: Callable) -> Iterator[ResourcePool]:
    with open_pool(2) as opened:
        yield opened


@pytest.fixture(scope="module")
def spec(write_model: Callable[..., str]) -> PolicySpec:
    return PolicySpec(path=write_model("qwen3"), eos_token_ids=[1, 3, 4, 7, 9], pad_token_id=0)


@pytest.fixture(scope="module")
def group(pool: ResourcePool, configure: Callable, spec: PolicySpec) -> ActorRolloutGroup:
    return ActorRolloutGroup(
        pool, configure("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2").actor_rollout_ref, spec
    )


@pytest.fixture(scope="module")
def alone(device_context: DeviceContext, configure: Callable, spec: PolicySpec) -> ActorRollout:
    """The same role in this process, without Ray."""
    return ActorRollout(device_context, configure().actor_rollout_ref, spec)


@pytest.mark.parametrize("num_rows", [5, 2, 1], ids=["uneven", "one each", "fewer rows than processes"])
def test_generate_gives_each_row_its_response(
    group: ActorRolloutGroup, alone: ActorRollout, prompts_of: Callable[..., PPOBatch], num_rows: int
) -> None:
    batch = group.generate(prompts_of(PROMPTS)[torch.arange(num_rows)], REQUEST)
    expected = alone.generate(prompts_of(PROMPTS)[torch.arange(num_rows)], REQUEST)
    assert torch.equal(batch.responses, expected["responses"])
    assert torch.equal(batch.response_mask, expected["response_mask"])
    assert torch.equal(batch.loss_mask, batch.response_mask)
    assert torch.equal(batch.attention_mask, torch.cat([batch.prompt_mask, batch.response_mask], dim=1))
    assert torch.allclose(batch.rollout_log_probs, expected["rollout_log_probs"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("num_rows", [5, 2], ids=["uneven", "one each"])
def test_compute_log_prob_gives_each_row_its_own(
    group: ActorRolloutGroup, alone: ActorRollout, answered: Callable[..., PPOBatch], num_rows: int
) -> None:
    batch = answered(PROMPTS, RESPONSES)[torch.arange(num_rows)]
    expected = alone.compute_log_prob(batch, [np.arange(num_rows)])
    scored = group.compute_log_prob(batch)
    mask = batch.response_mask
    assert torch.allclose(scored.old_log_probs[mask], expected["old_log_probs"][mask], rtol=0, atol=1e-5)
    assert torch.allclose(scored.entropys[mask], expected["entropys"][mask], rtol=0, atol=1e-5)


def test_the_reference_scores_with_the_starting_weights_after_an_update(
    pool: ResourcePool, configure: Callable, spec: PolicySpec, answered: Callable[..., PPOBatch]
) -> None:
    roles = configure("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1").actor_rollout_ref
    actor, reference = ActorRolloutGroup(pool, roles, spec), ReferenceGroup(pool, roles, spec)
    batch = reference.compute_ref_log_prob(actor.compute_log_prob(answered([3, 1, 6, 2], [2, 5, 1, 7])))
    before = batch.ref_log_prob.clone()
    batch.advantages = torch.ones(batch.responses.shape)
    actor.update_actor(batch, UpdateContext(seed=0, step=1, lr=1e-2))
    batch = reference.compute_ref_log_prob(actor.compute_log_prob(batch))
    assert torch.equal(batch.ref_log_prob, before)
    mask = batch.response_mask
    assert (batch.old_log_probs - before)[mask].mean() > 0.1  # all advantages were 1


def test_compute_values_gives_each_row_its_own(
    pool: ResourcePool,
    device_context: DeviceContext,
    configure: Callable,
    spec: PolicySpec,
    answered: Callable[..., PPOBatch],
) -> None:
    """The seed makes the new value head, so two builds agree."""
    config = configure("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2").critic
    batch = answered(PROMPTS, RESPONSES)
    alone = Critic(device_context, config, spec.path, 5, 9)
    expected = alone.compute_values(batch, [np.arange(len(batch))])["values"]
    values = CriticGroup(pool, config, spec.path, seed=5, max_response_length=9).compute_values(batch).values
    assert torch.allclose(values[batch.response_mask], expected[batch.response_mask], rtol=0, atol=1e-5)
    other = Critic(device_context, config, spec.path, 6, 9).compute_values(batch, [np.arange(len(batch))])["values"]
    assert not torch.allclose(other, expected)


def test_weights_saved_where_the_driver_does_not_see_them_are_no_checkpoint(
    group: ActorRolloutGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a node with a disk of its own; here, a relative path from another working folder."""
    elsewhere = os.path.relpath(tmp_path / "theirs")
    (tmp_path / "theirs").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"pool global has written actor/ where the driver cannot see it"):
        group.save(elsewhere)
    assert (tmp_path / "theirs/actor/config.json").exists()


def test_an_update_without_advantages_names_the_stage_that_fills_them(
    group: ActorRolloutGroup, answered: Callable[..., PPOBatch]
) -> None:
    with pytest.raises(ValueError, match=r"'old_log_probs'.*stage 4"):
        group.update_actor(answered(PROMPTS, RESPONSES), UpdateContext(seed=0, step=1, lr=0.0))


def test_a_nan_under_the_mask_ends_the_update_and_names_the_prompt(
    pool: ResourcePool, configure: Callable, spec: PolicySpec, answered: Callable[..., PPOBatch], tmp_path: Path
) -> None:
    """The error crosses the process as what it is."""
    model = AutoModelForCausalLM.from_pretrained(spec.path)
    with torch.no_grad():
        model.model.embed_tokens.weight[:] = float("nan")
    model.save_pretrained(tmp_path)
    actor = ActorRolloutGroup(
        pool, configure().actor_rollout_ref, PolicySpec(path=str(tmp_path), eos_token_ids=[1], pad_token_id=0)
    )
    batch = answered([3, 1], [2, 5])
    batch.old_log_probs = batch.advantages = torch.zeros(batch.responses.shape)
    with pytest.raises(
        DivergedError, match=r"the policy's log-probability is nan at token 0 of a response to prompt 1-[01]"
    ):
        actor.update_actor(batch, UpdateContext(seed=0, step=1, lr=0.0))


def test_a_nan_on_one_process_ends_the_call_though_the_other_still_waits_for_it(
    pool: ResourcePool,
    configure: Callable,
    write_model: Callable[..., str],
    answered: Callable[..., PPOBatch],
    tmp_path: Path,
) -> None:
    """The last of its pool: the other process hangs in a collective, and nothing can follow."""
    batch = answered([3, 1], [2, 5])
    batch.responses[batch.responses == 40] = 39
    batch.prompts[1, -1] = 40
    model = AutoModelForCausalLM.from_pretrained(write_model("llama"))
    with torch.no_grad():
        model.model.embed_tokens.weight[40] = float("nan")  # the second row alone reads it
    model.save_pretrained(tmp_path)
    spec = PolicySpec(path=str(tmp_path), eos_token_ids=[1], pad_token_id=0)
    actor = ActorRolloutGroup(pool, configure().actor_rollout_ref, spec)
    batch.old_log_probs = batch.advantages = torch.zeros(batch.responses.shape)
    started = time.monotonic()
    with pytest.raises(DivergedError, match=r"is nan at token 0 of a response to prompt 1-1"):
        actor.update_actor(batch, UpdateContext(seed=0, step=1, lr=0.0))
    assert time.monotonic() - started < 20  # a collective is given up after 60
