"""The untuned setting: what it stands for and costs, bad input, files; SABA and SOBA with its parts."""

import functools
import importlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from bilevel.solvers.preconditioning import metric_diagonal

import bilevel
from bilevel._precision import arithmetic
from bilevel.engine.driver import sweep
from bilevel.engine.metrics import inner_complaint, refit_outer_value
from bilevel.oracles import join
from tests import cases
from tests.solvers.test_adaptive import (
    ADAPTIVE,
    BATCH,
    DIAGONAL,
    PERIOD,
    adam_of_the_library,
    selection,
    tree_problem,
)
from tests.solvers.test_contract import CountingOracles
from tests.transcription.adaptive import metric


def test_auto_is_filled_in_and_shown():
    result = bilevel.run(selection(), bilevel.SRBA("auto", batch_size=BATCH), max_steps=5)
    chosen = result.solver
    assert (chosen.step_size, chosen.preconditioner, chosen.outer_optimizer) == (0.1, "low_rank", "adam")
    assert chosen.outer_bounds == selection().oracles.wide_bounds
    assert chosen.period == 20
    assert chosen.least_progress == 3e-5
    for shown in ("step_size=0.1", "preconditioner=low_rank", "outer_optimizer=adam", "outer_bounds=(-20.0, 20.0)"):
        assert shown in result.summary()


def test_what_is_given_beside_auto_stays():
    given = bilevel.SRBA("auto", batch_size=BATCH, outer_bounds=(-1, 1), period=3, outer_optimizer=optax.sgd(0.1))
    chosen = given.resolve(selection().oracles.with_batches(BATCH, "blocks"))
    assert (chosen.outer_bounds, chosen.period, chosen.outer_optimizer) == ((-1.0, 1.0), 3, given.outer_optimizer)


@pytest.mark.parametrize(("rows", "auto", "plain"), [(84, 20, 5), (2000, 250, 125), (3000, 300, 187), (9, 20, 1)])
def test_without_a_period_auto_takes_a_pass_of_20_to_300_steps_and_plain_srba_half_of_one(rows, auto, plain):
    oracles = SimpleNamespace(n_inner=rows - 4, n_outer=4, wide_bounds=None)
    assert bilevel.SRBA("auto", batch_size=BATCH).resolve(oracles).period == auto
    assert bilevel.SRBA(0.1, batch_size=BATCH).resolve(oracles).period == plain


@pytest.mark.parametrize(("passes", "floor"), [(1, 1e-6), (8, 0.1 * (1e6 + 2.0 + 1e-8) / 3)])
@pytest.mark.parametrize(("sampling", "batch"), [("blocks", 5), ("full", 40)])
def test_the_metric_is_the_size_of_the_diagonal_lifted_and_what_a_batch_adds(passes, floor, sampling, batch):
    diagonal, squares = np.array([1e6, -2.0, 1e-8]), np.array([1.0, 3.0, 0.0])
    samples = SimpleNamespace(sampling=sampling, batch_size=5)
    oracles = SimpleNamespace(inner_samples=samples, n_inner=40, diagonal_passes=passes)
    oracles.diagonal_majorizer, oracles.squared_diagonals = lambda *_: diagonal, lambda _: squares
    with arithmetic("float64"):
        found = metric_diagonal(oracles, None, 0)
    lifted = np.maximum(abs(diagonal), floor)
    np.testing.assert_allclose(found, lifted + squares / (batch * lifted), rtol=1e-12)


def test_auto_knows_no_bounds_for_losses_of_users():
    assert bilevel.SRBA("auto", 1.0, BATCH).resolve(tree_problem().oracles).outer_bounds is None


@pytest.mark.slow
def test_auto_needs_no_tuning_for_the_scale_of_the_data():
    rows, signs, val, val_signs = cases.logistic_data(400, 300, dim=6, seed=2)
    values = []
    for scale in (1e-3, 1.0, 1e3):
        start = {"outer_var": np.full(6, -1.0) + 2 * np.log(scale), "inner_var": np.ones(6) / scale}
        data = scale * rows, signs, scale * val, val_signs
        problem = bilevel.problems.logistic_selection(*data, **start, dtype="float32")
        bounds = tuple(2 * np.log(scale) + bound for bound in (-10, 10))
        history = bilevel.run(problem, bilevel.SRBA("auto", outer_bounds=bounds), max_steps=2000).history
        assert history["rollbacks"][-1] == 0
        values.append(history["value"][-1])
    np.testing.assert_allclose(values, values[1], rtol=1e-3)


