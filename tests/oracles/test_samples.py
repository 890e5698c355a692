"""Rows: layout, draws, weights."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevel
from bilevel._core.compilation import arithmetic
from bilevel._core.types import Rows
from bilevel.engine.loop import draw_page, run_key
from bilevel.engine.steps import PAGE_LENGTH
from bilevel.oracles.samples import Samples, permute
from tests import cases


def samples(n=23, batch=4, sampling="blocks"):
    rows = np.arange(n, dtype=np.float32)
    return Samples.from_rows({"x": rows[:, None] * np.ones(3), "i": np.arange(n)}, "float32").with_batches(
        batch, sampling
    )


@partial(jax.jit, static_argnums=(1, 2))
def drawn(level, steps, count=None):
    return jax.vmap(lambda index: level.draw(run_key(0), index, count))(jnp.arange(steps, dtype=jnp.int32))


@pytest.mark.parametrize("name", cases.PROBLEMS)
@pytest.mark.parametrize("sampling", ["blocks", "reshuffle"])
def test_weighted_mean_over_all_blocks_is_the_all_rows_direction(name, sampling):
    problem = cases.PROBLEMS[name]()
    rng = np.random.default_rng(3)
    point = jax.tree.map(lambda leaf: leaf + rng.standard_normal(leaf.shape), problem.start)
    with arithmetic("float64"):
        oracles = problem.oracles.with_batches(cases.BATCH, sampling)
        inner, outer = oracles.inner_samples, oracles.outer_samples

        def probability(level, block):
            return 1 / level.n_blocks if sampling == "reshuffle" else float(level.count(jnp.int32(block))) / level.n

        total = jax.tree.map(np.zeros_like, point)
        for i in range(inner.n_blocks):
            for j in range(outer.n_blocks):
                weight = probability(inner, i) * probability(outer, j)
                direction = cases.direction(oracles, point, Rows(np.int32(i), np.int32(j)))
                total = jax.tree.map(lambda so_far, leaf, w=weight: so_far + w * np.asarray(leaf), total, direction)
        cases.assert_trees_close(total, cases.direction(oracles, point), rtol=1e-13, atol=1e-14)
        cases.assert_trees_close(total, cases.direction(problem.oracles, point), rtol=1e-13, atol=1e-14)


def test_blocks_are_drawn_as_often_as_they_have_rows():
    level = samples(n=23, batch=4)
    draws = drawn(level, 23_000)
    counts = np.bincount(draws, minlength=6)
    expected = 1000 * np.array([4, 4, 4, 4, 4, 3])
    assert np.sum((counts - expected) ** 2 / expected) < 20.5  # chi² with 5 degrees of freedom, p = 0.001


def test_rows_drawn_one_by_one_are_uniform():
    level = samples(n=23, batch=4, sampling="iid")
    draws = drawn(level, 5750)
    counts = np.bincount(np.ravel(draws), minlength=23)
    assert np.sum((counts - 1000) ** 2 / 1000) < 48.3  # 22 degrees of freedom, p = 0.001


def test_a_block_holds_its_own_rows_and_weighs_no_other():
    level = samples(n=23, batch=4)
    for block in range(6):
        data, weights = level.take(jnp.int32(block))
        real = np.asarray(weights) > 0
        np.testing.assert_array_equal(np.asarray(data["i"])[real], np.arange(4 * block, min(4 * block + 4, 23)))
        assert np.isclose(np.sum(weights), 1)


def test_narrow_leaves_have_samples_last_and_wide_ones_first():
    data = {
        "narrow": np.zeros((7, 3), np.float32),
        "wide": np.zeros((7, 100), np.float32),
        "label": np.zeros(7, int),
    }
    level = Samples.from_rows(data, "float32")
    assert {name: leaf.shape for name, leaf in level.leaves.items()} == {
        "narrow": (3, 7),
        "wide": (7, 100),
        "label": (7,),
    }


def test_every_pass_of_reshuffle_visits_each_block_once_in_a_new_order():
    level = samples(n=23, batch=4, sampling="reshuffle")
    draws = drawn(level, 60)
    passes = np.reshape(draws, (10, 6))
    assert all(sorted(one) == list(range(6)) for one in passes.tolist())
    assert len({tuple(one) for one in passes.tolist()}) > 5


def test_several_batches_per_step_continue_the_same_pass():
    level = samples(n=23, batch=4, sampling="reshuffle")
    np.testing.assert_array_equal(np.ravel(drawn(level, 4, 3)), drawn(level, 12))


@pytest.mark.parametrize("n", [1, 2, 3, 16, 17, 100, 1433])
def test_permutations_are_bijections(n):
    positions = jnp.arange(n, dtype=jnp.int32)
    image = jax.jit(jax.vmap(lambda position: permute(run_key(5), position, n)))(positions)
    assert sorted(np.asarray(image).tolist()) == list(range(n))


def test_permutations_are_spread_evenly():
    def first_two_of(index):
        key = jax.random.fold_in(run_key(0), index)
        return jax.vmap(lambda position: permute(key, position, 5))(jnp.arange(2, dtype=jnp.int32))

    first_two = jax.jit(jax.vmap(first_two_of))(jnp.arange(4000, dtype=jnp.int32))
    pairs = np.bincount(np.asarray(first_two) @ np.array([5, 1]), minlength=25).reshape(5, 5)
    off_diagonal = pairs[~np.eye(5, dtype=bool)]
    assert np.all(np.diag(pairs) == 0)
    assert np.sum((off_diagonal - 200) ** 2 / 200) < 43.8  # 19 degrees of freedom, p = 0.001


@pytest.mark.parametrize("sampling", ["blocks", "iid", "reshuffle"])
def test_x64_on_or_off_draws_the_same_rows(sampling):
    pages = []
    for dtype in ("float32", "float64"):
        problem = cases.quadratic(dtype)
        solver = bilevel.SOBA(batch_size=cases.BATCH, sampling=sampling)
        with arithmetic(dtype):
            oracles = problem.oracles.with_batches(solver.batch_size, sampling)
            pages.append(draw_page(solver.cast(dtype), oracles, run_key(7), np.int32(0), PAGE_LENGTH).draws)
    cases.assert_trees_equal(*pages)


def test_the_seed_acts_from_the_first_step():
    problem = cases.quadratic()
    solver = bilevel.SOBA(batch_size=cases.BATCH)
    first = [cases.trajectory(problem, solver, 1, seed=seed).draws[0] for seed in range(12)]
    assert len({(int(rows.inner), int(rows.outer)) for rows in first}) > 6


def test_rows_are_shuffled_once_by_the_seed_of_the_problem():
    data = np.arange(50, dtype=np.float64)[:, None] + 1
    labels = np.ones(50)

    def layout(seed):
        problem = bilevel.problems.penalty_selection(data, labels, data, labels, seed=seed)
        return np.ravel(problem.oracles.inner_samples.leaves)

    assert sorted(layout(0).tolist()) == np.ravel(data).tolist()
    assert not np.array_equal(layout(0), np.ravel(data))
    assert not np.array_equal(layout(0), layout(1))
    np.testing.assert_array_equal(layout(0), layout(0))


def test_the_rows_of_several_batches_and_of_the_first_of_them_are_counted():
    """Blocks of 4, 4 and 2 rows."""
    level, blocks = samples(n=10), np.array([0, 2, 1], np.int32)
    assert int(level.count(blocks, batches=3)) == 10
    assert [int(level.count(blocks, batches=3, first=first)) for first in (0, 1, 2, 3)] == [0, 4, 6, 10]
