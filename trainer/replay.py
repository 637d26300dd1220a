"""`governor replay`: one kept batch, many settings. What would this step have done with another clip, KL or rate?

Each setting starts from the weights, the optimizer and the schedule before the step, and runs stages 7 to 9 of
`RayPPOTrainer.train_step` on the batch as it was. The first row has the recorded settings and equals what the run logged.
"""

import itertools
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from config.load import ConfigFaults, load_config, overrides_of
from config.pools import GLOBAL_POOL
from config.schema import GovernorConfig
from config.sweep import grid_of
from trainer.checkpoint import MANIFEST, why_invalid
from trainer.errors import CheckpointError, ConfigError
from trainer.metrics import Metrics
from trainer.rollouts import SavedBatch, load_batch

VARIED = ("actor_rollout_ref.actor.", "algorithm.")
COLUMNS = (
    ("actor/loss", "loss"),
    ("limiter/loss/pg", "pg"),
    ("limiter/loss/entropy", "entropy term"),
    ("limiter/loss/kl", "kl term"),
    ("limiter/push_share/pg", "push pg"),
    ("limiter/push_share/entropy", "push ent"),
    ("limiter/push_share/kl", "push kl"),
    ("actor/pg_clipfrac", "clip"),
    ("actor/pg_clipfrac_lower", "dual"),
    ("limiter/clip/removed", "removed"),
    ("rollout_corr/rollout_is_mean", "IS weight"),
    ("rollout_corr/rollout_rs_masked_fraction", "rejected"),
    ("limiter/probe/kl", "KL moved"),
    ("limiter/probe/entropy_after", "entropy after"),
    ("actor/grad_norm", "grad norm"),
    ("replay/distance", "distance"),
)


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table."""

    name: str
    config: GovernorConfig


def replay(batch_dir: Path, checkpoint: Path | None, overrides: Sequence[str]) -> str:
    """Run the settings, write `replay.md` and `replay.json` beside the batch, and return the Markdown table.

    Raises:
        DataError: not a saved batch.
        CheckpointError: a checkpoint that does not hold, or of another step.
        ConfigError: a setting that is refused, or that needs a field which the batch does not have.
    """
    saved = load_batch(batch_dir)
    start = _start(saved, checkpoint)
    settings = make_settings(saved, overrides)
    rows = _run(saved, start, settings)
    table = to_markdown([(setting.name, metrics) for setting, metrics in zip(settings, rows, strict=True)])
    record = [{"setting": s.name, **metrics} for s, metrics in zip(settings, rows, strict=True)]
    (batch_dir / "replay.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (batch_dir / "replay.md").write_text(table, encoding="utf-8")
    return table


def make_settings(saved: SavedBatch, overrides: Sequence[str]) -> list[Setting]:
    """The recorded setting, then the grid of the overrides, each checked against what the batch has.

    Raises:
        ConfigError: a key that a replay cannot vary, a value that is refused, or a field that is missing.
    """
    recorded = overrides_of(saved.config)
    settings, faults = [], []
    try:
        points = grid_of(overrides)
        for point in [(), *(point for point in points if point)]:
            wrong = [text for text in point if not text.startswith(VARIED)]
            faults += [f"{text}: a replay varies {' and '.join(f'{key}*' for key in VARIED)} alone" for text in wrong]
            config = load_config([*recorded, *point])
            name = " ".join(point) or "as recorded"
            faults += [f"{name}: {fault}" for fault in _missing(saved, config)]
            settings.append(Setting(name, config))
    except ConfigFaults as error:
        raise ConfigError(str(error)) from None
    if faults:
        raise ConfigError("\n".join(dict.fromkeys(faults)))
    return settings


def to_markdown(rows: Sequence[tuple[str, Metrics]]) -> str:
    """The table: a row per setting, the columns that any of them has."""
    columns = [(name, short) for name, short in COLUMNS if any(name in metrics for _, metrics in rows)]
    lines = [f"| setting | {' | '.join(short for _, short in columns)} |", "|---" * (len(columns) + 1) + "|"]
    for setting, metrics in rows:
        cells = [f"{metrics[name]:.4g}" if name in metrics else "–" for name, _ in columns]
        lines.append(f"| {setting} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _missing(saved: SavedBatch, config: GovernorConfig) -> list[str]:
    found = []
    if config.uses_reference and saved.batch.ref_log_prob is None:
        found.append("needs ref_log_prob, which the batch does not have: the run had no KL on")
    if config.uses_critic and saved.batch.values is None:
        found.append("needs values, which the batch does not have: the run had no critic")
    recorded = saved.config["algorithm"].get("rollout_correction", {}).get("bypass_mode", False)
    if config.algorithm.rollout_correction.bypass_mode != recorded:
        found.append("algorithm.rollout_correction.bypass_mode decides stage 4, which the kept batch has behind it")
    return found


def _start(saved: SavedBatch, checkpoint: Path | None) -> Path | None:
    """The checkpoint's folder; None for the run's first weights, which step 1 started from."""
    wanted = saved.about.step - 1
    if checkpoint is None:
        if wanted == 0:
            return None
        raise CheckpointError(
            f"{saved.folder} is of step {saved.about.step}: name the checkpoint of step {wanted} with --checkpoint"
        )
    if not checkpoint.is_dir():
        raise CheckpointError(f"--checkpoint={checkpoint}: no such folder")
    reason = why_invalid(checkpoint)
    if reason is not None:
        raise CheckpointError(f"--checkpoint={checkpoint}: {reason}")
    step = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))["step"]
    if step != wanted:
        raise CheckpointError(
            f"--checkpoint={checkpoint} is of step {step}; {saved.folder} of step {saved.about.step} started from step {wanted}"
        )
    return checkpoint


class _Updates:
    """Keeps nothing: a replay's figures are what `update_actor` returns."""

    def updates(self, step: int, role: str, updates: list[Metrics]) -> None:
        """Nothing."""


