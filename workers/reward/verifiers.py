"""Rewards through verifiers of other packages: math-verify (extra `math`) and reasoning-gym (extra `gym`).

They read whatever the policy wrote, and some texts make them slow, recurse or raise. That is the text's fault and not
the run's: such a response scores 0 and counts as `unscored`. `workers.reward.worker` does the same where a call takes
longer than `reward.timeout_s` or takes its process down.
"""

import functools
import importlib.util
import resource
from collections.abc import Mapping
from typing import Any

from config.gym_tasks import GYM_PREFIX, GYM_TASKS

MATH_SOURCES = ("math", "lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500")
# The package of each verifier as it is imported, and the extra that installs it.
EXTRAS = {"math_verify": "math", "reasoning_gym": "gym"}
MEMORY_LIMIT = 8 << 30  # bytes of address space: a power tower asks for more and gets a MemoryError

# What a response scores that a verifier could not read.
UNSCORED: dict[str, float | str] = {"score": 0.0, "acc": 0.0, "pred": "", "unscored": 1.0}


def package_of(data_source: str) -> str | None:
    """The package that scores a data source; None where none of another's does."""
    if data_source in MATH_SOURCES:
        return "math_verify"
    task = data_source.removeprefix(GYM_PREFIX)
    return "reasoning_gym" if task != data_source and task in GYM_TASKS else None


def missing_extra(data_source: str) -> str | None:
    """The extra to install before a data source can be scored; None where nothing is missing."""
    package = package_of(data_source)
    return EXTRAS[package] if package and importlib.util.find_spec(package) is None else None


def prepare(packages: list[str]) -> None:
    """Import the packages before the clock of a row runs, and bound this process's memory."""
    for package in packages:
        importlib.import_module(package)
    if packages:
        most = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = MEMORY_LIMIT if most == resource.RLIM_INFINITY else min(MEMORY_LIMIT, most)
        resource.setrlimit(resource.RLIMIT_AS, (limit, most))


def score_math(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None
) -> dict[str, float | str]:
    """1.0 when the response's answer equals the ground truth in mathematics, else 0.0; `pred` is the answer as written.

    The answer is the last \\boxed{…}, else the last formula or number. The ground truth is LaTeX, boxed or not.

    Raises:
        ValueError: the ground truth holds no answer, which is a fault of the data.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    # Their own time limits are alarms, which C code does not hear: this process is killed from outside.
    gold_text = ground_truth if "\\boxed" in ground_truth else f"\\boxed{{{ground_truth}}}"
    gold = parse(gold_text, extraction_config=[LatexExtractionConfig()], parsing_timeout=None)  # pyright: ignore
    if not ground_truth.strip() or not gold:
        raise ValueError(f"ground_truth {ground_truth!r} in a row of data_source {data_source!r} holds no answer")
    config = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    answer = parse(_last_box(solution_str), extraction_config=config, parsing_timeout=None)  # pyright: ignore
    correct = float(bool(answer) and verify(gold, answer, timeout_seconds=None))
    written = next((part for part in reversed(answer) if isinstance(part, str)), "")
    return {"score": correct, "acc": correct, "pred": " ".join(written.split()), "unscored": 0.0}


def _last_box(text: str) -> str:
    """The last box of a text that has one: math-verify would read all of them together as one answer."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return text
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == "{") - (text[place] == "}")
        if text[place] == "}" and depth == 0:
            return text[start : place + 1]
    return text[start:]


def score_gym(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> dict[str, float | str]:
    """What reasoning-gym's task gives for the response's answer to the problem in `extra_info["entry"]`, from 0 to 1.

    The answer is the text in the last <answer>…</answer>, else the whole response without white space around it. `acc` is
    1.0 for the full score.
    """
    from reasoning_gym.utils import extract_answer

    entry = dict((extra_info or {})["entry"])
    answer = extract_answer(solution_str)
    answer = solution_str.strip() if answer is None else answer
    try:
        score = float(_gym_scorer(data_source.removeprefix(GYM_PREFIX))(answer, entry))
    except Exception:  # each task reads answers in its own way, and not all of them expect any text
        return dict(UNSCORED)
    return {"score": score, "acc": float(score >= 1), "pred": answer, "unscored": 0.0}


@functools.cache
def _gym_scorer(task: str) -> Any:
    import reasoning_gym

    return reasoning_gym.get_score_answer_fn(task)
