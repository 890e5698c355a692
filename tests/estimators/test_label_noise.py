"""Label noise: formulas agree with enumerations, wrong labels are found, and the fit improves."""

import itertools

import numpy as np
import pytest
from scipy.optimize import check_grad
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import StratifiedKFold, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from bilevel.estimators import DataCleaningClassifier
from bilevel.estimators.label_noise import (
    compute_posterior,
    count_confident,
    estimate_noise,
    noisy_softmax_loss,
    uniform_noise,
)

ALONE = "ignore:No trusted rows"
RNG = np.random.default_rng(0)
MATRIX = np.array([[0.7, 0.2, 0.1], [0.0, 0.9, 0.1], [0.3, 0.1, 0.6]])


def corrupt(y, rate, rng):
    """Labels of digits, any other instead of some of them."""
    return np.where(rng.random(len(y)) < rate, (y + rng.integers(1, 10, len(y))) % 10, y)


@pytest.fixture(scope="module")
def noisy():
    """900 digits of which 20 % have a wrong label, 300 that are right, and the rest to test on."""
    X, y = load_digits(return_X_y=True)
    rng = np.random.default_rng(0)
    train, val, test = np.split(rng.permutation(len(y)), [900, 1200])
    return X, y, train, val, test, corrupt(y[train], 0.2, rng)


@pytest.fixture(scope="module")
def fitted(noisy):
    X, _, train, _, _, told = noisy
    with pytest.warns(UserWarning, match="No trusted rows .* are given"):
        return DataCleaningClassifier(random_state=0).fit(X[train], told)


@pytest.fixture(scope="module")
def fitted_with_trusted(noisy):
    X, y, train, val, _, told = noisy
    return DataCleaningClassifier(random_state=0).fit(X[train], told, X[val], y[val])


def test_posterior_and_likelihood_are_those_of_an_enumeration():
    p, labels = RNG.dirichlet(np.ones(3), 5), np.array([0, 1, 2, 1, 0])
    posterior, logs = compute_posterior(p, MATRIX[:, labels].T)
    for i, label in enumerate(labels):
        worlds = {(t, s): p[i, t] * MATRIX[t, s] for t, s in itertools.product(range(3), repeat=2)}
        seen = sum(weight for (_, s), weight in worlds.items() if s == label)
        assert np.isclose(logs[i], np.log(seen))
        np.testing.assert_allclose(posterior[i], [worlds[t, label] / seen for t in range(3)])


def test_confident_counts_are_those_of_a_loop():
    p, labels = RNG.dirichlet(np.ones(3), 40), RNG.integers(0, 3, 40)
    threshold = [np.mean([p[i, c] for i in range(40) if labels[i] == c]) for c in range(3)]
    counts = np.eye(3)
    for i in range(40):
        if above := [c for c in range(3) if p[i, c] >= threshold[c]]:
            counts[max(above, key=lambda c: p[i, c]), labels[i]] += 1
    joint = np.array([[counts[t, s] / sum(counts[:, s]) * sum(labels == s) for s in range(3)] for t in range(3)])
    np.testing.assert_allclose(count_confident(p, labels, np.ones(40)), [row / sum(row) for row in joint])


def test_the_noise_matrix_is_found_where_classes_are_known_well():
    true = RNG.integers(0, 3, 20_000)
    labels = (RNG.random((20_000, 1)) > MATRIX[true].cumsum(axis=1)).sum(axis=1)
    p = 0.97 * np.eye(3)[true] + 0.01
    np.testing.assert_allclose(estimate_noise(p, labels, uniform_noise(0.8, 3), np.ones(20_000)), MATRIX, atol=0.03)


def test_a_step_of_the_noise_matrix_does_not_decrease_the_likelihood():
    p, labels = RNG.dirichlet(0.3 * np.ones(3), 3000), RNG.integers(0, 3, 3000)
    matrix, last = uniform_noise(0.9, 3), -np.inf
    for _ in range(3):
        likelihood = compute_posterior(p, matrix[:, labels].T)[1].sum()
        assert likelihood > last - 1e-3  # of the prior, which is 3 rows in 1000
        matrix, last = estimate_noise(p, labels, matrix, np.ones(3000)), likelihood


