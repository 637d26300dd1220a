"""`governor compare DIR…`: runs that differ in their configuration beside each other, each configuration over its seeds.

Runs of one configuration, `data.seed` and names apart, are a group. A group's figure is the mean over its seeds, with a
95 % interval where there are at least three; nothing is called better while the intervals overlap. A run that failed or
was cut counts with what it has, and is marked.
"""

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from config.faults import shown
from config.load import flatten, read_yaml
from trainer.errors import ConfigError
from trainer.ppo.verdicts import limiter_verdicts
from trainer.report.read import Series, columns
from trainer.run_dir import RunDir
from trainer.sweep import short_reason

SCORE = "critic/score/mean"
WINDOW = 10  # steps of the final figure, and of the moving mean
MIN_SEEDS = 3  # for an interval
# Keys that change no number of the training: seeds, names, places, records, validation.
NOT_COMPARED = (
    "data.seed", "data.val_*", "data.generator.num_val", "*.val_kwargs.*", "trainer.project_name",
    "trainer.experiment_name", "trainer.default_local_dir", "trainer.logger", "trainer.resume_*", "trainer.*_freq",
    "trainer.val_*", "trainer.rollout_data_dir", "trainer.max_ckpt_to_keep", "trainer.placement_timeout_s", "trainer.cpu_threads",
    "actor_rollout_ref.nccl_timeout", "reward.num_workers", "ray_kwargs.*",
)  # fmt: skip
# Metrics whose mean over the last steps stands in the table, and their short names there.
FIGURES = {
    "actor/ppo_kl": "ppo_kl",
    "actor/kl_loss": "kl_loss",
    "actor/reward_kl_penalty": "reward_kl",
    "actor/entropy": "entropy",
    "actor/pg_clipfrac": "clip frac",
}
TIME = "timing_s/step"
# Two-sided 95 % quantiles of Student's t for 1 to 30 degrees of freedom.
T_95 = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010, 2.1788, 2.1604, 2.1448, 2.1314,
    2.1199, 2.1098, 2.1009, 2.0930, 2.0860, 2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423,
)  # fmt: skip
ABSENT = "–"


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One run directory. `config` is flat; `lines` are those of training steps."""

    root: Path
    state: dict[str, Any]
    config: dict[str, Any]
    lines: list[dict[str, Any]]
    series: dict[str, Series]

    @property
    def seed(self) -> Any:
        """`data.seed`, or what run.json says."""
        return self.config.get("data.seed", self.state.get("seed"))

    @property
    def last_step(self) -> int:
        """The last training step that was logged; 0 before the first."""
        return max((int(line["step"]) for line in self.lines), default=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A figure over seeds: its mean, and half of the 95 % interval's width where there are seeds enough for one."""

    mean: float
    half_width: float | None
    count: int

    @property
    def low(self) -> float:
        """The interval's lower end; the mean where there is none."""
        return self.mean - (self.half_width or 0.0)

    @property
    def high(self) -> float:
        """The interval's upper end; the mean where there is none."""
        return self.mean + (self.half_width or 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Runs of one configuration, one a seed. Estimates are None where no run has a score."""

    name: str
    config: dict[str, Any]
    runs: list[Run]
    final: Estimate | None
    best: Estimate | None
    area: Estimate | None
    validation: Estimate | None
    figures: dict[str, float]
    seconds: float | None  # per step
    verdicts: str  # empty where there are none
    cut: dict[int, str]  # index of a run that is not whole, and how it ended

    @property
    def seeds(self) -> str:
        """The seeds, and how many of them have figures or ended early."""
        text = ", ".join(str(run.seed) for run in self.runs)
        scored = self.final.count if self.final else 0
        notes = [f"{len(self.cut)} ended early"] if self.cut else []
        notes += [f"{scored} with figures"] if scored < len(self.runs) else []
        return f"{text} ({', '.join(notes)})" if notes else text


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """All that a page shows."""

    groups: list[Group]
    differing: dict[str, list[Any]]  # key, and its value in every group
    standing: list[str]
    notes: list[str]


def compare(folders: Sequence[Path], out: Path | None = None) -> str:
    """Write `compare.html` and `compare.md` into `out` (the first folder, unless given), and return the Markdown.

    Raises:
        ConfigError: a folder that is not there, no run in any, a record that cannot be read, or no place to write.
    """
    from trainer.compare_page import to_html, to_markdown

    comparison = compare_runs(folders)
    target = out or folders[0]
    markdown = to_markdown(comparison)
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name, text in (("compare.md", markdown), ("compare.html", to_html(comparison))):
            aside = target / f".tmp-{name}"
            aside.write_text(text, encoding="utf-8")
            os.replace(aside, target / name)
    except OSError as error:
        raise ConfigError(f"--out={target}: the comparison cannot be written there: {error}") from None
    return markdown


def compare_runs(folders: Sequence[Path]) -> Comparison:
    """The runs below the folders, grouped and measured.

    Raises:
        ConfigError: as `compare`.
    """
    notes: list[str] = []
    members = _sweep_members(folders)
    places = list(members)
    runs = [_read(root) for root in _find_runs(folders)]
    runs.sort(key=lambda run: places.index(run.root.resolve()) if run.root.resolve() in members else len(places))
    if not runs:
        listed = ", ".join(map(str, folders))
        raise ConfigError(
            f"{listed}: no run there. Name a sweep's folder or run directories (they hold metrics.jsonl)."
        )
    parts: dict[str, list[Run]] = {}
    for run in runs:
        parts.setdefault(_identity(run), []).append(run)
    kept = [_one_a_seed(part, notes) for part in parts.values()]
    groups = [_group(name, part) for name, part in zip(_names(kept), kept, strict=True)]
    for group in groups:
        notes += [f"{group.name}, seed {group.runs[index].seed}: {text}" for index, text in group.cut.items()]
    for place in sorted(set(members) - {run.root.resolve() for run in runs}, key=places.index):
        notes.append(members[place])
    claims = standing("final score", {group.name: group.final for group in groups})
    if any(group.validation for group in groups):
        claims += standing("validation", {group.name: group.validation for group in groups})
    return Comparison(groups=groups, differing=_differing(groups), standing=claims, notes=notes)


# --- figures over seeds ----------------------------------------------------------------------------------------------


def estimate(values: Sequence[float]) -> Estimate:
    """Mean of at least one value, with mean ± t · s / √n as its 95 % interval from three values on (Student's t, n-1)."""
    count = len(values)
    mean = math.fsum(values) / count
    if count < MIN_SEEDS:
        return Estimate(mean=mean, half_width=None, count=count)
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    return Estimate(mean=mean, half_width=t_95(count - 1) * spread / math.sqrt(count), count=count)


def t_95(degrees: int) -> float:
    """The two-sided 95 % quantile of Student's t; above 30 degrees of freedom by Cornish and Fisher's expansion."""
    if degrees <= len(T_95):
        return T_95[degrees - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


def final_score(series: Series) -> float:
    """Mean of the last 10 steps."""
    return series.recent(WINDOW)


def best_score(series: Series) -> float:
    """The greatest mean of 10 steps in a row; of all, where there are fewer."""
    return max(moving_mean(series.values)[min(WINDOW, len(series.values)) - 1 :])


def mean_score(series: Series, num_steps: int) -> float:
    """The area under the curve divided by the steps asked for; a run that ended early keeps its final score to the end."""
    missing = max(num_steps - len(series.values), 0)
    return (math.fsum(series.values) + missing * final_score(series)) / (len(series.values) + missing)


def moving_mean(values: Sequence[float]) -> list[float]:
    """Mean of each value and the up to nine before it."""
    return [
        math.fsum(part) / len(part) for part in (values[max(0, i - WINDOW + 1) : i + 1] for i in range(len(values)))
    ]


def standing(what: str, figures: Mapping[str, Estimate | None]) -> list[str]:
    """Sentences about a figure of groups, by name, that claim no more than the intervals bear."""
    scored = {name: figure for name, figure in figures.items() if figure is not None}
    without = [name for name, figure in figures.items() if figure is None]
    sentences = [f"Without any {what}: {', '.join(without)}."] if without else []
    if len(scored) < 2:
        return sentences
    best = max(scored, key=lambda name: scored[name].mean)
    top = scored.pop(best)
    if top.half_width is None:
        sentences.append(
            f"The highest {what} was seen in {best} ({top.mean:.3g}), with {_counted(top.count)}: below {MIN_SEEDS} there is "
            "no interval, so no group is called better than another."
        )
        return sentences
    sentences.append(
        f"The highest {what} was seen in {best}: {top.mean:.3g}, {top.low:.3g} to {top.high:.3g} with {_counted(top.count)}."
    )
    unknown = [name for name, figure in scored.items() if figure.half_width is None]
    overlapping = [name for name, figure in scored.items() if figure.half_width is not None and figure.high >= top.low]
    apart = [name for name in scored if name not in (*unknown, *overlapping)]
    if overlapping:
        sentences.append(f"Not told apart from it, since the intervals overlap: {', '.join(overlapping)}.")
    if apart:
        sentences.append(f"Below it, with intervals that do not overlap its own: {', '.join(apart)}.")
    if unknown:
        sentences.append(f"Not judged, fewer than {MIN_SEEDS} seeds: {', '.join(unknown)}.")
    return sentences


def _counted(count: int) -> str:
    return "1 seed" if count == 1 else f"{count} seeds"


# --- runs ------------------------------------------------------------------------------------------------------------


def _find_runs(folders: Sequence[Path]) -> Iterator[Path]:
    """Run directories at or below the folders, in the order of names; those that were moved aside only when named."""
    seen: set[Path] = set()
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{folder}: no such folder. Name a sweep's folder or run directories.")
        for place, names, files in os.walk(folder):
            root = Path(place)
            if "metrics.jsonl" in files or "run.json" in files:
                names.clear()  # what lies inside is the run's
                if root.resolve() not in seen:
                    seen.add(root.resolve())
                    yield root
            names[:] = sorted(name for name in names if not re.search(r"\.old\d+$", name))


def _read(root: Path) -> Run:
    """A run directory's configuration, state and metrics.

    Raises:
        ConfigError: a record cannot be read.
    """
    record, config = root / "run.json", root / "config.yaml"
    try:
        lines = [line for line in RunDir(root).read("metrics.jsonl") if int(line["step"]) > 0]
        return Run(
            root=root,
            state=json.loads(record.read_text(encoding="utf-8")) if record.exists() else {},
            config=flatten(read_yaml(config)) if config.exists() else {},
            lines=lines,
            series=columns(lines),
        )
    except ValueError as error:  # json's and UnicodeDecodeError
        raise ConfigError(f"{root}: a record of the run cannot be read: {error}. Mend or remove the file.") from error


def _identity(run: Run) -> str:
    """Equal for runs that belong to one group; a run without config.yaml belongs to none but its own."""
    if not run.config:
        return str(run.root.resolve())
    return json.dumps(_compared(run.config), sort_keys=True, default=repr)


def _compared(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value for key, value in config.items() if not any(fnmatchcase(key, pattern) for pattern in NOT_COMPARED)
    }


def _one_a_seed(runs: Sequence[Run], notes: list[str]) -> list[Run]:
    """One run of each seed, the longest; the same seed again gives the same numbers and is no further evidence."""
    kept: dict[str, Run] = {}
    for run in runs:
        known = kept.get(str(run.seed))
        if known is None:
            kept[str(run.seed)] = run
            continue
        longer, shorter = (run, known) if run.last_step > known.last_step else (known, run)
        kept[str(run.seed)] = longer
        notes.append(f"{shorter.root} repeats configuration and seed of {longer.root} and is left out.")
    return sorted(kept.values(), key=lambda run: (str(type(run.seed)), run.seed if run.seed is not None else 0))


def _sweep_members(folders: Sequence[Path]) -> dict[Path, str]:
    """The run directories that the folders' sweep.json name, in the sweep's order, with a sentence for one that is missing.

    Raises:
        ConfigError: a sweep.json cannot be read.
    """
    found: dict[Path, str] = {}
    for folder in folders:
        path = folder / "sweep.json"
        try:
            members = json.loads(path.read_text(encoding="utf-8"))["members"] if path.is_file() else []
            for member in members:
                reason = f": {member['reason']}" if member["reason"] else ""
                text = f"{member['name']}, seed {member['seed']} left no run ({member['state']}{reason})."
                found.setdefault((folder / member["folder"]).resolve(), text)
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}: cannot be read: {error!r}. Mend or remove the file.") from error
    return found


# --- groups ----------------------------------------------------------------------------------------------------------


def _names(parts: Sequence[Sequence[Run]]) -> list[str]:
    """A name for each group: its member's in a sweep, else that of its folders without the seed's number."""
    names: list[str] = []
    for runs in parts:
        places = [run.root.resolve() for run in runs]
        whole = [place.parent.name if place.name.startswith("seed=") else place.name for place in places]
        short = [re.sub(r"(?<=\w)[-_.=]+(seed[-_.=]*)?\d+$", "", name) for name in whole]
        distinct = list(dict.fromkeys(whole if len(set(whole)) <= len(set(short)) else short))
        name = distinct[0] if len(distinct) == 1 else f"{distinct[0]} and {len(distinct) - 1} more"
        number = sum(re.fullmatch(rf"{re.escape(name)}( \(\d+\))?", other) is not None for other in names)
        names.append(f"{name} ({number + 1})" if number else name)
    return names


def _group(name: str, runs: list[Run]) -> Group:
    num_steps = max([run.config.get("trainer.total_training_steps") or run.last_step for run in runs], default=0)
    scores = [run.series[SCORE] for run in runs if SCORE in run.series]
    figures: dict[str, float] = {}
    for metric in FIGURES:
        values = [run.series[metric].recent(WINDOW) for run in runs if metric in run.series]
        if values:
            figures[metric] = math.fsum(values) / len(values)
    validation = [series.last for run in runs if (series := _validation(run)) is not None]
    times = [value for run in runs if TIME in run.series for value in run.series[TIME].values]
    return Group(
        name=name,
        config=runs[0].config,
        runs=runs,
        final=estimate([final_score(series) for series in scores]) if scores else None,
        best=estimate([best_score(series) for series in scores]) if scores else None,
        area=estimate([mean_score(series, num_steps) for series in scores]) if scores else None,
        validation=estimate(validation) if validation else None,
        figures=figures,
        seconds=math.fsum(times) / len(times) if times else None,
        verdicts=_verdicts(runs),
        cut={index: text for index, run in enumerate(runs) if (text := _how_cut(run, num_steps))},
    )


def _validation(run: Run) -> Series | None:
    """The first data source's validation, accuracy before reward; None without one."""
    names = [name for name in run.series if name.startswith("val-core/") and "/mean@" in name]
    names.sort(key=lambda name: "/acc/" not in name)
    return run.series[names[0]] if names else None


def _how_cut(run: Run, num_steps: int) -> str | None:
    """How a run ended that is not whole, or lost figures; None for one that is."""
    state, reason = str(run.state.get("state", "without run.json")), run.state.get("reason")
    lost = run.series[SCORE].num_lost if SCORE in run.series else 0
    if state == "done" and run.last_step >= num_steps:
        return f"{lost} of its scores were not finite" if lost else None
    code = run.state.get("exit_code")
    exit_code = "" if code is None else f" (exit {code})"
    why = f": {short_reason(str(reason))}" if reason else ""
    return f"{state}{exit_code} at step {run.last_step} of {num_steps}{why}"


def _verdicts(runs: Sequence[Run]) -> str:
    """What each limiter was in the runs' last steps; left out are those off in all, and runs without pushes."""
    states: dict[str, dict[str, int]] = {}
    for run in runs:
        measured = any(name.startswith("limiter/push/") for name in run.series)
        for verdict in limiter_verdicts(run.lines, run.config) if measured else ():
            counts = states.setdefault(verdict.limiter, {})
            counts[verdict.state] = counts.get(verdict.state, 0) + 1
    parts = []
    for limiter, counts in states.items():
        if set(counts) != {"off"}:
            listed = ", ".join(state if len(counts) == 1 else f"{state} {count}" for state, count in counts.items())
            parts.append(f"{limiter} {listed}")
    return "; ".join(parts)


def _differing(groups: Sequence[Group]) -> dict[str, list[Any]]:
    """Keys in which groups differ, with every group's value.

    A key that only follows another one, as clip_ratio_low does clip_ratio and the critic's sizes do the actor's, is left out.
    """
    configs = [_compared(group.config) for group in groups]
    keys = {key for config in configs for key in config}
    rows = {key: [shown(config[key]) if key in config else ABSENT for config in configs] for key in keys}
    kept: dict[str, list[Any]] = {}
    for key in sorted(keys, key=lambda key: (len(_leaf(key)), key)):
        follows = any(_leaf(key).startswith(_leaf(other)) and rows[other] == rows[key] for other in kept)
        if len(set(rows[key])) > 1 and not follows:
            kept[key] = rows[key]
    return dict(sorted(kept.items()))


def _leaf(key: str) -> str:
    return key.rpartition(".")[2]
