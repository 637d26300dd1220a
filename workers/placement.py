"""Where the processes of a run's pools lie: placement groups over the nodes of the cluster."""

import math
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from config.pools import GLOBAL_POOL, pool_key
from trainer.errors import ResourceError


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSpec:
    """What a pool asks of the cluster."""

    name: str
    nnodes: int
    devices_per_node: int
    device: str  # cpu or cuda
    cpu_threads: int
    timeout_s: float  # of a collective
    placement_timeout_s: float
    log_dir: str

    @property
    def prefix(self) -> str:
        """What names of the pool's files begin with; nothing for the pool that every run has."""
        return "" if self.name == GLOBAL_POOL else f"{self.name}_"


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a pool's processes run."""

    group: PlacementGroup
    bundles: list[int]  # of the group, one per node
    cpus_per_process: float


def place(specs: Sequence[PoolSpec]) -> list[Placement]:
    """Where each pool runs: each of its nodes another one, nodes shared by pools where there are too few.

    All of a run's devices are asked for before any is waited for, so that its pools cannot wait for each other.

    Raises:
        ResourceError: with a table of what is wanted and what the nodes have.
    """
    nodes = [node for node in ray.nodes() if node["Alive"]]
    resource = "GPU" if specs[0].device == "cuda" else "CPU"
    if not _may_fit(specs, resource, nodes):
        raise ResourceError(_shortage(specs, resource, nodes))
    apart = resource == "CPU" and sum(spec.nnodes for spec in specs) <= sum(_has(node, "CPU") > 0 for node in nodes)
    placed = _on_own_nodes(specs, nodes) if apart else _on_shared_nodes(specs, resource, nodes)
    try:
        _wait([group for group, _ in placed], specs, resource, nodes)
    except BaseException:
        remove(group for group, _ in placed)
        raise
    if not apart:
        return [Placement(group, _bundles_from_here(group), cpus) for group, cpus in placed]
    group = placed[0][0]
    bundles = iter(_bundles_from_here(group))
    return [
        Placement(group, [next(bundles) for _ in range(spec.nnodes)], cpus)
        for spec, (_, cpus) in zip(specs, placed, strict=True)
    ]


def _on_own_nodes(specs: Sequence[PoolSpec], nodes: list[dict[str, Any]]) -> list[tuple[PlacementGroup, float]]:
    """One group for all pools with a whole node per bundle: no pool shares cores with another."""
    num_nodes = sum(spec.nnodes for spec in specs)
    cores = sorted((_has(node, "CPU") for node in nodes), reverse=True)[num_nodes - 1]
    group = placement_group([{"CPU": cores} for _ in range(num_nodes)], strategy="STRICT_SPREAD")
    return [(group, _share(cores, spec.devices_per_node)) for spec in specs]


def _on_shared_nodes(
    specs: Sequence[PoolSpec], resource: str, nodes: list[dict[str, Any]]
) -> list[tuple[PlacementGroup, float]]:
    """A group per pool, the largest first, since small ones find room beside others."""
    cpus = _cores_beside_others(specs, resource, nodes)
    groups = {}
    for spec in sorted(specs, key=lambda spec: -spec.devices_per_node):
        bundle = {"CPU": _round_down(cpus * spec.devices_per_node)}
        if resource == "GPU":
            bundle["GPU"] = float(spec.devices_per_node)
        groups[spec.name] = placement_group([dict(bundle) for _ in range(spec.nnodes)], strategy="STRICT_SPREAD")
    return [(groups[spec.name], cpus) for spec in specs]


def _cores_beside_others(specs: Sequence[PoolSpec], resource: str, nodes: list[dict[str, Any]]) -> float:
    """Cores for each device where any pool may come to lie beside any other."""
    if resource == "GPU":
        # One, or less where a node has fewer cores than GPUs: they must not keep its GPUs out of reach.
        gpus = [(_has(node, "CPU"), _has(node, "GPU")) for node in nodes if _has(node, "GPU") > 0]
        return min(1.0, *(_share(cores, int(devices)) for cores, devices in gpus))
    widest = max(spec.nnodes for spec in specs)
    cores = sorted((_has(node, "CPU") for node in nodes), reverse=True)[widest - 1]
    return _share(cores, sum(spec.devices_per_node for spec in specs))


def _share(cores: float, devices: int) -> float:
    """Cores for each of a node's devices, less than one where there are more devices."""
    return _round_down(cores / devices)


