"""Constants of regularity, and certificates: bounds on the error of a hypergradient from residuals and constants.

**Constants** (ass:regul_F, ass:regul_G). Each F_j is L0_F-Lipschitz, and its gradient and Hessian are L1_F- and
L2_F-Lipschitz in (z, x). Derivatives of order 1, 2, 3 of each G_i are L1_G-, L2_G-, L3_G-Lipschitz in (z, x). The paper
requires each G_i(., x) to be μ_G-strongly convex. Its proofs need this only for the mean G, and rows of rank one, as
those of its quadratics, have no more. So ``mu_G`` is the constant of G; all others are constants of each sample.

A Lipschitz constant of derivatives of order k - 1 is the supremum of |d^k/dt^k f(w + t u)| at t = 0 over points w and
unit vectors u.

**Certificates.**
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
e = L1_G. The file of a model family gives sharper numbers, which depend on the point. Rows are columns here: (features,
samples).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf, isfinite, sqrt
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from bilevel._core import trees
from bilevel._core.compilation import arithmetic
from bilevel._core.types import Array, Point
from bilevel.problems.checks import as_array
from bilevel.problems.exact import derivative, stationarity

if TYPE_CHECKING:
    from bilevel.problems.base import BilevelProblem


# Constants


@dataclass(frozen=True, eq=False)
class Region:
    """Where constants hold: ||z|| <= radius and lower <= x <= upper; None means no limit."""

    radius: float | None = None
    lower: np.ndarray | None = None
    upper: np.ndarray | None = None

    @property
    def outer_radius(self) -> float:
        """The largest ||x||."""
        if self.lower is None or self.upper is None:
            return inf
        return float(np.linalg.norm(np.maximum(abs(self.lower), abs(self.upper))))

    def __str__(self) -> str:
        z = "all z" if self.radius is None else f"||z|| <= {self.radius:.4g}"
        if self.lower is None or self.upper is None:
            return f"{z}, all x"
        return f"{z}, x from {self.lower.min():.4g} to {self.upper.max():.4g}"


ASSUMED = ("mu_G", "L0_F", "L1_F", "L2_F", "L1_G", "L2_G", "L3_G")
DERIVED = ("R", "L_z_star", "L_v_star", "L_h")

Values = dict[str, Any]  # numbers, or None
Found = tuple[Values, dict[str, str], Region]  # values, and how each was obtained
ConstantsRule = Callable[["BilevelProblem", float | None, Any], Found]  # of a radius and a box


@dataclass(frozen=True)
class Constants:
    """Constants of ass:regul_F and ass:regul_G, and their consequences; None if a constant is infinite or unknown.

    Attributes
    ----------
    mu_G : strong convexity in z of the mean G
    L0_F, L1_F, L2_F : Lipschitz constants in (z, x) of each F_j, its gradient and its Hessian
    L1_G, L2_G, L3_G : Lipschitz constants of the gradient, the Hessian and the third derivative of each G_i
    R : bound of ||v*(x)||, see `implied`. Like the next three, it holds for x with z*(x) in the region
    L_z_star, L_v_star, L_h : Lipschitz constants of z*, v* and ∇h
    how : for each constant, "exact" (the smallest one; None with "exact" means infinite) or "bound"
    region : where they hold
    """

    mu_G: float
    L0_F: float | None
    L1_F: float
    L2_F: float
    L1_G: float
    L2_G: float
    L3_G: float
    R: float | None
    L_z_star: float
    L_v_star: float | None
    L_h: float | None
    how: Mapping[str, str] = field(hash=False)
    region: Region

    def __str__(self) -> str:
        values = [(name, getattr(self, name)) for name in ASSUMED + DERIVED]
        shown = [(name, "none" if value is None else f"{value:.4g}") for name, value in values]
        return "".join(f"{name:<9} {value:>10}  {self.how[name]}\n" for name, value in shown) + f"on {self.region}"


def implied(mu_G: float, L0_F: float | None, L1_F: float, L1_G: float, L2_G: float) -> Values:
    """Return R, L_z*, L_v* and L_h, which follow from the constants of the assumptions.

        R = L0_F / μ                                                       (prop:v_star_boundedness)
        L_z* = L1_G / μ,   L_v* = √(1 + L_z*²) (L1_F + L2_G R) / μ         (app:lemma:z_star_lipschitz)
        L_h = (1 + L_z*²) (L1_F + L2_G R)                                  (app:sec:smoothness_h)

    The paper has 1 + L_z* instead of the root. Its L_h is not linear in F, as a Lipschitz constant of ∇h must be. This
    one follows from ∇²h = [J; I]' ∇²F [J; I] + ∇z F · D²z*, with J = Dz* and ||D²z*|| <= L2_G (1 + L_z*²) / μ.
    """
    if not mu_G > 0:
        raise ValueError(f"`mu_G={mu_G!r}`: must be above 0, the inner problem is not strongly convex.")
    R = None if L0_F is None else L0_F / mu_G
    L_z_star = L1_G / mu_G
    if L2_G > 0 and R is None:
        return {"R": None, "L_z_star": L_z_star, "L_v_star": None, "L_h": None}
    stretch, slope = 1 + L_z_star**2, L1_F + (0.0 if R is None else L2_G * R)
    return {"R": R, "L_z_star": L_z_star, "L_v_star": sqrt(stretch) * slope / mu_G, "L_h": stretch * slope}


def radius_with_start(problem: "BilevelProblem", radius: float) -> float:
    """Return the radius, or the norm of the start if that is larger."""
    return max(radius, float(np.linalg.norm(trees.flat(problem.start.inner_var))))


def box_around(problem: "BilevelProblem", box: tuple[Any, Any] | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the limits of x: the given ones, finite bounds of the problem, or the start plus and minus 1."""
    x = trees.flat(problem.start.outer_var)
    bounds = problem.oracles.outer_bounds if box is None else box
    limits = []
    for given, otherwise in zip((None, None) if bounds is None else bounds, (x - 1, x + 1), strict=True):
        limit = otherwise if given is None else trees.flat(given)
        if limit.size not in (1, x.size):
            raise ValueError(f"`box`: a limit has {limit.size} numbers; give 1, or {x.size} like the outer variable.")
        limits.append(np.where(np.isinf(limit), otherwise, limit))
    lower, upper = limits
    if not np.all(lower <= upper):
        raise ValueError(f"`box={box!r}`: a lower limit exceeds its upper one, or one is NaN.")
    return lower, upper


