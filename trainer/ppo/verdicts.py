"""Verdicts on the limiters over a window of steps, and alarms for the known ways to fail: pure functions of a run's lines.

One unit ranks the limiters: the norm at the logits. A limiter's force is its mean push over the unclipped surrogate's mean
push (`limiter/push/X` / `limiter/push/pg_unclipped`) in the window. All thresholds stand in `THRESHOLDS`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

State = Literal["off", "idle", "working", "governing", "saturated", "cannot act"]
Line = Mapping[str, float]

WINDOW = 20  # steps
LIMITERS = ("reward_kl", "clip", "entropy", "kl_loss")
PUSH = {"reward_kl": "reward_kl", "clip": "clip", "entropy": "entropy", "kl_loss": "kl"}
ACTOR = "actor_rollout_ref.actor"


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The numbers of all rules. Forces are relative to the unclipped surrogate's push."""

    idle_force: float = 0.01  # below it a limiter that is on does next to nothing
    governing_force: float = 0.5  # from it on the strongest limiter decides about the update as much as the reward does
    saturated_clip_share: float = 0.5  # share of Σ|A·r| that the clip took out of the gradient
    saturated_controller_share: float = 0.8  # share of the steps with the controller's error at its upper clamp
    collapsed_entropy: float = 0.1  # nats; with a fall to a tenth of where the run began
    runaway_kl: float = 10.0  # times the KL ten steps into the run, and above runaway_kl_floor
    runaway_kl_floor: float = 0.5  # nats per token
    exploded_ppo_kl: float = 0.5  # nats per token in the last update of a step
    length_growth: float = 1.5  # times the length at the window's start while the score does not rise
    dead_groups: float = 0.9  # share of loss tokens with advantage 0, over dead_groups_steps: one step may be bad luck
    dead_groups_steps: int = 5
    quiet_steps: int = 5  # an alarm that has been quiet for no longer goes on, and does not begin anew


