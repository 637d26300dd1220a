"""The limiter panel: for each of the four, did it act, how much, and is it the one that governs. And the alarms."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.ppo.verdicts import Alarm, Verdict
from trainer.report.markup import escaped, figure, share
from trainer.report.read import WINDOW, RunRecord, Series, ratio_of, sum_of
from trainer.report.svg import Line, line_chart, sparkline

MAX_ALARMS = 40
# A state's sign beside its name, so that neither stands on colour alone.
SIGNS = {"off": "○", "idle": "◌", "working": "◐", "governing": "●", "saturated": "▲", "cannot act": "✕"}
NAMES = {"reward_kl": "KL in the reward", "clip": "PPO clip", "entropy": "Entropy", "kl_loss": "KL in the loss"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A limiter's place in the panel: `push` is its metric under limiter/push/."""

    limiter: str
    colour: str
    push: str
    acted: str  # what its "did it act" shows
    is_share: bool
    settings: str
    series: Series | None


def _rows(record: RunRecord) -> list[Row]:
    """The four limiters with what each shows; the loss terms stand with their coefficients."""
    series, config = record.series, record.config
    return [
        Row(
            limiter="reward_kl",
            colour="reward-kl",
            push="reward_kl",
            acted="share of the reward",
            is_share=True,
            settings=_reward_kl_settings(config),
            series=series.get("limiter/reward_kl/share"),
        ),
        Row(
            limiter="clip",
            colour="clip",
            push="clip",
            acted="clipped tokens",
            is_share=True,
            settings=_clip_settings(config),
            series=sum_of([series.get("actor/pg_clipfrac"), series.get("actor/pg_clipfrac_lower")]),
        ),
        Row(
            limiter="entropy",
            colour="entropy",
            push="entropy",
            acted="its term of the loss",
            is_share=False,
            settings=_settings(config, actor={"entropy_coeff": "coefficient"}),
            series=series.get("limiter/loss/entropy"),
        ),
        Row(
            limiter="kl_loss",
            colour="kl-loss",
            push="kl",
            acted="its term of the loss",
            is_share=False,
            settings=_settings(config, actor={"kl_loss_coef": "coefficient", "kl_loss_type": "by"})
            if config.get("actor_rollout_ref.actor.use_kl_loss")
            else "use_kl_loss false",
            series=series.get("limiter/loss/kl"),
        ),
    ]


def limiter_panel(record: RunRecord, verdicts: Sequence[Verdict]) -> str:
    """Four rows, one fixed colour each."""
    by_name = {verdict.limiter: verdict for verdict in verdicts}
    unclipped = record.series.get("limiter/push/pg_unclipped")
    rows = _rows(record)
    pushes = {
        row.limiter: ratio_of(record.series.get(f"limiter/push/{row.push}"), unclipped)
        for row in rows
        if by_name[row.limiter].state != "off"
    }
    top = max([0.0, *(push.recent() for push in pushes.values() if push is not None)])
    head = (
        '<div class="panel-head" aria-hidden="true"><span>Limiter</span><span>Did it act?</span>'
        "<span>How much?</span><span>Verdict</span></div>"
    )
    return (
        f'<div class="panel">{head}'
        + "".join(_row(row, by_name[row.limiter], pushes.get(row.limiter), top) for row in rows)
        + "</div>"
        '<p class="note">How much: the norm of the limiter\'s gradient at the logits over that of the unclipped policy '
        f"gradient, mean of the last {WINDOW} steps; the bars share one scale. Small lines run over the whole run.</p>"
    )


def _row(row: Row, verdict: Verdict, push: Series | None, top: float) -> str:
    is_off = verdict.state == "off"
    return (
        f'<article class="limiter c-{row.colour}{" off" if is_off else ""}">'
        f"<div><h3>{NAMES[row.limiter]}</h3><p>{escaped(row.settings, 120)}</p></div>"
        f'<div><span class="cell-name">Did it act?</span>{_acted(row, is_off)}</div>'
        f'<div><span class="cell-name">How much?</span>{_pushed(row, push, top, is_off)}</div>'
        f"<div>{_badge(verdict)}<p>{escaped(verdict.evidence, 400)}</p></div></article>"
    )


def _acted(row: Row, is_off: bool) -> str:
    if row.series is None or (is_off and not any(row.series.values)):
        return f'<p class="none">{"off" if is_off else "not recorded"}</p>'
    recent = row.series.recent()
    number = share(recent) if row.is_share else figure(recent)
    return (
        f"<p><b>{number}</b> {row.acted}</p>"
        + sparkline(row.series, colour=row.colour, label=f"{NAMES[row.limiter]}, {row.acted}")
    )  # fmt: skip


