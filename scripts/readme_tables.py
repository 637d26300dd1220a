"""The tables of README.md that are made from the sources.

    python scripts/readme_tables.py           print them
    python scripts/readme_tables.py --write   put them between their markers in README.md

A table stands between `<!-- NAME:begin -->` and `<!-- NAME:end -->`. Exit codes: 0 done, 2 a marker is missing.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from config.foreign_keys import WHAT_TO_DO

README = Path(__file__).parents[1] / "README.md"


def foreign_keys_table() -> str:
    """A Markdown table of the keys of verl that this trainer does not have; one line for keys with the same answer."""
    lines = ["| key of verl | what to do |", "|---|---|"]
    for text, keys in WHAT_TO_DO.items():
        lines.append(f"| {', '.join(f'`{key}`' for key in keys)} | {text} |")
    return "\n".join(lines) + "\n"


TABLES: dict[str, Callable[[], str]] = {"foreign-keys": foreign_keys_table}


def with_tables(text: str) -> str:
    """The text with each table between its markers made anew.

    Raises:
        ValueError: a marker is missing, or the two are in the wrong order.
    """
    for name, table in TABLES.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        before, found_begin, rest = text.partition(begin)
        _, found_end, after = rest.partition(end)
        if not (found_begin and found_end):
            raise ValueError(f"README.md has no {begin if not found_begin else f'{end} after {begin}'}")
        text = f"{before}{begin}\n{table()}{end}{after}"
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables or write them, and return the exit code."""
    parser = argparse.ArgumentParser(description="The tables of README.md that are made from the sources.")
    parser.add_argument("--write", action="store_true", help="put them between their markers in README.md")
    if not parser.parse_args(argv).write:
        sys.stdout.write("\n".join(table() for table in TABLES.values()))
        return 0
    try:
        text = with_tables(README.read_text(encoding="utf-8"))
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    README.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
