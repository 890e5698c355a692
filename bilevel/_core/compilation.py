"""How functions of JAX are computed: in which floating type, and with which compiled programs.

A function under `jax.jit` keeps each of its programs, with the losses and shapes it was compiled for, as long as the
function exists, which for a function of a module is the life of the process. The programs of one run take about twenty
megabytes and some hundred memory maps, of which Linux allows a process 65 530, so a loop over problems would end in a
crash of XLA. `Compiled` therefore gives each kind of arguments a jitted function of its own, and frees the least
recently used one if there are too many. Programs of other libraries and of the user are never touched.
"""

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from threading import RLock
from typing import Any, Generic, TypeVar

import jax
import numpy as np
from numpy.typing import DTypeLike

MAX_PROGRAMS = 64  # of all functions together; a run has five to ten
_programs: OrderedDict[Hashable, Any] = OrderedDict()  # jitted functions, the least recently used first
_lock = RLock()
T = TypeVar("T")


# Floating types


@contextmanager
def arithmetic(dtype: DTypeLike) -> Iterator[None]:
    """Compute in ``dtype``: with 64-bit types if it is float64, and without TF32 products on a GPU."""
    with jax.enable_x64(np.dtype(dtype) == np.float64), jax.default_matmul_precision("highest"):
        yield


def as_float_dtype(dtype: DTypeLike) -> np.dtype:
    """Return ``dtype`` as a NumPy dtype, or raise ValueError if the library does not compute in it."""
    for known in (np.dtype("float32"), np.dtype("float64")):
        if isinstance(dtype, str | type | np.dtype) and known == dtype:
            return known
    raise ValueError(f"`dtype={dtype!r}`: must be 'float32' or 'float64'.")


def resolve_dtype(dtype: DTypeLike | None, **data: Any) -> np.dtype:
    """Return ``dtype``, or if it is None the dtype of the data in JAX, which is float64 for data without floats."""
    for name, rows in data.items():
        for leaf in jax.tree.leaves(rows):
            check_concrete(name, leaf)
    if dtype is not None:
        return as_float_dtype(dtype)
    found = {np.asarray(leaf).dtype for leaf in jax.tree.leaves(data)}
    floats = {leaf_dtype for leaf_dtype in found if leaf_dtype.kind == "f"} or {np.dtype("float64")}
    return jax.dtypes.canonicalize_dtype(np.result_type("float32", *floats))


def check_concrete(name: str, given: Any) -> None:
    """Raise an error for an array that is traced by JAX or has extended precision."""
    if isinstance(given, jax.core.Tracer):
        raise TypeError(
            f"`{name}` is traced by JAX, but this computes with concrete numbers and cannot be traced. Call it outside "
            "of `jax.jit`, `jax.vmap` and `jax.grad`; `bilevel.hypergradient` gives derivatives with respect to x."
        )
    dtype = getattr(given, "dtype", None)
    if isinstance(dtype, np.dtype) and dtype.kind == "f" and dtype.itemsize > 8:
        raise ValueError(f"`{name}` has the dtype {dtype}, in which JAX does not compute; use `.astype(np.float64)`.")


# Compiled programs


class Compiled(Generic[T]):
    """A function that is compiled when it is called, and whose least recently used programs are freed.

    Parameters
    ----------
    function : the function, of pytrees of arrays
    static_argnames : names of arguments that are compile-time constants
    options : returns the compiler options from the same arguments as ``function``; None means no options
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
