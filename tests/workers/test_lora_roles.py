"""LoRA over processes: the roles' figures, and that one process and two give the same."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from config.schema import ActorRolloutRefConfig
from trainer.batch import PPOBatch
from workers.engine.lora import WEIGHTS_FILE, prepare_adapter
from workers.engine.models import AdapterSpec, PolicySpec
from workers.groups import ActorRolloutGroup, ReferenceGroup, UpdateContext
from workers.pool import ResourcePool
from workers.rollout.sampling import TRAIN, VALIDATION, RolloutRequest, SamplingParams

ACTOR = "actor_rollout_ref.actor"
PROMPTS = [3, 1, 6, 2, 7, 4]
MAX_TOKENS = 8
TOKENS = {"eos_token_ids": [1, 3, 4, 7, 9], "pad_token_id": 0}
METRICS = ("pg_loss", "entropy_loss", "kl_loss", "grad_norm", "ppo_kl", "pg_clipfrac")
LENGTHS = [8, 2, 5, 0, 1, 7, 3, 4, 6, 1, 8, 2]


@dataclass(slots=True)
class Outcome:
    """What a start and three updates gave."""

    first: PPOBatch  # before any update
    metrics: list[dict[str, float]]
    adapter: dict[str, Tensor]
    references: list[Tensor]
    greedy: Tensor  # tokens after the updates
    folder: Path
    exact: dict[str, "Step"]  # by precision


@dataclass(slots=True)
class Step:
    """What one update with SGD gave."""

    metrics: dict[str, float]
    change: dict[str, Tensor]  # of the adapter: a multiple of its gradient


@pytest.fixture(scope="module")
def roles(configure: Callable) -> ActorRolloutRefConfig:
    return configure(
        "actor_rollout_ref.model.lora_rank=3",  # which two ranks cannot share equally
        f"{ACTOR}.use_kl_loss=true",
        f"{ACTOR}.entropy_coeff=0.01",
        f"{ACTOR}.optim.weight_decay=0.01",
        "actor_rollout_ref.rollout.n=2",
    ).actor_rollout_ref


@pytest.fixture(scope="module")
def base(write_model: Callable[..., str]) -> str:
    return write_model("qwen3")


@pytest.fixture(scope="module")
def start(roles: ActorRolloutRefConfig, base: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, AdapterSpec]:
    """A fresh adapter, and one that changes the base."""
    from safetensors.torch import save_file

    root = tmp_path_factory.mktemp("adapters")
    for name in ("fresh", "trained"):
        prepare_adapter(roles.model, base, root / name, seed=1)
    weights = load_file(root / "trained" / WEIGHTS_FILE)
    random = torch.Generator().manual_seed(2)
    noise = {key: 0.05 * torch.randn(value.shape, generator=random) for key, value in weights.items()}
    save_file({key: weights[key] + noise[key] for key in weights}, root / "trained" / WEIGHTS_FILE)
    return {
        "fresh": AdapterSpec(path=str(root / "fresh"), reference=None),
        "trained": AdapterSpec(path=str(root / "trained"), reference=str(root / "trained")),
    }


def train(pool: ResourcePool, roles: ActorRolloutRefConfig, spec: PolicySpec, batch: PPOBatch, folder: Path) -> Outcome:
    actor, reference = ActorRolloutGroup(pool, roles, spec), ReferenceGroup(pool, roles, spec)
    request = RolloutRequest(
        params=SamplingParams(temperature=1.0), max_tokens=MAX_TOKENS, seed=0, step=1, stream=TRAIN
    )
    batch = actor.generate(batch.clone(), request)
    batch = reference.compute_ref_log_prob(actor.compute_log_prob(batch))
    first, metrics, references = batch.clone(), [], [batch.ref_log_prob]
    batch.advantages = torch.randn(batch.responses.shape, generator=torch.Generator().manual_seed(0)) + 0.4
    for step in (1, 2, 3):
        metrics += actor.update_actor(batch, UpdateContext(seed=0, step=step, lr=1e-3))
        references.append(reference.compute_ref_log_prob(batch.clone()).ref_log_prob)
    actor.save(str(folder))
    actor.update_weights()
    greedy = replace(request, params=SamplingParams(temperature=0.0), stream=VALIDATION)
    tokens = actor.generate(batch.clone(), greedy).responses
    weights = load_file(folder / "actor" / WEIGHTS_FILE)
    return Outcome(first, metrics, weights, references, tokens, folder / "actor", exact={})


def step_with_sgd(
    pool: ResourcePool, roles: ActorRolloutRefConfig, spec: PolicySpec, batch: PPOBatch, folder: Path, dtype: str
) -> Step:
    """One update, two rows at a time, so that two processes cut the batch otherwise than one."""
    changed = replace(
        roles.actor,
        optim=replace(roles.actor.optim, optimizer="SGD", weight_decay=0.0),
        fsdp_config=replace(roles.actor.fsdp_config, dtype=dtype),
        ppo_micro_batch_size_per_gpu=2,
    )
    actor, random = ActorRolloutGroup(pool, replace(roles, actor=changed), spec), torch.Generator().manual_seed(3)
    shape, wide = batch.responses.shape, torch.float64 if dtype == "float64" else torch.float32
    batch = actor.compute_log_prob(batch.clone())
    batch.advantages = torch.randn(shape, generator=random).to(wide) + 0.4
    # Away from a ratio of 1 and a KL of 0, in which the figures would be rounding alone.
    batch.ref_log_prob = batch.old_log_probs + 0.3 * torch.randn(shape, generator=random).to(wide)
    batch.old_log_probs = batch.old_log_probs + 0.3 * torch.randn(shape, generator=random).to(wide)
    (metrics,) = actor.update_actor(batch, UpdateContext(seed=0, step=1, lr=1.0))
    actor.save(str(folder))
    assert spec.adapter is not None
    before, after = load_file(Path(spec.adapter.path) / WEIGHTS_FILE), load_file(folder / "actor" / WEIGHTS_FILE)
    return Step(metrics, {key: value - before[key] for key, value in after.items()})


@pytest.fixture(scope="module")
def outcomes(
    open_pool: Callable,
    roles: ActorRolloutRefConfig,
    base: str,
    start: dict[str, AdapterSpec],
    prompts_of: Callable[..., PPOBatch],
    answered: Callable[..., PPOBatch],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[tuple[str, int], Outcome]:
    """By start and number of processes."""
    found = {}
    for size in (1, 2):
        with open_pool(size) as pool:
            for name, adapter in start.items():
                spec = PolicySpec(path=base, adapter=adapter, **TOKENS)
                batch = prompts_of(PROMPTS, samples=2)
                found[name, size] = train(pool, roles, spec, batch, tmp_path_factory.mktemp("saved"))
                for dtype in ("float32", "float64"):
                    folder = tmp_path_factory.mktemp(dtype)
                    step = step_with_sgd(pool, roles, spec, answered(PROMPTS, LENGTHS, samples=2), folder, dtype)
                    found[name, size].exact[dtype] = step
    return found


CASES = list(itertools.product(("fresh", "trained"), (1, 2)))
each = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}, {case[1]} processes")


def opened(base: str, adapter: str | Path | None) -> torch.nn.Module:
    """The policy as peft alone opens it; None: the base."""
    import peft

    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return (plain if adapter is None else peft.PeftModel.from_pretrained(plain, adapter)).eval()


def rows_of(batch: PPOBatch, row_ids: Callable) -> Iterator[tuple[int, Tensor, int]]:
    for row, length in enumerate(batch.response_mask.sum(-1).tolist()):
        yield row, torch.tensor(row_ids(batch, row)), length


@each
def test_before_any_update_the_kl_is_0_and_the_ratio_1_to_the_bit(outcomes: dict, case: tuple[str, int]) -> None:
    outcome = outcomes[case]
    mask = outcome.first.response_mask
    assert torch.equal(outcome.first.old_log_probs[mask], outcome.first.ref_log_prob[mask])
    assert outcome.metrics[0]["actor/kl_loss"] == 0.0
    assert outcome.metrics[0]["actor/ppo_kl"] == 0.0
    assert outcome.metrics[2]["actor/kl_loss"] > 1e-3, "the policy moved away"


@each
@torch.no_grad()
def test_the_reference_is_the_start_as_peft_alone_computes_it_and_stays_it(
    outcomes: dict, case: tuple[str, int], base: str, start: dict[str, AdapterSpec], row_ids: Callable
) -> None:
    outcome, model = outcomes[case], opened(base, start[case[0]].reference)
    mask = outcome.first.response_mask
    for later in outcome.references[1:]:
        assert torch.equal(later[mask], outcome.references[0][mask])
    for row, ids, length in rows_of(outcome.first, row_ids):
        log_p = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1], -1).gather(-1, ids[1:, None])[:, 0]
        assert torch.allclose(outcome.references[0][row, :length], log_p[len(log_p) - length :], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["fresh", "trained"])
def test_one_update_is_the_same_in_one_process_and_two(outcomes: dict, name: str) -> None:
    """Though a rank of 3 leaves the second process fewer rows of each A."""
    for dtype, rel in (("float32", 1e-5), ("float64", 1e-6)):  # metrics are counted in float32
        one, two = outcomes[name, 1].exact[dtype], outcomes[name, 2].exact[dtype]
        assert two.metrics == pytest.approx(one.metrics, rel=rel, abs=1e-7)
        assert two.change.keys() == one.change.keys()
        for key, change in one.change.items():
            if dtype == "float64":
                torch.testing.assert_close(two.change[key], change, rtol=0.0, atol=1e-12, msg=key)
            else:
                assert float((two.change[key] - change).norm()) <= 1e-5 * float(change.norm()), key
            assert bool(change.any()) == (name == "trained" or ".lora_B." in key), "the gradient of A waits for B"


@pytest.mark.parametrize("name", ["fresh", "trained"])
def test_one_process_and_two_train_alike(outcomes: dict, name: str) -> None:
    one, two = outcomes[name, 1], outcomes[name, 2]
    assert torch.equal(one.first.responses, two.first.responses)
    for first, second in zip(one.metrics, two.metrics, strict=True):
        for key in METRICS:
            assert second[f"actor/{key}"] == pytest.approx(first[f"actor/{key}"], rel=1e-4, abs=1e-6), key
    assert one.adapter.keys() == two.adapter.keys()
    for key, value in one.adapter.items():
        # Three steps of AdamW: rounding near a zero gradient turns into parts of a step of 1e-3.
        assert float((two.adapter[key] - value).norm()) <= 1e-3 * float(value.norm()), key
    assert torch.equal(one.greedy, two.greedy)


@each
@torch.no_grad()
def test_the_rollout_decodes_with_the_merged_weights(
    outcomes: dict, case: tuple[str, int], base: str, prompts_of: Callable[..., PPOBatch]
) -> None:
    outcome, model = outcomes[case], opened(base, outcomes[case].folder).merge_and_unload()
    batch = prompts_of(PROMPTS, samples=2)
    for row in range(len(batch)):
        ids = batch.prompts[row][batch.prompt_mask[row]]
        answer = model.generate(
            input_ids=ids[None], max_new_tokens=MAX_TOKENS, do_sample=False, eos_token_id=TOKENS["eos_token_ids"]
        )
        expected = answer[0, len(ids) :]
        assert torch.equal(outcome.greedy[row, : len(expected)], expected)


def test_there_is_no_second_model_for_the_reference(
    open_pool: Callable, roles: ActorRolloutRefConfig, base: str, start: dict[str, AdapterSpec]
) -> None:
    spec = PolicySpec(path=base, adapter=start["fresh"], **TOKENS)
    with open_pool(1) as pool:
        actor, reference = ActorRolloutGroup(pool, roles, spec), ReferenceGroup(pool, roles, spec)
        assert reference.role == actor.NAME
        with pytest.raises(Exception, match=f"KeyError: '{ReferenceGroup.NAME}'"):
            pool.call_all(ReferenceGroup.NAME, "compute_ref_log_prob")