class Moments(NamedTuple):
    """Largest eigenvalues of mean dd' and of mean ||d|| dd', the norm of the longest row, and the number of rows."""

    second: float
    third: float
    longest: float
    n: int

    @classmethod
    def of(cls, rows: np.ndarray) -> "Moments":
        n, norms = len(rows), np.linalg.norm(rows, axis=1)
        second, third = (float(np.linalg.eigvalsh((rows.T * weight) @ rows / n)[-1]) for weight in (1.0, norms))
        return cls(second, third, float(norms.max()), n)


def largest_on_circle(terms: np.ndarray, points: int = 4096) -> float:
    """Return an upper bound of sum_j t_j |b|^j |a|^(k - j) over a² + b² = 1, for t_j >= 0 and k <= 4.

    The sum is a trigonometric polynomial of degree k. Between points of a grid it exceeds the values there by at most
    k²/2 (step/2)² sum t_j, and sum t_j is at most 2^(k/2) times its value at a = b.
    """
    degree = len(terms) - 1
    angles, step = np.linspace(0, np.pi / 2, points, retstep=True)
    powers = np.cos(angles)[:, None] ** np.arange(degree, -1, -1) * np.sin(angles)[:, None] ** np.arange(degree + 1)
    return float((powers @ terms).max() * (1 + degree**2 * step**2 / 8 * 2 ** (degree / 2)))


# Certificates


