"""An experiment, read from a TOML file and checked in full before anything runs."""

import itertools
import math
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from bilevel._precision import as_float_dtype
from bilevel.bench.cells import SWEEP, TIMING, Cell, Pairs, Setting, build_problem, parameter_types
from bilevel.bench.plugins import check_name, find_problem, find_solver, is_foreign
from bilevel.bench.tables import (
    BudgetTable,
    ConfigError,
    FileTable,
    arguments_table,
    at,
    check_cells,
    convert,
    find_config,
    list_seeds,
    read_table,
)
from bilevel.engine.metrics import METRICS
from bilevel.engine.metrics import metric as describe
from bilevel.problems import PROBLEMS
from bilevel.solvers import SOLVERS, SolverBase

Seeds: TypeAlias = int | Collection[int]  # how many, or which
EVERY = "*"  # in the place of a solver's name: the grid is every solver's


@dataclass(frozen=True, kw_only=True)
class Statement:
    """What an experiment is called, what selects its settings, and what each may cost."""

    name: str
    metric: str  # which settings are selected by, at the end of the sweep; not of test rows
    max_calls: int | None  # budget of a cell; either this or the next is None
    epochs: float | None
    max_seconds: float | None  # budget of a timing cell besides; None where there is no timing phase
    timing_epochs: float | None  # of a timing cell, where they are not those of the sweep

    @property
    def budgets(self) -> str:
        """What a run may use, in words."""
        sweep = f"{self.epochs:g} epochs" if self.epochs is not None else f"{self.max_calls:,} oracle calls"
        if self.max_seconds is None:
            return f"{self.name}: {sweep} for each run"
        epochs = "" if self.timing_epochs is None else f"{self.timing_epochs:g} epochs and "
        return (
            f"{self.name}: {sweep} for each run, and at most {epochs}{self.max_seconds:g} seconds in the timing phase"
        )


@dataclass(frozen=True, kw_only=True)
class Experiment(Statement):
    """A problem, and settings to compare on it."""

    seeds: tuple[int, ...]  # of the batches
    new_problem_per_seed: bool  # is the problem drawn anew with each seed?
    problem: str  # a name in ``bilevel.problems.PROBLEMS``, or ``module:function``
    problem_arguments: Pairs  # all of them, sorted
    settings: tuple[Setting, ...]  # the united grids, without duplicates
    exact: bool  # are h and its gradient evaluated?

    @property
    def solvers(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(setting.solver for setting in self.settings))

    def cells(
        self, n_inner: int, n_outer: int, seeds: Seeds | None = None, only: Collection[str] | None = None
    ) -> tuple[Cell, ...]:
        """Return the cells of the sweep on a problem of this size, with these seeds and solvers in the place of all."""
        with at(f"`{self.name}`"):
            for name in only or ():
                check_name("solver", name, self.solvers)
        n_rows = n_inner + n_outer
        kept = (setting for setting in self.settings if only is None or setting.solver in only)
        # Different fractions may come to the same period.
        runs: dict[tuple[str, Pairs], tuple[str, ...]] = {}
        for setting in kept:
            run = setting.solver, setting.pairs(n_rows)
            runs[run] = tuple(dict.fromkeys((*runs.get(run, ()), *setting.columns)))
        turns = ((run, columns, seed) for run, columns in runs.items() for seed in self._seeds(seeds))
        return tuple(self._cells(turns, SWEEP, n_rows))

    def timing_cells(
        self, settings: Iterable[tuple[str, Pairs]], n_inner: int, n_outer: int, seeds: Seeds | None = None
    ) -> tuple[Cell, ...]:
        """Return the cells that time these settings, (solver, parameters) each; solvers take turns."""
        # They end with the oracle calls of the sweep, which the settings were selected for, or with their seconds.
        if self.max_seconds is None:
            raise ConfigError(f"`{self.name}` has no timing phase; give `seconds` in [budget].")
        runs = [(name, _list_parameters(find_solver(name)(**dict(pairs)))) for name, pairs in settings]
        turns = ((run, (), seed) for seed in self._seeds(seeds) for run in runs)
        return tuple(self._cells(turns, TIMING, n_inner + n_outer))

    def _cells(
        self, turns: Iterable[tuple[tuple[str, Pairs], tuple[str, ...], int]], phase: str, n_rows: int
    ) -> Iterator[Cell]:
        epochs = (phase == TIMING and self.timing_epochs) or self.epochs
        max_calls = math.floor(epochs * n_rows) if epochs is not None else self.max_calls
        budget = max_calls, self.max_seconds if phase == TIMING else None
        for (solver, pairs), columns, seed in turns:
            arguments = dict(self.problem_arguments) | ({"seed": seed} if self.new_problem_per_seed else {})
            problem = self.problem, tuple(sorted(arguments.items()))
            yield Cell(self.name, *problem, solver, pairs, seed, phase, *budget, self.exact, columns)

    def _seeds(self, seeds: Seeds | None) -> tuple[int, ...]:
        if seeds is None:
            return self.seeds
        with at(f"`{self.name}`"):
            check_cells(len(self.settings), seeds)
            listed = seeds if isinstance(seeds, int) else list(seeds)
            entries = {"name": self.name, "metric": self.metric, "seeds": listed}
            return list_seeds(convert(entries, FileTable).seeds)


