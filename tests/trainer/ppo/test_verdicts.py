"""Verdicts and alarms on synthetic series: each state of each limiter, and each alarm at the step where it begins."""

import random
from collections.abc import Iterable
from typing import Any

import pytest

from trainer.ppo.verdicts import LIMITERS, RULES, THRESHOLDS, alarms, cannot_act, limiter_verdicts

ACTOR = "actor_rollout_ref.actor"
PUSH = {"reward_kl": "reward_kl", "clip": "clip", "entropy": "entropy", "kl_loss": "kl"}
EVERYTHING_ON = {
    "data.train_batch_size": 256,
    f"{ACTOR}.ppo_mini_batch_size": 64,
    f"{ACTOR}.ppo_epochs": 1,
    f"{ACTOR}.entropy_coeff": 0.01,
    f"{ACTOR}.use_kl_loss": True,
    f"{ACTOR}.kl_loss_coef": 0.001,
    f"{ACTOR}.kl_loss_type": "low_var_kl",
    "algorithm.use_kl_in_reward": True,
    "algorithm.kl_ctrl.type": "adaptive",
    "algorithm.kl_ctrl.kl_coef": 0.001,
}
SWITCH = {
    "reward_kl": "algorithm.use_kl_in_reward",
    "entropy": f"{ACTOR}.entropy_coeff",
    "kl_loss": f"{ACTOR}.use_kl_loss",
}
Line = dict[str, float]


def line(base: float = 2.0, *, removed: float = 0.05, saturated: float = 0, over: float = 1.0, **forces: float) -> Line:
    """A step's metrics; `forces` are the limiters' pushes over the unclipped surrogate's push, `base`; 0.1 unless given."""
    pushes = {f"limiter/push/{PUSH[name]}": base * forces.get(name, 0.1) for name in LIMITERS}
    reward_kl = {"limiter/reward_kl/saturated": saturated, "limiter/reward_kl/over_target": over}
    return {"limiter/push/pg_unclipped": base, "limiter/clip/removed": removed} | pushes | reward_kl


def run_of(lines: Iterable[Line]) -> list[Line]:
    return [{"step": float(step), **figures} for step, figures in enumerate(lines, 1)]


def states(lines: Iterable[Line], config: dict[str, Any] | None = None, **options: Any) -> dict[str, str]:
    verdicts = limiter_verdicts(run_of(lines), EVERYTHING_ON if config is None else config, **options)
    assert [verdict.limiter for verdict in verdicts] == list(LIMITERS)
    assert all(verdict.evidence for verdict in verdicts)
    return {verdict.limiter: verdict.state for verdict in verdicts}


# --- verdicts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limiter", LIMITERS)
@pytest.mark.parametrize(
    ("force", "state"),
    [(0.0, "idle"), (0.009, "idle"), (0.011, "working"), (0.49, "working"), (0.51, "governing"), (3.0, "governing")],
)
def test_a_limiters_force_decides(limiter: str, force: float, state: str) -> None:
    expected = dict.fromkeys(LIMITERS, "working") | {limiter: state}
    assert states([line(**{limiter: force})] * 20) == expected


@pytest.mark.parametrize("limiter", LIMITERS)
def test_only_the_strongest_governs(limiter: str) -> None:
    forces = dict.fromkeys(LIMITERS, 0.8) | {limiter: 0.9}
    assert states([line(**forces)] * 20) == {name: "governing" if name == limiter else "working" for name in LIMITERS}


@pytest.mark.parametrize("limiter", SWITCH)
@pytest.mark.parametrize("value", [0, False, None, "absent"])
def test_a_limiter_that_is_not_switched_on_is_off(limiter: str, value: Any) -> None:
    config = EVERYTHING_ON | {SWITCH[limiter]: value}
    if value == "absent":
        del config[SWITCH[limiter]]
    assert states([line()] * 20, config) == {name: "off" if name == limiter else "working" for name in LIMITERS}


@pytest.mark.parametrize(
    ("limiter", "figures"),
    [
        ("clip", {"removed": 0.55}),
        ("reward_kl", {"saturated": 1, "over": 4.0}),
        ("clip", {"removed": 1.0, "clip": 0.9}),
    ],
)
def test_a_limiter_at_its_end_is_saturated(limiter: str, figures: dict[str, float]) -> None:
    lines = [line(**figures)] * 20
    assert states(lines) == {name: "saturated" if name == limiter else "working" for name in LIMITERS}


