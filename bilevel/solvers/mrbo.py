"""MRBO: momentum-based recursive bilevel optimizer.

Yang, Ji, Liang. Provably Faster Algorithms for Bilevel Optimization. NeurIPS 2021, arXiv 2106.04692. Confidence:
high; estimates, moves and schedules were compared with the authors' code, whose series is that of the code of StocBiO
(:mod:`bilevel.solvers.stocbio`). The code resets its schedules in each step, so that its momentum is constant, and
moves z twice.

STORM estimates d_z of ∇z G and d_x of the hypergradient with a truncated Neumann series
(:mod:`bilevel.solvers.neumann`); z and x move together. With one sample S at both points, d = g_S(u) at the first step,

    d ← g_S(u) + (1 - a)(d - g_S(u_previous)),   a = min(1, c (t - 1)^-⅔) for t >= 2
    z ← z - α t^-⅓ d_z;   x ← x - (α/r) t^-⅓ d_x

Cost 2(Q + 4) b, half at the first step. Memory 3p + 3d. Adaptive: nothing.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from bilevel._core import trees
from bilevel._core.types import Array, Calls, Point, PyTree
from bilevel.oracles import Oracles
from bilevel.solvers import neumann
from bilevel.solvers.base import Complexity, solver
from bilevel.solvers.fields import fraction
from bilevel.solvers.moves import MovesState, decay, decay_share, move, split, storm


class StormState(NamedTuple):
    """The iterate, the one before it, the estimates of ∇z G and of the hypergradient, and states of transformations."""

    point: Point
    previous: Point
    inner_estimate: PyTree
    outer_estimate: PyTree
    moves: MovesState


class StormDraw(NamedTuple):
    """A batch for ∇z G, and the batches of a hypergradient."""

    inner: Any
    neumann: neumann.NeumannDraw


@dataclass(frozen=True)
class StormSolver(neumann.NeumannSolver[StormState, StormDraw]):
    """The common part of MRBO and SUSTAIN, which differ only in what they draw.

    Parameters
    ----------
    step_size : first step of the inner variable; steps decrease like t^-1/3
    momentum : c; the share of the new sample in an estimate is min(1, c (t - 1)^-2/3)
    """

    momentum: float = fraction(default=0.5)
    estimator = "storm"  # a parameter of SUSTAIN: "sgd" has no recursion, and that of "spider" has no momentum
    needs_plain_step = "its momentum is defined for plain steps of z"

    def init(self, oracles: Oracles, start: Point) -> StormState:
        zero = trees.zeros_like(start)
        return StormState(start, start, zero.inner_var, zero.outer_var, self.moves.init(start))

    def refreshes(self, index: Array, draw: StormDraw) -> Array | None:
        return index == 0

    def refresh(self, oracles: Oracles, state: StormState, index: Array, draw: StormDraw) -> StormState:
        return self.step(oracles, state, index, draw, first=True)

    def step(
        self, oracles: Oracles, state: StormState, index: Array, draw: StormDraw, first: bool = False
    ) -> StormState:
        inner_estimate, outer_estimate, v = self._gradients(oracles, state.point, draw)
        decays = self.estimator == "storm"
        if not first and self.estimator != "sgd":
            previous = self._gradients(oracles, state.previous, draw)
            momentum = decay_share(self.momentum, index - 1, 2 / 3) if decays else 0
            inner_estimate = storm(momentum, inner_estimate, state.inner_estimate, previous.inner_var)
            outer_estimate = storm(momentum, outer_estimate, state.outer_estimate, previous.outer_var)
        step = decay(self.step_size, index, 1 / 3) if decays else self.step_size
        point = state.point._replace(inner_var=move(state.point.inner_var, inner_estimate, step), v=v)
        point, moves = self.moves.outer(oracles, point, state.moves, outer_estimate, step / self.outer_ratio)
        return StormState(point, state.point, inner_estimate, outer_estimate, moves)

    def _gradients(self, oracles: Oracles, point: Point, draw: StormDraw) -> Point:
        """Return (∇z G, hypergradient, v)."""
        hyper = neumann.hypergradient(oracles, point, draw.neumann, self.n_neumann, self.neumann_step)
        return hyper._replace(inner_var=oracles.inner_grad(point, draw.inner))

    def calls(self, oracles: Oracles, draw: StormDraw, refresh: bool) -> Calls:
        hyper = neumann.hypergradient_calls(oracles, draw.neumann, self.n_neumann)
        one = hyper._replace(inner_grad=oracles.count_inner(draw.inner))
        return one if refresh or self.estimator == "sgd" else trees.scale(2, one)


@solver
class MRBO(StormSolver):
    """Momentum-based recursive bilevel optimizer."""

    complexity = Complexity("Õ(ε^-3/2)", "general expectation", "C^{1,1}", "C^{2,2}")

    def draw(self, oracles: Oracles, key: Array, index: Array) -> StormDraw:
        rows = oracles.draw_inner(key, index, self.n_neumann + 2)
        inner, products, cross = split(rows, None, self.n_neumann, None)
        return StormDraw(inner, neumann.NeumannDraw(products, cross, oracles.draw_outer(key, index)))
