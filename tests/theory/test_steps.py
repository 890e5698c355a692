"""The theorem's steps: every expectation below is a sum over all draws, so an inequality holds or it does not."""

import dataclasses
import itertools
from math import sqrt

import jax
import numpy as np
import pytest

import bilevel
from bilevel import _tree as trees
from bilevel._precision import arithmetic
from bilevel._types import Point, Rows
from bilevel.oracles import Samples
from bilevel.problems.base import BilevelProblem
from bilevel.problems.quadratic import Factors, Means, QuadraticExactSolver, QuadraticOracles
from bilevel.theory.steps import descent_constants, lyapunov, lyapunov_coefficients, phi_v_smoothness, step_sizes
from tests import cases
from tests.problems.test_constants import made

pytestmark = pytest.mark.slow  # many compilations, and float64 in either mode


def mild(n=3, m=2, inner_scale=1.0, outer_scale=1.0, seed=0, spread=0.3):
    """A quadratic in few dimensions whose rows are nearly alike: the theory's steps are as large as they get."""
    rng = np.random.default_rng(seed)

    def level(count, scale):
        def rows(mean):
            return mean + spread * rng.standard_normal((count, 1))

        factors = [rows(1.0), rows(1.0), rows(0.3), rows(0.3), rows(0.5), rows(-0.5)]
        return Factors(*(sqrt(scale) * part for part in factors[:4]), *(scale * part for part in factors[4:]))

    inner, outer = level(n, inner_scale), level(m, outer_scale)
    with arithmetic(np.float64):
        levels = [
            Samples(jax.tree.map(jax.numpy.asarray, rows), len(rows.a), (0,) * 6, np.dtype(np.float64))
            for rows in (inner, outer)
        ]
    start = Point(np.array([1.0]), np.array([-1.0]), np.array([0.5]))
    return BilevelProblem(QuadraticOracles(*levels), start, QuadraticExactSolver(Means.of(inner), Means.of(outer)))


class Row:
    """One row of a mild quadratic as scalars: ½ a² z² + ½ c² x² + e f x z + linear terms."""

    def __init__(self, leaves, row):
        a, c, e, f, dz, dx = (np.asarray(leaf)[row, 0] for leaf in leaves)
        self.zz, self.xx, self.xz, self.dz, self.dx = a**2, c**2, e * f, dz, dx

    def grad(self, z, x):
        return self.zz * z + self.xz * x + self.dz, self.xx * x + self.xz * z + self.dx


class Scalars:
    """A mild quadratic written anew with numbers for z, v and x."""

    def __init__(self, problem):
        self.problem = problem
        oracles = problem.oracles
        self.inner = [Row(oracles.inner_samples.leaves, i) for i in range(problem.n_inner)]
        self.outer = [Row(oracles.outer_samples.leaves, j) for j in range(problem.n_outer)]
        self.draws = list(itertools.product(range(problem.n_inner), range(problem.n_outer)))

    def sampled(self, u, i, j):
        z, v, x = u
        inner, (f_z, f_x) = self.inner[i], self.outer[j].grad(z, x)
        return np.array([inner.grad(z, x)[0], inner.zz * v + f_z, inner.xz * v + f_x])

    def full(self, u):
        return np.mean([self.sampled(u, i, j) for i, j in self.draws], axis=0)

    def measures(self, u):
        """φ_z, φ_v, h and ||∇h||²."""
        z, v, x = u
        reference = self.problem.exact_solver(np.array([x]))
        curvature = np.mean([row.zz for row in self.inner])
        off = np.array([z - reference.inner_var[0], v - reference.v[0]])
        return [*(curvature * off**2 / 2), reference.value, reference.hypergrad[0] ** 2]


@dataclasses.dataclass
class Path:
    """One sequence of draws: iterates, estimates D, true D, by step."""

    points: list
    estimates: list
    true: list


def paths(scalars, u, rho, gamma, q):
    """All sequences of draws of a period of SRBA from u, each as likely as the others; v is not projected."""
    step = np.array([rho, rho, gamma])
    found = [Path([u], [], [])]
    for k in range(q):
        longer = []
        for path in found:
            here = path.points[-1]
            true = scalars.full(here)
            for i, j in [(None, None)] if k == 0 else scalars.draws:
                estimate = true
                if k > 0:
                    change = scalars.sampled(here, i, j) - scalars.sampled(path.points[-2], i, j)
                    estimate = path.estimates[-1] + change
                moved = here - step * estimate
                longer.append(Path([*path.points, moved], [*path.estimates, estimate], [*path.true, true]))
        found = longer
    return found


