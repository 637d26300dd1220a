"""The engine on one process: what it saves, what it goes on from, and the precision it keeps."""

import dataclasses
import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from config.load import load_config
from trainer.batch import PPOBatch
from trainer.errors import DivergedError
from workers.engine.fsdp import DeviceContext, FSDPEngine
from workers.engine.models import PolicyModel, ValueModel
from workers.engine.pieces import make_piece
from workers.losses import LossShare

CPU = torch.device("cpu")
LOAD = {"dtype": torch.float32, "override_config": {}, "trust_remote_code": False}
ACTOR = load_config(["experiment=copy_ppo"]).actor_rollout_ref.actor
OPTIM = dataclasses.replace(ACTOR.optim, weight_decay=0.01)
OPTIMIZERS = {"AdamW": OPTIM, "SGD": dataclasses.replace(OPTIM, optimizer="SGD")}


@pytest.fixture
def batch(answered: Callable[..., PPOBatch]) -> PPOBatch:
    return answered([3, 5, 2], [4, 2, 6])


@pytest.fixture
def make_engine(device_context: DeviceContext) -> Callable[..., FSDPEngine]:
    """make_engine(path, dtype=…, optimizer=…, **changes of fsdp_config): a policy that is trained."""

    def make(path: str | Path, *, dtype: str = "float32", optimizer: str = "AdamW", **changes: bool) -> FSDPEngine:
        config = dataclasses.replace(ACTOR.fsdp_config, dtype=dtype, **changes)
        return FSDPEngine(
            PolicyModel.load(str(path), **LOAD), context=device_context, config=config, optim=OPTIMIZERS[optimizer]
        )

    return make


def log_probs(engine: FSDPEngine, batch: PPOBatch) -> Tensor:
    piece = make_piece(batch, np.arange(len(batch)), CPU)
    with torch.no_grad():
        return piece.widen(engine.module(piece.input_ids, piece.positions, piece.labels, 1.0)[0])


def update(engine: FSDPEngine, batch: PPOBatch, *, scale: float = 1.0, lr: float = 1e-2) -> float:
    """Raise the probability of the batch's responses once; the gradient norm."""

    def shares() -> Iterator[LossShare]:
        piece = make_piece(batch, np.arange(len(batch)), CPU)
        log_prob = piece.widen(engine.module(piece.input_ids, piece.positions, piece.labels, 1.0)[0])
        yield LossShare(-scale * torch.where(piece.batch.response_mask, log_prob, 0.0).sum(), {})

    return engine.update(shares(), lr=lr, grad_clip=1.0).grad_norm


def weights(engine: FSDPEngine) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in engine.full_weights()}


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("kind", ["qwen3", "llama"], ids=["tied embeddings", "a head of its own"])
def test_a_saved_policy_opens_with_from_pretrained_and_gives_equal_logits(
    write_model: Callable[..., str], make_engine: Callable[..., FSDPEngine], batch: PPOBatch, tmp_path: Path, kind: str
) -> None:
    engine = make_engine(write_model(kind))
    update(engine, batch)
    engine.save(tmp_path, "actor")
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "actor").eval()
    assert {parameter.dtype for parameter in opened.parameters()} == {torch.float32}
    ids = torch.arange(18).view(2, 9) + 2
    logits = []
    engine.hf_model.get_output_embeddings().register_forward_hook(lambda module, args, output: logits.append(output))
    with torch.no_grad():
        engine.module(ids, torch.arange(9).expand(2, -1), ids, 1.0)
        assert torch.equal(opened(input_ids=ids).logits, logits[0])


def test_a_saved_policy_keeps_the_generation_config(
    write_model: Callable[..., str], make_engine: Callable[..., FSDPEngine], tmp_path: Path
) -> None:
    """It names the end tokens, without which a resumed run would decode on."""
    path = write_model("qwen3")
    engine = make_engine(path)
    engine.hf_model.generation_config.eos_token_id = [1, 4]
    engine.save(tmp_path, "actor")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "actor").generation_config.eos_token_id == [1, 4]


def test_a_policy_with_sampling_settings_in_its_generation_config_can_be_saved(
    write_model: Callable[..., str], make_engine: Callable[..., FSDPEngine], tmp_path: Path
) -> None:
    """Public models ship temperature without do_sample, which transformers reads with a warning and refuses to write."""
    start = tmp_path / "start"
    shutil.copytree(write_model("llama"), start)
    (start / "generation_config.json").write_text(
        json.dumps({"temperature": 0.6, "top_p": 0.9, "eos_token_id": [1, 4]})
    )
    make_engine(start).save(tmp_path, "actor")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "actor").generation_config.eos_token_id == [1, 4]


