"""Selection: against the same rule written in plain Python."""

import json
import math
import random
import re
import statistics

import pandas
import pytest

from bilevel.bench.config import load_config
from bilevel.bench.select import list_settings, select
from bilevel.bench.store import SCHEMA, Store
from bilevel.engine.metrics import METRICS, Metric

INF, NAN = math.inf, math.nan
COUNTS = ["n_converged", "n_out_of_budget", "n_diverged", "n_interrupted"]


def row(solver, setting, seed, value, **changes):
    parameters = {f"param_{name}": given for name, given in setting.items()}
    start = {"cell": str((solver, setting, seed)), "experiment": "e", "phase": "sweep", "problem": "quadratic"}
    start |= {"problem_arguments": json.dumps({"dim_inner": 8, "seed": 0}), "solver": solver, "seed": seed}
    start |= {"status": "out_of_budget", "final": True, "calls": 100 + seed, "value": value}
    return start | parameters | changes


def rows(solver, setting, values, **changes):
    """One final row per seed; None is a diverged cell."""
    ends = [({"status": "diverged"}, 1e-9) if value is None else ({}, value) for value in values]
    return [row(solver, setting, seed, value, **end, **changes) for seed, (end, value) in enumerate(ends)]


def table(*groups):
    return pandas.DataFrame([one for group in groups for one in group])


def only(selected):
    assert len(selected) == 1
    return selected.iloc[0]


def test_selection_equals_a_plain_computation_on_random_tables():
    rng = random.Random(0)
    steps, ratios = [0.01, 0.1, 1.0], [0.1, 1.0]
    given = {}
    for solver in ("SRBA", "SOBA", "SABA"):
        for step in steps:
            for ratio in ratios:
                values = [rng.choice([rng.random()] * 6 + [None, NAN]) for _ in range(rng.randint(5, 9))]
                given[solver, step, ratio] = values
    groups = [rows(s, {"step_size": a, "outer_ratio": r}, values) for (s, a, r), values in given.items()]
    shuffled = table(*groups).sample(frac=1, random_state=1)
    selected = select(shuffled, "value").set_index("solver")
    assert sorted(selected.index) == ["SABA", "SOBA", "SRBA"]
    for solver in selected.index:
        losses = {
            key[1:]: [INF if value is None or math.isnan(value) else value for value in values]
            for key, values in given.items()
            if key[0] == solver
        }
        best = min(losses, key=lambda key: statistics.median(losses[key]))
        ours = selected.loc[solver]
        assert (ours["param_step_size"], ours["param_outer_ratio"]) == best
        assert ours["median"] == pytest.approx(statistics.median(losses[best]), rel=1e-14)
        assert ours["n_seeds"] == len(losses[best])
        assert ours["n_diverged"] == given[(solver, *best)].count(None)
        assert ours["median_calls"] == statistics.median(100 + seed for seed in range(len(losses[best])))
        assert (ours["status"], ours["metric"], ours["n_settings"]) == ("selected", "value", 6)


@pytest.mark.parametrize("n", [1, 2, 5, 10])
def test_the_band_is_that_of_the_inclusive_quantiles(n):
    values = [random.Random(n).random() for _ in range(n)]
    found = only(select(table(rows("SRBA", {"step_size": 0.1}, values)), "value"))
    fifths = statistics.quantiles(values, n=5, method="inclusive") if n > 1 else values * 4
    assert (found["p20"], found["p80"]) == pytest.approx((fifths[0], fifths[3]), rel=1e-12)


