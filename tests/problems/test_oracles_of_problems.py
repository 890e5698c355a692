"""Closed-form oracles of the problems on real data against automatic differentiation, and solvers on them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevel
from bilevel._core.compilation import arithmetic
from bilevel._core.types import Rows
from tests import cases
from tests.problems import small

ROWS = {
    "all": Rows(),
    "a full block": Rows(jnp.int32(2), jnp.int32(1)),
    "the short block": Rows(jnp.int32(cases.N_INNER // cases.BATCH), jnp.int32(cases.N_OUTER // cases.BATCH)),
}


def prepared(name):
    problem = small.PROBLEMS[name](dtype="float64")
    rng = np.random.default_rng(0)
    points = [
        jax.tree.map(lambda leaf: jnp.asarray(leaf + rng.standard_normal(leaf.shape)), problem.start) for _ in range(2)
    ]
    closed = problem.oracles.with_batches(cases.BATCH, "blocks")
    return closed, small.by_autodiff(name, closed), *points


# `check` compares derivatives on all rows with finite differences, see below.
@pytest.mark.parametrize("rows", [pytest.param("all", marks=pytest.mark.slow), "a full block", "the short block"])
@pytest.mark.parametrize("name", small.PROBLEMS)
def test_every_kind_equals_autodiff(name, rows):
    with arithmetic("float64"):
        closed, auto, point, _ = prepared(name)
        found, expected = (cases.every_kind(oracles, point, ROWS[rows]) for oracles in (closed, auto))
        cases.assert_trees_close(found, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", small.PROBLEMS)
def test_differences_equal_two_directions(name):
    with arithmetic("float64"):
        closed, auto, point, previous = prepared(name)
        for rows in (ROWS["a full block"], ROWS["the short block"]):
            expected = jax.tree.map(np.subtract, *(cases.direction(auto, at, rows) for at in (point, previous)))
            found = cases.difference(closed, point, previous, rows)
            cases.assert_trees_close(found, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", ["softmax_per_class", "cleaning", "softmax_folds"])
def test_steps_of_softmax_models_transpose_nothing(name):
    problem = (small.PROBLEMS | small.FOLDED)[name](dtype="float32")
    with arithmetic("float32"):
        oracles = problem.oracles.with_batches(cases.BATCH, "blocks")
        points, rows = (problem.start, problem.start), ROWS["a full block"]
        lowered = cases.direction.lower(oracles, points[0], rows), cases.difference.lower(oracles, *points, rows)
        programs = [each.compile().as_text() for each in lowered]
    assert all(" dot(" in program and " transpose(" not in program for program in programs)


@pytest.mark.parametrize("name", small.PROBLEMS)
def test_finite_differences_agree_with_every_derivative(name):
    assert max(small.PROBLEMS[name](dtype="float64").check().values()) < 1e-6


@pytest.mark.parametrize("sampling", ["blocks", "iid"])
def test_the_cross_product_of_cleaning_touches_only_rows_of_the_batch(sampling):
    with arithmetic("float64"):
        oracles = small.cleaning(dtype="float64").oracles.with_batches(cases.BATCH, sampling)
        _, _, point, previous = prepared("cleaning")
        drawn = oracles.draw(jax.random.key(0, impl="threefry2x32"), jnp.int32(0))
        data, weights = oracles.inner_samples.take(drawn.inner)
        touched = np.isin(np.arange(cases.N_INNER), np.asarray(data.index)[np.asarray(weights) > 0])
        difference = cases.difference(oracles, point, previous, drawn)
        for cross in (cases.every_kind(oracles, point, drawn)["cross"], difference.outer_var):
            assert np.all(cross[~touched] == 0) and np.all(cross[touched] != 0)


@pytest.mark.parametrize("name", small.PROBLEMS)
@pytest.mark.slow
def test_rows_cast_as_they_are_taken_give_float64_derivatives(name, monkeypatch):
    monkeypatch.setattr("bilevel.oracles.samples.PIECE", 7)
    problem = small.PROBLEMS[name](dtype="float32")
    with arithmetic("float64"):
        wide, copied = problem.oracles.in_float64(), problem.oracles.astype("float64")
        point = jax.tree.map(lambda leaf: jnp.asarray(leaf.astype(np.float64) + 0.1), problem.start)
        found, expected = (cases.every_kind(oracles, point) for oracles in (wide, copied))
        cases.assert_trees_close(found, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("name", "solver"), [*(("cleaning", solver) for solver in bilevel.SOLVERS), ("softmax_per_class", "SRBA")]
)
@pytest.mark.slow
def test_every_solver_runs_on_a_matrix_of_inner_variables(name, solver):
    problem = small.PROBLEMS[name]()
    run = bilevel.run(problem, cases.short(bilevel.SOLVERS[solver], 0.01, 10.0, cases.BATCH), max_steps=3)
    assert run.status == "out_of_budget" and run.history["step"][-1] == 3
    assert run.point.inner_var.shape == (small.CLASSES, small.FEATURES)
    assert np.isfinite(run.history["value"]).all()