class Expected:
    """Means over all paths of what the lemmas speak of, as arrays over the steps of a period."""

    def __init__(self, scalars, u, rho, gamma, q):
        self.paths = paths(scalars, u, rho, gamma, q)
        measures = np.mean([[scalars.measures(point) for point in path.points] for path in self.paths], axis=0)
        self.phi_z, self.phi_v, self.h, self.g = measures.T
        estimates = np.array([path.estimates for path in self.paths])
        true = np.array([path.true for path in self.paths])
        self.V = np.mean(estimates**2, axis=0)
        self.sums = np.vstack([np.zeros(3), np.cumsum(self.V, axis=0)])[:-1]
        self.error = np.mean((estimates - true) ** 2, axis=0)
        self.true_sq = np.mean(true[:, :, 2] ** 2, axis=0)


@pytest.fixture(scope="module")
def mild_case():
    problem = mild(outer_scale=0.3)
    return problem, Scalars(problem), problem.constants()


STARTS = [np.array(u) for u in ([1.0, 0.5, -1.0], [-2.0, 0.0, 0.3], [0.1, -1.0, 2.0], [5.0, 3.0, 0.0])]


def largest_for_lemmas(found):
    """The largest steps that the lemmas alone allow: far above those of the theorem."""
    d = descent_constants(found)
    rho = min(d.B_v, 1 / d.Lambda_z)
    return rho, min(d.C_z, d.C_v, 1) * rho


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("shrink", [1.0, 0.1])
def test_descent_lemmas_hold_at_the_largest_steps_they_allow(mild_case, start, shrink):
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
    """app:lemma:bound_error_directions prints L1_G for its square, and ||D_z||² twice."""
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
    """app:eq:exp_norm_exp_d_x sets E||E_k[D_x^k]||² = E||D_x(u^k)||² + E||D_x^(k-1) - D_x(u^(k-1))||²."""
    scalars = Scalars(mild(outer_scale=0.3, seed=4))
    excess = []
    for start in STARTS:
        e = Expected(scalars, start, 0.5, 0.01, 3)
        expected = [path.true[2][2] + path.estimates[1][2] - path.true[1][2] for path in e.paths]
        left = np.mean(np.square(expected))
        printed, corrected = e.true_sq[2] + e.error[1, 2], 2 * (e.true_sq[2] + e.error[1, 2])
        assert left <= corrected
        excess.append(left / printed - 1)
    assert max(excess) > 0.1 and min(excess) < -0.005, "the sides differ, in either sense"


def test_gradients_at_the_solution_are_bounded_as_corrected_and_not_as_printed():
    """app:eq:4 and app:eq:delta_D lose a square of L1_G and a μ."""
    scalars = Scalars(mild(inner_scale=1e5))
    found = scalars.problem.constants()
    curvature, cross = (np.mean([getattr(row, part) for row in scalars.inner]) for part in ("zz", "xz"))
    phi = curvature / 2  # at distance 1 from z*, or from v*
    assert cross**2 <= 2 * found.L1_G**2 / found.mu_G * phi
    assert cross**2 > 2 * found.L1_G / found.mu_G * phi, "app:eq:4"
    assert curvature**2 <= 2 * found.L1_G * phi
    assert curvature**2 > 2 * found.L1_G / found.mu_G * phi, "app:eq:delta_D"


def test_phi_v_moves_with_x_where_the_printed_constant_says_it_does_not(mild_case):
    """app:eq:9 has L2_F where ||∇²F|| <= L1_F: on quadratics the printed L'' is 0."""
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
    reference = problem.exact_solver(start.outer_var, None)
    for size in (1e-3, 0.3, 1.0):
        off_z, off_v = size * rng.standard_normal((2, *np.shape(start.inner_var)))
        z, v = reference.inner_var + off_z, reference.v + off_v
        with arithmetic(np.float64):
            direction = problem.oracles.direction(Point(z, start.outer_var, v))
        error = np.sum((np.asarray(direction.outer_var) - reference.hypergrad) ** 2)
        assert error <= d.L_x**2 * (np.sum(off_z**2) + np.sum(off_v**2))


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


