"""A hard problem with a strongly convex h: each inner derivative reveals at most one more coordinate of a chain.

    G = ½ z'(μ_y I + β D'D) z - b x'D z + γ z_1          D z = (z_1, z_2 - z_1, …, z_d - z_{d-1}),  β = (L_y - μ_y)/4
    F = ½ L ||z||² + ½ μ_x ||x||² + δ z_1 - x_1

There is one sample on each level. With T = DD', tridiagonal with the eigenvalues 4 sin²((2k - 1)π/(4d + 2)),

    ∇²h = μ_x I + L b² T (μ_y I + β T)^-2 = (μ_y I + β T)^-2 β² μ_x (T - t_1)(T - t_2),       t_2 < t_1 < 0

γ and δ are such that the minimizer of h satisfies (T - t_1) x* = e_1 μ_y²/(-t_2 β² μ_x): with q + 1/q = 2 - t_1, q < 1,

    x*_i = s (q^i - q^(2d + 2 - i)),     s = μ_y²/(-t_2 β² μ_x) / ((1 - q)(1 + q^(2d + 1)))

Lower bound. Linear methods that start at 0 have x_i = 0 for i > k + 1 after k inner derivatives of any kind, while x*
decreases as slowly as q^i, with 1 - q ≈ √(-t_1) ≈ √(μ_x/L) μ_y/b. So they need about √(L/μ_x) b/μ_y of them for each
factor e of the error, while h has the condition number L b²/(4 μ_x μ_y β). This is the rate of the lower bound of Ji,
Liang (arXiv 2102.03926, Ω(1/(√μ_x μ_y))), of which only the abstract was available: the construction is ours.
"""

from dataclasses import dataclass, field
from math import sqrt
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from bilevel._core.compilation import arithmetic, resolve_dtype
from bilevel._core.types import Array, InnerPass, OuterPass, Point
from bilevel.oracles import Oracles, Samples
from bilevel.oracles.samples import STATIC
from bilevel.problems.base import BilevelProblem
from bilevel.problems.checks import check_memory, check_positive, check_sizes
from bilevel.problems.quadratic import Means, QuadraticExactSolver

_SMOOTHNESS, _OUTER_SMOOTHNESS, _COUPLING = 1.0, 1.0, 0.5  # L_y, L and b: the derivatives of G are 1-Lipschitz


class Scales(NamedTuple):
    """The numbers of the formulas: μ_y, β, b, γ on the inner level; L, μ_x, δ on the outer one; t_1 and t_2."""

    inner_curvature: float
    chain_curvature: float
    coupling: float
    inner_slope: float
    outer_smoothness: float
    outer_curvature: float
    outer_slope: float
    roots: tuple[float, float]

    @classmethod
    def of(cls, inner_curvature: float, outer_curvature: float) -> "Scales":
        """Return the scales for these μ_y and μ_x."""
        mu_y, mu_x, b = inner_curvature, outer_curvature, _COUPLING
        beta, curvature = (_SMOOTHNESS - mu_y) / 4, _OUTER_SMOOTHNESS * _COUPLING**2
        # The roots of μ_x (μ_y + β t)² + L b² t.
        half = mu_y / beta + curvature / (2 * beta**2 * mu_x)
        low = -half - sqrt(half**2 - (mu_y / beta) ** 2)
        high = (mu_y / beta) ** 2 / low
        slope = (-(mu_y**2) / low - mu_y * beta) / (_OUTER_SMOOTHNESS * b)
        return cls(mu_y, beta, b, slope, _OUTER_SMOOTHNESS, mu_x, beta / b, (high, low))

    @property
    def ratio(self) -> float:
        """q, the factor by which the coordinates of x* decrease."""
        half = -self.roots[0] / 2
        return 1 / (1 + half + sqrt(half * (half + 2)))


def convex_chain(
    dim: int = 256, *, inner_curvature: float = 0.1, outer_curvature: float = 1e-2, dtype: DTypeLike | None = None
) -> BilevelProblem:
    """Build the problem, with derivatives of G that are 1-Lipschitz.

    The ``info`` of the problem contains ``mu_G``, ``mu_h``, ``L_h`` and ``q``, exactly.

    Parameters
    ----------
    dim : d, the size of both variables; the bound is that of an endless chain if q^d is small
    inner_curvature : μ_y, below 1; κ_y = 1/μ_y
    outer_curvature : μ_x
    dtype : "float32" or "float64", in which runs compute; by default the one that JAX gives to float64 data
    """
    dtype = resolve_dtype(dtype, drawn=np.float64(0))
    (dim,) = check_sizes(dim=dim)
    check_memory(8 * dim**2, np.float64, "dim")
    mu_y, mu_x = check_positive(inner_curvature=inner_curvature, outer_curvature=outer_curvature)
    if mu_y >= _SMOOTHNESS:
        raise ValueError(f"`inner_curvature={mu_y!r}`: must be below 1, the smoothness of G.")
    scales = Scales.of(mu_y, mu_x)
    with arithmetic(dtype):
        samples = Samples(jnp.ones(1, dtype), 1, axes=(0,), dtype=dtype)
    oracles = ConvexChain(samples, samples, scales=scales)
    start = Point(*(np.zeros(dim, dtype) for _ in Point._fields))
    curvatures = (
        mu_x
        + (values := eigenvalues(dim))
        * scales.outer_smoothness
        * (scales.coupling / (mu_y + scales.chain_curvature * values)) ** 2
    )
    info = {"mu_G": mu_y + scales.chain_curvature * float(values[0]), "q": scales.ratio}
    info |= {"mu_h": float(curvatures.min()), "L_h": float(curvatures.max())}
    return BilevelProblem(oracles, start, exact_solver(dim, scales), "convex_chain", {}, info)