def test_a_saved_critic_gives_equal_values(
    write_model: Callable[..., str], device_context: DeviceContext, batch: PPOBatch, tmp_path: Path
) -> None:
    def values(engine: FSDPEngine) -> Tensor:
        piece = make_piece(batch, np.arange(len(batch)), CPU)
        with torch.no_grad():
            return engine.module(piece.input_ids, piece.positions)

    def make(path: str) -> FSDPEngine:
        return FSDPEngine(ValueModel.load(path, **LOAD), context=device_context, config=ACTOR.fsdp_config, optim=OPTIM)

    engine = make(write_model("qwen3"))
    engine.save(tmp_path, "critic")
    assert torch.equal(values(make(str(tmp_path / "critic"))), values(engine))


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
@pytest.mark.parametrize("kind", ["qwen3", "llama"], ids=["tied embeddings", "a head of its own"])
def test_going_on_from_a_saved_folder_is_bitwise_going_on(
    write_model: Callable[..., str],
    make_engine: Callable[..., FSDPEngine],
    batch: PPOBatch,
    tmp_path: Path,
    kind: str,
    optimizer: str,
) -> None:
    first = make_engine(write_model(kind), optimizer=optimizer)
    for _ in range(2):
        update(first, batch)
    first.save(tmp_path, "actor")
    second = make_engine(tmp_path / "actor", optimizer=optimizer)
    second.load_optimizer(tmp_path, "actor")
    assert same_bits(weights(first), weights(second))
    for engine in (first, second):
        update(engine, batch)
    assert same_bits(weights(first), weights(second))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_look_at_the_policy_before_saving_loses_no_bit_and_no_optimizer_state(
    write_model: Callable[..., str],
    make_engine: Callable[..., FSDPEngine],
    batch: PPOBatch,
    tmp_path: Path,
    dtype: str,
) -> None:
    """As samples and probe look after a step's updates: a forward alone, whose gathered weights are not resharded."""
    engine = make_engine(write_model("qwen3"), dtype=dtype, reshard_after_forward=False)
    update(engine, batch)
    engine.save(tmp_path / "unseen", "actor")
    before = weights(engine)
    with engine.loaded():
        log_probs(engine, batch)
    assert same_bits(weights(engine), before)
    engine.save(tmp_path / "seen", "actor")
    for name in ("actor_optimizer.safetensors", "actor/model.safetensors"):
        assert same_bits(load_file(tmp_path / "seen" / name), load_file(tmp_path / "unseen" / name))


def test_without_the_optimizers_state_going_on_would_differ(
    write_model: Callable[..., str], make_engine: Callable[..., FSDPEngine], batch: PPOBatch, tmp_path: Path
) -> None:
    """Guards the test above: the state matters for the next update."""
    first = make_engine(write_model("qwen3"))
    for _ in range(2):
        update(first, batch)
    first.save(tmp_path, "actor")
    second = make_engine(tmp_path / "actor")
    for engine in (first, second):
        update(engine, batch)
    assert not same_bits(weights(first), weights(second))


def test_saving_before_the_first_update_changes_nothing(
    write_model: Callable[..., str], make_engine: Callable[..., FSDPEngine], batch: PPOBatch, tmp_path: Path
) -> None:
    """Critic-only steps also checkpoint, and then the actor's optimizer has no state yet."""
    first, second = make_engine(write_model("qwen3")), make_engine(write_model("qwen3"))
    first.save(tmp_path, "actor")
    for engine in (first, second):
        update(engine, batch)
    assert same_bits(weights(first), weights(second))


def test_going_on_from_a_checkpoint_before_the_first_update_is_bitwise_going_on(
    write_model: Callable[..., str], make_engine: Callable[..., FSDPEngine], batch: PPOBatch, tmp_path: Path
) -> None:
    unsaved = make_engine(write_model("qwen3"))
    make_engine(write_model("qwen3")).save(tmp_path, "actor")
    resumed = make_engine(tmp_path / "actor")
    resumed.load_optimizer(tmp_path, "actor")
    for engine in (unsaved, resumed):
        update(engine, batch)
    assert same_bits(weights(unsaved), weights(resumed))


