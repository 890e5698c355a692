"""Runs in processes of their own, whose memory or results are printed as JSON.

python -m tests.faults.long_runs steps N_STEPS N_EVALUATIONS    # megabytes at each evaluation of one run
python -m tests.faults.long_runs digests MANY                   # digests of the results of several solvers
"""

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np

import bilevel
from bilevel.engine.driver import sweep
from bilevel.engine.steps import prepare

ROOT = Path(__file__).parents[2]


def answer(*arguments, cpus=None):
    """Run this module with arguments, on some processors only if ``cpus`` is given, and return what it prints."""
    prefix = [] if cpus is None else ["taskset", "-c", cpus]
    command = [*prefix, sys.executable, "-m", "tests.faults.long_runs", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def resident_megabytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def steps(n_steps, n_evaluations):
    """Return the megabytes of this process at each evaluation of one run."""
    found = []
    problem = bilevel.problems.quadratic(512, 256, 8, 4, common_linear=0.5)
    watched = dataclasses.replace(problem, metrics={"held": lambda point: found.append(resident_megabytes()) or 0.0})
    solver = bilevel.SRBA(step_size=0.05, outer_ratio=2.0, batch_size=16)
    result = bilevel.run(watched, solver, max_steps=n_steps, eval_every=n_steps // n_evaluations)
    assert result.history["step"][-1] == n_steps and len(found) >= n_evaluations
    return found


def digests(many):
    """Return a digest of the result of each solver, and of a sweep."""
    rng, n = np.random.default_rng(0), 20_000 if many else 2000
    X = rng.standard_normal((n, 20))
    y = np.sign(X @ rng.standard_normal(20) + rng.logistic(size=n))
    problem = bilevel.problems.penalty_selection(X[::2], y[::2], X[1::2], y[1::2], dtype="float32")
    solvers = {"SRBA": bilevel.SRBA(0.05, 5.0), "AutoSRBA": bilevel.AutoSRBA(), "Exact": bilevel.Exact()}
    if many:
        solvers |= {"SABA": bilevel.SABA(0.05, 5.0), "full batch": bilevel.SOBA(0.05, 5.0, sampling="full")}
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, solver in solvers.items():
            result = bilevel.run(problem, solver, max_steps=3 if name == "Exact" else 200, eval_every=100)
            found[name] = digest([*result.point, result.history["value"]])
        settings = [prepare(problem, bilevel.SRBA(step, 5.0)).solver for step in (0.02, 0.05)]
        cells = sweep(problem, settings, [0, 1], max_calls=20 * n)
    found["sweep"] = digest([[row["value"] for row in cell.rows[-1:]] for of_seed in cells for cell in of_seed])
    return found


def digest(arrays):
    found = hashlib.sha256()
    for array in arrays:
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    print(json.dumps({"steps": steps, "digests": digests}[sys.argv[1]](*map(int, sys.argv[2:]))))
