"""Loops on a GPU: several steps in a turn, small loops unrolled, and the same numbers as plain loops."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevel
from bilevel._jaxprs import called_by
from bilevel._precision import arithmetic
from bilevel.engine import loop as engine_loop
from bilevel.engine.gpu_loops import STEPS_PER_TURN, loop_in_turns, unrolled_loop_in_turns
from bilevel.engine.loop import draw_page, initial_state, run_key, take_steps
from tests import cases

STEPS = 11  # two turns of four, and three steps more


def steps_of(problem, solver):
    """The arguments of `take_steps` for the first steps of a run."""
    with arithmetic(problem.dtype):
        inner, outer = solver.batches()
        oracles = problem.oracles.with_batches(inner, solver.sampling, outer)
        solver = solver.resolve(oracles).cast(problem.dtype)
        state = initial_state(solver, oracles, problem.start)
        page = draw_page(solver, oracles, run_key(0), np.int32(0), STEPS)
    return solver, oracles, state, page, np.int32(0), np.int32(STEPS)


def loops(traced):
    """The trip counts of loops in a traced function, None where they are not known; unrolled ones are none."""
    found = []
    for equation in traced.eqns:
        if equation.primitive.name == "while":
            found.append(None)
        if equation.primitive.name == "scan" and equation.params["unroll"] < equation.params["length"]:
            found.append(equation.params["length"])
        for called in called_by(equation):
            found += loops(called)
    return found


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (0, 3), (2, 6), (5, 16), (7, 4)])
def test_steps_are_those_of_a_plain_loop(start, stop):
    def step(i, state):
        total, product, seen = state
        return total + i, product * (1 + i / 7) - 0.1, seen.at[i].add(1)

    state = jnp.int32(3), jnp.linspace(0, 1, 5), jnp.zeros(20, jnp.int32)
    expected = jax.lax.fori_loop(start, stop, step, state)
    found = jax.jit(lambda start, stop: loop_in_turns(start, stop, step, state))(start, stop)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), found, expected)


def test_loops_within_a_step_may_go_backwards_and_collect():
    def step(i, state):
        def add(carry, row):
            return carry + row * i, carry * row

        rows = jnp.arange(6.0).reshape(3, 2)
        carry, collected = jax.lax.scan(add, state, rows, reverse=True)
        return jnp.sin(carry) + collected.sum(0)

    expected = jax.lax.fori_loop(0, 9, step, jnp.ones(2))
    found = jax.jit(lambda stop: unrolled_loop_in_turns(0, stop, step, jnp.ones(2)))(9)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_loop_within_a_step_may_have_no_turn():
    def step(i, state):
        return jax.lax.scan(lambda total, row: (total + row, row), state, jnp.zeros(0))[0] + i

    assert jax.jit(lambda stop: unrolled_loop_in_turns(0, stop, step, 0.0))(6) == 15


@pytest.mark.parametrize("name", cases.marked(cases.SOLVERS, quick=("SRBA", "SABA", "AmIGO")))
def test_solvers_end_where_plain_loops_end(name):
    problem = cases.quadratic()
    arguments = steps_of(problem, cases.SOLVERS[name])
    with arithmetic(problem.dtype):
        kinds = jax.lax.fori_loop, unrolled_loop_in_turns
        ends = [jax.jit(partial(take_steps, loop=loop))(*arguments) for loop in kinds]
    cases.assert_trees_close(*map(jax.tree.leaves, ends), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("solver", "plain", "in_turns", "unrolled"),
    [
        (bilevel.SOBA(), [None], [None, None], [None, None]),  # turns, and the steps that are left
        # Then a step without loops, too long for turns.
        (bilevel.AmIGO(n_inner_steps=10), [None, 10, 10], [None, 10, 10], [None]),
        (bilevel.StocBiO(n_inner_steps=10, n_neumann=100), [None, 10, 100], [None, 10, 100], [None, 100]),
        (bilevel.SUSTAIN(), [None] * 5, [None] * 5, [None] * 5),  # loops of a random length are none to unroll
    ],
)
def test_loops_are_unrolled_where_that_is_short(solver, plain, in_turns, unrolled):
    arguments = steps_of(cases.logistic_selection(), solver)
    kinds = (jax.lax.fori_loop, plain), (loop_in_turns, in_turns), (unrolled_loop_in_turns, unrolled)
    with arithmetic("float64"):
        for loop, expected in kinds:
            assert loops(jax.make_jaxpr(partial(take_steps, loop=loop))(*arguments)) == expected


def n_barriers(traced):
    own = sum(equation.primitive.name == "optimization_barrier" for equation in traced.eqns)
    return own + sum(n_barriers(called) for equation in traced.eqns for called in called_by(equation))


@pytest.mark.parametrize(("solver", "of_a_step"), [(bilevel.SOBA(), 0), (bilevel.SABA(), 2)])
def test_every_step_of_a_turn_ends_with_a_barrier_and_tables_are_read_before_they_are_written(solver, of_a_step):
    solver, oracles, state, page, *bounds = steps_of(cases.logistic_selection(), solver)
    with arithmetic("float64"):
        draw = jax.tree.map(lambda leaf: leaf[0], page.draws)
        step = jax.make_jaxpr(lambda state: solver.step(oracles, state, jnp.int32(0), draw))(state)
        turns = jax.make_jaxpr(
            lambda state: loop_in_turns(*bounds, lambda i, s: solver.step(oracles, s, i, draw), state)
        )
        assert n_barriers(step) == of_a_step
        assert n_barriers(turns(state)) == STEPS_PER_TURN * (1 + of_a_step) + of_a_step  # and the steps that are left


CUDA = ("gpu", "PJRT C API\ncuda 12080")


@pytest.mark.parametrize("program", ["_take_steps_of_one_run", "_take_steps_of_many"])
@pytest.mark.parametrize(
    ("solver", "backend", "of_one_run", "of_many"),
    [
        (bilevel.SOBA(), CUDA, [None, None], [None, None]),
        (bilevel.SOBA(), ("gpu", "ROCm"), [None], [None]),
        (bilevel.SOBA(), ("cpu", ""), [None], [None]),
        (bilevel.AmIGO(), CUDA, [None], [None, 10, 10]),
    ],
)
def test_turns_are_for_nvidia_gpus_and_unrolled_loops_for_one_run(
    monkeypatch, program, solver, backend, of_one_run, of_many
):
    arguments = steps_of(cases.logistic_selection(), solver)
    backend = SimpleNamespace(platform=backend[0], platform_version=backend[1])
    monkeypatch.setattr(engine_loop, "get_backend", lambda: backend)
    with arithmetic("float64"):
        traced = jax.make_jaxpr(lambda *arguments: getattr(engine_loop, program)(*arguments))(*arguments)
    assert loops(traced) == (of_many if program == "_take_steps_of_many" else of_one_run)


def test_settings_that_step_together_end_where_plain_loops_end():
    problem = cases.quadratic()
    _, oracles, *others = steps_of(problem, cases.SOLVERS["SRBA"])
    solvers = [replace(cases.SOLVERS["SRBA"], step_size=step).cast(problem.dtype) for step in (0.02, 0.05, 0.1)]
    with arithmetic("float64"):
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *solvers)
        ends = [
            jax.jit(jax.vmap(partial(take_steps, loop=loop), in_axes=(0, *[None] * 5)))(stacked, oracles, *others)
            for loop in (loop_in_turns, jax.lax.fori_loop)
        ]
    cases.assert_trees_close(*map(jax.tree.leaves, ends), rtol=1e-9, atol=1e-11)
    assert len({float(value) for value in ends[0].point.inner_var[:, 0]}) == 3
