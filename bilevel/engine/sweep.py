"""Many settings of one solver in one program: rows are drawn once per seed, and all settings step together."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from bilevel._precision import arithmetic
from bilevel.engine import steps
from bilevel.engine.driver import Budget, Driver
from bilevel.engine.loop import SEEDS_AND_SETTINGS, SETTINGS, draw_page, run_key
from bilevel.engine.result import Status
from bilevel.problems import BilevelProblem
from bilevel.solvers.base import Solver


class CellResult(NamedTuple):
    """How one setting did under one seed: a row per evaluation, and how it ended."""

    rows: list[dict[str, Any]]
    status: Status
    memory_bytes: int


def sweep(
    problem: BilevelProblem,
    solvers: Sequence[Solver],
    seeds: Sequence[int],
    max_calls: int,
    *,
    together: bool = False,
    exact: bool = True,
) -> list[list[CellResult]]:
    """Run every setting with every seed until its calls are used up; results by seed, then by setting.

    The solvers are of one class, resolved, and differ in traced numbers alone. Exact metrics are in the last row alone,
    or in none where ``exact`` is false. No row has seconds: those of a program of many runs belong to none. To step all
    seeds ``together`` pays on a GPU; all but the last row are then at the steps where the first seed is evaluated.
    """
    prepared = steps.prepare(problem, solvers[0])
    for solver in solvers[1:]:
        solver.check_start(prepared.start)
    results = []
    with arithmetic(prepared.dtype):
        if together and solvers[0].restarts:  # full-batch passes at the same steps for all seeds, save by a coin
            first = solvers[0].cast(prepared.dtype), prepared.oracles
            drawn = [draw_page(*first, run_key(seed), np.int32(0), steps.PAGE_LENGTH).refreshes for seed in seeds]
            together = all(np.array_equal(refreshes, drawn[0]) for refreshes in drawn)
        groups, programs = ([seeds], SEEDS_AND_SETTINGS) if together else ([[seed] for seed in seeds], SETTINGS)
        for group in groups:
            driver = Driver(problem, steps.CompiledSteps(prepared, group, solvers, programs), exact=False)
            driver.drive(Budget(max_calls=max_calls))
            memory = sum(leaf.nbytes // driver.running.size for leaf in jax.tree.leaves(driver.steps.position.state))
            for i in range(len(group)):
                rows = [driver.add_exact(i, j) if exact else driver.rows[i][j] for j in range(len(solvers))]
                results.append([CellResult(own, driver.status(i, j), memory) for j, own in enumerate(rows)])
    return results
