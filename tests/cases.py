"""Small problems in JAX, and as NumPy transcriptions of the same rows."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevel
from bilevel._core.compilation import arithmetic
from bilevel._core.types import Calls, Rows
from bilevel.engine.loop import advance, draw_page, for_one_run, initial_state, run_key
from bilevel.engine.steps import PAGE_LENGTH
from bilevel.oracles import AutodiffOracles
from bilevel.problems.penalized_linear import logistic
from bilevel.solvers import Solver
from tests.transcription import problems as numpy_problems

# Neither 53 nor 31 is a multiple of the batch size, so every shared test has a short last block.
N_INNER, N_OUTER, BATCH = 53, 31, 8


# Short loops and series, because the tests are about their order and not their effect.
SHORT = {"n_inner_steps": 2, "n_neumann": 3, "period": 5, "n_products": 3}
CONVEX = {"strong_convexity": 0.5, "outer_strong_convexity": 0.5}  # constants that most problems do not declare
SHORT |= CONVEX


def short(cls, *args, **kwargs):
    """Return a solver of a class with short loops."""
    names = {field.name for field in dataclasses.fields(cls)}
    return cls(*args, **({name: value for name, value in SHORT.items() if name in names} | kwargs))


SOLVERS = {name: short(cls, 0.05, 20.0, BATCH) for name, cls in bilevel.SOLVERS.items() if issubclass(cls, Solver)}


QUICK = ("SRBA", "SABA", "SOBA")


def marked(names, quick=QUICK):
    """The names as test parameters; those that are not quick, nor begin with a quick solver, are marked slow."""
    slow = [name for name in names if name not in quick and name.split()[0] not in QUICK]
    return [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in names]


def quadratic(dtype="float64", **kwargs):
    settings = {
        "n_inner": N_INNER,
        "n_outer": N_OUTER,
        "dim_inner": 5,
        "dim_outer": 3,
        "seed": 1,
        "common_linear": 0.5,
    }
    return bilevel.problems.quadratic(**(settings | kwargs), dtype=dtype)


def logistic_data(n_inner=N_INNER, n_outer=N_OUTER, dim=4, seed=0):
    rng = np.random.default_rng(seed)
    truth = rng.standard_normal(dim)

    def level(n):
        rows = rng.standard_normal((n, dim))
        return rows, np.where(rows @ truth + rng.logistic(size=n) > 0, 1, -1)

    return *level(n_inner), *level(n_outer)


def logistic_selection(dtype="float64", **kwargs):
    return bilevel.problems.penalty_selection(*logistic_data(), dtype=dtype, **kwargs)


def quadratic_loss(z, x, sample):
    squares = ((sample.a @ z) ** 2 + (sample.c @ x) ** 2) / 2
    return squares + (sample.e @ x) * (sample.f @ z) + sample.linear_inner @ z + sample.linear_outer @ x


def signed_inner_loss(z, x, row):
    return logistic(row @ z) + jnp.sum(jnp.exp(x) * z**2) / 2


def signed_outer_loss(z, x, row):
    return logistic(row @ z)


PROBLEMS = {"quadratic": quadratic, "logistic": logistic_selection}
LOSSES = {"quadratic": (quadratic_loss, quadratic_loss), "logistic": (signed_inner_loss, signed_outer_loss)}


def by_autodiff(name, problem):
    """Return oracles of the same rows in the same layout, differentiated automatically."""
    inner_loss, outer_loss = LOSSES[name]
    oracles = problem.oracles
    samples = {"inner_samples": oracles.inner_samples, "outer_samples": oracles.outer_samples}
    return AutodiffOracles(**samples, outer_bounds=oracles.outer_bounds, inner_loss=inner_loss, outer_loss=outer_loss)


def in_numpy(name, problem):
    """Return the transcription of a problem, with rows in the order of its layout."""
    inner, outer = problem.oracles.inner_samples.leaves, problem.oracles.outer_samples.leaves
    if name == "quadratic":
        keys = ("a", "c", "e", "f", "dz", "dx")
        levels = (
            dict(zip(keys, (np.asarray(leaf, np.float64) for leaf in level), strict=True)) for level in (inner, outer)
        )
        return numpy_problems.Quadratic(*levels)
    train, val = np.asarray(inner, np.float64).T, np.asarray(outer, np.float64).T
    return numpy_problems.LogisticSelection(train, np.ones(len(train)), val, np.ones(len(val)))


def indices(samples, rows):
    """Return the drawn rows as positions in the layout, or None for all rows."""
    if rows is None:
        return None
    if samples.sampling == "iid":
        return np.asarray(rows)
    begin = int(rows) * samples.batch_size
    return np.arange(begin, min(begin + samples.batch_size, samples.n))


def trajectory(problem, solver, steps, seed=0, page=None):
    """Return iterates, states and draws of the first steps, one compiled step at a time."""
    with arithmetic(problem.dtype):
        inner, outer = solver.batches()
        oracles = problem.oracles.with_batches(inner, solver.sampling, outer)
        traced = solver.configure(problem).cast(problem.dtype)
        # The page has the length of a page in a run, so that both share a program.
        page = page or draw_page(traced, oracles, run_key(seed), np.int32(0), PAGE_LENGTH)
        states = [initial_state(traced, oracles, problem.start)]
        for position in range(steps):
            at = np.int32(position), np.int32(position + 1)
            states.append(advance(traced, for_one_run(oracles), states[-1], page, *at))
        on_host = jax.tree.map(_numpy_unless_keys, page.draws)
        draws = [jax.tree.map(lambda leaf, i=i: leaf[i], on_host) for i in range(steps)]
    return SimpleNamespace(oracles=oracles, solver=traced, page=page, states=states[1:], draws=draws)


def lowered_steps(problem, solver, oracles):
    """Return the lowered loop of a solver."""
    page = jax.eval_shape(lambda: draw_page(solver, oracles, run_key(0), np.int32(0), PAGE_LENGTH))
    state = jax.eval_shape(initial_state, solver, oracles, problem.start)
    arguments = solver, for_one_run(oracles), state, page, np.int32(0), np.int32(9)
    program, leaves = advance.find(*arguments)
    return program.lower(leaves)


# Each is one program, because the operations of an oracle are dozens of programs otherwise.


@jax.jit
def every_kind(oracles, point, rows=Rows()):  # noqa: B008
    """Return all derivatives that count as calls, and derivatives along two pairs of directions, by name."""
    drawn = {kind: rows.outer if kind.startswith("outer") else rows.inner for kind in Calls._fields}
    pairs = jax.tree.map(lambda leaf: jnp.stack([leaf, jnp.cos(leaf)]), (point.v, point.outer_var))
    tangents = {"inner_tangents": oracles.inner_tangents(point, *pairs, rows.inner)}
    return {kind: getattr(oracles, kind)(point, drawn[kind]) for kind in Calls._fields} | tangents


@jax.jit
def direction(oracles, point, rows=Rows()):  # noqa: B008
    return oracles.direction(point, rows)


@jax.jit
def difference(oracles, point, previous, rows):
    return oracles.difference(point, previous, rows)


def _numpy_unless_keys(leaf):
    return leaf if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else np.asarray(leaf)


def assert_trees_close(a, b, rtol=1e-12, atol=1e-12):
    jax.tree.map(lambda s, t: np.testing.assert_allclose(s, t, rtol=rtol, atol=atol), a, b)


def assert_trees_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)
