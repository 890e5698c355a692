"""How methods are compared: by the cost until a run is stationary, with settings that are selected by other seeds.

At each place, such as a problem and a method, there are two stages. In the first each setting of a grid is run with
tuning seeds. In the second the setting with the lowest median cost is run with the other seeds. Runs whose rows are
already in the file are not run again.
"""

import csv
from collections.abc import Callable, Iterable, Sequence
from io import StringIO
from math import inf
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from scipy.stats import linregress, t

from bilevel._core import trees
from bilevel._core.extras import Reporter
from bilevel._core.files import replacing
from bilevel._core.types import Calls
from bilevel.engine.run import Run
from bilevel.problems import BilevelProblem
from bilevel.problems.exact import stationarity
from bilevel.solvers import SolverBase

FIRST_TUNING_SEED = 100
_GROWTH = 20  # between two looks at a run its steps grow by a twentieth, so costs are exact to 5 %


class Row(Protocol):
    """What a row of measurements has in common with others."""

    @property
    def seed(self) -> int:
        """Seed of the run."""

    @property
    def setting(self) -> Any:
        """Setting of the solver."""

    @property
    def cost(self) -> float:
        """Cost until the run was stationary for the first time, infinite if it never was."""

    @property
    def lowest(self) -> float:
        """The lowest ||∇h||² that was seen."""


class DueRun(Protocol):
    """A run that a stage asks for."""

    @property
    def key(self) -> tuple[Any, ...]:
        """The first entries of its rows, which identify the run."""

    @property
    def title(self) -> str:
        """A few words for the progress."""


RowT = TypeVar("RowT", bound=Row)
TupleT = TypeVar("TupleT", bound=tuple)
Place = TypeVar("Place")
DueRunT = TypeVar("DueRunT", bound=DueRun)
Stage = Callable[[Place, Sequence[RowT]], Iterable[DueRunT]]


def measure(
    places: Sequence[Place],
    stages: Sequence[Stage[Place, RowT, DueRunT]],
    take: Callable[[DueRunT], Iterable[RowT]],
    rows: list[RowT],
    save: Callable[[list[RowT]], None],
    progress: Reporter | None = None,
) -> list[RowT]:
    """Take all runs that are not in ``rows`` yet, and return the rows of all runs.

    Parameters
    ----------
    places : what the stages are applied to, one after the other
    stages : each returns the runs of a place, given the rows so far; a later one selects from the rows of earlier ones
    take : takes a run and returns its rows
    rows : rows of earlier runs
    save : is called with all rows after each run
    progress : called before each run with the share of places that are done, and a few words
    """
    for done, place in enumerate(places):
        for stage in stages:
            for due in _not_taken(list(stage(place, rows)), rows):
                if progress:
                    progress(done / len(places), due.title)
                rows += take(due)
                save(rows)
    return rows


def _not_taken(runs: Sequence[DueRunT], rows: Sequence[Any]) -> list[DueRunT]:
    taken = {row[: len(run.key)] for run in runs[:1] for row in rows}
    return [run for run in runs if run.key not in taken]


def check_seeds(seeds: Sequence[int], tuning_seeds: Sequence[int]) -> None:
    """Raise ValueError unless the seeds distinguish rows of the grid from the other rows."""
    if max(seeds) >= FIRST_TUNING_SEED or min(tuning_seeds) < FIRST_TUNING_SEED:
        raise ValueError(f"`plan`: `seeds` must lie below {FIRST_TUNING_SEED}, and `tuning_seeds` not.")


def best_setting(rows: Iterable[Row], default: Any = None) -> Any:
    """Return the setting of the grid with the lowest median cost; if all are infinite, with the lowest gradient."""
    grid: dict[Any, list[Row]] = {}
    for row in rows:
        if row.seed >= FIRST_TUNING_SEED:
            grid.setdefault(row.setting, []).append(row)

    def rank(setting: Any) -> tuple[float, float]:
        return median([row.cost for row in grid[setting]]), median([row.lowest for row in grid[setting]])

    return min(grid, key=rank, default=default)


