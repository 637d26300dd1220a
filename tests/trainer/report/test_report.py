"""The report: whole without a network, safe with any text, complete where there is data, quiet where there is none."""

import html
import json
import math
import random
import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from trainer.errors import ConfigError
from trainer.report import charts
from trainer.report.differences import ABSENT, default_config, difference_table, differences
from trainer.report.heatmap import _fair_share, best_and_worst, sample_section
from trainer.report.markup import duration, escaped, figure, share
from trainer.report.page import MAX_BYTES, write_report
from trainer.report.panel import NAMES, SIGNS, alarm_list, summary
from trainer.report.read import Series, columns, ratio_of, read_run, read_samples, sum_of
from trainer.report.style import _DARK, _LIGHT, STYLE
from trainer.report.svg import Line, _column_means, _edges, line_and_band, line_chart, sparkline, stacked_chart, thin

MakeRun = Callable[..., Path]
NASTY = (
    '<script>document.title="owned"</script><img src=x onerror=alert(1)>"\'&</style></title>--><svg onload=alert(2)>'
)
VOID = {"meta", "br", "wbr"}
OPTIONAL_END = {"td", "tr", "th"}  # the browser closes these
TITLES = {
    *(
        chart.title
        for group in (charts.PUSH, charts.KL, charts.CLIP, charts.ENTROPY, charts.LENGTH, charts.UPDATE)
        for chart in group
    ),
    charts.SCORE.title,
    charts.CRITIC.title,
    "Validation: copy/acc",
    "Push of the limiters",
    "Tokens that are not simply active",
    "Within a step: KL",
    "Within a step: clipped tokens",
    "Time of a step",
    "Throughput",
}


