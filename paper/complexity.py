"""Table 1 of the paper, measured: oracle calls to ||∇h||² <= ε against N = n + m and against 1/ε.

What is proved. SRBA with ρ ~ N^(-1/2) and q = N needs O(N^(1/2) ε^-1 + N) calls (the sample-complexity corollary), SABA
with ρ ~ N^(-2/3) needs O(N^(2/3) ε^-1 + N). For every N, SOBA, StocBiO and AmIGO need O(ε^-2), MRBO and VRBO O(ε^-3/2),
F²SA O(ε^-7/2). A full-batch method needs O(N ε^-1).

What is measured. The same problem at growing N: "quadratic" has a strongly convex h, "valleys" one that is not. All
methods follow the protocol of :mod:`paper.measuring`, where the setting is selected for each ε. If the bound of a
method depends on N, it has a grid at each N, with steps scaled by its theory and q = N. Other methods use at each N the
setting that is best at the smallest.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from bilevel._core.extras import Reporter
from bilevel.problems import BilevelProblem
from paper.measuring import (
    FIRST_TUNING_SEED,
    Slope,
    best_setting,
    check_seeds,
    first_passage,
    fit_slope,
    measure,
    median,
    read_rows,
    without_grid,
    write_rows,
)
from paper.methods import METHODS, PROBLEMS, Method, Setting


class Measurement(NamedTuple):
    """The calls of one run until ||∇h||² <= ε was seen first, infinite if it was not, and the lowest ||∇h||².

    Rows of the grid have seeds of at least `FIRST_TUNING_SEED`.
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

    @property
    def cost(self) -> float:
        return self.calls


class PackedRun(NamedTuple):
    """All measurements of a run as one line of a file; values of ε and calls are separated by blanks."""

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


class Plan(NamedTuple):
    """What is measured.

    Attributes
    ----------
    problems, methods : names of `PROBLEMS` and `METHODS`
    sizes : values of N, the smallest first
    epsilons : bounds of ||∇h||² for each problem
    seeds, tuning_seeds : seeds of the measurements and of the grid
    max_calls : calls after which a run ends; `Method.passes` are added
    settings : how many settings of each grid are used, all by default
    """

    problems: tuple[str, ...]
    methods: tuple[str, ...]
    sizes: tuple[int, ...]
    epsilons: dict[str, tuple[float, ...]]
    seeds: tuple[int, ...]
    tuning_seeds: tuple[int, ...]
    max_calls: int
    settings: int | None = None


_EPSILONS = {"quadratic": (1e-1, 1e-2, 1e-3, 1e-4, 1e-6), "valleys": (1e-1, 3e-2, 1e-2, 3e-3, 1e-3, 3e-4)}
_NAMES = tuple(method.name for method in METHODS)
FULL = Plan(tuple(PROBLEMS), _NAMES, (256, 1024, 4096, 16384), _EPSILONS, (0, 1, 2), (100, 101), 1_000_000)
QUICK = Plan(("valleys",), ("SRBA", "SOBA"), (64, 128), {"valleys": (1e-1, 3e-2)}, (0, 1), (100,), 30_000, 2)

_Place = tuple[str, Method]  # a problem and a method


class _Run(NamedTuple):
    problem: str
    method: Method
    setting: Setting
    size: int
    seed: int
    epsilons: tuple[float, ...]

    @property
    def key(self) -> tuple[Any, ...]:
        return self.problem, self.method.name, *self.setting, self.size, self.seed

    @property
    def title(self) -> str:
        return f"{self.method.name} on {self.problem}, N = {self.size}, seed {self.seed}"


def measure_complexity(
    plan: Plan | None = None, *, quick: bool = False, path: Path | None = None, progress: Reporter | None = None
) -> list[Measurement]:
    """Measure what a plan describes and return all rows.

    Parameters
    ----------
    plan : what to measure; ``FULL``, or ``QUICK`` if ``quick``, by default
    quick : use the plan that takes seconds instead of minutes
    path : a CSV file; runs in it are not taken again, and each new run is added to it
    progress : called before each run with the share of (problem, method) pairs that are done, and a few words
    """
    plan = plan or (QUICK if quick else FULL)
    _check_plan(plan)
    places = [(problem, method) for problem in plan.problems for method in METHODS if method.name in plan.methods]
    stages = [partial(_tuning_runs, plan), partial(_measuring_runs, plan)]
    rows = read_measurements(path) if path else []
    save = partial(write_measurements, path) if path else lambda rows: None
    return measure(places, stages, partial(_take, plan), rows, save, progress)


