"""A step's metrics from its batch, its updates and its timings. METRICS.md says what each means."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from trainer.batch import PPOBatch, require
from trainer.ppo.core_algos import masked_mean

Metrics = dict[str, float]
LAST_OF_STEP = (
    "actor/ppo_kl", "actor/kl_loss", "actor/pg_clipfrac", "actor/pg_clipfrac_pos_adv", "actor/pg_clipfrac_neg_adv",
    "actor/pg_clipfrac_lower", "limiter/ratio/mean", "limiter/ratio/deviation",
)  # fmt: skip


class Timer:
    """Seconds spent in the named parts of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the block's time to a part."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def data_metrics(batch: PPOBatch, *, max_prompt_length: int, ended: Sequence[bool]) -> Metrics:
    """Scores, rewards, advantages, values and lengths of a batch after stage 8."""
    (mask,) = require(batch, "response_mask")
    metrics: Metrics = {}
    per_row = {"score": batch.token_level_scores, "rewards": batch.token_level_rewards}
    for name, values in per_row.items():
        if values is not None:
            metrics |= _spread(f"critic/{name}", torch.where(mask, values, 0.0).sum(-1))
    per_token = {"advantages": batch.advantages, "returns": batch.returns, "values": batch.values}
    for name, values in per_token.items():
        if values is not None:
            metrics |= _spread(f"critic/{name}", values[mask])
    lengths, prompt_lengths = mask.sum(-1).float(), batch.prompt_mask.sum(-1).float()
    metrics |= _spread("response_length", lengths)
    metrics["response_length/clip_ratio"] = sum(not end for end in ended) / max(len(ended), 1)
    metrics["response/empty_ratio"] = float((lengths == 0).float().mean())
    metrics |= _spread("prompt_length", prompt_lengths)
    metrics["prompt_length/clip_ratio"] = float((prompt_lengths == max_prompt_length).float().mean())
    if batch.entropys is not None:
        metrics["actor/entropy"] = float(masked_mean(batch.entropys, mask))
    if batch.values is not None and batch.returns is not None:
        returns, values = batch.returns[mask], batch.values[mask]
        if len(returns) > 1:
            metrics["critic/vf_explained_var"] = float(1 - (returns - values).var() / (returns.var() + 1e-5))
    return metrics


def _spread(name: str, values: Tensor) -> Metrics:
    if values.numel() == 0:
        return {}
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }


def extra_metrics(extras: Sequence[dict[str, Any]]) -> Metrics:
    """The mean of each numeric field that the reward function returned, over the rows where it is a finite number."""
    columns: dict[str, list[float]] = {}
    for extra in extras:
        for name, value in extra.items():
            if is_figure(value):
                columns.setdefault(name, []).append(float(value))
    return {f"reward_extra/{name}/mean": sum(values) / len(values) for name, values in sorted(columns.items())}


def is_figure(value: Any) -> bool:
    """Whether a field that a reward function returned can be averaged."""
    return isinstance(value, int | float) and math.isfinite(value)


def part_metrics(parts: Sequence[dict[str, float]]) -> Metrics:
    """The spread of each part of the scores, over the rows that have it."""
    names = sorted({name for row in parts for name in row})
    metrics: Metrics = {}
    for name in names:
        metrics |= _spread(f"reward/{name}", torch.tensor([row[name] for row in parts if name in row]))
    return metrics


def update_metrics(updates: Sequence[Metrics]) -> Metrics:
    """A step's figures from those of its updates: the mean over the updates that have one, and for some also the last's."""
    columns: dict[str, list[float]] = {}
    for update in updates:
        for name, value in update.items():
            columns.setdefault(name, []).append(value)
    metrics = {name: sum(values) / len(values) for name, values in columns.items()}
    last = updates[-1] if updates else {}
    return metrics | {f"{name}_last": last[name] for name in LAST_OF_STEP if name in last}


def timing_metrics(timer: Timer, batch: PPOBatch, *, num_devices: int) -> Metrics:
    """Seconds per part, milliseconds per token, tokens per second and device."""
    seconds = timer.seconds
    all_tokens, new_tokens = (int(mask.sum()) for mask in require(batch, "attention_mask", "response_mask"))
    metrics = {f"timing_s/{name}": value for name, value in seconds.items()}
    for name in ("gen", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor"):
        if name in seconds:
            tokens = new_tokens if name == "gen" else all_tokens
            metrics[f"timing_per_token_ms/{name}"] = seconds[name] * 1000 / max(tokens, 1)
    metrics["perf/total_num_tokens"] = all_tokens
    metrics["perf/time_per_step"] = seconds["step"]
    metrics["perf/throughput"] = all_tokens / (seconds["step"] * num_devices)
    return metrics