class Page(HTMLParser):
    """Tags, attributes and the text of each kind of element of a page; fails on one that is closed out of turn."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        while self.open[-1] != tag and self.open[-1] in OPTIONAL_END:
            self.open.pop()
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        for tag in set(self.open):
            self.texts[tag][-1] += data


def report(run_dir: Path) -> str:
    return write_report(run_dir).read_text(encoding="utf-8")


def captions(text: str) -> set[str]:
    """Titles of the charts on a page, without their units."""
    return {html.unescape(title.strip()) for title in re.findall(r"<figcaption>(.*?)(?:<span|</figcaption>)", text)}


def series(*values: float, first: int = 1) -> Series:
    return Series(steps=list(range(first, first + len(values))), values=list(values))


# --- whole and safe --------------------------------------------------------------------------------------------------


def test_nothing_of_the_page_lies_elsewhere_and_nothing_in_it_runs(make_run: MakeRun) -> None:
    text = report(make_run())
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object", "embed", "base", "image", "use"} & set(page.tags)
    names = {name for _, name, _ in page.attributes}
    assert not {name for name in names if name.startswith("on")} | (names & {"src", "srcset", "xlink:href", "action"})
    assert all(value.startswith("#") for _, name, value in page.attributes if name == "href")
    assert "url(" not in text
    assert "@import" not in text
    assert not re.search(r"https?://", text)
    policy = next(value for tag, name, value in page.attributes if tag == "meta" and value.startswith("default-src"))
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def test_links_lead_to_parts_of_the_page_and_ids_are_unique(make_run: MakeRun) -> None:
    page = Page(report(make_run()))
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    assert [value.removeprefix("#") for _, name, value in page.attributes if name == "href"] == ids


def test_a_long_run_with_hostile_samples_stays_below_a_megabyte_and_harmless(make_run: MakeRun) -> None:
    run_dir = make_run(num_steps=2000, sample_every=500, text=NASTY, num_tokens=2000)
    path = write_report(run_dir)
    assert path == run_dir / "report.html"
    assert path.stat().st_size < MAX_BYTES == 1_000_000
    page = Page(path.read_text(encoding="utf-8"))
    assert not {"script", "img"} & set(page.tags)
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert any(NASTY in text for text in page.texts["p"])  # shown as it is, not dropped


def test_text_of_any_length_and_kind_leaves_the_page_whole(make_run: MakeRun) -> None:
    text = "\x00\u202e\ud800\u2028" + '"<&' * 50_000
    run_dir = make_run(text=text)
    state = json.loads((run_dir / "run.json").read_text())
    (run_dir / "run.json").write_text(json.dumps(state | {"state": "failed", "reason": text, "exit_code": 5}))
    path = write_report(run_dir)
    assert path.stat().st_size < MAX_BYTES
    whole = path.read_text(encoding="utf-8")
    assert not {"\x00", "\u202e", "\u2028"} & set(whole)
    Page(whole)


def test_a_second_report_replaces_the_first_and_is_the_same(make_run: MakeRun) -> None:
    run_dir = make_run(num_steps=10, sample_every=5)
    first = report(run_dir)
    assert report(run_dir) == first
    assert [path.name for path in run_dir.glob("*report*")] == ["report.html"]


# --- complete, and quiet ---------------------------------------------------------------------------------------------


def test_every_series_that_the_run_has_is_drawn(make_run: MakeRun) -> None:
    run_dir = make_run()
    text = report(run_dir)
    assert captions(text) == TITLES
    logged = set(read_run(run_dir).series)
    for group in (charts.PUSH, charts.KL, charts.CLIP, charts.ENTROPY, charts.LENGTH, charts.UPDATE):
        for trace in (trace for chart in group for trace in chart.traces):
            assert trace.metric in logged
            assert f"{escaped(trace.label)} <b>" in text


@pytest.mark.parametrize(
    ("hidden", "gone"),
    [
        (
            ["limiter/"],
            {
                *(chart.title for chart in charts.PUSH), "Push of the limiters", "Tokens that are not simply active",
                "What the KL in the reward changed", "Adaptive KL controller", "Probe: KL of the update",
                "Probe: entropy of the update", "Taken out by clipping",
            },
        ),
        (["critic/vf"], {charts.CRITIC.title}),
        (["val-core/"], {"Validation: copy/acc"}),
        (["timing_s/", "perf/"], {"Time of a step", "Throughput"}),
        (
            ["actor/"],
            {
                "KL within a step", "Clipped tokens", "Tokens at the KL loss's cap", "Coefficient of the KL in the reward",
                    "Entropy of the sampling policy",
            },
        ),
    ],
)  # fmt: skip
def test_what_a_run_did_not_log_is_left_out(make_run: MakeRun, hidden: list[str], gone: set[str]) -> None:
    text = report(make_run(hidden=hidden))
    assert TITLES - captions(text) == gone
    Page(text)


def test_a_limiter_that_is_off_shows_so(make_run: MakeRun) -> None:
    run_dir = make_run(
        hidden=["limiter/reward_kl", "limiter/push/reward_kl", "limiter/push/kl", "limiter/loss/kl"],
        overrides=["algorithm.use_kl_in_reward=false", "actor_rollout_ref.actor.use_kl_loss=false"],
    )
    text = report(run_dir)
    rows = re.findall(r'<article class="limiter c-([\w-]+)( off)?">', text)
    assert rows[0] == ("reward-kl", " off")
    assert rows[3] == ("kl-loss", " off")
    assert [colour for colour, _ in rows] == ["reward-kl", "clip", "entropy", "kl-loss"]
    assert "less the KL in the reward" not in text


def test_the_panel_names_four_limiters_in_order_with_a_sign_and_a_state_each(make_run: MakeRun) -> None:
    text = report(make_run())
    panel = text[text.index('<div class="panel">') : text.index('id="alarms"')]
    assert re.findall(r"<h3>(.*?)</h3>", panel) == list(NAMES.values())
    badges = re.findall(r'<span class="badge [\w-]+"><i aria-hidden="true">(.)</i> ([\w ]+)</span>', panel)
    assert len(badges) == 4
    assert all(SIGNS[state] == sign for sign, state in badges)


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_a_run_of_few_steps_gives_a_page(make_run: MakeRun, num_steps: int) -> None:
    text = report(make_run(num_steps=num_steps, sample_every=1))
    Page(text)
    assert f"<dt>Steps</dt><dd>{num_steps} of 100<small>" in text
    assert ("Score" in captions(text)) == (num_steps > 0)
    assert "nan" not in re.sub(r"<style>.*?</style>", "", text, flags=re.DOTALL).lower()


def test_a_run_that_failed_before_its_first_step_says_why(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"state": "failed", "exit_code": 3, "reason": "DataError: no rows <here>"}')
    text = report(tmp_path)
    assert "failed (exit 3)" in text
    assert '<p class="reason">DataError: no rows &lt;here&gt;</p>' in text
    Page(text)


def test_a_run_that_goes_on_with_a_torn_last_line_gives_a_page(make_run: MakeRun) -> None:
    run_dir = make_run(num_steps=3, sample_every=1, state="running")
    for name in ("metrics.jsonl", "updates.jsonl", "samples.jsonl"):
        with (run_dir / name).open("a") as file:
            file.write('{"step": 4, "critic/score/mean": 0.')
    text = report(run_dir)
    assert '<i aria-hidden="true">▶</i> running' in text
    assert "<dd>3 of 100<small>" in text


def test_validation_of_many_sources_is_cut_and_says_so(make_run: MakeRun) -> None:
    run_dir = make_run(num_steps=2)
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, **{f"val-core/s{number}/acc/mean@1": 0.5 for number in range(9)}}) + "\n")
    text = report(run_dir)
    assert sum(title.startswith("Validation:") for title in captions(text)) == charts.MAX_VALIDATION_CHARTS
    assert "4 more in metrics.jsonl, under val-core/." in text


def test_values_that_are_not_finite_are_counted_beside_the_line(make_run: MakeRun) -> None:
    assert report(make_run(num_steps=30)).count("(1 not finite)") == 1


# --- errors ----------------------------------------------------------------------------------------------------------


def test_a_folder_that_is_no_run_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing: no such folder\. Name a run directory, such as outputs/"):
        write_report(tmp_path / "missing")
    with pytest.raises(
        ConfigError, match=r"not a run directory; it holds none of run\.json, config\.yaml, metrics\.jsonl"
    ):
        write_report(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(ConfigError, match=r"a record of the run cannot be read: .* Mend or remove the file\."):
        write_report(tmp_path)


def test_a_configuration_that_is_not_yaml_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match="a record of the run cannot be read"):
        write_report(tmp_path)


# --- configuration ---------------------------------------------------------------------------------------------------


def test_the_difference_holds_the_changed_keys_with_default_and_value() -> None:
    defaults = default_config()
    config = defaults | {"actor_rollout_ref.actor.clip_ratio_high": 0.28, "trainer.logger": ["console", "<b>"]}
    assert differences(config, defaults) == {
        "actor_rollout_ref.actor.clip_ratio_high": (0.2, 0.28),
        "trainer.logger": (["console"], ["console", "<b>"]),
    }
    table = difference_table(config, defaults)
    assert "<p>2 of " in table
    assert "<tr class=\"limiter-key c-clip\"><th scope='row'>actor_<wbr>rollout_<wbr>ref.<wbr>actor." in table
    assert "<td>0.2</td><td><b>0.28</b></td>" in table
    assert "&quot;&lt;b&gt;&quot;" in table


def test_keys_of_an_open_mapping_stand_for_themselves() -> None:
    found = differences({"x.kwargs.a": 1, "x.old": 2}, {"x.kwargs": {}, "x.new": None})
    assert found == {"x.kwargs.a": (ABSENT, 1), "x.old": (ABSENT, 2), "x.new": (None, ABSENT)}


def test_a_run_with_all_defaults_says_so() -> None:
    assert difference_table(default_config(), default_config()) == "<p>Every key has its default.</p>"


def test_the_page_shows_the_difference_from_no_experiment(make_run: MakeRun) -> None:
    text = report(make_run(num_steps=1))
    keys = [key.replace("<wbr>", "") for key in re.findall(r"<th scope='row'>(.*?)</th>", text)]
    assert "algorithm.use_kl_in_reward" in keys
    assert "data.generator.name" in keys  # the experiment's, too
    assert "algorithm.gamma" not in keys


# --- samples ---------------------------------------------------------------------------------------------------------


def sample(**fields: Any) -> dict[str, Any]:
    return {
        "step": 5, "score": 1.0, "prompt": "p", "response": "a\nb", "ended": True, "tokens": ["a", "\n", " b"],
        "acted": ["high", "active", "zero_advantage"], "old_log_probs": [-1.0, -2.0, -3.0],
        "new_log_probs": [-0.7, -2.0, -3.1], "ref_log_prob": [-1.5, -2.0, -2.0], "entropys": [0.5, 1.0, 2.0],
        "advantages": [1.25, -0.5, 0.0], "token_level_rewards": [0.0, 0.0, 1.0], **fields,
    }  # fmt: skip


def heat_map(make_run: MakeRun, *samples: dict[str, Any], max_tokens: int = 100) -> str:
    run_dir = make_run(num_steps=1)
    (run_dir / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in samples))
    return sample_section(read_run(run_dir), max_tokens=max_tokens)


def test_a_token_shows_its_limiter_by_colour_and_sign_and_its_figures(make_run: MakeRun) -> None:
    text = heat_map(make_run, sample())
    # exp(-0.7 + 1) = 1.35; -1 + 1.5 = 0.5 of at most 1, level 2 of 4; entropy 0.5 of 2, level 1.
    assert (
        '<span class="t hi k2 h1" title="clipped high · adv 1.25 · ratio 1.35 · KL 0.5 · H 0.5">a<sup>▲</sup></span>'
        in text
    )
    assert '<span class="t h2" title="active · adv −0.5 · ratio 1 · KL 0 · H 1">⏎</span><br>' in text
    assert (
        '<span class="t za k4 h4" title="zero advantage · adv 0 · ratio 0.905 · KL −1 · H 2"> b<sup>∘</sup></span>'
        in text
    )
    assert "<tr><td>1<td>a<td>▲ clipped high<td>1.25<td>1.35<td>0.5<td>0.5<td>0" in text
    assert '<th scope="col">value</th>' not in text  # no critic
    assert "clipped low:" not in text  # the legend holds what occurs


def test_fields_that_a_run_did_not_record_are_left_out(make_run: MakeRun) -> None:
    old = sample()
    for name in ("acted", "new_log_probs", "ref_log_prob", "advantages", "token_level_rewards"):
        del old[name]
    text = heat_map(make_run, old)
    assert '<span class="t h1" title="not recorded · H 0.5">a</span>' in text
    assert "This run did not record which limiter acted on a token." in text
    assert '<th scope="col">limiter</th><th scope="col">entropy</th></tr>' in text


def test_lists_that_do_not_fit_and_values_that_are_no_numbers_do_no_harm(make_run: MakeRun) -> None:
    text = heat_map(make_run, sample(acted=["high"], entropys=[math.nan, None], extra="x", score=math.nan))
    assert text.count('class="t ') >= 3
    assert "score <b>nan</b>" in text


def test_best_and_worst_of_each_step_are_chosen() -> None:
    rows = [{"step": 2, "score": score, "uid": uid} for uid, score in enumerate((0.5, 1.0, 0.0))]
    found = best_and_worst([*rows, {"step": 7, "score": 0.1, "uid": 9}])
    assert [(step, [(rank, row["uid"]) for rank, row in pair]) for step, pair in found] == [
        (2, [("best", 1), ("worst", 2)]),
        (7, [("only", 9)]),
    ]


def test_samples_of_the_first_the_middle_and_the_last_step_are_read(tmp_path: Path) -> None:
    lines = [{"step": step, "row": row} for step in (10, 20, 30, 40, 50) for row in range(2)]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"row": 1, "step": 30}\n{"step": 60, "ro'
    (tmp_path / "samples.jsonl").write_text(text)
    found = read_samples(tmp_path / "samples.jsonl")
    assert [(line["step"], line["row"]) for line in found] == [
        (10, 0),
        (10, 1),
        (30, 0),
        (30, 1),
        (30, 1),
        (50, 0),
        (50, 1),
    ]
    assert read_samples(tmp_path / "missing.jsonl") == []


def test_a_long_response_keeps_its_beginning_and_its_end(make_run: MakeRun) -> None:
    many = sample(tokens=[f"t{number}." for number in range(100)], acted=["active"] * 100)
    text = heat_map(make_run, many, max_tokens=20)
    assert [int(number) for number in re.findall(r">t(\d+)\.</span>", text)] == [*range(15), *range(95, 100)]
    assert "… 80 tokens left out …" in text
    assert "100 tokens, ended by itself" in text


def test_the_token_budget_is_shared_fairly() -> None:
    assert _fair_share([5, 50, 100], 65) == 30  # 5 + 30 + 30
    assert _fair_share([5, 50, 100], 1000) == 100
    assert _fair_share([], 10) == 0
    assert _fair_share([7, 7], 3) == 1


def test_an_empty_response_says_so(make_run: MakeRun) -> None:
    text = heat_map(make_run, sample(tokens=[], response=""))
    assert "An empty response." in text
    assert "0 tokens" in text


# --- panel -----------------------------------------------------------------------------------------------------------


class Said:
    """A verdict or an alarm."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


