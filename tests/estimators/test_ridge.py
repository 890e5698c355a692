"""Fits at given penalties agree with scikit-learn, and derivatives of the objective with finite differences."""

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.linear_model import GammaRegressor, HuberRegressor, LogisticRegression, PoissonRegressor, Ridge

from bilevel.estimators import ridge, selection
from bilevel.estimators.losses import Gamma, Huber, Logistic, Poisson, Softmax, Squared
from bilevel.estimators.ridge import RidgeGLM
from bilevel.estimators.selection import Folds, Objective, PenaltySearch, Structure

LOSSES = {
    "squared": Squared(),
    "logistic": Logistic(),
    "softmax": Softmax(),
    "poisson": Poisson(),
    "gamma": Gamma(),
    "huber": Huber(1.35),
}
each_loss = pytest.mark.parametrize("name", LOSSES)


def draw(name, n, p, seed=0):
    """Features and targets as the loss takes them."""
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, p))
    scores = X @ rng.standard_normal((p, 3)) / np.sqrt(p)
    y = {
        "squared": scores[:, :2] + rng.standard_normal((n, 2)),
        "logistic": (scores[:, :1] + rng.logistic(size=(n, 1)) > 0).astype(float),
        "softmax": np.eye(3)[np.argmax(scores + rng.gumbel(size=(n, 3)), axis=1)],
        "poisson": rng.poisson(np.exp(scores[:, :1] / 2 + 1)).astype(float),
        "gamma": rng.gamma(2.0, np.exp(scores[:, :1] / 2)),
        "huber": scores[:, :1] + rng.standard_t(2, size=(n, 1)),
    }[name]
    return X, y


def folds(n, k=3, weights=None):
    number, weights = np.arange(n) % k, np.ones(n) if weights is None else weights
    return Folds.of_rows(
        *(np.array([weights * keep(number, f) for f in range(k)]) for keep in (np.not_equal, np.equal))
    )


def fit_exactly(name, X, y, weights, penalties):
    """Return coefficients and intercept by scikit-learn, whose one penalty is ours once columns are scaled."""
    scaled, options = X / np.sqrt(penalties), {"tol": 1e-10, "max_iter": 10_000}
    if name == "squared":
        model = Ridge(1.0, tol=1e-12).fit(scaled, y, sample_weight=weights)
    elif name in ("logistic", "softmax"):
        labels = y.argmax(axis=1) if name == "softmax" else y[:, 0]
        model = LogisticRegression(C=1.0, **options).fit(scaled, labels, sample_weight=weights)
    else:
        kind = {"poisson": PoissonRegressor, "gamma": GammaRegressor}[name]
        model = kind(alpha=1 / weights.sum(), **options).fit(scaled, y[:, 0], sample_weight=weights)
    return np.atleast_2d(model.coef_).T / np.sqrt(penalties)[:, None], np.atleast_1d(model.intercept_)


@pytest.mark.parametrize("shape", [(60, 5), (400, 4), (12, 20)], ids=["exact", "tall", "wide"])
@pytest.mark.parametrize("name", ["squared", "logistic", "softmax", "poisson", "gamma"])
def test_a_fit_is_that_of_scikit_learn(name, shape):
    X, y = draw(name, *shape)
    rng = np.random.default_rng(1)
    weights, penalties = rng.uniform(0.5, 2, shape[0]), rng.uniform(0.5, 3, shape[1])
    fits = RidgeGLM(X, y, LOSSES[name], tol=1e-16).fit(weights[None], np.log(penalties))
    coef, intercept = fit_exactly(name, X, y, weights, penalties)
    np.testing.assert_allclose(fits.coef[0], coef, atol=1e-5)
    np.testing.assert_allclose(fits.intercept[0], intercept, atol=1e-5)
    np.testing.assert_allclose(fits.predictor[0], X @ fits.coef[0] + fits.intercept[0], atol=1e-8)


def test_a_robust_fit_is_that_of_scikit_learn():
    X, y = draw("huber", 80, 4)
    model = HuberRegressor(epsilon=1.35, alpha=0.3, tol=1e-10, max_iter=10_000).fit(X, y[:, 0])
    # At its own scale σ it minimizes sum σ H(error / σ) + alpha ||coef||², where H is twice our loss.
    ours = RidgeGLM(X, y / model.scale_, Huber(1.35)).fit(np.ones((1, 80)), np.full(4, np.log(0.3 * model.scale_)))
    np.testing.assert_allclose(ours.coef[0, :, 0] * model.scale_, model.coef_, atol=1e-5)


STRUCTURES = {
    "single": Structure("single", np.zeros(5, int)),
    "per_group": Structure("per_group", np.array([0, 1, 0, 2, 1]), 1.0),
    "per_feature": Structure("per_feature", np.arange(5), 0.5),
}


