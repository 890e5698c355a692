"""Slopes, first passages compared with a counter in NumPy, and the measurement."""

import numpy as np
import pytest

import bilevel
from paper import complexity
from paper.complexity import (
    QUICK,
    Measurement,
    measure_complexity,
    read_measurements,
    select,
    slope_in_size,
    write_measurements,
)
from paper.measuring import first_passage, fit_slope
from paper.methods import METHODS, Setting, make_quadratic, make_valleys

BY_NAME = {method.name: method for method in METHODS}
TINY = QUICK._replace(methods=("SRBA",), sizes=(64, 128), epsilons={"valleys": (0.5, 0.2)}, max_calls=4000)


def test_a_power_law_has_its_exponent_and_infinite_points_are_left_out():
    x = np.array([1.0, 10, 100, 1000])
    found = fit_slope(x, 3 * x**0.7)
    np.testing.assert_allclose([found.value, found.half_width], [0.7, 0], atol=1e-6)
    assert fit_slope([*x, 1e4], [*(3 * x**0.7), np.inf]).n_points == 4


def test_the_interval_covers_the_exponent_with_its_probability():
    rng = np.random.default_rng(0)
    x = np.repeat(np.geomspace(1, 1000, 5), 3)
    fits = [fit_slope(x, x**0.5 * np.exp(0.3 * rng.standard_normal(len(x)))) for _ in range(400)]
    covered = np.mean([abs(fit.value - 0.5) <= fit.half_width for fit in fits])
    assert abs(covered - 0.95) < 4 * np.sqrt(0.95 * 0.05 / 400)


