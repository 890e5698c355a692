"""Logs: each row is written at once, files are complete however a run ends, and a failing log does not end a run."""

import csv
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import bilevel
from bilevel.engine import metrics
from tests import cases

ROOT = Path(__file__).parents[2]
SRBA = cases.SOLVERS["SRBA"]


def with_metric(metric):
    problem = cases.quadratic("float32")
    return bilevel.BilevelProblem(problem.oracles, problem.start, problem.exact_solver, metrics={"m": metric})


def at_evaluation(number, act):
    """Return a metric that calls ``act`` at its evaluation ``number``, counted from 1."""
    counts = iter(range(1, 10**6))
    return lambda point: act() if next(counts) == number else 0.0


def interrupt():
    raise KeyboardInterrupt


def table(path):
    with path.open(newline="") as file:
        rows = list(csv.reader(file))
    assert all(len(row) == len(rows[0]) for row in rows)
    return {name: np.array([float(row[i]) for row in rows[1:]]) for i, name in enumerate(rows[0])}


def assert_same_columns(found, history):
    assert list(found) == list(history)
    for name, column in history.items():
        np.testing.assert_array_equal(found[name], column, err_msg=name)


def test_a_csv_log_equals_the_history_bit_for_bit(path):
    result = bilevel.run(cases.quadratic("float32"), SRBA, max_steps=200, log=bilevel.CSVLog(path))
    assert len(result.history["step"]) > 5
    assert_same_columns(table(path), result.history)
    assert [entry.name for entry in path.parent.iterdir()] == ["run.csv"]


def test_a_row_is_written_before_the_run_continues(path):
    class Reading(bilevel.CSVLog):
        def write(self, row):
            super().write(row)
            seen.append(table(path)["step"].tolist())

    seen = []
    result = bilevel.run(cases.quadratic("float32"), SRBA, max_steps=30, eval_every=10, log=Reading(path))
    assert seen == [[0], [0, 10], [0, 10, 20], [0, 10, 20, 30]]
    assert result.history["step"].tolist() == seen[-1]


def test_the_time_of_writing_is_not_counted(monkeypatch):
    clock, waited = time.perf_counter, []
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + sum(waited))

    class Slow(bilevel.Log):
        def write(self, row):
            waited.append(1e4)

    result = bilevel.run(cases.quadratic("float32"), SRBA, max_steps=30, eval_every=10, log=Slow())
    assert len(waited) == 4 and result.history["seconds"][-1] < 5e3


def test_a_column_that_appears_later_is_nan_in_earlier_rows(path, monkeypatch):
    exact = metrics.exact_metrics
    available = iter([False, False, True, True])

    def sometimes(problem, point, guess):
        values, reference = exact(problem, point, guess)
        kept = values if next(available) else {"value": values["value"]}
        return kept, reference

    monkeypatch.setattr("bilevel.engine.driver.exact_metrics", sometimes)
    result = bilevel.run(cases.quadratic("float32"), SRBA, max_steps=30, eval_every=10, log=bilevel.CSVLog(path))
    assert np.isnan(result.history["hypergrad_norm_sq"]).tolist() == [True, True, False, False]
    assert_same_columns(table(path), result.history)


def test_an_interrupt_loses_no_row(path):
    problem = with_metric(at_evaluation(3, interrupt))
    result = bilevel.run(problem, SRBA, max_steps=100, eval_every=20, log=bilevel.CSVLog(path))
    assert result.status == "interrupted" and result.history["step"].tolist() == [0, 20, 40]
    assert_same_columns(table(path), result.history)


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_while_writing_neither_loses_nor_repeats_a_row(path, when):
    class Interrupted(bilevel.CSVLog):
        def write(self, row):
            due = row["step"] == 20 and not interruptions
            if due and when == "before":
                interruptions.append(interrupt)
                interrupt()
            super().write(row)
            if due:
                interruptions.append(interrupt)
                interrupt()

    interruptions = []
    result = bilevel.run(cases.quadratic("float32"), SRBA, max_steps=100, eval_every=10, log=Interrupted(path))
    assert result.status == "interrupted" and result.history["step"].tolist() == [0, 10, 20]
    assert_same_columns(table(path), result.history)


