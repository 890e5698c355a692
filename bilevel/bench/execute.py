"""An experiment from its first cell to its last: tune wide, time narrow, store each result as it comes."""

import signal
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import jax

from bilevel._optional import require
from bilevel.bench.cells import (
    SWEEP,
    TIMING,
    Cell,
    Task,
    build_problem,
    drop_duplicates,
    group_tasks,
    parameter_types,
    run_task,
    time_cell,
)
from bilevel.bench.config import Experiment
from bilevel.bench.plugins import find_solver
from bilevel.bench.select import list_settings, select, worst_value
from bilevel.bench.store import PARAMETER, SCHEMA, Store, check_metric_names, column_type, list_finished

_PATIENCE = 20  # seconds, for a scheduler and its first worker
_PAUSE = 0.05  # seconds between two looks at what a cluster has done
Outcome: TypeAlias = tuple[Task, list[dict[str, Any]], str | None]  # a task with its rows, or with what it raised


class Watcher(Protocol):
    """Is told how far an experiment has come."""

    def begin(self, phase: str, done: int, total: int) -> None:
        """Take note that a phase begins, with some of its cells in the store."""

    def start(self, title: str) -> None:
        """Take note that a task of this process begins: it compiles, and runs."""

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
    text: bytes | None = None,  # the file's, where there is none
) -> int:
    """Run what is not in the store yet, and return the number of failures; a task's rows are stored when it ends.

    A phase whose results are no longer in the store at its end is a failure too, and nothing is selected from the rest.
    """
    with _on_device(where.device):
        # The size of a problem does not depend on its seed.
        problem = build_problem(experiment.problem, experiment.problem_arguments)
        check_metric_names(problem.metrics)
        _check_parameters(experiment.solvers)
        size = problem.n_inner, problem.n_outer
        cells = drop_duplicates(experiment.cells(*size, seeds, only), problem)
        if config is not None:
            store.keep_config(config, text)
        missing = store.unfinished(cells)
        failed: Sequence[Task] = ()
        _warn_of_changes(cells, missing, store)
        store.keep_plan(experiment.name, SWEEP, cells, within=experiment.cells(*size))
        if SWEEP in phases:
            watcher.begin(SWEEP, len(cells) - len(missing), len(cells))
            outcomes = _run_tasks(group_tasks(missing, where.seeds_together), where, watcher)
            failed = _keep(outcomes, experiment.metric, store, watcher)
        elif missing:
            raise ValueError(f"{len(missing)} cells of the sweep are not in the store; run the sweep first.")
        table = store.read(SWEEP)
        failures = _count_failures(SWEEP, cells, failed, list_finished(table), store, watcher)
        # What is missing from the sweep might be what should be selected.
        if experiment.max_seconds is None or failures or TIMING not in phases:
            return failures
        selected = list_settings(select(table[table["cell"].isin({cell.id for cell in cells})], experiment.metric))
        timed = experiment.timing_cells(selected, *size, seeds)
        store.keep_plan(experiment.name, TIMING, timed)
        missing = store.unfinished(timed)
        watcher.begin(TIMING, len(timed) - len(missing), len(timed))
        # One at a time, with the machine to themselves.
        outcomes = (_attempt(Task((cell,)), time_cell, cell, watcher=watcher) for cell in missing)
        failed, done = _keep(outcomes, experiment.metric, store, watcher), store.finished()
        failures = _count_failures(SWEEP, cells, (), done, store, watcher)
        return failures + _count_failures(TIMING, timed, failed, done, store, watcher)


def _count_failures(
    phase: str, cells: Sequence[Cell], failed: Sequence[Task], done: Collection[str], store: Store, watcher: Watcher
) -> int:
    """Return the number of failed tasks, one more if results of others are not in the store although they were."""
    known = {cell for task in failed for cell in task.cells}
    gone = [cell for cell in cells if cell.id not in done and cell not in known]
    if gone:
        what = f"{len(gone)} of {len(cells)} cells were stored, and are no longer in `{store.folder}`"
        watcher.failed(phase, f"{what}: files were deleted, moved or damaged. Run it again.")
    return len(failed) + bool(gone)