def test_a_controller_at_its_lower_clamp_is_not_saturated() -> None:
    assert states([line(saturated=1, over=0.1)] * 20)["reward_kl"] == "working"


def test_one_step_of_large_kl_does_not_saturate_a_controller_below_its_target() -> None:
    lines = [line(saturated=1, over=0.1)] * 19 + [line(saturated=1, over=50.0)]
    assert states(lines)["reward_kl"] == "working"


@pytest.mark.parametrize(("num_above", "state"), [(15, "working"), (16, "saturated")])
def test_a_controller_is_saturated_from_four_fifths_of_the_window_on(num_above: int, state: str) -> None:
    lines = [line(over=1.1)] * (20 - num_above) + [line(saturated=1, over=2.0)] * num_above
    assert states(lines)["reward_kl"] == state


@pytest.mark.parametrize(
    ("limiter", "changes", "said"),
    [
        ("clip", {f"{ACTOR}.ppo_mini_batch_size": 256}, "one update"),
        ("kl_loss", {f"{ACTOR}.kl_loss_coef": 0}, "kl_loss_coef=0"),
        ("kl_loss", {f"{ACTOR}.kl_loss_type": "k1"}, "k1"),
        ("kl_loss", {f"{ACTOR}.kl_loss_type": "kl"}, "k1"),
        ("reward_kl", {"algorithm.kl_ctrl.kl_coef": 0}, "only multiplies"),
        ("reward_kl", {"algorithm.kl_ctrl.kl_coef": 0, "algorithm.kl_ctrl.type": "fixed"}, "kl_coef=0"),
    ],
)
def test_a_limiter_that_cannot_act_is_known_from_the_configuration(limiter: str, changes: dict, said: str) -> None:
    config = EVERYTHING_ON | changes
    assert cannot_act(config).keys() == {limiter}
    assert said in cannot_act(config)[limiter]
    expected = {name: "cannot act" if name == limiter else "working" for name in LIMITERS}
    assert states([line()] * 20, config) == expected
    assert states([], config)[limiter] == "cannot act", "before the first step"


@pytest.mark.parametrize(
    "changes",
    [
        {f"{ACTOR}.ppo_epochs": 2, f"{ACTOR}.ppo_mini_batch_size": 256},
        # The ratio is to the sampler, and may leave the band in the first update.
        {f"{ACTOR}.ppo_mini_batch_size": 256, "algorithm.rollout_correction.bypass_mode": True},
        {f"{ACTOR}.kl_loss_type": "k1+"},
        {f"{ACTOR}.kl_loss_coef": 0, f"{ACTOR}.use_kl_loss": False},
        {"algorithm.kl_ctrl.kl_coef": 0, "algorithm.use_kl_in_reward": False},
        {},
    ],
    ids=str,
)
def test_what_can_act_or_is_off_is_not_said_to_be_unable(changes: dict) -> None:
    assert cannot_act(EVERYTHING_ON | changes) == {}


def test_a_limiter_that_cannot_act_does_not_keep_another_from_governing() -> None:
    # k1 pushes hard, token by token, and nowhere on average.
    config = EVERYTHING_ON | {f"{ACTOR}.kl_loss_type": "k1"}
    found = states([line(kl_loss=2.0, entropy=0.7)] * 20, config)
    assert (found["kl_loss"], found["entropy"]) == ("cannot act", "governing")


def test_only_the_window_counts() -> None:
    lines = [line(entropy=0.9)] * 20 + [line(entropy=0.001)] * 20
    assert states(lines)["entropy"] == "idle"
    assert states(lines[:20])["entropy"] == "governing"
    assert states(lines, window=40)["entropy"] == "working"
    assert states(lines[:3])["entropy"] == "governing", "a run that is shorter than the window"


def test_step_0_holds_the_validation_alone_and_does_not_count() -> None:
    lines = [{"step": 0.0, "val-core/gsm8k/acc/mean@1": 0.1}, *run_of([line()])]
    verdicts = limiter_verdicts(lines, EVERYTHING_ON)
    assert "over 1 steps" in verdicts[0].evidence


