"""Estimators in threads and as copies give identical results.

``tests/faults/test_long_runs.py`` tests every estimator, also in other processes.
"""

import copy
import functools
import pickle
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from sklearn.base import clone, is_classifier

from bilevel import estimators

each = pytest.mark.parametrize("name", ["BilevelRidge", "DataCleaningClassifier"])


def data(estimator):
    rng = np.random.default_rng(0)
    X = rng.standard_normal((40, 3))
    y = X @ [1.0, -1.0, 0.5] + 0.3 * rng.standard_normal(40)
    return X, (y > 0).astype(int) if is_classifier(estimator) else y


def fit(name):
    estimator = getattr(estimators, name)(random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return estimator.fit(*data(estimator))


def fit_and_predict(name):
    fitted = fit(name)
    return fitted.predict(data(fitted)[0])


@pytest.fixture(scope="module")
def here():
    return functools.cache(fit)


@each
def test_a_copy_predicts_as_the_original(name, here):
    X, y = data(here(name))
    expected = here(name).predict(X)
    for other in (pickle.loads(pickle.dumps(here(name))), copy.deepcopy(here(name))):
        np.testing.assert_array_equal(other.predict(X), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        np.testing.assert_array_equal(clone(other).fit(X, y).predict(X), expected)


@each
def test_fits_in_two_threads_are_identical(name, here):
    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(fit_and_predict, [name, name]):
            np.testing.assert_array_equal(found, here(name).predict(data(here(name))[0]))
