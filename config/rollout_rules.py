"""Rules of the rollout: sampling, its back end, and the correction of a sampler that is not quite the policy."""

import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from config.faults import Fault, shown
from config.pools import pool_key, pools_of, role_pools
from config.schema import GovernorConfig, RolloutConfig, RolloutCorrectionConfig, bounds_of

# Keys of rollout that the back end vllm alone reads.
VLLM_KEYS = (
    "tensor_model_parallel_size", "gpu_memory_utilization", "enforce_eager", "free_cache_engine", "enable_prefix_caching",
    "max_model_len", "max_num_batched_tokens",
)  # fmt: skip
# Arguments of vLLM's engine that follow from other keys, or from how it is run here.
RESERVED_ENGINE_KWARGS = {
    "model": "actor_rollout_ref.model.path",
    "tokenizer": "actor_rollout_ref.model.tokenizer_path",
    "trust_remote_code": "actor_rollout_ref.model.trust_remote_code",
    "hf_overrides": "actor_rollout_ref.model.override_config",
    "seed": "data.seed",
    "enable_sleep_mode": "actor_rollout_ref.rollout.free_cache_engine",
    "tensor_parallel_size": "actor_rollout_ref.rollout.tensor_model_parallel_size",
    **{
        name: f"actor_rollout_ref.rollout.{name}"
        for name in (
            "dtype", "max_num_seqs", "max_model_len", "max_num_batched_tokens", "enforce_eager", "enable_prefix_caching",
            "gpu_memory_utilization",
        )
    },
    **dict.fromkeys(
        (
            "distributed_executor_backend", "generation_config", "load_format", "logprobs_mode", "skip_tokenizer_init",
            "data_parallel_size", "pipeline_parallel_size", "runner", "worker_cls",
        )
    ),
}  # fmt: skip
GROUP_ESTIMATORS = ("grpo", "rloo", "reinforce_plus_plus_baseline")


def sampling_rules(config: GovernorConfig) -> Iterator[Fault]:
    """Rules of how responses are drawn, in training and validation."""
    algorithm, rollout = config.algorithm, config.actor_rollout_ref.rollout
    if algorithm.adv_estimator in GROUP_ESTIMATORS and rollout.n == 1:
        yield Fault(
            "actor_rollout_ref.rollout.n",
            1,
            f"algorithm.adv_estimator={algorithm.adv_estimator} compares the responses to a prompt: use n of 2 or more",
        )
    val = rollout.val_kwargs
    if val.n > 1 and (not val.do_sample or val.temperature == 0 or val.top_k == 1):
        yield Fault(
            "actor_rollout_ref.rollout.val_kwargs.n",
            val.n,
            "greedy decoding gives the same response each time: use n=1, or do_sample=true with a temperature above 0 "
            "and a top_k other than 1",
        )


def correction_rules(config: GovernorConfig) -> Iterator[Fault]:
    """Rules of `algorithm.rollout_correction`."""
    correction, rollout = config.algorithm.rollout_correction, config.actor_rollout_ref.rollout
    key = "algorithm.rollout_correction"
    if correction.bypass_mode:
        for name in ("rollout_is", "rollout_rs"):
            if getattr(correction, name) is not None:
                yield Fault(
                    f"{key}.{name}",
                    getattr(correction, name),
                    f"compares the policy with the sampler, which {key}.bypass_mode=true takes for the policy: set one of them off",
                )
        cuts = cuts_of(rollout)
        if cuts:
            yield Fault(
                f"{key}.bypass_mode",
                True,
                f"takes the sampler's log-probabilities for the policy's, and they are not with {cuts}: set bypass_mode=false",
            )
    if correction.rollout_rs is not None and (text := _threshold_fault(correction, correction.rollout_rs)):
        yield Fault(f"{key}.rollout_rs_threshold", correction.rollout_rs_threshold, text)
    if correction.rollout_is is None and correction.rollout_is_batch_normalize:
        yield Fault(f"{key}.rollout_is_batch_normalize", True, f"needs weights: set {key}.rollout_is=token or sequence")


