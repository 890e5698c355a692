"""Constants of regularity: no difference quotient exceeds one, and none is far above the largest that is found."""

import dataclasses
import itertools
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import bilevel
from bilevel._core import trees
from bilevel._core.compilation import arithmetic
from bilevel._core.types import Point
from bilevel.problems.certificate import ASSUMED, DERIVED, implied
from paper.valleys import valleys
from paper.worst_case import worst_case
from tests import cases
from tests.problems import small
from tests.problems.sampling import sample_constants

pytestmark = pytest.mark.slow  # many compilations, and float64 in either mode

RADIUS = 30.0
STEP = 1e-3  # of difference quotients of derivatives up to the third


def cleaning():
    rows = (part[:12] for part in small.classes())
    return bilevel.problems.data_cleaning(*rows, dtype="float64")


def worst():
    return worst_case(2, 1e-6, n_inner=3, inner_curvature=0.7, dtype="float64")


MADE = {
    "quadratic": (cases.quadratic, {"radius": RADIUS}),
    "logistic": (cases.logistic_selection, {}),
    "grouped": (partial(small.grouped_logistic, dtype="float64"), {"radius": 1.0, "box": (-1.0, 0.5)}),
    "worst case": (worst, {"radius": 80.0}),
    "cleaning": (cleaning, {}),
    "valleys": (partial(valleys, 12, 8, 4, dtype="float64"), {"radius": 20.0}),
}
NAMES = pytest.mark.parametrize("name", MADE)


@lru_cache
def made(name):
    make, region = MADE[name]
    problem = make()
    return problem, problem.constants(**region)


# The largest ratio of a constant to the largest quotient found that is let pass: 1 is a constant that cannot be less.
LOOSENESS = {
    "quadratic": {"L0_F": 1.4, "L1_F": 1.001, "L1_G": 1.001},
    "logistic": {"L0_F": 1.001, "L1_F": 1.001, "L2_F": 1.001, "L1_G": 1.1, "L2_G": 1.1, "L3_G": 1.1},
    "grouped": {"L0_F": 1.001, "L1_F": 1.001, "L2_F": 1.001, "L1_G": 1.2, "L2_G": 1.5, "L3_G": 1.1},
    "worst case": {"L0_F": 1.2, "L1_F": 1.05, "L2_F": 1.01, "L1_G": 1.001},
    "cleaning": {"L0_F": 1.1, "L1_F": 1.1, "L2_F": 1.1, "L1_G": 1.2, "L2_G": 1.2, "L3_G": 1.2},
    "valleys": {"L0_F": 1.5, "L1_F": 1.5, "L2_F": 1.5, "L1_G": 1.15, "L2_G": 1.01, "L3_G": 1.01},
}


def repeated_derivative(function, order):
    if order == 0:
        return function
    lower = repeated_derivative(function, order - 1)
    return lambda t: jax.jvp(lower, (t,), (jnp.ones_like(t),))[1]


class Samples:
    """F_j or G_i as functions of (z, x) in one array, and the region of the comparison."""

    def __init__(self, problem, region, level):
        self.oracles = problem.oracles.with_batches(1, "iid")
        self.level, self.region = level, region
        start = problem.start.inner_var, problem.start.outer_var
        self.p, self.d = (trees.flat(part).size for part in start)
        self.unravel = ravel_pytree(start)[1]
        self.n = problem.n_outer if level == "F" else problem.n_inner
        far = np.full(self.d, 4.0 if region.radius is None else region.radius)
        self.lower = -far if region.lower is None else region.lower
        self.upper = far if region.upper is None else region.upper

    def along(self, point, direction, row, order):
        """The derivative of this order of one sample along a line."""
        value = self.oracles.outer_value if self.level == "F" else self.oracles.inner_value

        def moved(t):
            z, x = self.unravel(point + t * direction)
            return value(Point(z, x, z), row)

        return repeated_derivative(moved, order)(jnp.zeros_like(point[0]))

    def inside(self, point):
        z, x = point[: self.p], point[self.p :]
        norm = jnp.sqrt(jnp.sum(z**2) + 1e-300)
        shrunk = z * jnp.minimum(1, self.region.radius / norm)
        return jnp.concatenate([shrunk, jnp.clip(x, self.lower, self.upper)])

    def draw(self, rng, count):
        z = rng.standard_normal((count, self.p))
        z *= self.region.radius * rng.uniform(size=(count, 1)) / np.linalg.norm(z, axis=1, keepdims=True)
        return np.hstack([z, rng.uniform(self.lower, self.upper, (count, self.d))])


