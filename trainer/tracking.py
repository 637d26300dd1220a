"""Trackers that mirror `metrics.jsonl`. A tracker that fails is dropped with one warning; the run goes on."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


class WandbTracker:
    """Weights & Biases; offline when there is no key. All its files lie in the run directory."""

    def __init__(self, *, project: str, name: str, folder: Path, run_id: str | None, config: dict[str, Any]) -> None:
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        for variable in ("WANDB_CACHE_DIR", "WANDB_DATA_DIR"):  # else logs and staged files go to the home folder
            os.environ.setdefault(variable, str(folder / "wandb"))
        has_key = bool(os.environ.get("WANDB_API_KEY")) or _netrc_has_wandb()
        mode = os.environ.get("WANDB_MODE") or ("online" if has_key else "offline")
        self.run = wandb.init(
            project=project,
            name=name,
            dir=str(folder),
            id=run_id,
            resume="allow",
            config=config,
            mode=mode,  # pyright: ignore
        )
        self.run_id = self.run.id

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Take a step's metrics."""
        self.run.log(dict(metrics), step=step)

    def close(self) -> None:
        """End the run at the tracker."""
        self.run.finish()


class TensorboardTracker:
    """TensorBoard event files in the run directory. Needs the extra `tensorboard`."""

    run_id = None

    def __init__(self, *, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(log_dir=str(folder))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Take a step's metrics."""
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is pending."""
        self.writer.close()


class Trackers:
    """All trackers of a run; none of them can end it."""

    def __init__(
        self,
        names: Sequence[str],
        *,
        project: str,
        name: str,
        root: Path,
        run_ids: Mapping[str, str],
        config: dict[str, Any],
        warn: Callable[[str], None],
    ) -> None:
        self.warn = warn
        self.active: dict[str, Any] = {}
        makers: dict[str, Callable[[], Any]] = {
            "wandb": lambda: WandbTracker(
                project=project, name=name, folder=root, run_id=run_ids.get("wandb"), config=config
            ),
            "tensorboard": lambda: TensorboardTracker(folder=root / "tensorboard"),
        }
        for tracker in names:
            if tracker in makers:
                self._guard(tracker, lambda tracker=tracker: self.active.update({tracker: makers[tracker]()}))

    @staticmethod
    def none(warn: Callable[[str], None]) -> "Trackers":
        """No tracker."""
        return Trackers((), project="", name="", root=Path(), run_ids={}, config={}, warn=warn)

    def run_ids(self) -> dict[str, str]:
        """The ids under which trackers know the run, for resuming there."""
        return {name: tracker.run_id for name, tracker in self.active.items() if tracker.run_id}

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Hand a step's metrics to all trackers."""
        for name, tracker in list(self.active.items()):
            self._guard(name, lambda tracker=tracker: tracker.log(metrics, step))

    def close(self) -> None:
        """End all trackers."""
        for name, tracker in list(self.active.items()):
            self._guard(name, tracker.close)

    def _guard(self, name: str, action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception as error:  # whatever a tracker does, it must not cost a run
            self.active.pop(name, None)
            hint = (
                "; install the extra: pip install 'governor-rl[tensorboard]'" if isinstance(error, ImportError) else ""
            )
            self.warn(f"The tracker {name} failed and is left out from here on; metrics.jsonl has all: {error}{hint}")


def _netrc_has_wandb() -> bool:
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    return path.is_file() and "api.wandb.ai" in path.read_text(encoding="utf-8", errors="replace")
