"""Invalid input is rejected with the messages of scikit-learn, and unusual data are fitted."""

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.datasets import make_classification
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.model_selection import LeaveOneOut, ShuffleSplit

from bilevel.estimators import (
    BilevelGammaRegressor,
    BilevelHuberRegressor,
    BilevelLogisticRegression,
    BilevelPoissonRegressor,
    BilevelRidge,
    DataCleaningClassifier,
)

X, Y = make_classification(60, 5, random_state=0)
pytestmark = pytest.mark.filterwarnings("ignore:No trusted rows")
QUICK = {"max_iter": 20, "tol": 1.0, "random_state": 0}
ALL = [BilevelLogisticRegression, BilevelRidge, DataCleaningClassifier]
CLASSIFIERS = [BilevelLogisticRegression, DataCleaningClassifier]
each = pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
each_classifier = pytest.mark.parametrize("kind", CLASSIFIERS, ids=lambda kind: kind.__name__)


@each_classifier
def test_a_single_class_is_rejected(kind):
    with pytest.raises(ValueError, match=r"at least 2 classes in y, but there is only one class: np.int64\(1\)"):
        kind(**QUICK).fit(X, np.ones(60, int))


@each
def test_nan_is_refused(kind):
    with pytest.raises(ValueError, match="Input X contains NaN"):
        kind(**QUICK).fit(np.where(X > 2, np.nan, X), Y)
    with pytest.raises(ValueError, match="Input X contains infinity"):
        kind(**QUICK).fit(np.where(X > 2, np.inf, X), Y)


@each
def test_masked_entries_are_rejected(kind):
    hidden, shown = np.ma.masked_greater(X, 2.0), np.ma.array(Y, mask=np.arange(60) == 5)
    for rows, target in ((hidden, Y), (X, shown)):
        with pytest.raises(ValueError, match="has masked values; remove or impute"):
            kind(**QUICK).fit(rows, target)
    with pytest.raises(ValueError, match="`X_val` has masked values"):
        kind(**QUICK).fit(X, Y, X_val=hidden, y_val=Y)
    with pytest.raises(ValueError, match="`X` has masked values"):
        kind(**QUICK).fit(X, Y).predict(hidden)


@each
def test_nan_in_validation_rows_is_refused(kind):
    with pytest.raises(ValueError, match="Input X contains NaN"):
        kind(**QUICK).fit(X, Y, X_val=np.full((4, 5), np.nan), y_val=Y[:4])


def test_a_constant_target_gives_a_constant_model():
    model = BilevelRidge(**QUICK).fit(X, np.full(60, 3.5))
    np.testing.assert_allclose(model.predict(X), 3.5)
    assert np.all(model.coef_ == 0)


