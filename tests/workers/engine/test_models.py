"""Log-probabilities, entropies and values of the engine's models against plain forwards of transformers, row by row."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from trainer.batch import PPOBatch
from trainer.errors import ConfigError
from workers.engine.models import PolicyModel, ValueModel
from workers.engine.pieces import make_piece

CPU = torch.device("cpu")
LOAD = {"dtype": torch.float32, "override_config": {}, "trust_remote_code": False}
PROMPTS, RESPONSES = [3, 7, 1, 5], [4, 2, 9, 1]


@pytest.fixture
def batch(answered: Callable[..., PPOBatch]) -> PPOBatch:
    return answered(PROMPTS, RESPONSES)


def run_policy(
    model: PolicyModel, batch: PPOBatch, temperature: float = 1.0, rows: list[int] | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies [rows, R] by the engine's model."""
    piece = make_piece(batch, np.arange(len(batch)) if rows is None else np.array(rows), CPU)
    with torch.no_grad():
        log_prob, entropy, _ = model(piece.input_ids, piece.positions, piece.labels, temperature, with_entropy=True)
    return piece.widen(log_prob), piece.widen(entropy)


def run_value(model: ValueModel, batch: PPOBatch) -> Tensor:
    piece = make_piece(batch, np.arange(len(batch)), CPU)
    with torch.no_grad():
        return piece.widen(model(piece.input_ids, piece.positions))


def widened(batch: PPOBatch, *, left: int, right: int) -> PPOBatch:
    """The same rows on a wider wire, with padding that is not 0."""
    wider = batch.clone()
    wider.prompts = torch.nn.functional.pad(batch.prompts, (left, 0), value=7)
    wider.prompt_mask = torch.nn.functional.pad(batch.prompt_mask, (left, 0))
    wider.responses = torch.nn.functional.pad(batch.responses, (0, right), value=9)
    wider.response_mask = torch.nn.functional.pad(batch.response_mask, (0, right))
    wider.loss_mask = wider.response_mask
    wider.attention_mask = torch.cat([wider.prompt_mask, wider.response_mask], dim=1)
    return wider


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("kind", ["qwen3", "llama", "gemma2", "granite", "cohere", "gpt2"])
def test_log_probs_and_entropies_equal_a_full_forward_of_transformers(
    write_model: Callable[..., str], batch: PPOBatch, row_ids: Callable, kind: str, temperature: float
) -> None:
    folder = write_model(kind)
    log_prob, entropy = run_policy(PolicyModel.load(folder, **LOAD), batch, temperature)
    # eager, since sdpa leaves the soft cap of Gemma 2's attention out
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        ids = row_ids(batch, row)
        with torch.no_grad():
            logits = plain(input_ids=torch.tensor([ids])).logits[0, prompt - 1 : -1] / temperature
        log_p = logits - logits.exp().sum(-1, keepdim=True).log()
        expected = log_p[torch.arange(response), torch.tensor(ids[prompt:])]
        assert torch.allclose(log_prob[row, :response], expected, rtol=0, atol=1e-5)
        assert torch.allclose(entropy[row, :response], -(log_p.exp() * log_p).sum(-1), rtol=0, atol=1e-5)


def test_the_capped_models_logits_are_capped_and_the_cap_is_felt(
    write_model: Callable[..., str], batch: PPOBatch
) -> None:
    """Guards the test above: without the cap the numbers would differ."""
    capped = run_policy(PolicyModel.load(write_model("gemma2"), **LOAD), batch)[0]
    free = run_policy(PolicyModel.load(write_model("gemma2", final_logit_softcapping=None), **LOAD), batch)[0]
    assert (capped - free)[batch.response_mask].abs().max() > 0.05
    # Logits within ±3: no log-probability below -6 - log(41).
    assert capped[batch.response_mask].min() > -6 - math.log(41)


@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_numbers_do_not_depend_on_padding_or_company(
    write_model: Callable[..., str], batch: PPOBatch, kind: str
) -> None:
    model = PolicyModel.load(write_model(kind), **LOAD)
    log_prob, entropy = run_policy(model, batch, 0.6)
    wide_log_prob, wide_entropy = run_policy(model, widened(batch, left=6, right=5), 0.6)
    mask = batch.response_mask
    assert torch.allclose(wide_log_prob[:, : mask.shape[1]][mask], log_prob[mask], rtol=0, atol=1e-5)
    assert torch.allclose(wide_entropy[:, : mask.shape[1]][mask], entropy[mask], rtol=0, atol=1e-5)
    for row in range(len(batch)):
        alone = run_policy(model, batch, 0.6, rows=[row])[0]
        assert torch.allclose(alone[0][mask[row]], log_prob[row][mask[row]], rtol=0, atol=1e-5)


def test_gradients_flow_in_evaluation_mode_and_equal_those_of_transformers(
    write_model: Callable[..., str], batch: PPOBatch, row_ids: Callable
) -> None:
    folder = write_model("qwen3")
    model = PolicyModel.load(folder, **LOAD)
    piece = make_piece(batch, np.arange(len(batch)), CPU)
    log_prob, *_ = model(piece.input_ids, piece.positions, piece.labels, 0.6)
    torch.where(piece.batch.response_mask, piece.widen(log_prob), 0.0).sum().backward()

    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for row, prompt in enumerate(PROMPTS):
        ids = torch.tensor(row_ids(batch, row))
        log_p = torch.log_softmax(plain(input_ids=ids[None]).logits[0, prompt - 1 : -1] / 0.6, -1)
        log_p.gather(-1, ids[prompt:, None]).sum().backward()
    expected = dict(plain.named_parameters())
    for name, parameter in model.model.named_parameters():
        reference = expected[name].grad
        assert (parameter.grad - reference).norm() <= 1e-5 * reference.norm(), name