@dataclass(frozen=True)
class WeightedNorm:
    """The norm √(w'Mw) of a positive definite M = L L'; ``inverse_root`` is L⁻¹, or its diagonal if M is diagonal."""

    inverse_root: np.ndarray
    least: float

    @classmethod
    def dense(cls, matrix: np.ndarray) -> "WeightedNorm":
        """Return the norm of a matrix M; raise LinAlgError if it may be singular in float64."""
        eigenvalues = np.linalg.eigvalsh(matrix)
        if not eigenvalues[0] > 1e-10 * eigenvalues[-1]:  # then M⁻¹ has about six correct digits
            raise np.linalg.LinAlgError("not positive definite")
        return cls(np.linalg.inv(np.linalg.cholesky(matrix)), float(eigenvalues[0]))

    @classmethod
    def diagonal(cls, values: np.ndarray) -> "WeightedNorm":
        return cls(1 / np.sqrt(values), float(values.min()))

    def dual_norm(self, residual: np.ndarray) -> float:
        """Return √(r'M⁻¹r)."""
        root = self.inverse_root
        return float(np.linalg.norm(root * residual if root.ndim == 1 else root @ residual))

    def operator_norm(self, matrix: np.ndarray) -> float:
        """Return the norm of w -> matrix w, from this norm to the Euclidean one."""
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


class Bounds(NamedTuple):
    """The numbers of the proof, with the same names, and M."""

    delta: float
    mu: float
    v_residual: float
    a: float
    b: float
    c: float
    e: float
    metric: WeightedNorm = WeightedNorm(np.ones(1), 1.0)

    @property
    def epsilon(self) -> float:
        return (self.v_residual + (self.a + self.b) * self.delta) / self.mu

    @property
    def error(self) -> float:
        """The bound of the error of D_x; infinite if one of the numbers is not finite."""
        error = self.c * self.delta + self.e * self.epsilon
        return error if isfinite(error) else inf


NOTHING = Bounds(inf, 1.0, inf, 0.0, 0.0, 1.0, 1.0)

DENSE = 1024  # up to this many numbers per row, eigenvalues of mean dd' are computed; otherwise their sum bounds them


@dataclass(frozen=True)
class Certificate:
    """A bound on the distance from the direction D_x at a point (z, x, v) to ∇h(x), without knowing z*(x) or v*(x).

    Residuals are computed in float64 on all rows. The rounding errors of this computation are not part of the bounds.

    Attributes
    ----------
    error_bound : bound of ||D_x(z, v, x) - ∇h(x)||
    hypergrad_norm_bound : bound of ||∇h(x)||, which is ||D_x|| + error_bound. If x is at a bound, components of both
        vectors that point outwards are left out. With an outer term it bounds ||x - prox(x - ∇h)||
    inner_distance_bound, v_distance_bound : bounds of ||z - z*(x)|| and ||v - v*(x)||
    why : the source of the bounds, or the reason that they are infinite
    """

    error_bound: float
    hypergrad_norm_bound: float
    inner_distance_bound: float
    v_distance_bound: float
    why: str

    @property
    def certified(self) -> bool:
        """Whether there is a finite bound; all finite bounds are proved."""
        return isfinite(self.error_bound)

    def __str__(self) -> str:
        if not self.certified:
            return f"No bound: {self.why}"
        near = f"z within {self.inner_distance_bound:.3g} of z*(x), v within {self.v_distance_bound:.3g} of v*(x)"
        norm, error = self.hypergrad_norm_bound, self.error_bound
        return f"||∇h(x)|| <= {norm:.3g}, certified: D_x is within {error:.3g} of ∇h(x), {near}. {self.why}"


def largest(matrix: Any) -> float:
    """Return the largest eigenvalue of a positive semidefinite matrix; infinity if the matrix is not finite."""
    array = np.asarray(matrix)
    return max(0.0, float(np.linalg.eigvalsh(array)[-1])) if np.all(np.isfinite(array)) else inf


def whiten(rows: Array, inverse_root: Array) -> Array:
    """Return L⁻¹ d of each row: d'w = (L⁻¹d)'(L'w) <= ||L⁻¹d|| ||w||."""
    return inverse_root[:, None] * rows if inverse_root.ndim == 1 else inverse_root @ rows


