"""What one of two processes does, with two devices of its own: runs over all four, compared with runs on its own.

Started by `tests/test_two_processes.py`; the exit status is 0 if all comparisons hold.
"""

import argparse
import os
import signal
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

import bilevel
from tests import cases, listening
from tests.oracles.sharded_runs import PROBLEMS, difference
from tests.problems import small

STEPS = 6


def solver(name):
    return cases.short(bilevel.SOLVERS[name], 0.05, 20.0, cases.BATCH)


def assert_same(problem, chosen):
    alone = bilevel.run(problem, chosen, max_steps=STEPS)
    together = bilevel.run(problem.sharded(), chosen, max_steps=STEPS)
    assert difference(alone.point, together.point) < 1e-11
    assert alone.calls == together.calls


def assert_resumed(problem, path):
    """Every process saves and resumes: the digest of the rows is made by all."""
    first = bilevel.run(problem, solver("SRBA"), max_steps=STEPS // 2)
    first.save(path)
    resumed = bilevel.resume(path, problem, max_steps=STEPS)
    straight = bilevel.run(problem, solver("SRBA"), max_steps=STEPS)
    cases.assert_trees_equal(resumed.point, straight.point)


def assert_uneven_rows_are_refused(process):
    X, y, X_val, y_val = cases.logistic_data()
    part = slice(None, 30) if process == 0 else slice(30, None)
    problem = bilevel.problems.penalty_selection(
        X[part], y[part], X_val[process::2], y_val[process::2], dtype="float32"
    )
    with pytest.raises(ValueError, match=r"rows\[process::2\]"):
        problem.sharded(own_rows=True)


def assert_different_starts_are_refused(process):
    own = (part[process::2] for part in cases.logistic_data())
    problem = bilevel.problems.penalty_selection(*own, dtype="float32", seed=process)
    with pytest.raises(ValueError, match="differ in start"):
        problem.sharded(own_rows=True)


def assert_different_starts_of_runs_are_refused(process, folder):
    """Both processes refuse, and name what differs."""
    bound, other_bound = np.full(4, 8.0), np.full(4, 9.0)
    problem, first = cases.logistic_selection().sharded(), replace(solver("SRBA"), outer_bounds=(-bound, bound))
    second = {
        r"`step_size` is 0.05 in process 0 and 0.1 in process 1": {"solver": replace(first, step_size=0.1)},
        r"`solver` is SRBA in process 0 and SOBA in process 1": {"solver": solver("SOBA")},
        r"arrays of `solver`": {"solver": replace(first, outer_bounds=(-other_bound, other_bound))},
        r"`seed` is 0 in process 0 and 3 in process 1": {"seed": 3},
        r"`max_steps` is 6 in process 0 and 7 in process 1": {"max_steps": STEPS + 1},
        r"`eval_every` is None in process 0 and 2 in process 1": {"eval_every": 2},
        r"`checkpoint` is": {"checkpoint": folder / "kept"},
    }
    for message, change in second.items():
        given = {"solver": first, "max_steps": STEPS} | (change if process == 1 else {})
        with pytest.raises(ValueError, match=message):
            bilevel.run(problem, **given)
    with pytest.raises(ValueError, match="`seed` is 0 in process 0 and 1 in process 1"):
        bilevel.Run(problem, first, seed=process)
    with pytest.raises(ValueError, match="have built different problems"):
        cases.quadratic(**({"seed": 5} if process else {})).sharded()
    results = [bilevel.run(problem, first, max_steps=steps) for steps in (2, 4)]
    for result, name in zip(results, ("short", "long"), strict=True):
        result.save(folder / f"{name}{process}.npz")
    with pytest.raises(ValueError, match="`path` is a run of 2 steps in process 0 and a run of 4 steps in process 1"):
        bilevel.resume(folder / ("short0.npz", "long1.npz")[process], problem, solver=first, max_steps=STEPS)
    starts = [
        lambda: bilevel.run(problem, first, max_steps=STEPS),
        lambda: bilevel.resume(folder / "short1.npz", problem, solver=first, max_steps=STEPS),
    ]
    with pytest.raises(ValueError, match="`call` is run in process 0 and resume in process 1"):
        starts[process]()


def lose_a_process(process, folder):
    """Process 1 is killed in an evaluation; the other saves what it has."""
    evaluations = iter(range(100))

    def metric(point):
        if next(evaluations) == 2 and process == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return float(np.sum(point.outer_var))

    problem = replace(cases.logistic_selection(), metrics={"size": metric}).sharded()
    with pytest.raises(bilevel.StepError, match=r"in process 0 of 2 .*Another process has probably failed") as caught:
        bilevel.run(problem, solver("SRBA"), max_steps=STEPS, eval_every=2)
    result = caught.value.result
    assert caught.value.loss is None and result.status == "failed" and result.history["step"][-1] >= 4
    result.save(folder / "saved.npz")
    raise caught.value


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--lose", action="store_true")
    parser.add_argument("--address")
    parser.add_argument("--process", type=int)
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 1 if options.lose else 2)
    address = options.address
    soon = {"heartbeat_timeout_seconds": 10, "shutdown_timeout_seconds": 20} if options.lose else {}
    jax.distributed.initialize(address, 2, options.process, coordinator_bind_address=address, **soon)
    if options.lose:
        return lose_a_process(options.process, options.folder)
    assert not any(at.is_unspecified for at in listening.addresses())
    assert (jax.device_count(), jax.local_device_count()) == (4, 2)
    assert_uneven_rows_are_refused(options.process)
    assert_different_starts_are_refused(options.process)
    assert_different_starts_of_runs_are_refused(options.process, options.folder)
    assert_same(small.cleaning(dtype="float64"), solver("SABA"))
    assert_same(PROBLEMS["from_losses"](), solver("SRBA"))
    assert_same(cases.quadratic(), bilevel.Exact())
    assert_resumed(cases.logistic_selection().sharded(), options.folder / f"{options.process}.npz")
    with pytest.raises(ValueError, match="`max_seconds=1`"):
        bilevel.run(cases.quadratic().sharded(), solver("SOBA"), max_seconds=1)
    assert np.all(jax.experimental.multihost_utils.process_allgather(np.ones(1, np.int32)) == 1)


if __name__ == "__main__":
    main()
