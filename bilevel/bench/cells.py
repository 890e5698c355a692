"""Cells, the single runs of an experiment; tasks, the cells that run as one program; and the rows they give."""

import dataclasses
import functools
import hashlib
import json
import math
import os
import platform
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, get_args, get_type_hints

import jax
import numpy as np

from bilevel._optional import require
from bilevel._precision import arithmetic
from bilevel.bench.plugins import Builder, digest, find_problem, find_solver, is_foreign
from bilevel.engine.driver import CellResult, sweep
from bilevel.engine.result import Status
from bilevel.engine.run import run
from bilevel.engine.steps import Prepared, prepare
from bilevel.problems import BilevelProblem
from bilevel.solvers import HostSolver, SolverBase

Pairs: TypeAlias = tuple[tuple[str, Any], ...]
Rows: TypeAlias = list[dict[str, Any]]  # of the store, one per evaluation
SWEEP, TIMING = "sweep", "timing"
SIZES = ("n_inner", "n_outer", "dim_inner", "dim_outer")  # rows, and numbers in each variable
MAX_STATE_BYTES = 2**30  # of all settings of one program together


class Setting(NamedTuple):
    """A solver with its hyper-parameters; ``period_fraction`` stands for a period that follows the data's size."""

    solver: str
    parameters: Pairs
    period_fraction: float | None = None
    columns: tuple[str, ...] = ()  # of the table of results: each is selected apart

    def pairs(self, n_rows: int) -> Pairs:
        """Return the parameters on a problem with n + m rows, the period q = max(1, floor(a (n + m) / b)) included."""
        if self.period_fraction is None:
            return self.parameters
        period = max(1, math.floor(self.period_fraction * n_rows / dict(self.parameters)["batch_size"]))
        return tuple(sorted((*self.parameters, ("period", period))))


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run, stated in full: a solver with a setting and a seed, on a problem, under a budget."""

    experiment: str
    problem: str  # a name in ``bilevel.problems.PROBLEMS``, or ``module:function``
    problem_arguments: Pairs  # sorted, as all pairs
    solver: str  # a name in ``bilevel.SOLVERS``, or ``module:Class``
    parameters: Pairs
    seed: int  # of the batches
    phase: str = SWEEP  # where many cells run in one program, or TIMING, where one is alone on the machine
    max_calls: int | None = None
    max_seconds: float | None = None  # one of the two may be None
    exact: bool = True  # are h and its gradient evaluated?
    columns: tuple[str, ...] = ()  # of the config, that have the setting; no part of what is run

    @functools.cached_property
    def id(self) -> str:
        """A digest of all that is run: the same cell has the same one everywhere."""
        stated = dataclasses.asdict(self)
        stated |= {"problem_arguments": dict(self.problem_arguments), "parameters": dict(self.parameters)}
        del stated["columns"]
        if self.exact:  # as in stores from before there was a choice
            del stated["exact"]
        return hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def digests(self) -> list[str]:
        """Of somebody's solver and problem, the name with a digest of its file, which is no part of what is named."""
        return [f"{name} {digest(name)}" for name in (self.solver, self.problem) if is_foreign(name)]


class Task(NamedTuple):
    """Cells of one solver on one problem that differ in traced numbers and seeds."""

    cells: tuple[Cell, ...]

    @property
    def title(self) -> str:
        first, n_seeds = self.cells[0], len({cell.seed for cell in self.cells})
        return f"{first.solver} on {first.problem}, {f'seed {first.seed}' if n_seeds == 1 else f'{n_seeds} seeds'}"


def build_problem(problem: str, arguments: Pairs) -> BilevelProblem:
    """Return the problem of a cell; the last ones are remembered."""
    return _build(find_problem(problem), problem, arguments)


@functools.lru_cache(maxsize=2)
def _build(builder: Builder, problem: str, arguments: Pairs) -> BilevelProblem:  # a builder may change in a notebook
    built = builder(**dict(arguments))
    if not isinstance(built, BilevelProblem):
        raise ValueError(f"`{problem}` returned {type(built).__name__}; it must return a BilevelProblem.")
    return built


@functools.cache
def measure_problem(problem: str, arguments: Pairs) -> dict[str, int]:
    """Return the rows of each level and the sizes of both variables: the columns of `SIZES`."""
    built = build_problem(problem, arguments)
    dims = (
        sum(np.size(leaf) for leaf in jax.tree.leaves(one)) for one in (built.start.inner_var, built.start.outer_var)
    )
    return dict(zip(SIZES, (built.n_inner, built.n_outer, *dims), strict=True))


@functools.cache
def parameter_types(solver: type[SolverBase]) -> dict[str, type]:
    """Return the type of each hyper-parameter, without the None that some allow."""
    hints = get_type_hints(solver)
    return {field.name: (*get_args(hints[field.name]), hints[field.name])[0] for field in dataclasses.fields(solver)}


def _prepare(cell: Cell, problem: BilevelProblem | None = None) -> Prepared:
    problem = problem or build_problem(cell.problem, cell.problem_arguments)
    return prepare(problem, find_solver(cell.solver)(**dict(cell.parameters)))


