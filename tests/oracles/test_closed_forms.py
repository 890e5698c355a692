"""Closed-form oracles against automatic differentiation, and both against dense NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevel
from bilevel._core import trees
from bilevel._core.compilation import arithmetic
from bilevel._core.types import Rows
from bilevel.engine.loop import advance, draw_page, for_one_run, initial_state, run_key
from tests import cases
from tests.solvers.transcribed import KIND_NAMES

ROWS = {
    "all": Rows(),
    "a full block": Rows(jnp.int32(2), jnp.int32(1)),
    "the short block": Rows(jnp.int32(cases.N_INNER // cases.BATCH), jnp.int32(cases.N_OUTER // cases.BATCH)),
}


def points(problem):
    rng = np.random.default_rng(0)
    return [jax.tree.map(lambda leaf: leaf + rng.standard_normal(leaf.shape), problem.start) for _ in range(2)]


def oracles_of(name):
    problem = cases.PROBLEMS[name]()
    closed = problem.oracles.with_batches(cases.BATCH, "blocks")
    auto = cases.by_autodiff(name, problem).with_batches(cases.BATCH, "blocks")
    return problem, closed, auto


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", cases.PROBLEMS)
def test_every_kind_equals_autodiff_and_dense_numpy(name, rows):
    with arithmetic("float64"):
        problem, closed, auto = oracles_of(name)
        point, _ = points(problem)
        plain = cases.in_numpy(name, problem)
        by_oracles = [cases.every_kind(oracles, point, ROWS[rows]) for oracles in (closed, auto)]
        for kind, numpy_name in KIND_NAMES.items():
            level = "outer" if kind.startswith("outer") else "inner"
            drawn = getattr(ROWS[rows], level)
            samples = getattr(closed, f"{level}_samples")
            at = (np.asarray(point.inner_var), np.asarray(point.outer_var))
            if kind in ("hvp", "cross"):
                at = (*at, np.asarray(point.v))
            dense = getattr(plain, numpy_name)(*at, cases.indices(samples, drawn))
            for found in by_oracles:
                np.testing.assert_allclose(found[kind], dense, rtol=1e-12, atol=1e-13)
        z, x, v = trees.to_numpy(point)
        drawn = cases.indices(closed.inner_samples, ROWS[rows].inner)
        for found in by_oracles:
            grad, tangents = found["inner_tangents"]
            np.testing.assert_allclose(grad, plain.gz(z, x, drawn), rtol=1e-12, atol=1e-13)
            for tangent, along_z, along_x in zip(tangents, (v, np.cos(v)), (x, np.cos(x)), strict=True):
                dense = plain.hv(z, x, along_z, drawn) + plain.jf(z, x, along_x, drawn)
                np.testing.assert_allclose(tangent, dense, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", cases.PROBLEMS)
def test_differences_equal_two_directions(name):
    with arithmetic("float64"):
        problem, closed, auto = oracles_of(name)
        point, previous = points(problem)
        rows = ROWS["the short block"]
        found, expected = (cases.difference(oracles, point, previous, rows) for oracles in (closed, auto))
        cases.assert_trees_close(found, expected, rtol=1e-12, atol=1e-12)
        here, there = (cases.direction(auto, at, rows) for at in (point, previous))
        cases.assert_trees_close(expected, jax.tree.map(np.subtract, here, there), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("batch", [16, 48])
def test_small_products_of_one_run_are_sums_with_the_same_results(batch):
    with arithmetic("float64"):
        problem = bilevel.problems.penalty_selection(*cases.logistic_data(100, 100, dim=32), dtype="float64")
        plain = problem.oracles.with_batches(batch, "blocks")
        summed, rows = plain.for_one_run(), Rows(jnp.int32(1), jnp.int32(0))
        point, previous = points(problem)
        dots = [str(jax.make_jaxpr(oracles.direction)(point, rows)).count("dot_general") for oracles in (plain, summed)]
        assert dots == [6, 0]
        found, expected = (cases.difference(oracles, point, previous, rows) for oracles in (summed, plain))
        cases.assert_trees_close(found, expected, rtol=1e-12, atol=1e-13)
        found, expected = (cases.every_kind(oracles, point, rows) for oracles in (summed, plain))
        cases.assert_trees_close(found, expected, rtol=1e-12, atol=1e-13)


def test_passes_of_one_run_read_the_blocks_of_its_steps(monkeypatch):
    monkeypatch.setattr("bilevel.problems.penalized_linear.may_be_fused", lambda: True)
    with arithmetic("float64"):
        problem = bilevel.problems.penalty_selection(*cases.logistic_data(100, 90, dim=32), dtype="float64")
        plain = problem.oracles.with_batches(32, "blocks")
        point, _ = points(problem)
        found, expected = (cases.direction(oracles, point) for oracles in (plain.for_one_run(), plain))
        cases.assert_trees_close(found, expected, rtol=1e-12, atol=1e-13)
        direction = jax.jit(lambda oracles: oracles.direction(point))
        shuffled = problem.oracles.with_batches(32, "reshuffle")
        programs = [direction.lower(o).as_text() for o in (plain.for_one_run(), plain, shuffled.for_one_run())]
        # Blocks in the order of a pass have other weights: there the flat rows are read, at once.
        assert ["tensor<32x100xf64>" in program for program in programs] == [False, True, True]
        assert ["stablehlo.while" in program for program in programs] == [True, False, False]


def test_steps_of_one_run_have_no_small_products_and_those_that_a_sweep_batches_have():
    with arithmetic("float64"):
        problem = bilevel.problems.penalty_selection(*cases.logistic_data(100, 90, dim=32), dtype="float64")
        oracles = problem.oracles.with_batches(32, "blocks")
        solver = bilevel.SOBA(0.1, 1.0, 32).configure(problem).cast(problem.dtype)
        page = jax.eval_shape(lambda: draw_page(solver, oracles, run_key(0), np.int32(0), 9))
        state = jax.eval_shape(initial_state, solver, oracles, problem.start)
        positions = np.int32(0), np.int32(9)
        both = for_one_run(oracles), oracles
        found = [advance.find(solver, some, state, page, *positions) for some in both]
        programs = [program.lower(leaves).as_text() for program, leaves in found]
        assert ["dot_general" in program for program in programs] == [False, True]


@pytest.mark.parametrize("name", cases.PROBLEMS)
def test_finite_differences_agree_with_every_derivative(name):
    errors = cases.PROBLEMS[name]().check()
    assert set(errors) == {"inner_grad", "inner_grad_outer", "hvp", "cross", "outer_grad", "outer_grad_outer"}
    assert max(errors.values()) < 1e-6


def test_extreme_margins_stay_finite():
    problem = cases.logistic_selection("float32")
    with arithmetic("float32"):
        for scale in (-1e4, 1e4):
            point = problem.start._replace(inner_var=np.full(4, scale, np.float32))
            for oracles in (problem.oracles, cases.by_autodiff("logistic", problem)):
                assert all(np.all(np.isfinite(leaf)) for leaf in cases.direction(oracles, point))
                assert np.isfinite(oracles.outer_value(point))
