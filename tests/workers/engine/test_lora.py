"""LoRA on one process: what is trained, what the reference is, what is saved, and what goes out. peft by itself is the judge."""

import dataclasses
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from config.load import load_config
from config.schema import ModelConfig
from trainer.batch import PPOBatch
from trainer.errors import ConfigError
from workers.engine.fsdp import DeviceContext
from workers.engine.lora import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    LoraEngine,
    attach_adapters,
    check_base,
    prepare_adapter,
)
from workers.engine.models import AdapterSpec, PolicyModel, load_model, weights_fingerprint
from workers.engine.pieces import make_piece
from workers.engine.recompute import recompute_layers
from workers.losses import LossShare

CPU = torch.device("cpu")
CONFIG = load_config(["experiment=copy_ppo", "actor_rollout_ref.model.lora_rank=4"]).actor_rollout_ref
OPTIM = dataclasses.replace(CONFIG.actor.optim, weight_decay=0.01)


def lora(**changes: object) -> ModelConfig:
    return dataclasses.replace(CONFIG.model, **changes)


@pytest.fixture
def batch(answered: Callable[..., PPOBatch]) -> PPOBatch:
    return answered([3, 5, 2], [4, 2, 6])


@pytest.fixture
def make_engine(device_context: DeviceContext, tmp_path: Path) -> Callable[..., LoraEngine]:
    """make_engine(base, adapter=None, reference=None, dtype=…): a policy with an adapter, a fresh one unless one is named."""

    def make(
        base: str,
        adapter: str | Path | None = None,
        reference: str | Path | None = None,
        *,
        dtype: str = "float32",
        config: ModelConfig = CONFIG.model,
        saving_memory: bool = False,
    ) -> LoraEngine:
        folder = adapter or prepare_adapter(config, base, tmp_path / "fresh", seed=1).path
        model = load_model(AutoModelForCausalLM, base, dtype=torch.float32, override_config={}, trust_remote_code=False)
        spec = AdapterSpec(path=str(folder), reference=None if reference is None else str(reference))
        offload = {"param_offload": saving_memory, "optimizer_offload": saving_memory}
        fsdp = dataclasses.replace(CONFIG.actor.fsdp_config, dtype=dtype, **offload)
        attach_adapters(model, spec)
        policy = PolicyModel(model, logits_chunk_size=5 if saving_memory else None)
        if saving_memory:
            recompute_layers(policy)
        return LoraEngine(policy, spec, base=base, context=device_context, config=fsdp, optim=OPTIM)

    return make


@pytest.fixture
def trained(make_engine: Callable[..., LoraEngine], batch: PPOBatch, tmp_path: Path) -> Callable[[str], Path]:
    """trained(base): the folder of an adapter after three updates."""

    def train(base: str) -> Path:
        engine = make_engine(base)
        for _ in range(3):
            update(engine, batch)
        engine.save(tmp_path / "trained", "actor")
        return tmp_path / "trained" / "actor"

    return train


def log_probs(engine: LoraEngine, batch: PPOBatch) -> Tensor:
    piece = make_piece(batch, np.arange(len(batch)), CPU)
    return piece.widen(engine.module(piece.input_ids, piece.positions, piece.labels, 1.0)[0])


def update(engine: LoraEngine, batch: PPOBatch, *, lr: float = 1e-2) -> float:
    """Raise the probability of the batch's responses once; the gradient norm."""

    def shares() -> Iterator[LossShare]:
        yield LossShare(-torch.where(batch.response_mask, log_probs(engine, batch), 0.0).sum(), {})

    return engine.update(shares(), lr=lr, grad_clip=1.0).grad_norm


def parameters(engine: LoraEngine) -> dict[str, Tensor]:
    return {name: parameter.detach().full_tensor().clone() for name, parameter in engine.hf_model.named_parameters()}


def with_peft(base: str, adapter: Path | str | None, *, trainable: bool = False) -> torch.nn.Module:
    """The model as peft alone opens it; without an adapter the base."""
    import peft

    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return (plain if adapter is None else peft.PeftModel.from_pretrained(plain, adapter, is_trainable=trainable)).eval()


