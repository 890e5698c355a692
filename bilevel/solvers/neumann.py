"""Approximate solutions of H v = -∇z F by Neumann series, and the hypergradients they give.

Truncated, Q products on batches B_1, …, B_Q:          v = -η sum_{l=0..Q} (I - η H_{B_l}) … (I - η H_{B_1}) ∇z F
Random length, P uniform in {0, …, Q-1}, P products:   v = -η Q (I - η H_{B_P}) … (I - η H_{B_1}) ∇z F

The second has the mean of a sum of Q terms, one less than the first. Both need 0 < η < 2/L with L the largest curvature
of a batch, and leave the relative error (1 - η h)^Q, give or take one factor, in a mode of curvature h.
"""

from typing import Any, NamedTuple

from bilevel import _threefry
from bilevel import _tree as trees
from bilevel._types import Array, Calls, Count, Point, PyTree, Scalar
from bilevel.oracles import Oracles
from bilevel.solvers.directions import repeat, split


class NeumannDraw(NamedTuple):
    """Batches of one hypergradient: products, cross product, outer gradients; and the random length, or None."""

    products: Any
    cross: Any
    outer: Any
    length: Array | None = None


def check_step(solver: str, step: float, oracles: Oracles) -> None:
    """Refuse a step with which the series cannot converge, where the curvature is known."""
    curvature = oracles.largest_curvature
    if curvature is not None and not step < 2 / curvature:
        raise ValueError(
            f"`{solver}(neumann_step={step:g})`: the largest curvature of the inner problem is {curvature:.3g}, so the "
            f"Neumann series diverges unless neumann_step < 2/L = {2 / curvature:.3g}."
        )


def drawn(inner_rows: Any, outer_rows: Any, n_products: int) -> NeumannDraw:
    """Name the batches of a truncated series: ``n_products`` + 1 inner ones, one outer."""
    products, cross = split(inner_rows, n_products, None)
    return NeumannDraw(products, cross, outer_rows)


def random_length(key: Array, index: Array, n_neumann: int) -> Array:
    """Draw P uniform in {0, …, Q-1}."""
    length_key = _threefry.fold_in(_threefry.fold_in(key, 2), index)
    return _threefry.integers(length_key, (), n_neumann)


def hypergradient(oracles: Oracles, point: Point, draw: NeumannDraw, n_neumann: int, step: Scalar) -> Point:
    """Return (None, (∇²xz G) v + ∇x F, v) at the z and x of ``point``, v by the series the draw is for."""
    outer = oracles.outer(point, draw.outer)
    if draw.length is None:
        v = _truncated(oracles, point, outer.grad, draw.products, n_neumann, step)
    else:
        v = _random(oracles, point, outer.grad, draw, n_neumann, step)
    cross = oracles.cross(point._replace(v=v), draw.cross)
    return Point(None, trees.add(cross, outer.grad_outer), v)


def _truncated(oracles: Oracles, point: Point, grad: PyTree, rows: Any, n_products: int, step: Scalar) -> PyTree:
    def multiply(carry: tuple[PyTree, PyTree], batch: Any) -> tuple[PyTree, PyTree]:
        term, total = carry
        term = trees.subtract(term, trees.scale(step, oracles.hvp(point._replace(v=term), batch)))
        return term, trees.add(total, term)

    _, total = repeat(n_products, rows, multiply, (grad, grad))
    return trees.scale(-step, total)


def _random(oracles: Oracles, point: Point, grad: PyTree, draw: NeumannDraw, n_neumann: int, step: Scalar) -> PyTree:
    def multiply(term: PyTree, batch: Any) -> PyTree:
        return trees.subtract(term, trees.scale(step, oracles.hvp(point._replace(v=term), batch)))

    assert draw.length is not None
    term = repeat(draw.length, draw.products, multiply, grad)
    return trees.scale(-step * n_neumann, term)


def hypergradient_calls(oracles: Oracles, draw: NeumannDraw, n_neumann: int) -> Calls:
    """Return the exact cost: the products really taken, one cross product, both outer gradients."""
    if draw.length is None:
        products = oracles.count_inner(draw.products, n_neumann)
    else:
        products = oracles.count_inner(draw.products, n_neumann - 1, first=draw.length)
    outer = oracles.count_outer(draw.outer)
    return Calls(hvp=products, cross=oracles.count_inner(draw.cross), outer_grad=outer, outer_grad_outer=outer)


def scaled_calls(factor: Count, calls: Calls) -> Calls:
    """Return each count times ``factor``."""
    return Calls(*(factor * count for count in calls))
