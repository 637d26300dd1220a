"""Where pools come to lie: cores shared by all pools of a node, all pools or none."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from config.pools import GLOBAL_POOL
from trainer.errors import ResourceError
from workers.placement import Placement, PoolSpec, _cores_beside_others, _may_fit, place, remove

pytestmark = pytest.mark.usefixtures("ray_session")  # one node of four cores
CORES = 4


def spec(name: str, devices: int, **changes: Any) -> PoolSpec:
    given = {
        "name": name, "nnodes": 1, "devices_per_node": devices, "device": "cpu", "cpu_threads": 1, "timeout_s": 60,
        "placement_timeout_s": 60, "log_dir": "unused",
    }  # fmt: skip
    return PoolSpec(**given | changes)


def free_cores() -> float:
    import ray

    return ray.available_resources().get("CPU", 0.0)


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("devices", "cores"),
    [
        ([1], 4),
        ([2], 2),
        ([3], 1.3333),
        ([1, 1], 2),
        ([2, 1, 1], 1),
        ([3, 5], 0.5),
        ([7, 4], 0.3636),
        ([40, 7], 0.0851),
    ],
    ids=str,
)
def test_a_process_has_its_share_of_the_cores_over_all_pools_of_the_node(devices: list[int], cores: float) -> None:
    import ray

    placements: list[Placement] = place([spec(f"pool{index}", number) for index, number in enumerate(devices)])
    try:
        assert [placement.cpus_per_process for placement in placements] == [cores] * len(devices)
        total = sum(bundle["CPU"] for placement in placements for bundle in placement.group.bundle_specs)
        assert total <= CORES
        first = ray.remote(lambda: "here").options(  # that a process with this share starts in its bundle
            num_cpus=cores, scheduling_strategy=ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                placement_group=placements[0].group, placement_group_bundle_index=placements[0].bundles[0]
            ),
        )  # fmt: skip
        assert ray.get([first.remote() for _ in range(devices[0])], timeout=60) == ["here"] * devices[0]
    finally:
        remove(placement.group for placement in placements)
    wait_until(lambda: free_cores() == CORES)


def test_pools_that_do_not_all_get_their_devices_give_all_back() -> None:
    """Two of three cores' worth fit beside what others hold, and must not stay taken."""
    from ray.util.placement_group import placement_group, remove_placement_group

    held = placement_group([{"CPU": 2}])
    assert held.wait(30)
    try:
        with pytest.raises(ResourceError, match=r"placement_timeout_s=1 s; pool \w+ got none") as raised:
            place([spec(GLOBAL_POOL, 1, placement_timeout_s=1), spec("rollout", 2, placement_timeout_s=1)])
        assert "trainer.resource_pools.rollout.n_gpus_per_node=2" in str(raised.value)
        wait_until(lambda: free_cores() == CORES - 2)
    finally:
        remove_placement_group(held)
    wait_until(lambda: free_cores() == CORES)


def test_the_wait_for_what_others_hold_is_told_once_in_ten_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    from ray.util.placement_group import placement_group, remove_placement_group

    held = placement_group([{"CPU": CORES}])
    assert held.wait(30)
    try:
        with pytest.raises(ResourceError, match=r"placement_timeout_s=1\.5 s"):
            place([spec(GLOBAL_POOL, 1, placement_timeout_s=1.5)])
        assert len(capsys.readouterr().err.splitlines()) <= 2
    finally:
        remove_placement_group(held)
    wait_until(lambda: free_cores() == CORES)


@pytest.mark.parametrize(
    ("pools", "nodes", "fit"),
    [
        ([(1, 3), (1, 3), (1, 2)], [4, 4], False),  # each alone does, and there are eight in all
        ([(1, 3), (1, 3), (1, 1), (1, 1)], [4, 4], True),
        ([(2, 4), (1, 8)], [8, 8], False),  # the first takes half of both nodes
        ([(1, 4), (2, 2)], [8, 4], True),  # not with the first pool on the second node
        ([(1, 4), (1, 4)], [0, 8], True),
        ([(2, 1)], [0, 8], False),
        ([(32, 3), (32, 3), (32, 3), (32, 3)], [8] * 64, True),
        ([(32, 5), (32, 3), (20, 5), (45, 3)], [8] * 64, False),
    ],
)
def test_gpus_that_pools_cannot_have_at_the_same_time_are_not_waited_for(
    pools: list[tuple[int, int]], nodes: list[int], fit: bool
) -> None:
    specs = [spec(f"p{index}", devices, nnodes=count, device="cuda") for index, (count, devices) in enumerate(pools)]
    assert _may_fit(specs, "GPU", [{"Resources": {"CPU": 8.0, "GPU": float(gpus)}} for gpus in nodes]) is fit


@pytest.mark.parametrize(("cores", "each"), [(16, 1.0), (8, 1.0), (2, 0.25)])
def test_a_node_with_few_cores_keeps_its_gpus_in_reach(cores: int, each: float) -> None:
    nodes = [{"Resources": {"CPU": 64.0, "GPU": 8.0}}, {"Resources": {"CPU": float(cores), "GPU": 8.0}}]
    assert _cores_beside_others([spec(GLOBAL_POOL, 8, nnodes=2, device="cuda")], "GPU", nodes) == each


def test_more_nodes_or_gpus_than_there_are_is_told_at_once_for_all_pools() -> None:
    for change in ({"nnodes": 2}, {"device": "cuda"}):
        started = time.monotonic()
        with pytest.raises(ResourceError) as raised:
            place([spec(GLOBAL_POOL, 2, device=change.get("device", "cpu")), spec("rollout", 4, **change)])
        assert time.monotonic() - started < 10
        text = str(raised.value)
        assert "trainer.n_gpus_per_node=2" in text
        assert f"trainer.resource_pools.rollout.nnodes={change.get('nnodes', 1)}" in text
