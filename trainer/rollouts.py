"""A step's whole batch on disk, as it stands before stage 7, so that the rest of the step can be run again.

`step_N/` holds `batch.safetensors` (tensors), `rows.jsonl` (per-row objects), `about.json` and the run's `config.yaml`.
"""

import dataclasses
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from config.load import read_yaml, to_yaml
from config.schema import GovernorConfig
from trainer.batch import PPOBatch, per_row
from trainer.errors import DataError


@dataclass(frozen=True, slots=True)
class AboutBatch:
    """What a step depends on besides its batch and the weights."""

    step: int
    num_steps: int  # of the run, for the learning rate's schedule
    kl_coef: float  # of the KL controller before the step
    eos_token_ids: list[int]
    pad_token_id: int
    model_path: str  # the run's first weights
    adapter_path: str | None = None  # with LoRA, its first adapter on them


@dataclass(frozen=True, slots=True)
class SavedBatch:
    """A batch that was read back."""

    folder: Path
    batch: PPOBatch
    about: AboutBatch
    config: dict  # the run's configuration, plain


def save_batch(root: Path, batch: PPOBatch, about: AboutBatch, config: GovernorConfig) -> Path:
    """Write `root/step_N`, by one rename; a folder that is there already is replaced."""
    folder = root / f"step_{about.step}"
    aside = root / f".tmp-step_{about.step}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    names = [field.name for field in dataclasses.fields(PPOBatch)]  # pyright: ignore[reportArgumentType]
    values = {name: getattr(batch, name) for name in names}
    save_file(
        {name: value.contiguous() for name, value in values.items() if isinstance(value, Tensor)},
        aside / "batch.safetensors",
    )
    rows = [{"uid": uid, **extras} for uid, extras in zip(batch.uid, batch.extras, strict=True)]
    (aside / "rows.jsonl").write_text("".join(json.dumps(row, default=repr) + "\n" for row in rows), encoding="utf-8")
    (aside / "about.json").write_text(json.dumps(dataclasses.asdict(about), indent=1), encoding="utf-8")
    (aside / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(aside, folder)
    return folder


def load_batch(folder: Path) -> SavedBatch:
    """What `save_batch` wrote.

    Raises:
        DataError: the folder is not one of a saved batch.
    """
    try:
        tensors: dict[str, Any] = load_file(folder / "batch.safetensors")
        lines = (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()
        about = AboutBatch(**json.loads((folder / "about.json").read_text(encoding="utf-8")))
        config = read_yaml(folder / "config.yaml")
    except (OSError, ValueError, TypeError) as error:
        raise DataError(
            f"{folder}: is not a saved batch: {error}. Batches are kept by trainer.rollout_data_dir, as rollouts/step_N."
        ) from None
    rows = [json.loads(line) for line in lines]
    uid = per_row([row.pop("uid") for row in rows])
    batch = PPOBatch(**tensors, uid=uid, extras=per_row(rows), batch_size=[len(rows)])
    return SavedBatch(folder, batch, about, config)
