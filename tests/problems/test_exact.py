"""References of ridge, softmax and cleaning against SciPy, scikit-learn and finite differences; bad arguments."""

import jax
import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import expit, logsumexp
from sklearn.metrics import roc_auc_score

import bilevel
from bilevel import problems
from bilevel._core.compilation import arithmetic
from bilevel._core.types import Point
from bilevel.problems.data_cleaning import weight_auc
from bilevel.problems.exact import IterativeExactSolver, System, newton
from tests import cases
from tests.problems import small


def outer_point(problem, seed=3):
    return problem.start.outer_var + 0.5 * np.random.default_rng(seed).standard_normal(problem.start.outer_var.shape)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", small.PROBLEMS)
def test_hypergradient_is_the_gradient_of_h(name, dtype):
    problem = small.PROBLEMS[name](dtype=dtype)
    x = np.asarray(outer_point(problem), np.float64)
    solution = problem.exact_solver(x, None)
    scale = np.linalg.norm(solution.v)
    assert solution.inner_residual < 1e-9 and solution.v_residual < 1e-9 * max(1, scale)
    move = np.random.default_rng(5).standard_normal(x.shape)
    values = [problem.exact_solver(x + step * move, solution).value for step in (1e-4, -1e-4)]
    np.testing.assert_allclose(np.sum(solution.hypergrad * move), np.diff(values)[0] / -2e-4, rtol=1e-5)


@pytest.mark.parametrize("name", ["ridge", "grouped_ridge"])
def test_special_exact_solutions_equal_the_generic_one(name):
    problem = small.PROBLEMS[name](dtype="float64")
    x = outer_point(problem)
    generic = IterativeExactSolver(problem.oracles, problem.start)(x)
    cases.assert_trees_close(problem.exact_solver(x, None)[:4], generic[:4], rtol=1e-8, atol=1e-11)


def test_a_float32_problem_is_evaluated_in_float64():
    """In float32 the systems are solved roughly, and corrected until float64 residuals are small."""
    narrow, wide = small.cleaning(dtype="float32"), small.cleaning(dtype="float64")
    x = outer_point(wide)
    cases.assert_trees_close(narrow.exact_solver(x)[:4], wide.exact_solver(x)[:4], rtol=1e-5, atol=1e-6)
    assert narrow.exact_solver(x).inner_residual < 1e-9


def test_ridge_equals_the_normal_equations():
    X, y, X_val, y_val = small.targets()
    x = np.array([-1.0, 0.5, -3.0, 1.0])
    z = np.linalg.solve(X.T @ X / len(X) + np.diag(np.exp(x)), X.T @ y / len(X))
    solution = small.ridge(dtype="float64").exact_solver(x)
    np.testing.assert_allclose(solution.inner_var, z, rtol=1e-10)
    np.testing.assert_allclose(solution.value, np.mean((X_val @ z - y_val) ** 2) / 2, rtol=1e-12)


def scipy_softmax(X, labels, row_weights, penalty):
    """The minimizer of mean w CE + ½ sum penalty z², computed independently."""
    onehot = np.eye(small.CLASSES)[labels]

    def objective(flat):
        z = flat.reshape(small.CLASSES, small.FEATURES)
        scores = X @ z.T
        losses = logsumexp(scores, axis=1) - np.sum(onehot * scores, axis=1)
        probabilities = np.exp(scores - logsumexp(scores, axis=1, keepdims=True))
        grad = (row_weights[:, None] * (probabilities - onehot)).T @ X / len(X) + penalty * z
        return row_weights @ losses / len(X) + np.sum(penalty * z**2) / 2, grad.ravel()

    start = np.zeros(small.CLASSES * small.FEATURES)
    return minimize(objective, start, jac=True, method="BFGS", options={"gtol": 1e-10}).x.reshape(small.CLASSES, -1)


