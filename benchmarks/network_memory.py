"""Memory and time of a step of SOBA on a deep network: complete batches, parts, rematerialization, bfloat16.

    python benchmarks/network_memory.py [--layers 16] [--width 256] [--batch 1024]

Memory is what the compiled step needs in addition to its arguments, according to XLA. Times are medians of five
interleaved rounds.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from markdown import table
from stepping import steps_of

import bilevel
from bilevel._core.compilation import arithmetic
from bilevel.engine.loop import advance

STEPS, ROUNDS = 3, 5
OPTIONS = {
    "complete batches": {},
    "`accumulate=4`": {"accumulate": 4},
    "`accumulate=16`": {"accumulate": 16},
    "`jax.checkpoint` of each layer": {"remat": True},
    "`jax.checkpoint` and `accumulate=4`": {"remat": True, "accumulate": 4},
    '`compute_dtype="bfloat16"`': {"compute_dtype": "bfloat16"},
}


def build(layers, width, batch, remat=False, **options):
    """Return a deep network with a weight decay to learn."""
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
    return bilevel.BilevelProblem.from_losses(
        *(inner_loss, outer_loss, rows, rows),
        **start,
        differentiation=bilevel.Differentiation(**options),
        dtype="float32",
    )


def prepare(batch, problem):
    """Return the memory of the compiled steps, and a function that takes some."""
    steps = steps_of(problem, bilevel.SOBA(0.01, 1.0, batch))
    page, state = steps.draw(0, 64), steps.init()
    program, leaves = advance.find(steps.solver, steps.oracles, state, page, np.int32(0), np.int32(STEPS))
    program = program.lower(leaves).compile()
    memory = program.memory_analysis().temp_size_in_bytes
    return memory, lambda: jax.block_until_ready(steps.take(state, page, 0, STEPS))


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
    first = statistics.median(seconds["complete batches"])
    times = {name: f"{statistics.median(found) / first:.2f}" for name, found in seconds.items()}
    rows = [[name, f"{size / 2**20:.0f} MiB", times[name]] for name, (size, _) in ready.items()]
    print(table(["step", "memory", "time, complete batches = 1"], rows))


if __name__ == "__main__":
    main()
