"""What problems of linear softmax regression have in common: rows, probabilities p, residuals, curvature.

    F = mean CE(d'z)        z: features × classes

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
    return (train, validation), (rows.shape[1], n_classes)


def label_rows(
    rows: np.ndarray, name: str, labels: np.ndarray, dtype: DTypeLike, n_classes: int | None = None
) -> tuple[Labeled, int]:
    """Return the rows of one level, and the number of classes: as given, or at least two that are found."""
    classes = check_classes(name, labels, n_classes)
    n_classes = n_classes or int(classes.max()) + 1
    if n_classes < 2:
        raise ValueError(f"`{name}` holds the class 0 alone; a softmax problem needs at least two.")
    return Labeled(rows.astype(dtype, copy=False), classes, np.arange(len(rows), dtype=np.int32)), n_classes


def cross_entropies(scores: Array, labels: Array) -> Array:
    """Return log(sum exp(s)) - s_label of each row of scores."""
    return jax.nn.logsumexp(scores, axis=1) - jnp.take_along_axis(scores, labels[:, None], axis=1)[:, 0]


def probabilities(scores: Array) -> Array:
    """Return softmax of each row of scores."""
    raised = jnp.exp(scores - jnp.max(scores, axis=1, keepdims=True))
    return raised / jnp.sum(raised, axis=1, keepdims=True)


def residuals(p: Array, labels: Array) -> Array:
    """Return the gradient of each cross-entropy with respect to its scores."""
    return p - jax.nn.one_hot(labels, p.shape[1], dtype=p.dtype)


def bend(p: Array, tangents: Array) -> Array:
    """Return the Hessian of each cross-entropy with respect to its scores, times a tangent."""
    return p * (tangents - jnp.sum(p * tangents, axis=1, keepdims=True))


def products(features: Array, *matrices: Array) -> list[Array]:
    """Return features @ matrix for each matrix, reading the features once; none can be left uncomputed."""
    return jnp.split(features @ jnp.concatenate(matrices, axis=1), len(matrices), axis=1)


def sums(features: Array, *terms: Array) -> list[Array]:
    """Return features' @ term for each term of the rows, reading the features once."""
    # XLA's product with a thin matrix on the left takes half the time of that with transposed rows; without the
    # barrier it would turn the first into the second.
    thin = jnp.concatenate([term.T for term in terms])
    return [total.T for total in jnp.split(jax.lax.optimization_barrier(thin @ features), len(terms))]


def weight(terms: tuple[Array, ...], weights: Array) -> tuple[Array, ...]:
    """Return each term times the weight of its row."""
    return tuple(weights[:, None] * term if term.ndim == 2 else weights * term for term in terms)


@dataclass(frozen=True)
class SoftmaxOracles(RowwiseOracles):
    """F = mean CE(d'z), and the same rows in G; a subclass adds penalties, or weights of its rows.

    The first two terms of a row are numbers per class, for ∇z G and (∇²zz G) v. Rows are long, so that they are
    multiplied by all that is asked for at once; a derivative that is asked for alone has products of its own.
    """

    diagonal_passes = 1

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
        terms = weight(terms, weights)
        grad, hvp = sums(data.features, *terms[:2])
        return self._inner_bundle(grad, hvp, terms, data, like)

    def _inner_apart(self, point: Point, data: Labeled, weights: Array) -> InnerPass:
        rows = data.features
        terms = weight(self._inner_terms_of(rows @ point.inner_var, rows @ point.v, point, data), weights)
        grad, hvp = (sums(rows, term)[0] for term in terms[:2])
        total = self._inner_bundle(grad, hvp, terms, data, point)
        return trees.add(total, self.inner_regularization(point))

    def _row_diagonals(self, point: Point, data: Labeled, weights: Array, *, power: int, majorize: bool) -> Array:
        curvatures = self._curvatures(point, data, majorize)
        return (data.features ** (2 * power)).T @ (weights[:, None] * curvatures**power)

    def _majorized_product(self, point: Point, data: Labeled, weights: Array) -> Array:
        rows, tangents = data.features, data.features @ point.v
        bends = self._inner_terms_of(rows @ point.inner_var, tangents, point, data)[1]
        more = self._curvatures(point, data, majorize=True) - self._curvatures(point, data, majorize=False)
        return rows.T @ (weights[:, None] * (bends + more * tangents)) + self.inner_regularization(point).hvp

    def _diagonal_regularization(self, point: Point) -> Array:
        return self.inner_regularization(point._replace(v=jnp.ones_like(point.inner_var))).hvp

    def _curvatures(self, point: Point, data: Labeled, majorize: bool) -> Array:
        """Return p (1 - p) of each row and class; as a majorizer, at least the squared residual."""
        p = probabilities(data.features @ point.inner_var)
        plain = p * (1 - p)
        # Both are alike in the mean; where a row is fitted badly, only the residual is not 0.
        return jnp.maximum(plain, residuals(p, data.labels) ** 2) if majorize else plain

    def _outer_terms(self, point: Point, data: Labeled) -> Array:
        return residuals(probabilities(data.features @ point.inner_var), data.labels)

    def _outer_changes(self, point: Point, previous: Point, data: Labeled) -> Array:
        scores, scores0 = products(data.features, point.inner_var, previous.inner_var)
        return probabilities(scores) - probabilities(scores0)

    def _outer_sum(self, terms: Array, data: Labeled, weights: Array, like: Point) -> OuterPass:
        return OuterPass(sums(data.features, weights[:, None] * terms)[0], jnp.zeros_like(like.outer_var))

    def _outer_value(self, point: Point, data: Labeled, weights: Array) -> Array:
        return weights @ cross_entropies(data.features @ point.inner_var, data.labels)


_THIRD = sqrt(2) ** 3 * SIGMOID[2]
_FAR = 40.0  # beyond this reach the bound ½ is the smaller one, and exp may overflow


def largest_curvatures(p: Array, reach: Array) -> Array:
    """Return C of each row."""
    here = 2 * jnp.max(p * (1 - p), axis=1)
    grown = here * jnp.exp(sqrt(2) * jnp.minimum(reach, _FAR))
    return jnp.where(reach < _FAR, jnp.minimum(grown, 0.5), 0.5)


def centered_norms(tangents: Array) -> Array:
    """Return ||t - mean t|| of each row: shifts of all scores change nothing."""
    return jnp.sqrt(jnp.sum((tangents - jnp.mean(tangents, axis=1, keepdims=True)) ** 2, axis=1))


def largest_bends(tangents: Array, curvatures: Array) -> Array:
    """Return k of each row."""
    return jnp.minimum(_THIRD * centered_norms(tangents), curvatures * jnp.ptp(tangents, axis=1))
