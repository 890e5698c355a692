"""A regularizer of images, learned from noisy and clean patches, compared with total variation and a loop by hand.

    python examples/learned_regularizer.py [--seeds 3] [--steps 1500]

Each patch of a photograph is a task, and its inner variable is the denoised patch: the minimizer of the squared
distance from the noisy patch plus the weighted sizes of its responses to eight filters. The outer variable is the
filters and their weights, learned for a small distance from the clean patches. All are tested on patches of another
photograph, which are denoised until convergence. The weight of total variation is the best of a grid on the same
patches that the regularizer is learned from. The loop by hand is of the same method, on the same batches, in JAX.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_sample_image

import bilevel

NOISE, SIZE, N_FILTERS, N_PATCHES = 0.1, 24, 8, 128
INNER_STEP, N_INNER, N_PRODUCTS, BATCH = 0.1, 10, 10, 8
ADAM = optax.adam(0.02)


def patches(photograph, seed, n):
    rng, image = np.random.default_rng(seed), load_sample_image(photograph).mean(axis=2) / 255
    corners = rng.integers(0, np.array(image.shape) - SIZE, (n, 2))
    clean = np.stack([image[i : i + SIZE, j : j + SIZE] for i, j in corners]).astype(np.float32)
    return {"clean": clean, "noisy": clean + np.float32(NOISE * rng.normal(size=clean.shape))}


def first_filters(seed):
    filters = 0.3 * np.random.default_rng(seed).normal(size=(N_FILTERS, 1, 3, 3))
    return {"filters": filters.astype(np.float32), "log_weights": np.full(N_FILTERS, -3.0, np.float32)}


def total_variation(log_weight):
    filters = np.zeros((2, 1, 3, 3), np.float32)
    filters[:, 0, 1, 1], filters[0, 0, 1, 2], filters[1, 0, 2, 1] = 1, -1, -1
    return {"filters": filters, "log_weights": np.full(2, log_weight, np.float32)}


def inner_loss(z, x, task):
    responses = jax.lax.conv(z[None, None], x["filters"], (1, 1), "VALID")[0]
    sizes = jnp.sum(jnp.sqrt(responses**2 + 1e-3), axis=(1, 2))
    return jnp.sum((z - task["noisy"]) ** 2) / 2 + jnp.exp(x["log_weights"]) @ sizes


def outer_loss(z, x, task):
    return jnp.mean((z - task["clean"]) ** 2)


def make_problem(seed):
    tasks = patches("china.jpg", seed, N_PATCHES)
    return bilevel.BilevelProblem.from_task_losses(
        inner_loss, outer_loss, tasks, lambda x, task: task["noisy"], first_filters(seed), keep=True, dtype="float32"
    )


def train(seed, n_steps):
    """Return the learned filters and weights, and the seconds of the steps."""
    batches = {"batch_size": BATCH, "sampling": "iid"}
    solver = bilevel.AIDCG(INNER_STEP, n_inner_steps=N_INNER, n_products=N_PRODUCTS, outer_optimizer=ADAM, **batches)
    result = bilevel.run(make_problem(seed), solver, max_steps=n_steps, eval_every=n_steps, seed=seed)
    return result.point.outer_var, result.history["seconds"][-1]


def train_by_hand(seed, n_steps):
    """Return the same from a loop in JAX."""
    (tasks, drawn), slope = drawn_batches(seed, n_steps), jax.grad(inner_loss)

    def of_task(z, x, task):
        z = jax.lax.fori_loop(0, N_INNER, lambda _, z: z - INNER_STEP * slope(z, x, task), z)

        def multiply(w):
            return jax.jvp(lambda z: slope(z, x, task), (z,), (w,))[1]

        right = -jax.grad(outer_loss)(z, x, task)
        v = jax.scipy.sparse.linalg.cg(multiply, right, tol=0.0, maxiter=N_PRODUCTS)[0]
        return z, jax.grad(lambda x: jnp.vdot(slope(z, x, task), v))(x)

    def step(carry, rows):
        z, x, state = carry
        new, gradients = jax.vmap(of_task, (0, None, 0))(z[rows], x, jax.tree.map(lambda leaf: leaf[rows], tasks))
        updates, state = ADAM.update(jax.tree.map(lambda leaf: leaf.mean(axis=0), gradients), state)
        return (z.at[rows].set(new), optax.apply_updates(x, updates), state), None

    program = jax.jit(lambda x, rows: jax.lax.scan(step, (tasks["noisy"], x, ADAM.init(x)), rows)[0][1])
    jax.block_until_ready(program(first_filters(seed), drawn))
    began = time.perf_counter()
    return jax.block_until_ready(program(first_filters(seed), drawn)), time.perf_counter() - began


def drawn_batches(seed, n_steps):
    """Return the tasks in the order of the problem, and those of each step, as the library draws them."""
    oracles = make_problem(seed).oracles.with_batches(BATCH, "iid")
    key, steps = jax.random.key(seed, impl="threefry2x32"), jnp.arange(n_steps, dtype=jnp.int32)
    return oracles.inner_samples.leaves, jax.vmap(lambda step: oracles.draw(key, step).inner)(steps)


@jax.jit
def psnr(x, tasks):
    """Return the peak signal-to-noise ratio of denoised patches, in dB."""

    def denoise(task):
        return jax.lax.fori_loop(0, 2000, lambda _, z: z - 0.05 * jax.grad(inner_loss)(z, x, task), task["noisy"])

    return -10 * jnp.log10(jnp.mean((jax.vmap(denoise)(tasks) - tasks["clean"]) ** 2))


def best_total_variation(seed):
    tasks = patches("china.jpg", seed, N_PATCHES)
    return max(map(total_variation, np.linspace(-5, 0, 21)), key=lambda x: psnr(x, tasks))


def test_psnr(x):
    return float(psnr(x, patches("flower.jpg", 99, 100)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1500)
    options = parser.parse_args()
    for seed in range(options.seeds):
        print(f"seed {seed}, total variation: {test_psnr(best_total_variation(seed)):.2f} dB")
        for name, side in (("bilevel", train), ("by hand", train_by_hand)):
            x, seconds = side(seed, options.steps)
            print(f"  {name}: {test_psnr(x):.2f} dB, {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main()