def _round_down(cpus: float) -> float:
    return max(math.floor(round(cpus * 1e4, 3)) / 1e4, 1e-4)  # the steps in which Ray counts


def _wait(
    groups: Sequence[PlacementGroup], specs: Sequence[PoolSpec], resource: str, nodes: list[dict[str, Any]]
) -> None:
    """Wait until all groups have their devices.

    Raises:
        ResourceError: not in time.
    """
    timeout = specs[0].placement_timeout_s
    deadline = time.monotonic() + timeout
    for group, spec in zip(groups, specs, strict=True):
        # In whole seconds, as Ray counts: a part of one would not be waited for at all.
        while not group.wait(timeout_seconds=min(10, max(math.ceil(deadline - time.monotonic()), 1))):
            if time.monotonic() >= deadline:
                raise ResourceError(
                    f"{_shortage(specs, resource, nodes)}\nThey are there, but others held them for "
                    f"trainer.placement_timeout_s={timeout:g} s; pool {spec.name} got none."
                )
            wanted = f"{spec.nnodes} x {spec.devices_per_node}"
            print(f"Waiting for the {wanted} devices of pool {spec.name}, which other jobs hold …", file=sys.stderr)


def remove(groups: Iterable[PlacementGroup]) -> None:
    """Give the devices back."""
    for group in {group.id: group for group in groups}.values():
        remove_placement_group(group)


def _bundles_from_here(group: PlacementGroup) -> list[int]:
    """Bundle indexes, that of the driver's own node first: rank 0 writes checkpoints beside what the driver writes."""
    where = placement_group_table(group)["bundles_to_node_id"]
    here = ray.get_runtime_context().get_node_id()
    return sorted(where, key=lambda index: (where[index] != here, index))


def _has(node: dict[str, Any], resource: str) -> float:
    return node["Resources"].get(resource, 0.0)


def _may_fit(specs: Sequence[PoolSpec], resource: str, nodes: list[dict[str, Any]]) -> bool:
    """Whether the nodes have room for all pools at once, if nobody else holds any of it.

    On CPU any number of devices share a node's cores.
    """
    on_gpu = resource == "GPU"
    wanted = sorted(((spec.devices_per_node if on_gpu else 0, spec.nnodes) for spec in specs), reverse=True)
    return _fit_beside(
        wanted, Counter(int(_has(node, resource)) if on_gpu else 0 for node in nodes if _has(node, resource) > 0)
    )


def _fit_beside(wanted: Sequence[tuple[int, int]], free: Counter[int]) -> bool:
    """Whether pools of so many devices on so many nodes each fit on `free`: how many nodes have so many free devices."""
    if not wanted:
        return True
    (devices, nnodes), *others = wanted
    kinds = [there for there, count in free.items() if there >= devices and count]
    for counts in _splits(nnodes, [free[there] for there in kinds]):
        left = Counter(free)
        for there, count in zip(kinds, counts, strict=True):
            left[there] -= count
            left[there - devices] += count
        if _fit_beside(others, left):
            return True
    return False


def _splits(total: int, bounds: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as a sum of one part for each bound, at most that large."""
    if not bounds:
        yield from [()] if total == 0 else []
        return
    for first in range(min(total, bounds[0]), max(total - sum(bounds[1:]), 0) - 1, -1):
        yield from ((first, *rest) for rest in _splits(total - first, bounds[1:]))


def _shortage(specs: Sequence[PoolSpec], resource: str, nodes: list[dict[str, Any]]) -> str:
    """What all pools want, and what the nodes have."""
    rows = [f"  {'pool':<18}{'wanted':>24}   set by"]
    for spec in specs:
        key = pool_key(spec.name)
        wanted = f"{spec.nnodes} nodes x {spec.devices_per_node} {'GPUs' if resource == 'GPU' else 'processes'}"
        rows.append(
            f"  {spec.name:<18}{wanted:>24}   {key}.nnodes={spec.nnodes}, {key}.n_gpus_per_node={spec.devices_per_node}"
        )
    rows.append(f"  {'node':<18}{resource:>24}")
    rows += [f"  {node['NodeManagerAddress']:<18}{_has(node, resource):>24g}" for node in nodes]
    return "\n".join(
        [
            f"The cluster does not have the devices on trainer.device={specs[0].device}:",
            *rows,
            "Lower these numbers, choose trainer.device=cpu, send roles to the same pool with trainer.role_pools, or join a "
            "larger cluster with RAY_ADDRESS.",
        ]
    )
