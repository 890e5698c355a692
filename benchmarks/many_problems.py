"""Memory of a process that solves many problems one after another.

    python benchmarks/many_problems.py [--problems 2000] [--solver SOBA] [--kind own]

Each problem has its own losses, defined in a function (`own`), or its own shape (`ready-made`), so each run compiles
programs. Sizes stay in the same range, since larger problems take more memory. After every tenth of the problems, the
number of memory maps (Linux allows 65 530 per process) and the resident memory are printed. A jitted function of the
caller is called after every problem; the last line gives the number of its traces.
"""

import argparse
import os
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from markdown import head, line

import bilevel

KINDS = ("own", "ready-made")


def own_problem(number):
    """Return a problem with new losses and an unusual number of rows."""
    X = np.random.default_rng(number).standard_normal((40 + number % 50, 3))

    def outer(z, x, row):
        return (row @ z - 1.0) ** 2

    def inner(z, x, row):
        return outer(z, x, row) + jnp.exp(x[0]) * (z @ z)

    start = np.zeros(3), np.zeros(1)
    return bilevel.BilevelProblem.from_losses(inner, outer, X, X, *start, strongly_convex=True, dtype="float32")


def ready_made_problem(number):
    # 3150 different shapes
    return bilevel.problems.quadratic(64 + number % 50, 40, 3 + number % 9, 2 + number % 7, dtype="float32")


def held():
    """Return the number of memory maps and the resident megabytes of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Path("/proc/self/maps").read_bytes().count(b"\n"), pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def solve(n_problems, solver, kind, max_steps=50):
    """Yield the memory held after each problem."""
    build = own_problem if kind == "own" else ready_made_problem
    for number in range(n_problems):
        bilevel.run(build(number), solver, max_steps=max_steps, eval_every=max_steps)
        yield held()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=2000)
    parser.add_argument("--solver", default="SOBA", help="a name; AutoSRBA for the untuned solver")
    parser.add_argument("--kind", choices=KINDS, default="own")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    parameters = {} if options.solver == "AutoSRBA" else {"step_size": 0.05, "outer_ratio": 1.0, "batch_size": 8}
    solver = bilevel.SOLVERS[options.solver](**parameters)
    traces, began = [], time.perf_counter()
    users = jax.jit(lambda x: traces.append(1) or 2 * x)
    print(head(["problems", "memory maps", "MB", "seconds"]))
    for number, (maps, megabytes) in enumerate(solve(options.problems, solver, options.kind), start=1):
        users(1.0)
        if number % max(1, options.problems // 10) == 0:
            print(line([f"{number}", f"{maps}", f"{megabytes:.0f}", f"{time.perf_counter() - began:.0f}"]), flush=True)
    print(f"The caller's function was traced {len(traces)} time(s).")


if __name__ == "__main__":
    main()
