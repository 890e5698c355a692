"""Logs: each row at once, whole files whatever ends the run, and no run lost to a log."""

import csv
import importlib.util
import shutil
import struct
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


@pytest.fixture
def path(tmp_path):
    return tmp_path / "logs" / "run.csv"


def with_metric(metric):
    problem = cases.quadratic("float32")
    return bilevel.BilevelProblem(problem.oracles, problem.start, problem.exact_solver, metrics={"m": metric})


def at_evaluation(number, act):
    """A metric that does something when it is asked for the so-manyth time."""
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


def test_a_csv_log_is_the_history_to_the_last_bit(path):
    result = bilevel.run(cases.quadratic("float32"), SRBA, max_steps=200, log=bilevel.CSVLog(path))
    assert len(result.history["step"]) > 5
    assert_same_columns(table(path), result.history)
    assert [entry.name for entry in path.parent.iterdir()] == ["run.csv"]


def test_a_row_is_in_the_file_before_the_run_goes_on(path):
    class Reading(bilevel.CSVLog):
        def write(self, row):
            super().write(row)
            seen.append(table(path)["step"].tolist())

    seen = []
    result = bilevel.run(cases.quadratic("float32"), SRBA, max_steps=30, eval_every=10, log=Reading(path))
    assert seen == [[0], [0, 10], [0, 10, 20], [0, 10, 20, 30]]
    assert result.history["step"].tolist() == seen[-1]


def test_rows_are_handed_over_off_the_clock():
    class Slow(bilevel.Log):
        def write(self, row):
            time.sleep(0.2)

    result = bilevel.run(cases.quadratic("float32"), SRBA, max_steps=30, eval_every=10, log=Slow())
    assert result.history["seconds"][-1] < 0.4


def test_a_column_that_appears_later_is_nan_before(path, monkeypatch):
    exact = metrics.exact_metrics
    guesses = iter([False, False, True, True])

    def sometimes(problem, point, guess):
        values, reference = exact(problem, point, guess)
        kept = values if next(guesses) else {"value": values["value"]}
        return kept, reference

    monkeypatch.setattr("bilevel.engine.driver.exact_metrics", sometimes)
    result = bilevel.run(cases.quadratic("float32"), SRBA, max_steps=30, eval_every=10, log=bilevel.CSVLog(path))
    assert np.isnan(result.history["hypergrad_norm_sq"]).tolist() == [True, True, False, False]
    assert_same_columns(table(path), result.history)


def test_ctrl_c_loses_no_row(path):
    problem = with_metric(at_evaluation(3, interrupt))
    result = bilevel.run(problem, SRBA, max_steps=100, eval_every=20, log=bilevel.CSVLog(path))
    assert result.status == "interrupted" and result.history["step"].tolist() == [0, 20, 40]
    assert_same_columns(table(path), result.history)


@pytest.mark.parametrize("when", ["before", "after"])
def test_ctrl_c_in_the_midst_of_writing_neither_loses_nor_doubles_a_row(path, when):
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


def test_an_exception_in_a_run_leaves_the_rows_before_it(path):
    plain, fail = cases.quadratic("float32"), at_evaluation(3, lambda: 1 / 0)
    problem = replace(plain, exact_solver=lambda x, guess: fail(x) or plain.exact_solver(x, guess))
    with pytest.raises(ZeroDivisionError):
        bilevel.run(problem, SRBA, max_steps=100, eval_every=20, log=bilevel.CSVLog(path))
    assert table(path)["step"].tolist() == [0, 20]


def test_a_killed_process_leaves_the_rows_before_it(path):
    script = (
        "import os, signal, bilevel\nfrom tests import cases\nfrom tests.engine import test_logs\n"
        "problem = test_logs.with_metric(test_logs.at_evaluation(3, lambda: os.kill(os.getpid(), signal.SIGKILL)))\n"
        f"bilevel.run(problem, test_logs.SRBA, max_steps=100, eval_every=20, log=bilevel.CSVLog({str(path)!r}))\n"
    )
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, check=False)
    assert run.returncode == -9, run.stderr
    assert table(path)["step"].tolist() == [0, 20]


