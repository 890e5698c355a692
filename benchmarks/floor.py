"""About the time below which no program can take a step: rows, state and arithmetic at the machine's speeds.

Drawn rows are read once from where all rows fit, in full-batch passes whole and else in the part that every derivative
needs; the state is read and written once in the cache; each derivative counted takes the operations that no
sharing between kinds saves, or half of them where a method takes differences between two points. The longest of the
three counts, as if they ran at once.
"""

import jax
import numpy as np

import bilevel
from bilevel._precision import arithmetic
from bilevel._types import Rows
from bilevel.engine.loop import draw_page, initial_state, run_key
from bilevel.engine.steps import PAGE_LENGTH

# The products back with the rows, or all products where D is affine, can serve both points of a difference at once.
TAKE_DIFFERENCES = (bilevel.SRBA, bilevel.SPABA, bilevel.MRBO, bilevel.VRBO, bilevel.SUSTAIN, bilevel.FSLA)


class CountedDraws:
    """Oracles as `Solver.draw` uses them, which count the batches that are drawn."""

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
    """Seconds per step, full-batch passes spread over the steps between them."""
    with arithmetic(shape.problem.dtype):
        oracles = shape.problem.oracles.with_batches(solver.batch_size, solver.sampling)
        solver = solver.configure(shape.problem).cast(shape.problem.dtype)
        page = draw_page(solver, oracles, run_key(0), np.int32(0), PAGE_LENGTH)
        state = jax.eval_shape(initial_state, solver, oracles, shape.problem.start)
        drawn = CountedDraws(oracles)
        solver.draw(drawn, run_key(0), np.int32(1))
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
    """Bytes of the rows of both levels."""
    return _nbytes(oracles.inner_samples.leaves) + _nbytes(oracles.outer_samples.leaves)


def _nbytes(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def _passes_per_step(oracles, page):
    """Full-batch passes per step; a refresh of SABA sums tables and reads no row."""
    refreshes = np.asarray(page.refreshes)
    if not refreshes.any():
        return 0.0
    hvp = np.asarray(page.calls.hvp)
    return float(refreshes.mean()) if hvp[refreshes].mean() >= oracles.n_inner else 0.0


def _state_bytes(state, oracles):
    """Bytes of the state that a step touches: one row of a table."""
    blocks = oracles.inner_samples.n_blocks, oracles.outer_samples.n_blocks

    def touched(leaf):
        size = leaf.size * leaf.dtype.itemsize
        return size // leaf.shape[0] if leaf.ndim >= 2 and leaf.shape[0] in blocks else size

    return sum(map(touched, jax.tree.leaves(state)))
