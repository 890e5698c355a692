"""Cox's model: fits, held-out losses, survival functions and concordance agree with their definitions."""

import numpy as np
import pytest
import scipy.sparse as sp
from scipy.optimize import minimize
from sklearn.model_selection import GroupKFold, KFold, RepeatedKFold, StratifiedKFold, cross_val_score
from sklearn.utils import column_or_1d
from sklearn.utils.estimator_checks import parametrize_with_checks

from bilevel.estimators import BilevelCoxPH, linear_model, ridge, survival
from bilevel.estimators.ridge import RidgeGLM
from bilevel.estimators.selection import (
    Objective,
    Structure,
    held_out_loss,
    make_folds,
)
from bilevel.estimators.survival import Cox, RiskSets, concordance_index


def draw(n, p, seed=0, ties=8):
    """Rows, events and times, the latest first; times are whole numbers, so that many are tied."""
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, p))
    times = np.ceil(ties * rng.exponential(np.exp(-X[:, 0] + 0.5 * X[:, 1])))
    events = rng.random(n) < 0.6
    order = np.argsort(-times, kind="stable")
    return X[order], events[order], times[order]


def target(events, times):
    return np.array(list(zip(events, times, strict=True)), [("event", bool), ("time", float)])


def make_model(X, events, times, weights=None, **options):
    loss = Cox(times, np.ones(X.shape[0]) if weights is None else weights)
    return RidgeGLM(X, events[:, None].astype(float), loss, intercept=False, **{"tol": 1e-18} | options)


def log_likelihood(eta, events, times, weights):
    """Breslow's partial likelihood as it is written down."""
    total = 0.0
    for i in np.flatnonzero(events * weights):
        total += weights[i] * (eta[i] - np.log(np.sum((weights * np.exp(eta))[times >= times[i]])))
    return total


SHAPES = {"exact": (60, 5), "tall": (150, 3), "wide": (12, 20)}
each_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


@each_shape
def test_a_fit_minimizes_the_penalized_partial_likelihood(shape):
    X, events, times = draw(*shape)
    rng = np.random.default_rng(1)
    weights, strengths = rng.uniform(0.5, 2, shape[0]), rng.uniform(0.5, 3, shape[1])

    def objective(coef):
        return -log_likelihood(X @ coef, events, times, weights) + strengths @ coef**2 / 2

    # Differences of the value are exact to 1e-11 or so, of which a minimizer makes 1e-6 in the coefficients.
    expected = minimize(objective, np.zeros(shape[1]), method="BFGS", options={"gtol": 1e-7}).x
    fits = make_model(X, events, times).fit(weights[None], np.log(strengths))
    np.testing.assert_allclose(fits.coef[0, :, 0], expected, atol=1e-5)
    np.testing.assert_allclose(fits.predictor[0, :, 0], X @ fits.coef[0, :, 0], atol=1e-8)


@each_shape
def test_a_fit_is_that_of_scikit_survival(shape):
    linear_model = pytest.importorskip("sksurv.linear_model")
    X, events, times = draw(*shape)
    strengths = np.random.default_rng(1).uniform(0.5, 3, shape[1])
    expected = linear_model.CoxPHSurvivalAnalysis(strengths, ties="breslow", tol=1e-12).fit(X, target(events, times))
    fits = make_model(X, events, times).fit(np.ones((1, len(X))), np.log(strengths))
    np.testing.assert_allclose(fits.coef[0, :, 0], expected.coef_, atol=1e-5)


def divide(n, splits=3, repeats=1, weights=None):
    cv = RepeatedKFold(n_splits=splits, n_repeats=repeats, random_state=0)
    return make_folds(list(cv.split(np.zeros(n))), np.ones(n) if weights is None else weights)


