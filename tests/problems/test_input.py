"""What no problem can be made of is refused in a sentence that names the argument."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevel
from bilevel.problems.constants import implied
from tests import cases
from tests.problems import small

X, Y, X_VAL, Y_VAL = small.classes()


def cleaning(**changes):
    given = {"X_train": X, "y_train": Y, "X_val": X_VAL, "y_val": Y_VAL} | changes
    return bilevel.problems.data_cleaning(**given)


def loss(z, x, rows):
    return jnp.sum((jax.tree.leaves(rows)[0] * z) ** 2)


def own(**changes):
    given = {"inner_data": X, "outer_data": X, "inner_var": np.zeros(X.shape[1]), "outer_var": np.zeros(1)} | changes
    return bilevel.BilevelProblem.from_losses(loss, loss, **given)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: cleaning(seed=-1), "`seed=-1`: must be an integer of at least 0."),
        (lambda: cleaning(seed=np.nan), "`seed=nan`: must be an integer of at least 0."),
        (lambda: own(seed=True), "`seed=True`: must be an integer of at least 0."),
        (lambda: bilevel.problems.quadratic(10, 10, 2, 2, seed=1.5), "`seed=1.5`: must be an integer of at least 0."),
        (lambda: cleaning(outer_bounds=("a", "b")), "`outer_bounds=('a', 'b')`: bounds are numbers"),
        (lambda: own(outer_bounds=(None, "b")), "`outer_bounds=(None, 'b')`: bounds are numbers"),
        (lambda: cleaning(X_train=X[:, :0], X_val=X_VAL[:, :0]), "`X_train` has no column; at least one feature"),
        (lambda: cleaning(X_train=X * 1e20, dtype="float32"), "whose square overflows float32; scale its columns."),
        (lambda: cleaning(X_val=X_VAL * 1e200, dtype="float64"), "whose square overflows float64; scale its columns."),
        (lambda: own(outer_data=X * 1e200), "`outer_data` holds "),
        (lambda: own(metrics="x"), "`metrics='x'`: must be a dict, name -> function of the point."),
        (lambda: own(metrics={"x": 3}), "`metrics={'x': 3}`: must be a dict, name -> function of the point."),
    ],
)
def test_bad_input_is_refused_by_name(build, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build()


def test_large_integers_that_stay_integers_are_taken():
    assert own(inner_data=(X, np.full(len(X), 2**62))).n_inner == len(X)


def test_constants_of_nonsense_are_refused():
    problem = cases.quadratic()
    with pytest.raises(ValueError, match="`strongly_convex=True`"):
        dataclasses.replace(problem, exact_solver=None).constants()
    with pytest.raises(ValueError, match=r"`radius=-1\.0`"):
        problem.constants(radius=-1.0)
    with pytest.raises(ValueError, match="lower limit exceeds"):
        problem.constants(radius=1.0, box=(1.0, -1.0))
    with pytest.raises(ValueError, match="a limit has 2 numbers; give one, or 3"):
        problem.constants(radius=1.0, box=(np.zeros(2), None))
    with pytest.raises(ValueError, match=r"`mu_G=0\.0`"):
        implied(0.0, 1.0, 1.0, 1.0, 1.0)
