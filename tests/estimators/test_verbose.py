"""The lines that `verbose` prints."""

import numpy as np
import pytest

from bilevel.estimators import BilevelRidge, DataCleaningClassifier

rng = np.random.default_rng(0)
X = rng.standard_normal((60, 4))
y = X[:, 0] + 0.5 * rng.standard_normal(60)
LABELS = (y > 0).astype(int)


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
