"""Groups of features, the number of BLAS threads during a fit, and the place of warnings."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.compose import ColumnTransformer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from threadpoolctl import threadpool_info, threadpool_limits

from bilevel.estimators import BilevelRidge, DataCleaningClassifier
from bilevel.estimators.base import find_groups, find_prefixes, one_thread_if_small

X = np.array([[1, 0, 0, 0.5, 1], [0, 1, 0, 0.2, 1], [0, 0, 1, 1.5, 0]])
NAMES = ["job_blue_collar", "job_admin", "job_blue", "radius_mean", "radius_flag"]


def test_one_hot_columns_of_one_source_are_one_group():
    assert find_prefixes(X, NAMES) == ["job", "job", "job", "radius", "radius"]
    assert find_prefixes(sp.csr_array(X), NAMES) == find_prefixes(X, NAMES)


def test_columns_that_overlap_are_of_different_sources():
    names = ["cat__a_x", "cat__a_y", "cat__b_x", "cat__b_z", "num__size"]
    rows = np.array([[1, 0, 1, 0, 0.1], [0, 1, 0, 1, 0.2]])
    assert find_prefixes(rows, names) == ["cat__a", "cat__a", "cat__b", "cat__b", "num__size"]


def test_a_transformer_upstream_tells_the_groups():
    pd = pytest.importorskip("pandas")
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"job": rng.choice(["blue_collar", "admin", "none"], 80), "home": rng.choice(["a", "b"], 80)})
    table["age"], table["income"] = rng.standard_normal((2, 80))
    columns = ColumnTransformer(
        [("cat", OneHotEncoder(sparse_output=False), ["job", "home"]), ("num", StandardScaler(), ["age", "income"])]
    ).set_output(transform="pandas")
    model = make_pipeline(columns, BilevelRidge("per_group", groups="prefix", random_state=0))
    model.fit(table, (table["job"] == "admin") + 0.1 * rng.standard_normal(80))
    by_name = model[-1].penalty_table_.set_index("feature")["group"]
    assert set(by_name) == {"cat__job", "cat__home", "num__age", "num__income"}
    assert by_name["cat__job_blue_collar"] == "cat__job"


def test_labels_and_dicts_give_the_same_groups():
    by_label = find_groups(X, NAMES, ["j", "j", "j", "r", "rest"], None)
    by_name = find_groups(
        X, NAMES, {"job_blue_collar": "j", "job_admin": "j", "job_blue": "j", "radius_mean": "r"}, None
    )
    np.testing.assert_array_equal(by_label.numbers, by_name.numbers)
    assert list(by_name.labels) == ["j", "r", "rest"]


def test_unpenalized_features_are_in_no_group():
    found = find_groups(X, NAMES, [0, 0, 1, 1, 2], ["job_admin", 4])
    assert found.penalized.tolist() == [0, 2, 3] and found.numbers.tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("names", "groups", "unpenalized", "message"),
    [
        (NAMES, [0, 1], None, r"group of each of the 5 features, got 2"),
        (NAMES, [[0], [1], [2], [3], [4]], None, "`groups` must have strings or numbers as labels: unhashable type"),
        (NAMES, np.ma.masked_all(5), None, "`groups` must have strings or numbers as labels: unhashable type"),
        (NAMES, "suffix", None, "`groups='suffix'`: must be 'prefix', a dict, or a label for each feature"),
        (None, "prefix", None, "`groups` needs names of columns; give X as a DataFrame"),
        (NAMES, {"age": 1}, None, r"columns that X does not have: \['age'\]"),
        (NAMES, None, ["age"], "`unpenalized` has 'age', which must be a name of a column or a number below 5"),
        (None, None, [7], "`unpenalized` has 7, which must be a number below 5"),
    ],
)
def test_invalid_groups_are_rejected(names, groups, unpenalized, message):
    with pytest.raises(ValueError, match=message):
        find_groups(X, names, groups, unpenalized)


TABLE = np.random.default_rng(5).standard_normal((48, 4))


def blas_threads():
    return [library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"]


@pytest.mark.parametrize(("rows", "inside"), [(1000, 1), (300_000, 2)], ids=["small", "large"])
def test_small_tables_use_one_blas_thread_and_the_limit_is_restored(rows, inside):
    table = np.empty((rows, 2))

    def fit_elsewhere():
        with one_thread_if_small(table):
            pass

    # Of a thread that is not the first, OpenBLAS takes no number.
    with threadpool_limits(2, user_api="blas"), ThreadPoolExecutor(1) as pool:
        with one_thread_if_small(table):
            assert set(blas_threads()) == {inside}
            pool.submit(fit_elsewhere).result()
            assert set(blas_threads()) == {inside}
        assert set(blas_threads()) == {2}


@pytest.fixture
def two_threads():
    with threadpool_limits(2, user_api="blas"):
        if set(blas_threads()) != {2}:
            pytest.skip("this BLAS has one thread")
        yield


def test_the_thread_limit_is_restored_after_a_failed_fit(two_threads, monkeypatch):
    inside = []

    def fail(*args):
        inside.extend(blas_threads())
        raise KeyboardInterrupt

    monkeypatch.setattr(BilevelRidge, "_select", fail)
    with pytest.raises(KeyboardInterrupt):
        BilevelRidge().fit(TABLE, TABLE[:, 0])
    assert set(inside) == {1} and set(blas_threads()) == {2}


def test_the_thread_limit_is_restored_if_a_fit_in_another_thread_ends_last(two_threads):
    begun, end = threading.Event(), threading.Event()

    def fit():
        with one_thread_if_small(TABLE):
            begun.set()
            end.wait(10)

    other = threading.Thread(target=fit)
    with one_thread_if_small(TABLE):
        other.start()
        assert begun.wait(10)
    end.set()
    other.join()
    assert set(blas_threads()) == {2}


def test_warnings_point_to_the_caller():
    with pytest.warns(UserWarning, match="`cv_groups` is ignored") as caught:
        BilevelRidge("single", cv=2).fit(TABLE, TABLE[:, 0], cv_groups=np.arange(48))
    with pytest.warns(UserWarning, match="No trusted rows") as others:
        DataCleaningClassifier(cv=2).fit(TABLE, TABLE[:, 0] > 0)
    assert {item.filename for item in (*caught, *others)} == {__file__}
