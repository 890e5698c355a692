"""Memory of a step of SOBA on a deep network, and its time: whole, in parts, with rematerialization, in bfloat16.

    python benchmarks/network_memory.py [--layers 16] [--width 256] [--batch 1024]

Memory is what the compiled step asks for beside its arguments, as XLA tells it. Seconds are medians of five rounds of
steps, interleaved.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

import bilevel
from bilevel._precision import arithmetic
from bilevel.engine.loop import advance, draw_page, initial_state, run_key

STEPS, ROUNDS = 3, 5
OPTIONS = {
    "whole": {},
    "`accumulate=4`": {"accumulate": 4},
    "`accumulate=16`": {"accumulate": 16},
    "`jax.checkpoint` of each layer": {"remat": True},
    "`jax.checkpoint` and `accumulate=4`": {"remat": True, "accumulate": 4},
    '`compute_dtype="bfloat16"`': {"compute_dtype": "bfloat16"},
}


def build(layers, width, batch, remat=False, **options):
    """A deep network with a weight decay to learn."""
    rng = np.random.default_rng(0)

    def layer(row, weights):
        return row + jnp.tanh(row @ weights) / layers

    one = jax.checkpoint(layer) if remat else layer

    def score(z, row):
        return jax.lax.scan(lambda row, weights: (one(row, weights), None), row, z)[0]

    def inner_loss(z, x, row):
        return jnp.sum(score(z, row) ** 2) / width + jnp.exp(x) * jnp.sum(z**2)

    def outer_loss(z, x, row):
        return jnp.sum((score(z, row) - 1) ** 2) / width

    rows = rng.normal(size=(2 * batch, width))
    start = {"inner_var": rng.normal(size=(layers, width, width)) / width**0.5, "outer_var": np.array(-5.0)}
    return bilevel.BilevelProblem.from_losses(inner_loss, outer_loss, rows, rows, **start, **options, dtype="float32")


def prepare(batch, problem):
    """The compiled steps, and a function that takes some."""
    solver = bilevel.SOBA(0.01, 1.0, batch).cast("float32")
    oracles = problem.oracles.with_batches(batch, "blocks")
    page = draw_page(solver, oracles, run_key(0), np.int32(0), 64)
    state = initial_state(solver, oracles, problem.start)
    arguments = solver, oracles, state, page, np.int32(0), np.int32(STEPS)
    program = advance.lower(*arguments).compile()
    return program.memory_analysis().temp_size_in_bytes, lambda: jax.block_until_ready(advance(*arguments))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=1024)
    arguments = parser.parse_args()
    sizes = arguments.layers, arguments.width, arguments.batch
    with arithmetic("float32"):
        ready = {name: prepare(arguments.batch, build(*sizes, **options)) for name, options in OPTIONS.items()}
        seconds = {name: [] for name in OPTIONS}
        for _ in range(ROUNDS):
            for name, (_, take) in ready.items():
                began = time.perf_counter()
                take()
                seconds[name].append((time.perf_counter() - began) / STEPS)
    first = statistics.median(seconds["whole"])
    print("| step | memory | time, whole = 1 |\n| --- | --- | --- |")
    for name, (size, _) in ready.items():
        print(f"| {name} | {size / 2**20:.0f} MiB | {statistics.median(seconds[name]) / first:.2f} |")


if __name__ == "__main__":
    main()
