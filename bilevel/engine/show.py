"""Results as HTML, as data frames and as figures with bands over seeds."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from bilevel._core.extras import html_table, require
from bilevel.engine import metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCALES = ("calls", "seconds")
_BAND = (0.2, 0.5, 0.8)  # quantiles over seeds: the ends of the band, and the line


Shown: TypeAlias = Any  # a RunResult, whose module imports this one
Runs: TypeAlias = Sequence[Shown]


def as_html(run: Shown) -> str:
    """Return status, costs, final values and the history of the default metric as a small table."""
    last = {name: column[-1] for name, column in run.history.items()}
    rows = {
        "status": f"{run.status}: {run.reason or run.status.sentence}",
        "cost": f"{last['step']:,} steps, {last['calls']:,} oracle calls = {last['epochs']:.4g} epochs",
    }
    rows["cost"] += f", {last['seconds']:.3g} s"
    for name, entry in metrics.METRICS.items():
        if entry.in_tables and name in last:
            rows[entry.title] = f"{run.history[name][0]:.6g} → {last[name]:.6g}"
    metric = metrics.default_metric(run.history)
    line = (metric.title, run.history[metric.name].tolist()) if metric.name in run.history else None
    parameters = ", ".join(f"{name}={value}" for name, value in run.solver.parameters().items() if value is not None)
    title = f"{type(run.solver).__name__}({parameters}) on {run.problem.name}, seed {run.seed}"
    return html_table(title, rows, line)


def as_dataframe(run: Shown) -> Any:
    """Return the history as a pandas DataFrame that begins with columns for solver, problem and seed."""
    labels = {"solver": type(run.solver).__name__, "problem": run.problem.name, "seed": run.seed}
    size = len(run.history["step"])
    columns = {name: [value] * size for name, value in labels.items()} | run.history
    return require("pandas", "bench").DataFrame(columns)


def plot(results: Shown | Runs | Mapping[str, Shown | Runs], metric: str | None = None) -> "Figure":
    """Plot a metric of one or more runs against calls and against seconds.

    Runs that differ only in their seeds are shown as their median, with a band from the 20 % to the 80 % quantile.

    Parameters
    ----------
    results : a result, a list of them, or a dict of results or lists of results by label
    metric : a column of the histories; by default ‖∇h‖², or F if that is unknown

    Examples
    --------
    >>> import bilevel
    >>> problem = bilevel.problems.quadratic(100, 50, 5, 3)
    >>> runs = [bilevel.run(problem, bilevel.SOBA(batch_size=10), seed=seed, max_steps=50) for seed in range(3)]
    >>> [axes.get_xlabel() for axes in bilevel.plot(runs).axes]
    ['calls', 'seconds']
    """
    groups = _label(results)
    runs = [run for group in groups.values() for run in group]
    known = [name for name in runs[0].history if all(name in run.history for run in runs)]
    entry = metrics.default_metric(known) if metric is None else metrics.metric(str(metric))
    if entry.name not in known:
        raise ValueError(f"`metric={metric!r}` is not in the history, which has {', '.join(known)}.")
    values = np.concatenate([run.history[entry.name] for run in runs])
    is_log = entry.log_scale and np.all(values[np.isfinite(values)] > 0)
    figure: Figure = require("matplotlib.figure", "plot").Figure(figsize=(9, 3.6), layout="constrained")
    for axes, scale in zip(figure.subplots(1, 2, sharey=True), SCALES, strict=True):
        for label, group in groups.items():
            _draw(axes, label, [Line(run.history[scale], run.history[entry.name]) for run in group])
        axes.set(xlabel=scale, yscale="log" if is_log else "linear")
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel(entry.title)
    if len(groups) > 1:
        figure.axes[0].legend()
    figure.suptitle(_title(groups, runs))
    return figure


def _title(groups: Mapping[str, Runs], runs: Runs) -> str:
    problems = " and ".join(dict.fromkeys(run.problem.name for run in runs))
    if len(groups) > 1:
        return problems
    ends = ", ".join(dict.fromkeys(str(run.status) for run in runs))
    return f"{next(iter(groups))} on {problems}: {ends}"


class Line(NamedTuple):
    """A metric along a run."""

    x: np.ndarray
    y: np.ndarray


def _draw(axes: Any, label: str, lines: Sequence[Line]) -> None:
    if len(lines) == 1:
        axes.plot(*lines[0], marker=".", label=label)
        return
    x, (low, middle, high) = unite(lines)
    (line,) = axes.plot(x, middle, marker=".", label=f"{label}, {len(lines)} seeds")
    axes.fill_between(x, low, high, color=line.get_color(), alpha=0.2, linewidth=0)


def unite(lines: Sequence[Line]) -> tuple[np.ndarray, np.ndarray]:
    """Return the abscissas that at least half of the lines reach, and quantiles of the interpolated lines there."""
    x = np.unique(np.concatenate([line.x for line in lines]))
    heights = np.array([np.interp(x, *line, left=np.nan, right=np.nan) for line in lines])
    known = 2 * np.sum(~np.isnan(heights), axis=0) >= len(lines)
    return x[known], np.nanquantile(heights[:, known], _BAND, axis=0)


def _label(results: Shown | Runs | Mapping[str, Shown | Runs]) -> dict[str, list[Shown]]:
    if isinstance(results, Mapping):
        groups = {str(label): _as_list(runs) for label, runs in results.items()}
    else:
        groups = _group(_as_list(results))
    if not groups or not all(groups.values()):
        raise ValueError("`results` is empty; give at least one result of `bilevel.run`.")
    return groups


def _as_list(results: Any) -> list[Shown]:
    runs = list(results) if isinstance(results, Iterable) and not isinstance(results, str) else [results]
    for run in runs:
        if not hasattr(run, "history"):
            raise TypeError(f"`results` must contain results of `bilevel.run`, got {type(run).__name__}.")
    return runs


def _group(runs: Runs) -> dict[str, list[Shown]]:
    """Group the runs of each setting, named after the solver and the parameters in which its settings differ."""
    settings = [{"": run.problem.name} | run.solver.parameters() for run in runs]
    groups: dict[str, list[Shown]] = {}
    for run, setting in zip(runs, settings, strict=True):
        name = type(run.solver).__name__
        same = [other for one, other in zip(runs, settings, strict=True) if type(one.solver).__name__ == name]
        differing = [key for key in setting if any(other.get(key) != setting[key] for other in same)]
        parts = [f"{key}={setting[key]}" if key else f"on {setting[key]}" for key in differing]
        groups.setdefault(" ".join([name, ", ".join(parts)]).strip(), []).append(run)
    return groups
