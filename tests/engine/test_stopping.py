"""Runs that are stopped: by Ctrl-C once or twice, by a loss that raises, by a disk that is full."""

import os
import resource
import signal
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevel
from tests import cases

SRBA = cases.SOLVERS["SRBA"]
STEPS = 120


def press(times=1):
    for _ in range(times):
        os.kill(os.getpid(), signal.SIGINT)


def with_metric(metric):
    return replace(cases.quadratic("float32"), metrics={"m": metric})


def pressing(times, at):
    """A metric that presses Ctrl-C when it is asked for the so-manyth time."""
    counts = iter(range(1, 10**6))

    def metric(point):
        if next(counts) == at:
            press(times)
        return 0.0

    return metric


@pytest.fixture(autouse=True)
def _handler_as_it_was():
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_ends_a_run_with_the_step_that_it_is_in(tmp_path):
    result = bilevel.run(with_metric(pressing(1, at=3)), SRBA, max_steps=STEPS, eval_every=20)
    assert result.status == "interrupted" and result.history["step"].tolist() == [0, 20, 40]
    assert np.isfinite(result.history["value"][-1]), "the evaluation in which it was pressed is complete"
    result.save(tmp_path / "run.npz")
    resumed = bilevel.resume(tmp_path / "run.npz", cases.quadratic("float32"), max_steps=STEPS)
    whole = bilevel.run(cases.quadratic("float32"), SRBA, max_steps=STEPS)
    cases.assert_trees_equal(resumed.point, whole.point)


def test_ctrl_c_between_evaluations_loses_no_step_and_is_answered_soon():
    pressed = []
    timer = threading.Timer(0.5, lambda: pressed.append(time.perf_counter()) or press())
    timer.start()
    result = bilevel.run(cases.quadratic("float32"), SRBA, max_steps=2**31 - 1, eval_every=2**30, exact=False)
    waited = time.perf_counter() - pressed[0]
    timer.join()
    last = int(result.history["step"][-1])
    assert result.status == "interrupted" and last > 0
    assert waited < 5, "steps are taken in parts of a tenth of a second"
    whole = bilevel.run(cases.quadratic("float32"), SRBA, max_steps=last, exact=False)
    cases.assert_trees_equal(result.point, whole.point)


