"""Median curves against cases worked out by hand."""

import time
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from bilevel.bench.select import (
    Contender,
    final_values,
    make_curve,
    make_sections,
    reach,
)
from bilevel.engine.curves import SeedCurve, interpolate, median_curve, quantiles
from tests.bench import fake_store

INF, NAN = np.inf, np.nan


def run(x, y, status="out_of_budget"):
    return SeedCurve.from_evaluations(np.array(x, float), np.array(y, float), status)


def rows_of(values_by_seed, statuses=None):
    """Rows as a store has them; 100 calls between evaluations."""
    statuses = statuses or ["out_of_budget"] * len(values_by_seed)
    return pd.DataFrame(
        {
            "cell": f"cell{seed}",
            "status": status,
            "step": step,
            "calls": 100 * step,
            "value": value,
            "weight_auc": value,
        }
        for seed, (values, status) in enumerate(zip(values_by_seed, statuses, strict=True))
        for step, value in enumerate(values)
    )


def test_between_positive_values_interpolation_is_geometric_and_elsewhere_linear():
    x, y = np.array([0.0, 2.0, 4.0, 6.0]), np.array([100.0, 1.0, -3.0, 0.0])
    grid = np.array([-1.0, 0.0, 1.0, 2.0, 3.0, 5.0, 6.0, 7.0])
    np.testing.assert_allclose(interpolate(x, y, grid), [NAN, 100, 10, 1, -1, -1.5, 0, NAN])


def test_a_single_evaluation_is_known_only_where_it_was_made():
    np.testing.assert_equal(interpolate(np.array([2.0]), np.array([5.0]), np.array([1.0, 2.0, 3.0])), [NAN, 5, NAN])


def test_quantiles_agree_with_numpy_on_finite_numbers():
    values = np.random.default_rng(0).standard_normal((7, 5))
    np.testing.assert_allclose(quantiles(values), np.quantile(values, (0.2, 0.5, 0.8), axis=0))
    values[2] = values[5] = NAN
    np.testing.assert_allclose(quantiles(values), np.nanquantile(values, (0.2, 0.5, 0.8), axis=0))


def test_quantiles_of_infinite_values_are_never_nan():
    np.testing.assert_equal(quantiles(np.array([1.0, 2.0, INF, INF]))[1:], [INF, INF])
    np.testing.assert_allclose(quantiles(np.array([1.0, 2.0, 3.0, 4.0, INF])), [1.8, 3, INF])
    np.testing.assert_equal(quantiles(np.array([-INF, -INF, 0.5]))[1], -INF)
    assert np.isnan(quantiles(np.array([NAN, NAN]))).all()


def test_three_seeds_give_their_middle():
    curve = median_curve([run([0, 1], [1, 4]), run([0, 1], [2, 5]), run([0, 1], [9, 0.5])])
    np.testing.assert_array_equal(curve.x, [0, 1])
    np.testing.assert_allclose(curve.median, [2, 4])
    np.testing.assert_allclose(curve.low, [1.4, 1.9])
    np.testing.assert_allclose(curve.high, [6.2, 4.6])


def test_seeds_evaluated_at_different_times_meet_on_a_common_grid():
    curve = median_curve([run([0, 2], [1, 100]), run([0, 1, 2], [1, 10, 100])])
    np.testing.assert_array_equal(curve.x, [0, 1, 2])
    np.testing.assert_allclose(curve.median, [1, 10, 100])


def test_a_curve_ends_with_the_first_seed_that_is_out_of_budget():
    ends = [2, 3, 4, 5]
    curve = median_curve([run(range(end + 1), np.full(end + 1, end)) for end in ends])
    np.testing.assert_array_equal(curve.x, [0, 1, 2])
    np.testing.assert_allclose(curve.median, [3.5, 3.5, 3.5])
    assert curve.is_cut


def test_a_curve_is_not_cut_if_its_seeds_end_together_or_begin_late_or_diverge():
    same, late = run([0, 1, 2], [3, 2, 1]), run([1, 2], [2, 1])
    assert not median_curve([same, same]).is_cut
    assert not median_curve([late, same, same]).is_cut
    assert not median_curve([run([0, 1], [3, 9], "diverged"), same, same]).is_cut


def test_falling_seeds_of_different_speed_have_a_falling_median():
    x = np.linspace(0, 1, 50)
    curve = median_curve([run(x * speed, np.exp(-5 * x)) for speed in (0.6, 1, 2)])
    assert np.all(np.diff(curve.median) < 0) and curve.x[-1] == pytest.approx(0.6)


def test_a_seed_without_any_data_counts_among_the_seeds():
    curve = median_curve([run([0, 1], [1, 1]), run([0, 1], [NAN, NAN]), run([], [])])
    assert not curve.is_drawable and not len(curve.x)


