"""The GSM8K preparation on the first 64 training lines of the real data set, and on broken ones."""

import importlib.util
import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from workers.reward.scorers import SCORERS

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "prepare_gsm8k.py"
SAMPLE = ROOT / "tests" / "data" / "gsm8k" / "train_64.jsonl"


def load_script() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("prepare_gsm8k", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


prepare_gsm8k = load_script()


def run(out: Path, *, train: Path = SAMPLE, test: Path = SAMPLE) -> int:
    return prepare_gsm8k.main(["--train", str(train), "--test", str(test), "--out", str(out)])


def sample() -> list[dict[str, str]]:
    return [json.loads(line) for line in SAMPLE.read_text(encoding="utf-8").splitlines()]


def line(question: Any = "How many?", answer: Any = "Two.\n#### 2") -> bytes:
    return json.dumps({"question": question, "answer": answer}).encode()


def test_command_writes_both_files_and_says_so(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--train", str(SAMPLE), "--test", str(SAMPLE), "--out", "made/gsm8k"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "made/gsm8k/train.parquet: 64 rows\nmade/gsm8k/test.parquet: 64 rows\n"
    assert sorted(path.name for path in (tmp_path / "made/gsm8k").iterdir()) == ["test.parquet", "train.parquet"]


@pytest.mark.parametrize("split", ["train", "test"])
def test_parquet_has_the_columns_of_verl(tmp_path: Path, split: str) -> None:
    assert run(tmp_path) == 0
    table = pq.read_table(tmp_path / f"{split}.parquet")
    assert table.column_names == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    for index, (row, example) in enumerate(zip(table.to_pylist(), sample(), strict=True)):
        (message,) = row["prompt"]
        assert message["role"] == "user"
        assert message["content"].startswith(example["question"])
        assert "####" in message["content"]
        assert (row["data_source"], row["ability"]) == ("openai/gsm8k", "math")
        assert row["reward_model"]["style"] == "rule"
        assert row["extra_info"] == {"split": split, "index": index, **example}


def test_known_answers_are_read(tmp_path: Path) -> None:
    assert run(tmp_path) == 0
    rows = pq.read_table(tmp_path / "train.parquet").to_pylist()
    assert [row["reward_model"]["ground_truth"] for row in rows[:6]] == ["72", "10", "5", "42", "624", "35"]


def test_the_reference_solution_of_every_row_earns_the_full_reward(tmp_path: Path) -> None:
    assert run(tmp_path) == 0
    for row in pq.read_table(tmp_path / "train.parquet").to_pylist():
        scorer = SCORERS[row["data_source"]]
        ground_truth = row["reward_model"]["ground_truth"]
        assert scorer(row["data_source"], row["extra_info"]["answer"], ground_truth, None)["score"] == 1.0
        assert scorer(row["data_source"], f"#### {ground_truth}1", ground_truth, None)["score"] == 0.0


@pytest.mark.parametrize(
    ("answer", "number"),
    [("#### 1,080", "1080"), ("#### -3", "-3"), ("#### 2.5", "2.5"), ("#### 1\n####  7 ", "7")],
)
def test_final_answer_is_the_number_after_the_last_marker(answer: str, number: str) -> None:
    assert prepare_gsm8k.final_answer(answer) == number


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b"{", "not JSON: Expecting property name enclosed in double quotes at column 2"),
        (b"", "not JSON: Expecting value at column 1"),
        (b'{"question": "\xff", "answer": "#### 1"}', "not UTF-8: byte 15 cannot be read"),
        (b"[1]", "must be a JSON object, not list"),
        (b'{"answer": "#### 1"}', '"question" must be a text that is not empty, not None'),
        (line(question=" "), "\"question\" must be a text that is not empty, not ' '"),
        (line(answer=3), '"answer" must be a text that is not empty, not 3'),
        (line(answer="It is 2"), '"answer" has no "####" before its final number'),
        (line(answer="#### two"), '"answer" must have a number after the last "####", not \'two\''),
        (line(answer="#### 1 or 2"), '"answer" must have a number after the last "####", not \'1 or 2\''),
    ],
)
def test_bad_line_ends_with_3_and_names_file_line_and_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bad: bytes, message: str
) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_bytes(line() + b"\n" + bad + b"\n" + line() + b"\n")
    assert run(tmp_path / "out", test=path) == 3
    assert capsys.readouterr().err == f"{path}, line 2: {message}\n"
    assert not (tmp_path / "out").exists()


def test_all_faults_are_told_at_once_up_to_ten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_bytes(b"{}\n" * 12)
    assert run(tmp_path / "out", train=path) == 3
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 11
    assert told[9].startswith(f"{path}, line 10: ")
    assert told[10] == f"{path}: 2 more bad lines"


def test_empty_or_missing_file_ends_with_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    assert run(tmp_path / "out", train=empty) == 3
    assert run(tmp_path / "out", train=tmp_path / "none.jsonl") == 3
    assert capsys.readouterr().err == (
        f"{empty}: holds no examples\n{tmp_path / 'none.jsonl'}: No such file or directory\n"
    )


@pytest.mark.parametrize("options", [[], ["--train", "a"], ["--from-hub", "--test", "a"]])
def test_input_is_two_files_or_the_hub(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        prepare_gsm8k.main([*options, "--out", "never"])
    assert stopped.value.code == 2
    assert "give either both --train and --test, or --from-hub alone" in capsys.readouterr().err


def test_hub_without_its_extra_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert prepare_gsm8k.main(["--from-hub", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "--from-hub needs the extra hub: pip install 'governor-rl[hub]'\n"


def test_hub_and_files_give_the_same_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(name: str, config: str) -> dict[str, list[dict[str, str]]]:
        assert (name, config) == ("openai/gsm8k", "main")
        return {"train": sample(), "test": sample()}

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert prepare_gsm8k.main(["--from-hub", "--out", str(tmp_path / "hub")]) == 0
    assert run(tmp_path / "files") == 0
    for split in ("train", "test"):
        assert pq.read_table(tmp_path / f"hub/{split}.parquet").equals(
            pq.read_table(tmp_path / f"files/{split}.parquet")
        )
