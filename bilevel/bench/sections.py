"""What is shown of a store: for each problem of each experiment, every solver at its selected setting."""

import json
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np

from bilevel.bench.cells import SWEEP, TIMING
from bilevel.bench.curves import AXES, Curve, curve_of
from bilevel.bench.select import Frame, select, settings

# In the order in which they are offered.
METRICS = {
    "value_gap": "h(x) − min h",
    "value": "h(x)",
    "hypergrad_norm_sq": "‖∇h(x)‖²",
    "test_error": "test error",
    "weight_auc": "AUC of the weights",
    "outer_value": "F(z, x)",
    "inner_distance_sq": "‖z − z*(x)‖²",
    "v_distance_sq": "‖v − v*(x)‖²",
    "inner_residual_sq": "‖∇G‖² in z",
    "v_residual_sq": "‖residual of v‖²",
    "direction_norm_sq": "‖direction in x‖²",
    "drift": "drift",
    "rollbacks": "times gone back",
    "step_scale": "steps, of the first",
    "exact_inner_residual": "residual of z*(x)",
    "exact_v_residual": "residual of v*(x)",
}
# Never test data: a setting selected on it would make the test error too good.
_SELECTED_BY = ("value_gap", "value", "outer_value")


@dataclass(frozen=True)
class Contender:
    """A solver at its selected setting; its rows are those of the timing phase, where there are any.

    Where no setting could be selected, because all diverged, its rows are those of all settings.
    """

    solver: str
    parameters: dict[str, Any] | None
    rows: Frame

    @property
    def is_timed(self) -> bool:
        """Whether seconds and exact metrics are known along the way."""
        return bool((self.rows["phase"] == TIMING).any())

    @property
    def setting(self) -> str:
        """The parameters in words."""
        if self.parameters is None:
            return "none: each has an infinite median"
        return ", ".join(f"{name} {_short(value)}" for name, value in self.parameters.items())


@dataclass(frozen=True)
class Section:
    """A problem of an experiment, all its rows, and its contenders in the order of their names.

    Its arguments are those that all rows share: a problem may be drawn anew with each seed.
    """

    experiment: str
    problem: str
    arguments: dict[str, Any]
    metric: str
    rows: Frame
    contenders: tuple[Contender, ...]

    @cached_property
    def curves(self) -> dict[tuple[str, str, str], Curve]:
        """Curves by metric, axis and solver, without those of which there is nothing to see."""
        return {
            (metric, axis, contender.solver): curve
            for metric in METRICS
            if self.rows[metric].notna().any()
            for axis in AXES
            for contender in self.contenders
            if contender.parameters is not None
            if (curve := curve_of(contender.rows, axis, metric)).is_drawable
        }

    def drawn(self, position: int) -> list[str]:
        """Return the metrics (0) or axes (1) or solvers (2) that have a curve, in their order."""
        return list(dict.fromkeys(key[position] for key in self.curves))


def sections(table: Frame, metric: str | None = None) -> list[Section]:
    """Split a store by experiment and problem, and select a setting for each solver.

    Parameters
    ----------
    table : all rows of a store
    metric : a setting is selected by its final value; by default that of h, or of F where h is not known
    """
    if table.empty:
        raise ValueError("`table` has no rows; run the experiment first, or name the folder of its store.")
    keys = [table["experiment"], table["problem"], table["problem_arguments"].map(_without_seed)]
    return [_section(experiment, problem, rows, metric) for (experiment, problem, _), rows in table.groupby(keys)]


@cache
def _without_seed(arguments: str) -> str:
    return json.dumps({name: value for name, value in json.loads(arguments).items() if name != "seed"})


def _section(experiment: str, problem: str, rows: Frame, metric: str | None) -> Section:
    arguments = rows["problem_arguments"].unique()
    shared = json.loads(arguments[0] if len(arguments) == 1 else _without_seed(arguments[0]))
    metric = metric or next((name for name in _SELECTED_BY if np.isfinite(rows[name]).any()), "outer_value")
    selected = select(rows, metric)
    chosen = {solver: dict(pairs) for solver, pairs in settings(selected)}
    contenders = (_contender(solver, rows[rows["solver"] == solver], chosen) for solver in selected["solver"])
    return Section(experiment, problem, shared, metric, rows, tuple(contenders))


def _contender(solver: str, rows: Frame, chosen: dict[str, dict[str, Any]]) -> Contender:
    if solver not in chosen:
        return Contender(solver, None, rows[rows["phase"] == SWEEP])
    own = _with_setting(rows, chosen[solver])
    timed = own[own["phase"] == TIMING]
    return Contender(solver, chosen[solver], timed if len(timed) else own)


def _with_setting(rows: Frame, parameters: dict[str, Any]) -> Frame:
    given = {f"param_{name}": value for name, value in parameters.items()}
    same = np.ones(len(rows), bool)
    for name in rows.filter(regex="^param_"):
        equal = rows[name] == given[name] if name in given else rows[name].isna()
        same &= equal.to_numpy(bool, na_value=False)
    return rows[same]


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
