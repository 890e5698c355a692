"""Tables in Markdown and figures in SVG, from rows of measurements alone; the same rows give the same bytes."""

from collections.abc import Callable, Sequence
from math import inf, isfinite
from pathlib import Path
from typing import Any

from bilevel._io import replacing
from bilevel._optional import require
from bilevel._progress import Reporter
from paper import complexity, lower_bound
from paper.complexity import Measurement, Slope, median, median_calls
from paper.lower_bound import NORMALIZATIONS, Queries
from paper.methods import METHODS, Method

FIXED_STEP = 0.01  # ρ at the smallest N, where steps follow the theory from there
SHOWN = {"quadratic": 1e-2, "valleys": 3e-3}  # the ε at which calls are shown against N
_NOT_REACHED = "not reached"


def complexity_table(rows: Sequence[Measurement], problem: str, epsilon: float | None = None) -> str:
    """Return median calls to one ε, that of `SHOWN` by default, at each N, with the exponent of N."""
    rows = [row for row in rows if row.problem == problem]
    epsilon = _shown(rows) if epsilon is None else epsilon
    sizes = sorted({row.size for row in rows})
    lines = [["method", "proved", *(f"N = {size}" for size in sizes), "exponent of N"]]
    for method in _methods(rows):
        cells = [_calls(rows, method.name, size, epsilon) for size in sizes]
        slope = _slope(complexity.slope_in_size, rows, problem, method.name, epsilon)
        lines.append([method.name, method.bound, *cells, slope])
    return _markdown(lines)


def accuracy_table(rows: Sequence[Measurement], problem: str, size: int | None = None) -> str:
    """Return median calls at one N, the smallest by default, to each ε, with the exponent of 1/ε."""
    rows = [row for row in rows if row.problem == problem]
    size = min(row.size for row in rows) if size is None else size
    epsilons = sorted({row.epsilon for row in rows}, reverse=True)
    lines = [["method", "proved", *(f"ε = {epsilon:g}" for epsilon in epsilons), "exponent of 1/ε"]]
    for method in _methods(rows):
        cells = [_calls(rows, method.name, size, epsilon) for epsilon in epsilons]
        slope = _slope(complexity.slope_in_accuracy, rows, problem, method.name, size)
        lines.append([method.name, method.bound, *cells, slope])
    return _markdown(lines)


def scaling_table(rows: Sequence[Measurement], problem: str) -> str:
    """Return exponents of N at each ε, and of 1/ε at the smallest N, with one step that follows the theory."""
    mine = complexity.with_step([row for row in rows if row.problem == problem], FIXED_STEP)
    epsilons, size = sorted({row.epsilon for row in mine}, reverse=True), min((row.size for row in mine), default=0)
    lines = [["method", "proved", *(f"of N, ε = {epsilon:g}" for epsilon in epsilons), f"of 1/ε, N = {size}"]]
    for name in ("SRBA", "SABA"):
        in_size = [_slope(complexity.slope_in_size, mine, problem, name, epsilon) for epsilon in epsilons]
        in_accuracy = _slope(complexity.slope_in_accuracy, mine, problem, name, size)
        lines.append([name, next(method.bound for method in METHODS if method.name == name), *in_size, in_accuracy])
    return _markdown(lines)


def regime_table(rows: Sequence[Measurement], problem: str) -> str:
    """Return how many periods SRBA took to each ε at each N, its steps following the theory.

    A period costs 12.5 N calls, 2.5 N of them for the full-batch pass. Above one period the term N^(1/2)/ε rules; below
    it the term N, which is that pass.
    """
    calls = median_calls(complexity.with_step(rows, FIXED_STEP), problem, "SRBA")
    sizes, epsilons = sorted({size for size, _ in calls}), sorted({epsilon for _, epsilon in calls}, reverse=True)
    lines = [["ε", *(f"N = {size}" for size in sizes)]]
    for epsilon in epsilons:
        here = [calls.get((size, epsilon), inf) / (12.5 * size - 10) for size in sizes]
        lines.append([f"{epsilon:g}", *map(_number, here)])
    return _markdown(lines)


