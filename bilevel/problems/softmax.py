"""Selection of penalties for softmax regression, one per class, feature or group of them, on a validation set.

With z: classes × features, the probabilities p = softmax(zd) and the residual r = p - e_label of each row, and
S t = p (t - p't), on rows D:

    ∇z G = rD + exp(x) z      (∇²zz G) v = S(vD')D + exp(x) v      (∇²xz G) v = sum exp(x) z v

Derivatives of a cross-entropy are cumulants of variables on the classes, under the probabilities p at the scores s:
its Hessian is the covariance S = diag(p) - pp', and its third derivative κ(t, u, w) is a third cumulant.

    S <= C      with C = min(½, 2 max p (1 - p) exp(√2 reach)) for scores within ``reach``: 2 p (1 - p) is a sum of
                |entries| of a row of S, and S grows along u by κ(u, w, w) <= range(u) S(w, w), range(u) <= √2 ||u||
    |κ(t, u, w)| <= k ||u|| ||w||      with k = min(√2³/(6√3) ||t - mean t||, C range(t)): a symmetric form is largest
                where its arguments agree, and there it is the third cumulant of a variable of range up to √2 ||u||

Certificates. As in linear models (:mod:`bilevel.problems.linear`), two metrics are tried and the smaller error is kept;
c and e are the same. A row acts through one score per class. In M = P, μ = 1 and δ = ||D_z||', and the length of a row
is that of d̃ = d / √exp(x) with one penalty per feature and d / √exp(min x) with one per class, so that
||wd||_2 <= ||d̃|| ||w||. With C and k within ||d̃|| δ of the scores,

    a = λ_max(mean k d̃d̃')     b = λ_max(mean C d̃d̃') on outer rows

The other metric is M = H = mean S ⊗ dd' + P with S = diag(p) - pp' at z. Within t of z the scores of a row move by u
with range(u) <= w = 2 t max_c ||d||_c, where ||d||_c² = d'N_c d and N_c is the diagonal block of H⁻¹ of class c. As a
third cumulant κ(u, s, s) is at most range(u) S(s, s), S stays between exp(-w) and exp(w) times its value at z. So δ
and μ come from mean exp(-w) S ⊗ dd' + P (:mod:`bilevel.problems.certificate`), and with w at t = δ

    a = λ_max(M⁻¹ mean range(vd) exp(w) S ⊗ dd')     b = λ_max(M⁻¹ mean exp(w) S ⊗ dd') on outer rows
"""

from dataclasses import dataclass, field
from functools import partial
from math import sqrt
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from bilevel._core import trees
from bilevel._core.compilation import compiled, resolve_dtype
from bilevel._core.types import AnyArray, Array, InnerPass, OuterPass, Point
from bilevel.oracles import RowwiseOracles, Samples
from bilevel.oracles.samples import STATIC
from bilevel.problems import certificate
from bilevel.problems.base import BilevelProblem, documented, lay_out
from bilevel.problems.certificate import Metric
from bilevel.problems.checks import check_choice, check_classes, check_groups, check_tables, make_rng
from bilevel.problems.exact import IterativeExactSolver
from bilevel.problems.linear import LOG_PENALTIES, SIGMOID, LinearBounds, sum_groups

AXES = ("class", "feature")  # of z


# Softmax regression


class Labeled(NamedTuple):
    """Features, (samples, features), classes 0, 1, … and the position of each row in the order of the user."""

    features: AnyArray
    labels: AnyArray
    index: AnyArray


def check_labeled(*tables: Any, dtype: DTypeLike) -> tuple[tuple[Labeled, Labeled], tuple[int, int]]:
    """Return the rows of both levels from their features and labels, and the shape of z."""
    (rows, labels), (outer_rows, outer_labels) = check_tables(*tables)
    train, n_classes = label_rows(rows, "y_train", labels, dtype)
    validation, _ = label_rows(outer_rows, "y_val", outer_labels, dtype, n_classes)
    return (train, validation), (n_classes, rows.shape[1])


