"""Many settings of one solver in one program.

The settings differ in traced numbers alone. Rows are drawn once per seed, and all settings step through them together
by ``vmap``; what happens in one never reaches another. Seeds are taken one after the other on a CPU, and together on a
GPU, by a second ``vmap``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bilevel import _tree as trees
from bilevel._precision import arithmetic
from bilevel._types import INT32_MAX, Array, Calls, Point, PyTree
from bilevel.engine.budget import EvaluationSchedule
from bilevel.engine.loop import Compiled, Page, advanced, draw_page, run_key
from bilevel.engine.metrics import cheap_metrics, exact_metrics
from bilevel.engine.result import Status
from bilevel.oracles import Oracles
from bilevel.problems import BilevelProblem, ExactSolution
from bilevel.solvers.base import Solver, State

PAGE_LENGTH = 4096

_axes_of: Callable[..., Any] = Page
# Draws and costs belong to a seed; when all-rows passes come, all seeds of a program must agree.
_PAGE_OF_SEEDS = _axes_of(first=None, draws=0, calls=0, refreshes=None, next_refresh=None)


class CellResult(NamedTuple):
    """How one setting did under one seed: a row per evaluation, and how it ended."""

    rows: list[dict[str, Any]]
    status: Status
    memory_bytes: int


class _Record(NamedTuple):
    """One evaluation of all runs; ``of`` tells whose it is."""

    step: int
    calls: np.ndarray
    of: np.ndarray
    columns: dict[str, np.ndarray]


@dataclass(frozen=True)
class _Program:
    """The compiled parts, over settings alone or over seeds and settings."""

    init: Callable[..., State]
    draw: Callable[..., Page]
    advance: Callable[..., State]
    evaluate: Callable[..., dict[str, Array]]
    judge: Callable[..., Point]


def sweep(
    problem: BilevelProblem,
    solvers: Sequence[Solver],
    seeds: Sequence[int],
    max_calls: int,
    *,
    together: bool = False,
) -> list[list[CellResult]]:
    """Run every setting with every seed until the calls are used up; results by seed, then by setting.

    Parameters
    ----------
    problem : what is solved
    solvers : of one class, with the same static parameters, resolved
    seeds : of the batches
    max_calls : budget of each run, never exceeded
    together : step all seeds in one program, which pays on a GPU; all but the last row are then at the steps where the
        first seed is evaluated
    """
    with arithmetic(problem.dtype):
        if not together:
            return [_Sweep(problem, solvers, [seed], max_calls, _BY_SETTING).finished()[0] for seed in seeds]
        batched = problem.oracles.with_batches(solvers[0].batch_size, solvers[0].sampling)
        if solvers[0].restarts and not _refreshes_agree(solvers[0].cast(problem.dtype), batched, seeds):
            return sweep(problem, solvers, seeds, max_calls)
        return _Sweep(problem, solvers, seeds, max_calls, _BY_SEED_AND_SETTING).finished()


class _Sweep:
    """The runs of all settings with one seed, or with several that take the same steps."""

    def __init__(
        self, problem: BilevelProblem, solvers: Sequence[Solver], seeds: Sequence[int], max_calls: int, over: _Program
    ) -> None:
        self.problem, self.max_calls, self.over = problem, max_calls, over
        self.oracles = problem.oracles.with_batches(solvers[0].batch_size, solvers[0].sampling)
        for solver in solvers:
            solver.check_start(problem.start)
        casts = [solver.cast(problem.dtype) for solver in solvers]
        self.solver = casts[0]
        self.settings = jax.tree.map(lambda *leaves: jnp.stack(leaves), *casts)
        self.keys = jnp.stack([run_key(seed) for seed in seeds])
        self.shape = (len(seeds), len(solvers))
        self.schedule = EvaluationSchedule(None, epoch=problem.n_inner + problem.n_outer)
        self.step = 0
        first = np.array(self.solver.init_calls(self.oracles), np.int64)
        self.calls = np.tile(first, (len(seeds), 1))
        self.records: list[_Record] = []
        self.running = np.ones(self.shape, bool)
        self.diverged = np.zeros(self.shape, bool)
        self.state = over.init(self.settings, self.oracles, problem.start, self.keys)
        self.kept: Point = self._points()
        self.reference: ExactSolution | None = None

    def finished(self) -> list[list[CellResult]]:
        """Step and evaluate until the budget is used up, then judge each last finite point exactly."""
        self._evaluate(self.running)
        while self.running.any():
            self._advance_over_a_page()
        self.kept = trees.to_numpy(self.kept)
        return [[self._judged(i, j) for j in range(self.shape[1])] for i in range(self.shape[0])]

    def _advance_over_a_page(self) -> None:
        page = self.over.draw(self.solver, self.oracles, self.keys, np.int32(self.step), PAGE_LENGTH)
        costs = np.stack([np.asarray(kind, np.int64) for kind in page.calls], axis=-1).reshape(-1, PAGE_LENGTH, _KINDS)
        after = self.calls[:, None] + np.cumsum(costs, axis=1)
        totals = after.sum(axis=2)
        # Short blocks make seeds differ in cost, so each has a last step of its own.
        affordable = [np.searchsorted(total, self.max_calls, side="right") for total in totals]
        lasts = np.minimum(affordable, INT32_MAX - self.step)
        position = 0
        while position < PAGE_LENGTH and self.running.any():
            due = self.schedule.next_position(self.step, int(self.calls[0].sum()), self.step - position, totals[0])
            stop = int(min(due, PAGE_LENGTH, *lasts[self.running.any(axis=1)]))
            if stop > position:
                self._advance(page, position, stop)
                self.calls, position = after[:, stop - 1], stop
            # A seed that can afford the whole page ends, if it does, at the beginning of the next.
            ending = self.running & (lasts == stop)[:, None] & (stop < PAGE_LENGTH)
            if stop == due or ending.any():
                self._evaluate(self.running if stop == due else ending)
            self.running &= ~ending

    def _advance(self, page: Page, start: int, stop: int) -> None:
        self.state = self.over.advance(self.settings, self.oracles, self.state, page, np.int32(start), np.int32(stop))
        self.step += stop - start

    def _points(self) -> Point:
        """Return the points that stand for the states, with axes (seeds, settings) in front."""
        judged = self.over.judge(self.solver, self.state)
        return jax.tree.map(lambda leaf: leaf.reshape(*self.shape, *leaf.shape[self._axes :]), judged)

    @property
    def _axes(self) -> int:
        return 2 if self.over is _BY_SEED_AND_SETTING else 1

    def _evaluate(self, runs: np.ndarray) -> None:
        """Add a row to these runs, and keep their points; a run that is not finite has diverged."""
        metrics = self.over.evaluate(self.solver, self.oracles, dict(self.problem.metrics), self.state)
        columns = {name: np.asarray(column, np.float64).reshape(self.shape) for name, column in metrics.items()}
        points = self._points()
        finite = np.isfinite(columns["outer_value"]) & np.isfinite(columns["direction_norm_sq"]) & _finite(points, 2)
        self.diverged |= runs & ~finite
        self.running &= ~self.diverged
        sound = jnp.asarray(runs & finite)
        self.kept = jax.tree.map(lambda new, old: jnp.where(_expanded(sound, new), new, old), points, self.kept)
        self.records.append(_Record(self.step, self.calls, runs & finite, columns))

    def _rows(self, i: int, j: int) -> list[dict[str, Any]]:
        """Return the evaluations of one run; a step that was looked at twice makes one row."""
        own = {record.step: record for record in reversed(self.records) if record.of[i, j]}
        return [self._row(record, i, j) for _, record in sorted(own.items())]

    def _row(self, record: "_Record", i: int, j: int) -> dict[str, Any]:
        calls = record.calls[i]
        total = int(calls.sum())
        by_kind = {f"calls_{kind}": int(count) for kind, count in zip(Calls._fields, calls, strict=True)}
        epochs = total / (self.problem.n_inner + self.problem.n_outer)
        metrics = {name: float(column[i, j]) for name, column in record.columns.items()}
        return {"step": record.step, "calls": total, **by_kind, "epochs": epochs, **metrics}

    def _judged(self, i: int, j: int) -> CellResult:
        point = jax.tree.map(lambda leaf: leaf[i, j], self.kept)
        exact, reference = exact_metrics(self.problem, point, self.reference)
        if not self.diverged[i, j] and np.isfinite(exact.get("value", np.nan)):
            self.reference = reference  # near the next, as one far out is not
        rows = self._rows(i, j)
        if rows:
            rows[-1] |= exact
        one = jax.tree.map(lambda leaf: leaf.nbytes // np.prod(self.shape), self.state)
        status = Status.diverged if self.diverged[i, j] else Status.out_of_budget
        return CellResult(rows, status, int(sum(jax.tree.leaves(one))))


_KINDS = len(Calls._fields)


def _evaluated(solver: Solver, oracles: Oracles, metrics: dict[str, Any], state: State) -> dict[str, Array]:
    point = solver.evaluation_point(state)
    own = {name: metric(point) for name, metric in metrics.items()}
    return cheap_metrics(oracles, point) | own | solver.diagnostics(state)


def _judged(solver: Solver, state: State) -> Point:
    return solver.evaluation_point(state)


def _initial(settings: Solver, oracles: Oracles, start: Point, key: Array) -> State:
    return settings.init(oracles, start)


_init_settings = jax.vmap(_initial, in_axes=(0, None, None, None))
_advance_settings = jax.vmap(advanced, in_axes=(0, None, 0, None, None, None))
_evaluate_settings = jax.vmap(_evaluated, in_axes=(None, None, None, 0))
_judge_settings = jax.vmap(_judged, in_axes=(None, 0))


@partial(jax.jit, static_argnames="length")
def _draw_seeds(solver: Solver, oracles: Oracles, keys: Array, first: Array, length: int) -> Page:
    draw = jax.vmap(lambda key: draw_page(solver, oracles, key, first, length), out_axes=_axes_of(None, 0, 0, 0, 0))
    pages = draw(keys)
    return pages._replace(refreshes=pages.refreshes[0], next_refresh=pages.next_refresh[0])


def _draw_one(solver: Solver, oracles: Oracles, keys: Array, first: Any, length: int) -> Page:
    return draw_page(solver, oracles, keys[0], first, length)


_BY_SETTING = _Program(
    init=jax.jit(lambda settings, oracles, start, keys: _init_settings(settings, oracles, start, keys[0])),
    draw=_draw_one,
    advance=Compiled(_advance_settings),
    evaluate=jax.jit(_evaluate_settings),
    judge=jax.jit(_judge_settings),
)
_BY_SEED_AND_SETTING = _Program(
    init=jax.jit(jax.vmap(_init_settings, in_axes=(None, None, None, 0))),
    draw=_draw_seeds,
    advance=Compiled(jax.vmap(_advance_settings, in_axes=(None, None, 0, _PAGE_OF_SEEDS, None, None))),
    evaluate=jax.jit(jax.vmap(_evaluate_settings, in_axes=(None, None, None, 0))),
    judge=jax.jit(jax.vmap(_judge_settings, in_axes=(None, 0))),
)


def _refreshes_agree(solver: Solver, oracles: Oracles, seeds: Sequence[int]) -> bool:
    """Tell whether all-rows passes come at the same steps for all seeds; they do not where a coin decides."""
    pages = [draw_page(solver, oracles, run_key(seed), np.int32(0), PAGE_LENGTH) for seed in seeds]
    return all(np.array_equal(page.refreshes, pages[0].refreshes) for page in pages)


def _finite(tree: PyTree, axes: int) -> np.ndarray:
    """Tell of each run whether all its numbers are finite."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    return np.all([np.isfinite(leaf).all(axis=tuple(range(axes, leaf.ndim))) for leaf in leaves], axis=0)


def _expanded(mask: Array, like: Array) -> Array:
    return mask.reshape(*mask.shape, *(1,) * (like.ndim - mask.ndim))
