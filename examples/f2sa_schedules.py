"""F²SA with the corrected penalty schedule beside the one printed in the SRBA paper, over the paper's grid.

    python examples/f2sa_schedules.py [--steps 2000]

"corrected" lets λ grow like t^1/7 and shares the inner batch of the outer move. "printed" adds δ_0 t^-1/7, so that λ
grows like t^6/7, with the y step and the two batches of the published method. Each row looks at all step sizes of the
grid. Problems: the paper's quadratics, and penalty selection on data of the shape of IJCNN1.
"""

import argparse
import itertools

import numpy as np

import bilevel

PENALTIES = ((1.0, 0.01), (1.0, 0.1), (1.0, 1.0), (10.0, 0.1), (100.0, 0.1))
SCHEDULES = {"corrected": {"shared_batch": True}, "printed": {"shared_batch": False}}


def logistic_problem():
    rng = np.random.default_rng(0)
    truth = rng.standard_normal(22) * np.geomspace(2, 0.02, 22)

    def level(n):
        rows = rng.uniform(-1, 1, (n, 22))
        return rows, np.where(rows @ truth + rng.logistic(size=n) > 0, 1, -1)

    return bilevel.problems.logistic_selection(*level(49_990), *level(91_701), dtype="float64")


def compare(problem, grid, steps):
    start = None
    for (lambda_0, delta_0), schedule in itertools.product(PENALTIES, SCHEDULES):
        finals, diverged, largest = [], 0, 0.0
        for step_size, ratio in grid:
            solver = bilevel.F2SA(
                step_size, ratio, lambda_0=lambda_0, delta_0=delta_0, schedule=schedule, **SCHEDULES[schedule]
            )
            result = bilevel.run(problem, solver, max_steps=steps, eval_every=steps)
            start = result.history["hypergrad_norm_sq"][0]
            final = result.history["hypergrad_norm_sq"][-1]
            finals.append(final if np.isfinite(final) else np.inf)
            diverged += result.status == "diverged" or not final < 1e3 * start
            largest = max(largest, float(np.max(np.abs(result.point.outer_var))))
        print(
            f"| {problem.name} | {lambda_0:g} | {delta_0:g} | {schedule} | {start:.2g} | {min(finals):.2g} | "
            f"{np.median(finals):.2g} | {diverged} of {len(finals)} | {largest:.2g} |",
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    steps = parser.parse_args().steps
    print("| problem | λ_0 | δ_0 | schedule | start | best | median | diverged | largest abs x |")
    print("|---|---|---|---|---|---|---|---|---|")
    quadratic_grid = list(itertools.product((0.01, 0.1), (0.1, 1, 10, 100)))
    compare(bilevel.problems.quadratic(dtype="float64"), quadratic_grid, steps)
    logistic_grid = list(itertools.product((2.0**-5, 2.0**-4, 2.0**-3, 2.0**-2), 10.0 ** np.arange(-2, 0.1, 0.5)))
    compare(logistic_problem(), logistic_grid, steps)


if __name__ == "__main__":
    main()
