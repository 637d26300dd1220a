"""Verdicts on the limiters over a window of steps, and alarms for the known ways to fail: pure functions of a run's lines.

One unit ranks the limiters: the norm at the logits. A limiter's force is its push over the unclipped surrogate's push
(`limiter/push/X` / `limiter/push/pg_unclipped`), averaged over the window. All thresholds stand in `THRESHOLDS`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
    saturated_controller_share: float = 0.8  # share of the window's steps with the controller's error at its clamp
    collapsed_entropy: float = 0.1  # nats; with a fall to a tenth of where the run began
    runaway_kl: float = 10.0  # times the KL ten steps into the run, and above runaway_kl_floor
    runaway_kl_floor: float = 0.5  # nats per token
    exploded_ppo_kl: float = 0.5  # nats per token in the last update of a step
    length_growth: float = 1.5  # times the length at the window's start while the score falls
    dead_groups: float = 0.9  # share of loss tokens with advantage 0


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


def limiter_verdicts(
    lines: Sequence[Line], config: Mapping[str, Any], *, window: int = WINDOW, thresholds: Thresholds = THRESHOLDS
) -> list[Verdict]:
    """A verdict per limiter over the last `window` lines, always in the order of `LIMITERS`.

    Lines are those of `metrics.jsonl` of steps 1 and on; `config` has full keys. Both may be empty.
    """
    recent = [line for line in lines if line.get("step", 1) > 0][-window:]
    forces = {name: _force(recent, PUSH[name]) for name in LIMITERS}
    strongest = max(forces, key=lambda name: forces[name] or 0.0)
    return [_verdict(name, recent, config, forces[name], name == strongest, thresholds) for name in LIMITERS]


def cannot_act(config: Mapping[str, Any]) -> dict[str, str]:
    """Limiters that are switched on and cannot act, with the reason, from the configuration alone."""
    reasons = {}
    prompts, mini = config.get("data.train_batch_size"), config.get(f"{ACTOR}.ppo_mini_batch_size")
    if prompts and mini and prompts // mini * config.get(f"{ACTOR}.ppo_epochs", 1) == 1:
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
    name: str, recent: Sequence[Line], config: Mapping[str, Any], force: float | None, strongest: bool, at: Thresholds
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
    saturation = _saturation(name, recent, at)
    if saturation:
        return Verdict(name, "saturated", f"{saturation}; {evidence}")
    if force < at.idle_force:
        return Verdict(name, "idle", f"{evidence}, below {at.idle_force:g}")
    if strongest and force >= at.governing_force:
        return Verdict(name, "governing", f"{evidence}, the strongest and from {at.governing_force:g} on")
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


def _saturation(name: str, recent: Sequence[Line], at: Thresholds) -> str | None:
    """How a limiter has come to the end of what it can do, or None."""
    if name == "clip":
        removed = _mean(recent, "limiter/clip/removed")
        if removed is not None and removed >= at.saturated_clip_share:
            return f"the clip took {removed:.0%} of Σ|A·r| out of the gradient"
    if name == "reward_kl":
        saturated = _mean(recent, "limiter/reward_kl/saturated")
        over = _mean(recent, "limiter/reward_kl/over_target")
        if saturated is not None and over is not None and saturated >= at.saturated_controller_share and over > 1:
            return f"the controller's error stood at its clamp in {saturated:.0%} of the steps, KL {over:.3g} times target_kl"
    return None


def _force(lines: Sequence[Line], push: str) -> float | None:
    """Mean of a push over the unclipped surrogate's; None where no line has both."""
    pairs = [(line.get(f"limiter/push/{push}"), line.get("limiter/push/pg_unclipped")) for line in lines]
    ratios = [one / base for one, base in pairs if one is not None and base]
    return sum(ratios) / len(ratios) if ratios else None


def _mean(lines: Sequence[Line], name: str) -> float | None:
    values = [line[name] for line in lines if name in line]
    return sum(values) / len(values) if values else None


# --- alarms ----------------------------------------------------------------------------------------------------------


def alarms(
    lines: Sequence[Line], config: Mapping[str, Any], *, window: int = WINDOW, thresholds: Thresholds = THRESHOLDS
) -> list[Alarm]:
    """The known ways to fail, each where it begins: at the first step of a stretch in which its rule holds."""
    rows = [line for line in lines if line.get("step", 1) > 0]
    found = []
    for name, rule in RULES.items():
        holding = False
        for index, line in enumerate(rows):
            text = rule(rows[: index + 1], window, thresholds)
            if text and not holding:
                found.append(Alarm(int(line.get("step", index + 1)), name, text))
            holding = text is not None
    return sorted(found, key=lambda alarm: alarm.step)


def _entropy_collapse(rows: Sequence[Line], window: int, at: Thresholds) -> str | None:
    first, now = rows[0].get("actor/entropy"), rows[-1].get("actor/entropy")
    if first is None or now is None or now > at.collapsed_entropy or now > first / 10:
        return None
    score = rows[-1].get("critic/score/mean")
    told = "" if score is None else f" at a score of {score:.3g}"
    return f"entropy fell from {first:.3g} to {now:.3g} nats{told}; a policy this sure explores no more"


def _kl_runaway(rows: Sequence[Line], window: int, at: Thresholds) -> str | None:
    for name in ("actor/kl_loss", "actor/reward_kl_penalty"):
        values = [row[name] for row in rows if name in row]
        if len(values) <= 10:
            continue
        if values[-1] > at.runaway_kl_floor and values[-1] > at.runaway_kl * max(values[9], 1e-6):
            return f"{name} is {values[-1]:.3g} nats per token, {values[-1] / max(values[9], 1e-6):.3g} times that of step 10"
    return None


def _ratio_explosion(rows: Sequence[Line], window: int, at: Thresholds) -> str | None:
    moved = rows[-1].get("actor/ppo_kl_last")
    if moved is None or abs(moved) < at.exploded_ppo_kl:
        return None
    return f"the last update of the step is {moved:.3g} nats per token from the policy that sampled"


def _length_hacking(rows: Sequence[Line], window: int, at: Thresholds) -> str | None:
    before = rows[-window] if len(rows) >= window else None
    names = ("response_length/mean", "critic/score/mean")
    if before is None or any(name not in row for name in names for row in (before, rows[-1])):
        return None
    length, score = (rows[-1][name] for name in names)
    old_length, old_score = (before[name] for name in names)
    cut = rows[-1].get("response_length/clip_ratio", 0.0)
    if length < at.length_growth * old_length or score > old_score:
        return None
    return f"responses grew from {old_length:.3g} to {length:.3g} tokens in {window} steps while the score did not rise ({cut:.0%} cut)"


def _dead_groups(rows: Sequence[Line], window: int, at: Thresholds) -> str | None:
    dead = rows[-1].get("limiter/tokens/zero_advantage")
    if dead is None or dead < at.dead_groups:
        return None
    return f"{dead:.0%} of the loss tokens have advantage 0: their groups' rewards are equal and teach nothing"


RULES: dict[str, Callable[[Sequence[Line], int, Thresholds], str | None]] = {
    "entropy collapse": _entropy_collapse,
    "KL runaway": _kl_runaway,
    "ratio explosion": _ratio_explosion,
    "reward hacking by length": _length_hacking,
    "dead groups": _dead_groups,
}
