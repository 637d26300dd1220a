"""What saves memory on a device leaves the numbers: offload and gradient checkpointing to the bit, chunks to rounding.

On CPUs offload moves between two places of the one memory: that the code moves, and that nothing is lost on the way, is
what can be seen here.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from config.schema import ActorRolloutRefConfig, CriticConfig, FSDPConfig
from trainer.batch import PPOBatch
from trainer.ppo.core_algos import LossCounts
from workers.actor import ActorRollout
from workers.critic import Critic
from workers.engine.fsdp import DeviceContext, FSDPEngine, local_part
from workers.engine.lora import prepare_adapter
from workers.engine.models import AdapterSpec, PolicySpec
from workers.engine.offload import Offload
from workers.engine.pieces import LocalUpdate
from workers.groups import ActorRolloutGroup, CriticGroup, ReferenceGroup, UpdateContext
from workers.pool import ResourcePool

ACTOR = "actor_rollout_ref.actor"
PROMPTS, RESPONSES = [3, 1, 6, 2, 7, 4, 5, 2], [9, 2, 5, 0, 1, 7, 3, 4]
OFFLOADS = {
    "weights": {"param_offload": True},
    "optimizer": {"optimizer_offload": True},
    "both": {"param_offload": True, "optimizer_offload": True},
}
CHUNK = 5
Configs = tuple[ActorRolloutRefConfig, CriticConfig]


@pytest.fixture(scope="module", params=[1, 2], ids=["1 process", "2 processes"])
def pool(request: pytest.FixtureRequest, open_pool: Callable) -> Iterator[ResourcePool]:
    with open_pool(request.param) as opened:
        yield opened


@pytest.fixture(scope="module")
def configs(configure: Callable) -> Callable[..., Configs]:
    """configs(fsdp={…}, model={…}): actor, reference and critic; two updates of two pieces on each batch."""
    config = configure(
        f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.entropy_coeff=0.05", f"{ACTOR}.ppo_mini_batch_size=4",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=2", "actor_rollout_ref.rollout.temperature=0.7",
    )  # fmt: skip

    def change(
        *, fsdp: dict[str, Any] | None = None, model: dict[str, Any] | None = None, sgd: bool = False
    ) -> Configs:
        fsdp, roles, critic = fsdp or {}, config.actor_rollout_ref, config.critic

        def engine(part: FSDPConfig, *, optimizer: bool = True) -> FSDPConfig:
            changed = replace(part, **fsdp)
            return changed if optimizer else replace(changed, optimizer_offload=False)

        optim = replace(roles.actor.optim, optimizer="SGD") if sgd else roles.actor.optim
        actor = replace(roles.actor, fsdp_config=engine(roles.actor.fsdp_config), optim=optim)
        ref = replace(roles.ref, fsdp_config=engine(roles.ref.fsdp_config, optimizer=False))
        checkpointing = (model or {}).get("enable_gradient_checkpointing", False)
        critic_model = replace(critic.model, enable_gradient_checkpointing=checkpointing)
        critic = replace(critic, fsdp_config=engine(critic.fsdp_config), model=critic_model)
        return replace(roles, actor=actor, ref=ref, model=replace(roles.model, **(model or {}))), critic

    return change


@dataclass
class Outcome:
    """All that two steps of the three roles gave."""

    tensors: dict[str, Tensor]
    metrics: list[dict[str, float]]


@pytest.fixture(scope="module")
def two_steps(
    pool: ResourcePool,
    answered: Callable[..., PPOBatch],
    write_model: Callable[..., str],
    read_weights: Callable,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., Outcome]:
    """two_steps(configs, dtype): score, update twice, again, and save, by real processes."""

    def run(configs: Configs, dtype: torch.dtype = torch.float32) -> Outcome:
        (roles, critic_config), path = configs, write_model("qwen3")
        spec = PolicySpec(path=path, eos_token_ids=[1], pad_token_id=0)
        actor, reference = ActorRolloutGroup(pool, roles, spec), ReferenceGroup(pool, roles, spec)
        critic = CriticGroup(pool, critic_config, path, seed=0, max_response_length=9)
        batch, tensors, metrics = answered(PROMPTS, RESPONSES), {}, []
        random = torch.Generator().manual_seed(0)
        batch.advantages = torch.randn(batch.responses.shape, generator=random).to(dtype)
        batch.returns = torch.randn(batch.responses.shape, generator=random).to(dtype)
        for step in (1, 2):
            batch = critic.compute_values(reference.compute_ref_log_prob(actor.compute_log_prob(batch)))
            # Away from a KL of exactly 0, whose direction is rounding.
            batch.ref_log_prob = batch.ref_log_prob + 0.1 * torch.randn(batch.responses.shape, generator=random)
            for name in ("old_log_probs", "ref_log_prob", "entropys", "values"):
                tensors[f"{step} {name}"] = getattr(batch, name)[batch.response_mask].clone()
            context = UpdateContext(seed=0, step=step, lr=1e-3)
            metrics += critic.update_critic(batch, context) + actor.update_actor(batch, context)
        folder = tmp_path_factory.mktemp("saved")
        actor.save(str(folder))
        critic.save(str(folder))
        for part in ("actor", "critic", ""):
            tensors |= {f"{part} {name}": value for name, value in read_weights(folder / part).items()}
        return Outcome(tensors, metrics)

    return run


@pytest.fixture(scope="module")
def usual(two_steps: Callable[..., Outcome], configs: Callable[..., Configs]) -> Outcome:
    return two_steps(configs())


def assert_same_bits(outcome: Outcome, expected: Outcome) -> None:
    assert outcome.metrics == expected.metrics
    assert outcome.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert torch.equal(outcome.tensors[name], tensor), name


@pytest.mark.parametrize("offload", OFFLOADS)
def test_offload_changes_no_bit_of_scores_updates_metrics_and_checkpoints(
    two_steps: Callable[..., Outcome], configs: Callable[..., Configs], usual: Outcome, offload: str
) -> None:
    assert any("exp_avg" in name for name in usual.tensors), "the optimizer's state is compared too"
    assert_same_bits(two_steps(configs(fsdp=OFFLOADS[offload])), usual)


def test_gradient_checkpointing_changes_no_bit_either_also_with_offload(
    two_steps: Callable[..., Outcome], configs: Callable[..., Configs], usual: Outcome
) -> None:
    model = {"enable_gradient_checkpointing": True}
    assert_same_bits(two_steps(configs(fsdp=OFFLOADS["both"], model=model)), usual)


def test_chunks_of_logits_change_figures_and_weights_by_rounding_alone(
    two_steps: Callable[..., Outcome], configs: Callable[..., Configs]
) -> None:
    """In float64 and with SGD, since AdamW makes whole steps of rounding; with all that saves memory at once."""
    float64 = {"dtype": "float64"}
    model = {"logits_chunk_size": CHUNK, "enable_gradient_checkpointing": True}
    expected = two_steps(configs(fsdp=float64, sgd=True), torch.float64)
    outcome = two_steps(configs(fsdp=float64 | OFFLOADS["both"], model=model, sgd=True), torch.float64)
    for update, other in zip(outcome.metrics, expected.metrics, strict=True):
        assert update == pytest.approx(other, rel=1e-6, abs=1e-12)  # shares are counted in float32
    assert outcome.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert torch.allclose(outcome.tensors[name], tensor, rtol=0, atol=1e-10), name


def test_chunks_work_with_bfloat16_compute(two_steps: Callable[..., Outcome], configs: Callable[..., Configs]) -> None:
    half = {"dtype": "bfloat16"}
    expected = two_steps(configs(fsdp=half))
    outcome = two_steps(configs(fsdp=half, model={"logits_chunk_size": CHUNK}))
    for name in ("1 old_log_probs", "1 entropys"):
        assert torch.allclose(outcome.tensors[name], expected.tensors[name], rtol=0, atol=0.02), name
    first, other = outcome.metrics[2], expected.metrics[2]  # after the critic's two updates
    assert first["actor/grad_norm"] == pytest.approx(other["actor/grad_norm"], rel=0.02)


# --- that they act ---------------------------------------------------------------------------------------------------


@pytest.fixture
def roles(device_context: DeviceContext, write_model: Callable[..., str]) -> Callable[[Configs], tuple[Any, Any]]:
    """roles(configs): actor and critic of this process."""

    def build(configs: Configs) -> tuple[ActorRollout, Critic]:
        path = write_model("qwen3")
        actor = ActorRollout(device_context, configs[0], PolicySpec(path=path, eos_token_ids=[1], pad_token_id=0))
        return actor, Critic(device_context, configs[1], path, 0, 9)

    return build


@pytest.fixture
def batch(answered: Callable[..., PPOBatch]) -> PPOBatch:
    batch = answered(PROMPTS, RESPONSES)
    for name in ("advantages", "returns", "values", "old_log_probs", "ref_log_prob"):
        setattr(batch, name, torch.zeros(batch.responses.shape))
    return batch


def one_update(batch: PPOBatch) -> list[LocalUpdate]:
    return [LocalUpdate(counts=LossCounts.of(batch.loss_mask), micro_batches=[np.arange(len(batch))])]


def count_calls(engine: FSDPEngine) -> list[str]:
    calls: list[str] = []
    for name, module in engine.module.named_modules():
        if name.endswith("self_attn"):
            module.register_forward_hook(lambda module, args, output, name=name: calls.append(name))
    return calls


@pytest.mark.parametrize("role", [0, 1], ids=["actor", "critic"])
def test_with_gradient_checkpointing_each_layer_runs_once_more_in_an_update_and_not_in_scoring(
    roles: Callable, configs: Callable[..., Configs], batch: PPOBatch, role: int
) -> None:
    for checkpointing in (False, True):
        worker = roles(configs(model={"enable_gradient_checkpointing": checkpointing}))[role]
        calls = count_calls(worker.engine)
        worker.update(batch, one_update(batch), 1e-3)
        assert len(calls) == (4 if checkpointing else 2), "two layers"
        calls.clear()
        getattr(worker, ["compute_log_prob", "compute_values"][role])(batch, [np.arange(len(batch))])
        assert len(calls) == 2
        assert not worker.engine.module.model.training


def test_with_gradient_checkpointing_a_layer_keeps_its_input_alone(
    roles: Callable, configs: Callable[..., Configs], batch: PPOBatch
) -> None:
    def kept(checkpointing: bool) -> int:
        actor, _ = roles(configs(model={"enable_gradient_checkpointing": checkpointing}))
        numbers: list[int] = []

        def keep(tensor: Tensor) -> Tensor:
            numbers.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            actor.update(batch, one_update(batch), 1e-3)
        return sum(numbers)

    assert kept(True) < kept(False) / 3


def places(engine: FSDPEngine) -> dict[str, int]:
    """Where this rank's weights, and the optimizer's state, lie in memory."""
    found = {name: local_part(parameter.detach()).data_ptr() for name, parameter in engine.module.named_parameters()}
    for name, parameter in engine.module.named_parameters():
        slots = engine.optimizer.state.get(parameter, {})
        found |= {f"{name}/{slot}": local_part(value).data_ptr() for slot, value in slots.items() if value.dim()}
    return found


@pytest.mark.parametrize("offload", OFFLOADS)
def test_what_is_offloaded_is_elsewhere_between_phases(
    roles: Callable, configs: Callable[..., Configs], batch: PPOBatch, offload: str
) -> None:
    """On a CPU, another place of its memory. Phases within phases move nothing, and a failed one takes things back."""
    actor, _ = roles(configs(fsdp=OFFLOADS[offload]))
    actor.update(batch, one_update(batch), 1e-3)
    engine, outside = actor.engine, places(actor.engine)
    with contextlib.suppress(KeyError), engine.loaded(optimizer=True):
        inside = places(engine)
        with engine.loaded(optimizer=True):
            assert places(engine) == inside
        assert places(engine) == inside
        raise KeyError
    assert places(engine) != inside
    weights, states = ({name for name in outside if ("/" in name) == wanted} for wanted in (False, True))
    assert states
    moved = {name for name in outside if outside[name] != inside[name]}
    expected = (weights if "param_offload" in OFFLOADS[offload] else set()) | (
        states if "optimizer_offload" in OFFLOADS[offload] else set()
    )
    assert moved == expected


def test_without_offload_nothing_moves(roles: Callable, configs: Callable[..., Configs], batch: PPOBatch) -> None:
    actor, _ = roles(configs())
    actor.update(batch, one_update(batch), 1e-3)
    before = places(actor.engine)
    actor.compute_log_prob(batch, [np.arange(len(batch))])
    with actor.engine.loaded(optimizer=True):
        assert places(actor.engine) == before


def test_an_offloaded_optimizer_goes_on_from_a_checkpoint(
    roles: Callable, configs: Callable[..., Configs], batch: PPOBatch, tmp_path: Path
) -> None:
    after = []
    for offload in ({}, OFFLOADS["both"]):
        first, _ = roles(configs(fsdp=offload))
        first.update(batch, one_update(batch), 1e-3)
        first.save(str(tmp_path))
        second, _ = roles(configs(fsdp=offload))
        second.load_optimizer(str(tmp_path))
        second.update(batch, one_update(batch), 1e-3)
        after.append({name: value.clone() for name, value in second.engine.full_weights()})
    for name, value in after[0].items():
        assert torch.equal(after[1][name], value), name


@pytest.fixture
def unusable_on_the_host(monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[Tensor, Tensor]]:
    """Makes NaN of all that is offloaded, until it is brought back: no phase can do without asking for what it needs."""
    kept: dict[
        int, tuple[Tensor, Tensor]
    ] = {}  # values and NaN, by where the NaN are; held, so that no other comes there

    def moved(offload: Offload, tensor: Tensor, where: torch.device) -> Tensor:
        copy = tensor.detach().clone()
        values = local_part(copy)
        back = kept.pop(local_part(tensor.detach()).data_ptr(), None)
        if back is None:
            kept[values.data_ptr()] = values.clone(), values
            values.fill_(torch.nan)
        else:
            values.copy_(back[0])
        return copy

    monkeypatch.setattr(Offload, "_moved", moved)
    return kept


@pytest.mark.parametrize("with_lora", [False, True], ids=["all weights", "LoRA"])
def test_nothing_is_read_or_written_outside_of_a_phase(
    device_context: DeviceContext,
    write_model: Callable[..., str],
    configs: Callable[..., Configs],
    batch: PPOBatch,
    tmp_path: Path,
    unusable_on_the_host: dict[int, tuple[Tensor, Tensor]],
    read_weights: Callable,
    with_lora: bool,
) -> None:
    """Scores, updates, a push, a checkpoint, going on from it, and with LoRA the reference."""
    path = write_model("llama")  # not tied: a tied weight is moved twice

    def run(fsdp: dict[str, Any], folder: Path) -> dict[str, Tensor]:
        (roles, critic_config), adapter = configs(fsdp=fsdp, model={"lora_rank": 4 if with_lora else 0}), None
        if with_lora:
            fresh = prepare_adapter(roles.model, path, folder / "fresh", seed=1)
            adapter = AdapterSpec(path=fresh.path, reference=None)
        spec = PolicySpec(path=path, eos_token_ids=[1], pad_token_id=0, adapter=adapter)
        rows, update, out = [np.arange(len(batch))], one_update(batch), {}
        for step in (1, 2):
            actor, critic = ActorRollout(device_context, roles, spec), Critic(device_context, critic_config, path, 0, 9)
            if step == 2:
                actor.load_optimizer(str(folder))
                critic.load_optimizer(str(folder))
            out |= {f"{step} {name}": value for name, value in actor.compute_log_prob(batch, rows).items()}
            out |= {f"{step} {name}": value for name, value in critic.compute_values(batch, rows).items()}
            norms = [role.update(batch, update, 1e-3)[0].grad_norm for role in (actor, critic)]
            out[f"{step} norms"] = torch.tensor(norms)
            if with_lora:
                out |= {f"{step} {name}": value for name, value in actor.compute_ref_log_prob(batch, rows).items()}
            out |= {f"{step} {name}": value.clone() for name, value in actor.engine.full_weights()}
            folder.mkdir(exist_ok=True)
            actor.save(str(folder))
            critic.save(str(folder))
            for part in ("actor", "critic", ""):
                out |= {f"{step} {part} {name}": value for name, value in read_weights(folder / part).items()}
        return out

    batch.advantages = torch.ones(batch.responses.shape)
    expected = run({}, tmp_path / "usual")
    assert not unusable_on_the_host
    found = run(OFFLOADS["both"], tmp_path / "offloaded")
    assert unusable_on_the_host
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
