"""Many cells in one program against the same cells one after another: cell-steps per second, as a ratio.

    python benchmarks/sweep.py [--settings 25] [--seeds 10] [--epochs 150] [--seeds-together]

SRBA on data of the shape of IJCNN1, batch 64, float32. Both ways evaluate the cheap metrics at the same steps; seconds
are those of the wall, with draws, all-rows passes and evaluations, without compilation. The two ways take turns, and
the results are compared.
"""

import argparse
import time
from functools import partial
from itertools import product

import numpy as np

import bilevel
from bilevel.bench.sweep import sweep

N_TRAIN, N_VAL, FEATURES, BATCH = 49_990, 91_701, 22, 64


def data(seed=0):
    rng = np.random.default_rng(seed)
    truth = rng.standard_normal(FEATURES)

    def level(n):
        rows = rng.uniform(-1, 1, (n, FEATURES))
        return rows, np.where(rows @ truth + rng.logistic(size=n) > 0, 1, -1)

    return *level(N_TRAIN), *level(N_VAL)


def grid(n, problem):
    """n settings of one period, SRBA's default, spread over steps and ratios that do not diverge."""
    side = round(n**0.5)
    period = (problem.n_inner + problem.n_outer) // (2 * BATCH)
    pairs = product(np.geomspace(0.03, 0.5, side), np.geomspace(1, 10, -(-n // side)))
    return [bilevel.SRBA(float(step), float(ratio), BATCH, period=period) for step, ratio in pairs][:n]


def alone(problem, solvers, seeds, calls):
    """The final values, the seconds, and the steps."""
    values, seconds, steps = [], 0.0, 0
    for seed, solver in product(seeds, solvers):
        began = time.perf_counter()
        result = bilevel.run(problem, solver, seed=seed, max_calls=calls)
        seconds += time.perf_counter() - began - result.compile_seconds
        values.append(result.history["outer_value"][-1])
        steps += int(result.history["step"][-1])
    return np.array(values), seconds, steps


def together(problem, solvers, seeds, calls, seeds_together=False):
    """The same."""
    began = time.perf_counter()
    results = sweep(problem, solvers, seeds, calls, together=seeds_together)
    seconds = time.perf_counter() - began
    rows = [cell.rows[-1] for of_seed in results for cell in of_seed]
    return np.array([row["outer_value"] for row in rows]), seconds, sum(row["step"] for row in rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", type=int, default=25)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--epochs", type=float, default=150.0)
    parser.add_argument("--seeds-together", action="store_true", help="vmap over seeds as well, as on a GPU")
    arguments = parser.parse_args()
    problem = bilevel.problems.logistic_selection(*data())
    # References would dwarf runs this short, and both ways would compute the same ones.
    problem = bilevel.BilevelProblem(problem.oracles, problem.start)
    solvers = grid(arguments.settings, problem)
    calls = int(arguments.epochs * (problem.n_inner + problem.n_outer))
    parts = np.array_split(np.arange(arguments.seeds), 2)
    seeds = [[int(seed) for seed in part] for part in parts]
    ways = {"alone": alone, "together": partial(together, seeds_together=arguments.seeds_together)}
    ways["together"](problem, solvers, seeds[0], calls // 10)  # compiles
    alone(problem, solvers[:1], [0], calls // 10)
    found = {name: [] for name in ways}
    for part in seeds:
        for name, way in ways.items():
            found[name].append(way(problem, solvers, part, calls))
    rates = {}
    for name, results in found.items():
        seconds, steps = sum(r[1] for r in results), sum(r[2] for r in results)
        rates[name] = steps / seconds
        print(f"{name:9} {steps:,} cell-steps in {seconds:.1f} s: {1e6 * seconds / steps:.2f} µs each")
    print(f"ratio: {rates['together'] / rates['alone']:.2f}")
    values = [np.concatenate([r[0] for r in results]) for results in found.values()]
    print(f"largest relative difference of F at the end: {np.max(np.abs(values[0] / values[1] - 1)):.1e}")


if __name__ == "__main__":
    main()
