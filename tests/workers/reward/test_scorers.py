"""The rule rewards against hand-worked answers and the shared table of known faults."""

import json
from pathlib import Path

import pytest

from config.gym_tasks import GYM_TASKS
from workers.reward.scorers import SCORERS, score_addition, score_copy, score_gsm8k

KNOWN_FAULTS = Path(__file__).parents[2] / "data" / "known_faults.json"
# Boxed answers are the math scorer's (test_verifiers.py); by name, so that a new case cannot slip past.
BOXED_CASES = {"answer_14", "answer_16", "answer_17"}
ANSWER_CASES = [
    case
    for case in json.loads(KNOWN_FAULTS.read_text(encoding="utf-8"))["entries"]
    if case["kind"] == "answer_extraction" and case["id"] not in BOXED_CASES
]


def gsm8k(response: str, ground_truth: str) -> dict[str, float | str]:
    return score_gsm8k("openai/gsm8k", response, ground_truth, None)


def test_table_of_known_faults_holds_answer_cases_of_gsm8k_style_only() -> None:
    assert len(ANSWER_CASES) == 12
    assert {case["params"]["style"] for case in ANSWER_CASES} == {"gsm8k"}


@pytest.mark.parametrize("case", ANSWER_CASES, ids=lambda case: f"{case['id']}: {case['note']}")
def test_gsm8k_agrees_with_known_faults(case: dict) -> None:
    result = gsm8k(case["inputs"]["response"], case["inputs"]["ground_truth"])
    assert result["score"] == result["acc"] == case["expected"]["score"]


@pytest.mark.parametrize(
    ("response", "pred"),
    [
        ("#### 42", "42"),
        ("#### 1e3", "1000"),
        ("#### 2.5E-1", "0.25"),
        ("#### $ 5", "5"),
        ("#### -$1,234.50", "-1234.5"),
        ("#### $-5", "-5"),
        ("#### −5", "-5"),
        ("#### +5", "5"),
        ("#### .5", "0.5"),
        ("#### -0", "0"),
        ("#### **42**", "42"),
        ("####\n42 apples in 3 baskets", "42"),
        ("#### 60km/h", "60"),
        ("#### 50%", "50"),
        ("#### ９，０００", "9000"),
        ("＃＃＃＃ 9", "9"),
        ("So the answer is...42", "42"),
        ("6*7=42", "42"),
        ("<<48/2=24>>24 clips, so 24.", "24"),
        ("12345678901234567890123456789012345", "12345678901234567890123456789012345"),
    ],
)
def test_gsm8k_reads_the_plain_spelling_of_a_number(response: str, pred: str) -> None:
    assert gsm8k(response, pred) == {"score": 1.0, "acc": 1.0, "pred": pred}


@pytest.mark.parametrize("token", ["1/2", "12:30", "1-2", "1–2", "1,2", "1.2.3", "1+2", "1e999", "x1", "v1.2", "-$-1"])
def test_gsm8k_takes_no_part_of_a_longer_token_for_the_answer(token: str) -> None:
    for text in (f"#### {token}", f"It is {token}"):
        assert gsm8k(text, "1") == gsm8k(text, "2") == {"score": 0.0, "acc": 0.0, "pred": ""}


def test_gsm8k_without_marker_takes_the_last_number() -> None:
    assert gsm8k("First 41, then 42", "42")["score"] == 1.0
    assert gsm8k("First 42, then 41", "42")["score"] == 0.0


def test_gsm8k_with_marker_ignores_numbers_before_it() -> None:
    assert gsm8k("It is 42. #### none", "42") == {"score": 0.0, "acc": 0.0, "pred": ""}


def test_gsm8k_missing_numbers_never_match_each_other() -> None:
    assert gsm8k("#### none", "none")["score"] == 0.0


def test_gsm8k_compares_digits_beyond_float_precision() -> None:
    assert gsm8k("#### 10000000000000000000000000000001", "10000000000000000000000000000000")["score"] == 0.0


@pytest.mark.parametrize(
    ("response", "ended", "points"),
    [
        ("123", True, 4),
        ("123", False, 3),
        ("12", True, 2),
        ("1234", True, 3),
        ("321", True, 2),  # the middle digit, and the end
        ("223", True, 3),
        (" 123", True, 0),
        ("", True, 0),
    ],
)
def test_copy_gives_a_point_for_each_right_position_and_one_for_the_end(
    response: str, ended: bool, points: int
) -> None:
    result = score_copy("copy", response, "123", {"response_ended": ended})
    assert result == {"score": points / 4, "acc": float(points == 4), "pred": response}


def test_copy_counts_a_response_as_ended_unless_told_otherwise() -> None:
    assert score_copy("copy", "7", "7", None)["score"] == 1.0
    assert score_copy("copy", "7", "7", {"index": 3})["score"] == 1.0


def test_copy_refuses_an_empty_ground_truth() -> None:
    with pytest.raises(ValueError, match=r"ground_truth is empty .*'copy'"):
        score_copy("copy", "", "", None)


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("7", 1.0),
        (" 7\n", 1.0),
        ("8", 0.2),
        ("07", 0.2),
        ("77", 0.2),
        ("7.", 0.0),
        ("3 + 4 = 7", 0.0),
        ("-7", 0.0),
        ("７", 0.0),
        ("²", 0.0),
        ("", 0.0),
    ],
)
def test_addition_pays_for_digits_only_and_in_full_for_the_exact_sum(reply: str, score: float) -> None:
    result = score_addition("addition", reply, "7", None)
    assert result == {"score": score, "acc": float(score == 1.0), "pred": reply.strip()}


def test_addition_never_matches_an_empty_ground_truth() -> None:
    assert score_addition("addition", "", "", None)["acc"] == 0.0


def test_every_data_source_has_its_scorer() -> None:
    names = {name: scorer.__name__ for name, scorer in SCORERS.items()}
    assert {name for name, scorer in names.items() if scorer == "score_gym"} == {
        f"reasoning_gym/{task}" for task in GYM_TASKS
    }
    assert {name: scorer for name, scorer in names.items() if scorer != "score_gym"} == {
        "copy": "score_copy",
        "addition": "score_addition",
        "openai/gsm8k": "score_gsm8k",
        "gsm8k": "score_gsm8k",
        "math": "score_math",
        "lighteval/MATH": "score_math",
        "DigitalLearningGmbH/MATH-lighteval": "score_math",
        "HuggingFaceH4/MATH-500": "score_math",
    }
