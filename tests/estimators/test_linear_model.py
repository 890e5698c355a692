"""Learned penalties define the model, minimize the held-out loss, and are several only if that is better."""

import subprocess
import sys

import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer, load_diabetes, make_regression
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import log_loss
from sklearn.model_selection import (
    GroupKFold,
    KFold,
    RepeatedKFold,
    StratifiedKFold,
    train_test_split,
)
from sklearn.preprocessing import StandardScaler

import bilevel
from bilevel.estimators import (
    BilevelGammaRegressor,
    BilevelHuberRegressor,
    BilevelLogisticRegression,
    BilevelPoissonRegressor,
    BilevelRidge,
    linear_model,
    selection,
)
from bilevel.estimators.ridge import RidgeGLM


@pytest.fixture(scope="module")
def cancer():
    X, y = load_breast_cancer(return_X_y=True)
    return X[:200, :6], y[:200]


@pytest.fixture(scope="module")
def views():
    """Informative columns, and columns of noise."""
    X, y = make_regression(300, 30, n_informative=8, noise=40, shuffle=False, random_state=0)
    return train_test_split(X, y, test_size=150, random_state=0)


NOISE = np.arange(30) >= 8


FITS = """
import sys, warnings
import numpy as np
from sklearn.datasets import load_breast_cancer, load_diabetes
import bilevel.estimators as estimators
warnings.simplefilter("ignore")
X, classes = (part[:200] for part in load_breast_cancer(return_X_y=True))
rows, numbers = (part[:200] for part in load_diabetes(return_X_y=True))
survival = np.array([(True, t) for t in numbers], [("event", bool), ("time", float)])
for name in estimators.__all__:
    is_classifier = "Logistic" in name or "Classifier" in name
    data = (X / X.std(axis=0), classes) if is_classifier else (rows, survival if name == "BilevelCoxPH" else numbers)
    getattr(estimators, name)(random_state=0).fit(*data)
    print(name, "jax" in sys.modules)
"""


