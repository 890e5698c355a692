"""Targets from the data, and heat maps: made tables with known answers."""

import numpy as np
import pandas as pd
import pytest

from bilevel.bench.select import make_sections
from bilevel.bench.tables import choose_targets, make_heat_maps, make_target_table
from tests.bench import fake_store


@pytest.fixture(scope="module")
def sections():
    return {section.problem: section for section in make_sections(fake_store.store())}


def test_a_metric_over_orders_of_magnitude_has_powers_of_ten_between_start_and_end(sections):
    values = [target.value for target in choose_targets(sections["quadratic"], "value_gap")]
    start, best = 1.45, 1.45 * np.exp(-16)  # medians over seeds: 6.5 decades
    assert values == sorted(values, reverse=True) and len(values) == 6
    assert all(best <= value < start and np.log10(value) == round(np.log10(value)) for value in values)
    assert {1.0, 1e-6} <= set(values)


def test_another_metric_has_shares_of_the_way_to_the_best(sections):
    targets = choose_targets(sections["quadratic"], "outer_value")
    start, best = 0.1 + 1.45, 0.1 + 1.45 * np.exp(-16)
    shares = {"50 % of the way": 0.5, "99.9 % of the way": 0.001}
    for target in targets:
        if target.note in shares:
            assert target.value == pytest.approx(best + shares[target.note] * (start - best), rel=1e-3)
    assert len(targets) == 6 and [one.value for one in targets] == sorted((one.value for one in targets), reverse=True)


def test_a_race_counts_what_each_needs_and_who_arrives(sections):
    race = make_target_table(sections["quadratic"], "value_gap")
    place = [target.value for target in race.targets].index(1e-6)
    srba, soba = race.reached["SRBA"][place], race.reached["SOBA"][place]
    # exp(-0.4 k) (1 + seed / 10) <= 1e-6, 500 calls and 0.05 (1 + seed / 50) seconds between evaluations
    steps = np.ceil(np.log((1 + np.arange(10) / 10) * 1e6) / 0.4)
    assert srba.median("calls") == np.median(500 * steps) and srba.n_arrived == 10
    assert srba.median("seconds") == pytest.approx(np.median(0.05 * steps * (1 + np.arange(10) / 50)))
    assert soba.median("calls") == np.inf and soba.n_arrived == 0


def test_targets_that_tell_nothing_are_dropped(sections):
    table = fake_store.store()
    # Everybody begins at 1e-9, below most powers of ten, but for one solver.
    low = table.assign(value_gap=np.where(table.solver == "SRBA", table.value_gap, 1e-9 * table.value_gap))
    section = next(one for one in make_sections(low) if one.problem == "quadratic")
    for place in range(len(make_target_table(section, "value_gap").targets)):
        medians = [own[place].median("calls") for own in make_target_table(section, "value_gap").reached.values()]
        assert np.isfinite(medians).any() and max(medians) > 0
    swept = make_sections(table[table.phase == "sweep"])[0]
    assert make_target_table(swept, "value").targets == (), "without a timing phase there are no costs"


def test_a_target_of_a_metric_that_should_be_high_is_reached_from_below():
    table = fake_store.store()
    table = table[table.problem == "digits_cleaning"].assign(weight_auc=1 - 0.5 * table["value"])
    race = make_target_table(make_sections(table)[0], "weight_auc")
    values = [target.value for target in race.targets]
    assert values == sorted(values) and 0.27 < values[0] < values[-1] <= 1
    assert np.isfinite(race.reached["SRBA"][0].median("calls"))


def test_a_heat_map_has_the_median_of_each_setting_and_counts_what_diverged(sections):
    maps = {one.label: one for one in make_heat_maps(sections["quadratic"])}
    assert set(maps) == set(fake_store.RATES) and (maps["SRBA"].x, maps["SRBA"].y) == ("step_size", "")
    srba = maps["SRBA"]
    assert srba.xs == fake_store.STEP_SIZES and srba.selected == (0.1, None)
    assert srba.spots[0.1, None].median == pytest.approx(1.1 * np.exp(-16))
    assert srba.spots[1.0, None] == (np.inf, 3, 3)


def test_a_heat_map_takes_the_best_of_an_option_that_is_a_word():
    table, parts = fake_store.store(), []
    table = table[(table.problem == "quadratic") & (table.phase == "sweep") & (table.solver == "SRBA")]
    for schedule, factor in (("printed", 5.0), ("corrected", 1.0)):
        change = {"param_schedule": schedule, "cell": table.cell + schedule, "value_gap": factor * table.value_gap}
        parts.append(table.assign(**change))
    (one,) = make_heat_maps(make_sections(pd.concat(parts))[0])
    assert one.spots[0.1, None].median == pytest.approx(1.1 * np.exp(-16))
    assert one.spots[1.0, None].n_seeds == 3


def test_a_heat_map_is_over_step_and_ratio_and_takes_the_best_of_the_rest():
    table, parts = fake_store.store(), []
    table = table[(table.problem == "quadratic") & (table.phase == "sweep") & (table.solver == "SRBA")]
    for ratio in (1.0, 10.0):
        for period, factor in ((5, 3.0), (7, 1.0)):
            change = {"param_outer_ratio": ratio, "param_period": period, "cell": table.cell + f"{ratio}{period}"}
            parts.append(table.assign(**change, value_gap=ratio * factor * table.value_gap))
    (one,) = make_heat_maps(make_sections(pd.concat(parts))[0])
    assert (one.x, one.y, one.xs, one.ys) == ("step_size", "outer_ratio", fake_store.STEP_SIZES, (1.0, 10.0))
    assert one.spots[0.1, 10.0].median == pytest.approx(10 * 1.1 * np.exp(-16))
    assert one.selected == (0.1, 1.0)