def label_rows(
    rows: np.ndarray, name: str, labels: np.ndarray, dtype: DTypeLike, n_classes: int | None = None
) -> tuple[Labeled, int]:
    """Return the rows of one level and the number of classes, which is found in the labels if it is not given."""
    classes = check_classes(name, labels, n_classes)
    n_classes = n_classes or int(classes.max()) + 1
    if n_classes < 2:
        raise ValueError(f"`{name}` holds the class 0 alone; a softmax problem needs at least two.")
    return Labeled(rows.astype(dtype, copy=False), classes, np.arange(len(rows), dtype=np.int32)), n_classes


# Scores, tangents, probabilities and terms are (classes, samples): one column for each row.


def cross_entropies(scores: Array, labels: Array) -> Array:
    """Return log(sum exp(s)) - s_label of the scores of each row."""
    return jax.nn.logsumexp(scores, axis=0) - jnp.take_along_axis(scores, labels[None, :], axis=0)[0]


def probabilities(scores: Array) -> Array:
    """Return softmax of the scores of each row."""
    raised = jnp.exp(scores - jnp.max(scores, axis=0))
    return raised / jnp.sum(raised, axis=0)


def residuals(p: Array, labels: Array) -> Array:
    """Return the gradient of each cross-entropy with respect to its scores."""
    return p - jax.nn.one_hot(labels, len(p), dtype=p.dtype, axis=0)


def hessian_products(p: Array, tangents: Array) -> Array:
    """Return the Hessian of each cross-entropy with respect to its scores, times a tangent."""
    return p * (tangents - jnp.sum(p * tangents, axis=0))


def products(features: Array, *matrices: Array) -> list[Array]:
    """Return matrix @ features' for each matrix, reading the features once; all of them are computed."""
    # XLA is fastest with the thin matrix on the left.
    return jnp.split(jnp.concatenate(matrices) @ features.T, len(matrices))


def sums(features: Array, *terms: Array) -> list[Array]:
    """Return term @ features for each term of the rows, reading the features once."""
    return jnp.split(jnp.concatenate(terms) @ features, len(terms))


