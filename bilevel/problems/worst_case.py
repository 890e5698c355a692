"""The problem of the lower bound: no method that follows gradients from 0 makes it stationary with fewer queries."""

from math import floor, isfinite, log, pi, sqrt
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from bilevel.oracles import Oracles, Samples
from bilevel.oracles.worst_case import CoordinateChains, RotatedChains, WorstCaseOracles
from bilevel.precision import arithmetic, as_float_dtype
from bilevel.problems.base import BilevelProblem
from bilevel.problems.reference import Reference
from bilevel.types import INT32_MAX, Array, OuterPass, Point

GAMMA_CURVATURE = 180  # the maximum of |Γ''|, at -1
GAMMA_AT_0 = 60 * (1 + log(2)) - 30 * pi
ALPHA = 1 / GAMMA_CURVATURE
SHORTEST_CHAIN = 14  # the first integer of at least 1/√α: h(0) - inf h <= gap is proved from there on

NORMALISATIONS = ("individual", "mean_squared")
ROTATIONS = ("coordinates", "random")


def worst_case(
    n_outer: int,
    epsilon: float,
    *,
    normalisation: str = "individual",
    n_inner: int | None = None,
    smoothness: float = 1.0,
    gap: float = 1.0,
    inner_curvature: float = 1.0,
    rotation: str = "coordinates",
    dtype: DTypeLike = "float32",
    seed: int = 0,
) -> BilevelProblem:
    """Build the instance on which ||∇h||² <= epsilon takes a method at least ``query_bound`` rows of F.

    Each F_j is a chain of T + 1 coordinates of its own, in p = d = m (T + 1) dimensions, and G_i = μ/2 ||z - x||².
    A query of F_j, at any point reached so far, brings at most one more coordinate of chain j into reach, and ||∇h||²
    exceeds epsilon as long as half of the chains are not reached to the end. Queries are the ledger's ``outer_grad``.
    The bound is for methods that start at 0 and stay in the span of the gradients they have seen.

    Parameters
    ----------
    n_outer : m, outer samples
    epsilon : the squared norm of ∇h below which a point is stationary; it sets T, see Raises
    normalisation : which L-smooth class the problem is of. "individual": each F_j is L-smooth, and the bound does not
        depend on m. "mean_squared": mean_j ||∇F_j(a) - ∇F_j(b)||² <= L² ||a - b||², each F_j is √m L-smooth, and the
        bound grows as √m
    n_inner : n, inner samples, all alike; as many as outer ones by default
    smoothness : L
    gap : Δ, an upper bound of h(0) - inf h
    inner_curvature : μ
    rotation : where the chains lie. "coordinates": one after the other along the axes, without any matrix; coordinates
        out of reach stay exactly 0. "random": along a random basis of p² numbers, for methods that treat coordinates
        apart; rounding then reaches every coordinate a little. The iterates of a method that stays in the span
        of gradients turn with the basis, so the bound is the same
    dtype : "float32" or "float64"
    seed : of the random basis

    Returns
    -------
    BilevelProblem
        Its ``constants``: ``alpha``, ``lambda``, ``beta``, ``T``, ``L``, ``Delta``, ``mu_G``, ``epsilon``;
        ``outer_smoothness`` (of each F_j), ``mean_squared_smoothness``, ``value_smoothness`` (of h), each the smallest
        that holds; ``initial_gap``, h(0) - inf h exactly; ``query_bound`` = m T / 2.

    Raises
    ------
    ValueError
        When ``epsilon`` leaves a chain shorter than 14: h(0) - inf h <= gap is then not proved.
    """
    dtype = as_float_dtype(dtype)
    n_inner = n_outer if n_inner is None else n_inner
    _check_sizes(n_outer=n_outer, n_inner=n_inner)
    _check_positive(epsilon=epsilon, smoothness=smoothness, gap=gap, inner_curvature=inner_curvature)
    _check_choice("normalisation", normalisation, NORMALISATIONS)
    _check_choice("rotation", rotation, ROTATIONS)
    each = smoothness if normalisation == "individual" else sqrt(n_outer) * smoothness
    scales = _scales(n_outer, epsilon, each, gap)
    dim = n_outer * (scales.length + 1)
    curvature = float(dtype.type(inner_curvature))  # as the rows hold it
    with arithmetic(dtype):
        kind, outer_rows = _chains(rotation, n_outer, dim, dtype, seed)
        oracles = kind(
            inner_samples=Samples(jnp.full(n_inner, curvature, dtype), n_inner, axes=(0,), dtype=dtype),
            outer_samples=Samples(outer_rows, n_outer, axes=(0,), dtype=dtype),
            alpha=ALPHA,
            amplitude=scales.amplitude,
            width=scales.width,
            curvature=curvature,
        )
    start = Point(*(np.zeros(dim, dtype) for _ in Point._fields))
    given = {"L": smoothness, "Delta": gap, "mu_G": inner_curvature, "epsilon": epsilon}
    return BilevelProblem(
        oracles,
        start,
        WorstCaseReferee(oracles),
        f"worst_case ({normalisation})",
        constants=given | _constants(n_outer, scales),
    )


