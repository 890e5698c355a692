"""Validated hyperparameters: dataclass fields with a default, a rule and a description."""

import inspect
import math
import re
import sys
from collections.abc import Callable
from dataclasses import field
from numbers import Integral
from typing import Any, TypeVar

import jax
import numpy as np

from bilevel._core.types import INT32_MAX, as_float, is_number

# Descriptions of parameters that several solvers declare; the docstring of a class takes precedence.
SHARED_DESCRIPTIONS = {
    "n_inner_steps": "T, inner steps per outer step",
    "n_neumann": "Q, products of the Neumann series",
    "neumann_step": "η, step of the Neumann series; below 2/L of the batches' Hessians",
    "warm_start": "continue from the last inner variable; False restarts from the first one",
    "v_radius": "radius of the ball that v is projected onto; None means no projection",
    "outer_bounds": """(lower, upper) bounds of the outer variable besides those of the problem: numbers, or arrays like
    the outer variable; None means no others""",
}
_HEADING = "\n\nParameters\n----------\n"
_ITEM = re.compile(r"(\w+(?:, \w+)*) : (.+(?:\n +.+)*)")

ARRAY_BOUNDS = "like the outer variable"  # the text of bounds that are not numbers

T = TypeVar("T")
Rule = Callable[[Any], str | None]  # returns what is wrong with a value, or None


def parse_descriptions(text: str) -> dict[str, str]:
    """Return the descriptions in the section "Parameters" of a docstring, by name."""
    items = _ITEM.findall(inspect.cleandoc(text).partition(_HEADING)[2])
    return {name: meaning for names, meaning in items for name in names.split(", ")}


def document(cls: type) -> None:
    """Add the parameters of its bases to the docstring of a solver, in the order of its signature."""
    descriptions = dict(SHARED_DESCRIPTIONS)
    for base in reversed(cls.__mro__):
        descriptions |= parse_descriptions(base.__doc__ or "")
    head = inspect.cleandoc(cls.__doc__ or "").partition(_HEADING)[0]
    items = [f"{name} : {descriptions[name]}\n" for name in inspect.signature(cls).parameters if name in descriptions]
    cls.__doc__ = "".join([head, _HEADING, *items])


def parameter(default: Any, rule: Rule, *, optional: bool = False, kw_only: bool = False, **more: Any) -> Any:
    """Declare a hyperparameter; ``optional`` allows None, ``more`` is metadata for `SolverBase` and `solver`."""
    return field(default=default, metadata={"rule": rule, "optional": optional, **more}, kw_only=kw_only)


def given(value: T | None) -> T:
    """Return an optional parameter, which `Solver.configure` has filled in."""
    assert value is not None
    return value


def _must(holds: Callable[[Any], bool], complaint: str) -> Rule:
    return lambda value: None if holds(value) else complaint


def _real(most: float, text: str, off: bool, hint: str = "") -> Rule:
    """Return the rule of floats above 0 and at most ``most``; with ``off``, 0 is allowed too."""

    def holds(value: Any) -> bool:
        return isinstance(value, float) and (0 < value <= most or (off and value == 0))

    return _must(holds, f"must be {text}{', or 0 to turn it off' * off}{hint}.")


def positive(*, default: Any, optional: bool = False, hint: str = "", kw_only: bool = False, off: bool = False) -> Any:
    """Declare a finite number above 0; with ``off``, 0 is allowed and turns the feature off."""
    rule = _real(sys.float_info.max, "a finite number above 0", off, hint)
    return parameter(default, rule, optional=optional, kw_only=kw_only, convert=as_float)


def whole(*, default: Any, optional: bool = False, hint: str = "", least: int = 1, kw_only: bool = False) -> Any:
    """Declare an integer from ``least`` to 2**31 - 1, since steps are counted in 32 bits."""

    def rule(value: Any) -> str | None:
        if not is_number(value, Integral) or value < least:
            return f"must be an integer of at least {least}{hint}."
        return None if value <= INT32_MAX else f"must be below 2**31{hint}."

    def convert(value: Any) -> Any:  # integers of NumPy overflow where those of Python do not
        return int(value) if is_number(value, Integral) else value

    return parameter(default, rule, optional=optional, kw_only=kw_only, convert=convert)


def fraction(*, default: float | None, optional: bool = False, off: bool = False) -> Any:
    """Declare a number in (0, 1]; with ``off``, 0 is allowed and turns the feature off."""
    return parameter(default, _real(1.0, "a number in (0, 1]", off), optional=optional, convert=as_float)


def flag(*, default: bool) -> Any:
    """Declare a switch."""
    return parameter(default, _must(lambda value: isinstance(value, bool), "must be True or False."))


def one_of(names: tuple[str, ...], *, default: str | None, optional: bool = False, kw_only: bool = False) -> Any:
    """Declare a choice among names."""
    listed = ", ".join(map(repr, (None, *names) if optional else names))
    rule = _must(lambda value: isinstance(value, str) and value in names, f"must be one of {listed}.")
    return parameter(default, rule, optional=optional, kw_only=kw_only)


def transformation(names: tuple[str, ...], *, default: str | None, kw_only: bool, optional: bool = True) -> Any:
    """Declare an optax transformation, or the name of one, or None."""

    def holds(value: Any) -> bool:
        if isinstance(value, str):
            return value in names
        import optax

        return isinstance(value, optax.GradientTransformation)

    def text(value: Any) -> Any:
        # A transformation is represented by the function of optax that made it.
        is_name = value is None or isinstance(value, str)
        return value if is_name else f"optax {value.init.__qualname__.partition('.')[0]}"

    listed = ", ".join(map(repr, (None, *names) if optional else names))
    rule = _must(holds, f"must be {listed} or an optax GradientTransformation.")
    return parameter(default, rule, optional=optional, kw_only=kw_only, text=text)


def bounds(*, default: None, kw_only: bool) -> Any:
    """Declare (lower, upper), each None, a number or a pytree like the outer variable; or None for both.

    Two numbers may also be given as text such as "(-5, 5)", which is what configs and stores contain.
    """
    more = {"convert": _parse_bounds, "text": bounds_text, "traced": True}
    return parameter(default, _bounds_complaint, optional=True, kw_only=kw_only, **more)


def _parse_bounds(value: Any) -> Any:
    if isinstance(value, str):
        try:
            value = [None if side.strip() == "None" else float(side) for side in value.strip(" ()[]").split(",")]
        except ValueError:
            return value
    if not isinstance(value, tuple | list) or len(value) != 2:
        return value
    sides = zip(value, (-math.inf, math.inf), strict=True)
    return tuple(none if side is None else as_float(side) for side, none in sides)


def _bounds_complaint(value: Any) -> str | None:
    if not isinstance(value, tuple) or len(value) != 2:
        return "must be None or a pair (lower, upper), each None, a number or like the outer variable."
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(value)]
    hidden = any(map(np.ma.is_masked, jax.tree.leaves(value)))
    if hidden or not all(leaf.dtype.kind == "f" and not np.isnan(leaf).any() for leaf in leaves):
        return "bounds are real numbers, none NaN or masked."
    if all(map(is_number, value)) and value[0] > value[1]:
        return "the lower bound exceeds the upper."
    return None


def bounds_text(value: Any) -> str | None:
    """Return bounds as text, which `bounds` parses; arrays are described."""
    if value is None:
        return None
    finite = (side if math.isfinite(side) else None for side in value)
    return str(tuple(finite)) if all(map(is_number, value)) else ARRAY_BOUNDS
