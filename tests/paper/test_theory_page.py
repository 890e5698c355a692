"""Tables and figures depend only on rows; those of the repository follow from the kept rows."""

import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from paper import theory_page as tables
from paper.commands import app
from paper.complexity import Measurement, read_measurements
from paper.condition import CANDIDATES, Derivatives, read_derivatives
from paper.lower_bound import Queries
from paper.measuring import read_rows

CONDITIONED = ("chain in inner", "chain in outer", "delayed chain", "quadratic")
KEPT = Path(__file__).parents[2] / "reports" / "reproduction"


@pytest.fixture(scope="module")
def kept():
    rows, found = read_measurements(KEPT / "complexity.csv"), read_rows(KEPT / "lower_bound.csv", Queries)
    return rows, found, read_derivatives(KEPT / "condition.csv")


def measurements():
    """Yield rows of SRBA on a power law, and of AmIGO, which never reaches ε."""
    for size in (64, 256, 1024):
        for epsilon in (0.1, 0.01):
            for seed in (0, 1, 2):
                calls = 5 * size**0.5 / epsilon
                yield Measurement("valleys", "SRBA", 0.1, 1.0, 1, 0.0, size, seed, epsilon, calls, epsilon)
                yield Measurement("valleys", "AmIGO", 0.1, 1.0, 1, 0.0, size, seed, epsilon, np.inf, 0.3)


def test_a_table_has_medians_exponents_and_the_lowest_gradient_if_epsilon_was_not_reached():
    text = tables.complexity_table(list(measurements()), "valleys", 0.01)
    assert "| SRBA | N^1/2 ε^-1 | 4 000 | 8 000 | 16 000 | 0.50 ± 0.00 |" in text
    assert "| AmIGO | ε^-2 | not reached (0.3) | not reached (0.3) | not reached (0.3) | – |" in text
    text = tables.accuracy_table(list(measurements()), "valleys")
    assert "| SRBA | N^1/2 ε^-1 | 400 | 4 000 | 1.00 ± 0.00 |" in text


def test_the_regime_follows_from_periods_and_exponents_at_a_fixed_step():
    grid = [row._replace(seed=100 + row.seed, step=tables.FIXED_STEP) for row in measurements()]
    text = tables.regime_table(grid, "valleys")
    assert "| 0.01 | 5.1 | 2.5 | 1.3 |" in text
    assert "| SRBA | N^1/2 ε^-1 | 0.50 ± 0.00 | 0.50 ± 0.00 | 1.00 ± 0.00 |" in tables.scaling_table(grid, "valleys")


@pytest.mark.slow
def test_drawing_twice_gives_the_same_bytes(tmp_path, kept):
    for name in ("first.svg", "second.svg"):
        tables.draw_lower_bound(kept[1], tmp_path / name)
    first = (tmp_path / "first.svg").read_bytes()
    assert first == (tmp_path / "second.svg").read_bytes()
    assert b"<dc:date>" not in first and b"lower bound" in first


def test_the_kept_tables_are_those_of_the_kept_rows(kept):
    assert (KEPT / "theory.md").read_text() == tables.theory_page(*kept)


def test_the_report_shows_tables_of_the_kept_rows(kept):
    rows, found, conditioned = kept
    report = (KEPT.parent / "theory.md").read_text()
    shown = [tables.lower_bound_table(found), tables.regime_table(rows, "valleys")]
    for problem in ("quadratic", "valleys"):
        shown += [tables.complexity_table(rows, problem), tables.accuracy_table(rows, problem)]
        shown += [tables.scaling_table(rows, problem)]
    shown += [tables.condition_table(conditioned, name) for name in CONDITIONED]
    assert all(table in report for table in shown)


def test_the_multiples_of_the_bound_that_pages_state_are_those_of_the_kept_rows(kept):
    def multiples(solver, problems):
        own = [row for row in kept[2] if row.seed < 100 and row.solver == solver and row.problem in problems]
        found = [row.cost / row.bound for row in own]
        return min(found), max(found)

    def words(page):
        text = (KEPT.parents[1] / page).read_text()
        return " ".join(re.sub(r"<!-- .*? -->", "", text).split())  # without the names of inserted numbers

    low, high = multiples("AccBiO-BG", CONDITIONED[:2])
    assert all(f"{low:.1f} to {high:.1f}" in words(f"{page}.md") for page in ("docs/theory", "docs/solvers"))
    report = words("reports/theory.md")
    assert f"a factor of {low:.1f} to {high:.1f}" in report
    assert f"up to {multiples('AmIGO', CONDITIONED[:2])[1]:.0f} times the bound" in report
    slowest = multiples("full batch", CONDITIONED[:2])[1]
    assert f"up to {slowest:.0f} times" in report and f"up to {slowest:.0f} times" in words("docs/theory.md")
    low, high = multiples("AmIGO", ["delayed chain"])
    assert f"AmIGO needs {low:.0f} to {high:.0f} times as many" in report


def test_no_kept_run_is_stationary_before_the_bound(kept):
    assert all(row.queries > row.bound for row in kept[1])
    assert all(row.cost > row.bound for row in kept[2] if row.problem != "quadratic")


def test_a_table_against_kappa_has_the_bound_the_medians_and_the_exponents():
    rows = [
        Derivatives("chain in inner", solver, kappa, 1.0, 1.0, 1, 0, 1e-6, 7 * kappa, 100 * kappa**2, 1e-7)
        for solver in ("AmIGO", "AccBiO")
        for kappa in (4.0, 8.0, 16.0)
    ]
    text = tables.condition_table(rows, "chain in inner")
    assert "|  | known exponent | κ = 4 | κ = 8 | κ = 16 | exponent of κ |" in text
    assert "| lower bound | – | 28 | 56 | 112 | 1.00 ± 0.00 |" in text
    assert "| AmIGO | 2 | 1 600 | 6 400 | 25 600 | 2.00 ± 0.00 |" in text
    assert [line.split(" | ")[0].strip("| ") for line in text.splitlines()[3:]] == ["AccBiO", "AmIGO"]
    assert {"AccBiO", "AmIGO"} < set(CANDIDATES)
    unbounded = [row._replace(problem="quadratic", bound=np.nan) for row in rows]
    assert "lower bound" not in tables.condition_table(unbounded, "quadratic")


def test_kept_rows_are_compact():
    assert (
        sum((KEPT / name).stat().st_size for name in ("complexity.csv", "lower_bound.csv", "condition.csv")) < 250_000
    )


@pytest.mark.slow
def test_the_command_measures_draws_and_writes(tmp_path):
    result = CliRunner().invoke(app, ["complexity", "--quick", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    written = {path.name for path in tmp_path.iterdir()}
    names = ("complexity", "lower_bound", "condition")
    assert written == {f"{name}.{kind}" for name in names for kind in ("csv", "svg")} | {"theory.md"}
    assert "| SRBA |" in (tmp_path / "theory.md").read_text()
