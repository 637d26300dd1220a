"""Figures from chunks of tokens against those from whole logits: values, gradients, bits, and that whole logits never exist."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from trainer.errors import ConfigError
from trainer.ppo.core_algos import entropy_from_logits, log_prob_from_logits
from trainer.ppo.limiters import logit_geometry
from workers.engine.chunked import LanguageModelHead, TokenFigures, chunks, logit_gradient, token_figures
from workers.engine.models import PolicyModel, PolicyOutput

KINDS = ["qwen3", "llama", "gemma2", "granite", "cohere", "gpt2"]
TEMPERATURE = 0.7
ROWS, LENGTH, RESPONSE = 3, 9, 4
CHUNK = 5  # of 12 tokens: three chunks of 4
GENERATOR = torch.Generator().manual_seed(0)
IDS = torch.randint(2, 41, (ROWS, LENGTH), generator=GENERATOR)
POSITIONS = torch.tensor([[2, 3, 4, 5], [0, 1, 2, 3], [4, 5, 6, 7]])
LABELS = torch.randint(2, 41, (ROWS, RESPONSE), generator=GENERATOR)
WEIGHTS = torch.linspace(-1, 2, LABELS.numel(), dtype=torch.float64).view(LABELS.shape)


def load(path: str, chunk_size: int | None, dtype: torch.dtype = torch.float64) -> PolicyModel:
    return PolicyModel.load(
        path, dtype=dtype, override_config={}, trust_remote_code=False, logits_chunk_size=chunk_size
    )


def run(model: PolicyModel) -> PolicyOutput:
    return model(IDS, POSITIONS, LABELS, TEMPERATURE, with_entropy=True, with_geometry=True)


def gradients(model: PolicyModel, output: PolicyOutput) -> dict[str, Tensor]:
    loss = output.log_prob * WEIGHTS.to(output.log_prob.dtype) + 0.3 * output.entropy * WEIGHTS.flip(0).to(
        output.log_prob.dtype
    )
    loss.sum().backward()
    return {name: parameter.grad for name, parameter in model.model.named_parameters()}


def figures(output: PolicyOutput) -> dict[str, Tensor]:
    assert output.entropy is not None
    assert output.geometry is not None
    assert output.geometry.entropy is not None
    return {
        "log_prob": output.log_prob,
        "entropy": output.entropy,
        "others": output.geometry.others,
        "geometry entropy": output.geometry.entropy,
    }


@pytest.mark.parametrize("kind", KINDS)
def test_in_float64_figures_and_every_gradient_equal_those_of_whole_logits(
    write_model: Callable[..., str], kind: str
) -> None:
    """Scaled, capped and tied models among them: what a model does to its logits after the output layer stays."""
    whole, chunked = (load(write_model(kind), size) for size in (None, CHUNK))
    expected, output = run(whole), run(chunked)
    for (name, one), other in zip(figures(output).items(), figures(expected).values(), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12), name
    expected_gradients, found = gradients(whole, expected), gradients(chunked, output)
    assert expected_gradients.keys() == found.keys()
    for name, gradient in expected_gradients.items():
        assert float(gradient.abs().max()) > 1e-3, name
        assert torch.allclose(found[name], gradient, rtol=0, atol=1e-10), name


@pytest.mark.parametrize("size", [1, 3, 12, 100])
def test_the_chunks_size_changes_figures_by_rounding_alone(write_model: Callable[..., str], size: int) -> None:
    path = write_model("qwen3")
    expected, output = (run(load(path, chunk, torch.float32)) for chunk in (CHUNK, size))
    for (name, one), other in zip(figures(output).items(), figures(expected).values(), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-5), name


def test_scoring_and_update_give_the_same_bits(write_model: Callable[..., str]) -> None:
    """With entropy and geometry or without, with gradients or without: else the first ratio would not be 1."""
    model = load(write_model("qwen3"), CHUNK, torch.float32)
    updating = run(model)
    with torch.no_grad():
        scoring = model(IDS, POSITIONS, LABELS, TEMPERATURE, with_entropy=True)
        reference = model(IDS, POSITIONS, LABELS, TEMPERATURE)
    assert updating.log_prob.requires_grad
    assert torch.equal(updating.log_prob, scoring.log_prob)
    assert torch.equal(updating.log_prob, reference.log_prob)
    assert torch.equal(updating.entropy, scoring.entropy)
    assert scoring.geometry is None
    assert reference.entropy is None


def test_no_more_logits_than_a_chunk_exist_at_once_in_forward_and_backward(write_model: Callable[..., str]) -> None:
    model = load(write_model("llama"), CHUNK)
    seen: list[int] = []
    model.model.get_output_embeddings().register_forward_hook(lambda module, args, output: seen.append(output.numel()))
    output = run(model)
    in_forward = list(seen)
    gradients(model, output)
    assert in_forward == [4 * 41] * 3
    assert seen == in_forward * 2


def test_nothing_as_large_as_the_logits_is_kept_for_the_backward(write_model: Callable[..., str]) -> None:
    def largest_kept(chunk_size: int | None) -> int:
        model, kept = load(write_model("llama", vocab_size=1000), chunk_size), []
        weights = {parameter.data_ptr() for parameter in model.parameters()}

        def keep(tensor: Tensor) -> Tensor:
            if tensor.data_ptr() not in weights:
                kept.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            run(model)
        return max(kept)

    logits = LABELS.numel() * 1000
    assert largest_kept(None) >= logits
    assert largest_kept(CHUNK) < logits / 3


def test_frozen_parameters_get_no_gradient_and_change_none_of_the_others(write_model: Callable[..., str]) -> None:
    """As with an adapter: the output layer is frozen, the body is trained."""
    expected = gradients(whole := load(write_model("llama"), None), run(whole))
    model = load(write_model("llama"), CHUNK)
    model.model.lm_head.weight.requires_grad_(False)
    found = gradients(model, run(model))
    assert found.pop("lm_head.weight") is None
    for name, gradient in found.items():
        assert torch.allclose(gradient, expected[name], rtol=0, atol=1e-10), name


def test_an_output_layer_alone_can_be_trained(write_model: Callable[..., str]) -> None:
    expected = gradients(whole := load(write_model("llama"), None), run(whole))
    model = load(write_model("llama"), CHUNK)
    model.model.model.requires_grad_(False)
    found = gradients(model, run(model))
    assert torch.allclose(found["lm_head.weight"], expected["lm_head.weight"], rtol=0, atol=1e-10)


@pytest.mark.parametrize("by", ["log_prob", "entropy"])
def test_a_loss_of_one_figure_alone_has_its_gradient(write_model: Callable[..., str], by: str) -> None:
    found = []
    for size in (None, CHUNK):
        model = load(write_model("gemma2"), size)
        figures(run(model))[by].sum().backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in found[0].items():
        assert torch.allclose(found[1][name], gradient, rtol=0, atol=1e-10), name


@pytest.mark.parametrize(("tokens", "size"), [(12, 5), (11, 5), (5, 5), (6, 5), (1, 5), (7, 1)])
def test_chunks_are_few_even_and_together_all_tokens(tokens: int, size: int) -> None:
    lengths = [len(range(tokens)[part]) for part in chunks(tokens, size)]
    assert [token for part in chunks(tokens, size) for token in range(tokens)[part]] == list(range(tokens))
    assert len(lengths) == -(-tokens // size)
    assert max(lengths) <= size
    assert max(lengths) - min(lengths) <= 1


# --- the formulas ----------------------------------------------------------------------------------------------------


def logits_of(kind: str) -> Tensor:
    logits = torch.randn(7, 41, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    if kind == "forbidden":
        logits[:, 3:9] = float("-inf")
    scale = {"flat": 1e-4, "peaked": 60.0}.get(kind, 2.0)
    return logits * scale


@pytest.mark.parametrize("kind", ["usual", "flat", "peaked", "forbidden"])
def test_figures_in_one_pass_equal_the_formulas(kind: str) -> None:
    logits, labels = logits_of(kind), torch.arange(10, 17)
    found = token_figures(logits, labels, TEMPERATURE, with_entropy=True, with_geometry=True)
    assert torch.allclose(found.log_prob, log_prob_from_logits(logits, labels, TEMPERATURE), rtol=1e-12, atol=1e-12)
    assert torch.allclose(found.entropy, entropy_from_logits(logits, TEMPERATURE), rtol=1e-9, atol=1e-12)
    geometry = logit_geometry(logits, labels, TEMPERATURE, with_entropy=True)
    assert torch.equal(found.others, geometry.others)
    assert torch.equal(found.geometry_entropy, geometry.entropy)


@pytest.mark.parametrize("kind", ["usual", "flat", "peaked", "forbidden"])
def test_the_gradient_at_the_logits_is_autograds(kind: str) -> None:
    logits, labels = logits_of(kind), torch.arange(10, 17)
    d_log_prob, d_entropy = torch.randn(2, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    leaf = logits.clone().requires_grad_()
    scaled = leaf / TEMPERATURE
    p = torch.softmax(scaled, -1)
    log_p = torch.log_softmax(scaled, -1)
    entropy = -(p * torch.where(torch.isinf(log_p), 0.0, log_p)).sum(-1)
    loss = d_log_prob * log_p[torch.arange(7), labels] + d_entropy * entropy
    (expected,) = torch.autograd.grad(loss.sum(), leaf)
    figures = token_figures(logits, labels, TEMPERATURE, with_entropy=True, with_geometry=False)
    found = logit_gradient(logits, labels, TEMPERATURE, figures, d_log_prob, d_entropy)
    assert torch.allclose(found, expected, rtol=1e-9, atol=1e-12)


def test_half_precision_logits_have_figures_in_float32_and_a_gradient_in_their_own() -> None:
    logits, labels = logits_of("usual").bfloat16(), torch.arange(10, 17)
    figures = token_figures(logits, labels, 1.0, with_entropy=True, with_geometry=False)
    assert {figures.log_prob.dtype, figures.log_sum.dtype, figures.entropy.dtype} == {torch.float32}
    ones = torch.ones(7)
    assert logit_gradient(logits, labels, 1.0, figures, ones, ones).dtype == torch.bfloat16


# --- models that cannot be cut ---------------------------------------------------------------------------------------


def test_a_model_without_a_body_of_its_own_is_refused_with_the_way_out() -> None:
    class Flat(nn.Module):
        @property
        def base_model(self) -> nn.Module:
            return self

    with pytest.raises(ConfigError, match=r"logits_chunk_size: Flat has no body .* set it to null"):
        LanguageModelHead(Flat())


def test_a_model_that_makes_logits_without_its_body_is_refused(write_model: Callable[..., str]) -> None:
    """Its logits would be those of token 0, without a word."""
    model = AutoModelForCausalLM.from_pretrained(write_model("llama"))
    head = LanguageModelHead(model)
    hidden = head.hidden(IDS)[0]
    model.forward = lambda **inputs: SimpleNamespace(logits=torch.zeros(1, LENGTH, 41))
    with pytest.raises(ConfigError, match=r"calls its body 0 times"):
        head.logits(hidden)


def test_the_body_is_itself_again_after_an_answer(write_model: Callable[..., str]) -> None:
    model = AutoModelForCausalLM.from_pretrained(write_model("llama")).eval()
    head = LanguageModelHead(model)
    before = model(input_ids=IDS).logits
    assert torch.equal(head.logits(head.hidden(IDS)[0]), before[0])
    assert "forward" not in vars(model.model)
    assert torch.equal(model(input_ids=IDS).logits, before)


def test_a_figure_that_was_not_asked_for_is_none() -> None:
    found = token_figures(logits_of("usual"), torch.arange(7), 1.0, with_entropy=False, with_geometry=True)
    assert isinstance(found, TokenFigures)
    assert found.entropy is None
    assert found.geometry_entropy is None
    assert found.others is not None
