"""Keys that verl has and this trainer does not: the reason, or the new name. The README shows this table."""

# What to do, and the keys it holds for, each with all keys below it. `*.name` is a name at any place of a key.
WHAT_TO_DO: dict[str, tuple[str, ...]] = {
    # Renamed, or said elsewhere.
    "use actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": ("actor_rollout_ref.actor.ppo_micro_batch_size",),
    "use actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": ("actor_rollout_ref.ref.log_prob_micro_batch_size",),
    "use actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": (
        "actor_rollout_ref.rollout.log_prob_micro_batch_size",
    ),
    "use critic.ppo_micro_batch_size_per_gpu": (
        "critic.ppo_micro_batch_size",
        "critic.forward_micro_batch_size",
        "critic.forward_micro_batch_size_per_gpu",
    ),
    "use critic.ppo_max_token_len_per_gpu": ("critic.forward_max_token_len_per_gpu",),
    "use critic.fsdp_config": ("critic.fsdp", "critic.model.fsdp_config"),
    "use actor_rollout_ref.actor.grad_clip": ("actor_rollout_ref.actor.optim.clip_grad",),
    "use critic.grad_clip": ("critic.optim.clip_grad",),
    "use actor_rollout_ref.actor.optim.lr_scheduler_type": ("actor_rollout_ref.actor.optim.warmup_style",),
    "use critic.optim.lr_scheduler_type": ("critic.optim.warmup_style",),
    "use trainer.total_training_steps": (
        "actor_rollout_ref.actor.optim.total_training_steps",
        "critic.optim.total_training_steps",
    ),
    "use actor_rollout_ref.rollout.n": ("*.rollout_n",),
    "use actor_rollout_ref.rollout.max_num_seqs": ("actor_rollout_ref.rollout.micro_batch_size",),
    "use data.seed, the one seed": (
        "*.data_loader_seed",
        "actor_rollout_ref.actor.fsdp_config.seed",
        "actor_rollout_ref.ref.fsdp_config.seed",
        "actor_rollout_ref.rollout.seed",
    ),
    "use actor_rollout_ref.model.tokenizer_path": ("data.tokenizer", "critic.model.tokenizer_path"),
    "use actor_rollout_ref.model.custom_chat_template": ("critic.model.custom_chat_template",),
    "use actor_rollout_ref.model.trust_remote_code": ("data.trust_remote_code",),
    "use actor_rollout_ref.model.logits_chunk_size": (
        "*.use_fused_kernels",
        "*.fused_kernel_options",
        "*.entropy_from_logits_with_chunking",
        "*.entropy_checkpointing",
    ),
    "use reward.custom_reward_function": ("custom_reward_function",),
    "use ray_kwargs.ray_init": ("ray_init",),
    "use trainer.sample_freq": ("trainer.log_val_generations", "trainer.val_generations_to_log_to_wandb"),
    "use trainer.max_ckpt_to_keep": (
        "trainer.max_actor_ckpt_to_keep",
        "trainer.max_critic_ckpt_to_keep",
        "trainer.remove_previous_ckpt_in_save",
    ),
    "use trainer.default_local_dir": ("trainer.default_hdfs_dir",),
    "use trainer.placement_timeout_s": ("trainer.ray_wait_register_center_timeout",),
    "a run resumes from its own directory: use trainer.default_local_dir": ("trainer.resume_from_path",),
    "weights are float32 masters; for compute use actor_rollout_ref.actor.fsdp_config.dtype": ("*.model_dtype",),
    "use algorithm.rollout_correction.rollout_rs_threshold, as in 0.5_2.0": (
        "algorithm.rollout_correction.rollout_rs_threshold_lower",
    ),
    "training always samples; for validation use actor_rollout_ref.rollout.val_kwargs.do_sample": (
        "actor_rollout_ref.rollout.do_sample",
    ),
    "the rollout shares the actor's devices unless it has a pool: use trainer.role_pools.rollout": (
        "actor_rollout_ref.hybrid_engine",
    ),
    "use trainer.resource_pools and trainer.role_pools.rollout": (
        "actor_rollout_ref.rollout.nnodes",
        "actor_rollout_ref.rollout.n_gpus_per_node",
    ),
    # Decided once and for all here.
    "the critic follows algorithm.adv_estimator (gae has one); drop it": ("critic.enable",),
    "FSDP2 is the one strategy; drop it": ("*.strategy", "*.megatron"),
    "all devices form one sharding group; drop it": ("*.fsdp_size",),
    "each decoder layer is sharded by itself; drop it": ("*.wrap_policy",),
    "a micro-batch is padded to its longest row alone, and holds rows of like length; drop it": (
        "*.use_remove_padding",
    ),
    "models and data are read where they lie; drop it": ("*.use_shm",),
    "no code is imported by configuration but reward functions; drop it": ("*.external_lib", "*._target_"),
    "a model's folder has its config; to change fields use actor_rollout_ref.model.override_config": (
        "*.hf_config_path",
    ),
    "mini-batches are always cut in a new order, a function of (seed, step, epoch); drop it": (
        "actor_rollout_ref.actor.shuffle",
        "critic.shuffle",
    ),
    "rows are always balanced over devices inside a mini-batch; drop it": ("trainer.balance_batch",),
    "the PPO clip with dual clip is the one policy loss; drop it": (
        "actor_rollout_ref.actor.policy_loss",
        "actor_rollout_ref.actor.tau_pos",
        "actor_rollout_ref.actor.tau_neg",
        "algorithm.rollout_correction.loss_type",
    ),
    "the sampler's log-probabilities are always kept; drop it": ("actor_rollout_ref.rollout.calculate_log_probs",),
    "a checkpoint always holds all that resuming needs; drop it": ("*.checkpoint",),
    "a checkpoint is never deleted by loading it; drop it": ("trainer.del_local_ckpt_after_load",),
    "every random number is a function of data.seed; drop it": ("*.full_determinism",),
    "rows keep their messages and are tokenized once at start; drop it": (
        "data.return_raw_chat",
        "data.return_raw_input_ids",
        "data.return_full_prompt",
        "data.dataloader_num_workers",
        "data.filter_overlong_prompts_workers",
    ),
    "the order is a function of (data.seed, epoch, position), and file order in validation; drop it": (
        "data.sampler",
        "data.validation_shuffle",
    ),
    "prepare a file with the rows instead; drop it": ("data.custom_cls", "data.datagen"),
    # Not there.
    "an argument of vLLM's engine: use actor_rollout_ref.rollout.engine_kwargs.vllm": tuple(
        f"actor_rollout_ref.rollout.{name}"
        for name in ("enable_chunked_prefill", "scheduling_policy", "disable_log_stats")
    ),
    "not supported by the back ends hf and vllm here; drop it": tuple(
        f"actor_rollout_ref.rollout.{name}"
        for name in (
            "mode",
            "data_parallel_size",
            "expert_parallel_size",
            "pipeline_model_parallel_size",
            "ignore_eos",
            "cudagraph_capture_sizes",
            "logprobs_mode",
            "load_format",
            "layered_summon",
            "multi_stage_wake_up",
            "over_sample_rate",
            "skip_tokenizer_init",
            "engine_kwargs.sglang",
            "engine_kwargs.trtllm",
            "checkpoint_engine",
            "quantization",
            "quantization_config_file",
            "disaggregation",
            "prometheus",
            "trace",
            "skip",
            "skip_rollout",
            "skip_dump_dir",
        )
    ),
    "multi-turn rollouts and tools are not supported; drop it": (
        "actor_rollout_ref.rollout.multi_turn",
        "actor_rollout_ref.rollout.agent",
        "data.tool_config_path",
        "data.function_tool_path",
    ),
    "its parts are in reward: use reward.reward_model, reward.reward_manager.name and reward.reward_kwargs": (
        "reward_model",
    ),
    "use data.max_response_length": ("reward.reward_kwargs.max_resp_len",),
    "naive and dapo are the reward managers; for rules of your own use reward.custom_reward_function": (
        "reward.reward_manager.source",
        "reward.reward_manager.module",
    ),
    "use trainer.resource_pools and trainer.role_pools.reward_model": (
        "reward.reward_model.enable_resource_pool",
        "reward.reward_model.n_gpus_per_node",
        "reward.reward_model.nnodes",
    ),
    "reward models are sequence-classification models, which do not generate; drop it": (
        "reward.reward_model.rollout",
    ),
    "generated code is not run; drop it": ("sandbox_fusion", "reward.sandbox_fusion"),
    "use actor_rollout_ref.model.lora_rank": ("actor_rollout_ref.model.lora",),
    "the critic is trained whole, also where the policy has a LoRA adapter; drop it": (
        "critic.model.lora",
        "critic.model.lora_rank",
        "critic.model.lora_alpha",
        "critic.model.lora_adapter_path",
        "critic.model.target_modules",
        "critic.model.exclude_modules",
    ),
    "images, videos and sound are not supported; drop it": (
        "data.image_key",
        "data.video_key",
        "data.audio_key",
        "data.image_patch_size",
        "data.mm_processor_kwargs",
        "data.return_multi_modal_inputs",
        "*.freeze_vision_tower",
    ),
    "not supported yet; drop it": (
        "*.offload_policy",
        "*.enable_activation_offload",
        "trainer.validation_data_dir",
    ),
    "not supported; drop it": (
        "*.forward_prefetch",
        "*.use_orig_params",
        "*.forward_only",
        "*.use_torch_compile",
        "*.use_liger",
        "*.use_prefix_grouper",
        "*.tiled_mlp",
        "*.mtp",
        "*.qat",
        "*.ulysses_sequence_parallel_size",
        "*.router_replay",
        "*.profiler",
        "*.optimizer_impl",
        "*.override_optimizer_config",
        "*.zero_indexed_step",
        "actor_rollout_ref.actor.calculate_sum_pi_squared",
        "actor_rollout_ref.rollout.enable_rollout_routing_replay",
        "data.gen_batch_size",
        "algorithm.filter_groups",
        "algorithm.use_pf_ppo",
        "algorithm.pf_ppo",
        "distillation",
        "trainer.esi_redundant_time",
        "trainer.use_legacy_worker_impl",
        "ray_kwargs.timeline_json_file",
        "global_profiler",
        "transfer_queue",
    ),
}

FOREIGN_KEYS: dict[str, str] = {key: text for text, keys in WHAT_TO_DO.items() for key in keys}


def reason_for(key: str) -> str | None:
    """Why a key of verl's is refused and what to do, by the longest prefix in the table; None for other keys."""
    parts = key.split(".")
    prefixes = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    names = [*prefixes, *(f"*.{part}" for part in parts)]
    return next((FOREIGN_KEYS[name] for name in names if name in FOREIGN_KEYS), None)
