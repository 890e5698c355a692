"""Selection of penalties by cross-validation of K models, each fitted to the rows of all folds except one.

    G = mean over rows i of sum over k ≠ f_i of l_i(z_k)  +  ½ sum_k sum_j exp(x_g(j)) z_kj²
    F = mean over rows i of l_i(z_f_i)  +  sum_g (x_g - mean x)² / 2 s² n

with f_i the fold of row i, l_i its logistic, squared or softmax loss, and s the scale of a prior. Both levels read the
same rows d_i, so that one batch serves both: with slopes l' and curvatures l'' of row i in model k, the parts of the
direction that belong to model k are

    D_z = mean_i d_i (l' if k ≠ f_i, else 0) + exp(x) z_k
    D_v = mean_i d_i (l'' d_i'v_k if k ≠ f_i, else l') + exp(x) v_k

and D needs no more products than ∇z G and (∇²zz G) v. These are the products of one fit, in
:mod:`bilevel.problems.linear` or :mod:`bilevel.problems.softmax`, for K models at once.

Certificates. The bounds of one fit in the metric M = P. ∇²zz G has a block for each model, so a and b are the largest
ones of all blocks.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from bilevel._core import trees
from bilevel._core.compilation import arithmetic, compiled, resolve_dtype
from bilevel._core.types import AnyArray, Array, InnerPass, OuterPass, Point, PyTree, Rows, as_float
from bilevel.oracles import RowwiseOracles, Samples
from bilevel.oracles.base import estimate, join
from bilevel.problems.base import BilevelProblem, documented, lay_out
from bilevel.problems.certificate import Metric, largest
from bilevel.problems.checks import (
    check_choice,
    check_data,
    check_folds,
    check_groups,
    check_signs,
    check_table,
    make_rng,
)
from bilevel.problems.exact import IterativeExactSolver
from bilevel.problems.linear import EVERY_WIDTH, LOG_PENALTIES, LinearBounds, LogisticOracles, Regression, RidgeOracles
from bilevel.problems.softmax import SoftmaxSelectionOracles, label_rows


@documented
def cross_validation(
    X: Any,
    y: Any,
    folds: Any = 5,
    *,
    loss: str = "logistic",
    groups: Any = None,
    prior_scale: float = np.inf,
    inner_var: Any = None,
    outer_var: Any = None,
    outer_bounds: Any = None,
    dtype: DTypeLike | None = None,
    seed: int = 0,
) -> BilevelProblem:
    """Build the problem min over x of the cross-validated loss of a linear model with penalties exp(x).

        G = mean_i sum_{k ≠ fold_i} loss_i(z_k) + ½ sum_k sum_j exp(x_g(j)) z_kj²
        F = mean_i loss_i(z_{fold_i}) + sum_g (x_g - mean x)² / 2 s² n

    z_k is the model fitted without the rows of fold k. There is no intercept: add a column of ones.

    Parameters
    ----------
    X : features, (samples, features)
    y : labels -1 and 1 for the logistic loss, real targets for the squared one, classes 0, 1, 2, … for softmax
    folds : the fold of each row, 0, 1, …, or the number of folds, to which rows are then assigned at random
    loss : "logistic", "squared" (½ (d'z - y)²) or "softmax"
    %(groups)s
    prior_scale : s, the standard deviation of the logarithms of the penalties around their mean. Set it if there are
        many penalties, whose validation errors would otherwise be overfitted; no prior by default
    inner_var, outer_var : the start; z = 0, (folds, features) or (folds, classes, features), and x = -2 by default
    %(outer_bounds)s
    %(dtype)s
    seed : seed of the random folds and of the shuffle of the rows
    """
    dtype, rng = resolve_dtype(dtype, X=X), make_rng(seed)
    check_choice("loss", loss, tuple(_MODELS))
    prior_scale = as_float(prior_scale)
    if not isinstance(prior_scale, float) or not prior_scale > 0:
        raise ValueError(f"`prior_scale={prior_scale!r}`: must be above 0; leave it out for no prior.")
    rows, labels = check_table("X", X, "y", y)
    fold, n_folds = check_folds(folds, len(rows), rng)
    groups, n_penalties = check_groups(groups, rows.shape[1])
    table, model, shape, narrow = _MODELS[loss](rows, labels, groups, dtype)
    data, starts = Folded(table, fold), (inner_var, outer_var)
    defaults = np.zeros((n_folds, *shape)), np.full(n_penalties, -2.0)
    parts, start = lay_out((data, data), starts, defaults, outer_bounds, dtype, rng, narrow, names=("X", "X"))
    with arithmetic(dtype):
        oracles = FoldsOracles(**parts, model=model, prior_scale=trees.put(prior_scale, dtype))
    solver = IterativeExactSolver(oracles, start)
    return BilevelProblem(oracles, start, solver, "cross_validation", certificate_bounds=FoldsBounds)


class Folded(NamedTuple):
    """Rows in the form that the model of one fit takes, and the fold of each."""

    rows: PyTree
    fold: AnyArray


# Rows, the oracles of one fit without rows, the shape of its variable, and the argument ``narrow`` of `lay_out`.
Model: TypeAlias = tuple[PyTree, RowwiseOracles, tuple[int, ...], int]


def _logistic(rows: np.ndarray, labels: np.ndarray, groups: Array | None, dtype: np.dtype) -> Model:
    signed = rows * check_signs("y", labels)[:, None]
    return signed, LogisticOracles(NO_ROWS, NO_ROWS, groups=groups), rows.shape[1:], EVERY_WIDTH


def _squared(rows: np.ndarray, targets: np.ndarray, groups: Array | None, dtype: np.dtype) -> Model:
    data = Regression(*(part.astype(np.float64, copy=False) for part in (rows, check_data("y", targets))))
    return data, RidgeOracles(NO_ROWS, NO_ROWS, groups=groups), rows.shape[1:], EVERY_WIDTH


def _softmax(rows: np.ndarray, labels: np.ndarray, groups: Array | None, dtype: np.dtype) -> Model:
    data, n_classes = label_rows(rows, "y", labels, dtype)
    model = SoftmaxSelectionOracles(NO_ROWS, NO_ROWS, per="feature", groups=groups)
    return data, model, (n_classes, rows.shape[1]), 0


NO_ROWS = Samples(leaves=None, n=0, axes=(), dtype=np.dtype(np.float32))
_MODELS = {"logistic": _logistic, "squared": _squared, "softmax": _softmax}


_EACH = Point(0, None, 0)  # the axes of models in a point: z and v have one, x is the same for all models


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class FoldsOracles(RowwiseOracles):
    """The same rows on both levels; the first axis of terms is that of the models.

    Attributes
    ----------
    model : the oracles of one fit, without their rows
    prior_scale : s, in the dtype of the rows
    """

    model: Any
    prior_scale: Array

    has_row_diagonals = True
    holds_only_rows = True
    shares_rows = True
    wide_bounds = LOG_PENALTIES

    def _inner_terms(self, point: Point, data: Folded) -> tuple[Array, Array]:
        return _choose(data, self._all_terms(point, data), (0, 0))

    def _inner_changes(self, point: Point, previous: Point, data: Folded) -> tuple[Array, Array]:
        return _choose(data, self._all_changes(point, previous, data), (0, 0))

    def _inner_sum(self, terms: tuple[Array, Array], data: Folded, weights: Array, like: Point) -> InnerPass:
        each = jax.vmap(self.model._inner_sum, in_axes=(0, None, None, _EACH))
        return _sum_cross(each(terms, data.rows, weights, like))

    def _inner_apart(self, point: Point, data: Folded, weights: Array) -> InnerPass:
        return _sum_cross(_weighted(self.model._inner_apart, point, data, weights))

    def inner_regularization(self, point: Point) -> InnerPass:
        return _sum_cross(jax.vmap(self.model.inner_regularization, in_axes=(_EACH,))(point))

    def _inner_grad_outer(self, point: Point, data: Folded, weights: Array) -> Array:
        return jnp.sum(_weighted(self.model._inner_grad_outer, point, data, weights), axis=0)

    def _inner_value(self, point: Point, data: Folded, weights: Array) -> Array:
        return jnp.sum(_weighted(self.model._inner_value, point, data, weights))

    def _row_diagonals(self, point: Point, data: Folded, weights: Array, *, power: int, majorize: bool) -> Array:
        of_model = partial(self.model._row_diagonals, power=power, majorize=majorize)
        return _weighted(of_model, point, data, weights)

    def _majorized_product(self, point: Point, data: Folded, weights: Array) -> Array:
        return _weighted(self.model._majorized_product, point, data, weights)

    def _outer_terms(self, point: Point, data: Folded) -> Array:
        slopes = jax.vmap(self.model._outer_terms, in_axes=(_EACH, None))(point, data.rows)
        return _where_held_out(data, slopes, 0)

    def _outer_sum(self, terms: Array, data: Folded, weights: Array, like: Point) -> OuterPass:
        each = jax.vmap(self.model._outer_sum, in_axes=(0, None, None, _EACH))
        return OuterPass(each(terms, data.rows, weights, like).grad, jnp.zeros_like(like.outer_var))

    def outer_regularization(self, point: Point) -> OuterPass:
        x = point.outer_var
        return OuterPass(jnp.zeros_like(point.inner_var), (x - jnp.mean(x)) / (self.prior_scale**2 * self.n_outer))

    def _outer_value(self, point: Point, data: Folded, weights: Array) -> Array:
        losses = _weighted(self.model._outer_value, point, data, weights, held_out=True)
        prior = jnp.sum((point.outer_var - jnp.mean(point.outer_var)) ** 2) / (2 * self.prior_scale**2 * self.n_outer)
        return jnp.sum(losses) + prior

    def direction(self, point: Point, rows: Rows = Rows()) -> Point:  # noqa: B008
        # Both levels have the same draw, so `rows.outer` is not needed.
        total = estimate(self._sum_both, point, self.inner_samples, rows.inner)
        return trees.add(total, self._regularization(point))

    def difference(self, point: Point, previous: Point, rows: Rows) -> Point:
        data, weights = self.inner_samples.take(rows.inner)
        total = self._join(self._all_changes(point, previous, data), data, weights, point)
        return trees.add(total, trees.subtract(self._regularization(point), self._regularization(previous)))

    def _sum_both(self, point: Point, data: Folded, weights: Array) -> Point:
        return self._join(self._all_terms(point, data), data, weights, point)

    def _join(self, terms: tuple[Array, Array], data: Folded, weights: Array, like: Point) -> Point:
        """Return the sums over rows of both levels, from the terms of rows in all models."""
        both = self._inner_sum(_choose(data, terms, (0, terms[0])), data, weights, like)
        return Point(both.grad, both.cross, both.hvp)

    def _regularization(self, point: Point) -> Point:
        return join(self.inner_regularization(point), self.outer_regularization(point))

    def _all_terms(self, point: Point, data: Folded) -> tuple[Array, Array]:
        """Return slopes, and curvatures times tangents, of all rows in all models."""
        return jax.vmap(self.model._inner_terms, in_axes=(_EACH, None))(point, data.rows)

    def _all_changes(self, point: Point, previous: Point, data: Folded) -> tuple[Array, Array]:
        return jax.vmap(self.model._inner_changes, in_axes=(_EACH, _EACH, None))(point, previous, data.rows)


def _where_held_out(data: Folded, held_out: Any, fitted: Any) -> Array:
    """Return terms, (models, …, rows), that are ``held_out`` if the row is held out of the model, else ``fitted``."""
    like = fitted if jnp.ndim(fitted) else held_out
    model = jnp.arange(len(like), dtype=data.fold.dtype).reshape(-1, *[1] * (like.ndim - 1))
    return jnp.where(data.fold == model, held_out, fitted)


def _choose(data: Folded, fitted: tuple[Array, Array], held_out: tuple[Any, Any]) -> tuple[Array, Array]:
    slopes, products = (_where_held_out(data, *pair) for pair in zip(held_out, fitted, strict=True))
    return slopes, products


def _weighted(function: Any, point: Point, data: Folded, weights: Array, *, held_out: bool = False) -> Any:
    """Return a function of one model for each model, on the rows of its fit, or on those held out of it."""
    own = data.fold == jnp.arange(len(point.inner_var), dtype=data.fold.dtype)[:, None]
    of_model = jnp.where(own == held_out, weights, 0)
    return jax.vmap(function, in_axes=(_EACH, None, 0))(point, data.rows, of_model)


def _sum_cross(models: InnerPass) -> InnerPass:
    """Return the derivatives of all models together, as x is the same for all."""
    return models._replace(cross=jnp.sum(models.cross, axis=0))


class FoldsBounds(LinearBounds):
    """Bounds at points of cross-validation, in the metric M = P."""

    def __init__(self, problem: BilevelProblem) -> None:
        oracles, z = problem.oracles, problem.start.inner_var
        assert isinstance(oracles, FoldsOracles)
        groups = oracles.model.groups
        # The penalty of each feature, and of each number of z.
        self._features = np.arange(z.shape[-1]) if groups is None else np.asarray(groups)
        self._groups = self._features[np.indices(z.shape)[-1].ravel()]
        self._oracles, self._is_dense = oracles.in_float64(), False

    def _changes(self, metric: Metric, point: Point, delta: Any) -> list[float]:
        root = np.exp(-point.outer_var / 2)[self._features]
        return [
            max(largest(matrix) for matrix in _bound_curvatures(self._oracles, point, root, delta, kind))
            for kind in ("a", "b")
        ]


@compiled("kind")
def _bound_curvatures(oracles: FoldsOracles, point: Point, inverse_root: Array, radius: Array, kind: str) -> Array:
    """Return the matrix of each model whose largest eigenvalue is a ("a") or b ("b")."""
    of_model = partial(oracles.model.bound_curvature, inverse_root=inverse_root, radius=radius, kind=kind)

    def of_piece(data: Folded, weights: Array) -> Array:
        return _weighted(of_model, point, data, weights, held_out=kind == "b")

    return oracles.inner_samples.mean(of_piece)
