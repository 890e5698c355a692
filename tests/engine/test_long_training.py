"""Long runs: checkpoints and early stopping."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import bilevel
from tests import cases

SRBA, SOBA = cases.SOLVERS["SRBA"], cases.SOLVERS["SOBA"]
TIMED = {"seconds"}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def assert_same_run(found, expected):
    cases.assert_trees_equal(found.state, expected.state)
    cases.assert_trees_equal(found.point, expected.point)
    assert found.calls == expected.calls and set(found.history) == set(expected.history)
    for name in set(expected.history) - TIMED:
        np.testing.assert_array_equal(found.history[name], expected.history[name], err_msg=name)


@pytest.mark.filterwarnings("ignore:AutoSRBA")  # after so few steps z is far from its solution
@pytest.mark.parametrize("name", cases.marked(cases.SOLVERS))
def test_a_run_resumed_from_a_checkpoint_equals_an_uninterrupted_one(name, tmp_path):
    problem, solver = cases.quadratic("float32"), cases.SOLVERS[name]
    settings = {"eval_every": 40}  # 90 is not an evaluation point
    whole = bilevel.run(problem, solver, seed=5, max_steps=150, **settings)
    bilevel.run(problem, solver, seed=5, max_steps=100, checkpoint=bilevel.Checkpoints(tmp_path, every=30), **settings)
    assert names(tmp_path) == ["step-0000000060.npz", "step-0000000090.npz", "step-0000000100.npz"]
    (tmp_path / "step-0000000100.npz").unlink()
    resumed = bilevel.resume(tmp_path, problem, max_steps=150, **settings)
    assert_same_run(resumed, whole)


def test_only_the_last_checkpoints_and_all_other_files_are_kept(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    settings = {"checkpoint": bilevel.Checkpoints(tmp_path, every=10, keep=1)}
    bilevel.run(cases.quadratic("float32"), SRBA, max_steps=25, **settings)
    assert names(tmp_path) == ["notes.txt", "step-0000000025.npz"]
    bilevel.resume(tmp_path, cases.quadratic("float32"), max_steps=40, **settings)
    assert names(tmp_path) == ["notes.txt", "step-0000000040.npz"]


def test_the_interval_of_checkpoints_may_be_given_in_seconds(tmp_path):
    bilevel.run(
        cases.quadratic("float32"), SRBA, max_seconds=0.5, checkpoint=bilevel.Checkpoints(tmp_path, every=0.05, keep=99)
    )
    assert len(names(tmp_path)) >= 3


def test_checkpoints_do_not_change_a_run(tmp_path):
    plain = bilevel.run(cases.quadratic("float32"), SRBA, max_steps=100)
    noted = bilevel.run(
        cases.quadratic("float32"), SRBA, max_steps=100, checkpoint=bilevel.Checkpoints(tmp_path, every=7)
    )
    assert_same_run(noted, plain)


def test_the_checkpoints_of_another_run_are_not_overwritten(tmp_path):
    bilevel.run(cases.quadratic("float32"), SRBA, max_steps=5, checkpoint=tmp_path)
    with pytest.raises(
        FileExistsError, match=r"has step-0000000005.npz of another run. Continue that run with `bilevel.resume`"
    ):
        bilevel.run(cases.quadratic("float32"), SRBA, max_steps=5, checkpoint=tmp_path)
    saved = tmp_path.parent / "saved.npz"
    bilevel.run(cases.quadratic("float32"), SRBA, max_steps=3).save(saved)
    with pytest.raises(FileExistsError, match=r"of another run"):
        bilevel.resume(saved, cases.quadratic("float32"), max_steps=5, checkpoint=tmp_path)
    with pytest.raises(FileNotFoundError, match=r"has no checkpoint"):
        bilevel.resume(tmp_path.parent, cases.quadratic("float32"), max_steps=5)


def test_a_run_continues_without_a_checkpoint_if_the_disk_is_full(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.warns(RuntimeWarning, match=r"`checkpoint`: .*No space left.* The run continues without this one"):
        result = bilevel.run(
            cases.quadratic("float32"), SRBA, max_steps=25, checkpoint=bilevel.Checkpoints(tmp_path, every=10)
        )
    assert result.history["step"][-1] == 25 and names(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every": 0}, r"`Checkpoints\(every=0\)`: must be steps, as 1000, or seconds"),
        ({"every": "often"}, r"`Checkpoints\(every='often'\)`"),
        ({"keep": 0}, r"`Checkpoints\(keep=0\)`"),
    ],
)
def test_bad_settings_of_checkpoints_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        bilevel.Checkpoints("a", **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"checkpoint": 3}, "`checkpoint=3`: must be a path"),
        ({"eval_every": ()}, r"`eval_every=\(\)`: must be an integer of at least 1"),
        ({"eval_every": (10, 20)}, r"`eval_every=\(10, 20\)`: must be an integer of at least 1, or None"),
        ({"stop": "test_error"}, "`stop='test_error'`: must be a number of at least 0, a bilevel.CertifiedTolerance"),
        ({"stop": (1e-3, None)}, "`stop=None`: must be a number of at least 0"),
        ({"stop": bilevel.EarlyStopping("speed")}, "metric='speed'.*the history has step, "),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        bilevel.run(cases.quadratic("float32"), SRBA, max_steps=5, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"metric": 3}, "metric=3"),
        ({"metric": "a", "patience": 0}, "patience=0"),
        ({"metric": "a", "better": "up"}, "better='up'"),
    ],
)
def test_bad_stopping_rules_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        bilevel.EarlyStopping(**arguments)


def valley(at, sign=1):
    """Return a metric that falls until its evaluation ``at``, counted from 1, and rises afterwards."""
    seen = []

    def metric(point):
        seen.append(point)
        return sign * (abs(len(seen) - at) + 1.0)

    return metric


def followed(metric, **metrics):
    return dataclasses.replace(cases.quadratic("float32"), metrics={"held_out": metric, **metrics})


@pytest.mark.parametrize(("sign", "better"), [(1, None), (-1, "higher")])
def test_a_run_stops_when_its_metric_no_longer_improves(sign, better):
    rule = bilevel.EarlyStopping("held_out", patience=3, better=better)
    result = bilevel.run(followed(valley(4, sign)), SOBA, max_steps=200, eval_every=10, stop=rule)
    assert result.status == "stopped_early" and "no longer improved" in result.status.sentence
    assert result.history["step"].tolist() == [0, 10, 20, 30, 40, 50, 60]
    assert result.best_row == 3 and result.best_value == sign
    there = bilevel.run(cases.quadratic("float32"), SOBA, max_steps=30)
    cases.assert_trees_equal(result.best_point, there.point)


def test_a_resumed_run_stops_like_an_uninterrupted_one(tmp_path):
    problem, rule = cases.quadratic("float32"), bilevel.EarlyStopping("outer_value", patience=2)
    settings = {"eval_every": 10, "stop": rule}
    whole = bilevel.run(problem, bilevel.SOBA(0.05, 1.0, 8), max_steps=2000, **settings)
    assert whole.status == "stopped_early"
    (last,) = whole.history["step"][-1:]
    noted = {"checkpoint": bilevel.Checkpoints(tmp_path, every=int(last) - 5)}
    bilevel.run(problem, bilevel.SOBA(0.05, 1.0, 8), max_steps=2000, **settings, **noted)
    (tmp_path / f"step-{last:010d}.npz").unlink()
    resumed = bilevel.resume(tmp_path, problem, max_steps=2000, **settings)
    assert resumed.status == "stopped_early" and resumed.history["step"][-1] == whole.history["step"][-1]
    cases.assert_trees_equal(resumed.point, whole.point)


SCRIPT = """
import sys
import bilevel
from tests.problems.networks import network_problem