def test_the_slope_of_the_loss_is_that_of_differences():
    evidence, weights = MATRIX[:, RNG.integers(0, 3, 6)], RNG.random(6)

    def loss(flat):
        return noisy_softmax_loss(flat.reshape(3, 6), evidence, weights)

    scores = RNG.standard_normal(18)
    assert check_grad(lambda flat: loss(flat)[0], lambda flat: loss(flat)[1].ravel(), scores) < 1e-6


def test_wrong_labels_are_found_at_least_as_well_as_by_confidence_out_of_fold(noisy, fitted):
    X, y, train, _, _, told = noisy
    found, folds = [], StratifiedKFold(5, shuffle=True, random_state=0)
    for C in (0.01, 0.1, 1.0):  # the best of them, which only the wrong labels reveal
        model = make_pipeline(StandardScaler(), LogisticRegression(C=C, max_iter=300))
        p = cross_val_predict(model, X[train], told, cv=folds, method="predict_proba")
        found.append(roc_auc_score(told == y[train], p[np.arange(900), told]))
    assert roc_auc_score(told == y[train], fitted.sample_weights_) > max(found) - 0.002
    assert found[-1] > 0.9


def test_classes_mistaken_for_their_neighbor_are_found_where_confidence_fails():
    X, y = load_digits(n_class=5, return_X_y=True)
    told = np.where(np.random.default_rng(0).random(len(y)) < 0.4, (y + 1) % 5, y)
    with pytest.warns(UserWarning, match="No trusted rows"):
        model = DataCleaningClassifier(random_state=0).fit(X, told)
    assert roc_auc_score(told == y, model.sample_weights_) > 0.98
    np.testing.assert_allclose(model.noise_matrix_, 0.6 * np.eye(5) + 0.4 * np.roll(np.eye(5), 1, axis=1), atol=0.1)


def test_the_fit_is_better_than_without_cleaning(noisy, fitted, fitted_with_trusted):
    X, y, train, _, test, told = noisy
    baselines = (make_pipeline(StandardScaler(), LogisticRegression(C=C, max_iter=300)) for C in (0.01, 0.1))
    best = max(model.fit(X[train], told).score(X[test], y[test]) for model in baselines)
    assert fitted.score(X[test], y[test]) >= best
    assert fitted_with_trusted.score(X[test], y[test]) >= best


def test_trusted_rows_help_to_find_wrong_labels(noisy, fitted, fitted_with_trusted):
    _, y, train, _, _, told = noisy
    alone, helped = (roc_auc_score(told == y[train], m.sample_weights_) for m in (fitted, fitted_with_trusted))
    assert helped > alone - 1e-3 and helped > 0.99


def test_rows_are_ranked_from_the_least_trusted(fitted, fitted_with_trusted):
    for model in (fitted, fitted_with_trusted):
        weights = model.sample_weights_
        assert np.all(np.diff(weights[model.suspicious_]) >= -1e-12)
        assert sorted(model.suspicious_) == list(range(900)) and weights.min() >= 0 and weights.max() <= 1
        assert len(model.history_) == model.n_iter_ + 1


def test_the_model_minimizes_the_weighted_loss(noisy, fitted):
    X, _, train, _, test, told = noisy
    scaler = StandardScaler().fit(X[train])
    baseline = LogisticRegression(C=1 / fitted.penalty_, max_iter=9999, tol=1e-9)
    baseline.fit(scaler.transform(X[train]), told, sample_weight=fitted.sample_weights_)
    expected = baseline.predict_proba(scaler.transform(X[test]))
    np.testing.assert_allclose(fitted.predict_proba(X[test]), expected, atol=2e-3)


@pytest.mark.filterwarnings(ALONE)
def test_the_same_seed_gives_the_same_weights(noisy):
    X, _, train, _, _, told = noisy
    rows = train[:200]
    one, again, other = (DataCleaningClassifier(random_state=seed).fit(X[rows], told[:200]) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one.sample_weights_, again.sample_weights_)
    assert not np.array_equal(one.sample_weights_, other.sample_weights_)


@pytest.mark.filterwarnings(ALONE)
def test_two_classes_have_one_score():
    X, y = load_digits(n_class=2, return_X_y=True)
    model = DataCleaningClassifier(random_state=0).fit(X, np.array(["zero", "one"])[y])
    assert model.coef_.shape == (1, 64) and model.decision_function(X).shape == (len(X),)
    assert model.score(X, np.array(["zero", "one"])[y]) > 0.97
