"""The constants of regularity that the analysis of SRBA assumes, and those it derives from them.

ass:regul_F, ass:regul_G. Each F_j is L0_F-Lipschitz, its gradient and Hessian are L1_F- and L2_F-Lipschitz in
(z, x); derivatives of order 1, 2, 3 of each G_i are L1_G-, L2_G-, L3_G-Lipschitz in (z, x). The paper asks each
G_i(., x) to be μ_G-strongly convex; its proofs use that of the mean G alone, and rows of rank one, as those of its
quadratics, have no more. So ``mu_G`` is that of G, all other constants are of each sample.

A Lipschitz constant of derivatives of order k - 1 is the supremum of |d^k/dt^k f(w + t u)| at t = 0 over points w and
unit vectors u. Where it is not known, the largest that a search finds is an estimate: bounds from it are no proof.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf, sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from bilevel import _tree as trees
from bilevel._precision import arithmetic
from bilevel._programs import compiled
from bilevel._types import Array, Point
from bilevel.oracles import Oracles
from bilevel.problems.certificate import NOTHING, Bounds
from bilevel.problems.checks import make_rng

if TYPE_CHECKING:
    from bilevel.problems.base import BilevelProblem


@dataclass(frozen=True, eq=False)
class Region:
    """Where constants hold: ||z|| <= radius and lower <= x <= upper, coordinate by coordinate; None is no limit."""

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


_DRAWS, _ASCENTS = 512, 12  # of a search
ASSUMED = ("mu_G", "L0_F", "L1_F", "L2_F", "L1_G", "L2_G", "L3_G")
DERIVED = ("R", "L_z_star", "L_v_star", "L_h")

Values = dict[str, float | None]
Found = tuple[Values, dict[str, str], Region]  # values and how each was obtained, by name
ConstantsRule = Callable[["BilevelProblem", float | None, Any, int], Found]


@dataclass(frozen=True)
class Constants:
    """Constants of ass:regul_F and ass:regul_G, and what follows from them; None where there is no finite one.

    Attributes
    ----------
    mu_G : strong convexity in z of the mean G
    L0_F, L1_F, L2_F : Lipschitz constants in (z, x) of each F_j, its gradient, its Hessian
    L1_G, L2_G, L3_G : of the gradient, the Hessian, the third derivative of each G_i
    R : bound of ||v*(x)||, see `implied`; like the next three it holds for x whose z*(x) is in the region
    L_z_star, L_v_star, L_h : Lipschitz constants of z*, v*, ∇h
    how : of each of them, "exact" (no smaller one holds; None with "exact" is infinite), "bound" (proved) or "estimate"
        (the largest of many samples: the constant itself is at least this, or for mu_G at most)
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


def implied(mu_G: float, L0_F: float | None, L1_F: float, L1_G: float, L2_G: float) -> dict[str, float | None]:
    """Return R, L_z*, L_v* and L_h as they follow from the constants of the assumptions.

        R = L0_F / μ                                                       (prop:v_star_boundedness)
        L_z* = L1_G / μ,   L_v* = √(1 + L_z*²) (L1_F + L2_G R) / μ         (app:lemma:z_star_lipschitz)
        L_h = (1 + L_z*²) (L1_F + L2_G R)                                  (app:sec:smoothness_h)

    The paper has 1 + L_z* for the root. Its L_h is not linear in F, as a Lipschitz constant of ∇h must be; this one
    is read off ∇²h = [J; I]' ∇²F [J; I] + ∇z F · D²z*, with J = Dz* and ||D²z*|| <= L2_G (1 + L_z*²) / μ.
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
    """Return the radius, or a larger one whose ball holds the start."""
    return max(radius, float(np.linalg.norm(trees.flat(problem.start.inner_var))))


def box_around(problem: "BilevelProblem", box: tuple[Any, Any] | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the limits of x: those given, those of the problem where they are finite, or 1 around the start."""
    x = trees.flat(problem.start.outer_var)
    bounds = problem.oracles.outer_bounds if box is None else box
    limits = []
    for given, otherwise in zip((None, None) if bounds is None else bounds, (x - 1, x + 1), strict=True):
        limit = otherwise if given is None else trees.flat(given)
        if limit.size not in (1, x.size):
            raise ValueError(f"`box`: a limit has {limit.size} numbers; give one, or {x.size} like the outer variable.")
        limits.append(np.where(np.isinf(limit), otherwise, limit))
    lower, upper = limits
    if not np.all(lower <= upper):
        raise ValueError(f"`box={box!r}`: a lower limit exceeds its upper one, or one is NaN.")
    return lower, upper