@dataclass(frozen=True)
class SoftmaxOracles(RowwiseOracles):
    """F = mean CE(zd), and the same losses in G; a subclass adds penalties or weights of rows.

    The first two terms of a row are numbers per class, for ∇z G and (∇²zz G) v. Rows are long, so that one product
    computes everything that is needed together. A derivative that is needed alone has a product of its own.
    """

    has_row_diagonals = True

    def _inner_terms_of(self, scores: Array, tangents: Array, point: Point, data: Labeled) -> tuple[Array, ...]:
        """Return the terms of each row from its products with z and v."""
        p = probabilities(scores)
        return residuals(p, data.labels), hessian_products(p, tangents)

    def _inner_bundle(self, grad: Array, hvp: Array, terms: tuple[Array, ...], data: Labeled, like: Point) -> InnerPass:
        """Return the sums over rows from those of the first two terms, and from all weighted terms."""
        return InnerPass(grad, hvp, jnp.zeros_like(like.outer_var))

    def _inner_terms(self, point: Point, data: Labeled) -> tuple[Array, ...]:
        scores, tangents = products(data.features, point.inner_var, point.v)
        return self._inner_terms_of(scores, tangents, point, data)

    def _inner_changes(self, point: Point, previous: Point, data: Labeled) -> tuple[Array, ...]:
        (z, _, v), (z0, _, v0) = point, previous
        scores, tangents, scores0, tangents0 = products(data.features, z, v, z0, v0)
        new = self._inner_terms_of(scores, tangents, point, data)
        return trees.subtract(new, self._inner_terms_of(scores0, tangents0, previous, data))

    def _inner_sum(self, terms: tuple[Array, ...], data: Labeled, weights: Array, like: Point) -> InnerPass:
        terms = trees.scale(weights, terms)
        grad, hvp = sums(data.features, *terms[:2])
        return self._inner_bundle(grad, hvp, terms, data, like)

    def _inner_apart(self, point: Point, data: Labeled, weights: Array) -> InnerPass:
        rows = data.features
        (scores,), (tangents,) = products(rows, point.inner_var), products(rows, point.v)
        terms = trees.scale(weights, self._inner_terms_of(scores, tangents, point, data))
        (grad,), (hvp,) = (sums(rows, term) for term in terms[:2])
        total = self._inner_bundle(grad, hvp, terms, data, point)
        return trees.add(total, self.inner_regularization(point))

    def _row_diagonals(self, point: Point, data: Labeled, weights: Array, *, power: int, majorize: bool) -> Array:
        curvatures = self._curvatures(point, data, majorize)
        return (weights * curvatures**power) @ data.features ** (2 * power)

    def _majorized_product(self, point: Point, data: Labeled, weights: Array) -> Array:
        scores, tangents = products(data.features, point.inner_var, point.v)
        products_of_hessian = self._inner_terms_of(scores, tangents, point, data)[1]
        more = self._curvatures(point, data, majorize=True) - self._curvatures(point, data, majorize=False)
        (product,) = sums(data.features, weights * (products_of_hessian + more * tangents))
        return product + self.inner_regularization(point).hvp

    def _curvatures(self, point: Point, data: Labeled, majorize: bool) -> Array:
        """Return p (1 - p) of each class and row, or its maximum with the squared residual as a majorizer."""
        p = probabilities(point.inner_var @ data.features.T)
        plain = p * (1 - p)
        # Both have the same mean. For a badly fitted row, only the residual is not near 0.
        return jnp.maximum(plain, residuals(p, data.labels) ** 2) if majorize else plain

    def _outer_terms(self, point: Point, data: Labeled) -> Array:
        (scores,) = products(data.features, point.inner_var)
        return residuals(probabilities(scores), data.labels)

    def _outer_changes(self, point: Point, previous: Point, data: Labeled) -> Array:
        scores, scores0 = products(data.features, point.inner_var, previous.inner_var)
        return probabilities(scores) - probabilities(scores0)

    def _outer_sum(self, terms: Array, data: Labeled, weights: Array, like: Point) -> OuterPass:
        (grad,) = sums(data.features, weights * terms)
        return OuterPass(grad, jnp.zeros_like(like.outer_var))

    def _outer_value(self, point: Point, data: Labeled, weights: Array) -> Array:
        return weights @ cross_entropies(point.inner_var @ data.features.T, data.labels)


_THIRD = sqrt(2) ** 3 * SIGMOID[2]
_FAR = 40.0  # beyond this reach ½ is the smaller bound, and exp may overflow


def curvature_bounds(p: Array, reach: Array) -> Array:
    """Return C of each row."""
    here = 2 * jnp.max(p * (1 - p), axis=0)
    grown = here * jnp.exp(sqrt(2) * jnp.minimum(reach, _FAR))
    return jnp.where(reach < _FAR, jnp.minimum(grown, 0.5), 0.5)


def centered_norms(tangents: Array) -> Array:
    """Return ||t - mean t|| of each row, as a shift of all scores does not change the loss."""
    return jnp.sqrt(jnp.sum((tangents - jnp.mean(tangents, axis=0)) ** 2, axis=0))


def third_derivative_bounds(tangents: Array, curvatures: Array) -> Array:
    """Return k of each row."""
    return jnp.minimum(_THIRD * centered_norms(tangents), curvatures * jnp.ptp(tangents, axis=0))


# Selection of penalties


