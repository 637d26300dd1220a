"""Math answers through math-verify, in this process and in the child that can be killed."""

import json
from pathlib import Path

import pytest

from trainer.errors import RewardError
from workers.reward import verifiers
from workers.reward.verifiers import MATH_SOURCES, missing_extra, package_of, score_math

KNOWN_FAULTS = json.loads((Path(__file__).parents[2] / "data" / "known_faults.json").read_text(encoding="utf-8"))
BOXED = [case for case in KNOWN_FAULTS["entries"] if case["params"].get("style") == "boxed"]


def test_the_table_of_known_faults_holds_boxed_answers() -> None:
    assert {case["id"] for case in BOXED} == {"answer_14", "answer_16", "answer_17"}


@pytest.mark.parametrize("case", BOXED, ids=lambda case: f"{case['id']}: {case['note']}")
def test_boxed_answers_agree_with_known_faults(case: dict) -> None:
    assert score_math("math", **{"solution_str": case["inputs"]["response"], "ground_truth": case["inputs"]["ground_truth"]})[
        "score"
    ] == case["expected"]["score"]  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "truth", "pred"),
    [
        ("The answer is 0.5", r"\frac{1}{2}", "0.5"),
        ("so x = 1/2", r"\frac12", "1/2"),
        (r"\boxed{\frac{2}{4}}", "0.5", r"\frac{2}{4}"),
        (r"$\frac{1}{2}$", r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"First \boxed{41}, no, \boxed{42}.", "42", "42"),
        (
            r"\boxed{41}, which I checked again, and found to be \boxed{\frac{84}{2}}, that is {42}.",
            "42",
            r"\frac{84}{2}",
        ),
        (r"\boxed{42}, that is 43 less 1", "42", "42"),
        (r"\boxed{\{1,2,3\}}", r"\{3,2,1\}", r"\{1,2,3\}"),
        (r"\boxed{[0,1)}", "[0,1)", "[0,1)"),
        (r"\boxed{(1,2)}", "(1, 2)", "(1,2)"),
        (r"\boxed{x^2+2x+1}", "(x+1)^2", "x^2+2x+1"),
        (r"\boxed{2\sqrt{3}}", r"\sqrt{12}", r"2\sqrt{3}"),
        (r"\boxed{\text{Evelyn}}", r"\text{Evelyn}", r"\text{Evelyn}"),
    ],
)
def test_answers_that_are_equal_in_mathematics_score_1(answer: str, truth: str, pred: str) -> None:
    assert score_math("math", answer, truth) == {"score": 1.0, "acc": 1.0, "pred": pred, "unscored": 0.0}


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        (r"First \boxed{42}, no, \boxed{41}.", "42"),
        (r"\boxed{\{1,2\}}", r"\{1,2,3\}"),
        (r"\boxed{(1,2)}", "(2,1)"),
        (r"\boxed{[0,1]}", "[0,1)"),
        (r"\boxed{-3}", "3"),
        (r"\boxed{\pi}", "3.14"),
        (r"\boxed{\text{Bob}}", r"\text{Evelyn}"),
        ("no idea", "42"),
        (r"\boxed{}", "42"),
        ("", "42"),
        ("(" * 5000, "42"),
    ],
)
def test_other_answers_score_0(answer: str, truth: str) -> None:
    result = score_math("math", answer, truth)
    assert (result["score"], result["acc"], result["unscored"]) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("truth", ["", " ", r"\text{}"])
def test_a_ground_truth_without_an_answer_is_a_fault_of_the_data(truth: str) -> None:
    with pytest.raises(ValueError, match="holds no answer"):
        score_math("math", "42", truth)


def test_an_answer_that_takes_too_long_scores_0_and_its_neighbours_are_scored(start_worker, reward_rows) -> None:
    """A power tower never ends; the child is killed and a new one goes on behind it."""
    tower = r"\boxed{9^{9^{9^{9}}}}"
    worker = start_worker(None, timeout_s=1.5, packages=["math_verify"])
    rows = reward_rows(["42", tower, "41", r"\boxed{42}"], source="HuggingFaceH4/MATH-500", truths=["42"] * 4)
    rewards = worker.score(rows)
    assert [reward.score for reward in rewards] == [1, 0, 0, 1]
    assert [reward.extra["unscored"] for reward in rewards] == [0, 1, 0, 0]
    assert [reward.extra["pred"] for reward in rewards] == ["42", "", "41", "42"]
    assert worker.score(rows[:1]) == rewards[:1]


def test_a_fault_of_the_data_ends_the_run_and_names_the_row(start_worker, reward_rows) -> None:
    worker = start_worker(None, packages=["math_verify"])
    with pytest.raises(RewardError, match=r"(?s)raised for row 1:.*ground_truth '' .*holds no answer"):
        worker.score(reward_rows(["1", "2"], source="math", truths=["1", ""]))


def test_each_data_source_knows_its_package_and_a_missing_one_its_extra(monkeypatch) -> None:
    assert {package_of(source) for source in MATH_SOURCES} == {"math_verify"}
    assert package_of("reasoning_gym/gcd") == "reasoning_gym"
    assert package_of("reasoning_gym/codeio") is package_of("gcd") is package_of("gsm8k") is None
    assert missing_extra("math") is missing_extra("reasoning_gym/gcd") is missing_extra("gsm8k") is None
    monkeypatch.setattr(verifiers.importlib.util, "find_spec", lambda name: None)
    assert (missing_extra("math"), missing_extra("reasoning_gym/gcd"), missing_extra("gsm8k")) == ("math", "gym", None)
