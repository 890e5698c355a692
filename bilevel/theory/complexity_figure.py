"""The measured complexities as a table and a figure."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bilevel.atomic import replacing
from bilevel.extras import require
from bilevel.theory.complexity import METHODS, Measurement, Slope, medians, slope_in_accuracy, slope_in_size


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


def _guide(axes: Any, at: dict[Any, float], exponent: float, colour: str, label: str | None = None) -> None:
    """Draw the power law through the first point."""
    if len(at) < 2:
        return
    places = np.array(sorted(at), float)
    axes.plot(places, at[min(at)] * (places / places[0]) ** exponent, ":", color=colour, label=label)
