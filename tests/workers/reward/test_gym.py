"""Procedural tasks of reasoning-gym: what makes a task fit for the list, their rows, and their scores in the child."""

import dataclasses
import functools
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from config.gym_tasks import GYM_TASKS
from config.load import ConfigFaults, load_config
from config.schema import GeneratorConfig
from trainer.data.generated import Split
from trainer.data.gym import gym_rows
from trainer.errors import ConfigError, DataError
from workers.reward.verifiers import score_gym

ROOT = Path(__file__).parents[3]


@functools.cache
def defaults() -> GeneratorConfig:
    return load_config([]).data.generator


def rows_of(task: str, split: Split = "train", seed: int = 1, num_train: int = 12, **settings: Any) -> list[dict]:
    changes = {"name": "reasoning_gym", "task": task, "num_train": num_train, "num_val": 5, "task_kwargs": settings}
    return gym_rows(dataclasses.replace(defaults(), **changes), split=split, seed=seed)


def score(row: dict, answer: str) -> dict:
    return score_gym(row["data_source"], answer, row["reward_model"]["ground_truth"], row["extra_info"])


@pytest.mark.parametrize("task", GYM_TASKS)
def test_every_task_pays_its_own_answer_in_full_and_takes_any_text(task: str) -> None:
    """Also after JSON, which a row goes through; and nothing draws from the global generators."""
    rows_of(task)  # the first import of the package draws
    random.seed(5)
    np.random.seed(5)
    states = random.getstate(), np.random.get_state()[1].tolist()
    rows = json.loads(json.dumps(rows_of(task)))
    assert rows == rows_of(task)
    for row in rows:
        right = score(row, row["reward_model"]["ground_truth"])
        assert (right["score"], right["acc"], right["unscored"]) == (1.0, 1.0, 0.0)
        for text in ("", "x y", "[[", "{", "import os", "9" * 300, "é\n\x00"):
            wrong = score(row, text)
            assert 0 <= wrong["score"] <= 1
            assert wrong["unscored"] in (0.0, 1.0)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states


def test_rows_do_not_depend_on_the_process() -> None:
    """Python's hash seed decides the order of sets."""
    code = (
        f"import hashlib, json, sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); from test_gym import *\n"
        "print(json.dumps({t: hashlib.sha256(json.dumps(rows_of(t)).encode()).hexdigest() for t in GYM_TASKS}))"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        for seed in ("3", "4")
    ]
    one, two = (json.loads(process.communicate()[0]) for process in processes)
    assert one.keys() == set(GYM_TASKS)
    assert [task for task in GYM_TASKS if one[task] != two[task]] == []


def test_a_row_has_the_fields_of_verl_and_the_whole_problem() -> None:
    row = rows_of("chain_sum", "val")[3]
    entry = row["extra_info"]["entry"]
    assert row == {
        "data_source": "reasoning_gym/chain_sum",
        "prompt": [{"role": "user", "content": entry["question"]}],
        "reward_model": {"style": "rule", "ground_truth": entry["answer"]},
        "extra_info": {"index": 3, "split": "val", "entry": entry},
    }


def test_seed_and_split_give_other_rows_and_a_longer_list_begins_with_the_shorter_one() -> None:
    questions = [
        [row["prompt"][0]["content"] for row in rows_of("chain_sum", split, seed, num_train)]
        for split, seed, num_train in (("train", 1, 12), ("train", 2, 12), ("val", 1, 12), ("train", 1, 20))
    ]
    first, other_seed, val, longer = questions
    assert not set(first) & set(other_seed)
    assert not set(first) & set(val)
    assert longer[:12] == first


def test_the_settings_of_a_task_are_passed_on() -> None:
    rows = rows_of("chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    assert all(-9 <= int(row["reward_model"]["ground_truth"]) <= 18 for row in rows)


@pytest.mark.parametrize("settings", [{"no_such": 1}, {"max_terms": -1}, {"max_terms": "x"}])
def test_settings_that_a_task_refuses_are_named(settings: dict) -> None:
    with pytest.raises(DataError, match=r"data\.generator\.task_kwargs=.*reasoning-gym's task 'chain_sum' refuses"):
        rows_of("chain_sum", **settings)


@pytest.mark.parametrize("task", ["codeio", "bf", "string_insertion", "nope"])
def test_a_task_that_is_not_on_the_list_is_refused_with_the_list(task: str) -> None:
    with pytest.raises(ConfigFaults, match=rf"data\.generator\.task={task}: must be one of ab, .*chain_sum"):
        load_config(["data.generator.name=reasoning_gym", f"data.generator.task={task}"])


def test_the_answer_is_what_stands_between_the_last_tags_else_the_whole_response() -> None:
    row = rows_of("chain_sum")[0]
    truth = row["reward_model"]["ground_truth"]
    for text in (f" {truth}\n", f"Well. <answer>0.5</answer>, or <answer> {truth} </answer>."):
        assert score(row, text) == {"score": 1.0, "acc": 1.0, "pred": truth, "unscored": 0.0}
    assert score(row, f"{truth}<answer></answer>")["acc"] == 0.0


def test_a_worker_scores_rows_as_this_process_does(start_worker, reward_rows) -> None:
    from workers.reward.function import RewardRow

    rows = rows_of("spell_backward") + rows_of("chain_sum")
    answers = [row["reward_model"]["ground_truth"][: 1 + index % 4] for index, row in enumerate(rows)]
    sent = [
        RewardRow(
            row=f"row {index}",
            data_source=row["data_source"],
            solution_str=answer,
            ground_truth=row["reward_model"]["ground_truth"],
            extra_info=row["extra_info"],
        )
        for index, (row, answer) in enumerate(zip(rows, answers, strict=True))
    ]
    rewards = start_worker(None, packages=["reasoning_gym"]).score(sent)
    assert [{"score": r.score, **r.extra} for r in rewards] == list(map(score, rows, answers))
    assert len({reward.score for reward in rewards}) > 2


def test_without_the_package_the_extra_to_install_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"pip install 'governor-rl\[gym\]'"):
        rows_of("chain_sum")