def test_softmax_and_cleaning_equal_scipy():
    X, y, X_val, y_val = small.classes()
    x = np.array([-1.0, 0.0, 0.5])
    z = scipy_softmax(X, y, np.ones(len(X)), np.exp(x)[:, None])
    np.testing.assert_allclose(small.softmax_per_class(dtype="float64").exact_solver(x).inner_var, z, atol=1e-8)
    x = np.random.default_rng(0).standard_normal(len(X))
    z = scipy_softmax(X, y, expit(x), 0.4)
    solution = small.cleaning(dtype="float64").exact_solver(x)
    np.testing.assert_allclose(solution.inner_var, z, atol=1e-8)
    scores = X_val @ z.T
    value = np.mean(logsumexp(scores, axis=1) - scores[np.arange(len(y_val)), y_val])
    np.testing.assert_allclose(solution.value, value, rtol=1e-9)


def test_metrics_of_cleaning_equal_scikit_learn_and_count_ties_half():
    problem = small.cleaning(dtype="float64")
    rng = np.random.default_rng(0)
    x = np.round(rng.standard_normal(cases.N_INNER), 1)
    z = rng.standard_normal((small.CLASSES, small.FEATURES))
    point = Point(z, x, z)
    corrupted = np.arange(cases.N_INNER) % 2 == 0
    *_, X_val, y_val = small.classes()
    error = np.mean(np.argmax(X_val @ z.T, axis=1) != y_val)
    with arithmetic("float64"):
        separation = weight_auc(np.flatnonzero(~corrupted), np.flatnonzero(corrupted), point)
        np.testing.assert_allclose(separation, roc_auc_score(~corrupted, x), rtol=1e-12)
        np.testing.assert_allclose(problem.metrics["validation_error"](point), error, rtol=1e-12)


@pytest.mark.parametrize(("corruption", "more"), [(0.5, {"weight_auc"}), (0.0, set())])
def test_cleaning_of_digits_follows_test_rows_and_the_weights_of_corrupted_rows(corruption, more):
    problem = problems.digits_cleaning(corruption=corruption, n_train=100, n_val=50)
    history = bilevel.run(problem, bilevel.SRBA(0.1, 1.0, cases.BATCH), max_steps=2, exact=False).history
    assert set(problem.metrics) == {"validation_error", "test_error"} | more <= set(history)
    assert all(0 <= history[name][-1] <= 1 for name in problem.metrics)


def test_v_of_cleaning_stays_within_its_radius():
    problem = small.cleaning(dtype="float64")
    lengths = [np.linalg.norm(problem.exact_solver(outer_point(problem, seed)).v) for seed in range(5)]
    radius = problem.constants().R
    assert max(lengths) <= radius
    rows = small.classes()[2]
    expected = np.sqrt(2) * np.linalg.norm(rows, axis=1).max() / 0.4
    np.testing.assert_allclose(radius, expected, rtol=1e-12)


def test_labels_are_redrawn_with_the_given_chance():
    labels = np.repeat(np.arange(10), 2000).astype(np.int32)
    noisy = problems.corrupted_labels(labels, 10, 0.5, np.random.default_rng(0))
    changed = noisy != labels
    assert abs(changed.mean() - 0.45) < 4 * np.sqrt(0.45 * 0.55 / len(labels))
    counts = np.bincount(noisy[changed], minlength=10)
    assert counts.min() > 0.9 * counts.mean() and noisy.dtype == labels.dtype


