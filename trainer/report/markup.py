"""Text that goes into the page: escaped, cut to a length, and figures in a form that one reads at a glance."""

import html
import math
import re
from typing import Any

# What a browser drops, draws as nothing, or lets change the direction of the text around it.
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ud800-\udfff\ufeff\ufffe\uffff]"
)


def escaped(text: object, limit: int | None = None) -> str:
    """A text for HTML, in elements and in quoted attributes; what cannot be seen is written as its code.

    Longer than `limit` characters, it is cut there and the number of missing characters stands behind.
    """
    whole = str(text)
    shown = whole if limit is None or len(whole) <= limit else whole[:limit]
    visible = _INVISIBLE.sub(lambda match: f"\\u{ord(match[0]):04x}", shown)
    rest = "" if shown is whole else f" … ({len(whole) - len(shown):,} more characters)"
    return html.escape(visible) + rest


def figure(value: Any) -> str:
    """A number with three significant digits; `–` where there is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "–"
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 1e6 or size < 0.001:
        mantissa, exponent = f"{value:.2e}".split("e")
        return _signed(f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}")
    if size >= 1000:
        return _signed(f"{value:,.0f}")
    text = f"{value:.{max(0, 2 - math.floor(math.log10(size)))}f}"
    return _signed(text.rstrip("0").rstrip(".") if "." in text else text)


def share(value: Any) -> str:
    """A share of 1 as a percentage; `–` where there is none."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return "–"
    if 0 < abs(value) < 0.001:
        return "< 0.1 %"
    return f"{figure(round(100 * value, 1))} %"


def duration(seconds: float) -> str:
    """Seconds in the largest unit that leaves a readable figure."""
    if seconds < 120:
        return f"{figure(seconds)} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


def _signed(text: str) -> str:
    return text.replace("-", "−")