@pytest.mark.parametrize("scale", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_refused_and_leaves_the_weights(
    write_model: Callable[..., str], make_engine: Callable[..., FSDPEngine], batch: PPOBatch, scale: float
) -> None:
    engine = make_engine(write_model("qwen3"))
    update(engine, batch)
    before = weights(engine)
    with pytest.raises(DivergedError, match=r"gradient norm is (nan|inf)"):
        update(engine, batch, scale=scale)
    assert same_bits(before, weights(engine))


def test_the_gradient_norm_is_that_before_clipping_and_clipping_scales_the_step(
    write_model: Callable[..., str], make_engine: Callable[..., FSDPEngine], batch: PPOBatch
) -> None:
    engine = make_engine(write_model("qwen3"), optimizer="SGD")
    engine.optimizer.param_groups[0]["weight_decay"] = 0.0
    before = weights(engine)
    assert update(engine, batch, lr=0.5) > 1.0
    step = torch.cat([(weights(engine)[name] - before[name]).flatten() for name in before])
    # grad_clip is 1 and SGD steps lr times the gradient.
    assert float(step.norm()) == pytest.approx(0.5, rel=1e-4)


def test_one_update_does_not_see_the_gradient_of_the_last(
    write_model: Callable[..., str], make_engine: Callable[..., FSDPEngine], batch: PPOBatch
) -> None:
    engine = make_engine(write_model("qwen3"), optimizer="SGD")
    first = update(engine, batch, lr=0.0)
    assert update(engine, batch, lr=0.0) == first


def test_bfloat16_computes_in_bfloat16_and_keeps_float32_masters(
    write_model: Callable[..., str], make_engine: Callable[..., FSDPEngine], batch: PPOBatch, tmp_path: Path
) -> None:
    engine = make_engine(write_model("qwen3"), dtype="bfloat16")
    seen = []
    engine.hf_model.get_output_embeddings().register_forward_hook(
        lambda module, args, output: seen.append(output.dtype)
    )
    before = weights(engine)
    # 1e-5 is less than the gap between neighbouring bfloat16 numbers around 0.1 (5e-4): only a master can keep it.
    update(engine, batch, lr=1e-5)
    after = weights(engine)
    assert seen == [torch.bfloat16]
    assert {value.dtype for value in after.values()} == {torch.float32}
    moved = torch.cat([(after[name] - before[name]).abs().flatten() for name in before])
    assert 0.9e-5 < float(moved.median()) < 1.1e-5

    engine.save(tmp_path, "actor")
    assert {value.dtype for value in load_file(tmp_path / "actor" / "model.safetensors").values()} == {torch.float32}
    assert {value.dtype for value in load_file(tmp_path / "actor_optimizer.safetensors").values()} == {torch.float32}


def test_bfloat16_log_probs_are_float32_close_to_float32s(
    write_model: Callable[..., str], make_engine: Callable[..., FSDPEngine], batch: PPOBatch
) -> None:
    half, full = (log_probs(make_engine(write_model("qwen3"), dtype=dtype), batch) for dtype in ("bfloat16", "float32"))
    assert half.dtype == torch.float32
    difference = (half - full)[batch.response_mask].abs().max()
    assert 1e-4 < float(difference) < 0.2  # 8 bits of mantissa on logits of a few units


def test_bfloat16_goes_on_bitwise_from_a_saved_folder(
    write_model: Callable[..., str], make_engine: Callable[..., FSDPEngine], batch: PPOBatch, tmp_path: Path
) -> None:
    first = make_engine(write_model("qwen3"), dtype="bfloat16")
    update(first, batch)
    first.save(tmp_path, "actor")
    second = make_engine(tmp_path / "actor", dtype="bfloat16")
    second.load_optimizer(tmp_path, "actor")
    for engine in (first, second):
        update(engine, batch)
    assert same_bits(weights(first), weights(second))


def test_every_decoder_layer_is_a_shard_group_of_its_own(
    write_model: Callable[..., str], make_engine: Callable[..., FSDPEngine]
) -> None:
    from torch.distributed.fsdp import FSDPModule

    engine = make_engine(write_model("qwen3"))
    groups = [name for name, module in engine.module.named_modules() if isinstance(module, FSDPModule)]
    assert groups == ["", "model.model.layers.0", "model.model.layers.1"]
