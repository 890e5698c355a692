"""Preconditioners, by which the moves of z and v are divided, from each full-batch pass. H is the Hessian ∇²zz G.

**"diagonal"**: with the diagonals h_i of the Hessians of rows, and b rows in a batch,

    d = h + mean(h_i²) / (b h),    h the diagonal of H

so that d h bounds the mean square of a batch's diagonal, apart from terms that are not sums over rows. The second term
is small except for features that few rows have: a batch that contains such a row has a large curvature there, the other
batches have none, and without the term a step would overshoot.

**"norm"**: one number, an estimate of the Frobenius norm of H. It has no directions, so negative curvature does not
matter.

**"low_rank"**: a diagonal plus a few directions. In scaled coordinates, with C = T H T, a few products W = V C with
orthonormal rows V give the Nyström approximation, and a diagonal approximates the residual:

    C ≈ A'A + diag(r),    A'A = W' (V W')^-1 W,    r = diag(C - A'A)

C - A'A is positive semidefinite if C is. For columns that share a large mean, r is small: it is their variance. The
next pass uses an orthonormal basis of W as its V, which is subspace iteration. With ρ = d / h >= 1,

    M = R^½ (I + U' diag(s²) U) R^½,    R = T^-1 r ρ T^-1,    U' diag(s²) U = (rρ)^-½ A' diag(mean of ρ) A (rρ)^-½

For losses in closed form H is replaced by its majorizer, T = h^-½, and r = 1 - diag(A'A), or more where few rows have a
feature. For other losses both come from 8 probes y = (C - A'A) s with random signs s: r is the mean of s y plus its
standard error √(mean y² / 8), and T is divided by the square roots of the row norms of C, √(mean (C s)²). At first the
large coordinates hide a small one, whose row norm is about √(H_ii H_max); each round at the start halves this error
on a logarithmic scale.
"""

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from bilevel._core import threefry, trees
from bilevel._core.types import Array, Calls, Count, Point, PyTree
from bilevel.oracles import Oracles
from bilevel.oracles.curvature import (
    N_PROBES,
    diagonal_majorizer,
    diagonal_passes,
    majorized_hvp,
    probe_signs,
    squared_diagonals,
)

DIAGONAL, LOW_RANK, NORM = KINDS = ("diagonal", "low_rank", "norm")
N_NORM_PROBES = 2  # enough, since step sizes of 0.1 are far below the stability limit
_DIAGONAL_FLOOR = 1e-12  # of the largest entry: scales of columns from 1e-3 to 1e3 span 12 orders of magnitude
_PROBED_FLOOR = 0.1  # of the mean entry: probes give only noise for coordinates far below the others
RANK = 8
DENSE = RANK + N_PROBES  # up to this many coordinates of z, the products form the whole Hessian of other losses
_ROUNDS, _PROBED_ROUNDS = 4, 12  # line searches at the start; other losses may be exponential
_LENGTHS = (0.0, *(4.0**power for power in range(-1, 7)))
_SHORT_LENGTHS = tuple(4.0**power for power in range(-9, -1))
_MULTIPLES = (1.0, *(4.0**-power for power in range(1, 8)), 0.0)
_PROBE_ROUNDS = 6  # reduce a ratio of 1e8 between coordinates to 1.3
# Mean square over squared mean of the curvatures of rows, above which they are uneven; 3 for Gaussian columns.
_EVEN = 6.4
_NOISE = 32  # values below this many units of rounding are treated as zero
_RESIDUAL_FLOOR = 1e-9  # of C, in any arithmetic, since R^-½ amplifies rounding errors
_LARGEST_CHANGE = 4.0  # of a probed scale from one pass to the next


class LowRank(NamedTuple):
    """U by rows and 1 / (1 + s²); V for the next pass; and 1/T² if it is probed, else ()."""

    basis: Array
    shrink: Array
    subspace: Array
    scales: Any


