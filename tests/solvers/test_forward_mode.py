"""ForwardMode: its gradients equal those of ITD, or are unbiased estimates of them."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevel
from bilevel._core.compilation import arithmetic
from tests import cases

STEPS = 4


@jax.jit
def unrolled(solver, oracles, start, draw, signs=None):
    """Return the gradient of one step, with these random directions instead of those that are drawn."""
    if signs is not None:
        object.__setattr__(solver, "directions", lambda *_: (signs, 1 / len(signs)))
    return solver.unroll(oracles, start, solver._no_tangents(start), draw)[1]


def gradient(problem, solver, *signs):
    with arithmetic("float64"):
        oracles = problem.oracles.with_batches(cases.BATCH, "blocks")
        solver = solver.configure(problem).cast("float64")
        draw = solver.draw(oracles, jax.random.key(0), jnp.int32(3))
        return np.asarray(unrolled(solver, oracles, problem.start, draw, *signs))


@pytest.mark.parametrize("name", ["logistic", pytest.param("quadratic", marks=pytest.mark.slow)])
def test_forward_mode_equals_itd_on_the_same_batches(name):
    problem, settings = cases.PROBLEMS[name](), {"n_inner_steps": STEPS}
    forward, reverse = bilevel.ForwardMode(0.2, 0.5, 8, **settings), bilevel.ITD(0.2, 0.5, 8, **settings)
    paths = [cases.trajectory(problem, solver, 10).states for solver in (forward, reverse)]
    for one, other in zip(*paths, strict=True):
        cases.assert_trees_close(one.point, other.point, rtol=1e-12, atol=1e-13)
    assert np.abs(np.subtract(paths[0][-1].point.outer_var, problem.start.outer_var)).max() > 0.01, "x moves"


@pytest.mark.slow
def test_forward_mode_is_the_derivative_of_the_unrolled_value():
    problem, solver = cases.logistic_selection(), bilevel.ForwardMode(0.2, 2.0, 8, n_inner_steps=STEPS)
    with arithmetic("float64"):
        oracles = problem.oracles.with_batches(8, "blocks")
        draw = solver.configure(problem).draw(oracles, jax.random.key(0), jnp.int32(3))

    @jax.jit
    def value(x):
        point = problem.start._replace(outer_var=x)
        for rows in draw.inner_loop:
            point = point._replace(inner_var=point.inner_var - 0.2 * oracles.inner_grad(point, rows))
        return oracles.outer_value(point, draw.outer)

    with arithmetic("float64"):
        x = np.asarray(problem.start.outer_var)
        slopes = [(value(x + 1e-5 * unit) - value(x - 1e-5 * unit)) / 2e-5 for unit in np.eye(x.size)]
    np.testing.assert_allclose(gradient(problem, solver), slopes, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_random_directions_are_unbiased(count):
    problem = cases.quadratic()
    exact = gradient(problem, bilevel.ForwardMode(0.2, 2.0, 8, n_inner_steps=STEPS))
    random = bilevel.ForwardMode(0.2, 2.0, 8, n_inner_steps=STEPS, n_directions=count)
    patterns = np.array(list(itertools.product([-1.0, 1.0], repeat=3)))
    # All patterns, or disjoint pairs of all patterns.
    found = [gradient(problem, random, signs) for signs in patterns.reshape(-1, count, 3)]
    np.testing.assert_allclose(np.mean(found, axis=0), exact, rtol=1e-12)
    assert np.std(found, axis=0).max() > 1e-3


def test_random_directions_are_signs_that_change_from_step_to_step():
    problem, solver = cases.quadratic(), bilevel.ForwardMode(n_directions=30)
    with arithmetic("float64"):
        oracles = problem.oracles.with_batches(8, "blocks")
        keys = [solver.draw(oracles, jax.random.key(0), jnp.int32(index)).key for index in range(2)]
        one, other = (np.asarray(solver.directions(np.zeros(40), key)[0]) for key in keys)
    assert one.shape == (30, 40) and set(one.ravel()) == {-1.0, 1.0}
    assert abs(one.mean()) < 4 / np.sqrt(one.size)
    assert abs(np.mean(one * other)) < 4 / np.sqrt(one.size)


@pytest.mark.slow
def test_in_real_time_with_frozen_x_the_gradient_becomes_exact():
    problem = cases.quadratic()
    frozen = {"outer_ratio": 1e30, "sampling": "full", "n_inner_steps": 500}
    run = cases.trajectory(problem, bilevel.ForwardMode(0.3, reset=False, **frozen), 5)
    state, oracles = run.states[-1], run.oracles
    with arithmetic("float64"):
        _, found, _ = run.solver.unroll(oracles, state.point, state.tangents, run.draws[-1])
    exact = problem.exact_solver(np.asarray(state.point.outer_var)).hypergrad
    np.testing.assert_allclose(found, exact, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("given", [{"n_directions": 2}, {"warm_start": False}])
def test_real_time_with_random_directions_or_cold_starts_is_refused(given):
    with pytest.raises(ValueError, match=r"`ForwardMode\(reset=False\)`: carries the tangents of all coordinates"):
        bilevel.run(cases.quadratic(), bilevel.ForwardMode(reset=False, **given), max_steps=1)


def test_as_many_directions_as_coordinates_are_the_coordinates():
    problem = cases.quadratic()
    exact, many = (bilevel.ForwardMode(n_directions=count).configure(problem) for count in (None, 50))
    assert exact == many and exact.n_directions == 3
