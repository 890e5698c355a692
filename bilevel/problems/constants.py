"""The constants of regularity that the analysis of SRBA assumes, and those it derives from them.

ass:regul_F, ass:regul_G. Each F_j is L0_F-Lipschitz, its gradient and Hessian are L1_F- and L2_F-Lipschitz in
(z, x); derivatives of order 1, 2, 3 of each G_i are L1_G-, L2_G-, L3_G-Lipschitz in (z, x). The paper asks each
G_i(., x) to be μ_G-strongly convex; its proofs use that of the mean G alone, and rows of rank one, as those of its
quadratics, have no more. So ``mu_G`` is that of G, all other constants are of each sample.

A Lipschitz constant of derivatives of order k - 1 is the supremum of |d^k/dt^k f(w + t u)| at t = 0 over points w and
unit vectors u.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf, sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bilevel import _tree as trees

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
        rows = [f"{name:<9} {_shown(getattr(self, name)):>10}  {self.how[name]}" for name in ASSUMED + DERIVED]
        return "\n".join([*rows, f"on {self.region}"])


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
    L_z_star = L1_G / mu_G
    R = None if L0_F is None else L0_F / mu_G
    stretch = 1 + L_z_star**2
    if L2_G > 0 and R is None:
        return {"R": None, "L_z_star": L_z_star, "L_v_star": None, "L_h": None}
    slope = L1_F + (L2_G * R if R is not None else 0.0)
    return {"R": R, "L_z_star": L_z_star, "L_v_star": sqrt(stretch) * slope / mu_G, "L_h": stretch * slope}


def complete(values: Values, how: dict[str, str], region: Region) -> Constants:
    """Add what follows from the assumed constants to what a rule found."""
    needed = ("mu_G", "L0_F", "L1_F", "L1_G", "L2_G")
    follows = implied(**{name: values[name] for name in needed})  # type: ignore[arg-type]
    worst = "estimate" if "estimate" in how.values() else "bound"
    merged: dict[str, Any] = follows | values
    return Constants(**merged, how=dict.fromkeys(follows, worst) | how, region=region)


def _shown(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


def radius_with_start(problem: "BilevelProblem", radius: float) -> float:
    """Return the radius, or a larger one whose ball holds the start."""
    return max(radius, float(np.linalg.norm(trees.flat(problem.start.inner_var))))


def box_around(problem: "BilevelProblem", box: tuple[Any, Any] | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the limits of x: those given, those of the problem where they are finite, or 1 around the start."""
    x = trees.flat(problem.start.outer_var)
    bounds = problem.oracles.outer_bounds if box is None else box
    low, high = (None, None) if bounds is None else bounds
    lower, upper = _limits(low, x, x - 1), _limits(high, x, x + 1)
    if not np.all(lower <= upper):
        raise ValueError(f"`box={box!r}`: a lower limit exceeds its upper one, or one is NaN.")
    return lower, upper


def _limits(given: Any, x: np.ndarray, otherwise: np.ndarray) -> np.ndarray:
    if given is None:
        return otherwise
    limits = trees.flat(given)
    if limits.size not in (1, x.size):
        raise ValueError(f"`box`: a limit has {limits.size} numbers; give one, or {x.size} like the outer variable.")
    return np.where(np.isinf(limits), otherwise, limits)


class Moments(NamedTuple):
    """Largest eigenvalues of mean dd' and of mean ||d|| dd', the longest row, and how many there are."""

    second: float
    third: float
    longest: float
    n: int

    @classmethod
    def of(cls, rows: np.ndarray) -> "Moments":
        """Return those of a table, one row per sample."""
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
