"""Processes on devices: one Ray actor per device, placed over the nodes, each pool's joined in a process group.

A role (actor, rollout, reference, critic) is an object that lives in each process of its pool; the roles of a pool share
processes and process group. On CPU a device is a process with a share of its node's cores.
"""

import faulthandler
import logging
import os
import resource
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError, WorkerCrashedError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch.distributed.device_mesh import init_device_mesh

from trainer.errors import GovernorError, WorkerLostError, first_line
from workers.placement import Placement, PoolSpec, place, remove

log = logging.getLogger(__name__)
HEARTBEAT_S = 30.0


class DeviceProcess:
    """The process of one device; made a Ray actor by `ResourcePool`."""

    def __init__(self, rank: int, spec: PoolSpec) -> None:
        self.rank = rank
        self.spec = spec
        self.roles: dict[str, Any] = {}
        if spec.device == "cpu":
            torch.set_num_threads(spec.cpu_threads)
        Path(spec.log_dir).mkdir(parents=True, exist_ok=True)
        # All that this process prints, C++ libraries included, goes to its own file in the run directory.
        with (Path(spec.log_dir) / f"{spec.prefix}device_{rank}.log").open("ab") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        faulthandler.enable(2)
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", force=True)
        node = ray.get_runtime_context().get_node_id()
        where = f"pid {os.getpid()}, address {ray.util.get_node_ip_address()}, node_id={node}"
        log.info("pool %s, rank %d, %s", spec.name, rank, where)

    def rendezvous(self) -> tuple[str, int]:
        """Address of this process's node and a free port on it."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def join(self, world_size: int, address: str, port: int) -> None:
        """Enter the process group of all ranks."""
        from workers.engine.fsdp import DeviceContext

        on_gpu = self.spec.device == "cuda"
        device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(device)
        torch.distributed.init_process_group(
            backend="nccl" if on_gpu else "gloo",
            init_method=f"tcp://{address}:{port}",
            world_size=world_size,
            rank=self.rank,
            timeout=timedelta(seconds=self.spec.timeout_s),
        )
        mesh = init_device_mesh(self.spec.device, (world_size,))
        self.context = DeviceContext(self.rank, world_size, device, mesh)

    def build(self, name: str, role: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        """Make a role in this process."""
        self.roles[name] = role(self.context, *arguments)

    def call(self, name: str, method: str, *arguments: Any) -> Any:
        """Call a role's method. An argument that is a reference arrives as its value."""
        return getattr(self.roles[name], method)(*arguments)

    def call_and_keep(self, name: str, method: str, *arguments: Any) -> list[Any]:
        """As `call`, with the result left in the object store: a list of its reference, empty for None."""
        result = self.call(name, method, *arguments)
        return [] if result is None else [ray.put(result)]

    def save_rng(self, folder: str) -> None:
        """Write the state of this process's global random generators into a checkpoint's folder."""
        from workers.engine.random_state import save_random_state

        save_random_state(self._rng_path(folder))

    def load_rng(self, folder: str) -> None:
        """Restore what `save_rng` wrote; a rank or a pool that the checkpoint does not know starts anew."""
        from workers.engine.random_state import load_random_state

        load_random_state(self._rng_path(folder))

    def _rng_path(self, folder: str) -> Path:
        return Path(folder) / f"{self.spec.prefix}rng_rank_{self.rank}"

    def memory(self) -> dict[str, float]:
        """Peak memory in GiB: of the process, and of the GPU where there is one."""
        peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        figures = {"cpu_memory_used_gb": peak_kib / 2**20}
        if self.spec.device == "cuda":
            figures["max_memory_allocated_gb"] = torch.cuda.max_memory_allocated() / 2**30
            figures["max_memory_reserved_gb"] = torch.cuda.max_memory_reserved() / 2**30
        return figures


