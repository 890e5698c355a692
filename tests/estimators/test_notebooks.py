"""The summary of a fit in notebooks, and the lines that `verbose` prints."""

import numpy as np
import pytest
import sklearn
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from bilevel.estimators import BilevelElasticNet, BilevelLogisticRegression, BilevelRidge, DataCleaningClassifier

rng = np.random.default_rng(0)
X = rng.standard_normal((60, 4))
y = X[:, 0] + 0.5 * rng.standard_normal(60)
LABELS = (y > 0).astype(int)
FITTED = {
    "ridge": lambda: BilevelRidge(groups=list("aabb"), random_state=0).fit(X, y),
    "elastic net": lambda: BilevelElasticNet(random_state=0).fit(X, y),
    "logistic": lambda: BilevelLogisticRegression(unpenalized=[0, 1, 2, 3]).fit(X, LABELS),
    "cleaning": lambda: DataCleaningClassifier(random_state=0).fit(X[:40], LABELS[:40], X[40:], LABELS[40:]),
}


@pytest.mark.parametrize("kind", FITTED)
def test_a_summary_of_the_fit_is_displayed_below_the_diagram(kind):
    model = FITTED[kind]()
    shown = model._repr_mimebundle_()["text/html"]
    name = type(model).__name__
    assert f"{name}, fitted" in shown and "sk-top-container" in shown
    assert f"{name}, fitted" not in type(model)()._repr_mimebundle_()["text/html"]
    if kind in ("ridge", "elastic net"):
        assert f"{model.penalties_.min():.4g} to" in shown and "polyline" in shown and model.penalty_structure_ in shown


def test_pipelines_and_plain_text_are_displayed_by_scikit_learn():
    assert "BilevelRidge" in make_pipeline(StandardScaler(), BilevelRidge())._repr_mimebundle_()["text/html"]
    with sklearn.config_context(display="text"):
        assert "text/html" not in BilevelRidge().fit(X, y)._repr_mimebundle_()


def test_verbose_prints_the_steps_of_a_fit(capsys):
    quiet = BilevelRidge(groups=list("aabb"), random_state=0).fit(X, y)
    assert capsys.readouterr().out == ""
    told = BilevelRidge(groups=list("aabb"), random_state=0, verbose=True).fit(X, y)
    first, single, comparing, *_, last = capsys.readouterr().out.splitlines()
    assert first.startswith("BilevelRidge: learning the penalties of 4 features on 60 rows, ")
    assert single.startswith("BilevelRidge: a single penalty: ") and "per_group (0.5)" in comparing
    assert last.startswith(f"BilevelRidge: {told.penalty_structure_}, ")
    np.testing.assert_array_equal(told.coef_, quiet.coef_)
    DataCleaningClassifier(random_state=0, verbose=1).fit(X[:40], LABELS[:40], X[40:], LABELS[40:])
    assert "DataCleaningClassifier: one rate of wrong labels, round 1: " in capsys.readouterr().out


def test_verbose_is_a_number_or_a_bool():
    with pytest.raises(ValueError, match="The 'verbose' parameter of BilevelRidge must be an int in the range"):
        BilevelRidge(verbose="yes").fit(X, y)
