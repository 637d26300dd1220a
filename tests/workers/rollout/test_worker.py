"""Which back end is made, and what is said where vLLM is not installed."""

import importlib.util
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig

from trainer.errors import ConfigError
from workers.engine.fsdp import DeviceContext
from workers.engine.models import PolicySpec
from workers.rollout.hf import HFRollout
from workers.rollout.vllm import MAX_DEFAULT_CACHE, default_cache_bytes, engine_arguments, parameter_names
from workers.rollout.worker import make_backend


@pytest.fixture
def spec(write_model: Callable[..., str]) -> PolicySpec:
    return PolicySpec(path=write_model("qwen3"), eos_token_ids=[1], pad_token_id=0)


def test_the_default_back_end_is_hf(device_context: DeviceContext, configure: Callable, spec: PolicySpec) -> None:
    assert isinstance(make_backend(device_context, configure().actor_rollout_ref, spec), HFRollout)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_its_back_end_says_what_to_install(
    device_context: DeviceContext, configure: Callable, spec: PolicySpec
) -> None:
    config = configure("actor_rollout_ref.rollout.name=vllm").actor_rollout_ref
    with pytest.raises(ConfigError, match=r"pip install 'governor-rl\[vllm\]'.*scripts/vllm_cpu_env"):
        make_backend(device_context, config, spec)


@pytest.mark.parametrize(
    ("tokens", "sequences", "expected"),
    [
        # A block is 128 tokens x 2 (keys, values) x 1 head x 32 x 2 layers x 4 bytes = 64 KiB; one more is vLLM's own.
        (128, 3, 4 * 65536),
        (129, 3, 7 * 65536),
        (128, 10**6, MAX_DEFAULT_CACHE),
        (128 * 20000, 1, 20001 * 65536),  # a sequence that alone needs more than the bound
    ],
)
def test_the_default_cache_on_cpu_holds_all_sequences_up_to_a_bound(
    write_model: Callable[..., str], tokens: int, sequences: int, expected: int
) -> None:
    config = AutoConfig.from_pretrained(write_model("qwen3"))
    assert default_cache_bytes(config, torch.float32, tokens=tokens, sequences=sequences) == expected


def test_gpus_that_share_an_engine_do_not_use_its_own_all_reduce(
    device_context: DeviceContext,
    configure: Callable,
    spec: PolicySpec,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It looks for a second GPU in a process that sees one. What a run on GPUs hands over; nothing of it is run here."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")
    gpu = replace(device_context, device=torch.device("cuda"), world_size=2)
    hf_config = AutoConfig.from_pretrained(spec.path)
    for size in (1, 2):
        tp = f"actor_rollout_ref.rollout.tensor_model_parallel_size={size}"
        config = configure("actor_rollout_ref.rollout.name=vllm", "trainer.n_gpus_per_node=2", tp).actor_rollout_ref
        arguments = engine_arguments(gpu, config, spec, hf_config)
        assert arguments.get("disable_custom_all_reduce", False) == (size == 2)


@pytest.mark.parametrize("tied", [True, False])
def test_a_push_must_bring_the_parameters_of_the_model_a_tied_one_once(
    write_model: Callable[..., str], read_weights: Callable, tied: bool
) -> None:
    folder = write_model("llama", tie_word_embeddings=tied)
    names = parameter_names(AutoConfig.from_pretrained(folder), trust_remote_code=False)
    assert names == set(read_weights(folder))
    assert ("lm_head.weight" in names) != tied