def lower_bound_table(rows: Sequence[Queries]) -> str:
    """Return the bound and the median queries of each solver, in both classes, with the exponents of m."""
    sizes = sorted({row.n_outer for row in rows})
    lines = [["class", "", *(f"m = {m}" for m in sizes), "exponent of m"]]
    for normalization in NORMALIZATIONS:
        bounds = {row.n_outer: row.bound for row in rows if row.normalization == normalization}
        slope = _slope(lower_bound.slope_of_bound, rows, normalization)
        lines.append([normalization, "bound", *(_number(bounds[m]) for m in sizes), slope])
        for solver in lower_bound.SOLVERS:
            found = lower_bound.measured(rows, normalization, solver)
            slope = _slope(lower_bound.slope_in_rows, rows, normalization, solver)
            if found:
                lines.append([normalization, solver, *(_queries(found, m) for m in sizes), slope])
    return _markdown(lines)


MEASURED = ("complexity", "lower_bound")


def write_measurements(
    folder: Path,
    names: Sequence[str] = MEASURED,
    *,
    quick: bool = False,
    reporter: Callable[[str], Reporter] | None = None,
) -> list[Path]:
    """Measure what is not yet in a folder, and write rows, figures and tables there; `reporter` makes one by title."""
    measures: dict[str, Callable[..., Any]] = {"complexity": complexity.measure_complexity}
    measures["lower_bound"] = lower_bound.measure_lower_bound
    for name in names:
        progress = reporter(name) if reporter else None
        measures[name](quick=quick, path=folder / f"{name}.csv", progress=progress)
        if progress:
            progress(1.0, name)
    return draw_measurements(folder)


def draw_measurements(folder: Path) -> list[Path]:
    """Write figures and tables from the rows in a folder, and return their paths."""
    rows = complexity.read_measurements(folder / "complexity.csv")
    found = lower_bound.read_queries(folder / "lower_bound.csv")
    drawn = []
    if rows:
        drawn.append(folder / "complexity.svg")
        draw_complexity(rows, drawn[-1])
    if found:
        drawn.append(folder / "lower_bound.svg")
        draw_lower_bound(found, drawn[-1])
    with replacing(folder / "theory.md") as file:
        file.write(theory_page(rows, found).encode())
    return [*drawn, folder / "theory.md"]


def theory_page(rows: Sequence[Measurement], found: Sequence[Queries]) -> str:
    """Return all tables under their headings."""
    parts = []
    for problem in dict.fromkeys(row.problem for row in rows):
        mine = [row for row in rows if row.problem == problem]
        epsilon, size = _shown(mine), min(row.size for row in mine)
        parts += [f"## {problem}: calls to ‖∇h‖² ≤ {epsilon:g}", complexity_table(rows, problem)]
        parts += [f"## {problem}: calls at N = {size}", accuracy_table(rows, problem)]
        parts += [f"## {problem}: exponents, steps following the theory", scaling_table(rows, problem)]
        parts += [f"## {problem}: periods of SRBA, steps following the theory", regime_table(rows, problem)]
    last = ["## Queries of rows of F on the worst case", lower_bound_table(found)] if found else []
    return "\n\n".join(["# Theory, measured", *(part.strip() for part in parts + last)]) + "\n"


def _methods(rows: Sequence[Measurement]) -> list[Method]:
    there = {row.solver for row in rows}
    return [method for method in METHODS if method.name in there]


def _shown(rows: Sequence[Measurement]) -> float:
    """Return the ε to show of a problem; the middle one where that is not measured."""
    epsilons, shown = sorted({row.epsilon for row in rows}), SHOWN.get(rows[0].problem)
    return shown if shown in epsilons else epsilons[len(epsilons) // 2]


def _calls(rows: Sequence[Measurement], solver: str, size: int, epsilon: float) -> str:
    there = [row for row in rows if (row.solver, row.size, row.epsilon) == (solver, size, epsilon)]
    mine = [row for row in there if row.seed < complexity.FIRST_TUNING_SEED]
    return _median([row.calls for row in mine], [row.lowest for row in mine])


def _queries(rows: Sequence[Queries], m: int) -> str:
    mine = [row for row in rows if row.n_outer == m]
    return _median([row.queries for row in mine], [row.lowest for row in mine])


def _median(costs: list[float], lowest: list[float]) -> str:
    """Return the median of costs, or what the lowest ||∇h||² was where it is infinite."""
    if not costs:
        return "–"
    cost = median(costs)
    return _number(cost) if isfinite(cost) else f"{_NOT_REACHED} ({median(lowest):.2g})"


def _median_queries(rows: Sequence[Queries]) -> dict[int, float]:
    sizes = sorted({row.n_outer for row in rows})
    return {m: median([row.queries for row in rows if row.n_outer == m]) for m in sizes}


def _number(value: float) -> str:
    if not isfinite(value):
        return _NOT_REACHED
    return f"{value:.2g}" if value < 10 else f"{float(f'{value:.3g}'):,.0f}".replace(",", " ")


def _slope(fit: Callable[..., Slope], *arguments: Any) -> str:
    try:
        found = fit(*arguments)
    except ValueError:
        return "–"
    return f"{found.value:.2f} ± {found.half_width:.2f}"


def _markdown(lines: list[list[str]]) -> str:
    head, *rest = lines
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *rest]) + "\n"