def _list_parameters(solver: SolverBase) -> Pairs:
    """Return all hyper-parameters but those that are None, so that a cell is the same however its config is written."""
    return tuple(sorted((name, value) for name, value in solver.parameters().items() if value is not None))


def load_config(source: str | Path | dict[str, Any]) -> Experiment:
    """Return an experiment, of a TOML file, of the bare name of one of the package, or of the tables of such a file.

    A problem or solver named ``module:name`` is imported.
    """
    if isinstance(source, dict):
        with at("`config`"):
            return _parse(convert(source, FileTable))
    file = find_config(source)
    with at(str(file)):
        return _parse(read_table(file))


def read_statement(path: Path) -> Statement:
    """Return what a TOML file states of its experiment; nothing that it names is imported."""
    with at(str(path)):
        file = read_table(path)
        return Statement(name=file.name, metric=file.metric, **_parse_budget(file))


def _parse(file: FileTable) -> Experiment:
    _check_table("problem", file.problem)
    problem, arguments = _parse_problem(file.problem, file.new_problem_per_seed)
    if file.metric not in METRICS:  # then it is the problem's own, which only the problem knows
        check_name("metric", file.metric, (*METRICS, *build_problem(problem, arguments).metrics))
    check_selects(file.metric)
    budgets, entries = _parse_budget(file), file.solvers
    if not (isinstance(entries, list) and entries and all(isinstance(entry, dict) for entry in entries)):
        raise ValueError("missing table [[solvers]]; give one for each solver, in double brackets.")
    settings: dict[Setting, None] = {}
    for number, values in enumerate(entries, start=1):
        with _named(f"[[solvers]] {number}", values, "solver", (*SOLVERS, EVERY)) as (name, grid):
            columns = _parse_columns(grid.pop("column", []))
            for one in SOLVERS if name == EVERY else (name,):
                settings |= dict.fromkeys(_parse_grid(one, grid, columns))
                check_cells(len(settings), file.seeds)
    return Experiment(
        name=file.name,
        metric=file.metric,
        seeds=list_seeds(file.seeds),
        new_problem_per_seed=file.new_problem_per_seed,
        problem=problem,
        problem_arguments=arguments,
        settings=tuple(settings),
        exact=file.exact,
        **budgets,
    )


def _check_table(key: str, table: Any) -> None:
    if not isinstance(table, dict):
        raise ValueError(f"missing table [{key}]." if table is None else f"[{key}]: must be a table.")


def _parse_budget(file: FileTable) -> dict[str, Any]:
    _check_table("budget", file.budget)
    with at("[budget]"):
        budget = convert(file.budget, BudgetTable)
        if (budget.calls is None) == (budget.epochs is None):
            raise ValueError("give exactly one of `calls` and `epochs`.")
        if budget.timing_epochs is not None and not budget.seconds:
            raise ValueError("`timing_epochs` needs `seconds`: without them there is no timing phase.")
    limits = {"max_calls": budget.calls, "max_seconds": budget.seconds or None}
    return limits | {"epochs": budget.epochs, "timing_epochs": budget.timing_epochs}


