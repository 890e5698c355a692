"""Effects of a fit: attributes change completely or not at all, and weights are equivalent to repeated rows."""

import copy

import numpy as np
import pytest
from sklearn.exceptions import NotFittedError
from sklearn.feature_selection import SelectFromModel
from sklearn.model_selection import GroupKFold, LeaveOneGroupOut, StratifiedGroupKFold

from bilevel.estimators import (
    BilevelCoxPH,
    BilevelElasticNet,
    BilevelLogisticRegression,
    BilevelRidge,
    BilevelSparseLogisticRegression,
    DataCleaningClassifier,
)
from bilevel.estimators.selection import Scaling

RNG = np.random.default_rng(5)
X = RNG.standard_normal((48, 4))
Y = (X[:, 0] + 0.5 * RNG.standard_normal(48) > 0).astype(int)
SURVIVAL = np.array(list(zip(Y == 1, RNG.exponential(size=48), strict=True)), [("event", bool), ("time", float)])
TARGETS = {
    BilevelLogisticRegression: Y,
    BilevelSparseLogisticRegression: Y,
    BilevelRidge: X[:, 1],
    BilevelElasticNet: X[:, 1] + X[:, 2],
    BilevelCoxPH: SURVIVAL,
    DataCleaningClassifier: Y,
}
each = pytest.mark.parametrize("kind", TARGETS, ids=lambda kind: kind.__name__)
pytestmark = pytest.mark.filterwarnings("ignore:No trusted rows")


def make(kind):
    return kind(random_state=0) if kind is DataCleaningClassifier else kind("single", cv=2, random_state=0)


@each
@pytest.mark.parametrize("place", ["transform", "unscale"])
def test_an_interrupted_fit_leaves_the_estimator_unchanged(kind, place, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    fitted, fresh = make(kind).fit(X, TARGETS[kind]), make(kind)
    before, expected = copy.deepcopy(vars(fitted)), fitted.predict(X)
    monkeypatch.setattr(Scaling, place, interrupt)
    for model in (fitted, fresh):
        with pytest.raises(KeyboardInterrupt):
            model.fit(X[:40, :3], TARGETS[kind][:40])
    assert vars(fitted).keys() == before.keys() and fitted.n_features_in_ == 4
    np.testing.assert_array_equal(fitted.predict(X), expected)
    with pytest.raises(NotFittedError):
        fresh.predict(X)


@each
def test_a_rejected_refit_leaves_the_estimator_unchanged(kind):
    model = make(kind).fit(X, TARGETS[kind])
    expected = model.predict(X)
    with pytest.raises(ValueError, match="NaN"):
        model.fit(np.full((48, 3), np.nan), TARGETS[kind])
    assert model.n_features_in_ == 4
    np.testing.assert_array_equal(model.predict(X), expected)


@pytest.mark.parametrize("cv", [GroupKFold(3), StratifiedGroupKFold(3), LeaveOneGroupOut()], ids=str)
def test_splitters_of_groups_name_the_argument_that_they_need(cv):
    model = BilevelLogisticRegression("single", cv=cv)
    with pytest.raises(ValueError, match=r"`cv=.*Group.*` needs the group of each row; pass .* as `cv_groups`"):
        model.fit(X, Y)
    assert model.fit(X, Y, cv_groups=np.arange(48) % 6).coef_.shape == (1, 4)
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        model.fit(X, Y, cv_groups=np.arange(47) % 6)


def test_ignored_groups_of_rows_cause_a_warning():
    with pytest.warns(UserWarning, match=r"`cv_groups` is ignored by cv=2, .*; set cv=GroupKFold\(2\)"):
        BilevelRidge("single", cv=2).fit(X, X[:, 0], cv_groups=np.arange(48) % 6)


def test_select_from_model_takes_features_with_nonzero_coefficients():
    columns = np.random.default_rng(8).standard_normal((60, 7))
    for y, most in ((np.full(60, 1.5), 0), (3 * columns[:, 2] + columns[:, 5], 7)):
        selector = SelectFromModel(BilevelElasticNet(random_state=0)).fit(columns, y)
        np.testing.assert_array_equal(selector.get_support(), selector.estimator_.coef_ != 0)
        assert selector.get_support()[[2, 5]].sum() == min(most, 2) and selector.get_support().sum() <= most
    labels = SelectFromModel(BilevelSparseLogisticRegression(random_state=0)).fit(X, Y)
    np.testing.assert_array_equal(labels.get_support(), labels.estimator_.coef_[0] != 0)


def draw_noisy(rows=120, seed=3):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 3, rows)
    features = rng.standard_normal((rows, 5)) + 2.5 * np.eye(3, 5)[y]
    return features, np.where(rng.random(rows) < 0.2, (y + 1) % 3, y)


@pytest.mark.parametrize("trusted", [False, True])
def test_weights_of_noisy_labels_stand_for_repeated_rows(trusted):
    features, y = draw_noisy()
    weights = np.random.default_rng(4).integers(0, 4, 120)
    fold, again = np.arange(120) % 3, np.repeat(np.arange(120), weights)
    extra = (features[:9] + 0.1, np.arange(9) % 3) if trusted else ()
    fold_val = np.arange(9 if trusted else 0) % 3

    def split(numbers):
        numbers = np.append(numbers, fold_val)
        return [(np.flatnonzero(numbers != k), np.flatnonzero(numbers == k)) for k in range(3)]

    weighted = DataCleaningClassifier(cv=split(fold)).fit(features, y, *extra, sample_weight=weights)
    repeated = DataCleaningClassifier(cv=split(fold[again])).fit(features[again], y[again], *extra)
    np.testing.assert_allclose(weighted.history_, repeated.history_, rtol=1e-4)
    np.testing.assert_allclose(weighted.noise_matrix_, repeated.noise_matrix_, atol=1e-3)
    np.testing.assert_allclose(weighted.sample_weights_[again], repeated.sample_weights_, atol=2e-3)
    np.testing.assert_allclose(weighted.predict_proba(features), repeated.predict_proba(features), atol=2e-3)


def test_weights_of_one_change_nothing_and_rows_without_weight_get_a_probability():
    features, y = draw_noisy()
    plain = DataCleaningClassifier(random_state=0).fit(features, y)
    same = DataCleaningClassifier(random_state=0).fit(features, y, sample_weight=np.ones(120))
    np.testing.assert_array_equal(plain.sample_weights_, same.sample_weights_)
    features, labels = np.vstack([features, 50 * features[:20]]), np.append(y, (y[:20] + 1) % 3)
    more = DataCleaningClassifier(random_state=0).fit(features, labels, sample_weight=np.repeat([1.0, 0.0], [120, 20]))
    np.testing.assert_allclose(more.coef_, plain.coef_, rtol=1e-6)
    np.testing.assert_allclose(more.sample_weights_[:120], plain.sample_weights_, rtol=1e-6)
    assert more.sample_weights_.shape == (140,) and len(more.suspicious_) == 140


def test_folds_of_noisy_labels_hold_out_each_row_once():
    features, y = draw_noisy()
    with pytest.raises(ValueError, match="must hold out each row once"):
        DataCleaningClassifier(cv=[(np.arange(60), np.arange(60, 110))]).fit(features, y)
