"""An experiment, read from a TOML file and checked in full before anything runs."""

import difflib
import functools
import inspect
import itertools
import math
import re
import tomllib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias, get_args, get_type_hints

import msgspec
from msgspec import Meta, Struct

from bilevel._precision import as_float_dtype
from bilevel.bench.cells import SWEEP, TIMING, Cell, Pairs, Setting, parameter_types
from bilevel.engine.metrics import METRICS
from bilevel.engine.metrics import metric as describe
from bilevel.problems import PROBLEMS
from bilevel.solvers import SOLVERS, SolverBase

Seeds: TypeAlias = int | Collection[int]  # how many, or which
FOLDER = Path("configs")  # where a bare name is looked up


class ConfigError(ValueError):
    """An experiment that cannot be run; the message names the file and the place in it."""


@dataclass(frozen=True)
class Experiment:
    """A problem, settings to compare on it, and what each may cost."""

    name: str
    metric: str  # which settings are selected by, at the end of the sweep; not of test rows
    seeds: tuple[int, ...]  # of the batches
    new_problem_per_seed: bool  # is the problem drawn anew with each seed?
    problem: str  # a name in ``bilevel.problems.PROBLEMS``
    problem_arguments: Pairs  # all of them, sorted
    settings: tuple[Setting, ...]  # the united grids, without duplicates
    max_calls: int | None  # budget of a cell; either this or the next is None
    epochs: float | None
    max_seconds: float | None  # budget of a timing cell besides; None where there is no timing phase
    timing_epochs: float | None  # of a timing cell, where they are not those of the sweep
    exact: bool  # are h and its gradient evaluated?

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

    @property
    def solvers(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(setting.solver for setting in self.settings))

    def cells(
        self, n_inner: int, n_outer: int, seeds: Seeds | None = None, only: Collection[str] | None = None
    ) -> tuple[Cell, ...]:
        """Return the cells of the sweep on a problem of this size, with these seeds and solvers in the place of all."""
        with _at(f"`{self.name}`"):
            for name in only or ():
                _check_name("solver", name, self.solvers)
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
        runs = [(name, _list_parameters(SOLVERS[name](**dict(pairs)))) for name, pairs in settings]
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
        entries = {"name": self.name, "metric": self.metric, "seeds": seeds if isinstance(seeds, int) else list(seeds)}
        with _at(f"`{self.name}`"):
            return _list_seeds(_convert(entries, _File).seeds)


def _list_parameters(solver: SolverBase) -> Pairs:
    """Return all hyper-parameters but those that are None, so that a cell is the same however its config is written."""
    return tuple(sorted((name, value) for name, value in solver.parameters().items() if value is not None))


# The tables of a file. A description completes the sentence "must be ...".
_SeedsEntry: TypeAlias = Annotated[
    Annotated[int, Meta(ge=1, le=2**32)] | Annotated[list[Annotated[int, Meta(ge=0, lt=2**32)]], Meta(min_length=1)],
    Meta(description="a number of at least 1, or a list of integers in [0, 2**32)"),
]
_Cost: TypeAlias = Annotated[Annotated[float, Meta(gt=0, lt=2**63)] | None, Meta(description="a finite number above 0")]


class _File(Struct, forbid_unknown_fields=True):
    name: Annotated[str, Meta(pattern=r"^[\w-]*[^\W_][\w-]*\Z", description="letters, digits, - and _")]
    metric: Annotated[str, Meta(description="the name of a metric")]
    seeds: _SeedsEntry
    new_problem_per_seed: Annotated[bool, Meta(description="true or false")] = False
    exact: Annotated[bool, Meta(description="true or false")] = True
    problem: Any = None
    budget: Any = None
    solvers: Any = None


class _Budget(Struct, forbid_unknown_fields=True):
    calls: Annotated[Annotated[int, Meta(ge=1, le=2**63 - 1)] | None, Meta(description="an integer above 0")] = None
    epochs: _Cost = None
    seconds: _Cost = None
    timing_epochs: _Cost = None


@functools.cache
def _arguments_table(problem: str) -> Any:
    words = {int: "an integer", float: "a finite number", str: "a text", bool: "true or false"}
    hints = get_type_hints(PROBLEMS[problem])
    fields: list[tuple[Any, ...]] = []
    for name, parameter in inspect.signature(PROBLEMS[problem]).parameters.items():
        word = words.get((*get_args(hints[name]), hints[name])[0])
        kind = Any if word is None else Annotated[hints[name], Meta(description=word)]
        fields.append((name, kind) if parameter.default is parameter.empty else (name, kind, parameter.default))
    return msgspec.defstruct(problem, fields, kw_only=True, forbid_unknown_fields=True)


