"""Weights to a rollout in a pool of its own: whole, in bounded buckets, and never silently stale."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import ray
import torch
from torch import Tensor

from config.pools import GLOBAL_POOL
from trainer.batch import PPOBatch
from trainer.errors import WorkerLostError
from workers.actor import ActorRollout
from workers.engine.fsdp import DeviceContext
from workers.engine.models import PolicySpec
from workers.groups import ActorRolloutGroup, UpdateContext
from workers.rollout.apart import RolloutApart
from workers.rollout.buckets import WeightInbox, in_buckets
from workers.rollout.sampling import TRAIN, RolloutRequest, SamplingParams

REQUEST = RolloutRequest(params=SamplingParams(temperature=1.0), max_tokens=6, seed=0, step=1, stream=TRAIN)


def weights(*sizes: int) -> Iterator[tuple[str, Tensor]]:
    """Float32 tensors of these numbers of values, 4 bytes each."""
    return ((str(index), torch.full((size,), float(index))) for index, size in enumerate(sizes))


@pytest.fixture(scope="module")
def spec(write_model: Callable[..., str]) -> PolicySpec:
    return PolicySpec(path=write_model("qwen3"), eos_token_ids=[1, 3, 4, 7, 9], pad_token_id=0)


@pytest.mark.parametrize(
    ("sizes", "names"),
    [
        ([], []),
        ([1, 1, 1], ["012"]),
        ([2, 2, 1, 3, 1], ["01", "23", "4"]),
        ([9, 1, 1], ["0", "12"]),
        ([1, 9, 9, 1], ["0", "1", "2", "3"]),
        ([0, 0], ["01"]),
    ],
)
def test_a_bucket_holds_16_bytes_or_one_tensor(sizes: list[int], names: list[str]) -> None:
    kept = list(in_buckets(weights(*sizes), max_bytes=16, keep=True))
    assert ["".join(name for name, _ in bucket) for bucket in kept] == names
    assert len(list(in_buckets(weights(*sizes), max_bytes=16, keep=False))) == len(names)


def test_a_rank_that_keeps_nothing_draws_everything() -> None:
    drawn = weights(1, 2, 3)
    assert not any(in_buckets(drawn, max_bytes=4, keep=False))
    assert next(drawn, None) is None


def test_the_inbox_gives_one_stream_of_whole_weights() -> None:
    taken: dict[str, Tensor] = {}
    inbox = WeightInbox(lambda stream: taken.update(stream))
    for bucket in in_buckets(weights(1, 2, 3, 4), max_bytes=16, keep=True):
        for _, value in bucket:
            value.flags.writeable = False  # as what Ray's object store gives
        inbox.put(bucket)
    inbox.close()
    assert {name: value.tolist() for name, value in taken.items()} == {
        name: value.tolist() for name, value in weights(1, 2, 3, 4)
    }


def test_a_bucket_is_waited_for_while_one_waits_and_one_is_read() -> None:
    import threading

    read, goes_on = [], threading.Event()

    def load(stream: Any) -> None:
        for name, _ in stream:
            read.append(name)
            goes_on.wait(20)

    inbox, third = WeightInbox(load), threading.Event()
    inbox.put([("a", np.zeros(1))])
    inbox.put([("b", np.zeros(1))])
    threading.Thread(target=lambda: (inbox.put([("c", np.zeros(1))]), third.set()), daemon=True).start()
    assert not third.wait(0.5)
    goes_on.set()
    assert third.wait(20)
    inbox.close()
    assert read == ["a", "b", "c"]


def test_what_the_back_end_raises_comes_out_of_the_push(
    device_context: DeviceContext, configure: Callable, spec: PolicySpec
) -> None:
    role = RolloutApart(device_context, configure().actor_rollout_ref, spec)
    role.open_weights()
    role.take_weights([("nope", np.zeros(1))])
    with pytest.raises(KeyError, match="nope"):
        role.close_weights()
    role.open_weights()
    with pytest.raises(AssertionError, match="weights not received"):
        role.close_weights()


def test_the_rollout_apart_samples_with_the_weights_of_the_last_update_and_refuses_without_them(
    open_pools: Callable,
    configure: Callable,
    device_context: DeviceContext,
    spec: PolicySpec,
    answered: Callable[..., PPOBatch],
    prompts_of: Callable[..., PPOBatch],
) -> None:
    """Two actor ranks and one sampler, buckets of 50 kB; the same update in this process tells what to expect."""
    roles = configure("actor_rollout_ref.rollout.update_weights_bucket_megabytes=0.05").actor_rollout_ref
    with open_pools(**{GLOBAL_POOL: 2, "sampling": 1}) as pools:
        group = ActorRolloutGroup(pools[GLOBAL_POOL], roles, spec, rollout_pool=pools["sampling"])
        first = group.generate(prompts_of([3, 1, 6]), REQUEST)
        group.update_actor(_with_advantages(group, answered), UpdateContext(seed=0, step=1, lr=3e-2))
        assert torch.equal(group.generate(prompts_of([3, 1, 6]), REQUEST).responses, first.responses)
        group.update_weights()
        second = group.generate(prompts_of([3, 1, 6]), REQUEST)

        alone = ActorRollout(device_context, roles, spec)
        alone.update_weights()
        expected = alone.generate(prompts_of([3, 1, 6]), REQUEST)
        assert torch.equal(first.responses, expected["responses"])
        assert torch.equal(first.rollout_log_probs, expected["rollout_log_probs"])
        assert not torch.equal(second.rollout_log_probs, first.rollout_log_probs)
        scored = group.compute_log_prob(second.clone(recurse=False))
        mask = second.response_mask
        assert torch.allclose(scored.old_log_probs[mask], second.rollout_log_probs[mask], rtol=0, atol=1e-5)

        ray.kill(pools["sampling"].processes[0])
        with pytest.raises(WorkerLostError, match="in pool sampling"):
            group.update_weights()
        with pytest.raises(WorkerLostError, match="the last push of weights to the rollout failed"):
            group.generate(prompts_of([3, 1, 6]), REQUEST)


def _with_advantages(group: ActorRolloutGroup, answered: Callable[..., PPOBatch]) -> PPOBatch:
    batch = group.compute_log_prob(answered([3, 1, 6, 2], [2, 5, 1, 7]))
    batch.advantages = torch.ones(batch.responses.shape)
    return batch
