"""A hard problem for large condition numbers: signals of the inner level are amplified by κ, and delayed by about √κ.

For each of T + 1 coordinates x_k the inner variable has an amplifier s_k and a path p_k of ℓ coordinates:

    G = Σ_k ½ (b/c) s_k² + ½ p_k'A p_k - b x_k (s_k + p_k1)      b = 1/√2;   A tridiagonal, eigenvalues from μ to 1
    F = λ f(s / (c w), y / (c w))                                y_k = p_kℓ, the end of path k
    f(s, y) = √α/2 (s_1 - 1)² + ½ Σ_k (s_k+1 - y_k)² + α Σ_k Γ(s_k)

with Γ, α, λ, w and T of :mod:`paper.worst_case` with one row. f(s, s) is the chain f there. A is such that
c/b = e_1'A^-1 e_ℓ is as large as it can be: it is at most the error of the best approximation of 1/t on [μ, 1] by
polynomials of degree ℓ - 2, since A^j e_1 does not reach the end of the path for j < ℓ - 1. Hence

    c/b = (1 - μ)/(2μ) ((1 - √μ)/(1 + √μ))^(ℓ - 2),      z*: s_k = y_k = c x_k,      h(x) = λ f(x/w, x/w)

and h has the smoothness c² of a problem without an inner level whose F is 1-smooth, so that T is of the order c²/ε.

Lower bound. Linear methods start at 0 and stay in the span of all gradients and products that they have computed. If
x_k is the last nonzero coordinate, they need ℓ derivatives of G until y_k is not 0, and one more, after ∇z F has
revealed s_k+1, until x_k+1 is not 0. While x_T = 0, ||∇h||² >= 2ε. So they need at least 1 + (T - 1)(ℓ + 1) of them. If
ℓ is of the order √κ, this is of the order κ^5/2 / ε, as in the lower bound of Chen, Zhang (arXiv 2511.22331, version
2), of which only the abstract was available: the construction is ours.
"""

from dataclasses import dataclass, field
from math import sqrt
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from bilevel._core.compilation import Compiled, arithmetic, resolve_dtype
from bilevel._core.types import Array, InnerPass, OuterPass, Point
from bilevel.oracles import Oracles, Samples
from bilevel.oracles.samples import STATIC
from bilevel.problems.base import BilevelProblem
from bilevel.problems.checks import check_memory, check_outer, check_positive, check_sizes
from bilevel.problems.exact import ExactSolution
from paper.worst_case import ALPHA, chain_numbers, chain_scales, gamma, gamma_slope

_COUPLING = sqrt(0.5)  # b, with which ∇²xz G has the norm 1


class Scales(NamedTuple):
    """The numbers of the formulas: μ; the diagonal of A and the entries next to it; c; λ and w."""

    inner_curvature: float
    diagonal: tuple[float, ...]
    off_diagonal: tuple[float, ...]
    gain: float
    amplitude: float
    width: float


