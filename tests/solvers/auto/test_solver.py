"""AutoSRBA: its defaults, the warnings it gives, and problems that are hard for a solver without tuning."""

import functools
import importlib
import re
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.optimize import minimize

import bilevel
from bilevel._core.compilation import arithmetic
from bilevel.solvers.auto.inner import inner_complaint, refit_outer_value
from tests import cases
from tests.solvers.auto.problems import (
    AUTO,
    BATCH,
    badly_scaled,
    halves,
    penalized,
    regression,
    selection,
    tree_problem,
)

UNTUNED = bilevel.AutoSRBA()


# Defaults


def test_it_is_the_default_solver_and_the_result_shows_what_it_chose():
    result = bilevel.run(selection(), max_steps=0, exact=False)
    chosen = result.solver
    assert isinstance(chosen, bilevel.AutoSRBA)
    assert (chosen.step_size, chosen.preconditioner, chosen.outer_optimizer) == (0.1, "low_rank", "adam")
    assert chosen.outer_bounds == selection().oracles.wide_bounds
    assert chosen.least_progress == 3e-5
    for shown in ("step_size=0.1", "preconditioner=low_rank", "outer_optimizer=adam", "outer_bounds=(-20.0, 20.0)"):
        assert shown in result.summary()


def test_given_parameters_are_kept():
    given = bilevel.AutoSRBA(batch_size=BATCH, outer_bounds=(-1, 1), period=3, outer_optimizer=optax.sgd(0.1))
    chosen = given.configure(selection())
    assert (chosen.outer_bounds, chosen.period, chosen.outer_optimizer) == ((-1.0, 1.0), 3, given.outer_optimizer)


@pytest.mark.parametrize(("rows", "untuned", "textbook"), [(84, 20, 5), (2000, 250, 125), (3000, 300, 187)])
def test_a_default_period_is_one_pass_of_20_to_300_steps_and_that_of_srba_half_a_pass(rows, untuned, textbook):
    problem = cases.quadratic(n_inner=rows - 30, n_outer=30)
    assert bilevel.AutoSRBA(batch_size=BATCH).configure(problem).period == untuned
    assert bilevel.SRBA(0.1, batch_size=BATCH).configure(problem).period == textbook


def test_own_losses_have_no_default_bounds():
    assert AUTO.configure(tree_problem()).outer_bounds is None


@pytest.mark.parametrize(
    ("n_inner", "n_outer", "sampling", "batch"),
    [(20, 10, "full", 64), (1000, 24, "full", 64), (5000, 24, "blocks", 24), (100, 64, "blocks", 64)],
)
def test_batches_are_fitted_to_the_rows(n_inner, n_outer, sampling, batch):
    chosen = UNTUNED.configure(cases.quadratic(n_inner=n_inner, n_outer=n_outer))
    assert (chosen.sampling, chosen.batch_size) == (sampling, batch)


def test_the_outer_optimizer_cannot_be_left_out():
    with pytest.raises(ValueError, match=r"`AutoSRBA\(outer_optimizer=None\)`: must be 'adam' or an optax"):
        bilevel.AutoSRBA(outer_optimizer=None)


# Files


@pytest.mark.parametrize("optimizer", ["adam", pytest.param(optax.adam(1e-2), marks=pytest.mark.slow)])
def test_a_saved_run_is_resumed_bit_for_bit(optimizer, tmp_path):
    problem = selection()
    method = bilevel.AutoSRBA(0.1, 1.0, BATCH, period=7, preconditioner="diagonal", outer_optimizer=optimizer)
    whole_run = bilevel.run(problem, method, max_steps=40)
    bilevel.run(problem, method, max_steps=17).save(tmp_path / "run.npz")
    given = None if optimizer == "adam" else method
    resumed = bilevel.resume(tmp_path / "run.npz", problem, solver=given, max_steps=40)
    cases.assert_trees_equal(resumed.point, whole_run.point)


