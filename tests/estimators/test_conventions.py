"""Conventions of scikit-learn: its checks of estimators, docstrings and examples."""

import doctest
import re

import numpy as np
import pytest
from sklearn.base import clone, is_classifier
from sklearn.utils.estimator_checks import parametrize_with_checks

from bilevel import estimators
from bilevel.estimators import (
    BilevelCoxPH,
    BilevelElasticNet,
    BilevelGammaRegressor,
    BilevelHuberRegressor,
    BilevelLogisticRegression,
    BilevelPoissonRegressor,
    BilevelRidge,
    BilevelSparseLogisticRegression,
    DataCleaningClassifier,
)

PENALTIES = [BilevelLogisticRegression(), BilevelRidge(), BilevelPoissonRegressor(), BilevelGammaRegressor()]
PENALTIES += [BilevelHuberRegressor(), BilevelElasticNet(), BilevelSparseLogisticRegression()]
ESTIMATORS = [*PENALTIES, DataCleaningClassifier()]
WITH_OPTIONS = [
    BilevelLogisticRegression("single", fit_intercept=False, cv=2),
    BilevelRidge("per_feature", fit_intercept=False, standardize=False, cv=2),
]
# The conventions are about one fit; two folds make it short.
CHECKED = [clone(estimator).set_params(cv=2) for estimator in PENALTIES] + [DataCleaningClassifier(), *WITH_OPTIONS]
WITHOUT_INTERCEPT = {"check_class_weight_classifiers": "LogisticRegression fails it too, when it has no intercept"}


TO_TOLERANCE = {"check_sample_weight_equivalence_on_sparse_data": "L-BFGS finds coefficients to 1e-5, not 1e-7"}


def expected_failures(estimator):
    if isinstance(estimator, DataCleaningClassifier):
        return TO_TOLERANCE
    return {} if estimator.fit_intercept else WITHOUT_INTERCEPT


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning", "ignore::UserWarning")
@parametrize_with_checks(CHECKED, expected_failed_checks=expected_failures)
def test_checks_of_scikit_learn_pass(estimator, check):
    check(estimator)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
@parametrize_with_checks([BilevelRidge("single", cv=2)])
def test_checks_of_scikit_learn_pass_quickly(estimator, check):
    check(estimator)


SURVIVAL = BilevelCoxPH()  # its targets have two fields: scikit-learn's checks of it are in test_survival.py
each = pytest.mark.parametrize("estimator", [*ESTIMATORS, SURVIVAL], ids=lambda estimator: type(estimator).__name__)


@each
def test_a_clone_has_the_same_parameters_and_no_fit(estimator):
    changed = clone(estimator).set_params(max_iter=7, random_state=3)
    assert clone(changed).get_params() == changed.get_params()
    assert not any(name.endswith("_") and not name.startswith("_") for name in vars(clone(changed)))


@each
def test_every_parameter_and_attribute_is_explained(estimator):
    parameters, attributes = (
        re.findall(r"^(\w+(?:, \w+)*) : ", part, re.MULTILINE) for part in type(estimator).__doc__.split("Attributes\n")
    )
    assert set(parameters) == set(estimator.get_params()) and len(set(parameters)) == len(parameters)
    assert {"coef_", "intercept_", "n_features_in_", "feature_names_in_", "history_", "n_iter_"} <= set(attributes)
    assert "{" not in "".join(type(estimator).__doc__.split("Examples")[0].split("Attributes")[1])


@each
def test_a_fitted_estimator_has_the_attributes_that_are_explained(estimator):
    pd = pytest.importorskip("pandas")
    rng = np.random.default_rng(0)
    X = pd.DataFrame(rng.standard_normal((40, 2)), columns=["a", "b"])
    y = rng.gamma(2.0, 1.0, 40)
    if is_classifier(estimator):
        y = X["a"] > 0
    elif isinstance(estimator, BilevelCoxPH):
        y = np.array([(True, time) for time in y], [("event", bool), ("time", float)])
    options = {"X_val": X, "y_val": y} if isinstance(estimator, DataCleaningClassifier) else {}
    fitted = clone(estimator).set_params(random_state=0).fit(X, y, **options)
    described = re.findall(r"^(\w+_) : ", type(estimator).__doc__, re.MULTILINE)
    assert [name for name in described if not hasattr(fitted, name)] == []


def test_public_names_are_there():
    assert (
        {type(estimator).__name__ for estimator in [*ESTIMATORS, SURVIVAL]}
        == set(estimators.__all__)
        == set(dir(estimators))
    )
    with pytest.raises(AttributeError, match="has no attribute 'Lasso'"):
        estimators.Lasso  # noqa: B018


@pytest.mark.slow
@pytest.mark.parametrize("name", estimators.__all__)
def test_the_example_of_the_docstring_runs(name):
    (example,) = doctest.DocTestFinder(recurse=False).find(getattr(estimators, name), name)
    result = doctest.DocTestRunner().run(example)
    assert result.attempted > 4 and result.failed == 0
