"""A metric for z and v that sees a few directions beside the coordinates: diagonal plus low rank.

In scaled coordinates C = T H T of H = ∇²zz G, a few products W = V C with orthonormal rows V give the approximation of
Nyström, and a diagonal takes what it leaves,

    C ≈ A'A + diag(r),    A'A = W' (V W')^-1 W,    r = diag(C - A'A)

C - A'A is never negative where C is not. Columns that share a large mean have a small r: it is their variance. The next
pass takes an orthonormal basis of W for its V, a step of subspace iteration. Steps are divided by M, where ρ ≥ 1 is how
much more than H the diagonal d of :mod:`bilevel.solvers.preconditioning` says, coordinate by coordinate:

    M = R^½ (I + U' diag(s²) U) R^½,    R = T^-1 r ρ T^-1,    U' diag(s²) U = (rρ)^-½ A' diag(mean of ρ) A (rρ)^-½

In closed form H is its majorizer, T = h^-½ with h the diagonal, and r = 1 - diag(A'A), or more where few rows make a
column. Else both come from 8 probes y = (C - A'A) s
with random signs s: r is the mean of s y and its standard error, √(mean y² / 8), and T is divided by the root of the
row norms of C, √(mean (C s)²). A small coordinate is hidden at first by the large ones: its row norm is about
√(H_ii H_max), so that a few rounds at the start halve what is missing, in logarithms.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from bilevel import _threefry
from bilevel import _tree as trees
from bilevel._types import Array, Calls, Count, Point, PyTree
from bilevel.oracles import Oracles
from bilevel.oracles.diagonal import N_PROBES, probe_signs
from bilevel.solvers.directions import inner_batch

RANK = 8
DENSE = RANK + N_PROBES  # products form the whole Hessian of losses of users where z has at most so many coordinates
_ROUNDS, _PROBED_ROUNDS = 4, 12  # of searches at the start; losses of users may be exponential
_LENGTHS = (0.0, *(4.0**power for power in range(-1, 7)))
_SHORT_LENGTHS = tuple(4.0**power for power in range(-9, -1))
_MULTIPLES = (1.0, *(4.0**-power for power in range(1, 8)), 0.0)
_PROBE_ROUNDS = 6  # bring a ratio of 1e8 between coordinates to 1.3
_LEAST_DIAGONAL = 1e-12  # of the largest: scales of columns from 1e-3 to 1e3 span 12 orders
_EVEN = 6.4  # mean square over squared mean of the rows' curvatures, up to which they are even: 3 for Gaussian columns
_NOISE = 32  # roundings: what is below so many of them is not known
_LEAST_REST = 1e-9  # of C, in any arithmetic: R^-½ makes roundings as much larger
_MOST_CHANGE = 4.0  # of a probed scale from one pass to the next


class LowRank(NamedTuple):
    """U by rows and 1 / (1 + s²) for the moves; V for the next pass, and 1/T² where it is probed, else ()."""

    basis: Array
    shrink: Array
    subspace: Array
    scales: Any


class _Scaled(NamedTuple):
    """What a pass knows in scaled coordinates: 1/T², A by rows, r and ρ."""

    scales: Array
    factor: Array
    rest: Array
    ratio: Array


def init_low_rank(oracles: Oracles, start: Point, majorizer: Callable[[Point], PyTree]) -> tuple[Point, LowRank]:
    """Return the start with a better z, and the memory there: rounds of a pass and a search along M^-1 ∇zG."""
    flat, _ = ravel_pytree(start.inner_var)
    signs = 2 * _threefry.integers(jax.random.key(0, impl="threefry2x32"), (RANK, flat.size), 2) - 1
    subspace = _orthonormal(signs.astype(flat.dtype))
    scales: Any = ()
    probed = oracles.diagonal_passes > 1
    if probed:
        first = trees.largest(
            _products(oracles, start, jnp.ones_like(flat), probe_signs(flat.size, 0).astype(flat.dtype))
        )
        scales = jnp.full_like(flat, jnp.where(first > 0, first, 1))
        scales = jax.lax.fori_loop(0, _PROBE_ROUNDS, lambda i, old: _equilibrate(oracles, start, old, i), scales)
    rank = RANK
    if probed and flat.size <= DENSE:
        rank, subspace = flat.size, jnp.eye(DENSE, flat.size, dtype=flat.dtype)
    memory = LowRank(jnp.zeros((rank, flat.size), flat.dtype), jnp.ones(rank, flat.dtype), subspace, scales)

    def once(index: Array, carry: tuple[Point, LowRank]) -> tuple[Point, LowRank]:
        point, memory = carry
        gradient = oracles.inner_grad(point)
        whole = ravel_pytree(point.inner_var)[1](memory.scales) if probed else majorizer(point)
        diagonal, memory = update(oracles, point, index, whole, memory)
        # Far away a loss is linear, in directions that the metric would rather spare: z itself, or the gradient's.
        coarse, fine = jax.tree.map(jnp.divide, gradient, whole), solve(memory, diagonal, gradient)
        direction = jax.tree.map(partial(jnp.where, index == 1), coarse, fine)
        return _search(oracles, point, direction, index == 0), memory

    return jax.lax.fori_loop(0, _searches(oracles)[0], once, (start, memory))


def _searches(oracles: Oracles) -> tuple[int, tuple[float, ...]]:
    """Return how many searches fit z at the start, and the lengths that each of them tries."""
    if oracles.diagonal_passes == 1:
        return _ROUNDS, _LENGTHS
    return _PROBED_ROUNDS, _LENGTHS + _SHORT_LENGTHS


def _search(oracles: Oracles, point: Point, direction: PyTree, shrink: Array) -> Point:
    """Return the point with z where G is least, on a grid of lengths along a direction, or of multiples of z."""

    def moved(multiple: Array, length: Array) -> Point:
        z = jax.tree.map(lambda leaf, way: multiple * leaf - length * way, point.inner_var, direction)
        return point._replace(inner_var=z)

    dtype = jnp.result_type(*jax.tree.leaves(direction))
    lengths = jnp.asarray(_searches(oracles)[1], dtype)
    multiples = jnp.asarray([*_MULTIPLES, *[1.0] * (len(lengths) - len(_MULTIPLES))], dtype)
    multiples, lengths = jnp.where(shrink, multiples, 1), jnp.where(shrink, 0, lengths)
    values = jax.lax.map(lambda pair: oracles.inner_value(moved(*pair)), (multiples, lengths))
    best = jnp.argmin(jnp.where(jnp.isfinite(values), values, jnp.inf))
    return moved(multiples[best], lengths[best])


def init_calls(oracles: Oracles) -> Calls:
    """Return the cost of `init_low_rank`."""
    n, probes = oracles.n_inner, 0 if oracles.diagonal_passes == 1 else (1 + _PROBE_ROUNDS) * N_PROBES
    rounds, lengths = _searches(oracles)
    hvp = probes * n + rounds * pass_calls(oracles).hvp
    return Calls(inner_grad=rounds * n, hvp=hvp, inner_value=rounds * len(lengths) * n)


def pass_calls(oracles: Oracles) -> Calls:
    """Return the cost of `update`: a diagonal in closed form, or the probes, and a product per direction."""
    diagonals = 1 if oracles.diagonal_passes == 1 else N_PROBES
    return Calls(hvp=(diagonals + RANK) * oracles.n_inner)


def update(oracles: Oracles, point: Point, index: Count, majorizer: PyTree, old: LowRank) -> tuple[PyTree, LowRank]:
    """Return R and the low-rank part at a point; the majorizer is d, and () where the diagonal is probed."""
    probed = oracles.diagonal_passes > 1
    flat, unravel = ravel_pytree(point.inner_var)
    scales = old.scales if probed else _diagonal(oracles, point)
    products = _products(oracles, point, scales, old.subspace)
    if len(old.subspace) == DENSE:
        return _dense(old, products[: flat.size], unravel)
    factor = _nystrom(old.subspace, products)
    explained = jnp.sum(factor**2, axis=0)
    if probed:
        rest, norms = _probed_rest(oracles, point, scales, factor, index)
        ratio, new = jnp.ones_like(flat), scales * jnp.clip(norms, 1 / _MOST_CHANGE, _MOST_CHANGE) ** 0.5
    else:
        ratio, new = jnp.maximum(ravel_pytree(majorizer)[0] / scales, 1), ()
        # Few rows make such a column, and what the directions explain of it is not theirs.
        uneven = jnp.clip(ratio - 1 - _EVEN / inner_batch(oracles), 0, 1)
        rest = jnp.maximum(1 - explained, uneven)
    known = jnp.maximum(rest, max(_noise(flat), _LEAST_REST) * jnp.maximum(explained, 1))
    diagonal, basis, shrink = _metric(_Scaled(scales, factor, known, ratio))
    return unravel(diagonal), LowRank(basis, shrink, _orthonormal(products), new)


def _dense(old: LowRank, products: Array, unravel: Callable[[Array], PyTree]) -> tuple[PyTree, LowRank]:
    """Return the metric of a Hessian that is known, with its curvatures in absolute value and away from 0."""
    diagonal = jnp.abs(jnp.diagonal(products))
    roots = jnp.sqrt(jnp.maximum(diagonal, _LEAST_DIAGONAL * jnp.max(diagonal)))
    roots = jnp.where(roots > 0, roots, 1)
    values, vectors = jnp.linalg.eigh((products + products.T) / (2 * jnp.outer(roots, roots)))
    sizes = jnp.abs(values)
    shrink = 1 / jnp.maximum(sizes, jnp.maximum(_noise(values) * jnp.max(sizes), jnp.finfo(values.dtype).tiny))
    return unravel(old.scales * roots**2), LowRank(vectors.T, shrink, old.subspace, old.scales)


def solve(metric: LowRank, diagonal: PyTree, part: PyTree) -> PyTree:
    """Return M^-1 times a vector."""
    flat, unravel = ravel_pytree(part)
    root = jnp.sqrt(ravel_pytree(diagonal)[0])
    scaled = flat / root
    inside = metric.basis @ scaled
    outside = scaled - inside @ metric.basis
    # Twice: 1 / (1 + s²) may be below the rounding of the first difference.
    outside = outside - (metric.basis @ outside) @ metric.basis
    return unravel((outside + (metric.shrink * inside) @ metric.basis) / root)


def length_sq(metric: LowRank, diagonal: PyTree, part: PyTree) -> Array:
    """Return the squared norm of a vector in M."""
    scaled = ravel_pytree(part)[0] * jnp.sqrt(ravel_pytree(diagonal)[0])
    inside = metric.basis @ scaled
    outside = scaled - inside @ metric.basis
    return jnp.sum(outside**2) + jnp.sum(inside**2 / metric.shrink)


def _metric(scaled: _Scaled) -> tuple[Array, Array, Array]:
    """Return R, U and 1 / (1 + s²)."""
    weights = scaled.factor**2
    mean_ratio = (weights @ scaled.ratio) / jnp.maximum(jnp.sum(weights, axis=1), jnp.finfo(weights.dtype).tiny)
    rest = scaled.rest * scaled.ratio
    part = jnp.sqrt(mean_ratio)[:, None] * scaled.factor / jnp.sqrt(rest)
    _, strengths, basis = jnp.linalg.svd(part, full_matrices=False)
    return scaled.scales * rest, _fill(basis), 1 / (1 + _fill(strengths) ** 2)


def _nystrom(subspace: Array, products: Array) -> Array:
    """Return A; directions whose curvature is negative or below the rounding of the largest have a row of 0."""
    small = subspace @ products.T
    values, vectors = jnp.linalg.eigh((small + small.T) / 2)
    known = values > _noise(values) * jnp.max(values)
    roots = jnp.sqrt(jnp.where(known, values, 1))
    return jnp.where(known[:, None], (vectors.T @ products) / roots[:, None], 0)


def _products(oracles: Oracles, point: Point, scales: Array, vectors: Array) -> Array:
    """Return C times each row, one after the other: together they would take the memory of as many passes."""
    _, unravel = ravel_pytree(point.inner_var)
    roots = jnp.sqrt(scales)

    def one(vector: Array) -> Array:
        return ravel_pytree(oracles.majorized_hvp(point._replace(v=unravel(vector / roots))))[0] / roots

    return jax.lax.map(one, vectors)


def _diagonal(oracles: Oracles, point: Point) -> Array:
    diagonal = ravel_pytree(oracles.diagonal_majorizer(point))[0]
    tiny = jnp.finfo(diagonal.dtype).tiny
    return jnp.maximum(diagonal, jnp.maximum(_LEAST_DIAGONAL * jnp.max(diagonal), tiny))


def _probe(oracles: Oracles, point: Point, scales: Array, index: Count) -> tuple[Array, Array]:
    """Return signs and C times them, by rows."""
    signs = probe_signs(scales.size, index).astype(scales.dtype)
    return signs, _products(oracles, point, scales, signs)


def _equilibrate(oracles: Oracles, point: Point, scales: Array, index: Count) -> Array:
    """Return scales in which the rows of C are nearer to the norm 1."""
    return scales * jnp.maximum(_row_norms(_probe(oracles, point, scales, index)[1]), _noise(scales))


def _probed_rest(oracles: Oracles, point: Point, scales: Array, factor: Array, index: Count) -> tuple[Array, Array]:
    """Return r, and the row norms of C."""
    signs, products = _probe(oracles, point, scales, index)
    left = products - (signs @ factor.T) @ factor
    error = _row_norms(left) / N_PROBES**0.5
    return jnp.abs(jnp.mean(signs * left, axis=0)) + error, _row_norms(products)


def _row_norms(products: Array) -> Array:
    return jnp.sqrt(jnp.mean(products**2, axis=0))


def _orthonormal(rows: Array) -> Array:
    return _fill(jnp.linalg.qr(rows.T)[0].T)


def _fill(rows: Array) -> Array:
    """Return as many rows as there are directions, where there are fewer coordinates."""
    return jnp.pad(rows, [(0, RANK - len(rows)), *[(0, 0)] * (rows.ndim - 1)])


def _noise(like: Array) -> float:
    return _NOISE * float(jnp.finfo(like.dtype).eps)
