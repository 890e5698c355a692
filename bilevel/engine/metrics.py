"""Metrics of a run, which are neither timed nor counted as oracle calls."""

from collections.abc import Container, Iterable
from typing import Literal, NamedTuple

import numpy as np

from bilevel._core import trees
from bilevel._core.compilation import Compiled
from bilevel._core.types import Array, Calls, Point
from bilevel.oracles import Oracles
from bilevel.problems import BilevelProblem, ExactSolution
from bilevel.problems.exact import norm_sq, stationarity


class Metric(NamedTuple):
    """How a metric is shown, compared and stored."""

    name: str  # its column in histories and stores
    label: str  # in tables and on axes
    better: Literal["lower", "higher"] | None = "lower"  # None if it does not measure quality
    log_scale: bool = True  # of its axis
    of_test_rows: bool = False  # then it must not select settings
    of_problem: bool = False  # computed by a problem, of the library or of a user, under this name
    selects: bool = False  # settings, if no metric is named; the first known one is used
    in_tables: bool = False  # of final values
    in_summary: bool = False  # of a run, in addition to those in tables


# In the order of tables and figures. The metric of an own problem needs no entry.
METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("value_gap", "h(x) − min h", selects=True, in_tables=True),
        Metric("value", "h(x)", log_scale=False, selects=True, in_tables=True),
        Metric("hypergrad_norm_sq", "‖∇h(x)‖²", in_tables=True),
        Metric("certified_norm_sq", "certified bound of ‖∇h(x)‖²", in_summary=True),
        Metric("test_error", "test error", log_scale=False, of_test_rows=True, of_problem=True, in_tables=True),
        Metric("validation_error", "validation error", log_scale=False, of_problem=True, in_tables=True),
        Metric("weight_auc", "AUC of the weights", "higher", log_scale=False, of_problem=True, in_tables=True),
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
        Metric("outer_scale", "step of x / its size without rises of h", better=None),
        Metric("h_change", "relative change of h from window to window", better=None),
        Metric("h_lag", "|F(z, x) − h(x)| / h(x), estimated", better=None),
        Metric("h_gradient", "first-order gain of moving x by 1 / h(x)", better=None),
        Metric("quiet_windows", "windows without progress", better=None, log_scale=False),
        Metric("x_held", "fraction of passes after which x was frozen", better=None, log_scale=False),
        Metric("exact_inner_residual", "residual of z*(x)", better=None),
        Metric("exact_v_residual", "residual of v*(x)", better=None),
    )
}


def metric(name: str) -> Metric:
    """Return the entry of a metric; the label of an own metric is its name."""
    return METRICS.get(name, Metric(name, name.replace("_", " "), log_scale=False, in_tables=True))


def check_metrics(names: Iterable[str]) -> None:
    """Raise ValueError if a metric of a problem has the name of another column of the history."""
    columns = {"step", "seconds", "calls", *(f"calls_{kind}" for kind in Calls._fields), "epochs"}
    columns |= {name for name, entry in METRICS.items() if not entry.of_problem}
    if taken := sorted(columns.intersection(names)):
        raise ValueError(f"`metrics`: {taken[0]!r} is the name of another column of the history; rename your metric.")


def default_metric(known: Container[str]) -> Metric:
    """Return the metric that figures and the progress show by default: ‖∇h‖² if it is known, otherwise F."""
    return METRICS["hypergrad_norm_sq" if "hypergrad_norm_sq" in known else "outer_value"]


@Compiled
def cheap_metrics(oracles: Oracles, point: Point) -> dict[str, Array]:
    """Return the metrics that need two full-batch passes and no solve."""
    direction = oracles.direction(point)
    return {
        "outer_value": oracles.objective(oracles.outer_value(point), point.outer_var),
        "inner_residual_sq": trees.norm_sq(direction.inner_var),
        "v_residual_sq": trees.norm_sq(direction.v),
        "direction_norm_sq": trees.norm_sq(direction.outer_var),
    }


def exact_metrics(
    problem: BilevelProblem, point: Point, guess: ExactSolution | None
) -> tuple[dict[str, float], ExactSolution | None]:
    """Return the metrics at the exact inner solution, and that solution, from which the next solve starts.

    Raises LinAlgError or ValueError, with the reason, if there is no exact solution at the point.
    """
    if problem.exact_solver is None:
        return {}, None
    point = trees.to_numpy(point, np.float64)
    with np.errstate(all="ignore"):
        exact = problem.exact_solver(point.outer_var, guess)
        metrics = {
            "value": problem.oracles.objective(exact.value, point.outer_var),
            "hypergrad_norm_sq": stationarity(problem.oracles, point.outer_var, exact.hypergrad),
            "inner_distance_sq": norm_sq(trees.subtract(point.inner_var, trees.to_numpy(exact.inner_var))),
            "v_distance_sq": norm_sq(trees.subtract(point.v, trees.to_numpy(exact.v))),
            "exact_inner_residual": exact.inner_residual,
            "exact_v_residual": exact.v_residual,
        }
    gap = exact.value_gap if problem.oracles.outer_term is None else None
    return metrics | ({} if gap is None else {"value_gap": gap}), exact
