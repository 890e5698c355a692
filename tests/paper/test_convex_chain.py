"""The chain with a strongly convex h: its closed forms, and runs that stay above its lower bound."""

import numpy as np
import pytest

import bilevel
from bilevel._core.compilation import arithmetic
from paper.convex_chain import convex_chain, eigenvalues, gradient_floors, minimizer, required_derivatives
from tests import cases

SETTINGS = [(0.1, 1e-2), (0.03, 0.1), (0.5, 1e-3)]


def chain(dim=60, inner_curvature=0.1, outer_curvature=1e-2):
    settings = {"inner_curvature": inner_curvature, "outer_curvature": outer_curvature}
    return convex_chain(dim, **settings, dtype="float64")


@pytest.mark.parametrize(("mu_y", "mu_x"), SETTINGS)
@pytest.mark.parametrize("dim", [1, 7, 60])
def test_the_minimizer_and_the_constants_are_those_of_the_dense_matrices(dim, mu_y, mu_x):
    problem = chain(dim, mu_y, mu_x)
    exact_solver, known = problem.exact_solver, problem.info
    np.testing.assert_allclose(minimizer(dim, problem.oracles.scales), exact_solver.minimizer, rtol=1e-9)
    curvatures = np.linalg.eigvalsh(exact_solver.hessian)
    np.testing.assert_allclose([known["mu_h"], known["L_h"]], curvatures[[0, -1]], rtol=1e-9)
    inner = np.linalg.eigvalsh(exact_solver.inner.a_inner)
    np.testing.assert_allclose(known["mu_G"], inner[0], rtol=1e-9)
    assert inner[-1] <= problem.oracles.largest_curvature
    assert np.linalg.norm(exact_solver.inner.b, 2) <= 1
    assert mu_x <= known["mu_h"] and known["L_h"] <= mu_x + 0.25 / (mu_y * (1 - mu_y)) * (1 + 1e-9)


def test_derivatives_equal_finite_differences_and_those_of_the_dense_matrices():
    problem = chain(9)
    assert max(problem.check().values()) < 1e-8
    rng, exact = np.random.default_rng(0), problem.exact_solver
    z, x, v = rng.standard_normal((3, 9))
    with arithmetic(problem.dtype):
        found = cases.direction(problem.oracles, bilevel.Point(z, x, v))
    expected = exact.inner.a_inner @ z + exact.inner.b.T @ x + exact.inner.linear_inner
    np.testing.assert_allclose(found.inner_var, expected, atol=1e-12)
    expected = exact.inner.b @ v + exact.outer.a_outer @ x + exact.outer.linear_outer
    np.testing.assert_allclose(found.outer_var, expected, atol=1e-12)
    expected = exact.inner.a_inner @ v + exact.outer.a_inner @ z + exact.outer.linear_inner
    np.testing.assert_allclose(found.v, expected, atol=1e-12)


def test_the_coordinates_of_the_minimizer_decrease_as_slowly_as_both_constants_imply():
    for mu in (0.1, 0.05, 0.025):
        for mu_x in (1e-1, 1e-2):
            problem = chain(4, mu, mu_x)
            np.testing.assert_allclose(1 - problem.info["q"], 2 * mu * np.sqrt(mu_x), rtol=0.1)


def test_the_floor_is_the_least_gradient_over_the_first_coordinates():
    problem = chain(12)
    floors, exact = gradient_floors(problem), problem.exact_solver
    right = exact.hessian @ exact.minimizer
    for k in range(13):
        best = np.linalg.lstsq(exact.hessian[:, :k], right, rcond=None)[0] if k else np.zeros(0)
        np.testing.assert_allclose(floors[k], np.sum((exact.hessian[:, :k] @ best - right) ** 2), atol=1e-14)
    assert required_derivatives(problem, floors[5]) == 4 and required_derivatives(problem, 1.0) == 0
    # The bound by the tail of x*, which is larger than 0 in closed form.
    tails = np.append(np.cumsum(minimizer(12, problem.oracles.scales)[::-1] ** 2)[::-1], 0)
    assert np.all(floors >= problem.info["mu_h"] ** 2 * tails - 1e-14)


def derivatives(calls):
    return calls.inner_grad + calls.hvp + calls.cross + calls.inner_grad_outer


@pytest.mark.parametrize(
    "solver",
    [
        bilevel.AccBiO(1.0, 3.0, n_inner_steps=2, n_v_steps=1),
        pytest.param(bilevel.SRBA(0.5, 5.0, 1, period=1), marks=pytest.mark.slow),
        pytest.param(bilevel.AmIGO(0.5, 5.0, 1, n_inner_steps=3, sampling="full"), marks=pytest.mark.slow),
        pytest.param(bilevel.ITD(0.5, 5.0, 1, n_inner_steps=3, sampling="full"), marks=pytest.mark.slow),
    ],
)
def test_a_derivative_reveals_at_most_one_more_coordinate(solver):
    problem = chain(100)
    run, floors = bilevel.Run(problem, solver), gradient_floors(problem)
    for _ in range(8):
        run.advance(1)
        revealed = int(derivatives(run.calls)) + 1
        for part in run.point:
            assert not np.any(np.asarray(part)[revealed:])
        gradient = problem.exact_solver(np.asarray(run.point.outer_var)).hypergrad
        assert np.sum(gradient**2) >= floors[revealed]
    assert np.count_nonzero(run.point.outer_var) > 3


def test_acc_bio_converges_within_a_few_times_the_bound():
    problem = chain(150, 0.1, 0.1)
    epsilon = 1e-6 * gradient_floors(problem)[0]
    solver = bilevel.AccBiO(1.0, problem.info["L_h"], n_inner_steps=6, n_v_steps=6)
    result = bilevel.run(problem, solver, stop=epsilon, max_steps=400, eval_every=1)
    assert result.status == "converged"
    assert 1 < derivatives(result.calls) / required_derivatives(problem, epsilon) < 20


def test_an_inner_curvature_that_is_not_below_the_smoothness_is_refused():
    with pytest.raises(ValueError, match=r"`inner_curvature=1.0`: must be below 1"):
        convex_chain(5, inner_curvature=1.0)


def test_eigenvalues_of_the_chain_are_those_of_its_matrix():
    matrix = np.eye(6) - np.eye(6, k=-1)
    np.testing.assert_allclose(eigenvalues(6), np.linalg.eigvalsh(matrix @ matrix.T), atol=1e-12)
