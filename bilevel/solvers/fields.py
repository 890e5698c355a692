"""Hyper-parameters that check themselves: a dataclass field with its default and its rule."""

import math
from collections.abc import Callable
from dataclasses import field
from numbers import Integral, Real
from typing import Any

Rule = Callable[[Any], str | None]  # the complaint, or None


def parameter(default: Any, rule: Rule, *, optional: bool = False, kw_only: bool = False) -> Any:
    """Declare a hyper-parameter; ``optional`` lets None through."""
    return field(default=default, metadata={"rule": rule, "optional": optional}, kw_only=kw_only)


def positive(*, default: Any, optional: bool = False, hint: str = "", kw_only: bool = False) -> Any:
    """Declare a finite number above 0."""

    def rule(value: Any) -> str | None:
        if isinstance(value, Real) and not isinstance(value, bool) and 0 < float(value) < math.inf:
            return None
        return f"must be a finite number above 0{hint}."

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


def one_of(names: tuple[str, ...], *, default: str, kw_only: bool = False) -> Any:
    """Declare a choice among names."""

    def rule(value: Any) -> str | None:
        return None if value in names else "must be one of " + ", ".join(map(repr, names)) + "."

    return parameter(default, rule, kw_only=kw_only)
