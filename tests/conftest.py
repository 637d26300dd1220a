"""One Ray session serves all tests that need one."""

import importlib.util
import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two torch threads beside other processes collapse on a small machine


@pytest.fixture(scope="session")
def needs_vllm() -> None:
    """Skips where vLLM is not installed, or fails there if GOVERNOR_REQUIRE_VLLM is 1."""
    if importlib.util.find_spec("vllm") is None:
        reason = "vLLM is not installed; scripts/vllm_cpu_env makes an environment with it"
        if os.environ.get("GOVERNOR_REQUIRE_VLLM") == "1":
            pytest.fail(f"GOVERNOR_REQUIRE_VLLM=1, but {reason}")
        pytest.skip(reason)


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """A local Ray whose four logical CPUs let two devices and their neighbours fit on two cores."""
    import ray

    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()
