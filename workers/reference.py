"""The reference role: the policy at the start of the run, which the KL terms compare with."""

import numpy as np
from torch import Tensor

from config.schema import ActorRolloutRefConfig
from trainer.batch import PPOBatch
from workers.actor import load_policy, score_tokens
from workers.engine.fsdp import DeviceContext
from workers.engine.models import PolicySpec


class Reference:
    """One rank of the reference role."""

    def __init__(self, context: DeviceContext, config: ActorRolloutRefConfig, spec: PolicySpec) -> None:
        self.temperature = config.rollout.temperature
        self.engine = load_policy(spec, config, context, config.ref.fsdp_config, None)

    def compute_ref_log_prob(self, batch: PPOBatch, micro_batches: list[np.ndarray]) -> dict[str, Tensor]:
        """`ref_log_prob` [B, R] of the batch's responses, at the sampling temperature."""
        out = score_tokens(self.engine, batch, micro_batches, temperature=self.temperature, with_entropy=False)
        return {"ref_log_prob": out["log_prob"]}