class Moments(NamedTuple):
    """Largest eigenvalues of mean dd' and of mean ||d|| dd', the longest row, and how many there are."""

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

    Between points of the grid the sum, a trigonometric polynomial of degree k, exceeds them by no more than
    k²/2 (step/2)² sum t_j, and sum t_j is at most 2^(k/2) times its value at a = b.
    """
    degree = len(terms) - 1
    angles, step = np.linspace(0, np.pi / 2, points, retstep=True)
    powers = np.cos(angles)[:, None] ** np.arange(degree, -1, -1) * np.sin(angles)[:, None] ** np.arange(degree + 1)
    return float((powers @ terms).max() * (1 + degree**2 * step**2 / 8 * 2 ** (degree / 2)))


def sample_constants(problem: "BilevelProblem", radius: float | None, box: Any, seed: int) -> Found:
    """Take the largest derivative of each order among many points, rows and directions, improved by ascent."""
    region = Region(radius or radius_with_start(problem, 0.0) + 1, *box_around(problem, box))
    rng = make_rng(seed)
    with arithmetic(np.float64):
        oracles = problem.oracles.in_float64()
        start = trees.cast(problem.start, np.float64)
        flat, unravel = ravel_pytree((start.inner_var, start.outer_var))
        unravel = jax.tree_util.Partial(unravel)
        values: Values = {"mu_G": _least_curvature(oracles, start, unravel, _points(start, region, rng, 16))}
        oracles = oracles.with_batches(1, "iid")
        for level, n, orders in (("F", oracles.n_outer, (1, 2, 3)), ("G", oracles.n_inner, (2, 3, 4))):
            for order in orders:
                draws = _points(start, region, rng, _DRAWS), rng.standard_normal((_DRAWS, flat.size))
                rows = rng.integers(0, n, (_DRAWS, 1)).astype(np.int32)
                largest = _largest_derivatives(oracles, *draws, rows, unravel, level, order)
                values[f"L{order - 1}_{level}"] = float(np.max(largest))
    return values, dict.fromkeys(values, "estimate"), region


def _points(start: Point, region: Region, rng: np.random.Generator, count: int) -> np.ndarray:
    """Return random (z, x) of the region, half of the z on its edge."""
    assert region.radius is not None and region.lower is not None and region.upper is not None
    z = rng.standard_normal((count, trees.flat(start.inner_var).size))
    lengths = region.radius * np.minimum(1, 2 * rng.uniform(size=(count, 1)))
    z *= lengths / np.linalg.norm(z, axis=1, keepdims=True)
    return np.hstack([z, rng.uniform(region.lower, region.upper, (count, len(region.lower)))])


@compiled("level", "order")
def _largest_derivatives(
    oracles: Oracles, points: Array, directions: Array, rows: Array, unravel: Any, level: str, order: int
) -> Array:
    value = oracles.outer_value if level == "F" else oracles.inner_value

    def one(point: Array, direction: Array, row: Array) -> Array:
        def along(direction: Array) -> Array:
            def derivative(t: Array, order: int) -> Array:
                if order == 0:
                    z, x = unravel(point + t * direction)
                    return value(Point(z, x, z), row)
                return jax.jvp(lambda t: derivative(t, order - 1), (t,), (jnp.ones_like(t),))[1]

            return derivative(jnp.zeros_like(point[0]), order)

        def ascend(_: Any, state: tuple[Array, Array]) -> tuple[Array, Array]:
            direction, largest = state
            size, slope = jax.value_and_grad(along)(direction)
            return _unit(slope, direction), jnp.maximum(largest, jnp.abs(size))

        start = _unit(direction, direction), jnp.zeros_like(point[0])
        return jax.lax.fori_loop(0, _ASCENTS, ascend, start)[1]

    return jax.vmap(one)(points, directions, rows)


def _unit(vector: Array, otherwise: Array) -> Array:
    """Return the vector divided by its norm; ``otherwise`` where it is 0."""
    norm = jnp.linalg.norm(vector)
    return jnp.where(norm > 0, vector / jnp.where(norm > 0, norm, 1), otherwise)


def _least_curvature(oracles: Oracles, start: Point, unravel: Any, points: np.ndarray) -> float:
    """Return the smallest eigenvalue of ∇²zz G among some points."""
    z, unravel_z = ravel_pytree(start.inner_var)

    @jax.jit
    def hessian(oracles: Oracles, point: Array, basis: Array) -> Array:
        z, x = unravel(point)
        return jax.lax.map(lambda v: ravel_pytree(oracles.hvp(Point(z, x, unravel_z(v))))[0], basis)

    matrices = (hessian(oracles, point, np.eye(z.size)) for point in points)
    return float(min(np.linalg.eigvalsh(np.asarray(matrix))[0] for matrix in matrices))


class SampledBounds:
    """Bounds from constants sampled at this x, in a ball of z that holds the point."""

    why = "The losses are the user's own: their constants come from a search, and the true ones may be larger."

    def __init__(self, problem: "BilevelProblem") -> None:
        self._problem = problem

    def __call__(self, point: Point, direction: Point) -> Bounds:
        parts = (point.inner_var, point.v, direction.inner_var, direction.v)
        z_norm, v_norm, residual, v_residual = (float(np.linalg.norm(trees.flat(part))) for part in parts)
        try:
            found = self._problem.constants(radius=1 + z_norm, box=(point.outer_var, point.outer_var))
        except ValueError:
            return NOTHING  # the search met curvature that is not positive
        mu, b, e, a = found.mu_G, found.L1_F, found.L1_G, found.L2_G * v_norm
        return Bounds(residual / mu, mu, v_residual, a, b, a + b, e)
