"""Peak memory of building a problem and of running SRBA and SABA on it, each in a process of its own; compilation."""

import json
import sys

import floor
import jax
import shapes
from markdown import number, table
from processes import answer, peak_bytes, peak_with_jax

import bilevel

SOLVERS = {"SRBA": {}, "SABA": {}, "SABA, memory of rows": {"memory": "rows"}}
COLUMNS = ["problem", "solver", "rows, MB", "built, MB", "after a run, MB", "state, kB"]


def measure(quick):
    """Return the table; a quick one contains only the first problem."""
    rows = []
    for problem in list(shapes.PROBLEMS)[: 1 if quick else None]:
        for solver in SOLVERS:
            if solver == "SABA, memory of rows" and problem != "cleaning":  # no savings for short rows
                continue
            sizes = answer("memory.py", problem, solver)
            rows.append([problem, solver, *map(number, sizes)])
            print(f"  {' '.join(rows[-1])}", flush=True)
    words = (
        "Memory beyond that of a process that has imported JAX and run one operation, including the arrays of the "
        "problem. A run adds the memory of the compiler. The state of SABA contains its tables."
    )
    return f"{words}\n\n{table(COLUMNS, rows)}"


def peaks(name, solver):
    """Return megabytes of the rows and at the peaks after building and after a run, and kilobytes of the state."""
    before = peak_with_jax()
    problem = shapes.PROBLEMS[name]()
    built = peak_bytes() - before
    method = bilevel.SOLVERS[solver.split(",")[0]](0.001, 1.0, shapes.BATCH, **SOLVERS[solver])
    result = bilevel.run(problem, method, max_steps=500)
    state = sum(leaf.nbytes for leaf in jax.tree.leaves(result.state))
    sizes = floor.row_bytes(problem.oracles), built, peak_bytes() - before
    return [*(size / 1e6 for size in sizes), state / 1e3]


def measure_compilation(quick):
    """Return the seconds of compilation of each solver on logistic selection with 22 features."""
    problem = shapes.logistic_problem(5_000, 4_000)
    rows = []
    for name in ("SRBA", "SABA", "SOBA") if quick else bilevel.SOLVERS:
        result = bilevel.run(problem, bilevel.SOLVERS[name](step_size=0.01, outer_ratio=10.0), max_steps=1)
        rows.append([name, number(result.compile_seconds)])
        print(f"  {' '.join(rows[-1])} s", flush=True)
    return table(["solver", "seconds"], rows)


if __name__ == "__main__":
    bilevel.fuse_cpu_loops()
    print(json.dumps(peaks(*sys.argv[1:])))