class Scales(NamedTuple):
    """λ, β and T."""

    amplitude: float
    width: float
    length: int


def _scales(m: int, epsilon: float, each: float, gap: float) -> Scales:
    """Return the scales for F_j that are ``each``-smooth."""
    budget = gap * each * sqrt(ALPHA) / (1760 * m)
    if not budget / epsilon >= SHORTEST_CHAIN:
        # Rounded down: what the message names must be accepted.
        largest = f"{0.9995 * budget / SHORTEST_CHAIN:.3e}"
        raise ValueError(
            f"`epsilon={epsilon!r}` leaves chains of T = {floor(budget / epsilon)} < {SHORTEST_CHAIN}; "
            f"take `epsilon` <= {largest}, or a larger `gap` or `smoothness`."
        )
    if not m * (budget / epsilon + 1) <= INT32_MAX:
        raise ValueError(f"`epsilon={epsilon!r}` asks for more than {INT32_MAX} coordinates; take a larger one.")
    amplitude = 160 * m * epsilon / (each * ALPHA**1.5)
    return Scales(amplitude, sqrt(5 * amplitude / each), floor(budget / epsilon))


def _constants(m: int, scales: Scales) -> dict[str, float]:
    smoothness = scales.amplitude / scales.width**2 * _chain_smoothness(scales.length)
    chain_at_0 = sqrt(ALPHA) / 2 + ALPHA * scales.length * GAMMA_AT_0
    return {
        "alpha": ALPHA,
        "lambda": scales.amplitude,
        "beta": scales.width,
        "T": scales.length,
        "outer_smoothness": smoothness,
        "mean_squared_smoothness": smoothness / sqrt(m),
        "value_smoothness": smoothness / m,
        "initial_gap": scales.amplitude * chain_at_0,
        "query_bound": m * scales.length / 2,
    }


def _chain_smoothness(length: int) -> float:
    """Return max ||∇²f||: the top eigenvalue at y = (-1, ..., -1), where each Γ'' is at its maximum."""
    from scipy.linalg import eigh_tridiagonal

    diagonal = np.full(length + 1, 2 + ALPHA * GAMMA_CURVATURE)
    diagonal[0] += sqrt(ALPHA) - 1
    diagonal[-1] = 1
    top = (length, length)
    return float(eigh_tridiagonal(diagonal, -np.ones(length), eigvals_only=True, select="i", select_range=top)[0])


def _chains(
    rotation: str, m: int, dim: int, dtype: np.dtype, seed: int
) -> tuple[type[CoordinateChains | RotatedChains], Array]:
    """Return the kind of oracles and their outer rows."""
    if rotation == "coordinates":
        return CoordinateChains, jnp.arange(m, dtype=jnp.int32)
    from scipy.stats import ortho_group

    basis = ortho_group.rvs(dim, random_state=np.random.default_rng(seed))
    return RotatedChains, jnp.asarray(basis.reshape(m, -1, dim), dtype)


class WorstCaseReferee:
    """References in closed form: z*(x) = x, so h = F and v* = -∇F(x) / μ; h is at least 0, and 0 where U x = β."""

    def __init__(self, oracles: WorstCaseOracles) -> None:
        self._narrow_oracles = oracles
        self._oracles: WorstCaseOracles | None = None

    def __call__(self, outer_var: np.ndarray, guess: Reference | None = None) -> Reference:
        """Return the solution at ``outer_var``; no guess is needed."""
        x = np.asarray(outer_var, np.float64)
        with arithmetic(np.float64):
            if self._oracles is None:
                self._oracles = self._narrow_oracles.astype(np.float64)
            value, outer = _outer_value_and_grads(self._oracles, Point(x, x, x))
        grad = np.asarray(outer.grad)
        v = -grad / self._oracles.curvature
        return Reference(
            inner_var=x,
            v=v,
            value=float(value),
            hypergrad=grad,
            inner_residual=0.0,
            v_residual=float(np.linalg.norm(self._oracles.curvature * v + grad)),
            value_gap=float(value),
        )


@jax.jit
def _outer_value_and_grads(oracles: Oracles, point: Point) -> tuple[Array, OuterPass]:
    return oracles.outer_value(point), oracles.outer(point)


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int | np.integer) or size < 1:
            raise ValueError(f"`{name}={size!r}`: must be an integer of at least 1.")


def _check_positive(**numbers: float) -> None:
    for name, number in numbers.items():
        if not (isfinite(number) and number > 0):
            raise ValueError(f"`{name}={number!r}`: must be above 0 and finite.")


def _check_choice(name: str, choice: str, choices: tuple[str, ...]) -> None:
    if choice not in choices:
        raise ValueError(f"`{name}={choice!r}`: must be one of {', '.join(map(repr, choices))}.")
