"""The one container that goes through a step.

Axes: B rows (responses), P prompt tokens (left-padded), R response tokens (right-padded). These padding columns
exist on the wire only: `workers.engine.pieces` says what an engine makes of them.
"""

import numpy as np
import torch
from tensordict import NonTensorStack, TensorClass
from torch import Tensor

from trainer.errors import DivergedError

# Which stage of a step fills a field, for the message of a stage that finds it missing.
PRODUCERS = {
    "prompts": "stage 1 (data)",
    "responses": "stage 2 (generate)",
    "attention_mask": "stage 2 (generate)",
    "response_mask": "stage 2 (generate)",
    "loss_mask": "stage 2 (generate)",
    "rollout_log_probs": "stage 2 (generate)",
    "token_level_scores": "stage 3 (reward)",
    "old_log_probs": "stage 4 (old log-probabilities)",
    "entropys": "stage 4 (old log-probabilities)",
    "ref_log_prob": "stage 5 (reference), which runs only if a KL is on",
    "values": "stage 6 (critic), which runs only with algorithm.adv_estimator=gae",
    "token_level_rewards": "stage 7 (KL in the reward)",
    "rollout_is_weights": "stage 8 (advantages), only with algorithm.rollout_correction.rollout_is",
    "advantages": "stage 8 (advantages)",
    "returns": "stage 8 (advantages)",
    "kl_advantages": "stage 8 (advantages), only with algorithm.use_kl_in_reward",
}


class PPOBatch(TensorClass, shadow=True):
    """Prompts, responses and all that is computed from them, row by row. Absent fields are None.

    Log-probabilities and entropies are in nats at the sampling temperature. Outside `response_mask` a [B, R] field
    holds anything; every reader selects by mask.
    """

    uid: list  # [B] str, one per prompt; the responses to a prompt share it
    extras: list  # [B] dict of the row: prompt, data_source, ground_truth, extra_info, prompt_index, sample_index
    prompts: Tensor  # [B, P] int64
    prompt_mask: Tensor  # [B, P] bool, false on the left padding
    responses: Tensor | None = None  # [B, R] int64
    attention_mask: Tensor | None = None  # [B, P+R] bool, true on all real tokens
    response_mask: Tensor | None = None  # [B, R] bool, true where the policy produced the token
    loss_mask: Tensor | None = None  # [B, R] bool, true where the actor loss counts the token
    rollout_log_probs: Tensor | None = None  # [B, R] float32, by the sampler
    token_level_scores: Tensor | None = None  # [B, R] float32, before the KL penalty
    old_log_probs: Tensor | None = None  # [B, R] float32, by the actor before the update
    entropys: Tensor | None = None  # [B, R] float32, of the actor before the update
    ref_log_prob: Tensor | None = None  # [B, R] float32
    values: Tensor | None = None  # [B, R] float32, of the state before each response token
    token_level_rewards: Tensor | None = None  # [B, R] float32
    advantages: Tensor | None = None  # [B, R] float32
    returns: Tensor | None = None  # [B, R] float32
    rollout_is_weights: Tensor | None = None  # [B, R] float32, of the token's policy loss
    kl_advantages: Tensor | None = None  # [B, R] float32, the part of the advantages that the KL in the reward made


def per_row(values: list) -> NonTensorStack:
    """The per-row objects as a field of a batch, so that they are sliced and joined with the rows."""
    return NonTensorStack(*values)


def require(batch: PPOBatch, *fields: str) -> tuple[Tensor, ...]:
    """The fields, which earlier stages must have filled.

    Raises:
        ValueError: a field is missing; the message names the stage that fills it.
    """
    values = tuple(getattr(batch, name) for name in fields)
    for name, value in zip(fields, values, strict=True):
        if value is None:
            raise ValueError(f"batch has no {name!r}: it is filled by {PRODUCERS.get(name, 'an earlier stage')}")
    return values


def require_finite(batch: PPOBatch, values: Tensor, mask: Tensor, *, what: str) -> None:
    """Check values [B, R] of the batch's rows under a mask.

    Raises:
        DivergedError: one is NaN or infinite; names the row's prompt.
    """
    bad = mask.bool() & ~torch.isfinite(values)
    if bool(bad.any()):
        row, token = (int(i) for i in bad.nonzero()[0])
        raise DivergedError(
            f"{what} is {float(values[row, token])} at token {token} of a response to prompt {batch.uid[row]} "
            f"(data row {batch.extras[row]['prompt_index'] + 1})"
        )


def real_lengths(batch: PPOBatch) -> np.ndarray:
    """Real tokens of each row, prompt and response together: [B] int64."""
    mask = batch.prompt_mask if batch.attention_mask is None else batch.attention_mask
    return mask.sum(-1).cpu().numpy()
