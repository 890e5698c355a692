"""Run an experiment: sweep the grid, select the best setting of each solver, and time these settings alone.

Cells of a sweep that can share a program are grouped into tasks. The rows of a task are stored as soon as it ends, and
cells that are in the store are not run again.
"""

import dataclasses
import json
import math
import os
import platform
import subprocess
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

import bilevel
from bilevel._core.compilation import arithmetic
from bilevel._core.extras import require
from bilevel.bench.config import (
    SWEEP,
    TIMING,
    Cell,
    Experiment,
    Pairs,
    build_problem,
    find_solver,
    load_config,
    parameter_types,
)
from bilevel.bench.distribution import Outcome, Where, distribute
from bilevel.bench.live import Watcher
from bilevel.bench.select import list_settings, select
from bilevel.bench.store import PARAMETER, SIZES, Store, check_columns, list_finished
from bilevel.engine.driver import CellResult, sweep
from bilevel.engine.result import Status
from bilevel.engine.run import run
from bilevel.engine.steps import Prepared, prepare
from bilevel.problems import BilevelProblem
from bilevel.solvers import HostSolver, SolverBase

StoreRows: TypeAlias = list[dict[str, Any]]  # one per evaluation
MAX_STATE_BYTES = 2**30  # of all settings of one program together


class Task(NamedTuple):
    """Cells of one solver on one problem that run as one program: they differ in seeds and traced hyperparameters."""

    cells: tuple[Cell, ...]

    @property
    def title(self) -> str:
        first, n_seeds = self.cells[0], len({cell.seed for cell in self.cells})
        return f"{first.solver} on {first.problem}, {f'seed {first.seed}' if n_seeds == 1 else f'{n_seeds} seeds'}"


def benchmark(
    config: Mapping[str, Any] | str | Path, store: str | Path, *, jobs: int = 1, progress: bool = False
) -> Store:
    """Run an experiment and return the store of its results; cells that are in the store are not run again.

    Parameters
    ----------
    config : a TOML file, the name of a config of the package, or the tables of such a file as a dict. In a dict, the
        ``name`` of a solver may be its class, and that of a problem the function that builds it
    store : folder of the results, which ``bilevel report`` reads too
    jobs : number of processes. With more than one, your own classes must be in a module that these can import
    progress : print a line at the beginning and at the end of each task

    Raises
    ------
    RuntimeError : a task failed; the results of all others are in the store

    Examples
    --------
    >>> import tempfile
    >>> import bilevel
    >>> problem = {"name": bilevel.problems.quadratic, "n_inner": 64, "n_outer": 32, "dim_inner": 4, "dim_outer": 2}
    >>> solvers = [{"name": bilevel.SOBA, "step_size": [0.05, 0.1], "batch_size": 8}]
    >>> tables = {"problem": problem, "budget": {"epochs": 5}, "solvers": solvers}
    >>> config = {"name": "little", "metric": "value_gap", "seeds": 1, **tables}
    >>> store = bilevel.benchmark(config, tempfile.mkdtemp())
    >>> int(store.read()["final"].sum())
    2
    """
    experiment, results = load_config(config), Store(store)
    watcher = Watcher(shown=progress)
    failures = execute(experiment, results, watcher, where=Where(jobs))
    if failures:
        what = f"{failures} task{'s' * (failures > 1)} failed; the results of all others are in `{store}`"
        raise RuntimeError(f"{what}. The first: {watcher.failures[0]}")
    return results


# Execution of the phases.


