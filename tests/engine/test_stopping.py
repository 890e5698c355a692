"""Runs that are stopped by one or two interrupts, by a loss that raises, or by a full disk."""

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
    """Return a metric that interrupts the run ``times`` times at its evaluation ``at``, counted from 1."""
    counts = iter(range(1, 10**6))

    def metric(point):
        if next(counts) == at:
            press(times)
        return 0.0

    return metric


@pytest.fixture(autouse=True)
def _handler_is_restored():
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_ends_a_run_after_the_current_step(tmp_path):
    result = bilevel.run(with_metric(pressing(1, at=3)), SRBA, max_steps=STEPS, eval_every=20)
    assert result.status == "interrupted" and result.history["step"].tolist() == [0, 20, 40]
    assert np.isfinite(result.history["value"][-1]), "the interrupted evaluation is completed"
    result.save(tmp_path / "run.npz")
    resumed = bilevel.resume(tmp_path / "run.npz", cases.quadratic("float32"), max_steps=STEPS)
    whole = bilevel.run(cases.quadratic("float32"), SRBA, max_steps=STEPS)
    cases.assert_trees_equal(resumed.point, whole.point)


def test_an_interrupt_between_evaluations_loses_no_step_and_takes_effect_soon():
    pressed = []
    timer = threading.Timer(0.5, lambda: pressed.append(time.perf_counter()) or press())
    timer.start()
    result = bilevel.run(cases.quadratic("float32"), SRBA, max_steps=2**31 - 1, eval_every=2**30, exact=False)
    waited = time.perf_counter() - pressed[0]
    timer.join()
    last = int(result.history["step"][-1])
    assert result.status == "interrupted" and last > 0
    assert waited < 5, "the run must check for interrupts every tenth of a second"
    whole = bilevel.run(cases.quadratic("float32"), SRBA, max_steps=last, exact=False)
    cases.assert_trees_equal(result.point, whole.point)


