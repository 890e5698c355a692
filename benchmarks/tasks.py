"""Problems of tasks, and iterative differentiation, compared with loops written by hand in JAX.

    python benchmarks/tasks.py [--seeds 3] [--out reports/tasks.md]

Both sides have the same losses, tasks, batches and step sizes; the examples `few_shot.py` and `learned_regularizer.py`
contain them. Seconds are those of the steps without compilation. The two sides take turns, and the shorter of two
rounds counts. Lines are those of the functions that train.
"""

import argparse
import inspect
import sys
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from machine import facts
from markdown import number, table

import bilevel

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import few_shot
import learned_regularizer

COLUMNS = [
    "task",
    "seed",
    "quality",
    "bilevel",
    "by hand",
    "time, bilevel / by hand",
    "lines, bilevel",
    "lines, by hand",
]
STEP, LENGTH = 0.1, 50


def losses():
    def outer(z, x, row):
        return (row[0] @ z - row[1]) ** 2 / 2

    return lambda z, x, row: outer(z, x, row) + jnp.exp(x) @ z**2 / 2, outer


def data(seed):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(2, 512, 100)).astype(np.float32)
    y = (X[..., :5].sum(axis=2) + rng.normal(size=(2, 512))).astype(np.float32)
    return (X[0], y[0]), (X[1], y[1]), np.zeros(100, np.float32), np.full(100, -2.0, np.float32)


def unroll(seed, n_steps):
    problem = bilevel.BilevelProblem.from_losses(*losses(), *data(seed), dtype="float32")
    solver = bilevel.ITD(STEP, sampling="full", n_inner_steps=LENGTH, warm_start=False)
    result = bilevel.run(problem, solver, max_steps=n_steps, eval_every=n_steps)
    return result.point.outer_var, result.history["seconds"][-1]


def unroll_by_hand(seed, n_steps):
    (inner, outer), (train, val, z, x) = losses(), data(seed)

    def mean(loss, rows, z, x):
        return jnp.mean(jax.vmap(partial(loss, z, x))(rows))

    def value(x):
        def step(z, _):
            return z - STEP * jax.grad(partial(mean, inner, train))(z, x), None

        return mean(outer, val, jax.lax.scan(step, z, None, length=LENGTH)[0], x)

    program = jax.jit(lambda x: jax.lax.fori_loop(0, n_steps, lambda _, x: x - STEP * jax.grad(value)(x), x))
    jax.block_until_ready(program(x))
    began = time.perf_counter()
    return jax.block_until_ready(program(x)), time.perf_counter() - began


def final_value(x, seed):
    (X, y), (X_val, y_val), z, _ = data(seed)
    for _ in range(LENGTH):
        z = z - STEP * (X.T @ (X @ z - y) / len(y) + np.exp(np.asarray(x, float)) * z)
    return np.mean((X_val @ z - y_val) ** 2) / 2


def of_method(name):
    sides = [partial(side, name) for side in (few_shot.train, few_shot.train_by_hand)]
    return *sides, 5000, "test error", lambda x, seed: few_shot.test_error(name, x)


CASES = {
    "MAML, sinusoids": of_method("MAML"),
    "ANIL, sinusoids": of_method("ANIL"),
    "regularizer of images": (
        *(learned_regularizer.train, learned_regularizer.train_by_hand, 1500, "test PSNR, dB"),
        lambda x, seed: learned_regularizer.test_psnr(x),
    ),
    "ITD, 50 inner steps": (unroll, unroll_by_hand, 300, "F", final_value),
}


def count_lines(side):
    parts = [getattr(side, "func", side)]
    if side is learned_regularizer.train:
        parts.append(learned_regularizer.make_problem)
    return str(sum(len(inspect.getsource(part).splitlines()) for part in parts))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="page to write")
    options = parser.parse_args()
    rows = []
    for name, (*sides, n_steps, measure, quality) in CASES.items():
        for seed in range(options.seeds):
            runs = [[side(seed, n_steps) for side in sides] for _ in range(2)]
            seconds = [min(run[side][1] for run in runs) for side in (0, 1)]
            values = [number(float(quality(x, seed)), 4) for x, _ in runs[0]]
            rows.append([name, f"{seed}", measure, *values, number(seconds[0] / seconds[1]), *map(count_lines, sides)])
            print(table(COLUMNS, rows[-1:]), flush=True)
    if options.out:
        title = "# Tasks and unrolled loops, compared with loops by hand"
        text = [title, "    python benchmarks/tasks.py", (__doc__ or "").split("\n\n")[2].strip(), table(COLUMNS, rows)]
        options.out.write_text("\n\n".join([*text, *facts()]) + "\n")


if __name__ == "__main__":
    main()