def write_measurements(path: Path, rows: Sequence[Measurement]) -> None:
    """Write rows as CSV, one line per run."""
    runs: dict[tuple, list[Measurement]] = {}
    for row in rows:
        runs.setdefault(row[:8], []).append(row)
    write_rows(path, [_pack(key, own) for key, own in runs.items()], PackedRun)


def _pack(key: tuple, rows: Sequence[Measurement]) -> tuple:
    epsilons, calls = (" ".join(f"{row[place]:.9g}" for row in rows) for place in (8, 9))
    return *key, rows[0].lowest, epsilons, calls


def read_measurements(path: Path) -> list[Measurement]:
    """Return the rows that `write_measurements` wrote; an empty list if there is no file."""
    rows = []
    for run in read_rows(path, PackedRun):
        pairs = zip(run.epsilons.split(), run.calls.split(), strict=True)
        rows += [Measurement(*run[:8], float(epsilon), float(calls), run.lowest) for epsilon, calls in pairs]
    return rows


def _check_plan(plan: Plan) -> None:
    if not (plan.sizes and plan.seeds and plan.tuning_seeds):
        raise ValueError("`plan`: `sizes`, `seeds` and `tuning_seeds` must not be empty.")
    check_seeds(plan.seeds, plan.tuning_seeds)
    unknown = [*(set(plan.problems) - set(PROBLEMS)), *(set(plan.methods) - set(_NAMES))]
    if unknown:
        raise ValueError(f"`plan` names {unknown[0]!r}; it must be one of {', '.join([*PROBLEMS, *_NAMES])}.")


def _tuning_runs(plan: Plan, place: _Place, rows: Sequence[Measurement]) -> Iterator[_Run]:
    problem, method = place
    settings, sizes = method.settings[: plan.settings], plan.sizes if method.in_size else plan.sizes[:1]
    if len(settings) > 1:
        for size, setting, seed in product(sizes, settings, plan.tuning_seeds):
            yield _Run(problem, method, setting, size, seed, plan.epsilons[problem])


def _measuring_runs(plan: Plan, place: _Place, rows: Sequence[Measurement]) -> Iterator[_Run]:
    problem, method = place
    seeds = plan.seeds[:1] if method.name in ("Exact", "full batch") else plan.seeds
    for size in plan.sizes:
        selected: dict[Setting, list[float]] = {}
        for epsilon in plan.epsilons[problem]:
            selected.setdefault(select(rows, problem, method, size, epsilon), []).append(epsilon)
        for seed, (setting, epsilons) in product(seeds, selected.items()):
            yield _Run(problem, method, setting, size, seed, tuple(epsilons))


def select(rows: Sequence[Measurement], problem: str, method: Method, size: int, epsilon: float) -> Setting:
    """Return the setting of the grid that is ε-stationary first, or else the one with the lowest gradient, by medians.

    The grid is that of this size, or that of the smallest size if the bound of the method does not depend on the size.
    """
    place = problem, method.name, epsilon
    there = [row for row in rows if (row.problem, row.solver, row.epsilon) == place]
    grid = [row for row in there if row.size == size or not method.in_size]
    return best_setting(grid, default=method.settings[0])


def _take(plan: Plan, due: _Run) -> list[Measurement]:
    solver = due.method.make(due.setting, due.size / plan.sizes[0], due.size)
    budget = plan.max_calls + due.method.passes * due.size
    costs, lowest = first_passage(_problem(due.problem, due.size), solver, due.epsilons, due.seed, budget)
    low = float(f"{lowest:.3g}")
    return [Measurement(*(*due.key, epsilon, calls, low)) for epsilon, calls in costs.items()]


@lru_cache(maxsize=1)
def _problem(name: str, size: int) -> BilevelProblem:
    return PROBLEMS[name](size)


def measured(rows: Sequence[Measurement], problem: str, solver: str) -> list[Measurement]:
    """Return the rows of a solver on a problem, without those of the grid."""
    return without_grid(row for row in rows if (row.problem, row.solver) == (problem, solver))


def with_step(rows: Sequence[Measurement], step: float) -> list[Measurement]:
    """Return the rows of the grid with this step, which is scaled by the theory at each N, as if they were measured."""
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
    """Return the median calls over seeds by (size, ε), infinite if most seeds did not reach ε."""
    calls: dict[tuple[int, float], list[float]] = {}
    for row in measured(rows, problem, solver):
        calls.setdefault((row.size, row.epsilon), []).append(row.calls)
    return {place: median(found) for place, found in calls.items()}
