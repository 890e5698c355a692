"""FSLA: fully single-loop algorithm, with momentum only in the outer direction.

Li, Gu, Huang. A Fully Single Loop Algorithm for Bilevel Optimization without Hessian Inverse. AAAI 2022, arXiv
2112.04660. Confidence: medium; the text was not available. The equations, with a = min(1, α t^-½), are those of the
code in the benchmark of SOBA's authors, where only the first u_previous differs: its x is 0.

    draw B;     z ← z - α t^-½ ∇z G_B
    draw B, C;  v ← v - α t^-½ ((∇²zz G_B) v + ∇z F_C)                                  at the new z
    draw B, C;  h ← D_x(u) + (1 - a)(h - D_x(u_previous)),   h = D_x(u) at first;   x ← x - (α/r) t^-½ h

D_x was last evaluated at u_previous, and a = min(1, c t^-½), with c = α if `momentum` is None.
Cost 7b, 5b at the first step. Memory 4p + 3d. Adaptive: nothing.
"""

from typing import Any, NamedTuple

from bilevel._core import trees
from bilevel._core.types import Array, Calls, Point, PyTree, Rows
from bilevel.oracles import Oracles
from bilevel.solvers.base import Complexity, Solver, solver
from bilevel.solvers.fields import fraction
from bilevel.solvers.moves import MovesState, decay, decay_share, move, split, storm


class FSLAState(NamedTuple):
    """The iterate, the last point at which D_x was evaluated, the estimate of D_x, and states of transformations."""

    point: Point
    previous: Point
    estimate: PyTree
    moves: MovesState


class FSLADraw(NamedTuple):
    """Batches for the moves of z, v and x."""

    inner: Any
    v_rows: Rows
    x_rows: Rows


@solver
class FSLA(Solver[FSLAState, FSLADraw]):
    """Fully single-loop algorithm.

    Parameters
    ----------
    step_size : first step of the inner variable and of v; steps decrease like t^-1/2
    momentum : c; the share of the new sample in the outer estimate is min(1, c t^-1/2); None means c = α
    """

    momentum: float | None = fraction(default=0.5, optional=True)
    complexity = Complexity("O(ε^-2)", "general expectation", "C^{1,1}", "C^{2,2}")

    def init(self, oracles: Oracles, start: Point) -> FSLAState:
        return FSLAState(start, start, trees.zeros_like(start.outer_var), self.moves.init(start))

    def draw(self, oracles: Oracles, key: Array, index: Array) -> FSLADraw:
        inner, v_inner, x_inner = split(oracles.draw_inner(key, index, 3), None, None, None)
        v_outer, x_outer = split(oracles.draw_outer(key, index, 2), None, None)
        return FSLADraw(inner, Rows(v_inner, v_outer), Rows(x_inner, x_outer))

    def refreshes(self, index: Array, draw: FSLADraw) -> Array:
        return index == 0

    def refresh(self, oracles: Oracles, state: FSLAState, index: Array, draw: FSLADraw) -> FSLAState:
        return self.step(oracles, state, index, draw, first=True)

    def step(self, oracles: Oracles, state: FSLAState, index: Array, draw: FSLADraw, first: bool = False) -> FSLAState:
        def outer_direction(point: Point) -> PyTree:
            rows = draw.x_rows
            return trees.add(oracles.cross(point, rows.inner), oracles.outer_grad_outer(point, rows.outer))

        point, step = state.point, decay(self.step_size, index, 0.5)
        point = point._replace(inner_var=move(point.inner_var, oracles.inner_grad(point, draw.inner), step))
        residual = trees.add(oracles.hvp(point, draw.v_rows.inner), oracles.outer_grad(point, draw.v_rows.outer))
        point = point._replace(v=move(point.v, residual, step))
        estimate = outer_direction(point)
        if not first:
            share = decay_share(self.step_size if self.momentum is None else self.momentum, index, 0.5)
            estimate = storm(share, estimate, state.estimate, outer_direction(state.previous))
        outer_step = decay(self.step_size / self.outer_ratio, index, 0.5)
        moved, moves = self.moves.outer(oracles, point, state.moves, estimate, outer_step)
        return FSLAState(moved, point, estimate, moves)

    def calls(self, oracles: Oracles, draw: FSLADraw, refresh: bool) -> Calls:
        points = 1 if refresh else 2
        return Calls(
            inner_grad=oracles.count_inner(draw.inner),
            hvp=oracles.count_inner(draw.v_rows.inner),
            cross=points * oracles.count_inner(draw.x_rows.inner),
            outer_grad=oracles.count_outer(draw.v_rows.outer),
            outer_grad_outer=points * oracles.count_outer(draw.x_rows.outer),
        )