def drop_duplicates(cells: Iterable[Cell], problem: BilevelProblem) -> tuple[Cell, ...]:
    """Return the cells, in one those that a default, which follows the problem's size, makes equal."""
    resolved: dict[Any, Any] = {}
    first: dict[Any, Cell] = {}
    for cell in cells:
        stated = cell.solver, cell.parameters
        if stated not in resolved:
            resolved[stated] = tuple(sorted(_prepare(cell, problem).solver.parameters().items(), key=str))
        key = cell.solver, resolved[stated], cell.seed
        kept = first.setdefault(key, cell)
        first[key] = dataclasses.replace(kept, columns=tuple(dict.fromkeys((*kept.columns, *cell.columns))))
    return tuple(first.values())


def group_tasks(cells: Iterable[Cell], seeds_together: bool = False) -> list[Task]:
    """Group the cells of a sweep into tasks, in order of their first cell; a GPU has room for all seeds together."""
    groups: dict[Any, list[Cell]] = {}
    for cell in cells:
        solver = find_solver(cell.solver)(**dict(cell.parameters))
        # The structure of a solver contains its static parameters, and which of the traced ones are None.
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


def run_task(task: Task, *, seeds_together: bool = False) -> Rows:
    """Run the cells of a task of the sweep and return their rows."""
    first = task.cells[0]
    if issubclass(find_solver(first.solver), HostSolver):  # which is deterministic: one run for all seeds
        solver, result = _run_alone(first)
        # The last step may pass the budget; what it reached would not compare.
        within = [row for row in result.rows if first.max_calls is None or row["calls"] <= first.max_calls]
        unclocked = [{name: value for name, value in row.items() if name != "seconds"} for row in within]
        return [row for cell in task.cells for row in make_rows(cell, solver, result._replace(rows=unclocked))]
    settings = {cell.parameters: cell for cell in task.cells}
    solvers: dict[Pairs, Any] = {pairs: _prepare(cell).solver for pairs, cell in settings.items()}
    seeds = sorted({cell.seed for cell in task.cells})
    problem = build_problem(first.problem, first.problem_arguments)
    assert first.max_calls is not None
    options = {"together": seeds_together, "exact": first.exact}
    results = sweep(problem, list(solvers.values()), seeds, first.max_calls, **options)
    found = {seed: dict(zip(solvers, of_seed, strict=True)) for seed, of_seed in zip(seeds, results, strict=True)}
    cells = sorted(task.cells, key=lambda cell: cell.seed)
    parts = (make_rows(cell, solvers[cell.parameters], found[cell.seed][cell.parameters]) for cell in cells)
    return [row for part in parts for row in part]


def time_cell(cell: Cell) -> Rows:
    """Run a cell alone, against the clock, and return its rows."""
    assert cell.phase == TIMING
    return make_rows(cell, *_run_alone(cell))


def _run_alone(cell: Cell) -> tuple[SolverBase, CellResult]:
    problem, solver = build_problem(cell.problem, cell.problem_arguments), _prepare(cell).solver
    limits: dict[str, Any] = {"max_calls": cell.max_calls, "max_seconds": cell.max_seconds}
    result = run(problem, solver, seed=cell.seed, exact=cell.exact, **limits)
    if result.status is Status.interrupted:
        raise KeyboardInterrupt  # `run` gives what it has, but half a cell is none
    rows = require("pandas", "bench").DataFrame(result.history).to_dict("records")
    memory = sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(result.state))
    return solver, CellResult(rows, result.status, memory)


def make_rows(cell: Cell, solver: SolverBase, result: CellResult) -> Rows:
    """Return the rows of a cell as the store keeps them, the last one final."""
    common = {name: getattr(cell, name) for name in ("experiment", "phase", "problem", "solver", "seed")}
    common |= {f"param_{name}": value for name, value in solver.parameters().items()} | environment()
    common["revision"] = ", ".join([common["revision"], *cell.digests])
    common |= {"problem_arguments": json.dumps(dict(cell.problem_arguments), sort_keys=True)}
    common |= measure_problem(cell.problem, cell.problem_arguments)
    common |= {
        "columns": ", ".join(cell.columns) or None,
        "cell": cell.id,
        "status": str(result.status),
        "final": False,
    }
    rows = [common | row for row in result.rows]
    rows[-1] |= {"final": True, "memory_bytes": float(result.memory_bytes)}
    return rows


def environment() -> dict[str, str]:
    """Return machine, versions and revision: the columns that say how rows came about."""
    (device,) = jax.numpy.zeros(()).devices()
    accelerator = {} if device.platform == "cpu" else {"machine": str(device.device_kind)}
    return _host() | accelerator | {"written_at": datetime.now(UTC).isoformat(timespec="seconds")}


@functools.cache
def _host() -> dict[str, str]:
    found = {"python": platform.python_version(), "jax": version("jax"), "bilevel": "", "revision": ""}
    with suppress(PackageNotFoundError):  # the source is run without being installed
        found["bilevel"] = version("bilevel")
    # The revision of the source, with a + where it was changed; none where it is installed.
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=+"]
    with suppress(OSError, subprocess.SubprocessError):
        found["revision"] = subprocess.run(git, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    processor = platform.processor() or platform.machine()
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return found | {"machine": f"{processor}, {os.cpu_count()} cores"}