class Preconditioner(NamedTuple):
    """M: a diagonal, or R of the low-rank matrix and its low-rank part."""

    diagonal: PyTree
    low_rank: LowRank | None = None

    def solve(self, part: PyTree) -> PyTree:
        """Return M^-1 times a direction of z or v."""
        if self.low_rank is None:
            return jax.tree.map(jnp.divide, part, self.diagonal)
        flat, unravel = ravel_pytree(part)
        root = jnp.sqrt(ravel_pytree(self.diagonal)[0])
        basis, scaled = self.low_rank.basis, flat / root
        inside = basis @ scaled
        outside = scaled - inside @ basis
        # Twice, because 1 / (1 + s²) may be below the rounding errors of the first difference.
        outside = outside - (basis @ outside) @ basis
        return unravel((outside + (self.low_rank.shrink * inside) @ basis) / root)

    def length_sq(self, part: PyTree) -> Array:
        """Return z'Mz or v'Mv."""
        if self.low_rank is None:
            return trees.dot(part, jax.tree.map(jnp.multiply, part, self.diagonal))
        scaled = ravel_pytree(part)[0] * jnp.sqrt(ravel_pytree(self.diagonal)[0])
        inside = self.low_rank.basis @ scaled
        outside = scaled - inside @ self.low_rank.basis
        return jnp.sum(outside**2) + jnp.sum(inside**2 / self.low_rank.shrink)


def init_preconditioner(kind: str, oracles: Oracles, start: Point) -> tuple[Point, Preconditioner]:
    """Return the start, with a better z if M is of low rank, and an M that the first pass replaces."""
    if kind == LOW_RANK:
        start, low_rank = init_low_rank(oracles, start)
        return start, Preconditioner(trees.ones_like(start.inner_var), low_rank)
    dtype = jnp.result_type(*jax.tree.leaves(start.inner_var))
    return start, Preconditioner(
        jax.tree.map(lambda leaf: jnp.ones(() if kind == NORM else leaf.shape, dtype), start.inner_var)
    )


def update_preconditioner(
    kind: str, oracles: Oracles, point: Point, index: Count, old: Preconditioner
) -> Preconditioner:
    """Return the preconditioner at a full-batch pass."""
    if old.low_rank is not None:
        return Preconditioner(*update_low_rank(oracles, point, index, old.low_rank))
    return Preconditioner((norm_preconditioner if kind == NORM else diagonal_preconditioner)(oracles, point, index))


def init_calls(kind: str, oracles: Oracles) -> Calls:
    """Return the cost of `init_preconditioner`."""
    if kind != LOW_RANK:
        return Calls()
    n, probes = oracles.n_inner, 0 if diagonal_passes(oracles) == 1 else (1 + _PROBE_ROUNDS) * N_PROBES
    rounds, lengths = _searches(oracles)
    hvp = probes * n + rounds * preconditioner_calls(kind, oracles).hvp
    return Calls(inner_grad=rounds * n, hvp=hvp, inner_value=rounds * len(lengths) * n)


def preconditioner_calls(kind: str, oracles: Oracles) -> Calls:
    """Return the cost of `update_preconditioner`."""
    closed_form = diagonal_passes(oracles) == 1
    products = {
        DIAGONAL: diagonal_passes(oracles),
        NORM: N_NORM_PROBES,
        LOW_RANK: (1 if closed_form else N_PROBES) + RANK,
    }
    return Calls(hvp=products[kind] * oracles.n_inner)


# Diagonal and norm


def diagonal_preconditioner(oracles: Oracles, point: Point, index: Count) -> PyTree:
    """Return d, with a floor under entries too small to divide by."""
    # Estimated entries may be negative, and so may those of a Hessian that is not positive semidefinite.
    diagonal = jax.tree.map(jnp.abs, diagonal_majorizer(oracles, point, index))
    leaves = jax.tree.leaves(diagonal)
    if diagonal_passes(oracles) == 1:
        floor = _DIAGONAL_FLOOR * functools.reduce(jnp.maximum, [jnp.max(leaf) for leaf in leaves])
    else:
        floor = _PROBED_FLOOR * sum(jnp.sum(leaf) for leaf in leaves) / sum(leaf.size for leaf in leaves)
    tiny = np.finfo(leaves[0].dtype).tiny
    diagonal = jax.tree.map(lambda leaf: jnp.maximum(leaf, jnp.maximum(floor, tiny)), diagonal)
    batch = _inner_batch_size(oracles)
    return jax.tree.map(lambda h, square: h + square / (batch * h), diagonal, squared_diagonals(oracles, point))


