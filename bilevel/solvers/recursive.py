"""The recursive estimate of D = (D_z, D_v, D_x): what SRBA and SPABA share.

With u = (z, v, x), steps ρ for z and v and γ for x, and the projection P of v onto a ball,

    at a refresh:  D ← D(u) on all rows;                                              u ← P(u - step · D)
    otherwise:     draw B, C;  D ← D + D_{B,C}(u) - D_{B,C}(u_previous);              u ← P(u - step · D)

with the same B, C at both points. D is kept unscaled.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from bilevel import trees
from bilevel.oracles import Oracles
from bilevel.solvers.base import Solver
from bilevel.solvers.directions import descend, direction_calls
from bilevel.solvers.fields import positive
from bilevel.types import Array, Calls, Point

_DRIFTED = 0.5  # a working recursion shows 0 to 0.3, one at the floor of its arithmetic 0.4 to 1.1


class RecursiveState(NamedTuple):
    """The iterate, the one before it, the estimate of D; and of the last refresh, ||D|| and the drift."""

    point: Point
    previous: Point
    estimate: Point
    refresh_norm: Array
    drift: Array


@dataclass(frozen=True)
class RecursiveSolver(Solver):
    """Both methods but for when they refresh. A draw has fields ``inner`` and ``outer``."""

    v_radius: float | None = positive(default=None, optional=True, hint="; use None for no projection", kw_only=True)

    restarts = True
    unroll = 4

    def init(self, oracles: Oracles, start: Point) -> RecursiveState:
        """Start with no estimate: the first step is a refresh."""
        zero = jnp.zeros_like(self.step_size)
        return RecursiveState(start, start, trees.zeros_like(start), refresh_norm=zero, drift=zero)

    def refresh(self, oracles: Oracles, state: RecursiveState, index: Array, draw: Any) -> RecursiveState:
        """Replace the estimate by D on all rows, and move."""
        exact = oracles.direction(state.point)
        norm = jnp.sqrt(trees.norm_sq(exact))
        gap = jnp.sqrt(trees.norm_sq(trees.subtract(exact, state.estimate)))
        drift = jnp.where(index == 0, 0, gap / jnp.maximum(norm, state.refresh_norm))
        return self._moved(oracles, state._replace(refresh_norm=norm, drift=drift), exact)

    def step(self, oracles: Oracles, state: RecursiveState, index: Array, draw: Any) -> RecursiveState:
        """Correct the estimate by the difference over the last move, and move."""
        estimate = trees.add(state.estimate, oracles.difference(state.point, state.previous, draw))
        return self._moved(oracles, state, estimate)

    def _moved(self, oracles: Oracles, state: RecursiveState, estimate: Point) -> RecursiveState:
        outer_step = self.step_size / self.outer_ratio
        point = descend(oracles, state.point, estimate, self.step_size, outer_step, self.v_radius)
        return state._replace(point=point, previous=state.point, estimate=estimate)

    def calls(self, oracles: Oracles, draw: Any, refresh: bool) -> Calls:
        """Count 3n + 2m for a refresh, both points of the difference for a step."""
        if refresh:
            return direction_calls(oracles.n_inner, oracles.n_outer)
        return direction_calls(2 * oracles.count_inner(draw.inner), 2 * oracles.count_outer(draw.outer))

    def diagnostics(self, state: RecursiveState) -> dict[str, Array]:
        """Report how far the estimate was from the full pass at the last refresh.

        The distance is relative to ||D|| at this refresh or the one before, whichever is larger: a working
        recursion stays well below ½, however fast D itself goes to zero.
        """
        return {"drift": state.drift}

    def warning(self, diagnostics: dict[str, float], dtype: DTypeLike) -> str | None:
        """Speak up when rounding has made the recursion worthless."""
        if np.dtype(dtype) != np.float32 or not diagnostics["drift"] > _DRIFTED:
            return None
        return (
            f"{type(self).__name__}'s recursive estimate had drifted from the full pass at the last refresh, by "
            f"{diagnostics['drift']:.2g} of the direction itself: rounding in float32 has piled up, or the step "
            "size is too large for the period. Build the problem with dtype='float64', or give a smaller `period`."
        )
