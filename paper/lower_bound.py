"""Queries of rows of F until the worst case is ε-stationary, beside the lower bound m T / 2 (th:lower_bound).

In the class "individual" each F_j is L-smooth: T ~ 1/(mε), and the bound is flat in m. In the class "mean_squared" only
the mean square of the rows is L-smooth: T ~ 1/(√m ε), and the bound grows as √m. Both have the same L, Δ and ε here.

The rule, the same for all: at each m a solver is run with every setting of a grid, and the one that needs the fewest
queries is measured with other seeds. The step of x is a power of two over the smoothness of single rows.
"""

from collections.abc import Callable, Sequence
from itertools import product
from math import sqrt
from pathlib import Path
from typing import NamedTuple

from bilevel._progress import Reporter
from bilevel._types import Calls
from bilevel.problems import BilevelProblem, worst_case
from bilevel.solvers import SABA, SOBA, SRBA, Solver
from paper.complexity import FIRST_TUNING_SEED, Slope, fit_slope, median
from paper.measuring import first_passage, read_rows, write_rows

NORMALIZATIONS = ("individual", "mean_squared")


class Contender(NamedTuple):
    """A solver from ρ, ρ/γ and m, with n = m; its grid of ρ and of the step of x, and when a run ends."""

    make: Callable[[float, float, int], Solver]
    steps: tuple[float, ...] = (0.3, 1.0)
    outer_steps: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
    max_ratio: float = 100.0  # of the queries to the bound


SOLVERS = {
    "SRBA": Contender(lambda step, ratio, m: SRBA(step, ratio, 1, period=2 * m)),
    "SABA": Contender(lambda step, ratio, m: SABA(step, ratio, 1)),
    # Its steps decrease like t^-1/2, so that they begin large and runs are long.
    "SOBA": Contender(lambda step, ratio, m: SOBA(step, ratio, 1), (1.0,), (2.0, 4.0, 8.0, 16.0), 5000.0),
    "full batch": Contender(lambda step, ratio, m: SRBA(step, ratio, 1, period=1)),
}