def eigenvalues(dim: int) -> np.ndarray:
    """Return the eigenvalues of T, and of D'D, in increasing order."""
    return 4 * np.sin((2 * np.arange(1, dim + 1) - 1) * np.pi / (4 * dim + 2)) ** 2


def minimizer(dim: int, scales: Scales) -> np.ndarray:
    """Return x* in closed form."""
    q, places = scales.ratio, np.arange(1, dim + 1)
    amplitude = scales.inner_curvature**2 / (-scales.roots[1] * scales.chain_curvature**2 * scales.outer_curvature)
    return amplitude / ((1 - q) * (1 + q ** (2 * dim + 1))) * (q**places - q ** (2 * dim + 2 - places))


def exact_solver(dim: int, scales: Scales) -> QuadraticExactSolver:
    """Return the exact solver of quadratics for the matrices of this one, which does not use its closed form."""
    first, nothing = np.eye(dim)[0], np.zeros((dim, dim))
    chain = np.eye(dim) - np.eye(dim, k=-1)
    inner = scales.inner_curvature * np.eye(dim) + scales.chain_curvature * chain.T @ chain
    levels = (
        Means(inner, nothing, -scales.coupling * chain, scales.inner_slope * first, 0 * first),
        Means(
            scales.outer_smoothness * np.eye(dim),
            scales.outer_curvature * np.eye(dim),
            nothing,
            scales.outer_slope * first,
            -first,
        ),
    )
    return QuadraticExactSolver(*levels)


def gradient_floors(problem: BilevelProblem) -> np.ndarray:
    """Return the smallest ||∇h||² over all x with x_i = 0 for i > k, for k = 0, …, d.

    ∇h = ∇²h (x - x*), and with the QR factorization of ∇²h the residual of the first k columns is that of Q'∇²h x*.
    """
    solver = problem.exact_solver
    assert isinstance(solver, QuadraticExactSolver)
    left = np.linalg.qr(solver.hessian)[0].T @ (solver.hessian @ solver.minimizer)
    return np.append(np.cumsum(left[::-1] ** 2)[::-1], 0.0)


def required_derivatives(problem: BilevelProblem, epsilon: float) -> int:
    """Return how many inner derivatives a linear method needs at least until ||∇h||² <= epsilon."""
    return max(0, int(np.argmax(gradient_floors(problem) <= epsilon)) - 1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ConvexChain(Oracles):
    """Derivatives in closed form; they are exactly 0 beyond the coordinates that are revealed."""

    scales: Scales = field(metadata=STATIC)

    @property
    def largest_curvature(self) -> float:
        return _SMOOTHNESS

    def _curve(self, z: Array) -> Array:
        return self.scales.inner_curvature * z + self.scales.chain_curvature * _transposed(_differences(z))

    def _inner(self, point: Point, data: Array, weights: Array) -> InnerPass:
        (z, x, v), total = point, jnp.sum(weights * data)
        grad = self._curve(z) - self.scales.coupling * _transposed(x)
        cross = -self.scales.coupling * _differences(v)
        return InnerPass(total * grad.at[0].add(self.scales.inner_slope), total * self._curve(v), total * cross)

    def _inner_grad_outer(self, point: Point, data: Array, weights: Array) -> Array:
        return -self.scales.coupling * jnp.sum(weights * data) * _differences(point.inner_var)

    def _outer(self, point: Point, data: Array, weights: Array) -> OuterPass:
        (z, x, _), total = point, jnp.sum(weights * data)
        grad = (self.scales.outer_smoothness * z).at[0].add(self.scales.outer_slope)
        return OuterPass(total * grad, total * (self.scales.outer_curvature * x).at[0].add(-1))

    def _inner_value(self, point: Point, data: Array, weights: Array) -> Array:
        z, x, _ = point
        value = z @ self._curve(z) / 2 - self.scales.coupling * (x @ _differences(z)) + self.scales.inner_slope * z[0]
        return jnp.sum(weights * data) * value

    def _outer_value(self, point: Point, data: Array, weights: Array) -> Array:
        z, x, _ = point
        value = self.scales.outer_smoothness * (z @ z) / 2 + self.scales.outer_curvature * (x @ x) / 2
        return jnp.sum(weights * data) * (value + self.scales.outer_slope * z[0] - x[0])


def _differences(z: Array) -> Array:
    """Return D z."""
    return jnp.diff(z, prepend=0)


def _transposed(x: Array) -> Array:
    """Return D'x."""
    return -jnp.diff(x, append=0)
