"""The learning rate's schedule against numbers worked out by hand."""

import dataclasses
import math

import pytest

from config.load import load_config
from config.schema import OptimConfig
from workers.engine.schedule import lr_multiplier

BASE = load_config(["experiment=copy_ppo"]).actor_rollout_ref.actor.optim


def optim(**changes: object) -> OptimConfig:
    return dataclasses.replace(BASE, **changes)  # pyright: ignore[reportArgumentType]


def curve(config: OptimConfig, total_steps: int) -> list[float]:
    return [lr_multiplier(step, total_steps=total_steps, optim=config) for step in range(total_steps)]


def test_constant_without_warmup_is_the_peak_in_every_step() -> None:
    assert curve(optim(lr_scheduler_type="constant"), 5) == [1.0] * 5


def test_warmup_by_steps_rises_linearly_from_zero_and_then_stays() -> None:
    assert curve(optim(lr_warmup_steps=4), 7) == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_warmup_by_ratio_takes_that_share_of_the_steps_rounded_down() -> None:
    # 0.3 of 9 steps are 2.7, so 2 steps warm up.
    assert curve(optim(lr_warmup_steps_ratio=0.3), 9)[:4] == [0.0, 0.5, 1.0, 1.0]


@pytest.mark.parametrize(("steps", "expected"), [(0, 1.0), (2, 0.0)])
def test_warmup_steps_set_win_over_the_ratio_and_zero_steps_are_none(steps: int, expected: float) -> None:
    config = optim(lr_warmup_steps=steps, lr_warmup_steps_ratio=0.5)
    assert lr_multiplier(0, total_steps=10, optim=config) == expected


def test_cosine_falls_from_the_peak_through_the_middle_to_the_lowest() -> None:
    config = optim(lr_scheduler_type="cosine", min_lr_ratio=0.1)
    at = {step: lr_multiplier(step, total_steps=8, optim=config) for step in (0, 2, 4, 8)}
    # lowest + (1 - lowest) · (1 + cos) / 2 at 0, a quarter, a half and the whole of half a wave
    assert at[0] == 1.0
    assert at[2] == pytest.approx(0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2)
    assert at[4] == pytest.approx(0.55)
    assert at[8] == pytest.approx(0.1)


def test_cosine_begins_at_the_peak_after_the_warmup_and_stays_lowest_past_the_end() -> None:
    config = optim(lr_scheduler_type="cosine", lr_warmup_steps=2)
    assert lr_multiplier(2, total_steps=10, optim=config) == 1.0
    assert lr_multiplier(6, total_steps=10, optim=config) == pytest.approx(0.5)
    assert lr_multiplier(15, total_steps=10, optim=config) == pytest.approx(0.0)


def test_one_cosine_cycle_comes_back_to_the_peak() -> None:
    config = optim(lr_scheduler_type="cosine", num_cycles=1.0)
    assert lr_multiplier(5, total_steps=10, optim=config) == pytest.approx(0.0)
    assert lr_multiplier(10, total_steps=10, optim=config) == pytest.approx(1.0)


def test_a_warmup_as_long_as_the_run_never_divides_by_zero() -> None:
    config = optim(lr_scheduler_type="cosine", lr_warmup_steps=3)
    assert lr_multiplier(3, total_steps=3, optim=config) == 1.0