def test_the_summary_names_who_governs_and_what_is_wrong() -> None:
    def verdicts(*states: str) -> Any:
        return [Said(limiter=name, state=state, evidence="") for name, state in zip(NAMES, states, strict=True)]

    assert summary(verdicts("off", "governing", "idle", "off")) == "PPO clip governs the update."
    assert summary(verdicts("governing", "governing", "idle", "cannot act")) == (
        "KL in the reward and PPO clip govern the update. KL in the loss: cannot act."
    )
    assert summary(verdicts("off", "off", "off", "off")) == "All four limiters are off."
    assert summary(verdicts("saturated", "idle", "off", "off")) == (
        "No limiter governs the update. KL in the reward: saturated."
    )


def test_alarms_are_listed_escaped_and_cut() -> None:
    alarms: Any = [Said(step=step, name="KL <runaway>", text="a & b") for step in range(1, 51)]
    text = alarm_list(alarms)
    assert text.count("<li>") == 40
    assert '<span class="step">step 1</span><b>KL &lt;runaway&gt;</b> a &amp; b' in text
    assert "10 more." in text
    assert "No alarm." in alarm_list([])


# --- numbers into pictures -------------------------------------------------------------------------------------------


def test_thinning_keeps_the_ends_the_extremes_and_the_order() -> None:
    source = random.Random(3)
    points = [(float(x), source.gauss(0, 1)) for x in range(5000)]
    points[1234], points[4000] = (1234.0, 99.0), (4000.0, -99.0)
    kept = thin(points, 400)
    assert len(kept) <= 400
    assert kept == sorted(kept)
    assert {points[0], points[-1], points[1234], points[4000]} <= set(kept)
    assert thin(points[:400], 400) == points[:400]


