"""Kernel ridge: fits agree with fits by features, and derivatives with finite differences."""

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.linear_model import Ridge
from sklearn.model_selection import KFold

from bilevel.estimators import BilevelRidge, linear_model
from bilevel.estimators.base import Groups
from bilevel.estimators.kernel_ridge import KernelRidge, reduce_targets
from bilevel.estimators.losses import Squared
from bilevel.estimators.ridge import RidgeGLM
from bilevel.estimators.selection import Folds, Objective, Structure

N, P, G = 20, 42, 3
GROUPS = Groups(np.arange(2, P), np.arange(P - 2) % G, np.arange(G))


def draw(targets, n=N, p=P, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, p))
    scale = np.where(np.arange(p) % G == 1, 3.0, 0.3)
    return X, X @ (scale[:, None] * rng.standard_normal((p, targets))) / np.sqrt(p) + rng.standard_normal((n, targets))


def folds(n=N, k=4):
    weights, number = np.random.default_rng(1).uniform(0.5, 2, n), np.arange(n) % k
    return Folds.of_rows(
        *(np.array([weights * keep(number, f) for f in range(k)]) for keep in (np.not_equal, np.equal))
    )


def make(X, y, intercept=True):
    return KernelRidge(X, y, GROUPS, intercept=intercept)


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("targets", [3, 50])
def test_objective_and_gradient_are_those_of_coefficients(targets, intercept):
    X, y = draw(targets)
    at, structure = np.array([0.3, -1.0, 2.0]), Structure("", np.arange(G), 1.0)
    glm = RidgeGLM(X, y, Squared(), penalized=GROUPS.penalized, intercept=intercept, tol=1e-16)
    tied = Structure("", GROUPS.numbers, 1.0)
    value, gradient = Objective(glm, folds(), tied)(at)
    for columns in (X, sp.csr_array(X)):
        objective = Objective(make(columns, y, intercept=intercept), folds(), structure)
        found = objective(at)
        assert found[0] == pytest.approx(value, rel=1e-8)
        np.testing.assert_allclose(found[1], gradient, rtol=1e-5, atol=1e-6)
    h = 1e-4
    differences = [(objective.value(at + h * e) - objective.value(at - h * e)) / (2 * h) for e in np.eye(G)]
    np.testing.assert_allclose(found[1], differences, rtol=1e-5)


@pytest.mark.parametrize("form", [np.asarray, sp.csr_array])
def test_coefficients_are_those_of_scikit_learn(form):
    X, y = draw(4)
    X[:, :2] = 0  # the columns without a penalty
    weights, log_penalties = np.random.default_rng(2).uniform(0.5, 2, N), np.array([0.3, 1.0, 2.0])
    factors = np.ones(P)
    factors[2:] = np.exp(-log_penalties / 2)[GROUPS.numbers]
    expected = Ridge(1.0, tol=1e-12).fit(X * factors, y, sample_weight=weights)
    coef, intercept = make(form(X), y).refit(weights, log_penalties)
    np.testing.assert_allclose(coef.T, expected.coef_ * factors, atol=1e-8)
    np.testing.assert_allclose(intercept, expected.intercept_, atol=1e-8)


def test_derivatives_of_predictors_are_finite_differences():
    model = make(*draw(5))
    weights, at, move = folds().fitted, np.zeros(G), np.array([1.0, -0.5, 0.2])
    ahead, behind = (model.fit(weights, at + h * move).predictor for h in (1e-4, -1e-4))
    cotangent = np.random.default_rng(3).standard_normal(ahead.shape)  # of fitted rows too
    pulled = model.vjp(model.fit(weights, at), cotangent)
    np.testing.assert_allclose(pulled @ move, np.sum(cotangent * (ahead - behind) / 2e-4, axis=(1, 2)), rtol=1e-5)


def test_targets_are_replaced_by_fewer_with_the_same_errors():
    _, y = draw(60)
    few = reduce_targets(y)
    assert few.shape == (N, N)
    np.testing.assert_allclose(few @ few.T, y @ y.T, atol=1e-8)
    sketches = [np.linalg.norm(make(draw(900, seed=k)[0], draw(900, seed=k)[1]).sketch(8).y) for k in range(20)]
    norms = [np.linalg.norm(draw(900, seed=k)[1]) for k in range(20)]
    assert np.mean(np.square(sketches)) == pytest.approx(np.mean(np.square(norms)), rel=0.05)


def test_kernels_and_features_learn_the_same_penalties(monkeypatch):
    X, y = draw(12, 60, 150)
    groups, options = np.arange(150) % G, {"structure": "per_group", "prior_scale": 1.0, "cv": KFold(3), "tol": 1e-3}
    X_new = draw(1, 30, 150, seed=9)[0]
    found = {}
    for name, most in (("features", 1000), ("kernels", 10)):
        monkeypatch.setattr(linear_model, "_MANY_TARGETS", most)
        found[name] = BilevelRidge(groups=groups, **options).fit(X, y)
    expected, model = found["features"], found["kernels"]
    np.testing.assert_allclose(np.log(model.penalties_), np.log(expected.penalties_), atol=0.02)
    np.testing.assert_allclose(model.predict(X_new), expected.predict(X_new), atol=0.02)
    assert expected.penalties_[1] < 0.2 * expected.penalties_[0]


def test_many_targets_distinguish_groups_by_default():
    X, y = draw(200, 60, 150)
    model = BilevelRidge(groups=np.arange(150) % G, cv=KFold(5)).fit(X, y)
    assert model.penalty_structure_ == "per_group"
    assert model.penalties_[1] < 0.1 * model.penalties_[0]
    assert model.coef_.shape == (200, 150)
    np.testing.assert_allclose(X @ model.coef_.T + model.intercept_, model.predict(X))