# Ledger


@pytest.mark.parametrize("by_autodiff", [False, True])
@pytest.mark.slow
def test_diagonals_are_counted_as_oracle_calls(by_autodiff):
    problem = selection()
    oracles = cases.by_autodiff("logistic", problem) if by_autodiff else problem.oracles
    passes = 8 if by_autodiff else 1
    plain, metric_too = (
        bilevel.run(replace(problem, oracles=oracles), one, max_steps=2 * PERIOD + 1).history
        for one in (replace(DIAGONAL, preconditioner=None), DIAGONAL)
    )
    kinds = [name for name in plain if name.startswith("calls_")]
    more = {kind: metric_too[kind][-1] - plain[kind][-1] for kind in kinds}
    assert more == dict.fromkeys(kinds, 0) | {"calls_hvp": 3 * passes * problem.n_inner}


@pytest.mark.slow
def test_probes_cost_what_is_declared():
    problem = selection()
    with arithmetic("float64"), jax.disable_jit():
        counting = CountingOracles(cases.by_autodiff("logistic", problem))
        counting.inner_diagonal(problem.start, 0)
    assert counting.counted["hvp"] == counting.diagonal_passes * problem.n_inner


def test_saba_counts_its_diagonals():
    problem = selection()
    method = bilevel.SABA(0.1, 1.0, BATCH, rebuild_every=5, preconditioner="diagonal")
    histories = [
        bilevel.run(problem, one, max_steps=11).history for one in (replace(method, preconditioner=None), method)
    ]
    assert histories[1]["calls_hvp"][-1] - histories[0]["calls_hvp"][-1] == 3 * problem.n_inner


# SABA and SOBA


@functools.cache
def first_direction(tables):
    run = cases.trajectory(selection(), bilevel.SABA(1.0, 1.0, BATCH, tables=tables), 1)
    draw = run.draws[0]
    with arithmetic("float64"):
        start = run.states[0].point._replace(**selection().start._asdict())
        return (
            start,
            run.oracles.direction(start),
            join(run.oracles.inner(start, draw.inner), run.oracles.outer(start, draw.outer)),
        )


@pytest.mark.slow
def test_saba_moves_in_the_metric_and_by_adam():
    method = bilevel.SABA(0.1, 1.0, BATCH, tables="full", preconditioner="diagonal", outer_optimizer="adam")
    start, exact, _ = first_direction("full")
    point = cases.trajectory(selection(), method, 1).states[0].point
    d = metric(cases.in_numpy("logistic", selection()), np.asarray(start.inner_var), np.asarray(start.outer_var), BATCH)
    np.testing.assert_allclose(point.inner_var, start.inner_var - 0.1 * np.asarray(exact.inner_var) / d, rtol=1e-11)
    np.testing.assert_allclose(point.v, start.v - 0.1 * np.asarray(exact.v) / d, rtol=1e-11)
    update = adam_of_the_library().update(np.asarray(exact.outer_var))
    np.testing.assert_allclose(point.outer_var, start.outer_var + update, rtol=1e-11)


def test_soba_moves_by_adam():
    problem, method = selection(), bilevel.SOBA(0.1, 1.0, BATCH, outer_optimizer="adam")
    moved = cases.trajectory(problem, method, 1).states[0].point
    plain = cases.trajectory(problem, replace(method, outer_optimizer=None), 1).states[0].point
    np.testing.assert_array_equal(moved.inner_var, plain.inner_var)
    gradient = (problem.start.outer_var - np.asarray(plain.outer_var)) / 0.1
    update = adam_of_the_library().update(gradient)
    np.testing.assert_allclose(moved.outer_var, problem.start.outer_var + update, rtol=1e-9)


# Bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"preconditioner": "full"}, r"`SRBA\(preconditioner='full'\)`: must be one of None, 'diagonal'"),
        ({"outer_optimizer": "sgd"}, r"outer_optimizer='sgd'.*must be None, 'adam' or an optax GradientTransformation"),
        ({"outer_optimizer": 3}, "must be None, 'adam' or an optax GradientTransformation"),
        ({"outer_bounds": (1.0, -1.0)}, r"outer_bounds=\(1.0, -1.0\)\)`: the lower bound exceeds the upper"),
        ({"outer_bounds": 3.0}, r"outer_bounds=3.0.*must be None or a pair \(lower, upper\)"),
        ({"outer_bounds": (1.0, 2.0, 3.0)}, r"a pair \(lower, upper\)"),
        ({"outer_bounds": "wide"}, r"outer_bounds='wide'.*a pair"),
        ({"outer_bounds": (np.nan, 1.0)}, "none NaN"),
        ({"outer_bounds": (1, "x")}, "real numbers"),
        ({"step_size": "fast"}, r"must be a finite number above 0\. The word 'auto' stands for"),
    ],
)
def test_bad_parameters_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        bilevel.SRBA(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"outer_bounds": (0.0, 1.0)}, r"`SRBA\(outer_bounds=\(0.0, 1.0\)\)`: the outer variable starts outside"),
        ({"outer_bounds": (np.full(3, -1.0), 1.0)}, "outer_bounds=.*does not have the shape of the outer variable"),
        ({"outer_bounds": ({"a": -1.0}, 1.0)}, "outer_bounds=.*does not have the shape of the outer variable"),
        ({"outer_bounds": (np.full(4, 1.0), np.full(4, -1.0))}, "a lower bound exceeds its upper bound"),
        ({"outer_optimizer": optax.polyak_sgd()}, "outer_optimizer=….*asks for more.*value"),
    ],
)
def test_what_does_not_fit_the_start_is_refused(arguments, message):
    method = replace(DIAGONAL, **arguments)
    with pytest.raises(ValueError, match=message):
        bilevel.run(selection(), method, max_steps=3)
    with pytest.raises(ValueError, match=message):
        sweep(selection(), [method], [0], 5000)


def test_other_solvers_have_no_auto():
    with pytest.raises(ValueError, match="must be a finite number above 0"):
        bilevel.SOBA(step_size="auto")


# Texts, stores, files


def test_a_transformation_prints_as_what_made_it():
    method = replace(ADAPTIVE, outer_optimizer=optax.adam(1e-2))
    assert method.parameters()["outer_optimizer"] == "optax chain"
    assert "outer_optimizer=optax chain" in bilevel.run(selection(), method, max_steps=2).summary()
    assert hash(method.outer_optimizer) == hash(method.outer_optimizer)
    assert method == replace(method)


@pytest.mark.parametrize("optimizer", ["adam", optax.adam(1e-2)])
def test_a_saved_run_goes_on_bit_for_bit(optimizer, tmp_path):
    problem, method = selection(), replace(ADAPTIVE, outer_optimizer=optimizer)
    whole_run = bilevel.run(problem, method, max_steps=40)
    bilevel.run(problem, method, max_steps=17).save(tmp_path / "run.npz")
    given = None if optimizer == "adam" else method
    resumed = bilevel.resume(tmp_path / "run.npz", problem, solver=given, max_steps=40)
    cases.assert_trees_equal(resumed.point, whole_run.point)


def test_a_saved_run_with_a_transformation_asks_for_the_solver(tmp_path):
    method = replace(ADAPTIVE, outer_optimizer=optax.adam(1e-2))
    bilevel.run(selection(), method, max_steps=3).save(tmp_path / "run.npz")
    with pytest.raises(ValueError, match="with a transformation of optax; pass it as `solver=`"):
        bilevel.resume(tmp_path / "run.npz", selection(), max_steps=5)


@pytest.mark.slow
def test_configs_and_stores_hold_texts(tmp_path):
    from bilevel.bench.config import load_config
    from bilevel.bench.execute import group_tasks, run_task
    from bilevel.bench.select import list_settings, select
    from bilevel.bench.store import Store

    file = tmp_path / "auto.toml"
    file.write_text(
        'name = "auto"\nmetric = "value"\nseeds = 1\n[problem]\nname = "breast_cancer"\n[budget]\ncalls = 20000\n'
        '[[solvers]]\nname = "SRBA"\nstep_size = ["auto", 0.05]\nouter_bounds = "(-5, 5)"\nouter_optimizer = "adam"\n'
    )
    experiment = load_config(file)
    cells = experiment.cells(341, 228)
    store = Store(tmp_path / "store")
    for task in group_tasks(cells):
        store.write(run_task(task))
    table = store.read()
    assert set(table["param_outer_bounds"]) == {"(-5.0, 5.0)"} and set(table["param_outer_optimizer"]) == {"adam"}
    assert sorted(set(table["param_step_size"])) == [0.05, 0.1]
    assert table["rollbacks"].notna().all() and table["step_scale"].notna().all()
    ((name, pairs),) = list_settings(select(table, "value"))
    assert bilevel.SOLVERS[name](**dict(pairs)).outer_bounds == (-5.0, 5.0)


