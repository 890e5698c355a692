"""Markdown tables and figures of the measured complexity and lower bound, made from the rows alone."""

from collections.abc import Callable, Sequence
from math import inf, isfinite
from pathlib import Path
from typing import Any

from bilevel._core.extras import Reporter, require
from bilevel._core.files import replacing
from paper import complexity, condition, lower_bound
from paper.complexity import Measurement, median_calls
from paper.condition import Derivatives
from paper.figures import write_svg
from paper.lower_bound import NORMALIZATIONS, Queries
from paper.markdown import NOT_REACHED, format_cost, markdown_table
from paper.measuring import Row, Slope, median, without_grid
from paper.methods import METHODS, Method
from paper.parts import MEASURED

FIXED_STEP = 0.01  # ρ at the smallest N in tables of steps that follow the theory
SHOWN = {"quadratic": 1e-2, "valleys": 3e-3}  # the ε at which calls are shown against N


def write_measurements(
    folder: Path,
    names: Sequence[str] = tuple(MEASURED.values()),
    *,
    quick: bool = False,
    reporter: Callable[[str], Reporter] | None = None,
) -> list[Path]:
    """Take the runs that are not yet in a folder, and write rows, figures and tables there.

    Parameters
    ----------
    folder : folder of the CSV files, figures and the page ``theory.md``
    names : which measurements: "complexity", "lower_bound" and "condition", or some of them
    quick : measure little, in seconds
    reporter : returns a function that shows the progress of a measurement, given its name

    Returns
    -------
    paths : of figures and page
    """
    measures: dict[str, Callable[..., Any]] = {"complexity": complexity.measure_complexity}
    measures |= {"lower_bound": lower_bound.measure_lower_bound, "condition": condition.measure_condition}
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
    conditioned = condition.read_derivatives(folder / "condition.csv")
    drawn = [draw_complexity(rows, folder / "complexity.svg")] if rows else []
    drawn += [draw_lower_bound(found, folder / "lower_bound.svg")] if found else []
    drawn += [draw_condition(conditioned, folder / "condition.svg")] if conditioned else []
    with replacing(folder / "theory.md") as file:
        file.write(theory_page(rows, found, conditioned).encode())
    return [*drawn, folder / "theory.md"]


def theory_page(rows: Sequence[Measurement], found: Sequence[Queries], conditioned: Sequence[Derivatives] = ()) -> str:
    """Return a page with all tables."""
    parts = ["# Theory, measured"]
    for problem in dict.fromkeys(row.problem for row in rows):
        mine = [row for row in rows if row.problem == problem]
        epsilon, size = _shown(mine), min(row.size for row in mine)
        parts += [f"## {problem}: calls to ‖∇h‖² ≤ {epsilon:g}", complexity_table(rows, problem)]
        parts += [f"## {problem}: calls at N = {size}", accuracy_table(rows, problem)]
        parts += [f"## {problem}: exponents, steps following the theory", scaling_table(rows, problem)]
        parts += [f"## {problem}: periods of SRBA, steps following the theory", regime_table(rows, problem)]
    if found:
        parts += ["## Queries of rows of F on the worst case", lower_bound_table(found)]
    for problem in dict.fromkeys(row.problem for row in conditioned):
        parts += [f"## {problem}: derivatives of rows of G, against κ", condition_table(conditioned, problem)]
    return "\n\n".join(parts) + "\n"


def complexity_table(rows: Sequence[Measurement], problem: str, epsilon: float | None = None) -> str:
    """Return the median calls to one ε, by default that of `SHOWN`, at each N, with the exponent of N."""
    rows = [row for row in rows if row.problem == problem]
    epsilon = _shown(rows) if epsilon is None else epsilon
    sizes = sorted({row.size for row in rows})
    lines = []
    for method in _methods(rows):
        own = [row for row in rows if (row.solver, row.epsilon) == (method.name, epsilon)]
        cells = [_median_cost([row for row in own if row.size == size]) for size in sizes]
        slope = _slope(complexity.slope_in_size, rows, problem, method.name, epsilon)
        lines.append([method.name, method.bound, *cells, slope])
    return markdown_table(["method", "proved", *(f"N = {size}" for size in sizes), "exponent of N"], lines)


def accuracy_table(rows: Sequence[Measurement], problem: str, size: int | None = None) -> str:
    """Return the median calls at one N, the smallest by default, to each ε, with the exponent of 1/ε."""
    rows = [row for row in rows if row.problem == problem]
    size = min(row.size for row in rows) if size is None else size
    epsilons = sorted({row.epsilon for row in rows}, reverse=True)
    lines = []
    for method in _methods(rows):
        own = [row for row in rows if (row.solver, row.size) == (method.name, size)]
        cells = [_median_cost([row for row in own if row.epsilon == epsilon]) for epsilon in epsilons]
        slope = _slope(complexity.slope_in_accuracy, rows, problem, method.name, size)
        lines.append([method.name, method.bound, *cells, slope])
    head = ["method", "proved", *(f"ε = {epsilon:g}" for epsilon in epsilons), "exponent of 1/ε"]
    return markdown_table(head, lines)


