"""`scoring` chooses the level of the penalties."""

import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer, make_regression
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import get_scorer
from sklearn.model_selection import KFold, cross_val_score

from bilevel.estimators import BilevelElasticNet, BilevelLogisticRegression, BilevelRidge

FACTORS = 10.0 ** np.arange(-2, 2.1, 0.5)
SPLITS = KFold(4)


def mean_scores(build, penalty, X, y, scoring):
    return np.array(
        [cross_val_score(build(penalty * factor), X, y, cv=SPLITS, scoring=scoring).mean() for factor in FACTORS]
    )


@pytest.mark.parametrize("scoring", ["neg_mean_absolute_error", "neg_max_error"])
def test_all_penalties_have_the_factor_that_scores_best(scoring):
    X, y = make_regression(60, 30, n_informative=8, noise=40, random_state=3)
    y = 100 + y**3 / 1e4
    options = {"structure": "single", "standardize": False, "cv": SPLITS}
    plain, scored = BilevelRidge(**options).fit(X, y), BilevelRidge(**options, scoring=scoring).fit(X, y)
    expected = FACTORS[np.argmax(mean_scores(Ridge, plain.penalties_[0], X, y, scoring))]
    assert expected != 1
    np.testing.assert_allclose(scored.penalties_ / plain.penalties_, expected, rtol=1e-9)
    reference = Ridge(scored.penalties_[0]).fit(X, y)
    np.testing.assert_allclose(scored.coef_, reference.coef_, rtol=1e-6)


def test_a_score_of_probabilities_sees_labels_and_columns_as_given():
    X, y = load_breast_cancer(return_X_y=True, as_frame=True)
    X, y = X.iloc[:150, :4] / X.iloc[:150, :4].std(), np.where(y[:150], "benign", "malignant")
    options = {"structure": "single", "standardize": False, "cv": SPLITS}
    plain = BilevelLogisticRegression(**options).fit(X, y)
    scored = BilevelLogisticRegression(**options, scoring="roc_auc").fit(X, y)
    means = mean_scores(lambda p: LogisticRegression(C=1 / p, tol=1e-8), plain.penalties_[0], X, y, "roc_auc")
    factor = (scored.penalties_ / plain.penalties_)[0]
    assert means[np.argmin(np.abs(np.log(FACTORS / factor)))] == means.max() > means.min()


def test_the_two_strengths_of_an_elastic_net_have_one_factor():
    X, y = make_regression(50, 12, n_informative=3, noise=20, random_state=0)
    small = get_scorer("r2")
    few = BilevelElasticNet(random_state=0, scoring=lambda *of: small(*of) - np.count_nonzero(of[0].coef_)).fit(X, y)
    plain = BilevelElasticNet(random_state=0).fit(X, y)
    np.testing.assert_allclose(few.l1_penalties_ / plain.l1_penalties_, 100.0)
    np.testing.assert_allclose(few.penalties_ / plain.penalties_, 100.0)


def test_an_unknown_scorer_is_rejected():
    X, y = make_regression(20, 3, random_state=0)
    with pytest.raises(ValueError, match="scoring"):
        BilevelRidge(scoring="nonsense").fit(X, y)
