"""Sparse models: solutions agree with scikit-learn and proximal gradients, hypergradients with finite differences."""

from itertools import product

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.linear_model import ElasticNet, Lasso, LogisticRegression

from bilevel.estimators import sparse as sparse_module
from bilevel.estimators.losses import Logistic, Poisson, Softmax, Squared
from bilevel.estimators.selection import Folds, held_out_loss
from bilevel.estimators.sparse import Columns, SparseModel, WeightedLoss, minimize_groups, minimize_l1

N, P = 60, 8
GROUPS = np.array([0, 0, 1, 1, 1, 2, 2, 3])


def make(loss, sparse=False, seed=0):
    """Correlated columns of which three matter, half of the entries zero, and targets as the loss takes them."""
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((N, P)) + rng.standard_normal((N, 1))
    X[rng.random((N, P)) < 0.5] = 0
    truth = np.zeros((P, 3 if isinstance(loss, Softmax) else 1))
    truth[:3] = rng.standard_normal((3, truth.shape[1])) + 1
    scores = X @ truth + 0.5
    if isinstance(loss, Softmax):
        y = np.eye(3)[np.argmax(scores + rng.gumbel(size=scores.shape), axis=1)]
    elif isinstance(loss, Logistic):
        y = (scores + rng.logistic(size=scores.shape) > 0).astype(float)
    elif isinstance(loss, Poisson):
        y = rng.poisson(np.exp(np.clip(scores, -3, 2))).astype(float)
    else:
        y = scores + rng.standard_normal(scores.shape)
    return (sp.csr_array(X) if sparse else X), y


def fit_one(model, strengths, weights=None):
    weights = np.ones((1, N)) if weights is None else weights
    return model.fit(weights, np.log(strengths))


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("fit_intercept", [False, True])
def test_squared_loss_gives_the_lasso_and_the_elastic_net_of_scikit_learn(sparse, fit_intercept):
    X, y = make(Squared(), sparse)
    model, options = SparseModel(X, y, Squared(), fit_intercept=fit_intercept), {"fit_intercept": fit_intercept}
    lasso = Lasso(10 / N, tol=1e-12, max_iter=10**5, **options).fit(X, y[:, 0])
    with np.errstate(divide="ignore"):
        fits = fit_one(model, np.repeat([10.0, 0.0], P))
    np.testing.assert_allclose(fits.coef[0, :, 0], lasso.coef_, atol=1e-8)
    net = ElasticNet(8 / N, l1_ratio=0.75, tol=1e-12, max_iter=10**5, **options).fit(X, y[:, 0])
    fits = fit_one(model, np.repeat([6.0, 2.0], P))
    np.testing.assert_allclose(fits.coef[0, :, 0], net.coef_, atol=1e-8)
    np.testing.assert_allclose(fits.intercept[0], net.intercept_, atol=1e-8)
    np.testing.assert_allclose(fits.predictor[0, :, 0], net.predict(X), atol=1e-8)
    assert 0 < np.count_nonzero(lasso.coef_) < P


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("loss", [Logistic(), Softmax()], ids=["logistic", "softmax"])
def test_log_loss_gives_the_logistic_regression_of_scikit_learn(loss, sparse):
    X, y = make(loss, sparse)
    fits = fit_one(SparseModel(X, y, loss), np.repeat([3.0, 1.0], P))
    labels = y[:, 0] if y.shape[1] == 1 else y.argmax(axis=1)
    saga = LogisticRegression(C=0.25, l1_ratio=0.75, solver="saga", tol=1e-10, max_iter=10**5, random_state=0)
    saga.fit(X, labels)
    np.testing.assert_allclose(fits.coef[0].T, saga.coef_, atol=1e-5)
    shift = saga.intercept_.mean() if isinstance(loss, Softmax) else 0  # of all classes, which changes nothing
    np.testing.assert_allclose(fits.intercept[0], saga.intercept_ - shift, atol=1e-5)
    assert 0 < np.count_nonzero(saga.coef_) < saga.coef_.size


