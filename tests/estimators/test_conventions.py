"""scikit-learn's own checks of an estimator, none left out."""

import doctest

import pytest
from sklearn.base import clone
from sklearn.utils.estimator_checks import parametrize_with_checks

from bilevel.estimators import BilevelLogisticRegression, BilevelRidge, DataCleaningClassifier

ESTIMATORS = [BilevelLogisticRegression(), BilevelRidge(), DataCleaningClassifier()]
WITH_OPTIONS = [
    BilevelLogisticRegression("single", fit_intercept=False, refit=False),
    BilevelRidge("single", standardize=False),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning", "ignore::UserWarning")
@parametrize_with_checks(ESTIMATORS + WITH_OPTIONS)
def test_scikit_learn_finds_no_fault(estimator, check):
    check(estimator)


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda estimator: type(estimator).__name__)
def test_a_clone_has_the_same_parameters_and_no_fit(estimator):
    changed = clone(estimator).set_params(max_iter=7, random_state=3)
    assert clone(changed).get_params() == changed.get_params()
    assert not any(name.endswith("_") and not name.startswith("_") for name in vars(clone(changed)))


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda estimator: type(estimator).__name__)
def test_the_example_of_the_docstring_runs(estimator):
    kind = type(estimator)
    (example,) = doctest.DocTestFinder(recurse=False).find(kind, kind.__name__)
    result = doctest.DocTestRunner().run(example)
    assert result.attempted > 4 and result.failed == 0
