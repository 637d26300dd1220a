"""The types of the configuration: one dataclass per group, without defaults, since the values stand in YAML.

`config.load` checks a composed configuration against these types with pydantic; an `Annotated` bound or a `Literal` is
the rule that its message names. Rules over several keys stand in `config.rules`. Nothing below the CLI sees an
OmegaConf object.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

PositiveInt = Annotated[int, Gt(0)]
NonNegativeInt = Annotated[int, Ge(0)]
PositiveFloat = Annotated[float, Gt(0)]
NonNegativeFloat = Annotated[float, Ge(0)]
Probability = Annotated[float, Gt(0), Le(1)]  # of something that must be able to happen
Fraction = Annotated[float, Ge(0), Le(1)]
Frequency = Annotated[int, Ge(-1)]  # in steps; -1 and 0 are never
LossAggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KLPenalty = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "low_var_kl+", "k3+"]
RejectionMode = Literal[
    "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3", "seq_mean_k1", "seq_mean_k2", "seq_mean_k3",
    "seq_max_k2", "seq_max_k3",
]  # fmt: skip
ComputeDtype = Literal["float32", "bfloat16", "float64"]


@dataclass(kw_only=True, slots=True)
class GeneratorConfig:
    """Procedural rows in place of files: `data.generator`."""

    name: Literal["copy", "addition", "reasoning_gym"] | None
    task: str | None
    task_kwargs: dict[str, Any]
    num_train: PositiveInt
    num_val: PositiveInt
    num_digits: PositiveInt
    max_digit: Annotated[int, Ge(1), Le(9)]


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """`data`: rows, prompts and their order."""

    train_files: list[str]
    val_files: list[str]
    generator: GeneratorConfig
    prompt_key: str
    reward_fn_key: str
    train_batch_size: PositiveInt
    val_batch_size: PositiveInt | None
    train_max_samples: Annotated[int, Ge(-1)]
    val_max_samples: Annotated[int, Ge(-1)]
    max_prompt_length: PositiveInt
    max_response_length: PositiveInt
    filter_overlong_prompts: bool
    truncation: Literal["error", "left", "right"]
    shuffle: bool
    seed: NonNegativeInt
    apply_chat_template_kwargs: dict[str, Any]


@dataclass(kw_only=True, slots=True)
class RandomInitConfig:
    """A model with random weights and a character tokenizer, built when `model.path` is null."""

    architecture: Literal["qwen3", "llama"]
    alphabet: str
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: Annotated[int, Ge(32)]


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """`actor_rollout_ref.model`: the policy's weights and tokenizer."""

    path: str | None
    tokenizer_path: str | None
    custom_chat_template: str | None
    trust_remote_code: bool
    override_config: dict[str, Any]
    enable_gradient_checkpointing: bool
    logits_chunk_size: PositiveInt | None
    lora_rank: NonNegativeInt
    lora_alpha: PositiveInt
    target_modules: str | list[str]
    exclude_modules: str | list[str] | None
    lora_adapter_path: str | None
    random_init: RandomInitConfig


@dataclass(kw_only=True, slots=True)
class CriticModelConfig:
    """`critic.model`: the weights that the critic starts from; its value head is new."""

    path: str | None
    trust_remote_code: bool
    override_config: dict[str, Any]
    enable_gradient_checkpointing: bool


@dataclass(kw_only=True, slots=True)
class OptimConfig:
    """`….optim`: the optimizer and the learning rate's schedule, which moves once per training step."""

    optimizer: Literal["AdamW", "SGD"]
    lr: NonNegativeFloat
    lr_warmup_steps: Annotated[int, Ge(-1)]
    lr_warmup_steps_ratio: Fraction
    lr_scheduler_type: Literal["constant", "cosine"]
    min_lr_ratio: Fraction
    num_cycles: PositiveFloat
    weight_decay: NonNegativeFloat
    betas: list[Annotated[float, Ge(0), Lt(1)]]
    eps: PositiveFloat


@dataclass(kw_only=True, slots=True)
class FSDPConfig:
    """`….fsdp_config`: how a model is sharded and computed. Weights are float32 masters (float64 for float64)."""

    dtype: ComputeDtype
    reshard_after_forward: bool
    param_offload: bool
    optimizer_offload: bool


@dataclass(kw_only=True, slots=True)
class ActorConfig:
    """`actor_rollout_ref.actor`: the policy update."""

    ppo_mini_batch_size: PositiveInt
    ppo_micro_batch_size_per_gpu: PositiveInt | None
    use_dynamic_bsz: bool
    ppo_max_token_len_per_gpu: PositiveInt
    ppo_epochs: PositiveInt
    clip_ratio: Annotated[float, Gt(0), Lt(1)]
    clip_ratio_low: Annotated[float, Gt(0), Le(1)]
    clip_ratio_high: PositiveFloat
    clip_ratio_c: Annotated[float, Gt(1)] | None
    loss_agg_mode: LossAggMode
    loss_scale_factor: PositiveFloat
    entropy_coeff: NonNegativeFloat
    calculate_entropy: bool
    use_kl_loss: bool
    kl_loss_coef: NonNegativeFloat
    kl_loss_type: KLPenalty
    grad_clip: PositiveFloat
    optim: OptimConfig
    fsdp_config: FSDPConfig