def descend(X, y, loss, norms, squares, groups, steps=4000):
    """Proximal gradient steps on coefficients and an intercept, written out."""
    A = np.column_stack([X, np.ones(N)])
    size, coef = 1 / (2 * np.linalg.norm(A, 2) ** 2 + squares.max()), np.zeros((P + 1, y.shape[1]))
    for _ in range(steps):
        slope = A.T @ loss.derivative(y, A @ coef)
        slope[:P] += squares[:, None] * coef[:P]
        coef = coef - size * slope
        for g, norm in enumerate(norms):
            length = np.linalg.norm(coef[:P][groups == g])
            coef[:P][groups == g] *= max(0, 1 - size * norm / length) if length else 0
    return coef[:P], coef[P]


@pytest.mark.parametrize("loss", [Squared(), Logistic(), Softmax()], ids=["squared", "logistic", "softmax"])
def test_the_group_lasso_is_where_proximal_gradient_steps_end(loss):
    X, y = make(loss)
    norms, squares = np.array([3.0, 2.0, 4.0, 6.0]) * (3 if isinstance(loss, Squared) else 1), np.linspace(0.5, 1, P)
    fits = fit_one(SparseModel(X, y, loss, GROUPS), np.concatenate([norms, squares]))
    coef, intercept = descend(X, y, loss, norms, squares, GROUPS)
    np.testing.assert_allclose(fits.coef[0], coef, atol=1e-7)
    np.testing.assert_allclose(fits.intercept[0], intercept, atol=1e-7)
    zero = np.bincount(GROUPS, np.abs(coef).sum(axis=1)) == 0
    assert 0 < zero.sum() < 4


MODELS = {
    "squared": (Squared(), None),
    "logistic": (Logistic(), None),
    "softmax": (Softmax(), None),
    "Poisson": (Poisson(), None),
    "squared, groups": (Squared(), GROUPS),
    "logistic, groups": (Logistic(), GROUPS),
    "softmax, groups": (Softmax(), GROUPS),
}


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_hypergradients_are_those_of_finite_differences(name, sparse):
    loss, groups = MODELS[name]
    X, y = make(loss, sparse)
    model = SparseModel(X, y, loss, groups)
    rng = np.random.default_rng(1)
    held_out = (np.arange(N) % 3 == np.arange(2)[:, None]).astype(float)
    weights = (1 - held_out) * rng.uniform(0.5, 1.5, N)
    logs = np.log(rng.uniform(1, 3, model.n_penalties) * (4 if isinstance(loss, Squared) else 1))

    def value(logs):
        fits = model.fit(weights, logs)
        return held_out_loss(loss, y, Folds.of_rows(weights, held_out), fits.predictor), fits

    (_, cotangent), fits = value(logs)
    gradient = model.vjp(fits, cotangent).sum(axis=0)
    step = 1e-5
    expected = [(value(logs + d)[0][0] - value(logs - d)[0][0]) / (2 * step) for d in step * np.eye(len(logs))]
    np.testing.assert_allclose(gradient, expected, atol=1e-5 * np.abs(expected).max())
    assert 0 < np.count_nonzero(fits.coef) < fits.coef.size


