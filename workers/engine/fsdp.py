"""The engine of a role: a model sharded with FSDP2, its optimizer, and what is saved of both.

The same code runs one process or many, over gloo on CPUs and NCCL on GPUs. `dtype` is the precision of forward and
backward; weights, gradients and optimizer state are float32 masters, float64 with float64.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from config.schema import FSDPConfig, OptimConfig
from trainer.errors import DivergedError
from workers.engine.offload import Offload
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
        self._offload = Offload(
            self.module,
            self.optimizer,
            context.device,
            params=config.param_offload,
            optimizer_state=config.optimizer_offload,
        )

    @contextmanager
    def loaded(self, *, optimizer: bool = False) -> Iterator[None]:
        """A phase: what the configuration offloads is on the device inside. Phases may be nested.

        It ends with the weights sharded. With `reshard_after_forward=false` a forward without a backward would leave the
        gathered ones in place of the parameters: rounded to the compute precision, and strangers to the optimizer.
        """
        with self._offload.loaded(optimizer=optimizer):
            try:
                yield
            finally:
                for module in self.module.modules():
                    if isinstance(module, FSDPModule):
                        module.reshard()

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
        grad_norm = self._clip_gradient(grad_clip)
        if not grad_norm < float("inf"):
            raise DivergedError(f"the gradient norm is {grad_norm}; the update was not applied")
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        return UpdateOutcome({name: float(value) for name, value in metrics.items()}, grad_norm)

    def _clip_gradient(self, limit: float) -> float:
        """Scale the gradient down to the limit where its norm is larger; the norm before, over all ranks."""
        gradients = [local_part(p.grad) for p in self.module.parameters() if p.grad is not None]
        square = torch.nn.utils.get_total_norm(gradients).square()
        torch.distributed.all_reduce(square, group=self.context.mesh.get_group())
        norm = float(square.sqrt())
        if norm > limit:
            for gradient in gradients:
                gradient.mul_(limit / (norm + 1e-6))
        return norm

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Name and full value of each parameter, named as in the Hugging Face model. A collective: all ranks draw all."""
        with self.loaded():
            for name, parameter in self.hf_model.named_parameters():
                yield name, full_value(parameter.detach())

    def save(self, folder: Path, name: str) -> None:
        """Write `folder/name` (opens with from_pretrained) and the optimizer beside it. A collective; rank 0 writes.

        An optimizer that has no state yet, or never has (SGD), has no file.
        """
        assert self.optimizer is not None, "only what is trained is saved"
        weights, slots = {}, {}
        with self.loaded(optimizer=True):
            for key, parameter in self.saved_parameters():
                weights[key] = full_value(parameter.detach()).cpu()
                for slot, value in self.optimizer.state.get(parameter, {}).items():
                    slots[f"{key}/{slot}"] = full_value(value).cpu()
        if self.context.rank != 0:
            return
        self.write_model(folder / name, weights)
        if slots:
            save_file({key: value.contiguous() for key, value in slots.items()}, self._optimizer_path(folder, name))
        for path in [self._optimizer_path(folder, name), *(folder / name).iterdir()]:
            fsync(path)

    def saved_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Name and sharded value of each parameter that a checkpoint holds."""
        return self.hf_model.named_parameters()

    def write_model(self, folder: Path, weights: dict[str, Tensor]) -> None:
        """Write a model's folder on this rank."""
        write_model(self.hf_model, folder, weights)

    def load_optimizer(self, folder: Path, name: str) -> None:
        """Go on from the optimizer state that `save` wrote, on any number of ranks; without a file it starts anew."""
        assert self.optimizer is not None, "this model is not trained"
        path = self._optimizer_path(folder, name)
        if not path.exists():
            return
        parameters = dict(self.hf_model.named_parameters())
        with self.loaded(optimizer=True):
            for key, value in load_file(path).items():
                key, slot = key.rsplit("/", 1)
                parameter = parameters[key]
                if value.shape == parameter.shape:
                    value, whole = torch.zeros_like(parameter), value
                    local_part(value).copy_(own_part(whole, parameter))
                self.optimizer.state[parameter][slot] = value

    @staticmethod
    def _optimizer_path(folder: Path, name: str) -> Path:
        return folder / f"{name}_optimizer.safetensors"


# Weights and optimizer states are sharded by rows, as torch.chunk cuts them. They are gathered with plain collectives:
# DTensor's own, which torch runs asynchronously, crashed once over gloo on a busy machine.


def local_part(value: Tensor) -> Tensor:
    """This rank's rows of a sharded tensor, sharing its memory."""
    return value.to_local() if isinstance(value, DTensor) else value


def own_part(whole: Tensor, like: Tensor) -> Tensor:
    """The rows of a whole tensor that this rank has of the sharded `like`."""
    if not isinstance(like, DTensor):
        return whole
    mesh = like.device_mesh
    height = -(-whole.shape[0] // mesh.size())
    return whole[mesh.get_local_rank() * height :][: len(like.to_local())]


def full_value(value: Tensor) -> Tensor:
    """The whole of a sharded tensor, on every rank. A collective."""
    if not isinstance(value, DTensor):
        return value
    local, mesh = value.to_local(), value.device_mesh
    height = -(-value.shape[0] // mesh.size())
    padded = local.new_zeros(height, *value.shape[1:])
    padded[: len(local)] = local
    whole = local.new_empty(height * mesh.size(), *value.shape[1:])
    torch.distributed.all_gather_into_tensor(whole, padded, group=mesh.get_group())
    return whole[: value.shape[0]]


def shard(module: nn.Module, mesh: DeviceMesh, config: FSDPConfig) -> nn.Module:
    """Shard each decoder layer, then the rest (embeddings, norms, head), so that tied weights stay in one group."""
    policy = MixedPrecisionPolicy()
    if config.dtype == "bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": config.reshard_after_forward}
    for layer in decoder_layers(module):
        fully_shard(layer, **options)
    fully_shard(module, **options)
    return module


def decoder_layers(module: nn.Module) -> list[nn.Module]:
    """The decoder layers of a policy or critic."""
    classes = set(getattr(module.model, "_no_split_modules", None) or ())
    return [layer for layer in module.modules() if type(layer).__name__ in classes]


def make_optimizer(module: nn.Module, optim: OptimConfig) -> torch.optim.Optimizer:
    """The optimizer of `….optim` over what is trained; its learning rate is set anew before every update."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if optim.optimizer == "SGD":
        return torch.optim.SGD(trained, lr=optim.lr, weight_decay=optim.weight_decay)
    betas = (optim.betas[0], optim.betas[1])
    return torch.optim.AdamW(trained, lr=optim.lr, betas=betas, eps=optim.eps, weight_decay=optim.weight_decay)


def write_model(model: Any, folder: Path, weights: dict[str, Tensor]) -> None:
    """Write a Hugging Face model's folder with these weights."""
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.do_sample = True  # else transformers refuses to save a temperature
    model.save_pretrained(folder, state_dict=weights)


def fsync(path: Path) -> None:
    """Wait until a file, or a folder's list of files, is on the disk."""
    if not path.exists():
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
