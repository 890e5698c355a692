"""Learned strengths of sparse models define the model, and minimize the held-out loss."""

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.datasets import load_breast_cancer, load_iris
from sklearn.linear_model import ElasticNet, LassoCV, LogisticRegression
from sklearn.metrics import log_loss, root_mean_squared_error
from sklearn.model_selection import GridSearchCV, KFold, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from bilevel.estimators import BilevelElasticNet, BilevelRidge, BilevelSparseLogisticRegression, sparse_linear_model
from bilevel.estimators.sparse_linear_model import StrengthSearch

N, P, USEFUL = 80, 20, 4


@pytest.fixture(scope="module")
def rows():
    """Twenty columns of which four matter."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((N, P)) * rng.uniform(0.5, 2, P) + rng.uniform(-1, 1, P)
    X[rng.random((N, P)) < 0.3] = 0
    return X, 3 * X[:, :USEFUL].sum(axis=1) + 5 * rng.standard_normal(N) + 2


@pytest.fixture(scope="module")
def fitted(rows):
    return BilevelElasticNet(random_state=0, tol=1e-4).fit(*rows)


def as_elastic_net(l1, l2, n):
    """Return scikit-learn's model with these strengths relative to the summed loss."""
    return ElasticNet((l1 + l2) / n, l1_ratio=l1 / (l1 + l2), tol=1e-10, max_iter=10**5)


def test_the_model_is_the_elastic_net_of_its_strengths(rows, fitted):
    X, y = rows
    net = make_pipeline(StandardScaler(), as_elastic_net(fitted.l1_penalties_[0], fitted.penalties_[0], N))
    net.fit(X, (y - y.mean()) / y.std())
    np.testing.assert_allclose(fitted.predict(X), net.predict(X) * y.std() + y.mean(), atol=1e-5)
    assert np.array_equal(fitted.coef_ == 0, net[-1].coef_ == 0)
    assert USEFUL <= np.count_nonzero(fitted.coef_) < P


def test_no_strengths_nearby_have_a_smaller_held_out_loss(rows, fitted):
    X, y = StandardScaler().fit_transform(rows[0]), (rows[1] - rows[1].mean()) / rows[1].std()
    folds = KFold(5, shuffle=True, random_state=np.random.RandomState(0))
    splits = [pair for _ in range(5) for pair in folds.split(X)]  # few rows are shuffled five times

    def objective(l1, l2):
        errors = 0.0
        for train, test in splits:
            net = as_elastic_net(l1, l2, len(train)).fit(X[train], y[train])
            errors += np.sum((net.predict(X[test]) - y[test]) ** 2)
        return N / 2 * np.log(errors / (5 * N))

    l1, l2 = fitted.l1_penalties_[0] / np.sqrt(N / 64), fitted.penalties_[0]  # folds are fitted on 64 rows
    least = objective(l1, l2)
    assert fitted.history_["value"].min() == pytest.approx(least, abs=1e-4)
    for move in (0.8, 1.25):
        assert objective(move * l1, l2) > least - 0.01 and objective(l1, move * l2) > least - 0.01


@pytest.mark.parametrize("classes", [2, 3])
def test_the_classifier_is_the_logistic_regression_of_its_strengths(classes):
    X, y = load_iris(return_X_y=True)
    X, y = X[y < classes] + np.random.default_rng(0).standard_normal((50 * classes, 4)), y[y < classes]
    model = BilevelSparseLogisticRegression(random_state=0).fit(X, y)
    l1, l2 = model.l1_penalties_[0], model.penalties_[0]
    options = {"tol": 1e-8, "max_iter": 10**5, "random_state": 0}
    saga = LogisticRegression(C=1 / (l1 + l2), l1_ratio=l1 / (l1 + l2), solver="saga", **options)
    expected = make_pipeline(StandardScaler(), saga).fit(X, y).predict_proba(X)
    np.testing.assert_allclose(model.predict_proba(X), expected, atol=1e-5)


def test_paths_on_some_folds_end_at_strengths_as_good_as_those_on_all(monkeypatch):
    X, y = load_iris(return_X_y=True)
    X = X + np.random.default_rng(0).standard_normal(X.shape)
    few_rows, used = [], StrengthSearch._follow_path
    record = lambda search, *a: few_rows.append(len(search._path_folds.fitted)) or used(search, *a)  # noqa: E731
    monkeypatch.setattr(StrengthSearch, "_follow_path", record)
    on_all = BilevelSparseLogisticRegression(random_state=0).fit(X, y)
    monkeypatch.setattr(sparse_linear_model, "_PATH_ROWS", 60)
    on_some = BilevelSparseLogisticRegression(random_state=0).fit(X, y)
    assert few_rows[0] > 10 and few_rows[-1] == 2
    assert on_some.history_["value"].min() == pytest.approx(on_all.history_["value"].min(), abs=0.003 * len(y))


@pytest.mark.parametrize("made", [sp.csr_array, pytest.param(sp.csc_array, marks=pytest.mark.slow)])
def test_sparse_and_dense_rows_give_the_same(rows, fitted, made):
    X, y = rows
    model = BilevelElasticNet(random_state=0, tol=1e-4).fit(made(X), y)
    np.testing.assert_allclose(model.coef_, fitted.coef_, atol=1e-3 * np.abs(fitted.coef_).max())
    labels = (y > y.mean()).astype(int)
    dense, sparse = (BilevelSparseLogisticRegression(random_state=0).fit(part, labels) for part in (X, made(X)))
    np.testing.assert_allclose(dense.predict_proba(X), sparse.predict_proba(made(X)), atol=1e-3)


