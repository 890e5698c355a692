"""The problem of the lower bound: no method in the span of gradients finds a stationary point with fewer queries.

    G_i = μ/2 ||z - x||²        F_j = λ f(U_j z / β)

with orthonormal rows in all U_j together and a chain f of T + 1 coordinates:

    f(y) = √α/2 (y_1 - 1)² + ½ sum_k (y_k+1 - y_k)² + α sum_k Γ(y_k)
    Γ(t) = 120 ∫ from 1 to t of s² (s - 1) / (1 + s²) ds

A gradient of f is nonzero in a coordinate only if the previous coordinate is nonzero. z*(x) = x, so that h = F and
v* = -∇F(x) / μ. h is at least 0, and it is 0 if U x = β. Constants are exact, everywhere.

Certificates. M = I, δ = ||D_z||/μ, a = c = 0, b = L1_F, e = μ.
"""

from abc import abstractmethod
from dataclasses import dataclass, field
from functools import cache, partial
from math import floor, log, pi, sqrt
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from bilevel._core import trees
from bilevel._core.compilation import Compiled, arithmetic, resolve_dtype
from bilevel._core.types import INT32_MAX, Array, InnerPass, OuterPass, Point
from bilevel.oracles import Oracles, Samples
from bilevel.oracles.samples import STATIC
from bilevel.problems.base import BilevelProblem
from bilevel.problems.certificate import Bounds, Found, Region, Values
from bilevel.problems.checks import check_choice, check_memory, check_outer, check_positive, check_sizes, make_rng
from bilevel.problems.exact import ExactSolution

GAMMA_CURVATURE = 180  # the maximum of |Γ''|, at -1
GAMMA_AT_0 = 60 * (1 + log(2)) - 30 * pi
ALPHA = 1 / GAMMA_CURVATURE
SHORTEST_CHAIN = 14  # the first integer of at least 1/√α, from which h(0) - inf h <= gap is proved