THRESHOLDS = Thresholds()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a limiter was in a window, and the figures that say so."""

    limiter: str
    state: State
    evidence: str


@dataclass(frozen=True, slots=True)
class Alarm:
    """A known way to fail, at the step where it begins."""

    step: int
    name: str
    text: str


def limiter_verdicts(lines: Sequence[Line], config: Mapping[str, Any], *, window: int = WINDOW) -> list[Verdict]:
    """A verdict per limiter over the last `window` lines, always in the order of `LIMITERS`.

    Lines are those of `metrics.jsonl` of steps 1 and on; `config` has full keys. Both may be empty.
    """
    recent = [line for line in lines if line.get("step", 1) > 0][-window:]
    forces = {name: _force(recent, PUSH[name]) for name in LIMITERS}
    without = cannot_act(config)  # k1 in the loss may push hard, but nowhere
    acting = [name for name in LIMITERS if name not in without and not _is_off(name, config)]
    strongest = max(acting, key=lambda name: forces[name] or 0.0, default=None)
    return [_verdict(name, recent, config, forces[name], name == strongest) for name in LIMITERS]


def cannot_act(config: Mapping[str, Any]) -> dict[str, str]:
    """Limiters that are switched on and cannot act, with the reason, from the configuration alone."""
    reasons = {}
    prompts, mini = config.get("data.train_batch_size"), config.get(f"{ACTOR}.ppo_mini_batch_size")
    bypass = config.get("algorithm.rollout_correction.bypass_mode")  # there the ratio is to the sampler
    if prompts and mini and prompts // mini * config.get(f"{ACTOR}.ppo_epochs", 1) == 1 and not bypass:
        reasons["clip"] = "a step has one update, so the ratio is 1"
    if config.get(f"{ACTOR}.use_kl_loss"):
        if config.get(f"{ACTOR}.kl_loss_coef") == 0:
            reasons["kl_loss"] = "kl_loss_coef=0 pays for a reference and does nothing"
        elif config.get(f"{ACTOR}.kl_loss_type") in ("kl", "k1"):
            reasons["kl_loss"] = "the gradient of k1 is 0 in expectation"
    adaptive = config.get("algorithm.kl_ctrl.type") == "adaptive"
    if config.get("algorithm.use_kl_in_reward") and config.get("algorithm.kl_ctrl.kl_coef") == 0:
        reasons["reward_kl"] = "kl_coef=0" + (", which the adaptive controller only multiplies" if adaptive else "")
    return reasons


def _verdict(
    name: str, recent: Sequence[Line], config: Mapping[str, Any], force: float | None, strongest: bool
) -> Verdict:
    reason = cannot_act(config).get(name)
    if reason:
        return Verdict(name, "cannot act", reason)
    if _is_off(name, config):
        return Verdict(name, "off", "not switched on")
    if force is None:
        return Verdict(name, "idle", "no figures yet")
    steps = f"{len(recent)} steps"
    evidence = f"force {force:.3g} of the unclipped push over {steps}"
    if math.isinf(force):
        evidence = f"the reward pushed nothing over {steps}"
    saturation = _saturation(name, recent)
    if saturation:
        return Verdict(name, "saturated", f"{saturation}; {evidence}")
    if force < THRESHOLDS.idle_force:
        return Verdict(name, "idle", f"{evidence}, below {THRESHOLDS.idle_force:g}")
    if strongest and force >= THRESHOLDS.governing_force:
        return Verdict(name, "governing", f"{evidence}, the strongest and from {THRESHOLDS.governing_force:g} on")
    return Verdict(name, "working", evidence)


def _is_off(name: str, config: Mapping[str, Any]) -> bool:
    if name == "clip":
        return False
    key = {
        "reward_kl": "algorithm.use_kl_in_reward",
        "entropy": f"{ACTOR}.entropy_coeff",
        "kl_loss": f"{ACTOR}.use_kl_loss",
    }[name]
    return not config.get(key)


def _saturation(name: str, recent: Sequence[Line]) -> str | None:
    """How a limiter has come to the end of what it can do, or None."""
    if name == "clip":
        removed = _mean(recent, "limiter/clip/removed")
        if removed is not None and removed >= THRESHOLDS.saturated_clip_share:
            return f"the clip took {removed:.0%} of Σ|A·r| out of the gradient"
    if name == "reward_kl":
        known = [line for line in recent if "limiter/reward_kl/saturated" in line]
        above = [bool(line["limiter/reward_kl/saturated"]) and _over_target(line) > 1 for line in known]
        saturated = sum(above) / len(above) if above else 0.0
        if saturated >= THRESHOLDS.saturated_controller_share:
            over = sum(map(_over_target, known)) / len(known)
            return f"KL {over:.3g} times target_kl, the controller's error at its clamp in {saturated:.0%} of the steps"
    return None


def _over_target(line: Line) -> float:
    return line.get("limiter/reward_kl/over_target", 0.0)


def _force(lines: Sequence[Line], push: str) -> float | None:
    """Mean push over the unclipped surrogate's; None where no line has both, infinite where only this one pushes.

    Not the mean of the steps' ratios: a step of dead groups, whose surrogate pushes next to nothing, would decide.
    """
    names = (f"limiter/push/{push}", "limiter/push/pg_unclipped")
    pairs = [(line[names[0]], line[names[1]]) for line in lines if all(name in line for name in names)]
    if not pairs:
        return None
    one, base = (sum(column) for column in zip(*pairs, strict=True))
    if base > 0:
        return one / base
    return math.inf if one > 0 else 0.0


def _mean(lines: Sequence[Line], name: str) -> float | None:
    values = [line[name] for line in lines if name in line]
    return sum(values) / len(values) if values else None


# --- alarms ----------------------------------------------------------------------------------------------------------


def alarms(lines: Sequence[Line], config: Mapping[str, Any], *, window: int = WINDOW) -> list[Alarm]:
    """The known ways to fail, each where it begins: at the first step of a stretch in which its rule holds.

    A gap of at most `quiet_steps` does not end a stretch, so that a figure about its threshold rings once.
    """
    rows = [line for line in lines if line.get("step", 1) > 0]
    found = []
    for name, rule in RULES.items():
        held = None  # the last row in which the rule held
        for index, line in enumerate(rows):
            text = rule(rows[: index + 1], window)
            if text is None:
                continue
            if held is None or index - held > THRESHOLDS.quiet_steps + 1:
                found.append(Alarm(int(line.get("step", index + 1)), name, text))
            held = index
    return sorted(found, key=lambda alarm: alarm.step)


def _entropy_collapse(rows: Sequence[Line], window: int) -> str | None:
    first = next((row["actor/entropy"] for row in rows if "actor/entropy" in row), None)
    now = rows[-1].get("actor/entropy")
    if first is None or now is None or now > THRESHOLDS.collapsed_entropy or now > first / 10:
        return None
    score = rows[-1].get("critic/score/mean")
    told = "" if score is None else f" at a score of {score:.3g}"
    return f"entropy fell from {first:.3g} to {now:.3g} nats{told}; a policy this sure explores no more"


def _kl_runaway(rows: Sequence[Line], window: int) -> str | None:
    for name in ("actor/kl_loss", "actor/reward_kl_penalty"):
        now = rows[-1].get(name)
        if now is None or now <= THRESHOLDS.runaway_kl_floor:
            continue
        early = next(islice((row[name] for row in rows[:-1] if name in row), 9, None), None)  # the tenth
        if early is not None and now > THRESHOLDS.runaway_kl * max(early, 1e-6):
            return f"{name} is {now:.3g} nats per token, {now / max(early, 1e-6):.3g} times that of step 10"
    return None


def _ratio_explosion(rows: Sequence[Line], window: int) -> str | None:
    moved = rows[-1].get("actor/ppo_kl_last")
    if moved is None or abs(moved) < THRESHOLDS.exploded_ppo_kl:
        return None
    return f"the last update of the step is {moved:.3g} nats per token from the policy that sampled"


def _length_hacking(rows: Sequence[Line], window: int) -> str | None:
    if len(rows) < window:
        return None
    # Means over a quarter of the window at either end: a single step's score is mostly noise.
    quarter = max(window // 4, 1)
    before, now = rows[-window:][:quarter], rows[-quarter:]
    old_length, length = (_mean(part, "response_length/mean") for part in (before, now))
    old_score, score = (_mean(part, "critic/score/mean") for part in (before, now))
    if old_length is None or length is None or old_score is None or score is None:
        return None
    cut = rows[-1].get("response_length/clip_ratio", 0.0)
    if length < THRESHOLDS.length_growth * old_length or score > old_score:
        return None
    return f"responses grew from {old_length:.3g} to {length:.3g} tokens in {window} steps while the score did not rise ({cut:.0%} cut)"


def _dead_groups(rows: Sequence[Line], window: int) -> str | None:
    recent = rows[-THRESHOLDS.dead_groups_steps :]
    dead = _mean(recent, "limiter/tokens/zero_advantage")
    if len(recent) < THRESHOLDS.dead_groups_steps or dead is None or dead < THRESHOLDS.dead_groups:
        return None
    return f"{dead:.0%} of the loss tokens have advantage 0: their groups' rewards are equal and teach nothing"


RULES: dict[str, Callable[[Sequence[Line], int], str | None]] = {
    "entropy collapse": _entropy_collapse,
    "KL runaway": _kl_runaway,
    "ratio explosion": _ratio_explosion,
    "reward hacking by length": _length_hacking,
    "dead groups": _dead_groups,
}
