"""Derivatives of G until a point is stationary, against condition numbers.

What is proved. If G is quadratic in z and h strongly convex, linear methods need κ_x^½ κ_y derivatives up to constants
and logarithms, with κ_y = 1/μ_y for the strong convexity μ_y of G in z, and κ_x = 1/μ_x for that of h. On the chain of
:mod:`paper.convex_chain`, whose h has the condition number κ_x κ_y up to a constant, AccBiO-BG needs no more: of the
order of κ_y^½ derivatives in each of (κ_x κ_y)^½ outer steps. Gradient steps on both levels take of the order of κ_y
derivatives in each of κ_x κ_y outer steps. These counts follow from the rates of the loops.

If h is not convex, methods that use gradients of F and G need Ω(κ^5/2 ε^-1) of them, and Õ(κ^4 ε^-1) suffice, by the
abstract of arXiv 2511.22331. :mod:`paper.delayed_chain` is an instance with the rate of that lower bound.

What is measured. On "chain in inner" κ = 1/μ_y at a fixed μ_x, on "chain in outer" κ = 1/μ_x at a fixed μ_y, on
"delayed chain" κ = 1/μ_y at a fixed ε, and on "quadratic" the ratio of the eigenvalues of both levels of random
quadratics. For stochastic methods no bound that contains κ has been read. Methods follow the protocol of
:mod:`paper.measuring`, with a grid at each κ. Steps are multiples of the inverse smoothness of G and of h, which are
known.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import product
from math import ceil, nan
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bilevel._core.extras import Reporter
from bilevel._core.types import Calls
from bilevel.problems import BilevelProblem, quadratic
from bilevel.solvers import SABA, SBOLSVRG, SRBA, AccBiO, AmIGO, SolverBase
from paper.convex_chain import Scales, convex_chain, required_derivatives
from paper.delayed_chain import delayed_chain
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

REDUCTION = 1e-6  # ε as a share of ||∇h||² at the start where h is strongly convex
STATIONARY = 1.8e-5  # ε on the delayed chain, where T is 14 at κ = 8
_BATCH = 8
_FIXED = 0.1, 0.25  # μ_x where κ = 1/μ_y, and μ_y where κ = 1/μ_x


class Setting(NamedTuple):
    """Steps of z and of x in units of the inverse smoothness of G and of h, and steps per loop."""

    step: float
    outer_step: float
    loops: int


class Candidate(NamedTuple):
    """A method with its grid, and the exponents of κ that are known on each problem, by its name.

    `make` returns the solver from ρ, ρ/γ and the steps per loop.
    """

    make: Callable[[float, float, int], SolverBase]
    settings: tuple[Setting, ...]
    known: dict[str, float]
    max_derivatives: float = 4e6


def _grid(steps: Sequence[float], outer_steps: Sequence[float], loops: Sequence[int] = (1,)) -> tuple[Setting, ...]:
    return tuple(Setting(*one) for one in product(map(float, steps), map(float, outer_steps), loops))


def _acc_bio(form: str) -> Callable[[float, float, int], SolverBase]:
    return lambda step, ratio, loops: AccBiO(step, ratio, n_inner_steps=loops, n_v_steps=loops, form=form)


def _amigo(step: float, ratio: float, loops: int) -> SolverBase:
    return AmIGO(step, ratio, n_inner_steps=loops, sampling="full")


_ACCELERATED, _NESTED = {"chain in inner": 1.0, "chain in outer": 0.5}, {"chain in inner": 2.0, "chain in outer": 1.0}
_LOOPS, _SAMPLED = (1, 2, 4, 8, 16, 32), _grid((0.1, 0.2, 0.4, 0.8), (0.125, 0.25, 0.5, 1))
CANDIDATES = {
    "AccBiO-BG": Candidate(_acc_bio("bg"), _grid((1,), (1,), _LOOPS), _ACCELERATED),
    "AccBiO": Candidate(_acc_bio("general"), _grid((1,), (1,), _LOOPS), _ACCELERATED),
    "AmIGO": Candidate(_amigo, _grid((1,), (0.5, 1, 1.75, 4, 8), _LOOPS), _NESTED),
    "full batch": Candidate(
        lambda step, ratio, loops: SRBA(step, ratio, 1, period=1),
        _grid((1,), (*(2.0**-k for k in range(7, -1, -1)), 1.75, 4, 8)),
        {},
    ),
    "SRBA": Candidate(lambda step, ratio, loops: SRBA(step, ratio, _BATCH), _SAMPLED, {}),
    "SABA": Candidate(lambda step, ratio, loops: SABA(step, ratio, _BATCH), _SAMPLED, {}),
    "SBOLSVRG": Candidate(lambda step, ratio, loops: SBOLSVRG(step, ratio, _BATCH), _SAMPLED, {}),
}
_SAMPLED_NAMES = ("SRBA", "SABA", "SBOLSVRG")
# The chains have one row, so that sampling changes nothing there, and h of the delayed chain is not convex.
_PLAIN = ("AmIGO", "full batch")
MEASURED_ON: dict[str, tuple[str, ...]] = {"delayed chain": _PLAIN, "quadratic": tuple(CANDIDATES)}
MEASURED_ON |= dict.fromkeys(("chain in inner", "chain in outer"), ("AccBiO-BG", "AccBiO", *_PLAIN))


class Derivatives(NamedTuple):
    """The rows of G whose derivatives a run computed until ||∇h||² <= ε was seen first, infinite if it was not.

    `bound` is the number that each linear method needs, NaN if there is none, and `lowest` the lowest ||∇h||².
    Rows of the grid have seeds of at least `FIRST_TUNING_SEED`.
    """

    problem: str
    solver: str
    kappa: float
    step: float
    outer_step: float
    loops: int
    seed: int
    epsilon: float
    bound: float
    cost: float
    lowest: float

    @property
    def setting(self) -> Setting:
        return Setting(self.step, self.outer_step, self.loops)


class Plan(NamedTuple):
    """What is measured: values of κ by problem, methods, seeds of the measurements and of the grid."""

    kappas: dict[str, tuple[float, ...]]
    solvers: tuple[str, ...] = tuple(CANDIDATES)
    seeds: tuple[int, ...] = (0, 1, 2)
    tuning_seeds: tuple[int, ...] = (100,)
    settings: slice = slice(None)


_INNER, _OUTER, _BOTH = (4.0, 8.0, 16.0, 32.0), (16.0, 64.0, 256.0, 1024.0), (4.0, 8.0, 16.0, 32.0)
_DELAYED = (8.0, 16.0, 32.0, 64.0)
FULL = Plan({"chain in inner": _INNER, "chain in outer": _OUTER, "delayed chain": _DELAYED, "quadratic": _BOTH})
QUICK = Plan({"chain in inner": (2.0, 4.0, 8.0)}, ("AccBiO-BG", "full batch"), (0,), (100,), slice(2, 5))


class _Run(NamedTuple):
    problem: str
    solver: str
    kappa: float
    step: float
    outer_step: float
    loops: int
    seed: int

    @property
    def key(self) -> tuple[str | float, ...]:
        return tuple(self)

    @property
    def title(self) -> str:
        return f"{self.solver} on {self.problem}, condition number {self.kappa:g}, seed {self.seed}"


def measure_condition(
    plan: Plan | None = None, *, quick: bool = False, path: Path | None = None, progress: Reporter | None = None
) -> list[Derivatives]:
    """Measure what a plan describes and return all rows.

    Parameters
    ----------
    plan : what to measure; ``FULL``, or ``QUICK`` if ``quick``, by default
    quick : use the plan that takes seconds instead of minutes
    path : a CSV file; runs in it are not taken again, and each new run is added to it
    progress : called before each run with the share of the places that are done, and a few words
    """
    plan = plan or (QUICK if quick else FULL)
    check_seeds(plan.seeds, plan.tuning_seeds)
    places = [
        (name, kappa, solver)
        for name, kappas in plan.kappas.items()
        for kappa, solver in product(kappas, plan.solvers)
        if solver in MEASURED_ON[name]
    ]
    rows = read_derivatives(path) if path else []
    save = partial(write_rows, path, kind=Derivatives) if path else lambda rows: None
    return measure(places, [partial(_tuning, plan), partial(_measuring, plan)], _take, rows, save, progress)


def read_derivatives(path: Path) -> list[Derivatives]:
    """Return the rows of a file; an empty list if there is no file."""
    return read_rows(path, Derivatives)


def _tuning(plan: Plan, place: tuple[str, float, str], rows: Sequence[Derivatives]) -> Iterator[_Run]:
    name, kappa, solver = place
    for setting, seed in product(CANDIDATES[solver].settings[plan.settings], plan.tuning_seeds):
        yield _Run(name, solver, kappa, setting.step, setting.outer_step, setting.loops, seed)


def _measuring(plan: Plan, place: tuple[str, float, str], rows: Sequence[Derivatives]) -> Iterator[_Run]:
    name, kappa, solver = place
    best = best_setting(row for row in rows if row[:3] == (name, solver, kappa))
    for seed in plan.seeds if solver in _SAMPLED_NAMES else plan.seeds[:1]:
        yield _Run(name, solver, kappa, best.step, best.outer_step, best.loops, seed)


@lru_cache(maxsize=1)
def make_problem(name: str, kappa: float) -> BilevelProblem:
    """Return the problem of this name with the condition number κ, in float64."""
    if name == "quadratic":
        # The coupling keeps the Jacobian of z* below 1, so that h is as well conditioned as F.
        low, coupling = 1 / kappa, 0.2 / kappa
        return quadratic(
            128, 128, 10, 5, smallest_eigenvalue=low, coupling=coupling, common_linear=1.0, dtype="float64"
        )
    if name == "delayed chain":
        return delayed_chain(STATIONARY, inner_curvature=1 / kappa, dtype="float64")
    mu_x, mu_y = (_FIXED[0], 1 / kappa) if name == "chain in inner" else (1 / kappa, _FIXED[1])
    dim = ceil(10 / (1 - Scales.of(mu_y, mu_x).ratio))  # q^dim is below 1e-4
    return convex_chain(dim, inner_curvature=mu_y, outer_curvature=mu_x, dtype="float64")


def _take(due: _Run) -> list[Derivatives]:
    problem, candidate = make_problem(due.problem, due.kappa), CANDIDATES[due.solver]
    assert problem.exact_solver and problem.oracles.largest_curvature
    step = due.step / problem.oracles.largest_curvature
    solver = candidate.make(step, step * problem.info["L_h"] / due.outer_step, due.loops)
    start = problem.exact_solver(np.asarray(problem.start.outer_var), None).hypergrad
    epsilon = problem.info.get("epsilon", REDUCTION * float(start @ start))
    bound = problem.info.get("derivative_bound", nan)
    if problem.name == "convex_chain":
        bound = required_derivatives(problem, epsilon)
    costs, lowest = first_passage(problem, solver, [epsilon], due.seed, candidate.max_derivatives, inner_derivatives)
    found = (float(f"{one:.9g}") for one in (epsilon, bound, costs[epsilon], lowest))  # as in the file
    return [Derivatives._make((*due, *found))]


def inner_derivatives(calls: Calls) -> int:
    """Return of how many rows of G a derivative was computed, each kind counted on its own."""
    return int(calls.inner_grad + calls.inner_grad_outer + calls.hvp + calls.cross)


def measured(rows: Sequence[Derivatives], problem: str, solver: str) -> list[Derivatives]:
    """Return the rows of a solver on a problem, without those of the grid."""
    return without_grid(row for row in rows if (row.problem, row.solver) == (problem, solver))


def slope_in_kappa(rows: Sequence[Derivatives], problem: str, solver: str) -> Slope:
    """Return the exponent of κ in the derivatives; that of the bound if the solver is "bound"."""
    if solver == "bound":
        bounds = {row.kappa: row.bound for row in rows if row.problem == problem}
        return fit_slope(list(bounds), list(bounds.values()))
    chosen = measured(rows, problem, solver)
    return fit_slope([row.kappa for row in chosen], [row.cost for row in chosen])
