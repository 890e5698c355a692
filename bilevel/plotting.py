"""The figure of one run."""

from typing import TYPE_CHECKING

import numpy as np

from bilevel.extras import require

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from bilevel.result import RunResult


def plot_history(result: "RunResult", metric: str | None = None) -> "Figure":
    """Draw a metric against calls and against seconds."""
    figure_module = require("matplotlib.figure", "plot")
    metric = metric or ("hypergrad_norm_sq" if "hypergrad_norm_sq" in result.history else "outer_value")
    if metric not in result.history:
        known = ", ".join(result.history)
        raise ValueError(f"`metric={metric!r}` is not in the history, which has {known}.")
    values = result.history[metric]
    figure = figure_module.Figure(figsize=(9, 3.6), layout="constrained")
    for axes, scale in zip(figure.subplots(1, 2, sharey=True), ("calls", "seconds"), strict=True):
        axes.plot(result.history[scale], values, marker=".", label=type(result.solver).__name__)
        axes.set_xlabel(scale)
        axes.grid(alpha=0.3)
        if np.all(values[np.isfinite(values)] > 0):
            axes.set_yscale("log")
    figure.axes[0].set_ylabel(metric)
    figure.suptitle(f"{type(result.solver).__name__} on {result.problem.name}: {result.status}")
    return figure
