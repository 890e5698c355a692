"""What is measured along a run, off its clock and its count of oracle calls; one registry for all who show it.

`METRICS` describes every metric that the library computes: history, store, selection, tables and figures read it. A
metric of a user's problem needs no entry: `metric` describes it by its name.
"""

from collections.abc import Container
from typing import Literal, NamedTuple

import jax
import numpy as np

from bilevel import _tree as trees
from bilevel._types import Array, Point
from bilevel.oracles import Oracles
from bilevel.problems import BilevelProblem, ExactSolution
from bilevel.problems.exact import norm_sq, stationarity


class Metric(NamedTuple):
    """How a metric is shown, compared and stored.

    Attributes
    ----------
    name : its column in histories and stores
    label : what tables and axes call it
    unit : "" where it has none
    better : "lower", "higher", or None where it says nothing about quality
    log_scale : whether its axis is logarithmic
    of_test_rows : whether it reads test rows; such a metric selects nothing
    selects : whether settings are selected by it where no metric is named; the first one that is known does
    in_tables : whether tables of final values show it
    in_summary : whether the summary of a run shows it, beside those in tables
    """

    name: str
    label: str
    unit: str = ""
    better: Literal["lower", "higher"] | None = "lower"
    log_scale: bool = True
    of_test_rows: bool = False
    selects: bool = False
    in_tables: bool = False
    in_summary: bool = False


# In the order in which tables and figures offer them.
METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("value_gap", "h(x) − min h", selects=True, in_tables=True),
        Metric("value", "h(x)", log_scale=False, selects=True, in_tables=True),
        Metric("hypergrad_norm_sq", "‖∇h(x)‖²", in_tables=True),
        Metric("certified_norm_sq", "certified bound of ‖∇h(x)‖²", in_summary=True),
        Metric("test_error", "test error", log_scale=False, of_test_rows=True, in_tables=True),
        Metric("weight_auc", "AUC of the weights", better="higher", log_scale=False, in_tables=True),
        Metric("outer_value", "F(z, x)", log_scale=False, selects=True, in_tables=True),
        Metric("inner_distance_sq", "‖z − z*(x)‖²"),
        Metric("v_distance_sq", "‖v − v*(x)‖²"),
        Metric("inner_residual_sq", "‖∇G‖² in z"),
        Metric("v_residual_sq", "‖residual of v‖²"),
        Metric("direction_norm_sq", "‖direction in x‖²", in_summary=True),
        Metric("certified_error", "certified bound of ‖D_x − ∇h(x)‖"),
        Metric("drift", "drift", better=None, log_scale=False),
        Metric("rollbacks", "rollbacks", better=None, log_scale=False),
        Metric("step_scale", "step size / initial step size", better=None),
        Metric("exact_inner_residual", "residual of z*(x)", better=None),
        Metric("exact_v_residual", "residual of v*(x)", better=None),
    )
}


def metric(name: str) -> Metric:
    """Return the entry of a metric; one of the user's own is described by its name."""
    return METRICS.get(name, Metric(name, name.replace("_", " "), log_scale=False, in_tables=True))


def default_metric(known: Container[str]) -> Metric:
    """Return what a figure or a progress bar shows of a run unless asked otherwise: ‖∇h‖², else F."""
    return METRICS["hypergrad_norm_sq" if "hypergrad_norm_sq" in known else "outer_value"]


@jax.jit
def cheap_metrics(oracles: Oracles, point: Point) -> dict[str, Array]:
    """Return the metrics that need two full-batch passes and no solve."""
    direction = oracles.direction(point)
    return {
        "outer_value": oracles.outer_value(point),
        "inner_residual_sq": trees.norm_sq(direction.inner_var),
        "v_residual_sq": trees.norm_sq(direction.v),
        "direction_norm_sq": trees.norm_sq(direction.outer_var),
    }


def exact_metrics(
    problem: BilevelProblem, point: Point, guess: ExactSolution | None
) -> tuple[dict[str, float], ExactSolution | None]:
    """Return the metrics at the exact inner solution, and that solution, from which the next solve starts."""
    if problem.exact_solver is None:
        return {}, None
    point = trees.to_numpy(point, np.float64)
    try:
        with np.errstate(all="ignore"):
            exact = problem.exact_solver(point.outer_var, guess)
    except (np.linalg.LinAlgError, ValueError):
        # Near divergence a Hessian may not be finite; the run goes on and says so by itself.
        return {"value": np.nan, "hypergrad_norm_sq": np.nan}, guess
    with np.errstate(all="ignore"):
        metrics = {
            "value": exact.value,
            "hypergrad_norm_sq": stationarity(problem.oracles, point.outer_var, exact.hypergrad),
            "inner_distance_sq": norm_sq(trees.subtract(point.inner_var, exact.inner_var)),
            "v_distance_sq": norm_sq(trees.subtract(point.v, exact.v)),
            "exact_inner_residual": exact.inner_residual,
            "exact_v_residual": exact.v_residual,
        }
    return metrics | ({} if exact.value_gap is None else {"value_gap": exact.value_gap}), exact