@pytest.mark.parametrize("repeats", [1, 2])
def test_a_fold_costs_the_likelihood_of_all_rows_less_that_of_the_others(repeats):
    X, events, times = draw(40, 4)
    weights = np.random.default_rng(2).uniform(0.5, 2, 40)
    model, folds = make_model(X, events, times, weights), divide(40, 3, repeats, weights)
    fits = model.fit(folds.fitted, np.zeros(4))
    expected = [
        log_likelihood(eta, events, times, fitted) - log_likelihood(eta, events, times, weights)
        for eta, fitted in zip(fits.predictor[..., 0], folds.fitted, strict=True)
    ]
    total, _ = held_out_loss(model.loss, model.y, folds, fits.predictor)
    assert total == pytest.approx(sum(expected) / repeats)
    rows, _ = model.loss.held_out(model.y, fits.predictor, folds.fitted, folds.held_out)
    np.testing.assert_allclose(np.sum(folds.held_out * rows, axis=1), np.array(expected) / repeats)
    assert (rows >= 0).all()


def test_a_row_of_weight_two_is_the_row_twice():
    X, events, times = draw(30, 3)
    weights = 1.0 + (np.arange(30) % 2)
    twice = np.repeat(np.arange(30), weights.astype(int))
    splits = list(KFold(3).split(X))
    copies = [tuple(np.flatnonzero(np.isin(twice, part)) for part in pair) for pair in splits]
    structure, at = Structure("", np.arange(3), 1.0), np.array([0.0, 1.0, 2.0])
    one = Objective(make_model(X, events, times, weights), make_folds(splits, weights), structure)(at)
    other = Objective(
        make_model(X[twice], events[twice], times[twice]), make_folds(copies, np.ones(len(twice))), structure
    )(at)
    assert one[0] == pytest.approx(other[0])
    np.testing.assert_allclose(one[1], other[1])


STRUCTURES = {
    "single": Structure("single", np.zeros(5, int)),
    "per_group": Structure("per_group", np.array([0, 1, 0, 2, 1]), 1.0),
    "per_feature": Structure("per_feature", np.arange(5), 0.5),
}


def assert_gradient(model, folds, structure, h=1e-4):
    objective, at = Objective(model, folds, structure), np.random.default_rng(3).uniform(0, 2, structure.size)
    _, gradient = objective(at)
    found = [(objective.value(at + h * e) - objective.value(at - h * e)) / (2 * h) for e in np.eye(structure.size)]
    np.testing.assert_allclose(gradient, found, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_gradients_are_finite_differences(structure):
    X, events, times = draw(45, 6)
    weights = np.random.default_rng(2).uniform(0.5, 2, 45)
    model = make_model(X, events, times, weights, penalized=np.array([0, 1, 2, 4, 5]))
    assert_gradient(model, divide(45, 3, 1, weights), STRUCTURES[structure])


@pytest.mark.parametrize("shape", [(300, 3), (14, 30)], ids=["tall", "wide"])
def test_gradients_are_finite_differences_with_many_rows_and_with_few(shape):
    model = make_model(*draw(*shape))
    assert_gradient(model, divide(shape[0], 3, 2), Structure("", np.arange(shape[1]) % 3, 1.0))


def test_sparse_rows_and_diagonals_give_the_same(monkeypatch):
    X, events, times = draw(70, 8)
    X = np.where(np.abs(X) > 0.7, X, 0)
    structure, at = Structure("", np.arange(8), 1.0), np.linspace(0, 2, 8)
    value, gradient = Objective(make_model(X, events, times), divide(70), structure)(at)
    for name, entries in (("blocks", ridge._MAX_ENTRIES), ("diagonals", 0)):
        monkeypatch.setattr(ridge, "_MAX_ENTRIES", entries)
        for rows in (X, sp.csr_array(X)):
            other = Objective(make_model(rows, events, times), divide(70), structure)(at)
            np.testing.assert_allclose(other[0], value, rtol=1e-8, err_msg=name)
            np.testing.assert_allclose(other[1], gradient, rtol=1e-5, atol=1e-7, err_msg=name)


def second_derivative(X, events, times, weights, eta):
    """Sum over events of the covariance of the rows at risk, as it is written down."""
    total = np.zeros((X.shape[1], X.shape[1]))
    for i in np.flatnonzero(events * weights):
        share = weights * np.exp(eta - eta.max()) * (times >= times[i])
        share = share / share.sum()
        centered = X - share @ X
        total += weights[i] * (share[:, None] * centered).T @ centered
    return total


def thin_blocks(X, events, times, weights, eta):
    """The matrix of each fit that events at few times give."""
    loss, y = Cox(times, np.ones(len(X))), events[:, None, None].astype(float)
    diagonal, outer_means = loss.block_curvature(y, eta[..., None], weights)
    return np.einsum("rp,rf,rq->fpq", X, diagonal[..., 0], X) - outer_means(X)


@pytest.mark.parametrize("spread", [1.0, 4.0])
@pytest.mark.parametrize("ties", [8, 1e6])
def test_blocks_with_all_times_are_the_second_derivative(ties, spread, monkeypatch):
    monkeypatch.setattr(survival, "_KNOTS", 1e9)
    X, events, times = draw(80, 4, ties=ties)
    rng = np.random.default_rng(4)
    weights, eta = rng.uniform(0.5, 2, (80, 3)) * (rng.random((80, 3)) < 0.7), spread * rng.standard_normal((80, 3))
    weights[:3, 0] = 0
    for f, found in enumerate(thin_blocks(X, events, times, weights, eta)):
        expected = second_derivative(X, events, times, weights[:, f], eta[:, f])
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0])
def test_events_at_few_times_approximate_the_second_derivative(spread):
    X, events, times = draw(800, 4, ties=1e6)
    eta = spread * X[:, :1] * [1.0, 0.5]
    weights = np.random.default_rng(4).random((800, 2)) < 0.8
    for f, found in enumerate(thin_blocks(X, events, times, weights.astype(float), eta)):
        expected = second_derivative(X, events, times, weights[:, f], eta[:, f])
        assert np.abs(np.linalg.eigvals(np.linalg.solve(expected, found)) - 1).max() < 0.1
        assert np.linalg.eigvalsh(found).min() > 0


