"""Differentiation through training loops, against finite differences, plain loops and ITD."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree
from jax.test_util import check_grads

import bilevel
from bilevel._core.compilation import arithmetic
from tests import cases

RNG = np.random.default_rng(0)
ROWS, TARGETS = RNG.standard_normal((40, 3)), RNG.standard_normal(40)
WEIGHTS = RNG.standard_normal(3)
T = 17


@pytest.fixture(autouse=True)
def in_float64():
    with arithmetic(np.float64):
        yield


def gradient(weights, hyper, rows):
    return rows.T @ (rows @ weights - 1) / len(rows) + jnp.exp(hyper["log_decay"]) * weights


def momentum_update(state, hyper, rows, step):
    """Take a step of SGD whose rate, momentum and decay are learned, with a rate for each step."""
    weights, velocity = state
    velocity = jax.nn.sigmoid(hyper["momentum"]) * velocity + gradient(weights, hyper, rows)
    return weights - jnp.exp(hyper["log_rates"][step]) * velocity, velocity


STATE = WEIGHTS, np.zeros(3)
HYPER = {
    "log_rates": np.log(np.linspace(0.2, 0.05, T)),
    "momentum": np.array(0.3),
    "log_decay": np.array(-2.0),
}
BATCHES = RNG.standard_normal((T, 5, 3))


def final_loss(state, hyper):
    return jnp.sum((ROWS @ state[0] - TARGETS) ** 2) / 80 + hyper["momentum"] ** 2


def plain_loop(state, hyper, batches):
    for step in range(T):
        state = momentum_update(state, hyper, batches[step], step)
    return state


def assert_close(found, expected, rtol):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol), found, expected)


@pytest.mark.parametrize("mode", ["reverse", "forward"])
def test_rates_of_each_step_momentum_and_decay_have_the_gradients_of_finite_differences(mode):
    train = bilevel.unrolled(momentum_update, T)
    compute = jax.jit(lambda hyper: bilevel.unrolled_gradient(final_loss, train, STATE, hyper, BATCHES, mode=mode))
    value, found = compute(HYPER)
    flat, tree_of = ravel_pytree(HYPER)
    values = jax.jit(lambda flat: final_loss(plain_loop(STATE, tree_of(flat), BATCHES), tree_of(flat)))
    np.testing.assert_allclose(value, values(flat), rtol=1e-12)
    slopes = [(values(flat + 1e-6 * unit) - values(flat - 1e-6 * unit)) / 2e-6 for unit in np.eye(flat.size)]
    assert_close(ravel_pytree(found)[0], np.array(slopes), 1e-5 * np.abs(slopes).max())


@pytest.mark.parametrize("n_steps", [1, 2, 3, 9, 16, T])
def test_the_segments_cover_every_number_of_steps(n_steps):
    train = bilevel.unrolled(
        lambda state, hyper, batch, step: hyper * state + batch * (1 + step.astype(float)), n_steps
    )
    batches = np.arange(n_steps) + 0.5

    def by_hand(hyper):
        state = jnp.asarray(1.0)
        for step in range(n_steps):
            state = hyper * state + batches[step] * (step + 1)
        return state

    found = jax.value_and_grad(lambda hyper: train(1.0, hyper, batches))(0.9)
    assert_close(found, jax.value_and_grad(by_hand)(0.9), 1e-12)


def test_optimizers_of_optax_and_the_initial_state_are_differentiated():
    rows = BATCHES[0]

    def update(state, hyper, batch, step):
        weights, memory = state
        optimizer = optax.sgd(jnp.exp(hyper["log_rate"]), momentum=0.5)
        updates, memory = optimizer.update(gradient(weights, hyper, rows), memory)
        return optax.apply_updates(weights, updates), memory

    hyper = {"log_rate": jnp.asarray(-2.0), "log_decay": jnp.asarray(-1.0)}
    train = bilevel.unrolled(update, 12)

    def loss(weights, hyper):
        state = train((weights, optax.sgd(0.1, momentum=0.5).init(weights)), hyper)
        return jnp.sum(state[0] ** 2)

    check_grads(loss, (jnp.asarray(WEIGHTS), hyper), order=1, modes=["rev", "fwd"], atol=1e-6, rtol=1e-6)


def test_batches_may_be_a_function_of_the_step():
    def draw(step):
        return jax.random.normal(jax.random.fold_in(jax.random.key(0), step), (5, 3))

    train = bilevel.unrolled(momentum_update, T)
    drawn = jnp.stack([draw(step) for step in range(T)])
    assert_close(train(STATE, HYPER, draw), train(STATE, HYPER, drawn), 1e-12)


def test_a_truncated_loop_has_the_gradient_of_its_last_steps():
    short = bilevel.unrolled(momentum_update, T, last_steps=4)
    value, found = bilevel.unrolled_gradient(final_loss, short, STATE, HYPER, BATCHES)

    def by_hand(hyper):
        state = STATE
        for step in range(T):
            fixed = jax.lax.stop_gradient(hyper) if step < T - 4 else hyper
            state = momentum_update(state, fixed, BATCHES[step], step)
        return final_loss(state, hyper)

    assert_close((value, found), jax.value_and_grad(by_hand)(HYPER), 1e-12)
    assert np.all(found["log_rates"][: T - 4] == 0) and np.all(found["log_rates"][T - 4 :] != 0)


def test_itd_is_a_special_case():
    problem, solver = cases.quadratic(), bilevel.ITD(0.05, 20.0, cases.BATCH, n_inner_steps=7)
    run = cases.trajectory(problem, solver, 1)
    point, draw = problem.start, run.draws[0]

    def update(z, x, rows, step):
        return z - 0.05 * run.oracles.inner_grad(point._replace(inner_var=z, outer_var=x), rows)

    train = bilevel.unrolled(update, 7)

    def loss(z, x):
        return run.oracles.outer_value(point._replace(inner_var=z, outer_var=x), draw.outer)

    _, found = bilevel.unrolled_gradient(loss, train, point.inner_var, point.outer_var, draw.inner)
    moved = (point.outer_var - run.states[0].point.outer_var) * 20.0 / 0.05
    np.testing.assert_allclose(found, moved, rtol=1e-10)


def test_memory_grows_like_the_root_of_the_number_of_steps():
    width = 2000

    def update(state, hyper, batch, step):
        return jnp.tanh(hyper * state + 0.1)

    def bytes_of(train, n_steps):
        def loss(hyper):
            return jnp.sum(train(jnp.ones(width), hyper))

        program = jax.jit(jax.grad(loss)).lower(jnp.full(width, 0.5)).compile()
        return program.memory_analysis().temp_size_in_bytes / (8 * width)

    def scan(n_steps):
        return lambda state, hyper: jax.lax.scan(lambda s, _: (update(s, hyper, 0, 0), None), state, None, n_steps)[0]

    small, large, plain = (
        bytes_of(train, n)
        for train, n in (
            (bilevel.unrolled(update, 100), 100),
            (bilevel.unrolled(update, 1600), 1600),
            (scan(1600), 1600),
        )
    )
    assert large < 5 * small and large < 200 < 1600 <= plain


def test_it_can_be_batched():
    train = bilevel.unrolled(momentum_update, T)

    def slope(hyper):
        return bilevel.unrolled_gradient(final_loss, train, STATE, hyper, BATCHES)[1]

    many = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf - 0.1]), HYPER)
    found = jax.vmap(slope)(many)
    assert_close(jax.tree.map(lambda leaf: leaf[0], found), slope(HYPER), 1e-12)


def test_wrong_input_is_refused_by_name():
    with pytest.raises(ValueError, match="`n_steps=0`"):
        bilevel.unrolled(momentum_update, 0)
    with pytest.raises(ValueError, match="`last_steps=0`"):
        bilevel.unrolled(momentum_update, 3, last_steps=0)
    train = bilevel.unrolled(momentum_update, T)
    with pytest.raises(ValueError, match=r"`batches` has a leaf of shape \(5, 3\); .* each of 17 steps"):
        train(STATE, HYPER, BATCHES[0])
    with pytest.raises(ValueError, match=r"`update` must return a state like its first argument, .*\(3,\)"):
        bilevel.unrolled(lambda state, *_: state[0], T)(STATE, HYPER, BATCHES)
    with pytest.raises(ValueError, match="`mode='adjoint'`: must be one of 'reverse', 'forward'"):
        bilevel.unrolled_gradient(final_loss, train, STATE, HYPER, BATCHES, mode="adjoint")
    for mode in ("reverse", "forward"):
        with pytest.raises(ValueError, match=r"`loss` must return one number; it returned \(3,\)"):
            bilevel.unrolled_gradient(lambda state, hyper: state[0], train, STATE, HYPER, BATCHES, mode=mode)
        with pytest.raises(ValueError, match="`hyper` has a leaf of int64, which has no gradient"):
            bilevel.unrolled_gradient(final_loss, train, STATE, jnp.arange(3), BATCHES, mode=mode)
