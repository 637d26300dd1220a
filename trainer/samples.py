"""Responses worth looking at, with what happened to each of their tokens."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from config.schema import ActorConfig
from trainer.batch import PPOBatch, require
from trainer.ppo.core_algos import compute_policy_loss_vanilla
from trainer.ppo.limiters import token_classes

MAX_SAMPLES = 8
TOKEN_FIELDS = (
    "rollout_log_probs", "old_log_probs", "ref_log_prob", "entropys", "values", "token_level_rewards", "advantages", "returns",
    "rollout_is_weights",
)  # fmt: skip


def choose_rows(scores: Sequence[float]) -> list[int]:
    """At most eight rows, evenly spread from the best score to the worst."""
    order = sorted(range(len(scores)), key=lambda row: -scores[row])
    count = min(MAX_SAMPLES, len(order))
    return [order[i * (len(order) - 1) // max(count - 1, 1)] for i in range(count)]


def sample_rows(
    step: int, batch: PPOBatch, scored: Sequence[Any], new_log_probs: Tensor, tokenizer: Any, actor: ActorConfig
) -> list[dict[str, Any]]:
    """The rows of a batch as lines of `samples.jsonl`.

    `acted` names, token by token, what the ratio after the step's updates would meet: a side of the clip, the dual clip,
    or nothing; and `rejected` a token that the loss does not count.
    """
    old, advantages, responses = require(batch, "old_log_probs", "advantages", "responses")
    mask, loss_mask = require(batch, "response_mask", "loss_mask")
    surrogate = compute_policy_loss_vanilla(
        log_prob=new_log_probs,
        old_log_probs=old,
        advantages=advantages,
        clip_ratio_low=actor.clip_ratio_low,
        clip_ratio_high=actor.clip_ratio_high,
        clip_ratio_c=actor.clip_ratio_c,
    )
    classes = {"rejected": ~loss_mask}  # before the others: the first class that holds is named
    classes |= token_classes(log_ratio=new_log_probs - old, advantages=advantages, surrogate=surrogate)
    fields = {name: getattr(batch, name) for name in TOKEN_FIELDS} | {"new_log_probs": new_log_probs}
    lines = []
    for row, item in enumerate(scored):
        tokens = responses[row][mask[row]].tolist()
        acted = {name: members[row][mask[row]].tolist() for name, members in classes.items()}
        lines.append(
            {
                "step": step,
                "uid": batch.uid[row],
                "data_source": batch.extras[row]["data_source"],
                "prompt": tokenizer.decode(batch.prompts[row][batch.prompt_mask[row]]),
                "response": item.text,
                "ground_truth": batch.extras[row]["ground_truth"],
                "ended": item.ended,
                "score": item.reward.score,
                "extra": item.reward.extra,
                "tokens": [tokenizer.decode([token]) for token in tokens],
                "acted": [next(name for name in acted if acted[name][i]) for i in range(len(tokens))],
                **{name: _rounded(values[row][mask[row]]) for name, values in fields.items() if values is not None},
            }
        )
    return lines


def _rounded(values: torch.Tensor) -> list[float]:
    return [float(f"{value:.6g}") for value in values.tolist()]
