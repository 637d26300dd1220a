"""Rows from files: what is read, and what a refusal names."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer.data.rows import Row, load_rows
from trainer.errors import DataError

MESSAGES = [{"role": "user", "content": "hi"}]
GOOD: dict[str, Any] = {
    "data_source": "copy",
    "prompt": MESSAGES,
    "reward_model": {"style": "rule", "ground_truth": "42"},
    "extra_info": {"index": 7},
}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Rows as the kind of file that the name says."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def load(*paths: Path, prompt_key: str = "prompt", reward_fn_key: str = "data_source", max_rows: int = -1) -> list[Row]:
    return load_rows(
        [str(path) for path in paths], prompt_key=prompt_key, reward_fn_key=reward_fn_key, max_rows=max_rows
    )


def refusal(*paths: Path, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        load(*paths, **options)
    return str(caught.value)


def numbered(start: int, count: int) -> list[dict[str, Any]]:
    return [GOOD | {"prompt": f"prompt {number}"} for number in range(start, start + count)]


# --- what is read ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.json"])
def test_a_row_keeps_its_prompt_source_answer_and_extras(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, [GOOD])
    assert load(path) == [
        Row(
            where=f"{path} row 1",
            prompt=MESSAGES,
            data_source="copy",
            ground_truth="42",
            extra_info={"index": 7},
        )
    ]


def test_several_files_of_both_kinds_are_read_in_the_order_given(tmp_path: Path) -> None:
    one, two = write(tmp_path / "b.jsonl", numbered(0, 3)), write(tmp_path / "a.parquet", numbered(3, 2))
    assert [row.prompt for row in load(one, two)] == [f"prompt {number}" for number in range(5)]
    assert [row.where for row in load(two, one)][:3] == [f"{two} row 1", f"{two} row 2", f"{one} row 1"]


@pytest.mark.parametrize(("max_rows", "count"), [(-1, 5), (0, 0), (1, 1), (3, 3), (4, 4), (5, 5), (9, 5)])
def test_max_rows_counts_over_all_files(tmp_path: Path, max_rows: int, count: int) -> None:
    paths = write(tmp_path / "a.jsonl", numbered(0, 3)), write(tmp_path / "b.parquet", numbered(3, 2))
    assert [row.prompt for row in load(*paths, max_rows=max_rows)] == [f"prompt {number}" for number in range(count)]


def test_rows_beyond_max_rows_are_not_looked_at(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [GOOD, {"bad": 1}])
    assert len(load(path, tmp_path / "missing.parquet", max_rows=1)) == 1
    assert "row 2" in refusal(path, max_rows=2)


def test_row_numbers_of_jsonl_are_line_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f"\n{json.dumps(GOOD)}\n\n\n{json.dumps(GOOD)}")  # blank lines, and none at the end
    assert [row.where for row in load(path)] == [f"{path} row 2", f"{path} row 5"]


def test_columns_are_those_of_the_configuration(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"question": "q", "source": "s"}])
    (row,) = load(path, prompt_key="question", reward_fn_key="source")
    assert (row.prompt, row.data_source, row.ground_truth, row.extra_info) == ("q", "s", None, {})


def test_an_answer_may_be_of_any_type(tmp_path: Path) -> None:
    answers = [1, [1, {"a": None}], {"b": 2.5}, False, None]
    path = write(tmp_path / "a.jsonl", [GOOD | {"reward_model": {"ground_truth": answer}} for answer in answers])
    assert [row.ground_truth for row in load(path)] == answers


TEXTS = [
    "${oc.env:HOME} ${5} $${x}",
    "{{ jinja }} {% for x in y %}",
    "<|im_end|> <|endoftext|> </s> <pad>",
    "שלום \u202eمرحبا\u202c\u200f",
    "  spaces\t\r\n end \n",
    "a\u2028b\u0085c\x1cd",  # line ends to str.splitlines, not to JSON lines
    '"quotes" \\ back \\n',
    "\x00\x07",
    "𝔘nicode 👩‍👩‍👧 e\u0301",
]


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl"])
@pytest.mark.parametrize("text", TEXTS)
def test_text_passes_unchanged(tmp_path: Path, name: str, text: str) -> None:
    row = {
        "data_source": text,
        "prompt": [{"role": "user", "content": text}],
        "reward_model": {"ground_truth": text},
        "extra_info": {"note": text},
    }
    (found,) = load(write(tmp_path / name, [row]))
    assert found.prompt == row["prompt"]
    assert (found.data_source, found.ground_truth, found.extra_info) == (text, text, {"note": text})


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": ""}, "column 'prompt': must be a text that is not empty, or chat messages"),
        ({"prompt": 3}, "column 'prompt': must be a text that is not empty, or chat messages"),
        ({"prompt": [{"role": "user"}]}, "column 'prompt': must be a text that is not empty, or chat messages"),
        ({"prompt": [{"role": "user", "content": [1]}]}, "column 'prompt': must be a text"),
        ({"prompt": [{"role": 3, "content": "x"}]}, "column 'prompt': must be a text"),
        ({"prompt": ["hi"]}, "column 'prompt': must be a text"),
        ({"data_source": 3}, "column 'data_source': must be a text; got 3"),
        ({"reward_model": "x"}, "column 'reward_model': must be a mapping; got 'x'"),
        ({"extra_info": [1]}, "column 'extra_info': must be a mapping; got [1]"),
    ],
)
def test_a_wrong_type_names_file_row_column_and_what_came(
    tmp_path: Path, name: str, change: dict[str, Any], message: str
) -> None:
    path = write(tmp_path / name, [GOOD | change])
    assert refusal(path).startswith(f"{path} row 1, {message}")


def test_an_empty_list_of_messages_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [GOOD, GOOD | {"prompt": []}])
    assert refusal(path).startswith(f"{path} row 2, column 'prompt': must be a text that is not empty")


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl"])
@pytest.mark.parametrize(("column", "key"), [("prompt", "data.prompt_key"), ("data_source", "data.reward_fn_key")])
def test_a_missing_column_names_file_row_column_key_and_what_there_is(
    tmp_path: Path, name: str, column: str, key: str
) -> None:
    row = {name: value for name, value in GOOD.items() if name != column}
    path = write(tmp_path / name, [row])
    assert refusal(path) == f"{path} row 1: has no column {column!r} (set by {key}); it has {', '.join(sorted(row))}"


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl"])
@pytest.mark.parametrize("column", ["prompt", "data_source"])
def test_a_null_names_file_row_and_column_and_says_null(tmp_path: Path, name: str, column: str) -> None:
    path = write(tmp_path / name, [GOOD, GOOD | {column: None}])
    assert refusal(path).startswith(f"{path} row 2, column {column!r}: ")
    assert "null" in refusal(path).removeprefix(str(path))


@pytest.mark.parametrize("line", ["[1]", "3", '"text"', "null", "true"])
def test_a_line_that_is_no_object_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{line}\n")
    assert refusal(path).startswith(f"{path} row 2: must be a JSON object, not ")


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(b'{"prompt": "a', id="cut short"),
        pytest.param(b"{'prompt': 1}", id="not JSON"),
        pytest.param(b'{"prompt": "\xe9"}', id="latin-1"),
        pytest.param(b'{"prompt": "a\x0cb"}', id="control character"),
        pytest.param(b"[" * 100_000, id="nested too deep"),
        pytest.param(b'{"n": ' + b"9" * 5000 + b"}", id="number too long"),
    ],
)
def test_a_line_that_cannot_be_read_names_file_and_row(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n" + line)
    assert refusal(path).startswith(f"{path} row 2: is not a JSON object on one line of UTF-8: ")


def test_half_a_unicode_character_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(GOOD | {"prompt": "\ud800"}))  # JSON can write what no tokenizer can read
    assert refusal(path).startswith(f"{path} row 1, column 'prompt': ")


@pytest.mark.parametrize("content", [b"", b"\n\n", b"  \n"])
def test_an_empty_jsonl_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    assert refusal(path) == f"{path}: has no rows"


def test_a_parquet_without_rows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist([GOOD])[:0], path)
    assert refusal(path) == f"{path}: has no rows"


def test_one_empty_file_among_several_is_refused(tmp_path: Path) -> None:
    good, empty = write(tmp_path / "a.jsonl", [GOOD]), write(tmp_path / "b.jsonl", [])
    assert refusal(good, empty) == f"{empty}: has no rows"


@pytest.mark.parametrize("cut", ["half", "last byte", "nothing left", "wrong magic", "text"])
def test_a_parquet_that_is_none_is_named(tmp_path: Path, cut: str) -> None:
    path = write(tmp_path / "a.parquet", [GOOD])
    whole = path.read_bytes()
    parts = {
        "half": whole[: len(whole) // 2],
        "last byte": whole[:-1],
        "nothing left": b"",
        "wrong magic": whole[:-4] + b"XXXX",
        "text": b"prompt,answer\n" * 10,
    }
    path.write_bytes(parts[cut])
    assert refusal(path).startswith(f"{path}: is not a readable parquet file: ")


def test_a_parquet_with_one_byte_flipped_is_named_or_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [GOOD] * 3)
    whole, named = path.read_bytes(), 0
    for place in range(4, len(whole) - 8, len(whole) // 60):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:
            load(path)
        except DataError as error:
            named += str(error).startswith(str(path))
    assert named >= 10


def test_a_parquet_text_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    offsets = pa.py_buffer(b"\0\0\0\0\2\0\0\0")
    broken = pa.Array.from_buffers(pa.string(), 1, [None, offsets, pa.py_buffer(b"\xff\xfe")])
    pq.write_table(pa.table({"prompt": broken, "data_source": ["a"]}), path)
    assert refusal(path).startswith(f"{path}: is not a readable parquet file: ")


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    for name in ("no.parquet", "folder.jsonl"):
        assert refusal(tmp_path / name) == f"{tmp_path / name}: no such file"


def test_another_kind_of_file_is_refused_with_the_kinds_that_there_are(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("prompt\n")
    assert refusal(path) == f"{path}: data files end in .parquet, .jsonl or .json"


def test_a_long_value_is_cut_in_the_message(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [GOOD | {"prompt": ["x" * 10_000]}])
    assert len(refusal(path)) < 1000
