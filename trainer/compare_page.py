"""A comparison of runs as Markdown and as one self-contained page."""

from collections.abc import Mapping, Sequence
from importlib import metadata

from trainer.compare import ABSENT, FIGURES, SCORE, WINDOW, Comparison, Estimate, Group, Run, moving_mean
from trainer.report.markup import escaped, figure
from trainer.report.page import POLICY
from trainer.report.read import Series, from_pairs
from trainer.report.style import STYLE
from trainer.report.svg import Line, line_chart

COLOURS = ("reward-kl", "clip", "entropy", "kl-loss", "clip-low", "warn", "accent", "muted")
NUM_DASHES = 4
CHARTS = {
    SCORE: ("Score", ""),
    "actor/entropy": ("Entropy", "nats per token"),
    "actor/ppo_kl": ("KL from the policy that sampled", "nats per token"),
    "actor/pg_clipfrac": ("Clip fraction", "share of tokens"),
    "actor/kl_loss": ("KL to the reference, in the loss", "nats per token"),
    "actor/reward_kl_penalty": ("KL to the reference, in the reward", "nats per token"),
    "actor/grad_norm": ("Gradient norm", ""),
    "response_length/mean": ("Response length", "tokens"),
}
MAX_TEXT = 300
EXTRA_STYLE = (
    ".charts{grid-template-columns:repeat(auto-fill,minmax(min(100%,440px),1fr))}"
    ".compare th[scope=row]{font-weight:650}.compare td,.compare th{white-space:nowrap}"
    ".compare td.text{white-space:normal;min-width:15em}"
)
READING = (
    f"final: mean score of the last {WINDOW} steps, of responses that were sampled for training; best: greatest mean of "
    f"{WINDOW} steps in a row; area: mean score over all steps asked for, where a run that ended early keeps its final score to "
    "the end; validation: the last mean@n, of accuracy where there is one. Each with its 95 % interval over seeds (Student's t, "
    "one group and one figure at a time; needs three seeds). The other figures are means over seeds: of the last "
    f"{WINDOW} steps, and the time of a step over all steps."
)


def to_markdown(comparison: Comparison) -> str:
    """The tables and sentences as Markdown, columns aligned for reading as plain text."""
    parts = ["# Comparison", *(_text(sentence) for sentence in comparison.standing)]
    parts.append(_markdown_table(*_results(comparison.groups)))
    parts.append(READING)
    if comparison.differing:
        parts += ["## What differs", _markdown_table(*_differences(comparison))]
    else:
        parts.append("All runs have one configuration, apart from the seed.")
    if comparison.notes:
        parts += [
            "## Runs that ended early, repeat or are missing",
            "\n".join(f"- {_text(n)}" for n in comparison.notes),
        ]
    return "\n\n".join(parts) + "\n"


def to_html(comparison: Comparison) -> str:
    """The same, and the curves, as a page that loads nothing."""
    sentences = "".join(f'<p class="verdict-line">{escaped(sentence)}</p>' for sentence in comparison.standing)
    num_runs = sum(len(group.runs) for group in comparison.groups)
    differing = (
        _html_table(*_differences(comparison), code=True)
        if comparison.differing
        else "<p>All runs have one configuration, apart from the seed.</p>"
    )
    notes = "".join(f"<li>{escaped(note, 2 * MAX_TEXT)}</li>" for note in comparison.notes)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">'
        f"<title>Comparison · Governor</title><style>{STYLE}{EXTRA_STYLE}</style></head>\n"
        f'<body><header class="top"><p class="kicker">Governor comparison</p><h1>{len(comparison.groups)} configurations, '
        f"{num_runs} runs</h1>{sentences}</header><main>"
        f"<section><h2>Results</h2>{_html_table(*_results(comparison.groups))}<p class='note'>{escaped(READING)}</p></section>"
        f"<section><h2>Curves</h2><p class='note'>Moving mean of {WINDOW} steps, mean over seeds; the band reaches from the "
        "lowest to the highest seed and is no interval. A run that ended early keeps its last value.</p>"
        f'<div class="charts">{"".join(_charts(comparison.groups))}</div></section>'
        f"<section><h2>What differs</h2>{differing}</section>"
        + (f"<section><h2>Runs that ended early, repeat or are missing</h2><ul>{notes}</ul></section>" if notes else "")
        + f"</main><footer>Written by Governor {escaped(metadata.version('governor-rl'))}. METRICS.md says what each metric "
        "means.</footer></body></html>\n"
    )


