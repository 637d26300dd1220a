"""Validation figures per data source: mean@n, unbiased pass@k, maj@n."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from typing import Any

from trainer.metrics import Metrics, is_figure


@dataclass(frozen=True, kw_only=True, slots=True)
class ValSample:
    """One scored response."""

    data_source: str
    uid: str
    score: float
    extra: dict[str, Any]


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The chance that one of k samples, drawn from those without replacement, is correct: 1 - C(n-c, k)/C(n, k).

    Source: Chen et al., arXiv:2107.03374, eq. 1.
    """
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def majority_score(samples: Sequence[ValSample]) -> float:
    """The success of the most frequent `pred`; among equally frequent ones the first to come."""
    votes = Counter(str(sample.extra["pred"]) for sample in samples)
    winner = votes.most_common(1)[0][0]
    return next(_success(sample) for sample in samples if str(sample.extra["pred"]) == winner)


def validation_metrics(samples: Sequence[ValSample]) -> Metrics:
    """Figures of all samples; those of a prompt share its uid.

    Core: `acc` where all rows of the source have it, else `reward`; mean@n, pass@k for k = 1, 2, 4 … n, and maj@n where
    all rows have `pred` and n > 1. Aux: the mean of the score beside `acc`, and of other numeric fields.
    """
    metrics: Metrics = {}
    sources: dict[str, list[ValSample]] = {}
    for sample in samples:
        sources.setdefault(sample.data_source, []).append(sample)
    for source, rows in sorted(sources.items()):
        metrics |= _source_metrics(source, rows)
    return metrics


def _source_metrics(source: str, rows: list[ValSample]) -> Metrics:
    groups: dict[str, list[ValSample]] = {}
    for row in rows:
        groups.setdefault(row.uid, []).append(row)
    n = min(len(group) for group in groups.values())
    has_acc = all("acc" in row.extra for row in rows)
    name = "acc" if has_acc else "reward"
    core = f"val-core/{source}/{name}"
    means = [sum(row.extra["acc"] if has_acc else row.score for row in group) / len(group) for group in groups.values()]
    metrics = {f"{core}/mean@{n}": _mean(means)}
    k = 1
    while k <= n:
        rates = [pass_at_k(len(group), sum(_success(row) >= 1 for row in group), k) for group in groups.values()]
        metrics[f"{core}/pass@{k}"] = _mean(rates)
        k = n if k < n < 2 * k else 2 * k
    if n > 1 and all("pred" in row.extra for row in rows):
        metrics[f"{core}/maj@{n}"] = _mean([majority_score(group) for group in groups.values()])
    if has_acc:
        metrics[f"val-aux/{source}/reward/mean@{n}"] = _mean([row.score for row in rows])
    for field in sorted({key for row in rows for key in row.extra} - {"acc", "pred"}):
        values = [row.extra[field] for row in rows if is_figure(row.extra.get(field))]
        if values:
            metrics[f"val-aux/{source}/{field}/mean@{n}"] = _mean(values)
    return metrics


def _success(sample: ValSample) -> float:
    return float(sample.extra["acc"]) if "acc" in sample.extra else float(sample.score >= 1)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
