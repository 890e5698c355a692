"""Hypothesis strategies of values that no argument is meant for."""

import zlib
from datetime import datetime
from decimal import Decimal
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

HUGE = [2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**400, -(2**31), -(2**63) - 1]
FLOATS = [0.0, -0.0, 1e-320, 1e-40, 1e-8, 0.1, 0.5, 1.0, 1.5, 2.0, 1e8, 1e30, 1e39, 1e200, 1.7e308]
FLOATS += [-value for value in FLOATS[2:]] + [float("nan"), float("inf"), float("-inf")]
TEXTS = ["", " ", "a", "auto", "None", "1", "0.1", "nan", "full", "float32", "float16", "int32", "(0, 1)", "(nan, 1)"]
TEXTS += ["(1, 0)", "((1, 2), 3)", "__import__('os')", "ü" * 40, "\x00", "../x", "a\nb", "<b>x</b>", "("]
NUMPY_TYPES = [np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64, np.float16, np.float32, np.float64]
NUMPY_TYPES += [np.longdouble, np.complex64, np.bool_]


class Stranger:
    """A user-defined object whose comparison raises."""

    def __eq__(self, other):
        raise RuntimeError("compared")

    __hash__ = object.__hash__

    def __repr__(self):
        return "Stranger()"


def among(items):
    """Return a strategy of these items, which need not be hashable or comparable."""
    return st.integers(0, len(items) - 1).map(items.__getitem__)


small_integers = st.integers(-3, 70)
integers = small_integers | st.sampled_from(HUGE)
floats = st.sampled_from(FLOATS) | st.floats()
texts = st.sampled_from(TEXTS) | st.text(max_size=8)
numpy_scalars = st.builds(lambda kind, value: kind(value), st.sampled_from(NUMPY_TYPES), st.integers(0, 70))
odd_scalars = st.sampled_from(
    [1j, 1 + 0j, Decimal("0.1"), Fraction(1, 3), datetime(2020, 1, 1), np.datetime64("2020-01-01"), np.str_("a"), b"1"]
)
objects = among([None, True, False, object(), Stranger(), int, len, ..., NotImplemented, range(3)])
shapes = st.sampled_from([(), (0,), (1,), (3,), (1, 1), (2, 3), (0, 3), (3, 0)])
DTYPES = ["f4", "f8", "f2", "i4", "i8", "u8", "?", "c8", "O", "U3", "S3", "M8[s]", "m8[s]", "V4"]
arrays = st.builds(lambda shape, dtype: np.ones(shape).astype(_known(dtype)), shapes, st.sampled_from(DTYPES[:9]))
odd_arrays = st.builds(lambda shape, dtype: np.zeros(shape, dtype), shapes, st.sampled_from(DTYPES))
jax_arrays = st.builds(lambda shape, value: jnp.full(shape, value), shapes, st.sampled_from([0.0, 1.0, 2]))
masked = st.builds(lambda shape: np.ma.masked_equal(np.ones(shape), 1), shapes)
scalars = integers | floats | texts | numpy_scalars | odd_scalars | objects
containers = st.one_of(
    st.lists(scalars, max_size=3),
    st.lists(scalars, max_size=3).map(tuple),
    st.dictionaries(texts, scalars, max_size=2),
    st.just(set()),
    st.lists(st.lists(small_integers, max_size=2), max_size=2),
)
anything = st.one_of(scalars, scalars, arrays, odd_arrays, jax_arrays, masked, containers)


def _known(dtype):
    return np.dtype(dtype)


def text(value) -> str:
    """Return a short text for a value: type, shape and some numbers for arrays."""
    try:
        shown = " ".join(repr(value).split())
    except Exception as error:
        shown = f"<{type(error).__name__}>"
    if hasattr(value, "shape") and len(shown) > 60:
        about = getattr(value, "dtype", None) or ",".join(sorted({str(kind) for kind in value.dtypes}))
        shown = f"{about}{tuple(value.shape)} {zlib.crc32(shown.encode()):08x}"
    plain = type(value) in (str, int, float, bool, list, tuple, dict)
    return shown[:80] if plain else f"{type(value).__name__} {shown[:80]}"