def _check_parameters(solvers: Iterable[str]) -> None:
    """Refuse parameters that have the name of a solver's of the package and another type: they share a column."""
    columns = {field.name: field.type for field in SCHEMA()}
    for solver in solvers:
        for name, kind in parameter_types(find_solver(solver)).items():
            there = columns.get(PARAMETER + name)
            if there not in (None, column_type(kind)):
                raise ValueError(f"`{solver}`: its parameter `{name}` must be {there}, as in other solvers; rename it.")


def _warn_of_changes(cells: Sequence[Cell], missing: Sequence[Cell], store: Store) -> None:
    """Warn of results that somebody's code gave before it was changed: cells are known by names."""
    stated = {text for cell in cells for text in cell.digests}
    if not stated or len(missing) == len(cells):
        return
    rows = store.read()
    rows = rows[rows["cell"].isin([cell.id for cell in cells])]
    for text in sorted(stated):
        name = text.rpartition(" ")[0]
        own = rows[(rows["solver"] == name) | (rows["problem"] == name)]
        if not own["revision"].str.contains(text, regex=False).all():
            way = "give another folder, or rename it, to run it anew"
            warnings.warn(
                f"`{name}` was changed after results of it were put into `{store.folder}`; {way}.", stacklevel=3
            )


def _keep(outcomes: Iterable[Outcome], metric: str, store: Store, watcher: Watcher) -> list[Task]:
    """Store results as they come, and return the tasks that failed."""
    better, best = min if worst_value(metric) > 0 else max, None
    failed: list[Task] = []
    unwritten: list[tuple[Task, list[dict[str, Any]]]] = []  # for want of space, which may be made
    for task, rows, error in outcomes:
        if error is not None:
            watcher.failed(task.title, error)
            failed.append(task)
            continue
        finals = (row.get(metric) for row in rows if row["final"] and row["status"] != "diverged")
        best = better((value for value in (*finals, best) if value is not None and value == value), default=None)
        unwritten.append((task, rows))
        if problem := _write(unwritten, store, watcher, best):
            watcher.failed(task.title, f"{problem} Its results are in memory; the next task tries again to write them.")
    if unwritten and (problem := _write(unwritten, store, watcher, best)):
        for task, _ in unwritten:
            watcher.failed(task.title, f"{problem} Its results are lost; run it again.")
    return [*failed, *(task for task, _ in unwritten)]


def _write(
    unwritten: list[tuple[Task, list[dict[str, Any]]]], store: Store, watcher: Watcher, best: float | None
) -> str | None:
    """Write results, each of which leaves the list; return why the rest could not be written."""
    while unwritten:
        task, rows = unwritten[0]
        try:
            store.write(rows)
        except OSError as error:
            return str(error)
        watcher.advance(len(task.cells), task.title, best)
        del unwritten[0]
    return None


def _run_tasks(work: Sequence[Task], where: Where, watcher: Watcher) -> Iterator[Outcome]:
    if where.jobs == 1 and where.dask is None:
        for task in work:
            yield _attempt(task, run_task, task, watcher=watcher, seeds_together=where.seeds_together)
        return
    yield from _run_locally(work, where) if where.dask is None else _run_on_cluster(work, where, where.dask)


def _run_locally(work: Sequence[Task], where: Where) -> Iterator[Outcome]:
    joblib, left = require("joblib", "bench"), dict(enumerate(work))
    parallel = joblib.Parallel(n_jobs=where.jobs, backend="loky", return_as="generator_unordered")
    # Processes that are started here inherit this: Ctrl-C goes to all of them, and the first one ends the others.
    with _ctrl_c_later():
        results = parallel(joblib.delayed(_in_worker)(place, task, where) for place, task in enumerate(work))
    try:
        for place, outcome in results:
            del left[place]
            yield outcome
    except Exception as error:
        # A worker that dies takes the pool down: the tasks that are left have failed.
        for task in left.values():
            yield task, [], _describe(error)


