"""The configuration of a run as its difference from the defaults."""

import json
from collections.abc import Mapping
from typing import Any

from config.load import compose_values, flatten
from trainer.report.markup import escaped

MAX_ROWS = 200
MAX_VALUE = 200  # characters of a value
ABSENT = object()  # a key that one side does not have

# Keys that set a limiter, and its colour.
LIMITER_KEYS = (
    ("algorithm.use_kl_in_reward", "reward-kl"),
    ("algorithm.kl_penalty", "reward-kl"),
    ("algorithm.kl_ctrl.", "reward-kl"),
    ("actor_rollout_ref.actor.clip_ratio", "clip"),
    ("actor_rollout_ref.actor.entropy_coeff", "entropy"),
    ("actor_rollout_ref.actor.calculate_entropy", "entropy"),
    ("actor_rollout_ref.actor.use_kl_loss", "kl-loss"),
    ("actor_rollout_ref.actor.kl_loss_", "kl-loss"),
)


def default_config() -> dict[str, Any]:
    """The defaults without any experiment, flat."""
    return flatten(compose_values(["experiment=null"]))


def differences(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Keys whose value is not the default, with default and value; `ABSENT` where a side lacks the key.

    An open mapping that is empty on one side is the same as its keys missing there.
    """
    found = {
        key: (defaults.get(key, ABSENT), config.get(key, ABSENT))
        for key in sorted({*config, *defaults})
        if defaults.get(key, ABSENT) != config.get(key, ABSENT)
    }
    return {key: sides for key, sides in found.items() if not _is_emptied(key, sides, found)}


def _is_emptied(key: str, sides: tuple[Any, Any], found: Mapping[str, Any]) -> bool:
    """Whether a key is only the empty form of a mapping whose keys stand in the list themselves."""
    return {} in sides and ABSENT in sides and any(other.startswith(f"{key}.") for other in found)


def difference_table(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """The differences by group, with the limiters' keys in their colours."""
    if not config:
        return '<p class="none">The run has no config.yaml.</p>'
    found = differences(config, defaults)
    if not found:
        return "<p>Every key has its default.</p>"
    rows = "".join(
        f"<tr{_limiter_class(key)}><th scope='row'>{_key(key)}</th>"
        f"<td>{_value(default)}</td><td><b>{_value(value)}</b></td></tr>"
        for key, (default, value) in list(found.items())[:MAX_ROWS]
    )
    rest = f'<p class="note">{len(found) - MAX_ROWS} more in config.yaml.</p>' if len(found) > MAX_ROWS else ""
    return (
        f"<p>{len(found)} of {len({*config, *defaults})} keys differ from the defaults (<code>experiment=null</code>). "
        "A coloured edge marks a limiter's key.</p>"
        '<div class="wide"><table class="config"><thead><tr><th scope="col">key</th><th scope="col">default</th>'
        f'<th scope="col">this run</th></tr></thead><tbody>{rows}</tbody></table></div>{rest}'
    )


def _limiter_class(key: str) -> str:
    colour = next((colour for start, colour in LIMITER_KEYS if key.startswith(start)), None)
    return f' class="limiter-key c-{colour}"' if colour else ""


def _key(key: str) -> str:
    """A key that a narrow page breaks at its dots and underscores."""
    return escaped(key, MAX_VALUE).replace(".", ".<wbr>").replace("_", "_<wbr>")


def _value(value: Any) -> str:
    """A value as one would write it in an override; `–` for a key that is not there."""
    if value is ABSENT:
        return "–"
    text = value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False, default=str)
    return escaped(text, MAX_VALUE)