def test_a_long_line_is_its_mean_within_a_band_that_holds_every_point() -> None:
    points = [(float(x), float(x % 7)) for x in range(1, 2401)]  # stretches of 20
    line, outline = line_and_band(points)
    assert len(line) == 120
    assert line[0] == (10.5, sum(x % 7 for x in range(1, 21)) / 20)
    assert {y for _, y in outline} == {0.0, 6.0, 1.0}  # least, greatest, and the first point
    assert outline[0] == points[0]
    assert points[-1] in outline
    assert line_and_band(points[:240]) == (points[:240], [])


def test_columns_of_a_stack_are_means_over_their_steps() -> None:
    few = series(1.0, 2.0, 3.0)
    edges = _edges(few.steps, 100)
    assert edges == [0.5, 1.5, 2.5, 3.5]
    assert _column_means(few, edges) == [1.0, 2.0, 3.0]
    many = series(*[1.0] * 150)
    edges = _edges(many.steps, 100)
    assert edges[:2] == [0.5, 2.5]
    assert len(edges) == 76
    assert set(_column_means(many, edges)) == {1.0}
    five = series(*[4.0] * 5)
    assert _column_means(five, _edges(five.steps, 2)) == [4.0, 4.0]  # three steps, then two
    assert _column_means(Series(steps=[2], values=[6.0]), [0.5, 3.5]) == [2.0]  # a step without a value is 0


