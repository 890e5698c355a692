"""Closed-form oracles of the worst case of the lower bound.

    G_i = μ/2 ||z - x||²        F_j = λ f(U_j z / β)

with orthonormal rows in all U_j together and a chain f of T + 1 coordinates, of which Γ sees the first T:

    f(y) = √α/2 (y_1 - 1)² + ½ sum_k (y_k+1 - y_k)² + α sum_k Γ(y_k)
    Γ(t) = 120 ∫ from 1 to t of s² (s - 1) / (1 + s²) ds

A gradient of f sees a coordinate only after its predecessor has left 0.
"""

from abc import abstractmethod
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from bilevel.oracles.base import Oracles
from bilevel.types import Array, InnerPass, OuterPass, Point


def gamma(t: Array) -> Array:
    """Return Γ = 120 [(t - 1)²/2 - ½ log((1 + t²)/2) + atan(t) - π/4], without its cancellation at t = 1."""
    s = t - 1
    return 120 * (s**2 / 2 - jnp.log1p(s + s**2 / 2) / 2 + jnp.arctan2(s, 2 + s))


def gamma_slope(t: Array) -> Array:
    """Return Γ'."""
    return 120 * (t - 1) * (t**2 / (1 + t**2))


def chain(y: Array, alpha: float) -> Array:
    """Return f along the last axis."""
    quadratic = alpha**0.5 * (y[..., 0] - 1) ** 2 + jnp.sum(jnp.diff(y) ** 2, axis=-1)
    return quadratic / 2 + alpha * jnp.sum(gamma(y[..., :-1]), axis=-1)


def chain_slope(y: Array, alpha: float) -> Array:
    """Return ∇f along the last axis, exactly 0 beyond the first coordinate that is 0 with all after it."""
    steps = jnp.diff(y)
    pulled_back = jnp.concatenate([alpha**0.5 * (y[..., :1] - 1), steps], axis=-1)
    pulled_ahead = jnp.concatenate([alpha * gamma_slope(y[..., :-1]) - steps, jnp.zeros_like(y[..., :1])], axis=-1)
    return pulled_back + pulled_ahead


@dataclass(frozen=True, kw_only=True)
class WorstCaseOracles(Oracles):
    """Inner rows hold their curvature μ; what outer rows hold is up to the subclass.

    Attributes
    ----------
    alpha : α
    amplitude : λ
    width : β
    curvature : μ
    """

    alpha: float
    amplitude: float
    width: float
    curvature: float

    @abstractmethod
    def _parts(self, z: Array, rows: Array) -> Array:
        """Return U_j z of each row, (rows, T + 1)."""

    @abstractmethod
    def _whole(self, parts: Array, rows: Array) -> Array:
        """Return the sum of U_j' parts_j over the rows."""

    @property
    def largest_curvature(self) -> float | None:
        """The one eigenvalue of ∇²zz G."""
        return self.curvature

    def _inner(self, point: Point, data: Array, weights: Array) -> InnerPass:
        z, x, v = point
        curvature = jnp.sum(weights * data)
        return InnerPass(curvature * (z - x), curvature * v, -curvature * v)

    def _inner_grad_outer(self, point: Point, data: Array, weights: Array) -> Array:
        return jnp.sum(weights * data) * (point.outer_var - point.inner_var)

    def _outer(self, point: Point, data: Array, weights: Array) -> OuterPass:
        slopes = chain_slope(self._parts(point.inner_var, data) / self.width, self.alpha)
        grad = self._whole(weights[:, None] * (self.amplitude / self.width * slopes), data)
        return OuterPass(grad, jnp.zeros_like(point.outer_var))

    def _inner_value(self, point: Point, data: Array, weights: Array) -> Array:
        return jnp.sum(weights * data) / 2 * jnp.sum((point.inner_var - point.outer_var) ** 2)

    def _outer_value(self, point: Point, data: Array, weights: Array) -> Array:
        values = chain(self._parts(point.inner_var, data) / self.width, self.alpha)
        return self.amplitude * jnp.sum(weights * values)


_register = partial(
    jax.tree_util.register_dataclass,
    data_fields=["inner_samples", "outer_samples", "outer_bounds"],
    meta_fields=["alpha", "amplitude", "width", "curvature"],
)


@_register
@dataclass(frozen=True, kw_only=True)
class CoordinateChains(WorstCaseOracles):
    """U_j picks the j-th of m equal parts of z; outer rows hold their number j."""

    def _parts(self, z: Array, rows: Array) -> Array:
        return jnp.take(z.reshape(self.n_outer, -1), rows, axis=0)

    def _whole(self, parts: Array, rows: Array) -> Array:
        return jnp.zeros((self.n_outer, parts.shape[1]), parts.dtype).at[rows].add(parts).ravel()


@_register
@dataclass(frozen=True, kw_only=True)
class RotatedChains(WorstCaseOracles):
    """Outer rows hold U_j, (T + 1, p)."""

    def _parts(self, z: Array, rows: Array) -> Array:
        return rows @ z

    def _whole(self, parts: Array, rows: Array) -> Array:
        return jnp.tensordot(parts, rows, axes=2)