def test_a_second_interrupt_ends_a_run_at_once_with_a_complete_log(tmp_path):
    path = tmp_path / "run.csv"
    with pytest.raises(KeyboardInterrupt):
        bilevel.run(with_metric(pressing(2, at=3)), SRBA, max_steps=STEPS, eval_every=20, log=bilevel.CSVLog(path))
    assert [line.partition(",")[0] for line in path.read_text().splitlines()] == ["step", "0", "20"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.csv"]


def test_an_interrupt_in_the_last_evaluation_is_reported():
    result = bilevel.run(with_metric(pressing(1, at=2)), SRBA, max_steps=20, eval_every=20)
    assert result.status == "interrupted" and result.history["step"].tolist() == [0, 20]


def test_a_signal_handler_of_the_user_is_not_replaced():
    received = []
    signal.signal(signal.SIGINT, lambda *_: received.append(1))
    try:
        result = bilevel.run(with_metric(pressing(2, at=2)), SRBA, max_steps=40, eval_every=20)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    assert received == [1, 1] and result.status == "out_of_budget"


def test_a_run_in_another_thread_installs_no_signal_handler():
    found = []
    thread = threading.Thread(target=lambda: found.append(bilevel.run(cases.quadratic("float32"), SRBA, max_steps=20)))
    thread.start()
    thread.join()
    assert found[0].status == "out_of_budget"


# --- losses that raise


class Sensor:
    """A function on the host that raises if its argument exceeds `limit`."""

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
def test_an_error_in_a_loss_is_raised_with_its_step_and_a_result_that_can_be_resumed(which, tmp_path, capfd):
    sensor, solver = Sensor(), bilevel.SRBA(0.01, 1.0, 8)
    problem = from_sensor(which, sensor)
    sizes = [run_to(problem, solver, step) for step in (20, 21)]
    sensor.limit = np.mean(sizes)  # exceeded for the first time after 21 steps
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
    capfd.readouterr()  # JAX prints the error of the callback


def run_to(problem, solver, step):
    z = bilevel.run(problem, solver, max_steps=step, exact=False).point.inner_var
    return float(z @ z)


def test_an_error_in_a_loss_within_a_step_of_hoag_is_raised_with_its_step(monkeypatch):
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
    """Limit the size of files that this process writes, in bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_the_old_checkpoint_is_kept_if_a_new_one_cannot_be_written(tmp_path):
    path, problem = tmp_path / "run.npz", cases.quadratic("float32")
    first, second = (bilevel.run(problem, SRBA, max_steps=steps) for steps in (20, 40))
    first.save(path)
    with full_disk(), pytest.raises(OSError, match=r"run\.npz` cannot be written \(File too large\); the older file"):
        second.save(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.npz"]
    cases.assert_trees_equal(bilevel.resume(path, problem, max_steps=40).point, second.point)
    with full_disk(), pytest.raises(OSError, match=r"new\.npz` cannot be written \(File too large\)\.$"):
        second.save(tmp_path / "new.npz")


def test_a_run_continues_with_a_warning_if_the_disk_is_full(tmp_path):
    problem, path = cases.quadratic("float32"), tmp_path / "run.csv"
    whole = bilevel.run(problem, SRBA, max_steps=60, eval_every=20)
    with full_disk(1000), pytest.warns(RuntimeWarning, match=r"CSVLog failed.*File too large.*every row"):
        result = bilevel.run(problem, SRBA, max_steps=60, eval_every=20, log=bilevel.CSVLog(path))
    assert result.history["step"].tolist() == [0, 20, 40, 60]
    cases.assert_trees_equal(result.point, whole.point)


def test_a_log_that_cannot_connect_gives_a_warning_and_the_run_continues(tmp_path):
    class Remote(bilevel.Log):
        def open(self, about, past):
            raise ConnectionRefusedError("connection refused")

        def write(self, row):
            pytest.fail("the log was not opened")

    with pytest.warns(RuntimeWarning, match=r"`log`: Remote failed .*connection refused.* The run continues") as caught:
        result = bilevel.run(cases.quadratic("float32"), SRBA, max_steps=20, log=Remote())
    assert result.status == "out_of_budget" and [warning.filename for warning in caught] == [__file__]


def pressing_loss(when):
    """Return a loss that sends an interrupt the first time it is traced with a nonempty list ``when``."""

    def loss(z, x, row):
        if when:
            when.clear()
            press()
        return (row @ z - 1.0) ** 2 + jnp.exp(x[0]) * (z @ z)

    return loss


def test_an_interrupt_during_compilation_returns_the_result_at_the_start():
    rows, when = np.random.default_rng(0).standard_normal((30, 3)), []
    loss = pressing_loss(when)
    problem = bilevel.BilevelProblem.from_losses(loss, loss, rows, rows, np.zeros(3), np.zeros(1))
    when.append("now")
    result = bilevel.run(problem, bilevel.SOBA(0.1, 1.0, 5), max_steps=10**6)
    assert when == [] and result.status == "interrupted" and result.history["step"].tolist() == [0]


@pytest.mark.slow
def test_a_run_of_auto_srba_can_be_resumed_without_a_budget(tmp_path):
    problem = cases.quadratic("float64")
    bilevel.run(problem, bilevel.AutoSRBA(), max_steps=50).save(tmp_path / "run.npz")
    resumed = bilevel.resume(tmp_path / "run.npz", problem)
    whole = bilevel.run(problem, bilevel.AutoSRBA())
    assert resumed.status == whole.status == "converged"
    cases.assert_trees_equal(resumed.point, whole.point)


def test_resuming_a_run_without_a_stopping_rule_requires_a_budget(tmp_path):
    bilevel.run(cases.quadratic("float32"), SRBA, max_steps=20).save(tmp_path / "run.npz")
    with pytest.raises(ValueError, match="no budget"):
        bilevel.resume(tmp_path / "run.npz", cases.quadratic("float32"))
