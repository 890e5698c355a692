"""V-PBGD, G-PBGD and MEHA: their bias, from dense matrices, and inner problems that are not strongly convex."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevel
from bilevel._core.compilation import arithmetic
from tests import cases
from tests.solvers.test_convergence import tiny
from tests.solvers.transcribed import TRANSCRIPTIONS, start_of
from tests.transcription.problems import DoubleWell


def gap_penalty(exact, weight=None):
    """Return the matrices of the penalty G - min G: its Hessian in z, and its cross derivative along z - z*."""
    inner = exact.inner
    return inner.a_inner, inner.b if weight is None else inner.b @ weight


def gradient_penalty(exact):
    """Return the matrices of the penalty ||∇z G||² / 2."""
    inner = exact.inner
    return inner.a_inner @ inner.a_inner, inner.b @ inner.a_inner


def moreau_penalty(exact, gamma):
    """Return the matrices of the penalty G - (its Moreau envelope)."""
    inner = exact.inner
    weight = gamma * inner.a_inner @ np.linalg.inv(np.eye(8) + gamma * inner.a_inner)
    return inner.a_inner @ weight, inner.b @ weight


PENALTIES = {"VPBGD": gap_penalty, "GPBGD": gradient_penalty}


def stationary(exact, matrices, gamma, x=None):
    """Return z at which F + γ penalty is stationary, at ``x`` or at the x where it is too; x; the derivative in x."""
    (in_z, in_x), outer, p = matrices, exact.outer, len(exact.offset)
    z_part = np.hstack([outer.a_inner + gamma * in_z, outer.b.T - gamma * in_z @ exact.jacobian])
    x_part = np.hstack([outer.b + gamma * in_x, outer.a_outer - gamma * in_x @ exact.jacobian])
    z_constant = outer.linear_inner - gamma * in_z @ exact.offset
    x_constant = outer.linear_outer - gamma * in_x @ exact.offset
    if x is None:
        z, x = np.split(-np.linalg.solve(np.vstack([z_part, x_part]), np.r_[z_constant, x_constant]), [p])
    else:
        z = -np.linalg.solve(z_part[:, :p], z_part[:, p:] @ x + z_constant)
    return SimpleNamespace(z=z, x=x, gradient=x_part @ np.r_[z, x] + x_constant)


@pytest.mark.parametrize("name", PENALTIES)
def test_the_bias_of_a_penalized_gradient_is_of_first_order(name):
    problem = tiny(0)
    exact, x = problem.exact_solver, np.array([1.0, -1.0, 0.5, 2.0])
    solution = exact(x)

    def bias(gamma):
        """Return the error of the direction in which the solver moves x, if z and w are exact."""
        solver = bilevel.SOLVERS[name](0.1, 1.0, penalty=gamma)
        at = stationary(exact, PENALTIES[name](exact), gamma, x)
        with arithmetic("float64"):
            state = solver.init(problem.oracles, bilevel.Point(at.z, x, np.zeros(8)))
            if name == "VPBGD":
                state = state._replace(w=np.asarray(solution.inner_var))
            draw = jax.eval_shape(lambda: solver.draw(problem.oracles.with_batches(1, "full"), jax.random.key(0), 0))
            moved = jax.jit(solver.step)(problem.oracles, state, np.int32(0), draw)
        direction = (x - np.asarray(moved.point.outer_var)) * gamma / 0.1
        np.testing.assert_allclose(direction, at.gradient, rtol=1e-6, atol=1e-9)
        return np.linalg.norm(direction - solution.hypergrad)

    np.testing.assert_allclose(bias(2000.0) / bias(4000.0), 2, rtol=0.1)
    assert bias(4000.0) < 0.05 * np.linalg.norm(solution.hypergrad)


CASES = {
    "VPBGD": (bilevel.VPBGD(0.5, 0.1, penalty=10.0), None),
    "VPBGD published": (bilevel.VPBGD(0.5, 0.1, penalty=100.0, n_inner_steps=20, warm_start=False), 20),
    "GPBGD": (bilevel.GPBGD(0.5, 0.1, penalty=10.0), None),
    "GPBGD ramp": (bilevel.GPBGD(0.5, 0.1, penalty=100.0, ramp=500), None),
}


@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.slow if " " in case else ()) for case in CASES])
def test_penalty_methods_stop_at_the_bias_of_their_penalty(case):
    problem, (solver, times) = tiny(0), CASES[case]
    exact = problem.exact_solver
    matrices = PENALTIES[case.split()[0]](exact)
    if times:  # w - z* is what its loop leaves of z - z*
        left = np.linalg.matrix_power(np.eye(8) - solver.step_size * exact.inner.a_inner, times)
        matrices = gap_penalty(exact, np.eye(8) - left)
    expected = stationary(exact, matrices, solver.penalty).x
    steps = 30_000 if solver.penalty > 10 else 2000
    result = bilevel.run(problem, solver, max_steps=steps, eval_every=steps)
    np.testing.assert_allclose(result.point.outer_var, expected, atol=1e-6)
    floor = np.sum(exact(expected).hypergrad ** 2)
    np.testing.assert_allclose(result.history["hypergrad_norm_sq"][-1], floor, rtol=1e-3)
    assert 1e-3 * solver.penalty**-1 < floor < 0.2 * result.history["hypergrad_norm_sq"][0]


@pytest.mark.parametrize("strength", [10.0, pytest.param(1000.0, marks=pytest.mark.slow)])
def test_the_alternating_form_stops_at_the_same_bias_with_a_step_that_does_not_shrink_with_the_penalty(strength):
    problem = tiny(0)
    exact = problem.exact_solver
    solver = bilevel.F2SA(0.5, 0.5, schedule="constant", lambda_0=strength, sampling="full")
    result = bilevel.run(problem, solver, max_steps=400, eval_every=400)
    np.testing.assert_allclose(result.point.outer_var, stationary(exact, gap_penalty(exact), strength).x, atol=1e-8)
    assert result.history["hypergrad_norm_sq"][-1] < 0.1 * result.history["hypergrad_norm_sq"][0]


def meha_run(steps, **settings):
    problem = tiny(0)
    solver = bilevel.MEHA(0.5, 0.5, **settings)
    result = bilevel.run(problem, solver, max_steps=steps, eval_every=steps)
    return problem.exact_solver, result.point.outer_var, result.history["hypergrad_norm_sq"][-1]


def test_meha_with_a_constant_weight_stops_at_the_bias_of_its_penalty():
    exact, x, found = meha_run(2000, gamma=1.0, c_0=10.0, c_power=0)
    expected = stationary(exact, moreau_penalty(exact, 1.0), 10.0).x
    np.testing.assert_allclose(x, expected, atol=1e-8)
    np.testing.assert_allclose(found, np.sum(exact(expected).hypergrad ** 2), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("gamma", [1.0, 10.0])
def test_meha_with_a_growing_weight_follows_the_bias_of_its_penalty(gamma):
    steps = 30_000
    exact, _, found = meha_run(steps, gamma=gamma)
    floor = np.sum(exact(stationary(exact, moreau_penalty(exact, gamma), steps**0.48).x).hypergrad ** 2)
    np.testing.assert_allclose(found, floor, rtol=0.1)
    assert {1.0: 1e-3, 10.0: 1e-4}[gamma] < floor < {1.0: 0.1, 10.0: 5e-3}[gamma]


def double_well():
    """Return a problem whose inner level has negative curvature at the start, and its transcription."""

    def inner_loss(z, x, row):
        return jnp.sum((z**2 - 1) ** 2) / 4 + (x - row) @ z

    def outer_loss(z, x, row):
        return (jnp.sum((z - row) ** 2) + jnp.sum(x**2)) / 2

    rng = np.random.default_rng(0)
    rows = rng.normal(size=(20, 3)), 1.2 + 0.3 * rng.normal(size=(12, 3))
    start = np.array([0.1, -0.1, 0.3]), np.array([0.5, -1.0, 0.2])
    problem = bilevel.BilevelProblem.from_losses(inner_loss, outer_loss, *rows, *start, dtype="float64")
    levels = problem.oracles.inner_samples.leaves, problem.oracles.outer_samples.leaves
    return problem, DoubleWell(*(np.asarray(jax.tree.leaves(level)[0], np.float64).T for level in levels))


NONCONVEX = {
    "MEHA": bilevel.MEHA(0.1, 0.5, cases.BATCH, gamma=0.4),
    "MEHA blocks": bilevel.MEHA(0.1, 0.5, cases.BATCH, gamma=0.4, sampling="blocks"),
    "VPBGD": bilevel.VPBGD(0.1, 0.5, cases.BATCH, n_inner_steps=2),
    "GPBGD": bilevel.GPBGD(0.1, 0.5, cases.BATCH, penalty=5.0, sampling="blocks"),
}


@pytest.mark.parametrize("case", cases.marked(NONCONVEX, quick=("MEHA",)))
def test_steps_on_an_inner_problem_that_is_not_convex_equal_the_transcription(case):
    (problem, plain), solver = double_well(), NONCONVEX[case]
    assert np.min(np.diag(plain._hessian(*start_of(problem), None))) < -0.7
    run = cases.trajectory(problem, solver, 20)
    settings = {"step_size": solver.step_size, "outer_ratio": solver.outer_ratio}
    expected = TRANSCRIPTIONS[type(solver).__name__](plain, run, *start_of(problem), settings)
    for state, step in zip(run.states, expected, strict=True):
        np.testing.assert_allclose(state.point.inner_var, step["inner_var"], rtol=1e-10)
        np.testing.assert_allclose(state.point.outer_var, step["outer_var"], rtol=1e-10)


def test_meha_reports_the_point_that_is_nearer_to_the_minimizer_of_g():
    problem, gamma = tiny(0), 5.0
    result = bilevel.run(problem, bilevel.MEHA(0.5, 0.5, gamma=gamma, c_power=0), max_steps=3000, eval_every=3000)
    z, y, x = map(np.asarray, (result.state.point.inner_var, result.state.y, result.state.point.outer_var))
    np.testing.assert_array_equal(result.point.inner_var, y)
    matrix = np.eye(z.size) + gamma * problem.exact_solver.inner.a_inner
    best = problem.exact_solver(np.asarray(x)).inner_var
    np.testing.assert_allclose(y - best, np.linalg.solve(matrix, z - best), atol=1e-8)


def test_meha_approaches_a_stationary_point_of_a_problem_that_is_not_convex():
    problem, plain = double_well()
    point = bilevel.run(problem, bilevel.MEHA(0.1, 0.1, gamma=0.4), max_steps=20_000, eval_every=20_000).point
    z, x = np.asarray(point.inner_var), np.asarray(point.outer_var)
    curvature = 3 * z**2 - 1
    assert np.all(curvature > 0.5) and np.linalg.norm(plain.gz(z, x)) < 0.01
    hypergradient = plain.fx(z, x) - plain.fz(z, x) / curvature
    assert np.linalg.norm(hypergradient) < 1e-3


def test_v_pbgd_solves_an_inner_problem_with_many_minimizers():
    """G has rank 2 in three unknowns; the stationary point of F + γ (G - min G) is that of a dense matrix."""
    rng = np.random.default_rng(3)
    a, c, gamma = rng.normal(size=(9, 2)) @ rng.normal(size=(2, 3)), rng.normal(size=(9, 2)), 10.0
    target = np.array([1.0, -1.0, 0.5])

    def inner_loss(z, x, row):
        return (row[:3] @ z - row[3:] @ x) ** 2 / 2

    def outer_loss(z, x, row):
        return (jnp.sum((z - row) ** 2) + jnp.sum((x - 1) ** 2)) / 2

    data = np.hstack([a, c]), target[None]
    problem = bilevel.BilevelProblem.from_losses(
        inner_loss, outer_loss, *data, np.zeros(3), np.zeros(2), dtype="float64"
    )
    solver = bilevel.VPBGD(0.1, 1.0, penalty=gamma)
    point = bilevel.run(problem, solver, max_steps=5000, eval_every=5000).point
    gap = a.T @ a, -a.T @ c, c.T @ a @ np.linalg.pinv(a.T @ a) @ a.T @ c  # of 9 (G - min G), in blocks
    matrix = np.eye(5) + gamma / 9 * np.block([[gap[0], gap[1]], [gap[1].T, gap[2]]])
    z, x = np.split(np.linalg.solve(matrix, np.r_[target, 1, 1]), [3])
    np.testing.assert_allclose(point.outer_var, x, atol=1e-8)
    residual = a.T @ (a @ np.asarray(point.inner_var) - c @ x)
    assert np.linalg.norm(residual) < 1e-6 < np.linalg.norm(a.T @ (a @ z - c @ x)), "w minimizes G, and z does not"
