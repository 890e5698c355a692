"""SRBA: stochastic recursive bilevel algorithm.

Dagréou, Moreau, Vaiter, Ablin. A Lower Bound and a Near-Optimal Algorithm for Bilevel Empirical Risk
Minimization. AISTATS 2024.

With u = (z, v, x), steps ρ for z and v and γ for x, the projection P of v onto a ball, each q steps

    D ← D(u) on all rows;                                   u ← P(u - step · D)
    q - 1 times:  draw B, C;  D ← D + D_{B,C}(u) - D_{B,C}(u_previous);  u ← P(u - step · D)

Cost per period: 3n + 2m + 10 b (q - 1). Memory: 6p + 3d, no tables.
"""

from dataclasses import replace
from typing import NamedTuple, Self

import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from bilevel import trees
from bilevel.oracles import Oracles
from bilevel.solvers.base import Solver, solver
from bilevel.solvers.directions import descend, direction_calls
from bilevel.solvers.fields import positive, whole
from bilevel.types import Array, Calls, Point, Rows

_DRIFTED = 0.5  # a working recursion shows 0 to 0.3, one at the floor of its arithmetic 0.4 to 1.1


class SRBAState(NamedTuple):
    """The iterate, the one before it, the estimate of D; and of the last refresh, ||D|| and the drift."""

    point: Point
    previous: Point
    estimate: Point
    refresh_norm: Array
    drift: Array


@solver
class SRBA(Solver):
    """Stochastic recursive bilevel algorithm.

    Parameters
    ----------
    step_size : ρ, the step of the inner variable and of v
    outer_ratio : the outer variable moves with γ = step_size / outer_ratio
    batch_size : rows per batch, on both levels
    period : q, steps from one all-rows pass to the next; None means max(1, (n + m) // (2 batch_size))
    v_radius : radius R of the ball v is kept in; None means no projection
    sampling : "blocks", "iid", "reshuffle" or "full"
    """

    period: int | None = whole(default=None, optional=True, hint="; use None for the default")
    v_radius: float | None = positive(default=None, optional=True, hint="; use None for no projection")

    restarts = True
    unroll = 4

    def resolve(self, oracles: Oracles) -> Self:
        """Fill in the default period."""
        if self.period is not None:
            return self
        return replace(self, period=max(1, (oracles.n_inner + oracles.n_outer) // (2 * self.batch_size)))

    def init(self, oracles: Oracles, start: Point) -> SRBAState:
        """Start with no estimate: the first step is a refresh."""
        zero = jnp.zeros_like(self.step_size)
        return SRBAState(start, start, trees.zeros_like(start), refresh_norm=zero, drift=zero)

    def refreshes(self, index: Array, draw: Rows) -> Array:
        """Take an all-rows pass each ``period`` steps."""
        assert self.period is not None, "resolve() fills it in"
        return index % self.period == 0

    def refresh(self, oracles: Oracles, state: SRBAState, index: Array, draw: Rows) -> SRBAState:
        """Replace the estimate by D on all rows, and move."""
        exact = oracles.direction(state.point)
        norm = jnp.sqrt(trees.norm_sq(exact))
        gap = jnp.sqrt(trees.norm_sq(trees.subtract(exact, state.estimate)))
        drift = jnp.where(index == 0, 0, gap / jnp.maximum(norm, state.refresh_norm))
        return self._moved(oracles, state._replace(refresh_norm=norm, drift=drift), exact)

    def step(self, oracles: Oracles, state: SRBAState, index: Array, draw: Rows) -> SRBAState:
        """Correct the estimate by the difference over the last move, and move."""
        estimate = trees.add(state.estimate, oracles.difference(state.point, state.previous, draw))
        return self._moved(oracles, state, estimate)

    def _moved(self, oracles: Oracles, state: SRBAState, estimate: Point) -> SRBAState:
        outer_step = self.step_size / self.outer_ratio
        point = descend(oracles, state.point, estimate, self.step_size, outer_step, self.v_radius)
        return state._replace(point=point, previous=state.point, estimate=estimate)

    def calls(self, oracles: Oracles, draw: Rows, refresh: bool) -> Calls:
        """Count 3n + 2m for a refresh, both points of the difference for a step."""
        if refresh:
            return direction_calls(oracles.n_inner, oracles.n_outer)
        return direction_calls(2 * oracles.count_inner(draw.inner), 2 * oracles.count_outer(draw.outer))

    def diagnostics(self, state: SRBAState) -> dict[str, Array]:
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
            "SRBA's recursive estimate had drifted from the full pass at the last refresh, by "
            f"{diagnostics['drift']:.2g} of the direction itself: rounding in float32 has piled up, or the step "
            "size is too large for the period. Build the problem with dtype='float64', or give a smaller `period`."
        )