def scaling_table(rows: Sequence[Measurement], problem: str) -> str:
    """Return exponents of N at each ε, and of 1/ε at the smallest N, with steps that follow the theory."""
    mine = complexity.with_step([row for row in rows if row.problem == problem], FIXED_STEP)
    epsilons, size = sorted({row.epsilon for row in mine}, reverse=True), min((row.size for row in mine), default=0)
    lines = []
    for name in ("SRBA", "SABA"):
        in_size = [_slope(complexity.slope_in_size, mine, problem, name, epsilon) for epsilon in epsilons]
        in_accuracy = _slope(complexity.slope_in_accuracy, mine, problem, name, size)
        lines.append([name, next(method.bound for method in METHODS if method.name == name), *in_size, in_accuracy])
    head = ["method", "proved", *(f"of N, ε = {epsilon:g}" for epsilon in epsilons), f"of 1/ε, N = {size}"]
    return markdown_table(head, lines)


def regime_table(rows: Sequence[Measurement], problem: str) -> str:
    """Return the number of periods that SRBA took to each ε at each N, with steps that follow the theory.

    A period costs 12.5 N calls, of which the full-batch pass takes 2.5 N. With more than one period the term N^(1/2)/ε
    dominates, with less than one the term N, which is that pass.
    """
    calls = median_calls(complexity.with_step(rows, FIXED_STEP), problem, "SRBA")
    sizes, epsilons = sorted({size for size, _ in calls}), sorted({epsilon for _, epsilon in calls}, reverse=True)
    lines = []
    for epsilon in epsilons:
        here = [calls.get((size, epsilon), inf) / (12.5 * size - 10) for size in sizes]
        lines.append([f"{epsilon:g}", *map(format_cost, here)])
    return markdown_table(["ε", *(f"N = {size}" for size in sizes)], lines)


def lower_bound_table(rows: Sequence[Queries]) -> str:
    """Return the bound and the median queries of each solver, in both classes, with the exponents of m."""
    sizes = sorted({row.n_outer for row in rows})
    lines = []
    for normalization in NORMALIZATIONS:
        bounds = {row.n_outer: row.bound for row in rows if row.normalization == normalization}
        slope = _slope(lower_bound.slope_of_bound, rows, normalization)
        lines.append([normalization, "bound", *(format_cost(bounds[m]) for m in sizes), slope])
        for solver in lower_bound.SOLVERS:
            if found := lower_bound.measured(rows, normalization, solver):
                cells = [_median_cost([row for row in found if row.n_outer == m]) for m in sizes]
                slope = _slope(lower_bound.slope_in_rows, rows, normalization, solver)
                lines.append([normalization, solver, *cells, slope])
    return markdown_table(["class", "", *(f"m = {m}" for m in sizes), "exponent of m"], lines)


def condition_table(rows: Sequence[Derivatives], problem: str) -> str:
    """Return the bound, if there is one, and the median derivatives of each method at each κ, with exponents of κ."""
    rows = [row for row in rows if row.problem == problem]
    bounds = {row.kappa: row.bound for row in rows}
    lines = []
    if all(map(isfinite, bounds.values())):
        cells = [format_cost(bounds[kappa]) for kappa in sorted(bounds)]
        lines.append(["lower bound", "–", *cells, _slope(condition.slope_in_kappa, rows, problem, "bound")])
    for solver, candidate in condition.CANDIDATES.items():
        if found := condition.measured(rows, problem, solver):
            cells = [_median_cost([row for row in found if row.kappa == kappa]) for kappa in sorted(bounds)]
            known = candidate.known.get(problem)
            slope = _slope(condition.slope_in_kappa, rows, problem, solver)
            lines.append([solver, "–" if known is None else f"{known:g}", *cells, slope])
    return markdown_table(
        ["", "known exponent", *(f"κ = {kappa:g}" for kappa in sorted(bounds)), "exponent of κ"], lines
    )


def _methods(rows: Sequence[Measurement]) -> list[Method]:
    there = {row.solver for row in rows}
    return [method for method in METHODS if method.name in there]