@contextmanager
def _ctrl_c_later() -> Iterator[None]:
    """Hold Ctrl-C back: it comes at the end, and processes that are started meanwhile never get it."""
    # These let Ctrl-C through again where they are not running yet.
    for tracker in ("multiprocessing", "joblib.externals.loky.backend"):
        import_module(f"{tracker}.resource_tracker").ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run_on_cluster(work: Sequence[Task], where: Where, address: str) -> Iterator[Outcome]:
    """Yield what the workers of a cluster give. joblib's backend would run all of it here where there is only one."""
    with _connect(address) as client:
        futures = {client.submit(_in_worker, place, task, where, pure=False): task for place, task in enumerate(work)}
        waiting = require("distributed", "bench").as_completed(futures)
        while not waiting.is_empty():
            for future in _next_batch(waiting, client, address):
                try:
                    yield future.result()[1]
                except Exception as error:  # the task killed several workers, or the scheduler is gone
                    yield futures[future], [], _describe(error)


def _next_batch(waiting: Any, client: Any, address: str) -> Any:
    """Return the futures that are done, at least one; warn while none can be, as every worker is gone or stopped."""
    seen: dict[str, float] | None = None
    deadline, pause = time.monotonic() + _PATIENCE, _PATIENCE
    while not (batch := waiting.next_batch(block=False)):
        time.sleep(_PAUSE)
        if time.monotonic() > deadline:
            signs = _last_signs(client)
            if client.status == "running" and (problem := _describe_silence(signs, seen, pause)):
                left = f"{waiting.count()} tasks wait; Ctrl-C ends the waiting, and loses nothing done"
                warnings.warn(f"the Dask cluster at `{address}` {problem}. {left}.", stacklevel=2)
            pause = _PATIENCE if seen is None else 10 * _PATIENCE
            seen, deadline = signs or {}, time.monotonic() + pause
    return batch


def _last_signs(client: Any) -> dict[str, float] | None:
    """Return when each worker was last heard of, by the clock of the scheduler, or None if that does not answer."""
    try:
        found = client.sync(client.scheduler.identity, callback_timeout=_PATIENCE)
    except OSError:
        return None
    return {name: worker["last_seen"] for name, worker in found["workers"].items()}


def _describe_silence(signs: dict[str, float] | None, seen: dict[str, float] | None, seconds: float) -> str:
    """Return what a cluster lacks; a worker is silent if it was last heard of when it was ``seconds`` ago."""
    if signs is None:
        return "does not answer"
    if not signs:
        return "has no workers left; start one"
    silent = [name for name, last in signs.items() if (seen or {}).get(name) == last]
    names = f"{', '.join(silent[:3])}{', …' * (len(silent) > 3)}"
    what = f"has not heard of {len(silent)} of its {len(signs)} workers for {seconds:g} seconds ({names})"
    return f"{what}; if they were stopped, continue or end them, and others take over their tasks" if silent else ""


def _in_worker(place: int, task: Task, where: Where) -> tuple[int, Outcome]:
    with _on_device(where.device):
        return place, _attempt(task, run_task, task, seeds_together=where.seeds_together)


def _attempt(
    task: Task, function: Callable[..., list[dict[str, Any]]], *args: Any, watcher: Watcher | None = None, **kwargs: Any
) -> Outcome:
    """Return the rows, or no rows and what was raised: one task must not take the others down."""
    if watcher is not None:
        watcher.start(task.title)
    try:
        return task, function(*args, **kwargs), None
    except Exception as error:
        return task, [], f"{type(error).__name__}: {error}"


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _connect(address: str) -> Any:
    distributed = require("distributed", "bench")
    try:
        client = distributed.Client(address, timeout=_PATIENCE)
    except OSError as error:
        raise ConnectionError(f"no Dask scheduler answers at `{address}`: {error}") from error
    try:
        client.wait_for_workers(1, timeout=_PATIENCE)
    except OSError as error:
        client.close()
        lost = f"no Dask scheduler answers at `{address}` any more"
        what = f"the Dask scheduler at `{address}` has no workers" if isinstance(error, TimeoutError) else lost
        raise ConnectionError(f"{what}: {error}") from error
    return client


def _on_device(device: str | None) -> AbstractContextManager[Any]:
    try:
        return nullcontext() if device is None else jax.default_device(jax.devices(device)[0])
    except RuntimeError as error:
        raise ValueError(f"`device={device!r}`: JAX has no such device here: {error}") from error