@pytest.mark.slow
def test_configs_and_stores_contain_bounds_and_transformations_as_text(tmp_path):
    from bilevel.bench.config import load_config
    from bilevel.bench.execute import group_tasks, run_task
    from bilevel.bench.select import list_settings, select
    from bilevel.bench.store import Store

    file = tmp_path / "untuned.toml"
    file.write_text(
        'name = "untuned"\nmetric = "value"\nseeds = 1\n[problem]\nname = "breast_cancer"\n[budget]\ncalls = 20000\n'
        '[[solvers]]\nname = "AutoSRBA"\nstep_size = [0.1, 0.05]\nouter_bounds = "(-5, 5)"\nouter_optimizer = "adam"\n'
    )
    experiment = load_config(file)
    store = Store(tmp_path / "store")
    for task in group_tasks(experiment.cells(341, 228)):
        store.write(run_task(task))
    table = store.read()
    assert set(table["param_outer_bounds"]) == {"(-5.0, 5.0)"} and set(table["param_outer_optimizer"]) == {"adam"}
    assert sorted(set(table["param_step_size"])) == [0.05, 0.1]
    assert table["rollbacks"].notna().all() and table["step_scale"].notna().all()
    ((name, pairs),) = list_settings(select(table, "value"))
    assert bilevel.SOLVERS[name](**dict(pairs)).outer_bounds == (-5.0, 5.0)


# Variables that are trees


@pytest.mark.slow
@pytest.mark.parametrize("method", [AUTO, bilevel.AutoSRBA(batch_size=BATCH, outer_bounds=({"pen": -3.0}, 3.0))])
def test_variables_may_be_trees(method):
    result = bilevel.run(tree_problem(), method, max_steps=400)
    assert result.status == "out_of_budget"
    assert result.history["outer_value"][-1] < 0.9 * result.history["outer_value"][0]
    assert np.any(result.point.outer_var["pen"] != 0)
    assert set(result.point.outer_var) == {"pen"}


# Warnings


@pytest.mark.slow
@pytest.mark.parametrize("exact", [True, False])
def test_a_z_far_from_its_minimum_gives_a_warning(exact):
    problem, solver = badly_scaled(exact), bilevel.AutoSRBA(batch_size=8, preconditioner="diagonal")
    how = r"at z\*\(x\)" if exact else "after 5 conjugate-gradient steps of z alone"
    message = rf"AutoSRBA: z is far from z\*\(x\) at the end: F is .* at z, and .* {how}"
    with pytest.warns(RuntimeWarning) as caught:
        result = bilevel.run(problem, solver, max_steps=200)
    texts = [str(warning.message) for warning in caught]
    assert any(re.match(message, text) for text in texts)
    assert any(re.match("AutoSRBA: h is .* at the end, and was", text) for text in texts) == exact
    truth = badly_scaled(True).exact_solver(result.point.outer_var, None).value
    assert abs(result.history["outer_value"][-1] - truth) > 0.05 * truth


def test_a_z_that_follows_gives_no_warning(recwarn):
    result = bilevel.run(selection(), AUTO, max_steps=400, exact=False)
    truth = selection().exact_solver(result.point.outer_var, None).value
    assert abs(result.history["outer_value"][-1] - truth) < 0.01 * truth and not recwarn.list


@pytest.mark.slow
def test_the_low_rank_metric_follows_columns_of_very_different_scales(recwarn):
    result = bilevel.run(badly_scaled(strongly_convex=True), bilevel.AutoSRBA(batch_size=8), max_steps=1500)
    last = {name: column[-1] for name, column in result.history.items()}
    assert abs(last["outer_value"] - last["value"]) < 0.01 * last["value"] and not recwarn.list


def test_negative_curvature_along_v_is_reported():
    def well(z, x, row):
        return z[0] ** 4 / 4 - z[0] ** 2 / 2 + z[1] ** 2 / 2 + 0 * (x[0] + row)

    rows, start = np.zeros(4), {"inner_var": np.array([0.1, 0.0]), "outer_var": np.zeros(1)}
    problem = bilevel.BilevelProblem.from_losses(well, well, rows, rows, **start, dtype="float64")
    point = problem.start._replace(v=np.array([1.0, 0.0]))
    with arithmetic(np.float64):
        complaint = inner_complaint(problem.oracles, point, {"outer_value": 0.0})
        minimum = point._replace(inner_var=np.array([1.0, 0.0]))
        at_minimum = inner_complaint(problem.oracles, minimum, {"outer_value": -0.25})
    assert "curvature along v is -0.97" in complaint, "3 z² - 1"
    assert at_minimum is None


