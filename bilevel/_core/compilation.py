"""How functions of JAX are computed: in which floating type, and with which compiled programs.

A function under `jax.jit` keeps its programs, with the losses they were compiled for, as long as the function exists.
The programs of one run take some hundred memory maps, of which Linux allows a process 65 530, so a loop over problems
would end in a crash of XLA. `Compiled` therefore gives each kind of arguments a jitted function of its own, which
belongs to the problems that it was called for, named by `arithmetic`. After all of them are deleted, it is freed before
the next one is compiled, so a problem of equal structure that follows at once still finds it. Programs without a
problem, such as casts of arrays, are freed when they are too many.
"""

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from threading import RLock
from typing import Any, Generic, TypeVar
from weakref import ref

import jax
import numpy as np
from numpy.typing import DTypeLike

MAX_PROGRAMS = 128  # of all functions together; a run has five to fifteen
_lock = RLock()
_owner: ContextVar[Any] = ContextVar("owner", default=None)
T = TypeVar("T")


@contextmanager
def arithmetic(dtype: DTypeLike, owner: Any = None) -> Iterator[None]:
    """Compute in ``dtype``: with 64-bit types if it is float64, and without TF32 products on a GPU.

    Compiled programs that are used in this context belong to ``owner`` (a problem, or an object that lives as long),
    if one is given here or in an outer context.
    """
    token = _owner.set(_owner.get() if owner is None else owner)
    try:
        with jax.enable_x64(np.dtype(dtype) == np.float64), jax.default_matmul_precision("highest"):
            yield
    finally:
        _owner.reset(token)


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
            "of `jax.jit`, `jax.vmap` and `jax.grad`. For derivatives with respect to x, outside of them, use "
            "`bilevel.hypergradient`; inside of them, wrap a solver of your own in `bilevel.implicit`."
        )
    dtype = getattr(given, "dtype", None)
    if isinstance(dtype, np.dtype) and dtype.kind == "f" and dtype.itemsize > 8:
        raise ValueError(f"`{name}` has the dtype {dtype}, in which JAX does not compute; use `.astype(np.float64)`.")


class _Program:
    """A jitted function, and weak references to the problems that it belongs to."""

    def __init__(self, jitted: Any) -> None:
        self.jitted, self.owners = jitted, list[ref[Any]]()


_programs: OrderedDict[Hashable, _Program] = OrderedDict()  # the least recently used first


def _take(kind: Hashable, jit: Callable[[], Any]) -> Any:
    """Return the jitted function of this kind, and free those whose owners are gone, or that are too many."""
    with _lock:
        freed = []
        if kind not in _programs:
            owned = [(other, program.owners) for other, program in _programs.items() if program.owners]
            freed = [_programs.pop(other) for other, owners in owned if all(owner() is None for owner in owners)]
            _programs[kind] = _Program(jit())
        _programs.move_to_end(kind)
        program = _programs[kind]
        if (owner := _owner.get()) is not None:
            others = [known for known in program.owners if known() is not None and known() is not owner]
            program.owners = [*others, ref(owner)]
        freed += [_programs.popitem(last=False)[1] for _ in range(len(_programs) - MAX_PROGRAMS)]
    for old in freed:
        old.jitted.clear_cache()
    return program.jitted


class Compiled(Generic[T]):
    """A function of pytrees of arrays that is compiled when it is called, and freed with the problems of its calls.

    The arguments ``static_argnames`` are compile-time constants; ``options`` returns the compiler options from the
    arguments of the function.
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
        program, leaves = self.find(*arguments, **keywords)
        return program(leaves)

    def find(self, *arguments: Any, **keywords: Any) -> tuple[Any, list[Any]]:
        """Return the jitted function for these arguments, and the leaves of the arguments, which it is called with."""
        options = {} if self._options is None else self._options(*arguments, **keywords)
        named = self._signature.bind(*arguments, **keywords).arguments
        constants = {name: named.pop(name) for name in self._static}
        leaves, structure = jax.tree.flatten(named)
        shapes = tuple((np.shape(leaf), getattr(leaf, "dtype", type(leaf))) for leaf in leaves)
        kind = self, structure, shapes, tuple(constants.items()), tuple(options.items())

        # JAX refers to this function weakly, and frees what it compiled when the function is freed. Structures, which
        # may hold losses and what these refer to, are not among the arguments, because JAX keeps those longer.
        def program(leaves: list[Any]) -> T:
            bound = inspect.BoundArguments(self._signature, jax.tree.unflatten(structure, leaves) | constants)
            return self._function(*bound.args, **bound.kwargs)

        program.__name__ = self.__name__  # type: ignore[attr-defined]
        return _take(kind, lambda: jax.jit(program, compiler_options=options)), leaves


def compiled(*static_argnames: str) -> Callable[[Callable[..., T]], Compiled[T]]:
    """Return a decorator that makes a function `Compiled`; the named arguments are compile-time constants."""
    return lambda function: Compiled(function, static_argnames)
