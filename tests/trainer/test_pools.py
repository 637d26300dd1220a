"""Roles in pools of their own: where they run changes no number, and what goes wrong is told by pool."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from config.load import load_config
from trainer.errors import ConfigError, ResourceError
from trainer.main_ppo import run

pytestmark = pytest.mark.usefixtures("ray_session")

SMALL = [
    "data.train_batch_size=8",
    "data.generator.num_train=24",
    "data.generator.num_val=6",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "algorithm.use_kl_in_reward=true",
    "actor_rollout_ref.rollout.update_weights_bucket_megabytes=0.1",  # the model has 0.4
    "trainer.total_training_steps=3",
    "trainer.save_freq=2",
    "trainer.test_freq=3",
    "trainer.sample_freq=-1",
]


def pool(name: str, *roles: str, devices: int = 1) -> list[str]:
    key = f"trainer.resource_pools.{name}"
    return [
        f"{key}.nnodes=1",
        f"{key}.n_gpus_per_node={devices}",
        *(f"trainer.role_pools.{role}={name}" for role in roles),
    ]


LAYOUTS = {
    "rollout apart": pool("sampling", "rollout"),
    "critic and reference apart": pool("judges", "critic", "ref"),
}


def train(root: Path, *overrides: str) -> None:
    assert run(load_config([*SMALL, f"trainer.default_local_dir={root}", *overrides])) == 0


def metrics(root: Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl without what depends on time and memory."""
    timed = ("timing_s/", "timing_per_token_ms/", "perf/")
    lines = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith(timed)} for line in lines]


def assert_same_bits(one: Path, other: Path) -> None:
    assert metrics(one) == metrics(other)
    for name in ("actor/model", "actor_optimizer", "critic/model", "critic_optimizer"):
        first, second = (load_file(root / f"checkpoints/global_step_3/{name}.safetensors") for root in (one, other))
        assert first.keys() == second.keys()
        assert all(first[key].equal(second[key]) for key in first), name


@pytest.fixture(scope="module")
def colocated(tmp_path_factory):
    """A run with all roles in one process."""
    root = tmp_path_factory.mktemp("colocated")
    train(root)
    return root


@pytest.mark.parametrize("layout", LAYOUTS)
def test_roles_apart_give_the_run_the_same_bits(colocated, tmp_path, layout):
    train(tmp_path, *LAYOUTS[layout])
    assert_same_bits(colocated, tmp_path)


def test_a_run_goes_on_in_the_same_bits_under_another_layout(colocated, tmp_path):
    train(tmp_path, *pool("judges", "critic", "ref"), "trainer.total_training_steps=2", "trainer.test_freq=-1")
    names = {path.name for path in (tmp_path / "checkpoints/global_step_2").glob("*rng*")}
    assert names == {
        f"{stem}.{kind}" for stem in ("rng_rank_0", "judges_rng_rank_0") for kind in ("json", "safetensors")
    }
    assert {path.name for path in (tmp_path / "logs").glob("*device*")} == {"device_0.log", "judges_device_0.log"}
    other = pool("sampling", "rollout")
    with pytest.raises(ConfigError, match=r"trainer\.role_pools\.ref: the run has 'judges', now 'global'") as refused:
        train(tmp_path, *other)
    way_out = str(refused.value).split("; or ")[1].split(" to go on")[0]
    train(tmp_path, *other, way_out)
    assert_same_bits(colocated, tmp_path)


def test_a_pool_of_two_devices_gives_the_numbers_of_one(colocated, tmp_path):
    """Sums over two ranks round differently, so there is a tolerance; a step's responses are the same."""
    train(
        tmp_path,
        *pool("aside", "rollout", "critic", devices=2),
        "trainer.total_training_steps=1",
        "trainer.test_freq=-1",
    )
    for one, other in zip(metrics(colocated), metrics(tmp_path), strict=False):
        assert one == pytest.approx(other, rel=1e-5, abs=1e-7)


def test_devices_that_are_not_there_are_told_by_pool_with_the_keys_that_ask_for_them(tmp_path):
    sampling = ["trainer.resource_pools.sampling.nnodes=2", "trainer.resource_pools.sampling.n_gpus_per_node=1"]
    with pytest.raises(ResourceError) as raised:
        train(tmp_path, *sampling, "trainer.role_pools.rollout=sampling")
    lines = [line.split() for line in str(raised.value).splitlines()]
    assert ["sampling", "2", "nodes", "x", "1", "processes", "trainer.resource_pools.sampling.nnodes=2,"] in [
        line[:7] for line in lines
    ]
    assert [line[:5] for line in lines if line[0] == "global"] == [["global", "1", "nodes", "x", "1"]]