def _shown(rows: Sequence[Measurement]) -> float:
    """Return the ε of `SHOWN`, or the middle one if that was not measured."""
    epsilons, shown = sorted({row.epsilon for row in rows}), SHOWN.get(rows[0].problem)
    return shown if shown in epsilons else epsilons[len(epsilons) // 2]


def _median_cost(rows: Sequence[Row]) -> str:
    """Return the median cost without the grid, or the lowest ||∇h||² if the median is infinite."""
    rows = without_grid(rows)
    if not rows:
        return "–"
    cost = median([row.cost for row in rows])
    return format_cost(cost) if isfinite(cost) else f"{NOT_REACHED} ({median([row.lowest for row in rows]):.2g})"


def _slope(fit: Callable[..., Slope], *arguments: Any) -> str:
    try:
        found = fit(*arguments)
    except ValueError:
        return "–"
    return f"{found.value:.2f} ± {found.half_width:.2f}"


def draw_complexity(rows: Sequence[Measurement], path: Path) -> Path:
    """Draw, for each problem, calls against N at one ε and against 1/ε at the smallest N; return the path."""

    def draw() -> Any:
        problems = list(dict.fromkeys(row.problem for row in rows))
        figure, axes = _make_panels(len(problems), 2)
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
        return _with_legend(figure)

    return write_svg(path, draw)


def draw_lower_bound(rows: Sequence[Queries], path: Path) -> Path:
    """Draw queries of rows of F against m next to the bound, with a panel for each class; return the path."""

    def draw() -> Any:
        figure, ((*axes,),) = _make_panels(1, 2)
        for panel, normalization in zip(axes, NORMALIZATIONS, strict=True):
            bounds = {row.n_outer: row.bound for row in rows if row.normalization == normalization}
            for index, solver in enumerate(lower_bound.SOLVERS):
                found = lower_bound.measured(rows, normalization, solver)
                sizes = sorted({row.n_outer for row in found})
                medians = {m: median([row.queries for row in found if row.n_outer == m]) for m in sizes}
                _draw_line(panel, medians, f"C{index}", solver)
            panel.plot(sorted(bounds), [bounds[m] for m in sorted(bounds)], "k--", label="lower bound m T / 2")
            smooth = "each F_j is L-smooth" if normalization == "individual" else "F_j L-smooth in mean square"
            panel.set(xlabel="m", ylabel="queries of rows of F", title=smooth)
        return _with_legend(figure)

    return write_svg(path, draw)


def draw_condition(rows: Sequence[Derivatives], path: Path) -> Path:
    """Draw derivatives of rows of G against κ on each problem, next to the bound; return the path."""

    def draw() -> Any:
        problems = list(dict.fromkeys(row.problem for row in rows))
        columns = len(problems) if len(problems) % 2 else 2
        figure, axes = _make_panels(len(problems) // columns, columns)
        for panel, problem in zip(axes.flat, problems, strict=True):
            for index, (solver, candidate) in enumerate(condition.CANDIDATES.items()):
                found = condition.measured(rows, problem, solver)
                kappas = sorted({row.kappa for row in found})
                medians = {kappa: median([row.cost for row in found if row.kappa == kappa]) for kappa in kappas}
                _draw_line(panel, medians, f"C{index}", solver, candidate.known.get(problem))
            bounds = sorted({(row.kappa, row.bound) for row in rows if row.problem == problem and isfinite(row.bound)})
            if bounds:
                panel.plot(*zip(*bounds, strict=True), "k--", label="lower bound")
            panel.set(xlabel="κ", ylabel="derivatives of rows of G", title=problem)
        return _with_legend(figure)

    return write_svg(path, draw)


def _make_panels(n_rows: int, n_columns: int) -> tuple[Any, Any]:
    size = (3.2 * n_columns + 0.8, 2.5 * n_rows)
    figure = require("matplotlib.figure", "plot").Figure(figsize=size, layout="constrained")
    panels = figure.subplots(n_rows, n_columns, squeeze=False, subplot_kw={"xscale": "log", "yscale": "log"})
    for axes in panels.flat:
        axes.minorticks_off()
    return figure, panels


def _draw_line(axes: Any, points: dict[Any, float], color: str, label: str, exponent: float | None = None) -> None:
    """Draw the finite points, and the power law that is proved as a dotted line through the leftmost one."""
    places = sorted(place for place, found in points.items() if isfinite(found))
    if not places:
        return
    axes.plot(places, [points[place] for place in places], "o-", color=color, label=label, markersize=3)
    if exponent is not None and len(places) > 1:
        law = [points[places[0]] * (place / places[0]) ** exponent for place in places]
        axes.plot(places, law, ":", color=color, linewidth=1)


def _with_legend(figure: Any) -> Any:
    lines: dict[str, Any] = {}
    for axes in figure.axes:
        axes.grid(alpha=0.3)
        # Power laws may leave the panel, which ends at the measured points.
        highest = max(max(line.get_ydata()) for line in axes.lines if line.get_linestyle() != ":")
        axes.set_ylim(None, 3 * highest)
        lines |= {label: line for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(list(lines.values()), list(lines), loc="outside right upper")
    return figure