class Queries(NamedTuple):
    """Queries of one run until ||∇h||² <= ε for the first time, infinite where it never came there, and its lowest.

    The step of z and v, that of x in units of 1/(smoothness of each F_j), and the bound. Rows with a seed of at least
    `FIRST_TUNING_SEED` are those of the grid.
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


class Plan(NamedTuple):
    """What is measured."""

    n_outer: tuple[int, ...]
    epsilon: float
    seeds: tuple[int, ...]
    tuning_seeds: tuple[int, ...]
    solvers: tuple[str, ...] = tuple(SOLVERS)
    settings: slice = slice(None)  # of each grid


FULL = Plan((1, 2, 4, 8, 16), 1.8e-7, (0, 1, 2), (100,))
QUICK = Plan((2, 4), 7e-7, (0, 1), (100,), ("SRBA", "full batch"), slice(1, 3))


class _Run(NamedTuple):
    normalization: str
    solver: str
    n_outer: int
    step: float
    outer_step: float
    seed: int


def measure_lower_bound(
    plan: Plan | None = None, *, quick: bool = False, path: Path | None = None, progress: Reporter | None = None
) -> list[Queries]:
    """Measure what a plan says and return all rows; parameters as for `bilevel.theory.measure_complexity`."""
    plan = plan or (QUICK if quick else FULL)
    _check_plan(plan)
    rows = read_queries(path) if path else []
    places = list(product(NORMALIZATIONS, plan.n_outer, plan.solvers))
    for done, (normalization, m, solver) in enumerate(places):
        for stage in (_tuning_runs, _measuring_runs):
            for due in stage(plan, _Run(normalization, solver, m, 0.0, 0.0, 0), rows):
                if progress:
                    progress(done / len(places), f"{solver}, {normalization}, m = {m}, seed {due.seed}")
                rows.append(_take(due, plan))
                if path:
                    write_rows(path, rows, Queries)
    return rows


def read_queries(path: Path) -> list[Queries]:
    """Return the rows of a file; none where there is no file."""
    return read_rows(path, Queries)


def _check_plan(plan: Plan) -> None:
    if not (plan.n_outer and plan.seeds and plan.tuning_seeds):
        raise ValueError("`plan`: `n_outer`, `seeds` and `tuning_seeds` must not be empty.")
    if unknown := set(plan.solvers) - set(SOLVERS):
        raise ValueError(f"`plan` names {min(unknown)!r}; it must be one of {', '.join(SOLVERS)}.")
    worst_case(max(plan.n_outer), plan.epsilon)  # refuses an ε that is too large for so many rows


def _tuning_runs(plan: Plan, place: _Run, rows: Sequence[Queries]) -> list[_Run]:
    grid = list(product(SOLVERS[place.solver].steps, SOLVERS[place.solver].outer_steps))[plan.settings]
    each = product(grid, plan.tuning_seeds)
    return _not_taken([place._replace(step=s, outer_step=x, seed=seed) for (s, x), seed in each], rows)


def _measuring_runs(plan: Plan, place: _Run, rows: Sequence[Queries]) -> list[_Run]:
    grid: dict[tuple[float, float], list[Queries]] = {}
    for row in rows:
        if row[:3] == place[:3] and row.seed >= FIRST_TUNING_SEED:
            grid.setdefault((row.step, row.outer_step), []).append(row)

    def cost(setting: tuple[float, float]) -> tuple[float, float]:
        return median([row.queries for row in grid[setting]]), median([row.lowest for row in grid[setting]])

    step, outer_step = min(grid, key=cost)
    return _not_taken([place._replace(step=step, outer_step=outer_step, seed=seed) for seed in plan.seeds], rows)


def _not_taken(due: Sequence[_Run], rows: Sequence[Queries]) -> list[_Run]:
    taken = {row[:6] for row in rows}
    return [run for run in due if tuple(run) not in taken]


def make_problem(normalization: str, m: int, epsilon: float) -> BilevelProblem:
    """Return the worst case with n = m, L = Δ = μ = 1, in float64."""
    return worst_case(m, epsilon, normalization=normalization, dtype="float64")


def _take(due: _Run, plan: Plan) -> Queries:
    problem = make_problem(due.normalization, due.n_outer, plan.epsilon)
    each = 1.0 if due.normalization == "individual" else sqrt(due.n_outer)
    make, *_, max_ratio = SOLVERS[due.solver]
    solver = make(due.step, due.step * each / due.outer_step, due.n_outer)
    bound, length = problem.info["query_bound"], int(problem.info["T"])
    costs, lowest = first_passage(problem, solver, [plan.epsilon], due.seed, max_ratio * bound, queries)
    return Queries(*due, plan.epsilon, length, bound, costs[plan.epsilon], float(f"{lowest:.3g}"))


def queries(calls: Calls) -> int:
    """Return how many rows of F were read."""
    return int(calls.outer_grad)


def measured(rows: Sequence[Queries], normalization: str, solver: str) -> list[Queries]:
    """Return the rows of a solver in a class without those of the grid."""
    mine = [row for row in rows if (row.normalization, row.solver) == (normalization, solver)]
    return [row for row in mine if row.seed < FIRST_TUNING_SEED]


def slope_in_rows(rows: Sequence[Queries], normalization: str, solver: str) -> Slope:
    """Return the exponent of m in the queries."""
    chosen = measured(rows, normalization, solver)
    return fit_slope([row.n_outer for row in chosen], [row.queries for row in chosen])


def slope_of_bound(rows: Sequence[Queries], normalization: str) -> Slope:
    """Return the exponent of m in the bound, of which T is rounded down."""
    bounds = {row.n_outer: row.bound for row in rows if row.normalization == normalization}
    return fit_slope(list(bounds), list(bounds.values()))
