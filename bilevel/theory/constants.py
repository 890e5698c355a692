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
from functools import partial
from math import comb, exp, inf, log, sqrt
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from bilevel import trees
from bilevel.oracles import (
    CleaningOracles,
    Factors,
    LogisticOracles,
    Oracles,
    QuadraticOracles,
    Samples,
    WorstCaseOracles,
)
from bilevel.precision import arithmetic
from bilevel.problems import BilevelProblem
from bilevel.problems.quadratic import Means, QuadraticReferee
from bilevel.types import Array, Point

ASSUMED = ("mu_G", "L0_F", "L1_F", "L2_F", "L1_G", "L2_G", "L3_G")
DERIVED = ("R", "L_z_star", "L_v_star", "L_h")

# Suprema of |σ|, |σ'|, …: of the derivatives of log(1 + exp(s)) from the first on.
SIGMOID = (1.0, 1 / 4, 1 / (6 * sqrt(3)), 1 / 8)
_ROOT = sqrt(0.5 - sqrt(105) / 30)
SIGMOID_FOURTH = _ROOT * (1 - _ROOT**2) * (2 - 3 * _ROOT**2) / 4

_DRAWS, _ASCENTS = 512, 12


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


def constants(
    problem: BilevelProblem, *, radius: float | None = None, box: tuple[Any, Any] | None = None, seed: int = 0
) -> Constants:
    """Return the constants of ass:regul_F and ass:regul_G of a problem.

    Quadratics and the worst case: exact everywhere; L0_F, which is infinite, is bounded on a region where ``radius``
    is given. Logistic selection and data cleaning: proved on a region. Other problems: sampled in a region.

    Parameters
    ----------
    problem : with a strongly convex inner level
    radius : of the ball of z. By default one that z*(x) cannot leave, as G(z*) <= G(0), and that holds the start; for
        sampled problems 1 + ||z_0||
    box : (lower, upper) for x, numbers or like x; by default the bounds of the problem where they are finite, else
        1 around the start. Data cleaning needs none
    seed : of the samples, where the constants are sampled

    Raises
    ------
    ValueError
        When the problem does not say that its inner level is strongly convex, or the region makes no sense.
    """
    if problem.referee is None:
        raise ValueError(
            "`problem` has no exact solution, so its inner level may not be strongly convex and mu_G not exist; "
            "build it with `strongly_convex=True` if it is."
        )
    if radius is not None and not 0 < radius < inf:
        raise ValueError(f"`radius={radius!r}`: must be above 0 and finite, or None.")
    found = _rule(problem.oracles)(problem, radius, box, seed)
    return _completed(*found)


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


_Values = dict[str, float | None]
_Found = tuple[_Values, dict[str, str], Region]  # values and how each was obtained, by name


def _rule(oracles: Oracles) -> Callable[..., _Found]:
    for kind, rule in _RULES.items():
        if isinstance(oracles, kind):
            return rule
    return _sampled


def _completed(values: _Values, how: dict[str, str], region: Region) -> Constants:
    """Add what follows from the assumed constants to what a rule found."""
    needed = ("mu_G", "L0_F", "L1_F", "L1_G", "L2_G")
    follows = implied(**{name: values[name] for name in needed})  # type: ignore[arg-type]
    worst = "estimate" if "estimate" in how.values() else "bound"
    merged: dict[str, Any] = follows | values
    return Constants(**merged, how=dict.fromkeys(follows, worst) | how, region=region)


