"""Derivatives of a problem against finite differences, in float64.

A difference quotient errs by rounding where its step is short, and by curvature where it is long; a loss with kinks, as
that of a network with ReLUs, adds a jump of the gradient for each row that crosses one on the way. So several steps are
tried and the best one counts: a wrong derivative is wrong at all of them. Where many rows have kinks, some cross one at
every step: products are then compared row by row, and the median row counts.
"""

from typing import Any

import jax
import numpy as np

from bilevel import _tree as trees
from bilevel._precision import arithmetic
from bilevel._programs import compiled
from bilevel._types import Point
from bilevel.oracles import Oracles
from bilevel.problems.checks import make_rng

STEPS = (1e-5, 1e-7, 1e-3)
TOLERANCE, FLOAT32_TOLERANCE = 1e-5, 1e-2
NEGLIGIBLE = 1e-5  # rounding leaves about 1e-11 in a difference quotient, whatever the derivative's size
_N_ROWS = 15  # that are looked at one by one

# Of each derivative: what it is the derivative of, and along which part of a move.
_PRIMITIVES = {
    "inner_grad": ("inner_value", "inner_var"),
    "inner_grad_outer": ("inner_value", "outer_var"),
    "outer_grad": ("outer_value", "inner_var"),
    "outer_grad_outer": ("outer_value", "outer_var"),
    "hvp": ("inner_grad", "v"),
    "cross": ("inner_grad_outer", "v"),
}


def check_derivatives(
    oracles: Oracles, start: Point, seed: int, tolerance: float
) -> tuple[dict[str, float], Point, Point]:
    """Return the relative error of each derivative; refuse a wrong one. And where it was taken, and a random move."""
    rng = make_rng(seed)
    with arithmetic(np.float64):
        exact = oracles.astype(np.float64)
        point = jax.tree.map(lambda leaf: leaf + 0.1 * rng.standard_normal(np.shape(leaf)), start)
        point = point._replace(outer_var=exact.project(point.outer_var))
        move = jax.tree.map(lambda leaf: rng.standard_normal(np.shape(leaf)), point)
        errors = {name: _derivative_error(exact, name, point, move, tolerance) for name in _PRIMITIVES}
    refuse_large(errors, tolerance, "finite differences")
    return errors, point, move


def refuse_large(errors: dict[str, float], tolerance: float, reference: str) -> None:
    """Refuse an error above the tolerance."""
    for name, error in errors.items():
        if not error <= tolerance:
            cause = (
                "the loss is not smooth there, uses `stop_gradient`, has a wrong custom derivative, or is not finite"
            )
            way = "`check(tolerance=…)` allows for more"
            raise ValueError(f"`{name}` differs from {reference} by {error:.1e} of its size: {cause}; {way}.")


def default_tolerance(oracles: Oracles, start: Point) -> float:
    """Return a tolerance for float64, or a larger one where a loss rounds to less although it is given float64."""
    with arithmetic(np.float64):
        exact, point = oracles.astype(np.float64), trees.cast(start, np.float64)
        traced = str(jax.make_jaxpr(lambda point: (exact.inner_value(point), exact.outer_value(point)))(point))
    return FLOAT32_TOLERANCE if any(narrow in traced for narrow in ("f32[", "bf16[", "f16[")) else TOLERANCE


def _derivative_error(oracles: Oracles, name: str, point: Point, move: Point, tolerance: float) -> float:
    error = np.nan
    for step in STEPS:
        error = np.fmin(error, _error(oracles, name, point, move, step))
        if error <= tolerance:
            return float(error)
    if name not in ("hvp", "cross") or oracles.is_sharded or not np.isfinite(error):
        return float(error)
    drawn = oracles.with_batches(1, "iid")
    rows = [np.array([row], np.int32) for row in range(min(_N_ROWS, oracles.n_inner))]
    of_rows = [min(_error(drawn, name, point, move, step, row) for step in STEPS) for row in rows]
    return min(float(error), float(np.median(of_rows)))


def _error(oracles: Oracles, name: str, point: Point, move: Point, step: float, rows: Any = None) -> float:
    """Return |claimed - measured| relative to their sizes, by a central difference."""
    of, part = _PRIMITIVES[name]
    claimed = _derivative(oracles, name, point, rows)
    if part == "v":
        changes = {"inner_var": point.v}
    else:
        changes = {part: getattr(move, part)}
        claimed = trees.dot(claimed, changes[part])
    along = trees.scale(step, trees.zeros_like(point)._replace(**changes))
    places = trees.add(point, along), trees.subtract(point, along)
    ahead, behind = (_derivative(oracles, of, there, rows) for there in places)
    measured = trees.scale(1 / (2 * step), trees.subtract(ahead, behind))
    gap, *sizes = (np.sqrt(trees.norm_sq(tree)) for tree in (trees.subtract(claimed, measured), claimed, measured))
    return float(gap / (sum(sizes) + NEGLIGIBLE))


@compiled("name")
def _derivative(oracles: Oracles, name: str, point: Point, rows: Any) -> Any:
    return getattr(oracles, name)(point, rows)
