"""The chain with delays: its paths, its closed forms, and runs that stay above its lower bound."""

import numpy as np
import pytest

import bilevel
from bilevel._core.compilation import arithmetic
from paper.delayed_chain import delayed_chain, largest_gain, path_matrix
from paper.worst_case import worst_case
from tests import cases
from tests.paper.test_convex_chain import derivatives

EPSILON = 2e-5  # T = 59 at κ = 16


def delayed(epsilon=EPSILON, **settings):
    return delayed_chain(epsilon, **({"inner_curvature": 1 / 16} | settings), dtype="float64")


def dense_path(mu, delay):
    diagonal, beside = path_matrix(mu, delay)
    return np.diag(diagonal) + np.diag(beside, 1) + np.diag(beside, -1)


@pytest.mark.parametrize("delay", [2, 3, 4, 8])
@pytest.mark.parametrize("mu", [1 / 8, 1 / 100])
def test_paths_have_eigenvalues_between_mu_and_1_and_the_gain_of_the_formula(mu, delay):
    matrix = dense_path(mu, delay)
    values = np.linalg.eigvalsh(matrix)
    np.testing.assert_allclose(values[[0, -1]], [mu, 1], rtol=1e-9)
    np.testing.assert_allclose(np.linalg.inv(matrix)[0, -1], largest_gain(mu, delay), rtol=1e-9)


def test_no_path_has_a_larger_gain():
    rng, mu, delay = np.random.default_rng(0), 0.05, 5
    for _ in range(300):
        matrix = np.diag(rng.uniform(0, 1, delay))
        beside = rng.uniform(0, 1, delay - 1)
        matrix += np.diag(beside, 1) + np.diag(beside, -1)
        low, *_, high = np.linalg.eigvalsh(matrix)
        matrix = mu * np.eye(delay) + (1 - mu) / (high - low) * (matrix - low * np.eye(delay))
        assert abs(np.linalg.inv(matrix)[0, -1]) <= largest_gain(mu, delay)


def test_h_is_that_of_the_worst_case_with_a_larger_smoothness():
    problem = delayed()
    plain = worst_case(1, EPSILON, smoothness=problem.info["gain"] ** 2, dtype="float64")
    assert problem.info["T"] == plain.info["T"] and problem.info["L_h"] == plain.info["value_smoothness"]
    for seed in range(3):
        x = 3 * plain.info["beta"] * np.random.default_rng(seed).standard_normal(problem.start.outer_var.size)
        found, expected = problem.exact_solver(x), plain.exact_solver(x)
        np.testing.assert_allclose(found.value, expected.value, rtol=1e-10)
        np.testing.assert_allclose(found.hypergrad, expected.hypergrad, atol=1e-10 * np.abs(expected.hypergrad).max())
        scale = np.linalg.norm(found.inner_var)
        assert found.inner_residual < 1e-12 * scale and found.v_residual < 1e-12 * np.linalg.norm(found.v)


@pytest.mark.slow
def test_derivatives_equal_finite_differences_and_are_as_smooth_as_stated():
    problem = delayed(delay=3)
    assert max(problem.check().values()) < 1e-6
    x, size = problem.start.outer_var, problem.start.inner_var.size
    units = np.eye(size)
    with arithmetic("float64"):
        hessian = np.array([problem.oracles.curve(unit) for unit in units])
        cross = np.array([problem.oracles.force(unit) for unit in np.eye(x.size)])
    np.testing.assert_allclose(hessian, hessian.T, atol=1e-15)
    np.testing.assert_allclose(np.linalg.eigvalsh(hessian)[[0, -1]], [1 / 16, 1], rtol=1e-9)
    np.testing.assert_allclose(np.linalg.norm(cross, 2), 1, rtol=1e-12)


@pytest.mark.slow
def test_the_gradient_of_f_is_1_lipschitz():
    problem, rng = delayed(), np.random.default_rng(0)
    width = problem.info["gain"] * problem.oracles.scales.width
    largest, base = 0.0, np.full(problem.start.inner_var.size, -width)  # where every Γ'' is largest
    for scale in (1e-4, 1.0, 10.0):
        move = scale * width * rng.standard_normal(base.size)
        for _ in range(20):  # the power method, where the move is short
            points = [bilevel.Point(z, problem.start.outer_var, base) for z in (base + move, base)]
            with arithmetic(np.float64):
                ahead, here = (np.asarray(cases.every_kind(problem.oracles, one)["outer_grad"]) for one in points)
            change = ahead - here
            largest = max(largest, np.linalg.norm(change) / np.linalg.norm(move))
            move = scale * width * change / np.linalg.norm(change)
    np.testing.assert_allclose(largest, (3 + np.sqrt(5)) / 10, rtol=0.02)


@pytest.mark.parametrize(
    "solver",
    [
        bilevel.AmIGO(1.0, 20.0, 1, n_inner_steps=2, sampling="full"),
        pytest.param(bilevel.SRBA(1.0, 40.0, 1, period=1), marks=pytest.mark.slow),
        pytest.param(bilevel.ITD(1.0, 20.0, 1, n_inner_steps=5, sampling="full"), marks=pytest.mark.slow),
        pytest.param(bilevel.BOME(1.0, 20.0, 1, n_inner_steps=3), marks=pytest.mark.slow),
        pytest.param(bilevel.F2SA(1.0, 20.0, 1, n_inner_steps=3, sampling="full"), marks=pytest.mark.slow),
    ],
)
def test_each_coordinate_of_x_needs_the_delay_and_one_more_derivative(solver):
    problem = delayed(delay=3)
    run, floor = bilevel.Run(problem, solver), 2 * EPSILON
    for _ in range(12):
        run.advance(1)
        x = np.asarray(run.point.outer_var)
        reached = int(np.max(np.arange(1, x.size + 1) * (x != 0)))
        assert derivatives(run.calls) >= 1 + (reached - 1) * 4 if reached else True
        assert reached >= problem.info["T"] or np.sum(problem.exact_solver(x).hypergrad ** 2) >= floor * (1 - 1e-12)
    assert 1 < reached < problem.info["T"]


@pytest.mark.slow
def test_no_run_is_stationary_before_the_bound_and_one_is_after_it():
    problem = delayed()
    solver = bilevel.AmIGO(1.0, problem.info["L_h"], 1, n_inner_steps=4, sampling="full")
    result = bilevel.run(problem, solver, stop=EPSILON, max_steps=100_000, eval_every=20)
    assert result.status == "converged"
    assert derivatives(result.calls) > problem.info["derivative_bound"] == 1 + (problem.info["T"] - 1) * 3


def test_the_bound_grows_like_kappa_to_the_five_halves():
    """In units of 1/ε: T is proportional to c², and the delay to √κ."""
    kappas = np.array([1e4, 4e4, 16e4])
    bounds = [largest_gain(1 / kappa, round(kappa**0.5 / 2)) ** 2 * (kappa**0.5 / 2 + 1) for kappa in kappas]
    np.testing.assert_allclose(np.diff(np.log(bounds)) / np.log(4), 2.5, atol=0.1)


@pytest.mark.parametrize("settings", [{"inner_curvature": 0.3}, {"delay": 1}, {"delay": 30}])
def test_problems_without_amplified_signals_are_refused(settings):
    with pytest.raises(ValueError, match=r"`inner_curvature=.*take a smaller `inner_curvature`"):
        delayed(**settings)