def worst_case(
    n_outer: int,
    epsilon: float,
    *,
    normalization: str = "individual",
    n_inner: int | None = None,
    smoothness: float = 1.0,
    gap: float = 1.0,
    inner_curvature: float = 1.0,
    rotation: str = "coordinates",
    dtype: DTypeLike | None = None,
    seed: int = 0,
) -> BilevelProblem:
    """Build the instance on which ||∇h||² <= epsilon requires at least ``query_bound`` queries of rows of F.

    The variables have m (T + 1) dimensions. A query of F_j at any point reached so far reveals at most one more
    coordinate of chain j, and ||∇h||² exceeds epsilon until more than half of the chains are revealed to the end.
    Queries are calls of ``outer_grad``. The bound holds for methods that start at 0 and stay in the span of all
    gradients that they have computed.

    The ``info`` of the problem contains ``alpha``, ``lambda``, ``beta``, ``T``, ``L``, ``Delta``, ``mu_G`` and
    ``epsilon``; the smallest valid ``outer_smoothness`` (of each F_j), ``mean_squared_smoothness`` and
    ``value_smoothness`` (of h); ``initial_gap``, which is h(0) - inf h exactly; and ``query_bound`` = m T / 2.

    Parameters
    ----------
    n_outer : m, number of outer samples
    epsilon : the squared norm of ∇h below which a point is stationary. It determines T; if T < 14, ValueError is
        raised, since h(0) - inf h <= gap is then not proved
    normalization : "individual": each F_j is L-smooth, and the bound does not depend on m. "mean_squared":
        mean_j ||∇F_j(a) - ∇F_j(b)||² <= L² ||a - b||², each F_j is √m L-smooth, and the bound increases as √m
    n_inner : n, number of inner samples, which are all equal; by default that of outer samples
    smoothness : L
    gap : Δ, an upper bound of h(0) - inf h
    inner_curvature : μ
    rotation : directions of the chains. "coordinates": along the axes, one after the other; coordinates that are not
        revealed stay exactly 0. "random": along a random basis of p² numbers, for methods that treat coordinates
        separately; rounding errors then change all coordinates. The bound is the same
    dtype : "float32" or "float64", in which runs compute; by default the one that JAX gives to float64 data
    seed : seed of the random basis
    """
    dtype = resolve_dtype(dtype, drawn=np.float64(0))  # as the numbers below
    n_inner = n_outer if n_inner is None else n_inner
    n_outer, n_inner = check_sizes(n_outer=n_outer, n_inner=n_inner)
    scales = {"epsilon": epsilon, "smoothness": smoothness, "gap": gap, "inner_curvature": inner_curvature}
    epsilon, smoothness, gap, inner_curvature = check_positive(**scales)
    check_choice("normalization", normalization, ("individual", "mean_squared"))
    check_choice("rotation", rotation, ("coordinates", "random"))
    each = smoothness if normalization == "individual" else sqrt(n_outer) * smoothness
    amplitude, width, length = chain_scales(n_outer, epsilon, each, gap)
    dim, curvature = n_outer * (length + 1), float(dtype.type(inner_curvature))  # as the rows hold it
    check_memory(n_inner + dim * (dim if rotation == "random" else 10), dtype, "n_inner", "n_outer", "epsilon")
    with arithmetic(dtype):
        kind, outer_rows = _chains(rotation, n_outer, dim, dtype, seed)
        inner = Samples(jnp.full(n_inner, curvature, dtype), n_inner, axes=(0,), dtype=dtype)
        outer = Samples(outer_rows, n_outer, axes=(0,), dtype=dtype)
    oracles = kind(inner, outer, amplitude=amplitude, width=width, curvature=curvature)
    start = Point(*(np.zeros(dim, dtype) for _ in Point._fields))
    info = {"L": smoothness, "Delta": gap, "mu_G": inner_curvature, "epsilon": epsilon}
    info |= {"alpha": ALPHA, "lambda": amplitude, "beta": width, "T": length}
    info |= chain_numbers(n_outer, amplitude, width, length)
    solver, name = WorstCaseExactSolver(oracles), f"worst_case ({normalization})"
    return BilevelProblem(oracles, start, solver, name, {}, info, worst_case_constants, WorstCaseBounds)


def chain_scales(m: int, epsilon: float, each: float, gap: float) -> tuple[float, float, int]:
    """Return λ, β and T for F_j that are ``each``-smooth."""
    budget = gap * each * sqrt(ALPHA) / (1760 * m)
    if not budget / epsilon >= SHORTEST_CHAIN:
        largest = f"{0.9995 * budget / SHORTEST_CHAIN:.3e}"  # rounded down, so that this value is accepted
        found = f"`epsilon={epsilon!r}` leaves chains of T = {floor(budget / epsilon)} < {SHORTEST_CHAIN}"
        raise ValueError(f"{found}; take `epsilon` <= {largest}, or a larger `gap` or `smoothness`.")
    if not m * (budget / epsilon + 1) <= INT32_MAX:
        raise ValueError(f"`epsilon={epsilon!r}` needs more than {INT32_MAX} coordinates; take a larger one.")
    amplitude = 160 * m * epsilon / (each * ALPHA**1.5)
    return amplitude, sqrt(5 * amplitude / each), floor(budget / epsilon)


def chain_numbers(m: int, amplitude: float, width: float, length: int) -> dict[str, float]:
    """Return the numbers that are known in closed form for m chains with these scales.

    max ||∇²f|| is the largest eigenvalue at y = (-1, ..., -1), where each Γ'' has its maximum.
    """
    from scipy.linalg import eigh_tridiagonal

    diagonal = np.full(length + 1, 2 + ALPHA * GAMMA_CURVATURE)
    diagonal[0] += sqrt(ALPHA) - 1
    diagonal[-1] = 1
    last = {"eigvals_only": True, "select": "i", "select_range": (length, length)}
    smoothness = amplitude / width**2 * float(eigh_tridiagonal(diagonal, -np.ones(length), **last)[0])
    chain_at_0 = sqrt(ALPHA) / 2 + ALPHA * length * GAMMA_AT_0
    numbers = {"outer_smoothness": smoothness, "mean_squared_smoothness": smoothness / sqrt(m)}
    numbers |= {"value_smoothness": smoothness / m, "initial_gap": amplitude * chain_at_0}
    return numbers | {"query_bound": m * length / 2}