@documented
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
    X_train, X_val : features of each level, (samples, features)
    y_train, y_val : classes 0, 1, 2, …
    per : "class" or "feature": the axis of z along which penalties differ
    groups : the group of each class or feature, 0, 1, …; those of a group share a penalty; one each by default
    inner_var, outer_var : the start; z = 0, (classes, features), and x = -2 by default
    %(outer_bounds)s
    %(dtype)s
    %(seed)s
    """
    dtype = resolve_dtype(dtype, X_train=X_train, X_val=X_val)
    check_choice("per", per, AXES)
    data, shape = check_labeled(X_train, y_train, X_val, y_val, dtype=dtype)
    groups, n_penalties = check_groups(groups, shape[AXES.index(per)], per)
    defaults, rng = (np.zeros(shape), np.full(n_penalties, -2.0)), make_rng(seed)
    parts, start = lay_out(data, (inner_var, outer_var), defaults, outer_bounds, dtype, rng, narrow=0)
    oracles = SoftmaxSelectionOracles(**parts, per=per, groups=groups)
    solver = IterativeExactSolver(oracles, start)
    return BilevelProblem(oracles, start, solver, "softmax_selection", certificate_bounds=SoftmaxSelectionBounds)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SoftmaxSelectionOracles(SoftmaxOracles):
    """Labeled rows on each level.

    Attributes
    ----------
    per : "class" or "feature": the axis of z along which penalties differ
    groups : the group of each class or feature; None means one group for each
    """

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
        """Return the matrix whose largest eigenvalue is "a" or "b" in a diagonal metric."""
        rows = data.features.T
        whitened, p = certificate.whiten(rows, inverse_root), probabilities(point.inner_var @ rows)
        sizes = curvature_bounds(p, certificate.norms(whitened) * radius)
        if kind == "a":
            sizes = third_derivative_bounds(point.v @ rows, sizes)
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


_MOST_WORK = 2e10  # multiplications in a full-batch pass that computes a matrix like H


class SoftmaxSelectionBounds(LinearBounds):
    """Bounds at points of softmax selection."""

    def __init__(self, problem: BilevelProblem) -> None:
        oracles, z = problem.oracles, problem.start.inner_var
        assert isinstance(oracles, SoftmaxSelectionOracles)
        # The penalty of each number of z.
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
        samples = self._oracles.outer_samples if kind == "b" else self._oracles.inner_samples
        return of_metric(samples, point, measure, radius, kind)

    def _changes(self, metric: Metric, point: Point, delta: Any) -> list[float]:
        if metric.inverse_root.ndim == 1:
            measure, largest = metric.inverse_root.reshape(point.inner_var.shape).max(axis=0), certificate.largest
        else:
            measure, largest = self._measure(metric, point.inner_var), metric.largest
        changes = (self._curvature(kind, point, measure, delta) for kind in ("a", "b"))
        return [largest(np.asarray(matrix)) for matrix in changes]


@compiled("kind")
def _diagonal_curvature(samples: Samples, point: Point, inverse_root: Array, radius: Array, kind: str) -> Array:
    bound = SoftmaxSelectionOracles.bound_curvature
    return samples.mean(partial(bound, point, inverse_root=inverse_root, radius=radius, kind=kind))


@compiled("kind")
def _curvature(samples: Samples, point: Point, roots: Array, radius: Array, kind: str) -> Array:
    """Return mean exp(-w) S ⊗ dd' ("least"), or the same with exp(w) ("b") or range(vd) exp(w) ("a") for exp(-w)."""
    z, _, v = point
    same_class = jnp.eye(len(z), dtype=z.dtype)[:, None, :, None]

    def of_piece(data: Labeled, weights: Array) -> Array:
        rows = data.features.T
        p, lengths = probabilities(z @ rows), jnp.sqrt(jnp.max(jnp.sum((roots @ rows) ** 2, axis=1), axis=0))
        factors = jnp.exp((-2 if kind == "least" else 2) * radius * lengths)
        if kind == "a":
            factors = factors * jnp.ptp(v @ rows, axis=0)
        joint = (p[:, None, :] * rows).reshape(z.size, -1)
        weighted = joint * (weights * factors)
        own = (weighted @ rows.T).reshape(*z.shape, 1, len(rows))
        return (own * same_class).reshape(z.size, z.size) - weighted @ joint.T

    return samples.mean(of_piece)
