"""Closed-form oracles of quadratics whose matrices have rank one, kept as factors.

    ½ (a'z)² + ½ (c'x)² + (e'x)(f'z) + d_z'z + d_x'x      per sample, on both levels

so that A_z = a a', A_x = c c', B = e f', and a row costs p + d numbers of each kind instead of p².
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax

from bilevel import trees
from bilevel.oracles.base import Oracles, joined
from bilevel.types import Array, InnerPass, OuterPass, Point, Rows


class Factors(NamedTuple):
    """Per-sample vectors: a, f, d_z of size p; c, e, d_x of size d; (samples, size)."""

    a: Array
    c: Array
    e: Array
    f: Array
    linear_inner: Array
    linear_outer: Array


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["inner_samples", "outer_samples", "outer_bounds"],
    meta_fields=["curvature"],
)
@dataclass(frozen=True)
class QuadraticOracles(Oracles):
    """Factors on each level, rows first; ``curvature`` is the largest eigenvalue of the mean A_z of G, if known."""

    curvature: float | None = None

    diagonal_passes = 1

    @property
    def largest_curvature(self) -> float | None:
        """The largest eigenvalue of ∇²zz G."""
        return self.curvature

    def _row_diagonals(self, point: Point, data: Factors, weights: Array, *, power: int, cautious: bool) -> Array:
        return weights @ data.a ** (2 * power)

    def _inner(self, point: Point, data: Factors, weights: Array) -> InnerPass:
        inner = _inner_products(point, data, weights)
        return inner._replace(grad=inner.grad + weights @ data.linear_inner)

    def _inner_grad_outer(self, point: Point, data: Factors, weights: Array) -> Array:
        return _outer_products(point, data, weights).grad_outer + weights @ data.linear_outer

    def _outer(self, point: Point, data: Factors, weights: Array) -> OuterPass:
        grad, grad_outer = _outer_products(point, data, weights)
        return OuterPass(grad + weights @ data.linear_inner, grad_outer + weights @ data.linear_outer)

    def _inner_value(self, point: Point, data: Factors, weights: Array) -> Array:
        return _value(point, data, weights)

    def _outer_value(self, point: Point, data: Factors, weights: Array) -> Array:
        return _value(point, data, weights)

    def difference(self, point: Point, previous: Point, rows: Rows) -> Point:
        """Return D(point) - D(previous): D is affine, so one product with the move gives it."""
        move = trees.subtract(point, previous)
        inner = _inner_products(move, *self.inner_samples.take(rows.inner))
        outer = _outer_products(move, *self.outer_samples.take(rows.outer))
        return joined(inner, outer)


def _inner_products(point: Point, data: Factors, weights: Array) -> InnerPass:
    """Return A_z z + B'x, A_z v and B v."""
    z, x, v = point
    return InnerPass(
        grad=(weights * (data.a @ z)) @ data.a + (weights * (data.e @ x)) @ data.f,
        hvp=(weights * (data.a @ v)) @ data.a,
        cross=(weights * (data.f @ v)) @ data.e,
    )


def _outer_products(point: Point, data: Factors, weights: Array) -> OuterPass:
    """Return A_z z + B'x and A_x x + B z."""
    z, x, _ = point
    return OuterPass(
        grad=(weights * (data.a @ z)) @ data.a + (weights * (data.e @ x)) @ data.f,
        grad_outer=(weights * (data.c @ x)) @ data.c + (weights * (data.f @ z)) @ data.e,
    )


def _value(point: Point, data: Factors, weights: Array) -> Array:
    z, x, _ = point
    squares = ((data.a @ z) ** 2 + (data.c @ x) ** 2) / 2
    return weights @ (squares + (data.e @ x) * (data.f @ z) + data.linear_inner @ z + data.linear_outer @ x)