def delayed_chain(
    epsilon: float,
    *,
    inner_curvature: float = 0.1,
    delay: int | None = None,
    gap: float = 1.0,
    dtype: DTypeLike | None = None,
) -> BilevelProblem:
    """Build the problem on which ||∇h||² <= epsilon requires at least ``derivative_bound`` derivatives of G.

    ∇z F is 1-Lipschitz, ∇²zz G has eigenvalues from μ to 1, and ∇²xz G has the norm 1. There is one sample on each
    level. The ``info`` of the problem contains ``T``, ``delay``, ``gain`` (c), ``mu_G``, ``L_h``, ``epsilon`` and
    ``derivative_bound``.

    Parameters
    ----------
    epsilon : the squared norm of ∇h below which a point is stationary; it determines T, and must not be too large
    inner_curvature : μ = 1/κ, below 1/4
    delay : ℓ, at least 2; √κ/2 by default
    gap : an upper bound of h(0) - inf h
    dtype : "float32" or "float64", in which runs compute; by default the one that JAX gives to float64 data
    """
    dtype = resolve_dtype(dtype, drawn=np.float64(0))
    epsilon, mu, gap = check_positive(epsilon=epsilon, inner_curvature=inner_curvature, gap=gap)
    (delay,) = check_sizes(delay=max(2, round(0.5 / sqrt(mu))) if delay is None else delay)
    if not mu < 0.25 or delay < 2 or largest_gain(mu, delay) < 1:
        message = "`inner_curvature` must be below 1/4, and `delay` at least 2 and so small that signals are amplified"
        raise ValueError(f"`inner_curvature={mu!r}` and `delay={delay}`: {message}; take a smaller `inner_curvature`.")
    gain = _COUPLING * largest_gain(mu, delay)
    amplitude, width, length = chain_scales(1, epsilon, gain**2, gap)
    check_memory(8 * (length + 1) * (delay + 2), dtype, "epsilon", "delay")
    diagonal, off_diagonal = path_matrix(mu, delay)
    scales = Scales(mu, tuple(diagonal.tolist()), tuple(off_diagonal.tolist()), gain, amplitude, width)
    with arithmetic(dtype):
        samples = Samples(jnp.ones(1, dtype), 1, axes=(0,), dtype=dtype)
    n_inner = (length + 1) * (delay + 1)
    start = Point(*(np.zeros(size, dtype) for size in (n_inner, length + 1, n_inner)))
    info = {"epsilon": epsilon, "Delta": gap, "mu_G": mu, "gain": gain, "delay": delay, "T": length}
    info |= {"L_h": chain_numbers(1, amplitude, width, length)["value_smoothness"]}
    info |= {"derivative_bound": 1 + (length - 1) * (delay + 1)}
    oracles = DelayedChain(samples, samples, scales=scales)
    return BilevelProblem(oracles, start, DelayedChainExactSolver(oracles), "delayed_chain", {}, info)


def largest_gain(mu: float, delay: int) -> float:
    """Return the largest e_1'A^-1 e_ℓ of tridiagonal matrices A of size ℓ with eigenvalues in [μ, 1]."""
    return (1 - mu) / (2 * mu) * ((1 - sqrt(mu)) / (1 + sqrt(mu))) ** (delay - 2)


