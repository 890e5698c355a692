"""Difficult data: separable classes, rare classes, many classes, and many coefficients."""

import time
import warnings

import numpy as np
import pytest
import scipy.sparse as sp
from scipy.optimize import minimize
from scipy.special import logsumexp, softmax
from sklearn.datasets import load_diabetes
from sklearn.exceptions import ConvergenceWarning

from bilevel.estimators import (
    BilevelLogisticRegression,
    BilevelSparseLogisticRegression,
    DataCleaningClassifier,
    sparse,
    sparse_linear_model,
)
from bilevel.estimators.losses import Softmax
from bilevel.estimators.ridge import RidgeGLM, conjugate_gradients
from bilevel.estimators.selection import Objective

RARE = "ignore:The least populated class:UserWarning"


@pytest.fixture
def limit_work(monkeypatch):
    """Fail after a number of evaluations of the loss, instead of running forever."""
    counted, values = [], RidgeGLM._values

    def count(*args):
        counted.append(None)
        assert len(counted) < 40_000
        return values(*args)

    monkeypatch.setattr(RidgeGLM, "_values", count)


def draw_separable(rows, classes, columns, shift, seed=0, scales=0.0):
    """Fewer rows than columns; each class is shifted in some columns, which may have very different scales."""
    rng = np.random.default_rng(seed)
    y, own = np.arange(rows) % classes, max(1, columns // (2 * classes))
    X = rng.standard_normal((rows, columns))
    for k in range(classes):
        X[np.ix_(y == k, np.arange(k * own, (k + 1) * own))] += shift
    return X * 10 ** rng.uniform(-scales, scales, columns), y


def draw_texts(rows, classes, words, seed=0):
    """Sparse rows of unit norm, as TF-IDF makes them."""
    rng = np.random.default_rng(seed)
    y, rates = np.arange(rows) % classes, rng.gamma(0.2, 1, (classes, words))
    counts = rng.poisson(40 * (rates / rates.sum(axis=1, keepdims=True))[y]).astype(float)
    counts *= np.log(rows / (1 + (counts > 0).sum(axis=0)))
    return sp.csr_array(counts / np.linalg.norm(counts, axis=1, keepdims=True)), y


SEPARABLE = {
    "few rows": draw_separable(45, 3, 300, 2.0),
    "many columns": draw_separable(60, 3, 1500, 1.0, 1),
    "four classes": draw_separable(80, 4, 240, 3.0, 2),
    "five classes": draw_separable(75, 5, 400, 4.0, 3),
    "ten classes": draw_separable(100, 10, 250, 3.0, 4),
    "weak shifts": draw_separable(66, 3, 500, 0.3, 5),
    "strong shifts": draw_separable(66, 3, 500, 30.0, 6),
    "scales": draw_separable(60, 3, 250, 2.0, 7, scales=4.0),
    "two of three alike": draw_separable(50, 3, 120, 6.0, 8),
    "twice the columns": draw_separable(90, 3, 180, 2.5, 9),
    "texts": draw_texts(90, 4, 900),
    "short texts": draw_texts(48, 3, 2000, 1),
}


@pytest.mark.parametrize("structure", ["single", pytest.param("auto", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SEPARABLE)
def test_separable_classes_with_more_columns_than_rows_are_fitted(name, structure, limit_work):
    X, y = SEPARABLE[name]
    model = BilevelLogisticRegression(structure, random_state=0).fit(X, y)
    assert np.isfinite(model.coef_).all() and np.isfinite(model.penalties_).all() and model.score(X, y) == 1
    X = X.toarray() if sp.issparse(X) else X
    # The gradient of the penalized loss, in the units in which columns have deviation 1.
    scale = X.std(axis=0)
    residuals = softmax(X @ model.coef_.T + model.intercept_, axis=1) - np.eye(len(model.classes_))[y]
    slopes = (X.T @ residuals)[scale > 0] / scale[scale > 0, None]
    penalized = model.penalties_[scale > 0, None] * (model.coef_ * scale).T[scale > 0]
    np.testing.assert_allclose(slopes, -penalized, atol=1e-6 * np.abs(slopes).max() + 1e-10)
    np.testing.assert_allclose(residuals.sum(axis=0), 0, atol=1e-7)


@pytest.mark.parametrize("log_penalty", [-9.0, -4.0, 0.0])
def test_fits_with_tiny_penalties_have_the_least_loss(log_penalty):
    X, y = draw_separable(40, 3, 90, 2.0, 10)
    targets, penalty = np.eye(3)[y], np.exp(log_penalty)
    folds = np.array([np.arange(40) % 4 != k for k in range(4)]).astype(float)
    fits = RidgeGLM(X, targets, Softmax(), tol=1e-14).fit(folds, np.full(90, log_penalty))

    def objective(flat, weights):
        coef, intercept = flat[:-3].reshape(90, 3), flat[-3:]
        eta = X @ coef + intercept
        slope = weights[:, None] * (softmax(eta, axis=1) - targets)
        value = weights @ (logsumexp(eta, axis=1) - eta[np.arange(40), y]) + penalty * np.sum(coef**2) / 2
        return value, np.append((X.T @ slope + penalty * coef).ravel(), slope.sum(axis=0))

    for weights, coef, intercept in zip(folds, fits.coef, fits.intercept, strict=True):
        options = {"maxiter": 20_000, "maxfun": 40_000, "ftol": 1e-15, "gtol": 1e-12}
        best = minimize(objective, np.zeros(273), (weights,), jac=True, method="L-BFGS-B", options=options).fun
        assert objective(np.append(coef.ravel(), intercept), weights)[0] <= best * (1 + 1e-6)


def test_conjugate_gradients_leave_solved_fits_alone_and_end_at_once_without_positive_curvature():
    matrices = np.array([np.diag([1.0, 2.0, 3.0, 4.0]), np.eye(4), -np.eye(4)])
    rhs = np.zeros((4, 3, 1))
    rhs[:, :, 0] = np.array([[1.0, 2.0, 3.0, 4.0], np.zeros(4), np.ones(4)]).T
    x, steps = conjugate_gradients(lambda v: np.einsum("fpq,qfc->pfc", matrices, v), lambda r: r, rhs, 1e-12)
    np.testing.assert_allclose(x[..., 0], np.array([np.ones(4), np.zeros(4), np.zeros(4)]).T, atol=1e-10)
    assert steps <= 5


@pytest.mark.parametrize("shape", [(90, 25, 4), (70, 40, 2)], ids=str)
@pytest.mark.parametrize("kind", [BilevelLogisticRegression, DataCleaningClassifier], ids=lambda kind: kind.__name__)
def test_a_class_that_is_missing_in_a_fold_ends_with_the_warning_of_scikit_learn(shape, kind, limit_work):
    rows, columns, classes = shape
    options = {} if kind is DataCleaningClassifier else {"structure": "single"}
    rng = np.random.default_rng(rows)
    X, y = rng.standard_normal((rows, columns)), rng.integers(0, classes, rows)
    y[rows // 2] = classes
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = kind(random_state=0, **options).fit(X, y)
    told = [str(item.message) for item in caught if "The least populated class in y has only 1" in str(item.message)]
    assert len(told) == 1
    assert model.coef_.shape == (classes + 1, columns) and np.isfinite(model.coef_).all()


@pytest.mark.filterwarnings(RARE)
def test_targets_of_a_regression_are_refused_or_warned_of_as_scikit_learn_does():
    rng = np.random.default_rng(0)
    X, target = rng.standard_normal((40, 3)), rng.standard_normal(40)
    with pytest.raises(ValueError, match="Unknown label type: continuous"):
        BilevelLogisticRegression().fit(X, target)
    with pytest.warns(UserWarning, match="number of unique classes is greater than 50%"):
        BilevelLogisticRegression("single", random_state=0).fit(X, np.round(20 * target))


@pytest.mark.slow
def test_a_classifier_of_a_regression_target_ends(limit_work):
    X, y = load_diabetes(return_X_y=True)
    with pytest.warns(UserWarning, match="The least populated class"):
        model = BilevelLogisticRegression(random_state=0).fit(X[:250, :5], y[:250] // 4)
    assert len(model.classes_) > 60 and np.isfinite(model.coef_).all()


def test_the_work_of_a_sparse_search_respects_its_limit_and_is_reported(monkeypatch):
    X, y = draw_separable(60, 3, 60, 1.0, 11)
    work, solve = [], sparse.solve

    def record(*args):
        work.append(solve(*args))
        return work[-1]

    full = BilevelSparseLogisticRegression(random_state=0).fit(X, y)
    monkeypatch.setattr(sparse, "solve", record)
    monkeypatch.setattr(sparse_linear_model, "_MIN_FLOPS", 1e7)
    monkeypatch.setattr(sparse_linear_model, "_PASSES", 1)
    with pytest.warns(ConvergenceWarning, match="limit of work that max_iter=5 sets, .* Increase max_iter"):
        model = BilevelSparseLogisticRegression(max_iter=5, random_state=0).fit(X, y)
    searched = sum(one.flops for one in work[:-1])  # the last one is the fit to all rows
    assert searched < 1.5 * (1e7 + 5 * X.size * 3)  # the first fits of the fine search are made in any case
    assert np.isfinite(model.coef_).all() and model.score(X, y) > 0.9
    assert model.history_["value"].min() >= full.history_["value"].min() - 1e-6


@pytest.mark.slow
def test_a_sparse_search_with_many_classes_and_columns_ends(monkeypatch):
    rng = np.random.default_rng(3)
    y, rates = rng.integers(0, 9, 1500), rng.gamma(0.3, 1, 500) * rng.gamma(1.0, 1.0, (9, 500))
    X = rng.poisson(60 * (rates / rates.sum(axis=1, keepdims=True))[y]).astype(float)
    begin, evaluate = time.process_time(), Objective._evaluate

    def check(*args):
        assert time.process_time() - begin < 60
        return evaluate(*args)

    monkeypatch.setattr(Objective, "_evaluate", check)
    with pytest.warns(ConvergenceWarning, match="limit of work"):
        model = BilevelSparseLogisticRegression(random_state=0).fit(sp.csr_array(X), y)
    assert model.score(X, y) > 0.99
