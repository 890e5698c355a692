"""Time and memory against the number of rows and of features: logistic selection, half of the rows on each level.

An epoch is n + m calls of SRBA with its default period, full-batch passes included. Each point is measured in a process
of its own. The slopes on a log-log scale are that of a line fitted to all points and the steepest between neighbors.
"""

import json
import sys
import time

import jax
import numpy as np
import shapes
from markdown import number, table
from processes import answer, peak_bytes, peak_with_jax

import bilevel
from bilevel._core.compilation import arithmetic

FEATURES, ROWS = 22, 10_000  # fixed while the other one varies
OVER_ROWS = (10_000, 30_000, 100_000, 300_000, 1_000_000, 3_000_000, 10_000_000)
OVER_FEATURES = (10, 30, 100, 300, 1_000, 3_000, 10_000)
MEASURED = ["s per epoch", "s per full-batch pass", "peak MB"]
SECONDS = 0.3  # shortest measurement of a point


def measure(quick):
    """Return both tables."""
    some = slice(0, 3, 2) if quick else slice(None)
    over_rows = scaled("rows", [(n, FEATURES) for n in OVER_ROWS[some]], 0)
    over_features = scaled("features", [(ROWS, p) for p in OVER_FEATURES[some]], 1)
    return f"{FEATURES} features:\n\n{over_rows}\n\n{ROWS} rows:\n\n{over_features}"


def scaled(what, points, axis):
    """Return the table against one of the two sizes."""
    found = []
    for n, p in points:
        found.append(answer("scaling.py", n, p))
        print(f"  {n} rows × {p} features: {', '.join(map(number, found[-1]))}", flush=True)
    sizes = [point[axis] for point in points]
    rows = [[f"{size:,}", *map(number, line)] for size, line in zip(sizes, found, strict=True)]
    fitted, steepest = slopes(sizes, found)
    rows += [["slope, fitted", *map(number, fitted)], ["slope, steepest", *map(number, steepest)]]
    return table([what, *MEASURED], rows)


def slopes(sizes, lines):
    """Return the slope of a fitted line and the largest slope between neighbors, for each measured column."""
    x, y = np.log(sizes), np.log(lines)
    return np.polyfit(x, y, 1)[0], np.max(np.diff(y, axis=0) / np.diff(x)[:, None], axis=0)


def point(n, p):
    """Return seconds per epoch, seconds per full-batch pass, and peak megabytes, including building."""
    before = peak_with_jax()
    data = shapes.signed_rows(n // 2, n - n // 2, p)
    problem = bilevel.problems.penalty_selection(*data, **shapes.logistic_start(p), dtype="float32")
    del data
    problem = shapes.without_exact_solver(problem)
    return seconds_per_epoch(problem), seconds_per_pass(problem), (peak_bytes() - before) / 1e6


def seconds_per_epoch(problem):
    """Return the best of three runs of complete periods."""
    period = max(1, (problem.n_inner + problem.n_outer) // (2 * shapes.BATCH))
    solver = bilevel.SRBA(0.01, 1.0, shapes.BATCH, period=period)

    def measured(steps):
        history = bilevel.run(problem, solver, max_steps=steps, eval_every=steps).history
        return history["seconds"][-1], history["epochs"][-1]

    steps = period
    while measured(steps)[0] < SECONDS:
        steps *= 2
    return min(seconds / epochs for seconds, epochs in (measured(steps) for _ in range(3)))


def seconds_per_pass(problem):
    """Return the time of the fastest of some passes."""
    with arithmetic(problem.dtype):
        oracles = problem.oracles.with_batches(shapes.BATCH, "blocks")
        direction = jax.jit(lambda oracles, point: oracles.direction(point))
        jax.block_until_ready(direction(oracles, problem.start))
        times = []
        while len(times) < 3 or (sum(times) < SECONDS and len(times) < 100):
            began = time.perf_counter()
            jax.block_until_ready(direction(oracles, problem.start))
            times.append(time.perf_counter() - began)
    return min(times)


if __name__ == "__main__":
    bilevel.fuse_cpu_loops()
    print(json.dumps(point(*map(int, sys.argv[1:]))))
