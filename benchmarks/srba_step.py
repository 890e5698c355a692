"""Time per step of SRBA and SABA on IJCNN1-shaped data, beside a textbook JAX version of SRBA.

    python benchmarks/srba_step.py [--rounds 7] [--steps 20480]

All are timed in turn within one process, all-rows passes and draws included, and compared as ratios of their
best and of their median rounds. The textbook version keeps rows × features, branches on the period with
`cond`, draws inside the loop, and gets products by differentiating the gradient of a mean of `jax.nn.softplus`.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np

import bilevel
from bilevel.losses import logistic

N_TRAIN, N_VAL, DIM, BATCH, STEP = 49_990, 91_701, 22, 64, 0.05
PERIOD = (N_TRAIN + N_VAL) // (2 * BATCH)


def make_data(seed=0):
    rng = np.random.default_rng(seed)
    truth = rng.standard_normal(DIM)

    def level(n):
        rows = rng.uniform(-1, 1, (n, DIM)).astype(np.float32)
        labels = np.where(rows @ truth + rng.logistic(size=n) > 0, 1, -1)
        return rows, labels

    return *level(N_TRAIN), *level(N_VAL)


def textbook_srba(X_train, y_train, X_val, y_val):
    X_train, y_train, X_val, y_val = (jnp.asarray(a, jnp.float32) for a in (X_train, y_train, X_val, y_val))

    def inner_loss(z, x, X, y):
        return jnp.mean(jax.nn.softplus(-y * (X @ z))) + 0.5 * jnp.sum(jnp.exp(x) * z**2)

    def outer_loss(z, x, X, y):
        return jnp.mean(jax.nn.softplus(-y * (X @ z)))

    def direction(u, inner, outer):
        z, v, x = u
        grad, products = jax.vjp(lambda z, x: jax.grad(inner_loss)(z, x, *inner), z, x)
        hvp, cross = products(v)
        grad_z, grad_x = jax.grad(outer_loss, argnums=(0, 1))(z, x, *outer)
        return grad, hvp + grad_z, cross + grad_x

    def batch(key, X, y):
        start = jax.random.randint(key, (), 0, X.shape[0] // BATCH) * BATCH
        return (jax.lax.dynamic_slice_in_dim(array, start, BATCH) for array in (X, y))

    def step(index, carry, data):
        u, previous, estimate, key = carry
        X_train, y_train, X_val, y_val = data
        key, inner_key, outer_key = jax.random.split(key, 3)

        def full(_):
            return direction(u, (X_train, y_train), (X_val, y_val))

        def recursive(_):
            inner, outer = tuple(batch(inner_key, X_train, y_train)), tuple(batch(outer_key, X_val, y_val))
            new, old = direction(u, inner, outer), direction(previous, inner, outer)
            return jax.tree.map(lambda d, a, b: d + a - b, estimate, new, old)

        estimate = jax.lax.cond(index % PERIOD == 0, full, recursive, None)
        return jax.tree.map(lambda w, d: w - STEP * d, u, estimate), u, estimate, key

    @jax.jit
    def many_steps(u, data, steps):
        zero = jax.tree.map(jnp.zeros_like, u)
        carry = (u, u, zero, jax.random.key(0))
        return jax.lax.fori_loop(0, steps, lambda index, carry: step(index, carry, data), carry)[0]

    start = (jnp.zeros(DIM), jnp.zeros(DIM), jnp.full(DIM, -2.0))
    data = (X_train, y_train, X_val, y_val)

    def timed(steps):
        began = time.perf_counter()
        jax.block_until_ready(many_steps(start, data, steps))
        return time.perf_counter() - began

    return timed


def ours(problem, solver):
    def timed(steps):
        return bilevel.run(problem, solver, max_steps=steps, eval_every=steps).history["seconds"][-1]

    return timed


def as_losses(X_train, y_train, X_val, y_val):
    def inner_loss(z, x, sample):
        row, label = sample
        return logistic(label * (row @ z)) + jnp.sum(jnp.exp(x) * z**2) / 2

    def outer_loss(z, x, sample):
        row, label = sample
        return logistic(label * (row @ z))

    train, val = (X_train, y_train.astype(np.float32)), (X_val, y_val.astype(np.float32))
    return bilevel.BilevelProblem.from_losses(
        inner_loss, outer_loss, train, val, inner_var=np.zeros(DIM), outer_var=np.full(DIM, -2.0)
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20_480)
    arguments = parser.parse_args()
    data = make_data()
    start = dict(inner_var=np.zeros(DIM), outer_var=np.full(DIM, -2.0))
    closed, losses = bilevel.problems.logistic_selection(*data, **start), as_losses(*data)
    contenders = {
        "textbook SRBA": textbook_srba(*data),
        "SRBA, logistic_selection": ours(closed, bilevel.SRBA(STEP, 1.0, BATCH)),
        "SRBA, per-sample losses": ours(losses, bilevel.SRBA(STEP, 1.0, BATCH)),
        "SABA, logistic_selection": ours(closed, bilevel.SABA(STEP, 1.0, BATCH)),
        "SABA, per-sample losses": ours(losses, bilevel.SABA(STEP, 1.0, BATCH)),
        "SOBA, logistic_selection": ours(closed, bilevel.SOBA(STEP, 1.0, BATCH)),
    }
    for timed in contenders.values():
        timed(arguments.steps)
    seconds = {name: [] for name in contenders}
    for _ in range(arguments.rounds):
        for name, timed in contenders.items():
            seconds[name].append(timed(arguments.steps))
    best = {name: 1e6 * min(times) / arguments.steps for name, times in seconds.items()}
    median = {name: 1e6 * np.median(times) / arguments.steps for name, times in seconds.items()}
    base = "textbook SRBA"
    print(f"{'':<26} {'µs per step':^17}   {'textbook / this':^17}")
    print(f"{'':<26} {'best':>8} {'median':>8}   {'best':>8} {'median':>8}")
    for name in contenders:
        ratios = f"{best[base] / best[name]:8.2f} {median[base] / median[name]:8.2f}"
        print(f"{name:<26} {best[name]:8.2f} {median[name]:8.2f}   {ratios}")
    for kind in ("logistic_selection", "per-sample losses"):
        saba, srba = f"SABA, {kind}", f"SRBA, {kind}"
        print(f"SABA / SRBA, {kind}: best {best[saba] / best[srba]:.2f}, median {median[saba] / median[srba]:.2f}")


if __name__ == "__main__":
    main()
