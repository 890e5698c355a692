"""Time per step and per full-batch pass against the number of rows, on one device and on several.

    python benchmarks/sharded.py [--devices 1 2 8] [--rows 100000 1000000] [--features 22] [--batch 256]

Logistic penalty selection in float32 with ``--rows`` training and the same number of validation rows. Rows are created
in host memory and copied from there, so that no device ever holds more than its part. Without accelerators the devices
are simulated by threads of one CPU, which shows the cost of communication but no gain.
"""

import argparse
import time

import jax
import numpy as np
from markdown import head, line
from stepping import steps_of

import bilevel
from bilevel._core.compilation import arithmetic

SOLVERS = {"SOBA": bilevel.SOBA, "SRBA": bilevel.SRBA}


def build(n, features, devices):
    rng = np.random.default_rng(0)

    def level():
        rows = rng.standard_normal((n, features), dtype=np.float32)
        return rows, np.where(rows[:, 0] + rng.logistic(size=n) > 0, 1, -1)

    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        problem = bilevel.problems.penalty_selection(*level(), *level(), dtype="float32")
    return problem.sharded(devices, own_rows=True)


def best_seconds(work, repeats):
    """Return the shortest of several times, after a first call that compiles."""
    jax.block_until_ready(work())
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(work())
        times.append(time.perf_counter() - began)
    return min(times)


def step_seconds(problem, solver, steps, repeats):
    """Return the seconds of one step between two full-batch passes."""
    stepping = steps_of(problem, solver)
    page = stepping.draw(0, steps + 1)
    state = stepping.take(stepping.init(), page, 0, 1)  # the first step of SRBA contains a pass
    return best_seconds(lambda: stepping.take(state, page, 1, steps + 1), repeats) / steps


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
    sizes = f"{n:,}", f"{problem.oracles.mesh.size}", f"{megabytes_per_device(problem):,.1f}"
    return line([*sizes, *(f"{time:.1f}" for time in micros), f"{passed:.2f}"])


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
        raise SystemExit(f"`--devices {max(options.devices)}`: JAX has {len(devices)}; use at most this number.")
    print(f"JAX {jax.__version__}, {len(devices)} x {devices[0].device_kind}, batch {options.batch}\n")
    columns = ["rows per level", "devices", "MB per device", "µs per SOBA step", "µs per SRBA step", "ms per pass"]
    print(head(columns))
    for n in options.rows:
        for count in options.devices:
            print(row(build(n, options.features, devices[:count]), n, options), flush=True)


if __name__ == "__main__":
    bilevel.fuse_cpu_loops()
    main()
