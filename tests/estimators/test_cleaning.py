"""Weights of rows: wrong labels are found, and the fit is better for it."""

import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from bilevel.estimators import DataCleaningClassifier


@pytest.fixture(scope="module")
def noisy():
    """900 digits of which 40 % have a label drawn at random, 300 that are right, and the rest to test on."""
    X, y = load_digits(return_X_y=True)
    rng = np.random.default_rng(0)
    order = rng.permutation(len(y))
    train, val, test = np.split(order, [900, 1200])
    told = np.where(rng.random(900) < 0.4, rng.integers(0, 10, 900), y[train])
    return X, y, train, val, test, told


@pytest.fixture(scope="module")
def fitted(noisy):
    X, y, train, val, _, told = noisy
    return DataCleaningClassifier(random_state=0).fit(X[train], told, X[val], y[val])


def test_wrong_labels_get_small_weights(noisy, fitted):
    _, y, train, _, _, told = noisy
    assert roc_auc_score(told == y[train], fitted.sample_weights_) > 0.93
    wrong = np.flatnonzero(told != y[train])
    assert np.isin(fitted.suspicious_[:200], wrong).mean() > 0.9


def test_the_fit_is_better_than_on_the_rows_as_they_are_and_than_on_the_trusted_ones_alone(noisy, fitted):
    X, y, train, val, test, told = noisy
    errors = {"cleaned": 1 - fitted.score(X[test], y[test])}
    for name, rows, labels in (("as they are", train, told), ("trusted alone", val, y[val])):
        baselines = (
            make_pipeline(StandardScaler(), LogisticRegression(C=C, max_iter=5000)) for C in 10.0 ** np.arange(-3, 2)
        )
        errors[name] = min(1 - baseline.fit(X[rows], labels).score(X[test], y[test]) for baseline in baselines)
    assert errors["cleaned"] < min(errors["as they are"], errors["trusted alone"])


def test_rows_are_ranked_from_the_least_trusted(fitted):
    weights = fitted.sample_weights_
    assert np.all(np.diff(weights[fitted.suspicious_]) >= 0)
    assert weights.shape == (900,) and weights.min() > 0 and weights.max() < 1
    assert fitted.held_out_.size == 0


def test_the_model_minimizes_the_weighted_loss(noisy, fitted):
    X, _, train, _, test, told = noisy
    scaler = StandardScaler().fit(X[train])
    # scikit-learn: sum weight loss + ||coef||² / 2C, so C = 1 / (2 n regularization); our intercept counts a little.
    baseline = LogisticRegression(C=1 / (2 * 900 * fitted.regularization), max_iter=9999, tol=1e-9)
    baseline.fit(scaler.transform(X[train]), told, sample_weight=fitted.sample_weights_)
    expected = baseline.predict_proba(scaler.transform(X[test]))
    np.testing.assert_allclose(fitted.predict_proba(X[test]), expected, atol=0.01)


def test_held_out_rows_count_fully_and_are_not_suspected(noisy):
    X, _, train, _, _, told = noisy
    model = DataCleaningClassifier(random_state=0, max_iter=50, tol=1.0).fit(X[train], told)
    assert len(model.held_out_) == 225 and np.all(model.sample_weights_[model.held_out_] == 1)
    assert set(model.held_out_) | set(model.suspicious_) == set(range(900))
    assert not set(model.held_out_) & set(model.suspicious_)


def test_two_classes_have_one_score():
    X, y = load_digits(n_class=2, return_X_y=True)
    model = DataCleaningClassifier(random_state=0, max_iter=100, tol=0.05).fit(X, np.array(["zero", "one"])[y])
    assert model.coef_.shape == (1, 64) and model.decision_function(X).shape == (len(X),)
    assert model.score(X, np.array(["zero", "one"])[y]) > 0.97
