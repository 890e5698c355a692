"""Moves in a metric, by a transformation, within bounds, under rollback: and nothing of it where it is off."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import bilevel
from bilevel import _tree as trees
from bilevel._precision import arithmetic
from bilevel.engine.loop import advance, draw_page, initial_state, run_key
from bilevel.engine.steps import PAGE_LENGTH
from bilevel.engine.driver import sweep
from bilevel.oracles.curvature import probe_signs
from bilevel.solvers import preconditioning, rollback
from bilevel.solvers.base import Solver, solver
from bilevel.solvers.moves import descend, direction_calls
from bilevel.solvers.fields import whole
from bilevel.solvers.recursive import RecursiveState
from tests import cases
from tests.solvers.transcribed import start_of
from tests.transcription.adaptive import Adam, adaptive_srba, metric, norm

BATCH, PERIOD = cases.BATCH, 7
DIAGONAL = bilevel.SRBA(0.1, 1.0, BATCH, period=PERIOD, preconditioner="diagonal")
ADAPTIVE = replace(DIAGONAL, outer_optimizer="adam", outer_bounds=(-0.5, 0.35))
HUGE = 400.0


def adam_of_the_library():
    """Steps 1e-2 (1 + t/1000)^-½, as documented, and no ε, which would make them depend on units."""
    return Adam(1e-2, 1000.0, least=0.0)


def selection(outer_var=None, **kwargs):
    start = np.full(4, -0.2) if outer_var is None else outer_var
    return cases.logistic_selection(outer_var=start, **kwargs)


# Transcription


def norm_of(plain, index, z, x):
    with arithmetic("float64"):
        signs = np.asarray(probe_signs(len(z), index))[: preconditioning.N_NORM_PROBES]
    return norm(plain, z, x, signs)


METRICS = {"diagonal": lambda plain, index, z, x: metric(plain, z, x, BATCH), "norm": norm_of}


@pytest.mark.parametrize("kind", METRICS)
@pytest.mark.parametrize("name", ["quadratic", "logistic"])
def test_iterates_equal_the_transcription(name, kind):
    inner = "adam" if kind == "norm" else None
    method = replace(ADAPTIVE, preconditioner=kind, inner_optimizer=inner)
    problem = cases.quadratic() if name == "quadratic" else selection()
    run = cases.trajectory(problem, method, 56)
    draws = [
        SimpleNamespace(
            inner=cases.indices(run.oracles.inner_samples, d.inner),
            outer=cases.indices(run.oracles.outer_samples, d.outer),
        )
        for d in run.draws
    ]
    plain = cases.in_numpy(name, problem)
    settings = {"step_size": 0.1, "period": PERIOD, "bounds": (-0.5, 0.35), "scale_at": partial(METRICS[kind], plain)}
    settings["inner_adam"] = Adam(1e-3, np.inf) if inner else None
    expected = adaptive_srba(plain, *start_of(problem), draws, adam=adam_of_the_library(), **settings)
    for t, (state, step) in enumerate(zip(run.states, expected, strict=True)):
        for part, wanted in step.items():
            actual = np.asarray(getattr(state.point, part))
            assert np.linalg.norm(actual - wanted) <= 1e-10 * np.linalg.norm(wanted), (t, part)
    assert float(run.states[-1].rollback.rollbacks) == 0
    diagonals = {tuple(np.ravel(state.preconditioning.diagonal)) for state in run.states}
    assert len(diagonals) == (1 if (name, kind) == ("quadratic", "diagonal") else 56 // PERIOD)


def test_bounds_are_active_where_the_transcription_is_clipped():
    problem, narrow = selection(), replace(ADAPTIVE, outer_bounds=(-0.21, -0.19))
    last = trees.to_numpy(cases.trajectory(problem, narrow, 56).states[-1].point.outer_var)
    assert np.all(np.isclose(last, -0.21) | np.isclose(last, -0.19) | ((last > -0.21) & (last < -0.19)))
    assert np.any(np.isclose(last, -0.21)) or np.any(np.isclose(last, -0.19))


# Off


@solver
class Textbook(Solver):
    """SRBA as it was before it could be preconditioned."""

    period: int = whole(default=PERIOD)
    restarts = True

    def init(self, oracles, start):
        zero = jnp.zeros_like(self.step_size)
        return RecursiveState(start, start, trees.zeros_like(start), refresh_norm=zero, drift=zero)

    def refreshes(self, index, draw):
        return index % self.period == 0

    def refresh(self, oracles, state, index, draw):
        exact = oracles.direction(state.point)
        norm = jnp.sqrt(trees.norm_sq(exact))
        gap = jnp.sqrt(trees.norm_sq(trees.subtract(exact, state.estimate)))
        drift = jnp.where(index == 0, 0, gap / jnp.maximum(norm, state.refresh_norm))
        return self._move(oracles, state._replace(refresh_norm=norm, drift=drift), exact)

    def step(self, oracles, state, index, draw):
        estimate = trees.add(state.estimate, oracles.difference(state.point, state.previous, draw))
        return self._move(oracles, state, estimate)

    def _move(self, oracles, state, estimate):
        outer_step = self.step_size / self.outer_ratio
        point = descend(oracles, state.point, estimate, self.step_size, outer_step)
        return state._replace(point=point, previous=state.point, estimate=estimate)

    def calls(self, oracles, draw, refresh):
        if refresh:
            return direction_calls(oracles.n_inner, oracles.n_outer)
        return direction_calls(2 * oracles.count_inner(draw.inner), 2 * oracles.count_outer(draw.outer))


@pytest.mark.parametrize("name", ["quadratic", "logistic"])
def test_switched_off_the_program_and_the_iterates_are_those_of_plain_srba(name):
    problem = cases.PROBLEMS[name]("float32")
    programs, ends = [], []
    with arithmetic("float32"):
        oracles = problem.oracles.with_batches(BATCH, "blocks")
        for method in (Textbook(0.2, 2.0, BATCH), bilevel.SRBA(0.2, 2.0, BATCH, period=PERIOD)):
            traced = method.resolve(oracles).cast("float32")
            state = initial_state(traced, oracles, problem.start)
            page = draw_page(traced, oracles, run_key(0), np.int32(0), PAGE_LENGTH)
            arguments = (traced, oracles, state, page, np.int32(0), np.int32(50))
            programs.append(advance.lower(*arguments).as_text())
            ends.append(advance(*arguments))
    assert programs[0] == programs[1], "the hot loop does exactly the same work"
    cases.assert_trees_equal(*(trees.to_numpy(end.point) for end in ends))
    assert len(jax.tree.leaves(ends[1])) == len(jax.tree.leaves(ends[0]))


def test_a_transformation_that_is_a_plain_step_gives_plain_iterates():
    problem = cases.quadratic()
    plain = bilevel.SRBA(0.2, 2.0, BATCH, period=PERIOD)
    by_optax = replace(plain, outer_optimizer=optax.sgd(0.1))
    ends = [cases.trajectory(problem, one, 40).states[-1].point for one in (plain, by_optax)]
    cases.assert_trees_close(*ends, rtol=1e-11)


# Rollback


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.slow)])
def test_growth_is_seen_and_undone(dtype):
    problem = selection(dtype=dtype)
    plain = bilevel.run(problem, bilevel.SRBA(HUGE, 1.0, BATCH, period=PERIOD), max_steps=600)
    assert plain.status == "diverged" or plain.history["outer_value"][-1] > 10, "the step was meant to be too large"
    result = bilevel.run(problem, replace(ADAPTIVE, step_size=HUGE), max_steps=200, eval_every=1)
    history = result.history
    assert result.status == "out_of_budget"
    assert history["rollbacks"][-1] >= 5
    assert np.all(np.diff(history["rollbacks"]) >= 0)
    assert history["step_scale"].min() <= 2.0**-5
    assert np.all(np.isfinite(history["outer_value"])) and np.all(np.isfinite(history["value"]))
    assert history["outer_value"][-1] < history["outer_value"][0]
    assert history["inner_residual_sq"][-1] < history["inner_residual_sq"][0]
    assert trees.is_finite(result.point)


def test_a_calm_run_is_left_alone():
    history = bilevel.run(selection(), ADAPTIVE, max_steps=300).history
    assert np.all(history["rollbacks"] == 0) and np.all(history["step_scale"] == 1)


def test_where_the_iterate_is_not_finite_the_last_good_one_is_evaluated():
    problem = selection(dtype="float32")
    run = cases.trajectory(problem, replace(ADAPTIVE, step_size=1e30), PERIOD)
    state = run.states[-1]
    assert not trees.is_finite(state.point), "the step was meant to overflow between two refreshes"
    with arithmetic("float32"):
        evaluated = run.solver.evaluation_point(state)
    cases.assert_trees_equal(trees.to_numpy(evaluated), trees.to_numpy(problem.start))


def test_steps_grow_again_after_good_refreshes():
    point = bilevel.Point(np.ones(3), np.zeros(2), np.ones(3))
    one = np.ones(())
    with arithmetic("float64"):
        last = rollback.init_rollback(point, preconditioning.Preconditioning(), one)

        def after(last, size, first=False):
            exact = jax.tree.map(lambda leaf: size * np.ones_like(leaf), point)
            return rollback.check_refresh(last, point, exact, preconditioning.Preconditioning(), 0.1, np.array(first))

        last = after(last, 1.0, first=True)
        scales = [float(last.scale)]
        for size in (1e9, np.nan, *[1.0] * 100):
            last = after(last, size)
            scales.append(float(last.scale))
    assert scales[:3] == [1, 0.5, 0.25] and float(last.rollbacks) == 2
    assert scales.index(0.5, 3) == 2 + 31 and scales.index(1, 3) == 2 + 62 and scales[-1] == 1
    cases.assert_trees_equal(trees.to_numpy(last.point), point)


def refresh(last=None, *, z=3.0, v=3.0, D_z=0.0, D_v=0.0, first=False):
    """The memory after a refresh, in the metric d = 4 with step 0.1: |z| is 2 z long, a move of D 0.05 D."""
    at, exact = (bilevel.Point(*(np.array([part]) for part in (a, 0.0, b))) for a, b in ((z, v), (D_z, D_v)))
    metric = preconditioning.Preconditioning(np.array([4.0]))
    with arithmetic("float64"):
        last = rollback.init_rollback(at, metric, np.ones(())) if last is None else last
        return rollback.check_refresh(last, at, exact, metric, 0.1, np.array(first))


def test_the_first_refresh_is_good_and_sets_the_sizes():
    assert [float(size) for size in refresh(D_z=8.0, D_v=40.0, first=True).sizes] == [6, 20]  # |z|, ten moves of v


@pytest.mark.parametrize("part", ["D_z", "D_v"])
def test_a_refresh_is_good_up_to_half_the_size(part):
    good = refresh(first=True)
    assert float(refresh(good, **{part: 59.9}).rollbacks) == 0
    back = refresh(good, **{part: 60.1})
    assert (float(back.rollbacks), float(back.scale), float(back.streak)) == (1, 0.5, 0)
    assert float(refresh(back, **{part: 119.9}).rollbacks) == 1, "halved steps make moves half as long"
    assert float(refresh(back, **{part: 120.1}).scale) == 0.25


def test_sizes_grow_by_no_more_than_a_factor_of_two_and_never_fall():
    good = refresh(first=True)
    sizes = [[float(size) for size in refresh(good, z=z, v=3.0).sizes] for z in (1.0, 5.0, 500.0)]
    assert sizes == [[6, 6], [10, 6], [12, 6]]


@pytest.mark.parametrize("optimizer", [None, "adam"])
def test_a_scale_shortens_every_move_alike(optimizer):
    problem = cases.quadratic()
    method = replace(DIAGONAL, outer_ratio=2.0, outer_optimizer=optimizer).cast("float64")
    with arithmetic("float64"):
        state = method.init(problem.oracles, problem.start)
        ones = trees.ones_like(problem.start)
        whole, half = (method.descend(problem.oracles, state, ones, 0.1, scale).point for scale in (None, 0.5))
    for part, step in zip(bilevel.Point._fields, (0.1, 1e-2 if optimizer else 0.05, 0.1), strict=True):
        start, moved, less = (np.asarray(getattr(point, part)) for point in (problem.start, whole, half))
        np.testing.assert_allclose(start - moved, step, rtol=1e-6)
        np.testing.assert_allclose(start - less, step / 2, rtol=1e-6)


def test_points_a_million_times_farther_out_are_not_evaluated():
    good = refresh(first=True)  # at a distance of √18 from 0
    for z, evaluated in ((4.3e6, 4.3e6), (4.5e6, 3.0)):
        with arithmetic("float64"):
            point = rollback.point_within_reach(good, bilevel.Point(np.array([z]), np.zeros(1), np.array([3.0])))
        assert float(point.inner_var[0]) == evaluated


# Bounds


def test_the_outer_variable_stays_inside():
    problem = selection()
    for method in (ADAPTIVE, bilevel.SABA(0.1, 0.01, BATCH), bilevel.SOBA(0.1, 0.01, BATCH)):
        bounded = replace(method, outer_bounds=(-0.3, -0.1))
        point = bilevel.run(problem, bounded, max_steps=300).point
        assert np.all((point.outer_var >= -0.3) & (point.outer_var <= -0.1)), type(method)
        assert np.any((point.outer_var == -0.3) | (point.outer_var == -0.1)), "bounds were meant to be active"


def test_bounds_of_the_problem_and_of_the_solver_both_hold():
    problem = selection(outer_bounds=(-0.25, None))
    found = bilevel.run(problem, replace(ADAPTIVE, outer_bounds=(-5, -0.15)), max_steps=300).point.outer_var
    assert found.min() == -0.25 and found.max() == -0.15


def test_bounds_may_be_trees_and_texts():
    problem = selection()
    lower = np.array([-0.3, -0.25, -0.2, -0.5])
    tree = bilevel.run(problem, replace(ADAPTIVE, outer_bounds=(lower, 0.0)), max_steps=200).point.outer_var
    assert np.all(tree >= lower) and np.any(tree == lower)
    assert bilevel.SRBA(outer_bounds="(-3, 2)") == bilevel.SRBA(outer_bounds=[-3, 2.0])
    open_above = bilevel.SRBA(outer_bounds=(-3, None))
    assert open_above.parameters()["outer_bounds"] == "(-3.0, None)"
    assert bilevel.SRBA(**open_above.parameters()) == open_above


# Sweeps


def test_a_sweep_equals_single_runs_whatever_its_neighbors_do():
    problem = selection(dtype="float32")
    settings = [replace(ADAPTIVE, step_size=step) for step in (0.05, 0.1, HUGE)]
    calls = 60_000
    (together,) = sweep(problem, settings, [3], calls)
    for setting, cell in zip(settings, together, strict=True):
        alone = bilevel.run(problem, setting, seed=3, max_calls=calls)
        assert cell.status == alone.status == "out_of_budget"
        last = cell.rows[-1]
        assert last["step"] == alone.history["step"][-1]
        assert last["rollbacks"] == alone.history["rollbacks"][-1]
        np.testing.assert_allclose(last["value"], alone.history["value"][-1], rtol=2e-4)
    assert together[2].rows[-1]["rollbacks"] > 0


# Trees and users' losses


def tree_problem(**kwargs):
    rows, signs, val, val_signs = cases.logistic_data(dim=12)

    def loss(z, x, sample):
        row, sign = sample
        return jnp.log1p(jnp.exp(-sign * (row[:6] @ z["left"] + row[6:] @ z["right"])))

    def inner(z, x, sample):
        return loss(z, x, sample) + jnp.sum(jnp.exp(x["pen"]) * (z["left"] ** 2 + z["right"] ** 2)) / 2

    signs, val_signs = (s.astype(float) for s in (signs, val_signs))
    start = {"left": np.ones(6), "right": -np.ones(6)}
    return bilevel.BilevelProblem.from_losses(
        inner, loss, (rows, signs), (val, val_signs), start, {"pen": np.zeros(6)}, **({"dtype": "float32"} | kwargs)
    )


@pytest.mark.parametrize(
    "method",
    [
        bilevel.SRBA("auto", 1.0, BATCH),
        bilevel.SPABA(0.1, 1.0, BATCH, period=9),
    ],
)
@pytest.mark.slow
def test_auto_and_its_parts_run_on_trees(method):
    if isinstance(method, bilevel.SPABA):
        method = replace(method, preconditioner="diagonal", outer_optimizer="adam", outer_bounds=({"pen": -3.0}, 3.0))
    result = bilevel.run(tree_problem(), method, max_steps=400)
    assert result.status == "out_of_budget"
    assert result.history["outer_value"][-1] < 0.9 * result.history["outer_value"][0]
    assert np.any(result.point.outer_var["pen"] != 0)
    assert set(result.point.outer_var) == {"pen"}
