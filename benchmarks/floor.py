"""An estimate of the shortest possible time of a step: rows, state and arithmetic at the speeds of the machine.

Drawn rows are read once, completely in full-batch passes and otherwise in the part that every derivative needs. The
state is read and written once in the cache. Each derivative takes the operations that no sharing between kinds saves,
or half of them if a method takes differences between two points. The floor is the longest of the three times, as if
they overlapped completely.
"""

import jax
import numpy as np
from stepping import steps_of

import bilevel
from bilevel._core.compilation import arithmetic
from bilevel._core.types import Rows
from bilevel.engine.loop import run_key
from bilevel.engine.steps import PAGE_LENGTH

# The transposed products, or all products if D is affine, can serve both points of a difference.
TAKE_DIFFERENCES = (bilevel.SRBA, bilevel.SPABA, bilevel.MRBO, bilevel.VRBO, bilevel.SUSTAIN, bilevel.FSLA)


class CountedDraws:
    """The oracles that `Solver.draw` needs, with a count of the batches that are drawn."""

    def __init__(self, oracles):
        self.oracles, self.inner, self.outer = oracles, 0, 0

    def draw_inner(self, key, index, count=None):
        self.inner += count or 1
        return self.oracles.draw_inner(key, index, count)

    def draw_outer(self, key, index, count=None):
        self.outer += count or 1
        return self.oracles.draw_outer(key, index, count)

    def draw(self, key, index):
        return Rows(self.draw_inner(key, index), self.draw_outer(key, index))


def floor_seconds(shape, solver, speed):
    """Return the floor in seconds per step, with full-batch passes spread over the steps."""
    steps = steps_of(shape.problem, solver)
    oracles, drawn = steps.oracles, CountedDraws(steps.oracles)
    with arithmetic(shape.problem.dtype):
        page, state = steps.draw(0, PAGE_LENGTH), jax.eval_shape(steps.init)
        steps.solver.draw(drawn, run_key(0), np.int32(1))
    share = 0.5 if isinstance(solver, TAKE_DIFFERENCES) else 1.0
    return max(
        _bytes_read(shape.least_read, oracles, drawn, page) / speed.rows,
        2 * _state_bytes(state, oracles) / speed.cache,
        _flops(shape.row_flops, page) * share / speed.flops,
    )


def _flops(row_flops, page):
    return sum(flops * float(np.mean(count)) for flops, count in zip(row_flops, page.calls, strict=True))


def _bytes_read(least_read, oracles, drawn, page):
    passes = _passes_per_step(oracles, page)
    total = 0.0
    for samples, batches in ((oracles.inner_samples, drawn.inner), (oracles.outer_samples, drawn.outer)):
        rows = samples.n if samples.sampling == "full" else batches * samples.batch_size
        total += (least_read * rows / samples.n + passes) * _nbytes(samples.leaves)
    return total


def row_bytes(oracles):
    """Return the bytes of the rows of both levels."""
    return _nbytes(oracles.inner_samples.leaves) + _nbytes(oracles.outer_samples.leaves)


def _nbytes(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def _passes_per_step(oracles, page):
    """Return the full-batch passes per step. A refresh of SABA sums its tables and reads no row."""
    refreshes = np.asarray(page.refreshes)
    if not refreshes.any():
        return 0.0
    hvp = np.asarray(page.calls.hvp)
    return float(refreshes.mean()) if hvp[refreshes].mean() >= oracles.n_inner else 0.0


def _state_bytes(state, oracles):
    """Return the bytes of the state that a step reads; of a table, one row."""
    blocks = oracles.inner_samples.n_blocks, oracles.outer_samples.n_blocks

    def touched(leaf):
        size = leaf.size * leaf.dtype.itemsize
        return size // leaf.shape[0] if leaf.ndim >= 2 and leaf.shape[0] in blocks else size

    return sum(map(touched, jax.tree.leaves(state)))