def log_probs_of(model: torch.nn.Module, batch: PPOBatch, row_ids: Callable) -> Tensor:
    """Row by row, without padding: [B, R], 0 under mask 0."""
    out = torch.zeros(batch.responses.shape)
    for row, length in enumerate(batch.response_mask.sum(-1).tolist()):
        ids = torch.tensor(row_ids(batch, row))
        log_p = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1], -1).gather(-1, ids[1:, None])[:, 0]
        out[row, :length] = log_p[len(log_p) - length :]
    return out


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# --- the step --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gpt2"], ids=["tied", "untied", "transposed layers"])
@torch.no_grad()
def test_a_fresh_adapter_changes_no_bit_of_the_base(
    write_model: Callable[..., str],
    make_engine: Callable[..., LoraEngine],
    batch: PPOBatch,
    row_ids: Callable,
    kind: str,
) -> None:
    base = write_model(kind)
    engine = make_engine(base)
    with engine.reference():
        reference = log_probs(engine, batch)
    mask = batch.response_mask
    assert torch.equal(log_probs(engine, batch)[mask], reference[mask])
    expected = log_probs_of(with_peft(base, None), batch, row_ids)
    assert torch.allclose(reference[mask], expected[mask], rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_after_updates_the_reference_is_still_the_base_and_the_policy_is_not(
    write_model: Callable[..., str], make_engine: Callable[..., LoraEngine], batch: PPOBatch, dtype: str
) -> None:
    engine = make_engine(write_model("qwen3"), dtype=dtype)
    mask = batch.response_mask

    def score() -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            with engine.reference():
                reference = log_probs(engine, batch)[mask]
            return reference, log_probs(engine, batch)[mask]

    before, _ = score()
    for _ in range(3):
        update(engine, batch)
    after, policy = score()
    assert torch.equal(before, after)
    assert float((policy - after).abs().max()) > 0.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_from_a_trained_adapter_the_reference_is_that_start_to_the_bit_and_stays_it(
    write_model: Callable[..., str],
    make_engine: Callable[..., LoraEngine],
    trained: Callable[[str], Path],
    batch: PPOBatch,
    row_ids: Callable,
    dtype: str,
) -> None:
    base = write_model("qwen3")
    start = trained(base)
    engine = make_engine(base, start, start, dtype=dtype)
    mask = batch.response_mask
    with torch.no_grad():
        policy = log_probs(engine, batch)[mask]
        with engine.reference():
            assert torch.equal(log_probs(engine, batch)[mask], policy)
    for _ in range(2):
        update(engine, batch)
    with torch.no_grad():
        moved = log_probs(engine, batch)[mask]
        with engine.reference():
            kept = log_probs(engine, batch)[mask]
        expected = log_probs_of(with_peft(base, start), batch, row_ids)[mask]
    assert torch.equal(kept, policy)
    assert float((moved - policy).abs().max()) > 0.05
    assert torch.allclose(kept, expected, rtol=0, atol=1e-5 if dtype == "float32" else 0.2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_reference_pass_before_the_first_update_does_not_stop_the_adapter_from_training(
    write_model: Callable[..., str],
    make_engine: Callable[..., LoraEngine],
    trained: Callable[[str], Path],
    batch: PPOBatch,
    dtype: str,
) -> None:
    """A step starts with it, and FSDP2 then gathers the weights of a switched-off adapter for the first time."""
    base = write_model("qwen3")
    start = trained(base)
    for reference in (None, start):
        engine, other = (
            make_engine(base, start, reference, dtype=dtype),
            make_engine(base, start, reference, dtype=dtype),
        )
        with torch.no_grad(), engine.reference():
            log_probs(engine, batch)
        assert update(engine, batch) == update(other, batch) > 0
        assert same_bits(parameters(engine), parameters(other))


def test_only_the_adapter_changes_and_all_of_it(
    write_model: Callable[..., str],
    make_engine: Callable[..., LoraEngine],
    trained: Callable[[str], Path],
    batch: PPOBatch,
) -> None:
    base = write_model("qwen3")
    start = trained(base)
    engine = make_engine(base, start, start)
    before = parameters(engine)
    update(engine, batch)
    after = parameters(engine)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if ".default." in name}
    assert len(changed) == 2 * 2 * 7  # A and B, layers, linear layers in each
    assert len(engine.optimizer.state) == len(changed)


def test_gradient_and_update_equal_those_of_peft_alone(
    write_model: Callable[..., str],
    make_engine: Callable[..., LoraEngine],
    trained: Callable[[str], Path],
    batch: PPOBatch,
    row_ids: Callable,
) -> None:
    base = write_model("qwen3")
    start = trained(base)
    engine = make_engine(base, start)
    norm = update(engine, batch, lr=1e-3)
    model = with_peft(base, start, trainable=True)
    (-log_probs_of(model, batch, row_ids).sum()).backward()
    theirs = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert norm == pytest.approx(float(torch.nn.utils.clip_grad_norm_(theirs.values(), 1.0)), rel=1e-5)
    torch.optim.AdamW(theirs.values(), lr=1e-3, weight_decay=OPTIM.weight_decay).step()
    ours = {f"base_model.model.{name}": p for name, p in parameters(engine).items() if ".default." in name}
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert float((value - theirs[name]).norm()) <= 1e-5 * float(value.norm()), name


@pytest.mark.parametrize("targets", ["all-linear", ["lm_head", "q_proj"]], ids=["layers", "output layer too"])
def test_an_update_that_saves_memory_is_the_same_update(
    write_model: Callable[..., str],
    make_engine: Callable[..., LoraEngine],
    batch: PPOBatch,
    targets: str | list[str],
) -> None:
    """Logits in chunks, layers recomputed, weights and optimizer offloaded; the reference works too."""
    norms, adapters, references = [], [], []
    for saving_memory in (False, True):
        engine = make_engine(write_model("llama"), config=lora(target_modules=targets), saving_memory=saving_memory)
        with engine.loaded(optimizer=True):
            norms.append([update(engine, batch, lr=1e-3) for _ in range(3)])
        with torch.no_grad(), engine.loaded(), engine.reference():
            references.append(log_probs(engine, batch))
        adapters.append({name: p for name, p in parameters(engine).items() if ".default." in name})
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    assert torch.allclose(*references, rtol=0, atol=1e-5)
    for name, value in adapters[0].items():
        assert float((value - adapters[1][name]).norm()) <= 1e-4 * float(value.norm()), name


# --- weights outwards ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gpt2"], ids=["tied", "untied", "transposed layers"])
def test_weights_go_out_merged_under_the_names_of_the_plain_model(
    write_model: Callable[..., str], make_engine: Callable[..., LoraEngine], trained: Callable[[str], Path], kind: str
) -> None:
    base = write_model(kind)
    start = trained(base)
    merged = with_peft(base, start).merge_and_unload()
    out = dict(make_engine(base, start).full_weights())
    assert same_bits(out, {name: p.detach() for name, p in merged.named_parameters()})


def test_an_adapter_on_the_output_layer_is_merged_into_it(
    write_model: Callable[..., str], make_engine: Callable[..., LoraEngine], batch: PPOBatch, tmp_path: Path
) -> None:
    base = write_model("llama")
    engine = make_engine(base, config=lora(target_modules=["lm_head", "q_proj"]))
    update(engine, batch)
    engine.save(tmp_path, "actor")
    merged = with_peft(base, tmp_path / "actor").merge_and_unload()
    assert same_bits(dict(engine.full_weights()), {name: p.detach() for name, p in merged.named_parameters()})


# --- saved -----------------------------------------------------------------------------------------------------------


def test_a_saved_policy_is_the_adapter_alone_and_peft_opens_it_with_equal_logits(
    write_model: Callable[..., str],
    make_engine: Callable[..., LoraEngine],
    batch: PPOBatch,
    row_ids: Callable,
    tmp_path: Path,
) -> None:
    base = write_model("qwen3")
    engine = make_engine(base)
    update(engine, batch)
    engine.save(tmp_path, "actor")
    assert {path.name for path in (tmp_path / "actor").iterdir()} == {CONFIG_FILE, WEIGHTS_FILE, "governor_base.json"}
    weights = load_file(tmp_path / "actor" / WEIGHTS_FILE)
    assert all(".lora_A.weight" in name or ".lora_B.weight" in name for name in weights)
    states = load_file(tmp_path / "actor_optimizer.safetensors")
    assert all(".default." in name for name in states)
    mask = batch.response_mask
    with torch.no_grad():
        ours, theirs = log_probs(engine, batch), log_probs_of(with_peft(base, tmp_path / "actor"), batch, row_ids)
    assert torch.allclose(ours[mask], theirs[mask], rtol=0, atol=1e-5)


@pytest.mark.parametrize("with_reference", [False, True])
def test_going_on_from_a_saved_adapter_is_bitwise_going_on(
    write_model: Callable[..., str],
    make_engine: Callable[..., LoraEngine],
    trained: Callable[[str], Path],
    batch: PPOBatch,
    tmp_path: Path,
    with_reference: bool,
) -> None:
    base = write_model("qwen3")
    start = trained(base)
    reference = start if with_reference else None
    first = make_engine(base, start, reference)
    for _ in range(2):
        update(first, batch)
    first.save(tmp_path, "actor")
    second = make_engine(base, tmp_path / "actor", reference)
    second.load_optimizer(tmp_path, "actor")
    assert same_bits(parameters(first), parameters(second))
    for engine in (first, second):
        update(engine, batch)
    assert same_bits(parameters(first), parameters(second))


# --- the first adapter -----------------------------------------------------------------------------------------------


def test_a_fresh_adapter_is_a_function_of_the_seed_and_draws_nothing(
    write_model: Callable[..., str], make_engine: Callable[..., LoraEngine], tmp_path: Path
) -> None:
    base, state = write_model("qwen3"), torch.get_rng_state()
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        prepare_adapter(CONFIG.model, base, tmp_path / name, seed=seed)
    make_engine(base, tmp_path / "a", tmp_path / "a")
    assert torch.equal(torch.get_rng_state(), state)
    a, b, c = (load_file(tmp_path / name / WEIGHTS_FILE) for name in "abc")
    assert same_bits(a, b)
    assert not same_bits(a, c)
    for name, value in a.items():
        if "lora_A" in name:  # the standard deviation of a uniform of width 2/sqrt(in)
            assert float(value.std()) == pytest.approx((3 * value.shape[1]) ** -0.5, rel=0.15)
            assert float(value.abs().max()) <= value.shape[1] ** -0.5
        else:
            assert not value.any()


def test_an_adapter_of_an_earlier_configuration_is_replaced(write_model: Callable[..., str], tmp_path: Path) -> None:
    """A start that failed may have left one in the run directory."""
    for rank in (2, 8):
        prepare_adapter(lora(lora_rank=rank), write_model("qwen3"), tmp_path / "adapter", seed=1)
    assert json.loads((tmp_path / "adapter" / CONFIG_FILE).read_text())["r"] == 8


@pytest.mark.parametrize(
    ("changes", "kinds", "count"),
    [
        ({}, {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}, 14),
        ({"target_modules": ["q_proj", "v_proj"]}, {"q_proj", "v_proj"}, 4),
        (
            {"target_modules": r".*layers\.1\..*_proj"},
            {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
            7,
        ),
        ({"exclude_modules": ["down_proj", "up_proj", "gate_proj"]}, {"q_proj", "k_proj", "v_proj", "o_proj"}, 8),
    ],
    ids=["all-linear", "names", "expression", "left out"],
)
def test_the_named_layers_get_an_adapter(
    write_model: Callable[..., str], tmp_path: Path, changes: dict, kinds: set[str], count: int
) -> None:
    base = write_model("qwen3")
    adapter = prepare_adapter(lora(**changes), base, tmp_path / "adapter", seed=1)
    assert {name.rsplit(".", 1)[-1] for name in adapter.layers} == kinds
    assert len(adapter.layers) == count
    weights = load_file(tmp_path / "adapter" / WEIGHTS_FILE)
    assert adapter.num_trained == sum(value.numel() for value in weights.values())
    assert adapter.num_base == sum(p.numel() for p in with_peft(base, None).parameters())


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("qwen3", {"target_modules": ["q_proj", "qproj"]}, r"target_modules=\['q_proj', 'qproj'\]: no module is named qproj\. .* are down_proj, gate_proj"),
        ("qwen3", {"exclude_modules": ["mlpp"]}, r"exclude_modules=\['mlpp'\]: no module is named mlpp"),
        ("qwen3", {"target_modules": "nothing.*"}, r"target_modules=nothing\.\*: "),
        ("qwen3", {"target_modules": "q_proj"}, r"target_modules=q_proj: the expression must match a whole name, as model\.layers\.0\.self_attn\.q_proj is"),
        ("qwen3", {"target_modules": "*_proj"}, r"target_modules=\*_proj: is no regular expression: nothing to repeat"),
        ("qwen3", {"exclude_modules": "down_proj"}, r"exclude_modules=down_proj: the expression must match a whole name"),
        ("qwen3", {"target_modules": ["norm"]}, r"target_modules=\['norm'\]: "),
        ("qwen3", {"target_modules": ["embed_tokens"]}, r"embed_tokens is no linear layer"),
        ("qwen3", {"target_modules": ["lm_head"]}, r"lm_head shares its weights with the embeddings\. The .* down_proj, .*, lm_head, o_proj"),
    ],
)  # fmt: skip
def test_modules_that_cannot_have_an_adapter_are_told_with_those_that_can(
    write_model: Callable[..., str], tmp_path: Path, kind: str, changes: dict, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare_adapter(lora(**changes), write_model(kind), tmp_path / "adapter", seed=1)


def test_without_peft_the_extra_is_named(
    write_model: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"lora_rank: LoRA needs peft.*pip install 'governor-rl\[lora\]'"):
        prepare_adapter(CONFIG.model, write_model("qwen3"), tmp_path / "adapter", seed=1)


# --- a trained adapter -----------------------------------------------------------------------------------------------


def test_a_trained_adapter_of_pefts_own_is_taken_and_saved_with_its_base(
    write_model: Callable[..., str], make_engine: Callable[..., LoraEngine], tmp_path: Path
) -> None:
    import peft

    base = write_model("qwen3")
    config = peft.LoraConfig(
        r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, task_type="CAUSAL_LM"
    )
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(tmp_path / "theirs")
    wanted = lora(target_modules=["q_proj", "v_proj"], lora_adapter_path=str(tmp_path / "theirs"))
    adapter = prepare_adapter(wanted, base, tmp_path / "unused", seed=1)
    assert adapter.path == str(tmp_path / "theirs")
    assert not (tmp_path / "unused").exists()
    edit(tmp_path / "theirs", base_model_name_or_path="someone/somewhere")
    make_engine(base, tmp_path / "theirs", tmp_path / "theirs").save(tmp_path, "actor")
    assert json.loads((tmp_path / "actor" / CONFIG_FILE).read_text())["base_model_name_or_path"] == base
    check_base(tmp_path / "actor", base)
    with pytest.raises(ConfigError, match="made for a base with other weights"):
        check_base(tmp_path / "actor", write_model("qwen3", seed=1))


def test_a_run_goes_on_only_with_the_reference_that_it_started_with(
    write_model: Callable[..., str],
    make_engine: Callable[..., LoraEngine],
    trained: Callable[[str], Path],
    batch: PPOBatch,
    tmp_path: Path,
) -> None:
    """The folder it came from may be another run's, which has gone on since."""
    base = write_model("qwen3")
    start = trained(base)
    engine = make_engine(base, start, start)
    update(engine, batch)
    engine.save(tmp_path, "actor")
    config, unused = lora(lora_adapter_path=str(start)), tmp_path / "unused"
    prepare_adapter(config, base, unused, seed=1, checkpoint=tmp_path / "actor")
    shutil.copy(tmp_path / "actor" / WEIGHTS_FILE, start)
    with pytest.raises(ConfigError, match="is not the one that the run started from"):
        prepare_adapter(config, base, unused, seed=1, checkpoint=tmp_path / "actor")
    prepare_adapter(config, base, unused, seed=1)


def edit(folder: Path, **changes: object) -> None:
    path = folder / CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "spoil", "message"),
    [
        ({"lora_rank": 8}, None, r"lora_rank=8: the adapter in .* has 4; set actor_rollout_ref\.model\.lora_rank=4"),
        ({"lora_alpha": 32}, None, r"lora_alpha=32: the adapter in .* has 16"),
        ({"target_modules": ["q_proj"]}, None, r"is on other layers, by its target_modules="),
        ({}, lambda folder: edit(folder, use_dora=True), r"use_dora=True is not supported"),
        ({}, lambda folder: edit(folder, init_lora_weights="pissa"), r"init_lora_weights='pissa' is not supported"),
        ({}, lambda folder: edit(folder, rank_pattern={"q_proj": 2}), r"rank_pattern=.* is not supported"),
        ({}, lambda folder: edit(folder, peft_type="IA3"), r"of type .*IA3"),
        ({}, lambda folder: (folder / WEIGHTS_FILE).unlink(), r"holds no adapter in peft's format"),
        ({}, lambda folder: (folder / CONFIG_FILE).write_text("{"), r"holds no adapter in peft's format"),
    ],
    ids=["rank", "alpha", "layers", "dora", "pissa", "rank pattern", "another kind", "no weights", "broken"],
)  # fmt: skip
def test_an_adapter_that_does_not_fit_is_refused_with_what_to_set(
    write_model: Callable[..., str], tmp_path: Path, changes: dict, spoil: Callable[[Path], object] | None, message: str
) -> None:
    base, folder = write_model("qwen3"), tmp_path / "adapter"
    prepare_adapter(CONFIG.model, base, folder, seed=1)
    if spoil is not None:
        spoil(folder)
    with pytest.raises(ConfigError, match=rf"lora_adapter_path={folder}: .*{message}"):
        prepare_adapter(lora(lora_adapter_path=str(folder), **changes), base, tmp_path / "unused", seed=1)