def test_the_refit_is_the_exact_solution_of_a_quadratic_in_five_coordinates():
    problem = cases.quadratic("float64")
    assert problem.start.inner_var.shape == (5,)
    with arithmetic(np.float64):
        found = float(refit_outer_value(problem.oracles, problem.start))
    np.testing.assert_allclose(found, problem.exact_solver(problem.start.outer_var, None).value, rtol=1e-9)


# Networks


def neural_cleaning(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "examples"))
    return importlib.import_module("neural_cleaning").build(0.4)


@pytest.mark.slow
def test_an_x_frozen_by_a_network_gives_a_warning(monkeypatch):
    problem = neural_cleaning(monkeypatch)
    waiting = bilevel.AutoSRBA(batch_size=32, preconditioner="low_rank")
    with pytest.warns(RuntimeWarning, match=r"x was frozen in 100% of the run.*preconditioner='norm'"):
        result = bilevel.run(problem, waiting, max_steps=900, eval_every=900)
    assert not np.any(result.point.outer_var["logit"])


@pytest.mark.slow
def test_weights_of_rows_are_learned_with_a_network(monkeypatch, recwarn):
    result = bilevel.run(neural_cleaning(monkeypatch), bilevel.AutoSRBA(batch_size=32), max_steps=1500, eval_every=1500)
    assert (result.solver.preconditioner, result.solver.inner_optimizer) == ("norm", "adam")
    assert result.history["outer_value"][-1] < 0.25 and result.history["auc"][-1] > 0.95
    assert result.history["rollbacks"][-1] == 0 and not recwarn


# Units


@functools.cache
def end_in_units(**units):
    return bilevel.run(regression(**units), UNTUNED, max_steps=120, exact=False).point.outer_var


@pytest.mark.filterwarnings("ignore:AutoSRBA. z is far from")  # while x moves fast
@pytest.mark.parametrize(
    "units",
    [
        {"of_outer": 2.0**80},
        *(
            pytest.param(units, marks=pytest.mark.slow)
            for units in ({"of_y": 2.0**-35}, {"of_outer": 2.0**-80}, {"of_inner": 2.0**-60})
        ),
    ],
)
def test_units_that_are_powers_of_two_change_no_bit_of_x(units):
    x = end_in_units()
    assert np.any(x != 0), "x was meant to move"
    np.testing.assert_array_equal(end_in_units(**units), x)


@pytest.mark.slow
@pytest.mark.parametrize("units", [{"of_outer": 3e-24}, {"of_y": 7e11}, {"of_y": 7e-12}])
def test_other_units_change_neither_the_steps_nor_the_end(units):
    runs = [bilevel.run(regression(**some), UNTUNED, exact=False) for some in ({}, units)]
    assert runs[0].status == runs[1].status == "converged"
    assert runs[0].history["step"][-1] == pytest.approx(runs[1].history["step"][-1], rel=0.1)
    gains = [run.history["outer_value"][-1] / run.history["outer_value"][0] for run in runs]
    assert gains[0] == pytest.approx(gains[1], rel=1e-3)


# Hard problems


def distillation(columns=3, seed=22):
    """x are the features of two rows, on which a logistic model is fitted."""
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((60, columns))
    y = np.sign(X[:, 0] + 0.3 * rng.standard_normal(60))

    def outer(z, x, sample):
        return jax.nn.softplus(-sample[1] * (sample[0] @ z))

    def inner(z, x, sample):
        return outer(z, x, (x[sample[0]], sample[1])) + 0.05 * z @ z

    data = np.arange(2), np.array([-1.0, 1.0])
    start = np.zeros(columns), 6 * rng.standard_normal((2, columns))
    return bilevel.BilevelProblem.from_losses(inner, outer, data, (X, y), *start, dtype="float32", strongly_convex=True)


@pytest.mark.parametrize("seed", [22, 23])
@pytest.mark.parametrize(("preconditioner", "rise"), [("low_rank", 1.002), ("diagonal", 1.02)])
def test_h_at_the_evaluation_point_hardly_rises_and_ends_below_its_start(preconditioner, rise, seed):
    solver = bilevel.AutoSRBA(preconditioner=preconditioner)
    values = bilevel.run(distillation(seed=seed), solver, max_steps=3000).history["value"]
    assert values[-1] < 0.9 * values[0] and values[-1] <= 1.001 * values.min()
    assert np.all(values[1:] <= rise * values[:-1])


