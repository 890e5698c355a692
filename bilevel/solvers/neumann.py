"""Approximate solutions of H v = -∇z F by Neumann series, and the hypergradients computed with them.

Truncated, Q products on batches B_1, …, B_Q:          v = -η sum_{l=0..Q} (I - η H_{B_l}) … (I - η H_{B_1}) ∇z F
Random length, P uniform in {0, …, Q-1}, P products:   v = -η Q (I - η H_{B_P}) … (I - η H_{B_1}) ∇z F

The mean of the second is the first sum with Q terms instead of Q + 1. Both require 0 < η < 2/L, where L is the largest
curvature of a batch. The relative error along an eigenvector of curvature h is (1 - η h)^Q, up to one factor 1 - η h.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from bilevel._core import trees
from bilevel._core.types import Array, Calls, Point, PyTree, Scalar
from bilevel.oracles import Oracles
from bilevel.problems import BilevelProblem
from bilevel.solvers.base import Draw, Solver, State
from bilevel.solvers.fields import positive, whole
from bilevel.solvers.moves import move, repeat


class NeumannDraw(NamedTuple):
    """Batches of the products, the cross product and the outer gradients; the random length, or None."""

    products: Any
    cross: Any
    outer: Any
    length: Array | None = None


def check_step(solver: Solver[Any, Any], step: float, problem: BilevelProblem) -> None:
    """Raise ValueError if the series diverges with this step; the check is skipped if the curvature is unknown."""
    curvature = problem.oracles.largest_curvature
    if curvature is not None and not step < 2 / curvature:
        raise ValueError(
            f"`{type(solver).__name__}(neumann_step={step:g})`: the largest curvature L is {curvature:.3g}, so the "
            f"Neumann series diverges unless neumann_step < 2/L = {2 / curvature:.3g}."
        )


def series(oracles: Oracles, point: Point, draw: NeumannDraw, grad: PyTree, n_neumann: int, step: Scalar) -> PyTree:
    """Return v for ∇z F = ``grad`` at the z and x of ``point``; the draw determines the series."""

    def multiply(term: PyTree, batch: Any) -> PyTree:
        return move(term, oracles.hvp(point._replace(v=term), batch), step)

    def add_term(carry: tuple[PyTree, PyTree], batch: Any) -> tuple[PyTree, PyTree]:
        term = multiply(carry[0], batch)
        return term, trees.add(carry[1], term)

    if draw.length is not None:
        return trees.scale(-step * n_neumann, repeat(draw.length, draw.products, multiply, grad))
    _, total = repeat(n_neumann, draw.products, add_term, (grad, grad))
    return trees.scale(-step, total)


def hypergradient(oracles: Oracles, point: Point, draw: NeumannDraw, n_neumann: int, step: Scalar) -> Point:
    """Return (None, (∇²xz G) v + ∇x F, v) at the z and x of ``point``, with v by a series."""
    outer = oracles.outer(point, draw.outer)
    v = series(oracles, point, draw, outer.grad, n_neumann, step)
    cross = oracles.cross(point._replace(v=v), draw.cross)
    return Point(None, trees.add(cross, outer.grad_outer), v)


def hypergradient_calls(oracles: Oracles, draw: NeumannDraw, n_neumann: int) -> Calls:
    """Return the exact cost: the products that are taken, one cross product and both outer gradients."""
    n_drawn = n_neumann if draw.length is None else n_neumann - 1
    products = oracles.count_inner(draw.products, n_drawn, first=draw.length)
    outer = oracles.count_outer(draw.outer)
    return Calls(hvp=products, cross=oracles.count_inner(draw.cross), outer_grad=outer, outer_grad_outer=outer)


class LoopDraw(NamedTuple):
    """Batches of an inner loop and of the hypergradient after it."""

    inner_loop: Any
    neumann: NeumannDraw


@dataclass(frozen=True)
class NeumannSolver(Solver[State, Draw]):
    """A solver that computes v by a Neumann series."""

    n_neumann: int = whole(default=10)
    neumann_step: float = positive(default=0.5)

    def configure(self, problem: BilevelProblem) -> Self:
        check_step(self, self.neumann_step, problem)
        return self
