"""Exact solutions of badly scaled problems against extended precision: right, or refused with a sentence."""

import jax.numpy as jnp
import numpy as np
import pytest

import bilevel
from bilevel import problems
from paper.valleys import valleys
from tests import cases
from tests.problems import extended

LOSSES = {
    "poisson": lambda w, x, d: jnp.exp(d[0] @ w) - d[1] * (d[0] @ w),
    "logistic": lambda w, x, d: jnp.logaddexp(0.0, -d[1] * (d[0] @ w)),
    "squared": lambda w, x, d: (d[0] @ w - d[1]) ** 2 / 2,
}
KINDS = ["own poisson", "logistic", "squared", "own logistic", "own squared"]


def make_rows(seed):
    """Return a kind, rows of both levels whose columns have scales from 1e-3 to 1e3 and means up to 1000, and x."""
    rng, kind = np.random.default_rng(1000 + seed), KINDS[seed % len(KINDS)]
    n, p = rng.integers(15, 60), rng.integers(3, 9)
    plain = rng.standard_normal((2 * n, p))
    scores = plain @ rng.standard_normal(p) / np.sqrt(p)
    targets = {
        "poisson": rng.poisson(np.exp(np.minimum(scores + rng.uniform(0, 4), 8))),
        "logistic": np.where(scores + rng.logistic(size=2 * n) > 0, 1, -1),
        "squared": scores + 0.3 * rng.standard_normal(2 * n),
    }[kind.split()[-1]].astype(float)
    largest = rng.choice([0, 1, 10] if "poisson" in kind else [0, 1, 10, 1000])
    X = (plain + largest * (rng.random(p) < 0.4) * rng.standard_normal(p)) * 10 ** rng.uniform(-3, 3, p)
    low, high = [(-20, -10), (-10, 5), (-20, 10)][rng.integers(3)]
    return kind, (X[:n], targets[:n]), (X[n:], targets[n:]), rng.uniform(low, high, p)


def make_problem(kind, train, validation, x, dtype="float64"):
    loss, start = kind.split()[-1], {"inner_var": np.zeros(len(x)), "outer_var": x, "dtype": dtype}
    if "own" not in kind:
        return problems.penalty_selection(*train, *validation, loss=loss, **start)

    def penalized(w, x, d):
        return LOSSES[loss](w, x, d) + jnp.exp(x) @ w**2 / 2

    made = bilevel.BilevelProblem.from_losses
    return made(penalized, LOSSES[loss], train, validation, **start, strongly_convex=True)


def assert_right_or_refused(kind, train, validation, x):
    """Return whether a solution was given; it is right to 1e-6."""
    _, value, hypergrad = extended.solve(getattr(extended, kind.split()[-1]), train, validation, x)
    problem = make_problem(kind, train, validation, x)
    try:
        found = problem.exact_solver(x)
    except np.linalg.LinAlgError:
        return False
    assert abs(found.value - value) <= 1e-6 * abs(value)
    assert np.linalg.norm(found.hypergrad - hypergrad) <= 1e-6 * np.linalg.norm(hypergrad)
    return True


@pytest.mark.parametrize("seed", range(10))
def test_an_exact_solution_of_badly_scaled_rows_is_right_or_refused(seed):
    assert_right_or_refused(*make_rows(seed))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(10, 200, 10))
def test_exact_solutions_of_badly_scaled_rows_are_right_or_refused_and_most_are_right(first):
    assert sum(assert_right_or_refused(*make_rows(seed)) for seed in range(first, first + 10)) >= 9


def poisson_rows(seed=3, p=5, n=70):
    rng = np.random.default_rng(seed)
    plain = rng.standard_normal((2 * n, p))
    y = rng.poisson(np.exp(plain @ rng.standard_normal(p) / np.sqrt(p))).astype(float)
    X = plain * np.geomspace(1e-3, 1e3, p)
    return "own poisson", (X[:n], y[:n]), (X[n:], y[n:]), np.full(p, -14.0)


@pytest.mark.parametrize("seed", [0, 2, 4])
def test_counts_on_columns_of_many_sizes_are_fitted(seed):
    assert assert_right_or_refused(*poisson_rows(seed))


