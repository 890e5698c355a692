"""An experiment, read from a TOML file and checked in full before anything runs."""

import difflib
import functools
import inspect
import itertools
import math
import re
import tomllib
import typing
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta, Struct

from bilevel._precision import as_float_dtype
from bilevel.bench.cells import SWEEP, TIMING, Cell, Pairs, parameter_types
from bilevel.engine.metrics import METRICS
from bilevel.problems import PROBLEMS
from bilevel.solvers import SOLVERS, Solver

Seeds: TypeAlias = int | Collection[int]  # how many, or which

FOLDER = Path("configs")  # where a bare name is looked up


class ConfigError(ValueError):
    """An experiment that cannot be run; the message names the file and the place in it."""


@dataclass(frozen=True)
class Setting:
    """A solver with its hyper-parameters; ``period_fraction`` stands for a period that follows the data's size."""

    solver: str
    parameters: Pairs
    period_fraction: float | None = None

    def pairs(self, n_rows: int) -> Pairs:
        """Return the parameters on a problem with n + m rows, the period q = max(1, floor(a (n + m) / b)) included."""
        if self.period_fraction is None:
            return self.parameters
        period = max(1, math.floor(self.period_fraction * n_rows / dict(self.parameters)["batch_size"]))
        return tuple(sorted((*self.parameters, ("period", period))))


@dataclass(frozen=True)
class Experiment:
    """A problem, settings to compare on it, and what each may cost.

    Attributes
    ----------
    name : of the experiment
    metric : what settings are selected by, at the end of the sweep
    seeds : of the batches
    new_problem_per_seed : is the problem drawn anew with each seed?
    problem, problem_arguments : a name in ``bilevel.problems.PROBLEMS``, and all its arguments, sorted
    settings : the united grids, without duplicates
    max_calls, epochs : budget of a sweep cell, one of them None
    max_seconds : budget of a timing cell; None where there is no timing
    """

    name: str
    metric: str
    seeds: tuple[int, ...]
    new_problem_per_seed: bool
    problem: str
    problem_arguments: Pairs
    settings: tuple[Setting, ...]
    max_calls: int | None
    epochs: float | None
    max_seconds: float | None

    @property
    def budgets(self) -> str:
        """What a run may use, in words."""
        sweep = f"{self.epochs:g} epochs" if self.epochs is not None else f"{self.max_calls:,} oracle calls"
        timing = "" if self.max_seconds is None else f", and at most {self.max_seconds:g} seconds in the timing phase"
        return f"{self.name}: {sweep} for each run{timing}"

    @property
    def solvers(self) -> tuple[str, ...]:
        """The names of the solvers, each once, in the order of the file."""
        return tuple(dict.fromkeys(setting.solver for setting in self.settings))

    def cells(
        self, n_inner: int, n_outer: int, seeds: Seeds | None = None, only: Collection[str] | None = None
    ) -> tuple[Cell, ...]:
        """Return the cells of the sweep.

        Parameters
        ----------
        n_inner, n_outer : rows of the problem, which periods and epochs are counted in
        seeds : in the place of the experiment's own
        only : names of the solvers to keep
        """
        for name in only or ():
            _check_name(f"`{self.name}`", "solver", name, self.solvers)
        n_rows = n_inner + n_outer
        names = self.solvers if only is None else only
        # Different fractions may come to the same period.
        runs = dict.fromkeys((s.solver, s.pairs(n_rows)) for s in self.settings if s.solver in names)
        return tuple(
            self._cell(solver, pairs, seed, SWEEP, self._max_calls(n_rows))
            for (solver, pairs), seed in itertools.product(runs, self._seeds(seeds))
        )

    def timing_cells(
        self, settings: Iterable[tuple[str, Pairs]], n_inner: int, n_outer: int, seeds: Seeds | None = None
    ) -> tuple[Cell, ...]:
        """Return the cells that time these settings, (solver, parameters) each; solvers take turns.

        They end with the oracle calls of the sweep, which the settings were selected for, or with their seconds.
        """
        if self.max_seconds is None:
            raise ConfigError(f"`{self.name}` has no timing phase; give `seconds` in [budget].")
        runs = [(name, _list_parameters(SOLVERS[name](**dict(pairs)))) for name, pairs in settings]
        max_calls = self._max_calls(n_inner + n_outer)
        return tuple(
            self._cell(solver, pairs, seed, TIMING, max_calls, self.max_seconds)
            for seed, (solver, pairs) in itertools.product(self._seeds(seeds), runs)
        )

    def _max_calls(self, n_rows: int) -> int | None:
        return math.floor(self.epochs * n_rows) if self.epochs is not None else self.max_calls

    def _cell(self, solver: str, pairs: Pairs, seed: int, phase: str, *budget: Any) -> Cell:
        arguments = dict(self.problem_arguments) | ({"seed": seed} if self.new_problem_per_seed else {})
        problem_pairs = tuple(sorted(arguments.items()))
        return Cell(self.name, self.problem, problem_pairs, solver, pairs, seed, phase, *budget)

    def _seeds(self, seeds: Seeds | None) -> tuple[int, ...]:
        if seeds is None:
            return self.seeds
        given = {"seeds": seeds if isinstance(seeds, int) else list(seeds)}
        return _list_seeds(f"`{self.name}`", _convert(f"`{self.name}`", given, _SeedsTable).seeds)


