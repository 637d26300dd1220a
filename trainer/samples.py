"""Responses worth looking at, with what happened to each of their tokens."""

from collections.abc import Sequence
from typing import Any

import torch

from trainer.batch import PPOBatch, require

MAX_SAMPLES = 8
TOKEN_FIELDS = (
    "rollout_log_probs", "old_log_probs", "ref_log_prob", "entropys", "values", "token_level_rewards", "advantages", "returns",
)  # fmt: skip


def sample_rows(step: int, batch: PPOBatch, scored: Sequence[Any], tokenizer: Any) -> list[dict[str, Any]]:
    """At most eight responses of a batch, evenly spread over its scores from best to worst, for `samples.jsonl`."""
    order = sorted(range(len(scored)), key=lambda row: -scored[row].reward.score)
    count = min(MAX_SAMPLES, len(order))
    chosen = [order[int(i * (len(order) - 1) / max(count - 1, 1))] for i in range(count)]
    return [_sample(step, batch, row, scored[row], tokenizer) for row in chosen]


def _sample(step: int, batch: PPOBatch, row: int, scored: Any, tokenizer: Any) -> dict[str, Any]:
    responses, response_mask = require(batch, "responses", "response_mask")
    mask = response_mask[row]
    tokens = responses[row][mask].tolist()
    fields = {name: getattr(batch, name) for name in TOKEN_FIELDS}
    return {
        "step": step,
        "uid": batch.uid[row],
        "data_source": batch.extras[row]["data_source"],
        "prompt": tokenizer.decode(batch.prompts[row][batch.prompt_mask[row]]),
        "response": scored.text,
        "ground_truth": batch.extras[row]["ground_truth"],
        "ended": scored.ended,
        "score": scored.reward.score,
        "extra": scored.reward.extra,
        "tokens": [tokenizer.decode([token]) for token in tokens],
        **{name: _rounded(values[row][mask]) for name, values in fields.items() if values is not None},
    }


def _rounded(values: torch.Tensor) -> list[float]:
    return [float(f"{value:.6g}") for value in values.tolist()]