@pytest.mark.parametrize(
    ("values", "p20", "median", "p80"),
    [
        ([1.0, 2.0, 3.0, None], 1.6, 2.5, INF),
        ([1.0, 2.0, 3.0, 4.0, 5.0, None], 2.0, 3.5, 5.0),  # 80 % is the fifth exactly, its neighbor does not count
        ([1.0, 2.0, 3.0, None, None], 1.8, 3.0, INF),
        ([1.0, 2.0, 3.0, NAN, -INF], 1.8, 3.0, INF),
    ],
)
def test_diverged_cells_are_infinitely_bad_whatever_their_last_value_is(values, p20, median, p80):
    found = only(select(table(rows("SRBA", {"step_size": 0.1}, values)), "value"))
    assert [found["p20"], found["median"], found["p80"]] == pytest.approx([p20, median, p80])
    assert found["n_diverged"] == values.count(None)


def test_equal_medians_go_to_the_smaller_spread_and_then_to_the_first_in_any_order_of_the_rows():
    wide, narrow = [0.0, 1.0, 1.0, 1.0, 9.0], [0.9, 1.0, 1.0, 1.0, 1.1]
    whole = table(
        rows("SRBA", {"step_size": 0.1}, wide),
        rows("SRBA", {"step_size": 0.3}, narrow),
        rows("SRBA", {"step_size": 0.2}, narrow),
    )
    for ordered in (whole, whole.iloc[::-1]):
        assert only(select(ordered, "value"))["param_step_size"] == 0.2


def test_a_solver_that_always_diverges_is_listed_without_a_setting():
    diverged = [rows("SOBA", {"step_size": step}, [None, None, 0.5, None]) for step in (0.1, 1.0)]
    selected = select(table(rows("SRBA", {"step_size": 0.1}, [1.0, 2.0]), *diverged), "value")
    found = selected.set_index("solver").loc["SOBA"]
    assert found["status"] == "diverged" and found["median"] == INF
    assert math.isnan(found["param_step_size"])
    assert found[COUNTS].tolist() == [0, 2, 6, 0]
    assert (found["n_seeds"], found["n_settings"]) == (4, 2)
    assert list_settings(selected) == (("SRBA", (("step_size", 0.1),)),)


def test_if_everything_diverged_there_is_a_row_without_a_setting():
    selected = select(table(rows("SOBA", {"step_size": 0.1}, [None, None], weight_auc=NAN)), "weight_auc")
    assert only(selected)["status"] == "diverged"
    assert list_settings(selected) == ()


def test_the_largest_area_under_the_curve_wins():
    good = [{"weight_auc": value} for value in (0.9, 0.8, 0.7)]
    poor = [{"weight_auc": value} for value in (0.6, 0.6, 0.6)]
    groups = [
        [row("SRBA", {"step_size": step}, seed, 0.0, **one) for seed, one in enumerate(some)]
        for step, some in ((0.1, poor), (0.2, good))
    ]
    lost = rows("SRBA", {"step_size": 0.3}, [None] * 3, weight_auc=0.99)
    found = only(select(table(*groups, lost), "weight_auc"))
    assert found["param_step_size"] == 0.2
    assert [found["p20"], found["median"], found["p80"]] == pytest.approx([0.74, 0.8, 0.86])
    assert only(select(table(lost), "weight_auc"))["median"] == -INF


def test_a_metric_of_the_users_own_is_better_lower_unless_the_registry_says_otherwise(monkeypatch):
    whole = table(*(rows("SRBA", {"step_size": step}, [0.0], fairness=step) for step in (0.1, 0.2)))
    assert only(select(whole, "fairness"))["param_step_size"] == 0.1
    monkeypatch.setitem(METRICS, "fairness", Metric("fairness", "fairness", better="higher"))
    assert only(select(whole, "fairness"))["param_step_size"] == 0.2
    assert "fairness" in SCHEMA().names


def test_a_column_that_is_no_metric_selects_nothing():
    whole = table(rows("SRBA", {"step_size": 0.1}, [1.0]))
    for name in ("seed", "calls", "status", "param_step_size"):
        with pytest.raises(ValueError, match=re.escape(f"`metric={name!r}`: ")):
            select(whole, name)


