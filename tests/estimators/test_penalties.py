"""Learned penalties: the model that is kept is the one they define, and they are good ones."""

import numpy as np
import pytest
from scipy.optimize import minimize
from sklearn.datasets import load_breast_cancer, load_diabetes, load_wine, make_regression
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import log_loss
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import bilevel
from bilevel.estimators import BilevelLogisticRegression, BilevelRidge

FREE = 1e-6  # what an intercept is penalized by


@pytest.fixture(scope="module")
def cancer():
    X, y = load_breast_cancer(return_X_y=True)
    return train_test_split(X[:, :6], y, random_state=0)


@pytest.fixture(scope="module")
def half_useless(cancer):
    """The same features, and each once more in a random order of the rows."""
    X, X_test, y, y_test = cancer
    rng = np.random.default_rng(0)
    return *(np.column_stack([part, rng.permuted(part, axis=0)]) for part in (X, X_test)), y, y_test


@pytest.fixture(scope="module")
def fitted(cancer):
    X, _, y, _ = cancer
    return BilevelLogisticRegression(random_state=0, max_iter=500, tol=0.05).fit(X, y)


def penalized(X, y, penalty, loss):
    """Minimize mean loss + ½ sum penalty coef² in SciPy, without any of our code."""
    X = np.column_stack([X, np.ones(len(X))])
    penalty = np.append(penalty, FREE)

    def value_and_grad(z):
        value, slope = loss(X @ z, y)
        return value.mean() + penalty @ z**2 / 2, X.T @ slope / len(y) + penalty * z

    found = minimize(value_and_grad, np.zeros(X.shape[1]), jac=True, tol=1e-12, options={"gtol": 1e-9, "maxiter": 9999})
    return found.x[:-1], found.x[-1]


def logistic(scores, y):
    return np.logaddexp(0, -y * scores), -y / (1 + np.exp(y * scores))


def squared(scores, y):
    return (scores - y) ** 2 / 2, scores - y


def test_the_model_minimises_the_penalised_loss_on_all_rows(cancer, fitted):
    X, X_test, y, _ = cancer
    # Penalties act on features scaled as the training rows of the split are.
    train, _ = split_of(fitted, y)
    scaler = StandardScaler().fit(X[train])
    coef, intercept = penalized(scaler.transform(X), 2 * y - 1, fitted.penalty_, logistic)
    scores = scaler.transform(X_test) @ coef + intercept
    np.testing.assert_allclose(fitted.decision_function(X_test), scores, atol=1e-3, rtol=1e-4)


def split_of(estimator, y):
    from bilevel.estimators.base import draw_seed

    seed = draw_seed(estimator.random_state)
    parts = train_test_split(np.arange(len(y)), test_size=estimator.validation_fraction, random_state=seed, stratify=y)
    return (np.sort(part) for part in parts)


def test_without_refit_the_model_is_of_the_training_rows(cancer):
    X, X_test, y, _ = cancer
    model = BilevelLogisticRegression("single", random_state=1, refit=False, max_iter=200, tol=0.1).fit(X, y)
    train, _ = split_of(model, y)
    scaler = StandardScaler().fit(X[train])
    coef, intercept = penalized(scaler.transform(X[train]), 2 * y[train] - 1, model.penalty_, logistic)
    scores = scaler.transform(X_test) @ coef + intercept
    np.testing.assert_allclose(model.decision_function(X_test), scores, atol=1e-3, rtol=1e-4)


def test_a_single_penalty_is_as_good_as_the_best_of_a_fine_grid(cancer):
    X, _, y, _ = cancer
    X, X_val, y, y_val = train_test_split(X, y, random_state=2, stratify=y)
    model = BilevelLogisticRegression("single", random_state=0, tol=1e-3).fit(X, y, X_val, y_val)
    assert np.ptp(model.penalty_) == 0
    scaler = StandardScaler().fit(X)
    losses = []
    for penalty in np.geomspace(1e-5, 1, 60):
        rival = LogisticRegression(C=1 / (len(y) * penalty), solver="newton-cholesky", tol=1e-8).fit(
            scaler.transform(X), y
        )
        losses.append(log_loss(y_val, rival.predict_proba(scaler.transform(X_val))))
    assert model.history_["value"].min() <= min(losses) + 1e-4