def _list_parameters(solver: Solver) -> Pairs:
    """Return all hyper-parameters but those that are None, so that a cell is the same however its config is written."""
    return tuple(sorted((name, value) for name, value in solver.parameters().items() if value is not None))


# The tables of a file. A description completes the sentence "must be ...".

_SeedsEntry: TypeAlias = Annotated[
    Annotated[int, Meta(ge=1, le=2**32)] | Annotated[list[Annotated[int, Meta(ge=0, lt=2**32)]], Meta(min_length=1)],
    Meta(description="a number of at least 1, or a list of integers in [0, 2**32)"),
]
_Positive: TypeAlias = Annotated[
    Annotated[float, Meta(gt=0, lt=2.0**63)] | None, Meta(description="a finite number above 0")
]


class _SeedsTable(Struct):
    seeds: _SeedsEntry


class _File(Struct, forbid_unknown_fields=True):
    name: Annotated[str, Meta(pattern=r"^[\w-]*[^\W_][\w-]*\Z", description="letters, digits, - and _")]
    metric: Annotated[str, Meta(description="the name of a metric")]
    seeds: _SeedsEntry
    new_problem_per_seed: Annotated[bool, Meta(description="true or false")] = False
    problem: Any = None
    budget: Any = None
    solvers: Any = None


class _Budget(Struct, forbid_unknown_fields=True):
    calls: Annotated[Annotated[int, Meta(ge=1, le=2**63 - 1)] | None, Meta(description="an integer above 0")] = None
    epochs: _Positive = None
    seconds: _Positive = None


@functools.cache
def _arguments_table(problem: str) -> Any:
    """Return the table of a problem's arguments, made from its signature."""
    words = {int: "an integer", float: "a finite number", str: "a text", bool: "true or false"}
    hints = typing.get_type_hints(PROBLEMS[problem])
    fields: list[tuple[Any, ...]] = []
    for name, parameter in inspect.signature(PROBLEMS[problem]).parameters.items():
        word = words.get((*typing.get_args(hints[name]), hints[name])[0])
        kind = Any if word is None else Annotated[hints[name], Meta(description=word)]
        fields.append((name, kind) if parameter.default is parameter.empty else (name, kind, parameter.default))
    return msgspec.defstruct(problem, fields, kw_only=True, forbid_unknown_fields=True)


def _convert(place: str, values: Any, table: Any, what: str = "key") -> Any:
    """Return a table of the file, or say what is wrong in it, and where."""
    if not isinstance(values, dict):
        raise ConfigError(f"{place}: must be a table.")
    for key in values:
        _check_name(place, what, key, table.__struct_fields__)
    try:
        return msgspec.convert(values, table)
    except msgspec.ValidationError as error:
        # It ends with the field that is missing, or with the path to what is wrong: `$.seeds[1]`.
        key = re.findall(r"`(?:\$\.)?(\w+)[^`]*`", str(error))[-1]
        must = f"must be {typing.get_type_hints(table, include_extras=True)[key].__metadata__[0].description}."
        given = f"`{key}={values[key]!r}`: {must}" if key in values else f"`{key}` is missing; it {must}"
        raise ConfigError(f"{place}: {given}") from None


def load_config(path: str | Path) -> Experiment:
    """Read an experiment.

    Parameters
    ----------
    path : a TOML file, or the bare name of one in ``configs/``

    Raises
    ------
    ConfigError
        With the file, the place and the way out.
    """
    file = find_config(path)
    try:
        values = tomllib.loads(file.read_bytes().decode())
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ConfigError(f"{file}: not TOML: {error}") from error
    return _parse(str(file), _convert(str(file), values, _File))


def find_config(path: str | Path) -> Path:
    """Return the file of an experiment, given as a path or by its bare name."""
    path = Path(path)
    bare = len(path.parts) == 1 and not path.suffix
    file = FOLDER / f"{path}.toml" if bare else path
    if not file.exists():
        others = sorted(other.stem if bare else str(other) for other in file.parent.glob("*.toml"))
        raise ConfigError(f"{file}: no such file; {suggest(str(path), others)}")
    return file


def _parse(place: str, file: Any) -> Experiment:
    for key in ("problem", "budget"):
        if getattr(file, key) is None:
            raise ConfigError(f"{place}: missing table [{key}].")
    problem, arguments = _parse_problem(f"{place}: [problem]", file.problem, file.new_problem_per_seed)
    if file.metric not in METRICS:  # then it is the problem's own, which only the problem knows
        own = PROBLEMS[problem](**dict(arguments)).metrics
        _check_name(place, "metric", file.metric, (*METRICS, *own))
    budget = _convert(f"{place}: [budget]", file.budget, _Budget)
    if (budget.calls is None) == (budget.epochs is None):
        raise ConfigError(f"{place}: [budget]: give exactly one of `calls` and `epochs`.")
    return Experiment(
        name=file.name,
        metric=file.metric,
        seeds=_list_seeds(place, file.seeds),
        new_problem_per_seed=file.new_problem_per_seed,
        problem=problem,
        problem_arguments=arguments,
        settings=tuple(dict.fromkeys(_parse_solvers(place, file.solvers))),
        max_calls=budget.calls,
        epochs=budget.epochs,
        max_seconds=budget.seconds,
    )