def execute(
    experiment: Experiment,
    store: Store,
    watcher: Watcher,
    *,
    seeds: Collection[int] | None = None,
    only: Collection[str] | None = None,
    phases: Collection[str] = (SWEEP, TIMING),
    where: Where = Where(),  # noqa: B008
) -> int:
    """Run the cells that are not in the store yet, and return the number of failures.

    If results have disappeared from the store by the end of a phase, this counts as a failure too. Settings are
    selected, and timed, only after a sweep without failures.

    Parameters
    ----------
    seeds : seeds to run instead of those of the experiment
    only : solvers to run, all by default
    phases : "sweep", "timing" or both
    where : the processes and the device to use
    """
    with where.on_device():
        # The size of a problem does not depend on its seed.
        problem = build_problem(experiment.problem, experiment.problem_arguments)
        types = {name: parameter_types(find_solver(name)) for name in experiment.solvers}
        check_columns(problem.metrics, types)
        size = problem.n_inner, problem.n_outer
        narrowed = experiment.narrow(only, seeds)
        cells = drop_duplicates(narrowed.cells(*size), problem)
        store.keep_config(experiment)
        sweep = _Phase(SWEEP, cells, store, watcher, experiment.metric)
        _warn_of_changes(cells, sweep.missing, store)
        store.keep_plan(experiment.name, SWEEP, cells, within=experiment.cells(*size))
        if SWEEP in phases:
            sweep.run(_run_tasks(group_tasks(sweep.missing, where.seeds_together), where, watcher))
        elif sweep.missing:
            raise ValueError(f"{len(sweep.missing)} cells of the sweep are not in the store; run the sweep first.")
        table = store.read(SWEEP)
        failures = sweep.count_failures(list_finished(table))
        if not experiment.budget.seconds or failures or TIMING not in phases:
            return failures
        selected = list_settings(select(table[table["cell"].isin({cell.id for cell in cells})], experiment.metric))
        timing = _Phase(TIMING, narrowed.timing_cells(selected, *size), store, watcher, experiment.metric)
        store.keep_plan(experiment.name, TIMING, timing.cells)
        # One cell at a time, so that nothing else runs on the machine.
        timing.run(_attempt(Task((cell,)), partial(time_cell, cell), watcher) for cell in timing.missing)
        done = store.finished()
        return sweep.count_failures(done) + timing.count_failures(done)


class _Phase:
    """The sweep or the timing: stores the rows of its tasks as they end, and reports to the watcher."""

    def __init__(self, name: str, cells: Sequence[Cell], store: Store, watcher: Watcher, metric: str) -> None:
        self.name, self.cells, self.store, self.watcher, self.metric = name, cells, store, watcher, metric
        self.missing = store.unfinished(cells)
        self.failed: list[Task] = []
        self._unwritten: list[tuple[Task, StoreRows]] = []  # could not be written, for example on a full disk

    def run(self, outcomes: Iterable[Outcome]) -> None:
        self.watcher.begin(self.name, len(self.cells) - len(self.missing), len(self.cells))
        for task, rows, error in outcomes:
            if error is not None:
                self._fail(task, error)
                continue
            self._unwritten.append((task, rows))
            if problem := self._write():
                way = "Its results are in memory; the next task tries again to write them."
                self.watcher.failed(task.title, f"{problem} {way}")
        if problem := self._write():
            for task, _ in self._unwritten:
                self._fail(task, f"{problem} Its results are lost; run it again.")

    def _fail(self, task: Task, error: str) -> None:
        self.watcher.failed(task.title, error)
        self.failed.append(task)

    def _write(self) -> str | None:
        """Write the pending results, and return why one could not be written."""
        while self._unwritten:
            task, rows = self._unwritten[0]
            try:
                self.store.write(rows)
            except OSError as error:
                return str(error)
            self.watcher.advance(len(task.cells), task.title, describe_values(rows, self.metric))
            del self._unwritten[0]
        return None

    def count_failures(self, done: Collection[str]) -> int:
        """Return the number of failed tasks, plus one if results that were stored have disappeared.

        Failed tasks are counted once.
        """
        known, n_failed = {cell for task in self.failed for cell in task.cells}, len(self.failed)
        lost = [cell for cell in self.cells if cell.id not in done and cell not in known]
        if lost:
            what = f"{len(lost)} of {len(self.cells)} cells were stored, and are no longer in `{self.store.folder}`"
            self.watcher.failed(self.name, f"{what}: files were deleted, moved or damaged. Run it again.")
        return n_failed + bool(lost)


def _warn_of_changes(cells: Sequence[Cell], missing: Sequence[Cell], store: Store) -> None:
    """Warn if stored results are of an earlier version of the user's code: the ids of cells contain only its name."""
    digests = {text for cell in cells for text in cell.digests}
    if not digests or len(missing) == len(cells):
        return
    rows = store.read()
    rows = rows[rows["cell"].isin([cell.id for cell in cells])]
    for text in sorted(digests):
        name = text.rpartition(" ")[0]
        own = rows[(rows["solver"] == name) | (rows["problem"] == name)]
        if not own["revision"].str.contains(text, regex=False).all():
            what = f"`{name}` was changed after results of it were put into `{store.folder}`"
            warnings.warn(f"{what}; to run it again, give another folder or rename it.", stacklevel=3)


