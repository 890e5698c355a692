"""A whole grid on one device, without a store: how long each program takes, and the best setting of each solver.

    python benchmarks/grid.py ijcnn1 --solvers SRBA SABA AmIGO StocBiO MRBO VRBO F2SA

Seconds are those of the wall, with compilation and the exact h at the end of every run.
"""

import argparse
import time
from collections import defaultdict

import jax
import numpy as np
from markdown import number, table

import bilevel
from bilevel.bench.config import build_problem, load_config
from bilevel.bench.execute import group_tasks, run_task


def main():
    arguments = parsed()
    began = time.perf_counter()
    experiment = load_config(arguments.config)
    problem = build_problem(experiment.problem, experiment.problem_arguments)
    cells = experiment.cells(problem.n_inner, problem.n_outer, arguments.seeds, arguments.solvers)
    on_gpu = jax.default_backend() != "cpu"
    programs = sorted(group_tasks(cells, on_gpu), key=length_of_series)
    found = Found()
    for done, program in enumerate(programs, start=1):
        at = time.perf_counter()
        rows = run_task(program, seeds_together=on_gpu)
        found.add(program.cells[0].solver, rows, time.perf_counter() - at)
        spent = time.perf_counter() - began
        print(f"{done}/{len(programs)} {program.title}: {len(program.cells)} runs; {spent:.0f} s in all", flush=True)
    print(found.table())


def length_of_series(program):
    """Programs with long Neumann series, which take most of the time, come last."""
    return dict(program.cells[0].parameters).get("n_neumann", 0)


def parsed():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", help="a name of `bilevel list configs`, or a file")
    parser.add_argument("--solvers", nargs="+", help="all of the config by default")
    parser.add_argument("--seeds", type=int, help="those of the config by default")
    return parser.parse_args()


class Found:
    """Runs, steps, seconds and last values of h by solver and setting."""

    def __init__(self):
        self.seconds, self.steps = defaultdict(float), defaultdict(int)
        self.values = defaultdict(lambda: defaultdict(list))

    def add(self, solver, rows, seconds):
        self.seconds[solver] += seconds
        last = {row["cell"]: row for row in rows}
        for row in last.values():
            setting = tuple(sorted((name, row[name]) for name in row if name.startswith("param_")))
            self.values[solver][setting].append(row["value"] if row["status"] == "out_of_budget" else np.inf)
            self.steps[solver] += row["step"]

    def table(self):
        lines = []
        for solver, by_setting in self.values.items():
            runs = sum(map(len, by_setting.values()))
            best = min(np.median(values) for values in by_setting.values())
            each = 1e6 * self.seconds[solver] / self.steps[solver]
            lines.append([solver, f"{runs:,}", f"{self.steps[solver]:,}", f"{self.seconds[solver]:.0f}", number(each)])
            lines[-1].append(number(float(best), 5))
        columns = ["solver", "runs", "cell-steps", "seconds", "µs per cell-step", "best h, median of the seeds"]
        return table(columns, lines)


if __name__ == "__main__":
    bilevel.fuse_cpu_loops()
    main()
