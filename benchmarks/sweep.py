"""Many cells in one program compared with the same cells one after another: the ratio of cell-steps per second.

SRBA on data of the shape of IJCNN1, batch 64, float32. Both ways evaluate the cheap metrics at the same steps. Wall
times include draws, full-batch passes and evaluations, but not compilation. The two ways take turns, and their results
are compared.
"""

import time
from itertools import product

import jax
import numpy as np
import shapes
from markdown import number, table

import bilevel
from bilevel.engine.driver import sweep

SETTINGS, SEEDS, EPOCHS = 25, 4, 60
QUICK = 4, 2, 10


def measure(quick):
    """Return the table."""
    n_settings, n_seeds, epochs = QUICK if quick else (SETTINGS, SEEDS, EPOCHS)
    problem = shapes.logistic_problem()
    epoch = problem.n_inner + problem.n_outer
    solvers, calls = grid(n_settings, problem), epochs * epoch
    halves = [[int(seed) for seed in half] for half in np.array_split(np.arange(n_seeds), 2)]
    ways = {"one by one": alone, "together": together}
    for way in ways.values():
        way(problem, solvers, halves[0][:1], 5 * epoch)  # compiles: a full-batch pass and some steps
    found = {name: [] for name in ways}
    for half, (name, way) in product(halves, ways.items()):
        found[name].append(way(problem, solvers, half, calls))
        print(f"  {name}, seeds {half}: {found[name][-1][1]:.1f} s", flush=True)
    return described(found, f"{n_settings} settings × {n_seeds} seeds, {epochs} epochs each")


def grid(n, problem):
    """Return n settings with the default period, spread over steps and ratios that do not diverge."""
    side = round(n**0.5)
    period = (problem.n_inner + problem.n_outer) // (2 * shapes.BATCH)
    pairs = product(np.geomspace(0.03, 0.5, side), np.geomspace(1, 10, -(-n // side)))
    return [bilevel.SRBA(float(step), float(ratio), shapes.BATCH, period=period) for step, ratio in pairs][:n]


def alone(problem, solvers, seeds, calls):
    """Return the final values, the seconds and the steps of separate runs."""
    values, seconds, steps = [], 0.0, 0
    for seed, solver in product(seeds, solvers):
        began = time.perf_counter()
        result = bilevel.run(problem, solver, seed=seed, max_calls=calls)
        seconds += time.perf_counter() - began - result.compile_seconds
        values.append(result.history["outer_value"][-1])
        steps += int(result.history["step"][-1])
    return np.array(values), seconds, steps


def together(problem, solvers, seeds, calls):
    """Return the same of a sweep; on accelerators the seeds are stepped together too."""
    began = time.perf_counter()
    results = sweep(problem, solvers, seeds, calls, together=jax.default_backend() != "cpu")
    seconds = time.perf_counter() - began
    rows = [cell.rows[-1] for of_seed in results for cell in of_seed]
    return np.array([row["outer_value"] for row in rows]), seconds, sum(row["step"] for row in rows)


def described(found, title):
    """Return the table with the ratio, and the difference of the results."""
    rows, micros = [], []
    for name, results in found.items():
        seconds, steps = sum(r[1] for r in results), sum(r[2] for r in results)
        micros.append(1e6 * seconds / steps)
        rows.append([name, f"{steps:,}", number(seconds), number(micros[-1]), number(micros[0] / micros[-1])])
    values = [np.concatenate([r[0] for r in results]) for results in found.values()]
    lines = table(["way", "cell-steps", "seconds", "µs each", "ratio"], rows)
    return f"{title}.\n\n{lines}\n\nLargest relative difference of F at the end: {_gap(*values):.1e}."


def _gap(a, b):
    return np.max(np.abs(a / b - 1))