def printed_pieces(found, steps, q):
    """Pieces of th:cvg_rate as printed, each put in place of the corrected one, and what it must keep below 0."""
    d, mu, psi_z, psi_v = descent_constants(found), found.mu_G, steps.psi_z, steps.psi_v
    loose_xi = min(psi_v * mu**2 / (16 * d.L_x**2), psi_z * mu**2 / (24 * d.L_x**2), 1)
    free_rho = sqrt(1 / (12 * q * d.beta_vv))
    return {
        "psi_v, times alpha": ("phi_z", {"psi_v": d.alpha_vz * mu / 12 * psi_z}),
        "xi, with μ/2": ("phi_v", {"gamma": loose_xi * steps.rho}),
        "rho_bar, without tilde_vv": ("V_v", {"rho": free_rho, "gamma": steps.xi * free_rho}),
        "rho_bar, root of 1/(6 Λ_z)": ("V_z", {"rho": sqrt(1 / (6 * d.Lambda_z))}),
    }


PIECES = ["psi_v, times alpha", "xi, with μ/2", "rho_bar, without tilde_vv", "rho_bar, root of 1/(6 Λ_z)"]


@pytest.mark.parametrize("piece", PIECES)
def test_printed_pieces_of_the_theorem_make_a_coefficient_positive(piece):
    problem, found = made("quadratic")
    q = 1 if "Λ_z" in piece else 84
    steps = step_sizes(found, problem.n_inner, problem.n_outer, q)
    which, change = printed_pieces(found, steps, q)[piece]
    assert getattr(lyapunov_coefficients(found, steps), which) <= 0
    assert getattr(lyapunov_coefficients(found, dataclasses.replace(steps, **change)), which) > 0


def test_printed_bound_of_rho_lets_v_step_beyond_its_smoothness():
    """B_v as printed exceeds the 1/Λ_v that the proof takes for granted."""
    found = made("quadratic")[1]
    mu, g1, smoothness = found.mu_G, found.L1_G, phi_v_smoothness(found)
    e = g1 / mu**2 + mu**2 / (16 * g1)
    printed = e * min(2 / smoothness, mu / (sqrt(2 * g1) * smoothness))
    assert descent_constants(found).B_v <= 1 / smoothness < printed


def solved(x):
    """Where φ_z = φ_v = 0, so that L falls through h alone."""
    reference = mild(outer_scale=0.3).exact_solver(np.array([x]))
    return np.array([reference.inner_var[0], reference.v[0], x])


@pytest.mark.parametrize("start", [*STARTS, solved(-1.0), solved(3.0)])
def test_a_period_lowers_the_expected_lyapunov_function_by_what_the_theorem_says(mild_case, start):
    problem, scalars, found = mild_case
    q = 3
    steps = step_sizes(found, problem.n_inner, problem.n_outer, q)
    e = Expected(scalars, start, steps.rho, steps.gamma, q)
    total = e.h + steps.psi_z * e.phi_z + steps.psi_v * e.phi_v
    promised = steps.gamma / 4 * e.g[:q].sum()
    assert promised > 1e-12, "above rounding"
    assert total[q] - total[0] <= -promised


def test_the_librarys_solver_takes_the_enumerated_steps(mild_case):
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
    """The points at which periods begin, of a run by the library."""
    points = [problem.start]
    for period in range(1, periods + 1):
        result = bilevel.run(problem, solver, seed=seed, max_steps=period * solver.period, eval_every=10**6)
        points.append(result.point)
    return points


@pytest.fixture(params=["mild", "drawn"])
def quadratic_case(request, mild_case):
    """A quadratic on which x moves visibly, and one drawn by the library, on which it does not."""
    if request.param == "mild":
        return mild_case[0], mild_case[2]
    problem = cases.quadratic()
    return problem, problem.constants()


def test_runs_descend_in_the_mean_over_seeds_at_every_refresh(quadratic_case):
    problem, found = quadratic_case
    steps = step_sizes(found, problem.n_inner, problem.n_outer, 20)
    totals, gradients = [], []
    for seed in range(4):
        values = [lyapunov(problem, point, steps) for point in refresh_points(problem, steps.solver(), 4, seed)]
        totals.append([value.total for value in values])
        gradients.append([value.hypergrad_norm_sq for value in values])
    fall = -np.diff(np.mean(totals, axis=0))
    # ∇h hardly moves in a period of such steps.
    promised = steps.gamma / 4 * steps.q * np.mean(gradients, axis=0)[:-1]
    assert np.all(fall >= promised) and np.all(promised > 0)