def _run_tasks(tasks: Sequence[Task], where: Where, watcher: Watcher) -> Iterator[Outcome]:
    if where.jobs > 1 or where.dask is not None:
        yield from distribute(_in_worker, tasks, where)
        return
    for task in tasks:
        yield _attempt(task, partial(run_task, task, seeds_together=where.seeds_together), watcher)


def _in_worker(task: Task, where: Where) -> Outcome:
    with where.on_device():
        return _attempt(task, partial(run_task, task, seeds_together=where.seeds_together))


def _attempt(task: Task, run: Callable[[], StoreRows], watcher: Watcher | None = None) -> Outcome:
    """Return the rows, or the error message, so that other tasks can continue."""
    if watcher is not None:
        watcher.start(task.title)
    try:
        return task, run(), None
    except Exception as error:
        return task, [], f"{type(error).__name__}: {error}"


def describe_values(rows: StoreRows, metric: str) -> str:
    """Return the range of the metric at the end of the cells of a task, and how many of them diverged."""
    ended = [row for row in rows if row["final"] and row["status"] != Status.diverged]
    values = [row[metric] for row in ended if math.isfinite(row.get(metric, math.nan))] or [math.nan]
    n_diverged = sum(row["final"] for row in rows) - len(ended)
    span = " to ".join(dict.fromkeys(f"{value:.4g}" for value in (min(values), max(values))))
    return f"{metric} {span}" + (f", {n_diverged} diverged" if n_diverged else "")


# From cells to tasks to rows.


def _prepare(cell: Cell, problem: BilevelProblem | None = None) -> Prepared:
    problem = problem or build_problem(cell.problem, cell.problem_arguments)
    return prepare(problem, find_solver(cell.solver)(**dict(cell.parameters)))


def drop_duplicates(cells: Iterable[Cell], problem: BilevelProblem) -> tuple[Cell, ...]:
    """Merge cells that are equal once the defaults that depend on the problem are filled in."""
    configured: dict[Any, Any] = {}
    first: dict[Any, Cell] = {}
    for cell in cells:
        stated = cell.solver, cell.parameters
        if stated not in configured:
            configured[stated] = tuple(sorted(_prepare(cell, problem).solver.parameters().items(), key=str))
        key = cell.solver, configured[stated], cell.seed
        kept = first.setdefault(key, cell)
        first[key] = dataclasses.replace(kept, columns=tuple(dict.fromkeys((*kept.columns, *cell.columns))))
    return tuple(first.values())


def group_tasks(cells: Iterable[Cell], seeds_together: bool = False) -> list[Task]:
    """Group the cells of a sweep into tasks, in the order of their first cells."""
    groups: dict[Any, list[Cell]] = {}
    for cell in cells:
        solver = find_solver(cell.solver)(**dict(cell.parameters))
        # The tree structure contains the static parameters, and the names of traced parameters without a value.
        kind = cell.problem, cell.problem_arguments, cell.solver, cell.max_calls, jax.tree.structure(solver)
        apart = cell.parameters if isinstance(solver, HostSolver) else None if seeds_together else cell.seed
        groups.setdefault((kind, apart), []).append(cell)
    return [Task(tuple(part)) for group in groups.values() for part in _split(group)]


