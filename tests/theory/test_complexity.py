"""Slopes, and the measurement that they are fitted to."""

import numpy as np
import pytest

import bilevel
from bilevel.theory import complexity
from bilevel.theory.complexity import (
    METHODS,
    Measurement,
    calls_to,
    figure,
    fit_slope,
    make_problem,
    measure_complexity,
    slope_in_size,
    table,
)


def test_a_power_law_has_its_exponent_and_infinite_points_are_left_out():
    x = np.array([1.0, 10, 100, 1000])
    found = fit_slope(x, 3 * x**0.7)
    np.testing.assert_allclose([found.value, found.half_width], [0.7, 0], atol=1e-6)
    assert fit_slope([*x, 1e4], [*(3 * x**0.7), np.inf]).n_points == 4


def test_the_interval_covers_the_exponent_as_often_as_it_says():
    rng = np.random.default_rng(0)
    x = np.repeat(np.geomspace(1, 1000, 5), 3)
    fits = [fit_slope(x, x**0.5 * np.exp(0.3 * rng.standard_normal(len(x)))) for _ in range(400)]
    covered = np.mean([abs(fit.value - 0.5) <= fit.half_width for fit in fits])
    assert abs(covered - 0.95) < 4 * np.sqrt(0.95 * 0.05 / 400)


def test_calls_are_those_of_the_first_row_that_is_small_enough():
    problem, solver = make_problem(256), bilevel.SRBA(0.04, 1.0, 1, period=256)
    found = calls_to(problem, solver, [1.0, 1e-2, 1e-30], 0, 40_000)
    history = bilevel.run(problem, solver, max_calls=40_000, eval_every=50).history
    for epsilon in (1.0, 1e-2):
        first = np.flatnonzero(history["hypergrad_norm_sq"] <= epsilon)[0]
        assert found[epsilon] == history["calls"][first]
    assert found[1.0] <= found[1e-2] < found[1e-30] == np.inf


def test_steps_and_periods_follow_the_theory():
    by_name = {method.name: method for method in METHODS}
    small, large = by_name["SRBA"].solver(0.1, 256), by_name["SRBA"].solver(0.1, 4096)
    assert (small.period, large.period) == (256, 4096)
    np.testing.assert_allclose(large.step_size / small.step_size, 1 / 4)
    np.testing.assert_allclose(by_name["SABA"].solver(0.1, 4096).step_size, 0.1 * 16 ** (-2 / 3))


def test_a_measurement_goes_from_sizes_to_a_table_and_a_figure(tmp_path, monkeypatch):
    methods = tuple(method for method in METHODS if method.name in ("SRBA", "Exact"))
    monkeypatch.setattr("bilevel.theory.complexity.METHODS", methods)
    found = [
        row
        for method in methods
        for row in measure_complexity(method, (256, 512, 1024), (1e-1, 1e-2), range(2), 60_000)
    ]
    assert {(row.solver, row.size) for row in found} == {(m.name, size) for m in methods for size in (256, 512, 1024)}
    exact = slope_in_size(found, "Exact", 1e-2)
    assert 0.7 < exact.value < 1.4, "full-batch steps cost n + m each"
    text = table(found)
    assert text.count("\n") == 3 and "| SRBA | 0.50 |" in text
    figure(found, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_never_reached_is_said():
    rows = [Measurement("SRBA", size, 1e-3, 0, np.inf) for size in (64, 128, 256)]
    assert "not reached" in table(rows)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: make_problem(63), "size=63"),
        (lambda: calls_to(make_problem(64), bilevel.SRBA(), [0.0], 0, 10), r"epsilons=\(0.0,\)"),
        (lambda: calls_to(make_problem(64), bilevel.SRBA(), [], 0, 10), "must be numbers above 0"),
        (lambda: list(measure_complexity(METHODS[-1], sizes=())), "must not be empty"),
        (lambda: fit_slope([1, 2], [1, 2]), "at least three finite points"),
        (lambda: fit_slope([1, 1, 1], [1, 2, 3]), "at two places"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_every_method_is_stated_with_its_exponent():
    assert {method.name: round(method.proved_exponent, 3) for method in complexity.METHODS} == {
        "SRBA": 0.5,
        "SABA": 0.667,
        "SOBA": 0.0,
        "Exact": 1.0,
    }