@pytest.mark.parametrize(
    "values", [(0.0,), (5.0,), (0.0, 0.0), (-3.0, -3.0), (1e-9, 2e-9), (-1.0, 1e6), (0.1, 0.1 + 1e-16)]
)
def test_a_chart_of_any_values_has_coordinates_inside_its_frame(values: tuple[float, ...]) -> None:
    some = series(*values)
    text = line_chart("t", [Line(label="a", series=some)]) + stacked_chart("s", [Line(label="a", series=some)])
    numbers = [
        float(number) for path in re.findall(r' d="([^"]*)"', text) for number in re.findall(r"-?\d+\.?\d*", path)
    ]
    assert numbers
    assert all(-10 <= number <= 360 for number in numbers)
    assert "nan" not in text + sparkline(some, colour="ink", label="a")


def test_a_chart_says_in_words_what_it_shows() -> None:
    text = line_chart("Score", [Line(label="mean", series=series(0.25, 1.0, 0.5))])
    assert '<svg viewBox="0 0 360 176" role="img"><title>Score</title>' in text
    assert "<desc>mean: 0.25 at step 1, 0.5 at step 3, between 0.25 and 1</desc>" in text
    assert "<title>step 2\nmean 1</title>" in text


def test_lines_of_a_chart_differ_by_more_than_colour(make_run: MakeRun) -> None:
    for group in (charts.PUSH, charts.KL, charts.CLIP, charts.ENTROPY, charts.LENGTH, charts.UPDATE, (charts.SCORE,)):
        for chart in group:
            dashes = [trace.dash for trace in chart.traces]
            assert len(set(dashes)) == len(dashes), chart.title


