"""Results as data frames and as figures with bands over seeds."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from bilevel._core.extras import require
from bilevel.engine import metrics
from bilevel.engine.curves import Curve, SeedCurve, median_curve

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCALES = ("calls", "seconds")

Shown: TypeAlias = Any  # a RunResult, whose module imports this one
Runs: TypeAlias = Sequence[Shown]


def as_dataframe(run: Shown) -> Any:
    """Return the history as a pandas DataFrame that begins with columns for solver, problem and seed."""
    labels = {"solver": type(run.solver).__name__, "problem": run.problem.name, "seed": run.seed}
    size = len(run.history["step"])
    columns = {name: [value] * size for name, value in labels.items()} | run.history
    return require("pandas", "bench").DataFrame(columns)


def plot(results: Shown | Runs | Mapping[str, Shown | Runs], metric: str | None = None) -> "Figure":
    """Plot a metric of one or more runs against calls and against seconds.

    Runs that differ only in their seeds are shown as their median, with a band from the 20 % to the 80 % quantile. The
    curve ends with the first run that is out of budget; a run that diverged counts as worse than any other.

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
    ['calls', 'seconds, until the first seed ends']
    """
    groups = _label(results)
    runs = [run for group in groups.values() for run in group]
    known = [name for name in runs[0].history if all(name in run.history for run in runs)]
    entry = metrics.default_metric(known) if metric is None else metrics.metric(str(metric))
    if entry.name not in known:
        raise ValueError(f"`metric={metric!r}` is not in the history, which has {', '.join(known)}.")
    figure: Figure = require("matplotlib.figure", "plot").Figure(figsize=(9, 3.6), layout="constrained")
    named = {f"{label}, {len(own)} seeds" if len(own) > 1 else label: own for label, own in groups.items()}
    curves = {scale: {label: _unite(own, scale, entry) for label, own in named.items()} for scale in SCALES}
    draw_panels(figure.subplots(1, 2, sharey=True), curves, entry, {})
    figure.axes[1].set_ylabel("")
    if len(groups) > 1:
        figure.axes[0].legend()
    figure.suptitle(" and ".join(dict.fromkeys(run.problem.name for run in runs)))
    return figure


def _unite(runs: Runs, scale: str, entry: metrics.Metric) -> Curve:
    lines = [(run.history[scale], run.history[entry.name], str(run.status)) for run in runs]
    if len(lines) == 1:
        ((x, y, _),) = lines
        return Curve(x, y, y, y)
    worst = -np.inf if entry.better == "higher" else np.inf
    return median_curve([SeedCurve.from_evaluations(*line) for line in lines], worst)


def draw_panels(
    panels: Any,
    curves: Mapping[str, Mapping[str, Curve]],
    entry: metrics.Metric,
    styles: Mapping[str, Any],
    log: str | None = None,
) -> None:
    """Draw the curves of a metric by label, with the style of each, into one panel for each label of the x-axis.

    An infinite edge of a band, due to seeds that diverged, is clipped to the panel. ``log`` has the letters of the axes
    with a log scale; by default the metric determines that of y.
    """
    for axes, (title, own) in zip(np.ravel(panels), curves.items(), strict=True):
        known = np.concatenate([np.ravel(curve[1:4]) for curve in own.values()])
        known = known[np.isfinite(known)]
        ends = (known.min(), known.max()) if len(known) else (0.0, 0.0)
        for label, curve in own.items():
            median = np.where(np.isfinite(curve.median), curve.median, np.nan)
            marker = "." if len(curve.x) == 1 else None
            (line,) = axes.plot(curve.x, median, label=label, marker=marker, **styles.get(label, {}))
            if curve.low is not curve.high:
                edges = np.clip(curve.low, *ends), np.clip(curve.high, *ends)
                look = {"color": line.get_color(), "alpha": 0.15, "linewidth": 0}
                axes.fill_between(curve.x, *edges, where=~np.isnan(median), **look)
        is_cut = any(curve.is_cut for curve in own.values())
        axes.set(xlabel=f"{title}, until the first seed ends" if is_cut else title, ylabel=entry.label)
        if "y" in log if log is not None else entry.log_scale and ends[0] > 0:
            axes.set_yscale("log")
        if log is not None and "x" in log:
            axes.set_xscale("log")
        axes.grid(alpha=0.3, linewidth=0.5)


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