def norm_preconditioner(oracles: Oracles, point: Point, index: Count) -> PyTree:
    """Return an estimate of the Frobenius norm of H, which bounds its largest eigenvalue, for every array of z.

    With random signs s, ||H s||² is the squared norm on average.
    """
    flat, unravel = ravel_pytree(point.inner_var)

    def squared(signs: Array) -> Array:
        return trees.norm_sq(oracles.hvp(point._replace(v=unravel(signs))))

    signs = probe_signs(flat.size, index)[:N_NORM_PROBES].astype(flat.dtype)
    norm = jnp.sqrt(jnp.mean(jax.lax.map(squared, signs)))
    return jax.tree.map(lambda _: jnp.maximum(norm, np.finfo(norm.dtype).tiny), point.inner_var)


def _inner_batch_size(oracles: Oracles) -> int:
    samples = oracles.inner_samples
    return oracles.n_inner if samples.sampling == "full" else samples.batch_size


# Diagonal plus low rank


class _Scaled(NamedTuple):
    """The approximation in scaled coordinates: 1/T², A by rows, r and ρ."""

    scales: Array
    factor: Array
    residual: Array
    ratio: Array


def init_low_rank(oracles: Oracles, start: Point) -> tuple[Point, LowRank]:
    """Return the start with a better z, and the low-rank part there.

    Each round takes a full-batch pass and searches along M^-1 ∇z G.
    """
    flat, unravel = ravel_pytree(start.inner_var)
    signs = 2 * threefry.integers(jax.random.key(0, impl="threefry2x32"), (RANK, flat.size), 2) - 1
    subspace = _orthonormal(signs.astype(flat.dtype))
    scales: Any = ()
    probed = diagonal_passes(oracles) > 1
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
        majorizer = unravel(memory.scales) if probed else diagonal_preconditioner(oracles, point, 0)
        diagonal, memory = update_low_rank(oracles, point, index, memory)
        # Far from the minimum a loss is linear, so the search also tries multiples of z and the diagonal alone.
        coarse, fine = jax.tree.map(jnp.divide, gradient, majorizer), Preconditioner(diagonal, memory).solve(gradient)
        direction = jax.tree.map(partial(jnp.where, index == 1), coarse, fine)
        return _search(oracles, point, direction, index == 0), memory

    return jax.lax.fori_loop(0, _searches(oracles)[0], once, (start, memory))


def _searches(oracles: Oracles) -> tuple[int, tuple[float, ...]]:
    """Return the number of line searches at the start, and the lengths that each of them tries."""
    if diagonal_passes(oracles) == 1:
        return _ROUNDS, _LENGTHS
    return _PROBED_ROUNDS, _LENGTHS + _SHORT_LENGTHS


def _search(oracles: Oracles, point: Point, direction: PyTree, shrink: Array) -> Point:
    """Return the point whose z has the smallest G, among lengths along a direction, or among multiples of z."""

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


def update_low_rank(oracles: Oracles, point: Point, index: Count, old: LowRank) -> tuple[PyTree, LowRank]:
    """Return R and the low-rank part at a point."""
    probed = diagonal_passes(oracles) > 1
    flat, unravel = ravel_pytree(point.inner_var)
    scales = old.scales if probed else _diagonal(oracles, point)
    products = _products(oracles, point, scales, old.subspace)
    if len(old.subspace) == DENSE:
        return _dense(old, products[: flat.size], unravel)
    factor = _nystrom(old.subspace, products)
    explained = jnp.sum(factor**2, axis=0)
    if probed:
        residual, norms = _probe_residual(oracles, point, scales, factor, index)
        ratio, new = jnp.ones_like(flat), scales * jnp.clip(norms, 1 / _LARGEST_CHANGE, _LARGEST_CHANGE) ** 0.5
    else:
        ratio, new = jnp.maximum(ravel_pytree(diagonal_preconditioner(oracles, point, index))[0] / scales, 1), ()
        # In columns that few rows have, the directions do not explain the batches that contain these rows.
        uneven = jnp.clip(ratio - 1 - _EVEN / _inner_batch_size(oracles), 0, 1)
        residual = jnp.maximum(1 - explained, uneven)
    residual = jnp.maximum(residual, max(_noise(flat), _RESIDUAL_FLOOR) * jnp.maximum(explained, 1))
    diagonal, basis, shrink = _unscale(_Scaled(scales, factor, residual, ratio))
    return unravel(diagonal), LowRank(basis, shrink, _orthonormal(products), new)


