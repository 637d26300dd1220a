"""`governor export`: the policy of a run or checkpoint in a folder of its own, as adapter or as a whole model."""

import json
import os
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from config.load import read_yaml
from trainer.checkpoint import MANIFEST, Checkpoint, CheckpointStore, why_invalid
from trainer.errors import CheckpointError, ConfigError
from workers.engine.fsdp import write_model
from workers.engine.lora import ADAPTER_FILES, POLICY, attach, base_of, check_base, merged_weights
from workers.engine.models import load_model


def export(source: Path, out: Path, *, merged: bool, base: Path | None) -> str:
    """Write the policy to `out`, and return what was written, in words.

    A LoRA adapter stays one in peft's format, or is merged into its base: the folder given, else the one that it was
    trained on. A policy that was trained whole is copied. Tokenizer and chat template come along.

    Raises:
        CheckpointError: the source has no checkpoint that holds.
        ConfigError: the target is there already or cannot be written, or the base is not there, or is another.
    """
    actor = _actor(source.resolve())
    if out.exists():
        raise ConfigError(f"--out={out}: is there already; name a new folder")
    if base is not None and not merged:
        raise ConfigError(f"--base={base}: only --merged reads the base; add it, or drop --base")
    aside = out.with_name(f".tmp-{out.name}")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"--out={out}: cannot be written: {error}; name another folder") from None
    is_adapter = (actor / ADAPTER_FILES[0]).exists()
    try:
        if is_adapter and merged:
            folder = _base(actor, base)
            _merge(actor, folder, aside)
            what = f"the model {folder} with the adapter of {actor} merged"
        else:
            shutil.copytree(actor, aside, dirs_exist_ok=True)
            if is_adapter and (found := _known_base(actor)) is not None:
                _name_base(aside, found)
            what = f"the {'adapter' if is_adapter else 'model'} of {actor}"
        os.rename(aside, out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return f"{out}: {what}"


def _actor(source: Path) -> Path:
    """The policy's folder of a checkpoint, or of a run's newest one that holds."""
    if (source / MANIFEST).exists():
        reason = why_invalid(source)
        if reason is not None:
            raise CheckpointError(f"{source}: {reason}")
        return source / "actor"
    found: Checkpoint | None = None
    if (source / "checkpoints").is_dir():
        found, _ = CheckpointStore(source / "checkpoints", max_to_keep=None).newest_valid()
    if found is None:
        raise CheckpointError(f"{source}: neither a checkpoint (checkpoints/global_step_N) nor a run that has one")
    return found.folder / "actor"


def _base(actor: Path, named: Path | None) -> Path:
    """The base's folder: the one named, else where it was, or the run's own model, which may have moved with the run."""
    if named is not None:
        if not (named / "config.json").exists():
            raise ConfigError(f"--base={named}: no Hugging Face model there (config.json is missing)")
        return named
    found = _known_base(actor)
    if found is None:
        raise ConfigError(
            f"{base_of(actor)}: the base that the adapter was trained on is not there; say where it is with --base"
        )
    return found


def _known_base(actor: Path) -> Path | None:
    candidates = (base_of(actor), actor.parents[2] / "model")
    return next((folder for folder in candidates if (folder / "config.json").exists()), None)


def _name_base(adapter: Path, base: Path) -> None:
    """Write where the base is into an adapter's own file, by which peft finds it."""
    path = adapter / ADAPTER_FILES[0]
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["base_model_name_or_path"] = str(base)
    path.write_text(json.dumps(settings, indent=2, sort_keys=True), encoding="utf-8")


def _merge(actor: Path, base: Path, out: Path) -> None:
    check_base(actor, str(base))
    run = actor.parents[2] / "config.yaml"
    settings = read_yaml(run)["actor_rollout_ref"]["model"] if run.exists() else {}
    model = load_model(
        AutoModelForCausalLM,
        str(base),
        dtype=torch.float32,
        override_config=settings.get("override_config", {}),
        trust_remote_code=settings.get("trust_remote_code", False),
    )
    attach(model, actor, POLICY)
    write_model(model, out, dict(merged_weights(model)))
    for path in actor.iterdir():
        if path.name not in ADAPTER_FILES:
            shutil.copy2(path, out / path.name)