@pytest.mark.parametrize(("dtype", "rtol"), [(np.float64, 1e-6), (np.float32, 1e-5)])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("loss", [Logistic(), Softmax(), Poisson()], ids=["logistic", "softmax", "Poisson"])
def test_the_hessian_is_that_of_differences_of_gradients_in_either_precision(loss, sparse, dtype, rtol, monkeypatch):
    monkeypatch.setattr(sparse_module, "_CHUNK", 7)
    X, y = make(loss, sparse)
    rng = np.random.default_rng(2)
    weighted = WeightedLoss(Columns(X, True), y, loss, np.resize([2.0, 0.0, 1.0], N), 1)
    flat = rng.standard_normal((P + 1) * y.shape[1]) / 3  # coefficients, then intercepts
    variables = np.array([0, 2, 3, P * y.shape[1] - 1])

    def gradient(flat):
        coef, intercept = np.split(flat.reshape(P + 1, -1), [P])
        return np.concatenate([part.ravel() for part in weighted.gradient(X @ coef + intercept)])

    chosen = np.append(variables, np.arange(P * y.shape[1], len(flat)))
    moves = 1e-5 * np.eye(len(flat))[chosen]
    expected = np.array([gradient(flat + move) - gradient(flat - move) for move in moves])[:, chosen] / 2e-5
    coef, intercept = np.split(flat.reshape(P + 1, -1), [P])
    found = weighted.curvature(X @ coef + intercept, variables, dtype)
    np.testing.assert_allclose(found, expected, atol=rtol * np.abs(expected).max())
    assert found.dtype == np.float64


@pytest.mark.parametrize("sparse", [False, True])
def test_large_problems_end_at_the_same_minimum(sparse, monkeypatch):
    X, y = make(Softmax(), sparse)
    dtypes, curvature = [], sparse_module.WeightedLoss.curvature
    record = lambda *a: dtypes.append(a[3]) or curvature(*a)  # noqa: E731
    monkeypatch.setattr(sparse_module.WeightedLoss, "curvature", record)
    double = fit_one(SparseModel(X, y, Softmax()), np.repeat([1.0, 0.1], P))
    assert set(dtypes) == {np.float64}
    monkeypatch.setattr(sparse_module, "_LARGE", 0)
    single = fit_one(SparseModel(X, y, Softmax()), np.repeat([1.0, 0.1], P))
    assert np.float32 in dtypes
    np.testing.assert_allclose(single.coef, double.coef, atol=1e-8)


def test_minimizing_a_quadratic_and_absolute_values_finds_the_best_of_all_patterns_of_signs():
    rng = np.random.default_rng(0)
    for _ in range(30):
        root = rng.standard_normal((5, 4))
        Q, q, a = root.T @ root, 3 * rng.standard_normal(4), rng.uniform(0.5, 3, 4)
        best = np.inf
        for signs in product([-1, 0, 1], repeat=4):
            kept, w = np.flatnonzero(signs), np.zeros(4)
            w[kept] = np.linalg.solve(Q[np.ix_(kept, kept)], q[kept] - (a * signs)[kept])
            best = min(best, w @ Q @ w / 2 - q @ w + a @ np.abs(w))
        w = minimize_l1(Q, q, a, rng.standard_normal(4))
        assert w @ Q @ w / 2 - q @ w + a @ np.abs(w) == pytest.approx(best, rel=1e-10)


@pytest.mark.parametrize("square", [0.0, 1e-3])
def test_minimizing_with_many_correlated_variables_satisfies_the_optimality_conditions(square):
    rng = np.random.default_rng(0)
    X = rng.standard_normal((60, 5)) @ rng.standard_normal((5, 300)) + 0.01 * rng.standard_normal((60, 300))
    Q, q = X.T @ X + square * np.eye(300), X.T @ rng.standard_normal(60)
    a = np.full(300, 1e-3 * np.abs(q).max())
    w = minimize_l1(Q, q, a, np.zeros(300))
    slope = q - Q @ w
    np.testing.assert_allclose(slope[w != 0], (a * np.sign(w))[w != 0], atol=1e-9 * np.abs(q).max())
    assert np.all(np.abs(slope) <= a * (1 + 1e-6))