def test_a_parameter_that_no_longer_exists_still_distinguishes_settings():
    whole = table(
        rows("SRBA", {"step_size": 0.1, "old": "a"}, [2.0, 2.0]),
        rows("SRBA", {"step_size": 0.1, "old": "b"}, [1.0, 1.0]),
    )
    assert list_settings(select(whole, "value")) == (("SRBA", (("old", "b"), ("step_size", 0.1))),)


def test_only_final_rows_of_the_sweep_count():
    whole = table(
        rows("SRBA", {"step_size": 0.1}, [2.0, 2.0]),
        rows("SRBA", {"step_size": 0.2}, [3.0, 3.0]),
        rows("SRBA", {"step_size": 0.2}, [0.0, 0.0], final=False),
        rows("SRBA", {"step_size": 0.2}, [0.0, 0.0], phase="timing"),
    )
    assert only(select(whole, "value"))["param_step_size"] == 0.1


def test_problems_that_differ_by_their_seed_alone_are_one_and_others_are_not():
    anew = [
        row("SRBA", {"step_size": 0.1}, seed, 1.0, problem_arguments=json.dumps({"dim_inner": 8, "seed": seed}))
        for seed in range(3)
    ]
    other = rows("SRBA", {"step_size": 0.1}, [1.0], problem_arguments='{"dim_inner": 9}')
    elsewhere = rows("SRBA", {"step_size": 0.1}, [1.0], experiment="f")
    selected = select(table(anew, other, elsewhere), "value")
    found = dict(
        zip(zip(selected["experiment"], selected["problem_arguments"], strict=True), selected["n_seeds"], strict=True)
    )
    assert found == {("e", '{"dim_inner": 8}'): 3, ("e", '{"dim_inner": 9}'): 1, ("f", '{"dim_inner": 8}'): 1}


def test_the_cost_of_a_setting_is_the_median_of_its_calls():
    cells = [row("SRBA", {"step_size": 0.1}, seed, 1.0, calls=calls) for seed, calls in enumerate((7, 100, 8))]
    assert only(select(table(cells), "value"))["median_calls"] == 8


def test_a_parameter_that_is_none_is_a_setting_of_its_own():
    whole = table(
        rows("SRBA", {"step_size": 0.1, "v_radius": None}, [1.0, 1.0]),
        rows("SRBA", {"step_size": 0.1, "v_radius": 2.0}, [3.0, 3.0]),
    )
    selected = select(whole, "value")
    assert only(selected)["n_settings"] == 2
    assert list_settings(selected) == (("SRBA", (("step_size", 0.1),)),)


