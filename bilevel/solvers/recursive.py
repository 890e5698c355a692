"""The recursive estimate of D = (D_z, D_v, D_x): what SRBA and SPABA share.

The equations are in :mod:`bilevel.solvers.srba`; B and C are the same at both points. D is kept unscaled: the
difference needs both points and not how one came from the other, so that moves are free. They may be preconditioned
(:mod:`bilevel.solvers.preconditioning`), and are then rolled back where they grow (:mod:`bilevel.solvers.rollback`).
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from bilevel import _tree as trees
from bilevel._types import Array, Calls, Count, Point, PyTree
from bilevel.oracles import Oracles
from bilevel.solvers import low_rank
from bilevel.solvers.curvature import check_range
from bilevel.solvers.directions import direction_calls, move_outer
from bilevel.solvers.low_rank import LowRank
from bilevel.solvers.parameters import one_of, positive, whole
from bilevel.solvers.preconditioning import (
    PreconditionedSolver,
    Preconditioning,
    diagonal_calls,
    metric_diagonal,
    metric_norm,
    norm_calls,
)
from bilevel.solvers.progress import (
    QUIET_WINDOWS,
    Progress,
    check_following,
    check_progress,
    init_progress,
    return_to_best,
)
from bilevel.solvers.rollback import Rollback, check_refresh, init_rollback, measure, point_within_reach

DIAGONAL, LOW_RANK, NORM = "diagonal", "low_rank", "norm"
_DRIFTED = 0.5  # a working recursion shows 0 to 0.3, one at the floor of its arithmetic 0.4 to 1.1


_NOT_STATIONARY, _SMALL_LAG = 0.01, 0.01  # of h
_HELD, _FEW_PASSES = 0.5, 20  # x that stood still in a larger share of more passes is told
_FIRST_WINDOW = 1000  # steps: Adam can move x by 10


class RecursiveState(NamedTuple):
    """The iterate, the one before it, the estimate of D; and of the last refresh, ||D|| and the estimate's drift.

    The drift is relative to ||D|| at this refresh or the one before, whichever is larger: a working recursion stays
    well below ½, however fast D itself goes to zero. The last three fields hold nothing in the plain method.
    """

    point: Point
    previous: Point
    estimate: Point
    refresh_norm: Array
    drift: Array
    preconditioning: Preconditioning = Preconditioning()
    rollback: Rollback | tuple[()] = ()
    progress: Progress | tuple[()] = ()


@dataclass(frozen=True)
class RecursiveSolver(PreconditionedSolver):
    """Both methods but for when they refresh. A draw has fields ``inner`` and ``outer``.

    Parameters
    ----------
    preconditioner : "diagonal" divides the moves of z and v by the diagonal of ∇²zz G, taken with each full-batch pass
        (n calls more, 8n where it is estimated); "low_rank" also by eight directions (8n calls more), fits z before the
        first step, and lets x wait for z and v; "norm" divides them by an estimate of the norm of ∇²zz G (2n calls
        more), which knows no direction, and so none of negative curvature; None leaves the moves as they are
    least_progress : end where h changes by at most this share of itself from one window of full-batch passes to the
        next, twice in a row; needs "low_rank". None means to go on
    """

    v_radius: float | None = positive(default=None, optional=True, hint="; use None for no projection", kw_only=True)
    preconditioner: str | None = one_of((DIAGONAL, LOW_RANK, NORM), default=None, optional=True, kw_only=True)
    least_progress: float | None = positive(default=None, optional=True, hint="; use None to go on", kw_only=True)
    period: int | None = whole(default=None, optional=True, hint="; use None for the default")

    restarts = needs_finite_sum = True

    def init(self, oracles: Oracles, start: Point) -> RecursiveState:
        zero = jnp.zeros_like(self.step_size)
        ones = jax.tree.map(partial(self._ones, zero), start.inner_var) if self.preconditioner else ()
        preconditioning = self.init_preconditioning(start, ones)
        if self.preconditioner == LOW_RANK:
            start, memory = low_rank.init_low_rank(oracles, start, partial(self._diagonal, oracles))
            preconditioning = preconditioning._replace(low_rank=memory)
        # The plain method is left as its authors wrote it.
        plain = self.preconditioner is None and self.outer_optimizer is None
        rollback = () if plain else init_rollback(start, preconditioning, zero)
        first_window = max(1, _FIRST_WINDOW // (self.period or 1))
        progress: Progress | tuple[()] = ()
        if self.preconditioner == LOW_RANK and isinstance(rollback, Rollback):
            progress = init_progress(zero, first_window, rollback)
        return RecursiveState(start, start, trees.zeros_like(start), zero, zero, preconditioning, rollback, progress)

    def check_start(self, start: Point) -> None:
        if self.least_progress is not None and self.preconditioner != LOW_RANK:
            named = f"`{type(self).__name__}(least_progress={self.least_progress})`"
            raise ValueError(f"{named}: needs preconditioner='low_rank', whose passes tell the progress.")
        PreconditionedSolver.check_start(self, start)

    def check_losses(self, oracles: Oracles, start: Point) -> None:
        if self.preconditioner == LOW_RANK and not oracles.is_on_host:
            check_range(oracles, start)

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
            state = state._replace(preconditioning=self._metric(oracles, state, index))
        if isinstance(state.rollback, Rollback):
            good = check_refresh(state.rollback, state.point, exact, state.preconditioning, self.step_size, index == 0)
            if isinstance(state.progress, Progress):
                progress, good = self._read(oracles, state.progress, good)
                state = state._replace(progress=progress)
            state = state._replace(point=good.point, preconditioning=good.preconditioning, rollback=good)
            exact = good.estimate
        return self._move(oracles, state, exact)

    def _read(self, oracles: Oracles, progress: Progress, here: Rollback) -> tuple[Progress, Rollback]:
        """Return what a full-batch pass shows of h, and the pass to continue from: the best one if h has risen."""
        point, exact = here.point, here.estimate
        lengths, moves = measure(point, exact, here.preconditioning)
        stepped = self._project(move_outer(oracles, point, jax.tree.map(jnp.sign, exact.outer_var), 1))
        least = 0 if self.least_progress is None else self.least_progress
        progress = check_progress(progress, here, oracles.outer_value(point), stepped, moves, least)
        return return_to_best(check_following(progress, lengths, moves, here), here)

    def _ones(self, zero: Array, leaf: Array) -> Array:
        return jnp.ones_like(zero if self.preconditioner == NORM else leaf)

    def _diagonal(self, oracles: Oracles, point: Point, index: Count = 0) -> PyTree:
        if self.preconditioner == NORM:
            return metric_norm(oracles, point, index)
        probed_apart = self.preconditioner == LOW_RANK and oracles.diagonal_passes > 1
        return () if probed_apart else metric_diagonal(oracles, point, index)

    def _metric(self, oracles: Oracles, state: RecursiveState, index: Array) -> Preconditioning:
        old, point = state.preconditioning, state.point
        diagonal = self._diagonal(oracles, point, index)
        if not isinstance(old.low_rank, LowRank):
            return old._replace(diagonal=diagonal)
        diagonal, new = low_rank.update(oracles, point, index, diagonal, old.low_rank)
        return old._replace(diagonal=diagonal, low_rank=new)

    def step(self, oracles: Oracles, state: RecursiveState, index: Array, draw: Any) -> RecursiveState:
        estimate = trees.add(state.estimate, oracles.difference(state.point, state.previous, draw))
        return self._move(oracles, state, estimate)

    def _move(self, oracles: Oracles, state: RecursiveState, estimate: Point) -> RecursiveState:
        scale = state.rollback.scale if isinstance(state.rollback, Rollback) else None
        pace = state.progress.pace if isinstance(state.progress, Progress) else None
        moved = self.descend(oracles, state, estimate, self.step_size, scale, pace)
        if isinstance(state.progress, Progress):
            moved = _hold_outer(state.progress.x_moves, state, moved)
        return moved._replace(previous=state.point, estimate=estimate)

    def evaluation_point(self, state: RecursiveState) -> Point:
        if isinstance(state.progress, Progress):
            return state.progress.best.point
        last = state.rollback
        return point_within_reach(last, state.point) if isinstance(last, Rollback) else state.point

    def init_calls(self, oracles: Oracles) -> Calls:
        return low_rank.init_calls(oracles) if self.preconditioner == LOW_RANK else Calls()

    def calls(self, oracles: Oracles, draw: Any, refresh: bool) -> Calls:
        if refresh:
            cost = direction_calls(oracles.n_inner, oracles.n_outer)
            if self.preconditioner == LOW_RANK:
                return trees.add(cost, low_rank.pass_calls(oracles)._replace(outer_value=oracles.n_outer))
            of_metric = {DIAGONAL: diagonal_calls, NORM: norm_calls}
            return cost if self.preconditioner is None else trees.add(cost, of_metric[self.preconditioner](oracles))
        return direction_calls(2 * oracles.count_inner(draw.inner), 2 * oracles.count_outer(draw.outer))

    def diagnostics(self, state: RecursiveState) -> dict[str, Array]:
        if not isinstance(state.rollback, Rollback):
            return {"drift": state.drift}
        own = {"drift": state.drift, "rollbacks": state.rollback.rollbacks, "step_scale": state.rollback.scale}
        if not isinstance(state.progress, Progress):
            return own
        progress, at = state.progress, state.progress.best_reading
        told = {"h_change": progress.change, "h_lag": at.lag, "h_gradient": at.gradient}
        told |= {"quiet_windows": progress.quiet, "x_held": progress.held_share, "outer_scale": progress.pace}
        return own | told

    def end(self, diagnostics: dict[str, float]) -> str | None:
        if self.least_progress is None or not diagnostics["quiet_windows"] >= QUIET_WINDOWS:
            return None
        return f"h has stopped falling: {_describe(diagnostics)} {_stationarity(diagnostics)}"

    def shortfall(self, diagnostics: dict[str, float]) -> str:
        if self.least_progress is None:
            return ""
        return f"Until then h was not seen to stop falling: {_describe(diagnostics)} Go on by `resume`."

    def may_leave_inner_behind(self, steps: int) -> bool:
        assert self.period is not None, "resolve() fills it in"
        # Before, a run has hardly begun; and where the norm is the metric, z is not meant to be at a minimum.
        return self.preconditioner in (DIAGONAL, LOW_RANK) and steps > self.period

    def warning(self, diagnostics: dict[str, float], dtype: DTypeLike) -> str | None:
        assert self.period is not None, "resolve() fills it in"
        if diagnostics.get("x_held", 0) > _HELD and diagnostics["step"] >= _FEW_PASSES * self.period:
            return (
                f"{type(self).__name__}: x stood still in {diagnostics['x_held']:.0%} of the run, since z was far from "
                "z*(x). Scale the columns of the data or start at a larger penalty; where the inner level is a "
                "network, give preconditioner='norm' and inner_optimizer='adam'."
            )
        if np.dtype(dtype) != np.float32 or not diagnostics["drift"] > _DRIFTED or self.inner_optimizer is not None:
            return None  # a transformation of z averages over steps, and its steps do not shrink with D
        if self.least_progress is not None and diagnostics["h_lag"] <= _SMALL_LAG:
            return None  # D itself is near 0, and what is left of it does not matter
        return (
            f"{type(self).__name__}'s recursive estimate had drifted from the full-batch pass at the last refresh, by "
            f"{diagnostics['drift']:.2g} of the direction itself: rounding in float32 has piled up, or the step "
            "size is too large for the period. Build the problem with dtype='float64', or give a smaller `period`."
        )


def _hold_outer(moves: Array, before: RecursiveState, after: RecursiveState) -> RecursiveState:
    """Return the state after a step, with x and its transformation as before where x does not move."""

    def chosen(new: Any, old: Any) -> Any:
        return jax.tree.map(lambda a, b: jnp.where(moves, a, b), new, old)

    x = chosen(after.point.outer_var, before.point.outer_var)
    optimizer = chosen(after.preconditioning.optimizer, before.preconditioning.optimizer)
    held = after.preconditioning._replace(optimizer=optimizer)
    return after._replace(point=after.point._replace(outer_var=x), preconditioning=held)


def _describe(diagnostics: dict[str, float]) -> str:
    change, lag, gain = (diagnostics[name] for name in ("h_change", "h_lag", "h_gradient"))
    return (
        f"by its own full-batch passes, the mean of h over the last fifth of them changed by {change:.2g} of h, z is "
        f"behind by {lag:.2g} of h, and moving each number of x by 1 would gain {gain:.2g} of h to first order."
    )


def _stationarity(diagnostics: dict[str, float]) -> str:
    if diagnostics["h_gradient"] > _NOT_STATIONARY:
        return "So x is not stationary: a smaller `least_progress` goes on for longer, and another start may end lower."
    return "So x is nearly stationary; h is not convex, and another start or seed may end lower."