def _chains(rotation: str, m: int, dim: int, dtype: np.dtype, seed: int) -> "tuple[type[WorstCaseOracles], Array]":
    if rotation == "coordinates":
        return CoordinateChains, jnp.arange(m, dtype=jnp.int32)
    from scipy.stats import ortho_group

    basis = ortho_group.rvs(dim, random_state=make_rng(seed))
    return RotatedChains, trees.put(basis.reshape(m, -1, dim), dtype)


def gamma(t: Array) -> Array:
    """Return Γ = 120 [(t - 1)²/2 - ½ log((1 + t²)/2) + atan(t) - π/4], without its cancellation at t = 1."""
    s = t - 1
    return 120 * (s**2 / 2 - jnp.log1p(s + s**2 / 2) / 2 + jnp.arctan2(s, 2 + s))


def gamma_slope(t: Array) -> Array:
    """Return Γ'."""
    return 120 * (t - 1) * (t**2 / (1 + t**2))


def chain(y: Array, alpha: float) -> Array:
    """Return f along the last axis."""
    squares = alpha**0.5 * (y[..., 0] - 1) ** 2 + jnp.sum(jnp.diff(y) ** 2, axis=-1)
    return squares / 2 + alpha * jnp.sum(gamma(y[..., :-1]), axis=-1)


def chain_slope(y: Array, alpha: float) -> Array:
    """Return ∇f along the last axis. It is exactly 0 after the first of the zeros at the end of y."""
    steps = jnp.diff(y)
    from_previous = jnp.concatenate([alpha**0.5 * (y[..., :1] - 1), steps], axis=-1)
    to_next = jnp.concatenate([alpha * gamma_slope(y[..., :-1]) - steps, jnp.zeros_like(y[..., :1])], axis=-1)
    return from_previous + to_next