@pytest.mark.parametrize(
    ("whole", "metric", "message"),
    [
        (table(), "value", "the store is empty; run the sweep first."),
        (table(rows("SRBA", {"step_size": 0.1}, [1.0])), "valeu", "`metric='valeu'`: unknown; did you mean `value`?"),
        (table(rows("SRBA", {"step_size": 0.1}, [1.0])), "drift", "`metric='drift'`: the table has no such column."),
        (
            table(rows("SRBA", {"step_size": 0.1}, [1.0], weight_auc=NAN)),
            "weight_auc",
            "`metric='weight_auc'`: no cell of `e` on quadratic has it; there are: value.",
        ),
        (table(rows("SRBA", {"step_size": 0.1}, [1.0], phase="timing")), "value", "no finished cell of the sweep"),
        (table(rows("SRBA", {"step_size": 0.1}, [1.0], final=False)), "value", "no finished cell of the sweep"),
        (
            table(*[rows("SRBA", {"step_size": 0.1}, [1.0], cell=cell) for cell in "ab"]),
            "value",
            "SRBA of `e` has several cells with one setting and seed, as after a change of the budget;",
        ),
    ],
)
def test_a_table_that_cannot_be_selected_from_is_refused(whole, metric, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        select(whole, metric)


def test_an_empty_store_is_refused(tmp_path):
    with pytest.raises(ValueError, match="the store is empty"):
        select(Store(tmp_path).read(), "value")


def stored(cell, value):
    resolved = {f"param_{name}": given for name, given in cell.parameters}
    start = {name: getattr(cell, name) for name in ("experiment", "phase", "problem", "solver", "seed")}
    arguments = json.dumps(dict(cell.problem_arguments), sort_keys=True)
    start |= {"cell": cell.id, "problem_arguments": arguments, "status": "out_of_budget", "final": True}
    return start | resolved | {"calls": 10, "step": 1, "value": value}


CONFIG = """
name = "x"
metric = "value"
seeds = 3
[problem]
name = "quadratic"
[budget]
epochs = 10
seconds = 1
[[solvers]]
name = "SRBA"
step_size = [0.1, 1.0]
period_fraction = [1, 2]
[[solvers]]
name = "F2SA"
shared_batch = [true, false]
schedule = ["corrected", "printed"]
"""


def test_a_setting_is_read_from_the_store_unchanged(tmp_path):
    (tmp_path / "x.toml").write_text(CONFIG)
    experiment = load_config(tmp_path / "x.toml")
    cells = experiment.cells(640, 64)
    store = Store(tmp_path / "store")
    wanted = {"SRBA": {"step_size": 1.0, "period": 22}, "F2SA": {"shared_batch": False, "schedule": "printed"}}
    for number, cell in enumerate(cells):
        hit = wanted[cell.solver].items() <= dict(cell.parameters).items()
        store.write([stored(cell, 0.5 if hit else 1.0 + number)])
    chosen = list_settings(select(store.read(), "value"))
    assert set(chosen) == {
        (cell.solver, cell.parameters) for cell in cells if wanted[cell.solver].items() <= dict(cell.parameters).items()
    }
    for cell in experiment.timing_cells(chosen, 640, 64):
        assert (cell.solver, cell.parameters) in chosen
        assert {name: type(value) for name, value in cell.parameters}["batch_size"] is int


def test_columns_are_selected_apart_and_a_setting_of_both_counts_in_both():
    whole = table(
        rows("SRBA", {"step_size": 0.1}, [2.0, 2.0], columns="published, wider"),
        rows("SRBA", {"step_size": 0.2}, [1.0, 1.0], columns="wider"),
        rows("SRBA", {"step_size": 0.3}, [3.0, 3.0], columns="published, wider"),
        rows("SOBA", {"step_size": 0.1}, [5.0, 5.0]),
    )
    selected = select(whole, "value").set_index("label")
    steps = {"SRBA (published)": 0.1, "SRBA (wider)": 0.2, "SOBA": 0.1}
    assert selected["param_step_size"].to_dict() == steps
    assert selected["n_settings"].to_dict() == {"SRBA (published)": 2, "SRBA (wider)": 3, "SOBA": 1}
    assert len(list_settings(selected)) == 3


def test_a_setting_at_an_end_of_its_grid_is_flagged():
    settings = [{"step_size": step, "period": period} for step in (0.1, 0.2, 0.3) for period in (5, 7)]
    losses = {(0.3, 5): 1.0, (0.2, 7): 2.0}
    whole = table(*(rows("SRBA", one, [losses.get(tuple(one.values()), 9.0)]) for one in settings))
    assert only(select(whole, "value"))["edges"] == "largest step_size, least period"
    inside = whole[whole["param_step_size"] < 0.3]
    assert only(select(inside, "value"))["edges"] == "largest step_size, largest period"
    assert only(select(table(rows("SRBA", {"step_size": 0.1}, [1.0])), "value"))["edges"] == ""


def test_test_rows_select_nothing():
    with pytest.raises(ValueError, match="`metric='test_error'` is of test rows, which select nothing"):
        select(table(rows("SRBA", {"step_size": 0.1}, [1.0], test_error=0.1)), "test_error")
