"""Identities in expectation: the steps of the library are taken for all sequences of draws, weighted by probability.

Nothing is sampled, so that both sides of a correct identity agree to rounding in float64. Problems must be tiny.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from bilevel._core import trees
from bilevel._core.compilation import arithmetic
from bilevel._core.types import Array, Point, Rows
from bilevel.engine.loop import run_key
from bilevel.oracles import Oracles, Samples
from bilevel.problems import BilevelProblem
from bilevel.solvers import SABA, SRBA, Solver
from bilevel.solvers.neumann import NeumannDraw, hypergradient
from bilevel.solvers.saba import BlockTable, SABAState
from tests.theory.sequences import (
    Sequences,
    Sides,
    at_step,
    every_draw,
    every_sequence,
    flatten,
    mean_over,
    pair_levels,
    prepare,
    shares,
    widen,
)


def sampled_direction(problem: BilevelProblem, point: Point, batch_size: int, sampling: str, index: int = 0) -> Sides:
    """Return E[D_{B,C}(u)] and D(u): sampled directions are unbiased (eq:sampled_dz, eq:sampled_dv, eq:sampled_dx).

    Parameters
    ----------
    problem : a tiny problem
    point : u, not random
    batch_size, sampling : as for solvers
    index : the step that draws. With "reshuffle", its draw is unbiased over all orders of a pass, but not conditionally
        on the earlier draws of the pass: see `recursive_mse`

    Returns
    -------
    Sides
        Points of flat arrays.
    """
    with arithmetic(np.float64):
        oracles, _ = widen(problem, batch_size, sampling)
        drawn = every_draw(oracles, index + 1)
        point = trees.cast(point, np.float64)
        directions = _directions(oracles, point, jax.tree.map(lambda leaf: leaf[:, -1], drawn.rows))
        exact = flatten(oracles.direction(point))
    return Sides(mean_over(drawn.probability, directions), trees.to_numpy(exact))


@jax.jit
def _directions(oracles: Oracles, point: Point, rows: Rows) -> Point:
    return jax.vmap(lambda one: flatten(oracles.direction(point, one)))(rows)


def recursive_mse(problem: BilevelProblem, solver: SRBA, steps: int) -> Sides:
    """Return both sides of the mean squared error of SRBA's estimates (prop:bias_variance_decomp).

        E||D^k - D(u^k)||²  =  sum_{r<=k} E||D^r - D^(r-1)||²  -  sum_{r<=k} E||D(u^r) - D(u^(r-1))||²

    for each part of D, where the sums begin at the last full-batch pass. It holds if the draw of a step is independent
    of earlier draws: for "iid" and "blocks", with or without a projection of v, but not for "reshuffle".

    Parameters
    ----------
    problem : a tiny problem
    solver : SRBA; all sequences of its sampling are enumerated
    steps : number of steps from the start, which may exceed a period

    Returns
    -------
    Sides
        Points of arrays (steps,); entry k is at u^k, before the move of step k.
    """
    if not isinstance(solver, SRBA):
        raise ValueError(f"`solver={solver!r}`: must be SRBA, whose full-batch passes are at known steps.")
    with arithmetic(np.float64):
        oracles, start, traced = prepare(problem, solver)
        drawn = every_draw(oracles, steps)
        estimates, exact = trees.to_numpy(_recursion(traced, oracles, start, drawn.rows, steps))
    begins = [_begins_period(traced, index) for index in range(steps)]
    sides = [_mse_sides(drawn.probability, *parts, begins) for parts in zip(estimates, exact, strict=True)]
    return Sides(Point(*(side.lhs for side in sides)), Point(*(side.rhs for side in sides)))


def _begins_period(solver: SRBA, index: int) -> bool:
    return bool(solver.refreshes(np.int32(index), None))  # type: ignore[arg-type]


@partial(jax.jit, static_argnames="steps")
def _recursion(solver: SRBA, oracles: Oracles, start: Point, rows: Rows, steps: int) -> tuple[Point, Point]:
    """Return D^k and D(u^k), (sequences, steps, size) in each part."""

    def one(rows: Rows) -> tuple[Point, Point]:
        state, estimates, exact = solver.init(oracles, start), [], []
        for index in range(steps):
            step = solver.refresh if _begins_period(solver, index) else solver.step
            state = step(oracles, state, jnp.int32(index), at_step(rows, index))
            estimates.append(flatten(state.estimate))
            exact.append(flatten(oracles.direction(state.previous)))
        return _stack(estimates), _stack(exact)

    return jax.vmap(one)(rows)


def _stack(points: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *points)


def _mse_sides(probability: np.ndarray, estimates: np.ndarray, exact: np.ndarray, begins: list[bool]) -> Sides:
    def expected_norm_sq(vectors: np.ndarray) -> np.ndarray:
        return np.tensordot(probability, np.sum(vectors**2, axis=-1), 1)

    growth = expected_norm_sq(np.diff(estimates, axis=1)) - expected_norm_sq(np.diff(exact, axis=1))
    rhs = np.zeros(len(begins))
    for k in range(1, len(begins)):
        rhs[k] = 0 if begins[k] else rhs[k - 1] + growth[k - 1]
    return Sides(expected_norm_sq(estimates - exact), rhs)


def neumann_mean(problem: BilevelProblem, solver: Solver, point: Point | None = None) -> Sides:
    """Return the mean hypergradient of a Neumann method and its closed form.

    At a fixed (z, x), with H = ∇²zz G, J = ∇²xz G and v* = -H^(-1) ∇z F there,

        E[v] = (I - (I - η H)^K) v*        E[hypergradient] = J E[v] + ∇x F

    with K = Q + 1 for the truncated series (StocBiO, MRBO, VRBO) and K = Q for that of random length (BSA, TTSA,
    ALSET, SUSTAIN). The bias is -(I - η H)^K v*. The identity requires independent batches.

    Parameters
    ----------
    problem : a tiny problem, strongly convex at the point
    solver : determines the series, Q, η and the batches; its inner steps are not taken
    point : (z, x); None means the start

    Returns
    -------
    Sides
        Points (None, hypergradient, v) of flat arrays.
    """
    with arithmetic(np.float64):
        oracles, start, traced = prepare(problem, solver)
        point = start if point is None else trees.cast(point, np.float64)
        is_random = _is_random(traced, oracles)
        n_neumann, step = traced.n_neumann, traced.neumann_step  # type: ignore[attr-defined]
        series = _every_series(oracles, n_neumann, is_random)
        found = _hypergradients(oracles, point, series.rows, n_neumann, step)
        n_terms = n_neumann if is_random else n_neumann + 1
        return Sides(mean_over(series.probability, found), _neumann_closed_form(oracles, point, n_terms, float(step)))


def _is_random(solver: Solver, oracles: Oracles) -> bool:
    """Return True if the series has a random length, according to the draws of the solver."""
    if "n_neumann" not in solver.parameters():
        raise ValueError(
            f"`solver={type(solver).__name__}`: has no Neumann series; use a solver such as StocBiO or BSA."
        )
    draw = jax.eval_shape(lambda: solver.draw(oracles, run_key(0), jnp.int32(0)))
    nodes = jax.tree.leaves(draw, is_leaf=lambda node: isinstance(node, NeumannDraw))
    return any(isinstance(node, NeumannDraw) and node.length is not None for node in nodes)


def _every_series(oracles: Oracles, n_neumann: int, is_random: bool) -> Sequences:
    """Return all draws of a series: inner batches for products and the cross product, an outer batch, a length."""
    n_products = n_neumann - 1 if is_random else n_neumann
    inner = every_sequence(oracles.inner_samples, n_products + 1)
    (rows, outer), probability = pair_levels(inner, every_sequence(oracles.outer_samples, 1))
    series = NeumannDraw(rows[:, :-1], rows[:, -1], outer[:, 0])
    if not is_random:
        return Sequences(series, probability)
    lengths = np.tile(np.arange(n_neumann, dtype=np.int32), len(rows))
    series = jax.tree.map(lambda leaf: np.repeat(leaf, n_neumann, axis=0), series)
    return Sequences(series._replace(length=lengths), np.repeat(probability, n_neumann) / n_neumann)


@partial(jax.jit, static_argnames="n_neumann")
def _hypergradients(oracles: Oracles, point: Point, series: NeumannDraw, n_neumann: int, step: Array) -> Point:
    def one(draw: NeumannDraw) -> Point:
        _, grad, v = hypergradient(oracles, point, draw, n_neumann, step)
        return Point(None, ravel_pytree(grad)[0], ravel_pytree(v)[0])

    return jax.vmap(one)(series)


def _neumann_closed_form(oracles: Oracles, point: Point, n_terms: int, step: float) -> Point:
    hessian, cross = (np.asarray(matrix) for matrix in _dense(oracles, point))
    outer = oracles.outer(point)
    solution = -np.linalg.solve(hessian, trees.flat(outer.grad))
    left = np.linalg.matrix_power(np.eye(len(hessian)) - step * hessian, n_terms)
    v = solution - left @ solution
    return Point(None, cross @ v + trees.flat(outer.grad_outer), v)


@jax.jit
def _dense(oracles: Oracles, point: Point) -> tuple[Array, Array]:
    """Return ∇²zz G and ∇²xz G, column by column."""
    flat, unravel = ravel_pytree(point.v)

    def columns(unit: Array) -> tuple[Array, Array]:
        inner = oracles.inner(point._replace(v=unravel(unit)))
        return ravel_pytree(inner.hvp)[0], ravel_pytree(inner.cross)[0]

    return jax.vmap(columns, out_axes=1)(jnp.eye(flat.size, dtype=flat.dtype))


class TableIdentities(NamedTuple):
    """The identities of SABA, with one entry per sequence of draws."""

    mean: Sides
    direction: Sides


def saba_tables(problem: BilevelProblem, solver: SABA, steps: int) -> TableIdentities:
    """Return both sides of the identities of SABA's tables after each sequence of draws.

    With w_i = (rows of block i)/n, tables Y and stored means M, after any draws,

        M = sum_i w_i Y[i]        E over the next i of g_i(u) - Y[i] + M  =  the full-batch g(u)

    This is SAGA as in arXiv 2201.13409, on blocks that are drawn with probability w_i.

    Parameters
    ----------
    problem : a tiny problem
    solver : SABA; with a large ``rebuild_every``, means are only updated and never summed again
    steps : number of steps before the tables are examined

    Returns
    -------
    TableIdentities
        ``mean``: M and the mean of the table, with inner and outer entries in one row, (sequences, sizes);
        ``direction``: points of flat arrays, (sequences, size); the left side is from a move without projection.
    """
    if not isinstance(solver, SABA):
        raise ValueError(f"`solver={solver!r}`: must be SABA.")
    with arithmetic(np.float64):
        oracles, start, traced = prepare(problem, solver)
        states = _tables(traced, oracles, start, every_draw(oracles, steps).rows, steps)
        ahead = every_draw(oracles, 1)
        free = replace(oracles, outer_bounds=None), _without_projection(traced)
        estimates, exact = _next_estimates(*free, states, jax.tree.map(lambda leaf: leaf[:, 0], ahead.rows))
    levels = [(states.inner, oracles.inner_samples), (states.outer, oracles.outer_samples)]
    stored = np.concatenate([np.asarray(memory.mean) for memory, _ in levels], axis=1)
    expected = np.concatenate([_table_mean(*level) for level in levels], axis=1)
    direction = Sides(mean_over(ahead.probability, estimates, axis=1), trees.to_numpy(exact))
    return TableIdentities(Sides(stored, expected), direction)


def _without_projection(solver: SABA) -> SABA:
    return SABA(**(solver.parameters() | {"v_radius": None})).cast(np.float64)


def _table_mean(memory: BlockTable, samples: Samples) -> np.ndarray:
    return np.einsum("b,sbk->sk", shares(samples), np.asarray(memory.table))


@partial(jax.jit, static_argnames="steps")
def _tables(solver: SABA, oracles: Oracles, start: Point, rows: Rows, steps: int) -> SABAState:
    def one(rows: Rows) -> SABAState:
        state = solver.init(oracles, start)
        for index in range(steps):
            rebuilds = bool(solver.refreshes(np.int32(index), rows))  # type: ignore[arg-type]
            step = solver.refresh if rebuilds else solver.step
            state = step(oracles, state, jnp.int32(index), at_step(rows, index))
        return state

    return jax.vmap(one)(rows)


@jax.jit
def _next_estimates(oracles: Oracles, solver: SABA, states: SABAState, rows: Rows) -> tuple[Point, Point]:
    """Return the direction of the next step, (sequences, draws, size) in each part, and D, (sequences, size)."""

    def one(state: SABAState, rows: Rows) -> Point:
        after = solver.step(oracles, state, jnp.int32(0), rows).point
        z, x, v = flatten(trees.subtract(state.point, after))
        return Point(z / solver.step_size, x * solver.outer_ratio / solver.step_size, v / solver.step_size)

    def each(state: SABAState) -> tuple[Point, Point]:
        return jax.vmap(partial(one, state))(rows), flatten(oracles.direction(state.point))

    return jax.vmap(each)(states)
