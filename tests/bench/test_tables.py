"""Comparisons of solvers, targets, and heat maps: small tables with known answers."""

import html

import numpy as np
import pandas as pd
import pytest

from bilevel.bench.page import make_environment
from bilevel.bench.select import make_sections
from bilevel.bench.tables import (
    choose_targets,
    decide,
    describe_margin,
    format_quantity,
    make_heat_maps,
    make_targets,
    seed_finals,
)
from bilevel.engine.metrics import metric
from tests.bench import fake_store

INF = np.inf


def words(macro, *arguments):
    """What a macro of the page writes."""
    return html.unescape(str(getattr(make_environment().get_template("macros.html").module, macro)(*arguments)))


def seeds(*values):
    return dict(enumerate(values))


def test_the_least_median_wins_and_the_next_is_second():
    verdict = decide({"A": seeds(3, 4, 9), "B": seeds(1, 2, 8), "C": seeds(5, 5, 5)})
    assert (verdict.winner, verdict.median, verdict.second, verdict.second_median) == ("B", 2, "A", 4)
    assert verdict.margin == "2 times lower"
    assert decide({"A": seeds(1, 2), "B": seeds(3, 4)}, "higher").winner == "B"


def test_the_comparison_with_the_largest_p_value_counts():
    verdict = decide({"A": seeds(2, 2, 2, 2, 2), "B": seeds(3, 3, 3, 3, 3), "C": seeds(1, 1, 9, 9, 9)})
    assert (verdict.winner, verdict.second, verdict.wins, verdict.n_seeds) == ("A", "B", 3, 5)
    assert verdict.level == "open" and "at least 3 of 5 seeds" in words("confidence", verdict)


@pytest.mark.parametrize(
    ("wins", "n_seeds", "p_value", "level"),
    [
        (6, 6, 2 / 64, "significant"),
        (8, 9, 2 * 10 / 512, "significant"),
        (5, 5, 2 / 32, "open"),
        (4, 5, 2 * 6 / 32, "open"),
        (3, 5, 1.0, "open"),
        (1, 1, 1.0, "open"),
    ],
)
def test_the_sign_test_is_two_sided(wins, n_seeds, p_value, level):
    ours = [1.0] * wins + [3.0] * (n_seeds - wins)
    verdict = decide({"A": seeds(*ours), "B": seeds(*[2.0] * n_seeds)})
    assert verdict.winner == "A" and (verdict.p_value, verdict.level) == (p_value, level)


def test_the_sign_test_is_corrected_for_the_number_of_comparisons():
    verdict = decide({"A": seeds(*[1.0] * 6), "B": seeds(*[2.0] * 6), "C": seeds(*[3.0] * 6)})
    assert (verdict.p_value, verdict.level) == (2 * 2 / 64, "open")
    assert words("confidence", verdict) == (
        "Ahead of each other solver in all 6 seeds: sign test p = 0.062 (two-sided, 2 comparisons)."
    )


def test_a_diverged_seed_loses_and_ties_are_left_out():
    verdict = decide({"A": seeds(1, 1, INF, 1, INF), "B": seeds(2, 2, 2, 1, INF)})
    assert (verdict.winner, verdict.wins, verdict.n_seeds) == ("A", 2, 3)
    same = decide({"A": seeds(1, 1), "B": seeds(1, 1)})
    assert same.margin == "the same to 0.1 %" and words("confidence", same) == "Equal to another solver in all seeds."


def test_only_seeds_that_both_have_are_compared():
    verdict = decide({"A": {0: 1.0, 1: 1.0, 2: 1.0}, "B": {1: 2.0, 2: 2.0, 3: 0.5}})
    assert (verdict.wins, verdict.n_seeds) == (2, 2)


def test_without_a_finite_solver_there_is_no_verdict_and_with_one_no_second():
    alone = decide({"A": seeds(1, 2), "B": seeds(INF, INF)})
    assert alone.second is None and alone.level == "open"
    assert words("winner", alone, metric("value")) == "A ends with the lowest h(x): 1.5, the only finite one."
    assert decide({"A": seeds(INF)}) is None and decide({}) is None
    assert words("winner", None, metric("value")) == "No solver ends with a finite h(x)."


def test_the_headline_names_the_numbers():
    said = words("winner", decide({"A": seeds(0.9, 0.9), "B": seeds(0.6, 0.6)}, "higher"), metric("weight_auc"))
    assert said == "A ends with the highest AUC of the weights: 0.9, 50 % higher than B (0.6)."


