"""The steps of the theorem: the Lyapunov function decreases in expectation over all draws and along runs."""

import dataclasses
import itertools
from math import sqrt

import numpy as np
import pytest

import bilevel
from bilevel._core import trees
from bilevel._core.compilation import arithmetic
from bilevel._core.types import Point, Rows
from bilevel.theory import descent_constants, lyapunov, step_sizes
from paper.lyapunov import lyapunov_coefficients
from tests import cases
from tests.problems.test_constants import made
from tests.theory.enumeration import STARTS, Expected, mild, paths

pytestmark = pytest.mark.slow  # many compilations, and float64 in either mode

ALL = ["quadratic", "logistic", "grouped", "worst case", "cleaning"]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("q", [1, 10, 10_000])
def test_no_coefficient_of_the_lyapunov_inequality_is_positive(name, q):
    problem, found = made(name)
    steps = step_sizes(found, problem.n_inner, problem.n_outer, q)
    coefficients = lyapunov_coefficients(found, steps)
    assert coefficients.hypergrad <= -steps.gamma / 4
    assert max(coefficients[1:]) <= 0
    assert steps.rho <= descent_constants(found).B_v and steps.gamma <= steps.xi * steps.rho


def printed_terms(found, steps, q):
    """Return, for each printed term of th:cvg_rate, the coefficient that it makes positive and the changed steps."""
    d, mu, psi_z, psi_v = descent_constants(found), found.mu_G, steps.psi_z, steps.psi_v
    loose_xi = min(psi_v * mu**2 / (16 * d.L_x**2), psi_z * mu**2 / (24 * d.L_x**2), 1)
    free_rho = sqrt(1 / (12 * q * d.beta_vv))
    return {
        "psi_v, times alpha": ("phi_z", {"psi_v": d.alpha_vz * mu / 12 * psi_z}),
        "xi, with μ/2": ("phi_v", {"gamma": loose_xi * steps.rho}),
        "rho_bar, without tilde_vv": ("V_v", {"rho": free_rho, "gamma": steps.xi * free_rho}),
        "rho_bar, root of 1/(6 Λ_z)": ("V_z", {"rho": sqrt(1 / (6 * d.Lambda_z))}),
    }


TERMS = ["psi_v, times alpha", "xi, with μ/2", "rho_bar, without tilde_vv", "rho_bar, root of 1/(6 Λ_z)"]


@pytest.mark.parametrize("term", TERMS)
def test_printed_terms_of_the_theorem_make_a_coefficient_positive(term):
    problem, found = made("quadratic")
    q = 1 if "Λ_z" in term else 84
    steps = step_sizes(found, problem.n_inner, problem.n_outer, q)
    which, change = printed_terms(found, steps, q)[term]
    assert getattr(lyapunov_coefficients(found, steps), which) <= 0
    assert getattr(lyapunov_coefficients(found, dataclasses.replace(steps, **change)), which) > 0


def solved(x):
    """Return the point with φ_z = φ_v = 0 at x, at which only h can decrease."""
    solution = mild(outer_scale=0.3).exact_solver(np.array([x]))
    return np.array([solution.inner_var[0], solution.v[0], x])


@pytest.mark.parametrize("start", [*STARTS, solved(-1.0), solved(3.0)])
def test_a_period_decreases_the_expected_lyapunov_function_as_the_theorem_states(mild_case, start):
    problem, scalars, found = mild_case
    q = 3
    steps = step_sizes(found, problem.n_inner, problem.n_outer, q)
    e = Expected(scalars, start, steps.rho, steps.gamma, q)
    total = e.h + steps.psi_z * e.phi_z + steps.psi_v * e.phi_v
    expected = steps.gamma / 4 * e.g[:q].sum()
    assert expected > 1e-12, "the test requires a decrease above rounding errors"
    assert total[q] - total[0] <= -expected


def test_srba_takes_the_enumerated_steps(mild_case):
    problem, scalars, found = mild_case
    steps = step_sizes(found, problem.n_inner, problem.n_outer, 3)
    solver = steps.solver()
    ours = paths(scalars, STARTS[0], steps.rho, steps.gamma, 3)
    with arithmetic(np.float64):
        oracles = problem.oracles.with_batches(1, "iid")
        traced = solver.cast(np.float64)
        for path, (first, second) in zip(ours, itertools.product(scalars.draws, repeat=2), strict=True):
            state = traced.refresh(oracles, traced.init(oracles, problem.start), np.int32(0), None)
            for index, (i, j) in enumerate((first, second), 1):
                rows = Rows(np.array([i], np.int32), np.array([j], np.int32))
                state = traced.step(oracles, state, np.int32(index), rows)
            z, x, v = (float(part[0]) for part in state.point)
            np.testing.assert_allclose([z, v, x], path.points[-1], rtol=1e-13)


def refresh_points(problem, solver, periods, seed):
    """Return the points at which the periods of a run begin."""
    points = [problem.start]
    for period in range(1, periods + 1):
        result = bilevel.run(problem, solver, seed=seed, max_steps=period * solver.period, eval_every=10**6)
        points.append(result.point)
    return points


@pytest.fixture(params=["mild", "drawn"])
def quadratic_case(request, mild_case):
    """A quadratic on which x moves noticeably, and a random one on which it hardly moves."""
    if request.param == "mild":
        return mild_case[0], mild_case[2]
    problem = cases.quadratic()
    return problem, problem.constants()


