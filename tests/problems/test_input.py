"""Invalid input of problems raises an error that names the argument."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevel
from bilevel.problems.certificate import implied
from paper.valleys import valleys
from tests import cases
from tests.problems import small

X, Y, X_VAL, Y_VAL = small.classes()


def cleaning(**changes):
    given = {"X_train": X, "y_train": Y, "X_val": X_VAL, "y_val": Y_VAL} | changes
    return bilevel.problems.data_cleaning(**given)


def loss(z, x, rows):
    return jnp.sum((jax.tree.leaves(rows)[0] * z) ** 2)


def quadratic(**changes):
    return bilevel.problems.quadratic(**{"n_inner": 16, "n_outer": 16, "dim_inner": 3, "dim_outer": 2} | changes)


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
        (lambda: cleaning(outer_bounds=("a", "b")), "`outer_bounds`: bounds are numbers"),
        (lambda: own(outer_bounds=(None, "b")), "`outer_bounds`: bounds are numbers"),
        (lambda: cleaning(X_train=X[:, :0], X_val=X_VAL[:, :0]), "`X_train` has no column; at least one feature"),
        (lambda: cleaning(X_train=X * 1e20, dtype="float32"), "whose square overflows float32; scale its columns."),
        (lambda: cleaning(X_val=X_VAL * 1e200, dtype="float64"), "whose square overflows float64; scale its columns."),
        (lambda: own(outer_data=X * 1e200), "`outer_data` holds "),
        (lambda: cleaning(inner_var=np.full((3, 4), 1e39), dtype="float32"), "`inner_var` overflows float32"),
        (lambda: cleaning(y_val=[[4], [18, 20]]), "`y_val` is not an array of numbers: "),
        (lambda: cleaning(X_train=np.ma.masked_greater(X, 0)), "`X_train` has masked values; remove or impute"),
        (lambda: cleaning(regularization=np.ones(3)), "`regularization=array([1., 1., 1.])`: must be a finite number."),
        (lambda: cleaning(dtype=np.ones(2)), "`dtype=array([1., 1.])`: must be 'float32' or 'float64'."),
        (lambda: quadratic(n_inner=True), "`n_inner=True`: must be an integer of at least 1."),
        (lambda: quadratic(n_inner=2**31), "`n_inner=2147483648`: must be below 2**31."),
        (lambda: quadratic(n_inner=2**31 - 1, dim_inner=2**20), " GiB are needed, and this machine has "),
        (lambda: quadratic(coupling="a"), "`coupling='a'`: must be a finite number."),
        (lambda: quadratic(largest_eigenvalue=0.0), "`largest_eigenvalue=0.0`: must be above 0 and finite."),
        (lambda: valleys(inner_ripple=...), "`inner_ripple=Ellipsis`: must be a finite number."),
        (lambda: bilevel.problems.digits_cleaning(n_train=5), "`n_train=5`: these rows do not contain all classes"),
        (lambda: cleaning(y_train=[None, *Y[1:]]), "`y_train` must hold classes 0, 1, 2, …, got [None, "),
        (lambda: cleaning(inner_var=[[0.0], [0.0, 1.0]]), "`inner_var` is not an array of numbers: "),
        (lambda: own(metrics="x"), "`metrics='x'`: must be a dict, name -> function of the point."),
        (lambda: own(metrics={"x": 3}), "`metrics={'x': 3}`: must be a dict, name -> function of the point."),
    ],
)
def test_bad_input_is_refused_by_name(build, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build()


def test_a_start_may_be_a_list():
    assert cleaning(inner_var=np.ones((3, 4)).tolist()).start.inner_var.tolist() == np.ones((3, 4)).tolist()


def test_a_run_without_an_exact_value_says_so():
    rows, signs = np.full((12, 3), 2**62), np.resize([1, -1], 12)
    problem = bilevel.problems.penalty_selection(rows, signs, X_VAL[:, :3], np.resize([1, -1], len(X_VAL)))
    with pytest.warns(RuntimeWarning, match="`value` is NaN in 2 of 2 evaluations.*scale the columns of the data"):
        result = bilevel.run(problem, bilevel.HOAG(), max_steps=1)
    assert result.status == "out_of_budget"


def test_large_integers_that_stay_integers_are_taken():
    assert own(inner_data=(X, np.full(len(X), 2**62))).n_inner == len(X)


def test_constants_of_nonsense_are_refused():
    problem = cases.quadratic()
    with pytest.raises(ValueError, match="`constants`: the constants of 'custom' are not known; those of `quadratic`"):
        own().constants()
    with pytest.raises(ValueError, match=r"`radius=-1\.0`"):
        problem.constants(radius=-1.0)
    with pytest.raises(ValueError, match="lower limit exceeds"):
        problem.constants(radius=1.0, box=(1.0, -1.0))
    with pytest.raises(ValueError, match="a limit has 2 numbers; give 1, or 3"):
        problem.constants(radius=1.0, box=(np.zeros(2), None))
    with pytest.raises(ValueError, match=r"`mu_G=0\.0`"):
        implied(0.0, 1.0, 1.0, 1.0, 1.0)
