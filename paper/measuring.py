"""When a run is ε-stationary for the first time, and rows of measurements as files."""

import csv
from collections.abc import Callable, Iterable, Sequence
from io import StringIO
from math import inf
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from bilevel import _tree as trees
from bilevel._io import replacing
from bilevel._types import Calls
from bilevel.engine.run import Run
from bilevel.problems import BilevelProblem
from bilevel.problems.exact import stationarity
from bilevel.solvers import SolverBase

_LOOKS = 20  # a run is looked at each time that its steps have grown by 1/20: what is counted is right to 5 %

Row = TypeVar("Row", bound=tuple)


class Passage(NamedTuple):
    """The cost at which ||∇h||² was first seen at each ε or below, infinite where it was not, and the lowest seen."""

    costs: dict[float, float]
    lowest: float


def first_passage(
    problem: BilevelProblem,
    solver: SolverBase,
    epsilons: Sequence[float],
    seed: int,
    budget: float,
    cost: Callable[[Calls], float] = sum,
) -> Passage:
    """Run until ||∇h||² is at most every ε, the cost reaches the budget, or the iterates diverge.

    What a run costs is a function of its oracle calls: all of them, or those of a kind.
    """
    if not epsilons or min(epsilons) <= 0:
        raise ValueError(f"`epsilons={tuple(epsilons)}`: must be numbers above 0.")
    run, costs, lowest = Run(problem, solver, seed=seed), dict.fromkeys(epsilons, inf), inf
    while not run.diverged:
        spent, lowest = float(cost(run.calls)), min(lowest, hypergrad_norm_sq(problem, run))
        costs |= {epsilon: spent for epsilon, found in costs.items() if lowest <= epsilon and found == inf}
        if lowest <= min(epsilons) or spent >= budget:
            break
        run.advance(max(1, run.step // _LOOKS))
    return Passage(costs, lowest)


def hypergrad_norm_sq(problem: BilevelProblem, run: Run) -> float:
    """Return ||∇h||² at the point of a run, by the exact solution."""
    if problem.exact_solver is None:
        raise ValueError(f"`problem={problem.name!r}`: needs exact solutions.")
    x = trees.to_numpy(run.point.outer_var, np.float64)
    with np.errstate(all="ignore"):  # on its way to divergence a run may overflow here first
        return stationarity(problem.oracles, x, problem.exact_solver(x, None).hypergrad)


def write_rows(path: Path, rows: Iterable[Any], kind: type) -> None:
    """Write named tuples as CSV; the same rows give the same bytes."""
    text = StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(kind._fields)  # type: ignore[attr-defined]
    lines.writerows([f"{value:.9g}" if isinstance(value, float) else value for value in row] for row in rows)
    with replacing(path) as file:
        file.write(text.getvalue().encode())


def read_rows(path: Path, kind: type[Row]) -> list[Row]:
    """Return the named tuples that `write_rows` wrote; none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        head, *lines = csv.reader(file)
    if tuple(head) != kind._fields:  # type: ignore[attr-defined]
        raise ValueError(f"`{path}` has the columns {', '.join(head)}; move it away to measure anew.")
    types = kind.__annotations__.values()
    return [kind(*(convert(word) for convert, word in zip(types, line, strict=True))) for line in lines]
