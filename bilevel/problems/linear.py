"""What penalty selection for linear models has in common: a loss l of one score per row.

    G = mean l(d'z) + ½ sum_k exp(x_g(k)) z_k²        F = mean l(d'z)

with one outer variable per feature, or per group g of features. On rows D, features first,

    ∇z G = D l' + exp(x) z      (∇²zz G) v = D (l'' D'v) + exp(x) v      (∇²xz G) v = exp(x) z v, summed by group

Certificates. With P = diag exp(x), H = mean l'' dd' + P. Rows are measured in the metric, d̃ = L⁻¹d, so that within t of
z a score stays within ||d̃|| t. Two metrics are tried, and the smaller error is kept:

    M = P     H >= P everywhere, so μ = 1 and δ = ||D_z||'
    M = H     of z; δ and μ from the least l'' near z, as in :mod:`bilevel.problems.certificate`

    a = λ_max(mean k |d'v| d̃d̃')    k the supremum of |l'''| over scores within ||d̃|| δ of d'z
    b = λ_max(mean l'' d̃d̃')        on outer rows, l'' the supremum over the same scores
    c = ||S diag(P v)||             S sums over the features of a group
    e = ||S diag(P z)|| + δ         as ||S P (z* - z) w||_2 <= sum P |z* - z| |w| <= ||z - z*|| ||w||, for M >= P
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from bilevel._precision import arithmetic
from bilevel._process import may_be_fused
from bilevel._programs import compiled
from bilevel._types import Array, InnerPass, OuterPass, Point, PyTree
from bilevel.oracles import RowwiseOracles
from bilevel.oracles.base import estimate
from bilevel.oracles.samples import STATIC, Samples
from bilevel.problems import certificate
from bilevel.problems.base import BilevelProblem
from bilevel.problems.certificate import Bounds, Metric
from bilevel.problems.checks import check_outer
from bilevel.problems.exact import ExactSolution, InnerSolution, solve_adjoint

LOG_PENALTIES = (-20.0, 20.0)  # beside curvatures near 1, as good as no penalty, and as leaving the feature out
EVERY_WIDTH = 2**62  # the closed form wants features first, however many there are
# XLA's products of a matrix this small and a vector are loops over single numbers on a CPU; sums of so many rows side
# by side are not, and take half the time. Products of other sizes are as fast or faster.
LANES, MOST_ROWS, NUMBERS = 16, 64, (512, 2048)


def sum_groups(per_member: Array, groups: Array | None, n_groups: int) -> Array:
    """Return the sum over the members of each group."""
    return per_member if groups is None else jax.ops.segment_sum(per_member, groups, num_segments=n_groups)


def is_small(features: Array) -> bool:
    """Tell whether products with a block of rows are faster as sums."""
    n_rows, (least, most) = features.shape[1], NUMBERS
    return n_rows % LANES == 0 and n_rows <= MOST_ROWS and least <= features.size <= most


@dataclass(frozen=True)
class LinearOracles(RowwiseOracles):
    """A loss of one score per row; ``groups`` holds the group of each feature, None for one each."""

    groups: Array | None = None
    sums_small_products: bool = field(default=False, metadata=STATIC)

    has_row_diagonals = True
    holds_only_rows = True
    wide_bounds = LOG_PENALTIES

    def for_one_run(self) -> Self:
        return replace(self, sums_small_products=True)

    def inner(self, point: Point, rows: Any = None) -> InnerPass:
        return estimate(self._inner, point, self._as_steps_read(self.inner_samples), rows)

    def outer(self, point: Point, rows: Any = None) -> OuterPass:
        return estimate(self._outer, point, self._as_steps_read(self.outer_samples), rows)

    def _as_steps_read(self, samples: Samples) -> Samples:
        """Return samples whose full-batch pass leaves in the cache what steps read: blocks, not the rows once more."""
        if not self.sums_small_products or samples.blocks is None or samples.sampling != "blocks":
            return samples
        block = jax.tree.leaves(samples.blocks)[0][0]
        return replace(samples, piece=samples.batch_size) if may_be_fused() and is_small(block) else samples

    def _features(self, data: PyTree) -> Array:
        """Return the rows, (features, samples): the first array of the data."""
        return jax.tree.leaves(data)[0]

    def _scores(self, var: Array, features: Array) -> Array:
        """Return D'var."""
        if self.sums_small_products and is_small(features):
            return jnp.sum(var[:, None] * features, axis=0)
        return var @ features

    def _sum_rows(self, features: Array, terms: Array) -> Array:
        """Return D times a term of each row."""
        if self.sums_small_products and is_small(features):
            computed_once = jax.lax.optimization_barrier(terms)  # not again for each feature
            parts = jnp.split(features * computed_once, features.shape[1] // LANES, axis=1)
            return jnp.sum(sum(parts[1:], parts[0]), axis=1)
        return features @ terms

    @abstractmethod
    def _losses(self, scores: Array, data: PyTree) -> Array:
        """Return l of each score."""

    @abstractmethod
    def _slopes(self, scores: Array, data: PyTree) -> tuple[Array, Array]:
        """Return l' and l'' of each score."""

    @abstractmethod
    def curvature_near(self, scores: Array, reach: Array) -> tuple[Array, Array, Array]:
        """Return infimum and supremum of l'' and supremum of |l'''| within a reach of each score."""

    def bound_curvature(
        self, point: Point, data: PyTree, weights: Array, *, inverse_root: Array, radius: Array, kind: str
    ) -> Array:
        """Return sum w l'' dd' with the least l'' within a radius of z ("least"), or what has the eigenvalue a or b."""
        rows = self._features(data)
        whitened = certificate.whiten(rows, inverse_root)
        least, second, third = self.curvature_near(point.inner_var @ rows, certificate.norms(whitened) * radius)
        if kind == "least":
            return (rows * (weights * least)) @ rows.T
        bends = weights * third * abs(point.v @ rows)
        return certificate.second_moment(whitened, bends if kind == "bend" else weights * second)

    def _majorizer(self, slopes: Array, curvatures: Array) -> Array:
        """Return the curvatures, or what they may become where the loss is flat for being large."""
        return curvatures

    def penalties(self, outer_var: Array) -> Array:
        penalties = jnp.exp(outer_var)
        return penalties if self.groups is None else penalties[self.groups]

    def _row_diagonals(self, point: Point, data: PyTree, weights: Array, *, power: int, majorize: bool) -> Array:
        features = self._features(data)
        slopes, curvatures = self._slopes(point.inner_var @ features, data)
        if majorize:
            curvatures = self._majorizer(slopes, curvatures)
        return features ** (2 * power) @ (weights * curvatures**power)

    def _majorized_product(self, point: Point, data: PyTree, weights: Array) -> Array:
        features = self._features(data)
        curvatures = self._majorizer(*self._slopes(point.inner_var @ features, data))
        return features @ (weights * curvatures * (point.v @ features)) + self.penalties(point.outer_var) * point.v

    def _inner_terms(self, point: Point, data: PyTree) -> tuple[Array, Array]:
        features = self._features(data)
        slopes, curvatures = self._slopes(self._scores(point.inner_var, features), data)
        return slopes, curvatures * self._scores(point.v, features)

    def _inner_sum(self, terms: tuple[Array, Array], data: PyTree, weights: Array, like: Point) -> InnerPass:
        features, (slopes, bends) = self._features(data), terms
        grad, hvp = (self._sum_rows(features, weights * term) for term in (slopes, bends))
        return InnerPass(grad, hvp, jnp.zeros_like(like.outer_var))

    def inner_regularization(self, point: Point) -> InnerPass:
        z, x, v = point
        penalties = self.penalties(x)
        return InnerPass(penalties * z, penalties * v, sum_groups(penalties * z * v, self.groups, x.size))

    def _inner_grad_outer(self, point: Point, data: PyTree, weights: Array) -> Array:
        z, x, _ = point
        return sum_groups(self.penalties(x) * z**2 / 2, self.groups, x.size)

    def _outer_terms(self, point: Point, data: PyTree) -> Array:
        return self._slopes(self._scores(point.inner_var, self._features(data)), data)[0]

    def _outer_sum(self, terms: Array, data: PyTree, weights: Array, like: Point) -> OuterPass:
        return OuterPass(self._sum_rows(self._features(data), weights * terms), jnp.zeros_like(like.outer_var))

    def _inner_value(self, point: Point, data: PyTree, weights: Array) -> Array:
        penalty = jnp.sum(self.penalties(point.outer_var) * point.inner_var**2) / 2
        return self._outer_value(point, data, weights) + penalty

    def _outer_value(self, point: Point, data: PyTree, weights: Array) -> Array:
        return jnp.sum(weights * self._losses(point.inner_var @ self._features(data), data))


class LinearExactSolver(ABC):
    """Exact solutions with a dense Hessian; a subclass fits the model to given penalties."""

    def __init__(self, oracles: LinearOracles) -> None:
        self._oracles = oracles

    @abstractmethod
    def _fit(self, penalties: np.ndarray, start: np.ndarray) -> tuple[InnerSolution, float, np.ndarray]:
        """Fit the model, in float64 on the rows that runs use; return F and ∇z F there too."""

    def __call__(self, outer_var: np.ndarray, guess: ExactSolution | None = None) -> ExactSolution:
        # In NumPy, which has nothing to compile.
        x = check_outer(outer_var)
        groups = np.arange(x.size) if self._oracles.groups is None else np.asarray(self._oracles.groups)
        penalties = np.exp(x)[groups]
        with arithmetic(np.float64):
            start = np.zeros_like(penalties) if guess is None else guess.inner_var
            found, value, outer_grad = self._fit(penalties, start)
        v, left = solve_adjoint(found, value, outer_grad)
        hypergrad = np.bincount(groups, penalties * found.z * v, x.size)
        residuals = float(np.linalg.norm(found.grad)), float(np.linalg.norm(left))
        return ExactSolution(found.z, v, value, hypergrad, *residuals)


class LinearBounds:
    """Bounds at points of logistic or ridge selection; softmax selection measures rows in other ways."""

    why = "Penalties and curvature of the rows are known."

    def __init__(self, problem: BilevelProblem) -> None:
        oracles, size = problem.oracles, problem.start.inner_var.size
        assert isinstance(oracles, LinearOracles)
        self._groups = np.arange(size) if oracles.groups is None else np.asarray(oracles.groups)
        self._oracles: Any = oracles.in_float64()
        self._is_dense = size <= certificate.DENSE

    def _measure(self, metric: Metric | None, z: np.ndarray) -> np.ndarray:
        """Return what gives the length of a row in a metric; None is for a radius of 0, where lengths do not count."""
        return np.ones(z.size) if metric is None else metric.inverse_root

    def _curvature(self, kind: str, point: Point, measure: np.ndarray, radius: Any) -> Array:
        return _curvature(self._oracles, point, measure, radius, kind)

    def _moves(self, metric: Metric, point: Point, delta: Any) -> list[float]:
        moves = (self._curvature(kind, point, metric.inverse_root, delta) for kind in ("bend", "slope"))
        return [certificate.largest(matrix) for matrix in moves]

    def __call__(self, point: Point, direction: Point) -> Bounds:
        penalties = np.exp(point.outer_var)[self._groups]
        plain = Metric.diagonal(penalties)
        found = self._bounds(plain, point, direction, plain.dual_norm(direction.inner_var.ravel()), 1.0)
        try:
            local = self._local(point, direction, penalties) if self._is_dense else found
        except np.linalg.LinAlgError:
            return found
        return min(found, local, key=lambda bounds: bounds.error)

    def _local(self, point: Point, direction: Point, penalties: np.ndarray) -> Bounds:
        def least_hessian(measure: np.ndarray, radius: float) -> np.ndarray:
            return np.asarray(self._curvature("least", point, measure, np.float64(radius))) + np.diag(penalties)

        metric = Metric.dense(least_hessian(self._measure(None, point.inner_var), 0.0))
        within = partial(least_hessian, self._measure(metric, point.inner_var))
        found = certificate.ball(metric, metric.dual_norm(direction.inner_var.ravel()), within)
        return certificate.NOTHING if found is None else self._bounds(metric, point, direction, *found)

    def _bounds(self, metric: Metric, point: Point, direction: Point, delta: float, mu: float) -> Bounds:
        a, b = self._moves(metric, point, np.float64(delta))
        penalties, v_residual = np.exp(point.outer_var)[self._groups], metric.dual_norm(direction.v.ravel())
        parts = point.v, point.inner_var
        c, e = (metric.grouped_norm(penalties * part.ravel(), self._groups) for part in parts)
        return Bounds(delta, mu, v_residual, a, b, c, e + delta, metric.least)


@compiled("kind")
def _curvature(oracles: LinearOracles, point: Point, inverse_root: Array, radius: Array, kind: str) -> Array:
    of_piece = partial(oracles.bound_curvature, point, inverse_root=inverse_root, radius=radius, kind=kind)
    return (oracles.outer_samples if kind == "slope" else oracles.inner_samples).mean(of_piece)
