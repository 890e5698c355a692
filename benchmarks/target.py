"""Seconds of stepping until h reaches a target on IJCNN1, without compilation and evaluations.

The first step that reaches the target is found by evaluating a run, and then, since runs repeat bit for bit, by denser
evaluations between the last two. The run up to that step is timed without evaluations.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from markdown import number, table

import bilevel
from bilevel import datasets, problems
from bilevel.solvers import HostSolver

TARGETS = (0.2133, 0.2086)
BETWEEN = 32  # evaluations between two of the coarse run

# SRBA and SABA are tuned by docs/problem_tables.py, AmIGO by hand; SRBA(0.25) is a plausible first try.
SOLVERS = {
    "SRBA, tuned": bilevel.SRBA(2.0, 1.0, 64),
    "SABA, tuned": bilevel.SABA(1.0, 1.0, 64),
    "AmIGO, tuned": bilevel.AmIGO(0.5, 0.03, 64),
    "SRBA(0.25)": bilevel.SRBA(0.25),
    "Exact": bilevel.Exact(),
}


def measure(quick):
    """Return the table, or the reason for its absence."""
    if datasets.locate("ijcnn1") is None:
        return "Not measured: IJCNN1 is missing; put it into the folder BILEVEL_DATA (docs/problems.md)."
    problem = problems.ijcnn1(dtype="float32")
    limit, repeats = (0.5, 1) if quick else (15.0, 5)
    rows = []
    for name, solver in SOLVERS.items():
        coarse = bilevel.run(
            problem, solver, max_seconds=limit, eval_every=1 if isinstance(solver, HostSolver) else None
        ).history
        for target in TARGETS:
            step = first_step(problem, solver, coarse, target)
            times = [] if step is None else [seconds_of(problem, solver, step) for _ in range(repeats)]
            cells = [number(min(times)), number(np.median(times)), str(step)] if times else [f"not in {limit:g} s"]
            rows.append([name, str(target), *cells, *[None] * (3 - len(cells))])
            print(f"  {name}, h <= {target}: {cells[0]}", flush=True)
    return table(["solver", "h at most", "best, s", "median, s", "steps"], rows)


def first_step(problem, solver, coarse, target):
    """Return the first step with h <= target, or None; up to about 0.5 % of the steps."""
    hit = first_hit(coarse, target)
    if hit is None:
        return None
    before, after = (int(coarse["step"][i]) for i in (max(0, hit - 1), hit))
    if after - before <= 1:
        return after
    dense = between(problem, solver, before, after)
    return int(dense["step"][first_hit(dense, target)])


def first_hit(history, target):
    hits = np.flatnonzero(history["value"] <= target)
    return int(hits[0]) if hits.size else None


def between(problem, solver, before, after):
    """Return the history of the run up to ``after``, with dense evaluations from ``before`` on."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run.npz"
        bilevel.run(problem, solver, max_steps=before, eval_every=max(1, before)).save(path)
        every = max(1, (after - before) // BETWEEN)
        return bilevel.resume(path, problem, max_steps=after, eval_every=every).history


def seconds_of(problem, solver, step):
    """Return the seconds of the first steps, without evaluations in between."""
    return float(bilevel.run(problem, solver, max_steps=step, eval_every=max(1, step)).history["seconds"][-1])