def test_products_are_those_of_the_second_derivative_where_hazards_are_tiny():
    _, events, times = draw(40, 2, ties=1e6)
    eta, move = np.linspace(-400, 0, 40), np.random.default_rng(4).standard_normal(40)
    bend = Cox(times, np.ones(40)).hessian_operator(
        events[:, None, None].astype(float), eta[:, None, None], np.ones((40, 1))
    )
    expected = second_derivative(np.eye(40), events, times, np.ones(40), eta) @ move
    np.testing.assert_allclose(bend(move[:, None, None])[:, 0, 0], expected, rtol=1e-9, atol=1e-12)


def test_thinned_times_keep_all_events():
    rng = np.random.default_rng(0)
    sums, events = np.cumsum(rng.exponential(size=(5000, 2)), axis=0), rng.random((5000, 2))
    sets, kept, moved = RiskSets(np.arange(5000)).thin(sums, events)
    assert len(kept) < 200 and sets.ends[-1] == 5000
    np.testing.assert_array_equal(kept, sums[sets.ends - 1])
    assert np.log(sums[sets.ends[1:] - 1] / sums[sets.ends[:-1]]).max() < 1 / survival._KNOTS
    np.testing.assert_allclose(moved.sum(axis=0), events.sum(axis=0))


def test_rows_of_the_cox_model_are_not_compressed(monkeypatch):
    monkeypatch.setattr(ridge, "_MIN_COMPRESSIBLE", 0)
    assert not make_model(*draw(200, 2)).can_compress(divide(200))


