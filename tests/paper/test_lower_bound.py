"""Queries of rows of F on the worst case: an independent count, the bound, and the use of the grid."""

import numpy as np
import pytest

from paper import lower_bound
from paper.lower_bound import (
    QUICK,
    SOLVERS,
    Queries,
    make_problem,
    measure_lower_bound,
    queries,
    slope_in_rows,
    slope_of_bound,
)
from paper.measuring import first_passage

TINY = QUICK._replace(n_outer=(2,), epsilon=1.5e-6, seeds=(0,), solvers=("SRBA",))


def slope_of_f(y):
    """Return ∇f of a chain, coordinate by coordinate."""
    alpha, grad = 1 / 180, np.zeros_like(y)
    grad[0] = np.sqrt(alpha) * (y[0] - 1)
    for k in range(len(y) - 1):
        grad[k] += y[k] - y[k + 1] + alpha * 120 * y[k] ** 2 * (y[k] - 1) / (1 + y[k] ** 2)
        grad[k + 1] += y[k + 1] - y[k]
    return grad


def test_queries_of_a_full_batch_run_are_those_of_a_plain_count():
    m, epsilon = 2, 1.5e-6
    problem = make_problem("individual", m, epsilon)
    solver = SOLVERS["full batch"].make(1.0, 1 / 1.0, m)
    found = first_passage(problem, solver, [epsilon], 0, 1e6, queries).costs[epsilon]
    width, height = problem.info["beta"], problem.info["lambda"]

    def mean_slope(z):
        parts = [height / width * slope_of_f(part / width) for part in z.reshape(m, -1)]
        return np.concatenate(parts) / m

    z = x = v = np.zeros_like(problem.start.outer_var)
    step = look = 0
    while np.sum(mean_slope(x) ** 2) > epsilon:
        look += max(1, look // 20)
        for _ in range(look - step):
            z, x, v = z - (z - x), x + v, v - (v + mean_slope(z))
        step = look
    assert found == m * step > problem.info["query_bound"]


def test_runs_are_above_the_bound_and_are_resumed(tmp_path):
    path = tmp_path / "rows.csv"
    rows = measure_lower_bound(TINY, path=path)
    assert len(rows) == 2 * (2 + 1), "two classes, two settings of the grid, one seed"
    for row in rows:
        assert row.bound == row.n_outer * row.length / 2
        assert row.queries > row.bound
    best = {
        name: min((row for row in rows if row.normalization == name), key=lambda row: row.queries)
        for name in lower_bound.NORMALIZATIONS
    }
    assert all(row.outer_step == best[row.normalization].outer_step for row in rows if row.seed == 0)
    assert measure_lower_bound(TINY, path=path, progress=lambda *_: pytest.fail("nothing is due")) == rows


def row(normalization, m, found, bound, seed=0):
    return Queries(normalization, "SRBA", m, 1.0, 1.0, seed, 1e-7, 20, bound, found, 1e-8)


def test_slopes_are_those_of_the_rows():
    rows = [row("mean_squared", m, 90 * m**0.5, 30 * m**0.5, seed) for m in (2, 8, 32) for seed in (0, 1)]
    rows += [row("individual", m, 90.0, 30.0) for m in (2, 8, 32)] + [row("individual", 2, 1.0, 30.0, 100)]
    assert slope_of_bound(rows, "mean_squared").value == pytest.approx(0.5)
    assert slope_in_rows(rows, "mean_squared", "SRBA").value == pytest.approx(0.5)
    assert slope_in_rows(rows, "individual", "SRBA").value == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (TINY._replace(seeds=()), "must not be empty"),
        (TINY._replace(solvers=("SARAH",)), "`plan` names 'SARAH'"),
        (TINY._replace(epsilon=1.0), "`epsilon=1.0` leaves chains of T = 0"),
    ],
)
def test_bad_plans_are_refused(plan, message):
    with pytest.raises(ValueError, match=message):
        measure_lower_bound(plan)
