"""The charts of a run by section: which metric is drawn where, in which colour, and how to read it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from trainer.report.markup import duration
from trainer.report.read import WINDOW, RunRecord, Series, columns, from_pairs, sum_of
from trainer.report.svg import Line, line_chart, stacked_chart

MAX_VALIDATION_CHARTS = 6
# Parts of a step in their order; a part below SMALL of the run's time joins "other".
STAGES = (
    "gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor", "update_weights",
    "save_checkpoint", "testing", "probe",
)  # fmt: skip
SMALL = 0.01


@dataclass(frozen=True, slots=True)
class Trace:
    """A metric as a line of a chart; `low` and `high` are metrics that bound a band around it."""

    metric: str
    label: str
    colour: str = "ink"
    dash: int = 0
    low: str = ""
    high: str = ""


@dataclass(frozen=True, slots=True)
class Chart:
    """Metrics that are drawn together. Those that a run does not have are left out, and so is an empty chart."""

    title: str
    unit: str
    traces: tuple[Trace, ...]
    note: str = ""


SCORE = Chart(
    "Score",
    "reward",
    (
        Trace("critic/score/mean", "mean, with least and greatest", low="critic/score/min", high="critic/score/max"),
        Trace("critic/rewards/mean", "less the KL in the reward", "reward-kl", 1),
    ),
)
CRITIC = Chart(
    "Explained variance of the critic",
    "share",
    (Trace("critic/vf_explained_var", "of the returns"),),
    "1 is perfect; at or below 0 the critic knows no more than the mean.",
)
PUSH = (
    Chart(
        "Terms of the actor loss",
        "with their coefficients",
        (
            Trace("limiter/loss/pg", "policy gradient"),
            Trace("limiter/loss/entropy", "entropy", "entropy", 1),
            Trace("limiter/loss/kl", "KL", "kl-loss", 2),
        ),
        "They add up to actor/loss.",
    ),
    Chart(
        "Shares of the push at the logits",
        "share",
        (
            Trace("limiter/push_share/pg", "policy gradient"),
            Trace("limiter/push_share/entropy", "entropy", "entropy", 1),
            Trace("limiter/push_share/kl", "KL loss", "kl-loss", 2),
        ),
        "How hard each term of the loss moves the logits, whatever its value.",
    ),
    Chart(
        "Policy gradient against KL loss",
        "cosine",
        (Trace("limiter/push_cosine", "pg and kl", "kl-loss"),),
        "Below 0 the KL loss holds back what the policy gradient wants.",
    ),
)
KL = (
    Chart(
        "KL within a step",
        "nats per token",
        (
            Trace("actor/ppo_kl", "mean over the step's updates"),
            Trace("actor/ppo_kl_last", "in its last update", "muted", 1),
        ),
        "From the sampling policy to the current one. Good: below about 0.05, the last below 0.1.",
    ),
    Chart(
        "KL to the reference",
        "nats per token",
        (
            Trace("actor/reward_kl_penalty", "in the reward", "reward-kl"),
            Trace("actor/kl_loss", "in the loss", "kl-loss", 1),
            Trace("limiter/kl/sampling_policy", "sampling policy, by the loss's estimator", "muted", 2),
        ),
        "Good: grows slowly and levels off.",
    ),
    Chart(
        "Tokens at the KL loss's cap",
        "share",
        (Trace("actor/kl_loss_capped_frac", "capped", "kl-loss"),),
        "Good: 0.",
    ),
    Chart(
        "Coefficient of the KL in the reward",
        "β",
        (Trace("actor/reward_kl_penalty_coeff", "used in the step", "reward-kl"),),
    ),
    Chart(
        "What the KL in the reward changed",
        "",
        (
            Trace("limiter/reward_kl/share", "share of the reward", "reward-kl"),
            Trace("limiter/reward_kl/advantage_correlation", "advantages with and without it", "muted", 1),
        ),
        "A correlation of 1 says that the KL in the reward reordered nothing.",
    ),
    Chart(
        "Adaptive KL controller",
        "",
        (
            Trace("limiter/reward_kl/over_target", "KL over target_kl", "reward-kl"),
            Trace("limiter/reward_kl/saturated", "held by its ±0.2 clamp", "warn", 1),
        ),
    ),
    Chart(
        "Probe: KL of the update",
        "nats per token",
        (
            Trace("limiter/probe/kl", "before to after", "ink"),
            Trace("limiter/probe/ref_kl_before", "to the reference, before", "muted", 1),
            Trace("limiter/probe/ref_kl_after", "to the reference, after", "kl-loss", 2),
        ),
        "Measured on the same tokens before and after the step's updates.",
    ),
)
CLIP = (
    Chart(
        "Clipped tokens",
        "share of loss tokens",
        (
            Trace("actor/pg_clipfrac_pos_adv", "advantage > 0, at 1 + high", "clip"),
            Trace("actor/pg_clipfrac_neg_adv", "advantage < 0, at 1 − low", "clip-low", 1),
            Trace("actor/pg_clipfrac_lower", "dual clip", "warn", 2),
        ),
        "Good: 0.01 to 0.2 in all, the dual clip 0. One update per step leaves nothing to clip.",
    ),
    Chart(
        "Taken out by clipping",
        "share of Σ|A·r|",
        (Trace("limiter/clip/removed", "removed from the gradient", "clip"),),
    ),
)
TOKEN_CLASSES = (
    Trace("limiter/tokens/high", "clipped high", "clip"),
    Trace("limiter/tokens/low", "clipped low", "clip-low"),
    Trace("limiter/tokens/dual", "dual clip", "warn"),
    Trace("limiter/tokens/ratio_bound", "ratio bound", "ink"),
    Trace("limiter/tokens/zero_advantage", "zero advantage", "muted"),
)
ENTROPY = (
    Chart(
        "Entropy of the sampling policy",
        "nats per token",
        (
            Trace(
                "actor/entropy", "mean, with the lowest and highest decile", "entropy", 0, "limiter/entropy/p10", "limiter/entropy/p90"
            ),
            Trace("actor/entropy_loss", "of the current policy, over the updates", "muted", 1),
        ),
        "Good: falls slowly; a fall to 0 within a few steps is collapse.",
    ),
    Chart(
        "Probe: entropy of the update",
        "nats per token",
        (
            Trace("limiter/probe/entropy_before", "before", "muted", 1),
            Trace("limiter/probe/entropy_after", "after", "entropy"),
        ),
    ),
)  # fmt: skip
LENGTH = (
    Chart(
        "Response length",
        "tokens",
        (
            Trace("response_length/mean", "mean, with least and greatest", "ink", 0, "response_length/min", "response_length/max"),
        ),
        "Good: no drift without a rise of the score.",
    ),
    Chart(
        "Cut and empty responses",
        "share",
        (
            Trace("response_length/clip_ratio", "cut by the length limit", "ink"),
            Trace("response/empty_ratio", "empty", "warn", 1),
        ),
    ),
)  # fmt: skip
UPDATE = (
    Chart(
        "Gradient norm before clipping",
        "",
        (Trace("actor/grad_norm", "actor"), Trace("critic/grad_norm", "critic", "muted", 1)),
        "Good: steady; jumps come before trouble.",
    ),
)
WITHIN = (("actor/ppo_kl", "KL", "nats per token"), ("actor/pg_clipfrac", "clipped tokens", "share of loss tokens"))


def drawn(record: RunRecord, charts: Sequence[Chart], marks: Sequence[int] = ()) -> list[str]:
    """Markup of the charts that the run has data for."""
    found = [(chart, list(_lines(record.series, chart.traces))) for chart in charts]
    return [
        line_chart(chart.title, lines, unit=chart.unit, marks=marks, note=chart.note) for chart, lines in found if lines
    ]


def reward_charts(record: RunRecord, marks: Sequence[int]) -> list[str]:
    """Score, validation by source, and the critic. `marks` are steps with an alarm."""
    score = SCORE
    if not record.config.get("algorithm.use_kl_in_reward"):
        score = Chart(SCORE.title, SCORE.unit, SCORE.traces[:1])
    note = "Dashed uprights: an alarm began." if marks else ""
    lines = list(_lines(record.series, score.traces))
    first = [line_chart(score.title, lines, unit=score.unit, marks=marks, note=note)] if lines else []
    return [*first, *_validation_charts(record), *drawn(record, [CRITIC])]


def _validation_charts(record: RunRecord) -> Iterator[str]:
    """One chart for each source and field: mean@n, pass@k and maj@n together."""
    groups: dict[str, list[tuple[str, Series]]] = {}
    for name, series in record.beginning("val-core/").items():
        group, _, kind = name.removeprefix("val-core/").rpartition("/")
        groups.setdefault(group, []).append((kind, series))
    for number, (group, kinds) in enumerate(groups.items()):
        if number == MAX_VALIDATION_CHARTS:
            return
        left_out = len(groups) - MAX_VALIDATION_CHARTS
        more = number == MAX_VALIDATION_CHARTS - 1 and left_out > 0
        colours = ("ink", "accent", "muted", "warn")
        lines = [
            Line(label=kind, series=series, colour=colours[index % 4], dash=index % 4)
            for index, (kind, series) in enumerate(kinds[:6])
        ]
        yield line_chart(
            f"Validation: {group}", lines, note=f"{left_out} more in metrics.jsonl, under val-core/." if more else ""
        )


def kl_charts(record: RunRecord) -> list[str]:
    """The KL within a step and to the reference, and what the KL controller did."""
    fixed = record.config.get("algorithm.kl_ctrl.type", "fixed") == "fixed"
    adaptive_only = ("Coefficient of the KL in the reward", "Adaptive KL controller")
    return [
        *drawn(record, [chart for chart in KL if not (fixed and chart.title in adaptive_only)]),
        *_within(record, 0),
    ]


def clip_charts(record: RunRecord) -> list[str]:
    """What was clipped, and the classes of tokens that did not push."""
    layers = list(_lines(record.series, TOKEN_CLASSES))
    classes = (
        [
            stacked_chart(
                "Tokens that are not simply active",
                layers,
                unit="share of loss tokens",
                note="The rest is active: its advantage pushes with full weight.",
            )
        ]
        if layers
        else []
    )
    return [*drawn(record, CLIP), *classes, *_within(record, 1)]


def timing_charts(record: RunRecord) -> list[str]:
    """Seconds of a step by stage, and throughput."""
    throughput = Chart("Throughput", "tokens per second and device", (Trace("perf/throughput", "prompt and response"),))
    return [*_stage_chart(record), *drawn(record, [throughput])]


def _stage_chart(record: RunRecord) -> list[str]:
    """Layers of the stages in their order; small ones, and those that this list does not know, together on top."""
    found = {name.removeprefix("timing_s/"): series for name, series in record.beginning("timing_s/").items()}
    found.pop("step", None)
    totals = {name: math.fsum(series.values) for name, series in found.items()}
    whole = math.fsum(totals.values())
    if whole <= 0:
        return []
    shown = [name for name in STAGES if name in found and totals[name] >= SMALL * whole]
    layers = [
        Line(label=f"{name} ({totals[name] / whole:.0%})", series=found[name], colour=f"stage{STAGES.index(name)}")
        for name in shown
    ]
    if other := sum_of([series for name, series in found.items() if name not in shown]):
        layers.append(Line(label=f"other ({math.fsum(other.values) / whole:.0%})", series=other, colour="muted"))
    note = f"{duration(whole)} in all. The figures are the last step's that has them."
    return [stacked_chart("Time of a step", layers, unit="s", note=note)]


def _within(record: RunRecord, which: int) -> list[str]:
    """A metric update by update within a step: mean over the first and over the last steps of the run."""
    metric, what, unit = WITHIN[which]
    updates = [line for line in record.updates if line.get("role") == "actor" and "update" in line]
    steps = sorted({int(line["step"]) for line in updates})
    if not steps or max((int(line["update"]) for line in updates), default=0) < 1:
        return []
    window = min(WINDOW, max(len(steps) // 2, 1))
    early = _profile(updates, metric, set(steps[:window]))
    late = _profile(updates, metric, set(steps[-window:]))
    if early is None or late is None:
        return []
    lines = [Line(label=f"last {window} steps", series=late)]
    if len(steps) > 1:
        lines.insert(0, Line(label=f"first {window} steps", series=early, colour="muted", dash=1))
    return [line_chart(f"Within a step: {what}", lines, unit=unit, x_name="update")]


def _profile(updates: Sequence[Mapping[str, object]], metric: str, steps: set[int]) -> Series | None:
    """Mean of a metric by number of update, from 1, over some steps."""
    chosen = [{"step": line["update"], metric: line.get(metric)} for line in updates if line["step"] in steps]
    series = columns(chosen).get(metric)
    if series is None:
        return None
    groups: dict[int, list[float]] = {}
    for number, value in series.points():
        groups.setdefault(int(number) + 1, []).append(value)
    return from_pairs([(number, math.fsum(values) / len(values)) for number, values in sorted(groups.items())])


def _lines(series: Mapping[str, Series], traces: Sequence[Trace]) -> Iterator[Line]:
    for trace in traces:
        if trace.metric in series:
            yield Line(
                label=trace.label,
                series=series[trace.metric],
                colour=trace.colour,
                dash=trace.dash,
                low=series.get(trace.low) if trace.high in series else None,
                high=series.get(trace.high) if trace.low in series else None,
            )
