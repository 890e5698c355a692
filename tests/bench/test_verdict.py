"""Who wins, by how much, and the sign test: small tables with known answers."""

import numpy as np
import pytest

from bilevel.bench.select import make_sections
from bilevel.bench.tables import (
    decide,
    describe_leads,
    describe_margin,
    describe_winner,
    find_leads,
    round_count,
    seed_finals,
)
from bilevel.engine.metrics import metric
from tests.bench import fake_store

INF = np.inf


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
    assert verdict.level == "open" and "at least 3 of 5 seeds" in verdict.confidence


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
    assert verdict.confidence == (
        "Ahead of each other solver in all 6 seeds: sign test p = 0.062 (two-sided, 2 comparisons)."
    )


def test_a_diverged_seed_loses_and_seeds_that_end_alike_tell_nothing():
    verdict = decide({"A": seeds(1, 1, INF, 1, INF), "B": seeds(2, 2, 2, 1, INF)})
    assert (verdict.winner, verdict.wins, verdict.n_seeds) == ("A", 2, 3)
    same = decide({"A": seeds(1, 1), "B": seeds(1, 1)})
    assert same.margin == "the same to 0.1 %" and same.confidence == "Equal to another solver in all seeds."


def test_only_seeds_that_both_have_are_compared():
    verdict = decide({"A": {0: 1.0, 1: 1.0, 2: 1.0}, "B": {1: 2.0, 2: 2.0, 3: 0.5}})
    assert (verdict.wins, verdict.n_seeds) == (2, 2)


def test_one_finite_solver_has_no_second_and_none_no_verdict():
    alone = decide({"A": seeds(1, 2), "B": seeds(INF, INF)})
    assert alone.second is None and alone.level == "open"
    assert describe_winner(alone, metric("value")) == "A ends with the lowest h(x): 1.5, the only finite one."
    assert decide({"A": seeds(INF)}) is None and decide({}) is None
    assert describe_winner(None, metric("value")) == "No solver ends with a finite h(x)."


def test_the_headline_names_the_numbers():
    said = describe_winner(decide({"A": seeds(0.9, 0.9), "B": seeds(0.6, 0.6)}, "higher"), metric("weight_auc"))
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
def test_margins_are_relative_where_they_can_be(best, other, better, words):
    assert describe_margin(best, other, better) == words


def test_final_values_go_with_their_seeds():
    section = make_sections(fake_store.store())[0]
    values = seed_finals(section, "value")
    assert set(values) == {"SRBA", "SABA", "SOBA"}, "where all diverged nothing is selected"
    assert values["SOBA"][0] == INF and values["SRBA"][3] == pytest.approx(1.3 * np.exp(-16))


def test_who_leads_is_told_where_the_lead_changes():
    crossing = fake_store.store()
    late = (crossing.solver == "SABA") & (crossing.phase == "timing")
    # SABA stays at exp(-6), which SRBA, 1.45 exp(-0.4 k) after 500 k calls in the median, passes at k = 15.9.
    crossing.loc[late, "value"] = np.maximum(np.exp(-6 * crossing.calls / 5000), np.exp(-6))
    section = make_sections(crossing[crossing.problem == "digits_cleaning"])[0]
    (first, until), (then, end) = find_leads(section)
    assert (first, then) == ("SABA", "SRBA") and until == 7_500 and end == 20_000
    assert describe_leads(section) == "On the way there, SABA leads up to 7,500 oracle calls, then SRBA."


def test_where_nobody_is_passed_nothing_is_said():
    assert describe_leads(make_sections(fake_store.store())[1]) == ""


def test_counts_are_short():
    assert [round_count(count) for count in (950, 12_345, 2_773_092, 1.5e9)] == [
        "950",
        "12,000",
        "2.77 million",
        "1.5 billion",
    ]