def _threshold_fault(correction: RolloutCorrectionConfig, mode: str) -> str | None:
    """What is wrong with the bounds of a rejection that is on."""
    if correction.rollout_rs_threshold is None:
        bounds = (
            "a band of sampler over policy, as in 0.5_2.0"
            if mode.endswith("k1")
            else "the largest value that stays, as in 0.01"
        )
        return f"rollout_rs={mode} needs {bounds}"
    try:
        lower, upper = bounds_of(correction.rollout_rs_threshold)
    except ValueError:
        return "must be a number, or two joined by an underscore, as in 0.5_2.0"
    if not mode.endswith("k1"):
        good = lower is None and 0 < upper < math.inf
        return None if good else f"must be one number above 0 with rollout_rs={mode}"
    # 0.5_2 is the number 0.52 to Hydra: the point after the 2 makes a band of it.
    good = 1 < upper < math.inf and (lower is None or 0 < lower < 1)
    return None if good else "must be a band around 1, where sampler and policy agree, as in 0.5_2.0"


def cuts_of(rollout: RolloutConfig) -> str:
    """The settings that cut the distribution that is sampled from, as overrides; empty for none."""
    cuts = {"top_k": rollout.top_k > 0, "top_p": rollout.top_p < 1, "min_p": rollout.min_p > 0}
    return " ".join(
        f"actor_rollout_ref.rollout.{name}={shown(getattr(rollout, name))}" for name, cut in cuts.items() if cut
    )


def engine_rules(config: GovernorConfig) -> Iterator[Fault]:
    """Rules of the rollout's back end."""
    rollout, prefix = config.actor_rollout_ref.rollout, "actor_rollout_ref.rollout"
    for key, source, value in (
        ("prompt_length", "max_prompt_length", config.data.max_prompt_length),
        ("response_length", "max_response_length", config.data.max_response_length),
    ):
        if getattr(rollout, key) != value:
            yield Fault(f"{prefix}.{key}", getattr(rollout, key), f"follows data.{source}={value}: set that one")
    if rollout.name != "vllm":
        shipped = _shipped_rollout()
        changed = {
            f"{prefix}.{key}": getattr(rollout, key) for key in VLLM_KEYS if getattr(rollout, key) != shipped[key]
        }
        changed |= {f"{prefix}.engine_kwargs.vllm.{key}": value for key, value in rollout.engine_kwargs.vllm.items()}
        for key, value in changed.items():
            yield Fault(key, value, f"is read by vllm alone: drop it, or choose {prefix}.name=vllm")
        return
    yield from _vllm_rules(config, rollout, prefix)


def _vllm_rules(config: GovernorConfig, rollout: RolloutConfig, prefix: str) -> Iterator[Fault]:
    for name, key in RESERVED_ENGINE_KWARGS.items():
        if name in rollout.engine_kwargs.vllm:
            way_out = f"use {key}" if key else "is set by Governor; drop it"
            yield Fault(f"{prefix}.engine_kwargs.vllm.{name}", rollout.engine_kwargs.vllm[name], way_out)
    longest = rollout.prompt_length + rollout.response_length
    if rollout.max_model_len is not None and rollout.max_model_len < longest:
        yield Fault(
            f"{prefix}.max_model_len",
            rollout.max_model_len,
            f"must hold data.max_prompt_length + data.max_response_length = {longest} tokens",
        )
    if rollout.max_num_batched_tokens < rollout.max_num_seqs:
        yield Fault(
            f"{prefix}.max_num_batched_tokens",
            rollout.max_num_batched_tokens,
            f"must hold a token of each of {prefix}.max_num_seqs={rollout.max_num_seqs} responses",
        )
    for key, temperature in (
        ("temperature", rollout.temperature),
        ("val_kwargs.temperature", rollout.val_kwargs.temperature),
    ):
        if 0 < temperature < 0.01:
            yield Fault(f"{prefix}.{key}", temperature, "vLLM samples at 0.01 below that: use 0.01 or more, or name=hf")
    name, size = role_pools(config)["rollout"], rollout.tensor_model_parallel_size
    pool = pools_of(config).get(name)  # none if there is a fault about it
    if pool is not None and pool.n_gpus_per_node % size:
        yield Fault(
            f"{prefix}.tensor_model_parallel_size",
            size,
            f"must divide {pool_key(name)}.n_gpus_per_node={pool.n_gpus_per_node}, a node's devices",
        )
    if (
        config.trainer.device == "cpu"
        and rollout.gpu_memory_utilization != _shipped_rollout()["gpu_memory_utilization"]
    ):
        yield Fault(
            f"{prefix}.gpu_memory_utilization",
            rollout.gpu_memory_utilization,
            f"has no effect with trainer.device=cpu: use {prefix}.engine_kwargs.vllm.kv_cache_memory_bytes",
        )


@cache
def _shipped_rollout() -> dict[str, Any]:
    return yaml.safe_load((Path(__file__).parent / "rollout" / "default.yaml").read_text(encoding="utf-8"))
