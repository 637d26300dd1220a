"""The global random generators of a process, to and from files without pickle.

Nothing of Governor's draws from them; a model's own code, or a user's, might.
"""

import json
import random
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from workers.engine.fsdp import fsync


def save_random_state(stem: Path) -> None:
    """Write `stem.safetensors` (torch, CUDA) and `stem.json` (python, numpy)."""
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)  # pyright: ignore
    version, internal, gauss_next = random.getstate()
    state = {
        "python": [version, list(internal), gauss_next],
        "numpy": [name, np.asarray(keys).tolist(), int(position), int(has_gauss), float(gauss)],
    }
    save_file(tensors, stem.with_suffix(".safetensors"))
    stem.with_suffix(".json").write_text(json.dumps(state))
    for suffix in (".safetensors", ".json"):
        fsync(stem.with_suffix(suffix))


def load_random_state(stem: Path) -> None:
    """Restore what `save_random_state` wrote; does nothing where there is no such file."""
    if not stem.with_suffix(".json").exists():
        return
    tensors = load_file(stem.with_suffix(".safetensors"))
    torch.set_rng_state(tensors["torch"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])
    state = json.loads(stem.with_suffix(".json").read_text())
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
