"""SOBA: stochastic bilevel algorithm.

Dagréou, Ablin, Vaiter, Moreau. A framework for bilevel optimization that enables stochastic and global
variance reduction algorithms. NeurIPS 2022, arXiv 2201.13409.

    draw B, C;   (z, v) ← (z, v) - α t^-½ D_{B,C}(u);   x ← x - (α/r) t^-½ D_{B,C}(u),   all at the old u

Cost 5b. Memory 2p + d.
"""

from typing import Any, NamedTuple

from bilevel._types import Array, Calls, Point, Rows
from bilevel.oracles import Oracles
from bilevel.solvers.base import Solver, solver
from bilevel.solvers.directions import decayed, direction_calls
from bilevel.solvers.parameters import bounds, positive, transformation
from bilevel.solvers.preconditioning import OPTIMIZERS, Steering, check_steering, move, steering


class SOBAState(NamedTuple):
    """The iterate, and the state of the transformation of D_x if there is one."""

    point: Point
    steering: Steering = Steering()


@solver
class SOBA(Solver):
    """Stochastic bilevel algorithm: plain stochastic directions, steps decreasing like t^-1/2.

    Parameters
    ----------
    step_size : first step of the inner variable and of v
    outer_ratio : the outer variable moves with ``step_size / outer_ratio``
    batch_size : rows per batch, on both levels
    v_radius : radius of the ball v is kept in; None means no projection
    outer_optimizer : "adam" or an optax transformation of D_x, which moves the outer variable in the place of the step
        divided by `outer_ratio`; None keeps that step
    outer_bounds : (lower, upper), numbers or like the outer variable, which is kept inside; None means only the bounds
        of the problem
    sampling : "blocks", "iid", "reshuffle" or "full"
    """

    v_radius: float | None = positive(default=None, optional=True, hint="; use None for no projection")
    outer_optimizer: str | Any | None = transformation(OPTIMIZERS, default=None, kw_only=True)
    outer_bounds: str | tuple[Any, Any] | None = bounds(default=None, kw_only=True)

    def init(self, oracles: Oracles, start: Point) -> SOBAState:
        """Start where the problem starts."""
        return SOBAState(start, steering(self, start))

    def check_start(self, start: Point) -> None:
        """Refuse bounds and transformations that do not fit."""
        check_steering(self, start)

    def step(self, oracles: Oracles, state: SOBAState, index: Array, draw: Rows) -> SOBAState:
        """Move along the sampled direction."""
        step = decayed(self.step_size, index, 0.5)
        direction = oracles.direction(state.point, draw)
        return SOBAState(*move(self, oracles, state.point, direction, state.steering, step, step / self.outer_ratio))

    def calls(self, oracles: Oracles, draw: Rows, refresh: bool) -> Calls:
        """Count one direction."""
        return direction_calls(oracles.count_inner(draw.inner), oracles.count_outer(draw.outer))
