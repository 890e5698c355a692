"""The comparison of estimators reads tables exactly, fixes the splits, keeps results and tests them correctly."""

import gzip
import importlib
import io
import json
import lzma
import pickle
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
BOMBS = [("csv", "a.csv", bytes), ("csv", "a.csv.gz", gzip.compress), ("pickle", "a.pkl.xz", lzma.compress)]


@pytest.fixture
def script(monkeypatch):
    """Return a function that imports a script by name, as other scripts do."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module
    for path in FOLDER.glob("*.py"):
        sys.modules.pop(path.stem, None)


def wheel(folder, name, files):
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)


def entry(reader, *files, **more):
    return {"wheel": "made-up", "version": "1.0", "files": list(files), "reader": reader, "task": "binary", **more}


def test_a_file_without_names_is_read_from_a_wheel(script, tmp_path):
    wheel(tmp_path, "made_up", {"a/b.dat": "1.5, u, yes\n, v, no\n-2, u, yes\n"})
    frame = script("estimator_files").read(entry("bare", "a/b.dat"), tmp_path)
    assert list(frame) == ["c0", "c1", "target"]
    np.testing.assert_array_equal(frame["c0"], [1.5, np.nan, -2])
    assert list(frame["c1"]) == ["u", "v", "u"]


@pytest.mark.parametrize(("reader", "name", "pack"), BOMBS)
def test_a_bomb_in_a_wheel_is_cut(reader, name, pack, script, tmp_path, monkeypatch):
    wheel(tmp_path, "made_up", {name: pack(b"0,1\n" * 10_000)})
    files = script("estimator_files")
    monkeypatch.setattr(files, "MOST_BYTES", 10_000)
    with pytest.raises(files.Unavailable, match="more than 10,000 bytes"):
        files.read(entry(reader, name), tmp_path)


def test_views_are_joined_by_row(script, tmp_path):
    wheel(
        tmp_path, "made_up", {"a.csv": "0,1,0\n1,2,7\n3,4,8\n", "b.csv": "0,0\n5,7\n6,8\n", "c.csv": "0,0\n5,8\n6,7\n"}
    )
    files = script("estimator_files")
    frame = files.read(entry("views", "a.csv", "b.csv"), tmp_path)
    assert frame.to_dict("list") == {"0.0": [1, 3], "0.1": [2, 4], "1.0": [5, 6], "target": [7, 8]}
    with pytest.raises(files.Unavailable, match="different rows"):
        files.read(entry("views", "a.csv", "c.csv"), tmp_path)


def test_series_have_a_column_per_channel_and_time(script, tmp_path):
    wheel(tmp_path, "made_up", {"a.ts": "@x\n@data\n1,2:3,4:u\n", "b.ts": "@data\n5,6:7,8:v\n"})
    frame = script("estimator_files").read(entry("series", "a.ts", "b.ts"), tmp_path)
    assert frame.iloc[:, :-1].to_numpy().tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert list(frame) == ["0.0", "0.1", "1.0", "1.1", "target"]
    assert list(frame["target"]) == ["u", "v"]


def test_a_pickle_that_names_more_than_data_frames_is_refused(script, tmp_path):
    files = script("estimator_files")
    harmful = pickle.dumps(FOLDER.joinpath)  # a bound method of a path
    with pytest.raises(ValueError, match="is not part of a data frame"):
        files.unpickle(io.BytesIO(harmful))


def test_a_file_that_is_missing_in_the_wheel_is_named(script, tmp_path):
    wheel(tmp_path, "made_up", {"a.csv": "x\n1\n"})
    files = script("estimator_files")
    with pytest.raises(files.Unavailable, match=r"made-up==1.0 is not as expected.*b.csv"):
        files.read(entry("csv", "b.csv"), tmp_path)


def test_a_set_that_differs_from_the_list_is_refused(script, tmp_path, monkeypatch):
    sets = script("estimator_sets")
    text = "x,target\n" + "".join(f"{k},{k % 2}\n" for k in range(10))
    wheel(tmp_path, "made_up", {"a.csv": text})
    known = entry("csv", "a.csv") | {"rows": 10, "columns": 1, "classes": 2, "n_groups": 0}
    table = sets.encode(sets.read(known, tmp_path), known)
    known |= sets.facts(table)
    monkeypatch.setattr(sets, "entries", lambda: {"mine": known, "other": known | {"digest": "0"}})
    for _ in range(2):  # from the wheel, then from the arrays next to it
        np.testing.assert_array_equal(sets.load("mine", tmp_path).X, table.X)
        (tmp_path / "made_up-1.0-py3-none-any.whl").unlink(missing_ok=True)
    wheel(tmp_path, "made_up", {"a.csv": text})
    with pytest.raises(sets.Unavailable, match=r"its digest is .*, not 0"):
        sets.load("other", tmp_path)


def test_the_list_is_complete(script):
    sets = script("estimator_sets")
    assert len(sets.names()) >= 20
    for name, known in sets.entries().items():
        assert known["task"] in sets.TASKS, name
        assert {"rows", "columns", "classes", "n_groups", "digest", "splits"} <= set(known), name
        train = [sets.split_rows(known["rows"], split)[0] for split in range(sets.SPLITS)]
        assert sets.digest(*train) == known["splits"], name


def test_a_category_becomes_a_group_of_columns_and_gaps_become_a_level(script):
    frame = pd.DataFrame({"c": ["a", "b", None, "a"], "x": [1.0, None, 3, 4], "t": ["n", "y", "n", "y"]})
    table = script("estimator_sets").encode(frame, {"target": "t", "task": "binary"})
    np.testing.assert_array_equal(table.X, [[1, 0, 0, 1], [0, 1, 0, np.nan], [0, 0, 1, 3], [1, 0, 0, 4]])
    assert table.groups.tolist() == [0, 0, 0, 1]
    assert table.y.tolist() == [0, 1, 0, 1]


def test_rare_levels_share_a_column(script, monkeypatch):
    sets = script("estimator_sets")
    monkeypatch.setattr(sets, "LEVELS", 2)
    columns = sets.columns_of(pd.Series(["a", "b", "b", "c", "c", "d"]))
    np.testing.assert_array_equal(columns, np.array([[0, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 0], [1, 0, 0, 0, 0, 1]]).T)


def test_groups_follow_their_rule(script):
    group = script("estimator_sets").group
    assert group(["a_1", "a_2", "b", "b"], "source").tolist() == [0, 1, 2, 2]
    assert group(["a_1", "a_2", "b"], {"pattern": "^[a-z]"}).tolist() == [0, 0, 1]
    assert group(list("abcdef"), {"blocks": 3}).tolist() == [0, 0, 1, 1, 2, 2]
    assert group(list("abcdef"), {"cuts": [1, 4]}).tolist() == [0, 1, 1, 1, 2, 2]
    assert group(list("abcdef"), {"every": 4}).tolist() == [0, 1, 2, 3, 0, 1]
    assert group(["a", "b"], "none") is None
    assert group(["a", "b"], "source") is None  # one group per column


def test_splits_are_the_same_everywhere_and_share_no_row(script):
    split_rows = script("estimator_sets").split_rows
    train, test = split_rows(10, 0)
    assert train.tolist() == [1, 3, 2, 4, 7, 9]  # fixed once
    assert sorted([*train, *test]) == list(range(10))
    assert split_rows(10, 1)[0].tolist() != train.tolist()
    assert [len(rows) for rows in split_rows(5000, 0)] == [2000, 3000]


def test_columns_are_standardized_by_training_rows(script):
    X = np.array([[1.0, 5, np.nan], [3, 5, np.nan], [np.nan, 5, np.nan], [8, 5, np.nan]])
    train, test = script("estimator_sets").standardize(X, np.array([[np.nan, 7.0, 1.0]]))
    filled = np.array([1.0, 3, 3, 8])
    np.testing.assert_allclose(train[:, 0], (filled - filled.mean()) / filled.std())
    np.testing.assert_allclose(test[0], [(3 - filled.mean()) / filled.std(), 0, 0])
    assert not train[:, 1:].any()


def test_the_corrected_test_is_the_paired_test_with_a_larger_variance(script):
    from scipy import stats

    differences = np.array([0.1, 0.3, -0.05, 0.2, 0.15])
    test = script("estimator_tables").corrected_t_test
    assert test(differences, 0.0) == pytest.approx(stats.ttest_1samp(differences, 0).pvalue, rel=1e-12)
    statistic = 0.14 / np.sqrt((1 / 5 + 2 / 3) * np.sum((differences - 0.14) ** 2) / 4)
    assert test(differences, 2 / 3) == pytest.approx(2 * stats.t(4).cdf(-statistic), rel=1e-12)
    assert test(np.zeros(5), 0.5) == 1


def result(name, split, model, loss, **more):
    found = {"status": "ok", "loss": str(loss), "first": "2.0", "second": "1.0", "version": "scikit-learn 1.0"}
    empty = dict.fromkeys(("error", "structure"), "")
    return {"set": name, "split": str(split), "model": model, **found, **empty, **more}


@pytest.fixture
def results():
    """Two sets. On the first, LassoCV is about 10 % better on each split; on the second a fit took too long."""
    rows = [result("one", split, "RidgeCV", 2.0 + split) for split in range(5)]
    rows += [result("one", split, "LassoCV", (2.0 + split) * (0.9 + 0.001 * split)) for split in range(5)]
    rows += [result("two", split, "LogisticRegressionCV", 0.5) for split in range(5)]
    rows += [result("two", split, "bilevel", 0.5 + 0.1 * (-1) ** split, first="9.0") for split in range(5)]
    return [*rows, *(result("one", split, "ARDRegression", "", status="timeout") for split in range(5))]


def test_tables_compare_with_the_reference(script, results):
    tables = script("estimator_tables")
    page = tables.page(results)
    assert "| one | 4.000 | -9.8 %* |" in page
    assert "| two | 0.5000 | +4.0 % |" in page
    lines = {line.split(" | ")[0].strip("| "): line.split(" | ")[1:] for line in page.splitlines()}
    assert lines["LassoCV"][:5] == ["1", "1", "1, 0", "-9.8 %", "-9.8 % (one)"]
    assert lines["bilevel"][-2:] == ["9.0", "1.0 |"]


def test_a_model_counts_only_with_all_splits(script, results):
    tables = script("estimator_tables")
    cut = [row for row in results if (row["model"], row["split"]) != ("LassoCV", "3")]
    assert tables.changes(cut)["one"] == {}
    assert set(tables.changes(results)["one"]) == {"LassoCV"}


def test_a_later_row_replaces_an_earlier_one(script, results):
    tables = script("estimator_tables")
    again = [result("one", split, "LassoCV", 2.0 + split) for split in range(5)]
    assert tables.changes(results + again)["one"]["LassoCV"].mean == 0


def test_equal_results_give_equal_figures(script, results, tmp_path):
    tables = script("estimator_tables")
    for name in ("a.svg", "b.svg"):
        tables.draw(results, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_a_run_is_resumed_after_a_line_that_was_cut_off(script, results, tmp_path):
    estimators, path = script("estimators"), tmp_path / "kept.csv"
    estimators.keep(path, results[:4])
    with path.open("a") as file:
        file.write("one,4,RidgeCV,ok,6.")
    rows = estimators.read_kept(path)
    assert rows == results[:4]
    assert estimators.missing(rows, "one", "RidgeCV") == [4]
    estimators.keep(path, rows)
    estimators.append(path, results[4])
    assert estimators.read_kept(path) == results[:5]
    assert estimators.missing(results, "one", "RidgeCV") == []


def test_a_name_that_does_not_exist_is_refused(script):
    with pytest.raises(SystemExit, match="unknown set 'iris'; there are "):
        script("estimators").main(["--sets", "iris"])


def test_splits_after_a_timeout_are_not_tried(script, tmp_path):
    child = tmp_path / "python"
    child.write_text('#!/bin/sh\necho \'{"status": "ok", "loss": "1.5"}\'\nkill -XCPU $$\n')
    child.chmod(0o755)
    rows = list(script("estimators").run_model("one", "RidgeCV", [1, 3, 4], 9.0, str(child)))
    assert [(row["split"], row["status"], row["loss"]) for row in rows] == [
        ("1", "ok", "1.5"),
        ("3", "timeout", ""),
        ("4", "timeout", ""),
    ]


@pytest.mark.slow
def test_a_fit_that_takes_too_long_ends_its_process(script):
    body = "import estimators; estimators.limit(0.2)\nwhile True: pass"
    done = subprocess.run([sys.executable, "-c", body], cwd=FOLDER)
    assert done.returncode in (-signal.SIGXCPU, -signal.SIGALRM)  # the second one if other processes take the time


@pytest.fixture
def made_up(script, monkeypatch):
    """Twenty classified rows, as the set "mine"."""
    sets = script("estimator_sets")
    X = np.arange(40.0).reshape(20, 2) % 7
    table = sets.Table("binary", X, np.arange(20) % 2, np.array([0, 0]))
    monkeypatch.setattr(sets, "load", lambda name, folder=None: table)
    monkeypatch.setattr(script("estimators"), "limit", lambda seconds: None)
    return table


class Constant:
    """A classifier that gives each row the probability 0.8 of the second class."""

    def fit(self, X, y):
        return self

    def predict(self, X):
        return np.ones(len(X))

    def predict_proba(self, X):
        return np.tile([0.2, 0.8], (len(X), 1))


def test_losses_are_those_of_test_rows(script, made_up, monkeypatch, capsys):
    estimators, Model = script("estimators"), script("estimator_models").Model
    model = Model(lambda kind: Constant(), lambda model: "constant")
    monkeypatch.setattr(estimators, "models", lambda kind: {"mine": model})
    monkeypatch.setattr(estimators, "version", lambda model: "1.0")
    estimators.measure("mine", "mine", [0, 1], 1.0, None)
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for split, row in enumerate(found):
        targets = made_up.rows(split).y_test
        assert float(row["loss"]) == pytest.approx(-np.log(np.where(targets == 1, 0.8, 0.2)).mean(), rel=1e-5)
        assert float(row["error"]) == pytest.approx(np.mean(targets == 0))
    assert [bool(row["first"]) for row in found] == [True, False]


def test_a_missing_model_is_skipped_with_a_reason(script, made_up, capsys):
    estimators, models = script("estimators"), script("estimator_models")
    models.OURS["bilevel elastic net"] = ("NoSuchClass", "NoSuchClass", {})
    estimators.measure("mine", "bilevel elastic net", [0], 1.0, None)
    assert json.loads(capsys.readouterr().out)["status"] == "skipped: bilevel.estimators has no NoSuchClass"


def test_scaled_columns_with_a_penalty_of_one_equal_those_with_their_penalties(script):
    pytest.importorskip("optuna")
    rng = np.random.default_rng(0)
    X, y = rng.standard_normal((30, 3)), rng.standard_normal(30)
    kind = script("estimator_sets").Table("regression", X, y, np.array([0, 1, 1]))
    search = script("estimator_models").OptunaPerGroup(kind)
    search.penalties = search.of_columns({"group 0": 0.5, "group 1": 20.0})
    search.model = search.plain().fit(search.scale(X), y)
    centered = X - X.mean(0)
    coef = np.linalg.solve(centered.T @ centered + np.diag([0.5, 20, 20]), centered.T @ y)
    np.testing.assert_allclose(search.predict(X), centered @ coef + y.mean(), rtol=1e-10)


ARFF = """% a comment
@attribute days numeric
@attribute end {alive,dead}
@attribute grade {1,2,3}
@attribute x1 numeric
@attribute x2 numeric
@DATA
3,dead,1,0.5,2
4,alive,2,?,1
1,dead,3,1.5,0
"""


def test_survival_tables_are_read_and_encoded(script, tmp_path):
    cox, files = script("cox"), script("estimator_files")
    wheel(tmp_path, "made_up", {"a.arff": ARFF})
    frame = files.read(entry("arff", "a.arff"), tmp_path)
    assert list(frame["grade"]) == ["1", "2", "3"] and np.isnan(frame["x1"][1])
    found = cox.encode(frame, cox.Entry("arff", "a", "days", "end", "", "dead", ("x2",)))
    assert found.y.tolist() == [(True, 3.0), (False, 4.0), (True, 1.0)]
    np.testing.assert_array_equal(found.X, [[1, 0, 0, 0.5], [0, 1, 0, np.nan], [0, 0, 1, 1.5]])
    assert found.groups.tolist() == [0, 0, 0, 1]
    # All three rows are at risk at the first event, two at the second.
    expected = (np.log(np.exp(1) + np.exp(2) + np.exp(3)) - 3 + np.log(np.exp(1) + np.exp(2)) - 1) / 2
    assert cox.loss_per_event(found.y, np.array([1.0, 2.0, 3.0])) == pytest.approx(expected)


def test_the_report_on_cox_models_shows_what_was_measured(script):
    reports = FOLDER.parent / "reports"
    cox = script("cox")
    kept = cox.read_kept(reports / "cox.csv")
    assert len(kept) == len(cox.SETS) * cox.SPLITS * 6
    assert cox.summarize(kept) in (reports / "cox.md").read_text()
