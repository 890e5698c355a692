"""Several batches of one step: drawn together, handed out one by one."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax

from bilevel.types import Array

T = TypeVar("T")


def split(rows: Any, *sizes: int | None) -> tuple[Any, ...]:
    """Cut stacked batches into stacks of the given sizes; None takes one batch off the stack.

    Rows that stand for all rows stay what they are, whatever the size.
    """
    parts: list[Any] = []
    begin = 0
    for size in sizes:
        if rows is None:
            parts.append(None)
        elif size is None:
            parts.append(rows[begin])
        else:
            parts.append(rows[begin : begin + size])
        begin += 1 if size is None else size
    return tuple(parts)


def batch(rows: Any, index: Array | int) -> Any:
    """Return one batch of a stack."""
    return None if rows is None else rows[index]


def repeat(times: int | Array, rows: Any, update: Callable[[T, Any], T], state: T) -> T:
    """Apply ``update(state, batch)`` for the first batches of a stack; one copy is compiled for all."""
    return jax.lax.fori_loop(0, times, lambda i, state: update(state, batch(rows, i)), state)
