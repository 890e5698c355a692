"""Peak memory of building a problem and of running SRBA and SABA on it, each in a process of its own."""

import json
import sys

import floor
import jax
import shapes
from markdown import number, table
from own_process import answer, peak_bytes, peak_with_jax

import bilevel

SOLVERS = {"SRBA": {}, "SABA": {}, "SABA, memory of rows": {"memory": "rows"}}
COLUMNS = ["problem", "solver", "rows, MB", "built, MB", "after a run, MB", "state, kB"]


def measure(quick):
    """The table; a quick one is of the first problem alone."""
    rows = []
    for problem in list(shapes.PROBLEMS)[: 1 if quick else None]:
        for solver in SOLVERS:
            if solver == "SABA, memory of rows" and problem != "cleaning":  # rows of few numbers have nothing to spare
                continue
            sizes = answer("memory.py", problem, solver)
            rows.append([problem, solver, *map(number, sizes)])
            print(f"  {' '.join(rows[-1])}", flush=True)
    words = (
        "Above a process that has imported JAX and run one operation; the NumPy arrays that a problem is built from "
        "count. A run adds the compiler's memory. The state of SABA is its tables."
    )
    return f"{words}\n\n{table(COLUMNS, rows)}"


def peaks(name, solver):
    """Megabytes of the rows and at the peaks after building and after a run, kilobytes of the solver's state."""
    before = peak_with_jax()
    problem = shapes.PROBLEMS[name]()
    built = peak_bytes() - before
    method = bilevel.SOLVERS[solver.split(",")[0]](0.001, 1.0, shapes.BATCH, **SOLVERS[solver])
    result = bilevel.run(problem, method, max_steps=500)
    state = sum(leaf.nbytes for leaf in jax.tree.leaves(result.state))
    sizes = floor.row_bytes(problem.oracles), built, peak_bytes() - before
    return [*(size / 1e6 for size in sizes), state / 1e3]


if __name__ == "__main__":
    bilevel.fuse_cpu_loops()
    print(json.dumps(peaks(*sys.argv[1:])))
