"""Softmax regression, with penalties per class, feature or group of them.

With z: classes × features, the probabilities p = softmax(zd) and the residual r = p - e_label of each row, and
S t = p (t - p't), on rows D:

    ∇z G = rD + exp(x) z      (∇²zz G) v = S(vD')D + exp(x) v      (∇²xz G) v = sum exp(x) z v

Derivatives of a cross-entropy are cumulants of variables on the classes, under the probabilities p at the scores s:
its Hessian is the covariance S = diag(p) - pp', and its third derivative κ(t, u, w) is a third cumulant.

    S <= C      with C = min(½, 2 max p (1 - p) exp(√2 reach)) for scores within ``reach``: 2 p (1 - p) is a sum of
                |entries| of a row of S, and S grows along u by κ(u, w, w) <= range(u) S(w, w), range(u) <= √2 ||u||
    |κ(t, u, w)| <= k ||u|| ||w||      with k = min(√2³/(6√3) ||t - mean t||, C range(t)): a symmetric form is largest
                where its arguments agree, and there it is the third cumulant of a variable of range up to √2 ||u||

Certificates. As in linear models (:mod:`bilevel.problems.penalized_linear`), two metrics are tried and the smaller
error is kept; c and e are the same. A row acts through one score per class. In M = P, μ = 1 and δ = ||D_z||', and the
length of a row is that of d̃ = d / √exp(x) with one penalty per feature and d / √exp(min x) with one per class, so that
||wd||_2 <= ||d̃|| ||w||. With C and k within ||d̃|| δ of the scores,

    a = λ_max(mean k d̃d̃')     b = λ_max(mean C d̃d̃') on outer rows

The other metric is M = H = mean S ⊗ dd' + P with S = diag(p) - pp' at z. Within t of z the scores of a row move by u
with range(u) <= w = 2 t max_c ||d||_c, where ||d||_c² = d'N_c d and N_c is the diagonal block of H⁻¹ of class c. As a
third cumulant κ(u, s, s) is at most range(u) S(s, s), S stays between exp(-w) and exp(w) times its value at z. So δ
and μ come from mean exp(-w) S ⊗ dd' + P (:mod:`bilevel.problems.certificate`), and with w at t = δ

    a = λ_max(M⁻¹ mean range(vd) exp(w) S ⊗ dd')     b = λ_max(M⁻¹ mean exp(w) S ⊗ dd') on outer rows
"""

from dataclasses import dataclass, field
from math import sqrt
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bilevel._core import trees
from bilevel._core.types import AnyArray, Array, InnerPass, OuterPass, Point
from bilevel.oracles import RowwiseOracles
from bilevel.oracles.samples import STATIC
from bilevel.problems import certificate
from bilevel.problems.checks import check_classes
from bilevel.problems.penalized_linear import SIGMOID, PenalizedOracles, as_floats

AXES = ("class", "feature")  # of z


class Labeled(NamedTuple):
    """Features, (samples, features), classes 0, 1, … and the position of each row in the order of the user."""

    features: AnyArray
    labels: AnyArray
    index: AnyArray