def test_a_value_is_read_at_the_column_before_its_token(
    write_model: Callable[..., str], batch: PPOBatch, row_ids: Callable, tmp_path: Path
) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = ValueModel.load(write_model("qwen3"), **LOAD)
    model.model.save_pretrained(tmp_path)
    values = run_value(model, batch)
    plain = AutoModelForTokenClassification.from_pretrained(tmp_path, dtype=torch.float32).eval()
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        with torch.no_grad():
            columns = plain(input_ids=torch.tensor([row_ids(batch, row)])).logits[0, :, 0]
        for t in range(response):  # the state before token t ends at column prompt - 1 + t
            assert float(values[row, t]) == pytest.approx(float(columns[prompt - 1 + t]), abs=1e-5)


def test_a_value_does_not_know_its_own_token(
    write_model: Callable[..., str], answered: Callable[..., PPOBatch]
) -> None:
    model = ValueModel.load(write_model("qwen3"), **LOAD)
    batch = answered([4], [5])
    before = run_value(model, batch)
    batch.responses[0, 2] = (batch.responses[0, 2] + 1) % 41
    after = run_value(model, batch)
    assert torch.equal(after[0, :3], before[0, :3])
    assert bool((after[0, 3:] != before[0, 3:]).all())


def test_a_saved_critic_keeps_its_head(write_model: Callable[..., str], batch: PPOBatch, tmp_path: Path) -> None:
    first = ValueModel.load(write_model("llama"), **LOAD)
    first.model.save_pretrained(tmp_path)
    again = ValueModel.load(str(tmp_path), **LOAD)
    assert torch.equal(run_value(again, batch), run_value(first, batch))


@pytest.mark.parametrize(
    ("kind", "dropout"),
    [
        ("gpt2", {}),
        ("llama", {"attention_dropout": 0.5}),
        ("qwen3", {"attention_dropout": 0.5}),
    ],
)
def test_dropout_is_off_in_the_policy(
    write_model: Callable[..., str], batch: PPOBatch, kind: str, dropout: dict
) -> None:
    folder = write_model(kind, **dropout)
    saved = json.loads((Path(folder) / "config.json").read_text())
    assert 0.5 in [value for name, value in saved.items() if "dropout" in name or "pdrop" in name]
    model = PolicyModel.load(folder, **LOAD)
    piece = make_piece(batch, np.arange(len(batch)), CPU)
    # With gradients, as in an update.
    once, twice = (model(piece.input_ids, piece.positions, piece.labels, 1.0)[0] for _ in range(2))
    assert torch.equal(once, twice)
    assert once.requires_grad


def test_dropout_is_off_in_the_critic(write_model: Callable[..., str], batch: PPOBatch) -> None:
    # The dropout before the value head is 0.1 where the config has none.
    model = ValueModel.load(write_model("llama"), **LOAD)
    assert any(module.p > 0 for module in model.modules() if isinstance(module, torch.nn.Dropout))
    assert torch.equal(run_value(model, batch), run_value(model, batch))


def test_the_weights_keep_the_precision_asked_for_whatever_the_file_holds(
    write_model: Callable[..., str], tmp_path: Path
) -> None:
    AutoModelForCausalLM.from_pretrained(write_model("qwen3"), dtype=torch.bfloat16).save_pretrained(tmp_path)
    model = PolicyModel.load(str(tmp_path), **LOAD)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_override_config_reaches_the_model(write_model: Callable[..., str], batch: PPOBatch) -> None:
    changed = PolicyModel.load(
        write_model("qwen3"), **LOAD | {"override_config": {"rope_theta": 100.0, "num_hidden_layers": 1}}
    )
    assert changed.model.config.num_hidden_layers == 1
    assert len(changed.model.model.layers) == 1


def test_entropy_of_a_model_with_forbidden_tokens_is_finite(write_model: Callable[..., str], batch: PPOBatch) -> None:
    """A model that sets logits to -inf, as vocabulary padding does."""
    model = PolicyModel.load(write_model("llama"), **LOAD)
    forbidden = torch.zeros(41)
    forbidden[0] = float("-inf")
    model.model.lm_head.register_forward_hook(lambda module, args, output: output + forbidden)
    log_prob, entropy = run_policy(model, batch)
    assert bool(torch.isfinite(entropy).all())
    assert bool(torch.isfinite(log_prob[batch.response_mask]).all())


def test_a_folder_without_weights_is_named(write_model: Callable[..., str], tmp_path: Path) -> None:
    shutil.copy(Path(write_model("qwen3")) / "config.json", tmp_path)
    with pytest.raises(
        ConfigError, match=rf"^{tmp_path}: cannot be loaded with AutoModelForCausalLM: .*model.safetensors"
    ):
        PolicyModel.load(str(tmp_path), **LOAD)
    (tmp_path / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(ConfigError, match=rf"^{tmp_path}: cannot be loaded with AutoModelForCausalLM: "):
        PolicyModel.load(str(tmp_path), **LOAD)
