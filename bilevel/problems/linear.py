"""Closed-form oracles of penalty selection for linear models.

    G = mean l(d'z) + ½ sum_k exp(x_g(k)) z_k²        F = mean l(d'z)

with one outer variable per feature, or per group g of features. On rows D, features first,

    ∇z G = D l' + exp(x) z      (∇²zz G) v = D (l'' D'v) + exp(x) v      (∇²xz G) v = exp(x) z v, summed by group

Losses of one score: how large their second and third derivatives are near a score.

Certificates of penalty selection for linear models: G = mean l(d'z) + ½ sum exp(x) z², F = mean l(d'z).

With P = diag exp(x), H = mean l'' dd' + P. Rows are measured in the metric, d̃ = L⁻¹d, so that within t of z a score
stays within ||d̃|| t. Two metrics are tried, and the smaller error is kept:

    M = P     H >= P everywhere, so μ = 1 and δ = ||D_z||'
    M = H     of z; δ and μ from the least l'' near z, as in :mod:`bilevel.problems.certificate`

    a = λ_max(mean k |d'v| d̃d̃')    k the supremum of |l'''| over scores within ||d̃|| δ of d'z
    b = λ_max(mean l'' d̃d̃')        on outer rows, l'' the supremum over the same scores
    c = ||S diag(P v)||             S sums over the features of a group
    e = ||S diag(P z)|| + δ         as ||S P (z* - z) w||_2 <= sum P |z* - z| |w| <= ||z - z*|| ||w||, for M >= P
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import log, sqrt
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bilevel._types import Array, InnerPass, OuterPass, Point, PyTree
from bilevel.oracles.rowwise import RowwiseOracles
from bilevel.problems.base import BilevelProblem
from bilevel.problems.certificate import DENSE, NOTHING, Bounds, Metric, ball, largest, norms, spread, summed, whitened
from bilevel.problems.losses import sigmoid

# Beside curvatures of data near 1, a penalty below the lower one is as good as none, and one above the upper as good
# as leaving the feature out.
LOG_PENALTIES = (-20.0, 20.0)


def ungrouped(per_group: Array, groups: Array | None) -> Array:
    """Return what each member has from its group."""
    return per_group if groups is None else per_group[groups]


def grouped(per_member: Array, groups: Array | None, n_groups: int) -> Array:
    """Return the sum over the members of each group."""
    return per_member if groups is None else jax.ops.segment_sum(per_member, groups, num_segments=n_groups)


@dataclass(frozen=True)
class LinearOracles(RowwiseOracles):
    """A loss of one score per row; ``groups`` holds the group of each feature, None for one each."""

    groups: Array | None = None

    curve: ClassVar["Curve"]  # bounds of l'' and l''' near a score

    diagonal_passes = 1
    holds_only_rows = True

    @abstractmethod
    def _features(self, data: PyTree) -> Array:
        """Return the rows, (features, samples)."""

    @abstractmethod
    def _losses(self, scores: Array, data: PyTree) -> Array:
        """Return l of each score."""

    @abstractmethod
    def _slopes(self, scores: Array, data: PyTree) -> tuple[Array, Array]:
        """Return l' and l'' of each score."""

    @property
    def wide_bounds(self) -> tuple[float, float]:
        """Bounds of the logarithm of a penalty."""
        return LOG_PENALTIES

    def _row_diagonals(self, point: Point, data: PyTree, weights: Array, *, power: int, majorize: bool) -> Array:
        features = self._features(data)
        slopes, curvatures = self._slopes(point.inner_var @ features, data)
        if majorize:
            curvatures = self._majorizer(slopes, curvatures)
        return features ** (2 * power) @ (weights * curvatures**power)

    def _majorizer(self, slopes: Array, curvatures: Array) -> Array:
        """Return the curvatures, or what they may become where the loss is flat for being large."""
        return curvatures

    def _diagonal_regularization(self, point: Point) -> Array:
        return self.penalties(point.outer_var)

    def penalties(self, outer_var: Array) -> Array:
        """Return the penalty of each feature."""
        return ungrouped(jnp.exp(outer_var), self.groups)

    def grouped(self, per_feature: Array, outer_var: Array) -> Array:
        """Return the sum over the features of each group."""
        return grouped(per_feature, self.groups, outer_var.size)

    def _inner_terms(self, point: Point, data: PyTree) -> tuple[Array, Array]:
        features = self._features(data)
        slopes, curvatures = self._slopes(point.inner_var @ features, data)
        return slopes, curvatures * (point.v @ features)

    def _inner_sum(self, terms: tuple[Array, Array], data: PyTree, weights: Array, like: Point) -> InnerPass:
        features, (slopes, curved) = self._features(data), terms
        return InnerPass(features @ (weights * slopes), features @ (weights * curved), jnp.zeros_like(like.outer_var))

    def _inner_regularization(self, point: Point) -> InnerPass:
        z, x, v = point
        penalties = self.penalties(x)
        return InnerPass(penalties * z, penalties * v, self.grouped(penalties * z * v, x))

    def _inner_grad_outer(self, point: Point, data: PyTree, weights: Array) -> Array:
        return self.grouped(self.penalties(point.outer_var) * point.inner_var**2 / 2, point.outer_var)

    def _outer_terms(self, point: Point, data: PyTree) -> Array:
        return self._slopes(point.inner_var @ self._features(data), data)[0]

    def _outer_sum(self, terms: Array, data: PyTree, weights: Array, like: Point) -> OuterPass:
        return OuterPass(self._features(data) @ (weights * terms), jnp.zeros_like(like.outer_var))

    def _inner_value(self, point: Point, data: PyTree, weights: Array) -> Array:
        penalty = jnp.sum(self.penalties(point.outer_var) * point.inner_var**2) / 2
        return self._outer_value(point, data, weights) + penalty

    def _outer_value(self, point: Point, data: PyTree, weights: Array) -> Array:
        return jnp.sum(weights * self._losses(point.inner_var @ self._features(data), data))