@pytest.mark.parametrize("inner", [None, "adam"])
def test_a_run_with_the_norm_warns_if_it_ends_above_its_best_evaluation(inner):
    problem = replace(distillation(columns=20), exact_solver=None)  # with "norm" x does not follow h
    solver = bilevel.AutoSRBA(preconditioner="norm", inner_optimizer=inner)
    with pytest.warns(RuntimeWarning) as caught:
        values = bilevel.run(problem, solver, max_steps=2000).history["outer_value"]
    shown = f"the outer loss is {values[-1]:.4g} at the end, and was {values.min():.4g} after"
    assert any(shown in str(warning.message) for warning in caught)
    assert 1.05 * values.min() < values[-1] < values[0]


@pytest.mark.slow
def test_distillation_of_digits_ends_below_its_start():
    from sklearn.datasets import load_digits

    X, y = load_digits(return_X_y=True)
    X, y = X[:1500] / 16, y[:1500]

    def outer(z, x, sample):
        scores = sample[0] @ z
        return jax.nn.logsumexp(scores) - scores[sample[1]]

    def inner(z, x, sample):
        return outer(z, x, (x[sample], sample)) + 0.002 * jnp.sum(z**2)

    first = np.stack([X[np.flatnonzero(y == digit)[1]] for digit in range(10)])
    problem = bilevel.BilevelProblem.from_losses(
        inner, outer, np.arange(10), (X, y), np.zeros((64, 10)), first, dtype="float32", strongly_convex=True
    )
    values = bilevel.run(problem, UNTUNED, max_steps=2500, eval_every=500).history["value"]
    assert values[-1] < 0.5 * values[0] and np.all(values[1:] <= 1.01 * values[:-1])


def minimum(problem, starts):
    """The smallest h that L-BFGS finds from these x, by exact solutions in float64."""

    def value(x):
        exact = problem.exact_solver(x, None)
        return float(exact.value), np.asarray(exact.hypergrad, float)

    return min(minimize(value, x, jac=True, method="L-BFGS-B", bounds=[(-15, 15)] * len(x)).fun for x in starts)


@pytest.mark.slow
@pytest.mark.parametrize("mean", [150, 6000])
@pytest.mark.parametrize("effect", [0.25, 0.8])
def test_counts_are_fitted(mean, effect, recwarn):
    rng = np.random.default_rng(23)
    X = np.c_[rng.standard_normal((120, 3)), np.ones(120)]
    y = rng.poisson(mean * np.exp(effect * X[:, 1])).astype(float)
    problem = penalized(lambda score, count: jnp.exp(score) - count * score, *halves(X, y), columns=1)
    result = bilevel.run(problem, UNTUNED)
    values = result.history["value"]
    assert result.status == "converged" and not recwarn.list
    best = minimum(problem, [np.zeros(1), result.point.outer_var.astype(float)])
    assert values[-1] - best <= 1e-3 * abs(best) and values[-1] <= values[0]
    np.testing.assert_allclose(result.history["outer_value"][-1], values[-1], rtol=1e-4)


@pytest.mark.slow
def test_powers_of_one_column_are_fitted():
    rng = np.random.default_rng(7)
    t = rng.uniform(-1, 3, 200)
    y = np.where(np.sin(2.5 * t) + 0.8 * rng.logistic(size=200) > 0, 1.0, -1.0)
    columns = t[:, None] ** np.arange(10)
    problem = penalized(lambda score, sign: jax.nn.softplus(-sign * score), *halves(columns, y))
    result = bilevel.run(problem, UNTUNED, max_steps=30_000)
    values = result.history["value"]
    assert result.status == "converged" and values[-1] <= 1.0003 * values.min()
    starts = [np.zeros(10), np.full(10, -4.0), result.point.outer_var.astype(float)]
    assert values[-1] <= 1.02 * minimum(problem, starts)


@pytest.mark.slow
def test_twenty_rows_are_enough():
    rows, signs, val, val_signs = cases.logistic_data(20, 10, dim=3)
    result = bilevel.run(bilevel.problems.penalty_selection(rows, signs, val, val_signs))
    assert result.status == "converged"
    assert result.history["hypergrad_norm_sq"][-1] < 1e-3 * result.history["hypergrad_norm_sq"][0]
