"""Processes on devices: one Ray actor per device, placed over the nodes, joined in one process group.

A role (actor-rollout, reference, critic) is an object that lives in each of these processes; the roles of a pool share
processes and process group. On CPU a device is a process with a share of its node's cores.
"""

import faulthandler
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError, WorkerCrashedError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch.distributed.device_mesh import init_device_mesh

from trainer.errors import GovernorError, ResourceError, WorkerLostError

log = logging.getLogger(__name__)
HEARTBEAT_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSpec:
    """What a pool asks of the cluster."""

    nnodes: int
    devices_per_node: int
    device: str  # cpu or cuda
    cpu_threads: int
    timeout_s: float  # of a collective
    placement_timeout_s: float
    log_dir: str


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
        with (Path(spec.log_dir) / f"device_{rank}.log").open("ab") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        faulthandler.enable(2)
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", force=True)
        node = ray.get_runtime_context().get_node_id()
        log.info("rank %d, pid %d, address %s, node_id=%s", rank, os.getpid(), ray.util.get_node_ip_address(), node)

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

    def call(self, name: str, method: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Call a role's method."""
        return getattr(self.roles[name], method)(*arguments, **keywords)

    def save_rng(self, folder: str) -> None:
        """Write the state of this process's global random generators into a checkpoint's folder."""
        from workers.engine.random_state import save_random_state

        save_random_state(Path(folder) / f"rng_rank_{self.rank}")

    def load_rng(self, folder: str) -> None:
        """Restore what `save_rng` wrote; a rank that the checkpoint does not know starts anew."""
        from workers.engine.random_state import load_random_state

        load_random_state(Path(folder) / f"rng_rank_{self.rank}")

    def memory(self) -> dict[str, float]:
        """Peak memory in GiB: of the process, and of the GPU where there is one."""
        import resource

        peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        figures = {"cpu_memory_used_gb": peak_kib / 2**20}
        if self.spec.device == "cuda":
            figures["max_memory_allocated_gb"] = torch.cuda.max_memory_allocated() / 2**30
            figures["max_memory_reserved_gb"] = torch.cuda.max_memory_reserved() / 2**30
        return figures


class ResourcePool:
    """The driver's handle on the processes."""

    def __init__(self, spec: PoolSpec) -> None:
        """Place the processes and join them.

        Raises:
            ResourceError: the cluster does not have the devices, or not in time.
        """
        self.spec = spec
        self.size = spec.nnodes * spec.devices_per_node
        self._group = place(spec)
        remote = ray.remote(DeviceProcess)
        bundle = self._group.bundle_specs[0]
        gpus = 1 if spec.device == "cuda" else 0
        cpus = bundle["CPU"] / spec.devices_per_node
        nodes = _bundles_from_here(self._group)
        self.processes = [
            remote.options(
                num_cpus=cpus,
                num_gpus=gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=self._group, placement_group_bundle_index=nodes[rank // spec.devices_per_node]
                ),
            ).remote(rank, spec)
            for rank in range(self.size)
        ]
        address, port = self.gather([self.processes[0].rendezvous.remote()], "start")[0]
        self.gather([process.join.remote(self.size, address, port) for process in self.processes], "join")

    def build(self, name: str, role: Callable[..., Any], *arguments: Any) -> None:
        """Make a role in every process."""
        self.gather([process.build.remote(name, role, arguments) for process in self.processes], f"build {name}")

    def call(self, name: str, method: str, per_rank: Sequence[tuple[Any, ...]], **keywords: Any) -> list[Any]:
        """Call a role's method on every rank with that rank's arguments; results in the order of ranks."""
        calls = [
            process.call.remote(name, method, arguments, keywords)
            for process, arguments in zip(self.processes, per_rank, strict=True)
        ]
        return self.gather(calls, f"{name}.{method}")

    def call_all(self, name: str, method: str, *arguments: Any) -> list[Any]:
        """Call a role's method on every rank with the same arguments."""
        return self.call(name, method, [arguments] * self.size)

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
        while pending:
            done, pending = ray.wait(pending, timeout=HEARTBEAT_S)
            if not done:
                log.info(
                    "%s: waiting for %d of %d processes, %.0f s",
                    what,
                    len(pending),
                    len(references),
                    time.monotonic() - started,
                )
            for reference in done:
                get(reference, what)
        return [get(reference, what) for reference in references]

    def shutdown(self) -> None:
        """End the processes and give the devices back."""
        for process in self.processes:
            ray.kill(process)  # pyright: ignore[reportArgumentType]
        remove_placement_group(self._group)


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
        first = str(error).strip().splitlines()[0]
        raise WorkerLostError(f"a worker process was lost during {what}: {first}") from error


# --- placement -------------------------------------------------------------------------------------------------------


def place(spec: PoolSpec) -> PlacementGroup:
    """A placement group with one bundle per node, each on a node of its own.

    Raises:
        ResourceError: with a table of what is wanted and what the nodes have.
    """
    resource = "GPU" if spec.device == "cuda" else "CPU"
    nodes = [node for node in ray.nodes() if node["Alive"]]
    need = float(spec.devices_per_node) if resource == "GPU" else 0.001
    fitting = [node for node in nodes if node["Resources"].get(resource, 0) >= need]
    if len(fitting) < spec.nnodes:
        raise ResourceError(_shortage(spec, resource, nodes))
    cores = min(sorted((node["Resources"].get("CPU", 0.0) for node in fitting), reverse=True)[: spec.nnodes])
    bundle = {"CPU": float(spec.devices_per_node), "GPU": need} if resource == "GPU" else {"CPU": float(cores)}
    group = placement_group([dict(bundle) for _ in range(spec.nnodes)], strategy="STRICT_SPREAD")
    deadline = time.monotonic() + spec.placement_timeout_s
    while not group.wait(timeout_seconds=min(10, max(deadline - time.monotonic(), 0.1))):
        if time.monotonic() >= deadline:
            remove_placement_group(group)
            raise ResourceError(
                f"{_shortage(spec, resource, nodes)}\nThey are there, but others held them for "
                f"trainer.placement_timeout_s={spec.placement_timeout_s:g} s."
            )
        print(f"Waiting for {spec.nnodes} x {bundle}, which other jobs hold …", file=sys.stderr)
    return group


def _bundles_from_here(group: PlacementGroup) -> list[int]:
    """Bundle indexes, that of the driver's own node first: rank 0 writes checkpoints beside what the driver writes."""
    where = placement_group_table(group)["bundles_to_node_id"]
    here = ray.get_runtime_context().get_node_id()
    return sorted(where, key=lambda index: (where[index] != here, index))


def _shortage(spec: PoolSpec, resource: str, nodes: list[dict[str, Any]]) -> str:
    rows = [f"  {'node':<18}{resource:>6}{'wanted':>9}"]
    for index in range(max(len(nodes), spec.nnodes)):
        name = nodes[index]["NodeManagerAddress"] if index < len(nodes) else "(none)"
        there = nodes[index]["Resources"].get(resource, 0) if index < len(nodes) else 0
        wanted = spec.devices_per_node if index < spec.nnodes else 0
        rows.append(f"  {name:<18}{there:>6g}{wanted:>9}")
    return "\n".join(
        [
            f"The cluster does not have the devices: trainer.nnodes={spec.nnodes} x "
            f"trainer.n_gpus_per_node={spec.devices_per_node} on trainer.device={spec.device}.",
            *rows,
            "Lower trainer.nnodes or trainer.n_gpus_per_node, choose trainer.device=cpu, or join a larger cluster with RAY_ADDRESS.",
        ]
    )
