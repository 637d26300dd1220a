"""What a person sees while a run goes: a progress display on a terminal, one plain line a step elsewhere."""

import sys
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from trainer.plan import PlanLine
from trainer.ppo.verdicts import WINDOW, limiter_verdicts

# Metric and short name, in the order of a step's line; those that a run does not have are left out.
STEP_LINE = (
    ("critic/score/mean", "score"),
    ("actor/entropy", "entropy"),
    ("actor/ppo_kl", "ppo_kl"),
    ("actor/pg_clipfrac", "clip"),
    ("actor/pg_loss", "pg"),
    ("actor/kl_loss", "kl_loss"),
    ("actor/reward_kl_penalty", "reward_kl"),
    ("critic/vf_loss", "vf"),
    ("response_length/mean", "len"),
    ("perf/throughput", "tok/s"),
    ("timing_s/step", "s"),
)

LIMITER_NAMES = {"reward_kl": "KL in the reward", "clip": "PPO clip", "entropy": "entropy", "kl_loss": "KL in the loss"}
VERDICT_STYLES = {
    "off": "dim", "idle": "dim", "working": "green", "governing": "bold magenta", "saturated": "bold yellow",
    "cannot act": "yellow",
}  # fmt: skip


class Display:
    """All output of a run. Progress and notices go to stderr, results to stdout."""

    def __init__(self, *, num_steps: int, console: bool) -> None:
        self.out = Console(highlight=False, soft_wrap=True)
        self.err = Console(stderr=True, highlight=False, soft_wrap=True)
        self.num_steps = num_steps
        self.config: Mapping[str, Any] = {}  # full keys; the limiters' verdicts read it
        self.shows_steps = console
        self.progress: Progress | None = None
        self.live: Live | None = None
        self.recent: deque[Mapping[str, float]] = deque(maxlen=WINDOW)

    def plan(self, lines: Sequence[PlanLine]) -> None:
        """The batch plan."""
        if not self.out.is_terminal:
            for line in lines:
                self.out.print(f"{line.what}: {line.figure} ({line.how})", markup=False)
            return
        table = Table("batch plan", "", "from", box=None, header_style="bold", padding=(0, 2, 0, 0))
        for line in lines:
            table.add_row(line.what, line.figure, f"[dim]{escape(line.how)}[/dim]")
        self.out.print(table)

    def start(self, step: int) -> None:
        """Begin to show progress and the limiter panel, on a terminal."""
        if self.out.is_terminal and self.shows_steps:
            self.progress = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=20),
                TimeRemainingColumn(),
                TextColumn("{task.fields[line]}"),
            )
            self.progress.add_task("train", total=self.num_steps, completed=step, line="")
            self.live = Live(self.progress, console=self.out, transient=True)
            self.live.start()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is done."""
        figures = [f"{short} {_figure(metrics[name])}" for name, short in STEP_LINE if name in metrics]
        if "critic/score/mean" in metrics:
            self.recent.append({"step": step, **metrics})
        if self.progress is not None and self.live is not None:
            room = max((self.out.width - 50) // 14, 1)  # figures that fit beside the bar
            self.progress.update(self.progress.task_ids[0], completed=step, line="  ".join(figures[:room]))
            self.live.update(Group(self.limiter_panel(), self.progress))
        elif self.shows_steps and "critic/score/mean" in metrics:
            self.out.print(f"step {step}/{self.num_steps}  {'  '.join(figures)}", markup=False)
        core = {
            name.removeprefix("val-core/"): value for name, value in metrics.items() if name.startswith("val-core/")
        }
        validation = [f"{name} {_figure(value)}" for name, value in core.items()]
        if validation:
            self.say(f"validation after step {step}: {', '.join(validation)}")

    def limiter_panel(self) -> Table:
        """The four limiters over the last steps: verdict and evidence."""
        table = Table("limiter", "verdict", "evidence", box=None, header_style="dim", padding=(0, 2, 0, 0))
        for verdict in limiter_verdicts(list(self.recent), self.config):
            style = VERDICT_STYLES[verdict.state]
            table.add_row(
                LIMITER_NAMES[verdict.limiter], f"[{style}]{verdict.state}[/{style}]", escape(verdict.evidence)
            )
        return table

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Some responses of a step."""
        for sample in samples:
            self.say(
                f"step {step} sample: {sample['prompt']!r} -> {sample['response']!r}  score {_figure(sample['score'])}"
            )

    def say(self, text: str) -> None:
        """A line of result or progress."""
        self.out.print(text, markup=False)

    def notice(self, text: str) -> None:
        """Something that the user should know of."""
        self.err.print(f"[yellow]Notice:[/yellow] {escape(text)}")

    def stop(self) -> None:
        """End the progress display."""
        if self.live is not None:
            self.live.stop()
            self.live = self.progress = None


def print_error(text: str) -> None:
    """An error that ends the run, to stderr."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"[bold red]Error:[/bold red] {escape(text)}")
    sys.stderr.flush()


def _figure(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
