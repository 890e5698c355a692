"""S-TFBO: the single-loop tuning-free method, whose steps are divided by the norm of all directions so far.

Yang, Ban, Huang, Ma, Ji. Tuning-Free Bilevel Optimization: New Algorithms and Convergence Analysis. ICLR 2025, arXiv
2410.05140. Confidence: medium; only the abstract of the text was available. The steps are those of the authors' code,
and the sums of squares those of the code of a later paper that extends this method (AdaRHD, single loop).

    D = D(u);   b² ← b² + ||D_z||²;   c² ← c² + ||D_v||²;   a² ← a² + ||D_x||²;   f = max(b, c)
    z ← z - D_z / b;   v ← v - D_v / f;   x ← x - D_x / (a f),   all at the old u

Initially b = c = 1/α and a = r, so that the steps of z and v are at most α, and that of x at most α/r; the method
converges for all α and r. The theory is for full-batch passes; the authors' experiments draw batches, and then the sums
grow without bound.
Cost 3n + 2m, or 5b. Memory 2p + d. Adaptive: all steps, by sums of squared norms.
"""

from typing import NamedTuple

import jax.numpy as jnp

from bilevel._core import trees
from bilevel._core.types import Array, Calls, Point, Rows
from bilevel.oracles import SAMPLINGS, Oracles
from bilevel.solvers.base import Complexity, Solver, solver
from bilevel.solvers.fields import one_of, positive
from bilevel.solvers.moves import direction_calls, move, move_outer


class STFBOState(NamedTuple):
    """The iterate, and the sums of squares a², b² and c²."""

    point: Point
    outer_sum: Array
    inner_sum: Array
    v_sum: Array


@solver
class STFBO(Solver[STFBOState, Rows]):
    """Single-loop tuning-free bilevel optimizer.

    Parameters
    ----------
    step_size : α, upper bound of the steps of the inner variable and of v
    outer_ratio : r; the steps of the outer variable are below ``step_size / outer_ratio``
    sampling : "full", as in the theory, or "blocks", "iid", "reshuffle"
    """

    step_size: float = positive(default=1.0)
    sampling: str = one_of(SAMPLINGS, default="full", kw_only=True)
    needs_plain_step = "its steps of z are adaptive"
    needs_plain_outer_step = "its steps of x are adaptive"
    complexity = Complexity("Õ((n+m) ε^-1)", "full batches")

    def init(self, oracles: Oracles, start: Point) -> STFBOState:
        steps = jnp.asarray(self.step_size) ** -2
        return STFBOState(start, jnp.asarray(self.outer_ratio) ** 2, steps, steps)

    def step(self, oracles: Oracles, state: STFBOState, index: Array, draw: Rows) -> STFBOState:
        point, direction = state.point, oracles.direction(state.point, draw)
        outer_sum = state.outer_sum + trees.norm_sq(direction.outer_var)
        inner_sum = state.inner_sum + trees.norm_sq(direction.inner_var)
        v_sum = state.v_sum + trees.norm_sq(direction.v)
        larger = jnp.sqrt(jnp.maximum(inner_sum, v_sum))
        z = move(point.inner_var, direction.inner_var, 1 / jnp.sqrt(inner_sum))
        moved = Point(z, point.outer_var, move(point.v, direction.v, 1 / larger))
        moved = move_outer(oracles, moved, direction.outer_var, 1 / (jnp.sqrt(outer_sum) * larger))
        return STFBOState(moved, outer_sum, inner_sum, v_sum)

    def calls(self, oracles: Oracles, draw: Rows, refresh: bool) -> Calls:
        return direction_calls(oracles.count_inner(draw.inner), oracles.count_outer(draw.outer))
