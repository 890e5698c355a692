"""An experiment: the config that states it, and the cells (single runs) that follow from it.

A config is a TOML file, or a dict with the same tables. It is checked in full before anything runs, and each error
names the place in the file. Solvers and problems are named as in the package, or as ``module:name``, which imports the
module. Only loading a config imports modules: reading a store never does.
"""

import difflib
import functools
import hashlib
import importlib
import inspect
import itertools
import json
import math
import re
import sys
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias, get_args, get_type_hints

import msgspec
from msgspec import Meta, Struct

from bilevel._core.compilation import as_float_dtype
from bilevel._core.files import read_bounded
from bilevel.engine.metrics import METRICS
from bilevel.engine.metrics import metric as describe
from bilevel.problems import PROBLEMS, BilevelProblem
from bilevel.solvers import SOLVERS, SolverBase

Pairs: TypeAlias = tuple[tuple[str, Any], ...]  # names and values, sorted
Seeds: TypeAlias = int | Collection[int]  # their number, or the seeds themselves
Builder: TypeAlias = Callable[..., BilevelProblem]
SWEEP, TIMING = "sweep", "timing"  # the phases of an experiment
ALL_SOLVERS = "*"  # as the name of a solver: the grid is used for every solver but those that need constants
FOLDER = Path(__file__).parent / "configs"  # where a bare name is looked up
MOST_BYTES, MOST_CELLS = 2**18, 10**6  # of a file, and of an experiment
_TABLES = ("problem", "budget", "solvers")
# The memory of the TOML parser grows with the square of the number of parts of a key: `a.a.a = 1` has three.
_MOST_PARTS, _MOST_LETTERS = 16, 1000
_PART = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+"""
_LONG_KEY = re.compile(rf"[\w-]{{{_MOST_LETTERS}}}|(?<![\w-]){_PART}(?:\.[ \t]*+{_PART}){{{_MOST_PARTS}}}")


class ConfigError(ValueError):
    """An experiment that cannot be run; the message names the file and the place in it."""


# Solvers and problems by name.

_user_objects: dict[str, Any] = {}  # solvers and problems given as objects or imported in this process, by name


def find_solver(name: str) -> type[SolverBase]:
    """Return the class of a solver; the name ``module:Class`` imports the module."""
    found = _find("solver", name, SOLVERS)
    if not (isinstance(found, type) and issubclass(found, SolverBase) and not inspect.isabstract(found)):
        raise ValueError(f"`{name}` is no solver; it must be a class with `@bilevel.solvers.solver` and all methods.")
    return found


def find_problem(name: str) -> Builder:
    """Return the function that builds a problem; the name ``module:function`` imports the module."""
    found = _find("problem", name, PROBLEMS)
    if not callable(found):
        raise ValueError(f"`{name}` is no function; it must be one that returns a BilevelProblem.")
    return found


def find_loaded_solver(name: str) -> type[SolverBase] | None:
    """Return the class of a solver of the package, or of a user if it has been imported already."""
    return SOLVERS.get(name) or _user_objects.get(name)


def name_of(thing: Any) -> str:
    """Return the name of a solver's class or a problem's function, under which this process finds it again."""
    if isinstance(thing, str):
        return thing
    if not callable(thing) or not hasattr(thing, "__qualname__"):
        what = "a name, the class of a solver, or a function that returns a problem"
        raise ValueError(f"`name={thing!r}`: must be {what}.")
    if thing in (*SOLVERS.values(), *PROBLEMS.values()):
        return str(thing.__name__)
    name = f"{thing.__module__}:{thing.__qualname__}"
    _user_objects[name] = thing
    return name


def digest_source(name: str) -> str:
    """Return a digest of the file that defines a user's solver or problem; in a notebook, of its own source."""
    found = _import(name)
    try:
        file = inspect.getsourcefile(sys.modules[found.__module__])
        source = Path(file).read_bytes() if file else inspect.getsource(found).encode()
    except (KeyError, OSError, TypeError):
        return "unknown"
    return hashlib.sha256(source).hexdigest()[:12]


def _find(what: str, name: str, known: Mapping[str, Any]) -> Any:
    if ":" in name:
        return _import(name)
    check_name(what, name, known)
    return known[name]


