"""The descent lemmas and their constants; expectations are sums over all draws."""

from math import sqrt

import numpy as np
import pytest

from bilevel._core import trees
from bilevel._core.compilation import arithmetic
from bilevel._core.types import Point
from bilevel.theory import descent_constants, lyapunov, phi_v_smoothness, step_sizes
from tests.problems.test_constants import made
from tests.theory.enumeration import STARTS, Expected, Scalars, mild

pytestmark = pytest.mark.slow  # many compilations, and float64 in either mode


def largest_for_lemmas(found):
    """Return the largest steps that the lemmas permit, which are much larger than those of the theorem."""
    d = descent_constants(found)
    rho = min(d.B_v, 1 / d.Lambda_z)
    return rho, min(d.C_z, d.C_v, 1) * rho


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("shrink", [1.0, 0.1])
def test_descent_lemmas_hold_at_the_largest_steps_that_they_permit(mild_case, start, shrink):
    _, scalars, found = mild_case
    d, mu = descent_constants(found), found.mu_G
    rho, gamma = (shrink * step for step in largest_for_lemmas(found))
    e = Expected(scalars, start, rho, gamma, 3)
    (V_z, V_v, V_x), (s_z, s_v, s_x) = e.V.T, e.sums.T
    now = slice(None, -1)
    z = (1 - mu * rho / 2) * e.phi_z[now] - rho / 2 * (1 - d.Lambda_z * rho) * V_z + d.Lambda_z / 2 * gamma**2 * V_x
    z += rho**3 * d.beta_zz * s_z + gamma**2 * rho * (d.beta_zv * s_v + d.beta_zx * s_x)
    z += gamma**2 / rho * d.bar_zx * e.true_sq
    v = (1 - mu * rho / 16) * e.phi_v[now] - d.tilde_vv * rho * V_v + rho * d.alpha_vz * e.phi_z[now]
    v += rho**3 * (d.beta_vz * s_z + d.beta_vv * s_v) + gamma**2 * rho * d.beta_vx * s_x
    v += d.Lambda_v / 2 * gamma**2 * V_x + gamma**2 / rho * d.bar_vx * e.true_sq
    h = e.h[now] - gamma / 2 * e.g[now] + gamma * 2 * d.L_x**2 / mu * (e.phi_z[now] + e.phi_v[now])
    h += gamma * (rho**2 * (d.beta_hz * s_z + d.beta_hv * s_v) + gamma**2 * d.beta_hx * s_x)
    h -= gamma / 2 * (1 - found.L_h * gamma) * V_x
    for left, right in ((e.phi_z, z), (e.phi_v, v), (e.h, h)):
        assert np.all(left[1:] <= right * (1 + 1e-12) + 1e-14)


@pytest.mark.parametrize("start", STARTS)
def test_error_of_the_directions_is_bounded_by_the_squared_smoothness(start):
    """app:lemma:bound_error_directions prints L1_G instead of its square, and ||D_z||² twice."""
    scalars = Scalars(mild(inner_scale=300.0))
    found = scalars.problem.constants()
    g1, a = found.L1_G, found.L1_F**2
    rho, gamma = 0.001, 0.0003
    e = Expected(scalars, start, rho, gamma, 3)
    s_z, s_v, s_x = e.sums.T
    assert np.all(e.error[:, 0] <= g1**2 * (rho**2 * s_z + gamma**2 * s_x) + 1e-15)
    for part in (1, 2):
        right = 4 * rho**2 * (a * s_z + g1**2 * s_v) + 4 * gamma**2 * a * s_x
        assert np.all(e.error[:, part] <= right + 1e-15)
    printed = g1 * (rho**2 + gamma**2) * s_z
    assert np.all(e.error[1:, 0] > 5 * printed[1:])


def test_conditional_mean_of_the_estimate_has_a_cross_term():
    """app:eq:exp_norm_exp_d_x states E||E_k[D_x^k]||² = E||D_x(u^k)||² + E||D_x^(k-1) - D_x(u^(k-1))||²."""
    scalars = Scalars(mild(outer_scale=0.3, seed=4))
    excess = []
    for start in STARTS:
        e = Expected(scalars, start, 0.5, 0.01, 3)
        expected = [path.true[2][2] + path.estimates[1][2] - path.true[1][2] for path in e.paths]
        left = np.mean(np.square(expected))
        printed, corrected = e.true_sq[2] + e.error[1, 2], 2 * (e.true_sq[2] + e.error[1, 2])
        assert left <= corrected
        excess.append(left / printed - 1)
    assert max(excess) > 0.1 and min(excess) < -0.005, "either side may be the larger one"


