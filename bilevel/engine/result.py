"""What a run returns.

The figure of one run.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bilevel._types import Calls, Point
from bilevel.problems import BilevelProblem
from bilevel.problems.certificate import Certificate, Certifier
from bilevel.solvers.base import SolverBase, State

if TYPE_CHECKING:
    from matplotlib.figure import Figure
from typing import TYPE_CHECKING

from bilevel._optional import require

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    pass

_SUMMARIZED = ("value", "value_gap", "hypergrad_norm_sq", "certified_norm_sq", "outer_value", "direction_norm_sq")


class Status(StrEnum):
    """How a run ended; compares equal to its name."""

    converged = "converged"
    out_of_budget = "out_of_budget"
    diverged = "diverged"
    interrupted = "interrupted"

    @property
    def sentence(self) -> str:
        """The same, for people."""
        return {
            "converged": "The squared norm of the hypergradient, or its certified bound, fell to the tolerance.",
            "out_of_budget": "A budget was used up.",
            "diverged": "The iterates left the finite numbers; `point` is the last finite one. A stochastic solver "
            "needs a smaller `step_size` or a larger `outer_ratio`; bounds on the outer variable help any solver.",
            "interrupted": "The run was stopped from the keyboard; save it and `resume` to go on.",
        }[self.value]


@dataclass(frozen=True)
class RunResult:
    """The end of a run and the way there.

    Attributes
    ----------
    status : "converged", "out_of_budget", "diverged" or "interrupted"; ``status.sentence`` explains
    point : the final iterate, NumPy arrays in the problem's dtype
    history : columns, one entry per evaluation: ``step``, ``seconds`` (stepping alone, without compilation and
        evaluation), ``calls`` (all kinds together), ``calls_<kind>``, ``epochs`` = calls / (n + m), and the
        metrics of :mod:`bilevel.engine.metrics`
    solver, seed : what ran
    compile_seconds : spent on compilation, which `seconds` leaves out
    """

    status: Status
    point: Point
    history: dict[str, np.ndarray]
    solver: SolverBase
    seed: int
    compile_seconds: float
    problem: BilevelProblem
    state: State

    @property
    def calls(self) -> Calls:
        """The ledger at the end of the run."""
        return Calls(*(int(self.history[f"calls_{kind}"][-1]) for kind in Calls._fields))

    @cached_property
    def certificate(self) -> Certificate:
        """How far D_x at the final iterate can be from ∇h, proved where it says so; computed when first asked for."""
        return Certifier(self.problem)(self.point)

    def summary(self) -> str:
        """Return the run in a few lines."""
        last = {name: column[-1] for name, column in self.history.items()}
        parameters = ", ".join(f"{name}={value}" for name, value in self.solver.parameters().items())
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in self.calls._asdict().items() if count)
        lines = [
            f"{type(self.solver).__name__}({parameters}) on {self.problem.name}, seed {self.seed}",
            f"status   {self.status}: {self.status.sentence}",
            f"steps    {last['step']:,} in {last['seconds']:.3g} s (compilation {self.compile_seconds:.3g} s apart)",
            f"calls    {last['calls']:,} = {last['epochs']:.4g} epochs ({kinds or 'none'})",
        ]
        for name in _SUMMARIZED:
            if name in last:
                lines.append(f"{name:<17} {self.history[name][0]:.6g} -> {last[name]:.6g}")
        if self.problem.exact_solver is None:
            lines.append("No exact hypergradient: the problem does not say that its inner loss is strongly convex.")
        return "\n".join(lines)

    def plot(self, metric: str | None = None) -> "Figure":
        """Draw a metric against calls and against seconds; ||∇h||² by default, where it is known."""
        pass

        return plot_history(self, metric)

    def save(self, path: str | Path) -> None:
        """Write the run to one file, from which :func:`bilevel.resume` goes on bit for bit."""
        from bilevel.engine.checkpoint import save

        save(self, Path(path))

    def __repr__(self) -> str:
        return self.summary()


def columns(rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Turn rows into columns; a metric missing from a row is NaN there."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: np.array([row.get(name, np.nan) for row in rows]) for name in names}


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