def test_a_curve_begins_where_half_of_the_seeds_have_data():
    late = run([1, 2], [4, 4])
    np.testing.assert_array_equal(median_curve([run([0, 1, 2], [1, 1, 1]), late, late]).x, [1, 2])


def test_a_seed_that_diverged_before_any_evaluation_is_worse_than_any_other_throughout():
    lost = run([], [], "diverged")
    np.testing.assert_equal(median_curve([lost, lost, run([0, 1], [3, 2])]).median, [INF, INF])
    np.testing.assert_allclose(median_curve([lost, run([0, 1], [3, 2]), run([0, 1], [5, 2])]).median, [5, 2])


def test_a_diverged_seed_is_worse_than_any_other_from_its_end_on():
    curve = median_curve([run([0, 1], [5, 9], "diverged"), run([0, 1, 2], [5, 3, 1]), run([0, 1, 2], [5, 4, 2])])
    np.testing.assert_allclose(curve.median, [5, 4, 2])
    np.testing.assert_equal(curve.high[-1], INF)
    np.testing.assert_allclose(curve.low[-1], 1.4)


def test_a_median_of_mostly_diverged_seeds_is_infinite():
    bad = run([0, 1, 2], [5, NAN, NAN], "diverged")
    curve = median_curve([bad, bad, run([0, 1, 2], [5, 3, 1])])
    np.testing.assert_equal(curve.median, [5, INF, INF])


def test_an_infinite_value_counts_as_divergence_whatever_the_status():
    curve = median_curve([run([0, 1, 2], [5, INF, 1])])
    np.testing.assert_equal(curve.median, [5])
    curve = median_curve([run([0, 1, 2], [5, INF, 1]), run([0, 1, 2], [5, 3, 1])])
    np.testing.assert_equal(curve.median, [5, INF, INF])


def test_a_converged_seed_keeps_what_it_reached_but_draws_the_curve_no_further():
    done = run([0, 1], [8, 0.1], "converged")
    slow = run([0, 1, 2, 3], [8, 4, 2, 1])
    np.testing.assert_allclose(median_curve([done, slow, slow]).median, [8, 4, 2, 1])
    np.testing.assert_allclose(median_curve([done, slow]).median, [8, 2.05, 1.05, 0.55])
    np.testing.assert_array_equal(median_curve([done, done, slow]).x, [0, 1])


def test_a_long_curve_is_thinned_and_keeps_its_ends(monkeypatch):
    x = np.arange(1000.0)
    monkeypatch.setattr("bilevel.engine.curves.MAX_POINTS", 50)
    curve = median_curve([run(x, x + 1)])
    assert len(curve.x) == 50 and curve.x[0] == 0 and curve.x[-1] == 999
    np.testing.assert_allclose(curve.median, curve.x + 1)


def test_two_evaluations_at_the_same_time_count_once_by_the_later():
    np.testing.assert_allclose(median_curve([run([0, 1, 1, 2], [4, 3, 2, 1])]).median, [4, 2, 1])


def test_a_diverged_seed_counts_as_lowest_if_higher_is_better():
    rows = rows_of([[0.5, 0.7, 0.9], [0.5, 0.6], [0.5, 0.6]], ["out_of_budget", "diverged", "diverged"])
    np.testing.assert_equal(make_curve(rows, "calls", "weight_auc").median, [0.5, 0.6, -INF])
    np.testing.assert_equal(final_values(rows, "weight_auc"), [0.9, -INF, -INF])


def test_final_values_skip_missing_evaluations():
    rows = rows_of([[3, 2, NAN], [NAN, NAN], [3, 1, 0.5]], ["out_of_budget", "out_of_budget", "diverged"])
    np.testing.assert_equal(final_values(rows, "value"), [2, NAN, INF])


def test_calls_to_reach_are_a_median_over_seeds_that_counts_those_that_never_do():
    rows = rows_of([[1, 0.1, 0.01], [1, 0.5, 0.1], [1, 0.05, 0.2]])
    medians = [np.median(reach(rows, "value", target)) for target in (1, 0.1, 0.05, 0.01)]
    np.testing.assert_equal(medians, [0, 100, 200, INF])


def test_the_order_of_the_rows_of_a_store_does_not_matter():
    rows = rows_of([[5, 4, 3], [5, 3, 1]])
    np.testing.assert_array_equal(final_values(rows[::-1], "value"), [3, 1])
    np.testing.assert_equal(make_curve(rows[::-1], "calls", "value"), make_curve(rows, "calls", "value"))


def curve_of_each_cell(rows, axis, metric):
    """The same curve from one data frame for each seed."""
    seeds = []
    for _, cell in rows.sort_values("step", kind="stable").groupby("cell"):
        x, y = (cell[name].to_numpy(float) for name in (axis, metric))
        seeds.append(SeedCurve.from_evaluations(x, y, str(cell["status"].iloc[-1])))
    return median_curve(seeds, -INF if metric == "weight_auc" else INF)