def test_gradients_near_the_solution_satisfy_the_corrected_and_not_the_printed_bounds():
    """app:eq:4 and app:eq:delta_D omit a square of L1_G and a factor μ."""
    scalars = Scalars(mild(inner_scale=1e5))
    found = scalars.problem.constants()
    curvature, cross = (np.mean([getattr(row, part) for row in scalars.inner]) for part in ("zz", "xz"))
    phi = curvature / 2  # at distance 1 from z*, or from v*
    assert cross**2 <= 2 * found.L1_G**2 / found.mu_G * phi
    assert cross**2 > 2 * found.L1_G / found.mu_G * phi, "app:eq:4"
    assert curvature**2 <= 2 * found.L1_G * phi
    assert curvature**2 > 2 * found.L1_G / found.mu_G * phi, "app:eq:delta_D"


def test_phi_v_depends_on_x_although_the_printed_constant_is_0_on_quadratics(mild_case):
    """app:eq:9 has L2_F instead of L1_F, the bound of ||∇²F||: on quadratics the printed L'' is 0."""
    _, scalars, found = mild_case
    printed = 2 * (found.L_z_star + 1) ** 2 * (found.L2_G + found.L2_F) ** 2 / found.mu_G
    corrected = 2 * (found.L_z_star + 1) ** 2 * found.L1_F**2 / found.mu_G
    for z, v, x in STARTS:
        ahead, behind, here = (scalars.measures((z, v, x + move))[1] for move in (1e-5, -1e-5, 0.0))
        slope = (ahead - behind) / 2e-5
        assert printed * here < slope**2 <= corrected * here


def second_difference(function, point, direction, step=1e-3):
    ahead, here, behind = (function(point + t * step * direction) for t in (1, 0, -1))
    return abs(ahead - 2 * here + behind) / step**2


@pytest.mark.parametrize("name", ["quadratic", "logistic", "cleaning"])
def test_smoothness_of_phi_z_and_phi_v_bounds_second_differences(name):
    problem, found = made(name)
    d, steps = descent_constants(found), step_sizes(found, problem.n_inner, problem.n_outer)
    start = trees.to_numpy(problem.start, np.float64)
    shape, p = np.shape(start.inner_var), np.size(start.inner_var)
    rng = np.random.default_rng(0)
    largest = np.zeros(2)
    for _ in range(6):
        x = start.outer_var + 0.5 * rng.uniform(-1, 1, np.shape(start.outer_var))
        inner, direction = rng.standard_normal(p), rng.standard_normal(p + x.size)
        inner *= 0.5 * min(found.region.radius, found.R) / np.linalg.norm(inner)
        direction /= np.linalg.norm(direction)

        def gaps(w, shape=shape):
            part = w[:p].reshape(shape)
            return np.array(lyapunov(problem, Point(part, w[p:], part), steps)[2:4])

        largest = np.maximum(largest, second_difference(gaps, np.append(inner, x), direction))
    assert largest[0] <= d.Lambda_z and largest[1] <= d.Lambda_v


@pytest.mark.parametrize("name", ["quadratic", "logistic", "grouped", "cleaning", "worst case"])
def test_error_of_the_hypergradient_is_bounded_by_the_distances(name):
    problem, found = made(name)
    d = descent_constants(found)
    rng = np.random.default_rng(0)
    start = trees.to_numpy(problem.start, np.float64)
    solution = problem.exact_solver(start.outer_var, None)
    for size in (1e-3, 0.3, 1.0):
        off_z, off_v = size * rng.standard_normal((2, *np.shape(start.inner_var)))
        z, v = solution.inner_var + off_z, solution.v + off_v
        with arithmetic(np.float64):
            direction = problem.oracles.direction(Point(z, start.outer_var, v))
        error = np.sum((np.asarray(direction.outer_var) - solution.hypergrad) ** 2)
        assert error <= d.L_x**2 * (np.sum(off_z**2) + np.sum(off_v**2))


def test_the_printed_bound_of_rho_exceeds_the_inverse_smoothness_of_phi_v():
    """B_v as printed exceeds 1/Λ_v, which the proof assumes as an upper bound."""
    found = made("quadratic")[1]
    mu, g1, smoothness = found.mu_G, found.L1_G, phi_v_smoothness(found)
    e = g1 / mu**2 + mu**2 / (16 * g1)
    printed = e * min(2 / smoothness, mu / (sqrt(2 * g1) * smoothness))
    assert descent_constants(found).B_v <= 1 / smoothness < printed
