"""Measured complexity: how the calls to a stationary point grow with the number of samples and the accuracy asked for.

What is proved, with N = n + m: to reach ||∇h||² <= ε SRBA with ρ ~ N^(-1/2), q = N needs O(N^(1/2) ε^-1 + N) calls (the
sample-complexity corollary), SABA with ρ ~ N^(-2/3) needs O(N^(2/3) ε^-1 + N), SOBA O(ε^-2) whatever N, and a
full-batch method O(N). No linear method does better than Ω(N^(1/2) ε^-1) on a whole class.

What is measured: quadratics of growing size and equal conditioning. A step size is tuned at the smallest size, then
scaled as the theory says; the calls until ||∇h||² first falls to ε are read off runs of several seeds.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import linregress, t

from bilevel._io import replacing
from bilevel._optional import require
from bilevel.engine.run import run
from bilevel.problems import BilevelProblem, quadratic
from bilevel.solvers import SABA, SOBA, SRBA, Exact, HostSolver, SolverBase

DIM_INNER, DIM_OUTER = 10, 5
SIZES = (256, 1024, 4096, 16384, 65536)
TUNED_AT = 1e-2  # the ε at which a step size is chosen
EPSILONS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)


class Measurement(NamedTuple):
    """Calls of one run until ||∇h||² <= ε for the first time; infinite where it never came there."""

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
    """A solver whose steps and period follow the size as its theory says."""

    name: str
    proved_exponent: float  # of N in the number of calls, at a fixed ε
    proved_accuracy_exponent: float  # of 1/ε, at a fixed N
    solver: Callable[[float, int], SolverBase]  # from a step at the smallest size, and the size
    steps: tuple[float, ...]  # tried at the smallest size; one value where nothing is to be tuned
    passes: int = 40  # over the data that a run may take on top of its budget of calls


_STEPS = (0.01, 0.02, 0.04, 0.08)
METHODS = (
    Method("SRBA", 1 / 2, 1.0, lambda step, size: SRBA(step * (size / SIZES[0]) ** -0.5, 1.0, 1, period=size), _STEPS),
    Method("SABA", 2 / 3, 1.0, lambda step, size: SABA(step * (size / SIZES[0]) ** (-2 / 3), 1.0, 1), _STEPS),
    Method("SOBA", 0.0, 2.0, lambda step, size: SOBA(step, 1.0, 1), (0.01, 0.02, 0.05, 0.1, 0.2)),
    Method("Exact", 1.0, 0.0, lambda step, size: Exact(), (1.0,), passes=400),
)


def make_problem(size: int, seed: int = 0) -> BilevelProblem:
    """Return a quadratic problem with n = m = size / 2, in float64."""
    if size < 64 or size % 2:
        raise ValueError(f"`size={size}`: must be an even number of at least 64, or the draw is not strongly convex.")
    return quadratic(size // 2, size // 2, DIM_INNER, DIM_OUTER, seed, common_linear=1.0, dtype="float64")


def calls_to(
    problem: BilevelProblem, solver: SolverBase, epsilons: Sequence[float], seed: int, max_calls: int
) -> dict[float, float]:
    """Return the calls at which ||∇h||² first fell to each ε, infinite where the budget ended before."""
    if not epsilons or min(epsilons) <= 0:
        raise ValueError(f"`epsilons={tuple(epsilons)}`: must be numbers above 0.")
    every = 1 if isinstance(solver, HostSolver) else max(50, (problem.n_inner + problem.n_outer) // 50)
    result = run(problem, solver, seed=seed, max_calls=max_calls, tolerance=min(epsilons), eval_every=every)
    norms, calls = result.history["hypergrad_norm_sq"], result.history["calls"]
    return {epsilon: min(calls[norms <= epsilon].astype(float), default=np.inf) for epsilon in epsilons}


def measure_complexity(
    method: Method,
    sizes: Sequence[int] = SIZES,
    epsilons: Sequence[float] = EPSILONS,
    seeds: Sequence[int] = range(5),
    max_calls: int = 1_000_000,
) -> Iterator[Measurement]:
    """Tune a method at the first size, then measure it at all, each run within ``max_calls`` and its passes."""
    if not sizes or not seeds:
        raise ValueError("`sizes` and `seeds` must not be empty.")
    step = _tune(method, sizes[0], max_calls)
    for size in sizes:
        problem, solver = make_problem(size), method.solver(step, size)
        for seed in seeds[:1] if isinstance(solver, HostSolver) else seeds:
            found = calls_to(problem, solver, epsilons, seed, max_calls + method.passes * size)
            for epsilon, calls in found.items():
                yield Measurement(method.name, size, epsilon, seed, calls)


def _tune(method: Method, size: int, max_calls: int) -> float:
    """Return the step that is stationary first at this size, by the median of three seeds."""
    if len(method.steps) == 1:
        return method.steps[0]
    problem, costs = make_problem(size), []
    for solver in (method.solver(step, size) for step in method.steps):
        runs = [calls_to(problem, solver, [TUNED_AT], seed, max_calls)[TUNED_AT] for seed in (100, 101, 102)]
        costs.append(np.median(runs))
    return method.steps[int(np.argmin(costs))]


def fit_slope(x: Sequence[float], y: Sequence[float]) -> Slope:
    """Fit y ~ x^a by least squares on the logarithms of the finite points."""
    points = np.log([(a, b) for a, b in zip(x, y, strict=True) if np.isfinite(b)])
    if len(points) < 3 or len(np.unique(points[:, 0])) < 2:
        raise ValueError(f"a slope needs at least three finite points at two places, got {len(points)}.")
    fit = linregress(points[:, 0], points[:, 1])
    return Slope(float(fit.slope), float(t.ppf(0.975, len(points) - 2) * fit.stderr), len(points))


def slope_in_size(measurements: Sequence[Measurement], solver: str, epsilon: float) -> Slope:
    """Return the exponent of N in the calls at one ε."""
    chosen = [found for found in measurements if found.solver == solver and found.epsilon == epsilon]
    return fit_slope([found.size for found in chosen], [found.calls for found in chosen])


def slope_in_accuracy(measurements: Sequence[Measurement], solver: str, size: int) -> Slope:
    """Return the exponent of 1/ε in the calls at one size."""
    chosen = [found for found in measurements if found.solver == solver and found.size == size]
    return fit_slope([1 / found.epsilon for found in chosen], [found.calls for found in chosen])


def table(measurements: Sequence[Measurement]) -> str:
    """Return the slopes in N at each ε, and in 1/ε at the largest N, in Markdown."""
    epsilons = sorted({found.epsilon for found in measurements}, reverse=True)
    largest = max(found.size for found in measurements)
    head = ["solver", "theory", *(f"ε = {epsilon:.0e}" for epsilon in epsilons), f"in 1/ε, N = {largest}"]
    lines = [head, ["---"] * len(head)]
    for method in METHODS:
        slopes = [_format_slope(slope_in_size, measurements, method.name, epsilon) for epsilon in epsilons]
        in_accuracy = _format_slope(slope_in_accuracy, measurements, method.name, largest)
        lines.append([method.name, f"{method.proved_exponent:.2f}", *slopes, in_accuracy])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _format_slope(fit: Any, measurements: Sequence[Measurement], solver: str, place: float) -> str:
    try:
        found: Slope = fit(measurements, solver, place)
    except ValueError:
        return "not reached"
    return f"{found.value:.2f} ± {found.half_width:.2f}"


def figure(measurements: Sequence[Measurement], path: Path) -> None:
    """Draw calls against N at one ε and against 1/ε at the largest N, beside the slopes of the theory."""
    drawing = require("matplotlib.figure", "plot").Figure(figsize=(11, 4), layout="constrained")
    left, right = drawing.subplots(1, 2, subplot_kw={"xscale": "log", "yscale": "log"})
    epsilons, largest = sorted({found.epsilon for found in measurements}), max(found.size for found in measurements)
    middle, lowest = epsilons[len(epsilons) // 2], dict[float, float]()
    for method in METHODS:
        calls = _median_calls(measurements, method.name)
        in_size = {size: value for (size, epsilon), value in calls.items() if epsilon == middle}
        in_accuracy = {1 / epsilon: value for (size, epsilon), value in calls.items() if size == largest}
        (line,) = left.plot(list(in_size), list(in_size.values()), marker="o", label=method.name)
        right.plot(sorted(in_accuracy), [in_accuracy[k] for k in sorted(in_accuracy)], marker="o", label=method.name)
        _draw_power_law(left, in_size, method.proved_exponent, line.get_color())
        _draw_power_law(right, in_accuracy, method.proved_accuracy_exponent, line.get_color())
        lowest |= {size: min(value, lowest.get(size, np.inf)) for size, value in in_size.items()}
    tenth = {size: 0.1 * value for size, value in lowest.items()}
    _draw_power_law(left, tenth, 0.5, "black", label="slope of the lower bound")
    left.set(xlabel="N = n + m", ylabel="calls", title=f"to ||∇h||² ≤ {middle:.0e} (dotted: slopes proved)")
    highest = 2 * max(found.calls for found in measurements if np.isfinite(found.calls))
    right.set(xlabel="1/ε", ylabel="calls", title=f"at N = {largest}", ylim=(None, highest))
    for axes in (left, right):
        axes.grid(alpha=0.3)
    drawing.legend(*left.get_legend_handles_labels(), loc="outside right upper")
    with replacing(path) as file:
        drawing.savefig(file, dpi=150, format=path.suffix.removeprefix("."))


def _median_calls(measurements: Sequence[Measurement], solver: str) -> dict[tuple[int, float], float]:
    """Return the median calls over seeds by (size, ε), where it is finite."""
    calls: dict[tuple[int, float], list[float]] = {}
    for found in measurements:
        if found.solver == solver:
            calls.setdefault((found.size, found.epsilon), []).append(found.calls)
    return {place: median for place in calls if np.isfinite(median := float(np.median(calls[place])))}


def _draw_power_law(axes: Any, at: dict[Any, float], exponent: float, color: str, label: str | None = None) -> None:
    if len(at) > 1:
        places = np.array(sorted(at), float)
        axes.plot(places, at[min(at)] * (places / places[0]) ** exponent, ":", color=color, label=label)