def looks():
    step = 0
    while True:
        yield step
        step += max(1, step // 20)


def descend_in_numpy(problem, step, epsilon):
    """Return the calls of simultaneous full-batch moves of z, v and x, from the means in closed form."""
    a, r = (np.asarray(part) for part in (problem.oracles.curvatures, problem.oracles.widths))
    z, x, v = (np.array(part) for part in problem.start)
    n, m, taken = problem.n_inner, problem.n_outer, 0
    for look in looks():
        for _ in range(look - taken):
            directions = a * (z - x), -a * v, a * v + z / r**2 / np.sqrt(1 + (z / r) ** 2)
            z, x, v = (part - step * move for part, move in zip((z, x, v), directions, strict=True))
        taken = look
        if np.sum((x / r**2) ** 2 / (1 + (x / r) ** 2)) <= epsilon:
            return taken * (3 * n + 2 * m)


def test_calls_to_a_stationary_point_are_those_of_a_plain_count():
    problem = make_valleys(64)
    solver = BY_NAME["full batch"].make(Setting(0.25), 1.0, 64)
    found = first_passage(problem, solver, [0.2, 0.05], 0, 1e6)
    assert found.costs == {epsilon: descend_in_numpy(problem, 0.25, epsilon) for epsilon in (0.2, 0.05)}
    assert found.lowest <= 0.05


def test_calls_of_a_recursive_method_are_those_of_its_periods():
    n, q = 64, 64
    found = first_passage(make_valleys(n), bilevel.SRBA(0.05, 1.0, 1, period=q), [0.2, 1e-30], 3, 5000)
    steps = next(step for step in looks() if (-(-step // q)) * (2.5 * n - 10) + 10 * step >= found.costs[0.2])
    assert found.costs[0.2] == -(-steps // q) * (2.5 * n - 10) + 10 * steps
    assert found.costs[1e-30] == np.inf and 1e-30 < found.lowest <= 0.2


def test_the_cost_may_be_one_kind_of_calls():
    solver = bilevel.SRBA(0.25, 1.0, 1, period=1)
    everything, of_f = (
        first_passage(make_valleys(64), solver, [0.2], 0, 1e6, cost).costs[0.2]
        for cost in (sum, lambda c: c.outer_grad)
    )
    assert everything / of_f == (3 * 32 + 2 * 32) / 32


def test_steps_and_periods_follow_the_theory():
    small, large = (BY_NAME["SRBA"].make(Setting(0.1), size / 256, size) for size in (256, 4096))
    assert (small.period, large.period) == (256, 4096)
    np.testing.assert_allclose(large.step_size / small.step_size, 1 / 4)
    np.testing.assert_allclose(BY_NAME["SABA"].make(Setting(0.1), 16, 4096).step_size, 0.1 * 16 ** (-2 / 3))
    for name in ("SOBA", "AmIGO", "F2SA"):
        setting = BY_NAME[name].settings[0]
        assert BY_NAME[name].make(setting, 1, 256) == BY_NAME[name].make(setting, 64, 16384)


def test_every_row_of_table_1_is_measured_with_the_bound_that_its_solver_states():
    for name in ("StocBiO", "AmIGO", "MRBO", "VRBO", "SABA", "F2SA", "SRBA"):
        assert BY_NAME[name].bound.replace("N", "(n+m)") in bilevel.SOLVERS[name].complexity.calls


def test_a_measurement_is_resumed_and_its_file_holds_all_rows(tmp_path):
    path, said = tmp_path / "rows.csv", []
    rows = measure_complexity(TINY, path=path, progress=lambda share, text: said.append(text))
    grid = [row for row in rows if row.seed >= 100]
    assert len(grid) == 2 * 2 * 2, "two sizes, two settings, two values of ε"
    assert len(rows) - len(grid) == 2 * 2 * 2, "two sizes, two seeds, two values of ε"
    assert read_measurements(path) == rows and len(said) >= 8
    first = path.read_bytes()
    assert measure_complexity(TINY, path=path, progress=lambda *_: pytest.fail("nothing is due")) == rows
    write_measurements(path, rows)
    assert path.read_bytes() == first
    for row in rows:
        assert row.seed >= 100 or row.setting == select(rows, "valleys", BY_NAME["SRBA"], row.size, row.epsilon)


def measurement(step, seed, calls, lowest=1.0, size=256, solver="SRBA"):
    return Measurement("valleys", solver, step, 1.0, 1, 0.0, size, seed, 1e-3, calls, lowest)


def test_the_first_stationary_setting_is_selected_or_else_the_one_with_the_lowest_gradient():
    rows = [measurement(0.1, 100, 50.0), measurement(0.2, 100, 40.0), measurement(0.3, 0, 1.0)]
    assert select(rows, "valleys", BY_NAME["SRBA"], 256, 1e-3).step == 0.2
    rows = [measurement(0.1, 100, np.inf, 0.5), measurement(0.2, 100, np.inf, 0.7)]
    assert select(rows, "valleys", BY_NAME["SRBA"], 256, 1e-3).step == 0.1


def test_a_grid_at_the_smallest_size_is_used_if_the_bound_does_not_depend_on_the_size():
    rows = [measurement(0.3, 100, 50.0, size=64, solver=name) for name in ("SOBA", "SRBA")]
    rows += [measurement(0.1, 100, 60.0, size=256, solver="SRBA")]
    assert select(rows, "valleys", BY_NAME["SOBA"], 256, 1e-3).step == 0.3
    assert select(rows, "valleys", BY_NAME["SRBA"], 256, 1e-3).step == 0.1


def test_slopes_ignore_the_rows_of_the_grid():
    rows = [measurement(0.1, seed, 10.0 * size**0.5, size=size) for size in (4, 16, 64) for seed in (0, 1)]
    grid = [measurement(0.1, 100, 1e9, size=4)]
    assert slope_in_size(rows + grid, "valleys", "SRBA", 1e-3).value == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: make_quadratic(63), "size=63"),
        (lambda: first_passage(make_valleys(64), bilevel.SRBA(), [0.0], 0, 10), r"epsilons=\(0.0,\)"),
        (lambda: first_passage(make_valleys(64), bilevel.SRBA(), [], 0, 10), "must be numbers above 0"),
        (lambda: measure_complexity(TINY._replace(sizes=())), "must not be empty"),
        (lambda: measure_complexity(TINY._replace(seeds=(100,))), "`seeds` must lie below 100"),
        (lambda: measure_complexity(TINY._replace(methods=("SRBO",))), "`plan` names 'SRBO'"),
        (lambda: fit_slope([1, 2], [1, 2]), "at least three finite points"),
        (lambda: fit_slope([1, 1, 1], [1, 2, 3]), "at two places"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_file_with_other_columns_is_refused(tmp_path):
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="has the columns a, b; move it away"):
        read_measurements(tmp_path / "rows.csv")


def test_the_quick_plan_is_part_of_the_full_one():
    assert set(complexity.QUICK.methods) <= set(complexity.FULL.methods) == set(BY_NAME)
