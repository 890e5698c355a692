"""Representations of runs: data frames, and figures that compare runs."""

import dataclasses
import doctest

import numpy as np
import pytest

import bilevel
from tests import cases

SOLVER = bilevel.SOBA(0.05, batch_size=8, sampling="iid")  # all steps have the same cost


@pytest.fixture(scope="module")
def runs():
    return [bilevel.run(cases.quadratic("float32"), SOLVER, seed=seed, max_steps=60) for seed in range(3)]


def test_the_data_frame_of_a_history_names_its_run(runs):
    frame = runs[1].to_dataframe()
    assert list(frame.columns[:4]) == ["solver", "problem", "seed", "step"]
    assert set(frame["seed"]) == {1} and set(frame["solver"]) == {"SOBA"}
    for name, column in runs[1].history.items():
        np.testing.assert_array_equal(frame[name], column)


def test_seeds_of_one_setting_are_drawn_as_a_line_with_a_band(runs):
    other = bilevel.run(cases.quadratic("float32"), bilevel.SOBA(0.02, batch_size=8, sampling="iid"), max_steps=60)
    figure = bilevel.plot([*runs, other], "value")
    left, right = figure.axes
    labels = [line.get_label() for line in left.lines]
    assert labels == ["SOBA step_size=0.05, 3 seeds", "SOBA step_size=0.02"]
    assert len(left.collections) == len(right.collections) == 1
    values = np.array([run.history["value"] for run in runs])
    np.testing.assert_allclose(left.lines[0].get_ydata(), np.median(values, axis=0))
    np.testing.assert_array_equal(left.lines[1].get_ydata(), other.history["value"])
    assert left.get_legend() is not None


def test_runs_may_be_labeled(runs):
    figure = bilevel.plot({"first": runs[0], "others": runs[1:]}, "value")
    assert [line.get_label() for line in figure.axes[0].lines] == ["first", "others, 2 seeds"]


def test_a_line_ends_with_the_first_seed_that_is_out_of_budget_and_goes_on_after_those_that_converged(runs):
    short = bilevel.run(cases.quadratic("float32"), SOLVER, seed=3, max_steps=20)
    (line,) = bilevel.plot([*runs, short], "value").axes[0].lines
    assert line.get_xdata()[-1] == short.history["calls"][-1]
    done = dataclasses.replace(short, status=bilevel.Status.converged)
    (line,) = bilevel.plot([*runs, done], "value").axes[0].lines
    assert line.get_xdata()[-1] == runs[0].history["calls"][-1]


@pytest.mark.parametrize(
    ("results", "metric", "message"),
    [([], None, "`results` is empty"), ({"a": []}, None, "`results` is empty"), ([3], None, "must contain results")],
)
def test_invalid_results_are_refused(results, metric, message):
    with pytest.raises((ValueError, TypeError), match=message):
        bilevel.plot(results, metric)


def test_a_metric_that_one_run_lacks_is_refused(runs):
    with pytest.raises(ValueError, match=r"`metric='drift'` is not in the history, which has step,"):
        bilevel.plot(runs, "drift")


def test_the_docstring_example_runs():
    (example,) = doctest.DocTestFinder(recurse=False).find(bilevel.plot, "plot")
    assert doctest.DocTestRunner().run(example) == (0, 4)
