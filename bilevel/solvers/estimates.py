"""The estimators that PnPBO combines, each for one of z, v and x; the equations are in :mod:`bilevel.solvers.pnpbo`.

Derivatives are kept as parts of a direction, None where a part was not asked for: those of another variable cost
nothing. Tables are SABA's.
"""

from collections.abc import Collection
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from bilevel import _tree as trees
from bilevel._types import Array, Calls, Count, Point, PyTree, Rows
from bilevel.oracles import Oracles
from bilevel.solvers.saga_memory import BlockTable, Level

ESTIMATORS = ("sgd", "saga", "page", "zerosarah")
REMEMBER = ("saga", "zerosarah")  # the last estimate of each block
RECUR = ("page", "zerosarah")  # from the last estimate by a difference

# The derivatives that each part of a direction is the sum of, one of each level.
INNER_KINDS = {"inner_var": "inner_grad", "outer_var": "cross", "v": "hvp"}
OUTER_KINDS = {"outer_var": "outer_grad_outer", "v": "outer_grad"}


class Terms(NamedTuple):
    """The derivatives of each level."""

    inner: Point
    outer: Point


class Memory(NamedTuple):
    """A table for each level, None where nothing of it is remembered."""

    inner: BlockTable | None
    outer: BlockTable | None


def read(oracles: Oracles, point: Point, rows: Rows, parts: Collection[str]) -> Terms:
    """Return the derivatives that parts are made of."""
    if len(parts) == len(Point._fields):
        inner, outer = oracles.inner(point, rows.inner), oracles.outer(point, rows.outer)
        return Terms(Point(inner.grad, inner.cross, inner.hvp), Point(None, outer.grad_outer, outer.grad))
    return Terms(
        _point(
            {part: getattr(oracles, kind)(point, rows.inner) for part, kind in INNER_KINDS.items() if part in parts}
        ),
        _point(
            {part: getattr(oracles, kind)(point, rows.outer) for part, kind in OUTER_KINDS.items() if part in parts}
        ),
    )


def read_calls(inner_rows: Count, outer_rows: Count, parts: Collection[str]) -> Calls:
    """Return the cost of such derivatives on so many rows of each level."""
    kinds = {kind: inner_rows for part, kind in INNER_KINDS.items() if part in parts}
    return Calls(**kinds, **{kind: outer_rows for part, kind in OUTER_KINDS.items() if part in parts})


def total(terms: Terms) -> Point:
    """Return the direction that both levels make together."""
    pairs = zip(*terms, strict=True)
    return Point(*(one if other is None else trees.add(one, other) for one, other in pairs))


def remember_nothing(oracles: Oracles, start: Point, parts: Collection[str]) -> Memory:
    """Return tables of zeros, with room for the derivatives of these parts."""
    like = Terms(keep(start, parts), keep(start._replace(inner_var=None), parts))
    samples = oracles.inner_samples, oracles.outer_samples
    return Memory(*(_empty(terms, each.n_blocks) for terms, each in zip(like, samples, strict=True)))


def reduce(oracles: Oracles, memory: Memory, terms: Terms, rows: Rows, parts: Collection[str]) -> tuple[Point, Memory]:
    """Return the direction with less variance by SAGA, and the tables with the new derivatives in them."""
    reduced, tables = [], []
    for name, table, new, block in zip(Memory._fields, memory, terms, rows, strict=True):
        kept = keep(new, parts)
        if table is not None:
            level = Level.of(oracles, name)._replace(estimate=partial(_known, kept))
            kept, table = table.update(level, kept, block)
        reduced.append(kept)
        tables.append(table)
    return total(Terms(*reduced)), Memory(*tables)


def rebuild(oracles: Oracles, memory: Memory, like: Point) -> Memory:
    """Sum the means of the tables anew, against rounding."""
    pairs = zip(Memory._fields, memory, strict=True)
    return Memory(*(None if table is None else table.rebuild(Level.of(oracles, name), like) for name, table in pairs))


def keep(point: Point, parts: Collection[str]) -> Point:
    """Return some parts, and None in the place of the others."""
    return _point({part: getattr(point, part) for part in parts})


def _known(terms: Point, point: Point, block: Array) -> Point:
    return terms


def _point(parts: dict[str, PyTree]) -> Point:
    return Point(*(parts.get(name) for name in Point._fields))


def _empty(terms: Point, n_blocks: int) -> BlockTable | None:
    if not jax.tree.leaves(terms):
        return None
    row = jnp.zeros_like(ravel_pytree(terms)[0])
    return BlockTable(jnp.zeros((n_blocks, *row.shape), row.dtype), row)
