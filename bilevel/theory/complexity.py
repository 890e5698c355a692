"""How the cost of a stationary point grows with the number of samples and with the accuracy asked for.

The statements, with N = n + m: to reach ||∇h||² <= ε SRBA with ρ ~ N^(-1/2), q = N needs O(N^(1/2) ε^-1 + N) calls (the
sample-complexity corollary), SABA with ρ ~ N^(-2/3) needs O(N^(2/3) ε^-1 + N), SOBA O(ε^-2) whatever N, and a method on
all rows O(N). No linear method does better than Ω(N^(1/2) ε^-1) on a whole class.

The measurement: quadratics of growing size and equal conditioning. A step size is tuned at the smallest size, then
scaled as the theory says; the calls until ||∇h||² first falls to ε are read off runs of several seeds.

The measured complexities as a table and a figure.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bilevel._io import replacing
from bilevel._optional import require
from bilevel.engine.run import run
from bilevel.problems import BilevelProblem, quadratic
from bilevel.solvers.base import SolverBase
from bilevel.solvers.exact import Exact
from bilevel.solvers.host import HostSolver
from bilevel.solvers.saba import SABA
from bilevel.solvers.soba import SOBA
from bilevel.solvers.srba import SRBA

DIM_INNER, DIM_OUTER = 10, 5
SIZES = (256, 1024, 4096, 16384, 65536)
TUNED_AT = 1e-2  # the ε at which a step size is chosen
EPSILONS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)


class Measurement(NamedTuple):
    """Calls of one run until ||∇h||² <= ε for good or for the first time; infinite where it never came there."""

    solver: str
    size: int
    epsilon: float
    seed: int
    calls: float


class Slope(NamedTuple):
    """The exponent of a power law, with the half-width of its 95 % confidence interval."""

    value: float
    half_width: float
    n_points: int


@dataclass(frozen=True)
class Method:
    """A solver whose steps and period follow the size as its theory says.

    Attributes
    ----------
    name : of the solver
    exponent : of N in the number of calls, at a fixed ε
    accuracy_exponent : of 1/ε, at a fixed N
    solver : from a step at the smallest size, and the size, to the solver
    steps : what is tried at the smallest size; one value where nothing is to be tuned
    passes : over the data that a run may take on top of its budget of calls
    """

    name: str
    exponent: float
    accuracy_exponent: float
    solver: Callable[[float, int], SolverBase]
    steps: tuple[float, ...]
    passes: int = 40


def _srba(step: float, size: int) -> SRBA:
    return SRBA(step * (size / SIZES[0]) ** -0.5, 1.0, 1, period=size)


def _saba(step: float, size: int) -> SABA:
    return SABA(step * (size / SIZES[0]) ** (-2 / 3), 1.0, 1)


METHODS = (
    Method("SRBA", 1 / 2, 1.0, _srba, (0.01, 0.02, 0.04, 0.08)),
    Method("SABA", 2 / 3, 1.0, _saba, (0.01, 0.02, 0.04, 0.08)),
    Method("SOBA", 0.0, 2.0, lambda step, size: SOBA(step, 1.0, 1), (0.01, 0.02, 0.05, 0.1, 0.2)),
    Method("Exact", 1.0, 0.0, lambda step, size: Exact(), (1.0,), passes=400),
)


def problem_of(size: int, seed: int = 0) -> BilevelProblem:
    """Return a quadratic problem with n = m = size / 2, in float64."""
    if size < 64 or size % 2:
        raise ValueError(f"`size={size}`: must be an even number of at least 64, or the draw is not strongly convex.")
    half = size // 2
    return quadratic(half, half, DIM_INNER, DIM_OUTER, seed, common_linear=1.0, dtype="float64")


def calls_to(
    problem: BilevelProblem, solver: SolverBase, epsilons: Sequence[float], seed: int, max_calls: int
) -> dict[float, float]:
    """Return the calls at which ||∇h||² first fell to each ε, infinite where the budget ended before."""
    if not epsilons or min(epsilons) <= 0:
        raise ValueError(f"`epsilons={tuple(epsilons)}`: must be numbers above 0.")
    every = _every(problem, solver)
    result = run(problem, solver, seed=seed, max_calls=max_calls, tolerance=min(epsilons), eval_every=every)
    norms, calls = result.history["hypergrad_norm_sq"], result.history["calls"]
    return {epsilon: min(calls[norms <= epsilon].astype(float), default=np.inf) for epsilon in epsilons}


def _every(problem: BilevelProblem, solver: SolverBase) -> int:
    return 1 if isinstance(solver, HostSolver) else max(50, (problem.n_inner + problem.n_outer) // 50)


def measure(
    method: Method,
    sizes: Sequence[int] = SIZES,
    epsilons: Sequence[float] = EPSILONS,
    seeds: Sequence[int] = range(5),
    max_calls: int = 1_000_000,
) -> Iterator[Measurement]:
    """Tune a method at the first size, then measure it at all, each run within ``max_calls`` and its passes."""
    if not sizes or not seeds:
        raise ValueError("`sizes` and `seeds` must not be empty.")
    step = _tuned(method, sizes[0], max_calls)
    for size in sizes:
        problem, solver = problem_of(size), method.solver(step, size)
        for seed in seeds[:1] if isinstance(solver, HostSolver) else seeds:
            found = calls_to(problem, solver, epsilons, seed, max_calls + method.passes * size)
            for epsilon, calls in found.items():
                yield Measurement(method.name, size, epsilon, seed, calls)


def _tuned(method: Method, size: int, max_calls: int) -> float:
    """Return the step that is stationary first at this size, by the median of three seeds."""
    if len(method.steps) == 1:
        return method.steps[0]
    problem = problem_of(size)

    def cost(step: float) -> float:
        solver = method.solver(step, size)
        runs = [calls_to(problem, solver, [TUNED_AT], seed, max_calls)[TUNED_AT] for seed in (100, 101, 102)]
        return float(np.median(runs))

    return min(method.steps, key=cost)


def slope(x: Sequence[float], y: Sequence[float]) -> Slope:
    """Fit y ~ x^a by least squares on the logarithms of the finite points."""
    from scipy.stats import linregress, t

    points = np.log([(a, b) for a, b in zip(x, y, strict=True) if np.isfinite(b)])
    if len(points) < 3 or len(np.unique(points[:, 0])) < 2:
        raise ValueError(f"a slope needs at least three finite points at two places, got {len(points)}.")
    fit = linregress(points[:, 0], points[:, 1])
    return Slope(float(fit.slope), float(t.ppf(0.975, len(points) - 2) * fit.stderr), len(points))


def medians(measurements: Sequence[Measurement], solver: str) -> dict[tuple[int, float], float]:
    """Return the median calls over seeds by (size, ε)."""
    places: dict[tuple[int, float], list[float]] = {}
    for found in measurements:
        if found.solver == solver:
            places.setdefault((found.size, found.epsilon), []).append(found.calls)
    return {place: float(np.median(calls)) for place, calls in places.items()}


def slope_in_size(measurements: Sequence[Measurement], solver: str, epsilon: float) -> Slope:
    """Return the exponent of N in the calls at one ε."""
    chosen = [found for found in measurements if found.solver == solver and found.epsilon == epsilon]
    return slope([found.size for found in chosen], [found.calls for found in chosen])


def slope_in_accuracy(measurements: Sequence[Measurement], solver: str, size: int) -> Slope:
    """Return the exponent of 1/ε in the calls at one size."""
    chosen = [found for found in measurements if found.solver == solver and found.size == size]
    return slope([1 / found.epsilon for found in chosen], [found.calls for found in chosen])


def table(measurements: Sequence[Measurement]) -> str:
    """Return the slopes in N at each ε, and in 1/ε at the largest N, in Markdown."""
    epsilons = sorted({found.epsilon for found in measurements}, reverse=True)
    largest = max(found.size for found in measurements)
    head = ["solver", "theory", *(f"ε = {epsilon:.0e}" for epsilon in epsilons), f"in 1/ε, N = {largest}"]
    lines = [head, ["---"] * len(head)]
    for method in METHODS:
        slopes = [_worded(slope_in_size, measurements, method.name, epsilon) for epsilon in epsilons]
        in_accuracy = _worded(slope_in_accuracy, measurements, method.name, largest)
        lines.append([method.name, f"{method.exponent:.2f}", *slopes, in_accuracy])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _worded(fitted: Any, measurements: Sequence[Measurement], solver: str, place: float) -> str:
    try:
        found: Slope = fitted(measurements, solver, place)
    except ValueError:
        return "not reached"
    return f"{found.value:.2f} ± {found.half_width:.2f}"


def figure(measurements: Sequence[Measurement], path: Path) -> None:
    """Draw calls against N at one ε and against 1/ε at the largest N, beside the slopes of the theory."""
    drawing = require("matplotlib.figure", "plot").Figure(figsize=(11, 4), layout="constrained")
    left, right = drawing.subplots(1, 2, subplot_kw={"xscale": "log", "yscale": "log"})
    middle = sorted({found.epsilon for found in measurements})[len({f.epsilon for f in measurements}) // 2]
    largest = max(found.size for found in measurements)
    for method in METHODS:
        calls = medians(measurements, method.name)
        at = {size: value for (size, epsilon), value in calls.items() if epsilon == middle and np.isfinite(value)}
        along = {
            1 / epsilon: value for (size, epsilon), value in calls.items() if size == largest and np.isfinite(value)
        }
        (line,) = left.plot(list(at), list(at.values()), marker="o", label=method.name)
        right.plot(sorted(along), [along[place] for place in sorted(along)], marker="o", label=method.name)
        _guide(left, at, method.exponent, line.get_color())
        _guide(right, along, method.accuracy_exponent, line.get_color())
    tenth = {size: 0.1 * value for size, value in _lowest(measurements, middle).items()}
    _guide(left, tenth, 0.5, "black", label="slope of the lower bound")
    left.set(xlabel="N = n + m", ylabel="calls", title=f"to ||∇h||² ≤ {middle:.0e} (dotted: slopes proved)")
    highest = 2 * max(found.calls for found in measurements if np.isfinite(found.calls))
    right.set(xlabel="1/ε", ylabel="calls", title=f"at N = {largest}", ylim=(None, highest))
    for axes in (left, right):
        axes.grid(alpha=0.3)
    drawing.legend(*left.get_legend_handles_labels(), loc="outside right upper")
    with replacing(path) as file:
        drawing.savefig(file, dpi=150, format=path.suffix.removeprefix("."))


def _lowest(measurements: Sequence[Measurement], epsilon: float) -> dict[int, float]:
    """Return the least median over solvers at each size."""
    found: dict[int, float] = {}
    for method in METHODS:
        for (size, at), calls in medians(measurements, method.name).items():
            if at == epsilon and np.isfinite(calls):
                found[size] = min(calls, found.get(size, np.inf))
    return found


def _guide(axes: Any, at: dict[Any, float], exponent: float, color: str, label: str | None = None) -> None:
    """Draw the power law through the first point."""
    if len(at) < 2:
        return
    places = np.array(sorted(at), float)
    axes.plot(places, at[min(at)] * (places / places[0]) ** exponent, ":", color=color, label=label)
