"""What problems of linear softmax regression have in common: rows, probabilities p, residuals, curvature.

    F = mean CE(zd)        z: classes × features

Derivatives of a cross-entropy are cumulants of variables on the classes, under the probabilities p at the scores s:
its Hessian is the covariance S = diag(p) - pp', its third derivative κ(t, u, w) a third cumulant.

    S <= C      with C = min(½, 2 max p (1 - p) exp(√2 reach)) for scores within ``reach``: 2 p (1 - p) is a sum of
                |entries| of a row of S, and S grows along u by κ(u, w, w) <= range(u) S(w, w), range(u) <= √2 ||u||
    |κ(t, u, w)| <= k ||u|| ||w||      with k = min(√2³/(6√3) ||t - mean t||, C range(t)): a symmetric form is largest
                where its arguments agree, and there it is the third cumulant of a variable of range up to √2 ||u||
"""

from dataclasses import dataclass
from math import sqrt
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from bilevel import _tree as trees
from bilevel._types import AnyArray, Array, InnerPass, OuterPass, Point
from bilevel.oracles import RowwiseOracles
from bilevel.problems.checks import check_classes, check_tables
from bilevel.problems.losses import SIGMOID


class Labeled(NamedTuple):
    """Features, (samples, features), classes 0, 1, … and the place of each row in the user's order."""

    features: AnyArray
    labels: AnyArray
    index: AnyArray


def check_labeled(*tables: Any, dtype: DTypeLike) -> tuple[tuple[Labeled, Labeled], tuple[int, int]]:
    """Return the rows of both levels, from what `check_tables` takes, and the shape of z."""
    (rows, labels), (outer_rows, outer_labels) = check_tables(*tables)
    train, n_classes = label_rows(rows, "y_train", labels, dtype)
    validation, _ = label_rows(outer_rows, "y_val", outer_labels, dtype, n_classes)
    return (train, validation), (n_classes, rows.shape[1])


def label_rows(
    rows: np.ndarray, name: str, labels: np.ndarray, dtype: DTypeLike, n_classes: int | None = None
) -> tuple[Labeled, int]:
    """Return the rows of one level, and the number of classes: as given, or at least two that are found."""
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


def bend(p: Array, tangents: Array) -> Array:
    """Return the Hessian of each cross-entropy with respect to its scores, times a tangent."""
    return p * (tangents - jnp.sum(p * tangents, axis=0))


def products(features: Array, *matrices: Array) -> list[Array]:
    """Return matrix @ features' for each matrix, reading the features once; none can be left uncomputed."""
    # A thin matrix on the left is what XLA multiplies fastest.
    return jnp.split(jnp.concatenate(matrices) @ features.T, len(matrices))


def sums(features: Array, *terms: Array) -> list[Array]:
    """Return term @ features for each term of the rows, reading the features once."""
    return jnp.split(jnp.concatenate(terms) @ features, len(terms))


@dataclass(frozen=True)
class SoftmaxOracles(RowwiseOracles):
    """F = mean CE(zd), and the same rows in G; a subclass adds penalties, or weights of its rows.

    The first two terms of a row are numbers per class, for ∇z G and (∇²zz G) v. Rows are long, so that they are
    multiplied by all that is asked for at once; a derivative that is asked for alone has products of its own.
    """

    has_row_diagonals = True

    def _inner_terms_of(self, scores: Array, tangents: Array, point: Point, data: Labeled) -> tuple[Array, ...]:
        """Return the terms of each row from its products with z and v."""
        p = probabilities(scores)
        return residuals(p, data.labels), bend(p, tangents)

    def _inner_bundle(self, grad: Array, hvp: Array, terms: tuple[Array, ...], data: Labeled, like: Point) -> InnerPass:
        """Return the sums over rows, two of which are given; the terms are weighted."""
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
        bends = self._inner_terms_of(scores, tangents, point, data)[1]
        more = self._curvatures(point, data, majorize=True) - self._curvatures(point, data, majorize=False)
        (product,) = sums(data.features, weights * (bends + more * tangents))
        return product + self.inner_regularization(point).hvp

    def _curvatures(self, point: Point, data: Labeled, majorize: bool) -> Array:
        """Return p (1 - p) of each class and row; as a majorizer, at least the squared residual."""
        p = probabilities(point.inner_var @ data.features.T)
        plain = p * (1 - p)
        # Both are alike in the mean; where a row is fitted badly, only the residual is not 0.
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
_FAR = 40.0  # beyond this reach the bound ½ is the smaller one, and exp may overflow


def largest_curvatures(p: Array, reach: Array) -> Array:
    """Return C of each row."""
    here = 2 * jnp.max(p * (1 - p), axis=0)
    grown = here * jnp.exp(sqrt(2) * jnp.minimum(reach, _FAR))
    return jnp.where(reach < _FAR, jnp.minimum(grown, 0.5), 0.5)


def centered_norms(tangents: Array) -> Array:
    """Return ||t - mean t|| of each row: shifts of all scores change nothing."""
    return jnp.sqrt(jnp.sum((tangents - jnp.mean(tangents, axis=0)) ** 2, axis=0))


def largest_bends(tangents: Array, curvatures: Array) -> Array:
    """Return k of each row."""
    return jnp.minimum(_THIRD * centered_norms(tangents), curvatures * jnp.ptp(tangents, axis=0))
