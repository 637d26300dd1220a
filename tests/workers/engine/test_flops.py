"""Model FLOPs utilisation, worked out by hand."""

from collections.abc import Callable

import pytest
from transformers import AutoModelForCausalLM

from workers.actor import ActorRollout
from workers.engine.flops import ModelSize, actor_mfu, model_size, peak_flops, update_flops
from workers.engine.fsdp import DeviceContext
from workers.engine.models import PolicySpec


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA A10G", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("Tesla T4", None),
    ],
)
def test_a_gpus_peak_is_found_by_whole_words(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak


SIZE = ModelSize(body=1000, trained_body=1000, head=200, trained_head=200, num_layers=2, attention_width=8)


def test_an_update_takes_6_flops_per_parameter_and_token_and_12_per_pair_of_tokens_and_width() -> None:
    # 6 · 1000 · (3 + 5) + 6 · 200 · 4 + 12 · 2 · 8 · (9 + 25)
    assert update_flops(SIZE, lengths=[3, 5], num_response_tokens=4) == 48_000 + 4_800 + 6_528


def test_a_frozen_parameter_takes_4() -> None:
    frozen = ModelSize(body=1000, trained_body=10, head=200, trained_head=0, num_layers=2, attention_width=8)
    assert update_flops(frozen, lengths=[3, 5], num_response_tokens=4) == 4020 * 8 + 4 * 200 * 4 + 6_528


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gpt2"], ids=["tied", "not tied", "gpt2"])
def test_a_models_embedding_counts_only_as_its_output_layer(write_model: Callable[..., str], kind: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(write_model(kind))
    model.get_input_embeddings().requires_grad_(False)
    size = model_size(model)
    tables = 1 if model.config.tie_word_embeddings else 2
    assert size.head == 41 * 64
    assert size.trained_head == (0 if tables == 1 else size.head)
    assert size.body == size.trained_body == model.num_parameters() - tables * size.head
    assert (size.num_layers, size.attention_width) == (2, 64)


def test_mfu_is_the_updates_arithmetic_over_what_the_devices_could_do() -> None:
    """Two devices of 1000 FLOP/s for 10 s, two passes."""
    arguments = {"lengths": [3, 5], "num_response_tokens": 4, "epochs": 2, "seconds": 10.0, "num_devices": 2}
    assert actor_mfu(SIZE, **arguments, peak=1000.0) == {"perf/mfu/actor": 2 * 59_328 / 20_000}
    assert actor_mfu(SIZE, **arguments, peak=None) == {}


def test_a_policy_on_a_cpu_knows_its_size_and_no_peak(
    device_context: DeviceContext, configure: Callable, write_model: Callable[..., str]
) -> None:
    """Its shards are counted whole."""
    path = write_model("qwen3")
    spec = PolicySpec(path=path, eos_token_ids=[1], pad_token_id=0)
    policy = ActorRollout(device_context, configure().actor_rollout_ref, spec)
    assert policy.speed() == (model_size(AutoModelForCausalLM.from_pretrained(path)), None)
