"""BSA: bilevel stochastic approximation.

Ghadimi, Wang. Approximation Methods for Bilevel Programming. 2018, arXiv 1802.02246. Confidence: medium; the text was
not available. Schedules, constant η and T = 10 are those of the benchmark of SOBA's authors. An implementation by the
authors of LancBiO has free exponents of t, and the same P.

    T times:  draw B;  z ← z - α t^-½ ∇z G_B
    x ← x - (α/r) t^-½ ((∇²xz G_B') v + ∇x F_C),   v by a Neumann series of random length

The original restarts z from its first value in every outer step, with inner steps α/s, s = 1, …, T: this is
``warm_start=False``. In practice z is kept, and the algorithm is then the same as ALSET.
Cost (T + P + 3) b, P of mean (Q - 1)/2. Memory p + d. Adaptive: nothing.
"""

from typing import Any, NamedTuple

import jax

from bilevel._core.types import Array, Point, PyTree
from bilevel.oracles import Oracles
from bilevel.solvers.alset import AlternatingSolver
from bilevel.solvers.base import Complexity, PointState, solver
from bilevel.solvers.fields import flag, whole
from bilevel.solvers.moves import batch, decay, move
from bilevel.solvers.neumann import LoopDraw


class BSAState(NamedTuple):
    """The iterate, the states of transformations, and the first inner variable, for cold starts."""

    point: Point
    moves: Any
    first_inner_var: PyTree


@solver
class BSA(AlternatingSolver):
    """Bilevel stochastic approximation.

    Parameters
    ----------
    step_size : first step of the inner variable; steps decrease like t^-1/2
    warm_start : continue from the last inner variable; False restarts from the first one, with steps step_size / s
    """

    n_inner_steps: int = whole(default=10)
    warm_start: bool = flag(default=True)
    complexity = Complexity("O(ε^-3)", "general expectation", "C^{1,1}", "C^{2,2}")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inner_optimizer is not None and not self.warm_start:
            raise ValueError(
                "`BSA(inner_optimizer=…, warm_start=False)`: a cold start takes steps step_size / s; leave out "
                "one of the two."
            )

    def init(self, oracles: Oracles, start: Point) -> BSAState:  # type: ignore[override]
        return BSAState(start, self.moves.init(start), start.inner_var)

    def step(self, oracles: Oracles, state: BSAState, index: Array, draw: LoopDraw) -> BSAState:  # type: ignore[override]
        def cold_step(s: Array, point: Point) -> Point:
            grad = oracles.inner_grad(point, batch(draw.inner_loop, s))
            return point._replace(inner_var=move(point.inner_var, grad, decay(self.step_size, s, 1.0)))

        if self.warm_start:
            warm = AlternatingSolver.step(self, oracles, PointState(state.point, state.moves), index, draw)
            return BSAState(*warm, state.first_inner_var)
        first = state.point._replace(inner_var=state.first_inner_var)
        point = jax.lax.fori_loop(0, self.n_inner_steps, cold_step, first)
        return BSAState(*self.outer_move(oracles, point, state.moves, index, draw), state.first_inner_var)
