"""The differences of the published code are as described, and nothing else changes."""

import jax
import numpy as np
import pytest

import bilevel
from bilevel._core.compilation import arithmetic
from bilevel.engine.loop import run_key
from tests.scripts import load_example

pytestmark = pytest.mark.slow  # many compilations

FULL = {"step_size": 0.1, "outer_ratio": 0.5, "sampling": "full"}


@pytest.fixture(scope="module")
def published():
    return load_example("published_differences")


@pytest.fixture(scope="module")
def problem():
    return bilevel.problems.quadratic(44, 29, 5, 3, common_linear=0.5, dtype="float64")


def end(problem, solver, steps):
    return bilevel.run(problem, solver, max_steps=steps, eval_every=steps)


def closeness(one, other):
    pairs = zip(jax.tree.leaves(one.point), jax.tree.leaves(other.point), strict=True)
    return max(float(np.max(np.abs(a - b))) for a, b in pairs)


PAIRS = {
    "VRBO": ("LossyVRBO", {"lost_move": False}, {"period": 3, "n_inner_steps": 2, "n_neumann": 2}),
    "MRBO": ("ZeroMRBO", {"previous_at_zero": False}, {"n_neumann": 2}),
    "SRBA": ("PassSRBA", {"ordered_passes": False, "reread": False}, {"period": 3}),
    "F2SA": ("PartsF2SA", {}, {"n_inner_steps": 2, "delta_0": 1.0}),
}


@pytest.mark.parametrize("name", PAIRS)
def test_without_its_difference_a_solver_is_that_of_the_library(published, problem, name):
    other, off, parameters = PAIRS[name]
    ours = end(problem, bilevel.SOLVERS[name](0.1, 0.5, 8, **parameters), 7)
    same = end(problem, getattr(published, other)(0.1, 0.5, 8, **parameters, **off), 7)
    assert closeness(ours, same) < 1e-12
    assert ours.history["calls"][-1] == same.history["calls"][-1]


def test_vrbo_as_published_lacks_only_the_move_of_x(published, problem):
    solver = published.LossyVRBO(**FULL, n_inner_steps=2, n_neumann=2, period=50)
    result = end(problem, solver, 1)
    # On full batches the correct estimate is ∇z G, whose cross derivative is constant here.
    with arithmetic(np.float64):
        exact = problem.oracles.inner_grad(result.point)
        before = problem.oracles.inner_grad(problem.start)
        moved = problem.oracles.inner_grad(problem.start._replace(outer_var=result.point.outer_var))
    lost = np.asarray(moved) - np.asarray(before)
    assert np.linalg.norm(lost) > 1e-3
    np.testing.assert_allclose(np.asarray(exact) - result.state.inner_estimate, lost, atol=1e-12)
    # One pass with Q + 2 batches of inner rows, and T differences with twice this number.
    assert result.history["calls"][-1] == (1 + 2 * 2) * (4 * problem.n_inner + 2 * problem.n_outer)


def test_mrbo_as_published_subtracts_half_of_the_gradient_at_zero_from_the_first_estimate(published, problem):
    result = end(problem, published.ZeroMRBO(**FULL, n_neumann=2), 1)
    with arithmetic(np.float64):
        here = np.asarray(problem.oracles.inner_grad(problem.start))
        zero = np.asarray(problem.oracles.inner_grad(jax.tree.map(np.zeros_like, problem.start)))
    np.testing.assert_allclose(result.point.inner_var, -0.1 * (here - 0.5 * zero), atol=1e-13)


def blocks(published, n_blocks, seed, steps):
    key = run_key(seed)
    draw = jax.vmap(lambda index: published.block_of_pass(n_blocks, key, index))
    return np.asarray(draw(np.arange(steps, dtype=np.int32)))


def test_the_published_sampler_ignores_the_seed_in_its_first_pass_and_draws_each_last_block_twice(published):
    one, other = (blocks(published, 6, seed, 21) for seed in (0, 1))
    assert one[:7].tolist() == other[:7].tolist() == [0, 1, 2, 3, 4, 5, 5]
    assert one.tolist() != other.tolist()
    for drawn in (one, other):
        for turn in drawn.reshape(3, 7):
            assert turn[-1] == turn[-2]
            assert sorted(turn[:-1].tolist()) == list(range(6))


def test_a_reread_batch_is_the_last_rows_of_the_data_with_equal_weights(published, problem):
    with arithmetic(np.float64):
        oracles = problem.oracles.with_batches(8, "blocks")
        data, weights = published.with_reread_rows(oracles).inner_samples.take(np.int32(5))
        own_weights = oracles.inner_samples.take(np.int32(5))[1]
    assert problem.n_inner == 5 * 8 + 4
    np.testing.assert_array_equal(data.a, problem.oracles.inner_samples.leaves.a[-8:])
    np.testing.assert_array_equal(weights, np.full(8, 1 / 8))
    assert (np.asarray(own_weights) > 0).sum() == 4


def test_the_penalty_grows_with_its_exponent_and_y_follows_it(published, problem):
    steps, t = 6, np.arange(1, 7)
    for power in (1 / 7, 6 / 7):
        solver = published.PartsF2SA(0.1, 0.5, 8, delta_0=1.0, n_inner_steps=1, growth_power=power)
        np.testing.assert_allclose(end(problem, solver, steps).state.penalty, 1 + np.sum(t**-power), rtol=1e-12)
    follows = published.PartsF2SA(0.1, y_with_penalty=1.0)
    index = np.int32(9)
    np.testing.assert_allclose(follows.y_step(np.float32(5.0), index), 0.1 * 10 ** (-5 / 7) * 5, rtol=1e-6)
    plain = published.PartsF2SA(0.1).y_step(np.float32(5.0), index)
    np.testing.assert_allclose(plain, 0.05 * 10 ** (-4 / 7), rtol=1e-6)
