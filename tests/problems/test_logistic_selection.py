"""Penalty selection for logistic regression: its solution, and its errors."""

import numpy as np
import pytest
from scipy.optimize import minimize

import bilevel
from tests import cases


def scipy_solution(x):
    """z*, h and their derivatives, computed independently by SciPy's minimizer and a dense solve."""
    X, y, X_val, y_val = cases.logistic_data()

    def inner(z):
        margins = y * (X @ z)
        value = np.mean(np.logaddexp(0, -margins)) + np.sum(np.exp(x) * z**2) / 2
        return value, -X.T @ (y / (1 + np.exp(margins))) / len(y) + np.exp(x) * z

    z = minimize(inner, np.zeros(4), jac=True, method="BFGS", options={"gtol": 1e-12}).x
    s = 1 / (1 + np.exp(y * (X @ z)))
    hessian = (X.T * (s * (1 - s))) @ X / len(y) + np.diag(np.exp(x))
    z = z - np.linalg.solve(hessian, inner(z)[1])
    margins = y_val * (X_val @ z)
    v = np.linalg.solve(hessian, X_val.T @ (y_val / (1 + np.exp(margins))) / len(y_val))
    return z, v, np.mean(np.logaddexp(0, -margins)), np.exp(x) * z * v


def test_exact_solution_equals_an_independent_scipy_solution():
    x = np.array([-1.0, 0.5, -3.0, 0.0])
    for ours, theirs in zip(cases.logistic_selection().exact_solver(x), scipy_solution(x), strict=False):
        np.testing.assert_allclose(ours, theirs, rtol=1e-8)


def test_exact_solution_is_exact_far_from_its_guess():
    problem = cases.logistic_selection()
    guess = problem.exact_solver(np.full(4, 5.0))._replace(inner_var=np.full(4, 30.0))
    x = np.array([-6.0, -4.0, -5.0, 0.0])
    solution = problem.exact_solver(x, guess)
    assert max(solution.inner_residual, solution.v_residual) < 1e-14
    cases.assert_trees_close(solution[:4], problem.exact_solver(x)[:4], rtol=1e-9, atol=1e-12)


def test_hypergradient_is_the_gradient_of_h():
    exact_solver = cases.logistic_selection().exact_solver
    x, move = np.random.default_rng(1).standard_normal((2, 4))
    slope = (exact_solver(x + 1e-5 * move).value - exact_solver(x - 1e-5 * move).value) / 2e-5
    np.testing.assert_allclose(exact_solver(x).hypergrad @ move, slope, rtol=1e-7)


def test_default_start_follows_the_seed():
    first, again, other = (cases.logistic_selection(seed=seed).start for seed in (3, 3, 4))
    cases.assert_trees_equal(first, again)
    assert not np.array_equal(first.inner_var, other.inner_var)
    assert np.all(first.outer_var < 0), "x0 = log U(0, 1)"


def arguments(**changes):
    names = ("X_train", "y_train", "X_val", "y_val")
    return dict(zip(names, cases.logistic_data(), strict=True)) | changes


X, Y, X_VAL, Y_VAL = cases.logistic_data()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y_train": (Y + 1) // 2}, "`y_train` must hold labels -1 and 1.*np.where"),
        ({"y_val": Y_VAL[:-1]}, "`X_val` has 31 rows and `y_val` 30"),
        ({"y_train": Y[:, None]}, "`y_train` must have one axis"),
        ({"X_val": X_VAL[:, :2]}, "4 features and `X_val` 2"),
        ({"X_train": X[:0], "y_train": Y[:0]}, "`X_train` is empty"),
        ({"X_train": np.where(X > 1, np.nan, X)}, "`X_train` holds NaN or infinite"),
        ({"X_val": X_VAL[0]}, "`X_val` must be an array with two axes"),
        ({"X_train": X.astype(str)}, "`X_train` has a leaf of dtype"),
        ({"inner_var": np.zeros(3)}, r"`inner_var` has shape \(3,\); this problem needs \(4,\)"),
        ({"outer_var": np.zeros(4, int)}, "`outer_var` has a leaf of dtype int64"),
        ({"outer_var": np.full(4, np.inf)}, "`outer_var` holds NaN or infinite"),
        ({"outer_bounds": (1.0, 0.0)}, "lower bound exceeds"),
        ({"outer_var": np.zeros(4), "outer_bounds": (1.0, None)}, "starts outside"),
        ({"outer_bounds": 3.0}, "must be a pair"),
        ({"dtype": "int32"}, "dtype='int32'"),
    ],
)
def test_bad_arguments_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        bilevel.problems.penalty_selection(**arguments(**changes))
