"""Selection of the penalties of linear and softmax models, on a validation set or by cross-validation.

One fit is that of :mod:`bilevel.problems.penalized_linear` or :mod:`bilevel.problems.softmax`. Cross-validation has K
models, each fitted to the rows of all folds except one. Both of its levels read the same rows d_i, so that one batch
serves both. With f_i the fold of row i, and slopes l' and curvatures l'' of its loss in model k, the parts of the
direction that belong to model k are

    D_z = mean_i d_i (l' if k ≠ f_i, else 0) + exp(x) z_k
    D_v = mean_i d_i (l'' d_i'v_k if k ≠ f_i, else l') + exp(x) v_k

and D needs no more products than ∇z G and (∇²zz G) v.

Certificates. The bounds of one fit in the metric M = P. ∇²zz G has a block for each model, so a and b are the largest
ones of all blocks.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from bilevel._core import trees
from bilevel._core.compilation import arithmetic, resolve_dtype
from bilevel._core.types import AnyArray, Array, InnerPass, OuterPass, Point, PyTree, Rows, as_float
from bilevel.oracles import RowwiseOracles, Samples
from bilevel.oracles.base import estimate, join
from bilevel.oracles.host_samples import head
from bilevel.problems.base import BilevelProblem, documented, lay_out
from bilevel.problems.certificate import ConstantsRule
from bilevel.problems.checks import check_choice, check_folds, check_groups, check_table, check_tables, make_rng
from bilevel.problems.exact import ExactSolver, IterativeExactSolver
from bilevel.problems.penalized_linear import (
    LOG_PENALTIES,
    LogisticOracles,
    PenaltyBounds,
    RidgeExactSolver,
    RidgeOracles,
    logistic_constants,
    read_signed,
    read_targets,
)
from bilevel.problems.softmax import AXES, SoftmaxSelectionOracles, read_labeled

_EVERY_WIDTH = 2**62  # a limit that no row reaches: oracles of linear models need features first
_TO_ROUNDING = partial(IterativeExactSolver, accuracy=1e-15)  # Newton steps on few numbers cost little


class ModelFamily(NamedTuple):
    """What a loss of one row determines."""

    read: Callable[..., tuple[Any, int | None]]  # name, rows, labels -> data of the oracles, number of classes or None
    oracles: type[Any]
    narrow: int  # the argument of `lay_out`
    exact_solver: Callable[[Any, Point], ExactSolver]
    find_constants: ConstantsRule | None = None


LOSSES = {
    "logistic": ModelFamily(read_signed, LogisticOracles, _EVERY_WIDTH, _TO_ROUNDING, logistic_constants),
    "squared": ModelFamily(read_targets, RidgeOracles, _EVERY_WIDTH, RidgeExactSolver),
    "softmax": ModelFamily(read_labeled, SoftmaxSelectionOracles, 0, IterativeExactSolver),
}


@documented
def penalty_selection(
    X_train: Any,
    y_train: Any,
    X_val: Any,
    y_val: Any,
    *,
    loss: str = "logistic",
    per: str = "feature",
    groups: Any = None,
    inner_var: Any = None,
    outer_var: Any = None,
    outer_bounds: Any = None,
    dtype: DTypeLike | None = None,
    seed: int = 0,
) -> BilevelProblem:
    """Build the problem min over x of the validation loss of a linear model fitted with penalties exp(x).

        G = mean loss(z) + ½ sum_k exp(x_g(k)) z_k²  on training rows
        F = mean loss(z)                             on validation rows

    There is no intercept: add a column of ones, or center features and targets.

    Parameters
    ----------
    X_train, X_val : features of each level, (samples, features). A :class:`bilevel.HostData` stays on the host, and the
        problem then has no exact solution; the softmax loss needs arrays
    y_train, y_val : labels -1 and 1 for the logistic loss, real targets for the squared one, classes 0, 1, 2, … for
        softmax
    loss : "logistic", log(1 + exp(-y d'z)); "squared", ½ (d'z - y)²; or "softmax", the cross-entropy of softmax(zd)
    per : "feature" or, for softmax, "class": the axis of z along which penalties differ
    groups : the group of each feature or class, 0, 1, …; those of a group share a penalty. By default each has its own;
        zeros give a single penalty for all
    inner_var : start of z, (features,) or (classes, features); N(0, I) for the logistic loss, otherwise 0
    outer_var : start of x, the logarithms of the penalties; log U(0, 1) for the logistic loss, otherwise -2
    %(outer_bounds)s
    %(dtype)s
    seed : seed of the default start and of the shuffle of the rows
    """
    check_choice("loss", loss, tuple(LOSSES))
    check_choice("per", per, AXES if loss == "softmax" else ("feature",))
    dtype, made = resolve_dtype(dtype, X_train=head(X_train), X_val=head(X_val)), LOSSES[loss]
    tables = check_tables(X_train, y_train, X_val, y_val, on_host=loss != "softmax")
    train, n_classes = made.read("y_train", *tables[0])
    validation, _ = made.read("y_val", *tables[1], n_classes)
    n_features = head(X_train).shape[1]
    shape = (n_features,) if n_classes is None else (n_classes, n_features)
    groups, n_penalties = check_groups(groups, shape[-1] if per == "feature" else shape[0], per)
    rng, defaults = make_rng(seed), (np.zeros(shape), np.full(n_penalties, -2.0))
    if loss == "logistic":
        defaults = rng.standard_normal(shape), np.log(rng.uniform(size=n_penalties))
    rows, starts = (train, validation), (inner_var, outer_var)
    parts, start = lay_out(rows, starts, defaults, outer_bounds, dtype, rng, narrow=made.narrow)
    oracles = made.oracles(**parts, groups=groups, **({"per": per} if loss == "softmax" else {}))
    problem = BilevelProblem(oracles, start, name=f"{loss} selection")
    if oracles.is_on_host:
        return problem
    solver = made.exact_solver(oracles, start)
    return replace(problem, exact_solver=solver, find_constants=made.find_constants, certificate_bounds=PenaltyBounds)


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
    check_choice("loss", loss, tuple(LOSSES))
    prior_scale = as_float(prior_scale)
    if not isinstance(prior_scale, float) or not prior_scale > 0:
        raise ValueError(f"`prior_scale={prior_scale!r}`: must be above 0; leave it out for no prior.")
    rows, labels = check_table("X", X, "y", y)
    fold, n_folds = check_folds(folds, len(rows), rng)
    groups, n_penalties = check_groups(groups, rows.shape[1])
    table, n_classes = LOSSES[loss].read("y", rows, labels)
    shape = rows.shape[1:] if n_classes is None else (n_classes, rows.shape[1])
    data, starts = Folded(table, fold), (inner_var, outer_var)
    defaults = np.zeros((n_folds, *shape)), np.full(n_penalties, -2.0)
    narrow, no_rows = LOSSES[loss].narrow, Samples(leaves=None, n=0, axes=(), dtype=np.dtype(np.float32))
    parts, start = lay_out((data, data), starts, defaults, outer_bounds, dtype, rng, narrow, names=("X", "X"))
    model = LOSSES[loss].oracles(no_rows, no_rows, groups=groups)
    with arithmetic(dtype):
        oracles = FoldsOracles(**parts, model=model, prior_scale=trees.put(prior_scale, dtype))
    solver = IterativeExactSolver(oracles, start)
    return BilevelProblem(oracles, start, solver, "cross_validation", certificate_bounds=PenaltyBounds)


class Folded(NamedTuple):
    """Rows in the form that the model of one fit takes, and the fold of each."""

    rows: PyTree
    fold: AnyArray


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
    most_dense_work = 0.0

    def spread(self, per_penalty: Array) -> Array:
        """Return a number of each penalty as an array that broadcasts to z."""
        return self.model.spread(per_penalty)

    def bound_curvature(self, point: Point, data: Folded, weights: Array, *, kind: str, **measured: Array) -> Array:
        """Return the matrix of each model whose largest eigenvalue is a ("a") or b ("b")."""
        of_model = partial(self.model.bound_curvature, kind=kind, **measured)
        return _weighted(of_model, point, data, weights, held_out=kind == "b")

    def _inner_terms(self, point: Point, data: Folded) -> tuple[Array, Array]:
        slopes, products = self._all_terms(point, data)
        return _choose(data, 0, slopes), _choose(data, 0, products)

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
        return _choose(data, slopes, 0)

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
        def sum_both(point: Point, data: Folded, weights: Array) -> Point:
            return self._join(self._all_terms(point, data), data, weights, point)

        # Both levels have the same draw, so `rows.outer` is not needed.
        total = estimate(sum_both, point, self.inner_samples, rows.inner)
        return trees.add(total, self._regularization(point))

    def difference(self, point: Point, previous: Point, rows: Rows) -> Point:
        data, weights = self.inner_samples.take(rows.inner)
        total = self._join(self._all_changes(point, previous, data), data, weights, point)
        return trees.add(total, trees.subtract(self._regularization(point), self._regularization(previous)))

    def _join(self, terms: tuple[Array, Array], data: Folded, weights: Array, like: Point) -> Point:
        """Return the sums over rows of both levels, from the terms of rows in all models."""
        slopes, products = terms
        chosen = _choose(data, 0, slopes), _choose(data, slopes, products)
        both = self._inner_sum(chosen, data, weights, like)
        return Point(both.grad, both.cross, both.hvp)

    def _regularization(self, point: Point) -> Point:
        return join(self.inner_regularization(point), self.outer_regularization(point))

    def _all_terms(self, point: Point, data: Folded) -> tuple[Array, Array]:
        """Return slopes, and curvatures times tangents, of all rows in all models."""
        return jax.vmap(self.model._inner_terms, in_axes=(_EACH, None))(point, data.rows)

    def _all_changes(self, point: Point, previous: Point, data: Folded) -> tuple[Array, Array]:
        return jax.vmap(self.model._inner_changes, in_axes=(_EACH, _EACH, None))(point, previous, data.rows)


def _choose(data: Folded, held_out: Any, fitted: Any) -> Array:
    """Return terms, (models, …, rows), that are ``held_out`` if the row is held out of the model, else ``fitted``."""
    like = fitted if jnp.ndim(fitted) else held_out
    model = jnp.arange(len(like), dtype=data.fold.dtype).reshape(-1, *[1] * (like.ndim - 1))
    return jnp.where(data.fold == model, held_out, fitted)


def _weighted(function: Any, point: Point, data: Folded, weights: Array, *, held_out: bool = False) -> Any:
    """Return a function of one model for each model, on the rows of its fit, or on those held out of it."""
    own = data.fold == jnp.arange(len(point.inner_var), dtype=data.fold.dtype)[:, None]
    of_model = jnp.where(own == held_out, weights, 0)
    return jax.vmap(function, in_axes=(_EACH, None, 0))(point, data.rows, of_model)


def _sum_cross(models: InnerPass) -> InnerPass:
    """Return the derivatives of all models together, as x is the same for all."""
    return models._replace(cross=jnp.sum(models.cross, axis=0))
