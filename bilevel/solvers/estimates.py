"""The estimators of PnPBO; their equations are in :mod:`bilevel.solvers.pnpbo`.

Derivatives are stored as parts of a direction D = (D_z, D_v, D_x). Parts that were not requested are None, and their
derivatives are not computed. Tables are those of SABA.
"""

from collections.abc import Collection
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from bilevel._core import trees
from bilevel._core.types import Calls, Count, Point, PyTree, Rows
from bilevel.oracles import Oracles
from bilevel.solvers.saga_memory import BlockTable, Level

ESTIMATORS = ("sgd", "saga", "page", "zerosarah")
TABLED = ("saga", "zerosarah")  # with a table of the last estimate of each block
RECURSIVE = ("page", "zerosarah")  # the last estimate plus a difference

# The derivative of each level that each part of a direction contains.
INNER_KINDS = {"inner_var": "inner_grad", "outer_var": "cross", "v": "hvp"}
OUTER_KINDS = {"outer_var": "outer_grad_outer", "v": "outer_grad"}


class Terms(NamedTuple):
    """The derivatives of each level, as parts of a direction."""

    inner: Point
    outer: Point


class Memory(NamedTuple):
    """A table for each level; None if none of its derivatives is stored."""

    inner: BlockTable | None
    outer: BlockTable | None


def evaluate(oracles: Oracles, point: Point, rows: Rows, parts: Collection[str]) -> Terms:
    """Return the derivatives that these parts of a direction consist of."""
    if len(parts) == len(Point._fields):
        inner, outer = oracles.inner(point, rows.inner), oracles.outer(point, rows.outer)
        return Terms(Point(inner.grad, inner.cross, inner.hvp), Point(None, outer.grad_outer, outer.grad))
    inner_kinds = {part: kind for part, kind in INNER_KINDS.items() if part in parts}
    outer_kinds = {part: kind for part, kind in OUTER_KINDS.items() if part in parts}
    return Terms(
        _point({part: getattr(oracles, kind)(point, rows.inner) for part, kind in inner_kinds.items()}),
        _point({part: getattr(oracles, kind)(point, rows.outer) for part, kind in outer_kinds.items()}),
    )


def evaluation_calls(inner_rows: Count, outer_rows: Count, parts: Collection[str]) -> Calls:
    """Return the cost of `evaluate` on these numbers of rows."""
    kinds = {kind: inner_rows for part, kind in INNER_KINDS.items() if part in parts}
    return Calls(**kinds, **{kind: outer_rows for part, kind in OUTER_KINDS.items() if part in parts})


def direction(terms: Terms) -> Point:
    """Return the direction: the sum of both levels."""
    pairs = zip(*terms, strict=True)
    return Point(*(one if other is None else trees.add(one, other) for one, other in pairs))


def empty_memory(oracles: Oracles, start: Point, parts: Collection[str]) -> Memory:
    """Return tables of zeros for the derivatives of these parts."""
    like = Terms(select(start, parts), select(start._replace(inner_var=None), parts))
    samples = oracles.inner_samples, oracles.outer_samples
    return Memory(*(_empty_table(terms, each.n_blocks) for terms, each in zip(like, samples, strict=True)))


def saga(oracles: Oracles, memory: Memory, terms: Terms, rows: Rows, parts: Collection[str]) -> tuple[Point, Memory]:
    """Return the parts of the SAGA direction S, and the tables with the new derivatives."""
    samples = oracles.inner_samples, oracles.outer_samples
    reduced, tables = [], []
    for level, table, new, block in zip(samples, memory, terms, rows, strict=True):
        estimate = select(new, parts)
        if table is not None:
            estimate, table = table.store(level, estimate, block)
        reduced.append(estimate)
        tables.append(table)
    return direction(Terms(*reduced)), Memory(*tables)


def rebuild(oracles: Oracles, memory: Memory, like: Point) -> Memory:
    """Return the tables with their means summed again, which removes accumulated rounding errors."""
    pairs = zip(Memory._fields, memory, strict=True)
    return Memory(*(None if table is None else table.rebuild(Level.of(oracles, name), like) for name, table in pairs))


def select(point: Point, parts: Collection[str]) -> Point:
    """Return some parts, and None instead of the others."""
    return _point({part: getattr(point, part) for part in parts})


def _point(parts: dict[str, PyTree]) -> Point:
    return Point(*(parts.get(name) for name in Point._fields))


def _empty_table(terms: Point, n_blocks: int) -> BlockTable | None:
    if not jax.tree.leaves(terms):
        return None
    row = jnp.zeros_like(ravel_pytree(terms)[0])
    return BlockTable(jnp.zeros((n_blocks, *row.shape), row.dtype), row)