def read_labeled(name: str, rows: np.ndarray, labels: np.ndarray, n_classes: int | None = None) -> tuple[Labeled, int]:
    """Return labeled rows and the number of classes, which is found in the labels if it is not given."""
    classes = check_classes(name, labels, n_classes)
    n_classes = n_classes or int(classes.max()) + 1
    if n_classes < 2:
        raise ValueError(f"`{name}` holds the class 0 alone; a softmax problem needs at least two.")
    return Labeled(as_floats(rows), classes, np.arange(len(rows), dtype=np.int32)), n_classes


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
        scores, tangents = point.inner_var @ rows.T, point.v @ rows.T
        terms = trees.scale(weights, self._inner_terms_of(scores, tangents, point, data))
        total = self._inner_bundle(terms[0] @ rows, terms[1] @ rows, terms, data, point)
        return trees.add(total, self.inner_regularization(point))

    def _row_diagonals(self, point: Point, data: Labeled, weights: Array, *, power: int, majorize: bool) -> Array:
        curvatures = self._curvatures(point, data, majorize)
        return (weights * curvatures**power) @ data.features ** (2 * power)

    def _majorized_product(self, point: Point, data: Labeled, weights: Array) -> Array:
        scores, tangents = products(data.features, point.inner_var, point.v)
        products_of_hessian = self._inner_terms_of(scores, tangents, point, data)[1]
        more = self._curvatures(point, data, majorize=True) - self._curvatures(point, data, majorize=False)
        product = (weights * (products_of_hessian + more * tangents)) @ data.features
        return product + self.inner_regularization(point).hvp

    def _curvatures(self, point: Point, data: Labeled, majorize: bool) -> Array:
        """Return p (1 - p) of each class and row, or its maximum with the squared residual as a majorizer."""
        p = probabilities(point.inner_var @ data.features.T)
        plain = p * (1 - p)
        # Both have the same mean. For a badly fitted row, only the residual is not near 0.
        return jnp.maximum(plain, residuals(p, data.labels) ** 2) if majorize else plain

    def _outer_terms(self, point: Point, data: Labeled) -> Array:
        return residuals(probabilities(point.inner_var @ data.features.T), data.labels)

    def _outer_changes(self, point: Point, previous: Point, data: Labeled) -> Array:
        scores, scores0 = products(data.features, point.inner_var, previous.inner_var)
        return probabilities(scores) - probabilities(scores0)

    def _outer_sum(self, terms: Array, data: Labeled, weights: Array, like: Point) -> OuterPass:
        return OuterPass((weights * terms) @ data.features, jnp.zeros_like(like.outer_var))

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


def bounded_moment(p: Array, rows: Array, weights: Array, radius: Array, tangents: Array | None = None) -> Array:
    """Return the mean of C dd', or of k dd' if tangents are given, within ``radius`` of z."""
    sizes = curvature_bounds(p, certificate.norms(rows) * radius)
    sizes = sizes if tangents is None else third_derivative_bounds(tangents, sizes)
    return certificate.second_moment(rows, weights * sizes)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SoftmaxSelectionOracles(PenalizedOracles, SoftmaxOracles):
    """Labeled rows on each level.

    Attributes
    ----------
    per : "class" or "feature": the axis of z along which penalties differ
    groups : the group of each class or feature; None means one group for each
    """

    per: str = field(default="feature", metadata=STATIC)

    most_dense_work = 2e10

    def spread(self, per_penalty: Array) -> Array:
        return jnp.expand_dims(super().spread(per_penalty), 1 - AXES.index(self.per))

    def collect(self, per_entry: Array, n_penalties: int) -> Array:
        return super().collect(jnp.sum(per_entry, axis=1 - AXES.index(self.per)), n_penalties)

    def bound_curvature(
        self, point: Point, data: Labeled, weights: Array, *, measure: Array, radius: Array, kind: str
    ) -> Array:
        (z, _, v), rows = point, data.features.T
        p = probabilities(z @ rows)
        if measure.ndim == 1:
            tangents = v @ rows if kind == "a" else None
            return bounded_moment(p, certificate.whiten(rows, measure), weights, radius, tangents)
        # The mean of S ⊗ dd' times exp(-w) ("least"), exp(w) ("b") or range(vd) exp(w) ("a").
        lengths = jnp.sqrt(jnp.max(jnp.sum((measure @ rows) ** 2, axis=1), axis=0))
        factors = jnp.exp((-2 if kind == "least" else 2) * radius * lengths)
        if kind == "a":
            factors = factors * jnp.ptp(v @ rows, axis=0)
        joint = (p[:, None, :] * rows).reshape(z.size, -1)
        weighted = joint * (weights * factors)
        own = (weighted @ rows.T).reshape(*z.shape, 1, len(rows))
        same_class = jnp.eye(len(z), dtype=z.dtype)[:, None, :, None]
        return (own * same_class).reshape(z.size, z.size) - weighted @ joint.T
