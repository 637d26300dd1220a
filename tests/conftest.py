"""One Ray session serves all tests that need one."""

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two torch threads beside other processes collapse on a small machine


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """A local Ray whose four logical CPUs let two devices and their neighbours fit on two cores."""
    import ray

    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()