def test_minimizing_a_quadratic_and_norms_satisfies_the_optimality_conditions():
    rng = np.random.default_rng(0)
    for _ in range(10):
        root = rng.standard_normal((6, P))  # singular
        Q, q, a = root.T @ root, root.T @ rng.standard_normal(6), rng.uniform(0.5, 3, 4)
        w = minimize_groups(Q, q, a, GROUPS, np.zeros(P))
        for g in range(4):
            slope, part = (q - Q @ w)[g == GROUPS], w[g == GROUPS]
            if np.any(part):
                np.testing.assert_allclose(slope, a[g] * part / np.linalg.norm(part), atol=1e-9)
            else:
                assert np.linalg.norm(slope) <= a[g] * (1 + 1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_a_weight_of_two_repeats_a_row_and_a_weight_of_zero_removes_it(name):
    loss, groups = MODELS[name]
    X, y = make(loss)
    weights = np.resize([2.0, 0.0, 1.0, 1.0], N)
    rows = np.repeat(np.arange(N), weights.astype(int))
    model = SparseModel(X, y, loss, groups)
    logs = np.zeros(model.n_penalties) + 0.5
    weighted = model.fit(np.stack([np.ones(N), weights]), logs)
    written = SparseModel(X[rows], y[rows], loss, groups).fit(np.ones((1, len(rows))), logs)
    np.testing.assert_allclose(weighted.coef[1], written.coef[0], atol=1e-8)
    np.testing.assert_allclose(weighted.intercept[1], written.intercept[0], atol=1e-8)


@pytest.mark.parametrize("name", MODELS)
def test_features_without_penalty_have_a_gradient_of_zero(name):
    loss, groups = MODELS[name]
    X, y = make(loss)
    penalized = np.arange(2, P)
    groups = None if groups is None else groups[2:]
    model = SparseModel(X, y, loss, groups, penalized=penalized)
    fits = model.fit(np.ones((1, N)), np.full(model.n_penalties, 3.0 if isinstance(loss, Squared) else 1.5))
    slopes = X.T @ loss.derivative(y, fits.predictor[0])
    np.testing.assert_allclose(slopes[:2], 0, atol=1e-6)
    assert np.abs(slopes[2:]).max() > 0.1 and 0 in fits.coef[0, 2:] and 0 not in fits.coef[0, :2]


@pytest.mark.parametrize("loss", [Squared(), Logistic(), Softmax()], ids=["squared", "logistic", "softmax"])
def test_many_more_features_than_rows_are_solved_to_the_tolerance(loss):
    rng = np.random.default_rng(0)
    X, (_, y) = rng.standard_normal((N, 500)), make(loss)
    model, start = SparseModel(X, y, loss), None
    for strength in (10.0, 3.0, 1.0, 0.3):
        start = model.fit(np.ones((1, N)), np.log(np.repeat([strength, 1e-2], 500)), start)
        assert start.state.solved[0].residual <= 1e-8


@pytest.mark.parametrize("name", MODELS)
def test_derivatives_of_inexact_fits_are_close_to_exact_ones(name):
    loss, groups = MODELS[name]
    X, y = make(loss)
    model = SparseModel(X, y, loss, groups)
    logs, cotangent = np.zeros(model.n_penalties), np.random.default_rng(0).standard_normal((1, *y.shape))
    exact = model.vjp(model.fit(np.ones((1, N)), logs), cotangent)
    model.tol = 1e-4
    rough = model.vjp(model.fit(np.ones((1, N)), logs), cotangent)
    np.testing.assert_allclose(rough, exact, atol=0.02 * np.abs(exact).max())


def test_fits_of_some_folds_are_starts_for_the_same_rows_among_all_folds(monkeypatch):
    X, y = make(Logistic())
    model, logs = SparseModel(X, y, Logistic()), np.zeros(2 * P)
    weights = (np.arange(N) % 3 != np.arange(3)[:, None]).astype(float)
    some, steps = model.fit(weights[:2], logs), []
    eliminate = sparse_module._eliminate_intercepts
    record = lambda loss, *rest: steps.append(loss) or eliminate(loss, *rest)  # noqa: E731
    monkeypatch.setattr(sparse_module, "_eliminate_intercepts", record)
    fits = model.fit(weights, logs, some)
    assert {id(loss) for loss in steps} == {id(fits.state.solved[2].loss)}
    np.testing.assert_array_equal(fits.coef[:2], some.coef)
