"""Hyper-parameters that check themselves: a dataclass field with its default and its rule."""

import ast
import math
from collections.abc import Callable
from dataclasses import field
from numbers import Integral, Real
from typing import Any

import jax
import numpy as np

Rule = Callable[[Any], str | None]  # the complaint, or None


def parameter(default: Any, rule: Rule, *, optional: bool = False, kw_only: bool = False, **more: Any) -> Any:
    """Declare a hyper-parameter; ``optional`` lets None through, ``more`` is for `Solver` and the decorator."""
    return field(default=default, metadata={"rule": rule, "optional": optional, **more}, kw_only=kw_only)


def positive(
    *, default: Any, optional: bool = False, hint: str = "", kw_only: bool = False, word: str | None = None
) -> Any:
    """Declare a finite number above 0; a ``word`` may stand in its place."""

    def rule(value: Any) -> str | None:
        if word is not None and value == word:
            return None
        if isinstance(value, Real) and not isinstance(value, bool) and 0 < float(value) < math.inf:
            return None
        instead = "" if word is None else f" The word {word!r} stands for a setting that needs no tuning."
        return f"must be a finite number above 0{hint}.{instead}"

    return parameter(default, rule, optional=optional, kw_only=kw_only)


def whole(*, default: Any, optional: bool = False, hint: str = "") -> Any:
    """Declare an integer of at least 1."""

    def rule(value: Any) -> str | None:
        if isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1:
            return None
        return f"must be an integer of at least 1{hint}."

    return parameter(default, rule, optional=optional)


def fraction(*, default: float) -> Any:
    """Declare a number in (0, 1]."""

    def rule(value: Any) -> str | None:
        if isinstance(value, Real) and not isinstance(value, bool) and 0 < float(value) <= 1:
            return None
        return "must be a number in (0, 1]."

    return parameter(default, rule)


def flag(*, default: bool) -> Any:
    """Declare a switch."""

    def rule(value: Any) -> str | None:
        return None if isinstance(value, bool) else "must be True or False."

    return parameter(default, rule)


def one_of(names: tuple[str, ...], *, default: str | None, optional: bool = False, kw_only: bool = False) -> Any:
    """Declare a choice among names."""

    def rule(value: Any) -> str | None:
        listed = ", ".join(map(repr, (None, *names) if optional else names))
        return None if value in names else f"must be one of {listed}."

    return parameter(default, rule, optional=optional, kw_only=kw_only)


def transformation(names: tuple[str, ...], *, default: None, kw_only: bool) -> Any:
    """Declare an optax transformation, or the name of one, or None."""

    def rule(value: Any) -> str | None:
        known = value in names if isinstance(value, str) else isinstance(value, _transformation_class())
        return None if known else f"must be None, {', '.join(map(repr, names))} or an optax GradientTransformation."

    return parameter(default, rule, optional=True, kw_only=kw_only, text=transformation_text)


def _transformation_class() -> type:
    import optax

    found: type = optax.GradientTransformation
    return found


def transformation_text(value: Any) -> Any:
    """Return a name as it is, and of a transformation the function of optax that made it."""
    return value if value is None or isinstance(value, str) else f"optax {value.init.__qualname__.partition('.')[0]}"


def bounds(*, default: None, kw_only: bool) -> Any:
    """Declare (lower, upper), each None, a number or a pytree like the outer variable; or None for both.

    A text such as "(-5, 5)" may stand in the place of two numbers: configs and stores hold texts.
    """
    return parameter(
        default, _bounds_complaint, optional=True, kw_only=kw_only, convert=_as_bounds, text=_bounds_text, traced=True
    )


def _as_bounds(value: Any) -> Any:
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            return value
    if not isinstance(value, tuple | list) or len(value) != 2:
        return value
    sides = zip(value, (-math.inf, math.inf), strict=True)
    return tuple(none if side is None else float(side) if _is_number(side) else side for side, none in sides)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _bounds_complaint(value: Any) -> str | None:
    if not isinstance(value, tuple) or len(value) != 2:
        return "must be None or a pair (lower, upper), each None, a number or like the outer variable."
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(value)]
    if not all(leaf.dtype.kind == "f" and not np.isnan(leaf).any() for leaf in leaves):
        return "bounds are real numbers, none NaN."
    if all(map(_is_number, value)) and value[0] > value[1]:
        return "the lower bound exceeds the upper."
    return None


def _bounds_text(value: Any) -> str | None:
    if value is None:
        return None
    if not all(map(_is_number, value)):
        return "like the outer variable"
    return str(tuple(side if math.isfinite(side) else None for side in value))