def _import(name: str) -> Any:
    if name in _user_objects:
        return _user_objects[name]
    if not re.fullmatch(r"[\w.]+:\w+(\.\w+)*", name):
        raise ValueError(f"`{name}`: must be a name of the package, or `module:name`.")
    module_name, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # whatever the user's module raises
        problem = f"importing `{module_name}` failed: {type(error).__name__}: {error}"
        if isinstance(error, ModuleNotFoundError) and error.name == module_name.partition(".")[0]:
            problem = f"there is no module `{module_name}`; it must be installed, or a file of the current folder"
        raise ValueError(f"`{name}`: {problem}.") from error
    for part in path.split("."):
        if not hasattr(found, part):
            names = [one for one in vars(found) if not one.startswith("_")]
            raise ValueError(f"`{name}`: `{module_name}` has no `{part}`; {suggest(part, names)}")
        found = getattr(found, part)
    _user_objects[name] = found
    return found


def check_name(what: str, name: str, known: Collection[str]) -> None:
    """Raise ValueError, with a suggestion, for a name that is not known."""
    if name not in known:
        raise ValueError(f"unknown {what} `{name}`; {suggest(name, known)}")


def suggest(name: str, known: Collection[str]) -> str:
    """Return the nearest known name, ignoring case, or all of them."""
    by_lower_case = {other.lower(): other for other in known}
    nearest = difflib.get_close_matches(name.lower(), by_lower_case, n=1, cutoff=0.5)
    return f"did you mean `{by_lower_case[nearest[0]]}`?" if nearest else f"there are: {', '.join(known) or 'none'}."


@functools.cache
def parameter_types(solver: type[SolverBase]) -> dict[str, type]:
    """Return the type of each hyperparameter; for optional ones, that of values other than None."""
    hints = get_type_hints(solver)
    return {field.name: (*get_args(hints[field.name]), hints[field.name])[0] for field in fields(solver)}


def build_problem(problem: str, arguments: Pairs) -> BilevelProblem:
    """Return the problem with this name and these arguments; the last two problems are kept in memory."""
    return _build(find_problem(problem), problem, arguments)


@functools.lru_cache(maxsize=2)
def _build(builder: Builder, problem: str, arguments: Pairs) -> BilevelProblem:
    # The builder is part of the key, since a notebook may define another function with the same name.
    built = builder(**dict(arguments))
    if not isinstance(built, BilevelProblem):
        raise ValueError(f"`{problem}` returned {type(built).__name__}; it must return a BilevelProblem.")
    return built


# Settings and cells.

_Cost: TypeAlias = Annotated[Annotated[float, Meta(gt=0, lt=2**63)] | None, Meta(description="a finite number above 0")]
_CostOrOff: TypeAlias = Annotated[
    Annotated[float, Meta(ge=0, lt=2**63)] | None, Meta(description="a finite number above 0, or 0 for no timing phase")
]


class GridSetting(NamedTuple):
    """A solver with hyperparameters from a grid of the config.

    `period_fraction` is the fraction a in the period q = max(1, floor(a (n + m) / b)), which depends on the data size.
    """

    solver: str
    parameters: Pairs
    period_fraction: float | None = None
    columns: tuple[str, ...] = ()  # of the table of results; settings are selected separately in each

    def pairs(self, n_rows: int) -> Pairs:
        """Return the parameters on a problem with n + m rows, with the period filled in."""
        if self.period_fraction is None:
            return self.parameters
        period = max(1, math.floor(self.period_fraction * n_rows / dict(self.parameters)["batch_size"]))
        return tuple(sorted((*self.parameters, ("period", period))))


