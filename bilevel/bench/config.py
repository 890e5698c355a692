"""An experiment, read from a TOML file and checked in full before anything runs."""

import dataclasses
import difflib
import functools
import inspect
import itertools
import math
import tomllib
import typing
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bilevel._precision import as_float_dtype
from bilevel.bench.cells import SWEEP, TIMING, Cell, Pairs
from bilevel.problems import PROBLEMS
from bilevel.solvers import SOLVERS, SolverBase

METRICS = (
    *("outer_value", "inner_residual_sq", "v_residual_sq", "direction_norm_sq"),
    *("value", "hypergrad_norm_sq", "inner_distance_sq", "v_distance_sq", "value_gap"),
    *("exact_inner_residual", "exact_v_residual"),
    *("test_error", "weight_auc", "drift", "rollbacks", "step_scale"),
)
FOLDER = Path("configs")  # where a bare name is looked up
_TOP = ("name", "metric", "seeds", "new_problem_per_seed", "problem", "budget", "solvers")
_N_SEEDS = 2**32  # what a run takes
_LARGEST = 2**63  # what a column of the store holds


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
        sweep = f"{self.epochs:g} epochs" if self.epochs is not None else f"{self.max_calls:,} calls"
        timing = "" if self.max_seconds is None else f", and at most {self.max_seconds:g} seconds in the timing"
        return f"{self.name}: {sweep} for each run{timing}"

    @property
    def solvers(self) -> tuple[str, ...]:
        """The names of the solvers, each once, in the order of the file."""
        return tuple(dict.fromkeys(setting.solver for setting in self.settings))

    def cells(
        self,
        n_inner: int,
        n_outer: int,
        seeds: int | Collection[int] | None = None,
        only: Collection[str] | None = None,
    ) -> tuple[Cell, ...]:
        """Return the cells of the sweep.

        Parameters
        ----------
        n_inner, n_outer : rows of the problem, which periods and epochs are counted in
        seeds : in the place of the experiment's own
        only : names of the solvers to keep
        """
        n_rows = n_inner + n_outer
        calls = self._calls(n_rows)
        names = self._kept(only)
        # Different fractions may come to the same period.
        runs = dict.fromkeys((s.solver, s.pairs(n_rows)) for s in self.settings if s.solver in names)
        return tuple(
            self._cell(solver, pairs, seed, SWEEP, max_calls=calls)
            for (solver, pairs), seed in itertools.product(runs, self._seeds(seeds))
        )

    def timing_cells(
        self,
        settings: Iterable[tuple[str, Pairs]],
        n_inner: int,
        n_outer: int,
        seeds: int | Collection[int] | None = None,
    ) -> tuple[Cell, ...]:
        """Return the cells that time these settings, (solver, parameters) each; solvers take turns.

        They end with the calls of the sweep, which the settings were selected for, or with their seconds.
        """
        if self.max_seconds is None:
            raise ConfigError(f"`{self.name}` has no timing phase; give `seconds` in [budget].")
        runs = [(name, _stated(SOLVERS[name](**dict(pairs)))) for name, pairs in settings]
        budget = {"max_calls": self._calls(n_inner + n_outer), "max_seconds": self.max_seconds}
        return tuple(
            self._cell(solver, pairs, seed, TIMING, **budget)
            for seed, (solver, pairs) in itertools.product(self._seeds(seeds), runs)
        )

    def _calls(self, n_rows: int) -> int | None:
        return math.floor(self.epochs * n_rows) if self.epochs is not None else self.max_calls

    def _cell(self, solver: str, pairs: Pairs, seed: int, phase: str, **budget: Any) -> Cell:
        arguments = dict(self.problem_arguments) | ({"seed": seed} if self.new_problem_per_seed else {})
        problem_pairs = tuple(sorted(arguments.items()))
        return Cell(self.name, self.problem, problem_pairs, solver, pairs, seed, phase, **budget)

    def _kept(self, only: Collection[str] | None) -> Collection[str]:
        for name in only or ():
            _check_name(f"`{self.name}`", "solver", name, self.solvers)
        return self.solvers if only is None else only

    def _seeds(self, seeds: int | Collection[int] | None) -> tuple[int, ...]:
        return self.seeds if seeds is None else _checked_seeds(f"`{self.name}`", seeds)


