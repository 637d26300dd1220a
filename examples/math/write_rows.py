"""Writes fractions whose values are whole numbers, as questions: JSON lines for training and for validation."""

import json
import random
import sys
from pathlib import Path


def main(folder: Path) -> None:
    """train.jsonl with 4096 rows drawn from all problems, val.jsonl with each problem once."""
    folder.mkdir(parents=True, exist_ok=True)
    problems = [(value * bottom, bottom) for value in (1, 2, 3) for bottom in (1, 2, 3)]
    draw = random.Random(1)  # noqa: S311
    for name, chosen in (("train", draw.choices(problems, k=4096)), ("val", problems)):
        rows = [row(index, *problem) for index, problem in enumerate(chosen)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")


def row(index: int, top: int, bottom: int) -> dict:
    """A row with verl's columns; its data source has math-verify judge the answer."""
    return {
        "data_source": "math",
        "prompt": [{"role": "user", "content": f"{top}/{bottom}"}],
        "reward_model": {"ground_truth": f"\\frac{{{top}}}{{{bottom}}}"},
        "extra_info": {"index": index},
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
