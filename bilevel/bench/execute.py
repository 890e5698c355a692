"""An experiment from its first cell to its last: tune wide, time narrow, store each result as it comes."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax

from bilevel._optional import require
from bilevel.bench.cells import SWEEP, TIMING, Cell
from bilevel.bench.config import Experiment
from bilevel.bench.select import LARGER_IS_BETTER, select, settings
from bilevel.bench.store import Store
from bilevel.bench.tasks import Task, built, distinct, rows_of, tasks, timed_rows

Rows = list[dict[str, Any]]


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
        return _platform(self.device) == "gpu"


def execute(
    experiment: Experiment,
    store: Store,
    watcher: Watcher,
    *,
    seeds: Collection[int] | None = None,
    only: Collection[str] | None = None,
    where: Where = Where(),  # noqa: B008
    config: str | Path | None = None,
) -> int:
    """Run what is not in the store yet, and return how many tasks failed.

    Parameters
    ----------
    experiment : what to run
    store : where each task's rows go as soon as they are there
    watcher : told of the progress
    seeds, only : seeds and solvers in the place of all
    where : on what to run
    config : the experiment's file, to be kept beside the results
    """
    with _on(where.device):
        cells = _sweep_cells(experiment, seeds, only)
        if config is not None:
            store.keep_config(config)
        failures = _sweep(experiment, cells, store, watcher, where)
        # What is missing from the sweep might be what should be selected.
        if experiment.max_seconds is not None and not failures:
            failures += _timing(experiment, cells, seeds, store, watcher)
    return failures


def _sweep_cells(
    experiment: Experiment, seeds: Collection[int] | None, only: Collection[str] | None
) -> tuple[Cell, ...]:
    # The size of a problem does not depend on its seed.
    problem = built(experiment.problem, experiment.problem_arguments)
    return distinct(experiment.cells(problem.n_inner, problem.n_outer, seeds, only), problem)


def _sweep(experiment: Experiment, cells: Sequence[Cell], store: Store, watcher: Watcher, where: Where) -> int:
    missing = _missing(cells, store)
    watcher.begin(SWEEP, len(cells) - len(missing), len(cells))
    best, failures = _Best(experiment.metric), 0
    work = tasks(missing, where.seeds_together)
    for task, rows, error in _results(work, where):
        if error is not None:
            watcher.failed(task.title, error)
            failures += 1
            continue
        store.write(rows)
        watcher.advance(len(task.cells), task.title, best.after(rows))
    return failures


def _timing(
    experiment: Experiment, cells: Sequence[Cell], seeds: Collection[int] | None, store: Store, watcher: Watcher
) -> int:
    """Time the selected settings one at a time, with the machine to themselves."""
    table = store.read(SWEEP)
    swept = table[table["cell"].isin({cell.id for cell in cells})]
    if not len(swept):
        return 0
    problem = built(experiment.problem, experiment.problem_arguments)
    selected = settings(select(swept, experiment.metric))
    timed = experiment.timing_cells(selected, problem.n_inner, problem.n_outer, seeds)
    missing = _missing(timed, store)
    watcher.begin(TIMING, len(timed) - len(missing), len(timed))
    best, failures = _Best(experiment.metric), 0
    for cell in missing:
        task = Task((cell,))
        rows, error = _attempt(timed_rows, cell)
        if error is not None:
            watcher.failed(task.title, error)
            failures += 1
            continue
        store.write(rows)
        watcher.advance(1, task.title, best.after(rows))
    return failures


def _missing(cells: Sequence[Cell], store: Store) -> list[Cell]:
    done = store.finished()
    return [cell for cell in cells if cell.id not in done]


class _Best:
    """The best final value of a metric so far."""

    def __init__(self, metric: str) -> None:
        self.metric, self.better = metric, max if metric in LARGER_IS_BETTER else min
        self.value: float | None = None

    def after(self, rows: Rows) -> float | None:
        """Return the best, these rows included."""
        found = [row.get(self.metric) for row in rows if row["final"] and row["status"] != "diverged"]
        finite = [value for value in (*found, self.value) if value is not None and value == value]
        self.value = self.better(finite, default=None)
        return self.value


def _results(work: Sequence[Task], where: Where) -> Iterator[tuple[Task, Rows, str | None]]:
    """Yield each task with its rows, or with what it raised, as they come."""
    if where.jobs == 1 and where.dask is None:
        for task in work:
            yield (task, *_attempt(rows_of, task, seeds_together=where.seeds_together))
        return
    joblib = require("joblib", "bench")
    with _workers(where, joblib):
        parallel = joblib.Parallel(n_jobs=where.jobs if where.dask is None else -1, return_as="generator_unordered")
        calls = (joblib.delayed(_in_worker)(place, task, where) for place, task in enumerate(work))
        yield from _arriving(parallel(calls), dict(enumerate(work)))


def _arriving(results: Iterator[Any], left: dict[int, Task]) -> Iterator[tuple[Task, Rows, str | None]]:
    """Yield what comes; where a worker dies and takes the pool down, the tasks that are left have failed."""
    try:
        for place, rows, error in results:
            yield left.pop(place), rows, error
    except Exception as error:
        for task in left.values():
            yield task, [], f"{type(error).__name__}: {' '.join(str(error).split())}"


def _in_worker(place: int, task: Task, where: Where) -> tuple[int, Rows, str | None]:
    with _on(where.device):
        return (place, *_attempt(rows_of, task, seeds_together=where.seeds_together))


def _attempt(function: Callable[..., Rows], *args: Any, **kwargs: Any) -> tuple[Rows, str | None]:
    """Return the rows, or no rows and what was raised: one task must not take the others down."""
    try:
        return function(*args, **kwargs), None
    except Exception as error:
        return [], f"{type(error).__name__}: {error}"


@contextmanager
def _workers(where: Where, joblib: Any) -> Iterator[None]:
    if where.dask is None:
        with joblib.parallel_config(backend="loky"):
            yield
        return
    distributed = require("distributed", "bench")
    try:
        client = distributed.Client(where.dask, timeout=20)
    except OSError as error:
        raise ConnectionError(f"no Dask scheduler answers at `{where.dask}`: {error}") from error
    with client, joblib.parallel_config(backend="dask", client=client):
        yield


@contextmanager
def _on(device: str | None) -> Iterator[None]:
    if device is None:
        yield
        return
    try:
        found = jax.devices(device)[0]
    except RuntimeError as error:
        raise ValueError(f"`device={device!r}`: JAX has no such device here: {error}") from error
    with jax.default_device(found):
        yield


def _platform(device: str | None) -> str:
    return device or jax.default_backend()
