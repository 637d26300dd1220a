"""The rollout role: decodes responses with a back end over a copy of the policy's weights."""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from config.schema import ActorRolloutRefConfig
from trainer.batch import PPOBatch
from workers.engine.fsdp import DeviceContext
from workers.engine.models import TORCH_DTYPES, PolicySpec, load_model
from workers.rollout.hf import HFRollout, Responses
from workers.rollout.sampling import RolloutRequest, RowStream, SamplingParams


class RolloutBackend(Protocol):
    """What decodes."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take the trainer's weights, named as in the Hugging Face model."""

    def generate(
        self, prompts: Tensor, prompt_mask: Tensor, rows: RowStream, *, params: SamplingParams, max_tokens: int
    ) -> Responses:
        """One response per row. prompts [B, P] left-padded."""
        ...


def make_backend(context: DeviceContext, config: ActorRolloutRefConfig, spec: PolicySpec) -> RolloutBackend:
    """The back end of `rollout.name`. All devices of a pool call this together."""
    rollout = config.rollout
    if rollout.name == "vllm":
        from workers.rollout.vllm import VLLMRollout

        return VLLMRollout(context, config, spec)
    sampler = load_model(
        AutoModelForCausalLM,
        spec.path,
        dtype=TORCH_DTYPES[rollout.dtype],
        override_config=config.model.override_config,
        trust_remote_code=config.model.trust_remote_code,
    )
    return HFRollout(
        sampler,
        eos_token_ids=spec.eos_token_ids,
        pad_token_id=spec.pad_token_id,
        max_num_seqs=rollout.max_num_seqs,
        device=context.device,
    )


class Rollout:
    """One rank of the rollout role."""

    def __init__(self, context: DeviceContext, config: ActorRolloutRefConfig, spec: PolicySpec) -> None:
        self.backend = make_backend(context, config, spec)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take the trainer's weights."""
        self.backend.load_weights(weights)

    @torch.no_grad()
    def generate(self, batch: PPOBatch, request: RolloutRequest) -> dict[str, Tensor]:
        """`responses`, `response_mask` and `rollout_log_probs` [B, R] for the batch's prompts."""
        rows = RowStream(
            seed=request.seed,
            step=request.step,
            stream=request.stream,
            prompt_index=[row["prompt_index"] for row in batch.extras],
            sample_index=[row["sample_index"] for row in batch.extras],
        )
        out = self.backend.generate(
            batch.prompts, batch.prompt_mask, rows, params=request.params, max_tokens=request.max_tokens
        )
        return {"responses": out.tokens, "response_mask": out.mask, "rollout_log_probs": out.log_probs}
