"""The page: complete, self-contained, and deaf to what strings would like to be."""

import base64
import hashlib
import html
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from bilevel.bench.page import embed_json, write_report
from bilevel.bench.select import AXES, add_gap, make_sections
from bilevel.bench.store import SCHEMA
from bilevel.engine.metrics import METRICS
from tests.bench import fake_store


class Page(HTMLParser):
    """Texts and attributes by tag, tables as lists of rows."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.scripts, self.tables, self.names, self.inside, self.text = [], [], [], [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.inside.append(tag)
        if tag == "script":
            self.scripts.append("")
        if "data-table" in dict(attributes):
            self.names.append(dict(attributes)["data-table"])
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        while self.inside and self.inside.pop() != tag:
            pass

    def handle_data(self, data):
        if "script" in self.inside:
            self.scripts[-1] += data
            return
        if "style" not in self.inside:
            self.text += data
        if "td" in self.inside or "th" in self.inside:
            self.tables[-1][-1][-1] += data if "span" not in self.inside else f" [{data}]"

    def table(self, name):
        """The first table of this name."""
        return self.tables[self.names.index(name)]


@pytest.fixture(scope="module")
def table():
    return fake_store.store()


@pytest.fixture(scope="module")
def source(table, tmp_path_factory):
    path = write_report(
        table,
        tmp_path_factory.mktemp("report"),
        budgets="20,000 oracle calls",
        commands=["make <it>", "again && again"],
    )
    assert path.name == "index.html"
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(source):
    return Page(source)


@pytest.fixture(scope="module")
def data(page):
    return json.loads(page.scripts[0])


def test_the_page_is_one_file_that_asks_the_network_for_nothing(page):
    for tag, attributes in page.tags:
        assert tag not in ("link", "iframe", "img", "object", "base")
        assert attributes.get("href", "#").startswith("#") and "src" not in attributes
    assert len(page.scripts) == 3 and sum(len(script) > 1e6 for script in page.scripts) == 1


def test_only_the_two_scripts_of_the_page_may_run(page):
    policy = next(a["content"] for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    digests = {
        base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        for script, attributes in zip(page.scripts, (a for tag, a in page.tags if tag == "script"), strict=True)
        if attributes.get("type") != "application/json"
    }
    assert set(re.findall(r"'sha256-([^']+)'", policy)) == digests
    assert "default-src 'none'" in policy and "unsafe-inline" not in policy.split("style-src")[0]


def test_hostile_strings_are_text(source, page):
    assert page.text.count(fake_store.HOSTILE) >= 4
    assert fake_store.HOSTILE_ARGUMENT in page.text
    assert fake_store.HOSTILE not in source and html.escape(fake_store.HOSTILE) in source
    assert "make <it>\nagain && again" in page.text


def test_embedded_data_survives_and_holds_no_markup():
    hostile = {"a": "</script><!-- & \u2028\u2029 é", "b": [1.5, None]}
    text = embed_json(hostile)
    assert json.loads(text) == hostile
    assert not set(text) & set("<>&\u2028\u2029")


def test_data_that_is_no_json_is_refused():
    with pytest.raises(ValueError, match="Out of range"):
        embed_json([np.nan])


def test_curves_in_the_page_are_those_of_the_table(table, data):
    for section, drawing in zip(map(add_gap, make_sections(table)), data["sections"], strict=True):
        assert len(drawing["curves"]) == len(section.curves)
        for drawn in drawing["curves"]:
            solver = data["solvers"][drawn["solver"]]["name"]
            curve = section.curves[drawn["metric"], drawn["axis"], solver]
            for name in ("x", "low", "median", "high"):
                ours = np.array([np.nan if number is None else number for number in drawn[name]])
                theirs = getattr(curve, name)
                np.testing.assert_allclose(ours, np.where(np.isfinite(theirs), theirs, np.nan), rtol=1e-4)


def test_each_problem_offers_the_metrics_it_has(data):
    offered = [[metric["name"] for metric in section["metrics"]] for section in data["sections"]]
    cleaning, quadratic = offered
    assert quadratic[0] == "value_gap" and "test_error" not in quadratic
    assert cleaning[:2] == ["value_above_lowest", "value"] and "test_error" in cleaning and "value_gap" not in cleaning
    for section in data["sections"]:
        assert {curve["axis"] for curve in section["curves"]} == set(AXES)


def test_every_metric_of_the_registry_has_a_column_and_a_label():
    assert set(METRICS) <= set(SCHEMA().names)
    assert all(metric.label for metric in METRICS.values())


def test_the_selected_step_size_is_the_one_that_was_best(page):
    head, *rows = page.table("settings")
    settings = {row[0]: row[1] for row in rows}
    assert head == ["Solver", "Setting", "At an end of its grid"]
    assert "step_size 0.1" in settings["SRBA"] and "batch_size 64" in settings["SRBA"]
    assert settings["StocBiO"].startswith("none")


def final_of(solver, seed):
    return np.exp(-fake_store.RATES[solver] * (fake_store.EVALUATIONS - 1) / 10) * (1 + 0.1 * seed)


def test_final_values_are_medians_with_their_spread_and_ranked(page):
    head, *rows = page.table("finals")
    assert [row[0] for row in rows] == ["SRBA", "SABA", "SOBA", "StocBiO"]
    value = head.index("h(x)")
    low, median, high = (f"{final_of('SRBA', seed):.3g}" for seed in (1.8, 4.5, 7.2))
    assert rows[0][value] == f"{median} [{low} to {high}]"
    # Seeds 0, 1 and 2 diverged: the median of ten lies between seeds 7 and 8.
    assert rows[2][value] == f"{final_of('SOBA', 7.5):.3g} [{final_of('SOBA', 4.8):.3g} to diverged]"
    assert rows[3][value] == "diverged"


def test_cost_and_status_are_counted(page):
    head, *rows = page.table("finals")
    by_solver = {row[0]: dict(zip(head, row, strict=True)) for row in rows}
    assert by_solver["SRBA"]["Oracle calls"] == "20,000" and by_solver["SRBA"]["Memory"] == "8.0 KiB"
    assert by_solver["SRBA"]["Seconds"] == f"{2 * 1.09:.3g}"
    assert by_solver["SOBA"]["Seeds"] == "7 out of budget3 diverged"
    assert by_solver["SOBA"]["Diverged in sweep"] == "3 of 9"
    assert by_solver["StocBiO"]["Seconds"] == "–"
    assert (by_solver["StocBiO"]["Seeds"], by_solver["StocBiO"]["Diverged in sweep"]) == ("–", "9 of 9")


def test_divergence_is_marked_and_listed_among_the_warnings(source, page):
    assert source.count('<b class="line bad">3 diverged</b>') == source.count('<b class="bad">9 of 9</b>') == 2
    assert page.text.count("SOBA: 3 of 10 seeds diverged at the selected setting.") == 2
    assert page.text.count("StocBiO: no setting of its grid has a finite median.") == 2


def first_calls(solver, seed, epsilon):
    """500 calls between evaluations of exp(-rate k / 10) (1 + seed / 10)."""
    step = np.ceil(np.log((1 + 0.1 * seed) / epsilon) / fake_store.RATES[solver] * 10)
    return 500 * step if step < fake_store.EVALUATIONS else np.inf


def test_the_cost_to_targets_is_a_median_over_seeds_or_a_dash(page):
    head, *rows = page.table("targets-1")
    assert [row[0] for row in rows] == ["SRBA", "SABA", "SOBA"]
    for row in rows[:2]:
        for title, text in zip(head[1:], row[1:], strict=True):
            target = float(title.split()[1])
            calls = np.median([first_calls(row[0], seed, target) for seed in range(fake_store.TIMING_SEEDS)])
            assert text.startswith("–") if np.isinf(calls) else f"[{float(f'{calls:.2g}'):,.0f} calls]" in text


def test_no_target_is_out_of_reach_of_all_or_behind_the_start(page):
    for name in {name for name in page.names if name.startswith("targets")}:
        columns = list(zip(*page.table(name), strict=True))[1:]
        assert 2 <= len(columns) <= 6
        for _, *texts in columns:
            assert any(text[0] != "–" for text in texts)
            assert not all("[0 calls]" in text for text in texts)


def test_the_headline_names_the_winner_the_margin_and_the_sign_test(page):
    ours, theirs = final_of("SRBA", 4.5), final_of("SABA", 4.5)
    said = f"SRBA ends with the lowest h(x): {ours:.3g}, {theirs / ours:.2g} times lower than SABA ({theirs:.3g})."
    assert said in page.text
    assert "Ahead of each other solver in all 10 seeds: sign test p = 0.0039 (two-sided, 2 comparisons)." in page.text


def test_every_metric_has_a_winner_in_words(page):
    head, *rows = page.table("winners")
    winners = {row[0]: row[1] for row in rows}
    assert head[0] == "By" and head[-1] == "Sign test"
    for metric in ("h(x)", "‖∇h(x)‖²", "test error", "F(z, x)"):
        assert winners[f"final {metric}"] == "SRBA"
    assert [title.split(" to ")[0] for title in winners if " to " in title] == ["seconds", "oracle calls"]


@pytest.mark.slow
def test_the_page_explains_the_problem_and_its_metrics(table, tmp_path):
    sized = table.assign(n_inner=1000, n_outer=300, dim_inner=640, dim_outer=1000)
    text = Page(write_report(sized, tmp_path).read_text(encoding="utf-8")).text
    assert "Data cleaning on the 1797 digits of scikit-learn" in text
    assert "fits z, 640 numbers, to 1,000 rows; the outer one chooses x, 1,000 numbers, by a loss on 300 other" in text
    assert "The outer loss F(z*(x), x), where the inner problem is solved exactly; lower is better." in text


def test_the_page_explains_seconds_and_the_ends_of_curves(page):
    assert "compilation and evaluation are left out" in page.text
    assert "their curves end at different places" in page.text


def test_solvers_have_one_order_everywhere(page, data):
    order = ["SRBA", "SABA", "SOBA", "StocBiO"]
    assert [solver["name"] for solver in data["solvers"]] == order
    for name, rows in zip(page.names, page.tables, strict=True):
        if name != "winners":
            shown = [row[0] for row in rows[1:]]
            assert shown == [solver for solver in order if solver in shown]


def test_a_loss_is_drawn_above_the_lowest_value_seen_of_its_problem(table, tmp_path):
    cleaning = table[table.problem == "digits_cleaning"]
    drawn = cleaning.assign(
        problem_arguments=[json.dumps({"seed": seed}) for seed in cleaning.seed], value=cleaning.value + cleaning.seed
    )
    page = Page(write_report(drawn, tmp_path).read_text(encoding="utf-8"))
    section = json.loads(page.scripts[0])["sections"][0]
    assert section["metrics"][0] == {"name": "value_above_lowest", "label": "h(x) − lowest seen", "log": True}
    curve = next(one for one in section["curves"] if (one["metric"], one["axis"]) == ("value_above_lowest", "calls"))
    # Seeds of the timing are ten problems, each with a lowest value of its own, which SRBA has.
    lowest = np.exp(-16)
    np.testing.assert_allclose(curve["median"][0], 1.45 * (1 - lowest), rtol=1e-4)
    assert page.table("targets-1")[0][1:] == ["≤ 1", "≤ 0.1", "≤ 0.01"]
    assert "Each seed is a problem with its own data and start" in page.text


def test_the_page_names_machine_versions_and_number_of_runs(page):
    for fact in (
        "72 of the sweep phase, with 3 seeds, each up to 20,000 oracle calls",
        "60 of the timing phase, with 10 seeds",
        "Processor & Sons, 2 cores",
        "Python 3.11.2, JAX 0.10.0, bilevel 0.1.0",
        "0123456789abcdef",
        "2024-05-06",
        "Budget of a cell: 20,000 oracle calls",
    ):
        assert fact in page.text


def test_a_problem_without_a_finite_curve_has_a_sentence_and_its_table(table, tmp_path):
    only_diverged = table[(table.solver == "StocBiO") | (table.problem == "quadratic")]
    page = Page(write_report(only_diverged, tmp_path).read_text(encoding="utf-8"))
    assert page.text.count("No solver has a finite value to draw here") == 1
    assert sum(attributes.get("class") == "plot" for _, attributes in page.tags) == 1
    assert [row[0] for row in page.table("finals")[1:]] == ["StocBiO"]


def test_a_sweep_alone_makes_a_page_without_seconds_and_without_calls_to_reach(table, tmp_path):
    page = Page(write_report(table[table.phase == "sweep"], tmp_path).read_text(encoding="utf-8"))
    curves = [curve for section in json.loads(page.scripts[0])["sections"] for curve in section["curves"]]
    assert {curve["axis"] for curve in curves} == {"calls", "epochs"}
    assert {len(curve["x"]) for curve in curves if curve["metric"] == "value"} == {1}, "known at the end only"
    assert "To reach" not in page.text


def test_problems_that_differ_by_their_seed_share_a_section_of_the_page(table):
    arguments = [json.dumps({"dim": 3, "seed": seed}) for seed in table.seed]
    shown = make_sections(table.assign(problem_arguments=arguments))
    assert [section.problem for section in shown] == ["digits_cleaning", "quadratic"]
    assert shown[0].arguments == {"dim": 3}
    assert shown[0].contenders[0].rows.cell.nunique() == fake_store.TIMING_SEEDS


def test_an_empty_table_is_refused_and_nothing_is_written(table, tmp_path):
    with pytest.raises(ValueError, match="`table` has no rows; run the experiment first"):
        write_report(table[:0], tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_unknown_metric_is_refused(table, tmp_path):
    with pytest.raises(ValueError, match="metric='value_gab'"):
        write_report(table, tmp_path, select="value_gab")


def test_a_solver_has_the_same_color_and_dash_in_its_button_and_its_curve(page, data):
    lines = [attributes for tag, attributes in page.tags if tag == "line"]
    assert len(lines) == 2 * len(fake_store.RATES)
    for section in (lines[:4], lines[4:]):
        assert [line["stroke"] for line in section] == [solver["color"] for solver in data["solvers"]]
    assert len({solver["dash"] for solver in data["solvers"]}) == len(fake_store.RATES)