def test_runs_on_all_rows_descend_at_every_step(quadratic_case):
    problem, found = quadratic_case
    steps = step_sizes(found, problem.n_inner, problem.n_outer, 1)
    solver = dataclasses.replace(steps.solver(), sampling="full")
    states = cases.trajectory(problem, solver, 60, page_length=60).states
    values = [lyapunov(problem, point, steps) for point in (problem.start, *(state.point for state in states))]
    totals = np.array([value.total for value in values])
    promised = steps.gamma / 4 * np.array([value.hypergrad_norm_sq for value in values[:-1]])
    assert np.all(-np.diff(totals) >= promised)
    assert values[-1].phi_z < values[0].phi_z and values[-1].value <= values[0].value


@pytest.mark.parametrize("name", ["quadratic", "logistic", "worst case", "cleaning"])
def test_the_gaps_are_those_of_the_paper(name):
    """φ_z = G(z, x) - G(z*, x), φ_v = Ψ(v) - Ψ(v*); each at least μ/2 times a squared distance."""
    problem, found = made(name)
    steps = step_sizes(found, problem.n_inner, problem.n_outer)
    rng = np.random.default_rng(0)
    start = trees.to_numpy(problem.start, np.float64)
    shape = np.shape(start.inner_var)
    point = Point(rng.standard_normal(shape), start.outer_var, rng.standard_normal(shape))
    reference, value = problem.exact_solver(point.outer_var, None), lyapunov(problem, point, steps)
    at = Point(reference.inner_var, point.outer_var, reference.v)

    def psi(v):
        with arithmetic(np.float64):
            hvp, grad = problem.oracles.hvp(at._replace(v=v)), problem.oracles.outer_grad(at)
        return np.sum(v * np.asarray(hvp)) / 2 + np.sum(v * np.asarray(grad))

    np.testing.assert_allclose(value.phi_v, psi(point.v) - psi(reference.v), rtol=1e-9)
    with arithmetic(np.float64):
        gap = float(problem.oracles.inner_value(point)) - float(problem.oracles.inner_value(at))
    np.testing.assert_allclose(value.phi_z, gap, rtol=1e-9)
    assert value.phi_z >= found.mu_G / 2 * np.sum((point.inner_var - reference.inner_var) ** 2) * (1 - 1e-9)
    assert value.phi_v >= found.mu_G / 2 * np.sum((point.v - reference.v) ** 2) * (1 - 1e-9)
    total = reference.value + steps.psi_z * value.phi_z + steps.psi_v * value.phi_v
    np.testing.assert_allclose(value.total, total, rtol=1e-15)


def test_steps_hold_the_root_of_the_period_once():
    """cor:sample_complexity multiplies ρ̄ and γ, which hold it, by (n + m)^(-1/2) again."""
    found = made("quadratic")[1]
    few, many = step_sizes(found, 10**6, 10**6), step_sizes(found, 4 * 10**6, 4 * 10**6)
    assert few.q == 2 * 10**6 and few.rho == few.rho_bar
    np.testing.assert_allclose(few.rho / many.rho, 2)
    np.testing.assert_allclose(few.gamma / many.gamma, 2)


def test_a_period_costs_what_the_ledger_says(mild_case):
    problem, _, found = mild_case
    steps = step_sizes(found, problem.n_inner, problem.n_outer, 7)
    result = bilevel.run(problem, steps.solver(), max_steps=7)
    assert sum(result.calls) == steps.calls_per_period


@pytest.mark.parametrize(
    "name", ["quadratic", *(pytest.param(n, marks=pytest.mark.slow) for n in ("logistic", "cleaning"))]
)
def test_the_theorys_steps_are_far_below_those_that_work(name):
    problem, found = made(name)
    steps = step_sizes(found, problem.n_inner, problem.n_outer)
    works = bilevel.solvers.SRBA(0.05, 5.0, 8)
    values = bilevel.run(problem, works, max_steps=1000).history["value"]
    assert values[-1] < values[0]
    assert 1e-9 < steps.rho < 1e-4 and steps.gamma < 1e-14 * steps.rho


def test_nonsense_is_refused():
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