@dataclass(kw_only=True, slots=True)
class RefConfig:
    """`actor_rollout_ref.ref`: the reference policy, the actor's weights at the start of the run."""

    log_prob_micro_batch_size_per_gpu: PositiveInt | None
    log_prob_use_dynamic_bsz: bool
    log_prob_max_token_len_per_gpu: PositiveInt
    fsdp_config: FSDPConfig


@dataclass(kw_only=True, slots=True)
class ValKwargsConfig:
    """`actor_rollout_ref.rollout.val_kwargs`: sampling in validation."""

    n: PositiveInt
    do_sample: bool
    temperature: NonNegativeFloat
    top_k: Annotated[int, Ge(-1)]
    top_p: Probability
    min_p: Annotated[float, Ge(0), Lt(1)]


@dataclass(kw_only=True, slots=True)
class EngineKwargsConfig:
    """`actor_rollout_ref.rollout.engine_kwargs`: passed on to a back end's engine as they are."""

    vllm: dict[str, Any]


@dataclass(kw_only=True, slots=True)
class RolloutConfig:
    """`actor_rollout_ref.rollout`: sampling of responses, and the batches of the old log-probabilities."""

    name: Literal["hf", "vllm"]
    n: PositiveInt
    temperature: PositiveFloat
    top_k: Annotated[int, Ge(-1)]
    top_p: Probability
    min_p: Annotated[float, Ge(0), Lt(1)]
    dtype: Literal["float32", "bfloat16"]
    max_num_seqs: PositiveInt
    tensor_model_parallel_size: PositiveInt
    gpu_memory_utilization: Probability
    enforce_eager: bool | None
    free_cache_engine: bool
    enable_prefix_caching: bool
    prompt_length: PositiveInt
    response_length: PositiveInt
    max_model_len: PositiveInt | None
    max_num_batched_tokens: PositiveInt
    engine_kwargs: EngineKwargsConfig
    log_prob_micro_batch_size_per_gpu: PositiveInt | None
    log_prob_use_dynamic_bsz: bool
    log_prob_max_token_len_per_gpu: PositiveInt
    update_weights_bucket_megabytes: PositiveFloat
    val_kwargs: ValKwargsConfig


@dataclass(kw_only=True, slots=True)
class ActorRolloutRefConfig:
    """`actor_rollout_ref`: the policy in its three roles."""

    nccl_timeout: PositiveInt
    model: ModelConfig
    actor: ActorConfig
    ref: RefConfig
    rollout: RolloutConfig


@dataclass(kw_only=True, slots=True)
class CriticConfig:
    """`critic`: the value model, with `algorithm.adv_estimator=gae` only."""

    model: CriticModelConfig
    ppo_mini_batch_size: PositiveInt
    ppo_micro_batch_size_per_gpu: PositiveInt | None
    use_dynamic_bsz: bool
    ppo_max_token_len_per_gpu: PositiveInt
    ppo_epochs: PositiveInt
    cliprange_value: PositiveFloat
    loss_agg_mode: LossAggMode
    grad_clip: PositiveFloat
    optim: OptimConfig
    fsdp_config: FSDPConfig


@dataclass(kw_only=True, slots=True)
class KLCtrlConfig:
    """`algorithm.kl_ctrl`: the coefficient of the KL in the reward."""

    type: Literal["fixed", "adaptive"]
    kl_coef: NonNegativeFloat
    horizon: PositiveFloat
    target_kl: PositiveFloat


@dataclass(kw_only=True, slots=True)
class RolloutCorrectionConfig:
    """`algorithm.rollout_correction`: what is done about a sampler that is not quite the policy."""

    rollout_is: Literal["token", "sequence"] | None
    rollout_is_threshold: PositiveFloat
    rollout_is_batch_normalize: bool
    rollout_rs: RejectionMode | None
    rollout_rs_threshold: PositiveFloat | str | None
    bypass_mode: bool


def bounds_of(threshold: float | str) -> tuple[float | None, float]:
    """Lower (None where not given) and upper bound of a `rollout_rs_threshold`.

    Raises:
        ValueError: it is neither a number nor two joined by an underscore.
    """
    *lower, upper = (float(part) for part in str(threshold).split("_"))
    if len(lower) > 1:
        raise ValueError("more than two bounds")
    return (lower[0] if lower else None), upper