def test_rows_of_weight_zero_do_not_count(rows, fitted):
    X, y = (np.concatenate([part, part[:10]]) for part in rows)
    model = BilevelElasticNet(random_state=0, tol=1e-4).fit(X, y, np.repeat([1.0, 0.0], [N, 10]))
    np.testing.assert_allclose(model.coef_, fitted.coef_, atol=1e-6)


def test_several_targets_share_the_strengths(rows):
    X, y = rows
    targets = np.column_stack([y, X[:, 5] - X[:, 6] + np.cos(y)])
    model = BilevelElasticNet(random_state=0).fit(X, targets)
    scaled = (targets - targets.mean(axis=0)) / targets.std(axis=0)
    net = make_pipeline(StandardScaler(), as_elastic_net(model.l1_penalties_[0], model.penalties_[0], N))
    expected = net.fit(X, scaled).predict(X) * targets.std(axis=0) + targets.mean(axis=0)
    np.testing.assert_allclose(model.predict(X), expected, atol=1e-5)


def test_a_feature_without_penalty_is_never_left_out(rows):
    X, y = rows
    model = BilevelElasticNet(unpenalized=[P - 1], random_state=0).fit(X, y)
    assert model.coef_[P - 1] != 0 and model.l1_penalties_[P - 1] == model.penalties_[P - 1] == 0


def test_norms_of_groups_leave_out_whole_groups(rows):
    groups = np.repeat(np.arange(5), 4)
    model = BilevelElasticNet(groups=groups, sparsity="groups", random_state=0).fit(*rows)
    left_out = np.bincount(groups, model.coef_ != 0)
    assert set(left_out) <= {0, 4} and left_out[0] == 4 and 0 in left_out


def test_groups_of_noise_get_a_larger_strength(rows):
    X, y = rows
    groups = np.where(np.arange(P) < USEFUL, "useful", "noise")
    model = BilevelElasticNet("per_group", groups=groups, random_state=0).fit(X, y)
    assert model.l1_penalties_[-1] > 1.2 * model.l1_penalties_[0] and model.penalty_structure_ == "per_group"
    table = model.penalty_table_.set_index("feature").loc[[f"x{k}" for k in range(P)]]
    np.testing.assert_array_equal(table["l1_penalty"], model.l1_penalties_)
    np.testing.assert_array_equal(table["coefficient"], model.coef_)
    auto = BilevelElasticNet("auto", groups=groups, cv=3, random_state=0).fit(X, y)
    assert list(auto.candidates_["structure"]) == ["single", "per_group", "per_feature"]


def test_two_folds_are_too_few_for_a_comparison(rows):
    model = BilevelElasticNet("auto", cv=2, random_state=0).fit(*rows)
    assert model.penalty_structure_ == "single" and len(model.candidates_) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparsity": "rows"}, "The 'sparsity' parameter of BilevelElasticNet must be a str among"),
        ({"sparsity": "groups"}, "`sparsity='groups'` needs `groups`"),
        ({"structure": "two"}, "The 'structure' parameter of BilevelElasticNet must be a str among"),
    ],
)
def test_an_invalid_parameter_is_rejected(rows, options, message):
    with pytest.raises(ValueError, match=message):
        BilevelElasticNet(**options).fit(*rows)


def test_a_constant_target_leaves_the_intercept_alone(rows):
    model = BilevelElasticNet().fit(rows[0], np.full(N, 3.5))
    assert not model.coef_.any() and model.intercept_ == 3.5


def test_a_target_of_noise_leaves_few_coefficients():
    rng = np.random.default_rng(3)
    model = BilevelElasticNet(random_state=0).fit(rng.standard_normal((60, 100)), rng.standard_normal(60))
    assert np.count_nonzero(model.coef_) < 30 and np.isfinite(model.coef_).all()


@pytest.mark.slow
def test_with_many_useless_features_it_is_as_good_as_the_lasso_and_better_than_ridge():
    rng = np.random.default_rng(0)
    X = rng.standard_normal((3000, 300))
    y = X[:, :15] @ rng.standard_normal(15) + 3 * rng.standard_normal(3000)
    X, X_test, y, y_test = train_test_split(X, y, train_size=1000, random_state=0)
    kinds = [BilevelElasticNet(random_state=0), BilevelRidge("single", random_state=0), LassoCV(alphas=100)]
    ours, ridge, lasso = (root_mean_squared_error(y_test, kind.fit(X, y).predict(X_test)) for kind in kinds)
    assert ours < 1.005 * lasso and ours < 0.95 * ridge


@pytest.mark.slow
def test_with_columns_of_noise_it_is_as_good_as_a_grid_of_l1_strengths():
    X, y = load_breast_cancer(return_X_y=True)
    ratios = []
    for seed in range(5):  # single splits differ by a fifth either way
        noise = np.random.default_rng(seed).standard_normal((len(X), 300))
        parts = train_test_split(np.hstack([X, noise]), y, test_size=0.3, random_state=seed, stratify=y)
        final = LogisticRegression(l1_ratio=1, solver="liblinear", max_iter=1000, random_state=0)
        grid = {"logisticregression__C": np.geomspace(1e-2, 1e2, 9)}
        l1 = GridSearchCV(make_pipeline(StandardScaler(), final), grid, scoring="neg_log_loss")
        models = [BilevelSparseLogisticRegression(random_state=0), l1]
        ours, others = (log_loss(parts[3], model.fit(parts[0], parts[2]).predict_proba(parts[1])) for model in models)
        ratios.append(ours / others)
    assert np.median(ratios) < 1.1