_STEEPEST = log(2 + sqrt(3))  # where |l'''| of the logistic loss is largest


class Curve(NamedTuple):
    """A loss l of one score: infimum and supremum of l'', supremum of |l'''| over scores within a reach of it."""

    least_second: Callable[[Array, Array], Array]
    largest_second: Callable[[Array, Array], Array]
    largest_third: Callable[[Array, Array], Array]


def _logistic_second(sizes: Array) -> Array:
    """Return l'' of scores with these absolute values: it is even, and falls with them."""
    missed = sigmoid(-sizes)
    return missed * (1 - missed)


def _logistic_least_second(scores: Array, reach: Array) -> Array:
    return _logistic_second(jnp.abs(scores) + reach)


def _logistic_largest_second(scores: Array, reach: Array) -> Array:
    return _logistic_second(jnp.maximum(jnp.abs(scores) - reach, 0))


def _logistic_largest_third(scores: Array, reach: Array) -> Array:
    sizes = jnp.abs(scores)
    # |l'''| is even, rises up to its peak and falls beyond it.
    nearest = jnp.clip(_STEEPEST, jnp.maximum(sizes - reach, 0), sizes + reach)
    return _logistic_second(nearest) * (1 - 2 * sigmoid(-nearest))


def _one(scores: Array, reach: Array) -> Array:
    return jnp.ones_like(scores)


def _zero(scores: Array, reach: Array) -> Array:
    return jnp.zeros_like(scores)


LOGISTIC = Curve(_logistic_least_second, _logistic_largest_second, _logistic_largest_third)
SQUARED = Curve(_one, _one, _zero)


class LinearBounds:
    """Bounds at points of logistic or ridge selection."""

    why = "Penalties and curvature of the rows are known."

    def __init__(self, problem: BilevelProblem) -> None:
        oracles = problem.oracles
        assert isinstance(oracles, LinearOracles)
        self._oracles = oracles.widened()
        self._curve = oracles.curve
        size = problem.start.inner_var.size
        self._groups = np.arange(size) if oracles.groups is None else np.asarray(oracles.groups)

    def __call__(self, point: Point, direction: Point) -> Bounds:
        """Return the bounds in the better of the two metrics."""
        penalties = np.exp(point.outer_var)[self._groups]
        plain = Metric.diagonal(penalties)
        found = self._bounds(plain, point, direction, plain.dual_norm(direction.inner_var), 1.0)
        if penalties.size > DENSE:
            return found
        try:
            local = self._local(point, direction, penalties)
        except np.linalg.LinAlgError:
            return found
        return min(found, local, key=lambda bounds: bounds.error)

    def _local(self, point: Point, direction: Point, penalties: np.ndarray) -> Bounds:
        metric = Metric.dense(self._least_hessian(point.inner_var, penalties, np.ones(len(penalties)), 0.0))
        within = partial(self._least_hessian, point.inner_var, penalties, metric.inverse_root)
        found = ball(metric, metric.dual_norm(direction.inner_var), within)
        return NOTHING if found is None else self._bounds(metric, point, direction, *found)

    def _least_hessian(
        self, z: np.ndarray, penalties: np.ndarray, inverse_root: np.ndarray, radius: float
    ) -> np.ndarray:
        fit = _least_fit_curvature(self._oracles, self._curve, z, inverse_root, np.float64(radius))
        return np.asarray(fit) + np.diag(penalties)

    def _bounds(self, metric: Metric, point: Point, direction: Point, delta: float, mu: float) -> Bounds:
        z, x, v = point
        penalties = np.exp(x)[self._groups]
        moves = _moves(self._oracles, self._curve, z, v, metric.inverse_root, np.float64(delta))
        return Bounds(
            delta=delta,
            mu=mu,
            v_residual=metric.dual_norm(direction.v),
            a=largest(moves[0]),
            b=largest(moves[1]),
            c=metric.grouped_norm(penalties * v, self._groups),
            e=metric.grouped_norm(penalties * z, self._groups) + delta,
            least=metric.least,
        )


@partial(jax.jit, static_argnames="curve")
def _least_fit_curvature(oracles: LinearOracles, curve: Curve, z: Array, inverse_root: Array, radius: Array) -> Array:
    """Return mean l'' dd' with the least l'' of each row within a radius of z."""

    def of_piece(data: Any, weights: Array) -> Array:
        rows = oracles._features(data)
        reach = norms(whitened(rows, inverse_root)) * radius
        return (rows * (weights * curve.least_second(z @ rows, reach))) @ rows.T

    return summed(of_piece, oracles.inner_samples)


@partial(jax.jit, static_argnames="curve")
def _moves(
    oracles: LinearOracles, curve: Curve, z: Array, v: Array, inverse_root: Array, delta: Array
) -> tuple[Array, Array]:
    """Return the matrices whose largest eigenvalues are a and b."""

    def bend(data: Any, weights: Array) -> Array:
        rows = oracles._features(data)
        measured = whitened(rows, inverse_root)
        third = curve.largest_third(z @ rows, norms(measured) * delta)
        return spread(measured, weights * third * abs(v @ rows))

    def slope(data: Any, weights: Array) -> Array:
        rows = oracles._features(data)
        measured = whitened(rows, inverse_root)
        return spread(measured, weights * curve.largest_second(z @ rows, norms(measured) * delta))

    return summed(bend, oracles.inner_samples), summed(slope, oracles.outer_samples)