def test_the_rows_before_an_exception_are_in_the_file(path):
    plain, fail = cases.quadratic("float32"), at_evaluation(3, lambda: 1 / 0)
    problem = replace(plain, exact_solver=lambda x, guess: fail(x) or plain.exact_solver(x, guess))
    with pytest.raises(ZeroDivisionError):
        bilevel.run(problem, SRBA, max_steps=100, eval_every=20, log=bilevel.CSVLog(path))
    assert table(path)["step"].tolist() == [0, 20]


def test_the_rows_before_a_process_is_killed_are_in_the_file(path):
    script = (
        "import os, signal, bilevel\nfrom tests import cases\nfrom tests.engine import test_logs\n"
        "problem = test_logs.with_metric(test_logs.at_evaluation(3, lambda: os.kill(os.getpid(), signal.SIGKILL)))\n"
        f"bilevel.run(problem, test_logs.SRBA, max_steps=100, eval_every=20, log=bilevel.CSVLog({str(path)!r}))\n"
    )
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, check=False)
    assert run.returncode == -9, run.stderr
    assert table(path)["step"].tolist() == [0, 20]


def test_a_failing_log_gives_a_warning_and_the_run_continues(path):
    problem = with_metric(at_evaluation(3, lambda: shutil.rmtree(path.parent) or 0.0))
    with pytest.warns(RuntimeWarning, match=r"CSVLog failed.*No such file.*`result.history` has every row") as caught:
        result = bilevel.run(problem, SRBA, max_steps=100, eval_every=20, log=bilevel.CSVLog(path))
    assert [warning.filename for warning in caught] == [__file__], "one warning, at the line of the user"
    assert result.status == "out_of_budget" and result.history["step"].tolist() == [0, 20, 40, 60, 80, 100]
    cases.assert_trees_equal(result.point, bilevel.run(cases.quadratic("float32"), SRBA, max_steps=100).point)


def test_a_log_that_fails_to_close_gives_a_warning(path):
    class Closing(bilevel.CSVLog):
        def close(self):
            raise OSError("no space left")

    with pytest.warns(RuntimeWarning, match=r"Closing failed.*no space left") as caught:
        result = bilevel.run(cases.quadratic("float32"), SRBA, max_steps=20, log=Closing(path))
    assert [warning.filename for warning in caught] == [__file__]
    assert_same_columns(table(path), result.history)


def test_a_new_run_refuses_the_log_file_of_another_run(path):
    first = bilevel.run(cases.quadratic("float32"), SRBA, max_steps=20, log=bilevel.CSVLog(path))
    with pytest.raises(FileExistsError, match=r"run.csv'\)`: the file exists. Delete it.*bilevel.resume"):
        bilevel.run(cases.quadratic("float32"), SRBA, seed=1, max_steps=20, log=bilevel.CSVLog(path))
    assert_same_columns(table(path), first.history)


def test_a_resumed_run_appends_to_its_file(saved, path):
    result = bilevel.resume(*saved, max_steps=100, eval_every=10, log=bilevel.CSVLog(path))
    assert len(result.history["step"]) == 11
    assert_same_columns(table(path), result.history)


def test_rows_after_the_saved_step_are_replaced(saved, path):
    bilevel.resume(*saved, max_steps=100, eval_every=10, log=bilevel.CSVLog(path))
    again = bilevel.resume(*saved, max_steps=70, eval_every=10, log=bilevel.CSVLog(path))
    assert table(path)["step"].tolist() == [0, 10, 20, 30, 40, 50, 60, 70]
    assert_same_columns(table(path), again.history)


def test_a_resumed_run_completes_a_new_or_truncated_file(saved, path):
    text = path.read_text()
    path.write_text(text[:-30])
    result = bilevel.resume(*saved, max_steps=60, log=bilevel.CSVLog(path))
    assert_same_columns(table(path), result.history)
    result = bilevel.resume(*saved, max_steps=60, log=bilevel.CSVLog(path.with_name("new.csv")))
    assert_same_columns(table(path.with_name("new.csv")), result.history)


