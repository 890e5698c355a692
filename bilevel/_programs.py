"""Compiled programs: a bounded number stays in memory, and a folder may keep them from one process to the next.

A function under `jax.jit` keeps each of its programs, and the losses and shapes they were compiled for, as long as the
function exists. For a function of a module that is the life of the process. The programs of one run take about twenty
megabytes and some hundred memory maps, of which Linux allows a process 65 530, so a loop over problems would end in a
crash of XLA. `compiled` therefore gives every kind of arguments a jitted function of its own, and frees the one that
was not used for longest when there are too many. Programs of other libraries and of the user are never touched.
"""

import functools
import hashlib
import inspect
import os
import platform
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import RLock
from typing import Any, Generic, TypeVar

import jax
import numpy as np

from bilevel._io import cache_folder

MAX_PROGRAMS = 64  # of all functions together; a run has five to ten
_programs: OrderedDict[Hashable, Any] = OrderedDict()  # jitted functions, the least recently used first
_lock = RLock()
_MAX_FOLDER_BYTES = 2**29
T = TypeVar("T")


class Compiled(Generic[T]):
    """A function that is compiled when it is called, and whose least recently used programs are freed.

    Parameters
    ----------
    function : the function, of pytrees of arrays
    static_argnames : names of arguments that are compile-time constants
    options : returns the compiler options from the same arguments as ``function``; by default there are none
    """

    def __init__(
        self,
        function: Callable[..., T],
        static_argnames: Sequence[str] = (),
        options: Callable[..., dict[str, Any]] | None = None,
    ) -> None:
        functools.update_wrapper(self, function)
        self._function, self._static, self._options = function, static_argnames, options
        self._signature = inspect.signature(function)

    def __call__(self, *arguments: Any, **keywords: Any) -> T:
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((arguments, keywords))):
            return self._function(*arguments, **keywords)  # part of a larger program
        program, leaves = self._program(arguments, keywords)
        return program(leaves)

    def lower(self, *arguments: Any, **keywords: Any) -> Any:
        """Return the program for these arguments before XLA compiles it, as `jax.jit(function).lower` does."""
        program, leaves = self._program(arguments, keywords)
        return program.lower(leaves)

    def _program(self, arguments: Any, keywords: Any) -> tuple[Any, list[Any]]:
        options = {} if self._options is None else self._options(*arguments, **keywords)
        named = self._signature.bind(*arguments, **keywords).arguments
        constants = {name: named.pop(name) for name in self._static}
        leaves, structure = jax.tree.flatten(named)
        shapes = tuple((np.shape(leaf), getattr(leaf, "dtype", type(leaf))) for leaf in leaves)
        kind = self, structure, shapes, tuple(constants.items()), tuple(options.items())
        with _lock:
            if kind in _programs:
                _programs.move_to_end(kind)
            else:
                _programs[kind] = self._compile_later(structure, constants, options)
            program = _programs[kind]
            freed = [_programs.popitem(last=False)[1] for _ in range(len(_programs) - MAX_PROGRAMS)]
        for old in freed:
            old.clear_cache()
        return program, leaves

    def _compile_later(self, structure: Any, constants: dict[str, Any], options: dict[str, Any]) -> Any:
        # JAX refers to this function weakly, and frees what it compiled when the function is freed. Structures, which
        # may hold losses and what these refer to, are not among the arguments, because JAX keeps those longer.
        def program(leaves: list[Any]) -> T:
            named = jax.tree.unflatten(structure, leaves) | constants
            bound = inspect.BoundArguments(self._signature, named)
            return self._function(*bound.args, **bound.kwargs)

        program.__name__ = self.__name__  # type: ignore[attr-defined]
        return jax.jit(program, compiler_options=options)


def compiled(*static_argnames: str) -> Callable[[Callable[..., T]], Compiled[T]]:
    """Return a decorator that makes a function `Compiled`; the named arguments are compile-time constants."""
    return lambda function: Compiled(function, static_argnames)


def keep_programs(folder: str | Path | None = None) -> Path:
    """Have JAX keep compiled programs in a folder, so that the next process need not compile them again.

    This changes settings of JAX for the whole process, also for programs of others, so the library never does it by
    itself. A folder that you have given to JAX already, for example in the environment variable
    ``JAX_COMPILATION_CACHE_DIR``, stays. The oldest programs are removed from a folder of more than 512 MB.

    Parameters
    ----------
    folder : where to keep them; by default in the cache folder of this user, in one folder per kind of processor.
        Programs are machine code: a folder that belongs to another user, or that others can write to, is refused

    Returns
    -------
    The folder.
    """
    config: Any = jax.config  # its values are attributes that JAX does not declare
    if folder is None and config.jax_compilation_cache_dir:
        return Path(config.jax_compilation_cache_dir)
    path = program_folder() if folder is None else Path(folder).expanduser()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = path.stat()
    if hasattr(os, "getuid") and (about.st_uid != os.getuid() or about.st_mode & 0o022):
        raise PermissionError(
            f"`folder={str(path)!r}`: belongs to another user, or others can write to it, and the programs in it would "
            "be run. Give a folder of your own."
        )
    _remove_oldest(path)
    config.update("jax_compilation_cache_dir", str(path))
    config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return path


def _remove_oldest(folder: Path) -> None:
    """Remove the oldest files of a folder until it holds at most `_MAX_FOLDER_BYTES`."""
    newest_first = sorted(((about.st_mtime, about.st_size, path) for path, about in _files(folder)), reverse=True)
    total = 0
    for _, size, path in newest_first:
        total += size
        if total > _MAX_FOLDER_BYTES:
            path.unlink(missing_ok=True)


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # another process may have removed it
            yield path, path.stat()


def program_folder() -> Path:
    """Return the default folder of compiled programs, for this kind of processor."""
    return cache_folder() / "programs" / hashlib.sha256(_processor().encode()).hexdigest()[:16]


def _processor() -> str:
    """Return what distinguishes processors that cannot run the same programs."""
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.startswith(("flags", "Features")):
                return line
    return f"{platform.machine()} {platform.processor()}"