def _shown(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


# Quadratics ---------------------------------------------------------------------------------------------------------


def _quadratic(problem: BilevelProblem, radius: float | None, box: Any, seed: int) -> _Found:
    """All derivatives above the second are 0; Hessians are those of the rows and of the mean."""
    inner, outer = (_factors64(level) for level in (problem.oracles.inner_samples, problem.oracles.outer_samples))
    referee = QuadraticReferee(Means.of(inner), Means.of(outer))
    outer_norms = _hessian_norms(outer)
    v_jacobian = np.linalg.solve(referee.inner.a_inner, referee.outer.a_inner @ referee.jacobian + referee.outer.b.T)
    values: _Values = {
        "mu_G": float(np.linalg.eigvalsh(referee.inner.a_inner)[0]),
        "L1_F": float(outer_norms.max()),
        "L1_G": float(_hessian_norms(inner).max()),
        "L2_F": 0.0,
        "L2_G": 0.0,
        "L3_G": 0.0,
        "L_z_star": float(np.linalg.norm(referee.jacobian, 2)),
        "L_v_star": float(np.linalg.norm(v_jacobian, 2)),
        "L_h": float(np.linalg.norm(referee.hessian, 2)),
    }
    how = dict.fromkeys(values, "exact")
    if radius is None:
        return values | {"L0_F": None}, how | {"L0_F": "exact", "R": "exact"}, Region()
    region = Region(radius, *_box(problem, box))
    linear = np.hypot(*(np.linalg.norm(part, axis=1) for part in (outer.linear_inner, outer.linear_outer)))
    farthest = np.hypot(radius, region.outer_radius)
    return values | {"L0_F": float((outer_norms * farthest + linear).max())}, how | {"L0_F": "bound"}, region


def _factors64(samples: Samples) -> Factors:
    parts: list[Any] = [np.asarray(leaf, np.float64) for leaf in samples.leaves]
    return Factors(*parts)


def _hessian_norms(rows: Factors) -> np.ndarray:
    """Return the spectral norm of the Hessian [[aa', fe'], [ef', cc']] of each row, from products of its factors.

    It is W M W' with W = [[a, f, 0, 0], [0, 0, c, e]], whose eigenvalues other than 0 are those of √K M √K, K = W'W.
    """
    gram = np.zeros((len(rows.a), 4, 4))
    for first, pair in ((0, (rows.a, rows.f)), (2, (rows.c, rows.e))):
        for i, j in np.ndindex(2, 2):
            gram[:, first + i, first + j] = np.einsum("nk,nk->n", pair[i], pair[j])
    middle = np.eye(4)[[0, 3, 2, 1]]
    eigenvalues, vectors = np.linalg.eigh(gram)
    roots = (vectors * np.sqrt(np.maximum(eigenvalues, 0))[:, None, :]) @ np.swapaxes(vectors, 1, 2)
    return np.abs(np.linalg.eigvalsh(roots @ middle @ roots)).max(axis=1)


# The worst case -----------------------------------------------------------------------------------------------------


def _worst_case(problem: BilevelProblem, radius: float | None, box: Any, seed: int) -> _Found:
    """z* = x and v* = -∇F / μ; the Hessian of each G_i is μ [[I, -I], [-I, I]]."""
    oracles = problem.oracles
    assert isinstance(oracles, WorstCaseOracles)
    mu, smoothness = oracles.curvature, problem.constants["outer_smoothness"]
    slope = oracles.amplitude / oracles.width
    values: _Values = {
        "mu_G": mu,
        "L1_F": smoothness,
        "L2_F": slope / oracles.width**2 * oracles.alpha * _largest_third_derivative(),
        "L1_G": 2 * mu,
        "L2_G": 0.0,
        "L3_G": 0.0,
        "L_z_star": 1.0,
        "L_v_star": problem.constants["value_smoothness"] / mu,
        "L_h": problem.constants["value_smoothness"],
    }
    how = dict.fromkeys(values, "exact")
    if radius is None:
        return values | {"L0_F": None}, how | {"L0_F": "exact", "R": "exact"}, Region()
    at_0 = slope * sqrt(oracles.alpha)
    return values | {"L0_F": smoothness * radius + at_0}, how | {"L0_F": "bound"}, Region(radius)


def _largest_third_derivative() -> float:
    """Return max |Γ'''|, with Γ''' = -240 (t³ - 3t² - 3t + 1) / (1 + t²)³."""
    top, below = np.poly1d([1, -3, -3, 1]), np.poly1d([1, 0, 1])
    critical = (top.deriv() * below - 3 * top * below.deriv()).roots
    real = critical[abs(critical.imag) < 1e-9].real
    return float(240 * np.max(abs(top(real)) / below(real) ** 3))


# Logistic selection -------------------------------------------------------------------------------------------------


def _logistic(problem: BilevelProblem, radius: float | None, box: Any, seed: int) -> _Found:
    """Bound l(d'z) + ½ sum_k exp(x_g(k)) z_k² on a ball of z and a box of x."""
    lower, upper = _box(problem, box)
    weakest, strongest = float(np.exp(lower.min())), float(np.exp(upper.max()))
    radius = radius or _holding_start(problem, sqrt(2 * log(2) / weakest))
    train, validation = (_rows_of(level) for level in (problem.oracles.inner_samples, problem.oracles.outer_samples))
    longest, outer_longest = (float(np.linalg.norm(rows, axis=1).max()) for rows in (train, validation))
    values: _Values = {
        "mu_G": weakest + _least_fit_curvature(train, radius),
        "L0_F": outer_longest / (1 + exp(-radius * outer_longest)),
        "L1_F": outer_longest**2 * SIGMOID[1],
        "L2_F": outer_longest**3 * _steepest_curvature(radius * outer_longest),
    }
    steepest = SIGMOID[1], _steepest_curvature(radius * longest), SIGMOID[3]
    for order, slope in zip((2, 3, 4), steepest, strict=True):
        terms = strongest * _penalty_terms(order, radius)
        terms[0] += longest**order * slope
        values[f"L{order - 1}_G"] = _largest_on_circle(terms)
    exact = dict.fromkeys(("L0_F", "L1_F", "L2_F"), "exact")
    fitted = min(sqrt(2 * log(2)), sqrt(strongest) * radius)
    values |= _logistic_solution(values["mu_G"], fitted, _Moments.of(train), _Moments.of(validation))
    return values, dict.fromkeys(values, "bound") | exact, Region(radius, lower, upper)


def _logistic_solution(mu: Any, fitted: float, train: "_Moments", validation: "_Moments") -> _Values:
    """Bound z*, v* and ∇²h with P = diag(exp(x)) <= H = ∇²zz G, and ||√P z*|| <= ``fitted`` as G(z*) <= G(0).

    J = -H^-1 P diag(z*) and √P v* = -√P H^-1 ∇F, where ||H^-1 √P|| <= 1/√μ.
    """
    L_z_star, slope = fitted / sqrt(mu), sqrt(validation.second)
    curvature = validation.second * SIGMOID[1] + train.third * SIGMOID[2] * slope / mu
    return {
        "L_z_star": L_z_star,
        "L_v_star": (curvature * L_z_star + slope) / mu,
        "L_h": curvature * L_z_star**2 + 3 * fitted * slope / sqrt(mu),
    }


class _Moments(NamedTuple):
    """Largest eigenvalues of mean dd' and of mean ||d|| dd', the longest row, and how many there are."""

    second: float
    third: float
    longest: float
    n: int

    @classmethod
    def of(cls, rows: np.ndarray) -> "_Moments":
        n, norms = len(rows), np.linalg.norm(rows, axis=1)
        second, third = (float(np.linalg.eigvalsh((rows.T * weight) @ rows / n)[-1]) for weight in (1.0, norms))
        return cls(second, third, float(norms.max()), n)


def _rows_of(samples: Samples) -> np.ndarray:
    return np.asarray(samples.leaves, np.float64).T


def _least_fit_curvature(rows: np.ndarray, radius: float) -> float:
    """Return a lower bound of the eigenvalues of mean l''(d'z) dd' over ||z|| <= radius: l'' falls with |d'z|."""
    missed = 1 / (1 + np.exp(radius * np.linalg.norm(rows, axis=1)))
    return max(0.0, float(np.linalg.eigvalsh((rows.T * (missed * (1 - missed))) @ rows / len(rows))[0]))


def _steepest_curvature(margin: float) -> float:
    """Return max |l'''| over scores up to ``margin``."""
    if margin >= log(2 + sqrt(3)):
        return SIGMOID[2]
    missed = 1 / (1 + exp(margin))
    return missed * (1 - missed) * (1 - 2 * missed)


def _penalty_terms(order: int, radius: float) -> np.ndarray:
    """Return t_j: along (a, b), ½ sum exp(x) z² has derivatives up to sum_j t_j |b|^j |a|^(order - j) at x = 0."""
    terms = np.zeros(order + 1)
    terms[-3:] = order * (order - 1) / 2, order * radius, radius**2 / 2
    return terms


def _largest_on_circle(terms: np.ndarray, points: int = 4096) -> float:
    """Return an upper bound of sum_j t_j |b|^j |a|^(k - j) over a² + b² = 1, for t_j >= 0 and k <= 4.

    Between points of the grid the sum, a trigonometric polynomial of degree k, exceeds them by no more than
    k²/2 (step/2)² sum t_j, and sum t_j is at most 2^(k/2) times its value at a = b.
    """
    degree = len(terms) - 1
    angles, step = np.linspace(0, np.pi / 2, points, retstep=True)
    powers = np.cos(angles)[:, None] ** np.arange(degree, -1, -1) * np.sin(angles)[:, None] ** np.arange(degree + 1)
    return float((powers @ terms).max() * (1 + degree**2 * step**2 / 8 * 2 ** (degree / 2)))


# Data cleaning ------------------------------------------------------------------------------------------------------


def _cleaning(problem: BilevelProblem, radius: float | None, box: Any, seed: int) -> _Found:
    """Bound σ(x_i) CE_i(z) + C ||z||² on a ball of z, for all x.

    Derivatives of the cross-entropy along a are cumulants of a variable with a range of √2 ||d|| ||a||. A variable of
    range r has a variance up to r²/4 and a third and fourth cumulant up to r³/(6√3) and r⁴/8.
    """
    oracles = problem.oracles
    assert isinstance(oracles, CleaningOracles)
    ridge, n_classes = float(oracles.regularisation), problem.start.inner_var.shape[1]
    radius = radius or _holding_start(problem, sqrt(log(n_classes) / ridge))
    train, validation = (
        _Moments.of(np.asarray(level.leaves.features, np.float64))
        for level in (oracles.inner_samples, oracles.outer_samples)
    )
    values: _Values = {"mu_G": 2 * ridge}
    values |= {f"L{k - 1}_F": _cumulant(k, validation.longest) for k in (1, 2, 3)}
    loss = float(np.logaddexp(0, log(n_classes - 1) + sqrt(2) * train.longest * radius))
    slopes = [loss, *(_cumulant(k, train.longest) for k in (1, 2, 3, 4))]
    weights = (*SIGMOID, SIGMOID_FOURTH)
    for order in (2, 3, 4):
        terms = np.array([comb(order, j) * weights[j] * slopes[order - j] for j in range(order + 1)])
        terms[0] += 2 * ridge if order == 2 else 0
        values[f"L{order - 1}_G"] = _largest_on_circle(terms)
    values |= _cleaning_solution(2 * ridge, train, validation)
    # Those of F are approached as z goes to infinity only.
    return values, dict.fromkeys(values, "bound") | {"mu_G": "exact"}, Region(radius)


def _cumulant(order: int, longest: float) -> float:
    return (sqrt(2) * longest) ** order * SIGMOID[order - 1]


def _cleaning_solution(mu: float, train: _Moments, validation: _Moments) -> _Values:
    """Bound z*, v* and ∇²h: x_i enters the mean G through row i alone, with the weight 1/n."""
    R = sqrt(2) * validation.longest / mu
    spread = sqrt(train.second / train.n)  # the norm of the table of rows, over n
    L_z_star = SIGMOID[1] * sqrt(2) * spread / mu
    curvature = validation.second / 2 + train.third * _cumulant(3, 1) * R
    mixed = SIGMOID[1] / 2 * spread * train.longest * R
    pure = SIGMOID[2] * sqrt(2) * train.longest * R / train.n
    return {
        "L_z_star": L_z_star,
        "L_v_star": (curvature * L_z_star + mixed) / mu,
        "L_h": curvature * L_z_star**2 + 2 * mixed * L_z_star + pure,
    }


# Any problem --------------------------------------------------------------------------------------------------------


def _sampled(problem: BilevelProblem, radius: float | None, box: Any, seed: int) -> _Found:
    """Take the largest derivative of each order among many points, rows and directions, improved by ascent."""
    region = Region(radius or _holding_start(problem, 0.0) + 1, *_box(problem, box))
    rng = np.random.default_rng(seed)
    with arithmetic(np.float64):
        oracles = problem.oracles.widened().batched(1, "iid")
        size, unravel = _joint(problem)
        values: _Values = {"mu_G": _least_curvature(problem, region, rng)}
        for level, n, orders in (("F", oracles.n_outer, (1, 2, 3)), ("G", oracles.n_inner, (2, 3, 4))):
            for order in orders:
                draws = _points(problem, region, rng, _DRAWS), rng.standard_normal((_DRAWS, size))
                rows = rng.integers(0, n, (_DRAWS, 1)).astype(np.int32)
                largest = _largest_derivatives(oracles, *draws, rows, unravel, level, order)
                values[f"L{order - 1}_{level}"] = float(np.max(largest))
    return values, dict.fromkeys(values, "estimate"), region


def _joint(problem: BilevelProblem) -> tuple[int, Any]:
    """Return the size of (z, x) and how it goes back into trees."""
    start = trees.cast((problem.start.inner_var, problem.start.outer_var), np.float64)
    flat, unravel = ravel_pytree(start)
    return flat.size, jax.tree_util.Partial(unravel)


def _points(problem: BilevelProblem, region: Region, rng: np.random.Generator, count: int) -> np.ndarray:
    """Return random (z, x) of the region, half of the z on its edge."""
    assert region.radius is not None and region.lower is not None and region.upper is not None
    z = rng.standard_normal((count, trees.flat(problem.start.inner_var).size))
    lengths = region.radius * np.minimum(1, 2 * rng.uniform(size=(count, 1)))
    z *= lengths / np.linalg.norm(z, axis=1, keepdims=True)
    return np.hstack([z, rng.uniform(region.lower, region.upper, (count, len(region.lower)))])


@partial(jax.jit, static_argnames=("level", "order"))
def _largest_derivatives(
    oracles: Oracles, points: Array, directions: Array, rows: Array, unravel: Any, level: str, order: int
) -> Array:
    value = oracles.outer_value if level == "F" else oracles.inner_value

    def one(point: Array, direction: Array, row: Array) -> Array:
        def along(direction: Array) -> Array:
            def moved(t: Array) -> Array:
                z, x = unravel(point + t * direction)
                return value(Point(z, x, z), row)

            return _repeated_derivative(moved, order)(jnp.zeros_like(point[0]))

        def ascend(_: Any, state: tuple[Array, Array]) -> tuple[Array, Array]:
            direction, largest = state
            size, slope = jax.value_and_grad(along)(direction)
            return _unit(slope, direction), jnp.maximum(largest, jnp.abs(size))

        start = _unit(direction, direction), jnp.zeros_like(point[0])
        return jax.lax.fori_loop(0, _ASCENTS, ascend, start)[1]

    return jax.vmap(one)(points, directions, rows)


def _repeated_derivative(function: Callable[[Array], Array], order: int) -> Callable[[Array], Array]:
    if order == 0:
        return function
    slope = _repeated_derivative(function, order - 1)
    return lambda t: jax.jvp(slope, (t,), (jnp.ones_like(t),))[1]


def _unit(vector: Array, otherwise: Array) -> Array:
    """Return the vector divided by its norm; ``otherwise`` where it is 0."""
    norm = jnp.linalg.norm(vector)
    return jnp.where(norm > 0, vector / jnp.where(norm > 0, norm, 1), otherwise)


def _least_curvature(problem: BilevelProblem, region: Region, rng: np.random.Generator, count: int = 16) -> float:
    """Return the smallest eigenvalue of ∇²zz G among some points."""
    oracles = problem.oracles.widened()
    _, unravel = _joint(problem)
    unravel_z = ravel_pytree(trees.cast(problem.start.inner_var, np.float64))[1]

    @jax.jit
    def hessian(oracles: Oracles, point: Array, basis: Array) -> Array:
        z, x = unravel(point)
        return jax.lax.map(lambda v: ravel_pytree(oracles.hvp(Point(z, x, unravel_z(v))))[0], basis)

    basis = np.eye(trees.flat(problem.start.inner_var).size)
    matrices = (hessian(oracles, point, basis) for point in _points(problem, region, rng, count))
    return float(min(np.linalg.eigvalsh(np.asarray(matrix))[0] for matrix in matrices))


# Regions ------------------------------------------------------------------------------------------------------------


def _holding_start(problem: BilevelProblem, radius: float) -> float:
    return max(radius, float(np.linalg.norm(trees.flat(problem.start.inner_var))))


def _box(problem: BilevelProblem, box: tuple[Any, Any] | None) -> tuple[np.ndarray, np.ndarray]:
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


_RULES: dict[Any, Callable[..., _Found]] = {
    QuadraticOracles: _quadratic,
    WorstCaseOracles: _worst_case,
    LogisticOracles: _logistic,
    CleaningOracles: _cleaning,
}