def _split(group: list[Cell]) -> list[list[Cell]]:
    """Split a group so that the states of its runs fit into memory together."""
    solver, oracles, start, dtype = _prepare(group[0])
    if isinstance(solver, HostSolver):
        return [group]
    with arithmetic(dtype):
        state = jax.eval_shape(solver.cast(dtype).init, oracles, start)
    state_bytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    most = max(1, MAX_STATE_BYTES // (len({cell.seed for cell in group}) * state_bytes))
    settings = list(dict.fromkeys(cell.parameters for cell in group))
    parts = [set(settings[begin : begin + most]) for begin in range(0, len(settings), most)]
    return [[cell for cell in group if cell.parameters in part] for part in parts]


def run_task(task: Task, *, seeds_together: bool = False) -> StoreRows:
    """Run the cells of a task of the sweep and return their rows."""
    first = task.cells[0]
    if issubclass(find_solver(first.solver), HostSolver):  # deterministic: one run for all seeds
        solver, result = _run_alone(first)
        # The last step may exceed the budget; other solvers are not evaluated there.
        within = [row for row in result.rows if first.max_calls is None or row["calls"] <= first.max_calls]
        unclocked = [{name: value for name, value in row.items() if name != "seconds"} for row in within]
        return [row for cell in task.cells for row in make_rows(cell, solver, result._replace(rows=unclocked))]
    settings = {cell.parameters: cell for cell in task.cells}
    solvers: dict[Pairs, Any] = {pairs: _prepare(cell).solver for pairs, cell in settings.items()}
    seeds = sorted({cell.seed for cell in task.cells})
    problem = build_problem(first.problem, first.problem_arguments)
    assert first.max_calls is not None
    options = {"together": seeds_together, "exact": first.exact}
    by_seed = zip(seeds, sweep(problem, list(solvers.values()), seeds, first.max_calls, **options), strict=True)
    found = {(seed, pairs): one for seed, results in by_seed for pairs, one in zip(solvers, results, strict=True)}
    cells = sorted(task.cells, key=lambda cell: cell.seed)
    parts = (make_rows(cell, solvers[cell.parameters], found[cell.seed, cell.parameters]) for cell in cells)
    return [row for part in parts for row in part]


def time_cell(cell: Cell) -> StoreRows:
    """Run a cell alone, with a clock, and return its rows."""
    return make_rows(cell, *_run_alone(cell))


def _run_alone(cell: Cell) -> tuple[SolverBase, CellResult]:
    problem, solver = build_problem(cell.problem, cell.problem_arguments), _prepare(cell).solver
    limits: dict[str, Any] = {"max_calls": cell.max_calls, "max_seconds": cell.max_seconds}
    result = run(problem, solver, seed=cell.seed, exact=cell.exact, **limits)
    if result.status is Status.interrupted:  # `run` returns the history so far, but incomplete cells are discarded
        raise KeyboardInterrupt
    rows = require("pandas", "bench").DataFrame(result.history).to_dict("records")
    memory = sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(result.state))
    return solver, CellResult(rows, result.status, memory)


def make_rows(cell: Cell, solver: SolverBase, result: CellResult) -> StoreRows:
    """Return the rows of a cell in the form of the store; the last one is final."""
    common = {name: getattr(cell, name) for name in ("experiment", "phase", "problem", "solver", "seed")}
    common |= {f"{PARAMETER}{name}": value for name, value in solver.parameters().items()} | environment()
    common["revision"] = ", ".join([common["revision"], *cell.digests])
    common["problem_arguments"] = json.dumps(dict(cell.problem_arguments), sort_keys=True)
    common |= _measure_problem(cell.problem, cell.problem_arguments)
    common |= {"columns": ", ".join(cell.columns) or None, "cell": cell.id, "status": str(result.status)}
    rows = [common | {"final": False} | row for row in result.rows]
    rows[-1] |= {"final": True, "memory_bytes": float(result.memory_bytes)}
    return rows


@cache
def _measure_problem(problem: str, arguments: Pairs) -> dict[str, int]:
    """Return the rows of each level and the sizes of both variables: the columns of `SIZES`."""
    built = build_problem(problem, arguments)
    variables = built.start.inner_var, built.start.outer_var
    dims = (sum(np.size(leaf) for leaf in jax.tree.leaves(one)) for one in variables)
    return dict(zip(SIZES, (built.n_inner, built.n_outer, *dims), strict=True))


def environment() -> dict[str, str]:
    """Return the columns that describe the origin of rows: machine, versions, revision and time."""
    (device,) = jax.numpy.zeros(()).devices()
    accelerator = {} if device.platform == "cpu" else {"machine": str(device.device_kind)}
    return _host() | accelerator | {"written_at": datetime.now(UTC).isoformat(timespec="seconds")}


@cache
def _host() -> dict[str, str]:
    versions = {"python": platform.python_version(), "jax": jax.__version__, "bilevel": bilevel.__version__}
    revision = ""
    # The revision of a clone, with a + if it has changes; empty for an installed package.
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=+"]
    with suppress(OSError, subprocess.SubprocessError):
        revision = subprocess.run(git, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    processor = platform.processor() or platform.machine()
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return versions | {"revision": revision, "machine": f"{processor}, {os.cpu_count()} cores"}
