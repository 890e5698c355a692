"""The vocabulary of the library.

=================  =======================================================================
name               meaning
=================  =======================================================================
``inner_var``      z, the variable of the inner problem
``outer_var``      x, the variable of the outer problem
``v``              the auxiliary variable, an approximate solution of (∇²zz G) v = -∇z F
``inner_grad``     ∇z G                    ``inner_grad_outer``   ∇x G
``hvp``            (∇²zz G) v              ``cross``              (∇²xz G) v
``outer_grad``     ∇z F                    ``outer_grad_outer``   ∇x F
``inner_value``    G                       ``outer_value``        F
=================  =======================================================================

Each name from ``inner_grad`` on is a method of the oracles and a kind of oracle call, which `Calls` counts.
"""

from numbers import Real
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

Array: TypeAlias = jax.Array
AnyArray: TypeAlias = Any  # of JAX or of NumPy
PyTree: TypeAlias = Any
Scalar: TypeAlias = Any  # a float, a 0-d array, or a tracer
Count: TypeAlias = Any  # an int or an integer array
INT32_MAX = int(np.iinfo(np.int32).max)


def is_number(value: Any, kind: type = Real) -> bool:
    """Return True if a value is a number of this kind; True and False are not numbers."""
    return isinstance(value, kind) and not isinstance(value, bool)


def as_float(value: Any) -> Any:
    """Return a real number as a float, and other values or numbers too large for a float unchanged."""
    try:
        return float(value) if is_number(value) else value
    except OverflowError:
        return value


class Point(NamedTuple):
    """An iterate u = (z, x, v), or a direction with the same three parts."""

    inner_var: PyTree
    outer_var: PyTree
    v: PyTree


class Rows(NamedTuple):
    """Drawn rows of each level, opaque to solvers; ``None`` means all rows."""

    inner: Any = None
    outer: Any = None


class InnerPass(NamedTuple):
    """The three derivatives of G from one pass over inner rows."""

    grad: PyTree
    hvp: PyTree
    cross: PyTree


class OuterPass(NamedTuple):
    """Both gradients of F."""

    grad: PyTree
    grad_outer: PyTree


class Calls(NamedTuple):
    """Oracle calls: numbers of rows, by kind of derivative."""

    inner_grad: Count = 0
    inner_grad_outer: Count = 0
    hvp: Count = 0
    cross: Count = 0
    outer_grad: Count = 0
    outer_grad_outer: Count = 0
    inner_value: Count = 0
    outer_value: Count = 0
