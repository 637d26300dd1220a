"""Reward workers over real child processes: row by row, in batches, side by side; what a failure names."""

import json
import time

import pytest

from trainer.errors import RewardError

TEXTS = ["a", "bbb", "", "cc", "dddd"]
BY_ROW = """
def compute_score(data_source, solution_str, ground_truth, extra_info, factor=1):
    return {"score": factor * len(solution_str), "index": extra_info["index"]}
"""
BATCHED = """
def compute_score(data_sources, solution_strs, ground_truths, extra_infos, factor=1):
    assert len(data_sources) == len(ground_truths)
    return [{"score": factor * len(s), "index": e["index"]} for s, e in zip(solution_strs, extra_infos)]
"""
ASYNC = """
import asyncio, random
async def compute_score(data_source, solution_str, ground_truth, extra_info, factor=1):
    await asyncio.sleep(random.random() / 50)
    return {"score": factor * len(solution_str), "index": extra_info["index"]}
"""


def test_batched_and_async_functions_give_what_row_by_row_gives_in_the_order_of_the_rows(start_worker, reward_rows):
    rows = reward_rows(TEXTS)
    expected = start_worker(BY_ROW, kwargs={"factor": 2}).score(rows)
    assert [(reward.score, reward.extra["index"]) for reward in expected] == [(2, 0), (6, 1), (0, 2), (4, 3), (8, 4)]
    assert start_worker(BATCHED, kwargs={"factor": 2}, batched=True).score(rows) == expected
    asynchronous = start_worker(ASYNC, kwargs={"factor": 2})
    assert asynchronous.score(rows) == expected
    assert asynchronous.score(rows[:2]) == expected[:2]  # a second step finds the same loop


def test_a_worker_without_rows_has_no_rewards(start_worker):
    assert start_worker(BATCHED, batched=True).score([]) == []


def test_rows_of_an_async_function_run_at_once(start_worker, reward_rows):
    """Each row waits until all four are in, so one after the other would never end."""
    code = """
import asyncio
arrived, all_in = [], asyncio.Event()
async def compute_score(data_source, solution_str, ground_truth, extra_info):
    arrived.append(solution_str)
    if len(arrived) == 4:
        all_in.set()
    await all_in.wait()
    return len(arrived)
"""
    assert [reward.score for reward in start_worker(code, timeout_s=5).score(reward_rows("abcd"))] == [4] * 4
    with pytest.raises(RewardError, match=r"longer than reward\.timeout_s=1 s for row 0"):
        start_worker(code, timeout_s=1, max_concurrency=3).score(reward_rows("abcd"))


def test_no_more_than_max_concurrency_rows_of_an_async_function_run_at_once(start_worker, reward_rows):
    code = """
import asyncio
running = 0
async def compute_score(data_source, solution_str, ground_truth, extra_info):
    global running
    running += 1
    seen = running
    await asyncio.sleep(0.02)
    running -= 1
    return seen
"""
    scores = [reward.score for reward in start_worker(code, max_concurrency=3).score(reward_rows("x" * 9))]
    assert max(scores) == 3


def test_the_time_of_an_async_row_runs_from_its_own_start(start_worker, reward_rows):
    code = """
import asyncio
async def compute_score(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0.4)
    return 1
"""
    worker = start_worker(code, timeout_s=1, max_concurrency=1)
    assert len(worker.score(reward_rows("abcd"))) == 4  # 1.6 s in all


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("await asyncio.sleep(60)", r"longer than reward\.timeout_s=1 s for row 2"),
        ("time.sleep(60)", r"longer than reward\.timeout_s=1 s for row \d"),
        ("raise KeyError('oops')", r"(?s)raised for row 2:.*KeyError: 'oops'"),
        ("return 'good'", r"returned 'good' \(str\) for row 2"),
        ("os._exit(3)", r"ended its process \(exit 3\)"),
        ("os.closerange(3, 100), time.sleep(60)", r"ended its process \(exit -9\)"),
    ],
    ids=["hangs", "blocks", "raises", "returns", "exits", "hangs up"],
)
def test_a_failing_row_of_an_async_function_is_named(start_worker, reward_rows, body, message):
    code = f"""
import asyncio, os, time
async def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "c":
        {body}
    return 1
"""
    started = time.monotonic()
    with pytest.raises(RewardError, match=message):
        start_worker(code, timeout_s=1).score(reward_rows("abcd"))
    assert time.monotonic() - started < 20


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [1.0] * 2", r"returned 2 rewards for 3 rows, from row 0 to row 2; one per row is wanted"),
        ("return 1.0", r"returned float for 3 rows, .*batched=true it returns a list"),
        ("return {'score': [1, 2, 3]}", r"returned dict for 3 rows"),
        ("return [1.0, None, 2.0]", r"returned None \(NoneType\) for row 1"),
        ("return [1.0, 2.0, {'score': float('inf')}]", r"returned inf \(float\) for row 2"),
        ("raise KeyError('oops')", r"(?s)raised for 3 rows, from row 0 to row 2:.*KeyError: 'oops'"),
        ("import time; time.sleep(60)", r"longer than reward\.timeout_s=0\.3 s x 3 rows for 3 rows, from row 0 to row 2"),
    ],
    ids=["too few", "number", "mapping", "none", "inf", "raises", "hangs"],
)  # fmt: skip
def test_a_failing_batch_names_its_rows(start_worker, reward_rows, body, message):
    code = f"def compute_score(data_sources, solution_strs, ground_truths, extra_infos):\n    {body}\n"
    with pytest.raises(RewardError, match=message):
        start_worker(code, batched=True, timeout_s=0.3).score(reward_rows("abc"))


def test_a_batch_may_come_back_as_an_array(start_worker, reward_rows):
    code = "import numpy\ndef compute_score(solution_strs, **rest):\n    return numpy.array([len(s) for s in solution_strs])\n"
    assert [reward.score for reward in start_worker(code, batched=True).score(reward_rows(TEXTS))] == [1, 3, 0, 2, 4]


def test_a_hanging_function_of_the_users_still_ends_the_run(start_worker, reward_rows):
    """Only what other packages' verifiers do not come back from is forgiven, whatever the data source."""
    code = "import time\ndef compute_score(solution_str, **rest):\n    time.sleep(60 if solution_str == 'b' else 0)\n    return 1\n"
    with pytest.raises(RewardError, match=r"longer than reward\.timeout_s=0\.5 s for row 1; its process was killed"):
        start_worker(code, timeout_s=0.5).score(reward_rows("abc", source="math"))


def test_fields_come_back_as_plain_values_whatever_their_types(start_worker, reward_rows):
    """A type of the user's file is known to the child alone, and a line of samples.jsonl holds what JSON has."""
    code = """
import enum
import numpy as np
class Kind(enum.StrEnum):
    GOOD = "good"
class Grade(enum.IntEnum):
    TOP = 3
def compute_score(**rest):
    return {"score": Grade.TOP, "kind": Kind.GOOD, Kind.GOOD: True, "none": None, "mean": np.float64(0.5), "name": np.str_("x"),
            "spectrum": np.complex128(1), "day": np.datetime64("2020-01-02")}
"""
    (reward,) = start_worker(code).score(reward_rows("a"))
    assert json.loads(json.dumps(reward.extra)) == {
        "kind": "good", "good": True, "none": None, "mean": 0.5, "name": "x", "spectrum": "(1+0j)", "day": "datetime.date(2020, 1, 2)",
    }  # fmt: skip
    assert {type(value) for value in reward.extra.values()} == {str, bool, type(None), float}
    assert (reward.score, type(reward.score)) == (3.0, float)