def test_weights_of_rows_are_checked():
    for weights, message in (
        (-np.ones(60), "Negative values in data passed to `sample_weight`"),
        (np.zeros(60), "zero"),
        (np.ones(59), r"`sample_weight` has shape \(59,\); it must be \(60,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            BilevelRidge().fit(X, Y, sample_weight=weights)
        with pytest.raises(ValueError, match=message):
            DataCleaningClassifier().fit(X, Y, sample_weight=weights)
    for kind in CLASSIFIERS:
        with pytest.raises(ValueError, match="rows of one class only; at least two classes need weight"):
            kind().fit(X, Y, sample_weight=Y)
    with pytest.raises(ValueError, match=r"`sample_weight` has a weight of 1e\+200, where 2 means the same as"):
        BilevelGammaRegressor().fit(X, np.exp(X[:, 0]), sample_weight=1e200)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"tol": -1.0}, r"The 'tol' parameter of .* must be a float in the range \[0.0, inf\). Got -1.0 instead."),
        ({"tol": "small"}, "'tol' parameter"),
        ({"max_iter": 0}, r"The 'max_iter' parameter of .* must be an int in the range \[1, inf\). Got 0 instead."),
        ({"max_iter": 2.5}, "'max_iter' parameter"),
        ({"fit_intercept": "yes"}, "The 'fit_intercept' parameter of .* must be an instance of 'bool'"),
        ({"standardize": None}, "'standardize' parameter"),
    ],
)
@each
def test_an_invalid_parameter_is_rejected(kind, parameters, message):
    with pytest.raises(ValueError, match=message):
        kind(**parameters).fit(X, Y)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (BilevelLogisticRegression("l2"), "The 'structure' parameter of BilevelLogisticRegression must be a str among"),
        (BilevelLogisticRegression("per_group"), "`structure='per_group'` needs `groups`"),
        (BilevelRidge("per_group", groups=[0, 1]), r"group of each of the 5 features, got 2"),
        (BilevelRidge(prior_scale=0), "'prior_scale' parameter of BilevelRidge must be 'auto' or a float from 1e-100"),
        (BilevelRidge(prior_scale="wide"), "'prior_scale' parameter"),
        (BilevelRidge(prior_scale=1e155), "'prior_scale' parameter"),
        (BilevelRidge(cv=[[9, 8]]), "`cv` must hold pairs of arrays of row numbers. Got 9"),
        (BilevelRidge(cv=1), "`cv=1`: must be at least 2, a splitter of scikit-learn, or an iterable of splits"),
        (BilevelRidge(cv=[([], [0])]), "`cv` leaves no fold with rows to fit on and rows to hold out"),
        (BilevelHuberRegressor(epsilon=0.0), "'epsilon' parameter"),
        (BilevelGammaRegressor(), "Some value.s. of y are not positive"),
        (
            DataCleaningClassifier(cv=1),
            "The 'cv' parameter of DataCleaningClassifier must be an int of at least 2. Got 1",
        ),
        (DataCleaningClassifier(cv=2.5), "'cv' parameter"),
    ],
)
def test_a_parameter_of_one_estimator_is_refused(model, message):
    with pytest.raises(ValueError, match=message):
        model.fit(X, Y)


@each
def test_numbers_whose_squares_overflow_are_refused(kind):
    for rows in (1e200 * X, sp.csr_array(1e200 * X)):
        with pytest.raises(ValueError, match=r"X has an entry of .*e\+200, whose square overflows; scale it"):
            kind(**QUICK).fit(rows, Y)
    with pytest.raises(ValueError, match=r"X_val has an entry of .*, whose square overflows"):
        kind(**QUICK).fit(X, Y, X_val=1e200 * X, y_val=Y)
    with pytest.raises(ValueError, match=r"y has an entry of .*, whose square overflows"):
        BilevelRidge(**QUICK).fit(X, 1e200 * X[:, 0])


def test_missing_targets_among_objects_are_refused():
    for model in (BilevelGammaRegressor(), BilevelRidge()):
        with pytest.raises(ValueError, match="y contains NaN"):
            model.fit(X, np.array([1.0, None] * 30, object))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (BilevelHuberRegressor(epsilon=10**400), "'epsilon' parameter"),
        (BilevelRidge(unpenalized=...), "`unpenalized` has Ellipsis, which must be a number below 5"),
        (BilevelRidge(unpenalized=[0.5]), r"`unpenalized` has 0\.5, which must be a number below 5"),
        (BilevelRidge(prior_scale=np.ones(2)), "'prior_scale' parameter"),
        (BilevelRidge(prior_scale=10**400), "'prior_scale' parameter"),
        (BilevelRidge(np.zeros(3, "V4")), "'structure' parameter"),
        (BilevelRidge(unpenalized=np.ma.masked_array(0.5)), r"`unpenalized` has masked_array\(data=0\.5,"),
    ],
    ids=["epsilon", "dots", "half", "array", "prior_scale", "structure", "no list"],
)
def test_what_no_arithmetic_takes_is_refused_by_name(model, message):
    with pytest.raises(ValueError, match=message):
        model.fit(X, Y)


def test_counts_must_not_be_negative():
    with pytest.raises(ValueError, match="are negative"):
        BilevelPoissonRegressor().fit(X, Y - 1.0)


def test_a_class_with_one_row():
    labels = np.where(np.arange(60) == 7, 2, Y)
    for kind in CLASSIFIERS:
        with pytest.warns(UserWarning, match="The least populated class in y has only 1 members, .* n_splits=3"):
            assert kind(cv=3, random_state=0).fit(X, labels).coef_.shape == (3, 5)


