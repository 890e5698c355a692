"""One run over two processes on the loopback interface equals the run of one process."""

import importlib.util
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

import bilevel
from bilevel.oracles import Samples
from tests import cases

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "two_processes.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("two_processes", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_example(tmp_path, *arguments):
    """Return the printed lines, and point and history as written by the first process."""
    command = [sys.executable, str(EXAMPLE), "--timeout", "240", "--out", str(tmp_path / "run.npz"), *arguments]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    with np.load(tmp_path / "run.npz") as saved:
        return run.stdout.splitlines(), dict(saved)


def assert_same_run(saved, result):
    cases.assert_trees_close({name: saved[name] for name in result.point._fields}, result.point._asdict(), rtol=1e-11)
    for name in result.history:
        if name.startswith("calls") or name in ("step", "value", "outer_value", "hypergrad_norm_sq"):
            np.testing.assert_allclose(saved[name], result.history[name], rtol=1e-7, err_msg=name)


def interleaved(parts):
    """Return the rows of several levels, interleaved."""
    rows = [np.asarray(part.leaves).T for part in parts]
    n = sum(map(len, rows))
    merged = np.empty((n, rows[0].shape[1]))
    for i, part in enumerate(rows):
        merged[i :: len(rows)] = part
    return Samples.from_rows(merged, "float64", narrow=2**62)


@pytest.mark.slow
def test_the_complete_problem_over_two_processes_is_that_of_one(example, tmp_path):
    lines, saved = run_example(tmp_path, "--whole")
    problem = bilevel.problems.penalty_selection(*example.breast_cancer(slice(None)), dtype="float64")
    assert_same_run(saved, bilevel.run(problem, example.SOLVER, max_steps=example.STEPS))
    assert sum(line.startswith("SRBA(") for line in lines) == 1, "only the first process prints"


@pytest.mark.slow
def test_processes_with_their_own_rows_solve_the_problem_of_all_rows(example, tmp_path):
    _, saved = run_example(tmp_path)
    halves = [
        bilevel.problems.penalty_selection(*example.breast_cancer(slice(i, None, 2)), dtype="float64") for i in (0, 1)
    ]
    with jax.enable_x64(True):
        inner, outer = (
            interleaved([getattr(half.oracles, level) for half in halves])
            for level in ("inner_samples", "outer_samples")
        )
    oracles = replace(halves[0].oracles, inner_samples=inner, outer_samples=outer)
    problem = replace(halves[0], oracles=oracles, exact_solver=type(halves[0].exact_solver)(oracles, halves[0].start))
    assert_same_run(saved, bilevel.run(problem, example.SOLVER, max_steps=example.STEPS))


@pytest.mark.slow
def test_all_kinds_of_runs_go_over_two_processes_with_two_devices_each(example, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    file = ROOT / "tests" / "oracles" / "process_work.py"
    assert example.start_all(str(file), ["--folder", str(tmp_path)], 2, timeout=500) == 0


@pytest.mark.slow
@pytest.mark.parametrize("recoverable", [False, True])
def test_a_run_that_loses_a_process_is_saved_and_ends_soon(example, tmp_path, monkeypatch, recoverable):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("JAX_ENABLE_RECOVERABILITY", str(int(recoverable)))
    command = [sys.executable, str(ROOT / "tests" / "oracles" / "process_work.py"), "--lose", "--folder", str(tmp_path)]
    command += ["--address", example.free_address(), "--process"]
    processes = [subprocess.Popen([*command, str(i)], stderr=subprocess.PIPE, text=True) for i in (0, 1)]
    try:
        assert processes[1].wait(timeout=120) == -signal.SIGKILL
        lost = time.monotonic()
        told = processes[0].communicate(timeout=60)[1]
        waited = time.monotonic() - lost
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert "StepError" in told
    if recoverable:
        assert processes[0].returncode == 1 and waited < 20, "without a signal"
    assert waited < 40, "JAX ends it after 10 seconds without a heartbeat"
    with np.load(tmp_path / "saved.npz") as saved:
        assert "about" in saved


FAILS_EARLY = """
import os, sys
import jax
address, process = sys.argv[1], int(sys.argv[2])
timeouts = {"initialization_timeout": 30, "heartbeat_timeout_seconds": 10, "shutdown_timeout_seconds": 20}
jax.distributed.initialize(address, 2, process, **timeouts)
if process == 1:
    os._exit(3)
import bilevel
problem = bilevel.problems.quadratic(64, 32, 4, 2).sharded()
bilevel.run(problem, bilevel.SOBA(batch_size=8), max_steps=5)
"""


@pytest.mark.slow
def test_a_process_that_fails_before_jax_is_used_ends_the_other_within_the_documented_timeouts(example):
    command = [sys.executable, "-c", FAILS_EARLY, example.free_address()]
    processes = [subprocess.Popen([*command, str(i)], stderr=subprocess.PIPE, text=True) for i in (0, 1)]
    try:
        assert processes[1].wait(timeout=60) == 3
        assert processes[0].wait(timeout=60) != 0
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.fixture
def started(monkeypatch):
    """Return the list of processes that are started."""
    processes, popen = [], subprocess.Popen

    def recorded(*args, **kwargs):
        processes.append(popen(*args, **kwargs))
        return processes[-1]

    monkeypatch.setattr(subprocess, "Popen", recorded)
    return processes


@pytest.mark.parametrize("failing", [True, False])
def test_no_process_outlives_a_failure_or_the_time_limit(example, tmp_path, started, failing):
    file = tmp_path / "work.py"
    file.write_text(f"import sys, time; sys.exit(3) if {failing} and sys.argv[-1] == '1' else time.sleep(100)")
    if failing:
        assert example.start_all(str(file), [], 2, timeout=60) == 3
    else:
        with pytest.raises(TimeoutError, match="not done"):
            example.start_all(str(file), [], 2, timeout=0.5)
    assert len(started) == 2
    assert all(process.returncode is not None for process in started)