folder, kind, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
problem, solver = network_problem(dtype="float32"), bilevel.SRBA(0.02, 1.0, 8, outer_optimizer="adam")
settings = dict(max_steps=steps, eval_every=steps // 7, checkpoint=bilevel.Checkpoints(folder, every=steps // 50))
if kind == "run":
    result = bilevel.run(problem, solver, seed=3, **settings)
else:
    result = bilevel.resume(folder, problem, **settings)
result.save(folder + "/end.npz")
"""


@pytest.mark.slow
def test_a_run_that_is_killed_and_resumed_ends_bit_for_bit_like_an_uninterrupted_one(tmp_path):
    steps = 200_000
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}

    def start(folder, kind):
        return subprocess.Popen([sys.executable, "-c", SCRIPT, str(folder), kind, str(steps)], env=environment)

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert start(whole, "run").wait(timeout=300) == 0
    victim = start(killed, "run")
    while not (killed.exists() and len(list(killed.glob("step-*.npz"))) >= 3):
        assert victim.poll() is None, "the run ended before it was killed"
        time.sleep(0.01)
    victim.send_signal(signal.SIGKILL)
    assert victim.wait(timeout=60) == -signal.SIGKILL
    assert start(killed, "resume").wait(timeout=300) == 0
    with np.load(whole / "end.npz") as one, np.load(killed / "end.npz") as other:
        assert one["about"].tolist() == other["about"].tolist() and len(one["history_0"]) > 7
        columns = json.loads(str(one["about"]))["columns"]
        timed = f"history_{columns.index('seconds')}"
        assert set(one.files) == set(other.files)
        for name in set(one.files) - {timed}:
            np.testing.assert_array_equal(one[name], other[name])
