"""Table 1 of the paper, measured: oracle calls to ||∇h||² <= ε against N = n + m and against 1/ε.

What is proved: SRBA with ρ ~ N^(-1/2), q = N needs O(N^(1/2) ε^-1 + N) calls (the sample-complexity corollary), SABA
with ρ ~ N^(-2/3) needs O(N^(2/3) ε^-1 + N). Whatever N, SOBA, StocBiO and AmIGO need O(ε^-2), MRBO and VRBO O(ε^-3/2),
F²SA O(ε^-7/2). A full-batch method needs O(N ε^-1).

What is measured: the same problem at growing N. "quadratic" has a strongly convex h, "valleys" a bounded h that is not
convex. The rule, the same for all: at the smallest N each setting of a grid is run, and for each ε the one that needs
the fewest calls is taken, or the one that comes lowest where none is stationary within the budget. At larger N its step
sizes and its period follow the theory, as `Method.make` says; those of methods whose bound does not know N stay.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.stats import linregress, t

from bilevel._optional import Reporter
from bilevel.problems import BilevelProblem, quadratic, valleys
from bilevel.solvers import F2SA, MRBO, SABA, SOBA, SRBA, VRBO, AmIGO, Exact, SolverBase, StocBiO
from bilevel.theory.first_passage import first_passage, read_rows, write_rows

DIM_INNER, DIM_OUTER = 10, 5
FIRST_TUNING_SEED = 100


class Setting(NamedTuple):
    """ρ at the smallest size, ρ/γ, and what else a method has: Q of a Neumann series, λ_0 of F²SA, or 0."""

    step: float
    ratio: float = 1.0
    extra: float = 0.0


class Measurement(NamedTuple):
    """Calls of one run until ||∇h||² <= ε for the first time, infinite where it never came there, and its lowest.

    Rows with a seed of at least `FIRST_TUNING_SEED` are those of the grid.
    """

    problem: str
    solver: str
    step: float
    ratio: float
    extra: float
    size: int
    seed: int
    epsilon: float
    calls: float
    lowest: float

    @property
    def setting(self) -> Setting:
        return Setting(self.step, self.ratio, self.extra)


class Slope(NamedTuple):
    """The exponent of a power law, with the half-width of its 95 % confidence interval."""

    value: float
    half_width: float
    n_points: int


@dataclass(frozen=True)
class Method:
    """A solver whose steps and period follow the size as its theory says."""

    name: str
    bound: str
    in_size: float  # the proved exponent of N at a fixed ε, of the term with 1/ε
    in_accuracy: float  # that of 1/ε at a fixed N
    make: Callable[[Setting, float, int], SolverBase]  # from a setting, size over smallest size, and size
    settings: tuple[Setting, ...]
    passes: int = 100  # over the data that a run may take on top of the budget of calls


def _grid(steps: Sequence[float], ratios: Sequence[float] = (1.0,), extras: Sequence[float] = (0.0,)) -> tuple:
    return tuple(Setting(*map(float, values)) for values in product(steps, ratios, extras))


def _srba(setting: Setting, scale: float, size: int) -> SRBA:
    return SRBA(setting.step * scale**-0.5, setting.ratio, 1, period=size)


def _saba(setting: Setting, scale: float, size: int) -> SABA:
    return SABA(setting.step * scale ** (-2 / 3), setting.ratio, 1)


def _constant(cls: Callable[..., SolverBase], extra: str | None = None, kind: type = int, **fixed: int) -> Callable:
    """Return the maker of a solver that does not know the size; ``extra`` names what a setting has besides steps."""

    def make(setting: Setting, scale: float, size: int) -> SolverBase:
        more = {} if extra is None else {extra: kind(setting.extra)}
        return cls(setting.step, setting.ratio, 1, **fixed, **more)

    return make


_NEUMANN = (10, 30)  # terms, with η = 0.5
METHODS = (
    Method("SRBA", "N^1/2 ε^-1", 1 / 2, 1, _srba, _grid((0.02, 0.04, 0.08, 0.16))),
    Method("SABA", "N^2/3 ε^-1", 2 / 3, 1, _saba, _grid((0.02, 0.04, 0.08, 0.16))),
    Method("SOBA", "ε^-2", 0, 2, _constant(SOBA), _grid((0.1, 0.3, 1.0, 3.0))),
    Method("StocBiO", "ε^-2", 0, 2, _constant(StocBiO, "n_neumann"), _grid((0.03, 0.1), (1, 10), _NEUMANN)),
    Method("AmIGO", "ε^-2", 0, 2, _constant(AmIGO), _grid((0.01, 0.03, 0.1), (0.3, 1, 10))),
    Method("MRBO", "ε^-3/2", 0, 1.5, _constant(MRBO, "n_neumann"), _grid((0.1, 0.3), (1, 3), _NEUMANN)),
    Method("VRBO", "ε^-3/2", 0, 1.5, _constant(VRBO, "n_neumann"), _grid((0.02, 0.05), (0.3, 1), _NEUMANN)),
    Method("F2SA", "ε^-7/2", 0, 3.5, _constant(F2SA, "lambda_0", float), _grid((0.1, 0.3, 1), (1, 10), (1, 10))),
    Method("full batch", "N ε^-1", 1, 1, _constant(SRBA, period=1), _grid((0.25, 0.5, 1.0)), passes=20_000),
    Method("Exact", "–", 1, 0, lambda setting, scale, size: Exact(), _grid((0,)), passes=1000),
)


def make_quadratic(size: int) -> BilevelProblem:
    """Return a quadratic problem with n = m = size / 2, in float64."""
    if size < 64 or size % 2:
        raise ValueError(f"`size={size}`: must be an even number of at least 64, or the draw is not strongly convex.")
    return quadratic(size // 2, size // 2, DIM_INNER, DIM_OUTER, common_linear=1.0, dtype="float64")


def make_valleys(size: int) -> BilevelProblem:
    """Return the problem of `bilevel.problems.valleys` with n = m = size / 2, in float64."""
    return valleys(size // 2, size // 2, dtype="float64")


PROBLEMS = {"quadratic": make_quadratic, "valleys": make_valleys}


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
    rows = read_rows(path, Measurement) if path else []
    pairs = [(problem, method) for problem in plan.problems for method in METHODS if method.name in plan.methods]
    for done, (problem, method) in enumerate(pairs):
        for stage in (_tuning_runs, _measuring_runs):
            for due in stage(plan, problem, method, rows):
                if progress:
                    progress(done / len(pairs), f"{method.name} on {problem}, N = {due.size}, seed {due.seed}")
                rows += _take(due, plan)
                if path:
                    write_rows(path, rows, Measurement)
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
    settings = method.settings[: plan.settings]
    if len(settings) > 1:
        each = product(settings, plan.tuning_seeds)
        due = [_Run(problem, method, s, plan.sizes[0], seed, plan.epsilons[problem]) for s, seed in each]
        yield from _not_taken(due, rows)


def _measuring_runs(plan: Plan, problem: str, method: Method, rows: Sequence[Measurement]) -> Iterator[_Run]:
    taken: dict[Setting, list[float]] = {}
    for epsilon in plan.epsilons[problem]:
        taken.setdefault(select(rows, problem, method, epsilon), []).append(epsilon)
    seeds = plan.seeds[:1] if method.name in ("Exact", "full batch") else plan.seeds
    each = product(plan.sizes, seeds, taken.items())
    due = [_Run(problem, method, s, size, seed, tuple(epsilons)) for size, seed, (s, epsilons) in each]
    yield from _not_taken(due, rows)


def _not_taken(due: Sequence[_Run], rows: Sequence[Measurement]) -> list[_Run]:
    taken = {row[:7] for row in rows}
    return [run for run in due if run.key not in taken]


def select(rows: Sequence[Measurement], problem: str, method: Method, epsilon: float) -> Setting:
    """Return the setting that is ε-stationary first in the grid, else the one that comes lowest, by medians."""
    grid: dict[Setting, list[Measurement]] = {}
    for row in rows:
        if (row.problem, row.solver, row.epsilon) == (problem, method.name, epsilon) and row.seed >= FIRST_TUNING_SEED:
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