def test_the_mean_over_seeds_decreases_at_every_refresh(quadratic_case):
    problem, found = quadratic_case
    steps = step_sizes(found, problem.n_inner, problem.n_outer, 20)
    totals, gradients = [], []
    for seed in range(4):
        values = [lyapunov(problem, point, steps) for point in refresh_points(problem, steps.solver(), 4, seed)]
        totals.append([value.total for value in values])
        gradients.append([value.hypergrad_norm_sq for value in values])
    fall = -np.diff(np.mean(totals, axis=0))
    # ∇h is almost constant during a period of such steps.
    expected = steps.gamma / 4 * steps.q * np.mean(gradients, axis=0)[:-1]
    assert np.all(fall >= expected) and np.all(expected > 0)


def test_full_batch_runs_decrease_the_lyapunov_function_in_every_step(quadratic_case):
    problem, found = quadratic_case
    steps = step_sizes(found, problem.n_inner, problem.n_outer, 1)
    solver = dataclasses.replace(steps.solver(), sampling="full")
    states = cases.trajectory(problem, solver, 60).states
    values = [lyapunov(problem, point, steps) for point in (problem.start, *(state.point for state in states))]
    totals = np.array([value.total for value in values])
    expected = steps.gamma / 4 * np.array([value.hypergrad_norm_sq for value in values[:-1]])
    assert np.all(-np.diff(totals) >= expected)
    assert values[-1].phi_z < values[0].phi_z and values[-1].value <= values[0].value


@pytest.mark.parametrize("name", ["quadratic", "logistic", "worst case", "cleaning"])
def test_phi_z_and_phi_v_are_as_defined_in_the_paper(name):
    """φ_z = G(z, x) - G(z*, x), φ_v = Ψ(v) - Ψ(v*); each at least μ/2 times a squared distance."""
    problem, found = made(name)
    steps = step_sizes(found, problem.n_inner, problem.n_outer)
    rng = np.random.default_rng(0)
    start = trees.to_numpy(problem.start, np.float64)
    shape = np.shape(start.inner_var)
    point = Point(rng.standard_normal(shape), start.outer_var, rng.standard_normal(shape))
    solution, value = problem.exact_solver(point.outer_var, None), lyapunov(problem, point, steps)
    at = Point(solution.inner_var, point.outer_var, solution.v)

    def psi(v):
        with arithmetic(np.float64):
            hvp, grad = problem.oracles.hvp(at._replace(v=v)), problem.oracles.outer_grad(at)
        return np.sum(v * np.asarray(hvp)) / 2 + np.sum(v * np.asarray(grad))

    np.testing.assert_allclose(value.phi_v, psi(point.v) - psi(solution.v), rtol=1e-9)
    with arithmetic(np.float64):
        gap = float(problem.oracles.inner_value(point)) - float(problem.oracles.inner_value(at))
    np.testing.assert_allclose(value.phi_z, gap, rtol=1e-9)
    assert value.phi_z >= found.mu_G / 2 * np.sum((point.inner_var - solution.inner_var) ** 2) * (1 - 1e-9)
    assert value.phi_v >= found.mu_G / 2 * np.sum((point.v - solution.v) ** 2) * (1 - 1e-9)
    total = solution.value + steps.psi_z * value.phi_z + steps.psi_v * value.phi_v
    np.testing.assert_allclose(value.total, total, rtol=1e-15)


def test_steps_are_proportional_to_the_inverse_root_of_the_period():
    """cor:sample_complexity multiplies ρ̄ and γ, which contain this factor, by (n + m)^(-1/2) again."""
    found = made("quadratic")[1]
    few, many = step_sizes(found, 10**6, 10**6), step_sizes(found, 4 * 10**6, 4 * 10**6)
    assert few.q == 2 * 10**6
    np.testing.assert_allclose(few.rho / many.rho, 2)
    np.testing.assert_allclose(few.gamma / many.gamma, 2)


def test_calls_per_period_equals_the_oracle_calls_of_a_run(mild_case):
    problem, _, found = mild_case
    steps = step_sizes(found, problem.n_inner, problem.n_outer, 7)
    result = bilevel.run(problem, steps.solver(), max_steps=7)
    assert sum(result.calls) == steps.calls_per_period


@pytest.mark.parametrize(
    "name", ["quadratic", *(pytest.param(n, marks=pytest.mark.slow) for n in ("logistic", "cleaning"))]
)
def test_the_steps_of_the_theorem_are_much_smaller_than_practical_steps(name):
    problem, found = made(name)
    steps = step_sizes(found, problem.n_inner, problem.n_outer)
    practical = bilevel.SRBA(0.05, 5.0, 8)
    values = bilevel.run(problem, practical, max_steps=1000).history["value"]
    assert values[-1] < values[0]
    assert 1e-9 < steps.rho < 1e-4 and steps.gamma < 1e-14 * steps.rho


def test_invalid_arguments_are_refused():
    problem, found = made("quadratic")
    with pytest.raises(ValueError, match="`q=0`"):
        step_sizes(found, 3, 3, 0)
    with pytest.raises(ValueError, match=r"`n=2\.5`"):
        step_sizes(found, 2.5, 3)
    free = dataclasses.replace(made("logistic")[1], R=None)
    with pytest.raises(ValueError, match=r"`constants\.R` is None"):
        step_sizes(free, 3, 3)
    with pytest.raises(ValueError, match="strongly_convex"):
        lyapunov(dataclasses.replace(problem, exact_solver=None), problem.start, step_sizes(found, 3, 3))