def badly_scaled(strongly_convex):
    """Losses of one's own on columns from 1e-2 to 1e2, for which eight probes do not tell the curvature of each."""
    rng, p = np.random.default_rng(0), 10
    X, y = rng.standard_normal((200, p)), np.sign(rng.standard_normal(200))
    X = (X + y[:, None] * rng.standard_normal(p)) * np.geomspace(1e-2, 1e2, p)

    def outer(z, x, row):
        return jax.nn.softplus(-row[0] * (row[1:] @ z))

    def inner(z, x, row):
        return outer(z, x, row) + 0.5 * jax.numpy.exp(x[0]) * (z @ z)

    data = np.column_stack([y, X])
    start = {"inner_var": np.zeros(p), "outer_var": np.full(1, -6.0), "strongly_convex": strongly_convex}
    return bilevel.BilevelProblem.from_losses(inner, outer, data[:100], data[100:], **start, dtype="float32")


@pytest.mark.slow
@pytest.mark.parametrize("exact", [True, False])
def test_a_z_that_is_left_behind_is_told(exact):
    problem, auto = badly_scaled(exact), bilevel.SRBA("auto", batch_size=8, preconditioner="diagonal")
    how = r"at z\*\(x\)" if exact else "after 5 conjugate-gradient steps of z alone"
    with pytest.warns(RuntimeWarning, match=rf"SRBA: z is far from z\*\(x\) at the end: F is .* at z, and .* {how}"):
        result = bilevel.run(problem, auto, max_steps=200)
    truth = badly_scaled(True).exact_solver(result.point.outer_var, None).value
    assert abs(result.history["outer_value"][-1] - truth) > 0.05 * truth


def test_a_z_that_follows_is_not(recwarn):
    result = bilevel.run(selection(), bilevel.SRBA("auto", batch_size=BATCH), max_steps=400, exact=False)
    truth = selection().exact_solver(result.point.outer_var, None).value
    assert abs(result.history["outer_value"][-1] - truth) < 0.01 * truth and not recwarn.list


def test_negative_curvature_along_v_is_told():
    def well(z, x, row):
        return z[0] ** 4 / 4 - z[0] ** 2 / 2 + z[1] ** 2 / 2 + 0 * (x[0] + row)

    rows, start = np.zeros(4), {"inner_var": np.array([0.1, 0.0]), "outer_var": np.zeros(1), "v": np.array([1.0, 0.0])}
    problem = bilevel.BilevelProblem.from_losses(well, well, rows, rows, **start, dtype="float64")
    with arithmetic(np.float64):
        told = inner_complaint(problem.oracles, problem.start, {"outer_value": 0.0})
        minimum = problem.start._replace(inner_var=np.array([1.0, 0.0]))
        at_minimum = inner_complaint(problem.oracles, minimum, {"outer_value": -0.25})
    assert "curvature along v is -0.97" in told, "3 z² - 1"
    assert at_minimum is None


@pytest.mark.slow
def test_an_x_that_waits_for_a_network_is_told(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    problem = importlib.import_module("neural_cleaning").build(0.4)
    waiting = bilevel.SRBA("auto", batch_size=32, preconditioner="low_rank")
    with pytest.warns(RuntimeWarning, match=r"x stood still in 100% of the run.*preconditioner='norm'"):
        result = bilevel.run(problem, waiting, max_steps=900, eval_every=900)
    assert not np.any(result.point.outer_var["logit"])


@pytest.mark.slow
def test_auto_learns_the_weights_of_rows_with_a_network(monkeypatch, recwarn):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    problem = importlib.import_module("neural_cleaning").build(0.4)
    result = bilevel.run(problem, bilevel.SRBA("auto", batch_size=32), max_steps=1500, eval_every=1500)
    assert (result.solver.preconditioner, result.solver.inner_optimizer) == ("norm", "adam")
    assert result.history["outer_value"][-1] < 0.25 and result.history["auc"][-1] > 0.95
    assert result.history["rollbacks"][-1] == 0 and not recwarn


def test_the_refit_is_the_exact_solution_of_a_quadratic_in_five_coordinates():
    problem = cases.quadratic("float64")
    assert problem.start.inner_var.shape == (5,)
    with arithmetic(np.float64):
        found = float(refit_outer_value(problem.oracles, problem.start))
    np.testing.assert_allclose(found, problem.exact_solver(problem.start.outer_var, None).value, rtol=1e-9)