def test_a_step_of_dead_groups_does_not_decide() -> None:
    # Its surrogate pushes next to nothing, so that a usual entropy push is a million times as strong.
    dead = line(entropy=0.05) | {"limiter/push/pg_unclipped": 1e-7}
    assert states([line(entropy=0.05)] * 19 + [dead])["entropy"] == "working"


def test_a_limiter_that_pushes_alone_governs() -> None:
    quiet = dict.fromkeys(LIMITERS, 0.0)
    alone = line(**quiet) | {"limiter/push/pg_unclipped": 0.0, "limiter/push/entropy": 0.3}
    assert states([alone] * 20) == {name: "governing" if name == "entropy" else "idle" for name in LIMITERS}


@pytest.mark.parametrize(
    "lines", [[], [{}] * 5, [{"actor/lr": 1e-6}] * 5], ids=["none", "empty", "of the critic's warm-up"]
)
def test_without_figures_what_is_on_is_idle(lines: list[Line]) -> None:
    assert states(lines) == dict.fromkeys(LIMITERS, "idle")
    assert states(lines, {}) == dict.fromkeys(LIMITERS, "off") | {"clip": "idle"}
    assert alarms(run_of(lines), {}) == []


def test_figures_without_a_configuration() -> None:
    assert states([line(clip=0.6)], {}) == dict.fromkeys(LIMITERS, "off") | {"clip": "governing"}


def test_lines_that_lack_a_figure_are_passed_over() -> None:
    lines = [{"actor/lr": 1e-6}] * 10 + [line(clip=0.7)] * 10
    assert states(lines)["clip"] == "governing"


# --- alarms ----------------------------------------------------------------------------------------------------------


def healthy(steps: int, seed: int = 0) -> list[Line]:
    """A run that learns, with the noise of small batches: entropy 2 → 0.5, KL 0.002 → 0.1, longer and better answers."""
    noise = random.Random(seed)
    lines = []
    for step in range(steps):
        done = step / steps
        lines.append(
            {
                "actor/entropy": (2 - 1.5 * done) * noise.uniform(0.8, 1.2),
                "actor/kl_loss": (0.002 + 0.1 * done) * noise.uniform(0.5, 1.5),
                "actor/reward_kl_penalty": (0.001 + 0.1 * done) * noise.uniform(-0.5, 1.5),
                "actor/ppo_kl_last": noise.gauss(0.01, 0.02),
                "response_length/mean": (100 + 200 * done) * noise.uniform(0.85, 1.15),
                "response_length/clip_ratio": 0.02,
                "critic/score/mean": 0.2 + 0.6 * done + noise.gauss(0, 0.05),
                # Eight groups of a hard task: now and then all of them fail.
                "limiter/tokens/zero_advantage": 1.0 if step % 17 == 3 else noise.uniform(0.3, 0.85),
            }
        )
    return lines


def rings(lines: Iterable[Line], **options: Any) -> list[tuple[int, str]]:
    return [(alarm.step, alarm.name) for alarm in alarms(run_of(lines), {}, **options)]


@pytest.mark.parametrize("seed", range(10))
def test_no_alarm_rings_on_a_healthy_run(seed: int) -> None:
    assert rings(healthy(120, seed)) == []


def broken(name: str, values: list[float], *, begin: int = 30) -> list[Line]:
    """A healthy run with a metric replaced from the step `begin` on."""
    lines = healthy(60)
    for index, value in enumerate(values):
        lines[begin - 1 + index] = lines[begin - 1 + index] | {name: value}
    return lines


@pytest.mark.parametrize(
    ("metric", "value", "alarm"),
    [
        ("actor/entropy", 0.05, "entropy collapse"),
        ("actor/kl_loss", 0.9, "KL runaway"),
        ("actor/reward_kl_penalty", 0.9, "KL runaway"),
        ("actor/ppo_kl_last", 0.7, "ratio explosion"),
        ("actor/ppo_kl_last", -0.7, "ratio explosion"),
    ],
)
def test_an_alarm_rings_where_it_begins_and_once_per_stretch(metric: str, value: float, alarm: str) -> None:
    assert rings(broken(metric, [value] * 8)) == [(30, alarm)]
    assert rings(broken(metric, [value])) == [(30, alarm)]
    healed = THRESHOLDS.quiet_steps + 1
    twice = broken(metric, [value] * 3)
    for index in range(32 + healed, 40 + healed):
        twice[index] = twice[index] | {metric: value}
    assert rings(twice) == [(30, alarm), (33 + healed, alarm)]