def _pushed(row: Row, push: Series | None, top: float, is_off: bool) -> str:
    if push is None:
        return f'<p class="none">{"off" if is_off else "not recorded"}</p>'
    recent = push.recent()
    width = 100 * recent / top if top > 0 else 0.0
    return (
        f"<p><b>{share(recent)}</b> of the gradient's push</p>"
        f'<div class="bar" aria-hidden="true"><i style="width:{width:.1f}%"></i></div>'
        + sparkline(push, colour=row.colour, label=f"{NAMES[row.limiter]}, push over the unclipped policy gradient's")
    )  # fmt: skip


def _badge(verdict: Verdict) -> str:
    kind = verdict.state.replace(" ", "-")
    return f'<span class="badge {escaped(kind)}"><i aria-hidden="true">{SIGNS.get(verdict.state, "")}</i> {escaped(verdict.state)}</span>'


def push_chart(record: RunRecord, verdicts: Sequence[Verdict]) -> list[str]:
    """The push of every limiter that is on, in one unit."""
    unclipped = record.series.get("limiter/push/pg_unclipped")
    on = {verdict.limiter for verdict in verdicts if verdict.state != "off"}
    lines = [
        Line(label=NAMES[row.limiter], series=push, colour=row.colour, dash=dash)
        for dash, row in enumerate(_rows(record))
        if row.limiter in on
        and (push := ratio_of(record.series.get(f"limiter/push/{row.push}"), unclipped)) is not None
    ]
    if not lines:
        return []
    note = "At the logits; at 1 a limiter pushes as hard as the policy gradient would without a clip."
    return [line_chart("Push of the limiters", lines, unit="× the gradient's", note=note)]


def summary(verdicts: Sequence[Verdict]) -> str:
    """The verdicts in one sentence."""
    governing = [NAMES[verdict.limiter] for verdict in verdicts if verdict.state == "governing"]
    trouble = [
        f"{NAMES[verdict.limiter]}: {verdict.state}"
        for verdict in verdicts
        if verdict.state in ("saturated", "cannot act")
    ]
    if governing:
        first = f"{' and '.join(governing)} {'governs' if len(governing) == 1 else 'govern'} the update."
    elif all(verdict.state == "off" for verdict in verdicts):
        first = "All four limiters are off."
    else:
        first = "No limiter governs the update."
    return " ".join([first, *(f"{text}." for text in trouble)])


def alarm_list(alarms: Sequence[Alarm]) -> str:
    """What went wrong, in the order of the steps."""
    if not alarms:
        return '<p class="calm"><span aria-hidden="true">✓</span> No alarm.</p>'
    items = "".join(
        f'<li><span class="step">step {alarm.step:,}</span><b>{escaped(alarm.name, 80)}</b> {escaped(alarm.text, 400)}</li>'
        for alarm in alarms[:MAX_ALARMS]
    )
    rest = f'<p class="note">{len(alarms) - MAX_ALARMS} more.</p>' if len(alarms) > MAX_ALARMS else ""
    return f'<ol class="alarms">{items}</ol>{rest}'


# --- settings --------------------------------------------------------------------------------------------------------


def _reward_kl_settings(config: Mapping[str, Any]) -> str:
    if not config.get("algorithm.use_kl_in_reward"):
        return "use_kl_in_reward false"
    texts = [f"β {config.get('algorithm.kl_ctrl.kl_coef')} {config.get('algorithm.kl_ctrl.type')}"]
    if config.get("algorithm.kl_ctrl.type") == "adaptive":
        texts.append(f"target {config.get('algorithm.kl_ctrl.target_kl')}")
    return ", ".join([*texts, f"by {config.get('algorithm.kl_penalty')}"])


def _clip_settings(config: Mapping[str, Any]) -> str:
    low, high, dual = (
        config.get(f"actor_rollout_ref.actor.{name}") for name in ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")
    )
    if low is None and high is None:
        return ""
    return f"1 − {low} to 1 + {high}, dual clip {'off' if dual is None else dual}"


def _settings(config: Mapping[str, Any], *, actor: Mapping[str, str]) -> str:
    found = {text: config.get(f"actor_rollout_ref.actor.{name}") for name, text in actor.items()}
    return ", ".join(f"{text} {value}" for text, value in found.items() if value is not None)
