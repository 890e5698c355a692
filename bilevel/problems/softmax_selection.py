"""Selection of penalties for softmax regression, one per class, feature or group of them, on a validation set."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from bilevel.oracles import PENALTIES, SoftmaxSelectionOracles
from bilevel.precision import arithmetic, as_float_dtype
from bilevel.problems.base import BilevelProblem
from bilevel.problems.checks import checked_bounds, checked_groups, checked_start
from bilevel.problems.labelled import labelled_levels
from bilevel.problems.reference import GenericReferee
from bilevel.types import Point


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
    dtype: DTypeLike = "float32",
    seed: int = 0,
) -> BilevelProblem:
    """Build the problem min over x of the validation loss of softmax regression with penalties exp(x).

        G = mean CE(d'z, y) + ½ sum_kc exp(x) z_kc²  on training rows, x = x_c per class or x_k per feature
        F = mean CE(d'z, y)                          on validation rows

    Parameters
    ----------
    X_train, X_val : (samples, features)
    y_train, y_val : classes 0, 1, 2, …
    per : "class" or "feature"; what shares a penalty
    groups : the group of each class or feature, 0, 1, …; those of a group share a penalty; one each by default
    inner_var : start of z, (features, classes); 0 by default
    outer_var : start of x, the logarithms of the penalties; -2 by default
    outer_bounds : (lower, upper) for x, each None, a number or like x
    dtype : "float32" or "float64"
    seed : of the one shuffle of the rows
    """
    dtype = as_float_dtype(dtype)
    if per not in PENALTIES:
        raise ValueError(f"`per={per!r}`: must be 'class' or 'feature'.")
    with arithmetic(dtype):
        levels = labelled_levels(X_train, y_train, X_val, y_val, dtype, np.random.default_rng(seed))
        z = checked_start("inner_var", inner_var, np.zeros((levels.n_features, levels.n_classes)), dtype)
        n_members = levels.n_classes if per == "class" else levels.n_features
        groups = checked_groups(groups, n_members, per)
        n_penalties = n_members if groups is None else groups.max() + 1
        x = checked_start("outer_var", outer_var, np.full(n_penalties, -2.0), dtype)
        bounds = checked_bounds(outer_bounds, x)
        oracles = SoftmaxSelectionOracles(
            levels.inner, levels.outer, bounds, per, None if groups is None else jnp.asarray(groups)
        )
    start = Point(z, x, np.zeros_like(z))
    return BilevelProblem(oracles, start, GenericReferee(oracles, start), "softmax_selection")
