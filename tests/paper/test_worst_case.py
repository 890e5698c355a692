"""The worst case of the lower bound: its derivatives, its classes of smoothness, its chains, its constants."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.integrate import quad
from scipy.optimize import minimize

from bilevel._core.compilation import arithmetic
from bilevel._core.types import Calls, Point
from bilevel.oracles import AutodiffOracles
from bilevel.problems.exact import IterativeExactSolver
from paper.worst_case import chain, gamma, gamma_slope, worst_case
from tests import cases

pytestmark = pytest.mark.slow  # many compilations

M, N, BATCH, EPSILON = 5, 7, 3, 4e-7
BOTH = pytest.mark.parametrize("normalization", ["individual", "mean_squared"])
ROTATIONS = pytest.mark.parametrize("rotation", ["coordinates", "random"])


def small(n_outer=M, epsilon=EPSILON, *, dtype="float64", **kwargs):
    return worst_case(n_outer, epsilon, **({"n_inner": N, "inner_curvature": 0.7} | kwargs), dtype=dtype)


def basis_of(problem):
    """U as an array (m, T + 1, p)."""
    rows = np.asarray(problem.oracles.outer_samples.leaves)
    dim = problem.start.inner_var.size
    return np.eye(dim).reshape(problem.n_outer, -1, dim) if rows.ndim == 1 else rows


class InNumPy:
    """An independent version of the definitions, with integrals by SciPy and U as a matrix."""

    def __init__(self, problem):
        known = problem.info
        self.alpha, self.amplitude, self.width = known["alpha"], known["lambda"], known["beta"]
        self.basis, self.curvature = basis_of(problem), known["mu_G"]

    def loss(self, y):
        integrals = [quad(lambda t: 120 * t**2 * (t - 1) / (1 + t**2), 1, end, epsabs=1e-13)[0] for end in y[:-1]]
        links = sum((y[k + 1] - y[k]) ** 2 for k in range(len(y) - 1))
        return np.sqrt(self.alpha) / 2 * (y[0] - 1) ** 2 + links / 2 + self.alpha * sum(integrals)

    def gradient(self, y):
        size = len(y)
        matrix = 2 * np.eye(size) - np.eye(size, k=1) - np.eye(size, k=-1)
        matrix[0, 0], matrix[-1, -1] = 1 + np.sqrt(self.alpha), 1
        bent = 120 * y**2 * (y - 1) / (1 + y**2)
        bent[-1] = 0
        return matrix @ y - np.sqrt(self.alpha) * np.eye(size)[0] + self.alpha * bent

    def outer_value(self, z, rows):
        return self.amplitude * np.mean([self.loss(self.basis[j] @ z / self.width) for j in rows])

    def outer_grads(self, z):
        """The gradient of each F_j, (m, p)."""
        scale = self.amplitude / self.width
        return np.array([scale * part.T @ self.gradient(part @ z / self.width) for part in self.basis])

    def kinds(self, point, rows):
        z, x, v = (np.asarray(part) for part in point)
        mu = self.curvature
        return {
            "inner_grad": mu * (z - x),
            "inner_grad_outer": mu * (x - z),
            "hvp": mu * v,
            "cross": -mu * v,
            "inner_value": mu / 2 * np.sum((z - x) ** 2),
            "outer_grad": self.outer_grads(z)[rows].mean(0),
            "outer_grad_outer": np.zeros_like(x),
            "outer_value": self.outer_value(z, rows),
        }


def random_point(problem, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: 2 * rng.standard_normal(leaf.shape), problem.start)


def by_autodiff(problem):
    known = problem.info

    def outer_loss(z, x, row):
        part = z.reshape(problem.n_outer, -1)[row] if row.ndim == 0 else row @ z
        return known["lambda"] * chain(part / known["beta"], known["alpha"])

    return AutodiffOracles(
        inner_samples=problem.oracles.inner_samples,
        outer_samples=problem.oracles.outer_samples,
        inner_loss=lambda z, x, curvature: curvature / 2 * jnp.sum((z - x) ** 2),
        outer_loss=outer_loss,
    )


DRAWS = {
    "all": (None, None, np.arange(M)),
    "a block": (jnp.int32(1), jnp.int32(0), np.arange(BATCH)),
    "the short block": (jnp.int32(N // BATCH), jnp.int32(M // BATCH), np.arange(BATCH, M)),
}


@jax.jit
def every_kind(oracles, point, inner, outer):
    drawn = {kind: outer if kind.startswith("outer") else inner for kind in Calls._fields}
    return {kind: getattr(oracles, kind)(point, rows) for kind, rows in drawn.items()}


@pytest.mark.parametrize("draw", DRAWS)
@ROTATIONS
def test_every_kind_equals_autodiff_and_dense_numpy(rotation, draw):
    problem = small(rotation=rotation)
    point, (inner, outer, rows) = random_point(problem), DRAWS[draw]
    dense = InNumPy(problem).kinds(point, rows)
    with arithmetic("float64"):
        for plain in (problem.oracles, by_autodiff(problem)):
            ours = every_kind(plain.with_batches(BATCH, "blocks"), point, inner, outer)
            cases.assert_trees_close(ours, dense, rtol=1e-12, atol=1e-12)


@ROTATIONS
def test_a_row_drawn_twice_counts_twice(rotation):
    problem = small(rotation=rotation)
    point, rows = random_point(problem), np.array([2, 2, 4], np.int32)
    with arithmetic("float64"):
        oracles = problem.oracles.with_batches(3, "iid")
        grad = oracles.outer_grad(point, jnp.asarray(rows))
    np.testing.assert_allclose(grad, InNumPy(problem).outer_grads(point.inner_var)[rows].mean(0), atol=1e-14)


@ROTATIONS
def test_finite_differences_agree_with_every_derivative(rotation):
    assert max(small(rotation=rotation, dtype="float32").check().values()) < 1e-7


def test_gamma_equals_its_integral_and_is_clean_near_its_minimum():
    with arithmetic("float64"):
        for t in (-30.0, -1.0, -0.2, 0.0, 0.3, 0.999, 1.0, 1.5, 40.0):
            integral = quad(lambda s: 120 * s**2 * (s - 1) / (1 + s**2), 1, t, epsabs=1e-13, epsrel=1e-13)[0]
            np.testing.assert_allclose(gamma(t), integral, rtol=1e-12)
            np.testing.assert_allclose(jax.grad(gamma)(t), gamma_slope(t), rtol=1e-12, atol=1e-13)
        for move in (1e-4, -1e-4, 1e-6):
            np.testing.assert_allclose(gamma(1 + move), 30 * move**2 + 20 * move**3, rtol=1e-7 + 1e-14 / move**2)


def test_the_second_derivative_of_gamma_lies_between_its_known_extremes():
    with arithmetic("float64"):
        t = np.linspace(-20, 20, 400_001)
        curvature = np.asarray(jax.vmap(jax.grad(gamma_slope))(t))
    np.testing.assert_allclose(np.max(np.abs(curvature)), 180, rtol=1e-12)
    np.testing.assert_allclose(np.min(curvature), 45 * (1 - np.sqrt(3)), rtol=1e-7)  # the grid is 1e-4 wide
    np.testing.assert_allclose(t[np.argmax(curvature)], -1, atol=1e-9)


def test_constants_are_those_of_the_two_normalizations():
    alpha, m, eps, L, gap = 1 / 180, 6, 5e-7, 2.0, 3.0
    known = small(m, eps, smoothness=L, gap=gap).info
    np.testing.assert_allclose(known["lambda"], 160 * m * eps / (L * alpha**1.5))
    np.testing.assert_allclose(known["beta"] ** 2, 5 * known["lambda"] / L)
    assert known["T"] == int(gap * L * np.sqrt(alpha) / (1760 * m * eps))
    known = small(m, eps, smoothness=L, gap=gap, normalization="mean_squared").info
    np.testing.assert_allclose(known["lambda"], 160 * np.sqrt(m) * eps / (L * alpha**1.5))
    np.testing.assert_allclose(known["beta"] ** 2, 5 * known["lambda"] / (np.sqrt(m) * L))
    assert known["T"] == int(gap * L * np.sqrt(alpha) / (1760 * np.sqrt(m) * eps))
    expected = {"alpha": alpha, "L": L, "Delta": gap, "mu_G": 0.7, "epsilon": eps, "query_bound": m * known["T"] / 2}
    assert expected.items() <= known.items()


def test_the_bound_is_flat_in_m_for_one_class_and_grows_as_its_root_for_the_other():
    def bounds(normalization):
        return [worst_case(m, 1e-9, normalization=normalization).info["query_bound"] for m in (4, 64)]

    few, many = bounds("individual")
    np.testing.assert_allclose(many, few, rtol=0.01)
    few, many = bounds("mean_squared")
    np.testing.assert_allclose(many, 4 * few, rtol=0.01)


def dense_hessians(problem, z):
    """∇²F_j by differences of the dense gradients, (m, p, p)."""
    plain, dim = InNumPy(problem), z.size
    ahead, behind = (np.array([plain.outer_grads(z + s * e) for e in np.eye(dim)]) for s in (1e-5, -1e-5))
    return np.moveaxis((ahead - behind) / 2e-5, 1, 0)


def adversary(problem):
    """Where every Γ'' is largest: all chains at -1."""
    basis = basis_of(problem)
    return -problem.info["beta"] * basis.reshape(-1, basis.shape[-1]).sum(0)


@BOTH
@ROTATIONS
def test_the_known_smoothness_holds_and_is_reached(normalization, rotation):
    problem = small(3, 6e-7, normalization=normalization, rotation=rotation)
    known, m = problem.info, problem.n_outer
    claimed = known["L"] * (1 if normalization == "individual" else np.sqrt(m))
    points = [adversary(problem), *(random_point(problem, seed).inner_var for seed in range(3))]
    hessians = np.array([dense_hessians(problem, z) for z in points])
    largest = np.abs(np.linalg.eigvalsh(hessians)).max((1, 2))
    np.testing.assert_allclose(largest[0], known["outer_smoothness"], rtol=1e-7)
    assert np.all(largest <= known["outer_smoothness"] * (1 + 1e-7))
    assert 0.98 * claimed < known["outer_smoothness"] <= claimed
    value = np.linalg.norm(hessians[0].mean(0), 2)
    squares = np.sqrt(np.linalg.norm((hessians[0] @ hessians[0]).mean(0), 2))
    np.testing.assert_allclose(value, known["value_smoothness"], rtol=1e-7)
    np.testing.assert_allclose(squares, known["mean_squared_smoothness"], rtol=1e-7)


@ROTATIONS
def test_mean_squared_smoothness_holds_between_any_two_points(rotation):
    problem = small(normalization="mean_squared", rotation=rotation)
    plain, rng, base = InNumPy(problem), np.random.default_rng(0), adversary(problem)
    top = np.linalg.eigh(dense_hessians(problem, base).mean(0))[1][:, -1]
    pairs = [(base, base + 1e-3 * top), (base, base + top)]
    pairs += [tuple(scale * rng.standard_normal((2, base.size))) for scale in np.geomspace(0.1, 30, 50)]
    ratios = [
        np.mean(np.sum((plain.outer_grads(a) - plain.outer_grads(b)) ** 2, axis=1)) / np.sum((a - b) ** 2)
        for a, b in pairs
    ]
    assert max(ratios) <= problem.info["L"] ** 2
    np.testing.assert_allclose(max(ratios), problem.info["mean_squared_smoothness"] ** 2, rtol=0.01)


@pytest.mark.parametrize(("m", "times"), [(1, 1.0), (32, 7.2), (180, 36.8), (1000, 36.8)])
def test_with_alpha_as_printed_the_terms_are_far_less_smooth_than_claimed(m, times):
    alpha, length = min(1, m / 180), 300

    def gradient(y):
        return jax.grad(lambda y: chain(y, alpha))(y) / 5  # λ/β² = L/5

    with arithmetic("float64"):
        hessian = jax.jacfwd(gradient)(-np.ones(length + 1))
    np.testing.assert_allclose(np.linalg.eigvalsh(hessian)[-1], times, rtol=1e-3)


@BOTH
def test_h_at_0_exceeds_its_infimum_by_the_known_gap_and_not_more_than_allowed(normalization):
    problem = small(normalization=normalization)
    known, exact_solver = problem.info, problem.exact_solver
    rng = np.random.default_rng(0)
    starts = [np.zeros_like(problem.start.outer_var), *known["beta"] * rng.normal(0.5, 1, (2, problem.start.v.size))]

    def value_and_grad(x):
        solution = exact_solver(x)
        return solution.value, solution.hypergrad

    found = [minimize(value_and_grad, x, jac=True, method="L-BFGS-B", options={"maxiter": 300}).fun for x in starts]
    assert min(found) > -1e-12
    assert exact_solver(known["beta"] * np.ones_like(starts[0])).value == pytest.approx(0, abs=1e-15)
    np.testing.assert_allclose(exact_solver(starts[0]).value_gap, known["initial_gap"], rtol=1e-12)
    assert known["initial_gap"] <= known["Delta"]


@pytest.mark.parametrize("m", [1, 3, 50])
@BOTH
def test_the_gap_stays_below_delta_up_to_the_largest_epsilon(m, normalization):
    with pytest.raises(ValueError, match="take `epsilon`") as refusal:
        worst_case(m, 1.0, normalization=normalization, gap=2.5)
    largest = float(re.search(r"<= (\S+),", str(refusal.value))[1])
    known = worst_case(m, largest, normalization=normalization, gap=2.5).info
    assert known["T"] == 14
    assert known["initial_gap"] <= 2.5
    assert known["lambda"] * (np.sqrt(known["alpha"]) + 10 * known["alpha"] * known["T"]) <= 2.5, "as the proof says"
    with pytest.raises(ValueError, match=r"T = 13 < 14"):
        worst_case(m, 1.002 * largest, normalization=normalization, gap=2.5)


@ROTATIONS
def test_exact_solution_is_exact(rotation):
    problem = small(rotation=rotation)
    x, move = random_point(problem)[:2]
    solution, plain = problem.exact_solver(x), InNumPy(problem)
    grad = plain.outer_grads(x).mean(0)
    np.testing.assert_allclose(solution.hypergrad, grad, atol=1e-14)
    np.testing.assert_allclose(solution.v, -grad / 0.7, atol=1e-14)
    np.testing.assert_allclose(solution.value, plain.outer_value(x, np.arange(M)), rtol=1e-12)
    assert max(solution.inner_residual, solution.v_residual) < 1e-15
    slope = (problem.exact_solver(x + 1e-5 * move).value - problem.exact_solver(x - 1e-5 * move).value) / 2e-5
    np.testing.assert_allclose(solution.hypergrad @ move, slope, rtol=1e-8)
    generic = IterativeExactSolver(problem.oracles, problem.start)(x, None)
    cases.assert_trees_close(solution[:4], generic[:4], rtol=1e-9, atol=1e-11)


def test_the_exact_solution_of_a_float32_problem_is_that_of_the_rows_it_holds():
    problem = small(rotation="random", dtype="float32")
    direction = problem.exact_solver(x := random_point(problem).outer_var)
    with arithmetic("float64"):
        exact = problem.oracles.astype("float64").direction(Point(x, x, direction.v))
    np.testing.assert_allclose(exact.outer_var, direction.hypergrad, atol=1e-14)
    np.testing.assert_allclose(exact.v, 0, atol=1e-14)
    assert direction.hypergrad.dtype == np.float64
