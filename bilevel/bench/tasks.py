"""Cells that run as one program, and the rows they give."""

import functools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from bilevel._precision import arithmetic
from bilevel.bench.cells import TIMING, Cell, Pairs
from bilevel.bench.environment import environment
from bilevel.engine.result import Status
from bilevel.engine.run import run
from bilevel.engine.steps import prepare
from bilevel.engine.sweep import CellResult, sweep
from bilevel.problems import PROBLEMS, BilevelProblem
from bilevel.solvers import SOLVERS, HostSolver, SolverBase

MAX_STATE_BYTES = 2**30  # of all settings of one program together


@dataclass(frozen=True)
class Task:
    """Cells of one solver on one problem that differ in traced numbers and seeds."""

    cells: tuple[Cell, ...]

    @property
    def title(self) -> str:
        """The task in a few words."""
        first = self.cells[0]
        seeds = sorted({cell.seed for cell in self.cells})
        named = f"seed {seeds[0]}" if len(seeds) == 1 else f"{len(seeds)} seeds"
        return f"{first.solver} on {first.problem}, {named}"


@functools.lru_cache(maxsize=2)
def built(problem: str, arguments: Pairs) -> BilevelProblem:
    """Return the problem of a cell; the last ones are remembered."""
    return PROBLEMS[problem](**dict(arguments))


def tasks(cells: Iterable[Cell], seeds_together: bool = False) -> list[Task]:
    """Group the cells of a sweep, in order of their first cell.

    Parameters
    ----------
    cells : of the sweep
    seeds_together : put all seeds of a group into one task, as a GPU likes it
    """
    groups: dict[Any, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(_key(cell, seeds_together), []).append(cell)
    return [Task(tuple(part)) for group in groups.values() for part in _fitting(group)]


def _key(cell: Cell, seeds_together: bool) -> Any:
    solver = SOLVERS[cell.solver](**dict(cell.parameters))
    budget = (cell.max_calls, cell.max_seconds)
    # What is static, and which traced parameters are None, is in the structure of the solver; a word such as "auto"
    # in the place of a number stands for static ones too.
    words = tuple(leaf if isinstance(leaf, str) else None for leaf in jax.tree.leaves(solver))
    kind = (cell.problem, cell.problem_arguments, cell.solver, budget, jax.tree.structure(solver), words)
    if isinstance(solver, HostSolver):
        return (kind, cell.parameters)
    return kind if seeds_together else (kind, cell.seed)


def _fitting(group: list[Cell]) -> Iterator[list[Cell]]:
    """Split a group so that the states of its runs fit into memory together."""
    solver = _solver(group[0])
    if isinstance(solver, HostSolver):
        yield group
        return
    problem = built(group[0].problem, group[0].problem_arguments)
    settings = list(dict.fromkeys(cell.parameters for cell in group))
    n_seeds = len({cell.seed for cell in group})
    largest = max(1, MAX_STATE_BYTES // (n_seeds * _state_bytes(problem, solver)))
    for begin in range(0, len(settings), largest):
        chosen = set(settings[begin : begin + largest])
        yield [cell for cell in group if cell.parameters in chosen]


def _state_bytes(problem: BilevelProblem, solver: SolverBase) -> int:
    _, oracles, start, dtype = prepare(problem, solver)
    with arithmetic(dtype):
        state = jax.eval_shape(solver.cast(dtype).init, oracles, start)
    return int(sum(np.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)))


def _solver(cell: Cell) -> SolverBase:
    """Return the solver of a cell with its defaults filled in."""
    return _resolved(built(cell.problem, cell.problem_arguments), cell)


def _resolved(problem: BilevelProblem, cell: Cell) -> SolverBase:
    return prepare(problem, SOLVERS[cell.solver](**dict(cell.parameters))).solver


def distinct(cells: Iterable[Cell], problem: BilevelProblem) -> tuple[Cell, ...]:
    """Return the cells without those that a default makes equal to one before them.

    Parameters
    ----------
    cells : of one experiment
    problem : of the size that defaults follow
    """
    resolved: dict[Any, Any] = {}
    first: dict[Any, Cell] = {}
    for cell in cells:
        stated = cell.solver, cell.parameters
        if stated not in resolved:
            resolved[stated] = tuple(sorted(_resolved(problem, cell).parameters().items(), key=str))
        first.setdefault((cell.solver, resolved[stated], cell.seed), cell)
    return tuple(first.values())


def rows_of(task: Task, *, seeds_together: bool = False) -> list[dict[str, Any]]:
    """Run the cells of a task of the sweep and return the rows of the store."""
    first = task.cells[0]
    problem = built(first.problem, first.problem_arguments)
    if isinstance(_solver(first), HostSolver):
        return _run_once(problem, task.cells)
    by_parameters = list(dict.fromkeys(cell.parameters for cell in task.cells))
    seeds = sorted({cell.seed for cell in task.cells})
    where = {(cell.seed, cell.parameters): cell for cell in task.cells}
    solvers: list[Any] = [
        _solver(next(cell for cell in task.cells if cell.parameters == pairs)) for pairs in by_parameters
    ]
    assert first.max_calls is not None
    results = sweep(problem, solvers, seeds, first.max_calls, together=seeds_together)
    return [
        row
        for seed, of_seed in zip(seeds, results, strict=True)
        for pairs, solver, result in zip(by_parameters, solvers, of_seed, strict=True)
        if (seed, pairs) in where
        for row in _stored(where[seed, pairs], solver, result)
    ]


def _run_once(problem: BilevelProblem, cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Run a deterministic solver once, for all its seeds."""
    first, solver = cells[0], _solver(cells[0])
    result = _run_alone(problem, solver, first)
    unclocked = [{name: value for name, value in row.items() if name != "seconds"} for row in result.rows]
    return [row for cell in cells for row in _stored(cell, solver, result._replace(rows=unclocked))]


def timed_rows(cell: Cell) -> list[dict[str, Any]]:
    """Run a cell alone, against the clock, and return its rows."""
    assert cell.phase == TIMING
    problem, solver = built(cell.problem, cell.problem_arguments), _solver(cell)
    return _stored(cell, solver, _run_alone(problem, solver, cell))


def _run_alone(problem: BilevelProblem, solver: SolverBase, cell: Cell) -> CellResult:
    result = run(problem, solver, seed=cell.seed, max_calls=cell.max_calls, max_seconds=cell.max_seconds)
    if result.status is Status.interrupted:
        raise KeyboardInterrupt  # `run` gives what it has, but half a cell is none
    names = list(result.history)
    rows = [dict(zip(names, values, strict=True)) for values in zip(*result.history.values(), strict=True)]
    memory = sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(result.state))
    return CellResult([{name: value.item() for name, value in row.items()} for row in rows], result.status, memory)


def _stored(cell: Cell, solver: SolverBase, result: CellResult) -> list[dict[str, Any]]:
    common = {
        "cell": cell.id,
        "experiment": cell.experiment,
        "phase": cell.phase,
        "problem": cell.problem,
        "problem_arguments": json.dumps(dict(cell.problem_arguments), sort_keys=True),
        "solver": cell.solver,
        **{f"param_{name}": value for name, value in solver.parameters().items()},
        "seed": cell.seed,
        "status": str(result.status),
        **environment(),
    }
    rows = [common | {"final": False} | row for row in result.rows]
    rows[-1] |= {"final": True, "memory_bytes": float(result.memory_bytes)}
    return rows
