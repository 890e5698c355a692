"""A bound on the error of a hypergradient, from residuals and constants.

Fix x and write H, g for ∇²zz G and ∇z F at z, and H*, g* for them at z* = z*(x), so that D_z = ∇z G, D_v = H v + g and
H* v* = -g*. Lengths are taken in a metric M that is positive definite: ||w|| = √(w'Mw) for z and v, and
||r||' = √(r'M⁻¹r) for residuals. Where H* >= μ M and

    ||z - z*||     <= δ
    ||(H - H*) v||' <= a δ        ||g - g*||' <= b δ
    ||D_x(z, v, x) - D_x(z*, v, x)||_2 <= c δ        ||(∇²xz G)(z*, x) w||_2 <= e ||w||  for all w

it follows from  H* (v - v*) = H* v + g* = D_v - (H - H*) v - (g - g*)  that

    ||v - v*|| <= ε = (||D_v||' + (a + b) δ) / μ

and from  D_x(z, v, x) - ∇h(x) = [D_x(z, v, x) - D_x(z*, v, x)] + (∇²xz G)(z*, x) (v - v*)  that

    ||D_x(z, v, x) - ∇h(x)||_2 <= c δ + e ε.

With M = I and constants of the whole space this is δ = ||D_z||/μ, a = L2_G ||v||, b = L1_F, c = L2_G ||v|| + L1_F,
e = L1_G. The file of a model family gives sharper ones, of the point. Rows are columns here: (features, samples).
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isfinite, sqrt
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from bilevel import _tree as trees
from bilevel._precision import arithmetic
from bilevel._programs import Compiled
from bilevel._types import Array, Point
from bilevel.problems.checks import as_array
from bilevel.problems.exact import stationarity

if TYPE_CHECKING:
    from bilevel.problems.base import BilevelProblem


class Bounds(NamedTuple):
    """The numbers of the proof, named as there, and the smallest eigenvalue of M."""

    delta: float
    mu: float
    v_residual: float
    a: float
    b: float
    c: float
    e: float
    least: float = 1.0

    @property
    def epsilon(self) -> float:
        return (self.v_residual + (self.a + self.b) * self.delta) / self.mu

    @property
    def error(self) -> float:
        """The bound of the error of D_x, infinite where a number is."""
        error = self.c * self.delta + self.e * self.epsilon
        return error if isfinite(error) else inf


NOTHING = Bounds(inf, 1.0, inf, 0.0, 0.0, 1.0, 1.0)

# Up to this many numbers per row, eigenvalues of mean dd' are computed; above, their sum bounds them.
DENSE = 1024


@dataclass(frozen=True)
class Certificate:
    """How far the direction D_x at a point (z, x, v) can be from ∇h(x), without z*(x) or v*(x) being known.

    Residuals are those of all rows, in float64; the rounding of that arithmetic is not part of the bounds.

    Attributes
    ----------
    error_bound : of ||D_x(z, v, x) - ∇h(x)||
    hypergrad_norm_bound : of ||∇h(x)||: ||D_x|| + error_bound. Where x is at a bound, components of either that push
        against it do not count
    inner_distance_bound, v_distance_bound : of ||z - z*(x)|| and ||v - v*(x)||
    certified : whether all of this is proved; else `why` says what is missing, and infinite bounds say nothing
    why : where the constants come from, or why there are none
    """

    error_bound: float
    hypergrad_norm_bound: float
    inner_distance_bound: float
    v_distance_bound: float
    certified: bool
    why: str

    def __str__(self) -> str:
        if not isfinite(self.error_bound):
            return f"No bound: {self.why}"
        kind = "certified" if self.certified else "estimated, not certified"
        near = f"z within {self.inner_distance_bound:.3g} of z*(x), v within {self.v_distance_bound:.3g} of v*(x)"
        norm, error = self.hypergrad_norm_bound, self.error_bound
        return f"||∇h(x)|| <= {norm:.3g}, {kind}: D_x is within {error:.3g} of ∇h(x), {near}. {self.why}"


@dataclass(frozen=True)
class Metric:
    """M = L L', positive definite; ``inverse_root`` is L⁻¹, or its diagonal where M is diagonal."""

    inverse_root: np.ndarray
    least: float

    @classmethod
    def dense(cls, matrix: np.ndarray) -> "Metric":
        """Return the metric of a matrix; LinAlgError where float64 cannot tell it from a singular one."""
        eigenvalues = np.linalg.eigvalsh(matrix)
        if not eigenvalues[0] > 1e-10 * eigenvalues[-1]:  # such a one is known to some six digits
            raise np.linalg.LinAlgError("not positive definite")
        return cls(np.linalg.inv(np.linalg.cholesky(matrix)), float(eigenvalues[0]))

    @classmethod
    def diagonal(cls, values: np.ndarray) -> "Metric":
        return cls(1 / np.sqrt(values), float(values.min()))

    def dual_norm(self, residual: np.ndarray) -> float:
        """Return √(r'M⁻¹r)."""
        root = self.inverse_root
        return float(np.linalg.norm(root * residual if root.ndim == 1 else root @ residual))

    def operator_norm(self, matrix: np.ndarray) -> float:
        """Return the norm of w -> matrix w, from the metric to the Euclidean one."""
        return float(np.linalg.norm(matrix @ self.inverse_root.T, 2))

    def largest(self, matrix: np.ndarray) -> float:
        """Return the largest eigenvalue of M⁻¹ times a symmetric matrix."""
        return largest(self.inverse_root @ matrix @ self.inverse_root.T)

    def smallest(self, matrix: np.ndarray) -> float:
        """Return the smallest eigenvalue of M⁻¹ times a symmetric matrix."""
        return float(np.linalg.eigvalsh(self.inverse_root @ matrix @ self.inverse_root.T)[0])

    def grouped_norm(self, factors: np.ndarray, groups: np.ndarray) -> float:
        """Return the norm of w -> (sum of factors w over each group)."""
        if self.inverse_root.ndim == 1:
            return float(np.sqrt(np.bincount(groups, (factors * self.inverse_root) ** 2).max()))
        sums = np.zeros((groups.max() + 1, len(factors)))
        sums[groups, np.arange(len(factors))] = factors
        return self.operator_norm(sums)


