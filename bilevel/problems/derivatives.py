"""Checks of derivatives against finite differences.

A difference quotient has rounding errors if its step is short, and curvature errors if it is long. In a loss with
kinks, such as a network with ReLUs, each row that crosses a kink adds a jump of the gradient. So several steps are
tried and the smallest error counts, as a wrong derivative is wrong at all of them. If at every step some rows cross a
kink, products are compared row by row, and the median counts.
"""

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from bilevel._core import trees
from bilevel._core.compilation import arithmetic
from bilevel._core.types import Point
from bilevel.oracles import Oracles, TaskOracles
from bilevel.problems.checks import check_positive, make_rng
from bilevel.problems.exact import derivative

if TYPE_CHECKING:
    from bilevel.problems.base import BilevelProblem

_STEPS = (1e-5, 1e-7, 1e-3)
_TOLERANCE, _FLOAT32_TOLERANCE = 1e-5, 1e-2
_NEGLIGIBLE = 1e-5  # rounding errors of a difference quotient are about 1e-11, for derivatives of any size
_N_ROWS = 15  # that are compared one by one

# For each derivative, the function that it is the derivative of, and the part of a move along which it is taken.
_PRIMITIVES = {
    "inner_grad": ("inner_value", "inner_var"),
    "inner_grad_outer": ("inner_value", "outer_var"),
    "outer_grad": ("outer_value", "inner_var"),
    "outer_grad_outer": ("outer_value", "outer_var"),
    "hvp": ("inner_grad", "v"),
    "cross": ("inner_grad_outer", "v"),
}


def check_derivatives(problem: "BilevelProblem", seed: int, tolerance: float | None) -> dict[str, float]:
    """Return the relative errors of derivatives; raise ValueError if one is too large."""
    oracles, start = problem.oracles, problem.start
    if isinstance(oracles, TaskOracles):  # whose derivatives are not those of one sum
        first = jax.tree.map(lambda leaf: leaf[0], start._replace(outer_var=()))
        oracles, start = oracles.first(), first._replace(outer_var=start.outer_var)
    [largest] = check_positive(tolerance=_default_tolerance(oracles, start) if tolerance is None else tolerance)
    rng = make_rng(seed)
    with arithmetic(np.float64, problem):
        exact = oracles.astype(np.float64)
        point = jax.tree.map(lambda leaf: leaf + 0.1 * rng.standard_normal(np.shape(leaf)), start)
        point = point._replace(outer_var=exact.project(point.outer_var))
        move = jax.tree.map(lambda leaf: rng.standard_normal(np.shape(leaf)), point)
        errors = {name: _derivative_error(exact, name, point, move, largest) for name in _PRIMITIVES}
    for name, error in errors.items():
        if not error <= largest:
            cause = "the loss is not smooth or finite there, uses `stop_gradient`, or has a wrong custom derivative"
            way = "`check(tolerance=…)` accepts larger errors"
            raise ValueError(f"`{name}` differs from finite differences by {error:.1e} of its size: {cause}; {way}.")
    return errors


def _default_tolerance(oracles: Oracles, start: Point) -> float:
    """Return a tolerance for float64, or a larger one if a loss computes in float32 although its input is float64."""
    with arithmetic(np.float64):
        exact, point = oracles.astype(np.float64), trees.cast(start, np.float64)
        traced = str(jax.make_jaxpr(lambda point: (exact.inner_value(point), exact.outer_value(point)))(point))
    return _FLOAT32_TOLERANCE if any(narrow in traced for narrow in ("f32[", "bf16[", "f16[")) else _TOLERANCE


def _derivative_error(oracles: Oracles, name: str, point: Point, move: Point, tolerance: float) -> float:
    error = np.nan
    for step in _STEPS:
        error = np.fmin(error, _error(oracles, name, point, move, step))
        if error <= tolerance:
            return float(error)
    if name not in ("hvp", "cross") or oracles.is_sharded or not np.isfinite(error):
        return float(error)
    drawn = oracles.with_batches(1, "iid")
    rows = [np.array([row], np.int32) for row in range(min(_N_ROWS, oracles.n_inner))]
    of_rows = [min(_error(drawn, name, point, move, step, row) for step in _STEPS) for row in rows]
    return min(float(error), float(np.median(of_rows)))


def _error(oracles: Oracles, name: str, point: Point, move: Point, step: float, rows: Any = None) -> float:
    """Return the error of a derivative relative to its size, by a central difference."""
    primitive, part = _PRIMITIVES[name]
    claimed = derivative(oracles, name, point, rows)
    if part == "v":
        changes = {"inner_var": point.v}
    else:
        changes = {part: getattr(move, part)}
        claimed = trees.dot(claimed, changes[part])
    along = trees.scale(step, trees.zeros_like(point)._replace(**changes))
    ends = trees.add(point, along), trees.subtract(point, along)
    ahead, behind = (derivative(oracles, primitive, end, rows) for end in ends)
    measured = trees.scale(1 / (2 * step), trees.subtract(ahead, behind))
    gap, *sizes = (np.sqrt(trees.norm_sq(tree)) for tree in (trees.subtract(claimed, measured), claimed, measured))
    return float(gap / (sum(sizes) + _NEGLIGIBLE))
