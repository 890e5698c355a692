"""The recursive estimate of D = (D_z, D_v, D_x): what SRBA and SPABA share.

The equations are in :mod:`bilevel.solvers.srba`; B and C are the same at both points. D is kept unscaled: the
difference needs both points and not how one came from the other, so that moves are free. They may be preconditioned
(:mod:`bilevel.solvers.preconditioning`), and are then rolled back where they grow (:mod:`bilevel.solvers.rollback`).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from bilevel import _tree as trees
from bilevel._types import Array, Calls, Point
from bilevel.oracles import Oracles
from bilevel.solvers.directions import direction_calls
from bilevel.solvers.parameters import one_of, positive, whole
from bilevel.solvers.preconditioning import PreconditionedSolver, Preconditioning, diagonal_calls, metric_diagonal
from bilevel.solvers.rollback import Rollback, check_refresh, init_rollback, point_within_reach

_DRIFTED = 0.5  # a working recursion shows 0 to 0.3, one at the floor of its arithmetic 0.4 to 1.1


class RecursiveState(NamedTuple):
    """The iterate, the one before it, the estimate of D; and of the last refresh, ||D|| and the estimate's drift.

    The drift is relative to ||D|| at this refresh or the one before, whichever is larger: a working recursion stays
    well below ½, however fast D itself goes to zero. The last two fields hold nothing in the plain method.
    """

    point: Point
    previous: Point
    estimate: Point
    refresh_norm: Array
    drift: Array
    preconditioning: Preconditioning = Preconditioning()
    rollback: Rollback | tuple[()] = ()


@dataclass(frozen=True)
class RecursiveSolver(PreconditionedSolver):
    """Both methods but for when they refresh. A draw has fields ``inner`` and ``outer``."""

    v_radius: float | None = positive(default=None, optional=True, hint="; use None for no projection", kw_only=True)
    preconditioner: str | None = one_of(("diagonal",), default=None, optional=True, kw_only=True)
    period: int | None = whole(default=None, optional=True, hint="; use None for the default")

    restarts = True

    def init(self, oracles: Oracles, start: Point) -> RecursiveState:
        zero = jnp.zeros_like(self.step_size)
        ones = trees.ones_like(start.inner_var) if self.preconditioner else ()
        preconditioning = self.init_preconditioning(start, ones)
        # The plain method is left as its authors wrote it.
        plain = self.preconditioner is None and self.outer_optimizer is None
        rollback = () if plain else init_rollback(start, preconditioning, zero)
        return RecursiveState(start, start, trees.zeros_like(start), zero, zero, preconditioning, rollback)

    def refreshes(self, index: Array, draw: Any) -> Array:
        assert self.period is not None, "resolve() fills it in"
        return index % self.period == 0

    def refresh(self, oracles: Oracles, state: RecursiveState, index: Array, draw: Any) -> RecursiveState:
        exact = oracles.direction(state.point)
        norm = jnp.sqrt(trees.norm_sq(exact))
        gap = jnp.sqrt(trees.norm_sq(trees.subtract(exact, state.estimate)))
        drift = jnp.where(index == 0, 0, gap / jnp.maximum(norm, state.refresh_norm))
        state = state._replace(refresh_norm=norm, drift=drift)
        if self.preconditioner is not None:
            diagonal = metric_diagonal(oracles, state.point, index)
            state = state._replace(preconditioning=state.preconditioning._replace(diagonal=diagonal))
        if isinstance(state.rollback, Rollback):
            good = check_refresh(state.rollback, state.point, exact, state.preconditioning, self.step_size, index == 0)
            state = state._replace(point=good.point, preconditioning=good.preconditioning, rollback=good)
            exact = good.estimate
        return self._move(oracles, state, exact)

    def step(self, oracles: Oracles, state: RecursiveState, index: Array, draw: Any) -> RecursiveState:
        estimate = trees.add(state.estimate, oracles.difference(state.point, state.previous, draw))
        return self._move(oracles, state, estimate)

    def _move(self, oracles: Oracles, state: RecursiveState, estimate: Point) -> RecursiveState:
        scale = state.rollback.scale if isinstance(state.rollback, Rollback) else None
        moved = self.descend(oracles, state, estimate, self.step_size, scale)
        return moved._replace(previous=state.point, estimate=estimate)

    def evaluation_point(self, state: RecursiveState) -> Point:
        last = state.rollback
        return point_within_reach(last, state.point) if isinstance(last, Rollback) else state.point

    def calls(self, oracles: Oracles, draw: Any, refresh: bool) -> Calls:
        if refresh:
            cost = direction_calls(oracles.n_inner, oracles.n_outer)
            return cost if self.preconditioner is None else trees.add(cost, diagonal_calls(oracles))
        return direction_calls(2 * oracles.count_inner(draw.inner), 2 * oracles.count_outer(draw.outer))

    def diagnostics(self, state: RecursiveState) -> dict[str, Array]:
        if not isinstance(state.rollback, Rollback):
            return {"drift": state.drift}
        return {"drift": state.drift, "rollbacks": state.rollback.rollbacks, "step_scale": state.rollback.scale}

    def warning(self, diagnostics: dict[str, float], dtype: DTypeLike) -> str | None:
        if np.dtype(dtype) != np.float32 or not diagnostics["drift"] > _DRIFTED:
            return None
        return (
            f"{type(self).__name__}'s recursive estimate had drifted from the full-batch pass at the last refresh, by "
            f"{diagnostics['drift']:.2g} of the direction itself: rounding in float32 has piled up, or the step "
            "size is too large for the period. Build the problem with dtype='float64', or give a smaller `period`."
        )