@dataclass(frozen=True)
class Cell:
    """One run, fully specified: a solver with its hyperparameters and a seed, on a problem, within a budget."""

    experiment: str
    problem: str  # a name in ``bilevel.problems.PROBLEMS``, or ``module:function``
    problem_arguments: Pairs
    solver: str  # a name in ``bilevel.SOLVERS``, or ``module:Class``
    parameters: Pairs
    seed: int  # of the batches
    phase: str = SWEEP  # many cells run in one program; in the phase TIMING each runs alone on the machine
    max_calls: int | None = None
    max_seconds: float | None = None  # at least one of the two limits is given
    exact: bool = True  # evaluate h and its gradient
    columns: tuple[str, ...] = ()  # of the config, that contain the setting; not part of the identity of a cell

    @functools.cached_property
    def id(self) -> str:
        """A digest of everything that is run; it is the same on every machine."""
        stated = asdict(self)
        stated |= {"problem_arguments": dict(self.problem_arguments), "parameters": dict(self.parameters)}
        del stated["columns"]
        if self.exact:  # stores from before this field existed stay valid
            del stated["exact"]
        return hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def digests(self) -> list[str]:
        """The name of a user-defined solver or problem with a digest of its source, which is not part of the id."""
        return [f"{name} {digest_source(name)}" for name in (self.solver, self.problem) if ":" in name]


