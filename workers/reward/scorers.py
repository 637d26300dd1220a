"""Built-in rule rewards, one pure function per task, with verl's reward signature.

Every scorer is called as `f(data_source, solution_str, ground_truth, extra_info)`. `solution_str` is the decoded
response without special tokens; whether an end token closed the response stands in
`extra_info["response_ended"]` (absent: it did). Every scorer returns `score` (the reward), `acc` (1.0 or 0.0, what
validation counts as success) and `pred` (the answer that was read, for majority votes).
"""

import re
import unicodedata
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from config.gym_tasks import GYM_PREFIX, GYM_TASKS
from workers.reward.verifiers import MATH_SOURCES, score_gym, score_math

Scorer = Callable[[str, str, str, Mapping[str, Any] | None], dict[str, float | str]]

ANSWER_MARKER = "####"

# A token is everything glued to a digit, so that "1/2", "12:30" or "2-3" cannot pass for one of their parts.
_TOKEN = re.compile(
    r"(?<!\w)(?<!\d[.,/:^*])"  # not the tail of a word or of another number
    r"[-+]?[$€£¥₹]?[-+]?"
    r"(?:(?<!\.)\.)?\d"  # ".5" is a number, the dots of "...5" are not part of one
    "[\\w.,/:^*+\N{EN DASH}-]*"
)
# The tail holds no digit: it is a full stop, a unit ("42km/h") or markup ("42**").
_NUMBER = re.compile(
    r"(?P<sign>[-+]?)[$€£¥₹]?(?P<inner_sign>[-+]?)"
    r"(?P<digits>(?:\d{1,3}(?:,\d{3})+|\d*)(?:\.\d+)?(?:[eE][-+]?\d{1,2})?)\D*"
)


def score_copy(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None
) -> dict[str, float | str]:
    """The share of points won: one for each right position, one for ending right after the answer.

    `score` is in [0, 1], in steps of 1 / (len(ground_truth) + 1). The end point needs a response of exactly the
    answer's length that was closed by an end token. `acc` is 1.0 when every point was won. Nothing is stripped.

    Raises:
        ValueError: the ground truth is empty.
    """
    if not ground_truth:
        raise ValueError(f"ground_truth is empty in a row of data_source {data_source!r}: there is nothing to copy")
    ended = bool((extra_info or {}).get("response_ended", True))
    points = sum(got == want for got, want in zip(solution_str, ground_truth, strict=False))
    points += ended and len(solution_str) == len(ground_truth)
    max_points = len(ground_truth) + 1
    return {"score": points / max_points, "acc": float(points == max_points), "pred": solution_str}


def score_addition(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None
) -> dict[str, float | str]:
    """1.0 for a reply that is the sum and nothing else, 0.2 for any other reply of digits only, else 0.0.

    White space around the reply is dropped. The sum must be spelled as in the ground truth: "07" is not "7".
    """
    reply = solution_str.strip()
    digits_only = reply.isascii() and reply.isdigit()
    correct = digits_only and reply == ground_truth
    return {"score": 1.0 if correct else 0.2 * digits_only, "acc": float(correct), "pred": reply}


def score_gsm8k(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None
) -> dict[str, float | str]:
    """1.0 when the response's final number equals the ground truth, else 0.0; `pred` is that number or "".

    The final number is the first one after the last "####"; in a response without the marker it is the last number.
    Numbers are compared as decimals: thousands separators, a currency sign, a plus sign, a full stop, a unit,
    trailing zeros, exponents of up to two digits and full-width characters do not matter. What is not one plain
    number, such as a fraction, a range or a clock time, is no answer. A missing number never matches, not even a
    missing ground truth.
    """
    _, marker, tail = unicodedata.normalize("NFKC", solution_str).rpartition(ANSWER_MARKER)
    answer = _find_number(tail, place=0 if marker else -1)
    target = _find_number(unicodedata.normalize("NFKC", ground_truth), place=0)
    correct = float(answer is not None and answer == target)
    return {"score": correct, "acc": correct, "pred": "" if answer is None else _plain(answer)}


def _find_number(text: str, *, place: int) -> Decimal | None:
    """The value of the first (place 0) or last (place -1) token with a digit; None unless that is one plain number."""
    tokens = _TOKEN.findall(text.replace("\N{MINUS SIGN}", "-"))
    match = _NUMBER.fullmatch(tokens[place]) if tokens else None
    if match is None or (match["sign"] and match["inner_sign"]):
        return None
    return Decimal(match["sign"] + match["inner_sign"] + match["digits"].replace(",", ""))


def _plain(value: Decimal) -> str:
    """The one spelling of a value: no exponent, no trailing zeros, no negative zero, never rounded."""
    text = f"{value:f}"  # Decimal.normalize() would round to 28 digits
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return "0" if value == 0 else text


SCORERS: dict[str, Scorer] = {
    "copy": score_copy,
    "addition": score_addition,
    "openai/gsm8k": score_gsm8k,
    "gsm8k": score_gsm8k,
    **dict.fromkeys(MATH_SOURCES, score_math),
    **{f"{GYM_PREFIX}{task}": score_gym for task in GYM_TASKS},
}