@contextmanager
def _at(place: str) -> Iterator[None]:
    """Put the place in front of what is wrong there."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{place}: {error}") from error


def _convert(values: dict[str, Any], table: Any, what: str = "key") -> Any:
    for key in values:
        _check_name(what, key, table.__struct_fields__)
    try:
        return msgspec.convert(values, table)
    except msgspec.ValidationError as error:
        # It ends with the field that is missing, or with the path to what is wrong: `$.seeds[1]`.
        key = re.findall(r"`(?:\$\.)?(\w+)[^`]*`", str(error))[-1]
        must = f"must be {get_type_hints(table, include_extras=True)[key].__metadata__[0].description}."
        found = f"`{key}={values[key]!r}`:" if key in values else f"`{key}` is missing; it"
        raise ValueError(f"{found} {must}") from None


def load_config(path: str | Path) -> Experiment:
    """Read an experiment from a TOML file, given as a path or as the bare name of one in ``configs/``."""
    file = find_config(path)
    with _at(str(file)):
        try:
            values = tomllib.loads(file.read_bytes().decode())
        except OSError as error:
            raise ValueError(f"cannot be read: {error.strerror}.") from error
        except ValueError as error:
            raise ValueError(f"not TOML: {error}") from error
        return _parse(_convert(values, _File))


def find_config(path: str | Path) -> Path:
    """Return the file that `load_config` reads."""
    path = Path(path)
    bare = len(path.parts) == 1 and not path.suffix
    file = FOLDER / f"{path}.toml" if bare else path
    if not file.exists():
        others = sorted(other.stem if bare else str(other) for other in file.parent.glob("*.toml"))
        raise ConfigError(f"{file}: no such file; {suggest(str(path), others)}")
    return file


def _parse(file: _File) -> Experiment:
    for key, table in {"problem": file.problem, "budget": file.budget}.items():
        if not isinstance(table, dict):
            raise ValueError(f"missing table [{key}]." if table is None else f"[{key}]: must be a table.")
    problem, arguments = _parse_problem(file.problem, file.new_problem_per_seed)
    if file.metric not in METRICS:  # then it is the problem's own, which only the problem knows
        _check_name("metric", file.metric, (*METRICS, *PROBLEMS[problem](**dict(arguments)).metrics))
    check_selects(file.metric)
    with _at("[budget]"):
        budget = _convert(file.budget, _Budget)
        if (budget.calls is None) == (budget.epochs is None):
            raise ValueError("give exactly one of `calls` and `epochs`.")
        if budget.timing_epochs is not None and budget.seconds is None:
            raise ValueError("`timing_epochs` needs `seconds`: without them there is no timing phase.")
    entries = file.solvers
    if not (isinstance(entries, list) and entries and all(isinstance(entry, dict) for entry in entries)):
        raise ValueError("missing table [[solvers]]; give one for each solver, in double brackets.")
    settings: dict[Setting, None] = {}
    for number, values in enumerate(entries, start=1):
        with _named(f"[[solvers]] {number}", values, "solver", SOLVERS) as (name, grid):
            columns = _parse_columns(grid.pop("column", []))
            settings |= dict.fromkeys(_parse_grid(SOLVERS[name], grid, columns))
    head = file.name, file.metric, _list_seeds(file.seeds), file.new_problem_per_seed
    budgets = budget.calls, budget.epochs, budget.seconds, budget.timing_epochs
    return Experiment(*head, problem, arguments, tuple(settings), *budgets, file.exact)


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
        arguments = msgspec.structs.asdict(_convert(given, _arguments_table(name), "argument"))
        # A cell states its dtype: what JAX's flag makes of the data is no part of a config.
        arguments["dtype"] = as_float_dtype(arguments["dtype"] or "float32").name
    return name, tuple(sorted(arguments.items()))


def _parse_grid(solver: type[SolverBase], grid: dict[str, Any], columns: tuple[str, ...]) -> Iterator[Setting]:
    """Yield the settings of a grid; hyper-parameters are checked by the solver, which is its own config."""
    types = parameter_types(solver)
    if "period_fraction" in grid and "period" not in types:
        raise ValueError("`period_fraction`: this solver has no period.")
    if "period_fraction" in grid and "period" in grid:
        raise ValueError("`period` and `period_fraction` exclude each other; leave one out.")
    for key in grid:
        _check_name("parameter", key, (*types, *(["period_fraction"] if "period" in types else [])))
    for values in itertools.product(*(_list_values(key, value, types.get(key, float)) for key, value in grid.items())):
        parameters = dict(zip(grid, values, strict=True))
        fraction = parameters.pop("period_fraction", None)
        if fraction is not None and not (type(fraction) is float and fraction > 0):
            raise ValueError(f"`period_fraction={fraction!r}`: must be a finite number above 0.")
        yield Setting(solver.__name__, _list_parameters(solver(**parameters)), fraction, columns)


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
    with _at(place):
        if "name" not in values:
            raise ValueError(f"`name` is missing; it must be the name of a {what}.")
        name = str(values["name"])
        _check_name(what, name, known)
    with _at(f"{place} ({name})"):
        yield name, {key: value for key, value in values.items() if key != "name"}


def _list_seeds(seeds: int | list[int]) -> tuple[int, ...]:
    if isinstance(seeds, list) and len(set(seeds)) < len(seeds):
        raise ValueError(f"`seeds={seeds!r}`: a seed occurs twice.")
    return tuple(seeds if isinstance(seeds, list) else range(seeds))


def _check_name(what: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        raise ValueError(f"unknown {what} `{name}`; {suggest(name, known)}")


def suggest(name: str, known: Collection[str]) -> str:
    """Return the nearest known name, whatever its case, or all of them."""
    plain = {other.lower(): other for other in known}
    near = difflib.get_close_matches(name.lower(), plain, n=1)
    return f"did you mean `{plain[near[0]]}`?" if near else f"there are: {', '.join(known) or 'none'}."