# --- tables ----------------------------------------------------------------------------------------------------------


def _results(groups: Sequence[Group]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table of results; a column that no group has is left out."""
    columns: dict[str, list[str]] = {
        "configuration": [group.name for group in groups],
        "seeds": [group.seeds for group in groups],
        "final": [_estimate(group.final) for group in groups],
        "best": [_estimate(group.best) for group in groups],
        "area": [_estimate(group.area) for group in groups],
        "validation": [_estimate(group.validation) for group in groups],
    }
    for metric, name in FIGURES.items():
        columns[name] = [figure(group.figures.get(metric)) for group in groups]
    columns["s/step"] = [figure(group.seconds) for group in groups]
    columns["limiters"] = [group.verdicts or ABSENT for group in groups]
    present = {name: cells for name, cells in columns.items() if any(cell != ABSENT for cell in cells)}
    return list(present), [list(row) for row in zip(*present.values(), strict=True)]


def _differences(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    rows = [[key, *values] for key, values in comparison.differing.items()]
    return ["key", *(group.name for group in comparison.groups)], rows


def _estimate(value: Estimate | None) -> str:
    if value is None:
        return ABSENT
    if value.half_width is None:
        return f"{value.mean:.3f} (no interval)"
    return f"{value.mean:.3f} ± {value.half_width:.3f}"


def _markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [[_text(cell) for cell in row] for row in (head, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    lines = [f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))} |" for row in cells]
    lines.insert(1, f"|{'|'.join('-' * (width + 2) for width in widths)}|")
    return "\n".join(lines)


def _text(text: str) -> str:
    """A text in Markdown: one line, without markup of its own."""
    line = " ".join(text.split())
    line = line if len(line) <= MAX_TEXT else f"{line[: MAX_TEXT - 1]}…"
    line = "".join(f"\\{sign}" if sign in "\\`*[]|!#" else sign for sign in line)
    return line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _html_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, code: bool = False) -> str:
    top = "".join(f'<th scope="col">{escaped(cell, MAX_TEXT)}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{_wrapped(row[0], code)}</th>{"".join(_cell(cell) for cell in row[1:])}</tr>'
        for row in rows
    )
    return f'<div class="wide"><table class="compare"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(text: str) -> str:
    return f"<td{' class=text' if len(text) > 40 else ''}>{escaped(text, MAX_TEXT)}</td>"


def _wrapped(text: str, code: bool) -> str:
    return f"<code>{escaped(text, MAX_TEXT)}</code>" if code else escaped(text, MAX_TEXT)


# --- curves ----------------------------------------------------------------------------------------------------------


def _charts(groups: Sequence[Group]) -> list[str]:
    charts: list[str] = []
    for metric, (title, unit) in CHARTS.items():
        lines = [
            line for number, group in enumerate(groups) if (line := _group_line(group, metric, number)) is not None
        ]
        if lines:
            charts.append(line_chart(title, lines, unit=unit))
    return charts


def _group_line(group: Group, metric: str, number: int) -> Line | None:
    """A group's mean curve over its seeds, with the band from the lowest to the highest."""
    curves = [_curve(run, metric) for run in group.runs if metric in run.series]
    if not curves:
        return None
    steps = sorted({step for curve in curves for step in curve})
    whole = [_carried(curve, steps) for curve in curves]
    values = {step: [curve[step] for curve in whole if step in curve] for step in steps}
    mean = from_pairs([(step, sum(found) / len(found)) for step, found in values.items()])
    assert mean is not None
    low: Series | None = None
    high: Series | None = None
    if len(curves) > 1:
        low = from_pairs([(step, min(found)) for step, found in values.items()])
        high = from_pairs([(step, max(found)) for step, found in values.items()])
    dash = (number + number // len(COLOURS)) % NUM_DASHES
    return Line(label=group.name, series=mean, colour=COLOURS[number % len(COLOURS)], dash=dash, low=low, high=high)


def _curve(run: Run, metric: str) -> dict[int, float]:
    series = run.series[metric]
    return dict(zip(series.steps, moving_mean(series.values), strict=True))


def _carried(curve: Mapping[int, float], steps: Sequence[int]) -> dict[int, float]:
    """A curve at all steps from its first one on; where it has none, the value before."""
    carried: dict[int, float] = {}
    value: float | None = None
    for step in steps:
        value = curve.get(step, value)
        if value is not None:
            carried[step] = value
    return carried
