"""Derivatives against central differences, in float64."""

from collections.abc import Callable

import jax
import numpy as np

from bilevel import trees
from bilevel.oracles import Oracles
from bilevel.precision import arithmetic
from bilevel.types import Point, PyTree

STEP = 1e-5
TOLERANCE = 1e-5
NEGLIGIBLE = 1e-5  # rounding leaves about 1e-11 in a difference quotient, whatever the derivative's size


def check_derivatives(oracles: Oracles, start: Point, seed: int = 0) -> dict[str, float]:
    """Return the relative error of each derivative; raise ValueError where one is wrong or not finite.

    Values judge the gradients, and gradients judge the second derivatives, along random moves.
    """
    rng = np.random.default_rng(seed)
    with arithmetic(np.float64):
        exact = oracles.astype(np.float64)
        point = jax.tree.map(lambda leaf: leaf + 0.1 * rng.standard_normal(np.shape(leaf)), start)
        point = point._replace(outer_var=exact.project(point.outer_var))
        move = jax.tree.map(lambda leaf: rng.standard_normal(np.shape(leaf)), point)
        errors = {name: error(exact, point, move) for name, error in _COMPARISONS.items()}
    for name, error in errors.items():
        if not error <= TOLERANCE:
            raise ValueError(
                f"`{name}` differs from finite differences by {error:.1e} of its size at a point near the start: "
                "the loss is not smooth there, has a wrong custom derivative, or is not finite."
            )
    return errors


def _slope(function: Callable[[Point], PyTree], point: Point, move: Point) -> PyTree:
    ahead = function(trees.add(point, trees.scale(STEP, move)))
    behind = function(trees.subtract(point, trees.scale(STEP, move)))
    return trees.scale(1 / (2 * STEP), trees.subtract(ahead, behind))


def _relative(claimed: PyTree, measured: PyTree) -> float:
    gap = np.sqrt(trees.norm_sq(trees.subtract(claimed, measured)))
    size = np.sqrt(trees.norm_sq(claimed)) + np.sqrt(trees.norm_sq(measured))
    return float(gap / (size + NEGLIGIBLE))


def _along_inner(move: Point) -> Point:
    return Point(move.inner_var, trees.zeros_like(move.outer_var), trees.zeros_like(move.v))


def _along_outer(move: Point) -> Point:
    return Point(trees.zeros_like(move.inner_var), move.outer_var, trees.zeros_like(move.v))


def _gradient_error(value: str, gradient: str, along: Callable[[Point], Point]) -> Callable:
    def error(oracles: Oracles, point: Point, move: Point) -> float:
        direction = along(move)
        claimed = getattr(oracles, gradient)(point)
        part = direction.inner_var if along is _along_inner else direction.outer_var
        return _relative(trees.dot(claimed, part), _slope(getattr(oracles, value), point, direction))

    return error


def _product_error(gradient: str, product: str) -> Callable:
    def error(oracles: Oracles, point: Point, move: Point) -> float:
        along_v = _along_inner(move._replace(inner_var=point.v))
        return _relative(getattr(oracles, product)(point), _slope(getattr(oracles, gradient), point, along_v))

    return error


_COMPARISONS: dict[str, Callable[[Oracles, Point, Point], float]] = {
    "inner_grad": _gradient_error("inner_value", "inner_grad", _along_inner),
    "inner_grad_outer": _gradient_error("inner_value", "inner_grad_outer", _along_outer),
    "outer_grad": _gradient_error("outer_value", "outer_grad", _along_inner),
    "outer_grad_outer": _gradient_error("outer_value", "outer_grad_outer", _along_outer),
    "hvp": _product_error("inner_grad", "hvp"),
    "cross": _product_error("inner_grad_outer", "cross"),
}