def _parse_problem(place: str, values: Any, new_per_seed: bool) -> tuple[str, Pairs]:
    name, given = _split_name(place, values, "problem", PROBLEMS)
    place = f"{place} ({name})"
    for key, value in given.items():
        _check_single(place, key, value)
    if new_per_seed and "seed" in given:
        message = "`seed` and `new_problem_per_seed = true` exclude each other; leave one out."
        raise ConfigError(f"{place}: {message}")
    arguments = msgspec.structs.asdict(_convert(place, given, _arguments_table(name), "argument"))
    try:
        arguments["dtype"] = as_float_dtype(arguments["dtype"]).name
    except ValueError as error:
        raise ConfigError(f"{place}: {error}") from error
    return name, tuple(sorted(arguments.items()))


def _parse_solvers(place: str, entries: Any) -> Iterator[Setting]:
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{place}: missing table [[solvers]]; give one for each solver, in double brackets.")
    for number, values in enumerate(entries, start=1):
        name, grid = _split_name(f"{place}: [[solvers]] {number}", values, "solver", SOLVERS)
        yield from _parse_grid(f"{place}: [[solvers]] {number} ({name})", SOLVERS[name], grid)


def _parse_grid(place: str, solver: type[Solver], grid: dict[str, Any]) -> Iterator[Setting]:
    """Yield the settings of a grid; hyper-parameters are checked by the solver, which is its own config."""
    types = parameter_types(solver)
    if "period_fraction" in grid and "period" not in types:
        raise ConfigError(f"{place}: `period_fraction`: this solver has no period.")
    if "period_fraction" in grid and "period" in grid:
        raise ConfigError(f"{place}: `period` and `period_fraction` exclude each other; leave one out.")
    for key in grid:
        _check_name(place, "parameter", key, (*types, *(["period_fraction"] if "period" in types else [])))
    lists = [_list_values(place, key, value, types.get(key, float)) for key, value in grid.items()]
    for values in itertools.product(*lists):
        yield _parse_setting(place, solver, dict(zip(grid, values, strict=True)))


def _list_values(place: str, key: str, value: Any, kind: type) -> list[Any]:
    """Return the values of a hyper-parameter, 1 as 1.0 where a float is due, for 1 and 1.0 are one cell."""
    values = value if isinstance(value, list) else [value]
    if not values:
        raise ConfigError(f"{place}: `{key}=[]`: an empty list leaves an empty grid; give a value or leave it out.")
    for one in values:
        _check_single(place, key, one)
    return [float(one) if kind is float and type(one) is int else one for one in values]


def _parse_setting(place: str, solver: type[Solver], parameters: dict[str, Any]) -> Setting:
    fraction = parameters.pop("period_fraction", None)
    if fraction is not None and not (type(fraction) is float and fraction > 0):
        raise ConfigError(f"{place}: `period_fraction={fraction!r}`: must be a finite number above 0.")
    try:
        return Setting(solver.__name__, _list_parameters(solver(**parameters)), fraction)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{place}: {error}") from error


def _split_name(place: str, values: Any, what: str, known: Collection[str]) -> tuple[str, dict[str, Any]]:
    """Return the name in a table, and what else is in it."""
    if not isinstance(values, dict):
        raise ConfigError(f"{place}: must be a table.")
    must, name = f"must be the name of a {what}.", values.get("name")
    if not isinstance(name, str):
        raise ConfigError(
            f"{place}: " + (f"`name={name!r}`: {must}" if "name" in values else f"`name` is missing; it {must}")
        )
    _check_name(place, what, name, known)
    return name, {key: value for key, value in values.items() if key != "name"}


def _check_single(place: str, key: str, value: Any) -> None:
    if isinstance(value, list | dict):
        raise ConfigError(f"{place}: `{key}={value!r}`: must be a single value.")
    if isinstance(value, int | float) and not -(2**63) < value < 2**63:  # what a column of the store holds
        raise ConfigError(f"{place}: `{key}={value!r}`: must be a finite number that fits in 64 bits.")


def _list_seeds(place: str, seeds: int | list[int]) -> tuple[int, ...]:
    if isinstance(seeds, int):
        return tuple(range(seeds))
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"{place}: `seeds={seeds!r}`: a seed occurs twice.")
    return tuple(seeds)


def _check_name(place: str, what: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        raise ConfigError(f"{place}: unknown {what} `{name}`; {suggest(name, known)}")


def suggest(name: str, known: Collection[str]) -> str:
    """Return the nearest known name, whatever its case, or all of them."""
    plain = {other.lower(): other for other in known}
    near = difflib.get_close_matches(name.lower(), plain, n=1)
    return f"did you mean `{plain[near[0]]}`?" if near else f"there are: {', '.join(known) or 'none'}."
