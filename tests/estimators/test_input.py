"""What estimators are given: refused in scikit-learn's manner, or taken as it is meant."""

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.datasets import make_classification
from sklearn.exceptions import ConvergenceWarning, NotFittedError

import bilevel
from bilevel.engine.result import Status
from bilevel.estimators import BilevelLogisticRegression, BilevelRidge, DataCleaningClassifier, rows
from bilevel.estimators import base as fitting

X, Y = make_classification(60, 5, random_state=0)
QUICK = {"max_iter": 20, "tol": 1.0, "random_state": 0}
ALL = [BilevelLogisticRegression, BilevelRidge, DataCleaningClassifier]
CLASSIFIERS = [BilevelLogisticRegression, DataCleaningClassifier]
each = pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
each_classifier = pytest.mark.parametrize("kind", CLASSIFIERS, ids=lambda kind: kind.__name__)


@each_classifier
def test_one_class_alone_is_refused(kind):
    with pytest.raises(ValueError, match=r"at least 2 classes in y, but there is only one class: np.int64\(1\)"):
        kind(**QUICK).fit(X, np.ones(60, int))


@each
def test_nan_is_refused(kind):
    with pytest.raises(ValueError, match="Input X contains NaN"):
        kind(**QUICK).fit(np.where(X > 2, np.nan, X), Y)
    with pytest.raises(ValueError, match="Input X contains infinity"):
        kind(**QUICK).fit(np.where(X > 2, np.inf, X), Y)


@each
def test_nan_in_validation_rows_is_refused(kind):
    with pytest.raises(ValueError, match="Input X contains NaN"):
        kind(**QUICK).fit(X, Y, np.full((4, 5), np.nan), Y[:4])


@each
def test_too_few_rows_for_a_split_are_refused_with_the_way_out(kind):
    message = "rows cannot be split with validation_fraction=0.01.*Give more rows, another fraction, or `X_val`"
    few = (X[:2], np.array([0, 1])) if kind is not BilevelRidge else (X[:2], Y[:2])
    fraction = 0.01 if kind is not BilevelRidge else 0.999
    with pytest.raises(ValueError, match=message.replace("0.01", str(fraction))):
        kind(**QUICK, validation_fraction=fraction).fit(*few)


@each_classifier
def test_a_class_with_one_row_cannot_be_held_out(kind):
    labels = np.where(np.arange(60) == 7, 2, Y)
    with pytest.raises(ValueError, match=r"cannot be split.*least populated class"):
        kind(**QUICK).fit(X, labels)


def test_a_constant_target_gives_a_constant_model():
    model = BilevelRidge(**QUICK).fit(X, np.full(60, 3.5))
    np.testing.assert_allclose(model.predict(X), 3.5)
    assert np.all(model.coef_ == 0)


@each
def test_weights_of_rows_are_no_argument(kind):
    with pytest.raises(TypeError, match="sample_weight"):
        kind(**QUICK).fit(X, Y, sample_weight=-np.ones(60))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (
            {"validation_fraction": -0.1},
            r"The 'validation_fraction' parameter of .* must be a float in the range \(0.0, 1",
        ),
        ({"validation_fraction": 1.0}, "validation_fraction"),
        ({"tol": -1.0}, r"The 'tol' parameter of .* must be a float in the range \[0.0, inf\). Got -1.0 instead."),
        ({"tol": "small"}, "'tol' parameter"),
        ({"max_iter": 0}, r"The 'max_iter' parameter of .* must be an int in the range \[1, inf\). Got 0 instead."),
        ({"max_iter": 2.5}, "'max_iter' parameter"),
        ({"fit_intercept": "yes"}, "The 'fit_intercept' parameter of .* must be an instance of 'bool'"),
        ({"standardize": None}, "'standardize' parameter"),
        ({"verbose": -1}, "'verbose' parameter"),
        ({"solver": "SRBA"}, r"The 'solver' parameter of .* must be None or a solver of `bilevel`.*Got 'SRBA'"),
    ],
)
@each
def test_a_parameter_out_of_place_is_refused(kind, parameters, message):
    with pytest.raises(ValueError, match=message):
        kind(**QUICK | parameters).fit(X, Y)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (BilevelLogisticRegression("l2"), "The 'penalty' parameter of BilevelLogisticRegression must be a str among"),
        (BilevelLogisticRegression("per_group"), "`groups` and penalty='per_group' go together"),
        (BilevelRidge(groups=[0, 0, 1, 1, 1]), "`groups` and penalty='per_group' go together"),
        (BilevelRidge("per_group", groups=[0, 1]), r"group of each of the 5 features, got \(2,\)"),
        (BilevelRidge(refit=1), "'refit' parameter"),
        (BilevelRidge(shrink=None), "'shrink' parameter"),
        (DataCleaningClassifier(regularization=0.0), r"'regularization' parameter .* in the range \(0.0, inf\)"),
        (DataCleaningClassifier(regularization=-1), "'regularization' parameter"),
    ],
)
def test_a_parameter_of_one_estimator_is_refused(model, message):
    with pytest.raises(ValueError, match=message):
        model.fit(X, Y)