def test_a_penalty_per_feature_is_better_on_validation_rows_than_one_for_all(half_useless):
    X, X_val, y, y_val = half_useless
    losses = {
        penalty: BilevelLogisticRegression(penalty, random_state=0).fit(X, y, X_val, y_val).history_["value"].min()
        for penalty in ("single", "per_feature")
    }
    assert losses["per_feature"] < losses["single"] - 1e-3


def test_penalties_are_shrunk_as_far_as_the_exchanged_rows_say(half_useless):
    X, _, y, _ = half_useless
    X, y = X[:150], y[:150]
    shrunk, learned = (BilevelLogisticRegression(random_state=3, shrink=shrink).fit(X, y) for shrink in (True, False))
    assert learned.shrinkage_ == 0 and shrunk.shrinkage_ in (0.25, 0.5, 0.75)
    part, ends = shrunk.shrinkage_, np.log(learned.penalty_)
    singles = (np.log(shrunk.penalty_) - (1 - part) * ends) / part
    np.testing.assert_allclose(singles, singles[0], rtol=1e-5)
    assert np.exp(singles[0]) == pytest.approx(10 ** np.round(singles[0] / np.log(10)), rel=1e-4)
    train, held_out = split_of(shrunk, y)
    scaled, signs, losses = StandardScaler().fit(X[train]).transform(X), 2 * y - 1, {}
    for back in np.linspace(0, 1, 5):
        penalty = np.exp((1 - back) * ends + back * singles)
        coef, intercept = penalized(scaled[held_out], signs[held_out], penalty, logistic)
        losses[back] = logistic(scaled[train] @ coef + intercept, signs[train])[0].mean()
    assert min(losses, key=losses.get) == part


def test_validation_rows_that_lack_a_class_cannot_take_the_place_of_training_rows(half_useless):
    X, X_val, y, y_val = half_useless
    one_class = y_val == 1
    model = BilevelLogisticRegression(random_state=0, max_iter=50, tol=0.1).fit(
        X, y, X_val[one_class], y_val[one_class]
    )
    assert model.shrinkage_ == 0


def test_features_of_a_group_share_a_penalty(half_useless):
    X, _, y, _ = half_useless
    groups = np.array(["measured", "shuffled"]).repeat(6)
    model = BilevelLogisticRegression("per_group", groups=groups, random_state=0).fit(X, y)
    (measured,), (shuffled,) = (set(model.penalty_[groups == group]) for group in ("measured", "shuffled"))
    assert shuffled > 10 * measured


@pytest.mark.parametrize("seed", range(3))
def test_useful_features_get_small_penalties(seed):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((800, 40))
    y = np.where(rng.random(800) < 1 / (1 + np.exp(-2 * X[:, 0] + 2 * X[:, 1])), "yes", "no")
    model = BilevelLogisticRegression(random_state=0).fit(X, y)
    assert model.penalty_[:2].max() < np.median(model.penalty_[2:]) / 3


def test_scales_of_features_make_no_difference(cancer, fitted):
    X, X_test, y, _ = cancer
    scales, shifts = 10.0 ** np.array([-6, 3, 0, 5, -2, 1]), np.array([0, 1, -5, 0, 2, 0])
    moved = BilevelLogisticRegression(random_state=0, max_iter=500, tol=0.05).fit(X * scales + shifts, y)
    np.testing.assert_allclose(moved.penalty_, fitted.penalty_, rtol=0.05)
    chances = moved.predict_proba(X_test * scales + shifts)
    np.testing.assert_allclose(chances, fitted.predict_proba(X_test), atol=0.01)


def test_probabilities_and_scores_agree(cancer, fitted):
    X_test = cancer[1]
    chances = fitted.predict_proba(X_test)
    np.testing.assert_allclose(chances.sum(axis=1), 1)
    np.testing.assert_allclose(np.log(chances), fitted.predict_log_proba(X_test), atol=1e-12)
    np.testing.assert_array_equal(fitted.predict(X_test), fitted.classes_[chances.argmax(axis=1)])


