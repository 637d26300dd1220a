"""Rules over several keys: what triggers each alone, and what beside it passes. Notices too."""

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from config.faults import Fault, shown
from config.load import ConfigFaults, check_values, compose_values
from config.notices import notices
from config.rules import check_rules
from config.schema import GovernorConfig

ACTOR, CRITIC, ROLLOUT = "actor_rollout_ref.actor", "critic", "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
RANDOM = f"{MODEL}.random_init"
OVERLONG = "reward.reward_kwargs.overlong_buffer_cfg"
FILES = {"data.generator.name": None, "data.train_files": ["a.parquet"]}
GRPO = {"algorithm.adv_estimator": "grpo", f"{ROLLOUT}.n": 4}
ADAPTIVE = {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.type": "adaptive"}
SAMPLED_VALIDATION = {f"{ROLLOUT}.val_kwargs.n": 4, f"{ROLLOUT}.val_kwargs.do_sample": True}
POOL = {"aside": {"nnodes": 1, "n_gpus_per_node": 3}}
ROLLOUT_ASIDE = {"trainer.resource_pools": POOL, "trainer.role_pools.rollout": "aside"}
REFERENCE = {"algorithm.use_kl_in_reward": True}
DYNAMIC = {  # rows of 32 + 5 tokens
    f"{ACTOR}.use_dynamic_bsz": False,
    "critic.use_dynamic_bsz": False,
    f"{ROLLOUT}.log_prob_use_dynamic_bsz": False,
    "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": False,
}


@cache
def default_values() -> dict[str, Any]:
    base = ["experiment=null", "data.generator.name=copy", "data.max_prompt_length=32", "data.max_response_length=5"]
    base += ["data.train_batch_size=256", f"{ACTOR}.ppo_mini_batch_size=64", "trainer.n_gpus_per_node=1"]
    return compose_values([*base, "trainer.total_training_steps=120"])


def check(changes: dict[str, Any]) -> GovernorConfig:
    values = copy.deepcopy(default_values())
    for key, value in changes.items():
        *groups, name = key.split(".")
        group = values
        for part in groups:
            group = group[part]
        group[name] = value
    return check_values(values)


def fault_of(changes: dict[str, Any]) -> str:
    """The one fault of a changed default."""
    with pytest.raises(ConfigFaults) as caught:
        check(changes)
    head, *lines = str(caught.value).splitlines()
    assert head == "The configuration has 1 fault; nothing was started.", lines
    return lines[0].strip()


VLLM = {f"{ROLLOUT}.name": "vllm"}
APART = {
    "trainer.resource_pools": {"sampler": {"nnodes": 1, "n_gpus_per_node": 2}},
    "trainer.role_pools.rollout": "sampler",
}
CORRECTION = "algorithm.rollout_correction"
BAND = {f"{CORRECTION}.rollout_rs": "seq_sum_k1", f"{CORRECTION}.rollout_rs_threshold": "0.5_2.0"}
CASES = {
    "weights compare with what bypass mode replaces": (
        {f"{CORRECTION}.bypass_mode": True, f"{CORRECTION}.rollout_is": "token"},
        f"{CORRECTION}.rollout_is=token: compares the policy with the sampler, which {CORRECTION}.bypass_mode=true takes "
        "for the policy: set one of them off",
        {f"{CORRECTION}.bypass_mode": True},
    ),
    "rejection compares with what bypass mode replaces": (
        {f"{CORRECTION}.bypass_mode": True, **BAND},
        f"{CORRECTION}.rollout_rs=seq_sum_k1: compares the policy with the sampler, which {CORRECTION}.bypass_mode=true takes "
        "for the policy: set one of them off",
        BAND,
    ),
    "rejection has bounds": (
        {f"{CORRECTION}.rollout_rs": "token_k1"},
        f"{CORRECTION}.rollout_rs_threshold: rollout_rs=token_k1 needs a band of sampler over policy, as in 0.5_2.0",
        {f"{CORRECTION}.rollout_rs": "token_k1", f"{CORRECTION}.rollout_rs_threshold": 2.0},
    ),
    "rejection by divergence has a bound": (
        {f"{CORRECTION}.rollout_rs": "seq_mean_k3"},
        f"{CORRECTION}.rollout_rs_threshold: rollout_rs=seq_mean_k3 needs the largest value that stays, as in 0.01",
        {f"{CORRECTION}.rollout_rs": "seq_mean_k3", f"{CORRECTION}.rollout_rs_threshold": 0.01},
    ),
    **{
        f"a band is written {text}": (
            BAND | {f"{CORRECTION}.rollout_rs_threshold": text},
            f"{CORRECTION}.rollout_rs_threshold={text}: must be {rule}",
            BAND | {f"{CORRECTION}.rollout_rs_threshold": "0.999_1.001"},
        )
        for text, rule in {
            "wide": "a number, or two joined",
            "0.5_2.0_3.0": "a number, or two joined",
            "2.0_0.5": "a band around 1",
            "0.5": "a band around 1",
            "nan_2.0": "a band around 1",
            "0.5_inf": "a band around 1",
        }.items()
    },
    "a divergence has one bound": (
        BAND | {f"{CORRECTION}.rollout_rs": "token_k2"},
        f"{CORRECTION}.rollout_rs_threshold=0.5_2.0: must be one number above 0 with rollout_rs=token_k2",
        BAND | {f"{CORRECTION}.rollout_rs": "token_k2", f"{CORRECTION}.rollout_rs_threshold": "0.5"},
    ),
    "bypass mode needs the whole distribution": (
        {f"{CORRECTION}.bypass_mode": True, f"{ROLLOUT}.top_k": 5, f"{ROLLOUT}.top_p": 0.9},
        f"{CORRECTION}.bypass_mode=true: takes the sampler's log-probabilities for the policy's, and they are not with "
        f"{ROLLOUT}.top_k=5 {ROLLOUT}.top_p=0.9: set bypass_mode=false",
        {f"{ROLLOUT}.top_k": 5},
    ),
    "normalizing needs weights": (
        {f"{CORRECTION}.rollout_is_batch_normalize": True},
        f"{CORRECTION}.rollout_is_batch_normalize=true: needs weights: set {CORRECTION}.rollout_is=token or sequence",
        {f"{CORRECTION}.rollout_is_batch_normalize": True, f"{CORRECTION}.rollout_is": "token"},
    ),
    "the reference has no optimizer state": (
        {"actor_rollout_ref.ref.fsdp_config.optimizer_offload": True},
        "actor_rollout_ref.ref.fsdp_config.optimizer_offload=true: the reference has no optimizer: set it to false",
        {"actor_rollout_ref.ref.fsdp_config.param_offload": True, f"{ACTOR}.fsdp_config.optimizer_offload": True},
    ),
    "tokens of a prompt follow data": (
        {f"{ROLLOUT}.prompt_length": 64},
        f"{ROLLOUT}.prompt_length=64: follows data.max_prompt_length=32: set that one",
        {f"{ROLLOUT}.prompt_length": 32},
    ),
    "tokens of a response follow data": (
        {f"{ROLLOUT}.response_length": 64},
        f"{ROLLOUT}.response_length=64: follows data.max_response_length=5: set that one",
        {f"{ROLLOUT}.response_length": 5},
    ),
    "the hf back end reads no key of vLLM's": (
        {f"{ROLLOUT}.gpu_memory_utilization": 0.8},
        f"{ROLLOUT}.gpu_memory_utilization=0.8: is read by vllm alone: drop it, or choose {ROLLOUT}.name=vllm",
        {**VLLM, f"{ROLLOUT}.gpu_memory_utilization": 0.8},
    ),
    "the hf back end has no engine to pass arguments to": (
        {f"{ROLLOUT}.engine_kwargs.vllm": {"swap_space": 4}},
        f"{ROLLOUT}.engine_kwargs.vllm.swap_space=4: is read by vllm alone: drop it, or choose {ROLLOUT}.name=vllm",
        {**VLLM, f"{ROLLOUT}.engine_kwargs.vllm": {"swap_space": 4}},
    ),
    "an argument of the engine that is a key is said there": (
        {**VLLM, f"{ROLLOUT}.engine_kwargs.vllm": {"max_num_seqs": 4}},
        f"{ROLLOUT}.engine_kwargs.vllm.max_num_seqs=4: use {ROLLOUT}.max_num_seqs",
        {**VLLM, f"{ROLLOUT}.max_num_seqs": 4},
    ),
    "an argument of the engine that the weights' way depends on is refused": (
        {**VLLM, f"{ROLLOUT}.engine_kwargs.vllm": {"load_format": "auto"}},
        f"{ROLLOUT}.engine_kwargs.vllm.load_format=auto: is set by Governor; drop it",
        {**VLLM, f"{ROLLOUT}.engine_kwargs.vllm": {"block_size": 32}},
    ),
    "vLLM makes room for the longest row": (
        {**VLLM, f"{ROLLOUT}.max_model_len": 36},
        f"{ROLLOUT}.max_model_len=36: must hold data.max_prompt_length + data.max_response_length = 37 tokens",
        {**VLLM, f"{ROLLOUT}.max_model_len": 37},
    ),
    "a forward of vLLM's holds a token of each response": (
        {**VLLM, f"{ROLLOUT}.max_num_batched_tokens": 255},
        f"{ROLLOUT}.max_num_batched_tokens=255: must hold a token of each of {ROLLOUT}.max_num_seqs=256 responses",
        {**VLLM, f"{ROLLOUT}.max_num_batched_tokens": 256},
    ),
    "vLLM has a lowest temperature": (
        {**VLLM, f"{ROLLOUT}.temperature": 0.005},
        f"{ROLLOUT}.temperature=0.005: vLLM samples at 0.01 below that: use 0.01 or more, or name=hf",
        {f"{ROLLOUT}.temperature": 0.005},
    ),
    "vLLM's lowest temperature holds in validation, where 0 is greedy": (
        {**VLLM, f"{ROLLOUT}.val_kwargs.temperature": 0.005},
        f"{ROLLOUT}.val_kwargs.temperature=0.005: vLLM samples at 0.01 below that: use 0.01 or more, or name=hf",
        {**VLLM, f"{ROLLOUT}.val_kwargs.temperature": 0},
    ),
    "an engine's devices are on one node": (
        {**VLLM, f"{ROLLOUT}.tensor_model_parallel_size": 2},
        f"{ROLLOUT}.tensor_model_parallel_size=2: must divide trainer.n_gpus_per_node=1, a node's devices",
        {**VLLM, f"{ROLLOUT}.tensor_model_parallel_size": 2, "trainer.n_gpus_per_node": 4},
    ),
    "an engine's devices are on one node of the rollout's own pool": (
        {**VLLM, **APART, f"{ROLLOUT}.tensor_model_parallel_size": 4},
        f"{ROLLOUT}.tensor_model_parallel_size=4: must divide trainer.resource_pools.sampler.n_gpus_per_node=2, a node's devices",
        {**VLLM, **APART, f"{ROLLOUT}.tensor_model_parallel_size": 2},
    ),
    "a share of the GPU's memory has no effect on CPU": (
        {**VLLM, f"{ROLLOUT}.gpu_memory_utilization": 0.8, "trainer.device": "cpu"},
        f"{ROLLOUT}.gpu_memory_utilization=0.8: has no effect with trainer.device=cpu: use "
        f"{ROLLOUT}.engine_kwargs.vllm.kv_cache_memory_bytes",
        {**VLLM, f"{ROLLOUT}.gpu_memory_utilization": 0.8, "trainer.device": "cuda"},
    ),
    "a pool has a role": (
        {"trainer.resource_pools": POOL},
        "trainer.resource_pools.aside: no role lives in it: drop it, or send a role there, as in "
        "trainer.role_pools.rollout=aside",
        {"trainer.resource_pools": POOL, "trainer.role_pools.rollout": "aside"},
    ),
    "a role's pool is there": (
        {"trainer.role_pools.ref": "aside"},
        "trainer.role_pools.ref=aside: no such pool (there are: global); a new one needs "
        "trainer.resource_pools.aside.nnodes=… and trainer.resource_pools.aside.n_gpus_per_node=…",
        {"trainer.resource_pools": POOL, "trainer.role_pools.ref": "aside", **REFERENCE},
    ),
    "the actor's pool has keys of its own": (
        {"trainer.resource_pools": {"global": {"nnodes": 1, "n_gpus_per_node": 1}}},
        "trainer.resource_pools.global: is the pool of trainer.nnodes and trainer.n_gpus_per_node, where the actor lives: "
        "set those",
        {"trainer.role_pools.critic": "global"},
    ),
    "a pool's name can stand in a file's": (
        {"trainer.resource_pools": {"a/b": POOL["aside"]}, "trainer.role_pools.rollout": "a/b"},
        "trainer.resource_pools.a/b: a pool's name is at most 32 letters, digits, '_' and '-', the first a letter or digit",
        {"trainer.resource_pools": {"a-b": POOL["aside"]}, "trainer.role_pools.rollout": "a-b"},
    ),
    "rows are shared by the devices of the role's own pool": (
        {"trainer.resource_pools": POOL, "trainer.role_pools.critic": "aside"},
        "critic.ppo_mini_batch_size=64: 64 prompts x rollout.n=1 are 64 rows, which 3 devices of "
        "trainer.resource_pools.aside cannot share equally",
        {"trainer.resource_pools": POOL, "trainer.role_pools.rollout": "aside"},
    ),
    "actor's mini-batch divides the step's prompts": (
        {f"{ACTOR}.ppo_mini_batch_size": 60},
        f"{ACTOR}.ppo_mini_batch_size=60: must divide data.train_batch_size=256, the prompts of a step",
        {f"{ACTOR}.ppo_mini_batch_size": 128},
    ),
    "actor's mini-batch is no larger than the step": (
        {f"{ACTOR}.ppo_mini_batch_size": 512},
        f"{ACTOR}.ppo_mini_batch_size=512: must divide data.train_batch_size=256, the prompts of a step",
        {f"{ACTOR}.ppo_mini_batch_size": 256},
    ),
    "critic's mini-batch divides the step's prompts": (
        {"critic.ppo_mini_batch_size": 60},
        "critic.ppo_mini_batch_size=60: must divide data.train_batch_size=256, the prompts of a step",
        {**GRPO, "critic.ppo_mini_batch_size": 60},  # where there is no critic
    ),
    "devices share a mini-batch of the actor equally": (
        {"trainer.nnodes": 3, f"{ACTOR}.ppo_mini_batch_size": 32, **GRPO},
        f"{ACTOR}.ppo_mini_batch_size=32: 32 prompts x rollout.n=4 are 128 rows, which 3 devices cannot share equally",
        {"trainer.nnodes": 2, "trainer.n_gpus_per_node": 2, f"{ACTOR}.ppo_mini_batch_size": 32, **GRPO},
    ),
    "devices share a mini-batch of the critic equally": (
        {"trainer.n_gpus_per_node": 4, "critic.ppo_mini_batch_size": 2},
        "critic.ppo_mini_batch_size=2: 2 prompts x rollout.n=1 are 2 rows, which 4 devices cannot share equally",
        {"trainer.n_gpus_per_node": 4, "critic.ppo_mini_batch_size": 4},
    ),
    "actor's token budget holds the longest row": (
        {**DYNAMIC, f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.ppo_max_token_len_per_gpu": 36},
        f"{ACTOR}.ppo_max_token_len_per_gpu=36: must hold the longest row, data.max_prompt_length + "
        "data.max_response_length = 37 tokens",
        {**DYNAMIC, f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.ppo_max_token_len_per_gpu": 37},
    ),
    "critic's token budget holds the longest row": (
        {**DYNAMIC, "critic.use_dynamic_bsz": True, "critic.ppo_max_token_len_per_gpu": 36},
        "critic.ppo_max_token_len_per_gpu=36: must hold the longest row",
        {**DYNAMIC, "critic.use_dynamic_bsz": False, "critic.ppo_max_token_len_per_gpu": 36},
    ),
    "rollout's token budget holds the longest row": (
        {
            **DYNAMIC,
            f"{ROLLOUT}.log_prob_use_dynamic_bsz": True,
            f"{ROLLOUT}.log_prob_max_token_len_per_gpu": 36,
        },
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu=36: must hold the longest row",
        {
            **DYNAMIC,
            f"{ROLLOUT}.log_prob_use_dynamic_bsz": True,
            f"{ROLLOUT}.log_prob_max_token_len_per_gpu": 37,
        },
    ),
    "reference's token budget holds the longest row, where there is a reference": (
        {
            **DYNAMIC,
            f"{ACTOR}.use_kl_loss": True,
            "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": True,
            "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": 36,
        },
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=36: must hold the longest row",
        {
            **DYNAMIC,
            "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": True,
            "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": 36,
        },
    ),
    "an adapter to start from needs its rank": (
        {f"{MODEL}.lora_adapter_path": "adapter"},
        f"{MODEL}.lora_adapter_path=adapter: needs {MODEL}.lora_rank, the adapter's own",
        {f"{MODEL}.lora_adapter_path": "adapter", f"{MODEL}.lora_rank": 4, **GRPO},
    ),
    "an adapter is on some layer": (
        {f"{MODEL}.lora_rank": 4, f"{MODEL}.target_modules": []},
        f"{MODEL}.target_modules=[]: names no layer",
        {f"{MODEL}.target_modules": []},
    ),
    "with LoRA the reference computes as the actor does": (
        {f"{MODEL}.lora_rank": 4, f"{ACTOR}.use_kl_loss": True, "actor_rollout_ref.ref.fsdp_config.dtype": "float64"},
        "actor_rollout_ref.ref.fsdp_config.dtype=float64: with LoRA the reference is the actor's model without its adapter: "
        f"drop it, or set it to {ACTOR}.fsdp_config.dtype=bfloat16",
        {f"{MODEL}.lora_rank": 4, "actor_rollout_ref.ref.fsdp_config.dtype": "float64"},  # where there is no reference
    ),
    "there are rows to train on": (
        {"data.generator.name": None},
        "data.train_files=[]: name a file to train on, or choose a task with data.generator.name",
        FILES,
    ),
    "rows come from files or from a generator": (
        {"data.train_files": ["a.parquet"]},
        "data.generator.name=copy: excludes data.train_files: set the one to null or the other to []",
        {"data.val_files": ["a.parquet"]},
    ),
    "some training rows are left": (
        {"data.train_max_samples": 0},
        "data.train_max_samples=0: leaves no row",
        {"data.train_max_samples": 1},
    ),
    "some validation rows are left": (
        {"data.val_max_samples": 0},
        "data.val_max_samples=0: leaves no row",
        {"data.val_max_samples": -1},
    ),
    "the template's own arguments stay": (
        {"data.apply_chat_template_kwargs": {"tokenize": False}},
        "data.apply_chat_template_kwargs.tokenize=false: is set by Governor; drop it",
        {"data.apply_chat_template_kwargs": {"enable_thinking": False}},
    ),
    "the seed fits torch": ({"data.seed": 2**63}, f"data.seed={2**63}: must be below 2**63", {"data.seed": 2**63 - 1}),
    "heads of the random model share their keys equally": (
        {f"{RANDOM}.num_attention_heads": 4, f"{RANDOM}.num_key_value_heads": 3},
        f"{RANDOM}.num_key_value_heads=3: must divide num_attention_heads=4",
        {f"{RANDOM}.num_attention_heads": 4, f"{RANDOM}.num_key_value_heads": 2},
    ),
    "heads of the random model can be rotated": (
        {f"{RANDOM}.head_dim": 33},
        f"{RANDOM}.head_dim=33: must be even",
        {f"{RANDOM}.head_dim": 34},
    ),
    "the random model has a token for every digit to copy": (
        {f"{RANDOM}.alphabet": "01245", "data.generator.max_digit": 4},
        f"{RANDOM}.alphabet=01245: lacks 3, which data.generator.name=copy asks for: add them",
        {f"{RANDOM}.alphabet": "01234", "data.generator.max_digit": 4},
    ),
    "the random model has a token for every digit of a sum": (
        {f"{RANDOM}.alphabet": "01234567", "data.generator.name": "addition", "data.generator.max_digit": 4},
        f"{RANDOM}.alphabet=01234567: lacks 8, 9, which data.generator.name=addition asks for: add them",
        {f"{RANDOM}.alphabet": "", **FILES},
    ),
    "the random model has its own tokenizer": (
        {"actor_rollout_ref.model.tokenizer_path": "/t"},
        "actor_rollout_ref.model.tokenizer_path=/t: needs actor_rollout_ref.model.path",
        {"actor_rollout_ref.model.tokenizer_path": "/t", "actor_rollout_ref.model.path": "/m"},
    ),
    "the random model's critic is of its own kind": (
        {"critic.model.path": "/c"},
        "critic.model.path=/c: needs actor_rollout_ref.model.path",
        {"critic.model.path": "/c", "actor_rollout_ref.model.path": "/m"},
    ),
    "a model from a folder leaves the random one unchecked": (
        {f"{RANDOM}.head_dim": 33},
        f"{RANDOM}.head_dim=33: must be even",
        {f"{RANDOM}.head_dim": 33, f"{RANDOM}.alphabet": "", "actor_rollout_ref.model.path": "/m"},
    ),
    **{
        f"{estimator} compares several responses": (
            {"algorithm.adv_estimator": estimator},
            f"{ROLLOUT}.n=1: algorithm.adv_estimator={estimator} compares the responses to a prompt: use n",
            {"algorithm.adv_estimator": estimator, f"{ROLLOUT}.n": 2},
        )
        for estimator in ("grpo", "rloo", "reinforce_plus_plus_baseline")
    },
    "greedy validation has one response": (
        {f"{ROLLOUT}.val_kwargs.n": 2},
        f"{ROLLOUT}.val_kwargs.n=2: greedy decoding gives the same response each time",
        SAMPLED_VALIDATION,
    ),
    "validation at temperature 0 has one response": (
        {**SAMPLED_VALIDATION, f"{ROLLOUT}.val_kwargs.temperature": 0.0},
        f"{ROLLOUT}.val_kwargs.n=4: greedy decoding",
        {**SAMPLED_VALIDATION, f"{ROLLOUT}.val_kwargs.temperature": 0.1},
    ),
    "validation from the one likeliest token has one response": (
        {**SAMPLED_VALIDATION, f"{ROLLOUT}.val_kwargs.top_k": 1},
        f"{ROLLOUT}.val_kwargs.n=4: greedy decoding",
        {**SAMPLED_VALIDATION, f"{ROLLOUT}.val_kwargs.top_k": 2},
    ),
    "an adaptive coefficient cannot reach 0 in one step": (
        {**ADAPTIVE, "algorithm.kl_ctrl.horizon": 51.2},  # 256 rows
        "algorithm.kl_ctrl.horizon=51.2: must be above 51.2, a fifth of the 256 rows of a step, "
        "or one step could bring the coefficient to 0",
        {**ADAPTIVE, "algorithm.kl_ctrl.horizon": 51.3},
    ),
    "rows of a step count all responses": (
        {**ADAPTIVE, "algorithm.kl_ctrl.horizon": 100, f"{ROLLOUT}.n": 2},
        "algorithm.kl_ctrl.horizon=100.0: must be above 102.4, a fifth of the 512 rows of a step",
        {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.horizon": 100, f"{ROLLOUT}.n": 2},  # fixed
    ),
    "only a critic warms up": (
        {**GRPO, "trainer.critic_warmup": 1},
        "trainer.critic_warmup=1: algorithm.adv_estimator=grpo has no critic to warm up: set it to 0",
        {"trainer.critic_warmup": 1},
    ),
    "the warm-up leaves the actor a step": (
        {"trainer.critic_warmup": 120},
        "trainer.critic_warmup=120: leaves no step of trainer.total_training_steps=120 for the actor",
        {"trainer.critic_warmup": 119},
    ),
    "AdamW has two betas in the actor": (
        {f"{ACTOR}.optim.betas": [0.9]},
        f"{ACTOR}.optim.betas=[0.9]: needs two numbers",
        {f"{ACTOR}.optim.betas": [0.8, 0.9]},
    ),
    "AdamW has two betas in the critic": (
        {"critic.optim.betas": [0.9, 0.9, 0.9]},
        "critic.optim.betas=[0.9,0.9,0.9]: needs two numbers",
        {"critic.optim.betas": [0.0, 0.0]},
    ),
    "the project is a name": (
        {"trainer.project_name": "a/b"},
        "trainer.project_name=a/b: must be at most 100 letters, digits, '.', '_' and '-', the first a letter or digit",
        {"trainer.project_name": "a.b_c-D9"},
    ),
    **{
        f"the experiment {name!r} is no name": (
            {"trainer.experiment_name": name},
            f"trainer.experiment_name={name}".strip(),
            {"trainer.experiment_name": "x" * 100},
        )
        for name in ("../x", "", ".hidden", "_x", "-x", "a b", "ä", "x" * 101, "a\n", "a/../b")
    },
    "the run directory has a name": (
        {"trainer.default_local_dir": " "},
        "trainer.default_local_dir=: must name a folder",
        {"trainer.default_local_dir": "."},
    ),
    "validation alone needs rows": (
        {**FILES, "trainer.val_only": True},
        "trainer.val_only=true: needs data.val_files",
        {**FILES, "trainer.val_only": True, "data.val_files": ["v.parquet"]},
    ),
    "a batched function is the user's": (
        {"reward.custom_reward_function.batched": True},
        "reward.custom_reward_function.batched=true: needs reward.custom_reward_function.path",
        {},
    ),
    "the penalty of long responses is dapo's": (
        {f"{OVERLONG}.enable": True, f"{OVERLONG}.len": 5},
        f"{OVERLONG}.enable=true: needs reward.reward_manager.name=dapo",
        {"reward.reward_manager.name": "dapo", f"{OVERLONG}.enable": True, f"{OVERLONG}.len": 5},
    ),
    "the penalty's buffer is set": (
        {"reward.reward_manager.name": "dapo", f"{OVERLONG}.enable": True},
        f"{OVERLONG}.len=null: must be from 1 to data.max_response_length=5 tokens",
        {"reward.reward_manager.name": "dapo"},
    ),
    "the penalty's buffer is at most a response": (
        {"reward.reward_manager.name": "dapo", f"{OVERLONG}.enable": True, f"{OVERLONG}.len": 6},
        f"{OVERLONG}.len=6: must be from 1 to data.max_response_length=5 tokens",
        {"reward.reward_manager.name": "dapo", f"{OVERLONG}.enable": True, f"{OVERLONG}.len": 1},
    ),
    "a task is reasoning-gym's": (
        {"data.generator.task": "gcd"},
        "data.generator.task=gcd: needs data.generator.name=reasoning_gym",
        {"data.generator.name": "reasoning_gym", "data.generator.task": "gcd"},
    ),
    "a task's settings are reasoning-gym's": (
        {"data.generator.task_kwargs": {"size": 3}},
        "data.generator.task_kwargs={size:3}: needs data.generator.name=reasoning_gym",
        {},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_broken_rule_is_told_with_key_and_value_and_its_neighbour_is_legal(name: str) -> None:
    changes, message, beside = CASES[name]
    assert fault_of(changes).startswith(message)
    check(beside)


def test_all_rules_of_a_configuration_speak_at_once() -> None:
    config = check({})
    config.data.seed, config.trainer.experiment_name, config.data.train_max_samples = 2**64, "", 0
    assert {fault.key for fault in check_rules(config)} == {
        "data.seed",
        "trainer.experiment_name",
        "data.train_max_samples",
    }


# --- reward functions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"model_path": None}, "model_path=null: must be the folder of a Hugging Face sequence-classification model"),
        ({"model_path": "nowhere"}, "model_path=nowhere: must be the folder of"),
        ({"coef": 0.0}, "coef=0: leaves no reward with combine=replace"),
        (
            {"use_dynamic_bsz": True, "max_length": 64, "forward_max_token_len_per_gpu": 63},
            "forward_max_token_len_per_gpu=63: must hold the longest conversation, reward.reward_model.max_length=64 tokens",
        ),
        (
            {"fsdp_config.optimizer_offload": True},
            "fsdp_config.optimizer_offload=true: the reward model is never trained",
        ),
        ({"apply_chat_template_kwargs": {"tokenize": False}}, "apply_chat_template_kwargs.tokenize=false: is set by"),
    ],
    ids=["no model", "no folder", "no weight", "budget", "offload", "template"],
)
def test_a_reward_model_that_cannot_work_is_refused(tmp_path: Path, changes: dict[str, Any], fault: str) -> None:
    (tmp_path / "config.json").touch()
    key = "reward.reward_model"
    works = {f"{key}.enable": True, f"{key}.model_path": str(tmp_path)}
    check(works)
    check(works | {f"{key}.combine": "add", f"{key}.coef": 0.0})
    changes = {f"{key}.{name}": value for name, value in changes.items()}
    assert fault_of(works | changes).startswith(f"{key}.{fault}")
    check(changes)  # while it is off, nothing of it matters


def test_a_reward_model_in_place_of_a_users_function_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    (tmp_path / "mine.py").write_text("def score(): ...\n")
    model = {"reward.reward_model.enable": True, "reward.reward_model.model_path": str(tmp_path)}
    function = custom(tmp_path / "mine.py")
    assert "combine=replace: would leave reward.custom_reward_function.path=" in fault_of(model | function)
    check(model | function | {"reward.reward_model.combine": "add"})


def custom(path: Path, name: str = "score") -> dict[str, Any]:
    return {f"reward.custom_reward_function.{key}": value for key, value in (("path", str(path)), ("name", name))}


@pytest.mark.parametrize(
    "text",
    [
        "def score(data_source, solution_str, ground_truth, extra_info): return 1.0",
        "async def score(): return 1.0",
        "class score: ...",
        "score = lambda **kwargs: 1.0",
        "score: object = print",
        "one, (score, two) = 1, (print, 2)",
        "from os import getcwd as score",
        "from helpers import *",
        "try:\n    from fast import score\nexcept ImportError:\n    def score(): ...",
        "if True:\n    def other(): ...\nelse:\n    def score(): ...",
        "with open('x') as file:\n    score = print",
        "# -*- coding: latin-1 -*-\n\ufeff".removesuffix("\ufeff") + "def score(): 'x'",
    ],
)
def test_a_reward_function_is_found_without_running_its_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "reward.py"
    path.write_text(f"{text}\nraise SystemExit('this file was run')\n", encoding="utf-8")
    check(custom(path))
    path.write_text(text.replace("score", "other").replace("*", "x"), encoding="utf-8")
    assert fault_of(custom(path)).startswith(
        f"reward.custom_reward_function.name=score: {path} defines no such function"
    )


def test_a_reward_file_in_another_encoding_is_read(tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    path.write_bytes("# coding: latin-1\ndef score(): 'é'\n".encode("latin-1"))
    check(custom(path))
    path.write_bytes(b"\xef\xbb\xbfdef score(): ...\n")
    check(custom(path))


def test_a_missing_reward_function_is_told_with_those_that_there_are(tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    path.write_text("import os\nVALUE = 1\ndef accuracy(): ...\ndef length(): ...\n")
    assert fault_of(custom(path)) == (
        f"reward.custom_reward_function.name=score: {path} defines no such function; it has accuracy, length"
    )
    path.write_text("")
    assert fault_of(custom(path)).endswith("it has none")


SECRETS = {
    "reward.custom_reward_function.reward_kwargs": {"judge": {"api_key": "x"}, "urls": ["https://me:pass@host/v1"]},
    "ray_kwargs.ray_init": {
        "runtime_env": {"env_vars": {"HF_TOKEN": "abc", "OTHER": "hf_" + "a" * 34, "WANDB_API_KEY": "b"}}
    },
}
NO_SECRETS = {
    "reward.custom_reward_function.reward_kwargs": {
        "pad_token": "<pad>", "num_memory_tokens": 4, "api_key": None, "password": "", "secretary": "x", "url": "https://host:80/a@b",
        "keys": ["a"], "commit": "0" * 40, "tokenizer": "hf_model", "token": "</s>",
    }
}  # fmt: skip


def test_what_looks_like_a_secret_is_refused_and_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    path.write_text("def score(): ...\n")
    check(custom(path) | NO_SECRETS)
    with pytest.raises(ConfigFaults) as caught:
        check(custom(path) | SECRETS)
    lines = [line.strip() for line in str(caught.value).splitlines()[1:]]
    kwargs, env = "reward.custom_reward_function.reward_kwargs", "ray_kwargs.ray_init.runtime_env.env_vars"
    keys = [f"{kwargs}.judge.api_key", f"{kwargs}.urls", f"{env}.HF_TOKEN", f"{env}.OTHER", f"{env}.WANDB_API_KEY"]
    assert sorted(line.split(": looks like a secret, ")[0] for line in lines) == sorted(keys)
    assert "pass@" not in str(caught.value)


@pytest.mark.parametrize("content", [b"def score(:\n", b"def score(): '\xff'\n", b"def score(): ...\0\n"])
def test_a_reward_file_that_is_not_python_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "reward.py"
    path.write_bytes(content)
    assert fault_of(custom(path)).startswith(f"reward.custom_reward_function.path={path}: is not Python: ")


def test_a_coroutine_function_cannot_be_batched(tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    path.write_text("async def score(): ...\ndef plain(): ...\n")
    batched = {"reward.custom_reward_function.batched": True}
    assert fault_of(custom(path) | batched) == (
        "reward.custom_reward_function.batched=true: score is an async def, which scores row by row: set it to false, or use def"
    )
    check(custom(path))
    check(custom(path, "plain") | batched)


def test_a_reward_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "no.py", tmp_path):
        assert fault_of(custom(path)) == f"reward.custom_reward_function.path={path}: no such file"


# --- notices ---------------------------------------------------------------------------------------------------------

KL_LOSS, KL_REWARD = {f"{ACTOR}.use_kl_loss": True}, {"algorithm.use_kl_in_reward": True}
NOTICES = {
    "a correction of a cut distribution": (
        BAND | {f"{ROLLOUT}.top_p": 0.9},
        f"algorithm.rollout_correction compares whole distributions, and {ROLLOUT}.top_p=0.9 samples from a cut one",
        {f"{ROLLOUT}.top_p": 0.9},
    ),
    "bounds without a rejection": (
        {f"{CORRECTION}.rollout_rs_threshold": "0.5_2.0"},
        f"{CORRECTION}.rollout_rs_threshold=0.5_2.0 rejects nothing without {CORRECTION}.rollout_rs.",
        BAND,
    ),
    "a pool for a role that the run does not have": (
        {"trainer.resource_pools": POOL, "trainer.role_pools.ref": "aside"},
        "trainer.resource_pools.aside is not opened: none of the roles that it is for is in this run",
        {"trainer.resource_pools": POOL, "trainer.role_pools.rollout": "aside"},
    ),
    "both KL penalties": (KL_LOSS | KL_REWARD, "Two KL penalties are on: algorithm.use_kl_in_reward=true and", KL_LOSS),
    "k1 as a loss": (
        {**KL_LOSS, f"{ACTOR}.kl_loss_type": "k1"},
        f"{ACTOR}.kl_loss_type=k1 has an expected gradient of 0",
        {**KL_LOSS, f"{ACTOR}.kl_loss_type": "k1+"},
    ),
    "kl as a loss": (
        {**KL_LOSS, f"{ACTOR}.kl_loss_type": "kl"},
        f"{ACTOR}.kl_loss_type=kl has an expected gradient of 0",
        {f"{ACTOR}.kl_loss_type": "kl"},  # off
    ),
    "a KL loss of weight 0": (
        {**KL_LOSS, f"{ACTOR}.kl_loss_coef": 0.0},
        f"{ACTOR}.kl_loss_coef=0 pays for a reference policy and does nothing",
        {f"{ACTOR}.kl_loss_coef": 0.0},
    ),
    "a KL in the reward of weight 0": (
        {**KL_REWARD, "algorithm.kl_ctrl.kl_coef": 0.0},
        "algorithm.kl_ctrl.kl_coef=0 pays for a reference policy and does nothing",
        {"algorithm.kl_ctrl.kl_coef": 0.0},
    ),
    "a critic beside LoRA": (
        {f"{MODEL}.lora_rank": 4},
        "LoRA is the policy's: the critic is trained whole",
        {f"{MODEL}.lora_rank": 4, **GRPO},
    ),
    "one update per step": (
        {f"{ACTOR}.ppo_mini_batch_size": 256},
        "A step has one actor update, so the ratio is 1 and PPO's clip cannot act",
        {f"{ACTOR}.ppo_mini_batch_size": 256, f"{ACTOR}.ppo_epochs": 2},
    ),
    "one update per step, whose ratio is to the policy": (
        {f"{ACTOR}.ppo_mini_batch_size": 256},
        "A step has one actor update, so the ratio is 1",
        {f"{ACTOR}.ppo_mini_batch_size": 256, f"{CORRECTION}.bypass_mode": True},
    ),
}


@pytest.mark.parametrize("name", NOTICES)
def test_an_odd_setting_is_told_and_its_neighbour_is_not(name: str) -> None:
    changes, message, beside = NOTICES[name]
    (notice,) = notices(check(changes))
    assert notice.startswith(message)
    assert not list(notices(check(beside)))


def test_the_default_has_no_notice() -> None:
    assert not list(notices(check({})))


# --- how a fault reads -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (1e-6, "1e-06"),
        ("a b", "a b"),
        ([1, None, "x"], "[1,null,x]"),
        ({"a": False, "b": []}, "{a:false,b:[]}"),
    ],
)
def test_values_are_shown_as_a_user_writes_them(value: Any, text: str) -> None:
    assert shown(value) == text


def test_a_fault_shows_key_value_and_rule_and_cuts_a_long_value() -> None:
    assert str(Fault("a.b", None, "must be")) == "a.b: must be"
    assert str(Fault("a.b", [1], "must be")) == "a.b=[1]: must be"
    assert str(Fault("a.b", "x" * 201, "must be")) == f"a.b={'x' * 199}…: must be"
    assert str(Fault("a.b", "x" * 200, "must be")) == f"a.b={'x' * 200}: must be"