@each
def test_validation_rows_must_be_complete(kind):
    with pytest.raises(ValueError, match="given together; `y_val` is missing"):
        kind(**QUICK).fit(X, Y, X_val=X)
    with pytest.raises(ValueError, match="given together; `X_val` is missing"):
        kind(**QUICK).fit(X, Y, y_val=Y)
    with pytest.raises(ValueError, match=r"X has 3 features, but .* is expecting 5"):
        kind(**QUICK).fit(X, Y, X_val=X[:, :3], y_val=Y)
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        kind(**QUICK).fit(X, Y, X_val=X, y_val=Y[:-1])


@each_classifier
def test_unknown_labels_of_validation_rows_are_named(kind):
    with pytest.raises(ValueError, match=r"y_val contains labels that y does not: \[7\]"):
        kind(**QUICK).fit(X, Y, X_val=X, y_val=np.where(Y == 1, 7, Y))


def test_validation_targets_must_be_numeric():
    with pytest.raises(ValueError, match="could not convert string to float"):
        BilevelRidge(**QUICK).fit(X, Y, X_val=X, y_val=["a"] * 60)


@each
def test_predicting_before_fitting_is_an_error(kind):
    with pytest.raises(NotFittedError):
        kind().predict(X)


def test_sparse_and_dense_rows_give_the_same():
    kept = np.where(np.abs(X) > 0.5, X, 0)
    dense, sparse = (DataCleaningClassifier(**QUICK).fit(form(kept), Y) for form in (np.asarray, sp.csr_array))
    np.testing.assert_allclose(dense.coef_, sparse.coef_, atol=0.02)
    np.testing.assert_array_equal(dense.predict(kept), sparse.predict(sp.csc_matrix(kept)))


def test_a_search_that_ends_early_warns():
    useless = np.column_stack([X, np.random.default_rng(0).standard_normal((60, 30))])
    with pytest.warns(ConvergenceWarning, match=r"took max_iter=1 iterations .* still falling. Increase max_iter"):
        BilevelLogisticRegression("per_feature", prior_scale=2.0, max_iter=1, tol=0, random_state=0).fit(useless, Y)


def test_names_of_features_are_kept():
    pd = pytest.importorskip("pandas")
    table = pd.DataFrame(X, columns=list("abcde"))
    model = BilevelLogisticRegression(**QUICK).fit(table, Y)
    assert list(model.feature_names_in_) == list("abcde")
    with pytest.raises(ValueError, match="feature names"):
        model.predict(table.rename(columns={"a": "f"}))


@pytest.mark.parametrize(
    ("model", "features", "targets"),
    [
        (BilevelLogisticRegression(), X[:, :1], Y),
        (BilevelLogisticRegression(), X[:4], [0, 1, 0, 1]),
        (BilevelLogisticRegression(), np.column_stack([X, X, np.ones(60)]), Y),
        (BilevelLogisticRegression(standardize=False), 1e6 * X, Y),
        (BilevelLogisticRegression(), np.zeros((60, 3)), Y),
        (BilevelLogisticRegression(), X, X[:, 0] > 0),
        (BilevelLogisticRegression(unpenalized=range(5)), X, X[:, 0] > 0),
        (BilevelRidge(fit_intercept=False), X[:4].reshape(2, 10), [1.0, 2.0]),
        (BilevelRidge(cv=LeaveOneOut()), X[:12], X[:12, 0]),
        (BilevelRidge(cv=ShuffleSplit(4, random_state=0)), X, 1e12 * X[:, 1]),
        (BilevelPoissonRegressor(), X, np.arange(60) // 55),
        (BilevelHuberRegressor(), X, np.where(np.arange(60) % 9, 0.0, 1e6)),
    ],
    ids=str,
)
def test_unusual_data_are_fitted(model, features, targets):
    fitted = model.set_params(random_state=0).fit(features, targets)
    assert np.isfinite(fitted.coef_).all() and np.isfinite(fitted.predict(features)).all()


def test_folds_need_two_rows_of_some_class():
    with pytest.raises(ValueError, match="Every class in y has only one row"):
        BilevelLogisticRegression().fit(X[:3], [0, 1, 2])
