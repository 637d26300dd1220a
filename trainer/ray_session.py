"""The Ray session of a run: a local one, or the cluster that RAY_ADDRESS names."""

import os
from typing import Any

import ray

from config.schema import GovernorConfig
from trainer.errors import ResourceError, first_line


def start_ray(config: GovernorConfig) -> bool:
    """Start or join Ray; whether this call did, so that the same program ends it.

    A program that has called `ray.init` keeps its session. A local session has no dashboard and listens on loopback.

    Raises:
        ResourceError: the cluster cannot be reached.
    """
    # The first failed call of several ends the run; Ray would print the others at its shutdown.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    if ray.is_initialized():
        return False
    options: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False, **config.ray_kwargs.ray_init}
    address = options.pop("address", None) or os.environ.get("RAY_ADDRESS") or "local"
    if address == "local":
        options.setdefault("include_dashboard", False)
    try:
        ray.init(address=address, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ResourceError(
            f"Ray at {address} cannot be used: {first_line(error)}. See RAY_ADDRESS and ray_kwargs.ray_init."
        ) from error
    return True
