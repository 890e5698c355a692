"""Alternating stochastic approximation: inner steps, then a Neumann hypergradient of random length there.

BSA, ALSET and TTSA are this with different loops and schedules:

    z ← inner steps from z;   draw C, P, B_1, …, B_P, B';   v = -η Q prod (I - η H_B) ∇z F_C
    x ← x - (α/r) t^-e ((∇²xz G_B') v + ∇x F_C)   at the new z and the old x
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from bilevel._types import Array, Calls, Point
from bilevel.oracles import Oracles
from bilevel.solvers import neumann
from bilevel.solvers.base import Solver
from bilevel.solvers.directions import decayed, moved, split
from bilevel.solvers.parameters import positive, whole


class AlternatingDraw(NamedTuple):
    """Batches of the inner loop and of the hypergradient, whose length is drawn too."""

    inner_loop: Any
    neumann: neumann.NeumannDraw


@dataclass(frozen=True)
class AlternatingSolver(Solver):
    """What the three methods share: draws, hypergradient, cost."""

    n_neumann: int = whole(default=10)
    neumann_step: float = positive(default=0.5)

    def resolve(self, oracles: Oracles) -> Self:
        """Refuse a Neumann step that is too large for the problem."""
        neumann.check_step(type(self).__name__, self.neumann_step, oracles)
        return self

    def draw_alternating(self, oracles: Oracles, key: Array, index: Array, n_inner_steps: int) -> AlternatingDraw:
        """Draw T + Q inner batches, one outer and the length."""
        rows = oracles.draw_inner(key, index, n_inner_steps + self.n_neumann)
        inner_loop, rest = split(rows, n_inner_steps, self.n_neumann)
        series = neumann.drawn(rest, oracles.draw_outer(key, index), self.n_neumann - 1)
        length = neumann.random_length(key, index, self.n_neumann)
        return AlternatingDraw(inner_loop, series._replace(length=length))

    def outer_move(self, oracles: Oracles, point: Point, index: Array, draw: AlternatingDraw, power: float) -> Point:
        """Move x along the hypergradient at a point whose z has moved already."""
        _, grad, v = neumann.hypergradient(oracles, point, draw.neumann, self.n_neumann, self.neumann_step)
        step = decayed(self.step_size / self.outer_ratio, index, power)
        return Point(point.inner_var, oracles.project(moved(point.outer_var, grad, step)), v)

    def alternating_calls(self, oracles: Oracles, draw: AlternatingDraw, n_inner_steps: int) -> Calls:
        """Count T gradients and a hypergradient of the drawn length."""
        hyper = neumann.hypergradient_calls(oracles, draw.neumann, self.n_neumann)
        return hyper._replace(inner_grad=oracles.count_inner(draw.inner_loop, n_inner_steps))
