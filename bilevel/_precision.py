"""In which arithmetic a piece of work is done, without touching JAX's global settings."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax
import numpy as np
from numpy.typing import DTypeLike

FLOATS = (np.dtype("float32"), np.dtype("float64"))


def as_float_dtype(dtype: DTypeLike) -> np.dtype:
    """Return ``dtype`` as a NumPy dtype, refusing what the library does not compute in."""
    try:
        resolved = np.dtype(dtype)
    except TypeError:
        resolved = None
    if resolved not in FLOATS:
        raise ValueError(f"`dtype={dtype!r}`: must be 'float32' or 'float64'.")
    return resolved


@contextmanager
def arithmetic(dtype: DTypeLike) -> Iterator[None]:
    """Compute in ``dtype``: 64-bit types where it is float64, and no TF32 products on a GPU."""
    with jax.enable_x64(np.dtype(dtype) == np.float64), jax.default_matmul_precision("highest"):
        yield