def test_more_than_two_classes_are_fitted_by_softmax():
    X, number = load_wine(return_X_y=True)
    y = np.array(["barbera", "barolo", "grignolino"])[number]
    X, X_test, y, y_test = train_test_split(X, y, random_state=0, stratify=y)
    model = BilevelLogisticRegression("single", random_state=0, refit=False, max_iter=300, tol=0.1).fit(X, y)
    assert model.coef_.shape == (3, 13) and model.intercept_.shape == (3,)
    train, _ = split_of(model, y)
    scaler = StandardScaler().fit(X[train])
    rival = LogisticRegression(C=1 / (len(train) * model.penalty_[0]), max_iter=9999, tol=1e-10)
    rival.fit(scaler.transform(X[train]), y[train])
    np.testing.assert_allclose(model.predict_proba(X_test), rival.predict_proba(scaler.transform(X_test)), atol=1e-3)
    assert model.score(X_test, y_test) > 0.9


def test_ridge_is_the_penalised_least_squares_fit_of_its_penalties():
    X, y = load_diabetes(return_X_y=True)
    X, X_val, y, y_val = train_test_split(X, y, random_state=0)
    model = BilevelRidge(random_state=0, refit=False).fit(X, y, X_val, y_val)
    scaler = StandardScaler().fit(X)
    target = (y - y.mean()) / y.std()
    coef, intercept = penalized(scaler.transform(X), target, model.penalty_, squared)
    predicted = (scaler.transform(X_val) @ coef + intercept) * y.std() + y.mean()
    np.testing.assert_allclose(model.predict(X_val), predicted, rtol=1e-4)
    error = np.mean((model.predict(X_val) - y_val) ** 2) / y.var() / 2
    np.testing.assert_allclose(error, model.history_["value"].min(), rtol=1e-4)


def test_a_single_ridge_penalty_is_as_good_as_the_best_of_a_fine_grid():
    X, y = make_regression(200, 80, n_informative=10, noise=50.0, random_state=0)
    X, X_val, y, y_val = train_test_split(X, y, random_state=0)
    model = BilevelRidge("single", random_state=0, refit=False, tol=1e-3).fit(X, y, X_val, y_val)
    scaler = StandardScaler().fit(X)
    errors = [
        np.mean((Ridge(alpha=len(y) * a).fit(scaler.transform(X), y).predict(scaler.transform(X_val)) - y_val) ** 2)
        for a in np.geomspace(1e-5, 10, 80)
    ]
    assert np.mean((model.predict(X_val) - y_val) ** 2) <= min(errors) * 1.001


def test_a_ridge_penalty_per_feature_finds_the_useful_ones():
    X, y, coef = make_regression(1000, 60, n_informative=6, noise=100.0, coef=True, random_state=1)
    one, each = (BilevelRidge(penalty, random_state=0).fit(X, y) for penalty in ("single", "per_feature"))
    assert each.history_["value"].min() < 0.99 * one.history_["value"].min()
    assert np.median(each.penalty_[coef == 0]) > 10 * np.median(each.penalty_[coef != 0])


def test_it_works_in_a_pipeline_and_in_a_grid_search(cancer):
    X, X_test, y, y_test = cancer
    pipeline = make_pipeline(StandardScaler(), BilevelLogisticRegression(max_iter=50, tol=1.0, random_state=0))
    parameters = {"bilevellogisticregression__penalty": ["single", "per_feature"]}
    search = GridSearchCV(pipeline, parameters, cv=2).fit(X, y)
    assert search.best_estimator_.score(X_test, y_test) > 0.85


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_another_solver_may_be_given(half_useless):
    X, X_val, y, y_val = half_useless
    solver = bilevel.HOAG()
    model = BilevelLogisticRegression(solver=solver, max_iter=20, random_state=0).fit(X, y, X_val, y_val)
    assert model.history_["value"][-1] < model.history_["value"][0]
    assert model.n_iter_ <= 20


def test_the_same_seed_gives_the_same_model_and_another_one_another(cancer):
    X, _, y, _ = cancer
    models = [BilevelLogisticRegression(random_state=seed, max_iter=100, tol=0.05).fit(X, y) for seed in (0, 0, 1)]
    np.testing.assert_array_equal(models[0].coef_, models[1].coef_)
    assert not np.allclose(models[0].coef_, models[2].coef_)


def test_the_run_is_told(cancer, fitted):
    assert fitted.status_ == "converged" and 1 <= fitted.n_iter_ <= 500
    assert fitted.n_calls_ == fitted.history_["calls"][-1]
    assert {"step", "seconds", "calls", "value", "hypergrad_norm_sq"} <= set(fitted.history_)
    assert fitted.history_["hypergrad_norm_sq"][-1] <= (0.05 * fitted.history_["value"][0]) ** 2
