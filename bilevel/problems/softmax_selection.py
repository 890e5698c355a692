"""Selection of penalties for softmax regression, one per class, feature or group of them, on a validation set.

With z: classes × features, the residual r = softmax(zd) - e_label of each row and S t = p (t - p't), on rows D:

    ∇z G = rD + exp(x) z      (∇²zz G) v = S(vD')D + exp(x) v      (∇²xz G) v = sum exp(x) z v

Certificates. As for linear models (:mod:`bilevel.problems.linear`), but that a row acts through one score per class:
two metrics are tried, and the smaller error is kept; c and e are the same. In M = P, μ = 1 and δ = ||D_z||', and a row
is measured as d̃ = d / √exp(x) with one penalty per feature, d / √exp(min x) with one per class, so that
||wd||_2 <= ||d̃|| ||w||. With C and k of :mod:`bilevel.problems.softmax` within ||d̃|| δ of the scores,

    a = λ_max(mean k d̃d̃')     b = λ_max(mean C d̃d̃') on outer rows

The other metric is M = H = mean S ⊗ dd' + P with S = diag(p) - pp' at z. Within t of z the scores of a row move by u
with range(u) <= w = 2 t max_c ||d||_c, where ||d||_c² = d'N_c d and N_c is the diagonal block of H⁻¹ of class c. As a
third cumulant κ(u, s, s) is at most range(u) S(s, s), S stays between exp(-w) and exp(w) times what it is at z. So δ
and μ come from mean exp(-w) S ⊗ dd' + P (:mod:`bilevel.problems.certificate`), and with w at t = δ

    a = λ_max(M⁻¹ mean range(vd) exp(w) S ⊗ dd')     b = λ_max(M⁻¹ mean exp(w) S ⊗ dd') on outer rows
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from bilevel._precision import resolve_dtype
from bilevel._programs import compiled
from bilevel._types import Array, InnerPass, Point
from bilevel.oracles import Samples
from bilevel.oracles.samples import STATIC
from bilevel.problems import certificate, softmax
from bilevel.problems.base import BilevelProblem, lay_out
from bilevel.problems.certificate import Metric
from bilevel.problems.checks import check_choice, check_groups, make_rng
from bilevel.problems.exact import IterativeExactSolver
from bilevel.problems.linear import LOG_PENALTIES, LinearBounds, sum_groups
from bilevel.problems.softmax import Labeled, SoftmaxOracles

AXES = ("class", "feature")  # of z


def softmax_selection(
    X_train: Any,
    y_train: Any,
    X_val: Any,
    y_val: Any,
    *,
    per: str = "class",
    groups: Any = None,
    inner_var: Any = None,
    outer_var: Any = None,
    outer_bounds: Any = None,
    dtype: DTypeLike | None = None,
    seed: int = 0,
) -> BilevelProblem:
    """Build the problem min over x of the validation loss of softmax regression with penalties exp(x).

        G = mean CE(zd, y) + ½ sum_ck exp(x) z_ck²  on training rows, x = x_c per class or x_k per feature
        F = mean CE(zd, y)                          on validation rows

    Parameters
    ----------
    y_train, y_val : classes 0, 1, 2, …
    per : "class" or "feature"; what shares a penalty
    groups : the group of each class or feature, 0, 1, …; those of a group share a penalty; one each by default
    inner_var, outer_var : the start; z = 0, (classes, features), and x = -2 by default
    X_train, X_val, outer_bounds, dtype, seed : as for `logistic_selection`
    """
    dtype = resolve_dtype(dtype, X_train=X_train, X_val=X_val)
    check_choice("per", per, AXES)
    data, shape = softmax.check_labeled(X_train, y_train, X_val, y_val, dtype=dtype)
    groups, n_penalties = check_groups(groups, shape[AXES.index(per)], per)
    defaults, rng = (np.zeros(shape), np.full(n_penalties, -2.0)), make_rng(seed)
    parts, start = lay_out(data, (inner_var, outer_var), defaults, outer_bounds, dtype, rng, narrow=0)
    oracles = SoftmaxSelectionOracles(**parts, per=per, groups=groups)
    solver = IterativeExactSolver(oracles, start)
    return BilevelProblem(oracles, start, solver, "softmax_selection", certificate_bounds=SoftmaxSelectionBounds)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SoftmaxSelectionOracles(SoftmaxOracles):
    """Labeled rows on each level; one penalty per ``"class"`` or ``"feature"``, or per group of them."""

    per: str = field(default="class", metadata=STATIC)
    groups: Array | None = None

    holds_only_rows = True
    wide_bounds = LOG_PENALTIES

    def penalties(self, outer_var: Array) -> Array:
        """Return the penalties in a shape that broadcasts to that of z."""
        penalties = jnp.exp(outer_var)
        shared = penalties if self.groups is None else penalties[self.groups]
        return jnp.expand_dims(shared, 1 - AXES.index(self.per))

    def _sum_shared(self, per_entry: Array, outer_var: Array) -> Array:
        """Return the sum over the entries of z that share a penalty."""
        return sum_groups(jnp.sum(per_entry, axis=1 - AXES.index(self.per)), self.groups, outer_var.size)

    @staticmethod
    def bound_curvature(
        point: Point, data: Labeled, weights: Array, *, inverse_root: Array, radius: Array, kind: str
    ) -> Array:
        """Return the matrix whose largest eigenvalue is a ("bend") or b ("slope"), in a diagonal metric."""
        rows = data.features.T
        whitened, p = certificate.whiten(rows, inverse_root), softmax.probabilities(point.inner_var @ rows)
        sizes = softmax.largest_curvatures(p, certificate.norms(whitened) * radius)
        if kind == "bend":
            sizes = softmax.largest_bends(point.v @ rows, sizes)
        return certificate.second_moment(whitened, weights * sizes)

    def inner_regularization(self, point: Point) -> InnerPass:
        z, x, v = point
        penalties = self.penalties(x)
        return InnerPass(penalties * z, penalties * v, self._sum_shared(penalties * z * v, x))

    def _inner_grad_outer(self, point: Point, data: Labeled, weights: Array) -> Array:
        return self._sum_shared(self.penalties(point.outer_var) * point.inner_var**2 / 2, point.outer_var)

    def _inner_value(self, point: Point, data: Labeled, weights: Array) -> Array:
        penalty = jnp.sum(self.penalties(point.outer_var) * point.inner_var**2) / 2
        return self._outer_value(point, data, weights) + penalty


_MOST_WORK = 2e10  # multiplications in one pass that makes a matrix like H


class SoftmaxSelectionBounds(LinearBounds):
    """Bounds at points of softmax selection."""

    def __init__(self, problem: BilevelProblem) -> None:
        oracles, z = problem.oracles, problem.start.inner_var
        assert isinstance(oracles, SoftmaxSelectionOracles)
        # Of each number of z: which penalty it has.
        members = np.indices(z.shape)[AXES.index(oracles.per)].ravel()
        self._groups = members if oracles.groups is None else np.asarray(oracles.groups)[members]
        self._oracles = oracles.in_float64()
        most_rows = max(oracles.n_inner, oracles.n_outer)
        self._is_dense = z.size <= certificate.DENSE and most_rows * z.size**2 <= _MOST_WORK

    def _measure(self, metric: Metric | None, z: np.ndarray) -> np.ndarray:
        n_classes, n_features = z.shape
        if metric is None:
            return np.zeros((n_classes, n_features, n_features))
        blocks = metric.inverse_root.reshape(-1, n_classes, n_features).swapaxes(0, 1)
        return np.stack([np.linalg.cholesky(block.T @ block).T for block in blocks])

    def _curvature(self, kind: str, point: Point, measure: np.ndarray, radius: Any) -> Array:
        of_metric = _diagonal_curvature if measure.ndim == 1 else _curvature
        samples = self._oracles.outer_samples if kind == "slope" else self._oracles.inner_samples
        return of_metric(samples, point, measure, radius, kind)

    def _moves(self, metric: Metric, point: Point, delta: Any) -> list[float]:
        if metric.inverse_root.ndim == 1:
            measure, largest = metric.inverse_root.reshape(point.inner_var.shape).max(axis=0), certificate.largest
        else:
            measure, largest = self._measure(metric, point.inner_var), metric.largest
        moves = (self._curvature(kind, point, measure, delta) for kind in ("bend", "slope"))
        return [largest(np.asarray(matrix)) for matrix in moves]


@compiled("kind")
def _diagonal_curvature(samples: Samples, point: Point, inverse_root: Array, radius: Array, kind: str) -> Array:
    bound = SoftmaxSelectionOracles.bound_curvature
    return samples.mean(partial(bound, point, inverse_root=inverse_root, radius=radius, kind=kind))


@compiled("kind")
def _curvature(samples: Samples, point: Point, roots: Array, radius: Array, kind: str) -> Array:
    """Return mean exp(-w) S ⊗ dd' ("least"), exp(w) for it ("slope") or range(vd) exp(w) ("bend")."""
    z, _, v = point
    same_class = jnp.eye(len(z), dtype=z.dtype)[:, None, :, None]

    def of_piece(data: Labeled, weights: Array) -> Array:
        rows = data.features.T
        p, lengths = softmax.probabilities(z @ rows), jnp.sqrt(jnp.max(jnp.sum((roots @ rows) ** 2, axis=1), axis=0))
        factors = jnp.exp((-2 if kind == "least" else 2) * radius * lengths)
        if kind == "bend":
            factors = factors * jnp.ptp(v @ rows, axis=0)
        joint = (p[:, None, :] * rows).reshape(z.size, -1)
        weighted = joint * (weights * factors)
        own = (weighted @ rows.T).reshape(*z.shape, 1, len(rows))
        return (own * same_class).reshape(z.size, z.size) - weighted @ joint.T

    return samples.mean(of_piece)