class CellBudget(Struct, frozen=True, forbid_unknown_fields=True):
    """The limits of a run, as in the table [budget] of a config."""

    calls: Annotated[Annotated[int, Meta(ge=1, le=2**63 - 1)] | None, Meta(description="an integer above 0")] = None
    epochs: _Cost = None  # exactly one of this and `calls` is given
    seconds: _CostOrOff = None  # additional limit in the timing phase, if given
    timing_epochs: _Cost = None  # of the timing phase, if different from the sweep

    def __str__(self) -> str:
        sweep = f"{self.epochs:g} epochs" if self.epochs is not None else f"{self.calls:,} oracle calls"
        if not self.seconds:
            return f"{sweep} for each run"
        epochs = "" if self.timing_epochs is None else f"{self.timing_epochs:g} epochs and "
        return f"{sweep} for each run, and at most {epochs}{self.seconds:g} seconds in the timing phase"


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A problem, and the settings to compare on it."""

    name: str
    metric: str  # selects the settings, by its value at the end of the sweep; not a metric of test rows
    budget: CellBudget
    seeds: tuple[int, ...]  # of the batches
    new_problem_per_seed: bool  # each seed is also the seed of the problem's data
    problem: str  # a name in ``bilevel.problems.PROBLEMS``, or ``module:function``
    problem_arguments: Pairs
    settings: tuple[GridSetting, ...]  # the union of the grids
    exact: bool  # evaluate h and its gradient
    text: bytes = b""  # the config as a TOML file

    @property
    def solvers(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(setting.solver for setting in self.settings))

    def narrow(self, only: Collection[str] | None = None, seeds: Seeds | None = None) -> "Experiment":
        """Return the experiment with some of its solvers, and other seeds, if these are given."""
        with at(f"`{self.name}`"):
            for name in only or ():
                check_name("solver", name, self.solvers)
            settings = tuple(one for one in self.settings if only is None or one.solver in only)
            if seeds is None:
                return replace(self, settings=settings)
            _check_cells(len(settings), seeds)
            listed = _convert({"seeds": seeds if isinstance(seeds, int) else list(seeds)}, SeedsTable)
            return replace(self, settings=settings, seeds=_list_seeds(listed))

    def cells(self, n_inner: int, n_outer: int) -> tuple[Cell, ...]:
        """Return the cells of the sweep on a problem of this size."""
        n_rows = n_inner + n_outer
        # Different fractions may give the same period, so runs are merged and belong to the columns of both.
        runs: dict[tuple[str, Pairs], tuple[str, ...]] = {}
        for setting in self.settings:
            run = setting.solver, setting.pairs(n_rows)
            runs[run] = tuple(dict.fromkeys((*runs.get(run, ()), *setting.columns)))
        return tuple(
            self._cell(*run, seed, SWEEP, n_rows, columns) for run, columns in runs.items() for seed in self.seeds
        )

    def timing_cells(self, settings: Iterable[tuple[str, Pairs]], n_inner: int, n_outer: int) -> tuple[Cell, ...]:
        """Return the cells that time these settings, (solver, parameters) each; the solvers alternate."""
        if not self.budget.seconds:
            raise ConfigError(f"`{self.name}` has no timing phase; give `seconds` in [budget].")
        runs = [(name, _list_parameters(find_solver(name)(**dict(pairs)))) for name, pairs in settings]
        return tuple(self._cell(*run, seed, TIMING, n_inner + n_outer) for seed in self.seeds for run in runs)

    def _cell(
        self, solver: str, pairs: Pairs, seed: int, phase: str, n_rows: int, columns: tuple[str, ...] = ()
    ) -> Cell:
        budget, is_timed = self.budget, phase == TIMING
        epochs = (is_timed and budget.timing_epochs) or budget.epochs
        max_calls = math.floor(epochs * n_rows) if epochs is not None else budget.calls
        limits = max_calls, budget.seconds if is_timed else None
        arguments = dict(self.problem_arguments) | ({"seed": seed} if self.new_problem_per_seed else {})
        problem = self.problem, tuple(sorted(arguments.items()))
        return Cell(self.name, *problem, solver, pairs, seed, phase, *limits, self.exact, columns)


def _list_parameters(solver: SolverBase) -> Pairs:
    """Return the hyperparameters that have a value, including defaults, which a config may or may not write down."""
    return tuple(sorted((name, value) for name, value in solver.parameters().items() if value is not None))


def _check_cells(n_settings: int, seeds: Seeds = 1) -> None:
    n_seeds = seeds if isinstance(seeds, int) else len(seeds)
    if n_settings * n_seeds > MOST_CELLS:
        what = f"{n_settings:,} settings with {n_seeds:,} seed{'s' * (n_seeds > 1)} are {n_settings * n_seeds:,} cells"
        raise ValueError(f"{what}, more than {MOST_CELLS:,}; give fewer seeds, or shorter lists of values.")


# The tables of a config. Each description completes the sentence "must be ...".


class SeedsTable(Struct, kw_only=True, forbid_unknown_fields=True):
    """The seeds of an experiment."""

    seeds: Annotated[
        Annotated[int, Meta(ge=1, le=2**32)]
        | Annotated[list[Annotated[int, Meta(ge=0, lt=2**32)]], Meta(min_length=1)],
        Meta(description="a number of at least 1, or a list of integers in [0, 2**32)"),
    ]


class FileTable(SeedsTable, kw_only=True, forbid_unknown_fields=True):
    """The top level of a config."""

    name: Annotated[str, Meta(pattern=r"^[\w-]*[^\W_][\w-]*\Z", description="letters, digits, - and _")]
    metric: Annotated[str, Meta(description="the name of a metric")]
    new_problem_per_seed: Annotated[bool, Meta(description="true or false")] = False
    exact: Annotated[bool, Meta(description="true or false")] = True
    problem: Annotated[dict[str, Any], Meta(description="a table [problem]")]
    budget: Annotated[dict[str, Any], Meta(description="a table [budget]")]
    solvers: Annotated[list[dict[str, Any]], Meta(min_length=1, description="tables [[solvers]], one for each solver")]


def _list_seeds(table: SeedsTable) -> tuple[int, ...]:
    seeds = table.seeds
    if isinstance(seeds, list) and len(set(seeds)) < len(seeds):
        raise ValueError(f"`seeds={seeds!r}`: a seed occurs twice.")
    return tuple(seeds if isinstance(seeds, list) else range(seeds))


@functools.cache
def _arguments_table(builder: Builder) -> Any:
    """Return the table of a problem's arguments."""
    words = {int: "an integer", float: "a finite number", str: "a text", bool: "true or false"}
    hints = get_type_hints(builder)
    entries: list[tuple[Any, ...]] = []
    for name, parameter in inspect.signature(builder).parameters.items():
        default, hint = parameter.default, hints.get(name, Any)
        word = words.get((*get_args(hint), hint)[0])
        meaning = Meta(description=word or "given")
        kind = Annotated[Any, meaning] if word is None else Annotated[hint, meaning]
        if default is parameter.empty and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            entries.append((name, kind))
        elif default is None or type(default) in words:  # arguments of other types cannot be given in a config
            entries.append((name, kind, default))
    return msgspec.defstruct("Arguments", entries, kw_only=True, forbid_unknown_fields=True)


