"""Each limiter, alone, pushes the policy the way it should: measured on exact entropies and KLs over the vocabulary.

With a constant reward GRPO's advantages are 0, so what moves the policy is the limiter.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from config.schema import ActorRolloutRefConfig
from trainer.batch import PPOBatch
from trainer.ppo.advantages import compute_advantages
from trainer.ppo.core_algos import LossCounts, apply_kl_penalty, place_scores
from workers.actor import ActorRollout, LocalUpdate
from workers.engine.fsdp import DeviceContext
from workers.engine.models import PolicySpec
from workers.engine.pieces import make_piece
from workers.reference import Reference
from workers.rollout.sampling import TRAIN, RolloutRequest, SamplingParams

TOKENS = {"eos_token_ids": [1, 3], "pad_token_id": 0}
MAX_TOKENS = 6
STEPS, LR = 8, 2e-3
PROMPTS = [3, 1, 6, 2, 7, 4, 5, 2] * 2


@pytest.fixture(scope="module")
def roles(configure: Callable) -> Callable[..., ActorRolloutRefConfig]:
    """roles(**changes): one update a step of all rows, no weight decay; these fields of the actor changed."""
    base = configure("actor_rollout_ref.rollout.n=8", "actor_rollout_ref.actor.entropy_coeff=0").actor_rollout_ref

    def change(**changes: Any) -> ActorRolloutRefConfig:
        return replace(base, actor=replace(base.actor, **changes))

    return change


@pytest.fixture(scope="module")
def reference_path(write_model: Callable[..., str]) -> str:
    return write_model("qwen3")


@pytest.fixture(scope="module")
def drifted_path(reference_path: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The reference with noise on its weights: about a third of their size."""
    model = AutoModelForCausalLM.from_pretrained(reference_path)
    random = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.03 * torch.randn(parameter.shape, generator=random)
    folder = tmp_path_factory.mktemp("drifted")
    model.save_pretrained(folder)
    return str(folder)


class Run:
    """A policy that starts from one model and is compared with another; no Ray, no mini-batches."""

    def __init__(
        self, context: DeviceContext, roles: ActorRolloutRefConfig, prompts: PPOBatch, *, start: str, reference: str
    ) -> None:
        self.actor = ActorRollout(context, roles, PolicySpec(path=start, **TOKENS))
        self.reference = Reference(context, roles, PolicySpec(path=reference, **TOKENS))
        self.plain_reference = AutoModelForCausalLM.from_pretrained(reference).eval()
        self.context = context
        self.prompts = prompts

    def sample(self, step: int) -> PPOBatch:
        """Stages 1 to 5 with the present policy."""
        batch = self.prompts.clone()
        params = SamplingParams(temperature=1.0)
        request = RolloutRequest(params=params, max_tokens=MAX_TOKENS, seed=0, step=step, stream=TRAIN)
        fields = self.actor.generate(batch, request)
        for name, value in fields.items():
            setattr(batch, name, value)
        batch.loss_mask = batch.response_mask.clone()
        batch.attention_mask = torch.cat([batch.prompt_mask, batch.response_mask], dim=1)
        rows = [np.arange(len(batch))]
        for name, value in (
            self.actor.compute_log_prob(batch, rows) | self.reference.compute_ref_log_prob(batch, rows)
        ).items():
            setattr(batch, name, value)
        return batch

    def advantages(self, batch: PPOBatch, estimator: str, *, beta: float = 0.0, penalty: str = "kl") -> Tensor:
        """Stages 3, 7 and 8 with a reward of 1 for every response."""
        rewards = apply_kl_penalty(
            token_level_scores=place_scores([1.0] * len(batch), batch.response_mask),
            old_log_probs=batch.old_log_probs,
            ref_log_prob=batch.ref_log_prob,
            response_mask=batch.response_mask,
            beta=beta,
            penalty=penalty,
        ).token_level_rewards
        return compute_advantages(
            estimator, token_level_rewards=rewards, response_mask=batch.response_mask, uid=batch.uid, values=None,
            gamma=1.0, lam=1.0, norm_by_std=True,
        ).advantages  # fmt: skip

    def update(self, batch: PPOBatch, lr: float) -> dict[str, float]:
        """Stage 9 and the weights of stage 10."""
        counts = LossCounts.of(batch.loss_mask)
        (outcome,) = self.actor.update(batch, [LocalUpdate(counts=counts, micro_batches=[np.arange(len(batch))])], lr)
        self.actor.update_weights()
        return outcome.metrics

    @torch.no_grad()
    def states(self, batch: PPOBatch) -> tuple[Tensor, Tensor]:
        """Log-probabilities [N, V] by policy and reference in the N states that the batch visited."""
        piece = make_piece(batch, np.arange(len(batch)), self.context.device)
        mask = batch.response_mask[:, : piece.labels.shape[1]]
        pair = []
        for model in (self.actor.rollout.backend.model, self.plain_reference):
            logits = model(input_ids=piece.input_ids).logits
            index = piece.positions.unsqueeze(-1).expand(-1, -1, logits.shape[-1])
            pair.append(torch.log_softmax(logits.gather(1, index), -1)[mask])
        return pair[0], pair[1]

    def exact_kl(self, batch: PPOBatch) -> float:
        """KL(policy ‖ reference) in nats, the mean over the states."""
        policy, reference = self.states(batch)
        return float((policy.exp() * (policy - reference)).sum(-1).mean())

    def exact_entropy(self, batch: PPOBatch) -> float:
        """Entropy of the policy in nats, the mean over the states."""
        policy, _ = self.states(batch)
        return float(-(policy.exp() * policy).sum(-1).mean())


