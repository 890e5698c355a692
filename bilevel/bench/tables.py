"""The tables of a config file, checked one by one; what is wrong is told with its place."""

import functools
import inspect
import re
import tomllib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeAlias, get_args, get_type_hints

import msgspec
from msgspec import Meta, Struct

from bilevel._io import read_bounded
from bilevel.bench.plugins import Builder, check_name, suggest

MOST_BYTES, MOST_CELLS = 2**18, 10**6  # of a file, and of an experiment
_MOST_PARTS, _MOST_LETTERS = 16, 1000  # of a key
_PART = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+"""
_LONG_KEY = re.compile(rf"[\w-]{{{_MOST_LETTERS}}}|(?<![\w-]){_PART}(?:\.[ \t]*+{_PART}){{{_MOST_PARTS}}}")
FOLDER = Path(__file__).parent / "configs"  # where a bare name is looked up


class ConfigError(ValueError):
    """An experiment that cannot be run; the message names the file and the place in it."""


# The tables of a file. A description completes the sentence "must be ...".
_SeedsEntry: TypeAlias = Annotated[
    Annotated[int, Meta(ge=1, le=2**32)] | Annotated[list[Annotated[int, Meta(ge=0, lt=2**32)]], Meta(min_length=1)],
    Meta(description="a number of at least 1, or a list of integers in [0, 2**32)"),
]
_Cost: TypeAlias = Annotated[Annotated[float, Meta(gt=0, lt=2**63)] | None, Meta(description="a finite number above 0")]
_CostOrOff: TypeAlias = Annotated[
    Annotated[float, Meta(ge=0, lt=2**63)] | None, Meta(description="a finite number above 0, or 0 for no timing phase")
]


class FileTable(Struct, forbid_unknown_fields=True):
    """A file."""

    name: Annotated[str, Meta(pattern=r"^[\w-]*[^\W_][\w-]*\Z", description="letters, digits, - and _")]
    metric: Annotated[str, Meta(description="the name of a metric")]
    seeds: _SeedsEntry
    new_problem_per_seed: Annotated[bool, Meta(description="true or false")] = False
    exact: Annotated[bool, Meta(description="true or false")] = True
    problem: Any = None
    budget: Any = None
    solvers: Any = None


class BudgetTable(Struct, forbid_unknown_fields=True):
    """What a run may cost."""

    calls: Annotated[Annotated[int, Meta(ge=1, le=2**63 - 1)] | None, Meta(description="an integer above 0")] = None
    epochs: _Cost = None
    seconds: _CostOrOff = None
    timing_epochs: _Cost = None


@functools.cache
def arguments_table(builder: Builder) -> Any:
    """Return the table of a problem's arguments."""
    words = {int: "an integer", float: "a finite number", str: "a text", bool: "true or false"}
    hints = get_type_hints(builder)
    fields: list[tuple[Any, ...]] = []
    for name, parameter in inspect.signature(builder).parameters.items():
        default, hint = parameter.default, hints.get(name, Any)
        word = words.get((*get_args(hint), hint)[0])
        meaning = Meta(description=word or "given")
        kind = Annotated[Any, meaning] if word is None else Annotated[hint, meaning]
        if default is parameter.empty and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            fields.append((name, kind))
        elif default is None or type(default) in words:  # others have no place in a config
            fields.append((name, kind, default))
    return msgspec.defstruct("Arguments", fields, kw_only=True, forbid_unknown_fields=True)


@contextmanager
def at(place: str) -> Iterator[None]:
    """Put the place in front of what is wrong there."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{place}: {error}") from error


def convert(values: dict[str, Any], table: Any, what: str = "key") -> Any:
    """Return the values as this table has them, refusing keys that it does not have."""
    for key in values:
        check_name(what, key, table.__struct_fields__)
    try:
        return msgspec.convert(values, table)
    except msgspec.ValidationError as error:
        # It ends with the field that is missing, or with the path to what is wrong: `$.seeds[1]`.
        key = re.findall(r"`(?:\$\.)?(\w+)[^`]*`", str(error))[-1]
        must = f"must be {get_type_hints(table, include_extras=True)[key].__metadata__[0].description}."
        found = f"`{key}={values[key]!r}`:" if key in values else f"`{key}` is missing; it"
        raise ValueError(f"{found} {must}") from None


def read_table(file: Path) -> FileTable:
    """Return the whole of a TOML file."""
    try:
        content = read_bounded(file, MOST_BYTES)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    try:
        text = content.decode()
        # The memory of the parser grows with the square of the parts of a key: `a.a.a = 1` has three.
        if long := _LONG_KEY.search(text):
            limits = f"at most {_MOST_PARTS} parts of at most {_MOST_LETTERS} letters are read"
            raise ValueError(f"a key begins with `{long.group()[:40]}`, and {limits}")
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not TOML: {error}") from error
    converted: FileTable = convert(values, FileTable)
    return converted


def find_config(path: str | Path) -> Path:
    """Return the file that `load_config` reads."""
    path = Path(path)
    bare = len(path.parts) == 1 and not path.suffix
    file = FOLDER / f"{path}.toml" if bare else path
    if bare and not file.exists():
        here = Path(f"{path}.toml")
        way = f"did you mean `{here}`?" if here.exists() else suggest(str(path), [one.stem for one in list_configs()])
        raise ConfigError(f"{path}: no such config in the package; {way}")
    if not file.exists():
        raise ConfigError(f"{file}: no such file; {suggest(str(path), sorted(map(str, file.parent.glob('*.toml'))))}")
    return file


def list_configs() -> list[Path]:
    """Return the experiments that travel with the package."""
    return sorted(FOLDER.glob("*.toml"))


def check_cells(n_settings: int, seeds: int | Collection[int] = 1) -> None:
    """Refuse more cells than can be listed."""
    n_seeds = seeds if isinstance(seeds, int) else len(seeds)
    if n_settings * n_seeds > MOST_CELLS:
        what = f"{n_settings:,} settings with {n_seeds:,} seed{'s' * (n_seeds > 1)} are {n_settings * n_seeds:,} cells"
        raise ValueError(f"{what}, more than {MOST_CELLS:,}; give fewer seeds, or shorter lists of values.")


def list_seeds(seeds: int | list[int]) -> tuple[int, ...]:
    """Return the seeds, given one by one or by their number."""
    if isinstance(seeds, list) and len(set(seeds)) < len(seeds):
        raise ValueError(f"`seeds={seeds!r}`: a seed occurs twice.")
    return tuple(seeds if isinstance(seeds, list) else range(seeds))