@pytest.mark.parametrize("structure", STRUCTURES)
@each_loss
def test_gradients_are_finite_differences(name, structure):
    X, y = draw(name, 45, 6)
    weights = np.random.default_rng(2).uniform(0.5, 2, 45)
    model = RidgeGLM(X, y, LOSSES[name], penalized=np.array([0, 1, 2, 4, 5]), tol=1e-18)
    assert_gradient(model, folds(45, 3, weights), STRUCTURES[structure])


def assert_gradient(model, folds, structure, h=1e-4):
    objective, at = Objective(model, folds, structure), np.random.default_rng(3).uniform(0, 2, structure.size)
    _, gradient = objective(at)
    found = [(objective.value(at + h * e) - objective.value(at - h * e)) / (2 * h) for e in np.eye(structure.size)]
    np.testing.assert_allclose(gradient, found, rtol=1e-5, atol=1e-5)


@each_loss
def test_gradients_are_finite_differences_with_few_rows_and_with_many(name):
    X, y = draw(name, 14, 30)
    assert_gradient(RidgeGLM(X, y, LOSSES[name], tol=1e-18), folds(14), Structure("", np.arange(30) % 3, 1.0))
    X, y = draw(name, 300, 3)
    assert_gradient(RidgeGLM(X, y, LOSSES[name], tol=1e-18), folds(300), Structure("", np.arange(3), 1.0))