def unit(vector, otherwise):
    norm = jnp.linalg.norm(vector)
    return jnp.where(norm > 0, vector / jnp.where(norm > 0, norm, 1), otherwise)


def quotients(samples, order, seed=0, rounds=80):
    """Difference quotients of derivatives of order - 1: between random points, and where ascent finds them large."""
    rng = np.random.default_rng(seed)
    rows = np.tile(np.arange(samples.n, dtype=np.int32)[:, None], (480 // samples.n, 1))
    first, second = samples.draw(rng, len(rows)), samples.draw(rng, len(rows))
    directions = rng.standard_normal(first.shape)

    def climb(point, direction, row):
        def size(point, direction):
            return jnp.abs(samples.along(point, direction, row, order))

        def ascend(i, state):
            point, direction = state
            by_point, by_direction = jax.grad(size, argnums=(0, 1))(point, direction)
            stride = samples.region.radius * 0.3 * 0.93**i
            moved = point + stride * unit(by_point, jnp.zeros_like(point))
            return samples.inside(moved), unit(by_direction, direction)

        return jax.lax.fori_loop(0, rounds, ascend, (point, unit(direction, direction)))

    def quotient(point, other, direction, row):
        lower = [samples.along(end, direction, row, order - 1) for end in (point, other)]
        return jnp.abs(lower[0] - lower[1]) / jnp.linalg.norm(point - other)

    def one(point, other, direction, row):
        apart = unit(other - point, direction)
        random = quotient(point, other, apart, row)
        best, steepest = climb(point, direction, row)
        near = [samples.inside(best + sign * STEP * steepest) for sign in (-1.0, 1.0)]
        return random, quotient(*near, steepest, row)

    with arithmetic(np.float64):
        return np.concatenate(jax.jit(jax.vmap(one))(first, second, directions, rows))


ORDERS = {"L0_F": 1, "L1_F": 2, "L2_F": 3, "L1_G": 2, "L2_G": 3, "L3_G": 4}
LONG = {("cleaning", "L2_G"), ("cleaning", "L3_G"), *(("grouped", constant) for constant in ORDERS)}
CONSTANTS = [
    pytest.param(*pair, marks=[pytest.mark.slow] if pair in LONG else []) for pair in itertools.product(MADE, ORDERS)
]


@pytest.mark.parametrize(("name", "constant"), CONSTANTS)
def test_no_difference_quotient_exceeds_a_constant_and_some_come_near(name, constant):
    problem, found = made(name)
    samples = Samples(problem, found.region, constant[-1])
    bound = getattr(found, constant)
    largest = quotients(samples, ORDERS[constant]).max()
    if bound == 0:
        assert largest < 1e-9, "derivatives of this order are constant"
        return
    assert largest <= bound * (1 + 1e-6)
    assert bound <= LOOSENESS[name][constant] * largest, f"{bound / largest:.3g} times the largest quotient"
    if found.how[constant] == "exact":
        assert bound <= 1.05 * largest


@NAMES
def test_inner_curvature_is_at_least_mu(name):
    problem, found = made(name)
    samples = Samples(problem, found.region, "G")
    points = samples.draw(np.random.default_rng(0), 200)
    points[:, samples.p :] = np.where(points[:, samples.p :] < 0, samples.lower, samples.upper)
    points[:20, samples.p :] = samples.lower
    unravel_z = ravel_pytree(problem.start.inner_var)[1]

    @jax.jit
    @jax.vmap
    def hessian(point):
        z, x = samples.unravel(point)
        return jax.vmap(lambda v: ravel_pytree(problem.oracles.hvp(Point(z, x, unravel_z(v))))[0])(np.eye(samples.p))

    with arithmetic(np.float64):
        least = np.linalg.eigvalsh(np.asarray(hessian(points)))[:, 0].min()
    assert found.mu_G * (1 - 1e-9) <= least <= 2 * found.mu_G


def solution_jacobians(problem, x, step=1e-4):
    """Central differences of z*, v* and ∇h, one column per coordinate of x."""
    ends = [[problem.exact_solver(x + sign * step * axis, None) for axis in np.eye(len(x))] for sign in (1, -1)]

    def differences(part):
        columns = [[trees.flat(getattr(solution, part)) for solution in side] for side in ends]
        return (np.array(columns[0]) - np.array(columns[1])).T / (2 * step)

    return {name: differences(part) for name, part in PARTS.items()}


PARTS = {"L_z_star": "inner_var", "L_v_star": "v", "L_h": "hypergrad"}
# Bounds of the solution's Lipschitz constants are products of worst cases that do not occur together.
SOLUTION_LOOSENESS = {
    "quadratic": {"L_z_star": 1.001, "L_v_star": 1.001, "L_h": 1.001},
    "logistic": {"L_z_star": 40, "L_v_star": 300, "L_h": 10_000},
    "grouped": {"L_z_star": 30, "L_v_star": 100, "L_h": 5000},
    "worst case": {"L_z_star": 1.001, "L_v_star": 1.001, "L_h": 1.001},
    "cleaning": {"L_z_star": 10, "L_v_star": 600, "L_h": 2000},
    "valleys": {"L_z_star": 1.001, "L_v_star": 1.001, "L_h": 1.001},
}


def outer_points(problem, region, count, seed=0):
    samples = Samples(problem, region, "F")
    points = samples.draw(np.random.default_rng(seed), count)[:, samples.p :]
    return [np.full(samples.d, -4.0), *points] if region.lower is None else [samples.lower, samples.upper, *points]


@NAMES
def test_solutions_move_no_faster_than_their_constants(name):
    problem, found = made(name)
    points = outer_points(problem, found.region, 4 if name == "cleaning" else 12)
    if name == "worst case":
        points = [np.full_like(points[0], -problem.info["beta"]), *points[:3]]
    if name == "valleys":
        points = [np.zeros_like(points[0]), *points[:3]]
    largest = dict.fromkeys(PARTS, 0.0)
    solutions = [problem.exact_solver(x, None) for x in points]
    for constant, part in PARTS.items():
        ends = [trees.flat(getattr(solution, part)) for solution in solutions]
        pairs = zip(points, points[1:], ends, ends[1:], strict=False)
        rates = [np.linalg.norm(b - a) / np.linalg.norm(y - x) for x, y, a, b in pairs]
        largest[constant] = max(rates)
    for x in points[: 2 if name == "cleaning" else 6]:
        for constant, jacobian in solution_jacobians(problem, x).items():
            largest[constant] = max(largest[constant], np.linalg.norm(jacobian, 2))
    for constant, rate in largest.items():
        bound = getattr(found, constant)
        assert rate <= bound * (1 + 1e-5), constant
        assert bound <= SOLUTION_LOOSENESS[name][constant] * rate, f"{constant} is {bound / rate:.3g} times a rate"


@NAMES
def test_v_star_stays_in_the_ball_of_radius_R(name):
    problem, found = made(name)
    points = [problem.exact_solver(x, None) for x in outer_points(problem, found.region, 20)]
    inside = [r for r in points if np.linalg.norm(r.inner_var) <= found.region.radius]
    largest = max(np.linalg.norm(solution.v) for solution in inside)
    assert largest <= found.R == found.L0_F / found.mu_G


def test_the_default_ball_holds_every_solution():
    for name in ("logistic", "cleaning"):
        problem, found = made(name)
        for x in outer_points(problem, found.region, 20):
            assert np.linalg.norm(problem.exact_solver(x, None).inner_var) <= found.region.radius


def test_quadratics_have_constants_for_all_points_but_no_bounded_gradient():
    found = cases.quadratic().constants()
    assert found.L0_F is None and found.R is None
    assert found.region.radius is None and str(found.region) == "all z, all x"
    inner = made("quadratic")[1]
    assert (found.mu_G, found.L1_G, found.L_h) == (inner.mu_G, inner.L1_G, inner.L_h)


def test_the_mean_is_strongly_convex_where_no_row_is():
    """ass:regul_G asks it of each G_i; the rows of the quadratics have rank one."""
    problem, found = made("quadratic")
    a = np.asarray(problem.oracles.inner_samples.leaves.a)
    assert all(np.linalg.eigvalsh(np.outer(row, row))[0] < 1e-12 for row in a) and found.mu_G > 0.01


def test_exact_constants_lie_below_what_the_assumptions_imply():
    for name in ("quadratic", "logistic", "worst case", "cleaning"):
        found = made(name)[1]
        general = implied(found.mu_G, found.L0_F, found.L1_F, found.L1_G, found.L2_G)
        assert all(getattr(found, constant) <= general[constant] * (1 + 1e-12) for constant in DERIVED)


def printed_smoothness(mu, L0_F, L1_F, L1_G, L2_G):
    """app:sec:smoothness_h as it stands, its undefined L_11^G read as L2_G."""
    twice = L1_F + (2 * L1_F * L2_G + L0_F**2 * L2_G) / mu
    return twice + (2 * L1_G * L2_G * L0_F + L1_G**2 * L1_F) / mu**2 + L1_G**2 * L2_G * L0_F / mu**3


def test_smoothness_of_h_is_linear_in_F_unlike_the_printed_one():
    """The printed one holds all the same: it exceeds what is derived here."""
    rng = np.random.default_rng(0)
    for mu, L0_F, L1_F, more, L2_G in np.exp(rng.normal(size=(50, 5))):
        given = mu, L0_F, L1_F, mu + more, L2_G
        scaled = mu, 7 * L0_F, 7 * L1_F, mu + more, L2_G
        np.testing.assert_allclose(implied(*scaled)["L_h"], 7 * implied(*given)["L_h"])
        assert printed_smoothness(*scaled) > 7 * (1 + 1e-6) * printed_smoothness(*given)
        assert implied(*given)["L_h"] <= printed_smoothness(*given)


def test_estimates_never_exceed_the_constants_and_come_near():
    """The same rows by automatic differentiation, without closed forms."""
    problem, exact = made("quadratic")
    other = dataclasses.replace(problem, oracles=cases.by_autodiff("quadratic", problem))
    found = sample_constants(other, RADIUS)
    for constant in ("L0_F", "L1_F", "L1_G"):
        assert 0.5 * getattr(exact, constant) <= found[constant] <= getattr(exact, constant) * (1 + 1e-9)
    np.testing.assert_allclose(found["mu_G"], exact.mu_G)
    assert max(found["L2_F"], found["L2_G"], found["L3_G"]) < 1e-9


@pytest.mark.slow
def test_estimates_of_logistic_selection_lie_below_its_bounds():
    problem, bound = made("logistic")
    other = dataclasses.replace(problem, oracles=cases.by_autodiff("logistic", problem))
    found = sample_constants(other, bound.region.radius)
    for constant in ORDERS:
        assert 0.2 * getattr(bound, constant) <= found[constant] <= getattr(bound, constant) * (1 + 1e-9)
    assert found["mu_G"] >= bound.mu_G


def test_single_precision_rows_give_the_same_constants():
    for name, (make, region) in MADE.items():
        if name in ("quadratic", "logistic"):
            narrow, wide = make(dtype="float32").constants(**region), made(name)[1]
            for constant in ASSUMED + DERIVED:
                np.testing.assert_allclose(getattr(narrow, constant), getattr(wide, constant), rtol=2e-4)


def test_bounds_of_the_problem_are_the_box():
    x = np.zeros(4)
    problem = cases.logistic_selection(outer_var=x, outer_bounds=(-2.0, None))
    found = problem.constants()
    assert found.region.lower.tolist() == [-2.0] * 4 and found.region.upper.tolist() == [1.0] * 4
