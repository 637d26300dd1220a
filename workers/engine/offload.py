"""Weights and optimizer state on the host between the phases that need them on the device.

A phase (scoring, a step's updates, a push of the weights, a checkpoint) brings what it needs and takes it back. On a CPU
the same code copies within the one memory there is: numbers stay, nothing is saved.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn


class Offload:
    """Where a sharded model and its optimizer's state are kept; phases may be nested."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        device: torch.device,
        *,
        params: bool,
        optimizer_state: bool,
    ) -> None:
        self.module, self.optimizer, self.device = module, optimizer, device
        self.params = params
        self.optimizer_state = optimizer_state and optimizer is not None
        self._depth = {"params": 0, "optimizer": 0}  # phases that are open
        if params:
            self._move_params(torch.device("cpu"))
            self._free()

    @contextlib.contextmanager
    def loaded(self, *, optimizer: bool = False) -> Iterator[None]:
        """The weights, and the optimizer's state if asked for, are on the device inside."""
        with contextlib.ExitStack() as stack:
            if self.params:
                stack.enter_context(self._phase("params"))
            if self.optimizer_state and optimizer:
                stack.enter_context(self._phase("optimizer"))
            yield

    @contextlib.contextmanager
    def _phase(self, part: str) -> Iterator[None]:
        move = self._move_params if part == "params" else self._move_optimizer
        if self._depth[part] == 0:
            move(self.device)
        self._depth[part] += 1
        try:
            yield
        finally:
            self._depth[part] -= 1
            if self._depth[part] == 0:
                move(torch.device("cpu"))
                self._free()

    def _move_params(self, where: torch.device) -> None:
        # FSDP2 reshards first and takes the moved shards up; the parameters stay the objects that the optimizer knows.
        self.module._apply(lambda tensor: self._moved(tensor, where))

    def _move_optimizer(self, where: torch.device) -> None:
        assert self.optimizer is not None
        for slots in self.optimizer.state.values():
            for name, value in slots.items():
                if isinstance(value, Tensor) and value.dim() > 0:  # AdamW's step counter lives on the host anyway
                    slots[name] = self._moved(value, where)

    def _moved(self, tensor: Tensor, where: torch.device) -> Tensor:
        if self.device.type == "cpu":
            return tensor.to(where, copy=True)
        # Without blocking, a copy to the host goes to pinned memory, from which the way back is asynchronous too.
        moved = tensor.to(where, non_blocking=True)
        if where.type == "cpu":
            torch.cuda.current_stream(self.device).synchronize()  # FSDP2 may read the shard right away, to pad it
        return moved

    def _free(self) -> None:
        """Give the device's memory back to other processes, such as a sampler's."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