@dataclass(frozen=True, kw_only=True)
class WorstCaseOracles(Oracles):
    """Derivatives; an inner row contains its curvature μ, and a subclass defines the outer rows.

    Attributes
    ----------
    amplitude, width : λ and β
    curvature : μ
    """

    amplitude: float = field(metadata=STATIC)
    width: float = field(metadata=STATIC)
    curvature: float = field(metadata=STATIC)

    @abstractmethod
    def _parts(self, z: Array, rows: Array) -> Array:
        """Return U_j z of each row, (rows, T + 1)."""

    @property
    def largest_curvature(self) -> float:
        return self.curvature

    def _inner(self, point: Point, data: Array, weights: Array) -> InnerPass:
        z, x, v = point
        curvature = jnp.sum(weights * data)
        return InnerPass(curvature * (z - x), curvature * v, -curvature * v)

    def _inner_grad_outer(self, point: Point, data: Array, weights: Array) -> Array:
        return jnp.sum(weights * data) * (point.outer_var - point.inner_var)

    def _outer(self, point: Point, data: Array, weights: Array) -> OuterPass:
        parts, transpose = jax.vjp(partial(self._parts, rows=data), point.inner_var)
        slopes = self.amplitude / self.width * chain_slope(parts / self.width, ALPHA)
        (grad,) = transpose(weights[:, None] * slopes)
        return OuterPass(grad, jnp.zeros_like(point.outer_var))

    def _inner_value(self, point: Point, data: Array, weights: Array) -> Array:
        return jnp.sum(weights * data) / 2 * jnp.sum((point.inner_var - point.outer_var) ** 2)

    def _outer_value(self, point: Point, data: Array, weights: Array) -> Array:
        return self.amplitude * jnp.sum(weights * chain(self._parts(point.inner_var, data) / self.width, ALPHA))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class CoordinateChains(WorstCaseOracles):
    """U_j selects the j-th of m equal parts of z; an outer row contains its number j."""

    def _parts(self, z: Array, rows: Array) -> Array:
        return jnp.take(z.reshape(self.n_outer, -1), rows, axis=0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class RotatedChains(WorstCaseOracles):
    """An outer row contains U_j, (T + 1, p)."""

    def _parts(self, z: Array, rows: Array) -> Array:
        return rows @ z


_outer_value_and_grads = Compiled(lambda oracles, point: (oracles.outer_value(point), oracles.outer(point)))


class WorstCaseExactSolver:
    """Exact solutions in closed form."""

    def __init__(self, oracles: WorstCaseOracles) -> None:
        self._oracles = oracles
        self._in_float64 = cache(partial(oracles.astype, np.float64))  # computed once, at the first use

    def __call__(self, outer_var: np.ndarray, guess: ExactSolution | None = None) -> ExactSolution:
        x = check_outer(outer_var)
        with arithmetic(np.float64):
            value, outer = _outer_value_and_grads(self._in_float64(), Point(x, x, x))
        grad, h = np.asarray(outer.grad), float(value)
        v = -grad / self._oracles.curvature
        v_residual = float(np.linalg.norm(self._oracles.curvature * v + grad))
        return ExactSolution(x, v, h, grad, inner_residual=0.0, v_residual=v_residual, value_gap=h)


def worst_case_constants(problem: BilevelProblem, radius: float | None, box: Any) -> Found:
    """Return exact constants; z* = x, v* = -∇F / μ, and the Hessian of each G_i is μ [[I, -I], [-I, I]]."""
    oracles = problem.oracles
    assert isinstance(oracles, WorstCaseOracles)
    mu, smoothness = oracles.curvature, problem.info["outer_smoothness"]
    slope, value_smoothness = oracles.amplitude / oracles.width, problem.info["value_smoothness"]
    third = slope / oracles.width**2 * ALPHA * _largest_third_derivative()
    values: Values = {"mu_G": mu, "L1_F": smoothness, "L2_F": third, "L1_G": 2 * mu, "L2_G": 0.0, "L3_G": 0.0}
    values |= {"L_z_star": 1.0, "L_v_star": value_smoothness / mu, "L_h": value_smoothness}
    how = dict.fromkeys(values, "exact")
    if radius is None:
        return values | {"L0_F": None}, how | {"L0_F": "exact", "R": "exact"}, Region()
    steepest = smoothness * radius + slope * sqrt(ALPHA)  # the slope at 0 is the second term
    return values | {"L0_F": steepest}, how | {"L0_F": "bound"}, Region(radius)


def _largest_third_derivative() -> float:
    """Return max |Γ'''|, with Γ''' = -240 (t³ - 3t² - 3t + 1) / (1 + t²)³."""
    top, below = np.poly1d([1, -3, -3, 1]), np.poly1d([1, 0, 1])
    critical = (top.deriv() * below - 3 * top * below.deriv()).roots
    real = critical[abs(critical.imag) < 1e-9].real
    return float(240 * np.max(abs(top(real)) / below(real) ** 3))


class WorstCaseBounds:
    """Bounds at points of the worst case."""

    why = "All constants are known."

    def __init__(self, problem: BilevelProblem) -> None:
        assert isinstance(problem.oracles, WorstCaseOracles)
        self._mu, self._smoothness = problem.oracles.curvature, problem.info["outer_smoothness"]

    def __call__(self, point: Point, direction: Point) -> Bounds:
        delta = float(np.linalg.norm(direction.inner_var)) / self._mu
        return Bounds(delta, self._mu, float(np.linalg.norm(direction.v)), 0.0, self._smoothness, 0.0, self._mu)
