"""The diagonal of the inner Hessian: closed forms against dense Hessians, probes against what they estimate."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevel
from bilevel._core.compilation import arithmetic
from bilevel.oracles.curvature import (
    N_PROBES,
    diagonal_majorizer,
    diagonal_passes,
    inner_diagonal,
    probe_diagonal,
    squared_diagonals,
)
from tests import cases
from tests.problems import small

RNG = np.random.default_rng(5)


def table(n, dim=4, classes=3):
    return RNG.standard_normal((n, dim)), RNG.integers(0, classes, n)


def classes_problem(build, **kwargs):
    (X, y), (X_val, y_val) = table(40), table(23)
    y[:3] = [0, 1, 2]
    return build(X, y, X_val, y_val, dtype="float64", **kwargs)


def ridge():
    rows = RNG.standard_normal((40, 4))
    return bilevel.problems.penalty_selection(
        rows, rows[:, 0], rows[:20], rows[:20, 1], loss="squared", dtype="float64"
    )


CLOSED = {
    "logistic": cases.logistic_selection,
    "grouped": lambda: cases.logistic_selection(groups=[0, 1, 1, 0]),
    "ridge": ridge,
    "softmax per class": lambda: classes_problem(bilevel.problems.penalty_selection, loss="softmax", per="class"),
    "softmax per feature": lambda: classes_problem(bilevel.problems.penalty_selection, loss="softmax"),
    "cleaning": lambda: classes_problem(bilevel.problems.data_cleaning),
    "logistic folds": lambda: small.logistic_folds(dtype="float64"),
    "quadratic": cases.quadratic,
}


def somewhere(problem):
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: leaf + 0.3 * rng.standard_normal(leaf.shape), problem.start)


def dense_diagonal(oracles, point):
    """By automatic differentiation of the value, which shares no line with the closed forms."""
    size = point.inner_var.size
    hessian = dense_hessian(oracles, point)
    return np.diagonal(np.asarray(hessian).reshape(size, size)).reshape(point.inner_var.shape)


# Compiled: taken one by one, the operations of an oracle are dozens of programs.


@jax.jit
def dense_hessian(oracles, point):
    return jax.hessian(lambda z: oracles.inner_value(point._replace(inner_var=z)))(point.inner_var)


@jax.jit
def diagonals(oracles, point, index=0):
    """The diagonal, its majorizer and the squared one."""
    kinds = inner_diagonal(oracles, point, index), diagonal_majorizer(oracles, point, index)
    return *kinds, squared_diagonals(oracles, point)


@pytest.mark.parametrize("name", CLOSED)
def test_closed_diagonals_equal_those_of_the_dense_hessian(name):
    problem = CLOSED[name]()
    with arithmetic("float64"):
        oracles, point = problem.oracles, somewhere(problem)
        assert oracles.has_row_diagonals
        np.testing.assert_allclose(diagonals(oracles, point)[0], dense_diagonal(oracles, point), rtol=1e-11)


@pytest.mark.parametrize("name", CLOSED)
def test_a_diagonal_majorizer_is_never_below_the_diagonal(name):
    problem = CLOSED[name]()
    with arithmetic("float64"):
        oracles, point = problem.oracles, somewhere(problem)
        exact, majorizer = (np.asarray(one) for one in diagonals(oracles, point)[:2])
        assert np.all(majorizer >= exact * (1 - 1e-12))
        if "quadratic" in name or "ridge" in name:
            np.testing.assert_allclose(majorizer, exact)


@pytest.mark.parametrize("name", CLOSED)
def test_squared_diagonals_are_the_mean_square_over_rows(name):
    problem = CLOSED[name]()
    with arithmetic("float64"):
        oracles, point = problem.oracles.with_batches(1, "iid"), somewhere(problem)
        rest = np.asarray(oracles._diagonal_regularization(point))

        @jax.jit
        def of_row(point, i):
            rows = oracles.inner_samples.take(i[None])
            return oracles._row_diagonals(point, *rows, power=1, majorize=True)

        rows = np.stack([np.asarray(of_row(point, np.int32(i))) for i in range(oracles.n_inner)])
        _, majorizer, squared = diagonals(oracles, point)
        np.testing.assert_allclose(squared, np.mean(rows**2, axis=0), rtol=1e-11)
        np.testing.assert_allclose(majorizer, rows.mean(axis=0) + rest, rtol=1e-11)


def test_a_row_that_is_fitted_badly_keeps_its_weight_in_the_diagonal_majorizer():
    problem = bilevel.problems.penalty_selection(
        np.ones((1, 1)),
        [1],
        np.ones((1, 1)),
        [1],
        outer_var=np.array([-30.0]),
        inner_var=np.array([-50.0]),
        dtype="float64",
    )
    with arithmetic("float64"):
        exact, majorizer = (float(one[0]) for one in diagonals(problem.oracles, problem.start)[:2])
    assert exact < 1e-12
    np.testing.assert_allclose(majorizer, 1)


@pytest.mark.parametrize("name", ["quadratic", "logistic"])
def test_probes_are_exact_up_to_as_many_coordinates(name):
    problem = cases.PROBLEMS[name]()
    assert problem.start.inner_var.size <= N_PROBES
    with arithmetic("float64"):
        point, probing = somewhere(problem), cases.by_autodiff(name, problem)
        assert diagonal_passes(probing) == N_PROBES
        for index in (0, 3):
            expected = diagonals(problem.oracles, point)[0]
            np.testing.assert_allclose(diagonals(probing, point, index)[0], expected, rtol=1e-10)


def test_probes_of_many_coordinates_are_right_in_the_mean():
    rng, size = np.random.default_rng(0), 40
    factor = rng.standard_normal((size, size))
    matrix = factor @ factor.T / size + np.diag(np.arange(size))
    with arithmetic("float64"):
        estimate = jax.jit(jax.vmap(lambda i: probe_diagonal(lambda v: jnp.asarray(matrix) @ v, jnp.zeros(size), i)))
        found = np.asarray(estimate(np.arange(2000)))
    error = np.abs(found.mean(axis=0) - np.diag(matrix))
    spread = found.std(axis=0) / np.sqrt(len(found))
    assert np.all(error < 5 * spread + 1e-12)
    assert np.max(found.std(axis=0)) < np.max(np.linalg.norm(matrix, axis=0)), "better than one probe alone"


def test_probes_take_trees():
    with arithmetic("float64"):
        like = {"a": jnp.zeros((2, 2)), "b": jnp.zeros(3)}
        weights = {"a": jnp.array([[1.0, 2.0], [3.0, 4.0]]), "b": jnp.array([5.0, 6.0, 7.0])}
        found = jax.jit(lambda: probe_diagonal(lambda v: jax.tree.map(jnp.multiply, weights, v), like, 1))()
    cases.assert_trees_close(found, weights)


def test_rows_held_in_float32_give_the_same_diagonal_in_float64():
    problem = cases.logistic_selection("float32")
    with arithmetic("float64"):
        wide = problem.oracles.in_float64()
        point = jax.tree.map(lambda leaf: jnp.asarray(leaf, "float64"), problem.start)
        np.testing.assert_allclose(diagonals(wide, point)[0], dense_diagonal(wide, point), rtol=1e-11)


@pytest.mark.parametrize("name", ["logistic", "autodiff"])
def test_rows_on_a_mesh_give_the_same_diagonal(name):
    problem = cases.logistic_selection()
    with arithmetic("float64"):
        if name == "autodiff":
            problem = bilevel.BilevelProblem(cases.by_autodiff("logistic", problem), problem.start)
        point, spread = somewhere(problem), problem.sharded().oracles
        for found, expected in zip(diagonals(spread, point, 2), diagonals(problem.oracles, point, 2), strict=True):
            np.testing.assert_allclose(found, expected)
        queries = [(o.has_row_diagonals, o.wide_bounds) for o in (spread, problem.oracles)]
        assert queries[0] == queries[1]
