"""The layers: importing a formula does not load Ray or transformers, and a reward process does not load torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

FORMULAS = [
    "config.schema",
    "trainer.batch",
    "trainer.ppo.core_algos",
    "trainer.ppo.advantages",
    "trainer.ppo.limiters",
    "trainer.ppo.minibatch",
    "trainer.ppo.rollout_correction",
    "trainer.ppo.verdicts",
    "trainer.ppo.validation",
    "workers.losses",
]
LIBRARIES_OF_FORMULAS = ["ray", "transformers", "hydra", "omegaconf", "pyarrow", "vllm", "wandb"]
REWARD_PROCESS = ["workers.reward.child"]
LIBRARIES_OF_REWARDS = ["torch", "ray", "transformers", "tensordict", "numpy", "hydra"]

PROBE = """
import importlib, json, sys
modules, libraries = json.loads(sys.argv[1])
loaded = {}
for module in modules:
    importlib.import_module(module)
    loaded[module] = [name for name in libraries if name in sys.modules]
print(json.dumps(loaded))
"""


def modules_below(folder: str) -> list[str]:
    paths = sorted((ROOT / folder).glob("*.py"))
    return [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths if path.stem != "__init__"]


ENGINES = [*modules_below("workers/engine"), *modules_below("workers/rollout"), *modules_below("trainer/data")]


def libraries_loaded_by(modules: list[str], libraries: list[str]) -> dict[str, list[str]]:
    """The libraries in sys.modules after each import, all in one fresh process."""
    process = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps([modules, libraries])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


@pytest.fixture(scope="module")
def loaded() -> dict[str, list[str]]:
    return {
        **libraries_loaded_by(FORMULAS, LIBRARIES_OF_FORMULAS),
        **libraries_loaded_by(ENGINES, ["ray", "vllm"]),
        **libraries_loaded_by(REWARD_PROCESS, LIBRARIES_OF_REWARDS),
    }


@pytest.mark.parametrize("module", FORMULAS)
def test_a_formula_loads_with_torch_and_tensordict_alone(loaded: dict[str, list[str]], module: str) -> None:
    assert loaded[module] == []


@pytest.mark.parametrize("module", ENGINES)
def test_engines_rollout_and_data_do_not_load_ray(loaded: dict[str, list[str]], module: str) -> None:
    assert loaded[module] == []


@pytest.mark.parametrize("module", REWARD_PROCESS)
def test_a_reward_process_loads_neither_torch_nor_ray(loaded: dict[str, list[str]], module: str) -> None:
    assert loaded[module] == []


def test_the_probe_sees_a_library_that_is_loaded() -> None:
    assert libraries_loaded_by(["json", "workers.reward.function"], ["decimal", "ray"])["workers.reward.function"] == [
        "decimal"
    ]


def test_the_folders_hold_the_modules_that_this_test_is_about() -> None:
    assert {"workers.engine.fsdp", "workers.rollout.sampling", "trainer.data.dataset"} <= set(ENGINES)