@pytest.mark.parametrize("name", ["logistic", "softmax"])
def test_conjugate_gradients_give_the_same_as_exact_matrices(name, monkeypatch):
    X, y = draw(name, 70, 8)
    structure, at = Structure("", np.arange(8), 1.0), np.linspace(0, 2, 8)
    value, gradient = Objective(RidgeGLM(X, y, LOSSES[name], tol=1e-16), folds(70), structure)(at)
    monkeypatch.setattr(ridge, "_SMALL", 0)
    monkeypatch.setattr(ridge, "_MAX_ENTRIES", 0)
    for rows in (X, sp.csr_array(X)):
        other = Objective(RidgeGLM(rows, y, LOSSES[name], tol=1e-16), folds(70), structure)(at)
        np.testing.assert_allclose(other[0], value, rtol=1e-8)
        np.testing.assert_allclose(other[1], gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("shape", [(70, 8), (20, 30)])
def test_shared_blocks_give_the_same_as_exact_matrices(shape, monkeypatch):
    X, y = draw("softmax", *shape)
    structure, at = Structure("", np.arange(shape[1]) % 4, 1.0), np.linspace(0, 2, 4)
    model = RidgeGLM(X, y, Softmax(), tol=1e-16)
    value, gradient = Objective(model, folds(shape[0]), structure)(at)
    monkeypatch.setattr(ridge, "_SMALL", 0)
    found = Objective(model, folds(shape[0]), structure)(at)
    np.testing.assert_allclose(found[0], value, rtol=1e-8)
    np.testing.assert_allclose(found[1], gradient, rtol=1e-5, atol=1e-7)


def test_kernels_of_groups_add_up():
    X, _ = draw("squared", 9, 50)
    for columns in (X, sp.csr_array(X)):
        data = RidgeGLM(columns, np.zeros((9, 1)), Squared()).data
        for groups in (np.zeros(50, int), np.arange(50) % 3, np.arange(50), np.arange(50) % 3, np.arange(50) // 25):
            log_penalties = np.linspace(1, -2, groups.max() + 1)[groups]
            np.testing.assert_allclose(data.kernel(log_penalties), (X * np.exp(-log_penalties)) @ X.T)


@pytest.mark.parametrize("shape", [(50, 6), (12, 20), (300, 4)])
@each_loss
def test_sparse_and_dense_rows_give_the_same(name, shape):
    X, y = draw(name, *shape)
    X = np.where(np.abs(X) > 0.7, X, 0)
    structure, at = Structure("", np.arange(shape[1]), 1.0), np.linspace(0, 2, shape[1])
    dense, sparse = (
        Objective(RidgeGLM(rows, y, LOSSES[name]), folds(shape[0]), structure)(at) for rows in (X, sp.csr_array(X))
    )
    np.testing.assert_allclose(dense[0], sparse[0], rtol=1e-8)
    np.testing.assert_allclose(dense[1], sparse[1], rtol=1e-4, atol=1e-6)


@each_loss
def test_a_warm_start_ends_where_a_cold_one_does(name):
    for shape in ((60, 5), (12, 20), (400, 4)):
        X, y = draw(name, *shape)
        model, weights = RidgeGLM(X, y, LOSSES[name], tol=1e-14), folds(shape[0]).fitted
        first = model.fit(weights, np.zeros(shape[1]))
        for move in (0.3, 3.0):
            at = np.full(shape[1], move)
            np.testing.assert_allclose(model.fit(weights, at, first).coef, model.fit(weights, at).coef, atol=1e-6)


def test_wide_data_need_no_matrix_over_features(monkeypatch):
    X, y = draw("logistic", 10, 4000)
    sizes = []
    factor = ridge._factor
    monkeypatch.setattr(ridge, "_factor", lambda block, ridge: sizes.append(len(block)) or factor(block, ridge))
    Objective(RidgeGLM(X, y, Logistic()), folds(10), Structure("", np.arange(4000), 1.0))(np.full(4000, 5.0))
    assert max(sizes) == 11


def test_derivatives_of_predictors_are_finite_differences():
    for shape in ((50, 6), (12, 20)):
        X, y = draw("logistic", *shape)
        model, weights = RidgeGLM(X, y, Logistic(), tol=1e-16), folds(shape[0]).fitted
        at, move = np.zeros(shape[1]), np.linspace(-1, 1, shape[1])
        ahead, behind = (model.fit(weights, at + h * move).predictor for h in (1e-4, -1e-4))
        cotangent = np.random.default_rng(3).standard_normal(ahead.shape)  # of fitted rows too
        pulled = model.vjp(model.fit(weights, at), cotangent)
        np.testing.assert_allclose(pulled @ move, np.sum(cotangent * (ahead - behind) / 2e-4, axis=(1, 2)), rtol=1e-5)


def test_compression_is_exact_for_squared_errors():
    X, y = draw("squared", 200, 5)
    weights = np.random.default_rng(4).uniform(0.5, 2, 200)
    model, parts = RidgeGLM(X, y, Squared()), folds(200, 4, weights)
    problem = model.compress(parts, model.fit(parts.fitted, np.zeros(5)))
    assert len(problem.model.y) == 4 * 7
    structure, at = Structure("", np.arange(5), 1.0), np.linspace(-1, 3, 5)
    for few, many in ((problem.folds, parts), (problem.folds.without(np.array([1])), parts.without(np.array([1])))):
        expected = Objective(model, many, structure)(at)
        found = Objective(problem.model, few, structure)(at)
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-8)
        np.testing.assert_allclose(found[1], expected[1], rtol=1e-6, atol=1e-8)
    fits = problem.model.fit(problem.folds.fitted, at)
    np.testing.assert_allclose(problem.predict(fits), model.fit(parts.fitted, at).predictor, atol=1e-6)


@pytest.mark.parametrize("name", ["logistic", "softmax", "poisson"])
def test_compression_is_accurate_for_other_losses(name):
    X, y = draw(name, 2000, 5)
    model, parts = RidgeGLM(X, y, LOSSES[name]), folds(2000, 4)
    problem = model.compress(parts, model.fit(np.ones((1, 2000)), np.full(5, 2.0)))
    structure = Structure("single", np.zeros(5, int))
    values = [
        [Objective(of, on, structure).value(np.array([at])) for at in (1.5, 2.0, 2.5)]
        for of, on in ((model, parts), (problem.model, problem.folds))
    ]
    exact, about = (np.diff(part) for part in values)
    np.testing.assert_allclose(about, exact, rtol=0.2, atol=0.15)  # nats


def test_the_penalties_of_many_rows_are_stationary_for_the_exact_objective(monkeypatch):
    X, y = draw("logistic", 3000, 6)
    monkeypatch.setattr(ridge, "_MIN_COMPRESSIBLE", 0)
    model, parts = RidgeGLM(X, y, Logistic(), tol=1e-12), folds(3000, 5)
    search = PenaltySearch(model, parts, 3000, tol=1e-4, max_iter=100)
    assert search.compresses
    structure = Structure("per_feature", np.arange(6), 1.0)
    learned = search.refine(structure, np.full(6, search.find_single().log_penalties[0]))
    _, gradient = Objective(model, parts, structure)(learned.log_penalties)
    assert np.abs(gradient).max() < 0.005  # nats per unit of a log penalty


def test_compression_is_abandoned_if_it_is_inaccurate(monkeypatch):
    X, y = draw("logistic", 1500, 6)
    found = {}
    for name, entries, mismatch in (("exact", np.inf, 1.0), ("trusted", 0, 1.0), ("mistaken", 0, 0.0)):
        monkeypatch.setattr(ridge, "_MIN_COMPRESSIBLE", entries)
        monkeypatch.setattr(selection, "_MAX_MISMATCH", mismatch)
        search = PenaltySearch(RidgeGLM(X, y, Logistic()), folds(1500, 5), 1500, tol=1e-5, max_iter=100)
        found[name] = search.find_single().log_penalties[0]
        assert search.compresses == (name == "trusted")
    assert found["mistaken"] == pytest.approx(found["exact"], abs=0.03)
    assert found["trusted"] == pytest.approx(found["exact"], abs=0.1)
