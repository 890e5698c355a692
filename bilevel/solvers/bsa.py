"""BSA: bilevel stochastic approximation.

Ghadimi, Wang. Approximation Methods for Bilevel Programming. 2018, arXiv 1802.02246. Confidence: low; the text could
not be had, and the outer schedule is reconstructed.

    T times:  draw B;  z ← z - α t^-½ ∇z G_B
    x ← x - (α/r) t^-½ ((∇²xz G_B') v + ∇x F_C),   v by a Neumann series of random length

The original restarts z at its first value in every outer step, with steps α/s inside: ``warm_start=False``. Keeping z
is what is done in practice; it is then the same algorithm as ALSET.
Cost (T + P + 3) b, P of mean (Q - 1)/2. Memory p + d. Adaptive: nothing.
"""

import jax

from bilevel._types import Array, Point
from bilevel.oracles import Oracles
from bilevel.solvers.base import Complexity, solver
from bilevel.solvers.directions import LoopState, batch, decay, move
from bilevel.solvers.neumann import AlternatingSolver, LoopDraw
from bilevel.solvers.parameters import flag, whole


@solver
class BSA(AlternatingSolver):
    """Bilevel stochastic approximation.

    Parameters
    ----------
    step_size : first step of the inner variable; steps decrease like t^-1/2
    warm_start : go on from the last inner variable; False restarts from the first, with steps step_size / s
    """

    n_inner_steps: int = whole(default=10)
    warm_start: bool = flag(default=True)
    table_order = 9
    complexity = Complexity("O(ε^-3)", "general expectation", "C^{1,1}", "C^{2,2}")

    def __post_init__(self) -> None:
        AlternatingSolver.__post_init__(self)
        if self.inner_optimizer is not None and not self.warm_start:
            raise ValueError(
                "`BSA(inner_optimizer=…, warm_start=False)`: a cold start has steps step_size / s; leave one out."
            )

    def init(self, oracles: Oracles, start: Point) -> LoopState:
        return LoopState(start, start.inner_var, self.init_inner(start))

    def inner_loop(self, oracles: Oracles, state: LoopState, index: Array, draw: LoopDraw) -> LoopState:
        def cold(i: Array, point: Point) -> Point:
            grad = oracles.inner_grad(point, batch(draw.inner_loop, i))
            return point._replace(inner_var=move(point.inner_var, grad, decay(self.step_size, i, 1.0)))

        if self.warm_start:
            return AlternatingSolver.inner_loop(self, oracles, state, index, draw)
        first = state.point._replace(inner_var=state.first_inner_var)
        return state._replace(point=jax.lax.fori_loop(0, self.n_inner_steps, cold, first))
