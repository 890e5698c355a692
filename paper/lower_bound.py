"""Queries of rows of F until the worst case is ε-stationary, compared with the lower bound m T / 2 (th:lower_bound).

In the class "individual" each F_j is L-smooth: T ~ 1/(mε), and the bound is flat in m. In the class "mean_squared" only
the mean square of the rows is L-smooth: T ~ 1/(√m ε), and the bound grows as √m. L, Δ and ε are the same in both.

All solvers follow the protocol of :mod:`paper.measuring`, with a grid at each m. The step of x is a power of two over
the smoothness of single rows.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from math import sqrt
from pathlib import Path
from typing import NamedTuple

from bilevel._core.extras import Reporter
from bilevel._core.types import Calls
from bilevel.problems import BilevelProblem
from bilevel.solvers import SABA, SOBA, SRBA, Solver
from paper.measuring import (
    Slope,
    best_setting,
    check_seeds,
    first_passage,
    fit_slope,
    measure,
    read_rows,
    without_grid,
    write_rows,
)
from paper.worst_case import worst_case

NORMALIZATIONS = ("individual", "mean_squared")


class Candidate(NamedTuple):
    """A solver with its grid.

    Attributes
    ----------
    make : returns the solver from ρ, ρ/γ and m, where n = m
    steps : values of ρ
    outer_steps : steps of x, in units of 1/(smoothness of each F_j)
    max_ratio : a run ends after this multiple of the lower bound
    """

    make: Callable[[float, float, int], Solver]
    steps: tuple[float, ...] = (0.3, 1.0)
    outer_steps: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
    max_ratio: float = 100.0


SOLVERS = {
    "SRBA": Candidate(lambda step, ratio, m: SRBA(step, ratio, 1, period=2 * m)),
    "SABA": Candidate(lambda step, ratio, m: SABA(step, ratio, 1)),
    # The steps of SOBA decrease like t^-1/2, so they start large, and runs are long.
    "SOBA": Candidate(lambda step, ratio, m: SOBA(step, ratio, 1), (1.0,), (2.0, 4.0, 8.0, 16.0), 5000.0),
    "full batch": Candidate(lambda step, ratio, m: SRBA(step, ratio, 1, period=1)),
}


class Queries(NamedTuple):
    """The queries of one run until ||∇h||² <= ε was seen first, infinite if it was not, and the lowest ||∇h||².

    `step` is ρ, and `outer_step` the step of x in units of 1/(smoothness of each F_j). `length` is T. Rows of the grid
    have seeds of at least `FIRST_TUNING_SEED`.
    """

    normalization: str
    solver: str
    n_outer: int
    step: float
    outer_step: float
    seed: int
    epsilon: float
    length: int
    bound: float
    queries: float
    lowest: float

    @property
    def setting(self) -> tuple[float, float]:
        return self.step, self.outer_step

    @property
    def cost(self) -> float:
        return self.queries


class Plan(NamedTuple):
    """What is measured: values of m, ε, the seeds of the measurements and of the grid, and a slice of each grid."""

    n_outer: tuple[int, ...]
    epsilon: float
    seeds: tuple[int, ...]
    tuning_seeds: tuple[int, ...]
    solvers: tuple[str, ...] = tuple(SOLVERS)
    settings: slice = slice(None)


FULL = Plan((1, 2, 4, 8, 16), 1.8e-7, (0, 1, 2), (100,))
QUICK = Plan((2, 4), 7e-7, (0, 1), (100,), ("SRBA", "full batch"), slice(1, 3))

_Place = tuple[str, int, str]  # a normalization, m and a solver


class _Run(NamedTuple):
    normalization: str
    solver: str
    n_outer: int
    step: float
    outer_step: float
    seed: int

    @property
    def key(self) -> tuple[str | float, ...]:
        return tuple(self)

    @property
    def title(self) -> str:
        return f"{self.solver}, {self.normalization}, m = {self.n_outer}, seed {self.seed}"


def measure_lower_bound(
    plan: Plan | None = None, *, quick: bool = False, path: Path | None = None, progress: Reporter | None = None
) -> list[Queries]:
    """Measure what a plan describes and return all rows.

    Parameters
    ----------
    plan : what to measure; ``FULL``, or ``QUICK`` if ``quick``, by default
    quick : use the plan that takes seconds instead of minutes
    path : a CSV file; runs in it are not taken again, and each new run is added to it
    progress : called before each run with the share of the work that is done, and a few words
    """
    plan = plan or (QUICK if quick else FULL)
    _check_plan(plan)
    places = list(product(NORMALIZATIONS, plan.n_outer, plan.solvers))
    stages = [partial(_tuning_runs, plan), partial(_measuring_runs, plan)]
    rows = read_queries(path) if path else []
    save = partial(write_rows, path, kind=Queries) if path else lambda rows: None
    return measure(places, stages, partial(_take, plan), rows, save, progress)


def read_queries(path: Path) -> list[Queries]:
    """Return the rows of a file; an empty list if there is no file."""
    return read_rows(path, Queries)


def _check_plan(plan: Plan) -> None:
    if not (plan.n_outer and plan.seeds and plan.tuning_seeds):
        raise ValueError("`plan`: `n_outer`, `seeds` and `tuning_seeds` must not be empty.")
    check_seeds(plan.seeds, plan.tuning_seeds)
    if unknown := set(plan.solvers) - set(SOLVERS):
        raise ValueError(f"`plan` names {min(unknown)!r}; it must be one of {', '.join(SOLVERS)}.")
    worst_case(max(plan.n_outer), plan.epsilon)  # raises ValueError if ε is too large for that many rows


def _tuning_runs(plan: Plan, place: _Place, rows: Sequence[Queries]) -> Iterator[_Run]:
    normalization, m, solver = place
    grid = list(product(SOLVERS[solver].steps, SOLVERS[solver].outer_steps))[plan.settings]
    for (step, outer_step), seed in product(grid, plan.tuning_seeds):
        yield _Run(normalization, solver, m, step, outer_step, seed)


def _measuring_runs(plan: Plan, place: _Place, rows: Sequence[Queries]) -> Iterator[_Run]:
    normalization, m, solver = place
    step, outer_step = best_setting(row for row in rows if row[:3] == (normalization, solver, m))
    for seed in plan.seeds:
        yield _Run(normalization, solver, m, step, outer_step, seed)


def make_problem(normalization: str, m: int, epsilon: float) -> BilevelProblem:
    """Return the worst case with n = m, L = Δ = μ = 1, in float64."""
    return worst_case(m, epsilon, normalization=normalization, dtype="float64")


def _take(plan: Plan, due: _Run) -> list[Queries]:
    problem = make_problem(due.normalization, due.n_outer, plan.epsilon)
    row_smoothness = 1.0 if due.normalization == "individual" else sqrt(due.n_outer)
    make, *_, max_ratio = SOLVERS[due.solver]
    solver = make(due.step, due.step * row_smoothness / due.outer_step, due.n_outer)
    bound, length = problem.info["query_bound"], int(problem.info["T"])
    costs, lowest = first_passage(problem, solver, [plan.epsilon], due.seed, max_ratio * bound, queries)
    return [Queries(*due, plan.epsilon, length, bound, costs[plan.epsilon], float(f"{lowest:.3g}"))]


def queries(calls: Calls) -> int:
    """Return how many rows of F were read."""
    return int(calls.outer_grad)


def measured(rows: Sequence[Queries], normalization: str, solver: str) -> list[Queries]:
    """Return the rows of a solver in a class, without those of the grid."""
    return without_grid(row for row in rows if (row.normalization, row.solver) == (normalization, solver))


def slope_in_rows(rows: Sequence[Queries], normalization: str, solver: str) -> Slope:
    """Return the exponent of m in the queries."""
    chosen = measured(rows, normalization, solver)
    return fit_slope([row.n_outer for row in chosen], [row.queries for row in chosen])


def slope_of_bound(rows: Sequence[Queries], normalization: str) -> Slope:
    """Return the exponent of m in the bound, which differs from the theory because T is rounded down."""
    bounds = {row.n_outer: row.bound for row in rows if row.normalization == normalization}
    return fit_slope(list(bounds), list(bounds.values()))
