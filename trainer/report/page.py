"""`report.html`: one self-contained page on a run, from what its directory holds."""

import math
import os
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from trainer.ppo.verdicts import Alarm, Verdict, alarms, limiter_verdicts
from trainer.report.charts import (
    ENTROPY,
    LENGTH,
    PUSH,
    UPDATE,
    clip_charts,
    drawn,
    kl_charts,
    reward_charts,
    timing_charts,
)
from trainer.report.differences import default_config, difference_table
from trainer.report.heatmap import sample_section
from trainer.report.markup import duration, escaped, figure
from trainer.report.panel import alarm_list, limiter_panel, push_chart, summary
from trainer.report.read import WINDOW, RunRecord, read_run
from trainer.report.style import STYLE
from trainer.report.svg import MAX_LINE_POINTS

FILE = "report.html"
MAX_BYTES = 1_000_000
TOKEN_BUDGETS = (1600, 800, 300, 60)  # tokens in all heat maps together; the first that keeps the page below MAX_BYTES
MAX_METRICS = 300
MAX_MARKS = 5
# Nothing may load and nothing may run.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
SIGNS = {"done": "✓", "running": "▶", "failed": "✕", "stopped": "■"}


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into a run directory, over an older one, and return its path.

    Raises:
        ConfigError: the folder holds no run, or a record in it that cannot be read.
    """
    run_dir = Path(run_dir)
    page = report_page(read_run(run_dir))
    aside, path = run_dir / f".tmp-{FILE}", run_dir / FILE
    aside.write_text(page, encoding="utf-8")
    os.replace(aside, path)
    return path


def report_page(record: RunRecord) -> str:
    """The whole page, below MAX_BYTES."""
    trained = [line for line in record.lines if int(line["step"]) > 0]
    verdicts = limiter_verdicts(trained, record.config, window=WINDOW)
    found = alarms(trained, record.config, window=WINDOW)
    parts = {
        "reward": (
            "Reward and validation",
            _charts(reward_charts(record, _marks(found)), "No score was logged.")
            + f'<p class="note reading">{_reading(record)}</p>',
        ),
        "limiters": (
            "The four limiters",
            limiter_panel(record, verdicts) + _charts([*push_chart(record, verdicts), *drawn(record, PUSH)]),
        ),
        "alarms": ("Alarms", alarm_list(found)),
        "kl": ("KL", _charts(kl_charts(record), "No KL was logged.")),
        "clip": ("Clip", _charts(clip_charts(record), "No clip fraction was logged.")),
        "entropy": ("Entropy", _charts(drawn(record, ENTROPY), "No entropy was logged.")),
        "length": ("Length and gradient", _charts(drawn(record, [*LENGTH, *UPDATE]), "No length was logged.")),
        "timing": ("Timing", _charts(timing_charts(record), "No times were logged.")),
        "configuration": ("Configuration", difference_table(record.config, default_config())),
    }
    header = _header(record, verdicts)
    for budget in TOKEN_BUDGETS:
        samples = {"samples": ("Samples", sample_section(record, max_tokens=budget))}
        page = _document(record, header, {**parts, **samples, "metrics": ("All metrics", _metrics_table(record))})
        if len(page.encode()) < MAX_BYTES:
            break
    return page


def _marks(found: Sequence[Alarm]) -> list[int]:
    """Steps at which alarms first began, a few."""
    first: dict[str, int] = {}
    for alarm in found:
        first.setdefault(alarm.name, alarm.step)
    return sorted(set(first.values()))[:MAX_MARKS]


def _reading(record: RunRecord) -> str:
    """How to read the charts."""
    text = "Here and below: a figure beside a line is its last value; point at a chart for the others."
    if record.last_step > MAX_LINE_POINTS:
        text += (
            " In a run as long as this a line is the mean over a stretch of steps, and its light band holds every step."
        )
    return text


def _charts(charts: Sequence[str], otherwise: str = "") -> str:
    if charts:
        return f'<div class="charts">{"".join(charts)}</div>'
    return f'<p class="none">{otherwise}</p>' if otherwise else ""


# --- header ----------------------------------------------------------------------------------------------------------


def _header(record: RunRecord, verdicts: Sequence[Verdict]) -> str:
    state = str(record.state.get("state", "unknown"))
    reason = record.state.get("reason")
    versions = record.state.get("versions")
    listed = ", ".join(f"{name} {version}" for name, version in versions.items()) if isinstance(versions, dict) else ""
    code = record.state.get("exit_code")
    failed = "" if code in (None, 0) else f" (exit {code})"
    return (
        '<header class="top"><p class="kicker">Governor run report</p>'
        f'<div class="title"><h1>{escaped(record.name, 120)}</h1><span class="badge {escaped(state, 20)}">'
        f'<i aria-hidden="true">{SIGNS.get(state, "?")}</i> {escaped(state, 20)}{escaped(failed)}</span></div>'
        f'<p class="verdict-line">{escaped(summary(verdicts))}</p>'
        + (f'<p class="reason">{escaped(reason, 2000)}</p>' if reason else "")
        + f'<dl class="tiles">{"".join(_tiles(record))}</dl>'
        + f'<p class="versions">{escaped(listed, 600)}</p></header>'
    )


def _tiles(record: RunRecord) -> list[str]:
    """The few figures that one looks for first."""

    def tile(name: str, value: str, small: str = "") -> str:
        below = f"<small>{escaped(small, 120)}</small>" if small else ""
        return f"<div><dt>{name}</dt><dd>{escaped(value, 60)}{below}</dd></div>"

    wanted = record.config.get("trainer.total_training_steps")
    steps = f"{record.last_step:,}" + (f" of {wanted:,}" if isinstance(wanted, int) else "")
    seed = record.state.get("seed", record.config.get("data.seed"))
    tiles = [tile("Steps", steps, f"seed {seed}" if seed is not None else "")]
    if score := record.series.get("critic/score/mean"):
        count = min(WINDOW, len(score.values))
        tiles.append(
            tile("Score", figure(score.recent()), f"mean of the last {count}; first {figure(score.values[0])}")
        )
    cores = record.beginning("val-core/")
    if cores:
        name, series = next(iter(cores.items()))
        best = max(series.values)
        shown = name.removeprefix("val-core/")
        tiles.append(
            tile("Validation", figure(series.last), f"{shown}; first {figure(series.values[0])}, best {figure(best)}")
        )
    if entropy := record.series.get("actor/entropy"):
        tiles.append(tile("Entropy", figure(entropy.last), f"nats; first {figure(entropy.values[0])}"))
    if time := record.series.get("timing_s/step"):
        whole = math.fsum(time.values)
        tiles.append(tile("Time in steps", duration(whole), f"{duration(whole / len(time.values))} a step"))
    return tiles


# --- around the parts ------------------------------------------------------------------------------------------------


def _metrics_table(record: RunRecord) -> str:
    """Every series in figures, for those who do not see the charts and for what has none."""
    rows = "".join(
        f'<tr><th scope="row">{escaped(name, 120)}</th><td>{figure(series.values[0])}<td>{figure(series.last)}'
        f"<td>{figure(series.recent())}<td>{figure(min(series.values))}<td>{figure(max(series.values))}"
        for name, series in sorted(record.series.items())[:MAX_METRICS]
    )
    if not rows:
        return '<p class="none">Nothing was logged yet.</p>'
    left_out = len(record.series) - MAX_METRICS
    rest = f'<p class="note">{left_out} more in metrics.jsonl.</p>' if left_out > 0 else ""
    names = ("first", "last", f"mean of last {WINDOW}", "least", "greatest")
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    return (
        f"<details><summary>{len(record.series)} metrics in figures</summary>"
        f'<div class="wide"><table class="metrics"><thead><tr><th scope="col">metric</th>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>{rest}</details>"
    )


def _document(record: RunRecord, header: str, parts: dict[str, tuple[str, str]]) -> str:
    links = "".join(f'<a href="#{key}">{title}</a>' for key, (title, _) in parts.items())
    sections = "".join(
        f'<section id="{key}"><h2>{title}</h2>{content}</section>' for key, (title, content) in parts.items()
    )
    when = record.state.get("time")
    written = f"State of {escaped(when, 40)}. " if when else ""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">'
        f"<title>{escaped(record.name, 120)} · Governor</title><style>{STYLE}</style></head>\n"
        f'<body>{header}<nav aria-label="Parts">{links}</nav><main>{sections}</main>\n'
        f"<footer>{written}Written by Governor {escaped(metadata.version('governor-rl'))} from "
        f"{escaped(record.root.name, 120)}/. METRICS.md says what each metric means.</footer></body></html>\n"
    )