@pytest.mark.parametrize("n", [40, 300])
def test_concordance_is_a_count_of_pairs(n):
    rng = np.random.default_rng(n)
    times, events, risk = rng.integers(0, n // 3, n).astype(float), rng.random(n) < 0.5, rng.integers(0, 20, n) / 7
    first = events[:, None] & ((times[:, None] < times) | ((times[:, None] == times) & ~events))
    ahead = (risk[:, None] > risk) + 0.5 * (risk[:, None] == risk)
    assert concordance_index(events, times, risk) == pytest.approx(np.sum(first * ahead) / np.sum(first), abs=1e-12)


def test_no_pair_to_compare_is_an_error():
    with pytest.raises(ValueError, match="No two rows of `y` can be compared"):
        concordance_index(np.array([False, True]), np.array([1.0, 2.0]), np.zeros(2))


@pytest.fixture(scope="module")
def fitted():
    X, events, times = draw(150, 4)
    shuffled = np.random.default_rng(5).permutation(150)
    X, y = 3 + 2 * X[shuffled], target(events, times)[shuffled]
    return BilevelCoxPH("single", random_state=0).fit(X, y), X, y


def test_the_coefficients_are_those_of_the_penalty(fitted):
    model, X, y = fitted
    scaled, coef = (X - X.mean(axis=0)) / X.std(axis=0), model.coef_ * X.std(axis=0)

    def objective(w):
        return -log_likelihood(scaled @ w, y["event"], y["time"], np.ones(150)) + model.penalties_ @ w**2 / 2

    h = 1e-5
    slope = [(objective(coef + h * e) - objective(coef - h * e)) / (2 * h) for e in np.eye(4)]
    np.testing.assert_allclose(slope, 0, atol=1e-5)
    assert np.ptp(model.penalties_) == 0 and model.penalty_structure_ == "single"


def test_a_single_penalty_is_the_best_of_a_grid():
    X, events, times = draw(80, 4, seed=3)
    cv = StratifiedKFold(4)
    model = BilevelCoxPH("single", cv=cv, tol=1e-5).fit(X, target(events, times))
    inner = make_model((X - X.mean(axis=0)) / X.std(axis=0), events, times)
    objective = Objective(inner, make_folds(list(cv.split(X, events)), np.ones(80)), Structure("", np.zeros(4, int)))
    grid = [objective.value(np.array([at])) for at in np.log(80) + np.linspace(-9, 7, 60)]
    assert objective.value(np.log(model.penalties_[:1])) <= min(grid) + 1e-3


def test_survival_functions_are_breslows(fitted):
    model, X, y = fitted
    risk = np.exp(X @ model.coef_)
    steps = [np.sum(y["event"] & (y["time"] == t)) / risk[y["time"] >= t].sum() for t in model.unique_times_]
    expected = risk[:5, None] * np.cumsum(steps)
    np.testing.assert_array_equal(model.unique_times_, np.unique(y["time"]))
    np.testing.assert_allclose(model.predict_cumulative_hazard_function(X[:5]), expected)
    np.testing.assert_allclose(model.predict_survival_function(X[:5]), np.exp(-expected))


def test_predictions_are_risks(fitted):
    model, X, y = fitted
    np.testing.assert_allclose(model.predict(X), X @ model.coef_)
    assert model.score(X, y) == concordance_index(y["event"], y["time"], model.predict(X)) > 0.7
    assert cross_val_score(model, X, y, cv=3).mean() > 0.65


@pytest.fixture(scope="module")
def useless():
    """Two features that tell, and many that do not."""
    X, events, times = draw(150, 17, ties=50)
    return X[::-1], target(events, times)[::-1], np.arange(17) >= 2


def test_groups_are_taken_where_they_help(useless):
    X, y, noise = useless
    model = BilevelCoxPH(groups=noise, random_state=0, cv=KFold(4)).fit(X, y)
    assert model.penalty_structure_ == "per_group"
    assert model.penalties_[noise].min() > 10 * model.penalties_[~noise].max()
    assert list(model.candidates_["structure"]) == ["single"] + 3 * ["per_group"] + 3 * ["per_feature"]


def test_large_sparse_and_dense_rows_give_the_same(monkeypatch):
    monkeypatch.setattr(linear_model, "_FEW_ENTRIES", 0)
    X, events, times = draw(60, 4)
    X, y = np.where(np.abs(X) > 0.5, X, 0), target(events, times)
    dense, sparse = (BilevelCoxPH("single", random_state=0).fit(form(X), y) for form in (np.asarray, sp.csr_array))
    np.testing.assert_allclose(sparse.coef_, dense.coef_, rtol=1e-5)
    curves = [model.predict_survival_function(rows) for model, rows in ((dense, X), (sparse, sp.csr_array(X)))]
    np.testing.assert_allclose(*curves, rtol=1e-5)


def test_rows_are_held_out_as_the_user_says(fitted):
    _, X, y = fitted
    labels = np.arange(150) // 10
    own = BilevelCoxPH("single", cv=GroupKFold(3)).fit(X, y, cv_groups=labels)
    pairs = BilevelCoxPH("single", cv=list(GroupKFold(3).split(X, groups=labels))).fit(X, y)
    np.testing.assert_allclose(own.coef_, pairs.coef_)
    given = BilevelCoxPH("single").fit(X[:100], y[:100], X_val=X[100:], y_val=y[100:])
    same = BilevelCoxPH("single", cv=[(np.arange(100), np.arange(100, 150))]).fit(X, y)
    np.testing.assert_allclose(given.coef_, same.coef_)


def test_folds_are_stratified_by_events(fitted):
    model, X, y = fitted  # 150 rows are shuffled five times
    folds = StratifiedKFold(5, shuffle=True, random_state=np.random.RandomState(0))
    pairs = [pair for _ in range(5) for pair in folds.split(X, y["event"])]
    np.testing.assert_array_equal(model.coef_, BilevelCoxPH("single", cv=pairs).fit(X, y).coef_)


Y = target([True, False, True, False], [1.0, 2.0, 3.0, 3.0])


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (np.ones(4), r"`y` must be a structured array of two fields.* Got an array of float64 and shape \(4,\)"),
        ([(True, 1.0)] * 4, "structured array of two fields.* Got list"),
        (None, "requires y to be passed, but the target y is None"),
        (Y[["time", "event"]], r"event was seen \(bool\) and its time .* Got an array of .*'time', 'event'"),
        (Y.astype([("event", bool), ("time", "U3")]), r"and its time \(float\), .* Got an array of .*<U3"),
        (target([True] * 4, [1.0, np.nan, 2.0, 3.0]), "Input y contains NaN"),
        (target([True] * 4, [1.0, -1.0, 2.0, 3.0]), "Some times of `y` are negative"),
        (target([False] * 4, [1.0, 1.0, 2.0, 3.0]), "All rows of `y` that have weight are censored"),
        (Y[:3], "inconsistent numbers of samples"),
    ],
    ids=str,
)
def test_invalid_targets_are_rejected(y, message):
    with pytest.raises(ValueError, match=message):
        BilevelCoxPH().fit(np.arange(8.0).reshape(4, 2), y)


