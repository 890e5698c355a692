"""Time per step and per pass over all rows against the number of rows, on one device and on several.

    python benchmarks/sharded.py [--devices 1 2 8] [--rows 100000 1000000] [--features 22] [--batch 256]

Logistic penalty selection in float32; as many validation as training rows, ``--rows`` of each. Rows are made in host
memory and placed from there, so that no device ever holds more than its part. Where JAX has no accelerator the
devices are simulated: threads of one CPU, which shows the cost of communication and no gain from more hardware.
"""

import argparse
import time

import jax
import numpy as np

import bilevel
from bilevel._precision import arithmetic
from bilevel.engine.loop import advance, draw_page, for_one_run, initial_state, run_key

SOLVERS = {"SOBA": bilevel.SOBA, "SRBA": bilevel.SRBA}


def build(n, features, devices):
    rng = np.random.default_rng(0)

    def level():
        rows = rng.standard_normal((n, features), dtype=np.float32)
        return rows, np.where(rows[:, 0] + rng.logistic(size=n) > 0, 1, -1)

    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        problem = bilevel.problems.logistic_selection(*level(), *level(), dtype="float32")
    return problem.sharded(devices, own_rows=True)


def best_seconds(work, repeats):
    """The shortest of several times; the first call, which compiles, is not among them."""
    jax.block_until_ready(work())
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(work())
        times.append(time.perf_counter() - began)
    return min(times)


def step_seconds(problem, solver, steps, repeats):
    """Of one step between two passes over all rows."""
    oracles = problem.oracles.with_batches(solver.batch_size, solver.sampling)
    traced = solver.configure(problem).cast(problem.dtype)
    page = draw_page(traced, oracles, run_key(0), np.int32(0), steps + 1)
    state = initial_state(traced, oracles, problem.start)
    # SRBA's first step is a pass.
    state = advance(traced, for_one_run(oracles), state, page, np.int32(0), np.int32(1))
    positions = np.int32(1), np.int32(steps + 1)
    return best_seconds(lambda: advance(traced, for_one_run(oracles), state, page, *positions), repeats) / steps


@jax.jit
def whole_pass(oracles, point):
    return oracles.direction(point)


def megabytes_per_device(problem):
    levels = problem.oracles.inner_samples, problem.oracles.outer_samples
    return sum(leaf.addressable_shards[0].data.nbytes for level in levels for leaf in jax.tree.leaves(level)) / 1e6


def row(problem, n, options):
    settings = {"step_size": 0.01, "outer_ratio": 1.0, "batch_size": options.batch}
    solvers = [SOLVERS["SOBA"](**settings), SOLVERS["SRBA"](**settings, period=options.steps + 1)]
    with arithmetic(problem.dtype):
        micros = [1e6 * step_seconds(problem, solver, options.steps, options.repeats) for solver in solvers]
        passed = 1e3 * best_seconds(lambda: whole_pass(problem.oracles, problem.start), options.repeats)
    sizes = f"{n:,} | {problem.oracles.mesh.size} | {megabytes_per_device(problem):,.1f}"
    return f"| {sizes} | {micros[0]:.1f} | {micros[1]:.1f} | {passed:.2f} |"


def parsed():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 8])
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 1_000_000, 10_000_000])
    parser.add_argument("--features", type=int, default=22)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args()


def main():
    options = parsed()
    jax.config.update("jax_num_cpu_devices", max(options.devices))
    devices = jax.devices()
    if max(options.devices) > len(devices):
        raise SystemExit(f"`--devices {max(options.devices)}`: JAX has {len(devices)}; ask for at most that many.")
    print(f"JAX {jax.__version__}, {len(devices)} x {devices[0].device_kind}, batch {options.batch}\n")
    print("| rows per level | devices | MB per device | µs per SOBA step | µs per SRBA step | ms per pass |")
    print("|---|---|---|---|---|---|")
    for n in options.rows:
        for count in options.devices:
            print(row(build(n, options.features, devices[:count]), n, options), flush=True)


if __name__ == "__main__":
    bilevel.fuse_cpu_loops()
    main()