def test_ctrl_c_twice_ends_at_once_and_the_log_is_whole(tmp_path):
    path = tmp_path / "run.csv"
    with pytest.raises(KeyboardInterrupt):
        bilevel.run(with_metric(pressing(2, at=3)), SRBA, max_steps=STEPS, eval_every=20, log=bilevel.CSVLog(path))
    assert [line.partition(",")[0] for line in path.read_text().splitlines()] == ["step", "0", "20"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.csv"]


def test_ctrl_c_in_the_last_evaluation_is_not_swallowed():
    result = bilevel.run(with_metric(pressing(1, at=2)), SRBA, max_steps=20, eval_every=20)
    assert result.status == "interrupted" and result.history["step"].tolist() == [0, 20]


def test_a_handler_of_the_users_own_is_left_alone():
    heard = []
    signal.signal(signal.SIGINT, lambda *_: heard.append(1))
    try:
        result = bilevel.run(with_metric(pressing(2, at=2)), SRBA, max_steps=40, eval_every=20)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    assert heard == [1, 1] and result.status == "out_of_budget"


def test_a_run_in_another_thread_touches_no_handler():
    found = []
    thread = threading.Thread(target=lambda: found.append(bilevel.run(cases.quadratic("float32"), SRBA, max_steps=20)))
    thread.start()
    thread.join()
    assert found[0].status == "out_of_budget"


# --- losses that raise


class Sensor:
    """A function on the host that raises where z is large, until it is repaired."""

    limit = np.inf

    def __call__(self, size):
        if float(size) > self.limit:
            raise LookupError("the sensor is gone")
        return np.float32(1)


def from_sensor(which, sensor):
    def one(z):
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        size = jax.lax.stop_gradient(z @ z)
        return jax.pure_callback(sensor, shape, size, vmap_method="sequential")

    def inner(z, x, row):
        target = one(z) if which == "inner_loss" else 1.0
        return (row @ z - target) ** 2 + jnp.exp(x[0]) * (z @ z)

    def outer(z, x, row):
        target = one(z) if which == "outer_loss" else 1.0
        return (row @ z - target) ** 2

    rows = np.random.default_rng(0).standard_normal((24, 2)) + 1
    start = {"inner_var": np.zeros(2), "outer_var": np.zeros(1)}
    return bilevel.BilevelProblem.from_losses(inner, outer, rows, rows[:8], **start, dtype="float32")


@pytest.mark.parametrize("which", ["inner_loss", "outer_loss"])
def test_a_loss_that_raises_is_named_with_the_step_and_leaves_a_result_to_resume(which, tmp_path, capfd):
    sensor, solver = Sensor(), bilevel.SRBA(0.01, 1.0, 8)
    problem = from_sensor(which, sensor)
    sizes = [run_to(problem, solver, step) for step in (20, 21)]
    sensor.limit = np.mean(sizes)  # so that the point after 21 steps is the first one beyond it
    with pytest.raises(bilevel.StepError, match=rf"`{which}` raised in step 21 \(.*the sensor is gone\)") as caught:
        bilevel.run(problem, solver, max_steps=60, eval_every=30)
    error = caught.value
    assert (error.loss, error.step, error.result.status) == (which, 21, "failed")
    assert error.result.history["step"].tolist() == [0, 21] and np.isnan(error.result.history["outer_value"][-1])
    error.result.save(tmp_path / "run.npz")
    sensor.limit = np.inf
    resumed = bilevel.resume(tmp_path / "run.npz", problem, max_steps=60)
    whole = bilevel.run(problem, solver, max_steps=60)
    cases.assert_trees_equal(resumed.point, whole.point)
    assert resumed.calls == whole.calls
    capfd.readouterr()  # JAX prints what the callback raised


def run_to(problem, solver, step):
    z = bilevel.run(problem, solver, max_steps=step, exact=False).point.inner_var
    return float(z @ z)


def test_an_error_of_a_deterministic_solver_in_a_loss_is_named(monkeypatch):
    problem, plain = cases.quadratic(), bilevel.HOAG.step

    def broken(self, oracles, state, index):
        if index < 2:
            return plain(self, oracles, state, index)
        monkeypatch.setattr(type(oracles), "outer_value", lambda *_: 1 / 0)
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(bilevel.HOAG, "step", broken)
    with pytest.raises(
        bilevel.StepError, match=r"`outer_loss` raised in step 2 \(ZeroDivisionError: division"
    ) as caught:
        bilevel.run(problem, bilevel.HOAG(), max_steps=9)
    assert caught.value.result.history["step"].tolist() == [0, 1, 2]


# --- full disks


@contextmanager
def full_disk(limit=100):
    """No file of this process may grow beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_the_last_good_checkpoint_is_kept_when_a_new_one_cannot_be_written(tmp_path):
    path, problem = tmp_path / "run.npz", cases.quadratic("float32")
    first, second = (bilevel.run(problem, SRBA, max_steps=steps) for steps in (20, 40))
    first.save(path)
    with full_disk(), pytest.raises(OSError, match=r"run\.npz` cannot be written \(File too large\); the older file"):
        second.save(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.npz"]
    cases.assert_trees_equal(bilevel.resume(path, problem, max_steps=40).point, second.point)
    with full_disk(), pytest.raises(OSError, match=r"new\.npz` cannot be written \(File too large\)\.$"):
        second.save(tmp_path / "new.npz")


def test_a_run_that_meets_a_full_disk_goes_on_and_says_so(tmp_path):
    problem, path = cases.quadratic("float32"), tmp_path / "run.csv"
    whole = bilevel.run(problem, SRBA, max_steps=60, eval_every=20)
    with full_disk(1000), pytest.warns(RuntimeWarning, match=r"CSVLog failed.*File too large.*every row"):
        result = bilevel.run(problem, SRBA, max_steps=60, eval_every=20, log=bilevel.CSVLog(path))
    assert result.history["step"].tolist() == [0, 20, 40, 60]
    cases.assert_trees_equal(result.point, whole.point)


def test_a_log_that_the_system_does_not_let_open_is_warned_of_and_the_run_goes_on(tmp_path):
    class Remote(bilevel.Log):
        def open(self, about, past):
            raise ConnectionRefusedError("nobody listens")

        def write(self, row):
            pytest.fail("it was never open")

    with pytest.warns(RuntimeWarning, match=r"`log`: Remote failed .*nobody listens.* The run continues") as told:
        result = bilevel.run(cases.quadratic("float32"), SRBA, max_steps=20, log=Remote())
    assert result.status == "out_of_budget" and [warning.filename for warning in told] == [__file__]


def pressing_loss(when):
    """A loss that presses Ctrl-C when it is traced after ``when`` was filled, as a user does during compilation."""

    def loss(z, x, row):
        if when:
            when.clear()
            press()
        return (row @ z - 1.0) ** 2 + jnp.exp(x[0]) * (z @ z)

    return loss


def test_ctrl_c_during_compilation_gives_the_result_at_the_start():
    rows, when = np.random.default_rng(0).standard_normal((30, 3)), []
    loss = pressing_loss(when)
    problem = bilevel.BilevelProblem.from_losses(loss, loss, rows, rows, np.zeros(3), np.zeros(1))
    when.append("now")
    result = bilevel.run(problem, bilevel.SOBA(0.1, 1.0, 5), max_steps=10**6)
    assert when == [] and result.status == "interrupted" and result.history["step"].tolist() == [0]


def test_an_untuned_run_is_resumed_without_a_budget(tmp_path):
    problem = cases.quadratic("float64")
    bilevel.run(problem, bilevel.AutoSRBA(), max_steps=50).save(tmp_path / "run.npz")
    resumed = bilevel.resume(tmp_path / "run.npz", problem)
    whole = bilevel.run(problem, bilevel.AutoSRBA())
    assert resumed.status == whole.status == "converged"
    cases.assert_trees_equal(resumed.point, whole.point)


def test_a_run_that_does_not_end_by_itself_is_not_resumed_without_a_budget(tmp_path):
    bilevel.run(cases.quadratic("float32"), SRBA, max_steps=20).save(tmp_path / "run.npz")
    with pytest.raises(ValueError, match="no budget"):
        bilevel.resume(tmp_path / "run.npz", cases.quadratic("float32"))