def test_a_log_that_fails_is_warned_of_and_the_run_goes_on(path):
    problem = with_metric(at_evaluation(3, lambda: shutil.rmtree(path.parent) or 0.0))
    with pytest.warns(RuntimeWarning, match=r"CSVLog failed.*No such file.*`result.history` has every row") as caught:
        result = bilevel.run(problem, SRBA, max_steps=100, eval_every=20, log=bilevel.CSVLog(path))
    assert [warning.filename for warning in caught] == [__file__], "one warning, at the line of the user"
    assert result.status == "out_of_budget" and result.history["step"].tolist() == [0, 20, 40, 60, 80, 100]
    cases.assert_trees_equal(result.point, bilevel.run(cases.quadratic("float32"), SRBA, max_steps=100).point)


def test_a_log_that_fails_to_close_is_warned_of(path):
    class Closing(bilevel.CSVLog):
        def close(self):
            raise OSError("no space left")

    with pytest.warns(RuntimeWarning, match=r"Closing failed.*no space left") as caught:
        result = bilevel.run(cases.quadratic("float32"), SRBA, max_steps=20, log=Closing(path))
    assert [warning.filename for warning in caught] == [__file__]
    assert_same_columns(table(path), result.history)


def test_a_new_run_refuses_the_file_of_another(path):
    first = bilevel.run(cases.quadratic("float32"), SRBA, max_steps=20, log=bilevel.CSVLog(path))
    with pytest.raises(FileExistsError, match=r"run.csv'\)`: the file exists. Delete it.*bilevel.resume"):
        bilevel.run(cases.quadratic("float32"), SRBA, seed=1, max_steps=20, log=bilevel.CSVLog(path))
    assert_same_columns(table(path), first.history)


@pytest.fixture
def saved(tmp_path, path):
    """A run of 50 steps, logged and saved, and its problem."""
    problem = cases.quadratic("float32")
    run = bilevel.run(problem, SRBA, max_steps=50, eval_every=10, log=bilevel.CSVLog(path))
    run.save(tmp_path / "run.npz")
    return tmp_path / "run.npz", problem


def test_a_resumed_run_goes_on_in_its_file(saved, path):
    result = bilevel.resume(*saved, max_steps=100, eval_every=10, log=bilevel.CSVLog(path))
    assert len(result.history["step"]) == 11
    assert_same_columns(table(path), result.history)


def test_rows_later_than_the_save_are_evaluated_anew(saved, path):
    bilevel.resume(*saved, max_steps=100, eval_every=10, log=bilevel.CSVLog(path))
    again = bilevel.resume(*saved, max_steps=70, eval_every=10, log=bilevel.CSVLog(path))
    assert table(path)["step"].tolist() == [0, 10, 20, 30, 40, 50, 60, 70]
    assert_same_columns(table(path), again.history)


def test_a_resumed_run_fills_a_file_that_is_new_or_was_cut_short(saved, path):
    text = path.read_text()
    path.write_text(text[:-30])
    result = bilevel.resume(*saved, max_steps=60, log=bilevel.CSVLog(path))
    assert_same_columns(table(path), result.history)
    result = bilevel.resume(*saved, max_steps=60, log=bilevel.CSVLog(path.with_name("new.csv")))
    assert_same_columns(table(path.with_name("new.csv")), result.history)


def test_a_resumed_run_may_bring_columns_of_its_own(tmp_path):
    problem = cases.logistic_selection(outer_bounds=(-3.0, 3.0))
    first = bilevel.run(problem, SRBA, max_steps=20, eval_every=10, log=bilevel.CSVLog(tmp_path / "run.csv"))
    first.save(tmp_path / "run.npz")
    more = {"max_steps": 40, "certified_tolerance": 1e-30, "log": bilevel.CSVLog(tmp_path / "run.csv")}
    result = bilevel.resume(tmp_path / "run.npz", problem, **more)
    assert np.isnan(result.history["certified_error"][0]) and result.history["certified_error"][-1] > 0
    assert_same_columns(table(tmp_path / "run.csv"), result.history)