@pytest.mark.parametrize(
    ("best", "other", "better", "words"),
    [
        (0.0488, 0.0523, "lower", "6.7 % lower"),
        (1e-8, 1e-5, "lower", "1e+03 times lower"),
        (0.9, 0.8, "higher", "12 % higher"),
        (-1.0, 0.5, "lower", "1.5 lower"),
        (1.0, 1.0001, "lower", "the same to 0.1 %"),
        (1.0, INF, "lower", ""),
    ],
)
def test_margins_of_positive_values_are_relative(best, other, better, words):
    assert describe_margin(best, other, better) == words


def test_final_values_go_with_their_seeds():
    section = make_sections(fake_store.store())[0]
    values = seed_finals(section, "value")
    assert set(values) == {"SRBA", "SABA", "SOBA"}, "where all diverged nothing is selected"
    assert values["SOBA"][0] == INF and values["SRBA"][3] == pytest.approx(1.3 * np.exp(-16))


def test_counts_are_short():
    assert [format_quantity(count) for count in (950, 12_345, 2_773_092, 1.5e9)] == [
        "950",
        "12,000",
        "2.77 million",
        "1.5 billion",
    ]


@pytest.fixture(scope="module")
def sections():
    return {section.problem: section for section in make_sections(fake_store.store())}


def test_a_metric_over_orders_of_magnitude_has_powers_of_ten_between_start_and_end(sections):
    values = [value for value, _ in choose_targets(sections["quadratic"], "value_gap")]
    start, best = 1.45, 1.45 * np.exp(-16)  # medians over seeds: 6.5 decades
    assert values == sorted(values, reverse=True) and len(values) == 6
    assert all(best <= value < start and np.log10(value) == round(np.log10(value)) for value in values)
    assert {1.0, 1e-6} <= set(values)


def test_another_metric_has_shares_of_the_way_to_the_best(sections):
    targets = choose_targets(sections["quadratic"], "outer_value")
    start, best = 0.1 + 1.45, 0.1 + 1.45 * np.exp(-16)
    shares = {"50 % of the way": 0.5, "99.9 % of the way": 0.001}
    for value, note in targets:
        if note in shares:
            assert value == pytest.approx(best + shares[note] * (start - best), rel=1e-3)
    assert len(targets) == 6 and targets == sorted(targets, reverse=True)


def test_a_target_table_has_the_cost_of_each_solver_and_who_arrives(sections):
    (target,) = (one for one in make_targets(sections["quadratic"], "value_gap") if one.value == 1e-6)
    # exp(-0.4 k) (1 + seed / 10) <= 1e-6, 500 calls and 0.05 (1 + seed / 50) seconds between evaluations
    steps = np.ceil(np.log((1 + np.arange(10) / 10) * 1e6) / 0.4)
    assert target.medians("calls")["SRBA"] == np.median(500 * steps)
    assert target.medians("seconds")["SRBA"] == pytest.approx(np.median(0.05 * steps * (1 + np.arange(10) / 50)))
    assert target.medians("calls")["SOBA"] == np.inf
    assert target.n_arrived("SRBA") == 10 and target.n_arrived("SOBA") == 0


def test_unreachable_and_trivial_targets_are_dropped(sections):
    table = fake_store.store()
    # Everybody begins at 1e-9, below most powers of ten, but for one solver.
    low = table.assign(value_gap=np.where(table.solver == "SRBA", table.value_gap, 1e-9 * table.value_gap))
    section = next(one for one in make_sections(low) if one.problem == "quadratic")
    for target in make_targets(section, "value_gap"):
        medians = [*target.medians("calls").values()]
        assert np.isfinite(medians).any() and max(medians) > 0
    swept = make_sections(table[table.phase == "sweep"])[0]
    assert make_targets(swept, "value") == [], "without a timing phase there are no costs"


def test_a_target_of_a_metric_that_should_be_high_is_reached_from_below():
    table = fake_store.store()
    table = table[table.problem == "digits_cleaning"].assign(weight_auc=1 - 0.5 * table["value"])
    targets = make_targets(make_sections(table)[0], "weight_auc")
    values = [target.value for target in targets]
    assert values == sorted(values) and 0.27 < values[0] < values[-1] <= 1
    assert np.isfinite(targets[0].medians("calls")["SRBA"])


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