def test_a_figure_about_its_threshold_rings_once() -> None:
    assert rings(broken("actor/entropy", [0.099, 0.101] * 15)) == [(30, "entropy collapse")]


def test_all_alarms_come_in_the_order_of_their_steps() -> None:
    lines = broken("actor/ppo_kl_last", [0.7] * 3, begin=20)
    for index in range(9, 60):
        lines[index] = lines[index] | {"actor/entropy": 0.01}
    assert rings(lines) == [(10, "entropy collapse"), (20, "ratio explosion")]


def test_a_policy_that_began_sure_has_not_collapsed() -> None:
    assert rings([{"actor/entropy": 0.12}] * 5 + [{"actor/entropy": 0.08}] * 20) == []


def test_an_entropy_that_is_first_known_later_collapses_from_there() -> None:
    lines = (
        [{"actor/lr": 0.0}] * 3 + [{"actor/entropy": 1.0}] * 3 + [{"actor/entropy": 0.01, "critic/score/mean": 0.9}] * 3
    )
    (alarm,) = alarms(run_of(lines), {})
    assert (alarm.step, alarm.name) == (7, "entropy collapse")
    assert "at a score of 0.9" in alarm.text


@pytest.mark.parametrize(
    ("tenth", "now", "rung"),
    [
        (0.001, 0.4, False),
        (0.001, 0.51, True),
        (0.1, 0.9, False),
        (0.1, 1.1, True),
        (0.0, 0.51, True),
        (-0.1, 0.51, True),
    ],
)
def test_kl_runs_away_above_a_floor_and_ten_times_the_tenth_step(tenth: float, now: float, rung: bool) -> None:
    lines = [{"actor/kl_loss": 0.0}] * 9 + [{"actor/kl_loss": tenth}, {"actor/kl_loss": now}]
    assert rings(lines) == ([(11, "KL runaway")] if rung else [])


def test_kl_has_not_run_away_in_the_first_ten_steps() -> None:
    assert rings([{"actor/kl_loss": 5.0 * step} for step in range(10)]) == []


def answers(length: float, score: float) -> Line:
    return {"response_length/mean": length, "critic/score/mean": score, "response_length/clip_ratio": 0.25}


@pytest.mark.parametrize(
    ("length", "score", "rung"),
    [(200, 0.4, True), (200, 0.5, True), (200, 0.6, False), (140, 0.4, False), (60, 0.4, False)],
)
def test_longer_answers_without_a_better_score(length: float, score: float, rung: bool) -> None:
    lines = [answers(100, 0.5)] * 20 + [answers(length, score)] * 20
    found = alarms(run_of(lines), {})
    assert [alarm.name for alarm in found] == (["reward hacking by length"] if rung else [])
    if rung:
        # Of the last five steps' mean three at 200 tokens make 160 of 100.
        assert found[0].step == 23
        assert "25% cut" in found[0].text


def test_length_is_judged_over_the_window() -> None:
    lines = [answers(100 * 1.01**step, 0.5) for step in range(80)]  # × 1.16 over 15 steps, × 1.74 over 56
    assert rings(lines) == []
    assert [name for _, name in rings(lines, window=76)] == ["reward hacking by length"]


def test_groups_are_dead_over_several_steps() -> None:
    dead, alive = ({"limiter/tokens/zero_advantage": share} for share in (1.0, 0.4))
    assert rings([dead] * 4) == []
    assert rings([dead] * 9) == [(5, "dead groups")]
    # The mean over five steps of which four are dead is 0.88, of all 1.
    assert rings([alive] * 10 + [dead] * 10) == [(15, "dead groups")]
    assert rings([alive, dead, dead] * 10) == []


def test_each_rule_is_tried_here() -> None:
    assert set(RULES) == {
        "entropy collapse",
        "KL runaway",
        "ratio explosion",
        "reward hacking by length",
        "dead groups",
    }