def test_a_resumed_run_refuses_the_file_of_another_and_leaves_it_as_it_was(saved, path):
    other = path.with_name("other.csv")
    bilevel.run(saved[1], SRBA, max_steps=50, eval_every=10, log=bilevel.CSVLog(other))
    before = other.read_text()
    with pytest.raises(ValueError, match=r"other.csv'\)`: the file is the log of another run"):
        bilevel.resume(*saved, max_steps=60, log=bilevel.CSVLog(other))
    assert other.read_text() == before


@pytest.mark.parametrize("text", ["name,age\nAda,36\n", "a note without an end of line", "step,seconds\none,two\n"])
def test_a_resumed_run_refuses_what_is_no_log_and_leaves_it_as_it_was(saved, path, text):
    other = path.with_name("other.csv")
    other.write_text(text)
    with pytest.raises(ValueError, match=r"no log of a run"):
        bilevel.resume(*saved, max_steps=60, log=bilevel.CSVLog(other))
    assert other.read_text() == text


def test_a_log_of_ones_own_gets_what_runs_and_every_row(saved):
    class Own(bilevel.Log):
        def open(self, about, past):
            self.about, self.past, self.rows, self.open_now = about, past, [], True

        def write(self, row):
            assert self.open_now
            self.rows.append(dict(row))
            row.clear()  # the history is not the log's to change

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


def test_what_is_no_log_is_refused(path):
    with pytest.raises(TypeError, match=r"`log` must be a bilevel.Log such as bilevel.CSVLog.*got 'run.csv'"):
        bilevel.run(cases.quadratic("float32"), SRBA, max_steps=5, log="run.csv")


def events(folder):
    """The events of a folder, file by file in the order of their making, read by the definition of the format."""
    from tensorboardX.crc32c import crc32c
    from tensorboardX.proto.event_pb2 import Event

    def masked(data):
        crc = crc32c(data)
        return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF

    for file in sorted(folder.iterdir(), key=lambda entry: entry.stat().st_mtime_ns):
        data = file.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            body, rest = data[12 : 12 + length], data[12 + length :]
            assert struct.unpack("<II", data[8:12] + rest[:4]) == (masked(data[:8]), masked(body))
            yield Event.FromString(body)
            data = rest[4:]


def scalars(folder):
    """Rows of scalars by step, and their wall times."""
    found = [event for event in events(folder) if event.summary.value and not event.summary.value[0].HasField("tensor")]
    rows = {event.step: {value.tag: value.simple_value for value in event.summary.value} for event in found}
    return rows, [event.wall_time for event in found]


def assert_same_scalars(rows, history):
    assert list(rows) == history["step"].tolist()
    for name, column in history.items():
        np.testing.assert_array_equal([row[name] for row in rows.values()], column.astype(np.float32), err_msg=name)


def test_tensorboard_gets_every_scalar_at_its_step_and_second(tmp_path):
    folder = tmp_path / "board"
    result = bilevel.run(cases.quadratic("float32"), SRBA, max_steps=50, log=bilevel.TensorBoardLog(folder))
    rows, times = scalars(folder)
    assert_same_scalars(rows, result.history)
    seconds = result.history["seconds"]
    np.testing.assert_allclose(np.array(times) - times[0], seconds - seconds[0], atol=1e-6)


def test_tensorboard_shows_what_ran(tmp_path):
    bilevel.run(cases.quadratic("float32"), SRBA, seed=3, max_steps=5, log=bilevel.TensorBoardLog(tmp_path))
    (value,) = [value for event in events(tmp_path) for value in event.summary.value if value.HasField("tensor")]
    text = value.tensor.string_val[0].decode()
    assert value.metadata.plugin_data.plugin_name == "text"
    for line in (
        "| solver | SRBA |",
        "| problem | quadratic |",
        "| seed | 3 |",
        "| period | 5 |",
        "| step_size | 0.05 |",
    ):
        assert line in text