def without_grid(rows: Iterable[RowT]) -> list[RowT]:
    """Return the rows of the second stage."""
    return [row for row in rows if row.seed < FIRST_TUNING_SEED]


def median(values: Sequence[float]) -> float:
    """Return the median; of an even number of values the larger one in the middle, which may be infinite."""
    return sorted(values)[len(values) // 2]


class Passage(NamedTuple):
    """When a run became stationary.

    Attributes
    ----------
    costs : by ε, the cost at which ||∇h||² <= ε was seen first, infinite if it was not
    lowest : the lowest ||∇h||² that was seen
    """

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
    """Run a solver until ||∇h||² is at most every ε, the cost reaches the budget, or the run diverges.

    Parameters
    ----------
    problem : a problem with an exact solution
    solver : the solver
    epsilons : bounds of ||∇h||², above 0
    seed : seed of the run
    budget : the run ends once its cost is at least this
    cost : the cost of a run from its oracle calls; the number of all calls by default
    """
    if not epsilons or min(epsilons) <= 0:
        raise ValueError(f"`epsilons={tuple(epsilons)}`: must be numbers above 0.")
    run, costs, lowest = Run(problem, solver, seed=seed), dict.fromkeys(epsilons, inf), inf
    while not run.diverged:
        spent, lowest = float(cost(run.calls)), min(lowest, hypergrad_norm_sq(problem, run))
        costs |= {epsilon: spent for epsilon, found in costs.items() if lowest <= epsilon and found == inf}
        if lowest <= min(epsilons) or spent >= budget:
            break
        run.advance(max(1, run.step // _GROWTH))
    return Passage(costs, lowest)


def hypergrad_norm_sq(problem: BilevelProblem, run: Run) -> float:
    """Return ||∇h||² at the current point of a run, from the exact solution; infinite if there is none."""
    if problem.exact_solver is None:
        raise ValueError(f"`problem={problem.name!r}`: needs exact solutions.")
    x = trees.to_numpy(run.point.outer_var, np.float64)
    with np.errstate(all="ignore"):  # a diverging run may overflow here before its status says so
        try:
            return stationarity(problem.oracles, x, problem.exact_solver(x, None).hypergrad)
        except (np.linalg.LinAlgError, ValueError):
            return inf


class Slope(NamedTuple):
    """The exponent of a power law, with the half-width of its 95 % confidence interval and the number of points."""

    value: float
    half_width: float
    n_points: int


def fit_slope(x: Sequence[float], y: Sequence[float]) -> Slope:
    """Fit y ~ x^a by least squares on the logarithms; points with an infinite y are left out."""
    points = np.log([(a, b) for a, b in zip(x, y, strict=True) if np.isfinite(b)])
    if len(points) < 3 or len(np.unique(points[:, 0])) < 2:
        raise ValueError(f"a slope needs at least three finite points at two places, got {len(points)}.")
    fit = linregress(points[:, 0], points[:, 1])
    return Slope(float(fit.slope), float(t.ppf(0.975, len(points) - 2) * fit.stderr), len(points))


def write_rows(path: Path, rows: Iterable[Any], kind: type) -> None:
    """Write named tuples as CSV, with nine significant digits; equal rows give equal bytes."""
    text = StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(kind._fields)  # type: ignore[attr-defined]
    lines.writerows([f"{value:.9g}" if isinstance(value, float) else value for value in row] for row in rows)
    with replacing(path) as file:
        file.write(text.getvalue().encode())


def read_rows(path: Path, kind: type[TupleT]) -> list[TupleT]:
    """Return the named tuples that `write_rows` wrote; an empty list if there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        head, *lines = csv.reader(file)
    if tuple(head) != kind._fields:  # type: ignore[attr-defined]
        raise ValueError(f"`{path}` has the columns {', '.join(head)}; move it away to measure again.")
    types = kind.__annotations__.values()
    return [kind(*(convert(word) for convert, word in zip(types, line, strict=True))) for line in lines]
