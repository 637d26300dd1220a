"""Rows from parquet and JSON-lines files, checked where they enter. Rows stay plain Python; nothing interpolates them."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from trainer.errors import DataError

Prompt = str | list[dict[str, str]]  # a text used as it is, or chat messages


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One prompt with what its reward function gets."""

    where: str  # file and row number, for messages
    prompt: Prompt
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]


def load_rows(files: Sequence[str], *, prompt_key: str, reward_fn_key: str, max_rows: int = -1) -> list[Row]:
    """The rows of the files, in order; `max_rows` of them, -1 for all.

    Raises:
        DataError: a file or a row cannot be used; the message names file, row, column and what is wanted.
    """
    rows = []
    for name in files:
        for number, raw in read_file(Path(name)):
            if 0 <= max_rows <= len(rows):
                return rows
            rows.append(check_row(raw, f"{name} row {number}", prompt_key=prompt_key, reward_fn_key=reward_fn_key))
    return rows


def read_file(path: Path) -> Iterator[tuple[int, Any]]:
    """Row numbers from 1, and raw rows.

    Raises:
        DataError: the file is missing, empty, of another kind, or cannot be read.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    count = 0
    if path.suffix in (".jsonl", ".json"):
        for number, line in enumerate(path.read_bytes().splitlines(), start=1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError) as error:  # bad UTF-8, bad JSON, a number too long; nested too deep
                raise DataError(f"{path} row {number}: is not a JSON object on one line of UTF-8: {error}") from None
            count += 1
    elif path.suffix == ".parquet":
        try:
            file = pyarrow.parquet.ParquetFile(path)
            for batch in file.iter_batches():
                for raw in batch.to_pylist():
                    count += 1
                    yield count, raw
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:  # OSError for a damaged page
            raise DataError(f"{path}: is not a readable parquet file: {error}") from None
    else:
        raise DataError(f"{path}: data files end in .parquet, .jsonl or .json")
    if count == 0:
        raise DataError(f"{path}: has no rows")


def check_row(raw: Any, where: str, *, prompt_key: str, reward_fn_key: str) -> Row:
    """A raw row, checked.

    Raises:
        DataError: a column is missing or of the wrong type.
    """
    if not isinstance(raw, dict):
        raise DataError(f"{where}: must be a JSON object, not {type(raw).__name__}")
    prompt = _column(raw, prompt_key, "data.prompt_key", where)
    if not _is_prompt(prompt):
        raise DataError(
            f"{where}, column {prompt_key!r}: must be a text that is not empty, or chat messages such as "
            f'[{{"role": "user", "content": "…"}}]; got {prompt!r:.200}'
        )
    data_source = _column(raw, reward_fn_key, "data.reward_fn_key", where)
    if not isinstance(data_source, str):
        raise DataError(f"{where}, column {reward_fn_key!r}: must be a text; got {data_source!r:.200}")
    reward_model = raw.get("reward_model") or {}
    extra_info = raw.get("extra_info") or {}
    for name, value in (("reward_model", reward_model), ("extra_info", extra_info)):
        if not isinstance(value, dict):
            raise DataError(f"{where}, column {name!r}: must be a mapping; got {value!r:.200}")
    return Row(
        where=where,
        prompt=prompt,
        data_source=data_source,
        ground_truth=reward_model.get("ground_truth"),
        extra_info=extra_info,
    )


def _column(raw: dict[str, Any], name: str, key: str, where: str) -> Any:
    if name not in raw:
        raise DataError(f"{where}: has no column {name!r} (set by {key}); it has {', '.join(sorted(raw))}")
    if raw[name] is None:
        raise DataError(f"{where}, column {name!r}: is null")
    return raw[name]


def _is_prompt(prompt: Any) -> bool:
    if isinstance(prompt, str):
        return bool(prompt) and _is_text(prompt)
    return isinstance(prompt, list) and bool(prompt) and all(map(_is_message, prompt))


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and _is_text(message.get("role")) and _is_text(message.get("content"))


def _is_text(value: Any) -> bool:
    """Whether a tokenizer can read it: JSON can write halves of surrogate pairs, which are no characters."""
    return isinstance(value, str) and not any("\ud800" <= sign <= "\udfff" for sign in value)
