"""AutoSRBA: the solver that needs no tuning.

The `bilevel` library, 2026; not from a paper. Confidence: high; its iterates are compared with NumPy.

Its estimate of D = (D_z, D_v, D_x) is the recursive estimate of :mod:`bilevel.solvers.srba`. The rest is made to work
without a choice of step sizes, and has no convergence theory:

- moves of z and v are divided by a preconditioner M (:mod:`bilevel.solvers.auto.preconditioner`), and x moves by Adam:
  z ← z - ρ M^-1 D_z,   v ← v - ρ M^-1 D_v,   x ← P(x + Adam(D_x));
- a full-batch pass at which the iterates have grown is rolled back, with smaller steps
  (:mod:`bilevel.solvers.auto.rollback`);
- x is frozen while z or v is far behind, returns to its best pass if h rises, and the run ends when h no longer
  decreases (:mod:`bilevel.solvers.auto.progress`).

Cost per period: 3n + 2m + 10 b (q - 1), products of the preconditioner (9n in closed form, 16n otherwise) and m values
of F. Memory: four more copies of the iterate than SRBA, and 17 vectors like z. Adaptive: the preconditioner, the length
of steps and the end.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from bilevel._core import trees
from bilevel._core.types import Array, Calls, Point, PyTree, Rows, Scalar
from bilevel.oracles import Oracles
from bilevel.problems import BilevelProblem
from bilevel.solvers.auto.inner import inner_complaint
from bilevel.solvers.auto.preconditioner import (
    KINDS,
    LOW_RANK,
    NORM,
    Preconditioner,
    init_calls,
    init_preconditioner,
    preconditioner_calls,
    update_preconditioner,
)
from bilevel.solvers.auto.progress import (
    QUIET_WINDOWS,
    Progress,
    check_following,
    check_progress,
    init_progress,
    keep_moving,
    return_to_best,
)
from bilevel.solvers.auto.rollback import Rollback, check_pass, init_rollback, measure, point_to_evaluate
from bilevel.solvers.auto.start import check_range, has_negative_curvature
from bilevel.solvers.base import Complexity, Solver, solver
from bilevel.solvers.drift import Drift, DriftMonitor
from bilevel.solvers.fields import bounds, given, one_of, positive, transformation, whole
from bilevel.solvers.moves import MovesState, as_inner, as_outer, move, recursive_calls, transform

_MAX_STEPS = 300_000  # of a run without a budget
_LEAST_PROGRESS = 3e-5  # if the gap decreases as t^-½, it is then 3e-4 of h
_FULL_BATCH_LIMIT = 1024  # below this many rows, full batches cost about as much as batches of 64
_SHORTEST_PERIOD = 20  # a full-batch pass also builds the preconditioner, so it costs more than one step
_LONGEST_PERIOD = 300  # the preconditioner must not become outdated: log penalties move by up to 1e-2 per step
_FIRST_WINDOW = 1000  # steps, in which Adam can move x by 10
_STATIONARY_GAIN, _SMALL_LAG = 0.01, 0.01  # relative to h
_LARGEST_RISE = 0.05  # above the best evaluation, relative to its value
_LARGE_HELD_SHARE, _FEW_PASSES = 0.5, 20
_FOR_NETWORKS = "; if the inner level is a neural network, use preconditioner='norm' and inner_optimizer='adam'"


class AutoState(NamedTuple):
    """The iterate, the one before it, the estimate of D, and the states of the parts of the method."""

    point: Point
    previous: Point
    estimate: Point
    drift: Drift
    preconditioner: Preconditioner
    moves: MovesState
    rollback: Rollback
    progress: Progress | None  # None with "norm"


@solver
class AutoSRBA(Solver[AutoState, Rows]):
    """SRBA without tuning: preconditioned moves, Adam for x, rollback, and a stopping rule.

    Defaults suit most problems. If the data have fewer rows than a batch, full batches or smaller ones are used.

    Parameters
    ----------
    step_size : ρ, the step of z and v, which M divides; rollbacks reduce it if it is too large
    outer_ratio : not used, since x moves by `outer_optimizer`
    period : q, steps from one full-batch pass to the next; None means (n + m) // batch_size, but 20 to 300
    outer_optimizer : "adam", with steps 0.01 (1 + t/1000)^-½, or an optax transformation of D_x
    outer_bounds : (lower, upper) bounds of the outer variable besides those of the problem: numbers, or arrays like
        the outer variable; None means wide bounds if the problem knows any
    preconditioner : M, which divides the steps of z and v: "low_rank" is a diagonal and eight directions, and x is
        frozen while z is far behind; "diagonal" costs less per pass and lets x move at once, for short runs; "norm" is
        one number, for inner losses that are not convex, where h is not measured. None means "low_rank", or "norm" with
        ``inner_optimizer="adam"`` if a few products with ∇²zz G at the start show negative curvature, as for a neural
        network
    least_progress : the run ends when h changes by at most this fraction from one window of full-batch passes to the
        next, twice in a row; None means 3e-5. A smaller value runs longer. Not with "norm"
    """

    period: int | None = whole(default=None, optional=True, hint="; use None for the default")
    v_radius: float | None = positive(default=None, optional=True, hint="; use None for no projection", kw_only=True)
    outer_optimizer: str | Any = transformation(("adam",), default="adam", kw_only=True, optional=False)
    outer_bounds: str | tuple[Any, Any] | None = bounds(default=None, kw_only=True)
    preconditioner: str | None = one_of(KINDS, default=None, optional=True, kw_only=True)
    least_progress: float | None = positive(
        default=None, optional=True, hint="; use None for the default", kw_only=True
    )
    complexity = Complexity("none")
    needs_plain_step, needs_finite_sum = None, True

    def configure(self, problem: BilevelProblem) -> Self:
        fitted = self._fit_rows(problem.n_inner, problem.n_outer)._choose_preconditioner(problem)
        rows, measured = problem.n_inner + problem.n_outer, fitted.preconditioner != NORM
        if self.least_progress is not None and not measured:
            raise ValueError(
                f"`AutoSRBA(least_progress={self.least_progress})`: h is not measured with preconditioner='norm', "
                "which is for an inner loss that is not convex; leave `least_progress` out."
            )
        if fitted.preconditioner == LOW_RANK and not problem.oracles.is_on_host:
            check_range(problem.oracles, problem.start)
        return replace(
            fitted,
            outer_bounds=problem.oracles.wide_bounds if self.outer_bounds is None else self.outer_bounds,
            period=self.period or max(_SHORTEST_PERIOD, min(_LONGEST_PERIOD, 2 * rows // sum(fitted.batches()))),
            least_progress=self.least_progress or (_LEAST_PROGRESS if measured else None),
        )

    def _fit_rows(self, n_inner: int, n_outer: int) -> Self:
        """Return the solver with full batches if there are few rows, and batches no larger than their levels."""
        inner, outer = self.batches()
        if self.sampling == "full" or (inner <= n_inner and outer <= n_outer):
            return self
        if n_inner + n_outer <= _FULL_BATCH_LIMIT:
            return replace(self, sampling="full")
        if self.outer_batch_size is None:
            return replace(self, batch_size=min(n_inner, n_outer))
        return replace(self, batch_size=min(inner, n_inner), outer_batch_size=min(outer, n_outer))

    def _choose_preconditioner(self, problem: BilevelProblem) -> Self:
        may_be_nonconvex = problem.exact_solver is None and not problem.oracles.has_row_diagonals
        if self.preconditioner == NORM and not may_be_nonconvex:
            raise ValueError(
                "`AutoSRBA(preconditioner='norm')`: is for inner losses that are not convex, and does not notice that "
                "h rises; this one is known to be strongly convex. Leave `preconditioner` out."
            )
        if self.preconditioner is not None:
            return self
        if may_be_nonconvex and has_negative_curvature(problem.oracles, problem.start):
            return replace(self, preconditioner=NORM, inner_optimizer=self.inner_optimizer or "adam")
        return replace(self, preconditioner=LOW_RANK)

    def init(self, oracles: Oracles, start: Point) -> AutoState:
        moves = self.moves.init(start)
        start, preconditioner = init_preconditioner(given(self.preconditioner), oracles, start)
        rollback = init_rollback(start, preconditioner, moves, self.step_size)
        drift, progress = Drift.none(self.step_size), None
        if self.preconditioner != NORM:
            progress = init_progress(drift.norm, max(1, _FIRST_WINDOW // given(self.period)), rollback)
        return AutoState(start, start, trees.zeros_like(start), drift, preconditioner, moves, rollback, progress)

    def refreshes(self, index: Array, draw: Rows) -> Array:
        return index % given(self.period) == 0

    def refresh(self, oracles: Oracles, state: AutoState, index: Array, draw: Rows) -> AutoState:
        exact = oracles.direction(state.point)
        drift = state.drift.measure(exact, state.estimate, index)
        preconditioner = update_preconditioner(
            given(self.preconditioner), oracles, state.point, index, state.preconditioner
        )
        here = check_pass(state.rollback, state.point, exact, preconditioner, state.moves, self.step_size, index == 0)
        progress = state.progress
        if progress is not None:
            progress, here = self._measure(oracles, progress, here)
        state = state._replace(point=here.point, preconditioner=here.preconditioner, moves=here.moves, rollback=here)
        return self._move(oracles, state._replace(drift=drift, progress=progress), here.estimate)

    def step(self, oracles: Oracles, state: AutoState, index: Array, draw: Rows) -> AutoState:
        change = oracles.difference(state.point, state.previous, draw)
        return self._move(oracles, state, trees.add(state.estimate, change))

    def _move(self, oracles: Oracles, state: AutoState, estimate: Point) -> AutoState:
        """Return the state with all variables moved, or all except a frozen x."""
        (_, x, v), scale, progress = state.point, state.rollback.scale, state.progress
        step = scale * self.step_size
        change, outer = transform(as_outer(self.outer_optimizer), estimate.outer_var, state.moves.outer, x)
        moved_x = oracles.project(move(x, change, scale if progress is None else scale * progress.pace))
        moved_z, inner = self._move_inner(state, estimate.inner_var, step)
        moved_v = move(v, state.preconditioner.solve(estimate.v), step)
        point, moves = self.moves.project(Point(moved_z, moved_x, moved_v)), MovesState(inner, outer)
        if progress is not None:
            kept = partial(jnp.where, progress.x_moves)
            point = point._replace(outer_var=jax.tree.map(kept, point.outer_var, x))
            moves = moves._replace(outer=jax.tree.map(kept, moves.outer, state.moves.outer))
        return state._replace(point=point, previous=state.point, estimate=estimate, moves=moves)

    def _move_inner(self, state: AutoState, direction: PyTree, step: Scalar) -> tuple[PyTree, Any]:
        z = state.point.inner_var
        if self.inner_optimizer is None:
            return move(z, state.preconditioner.solve(direction), step), state.moves.inner
        change, inner = transform(as_inner(self.inner_optimizer), direction, state.moves.inner, z)
        return move(z, change, state.rollback.scale), inner

    def _measure(self, oracles: Oracles, progress: Progress, here: Rollback) -> tuple[Progress, Rollback]:
        """Return the measurements at a full-batch pass, and the pass to continue from: the best one if h has risen."""
        point, exact = here.point, here.estimate
        lengths, moves = measure(point, exact, here.preconditioner)
        farther = oracles.project(trees.subtract(point.outer_var, jax.tree.map(jnp.sign, exact.outer_var)))
        within = self.moves.project(point._replace(outer_var=farther)).outer_var
        gain = trees.dot(exact.outer_var, trees.subtract(point.outer_var, within))
        progress = check_progress(progress, here, oracles.outer_value(point), gain, moves, given(self.least_progress))
        progress = check_following(progress, lengths, moves, here)
        return return_to_best(progress if self.preconditioner == LOW_RANK else keep_moving(progress), here)

    def init_calls(self, oracles: Oracles) -> Calls:
        return init_calls(given(self.preconditioner), oracles)

    def calls(self, oracles: Oracles, draw: Rows, refresh: bool) -> Calls:
        cost = recursive_calls(oracles, draw, refresh)
        if not refresh:
            return cost
        values = 0 if self.preconditioner == NORM else oracles.n_outer
        return trees.add(cost, preconditioner_calls(given(self.preconditioner), oracles)._replace(outer_value=values))

    @property
    def monitor(self) -> "AutoMonitor":
        return AutoMonitor(self)


class AutoMonitor(DriftMonitor):
    """The diagnostics of `AutoSRBA`, its stopping rule and its warnings."""

    solver: AutoSRBA
    max_steps = _MAX_STEPS

    def evaluation_point(self, state: AutoState) -> Point:
        if state.progress is not None:
            return state.progress.best.point
        return point_to_evaluate(state.rollback, state.point)

    def diagnostics(self, state: AutoState) -> dict[str, Array]:
        found = {"drift": state.drift.relative}
        found |= {"rollbacks": state.rollback.rollbacks, "step_scale": state.rollback.scale}
        if (progress := state.progress) is None:
            return found
        best = progress.best_reading
        found |= {"h_change": progress.change, "h_lag": best.lag, "h_gradient": best.gradient}
        return found | {"quiet_windows": progress.quiet, "x_held": progress.held_share, "outer_scale": progress.pace}

    def end(self, row: dict[str, Any]) -> str | None:
        if self.solver.least_progress is None or not row["quiet_windows"] >= QUIET_WINDOWS:
            return None
        return f"h has stopped decreasing: {_describe(row)} {_stationarity(row)}"

    def unfinished(self, row: dict[str, Any]) -> str:
        if self.solver.least_progress is None:
            return ""
        return f"h was still decreasing: {_describe(row)} Continue with `resume`."

    def inner_warning(self, oracles: Oracles, point: Point, row: dict[str, Any]) -> str | None:
        # A network is not expected to be at a minimum, and before the second pass it is too early to judge.
        is_network = self.solver.preconditioner == NORM and self.solver.inner_optimizer is not None
        if is_network or row["step"] <= given(self.solver.period):
            return None
        complaint = inner_complaint(oracles, point, row)
        return complaint and f"AutoSRBA: {complaint}"

    def warning(self, rows: list[dict[str, Any]], dtype: DTypeLike) -> str | None:
        row = rows[-1]
        if (risen := self._rise(rows)) is not None:
            return risen
        if row.get("x_held", 0) > _LARGE_HELD_SHARE and row["step"] >= _FEW_PASSES * given(self.solver.period):
            return (
                f"AutoSRBA: x was frozen in {row['x_held']:.0%} of the run, since z was far from z*(x). Scale the "
                f"columns of the data or start at a larger penalty{'' if 'value' in row else _FOR_NETWORKS}."
            )
        if self.solver.least_progress is not None and row["h_lag"] <= _SMALL_LAG:
            return None  # D itself is close to 0, so that its rounding errors do not matter
        return super().warning(rows, dtype)

    def _rise(self, rows: list[dict[str, Any]]) -> str | None:
        """Return a sentence if the run ends above its best evaluation, by h, or by F if h is not measured."""
        exact = "value" in rows[-1]
        if not exact and self.solver.preconditioner != NORM:
            return None  # F at the first evaluations, before z is fitted, may be below the smallest h
        values = np.array([row.get("value" if exact else "outer_value", np.nan) for row in rows], float)
        if not (finite := np.isfinite(values)).any():
            return None
        best, last = int(np.argmin(np.where(finite, values, np.inf))), values[-1]
        if not last - values[best] > _LARGEST_RISE * abs(values[best]):
            return None
        way = "it is `result.best_point`" if exact else "a run with `EarlyStopping('outer_value')` keeps such a point"
        found = f"{'h' if exact else 'the outer loss'} is {last:.4g} at the end, and was {values[best]:.4g}"
        return f"AutoSRBA: {found} after {rows[best]['step']} steps; {way}."


def _describe(row: dict[str, Any]) -> str:
    change, lag, gain = (row[name] for name in ("h_change", "h_lag", "h_gradient"))
    return (
        f"by its own full-batch passes, the mean of h over the last fifth of them changed by {change:.2g} of h, F "
        f"differs from h by {lag:.2g} of h, and moving each number of x by 1 would gain {gain:.2g} of h to first order."
    )


def _stationarity(row: dict[str, Any]) -> str:
    if row["h_gradient"] > _STATIONARY_GAIN:
        return "So x is not stationary: a smaller `least_progress` runs longer, and another start may end lower."
    return "So x is nearly stationary; h is not convex, and another start or seed may end lower."
