"""What the trainer hands out while it runs: to the run directory, the trackers and the terminal."""

from pathlib import Path
from typing import Any

from torch import Tensor

from config.schema import GovernorConfig
from trainer.batch import PPOBatch
from trainer.data.tokenizer import PolicyTokenizer
from trainer.display import Display
from trainer.metrics import Metrics
from trainer.rollouts import AboutBatch, save_batch
from trainer.run_dir import RunDir
from trainer.samples import sample_rows
from trainer.tracking import Trackers

SHOWN_SAMPLES = 2


class FileRecord:
    """A run's record: series in the run directory, trackers, the terminal."""

    def __init__(
        self,
        run_dir: RunDir,
        trackers: Trackers,
        display: Display,
        tokenizer: PolicyTokenizer,
        config: GovernorConfig,
        model_path: str,
        adapter_path: str | None,
    ) -> None:
        self.run_dir, self.trackers, self.display = run_dir, trackers, display
        self.tokenizer, self.config = tokenizer, config
        self.model_path, self.adapter_path = model_path, adapter_path

    def updates(self, step: int, role: str, updates: list[Metrics]) -> None:
        """One line per update in `updates.jsonl`."""
        lines = [{"step": step, "role": role, "update": i, **update} for i, update in enumerate(updates)]
        self.run_dir.append("updates.jsonl", lines)

    def samples(self, step: int, batch: PPOBatch, scored: list[Any], new_log_probs: Tensor) -> None:
        """Some responses in `samples.jsonl`, fewer on the terminal."""
        rows = sample_rows(
            step, batch, scored, new_log_probs, self.tokenizer.tokenizer, self.config.actor_rollout_ref.actor
        )
        self.run_dir.append("samples.jsonl", rows)
        self.display.samples(step, rows[:SHOWN_SAMPLES])

    def batch(self, step: int, batch: PPOBatch, kl_coef: float) -> None:
        """The whole batch, in `trainer.rollout_data_dir`."""
        choice = self.config.trainer.rollout_data_dir
        root = self.run_dir.root / "rollouts" if choice is True else Path(str(choice))
        about = AboutBatch(
            step=step,
            num_steps=self.display.num_steps,
            kl_coef=kl_coef,
            eos_token_ids=self.tokenizer.eos_token_ids,
            pad_token_id=self.tokenizer.pad_token_id,
            model_path=self.model_path,
            adapter_path=self.adapter_path,
        )
        save_batch(root, batch, about, self.config)

    def validation(self, step: int, metrics: Metrics) -> None:
        """A validation by itself: shown, and kept nowhere."""
        self.display.step(step, metrics)

    def metrics(self, step: int, metrics: Metrics) -> None:
        """One line in `metrics.jsonl`, the trackers, the terminal."""
        self.run_dir.append("metrics.jsonl", [{"step": step, **metrics}])
        self.trackers.log(metrics, step)
        self.display.step(step, metrics)