X, Y, X_VAL, Y_VAL = small.classes()
_, TARGETS, _, TARGETS_VAL = small.targets()
BAD = [
    ("softmax", {"y_train": Y - 1}, r"`y_train` must hold classes 0, 1, 2.*return_inverse"),
    ("softmax", {"y_train": Y + 0.5}, "`y_train` must hold classes"),
    ("softmax", {"y_val": Y_VAL + 1}, "`y_val` holds the class 3, but `y_train` only classes 0 to 2"),
    ("softmax", {"y_train": np.zeros_like(Y)}, "needs at least two"),
    ("softmax", {"X_val": X_VAL[:, :2]}, "4 features and `X_val` 2"),
    ("softmax", {"per": "row"}, "per='row'"),
    ("softmax", {"outer_var": np.zeros(4)}, r"`outer_var` has shape \(4,\); this problem needs \(3,\)"),
    ("cleaning", {"regularization": 0.0}, "regularization=0.0"),
    ("cleaning", {"inner_var": np.zeros(4)}, r"`inner_var` has shape \(4,\); this problem needs \(3, 4\)"),
    ("softmax", {"inner_var": np.zeros((4, 3))}, r"shape \(4, 3\); this problem needs \(3, 4\)"),
    ("cleaning", {"X_train": {"a": X}}, "`X_train` must be an array with two axes"),
    ("squared", {"groups": [0, 1]}, r"`groups` must hold one integer per feature \(4\)"),
    ("squared", {"groups": [0, 1, 1, 3]}, "without gaps"),
    ("squared", {"groups": [0.0, 1, 1, 0]}, "one integer per feature"),
    ("squared", {"y_train": np.where(TARGETS > 0, np.nan, 0)}, "`y_train` holds NaN"),
    ("squared", {"y_train": TARGETS[:5]}, "`X_train` has 53 rows and `y_train` 5"),
    ("squared", {"dtype": "int8"}, "dtype='int8'"),
    ("logistic", {"groups": [0, 1, 2]}, "`groups` must hold one integer"),
]


@pytest.mark.parametrize(("name", "changes", "message"), BAD)
def test_bad_arguments_are_named(name, changes, message):
    rows = {
        "softmax": small.classes,
        "cleaning": small.classes,
        "squared": small.targets,
        "logistic": cases.logistic_data,
    }
    arguments = dict(zip(("X_train", "y_train", "X_val", "y_val"), rows[name](), strict=True)) | changes
    options = {} if name == "cleaning" else {"loss": name, "per": "class" if name == "softmax" else "feature"}
    build = problems.penalty_selection if options else problems.data_cleaning
    with pytest.raises(ValueError, match=message):
        build(**options | arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"corruption": 1.5}, "corruption=1.5"),
        ({"n_train": 0}, "n_train=0"),
        ({"n_val": 1.5}, "n_val=1.5"),
        ({"n_train": 1400, "n_val": 300}, "together exceed"),
    ],
)
def test_bad_arguments_of_cleaning_digits_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        problems.digits_cleaning(**changes)


def test_weak_penalties_of_many_sizes_are_solved_from_a_far_guess():
    problem = small.softmax_per_feature(dtype="float64")
    # From there a whole step goes too far.
    far = problem.start._replace(inner_var=2 * np.random.default_rng(0).standard_normal((3, 4)))
    problem.exact_solver._start = far
    x = np.array([-11.0, 3.0, -9.0, -2.0])
    found = problem.exact_solver(x, None)
    X, y, *_ = small.classes()

    def value(z):
        scores = X @ z.reshape(3, 4).T
        penalty = np.exp(x) @ (z.reshape(3, 4) ** 2).sum(axis=0) / 2
        return np.mean(logsumexp(scores, axis=1) - scores[np.arange(len(y)), y]) + penalty

    expected = minimize(value, np.zeros(12), tol=1e-12)
    assert value(found.inner_var.ravel()) <= expected.fun + 1e-12
    assert found.inner_residual < 1e-10


@pytest.mark.parametrize("start", [0.0, 3.0])
def test_newton_steps_end_where_the_gradient_is_zero(start):
    found = newton(lambda z: 2 * z, lambda z: System.dense(2 * np.eye(2)), np.full(2, start))
    assert np.linalg.norm(found.z) == np.linalg.norm(found.grad) == found.decrement == 0


def test_the_exact_solution_of_a_ridge_model_compiles_nothing(caplog):
    X, y = np.random.default_rng(0).standard_normal((40, 3)), np.arange(40.0)
    problem = bilevel.problems.penalty_selection(X[:20], y[:20], X[20:], y[20:], loss="squared", groups=[0, 1, 1])
    jax.clear_caches()
    with jax.log_compiles():
        found = problem.exact_solver(np.zeros(2), None)
        assert caplog.text == "" and found.hypergrad.shape == (2,)
        jax.jit(lambda x: x + 1)(1.0)
    assert "Compiling" in caplog.text
