"""Seconds to compile each solver on logistic selection with 22 features, everything a run needs together."""

import shapes
from markdown import number, table

import bilevel

QUICK = ("SRBA", "SABA", "SOBA")


def measure(quick):
    """The table."""
    problem = shapes.logistic_problem(5_000, 4_000)
    rows = []
    for name in QUICK if quick else bilevel.SOLVERS:
        result = bilevel.run(problem, bilevel.SOLVERS[name](0.01, 10.0), max_steps=1)
        rows.append([name, number(result.compile_seconds)])
        print(f"  {' '.join(rows[-1])} s", flush=True)
    return table(["solver", "seconds"], rows)