def largest(matrix: Any) -> float:
    """Return the largest eigenvalue of a matrix without negative ones, infinite where the matrix is not finite."""
    array = np.asarray(matrix)
    return max(0.0, float(np.linalg.eigvalsh(array)[-1])) if np.all(np.isfinite(array)) else inf


def whiten(rows: Array, inverse_root: Array) -> Array:
    """Return L⁻¹ d of each row: d'w = (L⁻¹d)'(L'w) <= ||L⁻¹d|| ||w||."""
    return inverse_root[:, None] * rows if inverse_root.ndim == 1 else inverse_root @ rows


def norms(rows: Array) -> Array:
    """Return the norm of each row."""
    return jnp.sqrt(jnp.sum(rows**2, axis=0))


def second_moment(rows: Array, weights: Array) -> Array:
    """Return the sum of weights dd', or for long rows its trace as a matrix of one number: the larger bound."""
    if rows.shape[0] > DENSE:
        return jnp.sum(weights * jnp.sum(rows**2, axis=0))[None, None]
    return (rows * weights) @ rows.T


def ball(metric: Metric, residual: float, least_hessian: Callable[[float], np.ndarray]) -> tuple[float, float] | None:
    """Return δ and μ with ||z - z*|| <= δ and H >= μ M within δ of z, or None where none is found.

    Let f(t) be the smallest eigenvalue of M⁻¹ times ``least_hessian(t)``, a lower bound of H within t of z. On the edge
    of that ball ∇z G has a part of at least t f(t) - ||D_z||' pointing outwards; where that is not negative, z* is
    inside. G is then f(t)-strongly convex between z and z*: δ = ||D_z||'/f(t), μ = f(t).
    """
    mu = 1.0
    for _ in range(12):
        radius = 1.02 * residual / mu  # t f(t) would never reach ||D_z||' if the next t were just ||D_z||'/f(t)
        mu = metric.smallest(least_hessian(radius))
        if not mu > 1e-3:
            return None  # so far from z, the metric of z is of no use
        if radius * mu >= residual:
            return residual / mu, mu
    return None


class PointBounds(Protocol):
    """From a point and D there, in NumPy and float64, to the numbers of the proof."""

    why: str

    def __call__(self, point: Point, direction: Point) -> Bounds: ...


_SHARDED = "The rows lie on several devices; ask for a certificate with the problem before `sharded`."
_UNKNOWN = "The inner loss is not known to be strongly convex; where it is, `strongly_convex=True` gives estimates."
_TOO_FAR = "From the residuals and the curvature at this point no finite bound follows in float64."

_direction = Compiled(lambda oracles, point: oracles.direction(point))


class Certifier:
    """Certificates of one problem; `certified` and `why` are those of each of them."""

    def __init__(self, problem: "BilevelProblem") -> None:
        make = problem.certificate_bounds
        with arithmetic(np.float64):
            self._oracles = problem.oracles.in_float64()
            self._bounds_at = None if make is None else make(problem)
        self.certified = problem.is_certified and self._bounds_at is not None
        missing = _SHARDED if problem.oracles.is_sharded else _UNKNOWN
        self.why = missing if self._bounds_at is None else self._bounds_at.why

    def __call__(self, point: Point) -> Certificate:
        """Return the certificate of a point; it takes a few passes over all rows, and no solve."""
        if self._bounds_at is None:
            return Certificate(inf, inf, inf, inf, False, self.why)
        if any(as_array("point", leaf).dtype.kind not in "fiu" for leaf in jax.tree.leaves(point)):
            raise ValueError("`point` holds other numbers than real ones; give a point such as `result.point`.")
        with arithmetic(np.float64), np.errstate(all="ignore"):
            point = trees.to_numpy(point, np.float64)
            direction = trees.to_numpy(_direction(self._oracles, point))
            norm = float(np.sqrt(stationarity(self._oracles, point.outer_var, direction.outer_var)))
            try:
                bounds = self._bounds_at(point, direction)
            except np.linalg.LinAlgError:
                bounds = NOTHING  # numbers that are not finite, or too far apart for float64
        if not np.isfinite(norm + bounds.error):
            return Certificate(inf, inf, inf, inf, False, _TOO_FAR)
        root = sqrt(bounds.least)  # from the metric to Euclidean distances
        lengths = bounds.error, norm + bounds.error, bounds.delta / root, bounds.epsilon / root
        return Certificate(*lengths, self.certified, self.why)