def test_tensorboard_has_a_row_before_the_run_goes_on(tmp_path):
    class Reading(bilevel.TensorBoardLog):
        def write(self, row):
            super().write(row)
            seen.append(list(scalars(tmp_path)[0]))

    seen = []
    bilevel.run(cases.quadratic("float32"), SRBA, max_steps=20, eval_every=10, log=Reading(tmp_path))
    assert seen == [[0], [0, 10], [0, 10, 20]]


def test_a_resumed_run_goes_on_in_its_folder_and_hides_what_came_after_the_save(saved, tmp_path):
    folder = tmp_path / "board"
    first = bilevel.run(saved[1], SRBA, max_steps=50, eval_every=10, log=bilevel.TensorBoardLog(folder))
    first.save(tmp_path / "first.npz")
    with pytest.raises(FileExistsError, match=r"board'\)`: the folder has event files. Delete them"):
        bilevel.run(saved[1], SRBA, max_steps=50, log=bilevel.TensorBoardLog(folder))
    result = bilevel.resume(
        tmp_path / "first.npz", saved[1], max_steps=80, eval_every=10, log=bilevel.TensorBoardLog(folder)
    )
    assert len(list(folder.iterdir())) == 2
    assert_same_scalars(scalars(folder)[0], result.history)
    restarts = [event.step for event in events(folder) if event.HasField("session_log")]
    assert restarts == [51]


def test_a_resumed_run_fills_a_new_folder(saved, tmp_path):
    log = bilevel.TensorBoardLog(tmp_path / "board")
    result = bilevel.resume(*saved, max_steps=80, eval_every=10, log=log)
    assert_same_scalars(scalars(tmp_path / "board")[0], result.history)


def test_a_full_disk_under_tensorboard_does_not_stop_a_run(tmp_path, monkeypatch):
    from tensorboardX.record_writer import RecordWriter

    flush, times = RecordWriter.flush, iter(range(100))

    def full(writer):
        if next(times) == 2:
            raise OSError(28, "No space left on device")
        flush(writer)

    monkeypatch.setattr(RecordWriter, "flush", full)
    with pytest.warns(RuntimeWarning, match=r"TensorBoardLog failed.*No space left"):
        result = bilevel.run(cases.quadratic("float32"), SRBA, max_steps=20, log=bilevel.TensorBoardLog(tmp_path))
    assert result.history["step"][-1] == 20
    assert list(scalars(tmp_path)[0]) == result.history["step"][:3].tolist()


def test_numbers_beyond_float32_are_logged_too(tmp_path):
    problem = with_metric(lambda point: 1e300)
    bilevel.run(problem, SRBA, max_steps=5, eval_every=5, log=bilevel.TensorBoardLog(tmp_path))
    assert [row["m"] for row in scalars(tmp_path)[0].values()] == [np.inf, np.inf]


@pytest.mark.slow
def test_of_two_processes_only_the_first_writes(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("two_processes", ROOT / "examples" / "two_processes.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    work = tmp_path / "work.py"
    work.write_text(
        "import sys, jax, bilevel\nfrom tests import cases\nfrom tests.engine import test_logs\n"
        "address, process = sys.argv[2], int(sys.argv[4])\n"
        "jax.distributed.initialize(address, 2, process)\n"
        f"log = bilevel.CSVLog({str(tmp_path)!r} + f'/{{process}}.csv')\n"
        "bilevel.run(cases.logistic_selection().sharded(), test_logs.SRBA, max_steps=20, eval_every=10, log=log)\n"
    )
    assert example.start_all(str(work), [], 2, timeout=200) == 0
    assert sorted(file.name for file in tmp_path.glob("*.csv")) == ["0.csv"]
    assert table(tmp_path / "0.csv")["step"].tolist() == [0, 10, 20]