def check_selects(metric: str) -> None:
    """Refuse to select by test rows, which would make them validation rows."""
    if describe(metric).of_test_rows:
        raise ValueError(f"`metric={metric!r}` is of test rows, which select nothing; draw it instead.")


def _parse_columns(names: Any) -> tuple[str, ...]:
    listed = names if isinstance(names, list) else [names]
    if not all(isinstance(name, str) and re.fullmatch(r"\w[\w -]*", name) for name in listed):
        raise ValueError(f"`column={names!r}`: must be a name, or a list of them, of letters, digits, spaces, - and _.")
    return tuple(dict.fromkeys(listed))


def _parse_problem(values: dict[str, Any], new_per_seed: bool) -> tuple[str, Pairs]:
    with _named("[problem]", values, "problem", PROBLEMS) as (name, given):
        for key, value in given.items():
            _list_values(key, [value])
        if new_per_seed and "seed" in given:
            raise ValueError("`seed` and `new_problem_per_seed = true` exclude each other; leave one out.")
        arguments = msgspec.structs.asdict(convert(given, arguments_table(find_problem(name)), "argument"))
        if new_per_seed and "seed" not in arguments:
            raise ValueError("`new_problem_per_seed = true` needs a problem with an argument `seed`.")
        # A cell states its dtype: what JAX's flag makes of the data is no part of a config.
        if "dtype" in arguments:
            arguments["dtype"] = as_float_dtype(arguments["dtype"] or "float32").name
    return name, tuple(sorted(arguments.items()))


def _parse_grid(name: str, grid: dict[str, Any], columns: tuple[str, ...]) -> Iterator[Setting]:
    """Yield the settings of a grid; hyper-parameters are checked by the solver, which is its own config."""
    solver = find_solver(name)
    types = parameter_types(solver)
    if "period_fraction" in grid and "period" not in types:
        raise ValueError("`period_fraction`: this solver has no period.")
    if "period_fraction" in grid and "period" in grid:
        raise ValueError("`period` and `period_fraction` exclude each other; leave one out.")
    for key in grid:
        check_name("parameter", key, (*types, *(["period_fraction"] if "period" in types else [])))
    lists = [_list_values(key, value, types.get(key, float)) for key, value in grid.items()]
    check_cells(math.prod(map(len, lists)))
    for values in itertools.product(*lists):
        parameters = dict(zip(grid, values, strict=True))
        fraction = parameters.pop("period_fraction", None)
        if fraction is not None and not (type(fraction) is float and fraction > 0):
            raise ValueError(f"`period_fraction={fraction!r}`: must be a finite number above 0.")
        yield Setting(name, _list_parameters(solver(**parameters)), fraction, columns)


def _list_values(key: str, value: Any, kind: type = float) -> list[Any]:
    """Return the values of a parameter, 1 as 1.0 where a float is due, for 1 and 1.0 are one cell."""
    values = value if isinstance(value, list) else [value]
    if not values:
        raise ValueError(f"`{key}=[]`: an empty list leaves an empty grid; give a value or leave it out.")
    for one in values:
        if isinstance(one, list | dict):
            raise ValueError(f"`{key}={one!r}`: must be a single value.")
        if isinstance(one, int | float) and not -(2**63) < one < 2**63:  # what a column of the store holds
            raise ValueError(f"`{key}={one!r}`: must be a finite number that fits in 64 bits.")
    return [float(one) if kind is float and type(one) is int else one for one in values]


@contextmanager
def _named(place: str, values: dict[str, Any], what: str, known: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yield the name in a table and what else is in it; what is wrong with the rest is told with the name."""
    with at(place):
        if "name" not in values:
            raise ValueError(f"`name` is missing; it must be the name of a {what}.")
        name = str(values["name"])
        if not is_foreign(name):
            check_name(what, name, known)
    with at(f"{place} ({name})"):
        yield name, {key: value for key, value in values.items() if key != "name"}