@pytest.fixture(scope="module")
def shuffled():
    """40 seeds of other lengths, with gaps and divergence, in an order of no meaning."""
    rng = np.random.default_rng(7)
    values = [np.where(rng.random(n) < 0.2, NAN, rng.standard_normal(n)) for n in rng.integers(3, 60, 40)]
    rows = rows_of(values, list(rng.choice(["converged", "diverged", "out_of_budget"], 40, p=[0.2, 0.2, 0.6])))
    return rows.sample(frac=1, random_state=3).reset_index(drop=True)


@pytest.mark.parametrize("metric", ["value", "weight_auc"])
def test_a_curve_equals_that_of_one_data_frame_for_each_seed(metric, shuffled):
    found, expected = make_curve(shuffled, "calls", metric), curve_of_each_cell(shuffled, "calls", metric)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_the_curves_of_a_section_take_a_fraction_of_the_time_of_a_data_frame_for_each_seed():
    section = next(one for one in make_sections(fake_store.store()) if one.problem == "quadratic")
    shown = {one.label: one.rows for one in section.contenders}

    def seconds(function):
        began = time.perf_counter()
        function()
        return time.perf_counter() - began

    def apart():
        for metric, axis, label in section.curves:
            curve_of_each_cell(shown[label], axis, metric)

    ratios = [seconds(apart) / seconds(lambda: replace(section).curves) for _ in range(3)]
    assert max(ratios) > 2


def test_a_section_shows_each_solver_at_its_selected_setting_from_the_timing_phase():
    for section in make_sections(fake_store.store()):
        contenders = {one.label: one for one in section.contenders}
        assert section.metric == {"quadratic": "value_gap", "digits_cleaning": "value"}[section.problem]
        assert list(contenders) == sorted(fake_store.RATES)
        for solver in ("SABA", "SOBA", "SRBA"):
            rows = contenders[solver].rows
            assert set(rows["phase"]) == {"timing"} and set(rows["param_step_size"]) == {0.1}
            assert len(rows["cell"].unique()) == fake_store.TIMING_SEEDS
        assert contenders["StocBiO"].parameters is None
        assert len(contenders["StocBiO"].rows["cell"].unique()) == fake_store.SWEEP_SEEDS * len(fake_store.STEP_SIZES)


def test_only_selected_settings_have_curves():
    shown = fake_store.store().drop(columns=[*fake_store.EXACT[1:], *fake_store.CHEAP, *fake_store.UNUSED])
    section = make_sections(shown)[0]
    assert [section.with_curves(position) for position in (0, 2)] == [["value"], ["SABA", "SOBA", "SRBA"]]


def test_a_setting_reads_as_names_and_short_numbers():
    assert (
        Contender("SRBA", {"step_size": 0.123456, "period": 22}, None, None, "").setting
        == "step_size 0.1235, period 22"
    )
    assert Contender("SRBA", None, None, None, "").setting == "none: each has an infinite median"


def test_problems_that_differ_by_their_seed_are_one_section():
    table = fake_store.store()
    table = table[(table.problem == "digits_cleaning") & (table.phase == "sweep")]
    drawn = table.assign(problem_arguments=[f'{{"corruption": 0.5, "seed": {seed}}}' for seed in table.seed])
    (section,) = make_sections(drawn)
    assert section.arguments == {"corruption": 0.5}
    assert {len(one.rows["seed"].unique()) for one in section.contenders} == {fake_store.SWEEP_SEEDS}
    (fixed,) = make_sections(table.assign(problem_arguments='{"corruption": 0.5, "seed": 3}'))
    assert fixed.arguments == {"corruption": 0.5, "seed": 3}


def test_without_exact_values_the_outer_value_selects():
    table = fake_store.store()
    sections = make_sections(table.assign(value=NAN, value_gap=NAN))
    assert [section.metric for section in sections] == ["outer_value", "outer_value"]


@pytest.mark.parametrize("axis", ["calls", "epochs"])
def test_the_curve_of_a_store_is_that_of_its_median_seed(axis):
    table = fake_store.store()
    rows = table[(table.problem == "quadratic") & (table.solver == "SRBA") & (table.phase == "timing")]
    curve = make_curve(rows, axis, "value_gap")
    expected = 1.45 * np.exp(-0.4 * curve.x / {"calls": 500, "epochs": 0.5}[axis])
    np.testing.assert_allclose(curve.median, expected, rtol=1e-9)


def test_a_sweep_has_no_curve_against_seconds():
    table = fake_store.store()
    rows = table[(table.problem == "quadratic") & (table.solver == "SRBA") & (table.phase == "sweep")]
    assert not make_curve(rows, "seconds", "outer_value").is_drawable
    assert make_curve(rows[rows.param_step_size == 0.1], "calls", "outer_value").is_drawable