@each
def test_validation_rows_must_be_whole(kind):
    with pytest.raises(ValueError, match="given together; `y_val` is missing"):
        kind(**QUICK).fit(X, Y, X)
    with pytest.raises(ValueError, match="given together; `X_val` is missing"):
        kind(**QUICK).fit(X, Y, y_val=Y)
    with pytest.raises(ValueError, match=r"X has 3 features, but .* is expecting 5"):
        kind(**QUICK).fit(X, Y, X[:, :3], Y)
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        kind(**QUICK).fit(X, Y, X, Y[:-1])


@each_classifier
def test_unknown_labels_of_validation_rows_are_named(kind):
    with pytest.raises(ValueError, match=r"y_val contains labels that y does not: \[7\]"):
        kind(**QUICK).fit(X, Y, X, np.where(Y == 1, 7, Y))


def test_validation_targets_that_are_no_numbers_are_refused():
    with pytest.raises(ValueError, match="could not convert string to float"):
        BilevelRidge(**QUICK).fit(X, Y, X, ["a"] * 60)


@each
def test_predicting_before_fitting_is_an_error(kind):
    with pytest.raises(NotFittedError):
        kind().predict(X)


@each
def test_sparse_rows_give_what_dense_ones_give(kind):
    kept = np.where(np.abs(X) > 0.5, X, 0)
    dense, sparse = (kind(**QUICK).fit(made(kept), Y) for made in (np.asarray, sp.csr_array))
    np.testing.assert_array_equal(dense.coef_, sparse.coef_)
    np.testing.assert_allclose(dense.predict(kept), sparse.predict(sp.csc_matrix(kept)))


def test_sparse_rows_too_many_for_memory_are_refused(monkeypatch):
    monkeypatch.setattr(rows, "_DENSE_BYTES", 1000)
    with pytest.raises(ValueError, match=r"`X` is sparse and would take .* GiB.*TruncatedSVD"):
        BilevelLogisticRegression(**QUICK).fit(sp.csr_array(X), Y)


def test_a_run_that_is_cut_short_warns_as_scikit_learn_does():
    useless = np.column_stack([X, np.random.default_rng(0).standard_normal((60, 30))])
    with pytest.warns(ConvergenceWarning, match=r"took max_iter=2 steps .* still falling, from .* Increase max_iter"):
        model = BilevelLogisticRegression(max_iter=2, tol=0, random_state=0).fit(useless, Y)
    assert model.status_ == "out_of_budget" and model.n_iter_ == 2


def test_a_diverging_solver_leaves_a_fitted_model_and_a_warning():
    solver = bilevel.SRBA(step_size=1e4, outer_ratio=1e-4, batch_size=8)
    with pytest.warns(ConvergenceWarning, match=r"became non-finite.*the best point before is kept"):
        model = BilevelLogisticRegression(solver=solver, max_iter=500, tol=0, shrink=False, random_state=0).fit(X, Y)
    assert model.status_ == "diverged" and model.score(X, Y) > 0.8
    # Nothing that the solver found is better than the single penalty it was to improve on.
    assert np.log10(model.penalty_) == pytest.approx(np.round(np.log10(model.penalty_[0])), abs=1e-3)


def test_ctrl_c_ends_a_search_but_not_what_was_found(monkeypatch):
    finished = fitting.run

    def interrupted(*arguments, **options):
        from dataclasses import replace

        return replace(finished(*arguments, **options), status=Status.interrupted)

    monkeypatch.setattr(fitting, "run", interrupted)
    model = BilevelLogisticRegression(**QUICK)
    with pytest.raises(KeyboardInterrupt):
        model.fit(X, Y)
    assert model.status_ == "interrupted" and model.score(X, Y) > 0.8


def test_names_of_features_are_kept():
    pd = pytest.importorskip("pandas")
    table = pd.DataFrame(X, columns=list("abcde"))
    model = BilevelLogisticRegression(**QUICK).fit(table, Y)
    assert list(model.feature_names_in_) == list("abcde")
    with pytest.raises(ValueError, match="feature names"):
        model.predict(table.rename(columns={"a": "f"}))


def test_verbose_shows_a_bar(capsys):
    BilevelLogisticRegression(**QUICK, verbose=1).fit(X, Y)
    assert "Exact on logistic_selection" in capsys.readouterr().out