def draw_complexity(rows: Sequence[Measurement], path: Path) -> None:
    """Draw, for each problem, calls against N at one ε and against 1/ε at the smallest N."""
    problems = list(dict.fromkeys(row.problem for row in rows))
    figure, axes = _figure(len(problems), 2)
    for problem, (left, right) in zip(problems, axes, strict=True):
        mine = [row for row in rows if row.problem == problem]
        epsilon, size = _shown(mine), min(row.size for row in mine)
        for index, method in enumerate(METHODS):
            calls = median_calls(mine, problem, method.name)
            in_size = {n: found for (n, at), found in calls.items() if at == epsilon}
            in_accuracy = {1 / at: found for (n, at), found in calls.items() if n == size}
            _draw_line(left, in_size, f"C{index}", method.name, method.in_size)
            _draw_line(right, in_accuracy, f"C{index}", method.name, method.in_accuracy)
        left.set(xlabel="N = n + m", ylabel="oracle calls", title=f"{problem}: to ‖∇h‖² ≤ {epsilon:g}")
        right.set(xlabel="1/ε", title=f"{problem}: at N = {size}")
    _save(figure, path)


def draw_lower_bound(rows: Sequence[Queries], path: Path) -> None:
    """Draw queries of rows of F against m beside the bound, a panel for each class."""
    figure, ((*axes,),) = _figure(1, 2)
    for panel, normalization in zip(axes, NORMALIZATIONS, strict=True):
        bounds = {row.n_outer: row.bound for row in rows if row.normalization == normalization}
        for index, solver in enumerate(lower_bound.SOLVERS):
            found = _median_queries(lower_bound.measured(rows, normalization, solver))
            _draw_line(panel, found, f"C{index}", solver)
        panel.plot(sorted(bounds), [bounds[m] for m in sorted(bounds)], "k--", label="lower bound m T / 2")
        smooth = "each F_j is L-smooth" if normalization == "individual" else "F_j L-smooth in mean square"
        panel.set(xlabel="m", ylabel="queries of rows of F", title=smooth)
    _save(figure, path)


def _figure(n_rows: int, n_columns: int) -> tuple[Any, Any]:
    figure = require("matplotlib.figure", "plot").Figure(
        figsize=(4.6 * n_columns + 1, 3.4 * n_rows), layout="constrained"
    )
    return figure, figure.subplots(n_rows, n_columns, squeeze=False, subplot_kw={"xscale": "log", "yscale": "log"})


def _draw_line(axes: Any, points: dict[Any, float], color: str, label: str, exponent: float | None = None) -> None:
    """Draw the finite points, and from the first of them on the power law that is proved."""
    places = sorted(place for place, found in points.items() if isfinite(found))
    if not places:
        return
    axes.plot(places, [points[place] for place in places], "o-", color=color, label=label, markersize=3)
    if exponent is not None and len(places) > 1:
        law = [points[places[0]] * (place / places[0]) ** exponent for place in places]
        axes.plot(places, law, ":", color=color, linewidth=1)


def _end_at_points(axes: Any) -> None:
    """Let laws that leave the measured range leave the panel."""
    highest = max(max(line.get_ydata()) for line in axes.lines if line.get_linestyle() != ":")
    axes.set_ylim(None, 3 * highest)


def _save(figure: Any, path: Path) -> None:
    lines: dict[str, Any] = {}
    for axes in figure.axes:
        axes.grid(alpha=0.3)
        _end_at_points(axes)
        lines |= {label: line for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(list(lines.values()), list(lines), loc="outside right upper")
    settings = {"svg.hashsalt": "bilevel", "svg.fonttype": "none"}
    with require("matplotlib", "plot").rc_context(settings), replacing(path) as file:
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
