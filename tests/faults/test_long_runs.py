"""The memory of a long run stays constant, and results do not depend on thread, process or processor.

The memory of many problems in one process is tested in ``tests/engine/test_programs.py``.
"""

import copy
import os
import pickle
import warnings
from concurrent.futures import ThreadPoolExecutor

import joblib
import numpy as np
import pytest
from sklearn.base import clone, is_classifier

from bilevel import estimators
from tests.faults import LONG, SEED, repeats
from tests.faults.long_runs import answer, digests

pytestmark = pytest.mark.slow
MARGIN = 30  # megabytes


def test_no_tenth_of_a_long_run_takes_more_memory_than_the_first():
    megabytes = answer("steps", *repeats((20_000, 100), (10**6, 1000)))
    first, *others = (max(part) for part in np.array_split(megabytes, 10))
    assert max(others) <= first + MARGIN, [first, *others]


@pytest.mark.parametrize("processors", ["any", "one", "two"])
def test_the_same_seed_gives_the_same_bits_in_another_process(processors):
    available = sorted(os.sched_getaffinity(0))
    if processors == "two" and len(available) < 2:
        pytest.skip("there is one processor")
    chosen = {"any": None, "one": available[:1], "two": available[:2]}[processors]
    cpus = None if chosen is None else ",".join(map(str, chosen))
    assert answer("digests", int(LONG), cpus=cpus) == digests(LONG)


def predictions(estimator, X, y):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return estimator.fit(X, y).predict(X)


def table_for(estimator):
    rng = np.random.default_rng(SEED)
    X = rng.standard_normal((60, 4))
    y = X @ [1.0, -1.0, 0.5, 0.0] + 0.3 * rng.standard_normal(60)
    if isinstance(estimator, estimators.BilevelCoxPH):
        return X, np.array(list(zip(y > -1, np.exp(y), strict=True)), [("event", bool), ("time", float)])
    return X, (y > 0).astype(int) if is_classifier(estimator) else np.exp(y / 2)


@pytest.mark.parametrize("name", estimators.__all__)
def test_an_estimator_predicts_the_same_in_threads_in_processes_and_as_a_copy(name):
    estimator = getattr(estimators, name)(random_state=SEED)
    X, y = table_for(estimator)
    expected = predictions(estimator, X, y)
    jobs = [clone(estimator), clone(estimator)]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda job: predictions(job, X, y), jobs))
    found += joblib.Parallel(n_jobs=2, backend="loky")(joblib.delayed(predictions)(job, X, y) for job in jobs)
    found += [other.predict(X) for other in (pickle.loads(pickle.dumps(estimator)), copy.deepcopy(estimator))]
    for one in found:
        np.testing.assert_array_equal(one, expected)
