"""Few-shot regression of sinusoids by MAML and ANIL, compared with the same methods written by hand in JAX.

    python examples/few_shot.py [--seeds 3] [--steps 5000]

A task is a sinusoid with random amplitude and phase: ten points to fit, and ten to predict. MAML learns weights of a
network from which five gradient steps fit a new task; ANIL adapts only the last layer. Both sides take the same tasks
in the same order, with the same start and the same Adam. The error is that of 1000 new tasks after the inner steps.
"""

import argparse
import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import bilevel

N_INNER, INNER_STEP, BATCH = 5, 0.005, 25
ADAM = optax.adam(1e-3)
N_BODY = {"MAML": 0, "ANIL": 2}  # number of layers that are not adapted


def make_task(key):
    amplitude, phase, points = jax.random.split(key, 3)
    points = jax.random.uniform(points, (20, 1), minval=-5, maxval=5)
    size = jax.random.uniform(amplitude, minval=0.1, maxval=5)
    values = size * jnp.sin(points - jax.random.uniform(phase, maxval=jnp.pi))
    return {"fit": (points[:10], values[:10]), "predict": (points[10:], values[10:])}


def network(layers, points):
    for matrix, shift in layers[:-1]:
        points = jax.nn.relu(points @ matrix + shift)
    return points @ layers[-1][0] + layers[-1][1]


def squares(layers, data):
    return jnp.mean((network(layers, data[0]) - data[1]) ** 2)


def first_layers(seed):
    rng = np.random.default_rng(seed)
    sizes = itertools.pairwise([1, 40, 40, 1])
    return [(np.float32(rng.normal(size=(a, b)) / np.sqrt(a)), np.zeros(b, np.float32)) for a, b in sizes]


def train(method, seed, n_steps):
    """Return the learned layers and the seconds of the steps."""
    n_body = N_BODY[method]
    problem = bilevel.BilevelProblem.from_task_losses(
        lambda z, x, task: squares([*x[:n_body], *z], task["fit"]),
        lambda z, x, task: squares([*x[:n_body], *z], task["predict"]),
        make_task,
        lambda x, task: x[n_body:],
        first_layers(seed),
        dtype="float32",
    )
    solver = bilevel.ITD(INNER_STEP, batch_size=BATCH, sampling="iid", n_inner_steps=N_INNER, outer_optimizer=ADAM)
    result = bilevel.run(problem, solver, max_steps=n_steps, eval_every=n_steps, seed=seed)
    return result.point.outer_var, result.history["seconds"][-1]


def train_by_hand(method, seed, n_steps):
    """Return the same from a loop in JAX."""
    n_body = N_BODY[method]

    def task_loss(x, number):
        task, z = make_task(jax.random.key(number)), x[n_body:]
        for _ in range(N_INNER):
            gradient = jax.grad(lambda z: squares([*x[:n_body], *z], task["fit"]))(z)
            z = jax.tree.map(lambda leaf, slope: leaf - INNER_STEP * slope, z, gradient)
        return squares([*x[:n_body], *z], task["predict"])

    def batch_loss(x, numbers):
        return jnp.mean(jax.vmap(task_loss, (None, 0))(x, numbers))

    def step(carry, numbers):
        x, state = carry
        updates, state = ADAM.update(jax.grad(batch_loss)(x, numbers), state)
        return (optax.apply_updates(x, updates), state), None

    program = jax.jit(lambda x, numbers: jax.lax.scan(step, (x, ADAM.init(x)), numbers)[0][0])
    inputs = jax.tree.map(jnp.asarray, first_layers(seed)), drawn_tasks(seed, n_steps)
    jax.block_until_ready(program(*inputs))
    began = time.perf_counter()
    return jax.block_until_ready(program(*inputs)), time.perf_counter() - began


def drawn_tasks(seed, n_steps):
    """Return the seeds of the tasks of each step, as the library draws them."""
    any_loss = lambda z, x, task: jnp.sum(z**2)  # noqa: E731
    problem = bilevel.BilevelProblem.from_task_losses(any_loss, any_loss, make_task, np.zeros(1), np.zeros(1))
    oracles, key = problem.oracles.with_batches(BATCH, "iid"), jax.random.key(seed, impl="threefry2x32")
    return jax.vmap(lambda step: oracles.take(oracles.draw(key, step).inner)[0])(jnp.arange(n_steps, dtype=jnp.int32))


def test_error(method, x):
    """Return the mean error on new tasks, after the inner steps."""
    n_body = N_BODY[method]

    def task_error(task):
        def step(_, z):
            gradient = jax.grad(lambda z: squares([*x[:n_body], *z], task["fit"]))(z)
            return jax.tree.map(lambda leaf, slope: leaf - INNER_STEP * slope, z, gradient)

        z = jax.lax.fori_loop(0, N_INNER, step, jax.tree.map(jnp.asarray, list(x[n_body:])))
        return squares([*x[:n_body], *z], task["predict"])

    tasks = jax.vmap(make_task)(jax.random.split(jax.random.key(99), 1000))
    return float(jnp.mean(jax.vmap(task_error)(tasks)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5000)
    options = parser.parse_args()
    for method in N_BODY:
        for seed in range(options.seeds):
            print(f"{method}, seed {seed}, before training: test error {test_error(method, first_layers(seed)):.3f}")
            for name, side in (("bilevel", train), ("by hand", train_by_hand)):
                x, seconds = side(method, seed, options.steps)
                print(f"  {name}: test error {test_error(method, x):.3f}, {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main()