def test_rows_without_weight_have_no_events():
    with pytest.raises(ValueError, match="All rows of `y` that have weight are censored"):
        BilevelCoxPH().fit(np.arange(8.0).reshape(4, 2), Y, sample_weight=[0.0, 1.0, 0.0, 1.0])
    with pytest.raises(ValueError, match="`y_val` must be a structured array"):
        BilevelCoxPH().fit(np.arange(8.0).reshape(4, 2), Y, X_val=np.zeros((4, 2)), y_val=np.zeros(4))


@pytest.mark.parametrize(
    ("X", "y"),
    [
        (np.ones((30, 2)), target(np.arange(30) % 2 == 0, np.arange(30.0))),
        (np.arange(30.0)[:, None], target([True] * 30, np.arange(30.0))),
        (np.arange(30.0)[:, None], target([True] * 30, np.ones(30))),
        (np.arange(30.0)[:, None], target(np.arange(30) == 29, np.arange(30.0))),
        (1e4 * np.arange(60.0).reshape(30, 2) ** 2, target([True] * 30, np.zeros(30))),
    ],
    ids=["constant", "perfect", "tied", "one event", "large"],
)
@pytest.mark.parametrize("standardize", [True, False])
def test_unusual_data_are_fitted(X, y, standardize):
    model = BilevelCoxPH(standardize=standardize, random_state=0).fit(X, y)
    assert np.isfinite(model.coef_).all()
    assert np.isfinite(model.predict_survival_function(X)).all()


class CoxOfNumbers(BilevelCoxPH):
    """Takes any numbers as times of events, as scikit-learn's checks give them."""

    def fit(self, X, y, sample_weight=None, **options):
        if y is None:
            return super().fit(X, y)
        y = column_or_1d(y, warn=True).astype(float)
        return super().fit(X, target(np.ones(len(y), bool), y - min(0, np.nanmin(y))), sample_weight, **options)

    def score(self, X, y):
        return super().score(X, target(np.ones(len(y), bool), y - np.min(y)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning", "ignore::UserWarning")
@parametrize_with_checks([CoxOfNumbers(), CoxOfNumbers("per_feature", standardize=False, cv=3)])
def test_checks_of_scikit_learn_pass(estimator, check):
    check(estimator)