def test_series_are_divided_and_added_where_both_have_a_value() -> None:
    top, bottom = series(1.0, 2.0, 3.0), Series(steps=[1, 2, 4], values=[2.0, 0.0, 1.0])
    assert ratio_of(top, bottom) == Series(steps=[1], values=[0.5])
    assert ratio_of(top, None) is None
    assert ratio_of(Series(steps=[9], values=[1.0]), bottom) is None
    assert sum_of([top, None, bottom]) == Series(steps=[1, 2, 3, 4], values=[3.0, 2.0, 3.0, 1.0])
    assert sum_of([None]) is None


def test_columns_leave_out_what_is_no_number_and_count_what_is_not_finite() -> None:
    lines = [{"step": 1, "a": 1, "b": "x", "c": True}, {"step": 2, "a": math.nan, "b": None}, {"step": 3, "a": 2.5}]
    assert columns(lines) == {"a": Series(steps=[1, 3], values=[1.0, 2.5], num_lost=1)}


# --- text ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (0.0, "0"), (1, "1"), (0.12345, "0.123"), (0.00123, "0.00123"), (0.000123, "1.23e−4"), (-0.5, "−0.5"),
        (12.345, "12.3"), (123.45, "123"), (1234.5, "1,234"), (2e6, "2e6"), (100, "100"), (0.1 + 0.2, "0.3"),
        (math.nan, "nan"), (math.inf, "inf"), (None, "–"), ("x", "–"), (True, "–"),
    ],
)  # fmt: skip
def test_a_figure_has_three_digits(value: Any, text: str) -> None:
    assert figure(value) == text


def test_shares_and_durations_read_well() -> None:
    assert [share(value) for value in (0, 0.0001, 0.051, 1.0, None, math.nan)] == [
        "0 %",
        "< 0.1 %",
        "5.1 %",
        "100 %",
        "–",
        "–",
    ]
    assert [duration(value) for value in (1.25, 119, 150, 9000)] == ["1.25 s", "119 s", "2.5 min", "2.5 h"]


def test_escaped_text_is_cut_before_it_is_escaped() -> None:
    assert escaped("<&>", 2) == "&lt;&amp; … (1 more characters)"
    assert escaped("a\x00b\u202ec\ud800") == "a\\u0000b\\u202ec\\ud800"
    assert escaped("line\n\ttab") == "line\n\ttab"


# --- looks -----------------------------------------------------------------------------------------------------------


def luminance(colour: str) -> float:
    channels = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def palettes() -> Iterator[tuple[str, dict[str, str]]]:
    for name, text in (("light", _LIGHT), ("dark", _DARK)):
        yield name, dict(re.findall(r"--([\w-]+):(#[0-9a-f]{6})", text))


@pytest.mark.parametrize(("name", "palette"), list(palettes()))
def test_text_has_the_contrast_of_wcag_aa_in(name: str, palette: dict[str, str]) -> None:
    def contrast(left: str, right: str) -> float:
        low, high = sorted((luminance(palette[left]), luminance(palette[right])))
        return (high + 0.05) / (low + 0.05)

    texts = ("ink", "soft", "accent", "warn", "calm", "reward-kl", "clip", "clip-low", "entropy", "kl-loss")
    assert {text: ground for text in texts for ground in ("paper", "card") if contrast(text, ground) < 4.5} == {}
    filled = ("warn", "clip", "reward-kl", "entropy", "kl-loss")  # badges with their text on the colour
    assert [colour for colour in filled if contrast("on", colour) < 4.5] == []
    assert contrast("muted", "card") >= 3  # lines


def test_the_style_sheet_knows_every_colour_that_a_chart_names() -> None:
    named = {
        trace.colour
        for group in (charts.PUSH, charts.KL, charts.CLIP, charts.ENTROPY)
        for chart in group
        for trace in chart.traces
    }
    named |= {trace.colour for trace in charts.TOKEN_CLASSES} | {
        f"stage{number}" for number in range(len(charts.STAGES))
    }
    assert [colour for colour in named if f".c-{colour}{{--c:var(" not in STYLE] == []
