"""Charts as inline SVG: lines with bands, stacked shares, sparklines. Numbers in, markup out.

A colour is the name of a CSS class of style.py, never a value, so that light, dark and print can differ. Lines differ
by dash and marker as well, stacks by their order, which the legend repeats. Nothing here refers to an id or an address.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.report.markup import escaped, figure
from trainer.report.read import Series

Point = tuple[float, float]

MAX_POINTS = 400  # of a band; a longer one keeps the least and the greatest of each stretch
MAX_LINE_POINTS = 240  # of a line; a longer one becomes its mean over stretches, within a band from least to greatest
NUM_STRETCHES = 120
MAX_HOVER = 48  # stretches of the x axis with a tooltip of their own
MAX_COLUMNS = 100  # of a stack; a longer one shows means over stretches
MAX_NARROW_LAYERS = 5  # a stack with more has its legend beside it
MARKERS_UP_TO = 30  # points that are few enough to be seen one by one
WIDTH, HEIGHT = 360.0, 176.0
LEFT, RIGHT, TOP, BOTTOM = 44.0, 10.0, 8.0, 22.0
SPARK_WIDTH, SPARK_HEIGHT = 180.0, 40.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A series with its looks; `low` and `high` bound a lightly filled band around it."""

    label: str
    series: Series
    colour: str = "ink"
    dash: int = 0
    low: Series | None = None
    high: Series | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """The plot's place, and the values that its edges stand for."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        span = self.x_high - self.x_low
        return LEFT + (WIDTH - LEFT - RIGHT) * ((value - self.x_low) / span if span else 0.5)

    def y(self, value: float) -> float:
        part = (value - self.y_low) / (self.y_high - self.y_low)
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - min(max(part, 0.0), 1.0))


# --- charts ----------------------------------------------------------------------------------------------------------


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    unit: str = "",
    x_name: str = "step",
    marks: Sequence[int] = (),
    note: str = "",
) -> str:
    """A figure with lines over steps. `marks` are steps with a dashed upright, such as alarms."""
    drawn = [series for line in lines for series in (line.series, line.low, line.high) if series is not None]
    steps = [step for series in drawn for step in series.steps]
    frame = _frame(steps, [value for series in drawn for value in series.values])
    parts = [_axes(frame)]
    for mark in marks:
        if frame.x_low <= mark <= frame.x_high:
            parts.append(f'<path class="mark" d="M{_n(frame.x(mark))} {_n(TOP)}V{_n(HEIGHT - BOTTOM)}"/>')
    for line in lines:
        if line.low is not None and line.high is not None:
            parts.append(_band(frame, line.colour, line.low, line.high))
    parts += [_line(frame, line) for line in lines]
    parts.append(_hover(frame, lines, x_name))
    legend = "".join(_legend_line(line) for line in lines)
    return _figure(title, unit, _described(lines, x_name), "".join(parts), legend, note)


def stacked_chart(title: str, layers: Sequence[Line], *, unit: str = "", note: str = "") -> str:
    """A figure with layers that add up, the first at the bottom; each column is the mean over a stretch of steps."""
    edges = _edges([step for layer in layers for step in layer.series.steps], MAX_COLUMNS)
    heights = [_column_means(layer.series, edges) for layer in layers]
    sums = [sum(column) for column in zip(*heights, strict=True)]
    frame = _frame([edges[0], edges[-1]], [0.0, *sums])
    below = [0.0] * len(sums)
    parts = [_axes(frame)]
    for layer, height in zip(layers, heights, strict=True):
        above = [low + more for low, more in zip(below, height, strict=True)]
        parts.append(f'<path class="layer c-{layer.colour}" d="{_steps_area(frame, edges, below, above)}"/>')
        below = above
    parts.append(_hover(frame, layers, "step"))
    legend = "".join(_legend_layer(layer) for layer in reversed(layers))
    look = "chart broad" if len(layers) > MAX_NARROW_LAYERS else "chart"
    return _figure(title, unit, _described(layers, "step"), "".join(parts), legend, note, look)


def sparkline(series: Series, *, colour: str, label: str) -> str:
    """A small line without axes that always shows 0, with its last point marked; nothing for a single point."""
    if len(series.values) < 2:
        return ""
    low, high = min(0.0, min(series.values)), max(0.0, max(series.values))
    first, span_x, span_y = series.steps[0], series.steps[-1] - series.steps[0], (high - low) or 1.0

    def place(x: float, y: float) -> Point:
        return 3 + (SPARK_WIDTH - 8) * (x - first) / span_x, 3 + (SPARK_HEIGHT - 6) * (1 - (y - low) / span_y)

    line, band = line_and_band(series.points())
    points = [place(x, y) for x, y in line]
    _, base = place(first, 0.0)
    end_x, end_y = points[-1]
    area = [place(x, y) for x, y in band] or [(points[0][0], base), *points, (end_x, base)]
    text = (
        f"{label}: {figure(series.values[0])} at step {series.steps[0]}, {figure(series.last)} at step {series.steps[-1]}, "
        f"at least {figure(min(series.values))}, at most {figure(max(series.values))}"
    )
    return (
        f'<svg class="spark c-{colour}" viewBox="0 0 {_n(SPARK_WIDTH)} {_n(SPARK_HEIGHT)}" role="img">'
        f"<title>{escaped(text)}</title>"
        f'<path class="axis" d="M3 {_n(base)}H{_n(SPARK_WIDTH - 3)}"/><path class="band" d="M{_path(area)}Z"/>'
        f'<path class="line" d="M{_path(points)}"/><circle class="dot" cx="{_n(end_x)}" cy="{_n(end_y)}" r="2.6"/></svg>'
    )


# --- thinning --------------------------------------------------------------------------------------------------------


def thin(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """At most `limit` points in the order they came: the ends, and the least and the greatest of equal stretches."""
    if len(points) <= limit:
        return list(points)
    inner = range(1, len(points) - 1)
    num_stretches = (limit - 2) // 2
    kept = {0, len(points) - 1}
    for number in range(num_stretches):
        stretch = inner[len(inner) * number // num_stretches : len(inner) * (number + 1) // num_stretches]
        kept.add(min(stretch, key=lambda index: points[index][1]))
        kept.add(max(stretch, key=lambda index: points[index][1]))
    return [points[index] for index in sorted(kept)]


def line_and_band(points: Sequence[Point]) -> tuple[list[Point], list[Point]]:
    """A line that can be followed, and the outline of the band that holds all points; no band for a short one.

    A long line's points are means over equal stretches, each at its middle; the band reaches the first and the last point.
    """
    if len(points) <= MAX_LINE_POINTS:
        return list(points), []
    line, upper, lower = [], [points[0]], []
    for number in range(NUM_STRETCHES):
        stretch = points[len(points) * number // NUM_STRETCHES : len(points) * (number + 1) // NUM_STRETCHES]
        values = [y for _, y in stretch]
        middle = (stretch[0][0] + stretch[-1][0]) / 2
        line.append((middle, math.fsum(values) / len(values)))
        upper.append((middle, max(values)))
        lower.append((middle, min(values)))
    return line, [*upper, points[-1], *reversed(lower)]


def _edges(steps: Sequence[int], limit: int) -> list[float]:
    """Edges of at most `limit` columns that hold all steps, each a whole number of them; the last may be narrower."""
    low, high = min(steps), max(steps)
    width = math.ceil((high - low + 1) / limit)
    return [*(step - 0.5 for step in range(low, high + 1, width)), high + 0.5]


def _column_means(series: Series, edges: Sequence[float]) -> list[float]:
    """Mean of a series over each column's steps; a step without a value counts as 0."""
    width = edges[1] - edges[0]
    totals = [0.0] * (len(edges) - 1)
    for step, value in series.points():
        totals[int((step - edges[0]) / width)] += value
    return [total / (right - left) for total, left, right in zip(totals, edges, edges[1:], strict=False)]