def _run(saved: SavedBatch, start: Path | None, settings: Sequence[Setting]) -> list[Metrics]:
    import ray

    from trainer.ray_session import start_ray
    from trainer.roles import open_pools

    config = settings[0].config
    started = start_ray(config)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            pools = open_pools(config, Path(scratch) / "logs", names=[GLOBAL_POOL])  # the actor alone is replayed
            try:
                return [_one(saved, start, setting.config, pools[GLOBAL_POOL], Path(scratch)) for setting in settings]
            finally:
                pools.shutdown()
    finally:
        if started:
            ray.shutdown()


def _one(saved: SavedBatch, start: Path | None, config: GovernorConfig, pool: Any, scratch: Path) -> Metrics:
    """One setting's metrics: stages 7 to 9, the probe, and how far the weights moved."""
    from trainer.data.dataset import PromptDataset
    from trainer.ppo.ray_trainer import RayPPOTrainer, WorkerGroups
    from workers.engine.models import AdapterSpec, PolicySpec
    from workers.groups import ActorRolloutGroup

    about = saved.about
    first = str(start / "actor") if start else about.adapter_path or about.model_path
    spec = PolicySpec(path=first, eos_token_ids=about.eos_token_ids, pad_token_id=about.pad_token_id)
    if about.adapter_path is not None:
        spec = replace(spec, path=about.model_path, adapter=AdapterSpec(path=first, reference=None))
    actor = ActorRolloutGroup(pool, config.actor_rollout_ref, spec)
    if start is not None:
        actor.load_optimizer(str(start))
    trainer = RayPPOTrainer(
        config,
        groups=WorkerGroups(actor_rollout=actor, reward=None, reference=None, critic=None),  # pyright: ignore
        train_set=PromptDataset([], [], 0, 0),
        val_set=None,
        pad_token_id=about.pad_token_id,
        num_steps=about.num_steps,
        record=_Updates(),  # pyright: ignore[reportArgumentType]
        checkpoints=None,  # pyright: ignore[reportArgumentType]
    )
    trainer.step = about.step
    recorded_coefficient = saved.config["algorithm"]["kl_ctrl"]["kl_coef"]
    if config.algorithm.kl_ctrl.kl_coef == recorded_coefficient:
        trainer.kl_ctrl.load_state_dict({"value": about.kl_coef})  # where the run's controller had got to
    batch = saved.batch.clone()
    metrics = trainer.apply_kl(batch) | trainer.correct_rollout(batch) | trainer.compute_advantages(batch)
    metrics |= trainer.update_actor(batch) | trainer.probe(batch)
    actor.save(str(scratch))
    return metrics | {"replay/distance": _distance(Path(first), scratch / "actor")}


def _distance(before: Path, after: Path) -> float:
    """Euclidean distance of two models' weights, with LoRA of two adapters'."""
    old, new = (
        dict(itertools.chain.from_iterable(load_file(path).items() for path in sorted(folder.glob("*.safetensors"))))
        for folder in (before, after)
    )
    return sum(float((new[name].double() - old[name].double()).square().sum()) for name in new if name in old) ** 0.5
