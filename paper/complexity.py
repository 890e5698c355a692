"""Table 1 of the paper, measured: oracle calls to ||∇h||² <= ε against N = n + m and against 1/ε.

What is proved: SRBA with ρ ~ N^(-1/2), q = N needs O(N^(1/2) ε^-1 + N) calls (the sample-complexity corollary), SABA
with ρ ~ N^(-2/3) needs O(N^(2/3) ε^-1 + N). Whatever N, SOBA, StocBiO and AmIGO need O(ε^-2), MRBO and VRBO O(ε^-3/2),
F²SA O(ε^-7/2). A full-batch method needs O(N ε^-1).

What is measured: the same problem at growing N. "quadratic" has a strongly convex h, "valleys" one that is not. The
rule, the same for all: each setting of a grid is run with two seeds, and for each ε the one that needs the fewest calls
is taken, or the one that comes lowest where none is stationary within the budget; it is measured with other seeds. A
method whose bound knows N has a grid at each N, its steps scaled by its theory, and q = N. A method whose bound does
not is given at each N what is best at the smallest.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.stats import linregress, t

from bilevel._progress import Reporter
from bilevel.problems import BilevelProblem
from paper.measuring import first_passage, read_rows, write_rows
from paper.methods import METHODS, PROBLEMS, Method, Setting

FIRST_TUNING_SEED = 100


class Measurement(NamedTuple):
    """Calls of one run until ||∇h||² <= ε for the first time, infinite where it never came there, and its lowest.

    Rows with a seed of at least `FIRST_TUNING_SEED` are those of the grid.
    """

    problem: str
    solver: str
    step: float
    ratio: float
    batch: int
    extra: float
    size: int
    seed: int
    epsilon: float
    calls: float
    lowest: float

    @property
    def setting(self) -> Setting:
        return Setting(self.step, self.ratio, self.batch, self.extra)


class Packed(NamedTuple):
    """All rows of one run, as a file has them; values of ε and calls are separated by blanks."""

    problem: str
    solver: str
    step: float
    ratio: float
    batch: int
    extra: float
    size: int
    seed: int
    lowest: float
    epsilons: str
    calls: str


class Slope(NamedTuple):
    """The exponent of a power law, with the half-width of its 95 % confidence interval."""

    value: float
    half_width: float
    n_points: int


class Plan(NamedTuple):
    """What is measured."""

    problems: tuple[str, ...]
    methods: tuple[str, ...]
    sizes: tuple[int, ...]
    epsilons: dict[str, tuple[float, ...]]
    seeds: tuple[int, ...]
    tuning_seeds: tuple[int, ...]
    max_calls: int
    settings: int | None = None  # of each grid, the first so many


_EPSILONS = {"quadratic": (1e-1, 1e-2, 1e-3, 1e-4, 1e-6), "valleys": (1e-1, 3e-2, 1e-2, 3e-3, 1e-3, 3e-4)}
_NAMES = tuple(method.name for method in METHODS)
FULL = Plan(tuple(PROBLEMS), _NAMES, (256, 1024, 4096, 16384), _EPSILONS, (0, 1, 2), (100, 101), 1_000_000)
QUICK = Plan(("valleys",), ("SRBA", "SOBA"), (64, 128), {"valleys": (1e-1, 3e-2)}, (0, 1), (100,), 30_000, 2)


class _Run(NamedTuple):
    """One run that is due, and at which ε it is looked at."""

    problem: str
    method: Method
    setting: Setting
    size: int
    seed: int
    epsilons: tuple[float, ...]

    @property
    def key(self) -> tuple:
        return self.problem, self.method.name, *self.setting, self.size, self.seed


def measure_complexity(
    plan: Plan | None = None, *, quick: bool = False, path: Path | None = None, progress: Reporter | None = None
) -> list[Measurement]:
    """Measure what a plan says, the whole one or a quick one by default, and return all rows.

    Parameters
    ----------
    plan : what to measure, instead of ``FULL`` or ``QUICK``
    quick : take seconds, not minutes
    path : a CSV file; runs whose rows are in it are not taken again, and each run is added to it when it ends
    progress : gets the share of the (problem, method) pairs that are done, and a few words, before each run
    """
    plan = plan or (QUICK if quick else FULL)
    _check_plan(plan)
    rows = read_measurements(path) if path else []
    pairs = [(problem, method) for problem in plan.problems for method in METHODS if method.name in plan.methods]
    for done, (problem, method) in enumerate(pairs):
        for stage in (_tuning_runs, _measuring_runs):
            for due in stage(plan, problem, method, rows):
                if progress:
                    progress(done / len(pairs), f"{method.name} on {problem}, N = {due.size}, seed {due.seed}")
                rows += _take(due, plan)
                if path:
                    write_measurements(path, rows)
    return rows


def write_measurements(path: Path, rows: Sequence[Measurement]) -> None:
    """Write rows as CSV, one line per run."""
    runs: dict[tuple, list[Measurement]] = {}
    for row in rows:
        runs.setdefault(row[:8], []).append(row)
    each = ((key, of, "{:.9g}".format) for key, of in runs.items())
    packed = [
        (*key, of[0].lowest, " ".join(number(row.epsilon) for row in of), " ".join(number(row.calls) for row in of))
        for key, of, number in each
    ]
    write_rows(path, packed, Packed)


def read_measurements(path: Path) -> list[Measurement]:
    """Return the rows that `write_measurements` wrote; none where there is no file."""
    rows = []
    for run in read_rows(path, Packed):
        pairs = zip(run.epsilons.split(), run.calls.split(), strict=True)
        rows += [Measurement(*run[:8], float(epsilon), float(calls), run.lowest) for epsilon, calls in pairs]
    return rows


def _check_plan(plan: Plan) -> None:
    if not (plan.sizes and plan.seeds and plan.tuning_seeds):
        raise ValueError("`plan`: `sizes`, `seeds` and `tuning_seeds` must not be empty.")
    if max(plan.seeds) >= FIRST_TUNING_SEED or min(plan.tuning_seeds) < FIRST_TUNING_SEED:
        raise ValueError(f"`plan`: `seeds` must lie below {FIRST_TUNING_SEED}, and `tuning_seeds` not.")
    unknown = [*(set(plan.problems) - set(PROBLEMS)), *(set(plan.methods) - set(_NAMES))]
    if unknown:
        raise ValueError(f"`plan` names {unknown[0]!r}; it must be one of {', '.join([*PROBLEMS, *_NAMES])}.")


def _tuning_runs(plan: Plan, problem: str, method: Method, rows: Sequence[Measurement]) -> Iterator[_Run]:
    settings, sizes = method.settings[: plan.settings], plan.sizes if method.in_size else plan.sizes[:1]
    if len(settings) > 1:
        each = product(sizes, settings, plan.tuning_seeds)
        due = [_Run(problem, method, s, size, seed, plan.epsilons[problem]) for size, s, seed in each]
        yield from _not_taken(due, rows)


def _measuring_runs(plan: Plan, problem: str, method: Method, rows: Sequence[Measurement]) -> Iterator[_Run]:
    seeds = plan.seeds[:1] if method.name in ("Exact", "full batch") else plan.seeds
    for size in plan.sizes:
        taken: dict[Setting, list[float]] = {}
        for epsilon in plan.epsilons[problem]:
            taken.setdefault(select(rows, problem, method, size, epsilon), []).append(epsilon)
        each = product(seeds, taken.items())
        due = [_Run(problem, method, s, size, seed, tuple(epsilons)) for seed, (s, epsilons) in each]
        yield from _not_taken(due, rows)


def _not_taken(due: Sequence[_Run], rows: Sequence[Measurement]) -> list[_Run]:
    taken = {row[:8] for row in rows}
    return [run for run in due if run.key not in taken]


def select(rows: Sequence[Measurement], problem: str, method: Method, size: int, epsilon: float) -> Setting:
    """Return the setting that is ε-stationary first in the grid, else the one that comes lowest, by medians.

    The grid is that of the size, or of the smallest one where the bound of the method does not know the size.
    """
    grid: dict[Setting, list[Measurement]] = {}
    for row in rows:
        there = (row.problem, row.solver, row.epsilon) == (problem, method.name, epsilon)
        if there and row.seed >= FIRST_TUNING_SEED and (row.size == size or not method.in_size):
            grid.setdefault(row.setting, []).append(row)

    def cost(setting: Setting) -> tuple[float, float]:
        return median([row.calls for row in grid[setting]]), median([row.lowest for row in grid[setting]])

    return min(grid, key=cost, default=method.settings[0])


def median(values: Sequence[float]) -> float:
    """Return the median; of an even number, the larger one in the middle, which may be infinite."""
    return sorted(values)[len(values) // 2]


def _take(due: _Run, plan: Plan) -> list[Measurement]:
    solver = due.method.make(due.setting, due.size / plan.sizes[0], due.size)
    budget = plan.max_calls + due.method.passes * due.size
    costs, lowest = first_passage(_problem(due.problem, due.size), solver, due.epsilons, due.seed, budget)
    name, setting, low = due.method.name, due.setting, float(f"{lowest:.3g}")
    place = due.size, due.seed
    return [Measurement(due.problem, name, *setting, *place, epsilon, calls, low) for epsilon, calls in costs.items()]


@lru_cache(maxsize=1)
def _problem(name: str, size: int) -> BilevelProblem:
    return PROBLEMS[name](size)


def fit_slope(x: Sequence[float], y: Sequence[float]) -> Slope:
    """Fit y ~ x^a by least squares on the logarithms of the finite points."""
    points = np.log([(a, b) for a, b in zip(x, y, strict=True) if np.isfinite(b)])
    if len(points) < 3 or len(np.unique(points[:, 0])) < 2:
        raise ValueError(f"a slope needs at least three finite points at two places, got {len(points)}.")
    fit = linregress(points[:, 0], points[:, 1])
    return Slope(float(fit.slope), float(t.ppf(0.975, len(points) - 2) * fit.stderr), len(points))


def measured(rows: Sequence[Measurement], problem: str, solver: str) -> list[Measurement]:
    """Return the rows of a solver on a problem without those of the grid."""
    mine = [row for row in rows if (row.problem, row.solver) == (problem, solver)]
    return [row for row in mine if row.seed < FIRST_TUNING_SEED]


def with_step(rows: Sequence[Measurement], step: float) -> list[Measurement]:
    """Return the rows of the grid with this step, the same up to the scaling at each N, as if they were measured."""
    grid = [row for row in rows if row.seed >= FIRST_TUNING_SEED and row.step == step]
    return [row._replace(seed=row.seed - FIRST_TUNING_SEED) for row in grid]


def slope_in_size(rows: Sequence[Measurement], problem: str, solver: str, epsilon: float) -> Slope:
    """Return the exponent of N in the calls at one ε."""
    chosen = [row for row in measured(rows, problem, solver) if row.epsilon == epsilon]
    return fit_slope([row.size for row in chosen], [row.calls for row in chosen])


def slope_in_accuracy(rows: Sequence[Measurement], problem: str, solver: str, size: int) -> Slope:
    """Return the exponent of 1/ε in the calls at one size."""
    chosen = [row for row in measured(rows, problem, solver) if row.size == size]
    return fit_slope([1 / row.epsilon for row in chosen], [row.calls for row in chosen])


def median_calls(rows: Sequence[Measurement], problem: str, solver: str) -> dict[tuple[int, float], float]:
    """Return the median calls over seeds by (size, ε), infinite where most seeds did not come there."""
    calls: dict[tuple[int, float], list[float]] = {}
    for row in measured(rows, problem, solver):
        calls.setdefault((row.size, row.epsilon), []).append(row.calls)
    return {place: median(found) for place, found in calls.items()}
