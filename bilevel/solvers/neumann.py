"""Approximate solutions of H v = -∇z F by Neumann series, and the hypergradients they give.

Truncated, Q products on batches B_1, …, B_Q:          v = -η sum_{l=0..Q} (I - η H_{B_l}) … (I - η H_{B_1}) ∇z F
Random length, P uniform in {0, …, Q-1}, P products:   v = -η Q (I - η H_{B_P}) … (I - η H_{B_1}) ∇z F

The second has the mean of a sum of Q terms, one less than the first. Both need 0 < η < 2/L with L the largest curvature
of a batch, and leave the relative error (1 - η h)^Q, give or take one factor, in a mode of curvature h.

`AlternatingSolver` is what BSA, ALSET and TTSA share: inner steps, then a move of x by the second series.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from bilevel import _threefry
from bilevel import _tree as trees
from bilevel._types import Array, Calls, Point, PyTree, Scalar
from bilevel.oracles import Oracles
from bilevel.solvers.base import Solver
from bilevel.solvers.directions import decay, move, move_outer, repeat, split
from bilevel.solvers.parameters import positive, whole


class NeumannDraw(NamedTuple):
    """Batches of one hypergradient: products, cross product, outer gradients; and the random length, or None."""

    products: Any
    cross: Any
    outer: Any
    length: Array | None = None


def check_step(solver: Solver, step: float, oracles: Oracles) -> None:
    """Refuse a step with which the series cannot converge, where the curvature is known."""
    curvature = oracles.largest_curvature
    if curvature is not None and not step < 2 / curvature:
        raise ValueError(
            f"`{type(solver).__name__}(neumann_step={step:g})`: the largest curvature of the inner problem is "
            f"{curvature:.3g}, so the Neumann series diverges unless neumann_step < 2/L = {2 / curvature:.3g}."
        )


def assign_batches(inner_rows: Any, outer_rows: Any, n_products: int) -> NeumannDraw:
    """Name the batches of a truncated series: ``n_products`` + 1 inner ones, one outer."""
    products, cross = split(inner_rows, n_products, None)
    return NeumannDraw(products, cross, outer_rows)


def random_length(key: Array, index: Array, n_neumann: int) -> Array:
    """Draw P uniform in {0, …, Q-1}."""
    return _threefry.integers(_threefry.fold_in(_threefry.fold_in(key, 2), index), (), n_neumann)


def hypergradient(oracles: Oracles, point: Point, draw: NeumannDraw, n_neumann: int, step: Scalar) -> Point:
    """Return (None, (∇²xz G) v + ∇x F, v) at the z and x of ``point``, v by the series the draw is for."""

    def multiply(term: PyTree, batch: Any) -> PyTree:
        return move(term, oracles.hvp(point._replace(v=term), batch), step)

    def add_term(carry: tuple[PyTree, PyTree], batch: Any) -> tuple[PyTree, PyTree]:
        term = multiply(carry[0], batch)
        return term, trees.add(carry[1], term)

    outer = oracles.outer(point, draw.outer)
    if draw.length is not None:
        term = repeat(draw.length, draw.products, multiply, outer.grad)
        v = trees.scale(-step * n_neumann, term)
    else:
        _, total = repeat(n_neumann, draw.products, add_term, (outer.grad, outer.grad))
        v = trees.scale(-step, total)
    cross = oracles.cross(point._replace(v=v), draw.cross)
    return Point(None, trees.add(cross, outer.grad_outer), v)


def hypergradient_calls(oracles: Oracles, draw: NeumannDraw, n_neumann: int) -> Calls:
    """Return the exact cost: the products really taken, one cross product, both outer gradients."""
    n_drawn = n_neumann if draw.length is None else n_neumann - 1
    products = oracles.count_inner(draw.products, n_drawn, first=draw.length)
    outer = oracles.count_outer(draw.outer)
    return Calls(hvp=products, cross=oracles.count_inner(draw.cross), outer_grad=outer, outer_grad_outer=outer)


class LoopDraw(NamedTuple):
    """Batches of an inner loop, and of the hypergradient after it."""

    inner_loop: Any
    neumann: NeumannDraw


@dataclass(frozen=True)
class NeumannSolver(Solver):
    """A solver with a Neumann series."""

    n_neumann: int = whole(default=10)
    neumann_step: float = positive(default=0.5)

    def resolve(self, oracles: Oracles) -> Self:
        check_step(self, self.neumann_step, oracles)
        return self


@dataclass(frozen=True)
class AlternatingSolver(NeumannSolver):
    """Inner steps, then a move along a hypergradient of random length: BSA, ALSET and TTSA but for their schedules.

    Parameters
    ----------
    n_neumann : Q; the Neumann series takes P products, uniform in 0, …, Q - 1
    """

    n_inner_steps = 1  # unless a solver makes it a parameter

    def draw(self, oracles: Oracles, key: Array, index: Array) -> LoopDraw:
        rows = oracles.draw_inner(key, index, self.n_inner_steps + self.n_neumann)
        inner_loop, series = split(rows, self.n_inner_steps, self.n_neumann)
        draw = assign_batches(series, oracles.draw_outer(key, index), self.n_neumann - 1)
        return LoopDraw(inner_loop, draw._replace(length=random_length(key, index, self.n_neumann)))

    def move_outer(self, oracles: Oracles, point: Point, index: Array, draw: LoopDraw, power: float) -> Point:
        """Move x along the hypergradient at a point whose z has moved already; steps decrease like t^-power."""
        _, grad, v = hypergradient(oracles, point, draw.neumann, self.n_neumann, self.neumann_step)
        step = decay(self.step_size / self.outer_ratio, index, power)
        return move_outer(oracles, point._replace(v=v), grad, step)

    def calls(self, oracles: Oracles, draw: LoopDraw, refresh: bool) -> Calls:
        hyper = hypergradient_calls(oracles, draw.neumann, self.n_neumann)
        return hyper._replace(inner_grad=oracles.count_inner(draw.inner_loop, self.n_inner_steps))
