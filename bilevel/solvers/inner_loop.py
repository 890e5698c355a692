"""Stochastic gradient steps on the inner problem."""

from typing import Any

from bilevel import trees
from bilevel.oracles import Oracles
from bilevel.solvers.batches import repeat
from bilevel.types import Point, Scalar


def inner_descent(oracles: Oracles, point: Point, rows: Any, times: int, step: Scalar) -> Point:
    """Return the point after z ← z - step ∇z G on each of ``times`` batches."""

    def descend(point: Point, batch: Any) -> Point:
        move = trees.scale(step, oracles.inner_grad(point, batch))
        return point._replace(inner_var=trees.subtract(point.inner_var, move))

    return repeat(times, rows, descend, point)
