"""Turns GSM8K into the parquet files that the trainer reads, with verl's columns.

    python scripts/prepare_gsm8k.py --train train.jsonl --test test.jsonl --out data/gsm8k
    python scripts/prepare_gsm8k.py --from-hub --out data/gsm8k

An input line is a JSON object with `question` and `answer`; the answer ends in "#### NUMBER". Nothing is written
unless every line is good.

Exit codes: 0 done, 2 wrong options or the extra `hub` is missing, 3 bad data.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

DATA_SOURCE = "openai/gsm8k"
ANSWER_MARKER = "####"
INSTRUCTION = f'Reason step by step, then give the final answer as a plain number after "{ANSWER_MARKER}".'
MAX_FAULTS_SHOWN = 10

SCHEMA = pa.schema(
    {
        "data_source": pa.string(),
        "prompt": pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})),
        "ability": pa.string(),
        "reward_model": pa.struct({"style": pa.string(), "ground_truth": pa.string()}),
        "extra_info": pa.struct(
            {"split": pa.string(), "index": pa.int64(), "answer": pa.string(), "question": pa.string()}
        ),
    }
)


class BadDataError(ValueError):
    """The input cannot be used; the message names the source, the line and what is wrong with it."""


def final_answer(answer: str) -> str:
    """The number after the last "####", without thousands separators.

    Raises:
        ValueError: there is no marker, or what follows it is not a number.
    """
    _, marker, tail = answer.rpartition(ANSWER_MARKER)
    if not marker:
        raise ValueError(f'"answer" has no "{ANSWER_MARKER}" before its final number')
    number = tail.strip().replace(",", "")
    if not re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", number):
        raise ValueError(f'"answer" must have a number after the last "{ANSWER_MARKER}", not {tail.strip()!r}')
    return number


def make_row(example: Any, *, split: str, index: int) -> dict[str, Any]:
    """One row in verl's format from one `{"question", "answer"}` example.

    Raises:
        ValueError: the example is not such a mapping, a field is missing or empty, or the answer has no number.
    """
    if not isinstance(example, dict):
        raise ValueError(f"must be a JSON object, not {type(example).__name__}")
    for field in ("question", "answer"):
        text = example.get(field)
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f'"{field}" must be a text that is not empty, not {text!r}')
    question, answer = example["question"], example["answer"]
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{question}\n\n{INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": final_answer(answer)},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": question},
    }


def make_rows(examples: Iterable[Any], *, split: str, source: str) -> list[dict[str, Any]]:
    """The rows of one split, in order. An example is a mapping, or the bytes of one JSON line.

    Raises:
        BadDataError: some examples are bad (the first ten are named, by numbers from 1), or there are none.
    """
    rows, faults = [], []
    for number, example in enumerate(examples, start=1):
        try:
            parsed = json.loads(example) if isinstance(example, bytes) else example
            rows.append(make_row(parsed, split=split, index=number - 1))
        except json.JSONDecodeError as error:
            faults.append(f"{source}, line {number}: not JSON: {error.msg} at column {error.colno}")
        except UnicodeDecodeError as error:
            faults.append(f"{source}, line {number}: not UTF-8: byte {error.start + 1} cannot be read")
        except ValueError as error:
            faults.append(f"{source}, line {number}: {error}")
    if len(faults) > MAX_FAULTS_SHOWN:
        faults[MAX_FAULTS_SHOWN:] = [f"{source}: {len(faults) - MAX_FAULTS_SHOWN} more bad lines"]
    if not faults and not rows:
        faults = [f"{source}: holds no examples"]
    if faults:
        raise BadDataError("\n".join(faults))
    return rows


def read_jsonl(path: Path, *, split: str) -> list[dict[str, Any]]:
    """The rows of one JSON-lines file.

    Raises:
        BadDataError: a line is bad, or the file cannot be opened or is empty.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise BadDataError(f"{path}: {error.strerror}") from error
    return make_rows(lines, split=split, source=str(path))


def load_from_hub() -> dict[str, list[dict[str, Any]]]:
    """The rows of both splits of the public data set, by split.

    Raises:
        ModuleNotFoundError: the package `datasets` (extra `hub`) is not installed.
        BadDataError: an example is bad.
    """
    import datasets  # pyright: ignore[reportMissingImports]

    loaded = datasets.load_dataset(DATA_SOURCE, "main")
    return {
        split: make_rows(loaded[split], split=split, source=f"{DATA_SOURCE} {split}") for split in ("train", "test")
    }


def write_parquet(rows: list[dict[str, Any]], path: Path) -> None:
    """Writes rows as one parquet file, which appears complete or not at all."""
    unfinished = path.with_suffix(".tmp")
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), unfinished)
    os.replace(unfinished, path)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code; see the module's docstring."""
    parser = argparse.ArgumentParser(description="Turns GSM8K into parquet files for the trainer.")
    parser.add_argument("--train", type=Path, help="training examples, JSON lines")
    parser.add_argument("--test", type=Path, help="test examples, JSON lines")
    parser.add_argument("--from-hub", action="store_true", help=f"load {DATA_SOURCE} with the package datasets")
    parser.add_argument("--out", type=Path, required=True, help="folder for train.parquet and test.parquet")
    args = parser.parse_args(argv)
    given = [path is not None for path in (args.train, args.test)]
    if any(given) if args.from_hub else not all(given):
        parser.error("give either both --train and --test, or --from-hub alone")

    try:
        if args.from_hub:
            splits = load_from_hub()
        else:
            splits = {split: read_jsonl(getattr(args, split), split=split) for split in ("train", "test")}
    except BadDataError as error:
        print(error, file=sys.stderr)
        return 3
    except ModuleNotFoundError as error:
        if error.name != "datasets":
            raise
        print("--from-hub needs the extra hub: pip install 'governor-rl[hub]'", file=sys.stderr)
        return 2

    args.out.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        path = args.out / f"{split}.parquet"
        write_parquet(rows, path)
        print(f"{path}: {len(rows)} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