@dataclass(kw_only=True, slots=True)
class AlgorithmConfig:
    """`algorithm`: advantages and the KL in the reward."""

    adv_estimator: Literal["gae", "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
    gamma: Fraction
    lam: Fraction
    norm_adv_by_std_in_grpo: bool
    use_kl_in_reward: bool
    kl_penalty: KLPenalty
    kl_ctrl: KLCtrlConfig
    rollout_correction: RolloutCorrectionConfig


@dataclass(kw_only=True, slots=True)
class CustomRewardFunctionConfig:
    """`reward.custom_reward_function`: a Python function of the user's."""

    path: str | None
    name: str
    batched: bool
    max_concurrency: PositiveInt
    reward_kwargs: dict[str, Any]


@dataclass(kw_only=True, slots=True)
class RewardManagerConfig:
    """`reward.reward_manager`: how the parts of a score become one."""

    name: Literal["naive", "dapo"]


@dataclass(kw_only=True, slots=True)
class OverlongBufferConfig:
    """`reward.reward_kwargs.overlong_buffer_cfg`: the penalty of reward manager `dapo` for long responses."""

    enable: bool
    len: PositiveInt | None
    penalty_factor: NonNegativeFloat
    log: bool


@dataclass(kw_only=True, slots=True)
class RewardKwargsConfig:
    """`reward.reward_kwargs`: settings of the reward manager."""

    overlong_buffer_cfg: OverlongBufferConfig


@dataclass(kw_only=True, slots=True)
class RewardModelConfig:
    """`reward.reward_model`: a sequence-classification model that scores conversations."""

    enable: bool
    model_path: str | None
    combine: Literal["replace", "add"]
    coef: NonNegativeFloat
    tokenizer_path: str | None
    custom_chat_template: str | None
    apply_chat_template_kwargs: dict[str, Any]
    trust_remote_code: bool
    override_config: dict[str, Any]
    max_length: PositiveInt | None
    truncation: Literal["error", "left", "right"]
    micro_batch_size_per_gpu: PositiveInt | None
    use_dynamic_bsz: bool
    forward_max_token_len_per_gpu: PositiveInt
    fsdp_config: FSDPConfig


@dataclass(kw_only=True, slots=True)
class RewardConfig:
    """`reward`: scores of responses."""

    custom_reward_function: CustomRewardFunctionConfig
    reward_manager: RewardManagerConfig
    reward_kwargs: RewardKwargsConfig
    reward_model: RewardModelConfig
    num_workers: PositiveInt
    timeout_s: PositiveFloat


@dataclass(kw_only=True, slots=True)
class PoolConfig:
    """`trainer.resource_pools.NAME`: a group of devices, one process on each."""

    nnodes: PositiveInt
    n_gpus_per_node: PositiveInt


@dataclass(kw_only=True, slots=True)
class RolePoolsConfig:
    """`trainer.role_pools`: the name of the pool that each role lives in."""

    actor: Literal["global"]
    rollout: str
    ref: str
    critic: str
    reward_model: str


@dataclass(kw_only=True, slots=True)
class TrainerConfig:
    """`trainer`: the run, its devices and its records."""

    project_name: str
    experiment_name: str
    default_local_dir: str
    device: Literal["auto", "cpu", "cuda"]
    nnodes: PositiveInt
    n_gpus_per_node: PositiveInt
    resource_pools: dict[str, PoolConfig]
    role_pools: RolePoolsConfig
    cpu_threads: PositiveInt
    placement_timeout_s: PositiveFloat
    total_epochs: PositiveInt
    total_training_steps: PositiveInt | None
    critic_warmup: NonNegativeInt
    val_before_train: bool
    val_only: bool
    test_freq: Frequency
    save_freq: Frequency
    sample_freq: Frequency
    limiter_probe_freq: Frequency
    rollout_data_dir: bool | str | None
    max_ckpt_to_keep: PositiveInt | None
    resume_mode: Literal["auto", "disable"]
    resume_allow_changes: list[str]
    logger: list[Literal["console", "wandb", "tensorboard"]]


@dataclass(kw_only=True, slots=True)
class RayKwargsConfig:
    """`ray_kwargs`: passed on to Ray as they are."""

    ray_init: dict[str, Any]


@dataclass(kw_only=True, slots=True)
class GovernorConfig:
    """The whole configuration of a run."""

    data: DataConfig
    actor_rollout_ref: ActorRolloutRefConfig
    critic: CriticConfig
    algorithm: AlgorithmConfig
    reward: RewardConfig
    trainer: TrainerConfig
    ray_kwargs: RayKwargsConfig

    @property
    def uses_critic(self) -> bool:
        """Whether the advantage estimator reads values."""
        return self.algorithm.adv_estimator == "gae"

    @property
    def uses_reference(self) -> bool:
        """Whether a KL is on, in the reward or in the loss."""
        return self.algorithm.use_kl_in_reward or self.actor_rollout_ref.actor.use_kl_loss
