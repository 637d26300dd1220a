"""The engine of a role: a model sharded with FSDP2, its optimizer, and what is saved of both.

The same code runs one process or many, over gloo on CPUs and NCCL on GPUs. Weights, gradients and optimizer state are
float32 masters; `dtype` is the precision of forward and backward.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from config.schema import FSDPConfig, OptimConfig
from trainer.errors import DivergedError
from workers.losses import LossShare


@dataclass(frozen=True, slots=True)
class DeviceContext:
    """Where a role lives: its process's rank, device and process group."""

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh


@dataclass(slots=True)
class UpdateOutcome:
    """What one optimizer update did on this rank."""

    metrics: dict[str, float]  # this rank's shares; they add up over ranks
    grad_norm: float  # of the whole gradient before clipping, the same on all ranks


class FSDPEngine:
    """A sharded model with its optimizer (None for a model that is never trained)."""

    def __init__(
        self, module: nn.Module, *, context: DeviceContext, config: FSDPConfig, optim: OptimConfig | None
    ) -> None:
        self.context = context
        self.hf_model: Any = module.model
        self.module = shard(module, context.mesh, config)
        self.optimizer = None if optim is None else make_optimizer(self.module, optim)

    def update(self, shares: Iterable[LossShare], *, lr: float, grad_clip: float) -> UpdateOutcome:
        """One optimizer update from the loss shares of this rank's pieces, each computed as it is drawn.

        Raises:
            DivergedError: the gradient is not finite; the weights are left as they were.
        """
        assert self.optimizer is not None, "this model is not trained"
        metrics: dict[str, Tensor] = {}
        for share in shares:
            # FSDP averages gradients over ranks; the shares of all ranks are to be added.
            (share.loss * self.context.world_size).backward()
            for name, value in share.metrics.items():
                metrics[name] = metrics[name] + value if name in metrics else value
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), grad_clip)
        grad_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if not grad_norm < float("inf"):
            raise DivergedError(f"the gradient norm is {grad_norm}; the update was not applied")
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        return UpdateOutcome({name: float(value) for name, value in metrics.items()}, grad_norm)

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Name and full value of each parameter, named as in the Hugging Face model. A collective: all ranks draw all."""
        for name, parameter in self.hf_model.named_parameters():
            value = parameter.detach()
            yield name, value.full_tensor() if isinstance(value, DTensor) else value

    def save(self, folder: Path, name: str) -> None:
        """Write `folder/name` (opens with from_pretrained) and the optimizer beside it. A collective; rank 0 writes.

        An optimizer without state (not stepped yet, or SGD) has no file: to ask torch for its state would step it.
        """
        assert self.optimizer is not None, "only what is trained is saved"
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(self.hf_model, options=options)
        optimizer: dict[str, Any] = {}
        if self.optimizer.state:
            optimizer = get_optimizer_state_dict(self.module, self.optimizer, options=options)
        if self.context.rank != 0:  # where both are empty
            return
        kept = {key for key, _ in self.hf_model.named_parameters()}
        tied = {key for key, _ in self.hf_model.named_parameters(remove_duplicate=False)} - kept
        if getattr(self.hf_model, "generation_config", None) is not None:
            self.hf_model.generation_config.do_sample = True  # else transformers refuses to save a temperature
        weights = {key: value for key, value in weights.items() if key not in tied}
        self.hf_model.save_pretrained(folder / name, state_dict=weights)
        if optimizer:
            state = optimizer["state"].items()
            tensors = {f"{parameter}/{slot}": value for parameter, slots in state for slot, value in slots.items()}
            save_file(tensors, folder / f"{name}_optimizer.safetensors")
        for path in [folder / f"{name}_optimizer.safetensors", *(folder / name).iterdir()]:
            fsync(path)

    def load_optimizer(self, path: Path) -> None:
        """Go on from the optimizer state that `save` wrote, on any number of ranks; without a file it starts anew."""
        assert self.optimizer is not None, "this model is not trained"
        if not path.exists():
            return
        slots: dict[str, dict[str, Tensor]] = {}
        for key, value in load_file(path).items():
            parameter, slot = key.rsplit("/", 1)
            slots.setdefault(parameter, {})[slot] = value
        options = StateDictOptions(full_state_dict=True)
        groups = get_optimizer_state_dict(self.module, self.optimizer)["param_groups"]
        state = {"state": slots, "param_groups": groups}
        set_optimizer_state_dict(self.module, self.optimizer, state, options=options)


def shard(module: nn.Module, mesh: DeviceMesh, config: FSDPConfig) -> nn.Module:
    """Shard each decoder layer, then the rest (embeddings, norms, head), so that tied weights stay in one group."""
    policy = MixedPrecisionPolicy()
    if config.dtype == "bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layer_classes = set(getattr(module.model, "_no_split_modules", None) or ())
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": config.reshard_after_forward}
    for layer in [layer for layer in module.modules() if type(layer).__name__ in layer_classes]:
        fully_shard(layer, **options)
    fully_shard(module, **options)
    return module


def make_optimizer(module: nn.Module, optim: OptimConfig) -> torch.optim.Optimizer:
    """The optimizer of `….optim`; its learning rate is set anew before every update."""
    if optim.optimizer == "SGD":
        return torch.optim.SGD(module.parameters(), lr=optim.lr, weight_decay=optim.weight_decay)
    betas = (optim.betas[0], optim.betas[1])
    return torch.optim.AdamW(
        module.parameters(), lr=optim.lr, betas=betas, eps=optim.eps, weight_decay=optim.weight_decay
    )


def fsync(path: Path) -> None:
    """Wait until a file, or a folder's list of files, is on the disk."""
    if not path.exists():
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