class ResourcePool:
    """The driver's handle on the processes of one pool."""

    def __init__(self, spec: PoolSpec, placement: Placement) -> None:
        """Start the processes; nothing is waited for."""
        self.spec = spec
        self.size = spec.nnodes * spec.devices_per_node
        remote = ray.remote(DeviceProcess)
        self.processes = [
            remote.options(
                num_cpus=placement.cpus_per_process,
                num_gpus=1 if spec.device == "cuda" else 0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=placement.group,
                    placement_group_bundle_index=placement.bundles[rank // spec.devices_per_node],
                ),
            ).remote(rank, spec)
            for rank in range(self.size)
        ]

    def join(self) -> None:
        """Bring the processes into one process group."""
        address, port = self.gather([self.processes[0].rendezvous.remote()], "start")[0]
        self.gather([process.join.remote(self.size, address, port) for process in self.processes], "join")

    def build(self, name: str, role: Callable[..., Any], *arguments: Any) -> None:
        """Make a role in every process."""
        self.gather([process.build.remote(name, role, arguments) for process in self.processes], f"build {name}")

    def call(self, name: str, method: str, per_rank: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a role's method on every rank with that rank's arguments; results in the order of ranks."""
        return self.gather(self.start(name, method, per_rank), f"{name}.{method}")

    def call_all(self, name: str, method: str, *arguments: Any) -> list[Any]:
        """Call a role's method on every rank with the same arguments."""
        return self.call(name, method, [arguments] * self.size)

    def start(self, name: str, method: str, per_rank: Sequence[tuple[Any, ...]]) -> list[Any]:
        """As `call`, without waiting: references for `gather`."""
        return [
            process.call.remote(name, method, *arguments)
            for process, arguments in zip(self.processes, per_rank, strict=True)
        ]

    def start_and_keep(self, name: str, method: str, *arguments: Any) -> list[Any]:
        """As `start` on every rank, for results that stay where they are: `gather` gives a list of references of each."""
        return [process.call_and_keep.remote(name, method, *arguments) for process in self.processes]

    def save_rng(self, folder: str) -> None:
        """Every process writes its random generators' state."""
        self.gather([process.save_rng.remote(folder) for process in self.processes], "save_rng")

    def load_rng(self, folder: str) -> None:
        """Every process restores its random generators' state."""
        self.gather([process.load_rng.remote(folder) for process in self.processes], "load_rng")

    def memory(self) -> dict[str, float]:
        """Peak memory in GiB, the largest of the processes."""
        figures = self.gather([process.memory.remote() for process in self.processes], "memory")
        return {name: max(figure[name] for figure in figures) for name in figures[0]}

    def gather(self, references: Sequence[Any], what: str) -> list[Any]:
        """Results of calls to the ranks, in order; the first failure ends the wait, since the others may hang on it.

        Raises:
            GovernorError: as the worker raised it.
            WorkerLostError: a process died.
        """
        pending, started = list(references), time.monotonic()
        where = f"{what} in pool {self.spec.name}"
        while pending:
            done, pending = ray.wait(pending, timeout=HEARTBEAT_S)
            if not done:
                waited = time.monotonic() - started
                log.info("%s: waiting for %d of %d processes, %.0f s", where, len(pending), len(references), waited)
            for reference in done:
                get(reference, where)
        return [get(reference, where) for reference in references]

    def shutdown(self) -> None:
        """End the processes."""
        for process in self.processes:
            ray.kill(process)  # pyright: ignore[reportArgumentType]


class Pools:
    """All pools of a run, by name."""

    def __init__(self, specs: Sequence[PoolSpec]) -> None:
        """Place the pools, start their processes and join each pool's.

        Raises:
            ResourceError: the cluster does not have the devices, or not in time.
        """
        self._placements = place(specs)
        self._pools: dict[str, ResourcePool] = {}
        try:
            for spec, placement in zip(specs, self._placements, strict=True):
                self._pools[spec.name] = ResourcePool(spec, placement)
            for pool in self._pools.values():
                pool.join()
        except BaseException:
            self.shutdown()
            raise

    def __getitem__(self, name: str) -> ResourcePool:
        return self._pools[name]

    def save_rng(self, folder: str) -> None:
        """Every process writes its random generators' state."""
        for pool in self._pools.values():
            pool.save_rng(folder)

    def load_rng(self, folder: str) -> None:
        """Every process restores its random generators' state."""
        for pool in self._pools.values():
            pool.load_rng(folder)

    def memory(self) -> dict[str, float]:
        """Peak memory in GiB, the largest of all processes."""
        figures = [pool.memory() for pool in self._pools.values()]
        return {name: max(figure[name] for figure in figures) for name in figures[0]}

    def shutdown(self) -> None:
        """End the processes and give the devices back."""
        for pool in self._pools.values():
            pool.shutdown()
        remove(placement.group for placement in self._placements)


def get(reference: Any, what: str) -> Any:
    """The value of a finished call, with Ray's wrapping of errors taken off.

    Raises:
        GovernorError: as it was raised.
        WorkerLostError: the process died.
    """
    try:
        return ray.get(reference, timeout=600)
    except RayTaskError as error:
        if isinstance(error.cause, GovernorError):
            raise type(error.cause)(str(error.cause)) from None
        raise
    except (RayActorError, WorkerCrashedError, GetTimeoutError) as error:
        raise WorkerLostError(
            f"a worker process was lost during {what}: {first_line(error)}. logs/ has what the processes "
            "printed. The same command again goes on from the newest checkpoint."
        ) from error
