"""What is measured along a run, off its clock and off its ledger.

Cheap metrics, at the iterate itself: ``outer_value`` F(z, x), and the squared norms ``inner_residual_sq`` of
D_z, ``v_residual_sq`` of D_v, ``direction_norm_sq`` of D_x.

Exact metrics, at z*(x) in float64: ``value`` h(x), ``hypergrad_norm_sq`` ||∇h(x)||², ``inner_distance_sq``
||z - z*(x)||², ``v_distance_sq`` ||v - v*(x)||², ``value_gap`` h(x) - min h where it is known, and the residuals
``exact_inner_residual``, ``exact_v_residual`` of the reference itself.
"""

import jax
import numpy as np

from bilevel import _tree as trees
from bilevel._types import Array, Point, PyTree
from bilevel.oracles import Oracles
from bilevel.problems import BilevelProblem, ExactSolution
from bilevel.problems.exact import ExactSolver, norm_sq, stationarity


@jax.jit
def cheap_metrics(oracles: Oracles, point: Point) -> dict[str, Array]:
    """Return the metrics that need two all-rows passes and no solve."""
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
    """Return the metrics at the exact inner solution, and the reference to warm-start the next ones."""
    if problem.exact_solver is None:
        return {}, None
    with np.errstate(all="ignore"):
        return _exact_metrics(problem, problem.exact_solver, trees.to_numpy(point, np.float64), guess)


def _exact_metrics(
    problem: BilevelProblem, exact_solver: ExactSolver, point: Point, guess: ExactSolution | None
) -> tuple[dict[str, float], ExactSolution | None]:
    try:
        reference = exact_solver(point.outer_var, guess)
    except (np.linalg.LinAlgError, ValueError):
        # Near divergence a Hessian may not be finite; the run goes on and says so by itself.
        return {"value": np.nan, "hypergrad_norm_sq": np.nan}, guess
    metrics = {
        "value": reference.value,
        "hypergrad_norm_sq": stationarity(problem.oracles, point.outer_var, reference.hypergrad),
        "inner_distance_sq": _distance_sq(point.inner_var, reference.inner_var),
        "v_distance_sq": _distance_sq(point.v, reference.v),
        "exact_inner_residual": reference.inner_residual,
        "exact_v_residual": reference.v_residual,
    }
    if reference.value_gap is not None:
        metrics["value_gap"] = reference.value_gap
    return metrics, reference


def _distance_sq(a: PyTree, b: PyTree) -> float:
    return norm_sq(trees.subtract(a, b))
