"""In which arithmetic a piece of work is done, without touching JAX's global settings."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from numpy.typing import DTypeLike

from bilevel._types import PyTree


def as_float_dtype(dtype: DTypeLike) -> np.dtype:
    """Return ``dtype`` as a NumPy dtype, refusing what the library does not compute in."""
    for known in (np.dtype("float32"), np.dtype("float64")):
        if isinstance(dtype, str | type | np.dtype) and known == dtype:
            return known
    raise ValueError(f"`dtype={dtype!r}`: must be 'float32' or 'float64'.")


def check_concrete(name: str, given: Any) -> None:
    """Refuse an array that JAX traces, and one in extended precision."""
    if isinstance(given, jax.core.Tracer):
        raise TypeError(
            f"`{name}` is traced by JAX, but this computes with concrete numbers and cannot be traced. Call it outside "
            "of `jax.jit`, `jax.vmap` and `jax.grad`; `bilevel.hypergradient` gives derivatives with respect to x."
        )
    dtype = getattr(given, "dtype", None)
    if isinstance(dtype, np.dtype) and dtype.kind == "f" and dtype.itemsize > 8:
        raise ValueError(f"`{name}` has the dtype {dtype}, in which JAX does not compute; use `.astype(np.float64)`.")


def resolve_dtype(dtype: DTypeLike | None, **data: PyTree) -> np.dtype:
    """Return ``dtype``, or where it is None the one that JAX would give to the data; float64 to data without floats."""
    for name, rows in data.items():
        for leaf in jax.tree.leaves(rows):
            check_concrete(name, leaf)
    if dtype is not None:
        return as_float_dtype(dtype)
    found = {np.asarray(leaf).dtype for leaf in jax.tree.leaves(data)}
    floats = {leaf_dtype for leaf_dtype in found if leaf_dtype.kind == "f"} or {np.dtype("float64")}
    return jax.dtypes.canonicalize_dtype(np.result_type("float32", *floats))


@contextmanager
def arithmetic(dtype: DTypeLike) -> Iterator[None]:
    """Compute in ``dtype``: 64-bit types where it is float64, and no TF32 products on a GPU."""
    with jax.enable_x64(np.dtype(dtype) == np.float64), jax.default_matmul_precision("highest"):
        yield
