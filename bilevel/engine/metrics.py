"""Metrics of a run, which are neither timed nor counted as oracle calls."""

from collections.abc import Container, Iterable, Mapping
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.scipy.sparse.linalg import cg

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
    unit: str = ""

    @property
    def title(self) -> str:
        """The label with the unit, for axes."""
        return f"{self.label} ({self.unit})" if self.unit else self.label


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
    """Return the metric that figures and progress bars show by default: ‖∇h‖² if it is known, otherwise F."""
    return METRICS["hypergrad_norm_sq" if "hypergrad_norm_sq" in known else "outer_value"]


@Compiled
def cheap_metrics(oracles: Oracles, point: Point) -> dict[str, Array]:
    """Return the metrics that need two full-batch passes and no solve."""
    direction = oracles.direction(point)
    return {
        "outer_value": oracles.outer_value(point),
        "inner_residual_sq": trees.norm_sq(direction.inner_var),
        "v_residual_sq": trees.norm_sq(direction.v),
        "direction_norm_sq": trees.norm_sq(direction.outer_var),
    }


_REFIT_PRODUCTS = 5  # of the inner Hessian
_LARGEST_GAP = 0.05  # between F and h, relative; above it a run warns that z is far from z*(x)
_NEGATIVE = 1e-5  # relative to the largest curvature; rounding errors of float32 stay below


@Compiled
def refit_outer_value(oracles: Oracles, point: Point) -> Array:
    """Return F at the same x after a few conjugate-gradient steps of z, of the length at which G is smallest."""
    gradient = trees.scale(-1, oracles.inner_grad(point))
    move, _ = cg(lambda v: oracles.hvp(point._replace(v=v)), gradient, maxiter=_REFIT_PRODUCTS)
    moved = [point._replace(inner_var=trees.add(point.inner_var, trees.scale(t, move))) for t in (0, 1 / 16, 1 / 4, 1)]
    values = jnp.stack([oracles.inner_value(one) for one in moved])
    # Far from z*(x), G is not the quadratic that conjugate gradients assume.
    return jnp.stack([oracles.outer_value(one) for one in moved])[jnp.nanargmin(values)]


@Compiled
def curvature_along_v(oracles: Oracles, point: Point) -> tuple[Array, Array]:
    """Return v'Hv / v'v with H = ∇²zz G, and |HHv| / |Hv|, the size of the curvatures along v."""
    once = oracles.hvp(point)
    twice = oracles.hvp(point._replace(v=once))
    size, largest = trees.norm_sq(point.v), trees.norm_sq(once)
    return trees.dot(point.v, once) / size, jnp.sqrt(trees.norm_sq(twice) / largest)


def _curvature_complaint(oracles: Oracles, point: Point) -> str | None:
    along, largest = (float(number) for number in curvature_along_v(oracles, point))
    if not along < -_NEGATIVE * largest:
        return None
    return (
        f"the inner loss is not convex at the end: its curvature along v is {along:.2g}. So z is not at a minimum, and "
        "x did not follow a gradient of h; other step sizes may end much lower. Compare with solvers that follow the "
        "training, such as SOBA with `inner_optimizer` and a smaller `outer_ratio`."
    )


def inner_complaint(oracles: Oracles, point: Point, row: Mapping[str, float]) -> str | None:
    """Return a sentence if F(z, x) differs from h(x), which is the exact value or, if unknown, a refit of z."""
    here = row["outer_value"]
    exact = "value" in row
    if not exact and (sentence := _curvature_complaint(oracles, point)):
        return sentence  # a refit by conjugate gradients would be meaningless
    there = row["value"] if exact else float(refit_outer_value(oracles, point))
    if not abs(here - there) > _LARGEST_GAP * max(abs(here), abs(there)):
        return None
    how = "at z*(x)" if exact else f"after {_REFIT_PRODUCTS} conjugate-gradient steps of z alone"
    way = "continue with `resume`, scale the columns of your data, or fit z at this x before you use it"
    return f"z is far from z*(x) at the end: F is {here:.4g} at z, and {there:.4g} {how}; {way}."


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
            "value": exact.value,
            "hypergrad_norm_sq": stationarity(problem.oracles, point.outer_var, exact.hypergrad),
            "inner_distance_sq": norm_sq(trees.subtract(point.inner_var, trees.to_numpy(exact.inner_var))),
            "v_distance_sq": norm_sq(trees.subtract(point.v, trees.to_numpy(exact.v))),
            "exact_inner_residual": exact.inner_residual,
            "exact_v_residual": exact.v_residual,
        }
    return metrics | ({} if exact.value_gap is None else {"value_gap": exact.value_gap}), exact
