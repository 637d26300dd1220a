"""What a run left behind, as series over its steps."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from config.load import flatten, read_yaml
from trainer.errors import ConfigError
from trainer.run_dir import RunDir

RECORDS = ("run.json", "config.yaml", "metrics.jsonl")
# Steps at the end of a run that its last figures and its verdicts look at.
WINDOW = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One metric over the steps that have it. Values are finite; `num_lost` counts those that were not."""

    steps: list[int]
    values: list[float]
    num_lost: int = 0

    @property
    def last(self) -> float:
        """The newest value."""
        return self.values[-1]

    def recent(self, window: int = WINDOW) -> float:
        """Mean over the last values."""
        tail = self.values[-window:]
        return math.fsum(tail) / len(tail)

    def points(self) -> list[tuple[float, float]]:
        """Step and value."""
        return list(zip(self.steps, self.values, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """One run directory, read once. `config` is flat: full key and value; `samples` are those of a few steps."""

    root: Path
    state: dict[str, Any]
    config: dict[str, Any]
    lines: list[dict[str, Any]]
    series: dict[str, Series]
    updates: list[dict[str, Any]]
    samples: list[dict[str, Any]]

    @property
    def name(self) -> str:
        """The run's name; the folder's where the configuration is missing."""
        return str(self.config.get("trainer.experiment_name") or self.root.name)

    @property
    def last_step(self) -> int:
        """The last step that was logged; 0 before the first."""
        return max((int(line["step"]) for line in self.lines), default=0)

    def beginning(self, prefix: str) -> dict[str, Series]:
        """Series whose names begin so, in the order in which the run first logged them."""
        return {name: series for name, series in self.series.items() if name.startswith(prefix)}


def read_run(root: Path) -> RunRecord:
    """Everything in a run directory that the report shows.

    Raises:
        ConfigError: the folder does not exist, holds no run, or holds a record that cannot be read.
    """
    if not root.is_dir():
        raise ConfigError(f"{root}: no such folder. Name a run directory, such as outputs/governor/copy_ppo.")
    if not any((root / name).is_file() for name in RECORDS):
        raise ConfigError(
            f"{root}: not a run directory; it holds none of {', '.join(RECORDS)}. Name the folder that "
            "trainer.default_local_dir named, such as outputs/governor/copy_ppo."
        )
    files = RunDir(root)
    try:
        lines = files.read("metrics.jsonl")
        return RunRecord(
            root=root,
            state=json.loads((root / "run.json").read_text(encoding="utf-8")) if (root / "run.json").exists() else {},
            config=flatten(read_yaml(root / "config.yaml")) if (root / "config.yaml").exists() else {},
            lines=lines,
            series=columns(lines),
            updates=files.read("updates.jsonl"),
            samples=read_samples(root / "samples.jsonl"),
        )
    except (ValueError, yaml.YAMLError) as error:  # json's and UnicodeDecodeError are ValueErrors
        raise ConfigError(f"{root}: a record of the run cannot be read: {error}. Mend or remove the file.") from error


def read_samples(path: Path) -> list[dict[str, Any]]:
    """The samples of the first, the middle and the last step that has some.

    Those of a long run with long responses fill a machine's memory, so the others are passed over unread.
    """
    if not path.exists():
        return []
    places: dict[int, list[int]] = {}
    with path.open("rb") as file:
        start = 0
        for line in file:
            if line.endswith(b"\n"):  # one that a kill cut short is left out
                places.setdefault(_step_of(line), []).append(start)
            start += len(line)
        steps = sorted(places)
        chosen = sorted({steps[0], steps[len(steps) // 2], steps[-1]}) if steps else []
        found = []
        for place in (place for step in chosen for place in places[step]):
            file.seek(place)
            found.append(json.loads(file.readline()))
    return found


def _step_of(line: bytes) -> int:
    """A line's step, without reading the whole of it where the step comes first, as a run writes it."""
    first = re.match(rb'\{"step": (\d+)[,}]', line)
    return int(first[1] if first else json.loads(line)["step"])


def columns(lines: Iterable[Mapping[str, Any]]) -> dict[str, Series]:
    """Lines with a `step` as one series a metric; what is not a number is left out."""
    found: dict[str, tuple[list[int], list[float], list[int]]] = {}
    for line in lines:
        for name, value in line.items():
            if name == "step" or isinstance(value, bool) or not isinstance(value, int | float):
                continue
            steps, values, lost = found.setdefault(name, ([], [], []))
            if math.isfinite(value):
                steps.append(int(line["step"]))
                values.append(float(value))
            else:
                lost.append(int(line["step"]))
    return {
        name: Series(steps=steps, values=values, num_lost=len(lost))
        for name, (steps, values, lost) in found.items()
        if values
    }


def ratio_of(top: Series | None, bottom: Series | None) -> Series | None:
    """One series over another, at the steps that have both and where the lower one is not 0."""
    if top is None or bottom is None:
        return None
    below = dict(bottom.points())
    pairs = [(step, value / below[step]) for step, value in top.points() if below.get(step)]
    return from_pairs(pairs)


def sum_of(parts: Sequence[Series | None]) -> Series | None:
    """The sum of the series that there are, at the steps that have one of them."""
    totals: dict[float, float] = {}
    for part in parts:
        for step, value in part.points() if part is not None else ():
            totals[step] = totals.get(step, 0.0) + value
    return from_pairs(sorted(totals.items()))


def from_pairs(pairs: Sequence[tuple[float, float]]) -> Series | None:
    """A series of step and value; None without any."""
    if not pairs:
        return None
    return Series(steps=[int(step) for step, _ in pairs], values=[value for _, value in pairs])