@functools.cache
def parameter_types(solver: type[SolverBase]) -> dict[str, type]:
    """Return the type of each hyper-parameter, without the None that some allow."""
    hints = typing.get_type_hints(solver)
    names = [field.name for field in dataclasses.fields(solver)]
    return {name: (*typing.get_args(hints[name]), hints[name])[0] for name in names}


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
    file = found(path)
    try:
        values = tomllib.loads(file.read_bytes().decode())
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ConfigError(f"{file}: not TOML: {error}") from error
    return _experiment(_Table(str(file), values))


def found(path: str | Path) -> Path:
    """Return the file of an experiment, given as a path or by its bare name."""
    path = Path(path)
    bare = len(path.parts) == 1 and not path.suffix
    file = FOLDER / f"{path}.toml" if bare else path
    if not file.exists():
        others = sorted(other.stem if bare else str(other) for other in file.parent.glob("*.toml"))
        raise ConfigError(f"{file}: no such file; {nearest(str(path), others)}")
    return file


class _Table:
    """A table of the file, which knows its place."""

    def __init__(self, place: str, values: Any) -> None:
        self.place = place
        if not isinstance(values, dict):
            raise self.error("must be a table.")
        self.values: dict[str, Any] = values

    def error(self, message: str) -> ConfigError:
        return ConfigError(f"{self.place}: {message}")

    def check_keys(self, known: Collection[str], what: str = "key") -> None:
        for key in self.values:
            _check_name(self.place, what, key, known)

    def get(self, key: str, kind: type, what: str) -> Any:
        """Return a value that must be there."""
        if key not in self.values:
            raise self.error(f"`{key}` is missing; it must be {what}.")
        value = self.values[key]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.error(f"`{key}={value!r}`: must be {what}.")
        return value

    def table(self, key: str) -> "_Table":
        if key not in self.values:
            raise self.error(f"missing table [{key}].")
        return _Table(f"{self.place}: [{key}]", self.values[key])

    def number(self, key: str, kind: type) -> Any:
        """Return a number above 0, or None where there is none."""
        if key not in self.values:
            return None
        value = self.values[key]
        if type(value) not in (int, kind) or not 0 < value < _LARGEST:
            raise self.error(f"`{key}={value!r}`: must be {_called(kind)} above 0.")
        return kind(value)


def _experiment(top: _Table) -> Experiment:
    top.check_keys(_TOP)
    metric = top.get("metric", str, "the name of a metric")
    _check_name(top.place, "metric", metric, METRICS)
    seeds = _checked_seeds(top.place, top.get("seeds", object, "a number of seeds, or a list of them"))
    anew = top.get("new_problem_per_seed", bool, "true or false") if "new_problem_per_seed" in top.values else False
    problem, arguments = _problem(top.table("problem"), anew)
    max_calls, epochs, max_seconds = _budget(top.table("budget"))
    return Experiment(
        name=_name(top),
        metric=metric,
        seeds=seeds,
        new_problem_per_seed=anew,
        problem=problem,
        problem_arguments=arguments,
        settings=tuple(dict.fromkeys(_settings(top))),
        max_calls=max_calls,
        epochs=epochs,
        max_seconds=max_seconds,
    )


def _name(top: _Table) -> str:
    what = "letters, digits, - and _"
    name = top.get("name", str, what)
    if not name.replace("-", "").replace("_", "").isalnum():
        raise top.error(f"`name={name!r}`: must be {what}.")
    return name


def _problem(table: _Table, anew: bool) -> tuple[str, Pairs]:
    name = table.get("name", str, "the name of a problem")
    _check_name(table.place, "problem", name, tuple(PROBLEMS))
    table.place += f" ({name})"
    defaults = {key: argument.default for key, argument in inspect.signature(PROBLEMS[name]).parameters.items()}
    given = {key: value for key, value in table.values.items() if key != "name"}
    for key, value in given.items():
        _check_name(table.place, "argument", key, tuple(defaults))
        given[key] = _argument(table, key, value, type(defaults[key]))
    if anew and "seed" in given:
        raise table.error("`seed` and `new_problem_per_seed = true` exclude each other; leave one out.")
    return name, tuple(sorted((defaults | given).items()))


def _argument(table: _Table, key: str, value: Any, kind: type) -> Any:
    if key == "dtype":
        try:
            return as_float_dtype(value).name
        except ValueError as error:
            raise table.error(str(error)) from error
    typed = _typed(table, key, value, kind)
    if type(typed) is not kind:
        raise table.error(f"`{key}={value!r}`: must be {_called(kind)}.")
    return typed