@contextmanager
def at(place: str) -> Iterator[None]:
    """Turn errors of the block into a ConfigError whose message begins with the place."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{place}: {error}") from error


def _convert(values: dict[str, Any], table: Any, what: str = "key") -> Any:
    """Return the values as an instance of a table; unknown keys and values of another type raise ValueError."""
    for key in values:
        check_name(what, key, table.__struct_fields__)
    try:
        return msgspec.convert(values, table)
    except msgspec.ValidationError as error:
        # Its message ends with the missing field, or with the path to the wrong value: `$.seeds[1]`.
        key = re.findall(r"`(?:\$\.)?(\w+)[^`]*`", str(error))[-1]
        must = f"must be {get_type_hints(table, include_extras=True)[key].__metadata__[0].description}."
        found = f"`{key}={values[key]!r}`:" if key in values else f"`{key}` is missing; it"
        raise ValueError(f"{found} {must}") from None


def list_configs() -> list[Path]:
    """Return the configs of the package."""
    return sorted(FOLDER.glob("*.toml"))


def find_config(path: str | Path) -> Path:
    """Return the file of a config, given as a path or as the bare name of a config of the package."""
    path = Path(path)
    is_bare = len(path.parts) == 1 and not path.suffix
    file = FOLDER / f"{path}.toml" if is_bare else path
    if not file.exists():
        known = [*(one.stem for one in list_configs() if is_bare), *sorted(map(str, path.parent.glob("*.toml")))]
        what = "no such config in the package" if is_bare else "no such file"
        raise ConfigError(f"{path}: {what}; {suggest(str(path), known)}")
    return file


def load_config(source: str | Path | Mapping[str, Any]) -> Experiment:
    """Return an experiment, and import the solvers and problems that it names as ``module:name``.

    `source` is a TOML file, the bare name of a config of the package, or a dict with the tables of such a file. In a
    dict, the name of a solver may be its class, and that of a problem the function that builds it.
    """
    if isinstance(source, Mapping):
        with at("`config`"):
            return replace(_parse(_convert({**source}, FileTable)), text=_as_toml(source))
    file = find_config(source)
    with at(str(file)):
        text = _read_file(file)
        return replace(_parse(_parse_toml(text)), text=text)


def _as_toml(config: Mapping[str, Any]) -> bytes:
    """Return the text of a valid config, with names instead of classes and functions."""
    tables = [("[problem]", config["problem"]), ("[budget]", config["budget"])]
    tables += [("[[solvers]]", entry) for entry in config["solvers"]]
    text = _list_entries({name: value for name, value in config.items() if name not in _TABLES})
    return "\n".join([text, *(f"{head}\n{_list_entries(table)}" for head, table in tables)]).encode()


def _list_entries(table: Mapping[str, Any]) -> str:
    # JSON and TOML write numbers, texts and lists in the same way.
    named = {name: name_of(value) if name == "name" else value for name, value in table.items()}
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in named.items())


def read_config(path: Path) -> FileTable:
    """Return the tables of a TOML file; nothing that it names is imported."""
    with at(str(path)):
        return _parse_toml(_read_file(path))


def _read_file(path: Path) -> bytes:
    try:
        return read_bounded(path, MOST_BYTES)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot be read: {getattr(error, 'strerror', None) or error}.") from error


def _parse_toml(content: bytes) -> FileTable:
    try:
        text = content.decode()
        if long := _LONG_KEY.search(text):
            limits = f"at most {_MOST_PARTS} parts of at most {_MOST_LETTERS} letters are read"
            raise ValueError(f"a key begins with `{long.group()[:40]}`, and {limits}")
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not TOML: {error}") from error
    converted: FileTable = _convert(values, FileTable)
    return converted


def _parse(file: FileTable) -> Experiment:
    problem, arguments = _parse_problem(file.problem, file.new_problem_per_seed)
    if file.metric not in METRICS:  # it may be a metric of the problem itself
        check_name("metric", file.metric, (*METRICS, *build_problem(problem, arguments).metrics))
    check_selects(file.metric)
    budget = parse_budget(file.budget)
    settings: dict[GridSetting, None] = {}
    for number, values in enumerate(file.solvers, start=1):
        with _named(f"[[solvers]] {number}", values, "solver", (*SOLVERS, ALL_SOLVERS)) as (name, grid):
            columns = _parse_columns(grid.pop("column", []))
            every = [one for one, cls in SOLVERS.items() if not cls.needs_constants]
            for one in every if name == ALL_SOLVERS else (name,):
                settings |= dict.fromkeys(_parse_grid(one, grid, columns))
                _check_cells(len(settings), file.seeds)
    return Experiment(
        name=file.name,
        metric=file.metric,
        budget=budget,
        seeds=_list_seeds(file),
        new_problem_per_seed=file.new_problem_per_seed,
        problem=problem,
        problem_arguments=arguments,
        settings=tuple(settings),
        exact=file.exact,
    )


def parse_budget(values: dict[str, Any]) -> CellBudget:
    """Return the limits in the table [budget]."""
    with at("[budget]"):
        budget: CellBudget = _convert(values, CellBudget)
        if (budget.calls is None) == (budget.epochs is None):
            raise ValueError("give exactly one of `calls` and `epochs`.")
        if budget.timing_epochs is not None and not budget.seconds:
            raise ValueError("`timing_epochs` needs `seconds`: without them there is no timing phase.")
        return budget


def check_selects(metric: str) -> None:
    """Raise ValueError for a metric of test rows: if it selected settings, these would be validation rows."""
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
        arguments = msgspec.structs.asdict(_convert(given, _arguments_table(find_problem(name)), "argument"))
        if new_per_seed and "seed" not in arguments:
            raise ValueError("`new_problem_per_seed = true` needs a problem with an argument `seed`.")
        # The dtype is always part of a cell, so that it does not depend on jax_enable_x64.
        if "dtype" in arguments:
            arguments["dtype"] = as_float_dtype(arguments["dtype"] or "float32").name
    return name, tuple(sorted(arguments.items()))


def _parse_grid(name: str, grid: dict[str, Any], columns: tuple[str, ...]) -> Iterator[GridSetting]:
    """Yield the settings of a grid; constructing the solver checks the values."""
    solver = find_solver(name)
    types = parameter_types(solver)
    if "period_fraction" in grid and "period" in grid:
        raise ValueError("`period` and `period_fraction` exclude each other; leave one out.")
    for key in grid:
        check_name("parameter", key, (*types, *(["period_fraction"] if "period" in types else [])))
    lists = [_list_values(key, value, types.get(key, float)) for key, value in grid.items()]
    _check_cells(math.prod(map(len, lists)))
    for values in itertools.product(*lists):
        parameters = dict(zip(grid, values, strict=True))
        fraction = parameters.pop("period_fraction", None)
        if fraction is not None and not (type(fraction) is float and fraction > 0):
            raise ValueError(f"`period_fraction={fraction!r}`: must be a finite number above 0.")
        yield GridSetting(name, _list_parameters(solver(**parameters)), fraction, columns)


def _list_values(key: str, value: Any, kind: type = float) -> list[Any]:
    """Return the values of a parameter; integers become floats where the type is float, so that 1 and 1.0 are equal."""
    values = value if isinstance(value, list) else [value]
    if not values:
        raise ValueError(f"`{key}=[]`: an empty list leaves an empty grid; give a value or leave it out.")
    for one in values:
        if isinstance(one, list | dict):
            raise ValueError(f"`{key}={one!r}`: must be a single value.")
        if isinstance(one, int | float) and not -(2**63) < one < 2**63:  # the range of a column of the store
            raise ValueError(f"`{key}={one!r}`: must be a finite number that fits in 64 bits.")
    return [float(one) if kind is float and type(one) is int else one for one in values]


@contextmanager
def _named(place: str, values: dict[str, Any], what: str, known: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yield the name in a table and its other entries; errors of the block are reported with the place and the name."""
    with at(place):
        if "name" not in values:
            raise ValueError(f"`name` is missing; it must be the name of a {what}.")
        name = name_of(values["name"])
        if ":" not in name:
            check_name(what, name, known)
    with at(f"{place} ({name})"):
        yield name, {key: value for key, value in values.items() if key != "name"}