def path_matrix(mu: float, delay: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the diagonal of the A with the largest gain, and the entries next to it.

    Its eigenvalues are the ℓ points where the error of the best approximation of 1/t by polynomials of degree ℓ - 2 is
    largest, and the squares of the first entries of its eigenvectors are proportional to 1/∏|λ_i - λ_j|. The error is
    proportional to cos((ℓ - 2)φ + δ) at the point (1 + μ - (1 - μ) cos φ)/2.
    """
    from scipy.optimize import brentq

    pole = (1 + mu) / (1 - mu)

    def phase(angle: float) -> float:
        cosine = (pole * np.cos(angle) - 1) / (np.cos(angle) - pole)
        return float((delay - 2) * angle + 2 * np.pi - np.arccos(np.clip(cosine, -1, 1)))

    angles = [brentq(lambda t, j=j: phase(t) - j * np.pi, 0, np.pi, xtol=1e-15) for j in range(2, delay)]
    nodes = (1 + mu - (1 - mu) * np.cos([0, *angles, np.pi])) / 2
    distances = np.abs(np.subtract.outer(nodes, nodes)) + np.eye(delay)
    logs = -np.sum(np.log(distances), axis=1)
    first = np.exp((logs - logs.max()) / 2)
    basis = np.linalg.qr(np.vander(nodes, increasing=True) * first[:, None])[0]
    matrix = basis.T @ (nodes[:, None] * basis)
    return np.diag(matrix).copy(), -np.abs(np.diag(matrix, 1))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DelayedChain(Oracles):
    """Derivatives in closed form. The inner variable is a flat matrix, whose row k is s_k, p_k1, …, p_kℓ."""

    scales: Scales = field(metadata=STATIC)

    @property
    def largest_curvature(self) -> float:
        return 1.0

    def _rows(self, z: Array) -> Array:
        return z.reshape(-1, len(self.scales.diagonal) + 1)

    def curve(self, z: Array) -> Array:
        """Return ∇²zz G times a vector."""
        rows = self._rows(z)
        path, diagonal = rows[:, 1:], jnp.asarray(self.scales.diagonal, z.dtype)
        beside = jnp.asarray(self.scales.off_diagonal, z.dtype)
        image = (diagonal * path).at[:, 1:].add(beside * path[:, :-1]).at[:, :-1].add(beside * path[:, 1:])
        return jnp.concatenate([_COUPLING / self.scales.gain * rows[:, :1], image], axis=1).ravel()

    def force(self, x: Array) -> Array:
        """Return ∇²zx G times a vector, with the opposite sign: b x_k for s_k and for the first coordinate of p_k."""
        rows = jnp.zeros((x.size, len(self.scales.diagonal) + 1), x.dtype)
        return rows.at[:, :2].set(_COUPLING * x[:, None]).ravel()

    def _inner(self, point: Point, data: Array, weights: Array) -> InnerPass:
        (z, x, v), total = point, jnp.sum(weights * data)
        return InnerPass(total * (self.curve(z) - self.force(x)), total * self.curve(v), -total * self._pull(v))

    def _pull(self, z: Array) -> Array:
        return _COUPLING * jnp.sum(self._rows(z)[:, :2], axis=1)

    def _inner_grad_outer(self, point: Point, data: Array, weights: Array) -> Array:
        return -jnp.sum(weights * data) * self._pull(point.inner_var)

    def _outer(self, point: Point, data: Array, weights: Array) -> OuterPass:
        s, y, scale = self._read(point.inner_var)
        jumps = s[1:] - y[:-1]
        of_s = (ALPHA * gamma_slope(s)).at[-1].set(0).at[1:].add(jumps).at[0].add(ALPHA**0.5 * (s[0] - 1))
        slopes = jnp.zeros_like(self._rows(point.inner_var)).at[:, 0].set(of_s).at[:-1, -1].add(-jumps)
        total = jnp.sum(weights * data) * self.scales.amplitude / scale
        return OuterPass(total * slopes.ravel(), jnp.zeros_like(point.outer_var))

    def _read(self, z: Array) -> tuple[Array, Array, float]:
        """Return s and y in units of c w, and c w."""
        rows, scale = self._rows(z), self.scales.gain * self.scales.width
        return rows[:, 0] / scale, rows[:, -1] / scale, scale

    def _inner_value(self, point: Point, data: Array, weights: Array) -> Array:
        z, x, _ = point
        return jnp.sum(weights * data) * (z @ self.curve(z) / 2 - z @ self.force(x))

    def _outer_value(self, point: Point, data: Array, weights: Array) -> Array:
        s, y, _ = self._read(point.inner_var)
        squares = ALPHA**0.5 * (s[0] - 1) ** 2 + jnp.sum((s[1:] - y[:-1]) ** 2)
        value = squares / 2 + ALPHA * jnp.sum(gamma(s[:-1]))
        return jnp.sum(weights * data) * self.scales.amplitude * value


_outer_parts = Compiled(lambda oracles, point: (oracles.outer_value(point), oracles.outer_grad(point)))
_inner_parts = Compiled(lambda oracles, point: (oracles.inner_grad(point), oracles.hvp(point), oracles.cross(point)))


class DelayedChainExactSolver:
    """Exact solutions by one dense inverse of A."""

    def __init__(self, oracles: DelayedChain) -> None:
        diagonal, beside = oracles.scales.diagonal, oracles.scales.off_diagonal
        with arithmetic(np.float64):
            self._oracles = oracles.astype(np.float64)
        self._inverse = np.linalg.inv(np.diag(diagonal) + np.diag(beside, 1) + np.diag(beside, -1))

    def _solve(self, right: np.ndarray) -> np.ndarray:
        rows = right.reshape(-1, len(self._inverse) + 1)
        amplified = rows[:, :1] * (self._oracles.scales.gain / _COUPLING)
        return np.concatenate([amplified, rows[:, 1:] @ self._inverse], axis=1).ravel()

    def __call__(self, outer_var: np.ndarray, guess: ExactSolution | None = None) -> ExactSolution:
        x = check_outer(outer_var)
        with arithmetic(np.float64):
            force = np.zeros((x.size, len(self._inverse) + 1))
            force[:, :2] = _COUPLING * x[:, None]
            z = self._solve(force.ravel())
            value, grad = map(np.asarray, _outer_parts(self._oracles, Point(z, x, z)))
            v = -self._solve(grad)
            of_z, product, hypergrad = map(np.asarray, _inner_parts(self._oracles, Point(z, x, v)))
        residuals = float(np.linalg.norm(of_z)), float(np.linalg.norm(product + grad))
        return ExactSolution(z, v, float(value), hypergrad, *residuals, value_gap=float(value))