@pytest.mark.parametrize(
    ("other", "message"),
    [({"seed": 1}, "made for a base with other weights"), ({"hidden_size": 32}, "was made for another base")],
    ids=["equal shapes", "other shapes"],
)
def test_an_adapter_of_another_base_is_refused(
    write_model: Callable[..., str], tmp_path: Path, other: dict, message: str
) -> None:
    folder = tmp_path / "adapter"
    prepare_adapter(CONFIG.model, write_model("qwen3"), folder, seed=1)
    with pytest.raises(ConfigError, match=message):
        prepare_adapter(lora(lora_adapter_path=str(folder)), write_model("qwen3", **other), tmp_path / "unused", seed=1)


def test_the_fingerprint_of_a_base_stands_for_its_weights_wherever_they_lie(
    write_model: Callable[..., str], tmp_path: Path
) -> None:
    base = write_model("qwen3")
    shutil.copytree(base, tmp_path / "copy")
    assert weights_fingerprint(str(tmp_path / "copy")) == weights_fingerprint(base)
    weights = load_file(tmp_path / "copy" / "model.safetensors")
    weights["model.norm.weight"] += 1e-3
    save_file(weights, tmp_path / "copy" / "model.safetensors", metadata={"format": "pt"})
    assert weights_fingerprint(str(tmp_path / "copy")) != weights_fingerprint(base)