def _dense(old: LowRank, products: Array, unravel: Callable[[Array], PyTree]) -> tuple[PyTree, LowRank]:
    """Return M if the products are the whole Hessian: its eigenvalues in absolute value, with a floor."""
    diagonal = jnp.abs(jnp.diagonal(products))
    roots = jnp.sqrt(jnp.maximum(diagonal, _DIAGONAL_FLOOR * jnp.max(diagonal)))
    roots = jnp.where(roots > 0, roots, 1)
    values, vectors = jnp.linalg.eigh((products + products.T) / (2 * jnp.outer(roots, roots)))
    sizes = jnp.abs(values)
    shrink = 1 / jnp.maximum(sizes, jnp.maximum(_noise(values) * jnp.max(sizes), jnp.finfo(values.dtype).tiny))
    return unravel(old.scales * roots**2), LowRank(vectors.T, shrink, old.subspace, old.scales)


def _unscale(scaled: _Scaled) -> tuple[Array, Array, Array]:
    """Return R, U and 1 / (1 + s²)."""
    weights = scaled.factor**2
    mean_ratio = (weights @ scaled.ratio) / jnp.maximum(jnp.sum(weights, axis=1), jnp.finfo(weights.dtype).tiny)
    residual = scaled.residual * scaled.ratio
    part = jnp.sqrt(mean_ratio)[:, None] * scaled.factor / jnp.sqrt(residual)
    _, strengths, basis = jnp.linalg.svd(part, full_matrices=False)
    return scaled.scales * residual, _fill(basis), 1 / (1 + _fill(strengths) ** 2)


def _nystrom(subspace: Array, products: Array) -> Array:
    """Return A, with rows of 0 for directions whose curvature is negative or below rounding errors."""
    small = subspace @ products.T
    values, vectors = jnp.linalg.eigh((small + small.T) / 2)
    positive = values > _noise(values) * jnp.max(values)
    roots = jnp.sqrt(jnp.where(positive, values, 1))
    return jnp.where(positive[:, None], (vectors.T @ products) / roots[:, None], 0)


def _products(oracles: Oracles, point: Point, scales: Array, vectors: Array) -> Array:
    """Return C times each row, one after the other, since together they would need the memory of several passes."""
    _, unravel = ravel_pytree(point.inner_var)
    roots = jnp.sqrt(scales)

    def one(vector: Array) -> Array:
        return ravel_pytree(majorized_hvp(oracles, point._replace(v=unravel(vector / roots))))[0] / roots

    return jax.lax.map(one, vectors)


def _diagonal(oracles: Oracles, point: Point) -> Array:
    diagonal = ravel_pytree(diagonal_majorizer(oracles, point))[0]
    tiny = jnp.finfo(diagonal.dtype).tiny
    return jnp.maximum(diagonal, jnp.maximum(_DIAGONAL_FLOOR * jnp.max(diagonal), tiny))


def _probe(oracles: Oracles, point: Point, scales: Array, index: Count) -> tuple[Array, Array]:
    """Return random signs and C times them, by rows."""
    signs = probe_signs(scales.size, index).astype(scales.dtype)
    return signs, _products(oracles, point, scales, signs)


def _equilibrate(oracles: Oracles, point: Point, scales: Array, index: Count) -> Array:
    """Return scales in which the norms of the rows of C are closer to 1."""
    return scales * jnp.maximum(_row_norms(_probe(oracles, point, scales, index)[1]), _noise(scales))


def _probe_residual(oracles: Oracles, point: Point, scales: Array, factor: Array, index: Count) -> tuple[Array, Array]:
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
    """Return the rows padded with zeros to `RANK` rows, which are fewer if z has fewer coordinates."""
    return jnp.pad(rows, [(0, RANK - len(rows)), *[(0, 0)] * (rows.ndim - 1)])


def _noise(like: Array) -> float:
    return _NOISE * float(jnp.finfo(like.dtype).eps)
