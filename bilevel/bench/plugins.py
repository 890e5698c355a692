"""Solvers and problems by name: those of the package, and anybody's as ``module:name``, which imports the module.

Only an experiment that is to be run imports anything. What is read from a store never does.
"""

import difflib
import hashlib
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeAlias

from bilevel.problems import PROBLEMS, BilevelProblem
from bilevel.solvers import SOLVERS, SolverBase

Builder: TypeAlias = Callable[..., BilevelProblem]
_found: dict[str, Any] = {}  # by name: what was handed over or imported in this process


def find_solver(name: str) -> type[SolverBase]:
    """Return the class of a solver; ``module:Class`` imports the module."""
    if not is_foreign(name):
        check_name("solver", name, SOLVERS)
        return SOLVERS[name]
    found = _find(name)
    if not (isinstance(found, type) and issubclass(found, SolverBase) and not inspect.isabstract(found)):
        raise ValueError(f"`{name}` is no solver; it must be a class with `@bilevel.solvers.solver` and all methods.")
    return found


def find_problem(name: str) -> Builder:
    """Return the function that builds a problem; ``module:function`` imports the module."""
    if not is_foreign(name):
        check_name("problem", name, PROBLEMS)
        return PROBLEMS[name]
    found = _find(name)
    if not callable(found):
        raise ValueError(f"`{name}` is no function; it must be one that returns a BilevelProblem.")
    return found


def known_solver(name: str) -> type[SolverBase] | None:
    """Return the class of a solver, where it is at hand: nothing is imported."""
    return SOLVERS.get(name) or _found.get(name)


def is_foreign(name: str) -> bool:
    """Tell whether a name is of somebody's module."""
    return ":" in name


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
    _found[name] = thing
    return name


def digest(name: str) -> str:
    """Return a digest of the file that somebody's solver or problem is in; of its own text alone in a notebook."""
    found = _find(name)
    try:
        file = inspect.getsourcefile(sys.modules[found.__module__])
        source = Path(file).read_bytes() if file else inspect.getsource(found).encode()
    except (KeyError, OSError, TypeError):
        return "unknown"
    return hashlib.sha256(source).hexdigest()[:12]


def _find(name: str) -> Any:
    if name in _found:
        return _found[name]
    module_name, _, path = name.partition(":")
    if not re.fullmatch(r"[\w.]+:\w+(\.\w+)*", name):
        raise ValueError(f"`{name}`: must be a name of the package, or `module:name`.")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name.partition(".")[0]:
            raise ValueError(f"`{name}`: importing `{module_name}` failed: {error}.") from error
        where = "it must be installed, or a file of the current folder"
        raise ValueError(f"`{name}`: there is no module `{module_name}`; {where}.") from error
    except Exception as error:  # it is the user's program
        raise ValueError(f"`{name}`: importing `{module_name}` failed: {type(error).__name__}: {error}.") from error
    for part in path.split("."):
        if not hasattr(found, part):
            names = [one for one in vars(found) if not one.startswith("_")]
            raise ValueError(f"`{name}`: `{module_name}` has no `{part}`; {suggest(part, names)}")
        found = getattr(found, part)
    _found[name] = found
    return found


def check_name(what: str, name: str, known: Collection[str]) -> None:
    """Refuse a name that is not known."""
    if name not in known:
        raise ValueError(f"unknown {what} `{name}`; {suggest(name, known)}")


def suggest(name: str, known: Collection[str]) -> str:
    """Return the nearest known name, whatever its case, or all of them."""
    plain = {other.lower(): other for other in known}
    near = difflib.get_close_matches(name.lower(), plain, n=1)
    return f"did you mean `{plain[near[0]]}`?" if near else f"there are: {', '.join(known) or 'none'}."
