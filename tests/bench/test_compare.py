"""Two stores side by side."""

import pytest

from bilevel.bench.page import write_report
from bilevel.bench.select import make_sections
from bilevel.bench.tables import compare, describe_changes, join_sections
from tests.bench import fake_store
from tests.bench.test_report import Page


@pytest.fixture(scope="module")
def before():
    table = fake_store.store()
    return table[table.problem == "quadratic"]


@pytest.fixture(scope="module")
def after(before):
    """SRBA twice as good, SABA as it was, SOBA a little worse."""
    factors = before.solver.map({"SRBA": 0.5, "SABA": 1.0, "SOBA": 1.1, "StocBiO": 1.0})
    return before.assign(value_gap=before.value_gap * factors)


@pytest.fixture(scope="module")
def section(before, after):
    (joined,) = join_sections(make_sections(before), make_sections(after))
    return joined


def test_each_solver_is_there_as_it_was_and_as_it_is(section):
    labels = [one.label for one in section.contenders]
    assert labels == [f"{name} ({when})" for name in sorted(fake_store.RATES) for when in ("after", "before")]
    was, now = (section.curves["value_gap", "calls", f"SRBA ({when})"] for when in ("before", "after"))
    assert now.median == pytest.approx(0.5 * was.median)


def test_changes_are_told_with_how_sure_they_are(section):
    rows = {row["solver"]: row for row in compare(section)}
    assert rows["SRBA"]["change"] == "better: 2 times lower than before"
    assert rows["SRBA"]["after"] == pytest.approx(0.5 * rows["SRBA"]["before"])
    assert rows["SRBA"]["verdict"].level == "significant"
    assert rows["SABA"]["change"] == "the same in every seed"
    assert rows["SOBA"]["change"] == "worse: before, it was 9.1 % lower"
    assert rows["StocBiO"]["change"] == "diverges before and after"
    said = "After against before, of 4 solvers: 1 better, 1 worse, 2 without a significant difference."
    assert describe_changes([*rows.values()]) == said


def test_names_of_grids_stay_readable(before, after):
    named = [table.assign(columns=table.solver.map(lambda _: "tuned")) for table in (before, after)]
    (joined,) = join_sections(*map(make_sections, named))
    assert joined.contenders[0].label == "SABA (tuned, after)"
    assert [row["solver"] for row in compare(joined)] == [f"{name} (tuned)" for name in sorted(fake_store.RATES)]


@pytest.mark.slow
def test_the_page_compares(before, after, tmp_path):
    page = Page(write_report(after, tmp_path, before=before).read_text(encoding="utf-8"))
    head, *rows = page.table("changes")
    assert head[:5] == ["Solver", "Before", "After", "Change", "Sign test"] and len(rows) == len(fake_store.RATES)
    assert "1 better, 1 worse, 2 without a significant difference." in page.text
    assert f"before, {fake_store.HOSTILE}" in page.text, "where both come from"


def test_stores_without_a_common_problem_are_refused(before, tmp_path):
    other = before.assign(problem="digits_cleaning")
    with pytest.raises(
        ValueError, match="`before`: the two stores share no problem of an experiment; it has quadratic"
    ):
        write_report(other, tmp_path, before=before)