def _budget(table: _Table) -> tuple[int | None, float | None, float | None]:
    table.check_keys(("calls", "epochs", "seconds"))
    if ("calls" in table.values) == ("epochs" in table.values):
        raise table.error("give exactly one of `calls` and `epochs`.")
    return table.number("calls", int), table.number("epochs", float), table.number("seconds", float)


def _settings(top: _Table) -> Iterator[Setting]:
    entries = top.values.get("solvers")
    if not isinstance(entries, list) or not entries:
        raise top.error("missing table [[solvers]]; give one for each solver, in double brackets.")
    for place, values in enumerate(entries, start=1):
        yield from _grid(_Table(f"{top.place}: [[solvers]] {place}", values))


def _grid(table: _Table) -> Iterator[Setting]:
    name = table.get("name", str, "the name of a solver")
    _check_name(table.place, "solver", name, tuple(SOLVERS))
    table.place += f" ({name})"
    types = parameter_types(SOLVERS[name])
    _check_periods(table, types)
    table.check_keys(("name", *types, *(["period_fraction"] if "period" in types else [])), "parameter")
    names = [key for key in table.values if key != "name"]
    for values in itertools.product(*(_listed(table, key, types) for key in names)):
        yield _setting(table, SOLVERS[name], dict(zip(names, values, strict=True)))


def _check_periods(table: _Table, types: dict[str, type]) -> None:
    if "period_fraction" not in table.values:
        return
    if "period" not in types:
        raise table.error("`period_fraction`: this solver has no period.")
    if "period" in table.values:
        raise table.error("`period` and `period_fraction` exclude each other; leave one out.")


def _listed(table: _Table, key: str, types: dict[str, type]) -> list[Any]:
    value = table.values[key]
    values = value if isinstance(value, list) else [value]
    if not values:
        raise table.error(f"`{key}=[]`: an empty list leaves an empty grid; give a value or leave it out.")
    return [_typed(table, key, value, types.get(key, float)) for value in values]


def _setting(table: _Table, solver: type[SolverBase], parameters: dict[str, Any]) -> Setting:
    fraction = parameters.pop("period_fraction", None)
    if fraction is not None and not (type(fraction) is float and fraction > 0):
        raise table.error(f"`period_fraction={fraction!r}`: must be a finite number above 0.")
    try:
        return Setting(solver.__name__, _stated(solver(**parameters)), fraction)
    except (TypeError, ValueError) as error:
        raise table.error(str(error)) from error


def _stated(solver: SolverBase) -> Pairs:
    """Return all hyper-parameters but those that are None, so that a cell is the same however its config is written."""
    return tuple(sorted((name, value) for name, value in solver.parameters().items() if value is not None))


def _typed(table: _Table, key: str, value: Any, kind: type) -> Any:
    """Return a single value, 1 as 1.0 where a float is due, for 1 and 1.0 are one cell."""
    if isinstance(value, list | dict):
        raise table.error(f"`{key}={value!r}`: must be a single value.")
    if isinstance(value, int | float) and not -_LARGEST < value < _LARGEST:
        raise table.error(f"`{key}={value!r}`: must be a finite number that fits in 64 bits.")
    return float(value) if kind is float and type(value) is int else value


def _checked_seeds(place: str, seeds: Any) -> tuple[int, ...]:
    if type(seeds) is int and 1 <= seeds <= _N_SEEDS:
        return tuple(range(seeds))
    listed = tuple(seeds) if isinstance(seeds, list | tuple | range | set) else ()
    if not listed or not all(type(seed) is int and 0 <= seed < _N_SEEDS for seed in listed):
        what = "a number of at least 1, or a list of integers in [0, 2**32)"
        raise ConfigError(f"{place}: `seeds={seeds!r}`: must be {what}.")
    if len(set(listed)) < len(listed):
        raise ConfigError(f"{place}: `seeds={seeds!r}`: a seed occurs twice.")
    return listed


def _check_name(place: str, what: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        raise ConfigError(f"{place}: unknown {what} `{name}`; {nearest(name, known)}")


def nearest(name: str, known: Collection[str]) -> str:
    """Return the nearest known name, whatever its case, or all of them."""
    plain = {other.lower(): other for other in known}
    near = difflib.get_close_matches(name.lower(), plain, n=1)
    return f"did you mean `{plain[near[0]]}`?" if near else f"there are: {', '.join(known) or 'none'}."


def _called(kind: type) -> str:
    return {int: "an integer", float: "a finite number", str: "a text", bool: "true or false"}[kind]
