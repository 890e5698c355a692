"""Representations of runs: HTML, data frames, and figures that compare runs."""

import doctest
import re
from xml.etree import ElementTree

import numpy as np
import pytest

import bilevel
from bilevel._core import extras
from bilevel.engine import show
from tests import cases

SOLVER = bilevel.SOBA(0.05, batch_size=8, sampling="iid")  # all steps have the same cost


@pytest.fixture(scope="module")
def runs():
    return [bilevel.run(cases.quadratic("float32"), SOLVER, seed=seed, max_steps=60) for seed in range(3)]


def test_the_html_of_a_result_is_well_formed(runs):
    text = runs[0]._repr_html_()
    tree = ElementTree.fromstring(text)
    shown = " ".join(tree.itertext())
    assert "SOBA(step_size=0.05" in shown and "out_of_budget: A budget was used up." in shown
    assert f"{runs[0].history['value'][-1]:.6g}" in shown
    points = tree.find(".//polyline").get("points").split()
    assert len(points) == len(runs[0].history["step"])


def test_names_are_escaped_in_html(runs):
    shown = extras.html_table("<b>x</b>", {"<i>": "<script>"}, ("<u>", [1.0, 2.0]))
    assert not re.search(r"<(b>x|i|script|u)>", shown) and "&lt;script&gt;" in shown


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 10.0, 100.0], "2.0,26.0 80.0,14.0 158.0,2.0"),  # on a logarithmic scale
        ([-1.0, 0.0, 1.0], "2.0,26.0 80.0,14.0 158.0,2.0"),
        ([0.0, np.nan, 1.0, np.inf], "2.0,26.0 106.0,2.0"),
        ([3.0, 3.0], "2.0,2.0 158.0,2.0"),
    ],
)
def test_a_sparkline_is_drawn_to_scale(values, expected):
    assert f"points='{expected}'" in extras.sparkline(values)


def test_a_sparkline_without_finite_values_is_a_note():
    assert extras.sparkline([np.nan]) == "no finite number"


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


def test_a_run_that_ends_early_is_ignored_beyond_its_end():
    x, (low, middle, high) = show.unite(
        [show.Line(np.array([0.0, 2.0, 4.0]), np.array([0.0, 2.0, 4.0])), show.Line(np.array([0.0, 1.0]), np.ones(2))]
    )
    np.testing.assert_array_equal(x, [0, 1, 2, 4])
    np.testing.assert_allclose(middle, [0.5, 1, 2, 4])
    assert show.unite([show.Line(np.arange(n), np.ones(n)) for n in (2, 2, 9)])[0].max() == 1, (
        "a line ends where most runs have ended"
    )
    assert (low <= middle).all() and (middle <= high).all()


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