# --- parts of a chart ------------------------------------------------------------------------------------------------


def _frame(steps: Sequence[float], values: Sequence[float]) -> Frame:
    """A frame whose upper and lower edges are round numbers; it shows 0 unless the values stay far from it."""
    low, high = min(values), max(values)
    if low > 0 and low < 0.6 * high:
        low = 0.0
    elif high < 0 and high > 0.6 * low:
        high = 0.0
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        low, high = (0.0, 1.0) if low == 0 else (low - abs(low) * 0.1, high + abs(high) * 0.1)
    gap = _gap(low, high, 4)
    return Frame(
        x_low=min(steps), x_high=max(steps), y_low=gap * math.floor(low / gap + 1e-9), y_high=gap * math.ceil(high / gap - 1e-9)
    )  # fmt: skip


def _gap(low: float, high: float, count: int) -> float:
    """The round distance of some `count` ticks."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)


def _axes(frame: Frame) -> str:
    gap = _gap(frame.y_low, frame.y_high, 4)
    ticks = [frame.y_low + gap * number for number in range(round((frame.y_high - frame.y_low) / gap) + 1)]
    rows = "".join(
        f'<path class="grid" d="M{_n(LEFT)} {_n(frame.y(tick))}H{_n(WIDTH - RIGHT)}"/>'
        f'<text x="{_n(LEFT - 5)}" y="{_n(frame.y(tick) + 3.5)}" text-anchor="end">{figure(0.0 if abs(tick) < gap / 1e6 else tick)}</text>'
        for tick in ticks
    )
    return rows + "".join(
        f'<text x="{_n(frame.x(step))}" y="{_n(HEIGHT - 6)}" text-anchor="{anchor}">{figure(step)}</text>'
        for step, anchor in _step_ticks(frame)
    )


def _step_ticks(frame: Frame) -> list[tuple[float, str]]:
    """Steps that get a number: the ends, and round ones between that do not touch them."""
    low, high = math.ceil(frame.x_low), math.floor(frame.x_high)
    if low == high:
        return [(low, "middle")]
    gap = max(1, round(_gap(low, high, 5)))
    inner = [
        step
        for step in range(gap * math.ceil(low / gap), high, gap)
        if min(frame.x(step) - frame.x(low), frame.x(high) - frame.x(step)) > 30
    ]
    return [(low, "start"), *((step, "middle") for step in inner), (high, "end")]


def _line(frame: Frame, line: Line) -> str:
    followed, outline = line_and_band(line.series.points())
    points = [(frame.x(x), frame.y(y)) for x, y in followed]
    band = (
        f'<path class="band c-{line.colour}" d="M{_path([(frame.x(x), frame.y(y)) for x, y in outline])}Z"/>'
        if outline
        else ""
    )
    path = f'{band}<path class="line d{line.dash} c-{line.colour}" d="M{_path(points)}"/>' if len(points) > 1 else ""
    if len(points) > MARKERS_UP_TO:
        return path
    return path + "".join(_marker(line, x, y) for x, y in points)


def _marker(line: Line, x: float, y: float) -> str:
    """A point of its own: a shape that differs with the dash."""
    shapes = (
        f"M{_n(x - 2.4)} {_n(y)}a2.4 2.4 0 1 0 4.8 0a2.4 2.4 0 1 0-4.8 0",
        f"M{_n(x - 2.2)} {_n(y - 2.2)}h4.4v4.4h-4.4z",
        f"M{_n(x)} {_n(y - 3)}l2.9 5h-5.8z",
        f"M{_n(x)} {_n(y - 3.2)}l3.2 3.2l-3.2 3.2l-3.2-3.2z",
    )
    return f'<path class="dot c-{line.colour}" d="{shapes[line.dash % len(shapes)]}"/>'


def _band(frame: Frame, colour: str, low: Series, high: Series) -> str:
    upper = [(frame.x(x), frame.y(y)) for x, y in thin(high.points())]
    lower = [(frame.x(x), frame.y(y)) for x, y in reversed(thin(low.points()))]
    return f'<path class="band c-{colour}" d="M{_path([*upper, *lower])}Z"/>'


def _steps_area(frame: Frame, edges: Sequence[float], below: Sequence[float], above: Sequence[float]) -> str:
    """A closed path between two stairs over the same columns."""
    first, last = edges[0], edges[-1]
    span = (WIDTH - LEFT - RIGHT) / (last - first)
    xs = [LEFT + span * (edge - first) for edge in edges]
    upper = [point for left, right, y in zip(xs, xs[1:], above, strict=False) for point in ((left, y), (right, y))]
    lower = [point for left, right, y in zip(xs, xs[1:], below, strict=False) for point in ((left, y), (right, y))]
    return f"M{_path([(x, frame.y(y)) for x, y in [*upper, *reversed(lower)]])}Z"


def _hover(frame: Frame, lines: Sequence[Line], x_name: str) -> str:
    """Upright stretches over the plot that tell the values there when pointed at."""
    steps = sorted({step for line in lines for step in line.series.steps})
    count = min(len(steps), MAX_HOVER)
    chosen = [steps[round(number * (len(steps) - 1) / max(count - 1, 1))] for number in range(count)]
    values = [dict(line.series.points()) for line in lines]
    bounds = [
        (dict(line.low.points()), dict(line.high.points())) if line.low and line.high else ({}, {}) for line in lines
    ]
    width = (WIDTH - LEFT - RIGHT) / max(count - 1, 1)
    parts = []
    for step in chosen:
        texts = [f"{x_name} {step:,}"]
        for line, value, (low, high) in zip(lines, values, bounds, strict=True):
            if step in value:
                limits = f" ({figure(low[step])} to {figure(high[step])})" if step in low and step in high else ""
                texts.append(f"{line.label} {figure(value[step])}{limits}")
        left = min(max(frame.x(step) - width / 2, LEFT), WIDTH - RIGHT)
        right = min(max(frame.x(step) + width / 2, LEFT), WIDTH - RIGHT)
        parts.append(
            f'<rect class="hover" x="{_n(left)}" y="{_n(TOP)}" width="{_n(right - left)}" '
            f'height="{_n(HEIGHT - TOP - BOTTOM)}"><title>{escaped(chr(10).join(texts))}</title></rect>'
        )
    return "".join(parts)


# --- around a chart --------------------------------------------------------------------------------------------------


def _figure(title: str, unit: str, description: str, drawing: str, legend: str, note: str, look: str = "chart") -> str:
    units = f' <span class="unit">{escaped(unit)}</span>' if unit else ""
    notes = f'<p class="note">{escaped(note)}</p>' if note else ""
    return (
        f'<figure class="{look}"><figcaption>{escaped(title)}{units}</figcaption>'
        f'<svg viewBox="0 0 {_n(WIDTH)} {_n(HEIGHT)}" role="img"><title>{escaped(title)}</title>'
        f'<desc>{escaped(description)}</desc>{drawing}</svg><ul class="legend">{legend}</ul>{notes}</figure>'
    )


def _described(lines: Sequence[Line], x_name: str) -> str:
    """The chart in words, for those who do not see it."""
    return ". ".join(
        f"{line.label}: {figure(line.series.values[0])} at {x_name} {line.series.steps[0]}, {figure(line.series.last)} at "
        f"{x_name} {line.series.steps[-1]}, between {figure(min(line.series.values))} and {figure(max(line.series.values))}"
        for line in lines
    )


def _legend_line(line: Line) -> str:
    lost = f' <span class="lost">({line.series.num_lost} not finite)</span>' if line.series.num_lost else ""
    band = '<path class="band" d="M0 0H24V10H0Z"/>' if line.low is not None else ""
    swatch = f'<path class="line d{line.dash}" d="M0 5H24"/>{_marker(line, 12, 5)}'
    return (
        f'<li><svg class="swatch c-{line.colour}" viewBox="0 0 24 10" aria-hidden="true">{band}{swatch}</svg>'
        f"{escaped(line.label)} <b>{figure(line.series.last)}</b>{lost}</li>"
    )


def _legend_layer(layer: Line) -> str:
    box = '<path class="layer" d="M4 0H20V10H4Z"/>'
    return (
        f'<li><svg class="swatch c-{layer.colour}" viewBox="0 0 24 10" aria-hidden="true">{box}</svg>'
        f"{escaped(layer.label)} <b>{figure(layer.series.last)}</b></li>"
    )


def _path(points: Sequence[Point]) -> str:
    return " ".join(f"{_n(x)} {_n(y)}" for x, y in points)


def _n(value: float) -> str:
    """A coordinate with one decimal, as short as it goes."""
    text = f"{value:.1f}"
    return text[:-2] if text.endswith(".0") else text