@pytest.mark.parametrize("n_columns", [70, 130])
def test_more_columns_than_products_can_solve_are_fitted_by_a_matrix(n_columns):
    assert assert_right_or_refused(*poisson_rows(1, n_columns, 3 * n_columns))


def test_hypergradients_of_columns_of_many_sizes_are_right():
    rows = poisson_rows(4)
    expected = extended.solve(extended.poisson, *rows[1:])[2]
    problem = make_problem(*rows)
    z = problem.exact_solver(problem.start.outer_var).inner_var
    found = bilevel.hypergradient(problem, problem.start._replace(inner_var=z), tolerance=1e-6)
    np.testing.assert_allclose(found.gradient, expected.astype(float), rtol=1e-5)


@pytest.mark.parametrize("solver", [bilevel.Exact(), bilevel.SOBA(1e-9, 1.0, 8)])
def test_a_run_reports_the_value_that_extended_precision_gives(solver):
    rows = poisson_rows(0)
    result = bilevel.run(make_problem(*rows), solver, max_steps=1, eval_every=1)
    value = extended.solve(extended.poisson, *rows[1:3], result.point.outer_var)[1]
    np.testing.assert_allclose(result.history["value"][-1], float(value), rtol=1e-6)


def hopeless():
    """Rows of a squared loss whose two columns are equal but for rounding, without a penalty to speak of."""
    rng = np.random.default_rng(0)
    column = rng.standard_normal(60)
    X = np.column_stack([column, column * (1 + 1e-12 * rng.standard_normal(60))])
    y = column + rng.standard_normal(60)
    return (X[:30], y[:30]), (X[30:], y[30:]), np.full(2, -60.0)


@pytest.mark.parametrize("kind", ["squared", "own squared", "own logistic"])
def test_what_float64_cannot_solve_is_refused_with_a_way_out(kind):
    train, validation, x = hopeless()
    if "logistic" in kind:
        train, validation = ((X, np.sign(y)) for X, y in (train, validation))
    problem = make_problem(kind, train, validation, x)
    with pytest.raises(np.linalg.LinAlgError, match=r"(?i)scale the columns of the data, or bound the outer variable"):
        problem.exact_solver(x)


def test_a_run_warns_of_values_that_could_not_be_solved_and_none_is_its_best():
    problem = make_problem("own squared", *hopeless())
    with pytest.warns(RuntimeWarning, match=r"`value` is NaN in 3 of 3 evaluations.*float64"):
        result = bilevel.run(problem, bilevel.SOBA(1e-3, 1.0, 8), max_steps=2, eval_every=1)
    assert np.isnan(result.history["value"]).all() and result.best_row == -1 and result.best_point is None


def test_a_stationary_start_and_a_perfect_fit_are_solved():
    X, z = np.random.default_rng(0).standard_normal((40, 3)), np.array([1.0, -2.0, 0.5])
    for y, x in ((np.zeros(40), 0.0), (X @ z, -70.0)):
        problem = problems.penalty_selection(
            X[:20], y[:20], X[20:], y[20:], loss="squared", outer_var=np.full(3, x), dtype="float64"
        )
        found = problem.exact_solver(problem.start.outer_var)
        assert found.value < 1e-25 and np.linalg.norm(found.hypergrad) < 1e-25


@pytest.mark.parametrize("name", ["quadratic", "ridge", "logistic", "valleys", "softmax"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_outer_variable_that_is_not_finite_is_refused(name, bad):
    X, y = np.random.default_rng(0).standard_normal((20, 3)), np.resize([1, -1], 20)
    rows = (X[:10], y[:10], X[10:], y[10:])
    made = {
        "quadratic": lambda: cases.quadratic(),
        "ridge": lambda: problems.penalty_selection(*rows, loss="squared"),
        "logistic": lambda: problems.penalty_selection(*rows),
        "valleys": lambda: valleys(16, 16, 4),
        "softmax": lambda: problems.penalty_selection(X, (y + 1) // 2, X, (y + 1) // 2, loss="softmax", per="class"),
    }[name]()
    x = np.array(made.start.outer_var)
    x.flat[0] = bad
    with pytest.raises(ValueError, match="`outer_var` holds NaN or infinite values; give a finite point") as caught:
        made.exact_solver(x)
    assert not isinstance(caught.value, np.linalg.LinAlgError)