def test_a_resumed_run_may_add_columns(tmp_path):
    problem = cases.logistic_selection(outer_bounds=(-3.0, 3.0))
    first = bilevel.run(problem, SRBA, max_steps=20, eval_every=10, log=bilevel.CSVLog(tmp_path / "run.csv"))
    first.save(tmp_path / "run.npz")
    more = {"max_steps": 40, "stop": bilevel.CertifiedTolerance(1e-30), "log": bilevel.CSVLog(tmp_path / "run.csv")}
    result = bilevel.resume(tmp_path / "run.npz", problem, **more)
    assert np.isnan(result.history["certified_error"][0]) and result.history["certified_error"][-1] > 0
    assert_same_columns(table(tmp_path / "run.csv"), result.history)


def test_a_resumed_run_does_not_change_the_log_file_of_another_run(saved, path):
    other = path.with_name("other.csv")
    bilevel.run(saved[1], SRBA, max_steps=50, eval_every=10, log=bilevel.CSVLog(other))
    before = other.read_text()
    with pytest.raises(FileExistsError, match=r"other.csv'\)`: the file is the log of another run"):
        bilevel.resume(*saved, max_steps=60, log=bilevel.CSVLog(other))
    assert other.read_text() == before


@pytest.mark.parametrize("text", ["name,age\nAda,36\n", "a note without an end of line", "step,seconds\none,two\n"])
def test_a_resumed_run_does_not_change_a_file_that_is_not_a_log(saved, path, text):
    other = path.with_name("other.csv")
    other.write_text(text)
    with pytest.raises(FileExistsError, match=r"not the log of a run"):
        bilevel.resume(*saved, max_steps=60, log=bilevel.CSVLog(other))
    assert other.read_text() == text


def test_a_user_defined_log_receives_the_settings_and_every_row(saved):
    class Own(bilevel.Log):
        def open(self, about, past):
            self.about, self.past, self.rows, self.open_now = about, past, [], True

        def write(self, row):
            assert self.open_now
            self.rows.append(dict(row))
            row.clear()  # must not change the history

        def close(self):
            self.open_now = False

    log = Own()
    result = bilevel.resume(*saved, max_steps=80, eval_every=10, log=log)
    assert (log.about.problem, log.about.solver, log.about.seed) == ("quadratic", "SRBA", 0)
    assert log.about.parameters == result.solver.parameters()
    assert [row["step"] for row in log.past] == [0, 10, 20, 30, 40, 50]
    assert not log.open_now
    for name, column in result.history.items():
        assert [row[name] for row in log.rows] == column[6:].tolist()


def test_an_argument_that_is_not_a_log_is_refused(path):
    with pytest.raises(TypeError, match=r"`log` must be a bilevel.Log such as bilevel.CSVLog.*got 'run.csv'"):
        bilevel.run(cases.quadratic("float32"), SRBA, max_steps=5, log="run.csv")


@pytest.mark.parametrize("error", [KeyError, ValueError, PermissionError, RuntimeError, ZeroDivisionError])
def test_a_log_that_cannot_be_opened_gives_a_warning_and_the_run_continues(error):
    class Failing(bilevel.Log):
        def open(self, about, past):
            raise error("nothing to write to")

        def write(self, row):
            pytest.fail("the log was not opened")

    with pytest.warns(RuntimeWarning, match=rf"Failing failed \({error.__name__}.*`result.history` has every row"):
        result = bilevel.run(cases.quadratic("float32"), bilevel.SOBA(0.05, 1.0, 8), max_steps=2, log=Failing())
    assert result.history["step"][-1] == 2


@pytest.mark.parametrize("error", [FileExistsError, ImportError])
def test_a_log_of_another_run_or_a_missing_package_is_an_error_before_the_first_step(error):
    class Strict(bilevel.Log):
        def open(self, about, past):
            raise error("`Strict`: not this one.")

        def write(self, row):
            pytest.fail("the log was not opened")

    with pytest.raises(error, match="`Strict`: not this one"):
        bilevel.run(cases.quadratic("float32"), bilevel.SOBA(0.05, 1.0, 8), max_steps=2, log=Strict())