@pytest.mark.slow
def test_no_fit_imports_jax():
    program = (
        "import sys, numpy as np; from bilevel.estimators import BilevelLogisticRegression, BilevelRidge; "
        "X = np.random.default_rng(0).standard_normal((40, 3)); "
        "BilevelLogisticRegression().fit(X, X[:, 0] > 0); BilevelRidge().fit(X, X[:, 1]); "
        "print('jax' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["False"]


@pytest.mark.slow
def test_no_estimator_imports_jax():
    out = subprocess.run([sys.executable, "-c", FITS], capture_output=True, text=True, check=True).stdout
    assert out.splitlines() == [f"{name} False" for name in bilevel.estimators.__all__]


def test_names_that_need_jax_are_imported_on_access():
    assert {"SRBA", "run", "problems", "__version__"} <= set(dir(bilevel)) and bilevel.SRBA is bilevel.SOLVERS["SRBA"]
    assert bilevel.theory.__name__ == "bilevel.theory"
    with pytest.raises(AttributeError, match="module 'bilevel' has no attribute 'Adam'"):
        bilevel.Adam  # noqa: B018


def test_the_coefficients_are_those_of_the_penalties(cancer):
    X, y = cancer
    model = BilevelLogisticRegression("per_feature", prior_scale=2.0, random_state=0).fit(X, y)
    scaler = StandardScaler().fit(X)
    root = np.sqrt(model.penalties_)
    expected = LogisticRegression(C=1.0, tol=1e-10, max_iter=10_000).fit(scaler.transform(X) / root, y)
    np.testing.assert_allclose(model.coef_, expected.coef_ / root / scaler.scale_, rtol=1e-4)
    np.testing.assert_allclose(model.predict_proba(X), expected.predict_proba(scaler.transform(X) / root), atol=1e-5)


def test_a_single_penalty_of_ridge_is_its_alpha():
    X, y = load_diabetes(return_X_y=True)
    model = BilevelRidge("single", random_state=0).fit(X, y)
    assert np.ptp(model.penalties_) == 0 and model.penalty_structure_ == "single"
    expected = Ridge(model.penalties_[0]).fit(StandardScaler().fit_transform(X), y)
    np.testing.assert_allclose(model.coef_ * X.std(axis=0), expected.coef_, rtol=1e-6)
    assert model.intercept_ + model.coef_ @ X.mean(axis=0) == pytest.approx(y.mean())


def test_a_single_penalty_is_the_best_of_a_fine_grid(cancer):
    X, y = cancer
    cv = StratifiedKFold(5, shuffle=True, random_state=1)
    model = BilevelLogisticRegression("single", cv=cv).fit(X, y)
    scaled = StandardScaler().fit_transform(X)

    def held_out(penalty):
        losses = []
        for train, test in cv.split(X, y):
            fitted = LogisticRegression(C=1 / penalty, max_iter=1000, tol=1e-8).fit(scaled[train], y[train])
            losses.append(log_loss(y[test], fitted.predict_proba(scaled[test]), normalize=False))
        return sum(losses)

    grid = [held_out(penalty) for penalty in np.geomspace(1e-3, 1e2, 26)]
    assert held_out(model.penalties_[0]) < min(grid) + 0.02


def test_groups_are_taken_where_they_help(views):
    X, X_test, y, y_test = views
    model, single = (
        BilevelRidge(groups=NOISE, structure=kind, random_state=0).fit(X, y) for kind in ("auto", "single")
    )
    assert model.penalty_structure_ == "per_group"
    assert model.penalties_[NOISE].min() > 10 * model.penalties_[~NOISE].max()
    errors = [np.mean((fitted.predict(X_test) - y_test) ** 2) for fitted in (model, single)]
    assert errors[0] < 0.95 * errors[1]


def test_a_single_penalty_is_kept_where_many_do_not_help():
    rng = np.random.default_rng(0)
    X = rng.standard_normal((150, 10))
    model = BilevelRidge(random_state=0).fit(X, X @ np.ones(10) + 3 * rng.standard_normal(150))
    assert model.penalty_structure_ == "single" and model.prior_scale_ == np.inf
    table = model.candidates_
    assert list(table["structure"]) == ["single"] + 3 * ["per_feature"]
    assert table["chosen"].tolist() == [True, False, False, False]


def test_a_part_of_the_outer_folds_chooses_as_all_do(views, monkeypatch):
    X, _, y, _ = views
    limit = selection._MAX_FLOPS / selection._EVALUATIONS / 3
    monkeypatch.setattr(RidgeGLM, "estimate_flops", lambda *args: limit)
    model = BilevelRidge(groups=NOISE, random_state=0).fit(X[:150], y[:150])
    assert list(model.candidates_["structure"]) == ["single", "per_group"] and model.prior_scale_ == 0.5
    wide = BilevelRidge(groups=NOISE, random_state=0).fit(X[:149], y[:149])  # fewer than 5 rows per coefficient
    assert wide.penalty_structure_ == "single" and len(wide.candidates_) == 0


def test_a_comparison_that_costs_too_much_is_skipped(views, monkeypatch):
    X, _, y, _ = views
    monkeypatch.setattr(selection, "_MAX_FLOPS", 1.0)
    model = BilevelRidge(random_state=0).fit(X, y)
    assert model.penalty_structure_ == "single" and len(model.candidates_) == 0
    asked_for = BilevelRidge("per_feature", random_state=0).fit(X, y)
    assert asked_for.penalty_structure_ == "per_feature" and asked_for.prior_scale_ == 0.5


def test_the_same_seed_gives_the_same_model_and_another_one_other_folds(cancer):
    X, y = cancer[0][:, :2], cancer[1]
    models = [BilevelLogisticRegression(cv=3, random_state=seed).fit(X, y) for seed in (0, 0, 1)]
    np.testing.assert_array_equal(models[0].coef_, models[1].coef_)
    assert models[0].candidates_.equals(models[1].candidates_)
    assert not np.array_equal(models[0].penalties_, models[2].penalties_)


@pytest.mark.parametrize("cv", [3, KFold(4), RepeatedKFold(n_splits=2, n_repeats=3, random_state=0), "pairs"])
def test_any_splitter_is_accepted(cv, cancer):
    X, y = cancer
    pairs = [(np.arange(100), np.arange(100, 200)), (np.arange(50, 200), np.arange(50))]
    model = BilevelLogisticRegression(cv=pairs if cv == "pairs" else cv, random_state=0).fit(X, y)
    assert model.score(X, y) > 0.85


def test_shuffled_folds_are_those_of_a_repeated_splitter(cancer):
    X, y = cancer  # 200 rows are shuffled five times
    model = BilevelLogisticRegression("single", random_state=0).fit(X, y)
    folds = StratifiedKFold(5, shuffle=True, random_state=np.random.RandomState(0))
    pairs = [pair for _ in range(5) for pair in folds.split(X, y)]
    np.testing.assert_array_equal(model.coef_, BilevelLogisticRegression("single", cv=pairs).fit(X, y).coef_)


def test_groups_of_rows_stay_together(cancer):
    X, y = cancer
    number = np.arange(200) // 10
    by_name = BilevelLogisticRegression(cv=GroupKFold(4)).fit(X, y, cv_groups=number)
    pairs = BilevelLogisticRegression(cv=list(GroupKFold(4).split(X, y, number))).fit(X, y)
    np.testing.assert_array_equal(by_name.coef_, pairs.coef_)


def test_validation_rows_choose_the_penalty_and_all_rows_are_fitted(cancer):
    X, y = cancer
    model = BilevelLogisticRegression("single").fit(X[:120], y[:120], X_val=X[120:], y_val=y[120:])
    pairs = BilevelLogisticRegression("single", cv=[(np.arange(120), np.arange(120, 200))]).fit(X, y)
    np.testing.assert_allclose(model.coef_, pairs.coef_, rtol=1e-6)
    many = BilevelLogisticRegression().fit(X[:120], y[:120], X_val=X[120:], y_val=y[120:])
    assert len(many.candidates_) == 4


@pytest.mark.parametrize("kind", [BilevelRidge, BilevelPoissonRegressor, BilevelGammaRegressor, BilevelHuberRegressor])
def test_weights_are_repetitions(kind):
    rng = np.random.default_rng(0)
    X = rng.standard_normal((60, 4))
    y, weights = rng.poisson(np.exp(0.5 * X[:, 0] + 1)) + 1.0, rng.integers(0, 3, 60)
    splits = [(np.setdiff1d(np.arange(60), np.arange(k, 60, 3)), np.arange(k, 60, 3)) for k in range(3)]
    weighted = kind("per_feature", cv=splits).fit(X, y, sample_weight=weights)
    place = np.repeat(np.arange(60), weights)
    repeated = [tuple(np.flatnonzero(np.isin(place, part)) for part in pair) for pair in splits]
    twice = kind("per_feature", cv=repeated).fit(X[place], y[place])
    np.testing.assert_allclose(weighted.coef_, twice.coef_, rtol=1e-5, atol=1e-8)


def test_classes_of_weight_count_as_rows_of_weight(cancer):
    X, y = cancer
    cv = list(StratifiedKFold(3).split(X, y))
    classes = BilevelLogisticRegression("single", cv=cv, class_weight={0: 1, 1: 4}).fit(X, y)
    rows = BilevelLogisticRegression("single", cv=cv).fit(X, y, sample_weight=np.where(y == 1, 4, 1))
    np.testing.assert_allclose(classes.coef_, rows.coef_)
    balanced = BilevelLogisticRegression("single", cv=cv, class_weight="balanced").fit(X, y)
    size = len(y) / (2 * np.bincount(y))
    np.testing.assert_allclose(balanced.coef_, BilevelLogisticRegression("single", cv=cv).fit(X, y, size[y]).coef_)


def test_targets_share_their_penalties():
    X, y = load_diabetes(return_X_y=True)
    both = np.column_stack([y, 3 + 2 * y])
    one, two = (BilevelRidge("per_feature", prior_scale=1.0, random_state=0).fit(X, of) for of in (y, both))
    assert two.coef_.shape == (2, 10) and two.predict(X).shape == (442, 2)
    np.testing.assert_allclose(two.coef_[1], 2 * two.coef_[0], rtol=1e-6)
    assert np.ptp(np.log(two.penalties_)) > np.ptp(
        np.log(one.penalties_)
    )  # the same rows count twice, but the prior does not


def test_features_can_be_unpenalized(cancer):
    pd = pytest.importorskip("pandas")
    X, y = cancer
    table = pd.DataFrame(X, columns=list("abcdef"))
    model = BilevelLogisticRegression(unpenalized=["b"], random_state=0).fit(table, y)
    assert model.penalties_[1] == 0 and np.all(np.delete(model.penalties_, 1) > 0)
    assert model.penalty_table_["feature"][0] == "b" and model.penalty_table_["group"][0] == "unpenalized"
    none = BilevelRidge(unpenalized=list("abcdef")).fit(table, X[:, 0] + y)
    np.testing.assert_allclose(none.predict(table), Ridge(1e-10).fit(X, X[:, 0] + y).predict(X), rtol=1e-5)


def test_sparse_and_dense_rows_give_the_same(cancer, monkeypatch):
    import scipy.sparse as sp

    X, y = cancer
    kept = np.where(np.median(X, axis=0) < X, X, 0)
    monkeypatch.setattr(linear_model, "_FEW_ENTRIES", 0)
    dense, sparse = (
        BilevelLogisticRegression("per_feature", prior_scale=1.0, random_state=0).fit(form(kept), y)
        for form in (np.asarray, sp.csr_array)
    )
    np.testing.assert_allclose(dense.coef_, sparse.coef_, rtol=1e-3)
    np.testing.assert_allclose(dense.predict_proba(kept), sparse.predict_proba(sp.csc_array(kept)), atol=1e-4)


def test_penalties_are_drawn_with_names_and_coefficients(views):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    X, _, y, _ = views
    model = BilevelRidge("per_group", groups=np.where(NOISE, "noise", "signal"), random_state=0).fit(X, y)
    figure = model.plot_penalties(most=12)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert len(labels) == 12 and set(labels) <= set(model.penalty_table_["feature"])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["signal", "noise"]