@pytest.fixture
def start(
    device_context: DeviceContext,
    prompts_of: Callable[..., PPOBatch],
    roles: Callable,
    reference_path: str,
    drifted_path: str,
) -> Callable[..., Run]:
    """start(samples=8, **changes): the drifted policy; samples of each prompt, and changed fields of the actor's configuration."""

    def make(*, samples: int = 8, **changes: Any) -> Run:
        prompts = prompts_of(PROMPTS, samples=samples)
        return Run(device_context, roles(**changes), prompts, start=drifted_path, reference=reference_path)

    return make


def test_a_constant_reward_has_no_advantage(start: Callable[..., Run]) -> None:
    """Guards the tests below: what moves the policy there is the limiter alone."""
    run = start()
    batch = run.sample(1)
    assert not run.advantages(batch, "grpo").any()
    batch.advantages = run.advantages(batch, "grpo")
    before = run.exact_entropy(batch), run.exact_kl(batch)
    assert before[1] > 0.2, "the policy has drifted"
    run.update(batch, lr=LR)
    assert (run.exact_entropy(batch), run.exact_kl(batch)) == before


def test_the_entropy_bonus_raises_the_entropy(start: Callable[..., Run]) -> None:
    run = start(entropy_coeff=0.5)
    first = batch = run.sample(1)
    entropies = [run.exact_entropy(batch)]
    for step in range(1, STEPS + 1):
        batch.advantages = run.advantages(batch, "grpo")
        metrics = run.update(batch, LR)
        assert metrics["actor/entropy_loss"] == pytest.approx(entropies[-1], rel=1e-4)
        batch = run.sample(step + 1)
        entropies.append(run.exact_entropy(batch))
    assert entropies == sorted(entropies), "in the states that it comes to, step by step"
    assert entropies[-1] > entropies[0] + 0.1
    assert run.exact_entropy(first) > entropies[0] + 0.1, "and in those where it was"


def exact_kls(
    run: Run, *, steps: int, estimator: str = "grpo", beta: float = 0.0, lr: float = LR
) -> tuple[list[float], float]:
    """The exact KL in the states of each step's own samples, and at the end in those of the first step."""
    first = batch = run.sample(1)
    kls = [run.exact_kl(batch)]
    for step in range(1, steps + 1):
        batch.advantages = run.advantages(batch, estimator, beta=beta)
        run.update(batch, lr)
        batch = run.sample(step + 1)
        kls.append(run.exact_kl(batch))
    return kls, run.exact_kl(first)


@pytest.mark.parametrize("kl_loss_type", ["k2", "low_var_kl", "k3", "abs", "k1+", "k3+"])
def test_a_kl_in_the_loss_brings_the_policy_back(start: Callable[..., Run], kl_loss_type: str) -> None:
    kls, in_first_states = exact_kls(start(use_kl_loss=True, kl_loss_coef=1.0, kl_loss_type=kl_loss_type), steps=STEPS)
    assert kls[-1] < 0.7 * kls[0]
    assert in_first_states < 0.7 * kls[0]


@pytest.mark.parametrize("estimator", ["grpo", "reinforce_plus_plus"])
def test_a_kl_in_the_reward_brings_the_policy_back(start: Callable[..., Run], estimator: str) -> None:
    # It pulls through the noise of sampled rewards, which takes more samples and a smaller step.
    kls, in_first_states = exact_kls(start(samples=32), steps=STEPS, estimator=estimator, beta=0.5, lr=1e-3)
    assert kls[-1] < 0.8 * kls[0]
    assert in_first_states < 0.8 * kls[0]
