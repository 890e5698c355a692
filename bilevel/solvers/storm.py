"""STORM on the inner gradient and on the hypergradient: what MRBO and SUSTAIN share.

d ← g_S(u) + (1 - a)(d - g_S(u_previous)),   one sample S at both points, d = g_S(u) at the first step
z ← z - α t^-⅓ d_z   and   x ← x - (α/r) t^-⅓ d_x   together;   a = min(1, c (t - 1)^-⅔) for t >= 2
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from bilevel import _tree as trees
from bilevel._types import Array, Calls, Point, PyTree
from bilevel.oracles import Oracles
from bilevel.solvers import neumann
from bilevel.solvers.base import Solver
from bilevel.solvers.directions import decayed, decayed_share, moved, storm
from bilevel.solvers.parameters import fraction, positive, whole


class StormState(NamedTuple):
    """The iterate, the one before it, and the estimates of ∇z G and of the hypergradient."""

    point: Point
    previous: Point
    inner_estimate: PyTree
    outer_estimate: PyTree


class StormDraw(NamedTuple):
    """One batch for ∇z G and those of a hypergradient."""

    inner: Any
    neumann: neumann.NeumannDraw


@dataclass(frozen=True)
class StormSolver(Solver):
    """Both methods but for what they draw."""

    n_neumann: int = whole(default=10)
    neumann_step: float = positive(default=0.5)
    momentum: float = fraction(default=0.5)

    restarts = True

    def resolve(self, oracles: Oracles) -> Self:
        """Refuse a Neumann step that is too large for the problem."""
        neumann.check_step(type(self).__name__, self.neumann_step, oracles)
        return self

    def init(self, oracles: Oracles, start: Point) -> StormState:
        """Start where the problem starts; the first step makes the estimates."""
        return StormState(start, start, trees.zeros_like(start.inner_var), trees.zeros_like(start.outer_var))

    def refreshes(self, index: Array, draw: StormDraw) -> Array:
        """Take the estimates at one point at the first step."""
        return index == 0

    def refresh(self, oracles: Oracles, state: StormState, index: Array, draw: StormDraw) -> StormState:
        """Take the estimates at the start, and move."""
        return self._moved(oracles, state, index, self._gradients(oracles, draw)(state.point))

    def step(self, oracles: Oracles, state: StormState, index: Array, draw: StormDraw) -> StormState:
        """Correct the estimates, and move."""
        at = self._gradients(oracles, draw)
        here, there = at(state.point), at(state.previous)
        momentum = decayed_share(self.momentum, index - 1, 2 / 3)
        estimates = Point(
            storm(momentum, here.inner_var, state.inner_estimate, there.inner_var),
            storm(momentum, here.outer_var, state.outer_estimate, there.outer_var),
            here.v,
        )
        return self._moved(oracles, state, index, estimates)

    def _gradients(self, oracles: Oracles, draw: StormDraw) -> Callable[[Point], Point]:
        """Return the function from a point to (∇z G, hypergradient, v) on the batches of one step."""

        def at(point: Point) -> Point:
            hyper = neumann.hypergradient(oracles, point, draw.neumann, self.n_neumann, self.neumann_step)
            return hyper._replace(inner_var=oracles.inner_grad(point, draw.inner))

        return at

    def _moved(self, oracles: Oracles, state: StormState, index: Array, estimates: Point) -> StormState:
        step = decayed(self.step_size, index, 1 / 3)
        point = Point(
            moved(state.point.inner_var, estimates.inner_var, step),
            oracles.project(moved(state.point.outer_var, estimates.outer_var, step / self.outer_ratio)),
            estimates.v,
        )
        return StormState(point, state.point, estimates.inner_var, estimates.outer_var)

    def calls(self, oracles: Oracles, draw: StormDraw, refresh: bool) -> Calls:
        """Count both points, one at the first step."""
        hyper = neumann.hypergradient_calls(oracles, draw.neumann, self.n_neumann)
        one = hyper._replace(inner_grad=oracles.count_inner(draw.inner))
        return one if refresh else neumann.scaled_calls(2, one)
