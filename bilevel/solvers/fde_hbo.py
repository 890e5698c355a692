"""FdeHBO: a single loop of STORM estimates, with products replaced by differences of gradients.

Yang, Xiao, Ji. Achieving O(ε^-1.5) Complexity in Hessian/Jacobian-free Stochastic Bilevel Optimization. NeurIPS 2023,
arXiv 2312.03807. Confidence: low; only the abstract and summaries were available, and no code of the authors. They name
the single loop, the differences, the projection of v and the recursive momentum of all three estimates. The central
differences are taken from HJFBiO (ICML 2024), a later method of this kind.

With D of :mod:`bilevel.solvers.srba`, its products replaced by central differences at z ± δ v on the same rows,

    (∇²zz G) v ≈ (∇z G(z + δ v, x) - ∇z G(z - δ v, x)) / 2δ;   (∇²xz G) v ≈ (∇x G(z + δ v, x) - ∇x G(z - δ v, x)) / 2δ
    draw S;  d ← D_S(u) + (1 - a)(d - D_S(u_previous)),  d = D_S(u) at first,  a = min(1, c (t - 1)^-⅔) for t >= 2
    (z, v) ← (z, v) - α t^-⅓ d;   x ← x - (α/r) t^-⅓ d;   v is projected onto a ball of radius R

Choices made here: z, v and x have separate batches; all move together from the old point; the schedules are those of
MRBO, which uses STORM estimates as well; δ is 1e-3, since differences over much shorter distances are dominated by
rounding in float32; v is not projected unless a radius is given, since the paper's radius, a bound of the solution, is
unknown. The error of a difference is of order δ², and 0 on quadratics.
Cost 14b, half at the first step, all of them gradients. Memory 6p + 3d. Adaptive: nothing.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from bilevel._core import trees
from bilevel._core.types import Array, Calls, Point, PyTree, Rows
from bilevel.oracles import Oracles
from bilevel.solvers.base import Complexity, Solver, solver
from bilevel.solvers.fields import bounds, fraction, positive
from bilevel.solvers.moves import MovesState, decay, decay_share, split, storm


class FdeHBOState(NamedTuple):
    """The iterate, the one before it, d, and the states of transformations."""

    point: Point
    previous: Point
    estimate: Point
    moves: MovesState


class FdeHBODraw(NamedTuple):
    """Batches for the estimates of D_z, D_v and D_x."""

    inner: Any
    v_rows: Rows
    x_rows: Rows


@solver
class FdeHBO(Solver[FdeHBOState, FdeHBODraw]):
    """Finite-difference enabled Hessian-free bilevel optimizer.

    Parameters
    ----------
    step_size : first step of the inner variable and of v; steps decrease like t^-1/3
    momentum : c; the share of the new sample in an estimate is min(1, c (t - 1)^-2/3)
    perturbation : δ; gradients are taken at z ± δ v
    """

    v_radius: float | None = positive(default=None, optional=True, hint="; use None for no projection")
    outer_bounds: str | tuple[Any, Any] | None = bounds(default=None, kw_only=True)
    momentum: float = fraction(default=0.5)
    perturbation: float = positive(default=1e-3)
    complexity = Complexity("Õ(ε^-3/2)", "general expectation")
    needs_plain_step = None

    def init(self, oracles: Oracles, start: Point) -> FdeHBOState:
        return FdeHBOState(start, start, trees.zeros_like(start), self.moves.init(start))

    def draw(self, oracles: Oracles, key: Array, index: Array) -> FdeHBODraw:
        inner, v_inner, x_inner = split(oracles.draw_inner(key, index, 3), None, None, None)
        v_outer, x_outer = split(oracles.draw_outer(key, index, 2), None, None)
        return FdeHBODraw(inner, Rows(v_inner, v_outer), Rows(x_inner, x_outer))

    def refreshes(self, index: Array, draw: FdeHBODraw) -> Array:
        return index == 0

    def refresh(self, oracles: Oracles, state: FdeHBOState, index: Array, draw: FdeHBODraw) -> FdeHBOState:
        return self.step(oracles, state, index, draw, first=True)

    def step(
        self, oracles: Oracles, state: FdeHBOState, index: Array, draw: FdeHBODraw, first: bool = False
    ) -> FdeHBOState:
        estimate = self._directions(oracles, state.point, draw)
        if not first:
            previous = self._directions(oracles, state.previous, draw)
            estimate = storm(decay_share(self.momentum, index - 1, 2 / 3), estimate, state.estimate, previous)
        step = decay(self.step_size, index, 1 / 3)
        point, moves = self.moves.apply(oracles, state.point, state.moves, estimate, step, step / self.outer_ratio)
        return FdeHBOState(point, state.point, estimate, moves)

    def _directions(self, oracles: Oracles, point: Point, draw: FdeHBODraw) -> Point:
        """Return D, computed from gradients only."""
        shift = trees.scale(self.perturbation, point.v)
        ahead = point._replace(inner_var=trees.add(point.inner_var, shift))
        behind = point._replace(inner_var=trees.subtract(point.inner_var, shift))

        def difference(gradient: Callable[[Point, Any], PyTree], rows: Any) -> PyTree:
            change = trees.subtract(gradient(ahead, rows), gradient(behind, rows))
            return trees.scale(1 / (2 * self.perturbation), change)

        hvp = difference(oracles.inner_grad, draw.v_rows.inner)
        cross = difference(oracles.inner_grad_outer, draw.x_rows.inner)
        return Point(
            oracles.inner_grad(point, draw.inner),
            trees.add(cross, oracles.outer_grad_outer(point, draw.x_rows.outer)),
            trees.add(hvp, oracles.outer_grad(point, draw.v_rows.outer)),
        )

    def calls(self, oracles: Oracles, draw: FdeHBODraw, refresh: bool) -> Calls:
        one = Calls(
            inner_grad=oracles.count_inner(draw.inner) + 2 * oracles.count_inner(draw.v_rows.inner),
            inner_grad_outer=2 * oracles.count_inner(draw.x_rows.inner),
            outer_grad=oracles.count_outer(draw.v_rows.outer),
            outer_grad_outer=oracles.count_outer(draw.x_rows.outer),
        )
        return one if refresh else trees.scale(2, one)
