"""An experiment from its first cell to its last: tune wide, time narrow, store each result as it comes."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import jax

from bilevel._optional import require
from bilevel.bench.cells import SWEEP, TIMING, Task, build_problem, drop_duplicates, group_tasks, run_task, time_cell
from bilevel.bench.config import Experiment
from bilevel.bench.select import list_settings, select, worst_value
from bilevel.bench.store import Store, check_metric_names

Outcome: TypeAlias = tuple[Task, list[dict[str, Any]], str | None]  # a task with its rows, or with what it raised


class Watcher(Protocol):
    """Is told how far an experiment has come."""

    def begin(self, phase: str, done: int, total: int) -> None:
        """Take note that a phase begins, with some of its cells in the store."""

    def advance(self, n_cells: int, title: str, best: float | None) -> None:
        """Take note that cells were written, and of the best final value of the metric so far."""

    def failed(self, title: str, error: str) -> None:
        """Take note of what a task raised."""


@dataclass(frozen=True)
class Where:
    """On what an experiment runs: processes of this machine, or a Dask cluster; a CPU or a GPU."""

    jobs: int = 1
    dask: str | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        if self.jobs < 1:
            raise ValueError(f"`jobs={self.jobs}`: must be at least 1.")
        if self.dask is not None and self.jobs != 1:
            raise ValueError("`jobs` and `dask` exclude each other: a cluster has its own workers.")

    @property
    def seeds_together(self) -> bool:
        """Whether one program takes all seeds: a GPU has room for them."""
        return (self.device or jax.default_backend()) == "gpu"


def execute(
    experiment: Experiment,
    store: Store,
    watcher: Watcher,
    *,
    seeds: Collection[int] | None = None,  # in the place of the experiment's
    only: Collection[str] | None = None,  # these solvers
    phases: Collection[str] = (SWEEP, TIMING),
    where: Where = Where(),  # noqa: B008
    config: str | Path | None = None,  # a copy is kept beside the results
) -> int:
    """Run what is not in the store yet, and return how many tasks failed; a task's rows are stored when it ends."""
    with _on_device(where.device):
        # The size of a problem does not depend on its seed.
        problem = build_problem(experiment.problem, experiment.problem_arguments)
        check_metric_names(problem.metrics)
        size = problem.n_inner, problem.n_outer
        cells = drop_duplicates(experiment.cells(*size, seeds, only), problem)
        if config is not None:
            store.keep_config(config)
        missing = store.unfinished(cells)
        failures = 0
        if SWEEP in phases:
            watcher.begin(SWEEP, len(cells) - len(missing), len(cells))
            outcomes = _run_tasks(group_tasks(missing, where.seeds_together), where)
            failures = _keep(outcomes, experiment.metric, store, watcher)
        elif missing:
            raise ValueError(f"{len(missing)} cells of the sweep are not in the store; run the sweep first.")
        # What is missing from the sweep might be what should be selected.
        if experiment.max_seconds is None or failures or TIMING not in phases:
            return failures
        table = store.read(SWEEP)
        swept = table[table["cell"].isin({cell.id for cell in cells})]
        selected = list_settings(select(swept, experiment.metric)) if len(swept) else ()
        cells = experiment.timing_cells(selected, *size, seeds)
        missing = store.unfinished(cells)
        watcher.begin(TIMING, len(cells) - len(missing), len(cells))
        # One at a time, with the machine to themselves.
        outcomes = (_attempt(Task((cell,)), time_cell, cell) for cell in missing)
        return _keep(outcomes, experiment.metric, store, watcher)


def _keep(outcomes: Iterable[Outcome], metric: str, store: Store, watcher: Watcher) -> int:  # how many failed
    failures, better, best = 0, min if worst_value(metric) > 0 else max, None
    for task, rows, error in outcomes:
        if error is not None:
            watcher.failed(task.title, error)
            failures += 1
            continue
        store.write(rows)
        finals = (row.get(metric) for row in rows if row["final"] and row["status"] != "diverged")
        best = better((value for value in (*finals, best) if value is not None and value == value), default=None)
        watcher.advance(len(task.cells), task.title, best)
    return failures


def _run_tasks(work: Sequence[Task], where: Where) -> Iterator[Outcome]:
    if where.jobs == 1 and where.dask is None:
        for task in work:
            yield _attempt(task, run_task, task, seeds_together=where.seeds_together)
        return
    joblib, client = require("joblib", "bench"), None if where.dask is None else _connect(where.dask)
    backend = {"backend": "loky"} if client is None else {"backend": "dask", "client": client}
    left = dict(enumerate(work))
    with nullcontext() if client is None else client, joblib.parallel_config(**backend):
        parallel = joblib.Parallel(n_jobs=where.jobs if client is None else -1, return_as="generator_unordered")
        results = parallel(joblib.delayed(_in_worker)(place, task, where) for place, task in enumerate(work))
        try:
            for place, outcome in results:
                del left[place]
                yield outcome
        except Exception as error:
            # A worker that dies takes the pool down: the tasks that are left have failed.
            for task in left.values():
                yield task, [], f"{type(error).__name__}: {' '.join(str(error).split())}"


def _in_worker(place: int, task: Task, where: Where) -> tuple[int, Outcome]:
    with _on_device(where.device):
        return place, _attempt(task, run_task, task, seeds_together=where.seeds_together)


def _attempt(task: Task, function: Callable[..., list[dict[str, Any]]], *args: Any, **kwargs: Any) -> Outcome:
    """Return the rows, or no rows and what was raised: one task must not take the others down."""
    try:
        return task, function(*args, **kwargs), None
    except Exception as error:
        return task, [], f"{type(error).__name__}: {error}"


def _connect(address: str) -> Any:
    try:
        return require("distributed", "bench").Client(address, timeout=20)
    except OSError as error:
        raise ConnectionError(f"no Dask scheduler answers at `{address}`: {error}") from error


def _on_device(device: str | None) -> AbstractContextManager[Any]:
    try:
        return nullcontext() if device is None else jax.default_device(jax.devices(device)[0])
    except RuntimeError as error:
        raise ValueError(f"`device={device!r}`: JAX has no such device here: {error}") from error
