"""Comparisons: intervals worked out by hand, grouping, what is claimed, and a page that is safe."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from config.load import load_config, to_plain
from trainer.compare import (
    Estimate,
    best_score,
    compare,
    compare_runs,
    estimate,
    final_score,
    mean_score,
    moving_mean,
    standing,
    t_95,
)
from trainer.errors import ConfigError
from trainer.report.read import Series

BASE = to_plain(load_config(["experiment=copy_grpo", "trainer.total_training_steps=20"]))
HOSTILE = "<img src=x onerror=alert(1)>|<script>alert(2)"


def write_run(
    root: Path,
    scores: list[float],
    *,
    seed: int = 1,
    state: str = "done",
    reason: str | None = None,
    changes: dict[str, Any] | None = None,
    metrics: dict[str, float] | None = None,
) -> Path:
    """A run directory with these scores, one a step, and a configuration with these changes."""
    config = json.loads(json.dumps(BASE))
    for key, value in {"data.seed": seed, "trainer.experiment_name": root.name, **(changes or {})}.items():
        *path, name = key.split(".")
        place = config
        for part in path:
            place = place[part]
        place[name] = value
    root.mkdir(parents=True)
    (root / "config.yaml").write_text(yaml.safe_dump(config))
    code = {"done": 0, "failed": 5, "stopped": 143, "running": None}[state]
    (root / "run.json").write_text(json.dumps({"state": state, "exit_code": code, "reason": reason, "seed": seed}))
    lines = [
        {"step": step, "critic/score/mean": score, "actor/entropy": 1.5, "timing_s/step": 0.5, **(metrics or {})}
        for step, score in enumerate(scores, 1)
    ]
    (root / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [{"step": 0, "val": 1}, *lines]))
    return root


def series(values: list[float]) -> Series:
    return Series(steps=list(range(1, len(values) + 1)), values=values)


# --- figures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("degrees", "value"), [(1, 12.706), (2, 4.303), (4, 2.776), (30, 2.042), (31, 2.0395), (60, 2.0003), (120, 1.9799)]
)
def test_students_t_is_that_of_printed_tables(degrees: int, value: float) -> None:
    assert t_95(degrees) == pytest.approx(value, abs=5e-4)  # the tables' digits


def test_an_interval_over_three_seeds_by_hand() -> None:
    # mean 0.9, s = sqrt((0.01 + 0 + 0.01) / 2) = 0.1; 4.3027 · 0.1 / sqrt(3) = 0.24842
    found = estimate([0.8, 0.9, 1.0])
    assert (found.mean, found.count) == (pytest.approx(0.9), 3)
    assert found.half_width == pytest.approx(0.24842, abs=1e-5)
    assert (found.low, found.high) == (pytest.approx(0.65158, abs=1e-5), pytest.approx(1.14842, abs=1e-5))


def test_an_interval_over_equal_seeds_has_no_width() -> None:
    assert estimate([0.5] * 4) == Estimate(mean=0.5, half_width=0.0, count=4)


@pytest.mark.parametrize("values", [[0.5], [0.4, 0.6]])
def test_fewer_than_three_seeds_have_no_interval(values: list[float]) -> None:
    assert estimate(values).mean == 0.5
    assert estimate(values).half_width is None


def test_final_best_and_area_by_hand() -> None:
    scores = series([0.0] * 10 + [1.0] * 10 + [0.5] * 10)
    assert final_score(scores) == 0.5
    assert best_score(scores) == 1.0
    assert mean_score(scores, 30) == 0.5
    assert mean_score(scores, 60) == 0.5  # 15 seen and 30 · 0.5 carried on, over 60
    assert mean_score(series([0.0, 1.0]), 4) == 0.5
    assert mean_score(series([0.0] * 10 + [1.0] * 10), 40) == 0.75  # a run that ended early keeps its final score


def test_best_needs_ten_steps_in_a_row() -> None:
    assert best_score(series([0.0] * 9 + [1.0] + [0.0] * 9)) == 0.1
    assert best_score(series([1.0, 0.0])) == 0.5  # fewer than ten in all


def test_a_moving_mean_begins_with_what_there_is() -> None:
    assert moving_mean([2.0, 4.0]) == [2.0, 3.0]
    assert moving_mean([float(value) for value in range(12)])[-1] == 6.5  # 2 to 11


# --- what is claimed -------------------------------------------------------------------------------------------------


def test_overlapping_groups_are_not_told_apart_and_others_are() -> None:
    seeds = {"a": [0.9, 0.91, 0.92], "b": [0.7, 0.8, 0.95], "c": [0.1, 0.11, 0.12], "d": [0.8]}
    assert standing("final score", {name: estimate(values) for name, values in seeds.items()}) == [
        "The highest final score was seen in a: 0.91, 0.885 to 0.935 with 3 seeds.",
        "Not told apart from it, since the intervals overlap: b.",
        "Below it, with intervals that do not overlap its own: c.",
        "Not judged, fewer than 3 seeds: d.",
    ]


def test_with_too_few_seeds_nothing_is_claimed() -> None:
    assert standing("score", {"a": estimate([0.9, 0.9]), "b": estimate([0.1, 0.1, 0.1])}) == [
        "The highest score was seen in a (0.9), with 2 seeds: below 3 there is no interval, so no group is called better "
        "than another."
    ]


def test_one_group_and_groups_without_scores_are_not_compared() -> None:
    assert standing("score", {"a": estimate([0.9])}) == []
    assert standing("score", {"a": estimate([0.9]), "b": None}) == ["Without any score: b."]


# --- grouping --------------------------------------------------------------------------------------------------------


def test_runs_are_grouped_by_configuration_without_seeds_names_and_records(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        write_run(tmp_path / f"wide-{seed}", [0.5] * 20, seed=seed, changes={"trainer.test_freq": seed})
        clip = {f"actor_rollout_ref.actor.{key}": 0.1 for key in ("clip_ratio", "clip_ratio_low", "clip_ratio_high")}
        write_run(tmp_path / f"narrow-{seed}", [0.2 * seed] * 20, seed=seed, changes=clip)
    found = compare_runs([tmp_path])
    assert [(one.name, [run.seed for run in one.runs]) for one in found.groups] == [
        ("narrow", [1, 2, 3]),
        ("wide", [1, 2, 3]),
    ]
    assert found.differing == {"actor_rollout_ref.actor.clip_ratio": ["0.1", "0.2"]}  # its followers left out
    assert found.groups[0].final == estimate([0.2, 0.4, 0.6000000000000001])
    assert found.groups[1].seconds == 0.5
    assert found.notes == []


def test_members_of_a_sweep_have_its_names_and_order_and_those_without_a_run_are_told(tmp_path: Path) -> None:
    write_run(tmp_path / "small/seed=1", [0.5] * 20, changes={"algorithm.gamma": 0.5})
    write_run(tmp_path / "big/seed=1", [0.5] * 20)
    listed = [
        {"name": name, "seed": 1, "folder": f"{name}/seed=1", "state": state, "reason": reason}
        for name, state, reason in (
            ("small", "done", None),
            ("lost", "failed", "no.parquet: no such file"),
            ("big", "done", None),
        )
    ]
    (tmp_path / "sweep.json").write_text(json.dumps({"members": listed}))
    found = compare_runs([tmp_path])
    assert [one.name for one in found.groups] == ["small", "big"]
    assert found.notes == ["lost, seed 1 left no run (failed: no.parquet: no such file)."]


def test_a_run_that_died_counts_and_is_told_of(tmp_path: Path) -> None:
    write_run(tmp_path / "a/seed=1", [1.0] * 20)
    write_run(tmp_path / "a/seed=2", [0.4] * 5, seed=2, state="failed", reason="DivergedError: loss is nan\nmore")
    write_run(tmp_path / "a/seed=3", [], seed=3, state="running")
    (only,) = compare_runs([tmp_path]).groups
    assert only.seeds == "1, 2, 3 (2 ended early, 2 with figures)"
    assert only.final == estimate([1.0, 0.4])
    assert only.cut == {
        1: "failed (exit 5) at step 5 of 20: DivergedError: loss is nan",
        2: "running at step 0 of 20",
    }
    text = compare([tmp_path])
    assert "a, seed 2: failed (exit 5) at step 5 of 20: DivergedError: loss is nan" in text
    assert "0.700 (no interval)" in text


def test_validation_is_the_last_accuracy_of_the_first_source(tmp_path: Path) -> None:
    names = ("val-core/copy/reward/mean@1", "val-core/copy/acc/pass@1", "val-core/copy/acc/mean@1")
    write_run(tmp_path / "a", [0.5] * 20, metrics=dict(zip(names, (0.1, 0.2, 0.3), strict=True)))
    assert compare_runs([tmp_path]).groups[0].validation == estimate([0.3])


def test_verdicts_stand_beside_the_figures_with_their_counts_where_seeds_differ(tmp_path: Path) -> None:
    for seed, clip in ((1, 0.05), (2, 0.001)):
        push = {"pg_unclipped": 1.0, "clip": clip, "entropy": 0.6}
        metrics = {f"limiter/push/{name}": value for name, value in push.items()}
        write_run(tmp_path / f"a/seed={seed}", [0.5] * 20, seed=seed, metrics=metrics)
    assert compare_runs([tmp_path]).groups[0].verdicts == "clip working 1, idle 1; entropy governing"
    assert "clip working 1, idle 1; entropy governing" in compare([tmp_path])


def test_without_pushes_there_is_no_column_of_verdicts(tmp_path: Path) -> None:
    assert "limiters" not in compare([write_run(tmp_path / "a", [0.5] * 20)])


def test_a_score_that_is_not_finite_is_told_of(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [1.0] * 19 + [float("nan")])
    assert compare_runs([tmp_path]).notes == ["a, seed 1: 1 of its scores were not finite"]


def test_a_seed_that_is_repeated_is_no_further_evidence(tmp_path: Path) -> None:
    for name in ("x", "y", "z"):
        write_run(tmp_path / name, [0.5] * (20 if name == "y" else 10))
    found = compare_runs([tmp_path])
    assert [run.root.name for run in found.groups[0].runs] == ["y"]
    assert len(found.notes) == 2
    assert all("repeats configuration and seed of" in note for note in found.notes)


def test_runs_moved_aside_and_folders_inside_of_runs_are_not_found(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", [0.5] * 20)
    write_run(tmp_path / "a.old1", [0.1] * 20)
    write_run(run / "checkpoints/inner", [0.1] * 20)
    assert [[run.root.name for run in one.runs] for one in compare_runs([tmp_path]).groups] == [["a"]]
    assert len(compare_runs([tmp_path / "a", tmp_path / "a"]).groups[0].runs) == 1


def test_names_that_would_be_one_are_numbered(tmp_path: Path) -> None:
    write_run(tmp_path / "one/a/seed=1", [0.5] * 20)
    write_run(tmp_path / "two/a/seed=1", [0.5] * 20, changes={"algorithm.gamma": 0.5})
    assert [one.name for one in compare_runs([tmp_path]).groups] == ["a", "a (2)"]


@pytest.mark.parametrize("content", ["nothing", "missing", "broken run", "broken sweep"])
def test_folders_that_cannot_be_compared_are_refused(tmp_path: Path, content: str) -> None:
    folder = tmp_path / "x"
    if content != "missing":
        folder.mkdir()
    if content.startswith("broken"):
        (write_run(folder / "run", [0.5]) if content == "broken run" else folder).joinpath(
            "run.json" if content == "broken run" else "sweep.json"
        ).write_text("{")
    with pytest.raises(ConfigError, match=re.escape(str(folder))):
        compare([folder])


# --- pages -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def pages(tmp_path: Path) -> tuple[str, str]:
    """compare.html and compare.md of two groups of three seeds, with texts that would be markup."""
    for seed in (1, 2, 3):
        write_run(tmp_path / f"sweep/plain/seed={seed}", [0.1 * seed] * 20, seed=seed)
        write_run(
            tmp_path / f"sweep/{HOSTILE}/seed={seed}",
            [0.9] * 20,
            seed=seed,
            state="failed",
            reason=f"{HOSTILE} [x](http://example.org)",
            changes={"data.prompt_key": HOSTILE},
        )
    printed = compare([tmp_path / "sweep"], out=tmp_path / "out")
    html, markdown = ((tmp_path / f"out/compare.{kind}").read_text() for kind in ("html", "md"))
    assert printed == markdown
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"compare.html", "compare.md"}
    return html, markdown


def test_nothing_in_the_page_is_taken_for_markup(pages: tuple[str, str]) -> None:
    html, _ = pages
    assert "&lt;img src=x" in html
    assert not re.search(r"<(img|script|iframe|link|object)\b", html)


def test_the_page_refers_to_nothing_outside(pages: tuple[str, str]) -> None:
    html, _ = pages
    html = html.replace("http://example.org", "")  # a text in the reason of a failed run
    assert not re.search(r"https?:|//[a-z]|url\(|@import|<[^>]+\b(src|href)=", html)
    assert "default-src 'none'" in html


def test_the_page_shows_tables_curves_with_bands_and_works_on_a_phone_and_in_the_dark(pages: tuple[str, str]) -> None:
    html, _ = pages
    assert html.count("<table") == 2
    assert len(re.findall(r'<path class="band c-', html)) >= 2
    assert "prefers-color-scheme:dark" in html
    assert 'name="viewport" content="width=device-width, initial-scale=1"' in html
    assert len(html.encode()) < 1_000_000


def test_the_markdown_table_is_one_and_escaped(pages: tuple[str, str]) -> None:
    _, markdown = pages
    assert "<" not in markdown
    tables = [line for line in markdown.splitlines() if line.startswith("|")]
    pipes = [len(re.findall(r"(?<!\\)\|", line)) for line in tables]
    assert len(set(pipes[:4])) == 1
    assert len(set(pipes[4:])) == 1
    assert "\\[x\\](http" in markdown
    assert "0.200 ± 0.248" in markdown


def test_without_out_the_files_go_into_the_first_folder(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", [0.5] * 20)
    compare([run, write_run(tmp_path / "b", [0.5] * 20, changes={"algorithm.gamma": 0.5})])
    assert (run / "compare.html").exists()
    assert (run / "compare.md").exists()


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", [0.5] * 20)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--out="):
        compare([run], out=tmp_path / "file/x")