def norms(rows: Array) -> Array:
    """Return the norm of each row."""
    return jnp.sqrt(jnp.sum(rows**2, axis=0))


def second_moment(rows: Array, weights: Array) -> Array:
    """Return the sum of weights dd', or for long rows its trace as a 1×1 matrix, which is a larger bound."""
    if rows.shape[0] > DENSE:
        return jnp.sum(weights * jnp.sum(rows**2, axis=0))[None, None]
    return (rows * weights) @ rows.T


def ball(
    metric: WeightedNorm, residual: float, least_hessian: Callable[[float], np.ndarray]
) -> tuple[float, float] | None:
    """Return δ and μ with ||z - z*|| <= δ and H >= μ M within δ of z, or None if no such pair is found.

    Let f(t) be the smallest eigenvalue of M⁻¹ times ``least_hessian(t)``, a lower bound of H within t of z. On the
    boundary of that ball the outward component of ∇z G is at least t f(t) - ||D_z||'. If that is not negative, z* is
    inside, and G is f(t)-strongly convex between z and z*: δ = ||D_z||'/f(t), μ = f(t).
    """
    mu = 1.0
    for _ in range(12):
        radius = 1.02 * residual / mu  # with a factor of 1, t f(t) might never reach ||D_z||'
        mu = metric.smallest(least_hessian(radius))
        if not mu > 1e-3:
            return None  # the metric of z does not fit the Hessian this far from z
        if radius * mu >= residual:
            return residual / mu, mu
    return None


class PointBounds(Protocol):
    """A function from a point and D there, in NumPy and float64, to the numbers of the proof."""

    why: str

    def __call__(self, point: Point, direction: Point) -> Bounds: ...


_SHARDED = "The rows lie on several devices; compute the certificate with the problem before `sharded`."
_UNKNOWN = "Bounds are known for the families of `bilevel.problems`, and not for custom losses."
_TOO_FAR = "No finite bound follows in float64 from the residuals and the curvature at this point."


class Certifier:
    """Certificates of the points of one problem; `certified` is False if nothing is proved about the problem."""

    def __init__(self, problem: "BilevelProblem") -> None:
        self._problem, make = problem, problem.certificate_bounds
        with arithmetic(np.float64, problem):
            self.oracles = problem.oracles.in_float64()
            self._bounds_at = None if make is None else make(problem)
        self.certified = self._bounds_at is not None
        missing = _SHARDED if problem.oracles.is_sharded else _UNKNOWN
        self.why = missing if self._bounds_at is None else self._bounds_at.why

    def __call__(self, point: Point) -> Certificate:
        """Return the certificate of a point, which takes a few full-batch passes and no solve."""
        if self._bounds_at is None:
            return Certificate(inf, inf, inf, inf, self.why)
        if any(as_array("point", leaf).dtype.kind not in "fiu" for leaf in jax.tree.leaves(point)):
            raise ValueError("`point` must contain real numbers; give a point such as `result.point`.")
        with arithmetic(np.float64, self._problem), np.errstate(all="ignore"):
            point = trees.to_numpy(point, np.float64)
            direction = trees.to_numpy(derivative(self.oracles, "direction", point))
            norm = float(np.sqrt(stationarity(self.oracles, point.outer_var, direction.outer_var)))
            bounds = self.bounds(point, direction)
        if not np.isfinite(norm + bounds.error):
            return Certificate(inf, inf, inf, inf, _TOO_FAR)
        root = sqrt(bounds.metric.least)  # from the metric to Euclidean distances
        return Certificate(bounds.error, norm + bounds.error, bounds.delta / root, bounds.epsilon / root, self.why)

    @np.errstate(all="ignore")
    def bounds(self, point: Point, direction: Point) -> Bounds:
        """Return the numbers of the proof at a point, given D there, in NumPy and float64."""
        assert self._bounds_at is not None, "check `certified`"
        try:
            with arithmetic(np.float64, self._problem):
                return self._bounds_at(point, direction)
        except np.linalg.LinAlgError:
            return NOTHING  # numbers that are not finite, or too far apart for float64
