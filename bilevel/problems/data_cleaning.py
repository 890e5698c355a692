"""Data cleaning: learn how far to trust each training row, by the loss of the fit on clean validation rows."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial
from numpy.typing import DTypeLike

from bilevel.oracles import CleaningOracles
from bilevel.precision import arithmetic, as_float_dtype
from bilevel.problems.base import BilevelProblem
from bilevel.problems.checks import (
    check_same_features,
    checked_bounds,
    checked_classes,
    checked_start,
    checked_table,
)
from bilevel.problems.labelled import labelled_levels
from bilevel.problems.reference import GenericReferee
from bilevel.types import Array, Point


def data_cleaning(
    X_train: Any,
    y_train: Any,
    X_val: Any,
    y_val: Any,
    *,
    X_test: Any = None,
    y_test: Any = None,
    corrupted: Any = None,
    regularisation: float = 0.2,
    inner_var: Any = None,
    outer_var: Any = None,
    outer_bounds: Any = None,
    dtype: DTypeLike = "float32",
    seed: int = 0,
) -> BilevelProblem:
    """Build the problem min over x of the validation loss of a softmax fit with the weight sigmoid(x_i) on row i.

        G = mean_i sigmoid(x_i) CE(d_i'z, y_i) + C ||z||²  on training rows, some of whose labels are wrong
        F = mean CE(d'z, y)                                on validation rows, whose labels can be trusted

    ``constants["v_radius"]`` is the bound sqrt(2) max||d_j|| / 2C of ||v*(x)||, for solvers that project v.

    Parameters
    ----------
    X_train, X_val : (samples, features)
    y_train, y_val : classes 0, 1, 2, …
    X_test, y_test : rows for the metric ``test_error`` at the solver's z; none by default
    corrupted : which training rows are known to be wrong, one bool each, for the metric ``weight_auc``: the chance
        that a clean row has a larger weight than a corrupted one; solvers never see it
    regularisation : C
    inner_var : start of z, (features, classes); 0 by default
    outer_var : start of x, one per training row; -2 by default
    outer_bounds : (lower, upper) for x, each None, a number or like x
    dtype : "float32" or "float64"
    seed : of the one shuffle of the rows
    """
    dtype = as_float_dtype(dtype)
    if not 0 < regularisation < np.inf:
        raise ValueError(f"`regularisation={regularisation!r}`: must be above 0, or the fit has no unique solution.")
    with arithmetic(dtype):
        levels = labelled_levels(X_train, y_train, X_val, y_val, dtype, np.random.default_rng(seed))
        z = checked_start("inner_var", inner_var, np.zeros((levels.n_features, levels.n_classes)), dtype)
        x = checked_start("outer_var", outer_var, np.full(levels.inner.n, -2.0), dtype)
        oracles = CleaningOracles(
            inner_samples=levels.inner,
            outer_samples=levels.outer,
            outer_bounds=checked_bounds(outer_bounds, x),
            regularisation=jnp.asarray(regularisation, dtype),
        )
        metrics = _test_metrics(X_test, y_test, z.shape, dtype) | _weight_metrics(corrupted, len(x))
    start = Point(z, x, np.zeros_like(z))
    longest = float(np.linalg.norm(levels.outer.leaves.features, axis=1).max())
    constants = {
        "inner_strong_convexity": 2 * regularisation,
        "v_radius": float(np.sqrt(2) * longest / (2 * regularisation)),
    }
    referee = GenericReferee(oracles, start, residual=1e-10)
    return BilevelProblem(oracles, start, referee, "data_cleaning", metrics, constants)


def _test_metrics(X_test: Any, y_test: Any, shape: tuple[int, int], dtype: np.dtype) -> dict[str, Partial]:
    if X_test is None and y_test is None:
        return {}
    if X_test is None or y_test is None:
        raise ValueError("`X_test` and `y_test` must be given together.")
    rows, labels = checked_table("X_test", X_test, "y_test", y_test)
    check_same_features(("X_train", "X_test"), (np.empty(shape).T, rows))
    labels = checked_classes("y_test", labels, shape[1])
    return {"test_error": Partial(_error_rate, jnp.asarray(rows.astype(dtype, copy=False)), jnp.asarray(labels))}


@jax.jit
def _error_rate(rows: Array, labels: Array, point: Point) -> Array:
    guesses = jnp.argmax(rows @ point.inner_var, axis=1).astype(labels.dtype)
    return jnp.mean(guesses != labels, dtype=rows.dtype)


def _weight_metrics(corrupted: Any, n_rows: int) -> dict[str, Partial]:
    if corrupted is None:
        return {}
    marked = np.asarray(corrupted)
    if marked.shape != (n_rows,) or marked.dtype != bool:
        raise ValueError(
            f"`corrupted` must hold one bool per training row ({n_rows}), got {marked.dtype} of shape {marked.shape}."
        )
    if marked.all() or not marked.any():
        raise ValueError("`corrupted` must mark some rows and leave others; leave it out where nothing is to be told.")
    clean, wrong = (jnp.asarray(np.flatnonzero(mask).astype(np.int32)) for mask in (~marked, marked))
    return {"weight_auc": Partial(_separation, clean, wrong)}


@jax.jit
def _separation(clean: Array, corrupted: Array, point: Point) -> Array:
    """Return the area under the ROC curve of x as a sign of clean rows; ties count half."""
    distrusted = jnp.sort(point.outer_var[corrupted])
    below, not_above = (jnp.searchsorted(distrusted, point.outer_var[clean], side=side) for side in ("left", "right"))
    dtype = point.outer_var.dtype
    return jnp.mean((below.astype(dtype) + not_above.astype(dtype)) / 2) / len(corrupted)
