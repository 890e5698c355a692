"""Compiled programs, of which a bounded number stays in memory.

A function under `jax.jit` keeps each of its programs, and the losses and shapes they were compiled for, as long as the
function exists. For a function of a module that is the life of the process. The programs of one run take about twenty
megabytes and some hundred memory maps, of which Linux allows a process 65 530, so a loop over problems would end in a
crash of XLA. `Compiled` therefore gives every kind of arguments a jitted function of its own, and frees the one that
was not used for longest when there are too many. Programs of other libraries and of the user are never touched.
"""

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from threading import RLock
from typing import Any, Generic, TypeVar

import jax
import numpy as np

MAX_PROGRAMS = 64  # of all functions together; a run has five to ten
_programs: OrderedDict[Hashable, Any] = OrderedDict()  # jitted functions, the least recently used first
_lock = RLock()
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
