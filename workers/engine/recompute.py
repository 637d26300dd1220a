"""Gradient checkpointing: a decoder layer keeps its input alone, and its backward runs the forward once more."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from workers.engine.fsdp import decoder_layers


def recompute_layers(module: nn.Module) -> None:
    """Let each decoder layer recompute what it does not keep. Before sharding: the layer gathers its weights outside.

    The switch of transformers acts in training mode only, which would bring dropout back.
    """
    for layer in decoder_layers(module):
        layer.forward = partial(_recomputed, layer.forward)


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # Nothing random happens in a layer, so no generator's state is kept.
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
