"""Whether x may move, and whether h still falls: what the untuned setting reads from its full-batch passes.

**x waits** for z and v. In the norms of :mod:`bilevel.solvers.rollback` they follow where, for z and likewise for v,

    |D_z| <= ½ |z|  or size / 100,    at first |D_z| <= a tenth of what it was, or |z| / 1000,    and |v'∇zG| <= h / 10

v'∇zG being what F is behind h. Elsewhere D_x says little of ∇h, but a transformation such as Adam's makes full steps of
it. So x and the transformation stay as they are until the next pass; at first for fifty passes at most.

**h still falls.** With v near v*(x), h(x) = F + v'∇zG up to second order. Its mean over a window of passes is compared
with that over the window before; each window ends after 1.25 times as many passes as the last. A window is quiet where
they differ by at most a share ``least_progress`` of h, and z is behind by at most ten times this share.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from bilevel import _tree as trees
from bilevel._types import Array, Point
from bilevel.solvers.rollback import Rollback

_NEAR, _SMALL = 0.5, 0.01
_FIRST_NEAR, _REDUCED = 1e-3, 0.1
_MOST_LAG = 0.1  # of h
_LONGEST_WAIT = 50  # passes
_RISE = 1e-3  # of h: less than that is no rise
_REGAIN, _LEAST_PACE = 1.05, 1e-2
_GROWTH = 1.25  # of windows
_LAG = 10  # times the least progress
QUIET_WINDOWS = 2  # in a row are the end


class Reading(NamedTuple):
    """The estimate of h at a full-batch pass, its error, and relative to h the lag of F and the gain of moving x.

    ``lag`` is |F - h| and ``gradient`` what moving each number of x by 1 against D_x, within its bounds, gains to first
    order.
    """

    h: Array
    error: Array
    lag: Array
    gradient: Array


class Progress(NamedTuple):
    """Passes that x has waited, and the first lengths of D_z and D_v, 0 once they were followed.

    Of the passes so far: their number; sums of h and of F - h in this window, the number of its passes, its last pass,
    and the mean of h in the window before.
    ``quiet`` counts quiet windows in a row, ``held`` the passes after which x stood still, ``change`` is that of h from
    window to window, relative to h. ``best`` is the pass with the least upper bound of h once x moves, and the last one
    before that; ``pace`` what the steps of x are multiplied by; ``returned`` is 1 after a return to ``best``.
    """

    waited: Array
    first: tuple[Array, Array]
    passes: Array
    total: Array
    behind: Array
    number: Array
    end: Array
    mean: Array
    quiet: Array
    change: Array
    reading: Reading
    held: Array
    best: Rollback
    best_reading: Reading
    pace: Array
    returned: Array

    @property
    def held_share(self) -> Array:
        """The share of the passes after which x stood still."""
        return self.held / jnp.maximum(self.passes, 1)

    @property
    def x_moves(self) -> Array:
        """Whether x moves until the next pass."""
        return self.waited == 0


def init_progress(zero: Array, first_window: float, start: Rollback) -> Progress:
    """Return the memory before the first pass; the first window has so many passes."""
    one = jnp.ones_like(zero)
    end, unknown = first_window * one, jnp.inf * one
    reading = Reading(unknown, zero, one, one)
    window = zero, zero, zero, zero, end, unknown, zero, unknown
    return Progress(one, (-one, -one), *window, reading, zero, start, reading, one, zero)


def check_following(progress: Progress, lengths: list[Array], moves: list[Array], rollback: Rollback) -> Progress:
    """Return the memory with the wait of x: lengths of z and v, and of their directions."""
    first = [jnp.where(old < 0, move, old) for old, move in zip(progress.first, moves, strict=True)]
    near = progress.reading.lag <= _MOST_LAG
    for move, length, size, before in zip(moves, lengths, rollback.sizes, first, strict=True):
        at_first = (before == 0) | (move <= jnp.maximum(_REDUCED * before, _FIRST_NEAR * length))
        near &= at_first & (move <= jnp.maximum(_NEAR * length, _SMALL * size))
    waited = jnp.where(near, 0, progress.waited + 1)
    over = near | ((waited > _LONGEST_WAIT) & (first[0] > 0))
    waited, held = jnp.where(over, 0, waited), progress.held + jnp.where(over, 0, 1)
    first = [jnp.where(over, 0, one) for one in first]
    return progress._replace(waited=waited, held=held, first=(first[0], first[1]))


def check_progress(
    progress: Progress,
    here: Rollback,
    outer_value: Array,
    stepped: Point,
    moves: list[Array],
    least: Array | float,
) -> Progress:
    """Return the memory after a pass; ``stepped`` has x moved by 1 against D_x, ``moves`` are |D_z| and |D_v|."""
    point, exact = here.point, here.estimate
    behind = trees.dot(point.v, exact.inner_var)
    h = outer_value + behind
    size = jnp.maximum(jnp.abs(h), jnp.finfo(h.dtype).tiny)
    gain = trees.dot(exact.outer_var, trees.subtract(point.outer_var, stepped.outer_var))
    progress = progress._replace(
        passes=progress.passes + 1,
        total=progress.total + h,
        behind=progress.behind - behind,
        number=progress.number + 1,
        reading=Reading(h, jnp.abs(behind) + moves[0] * moves[1], jnp.abs(behind) / size, gain / size),
    )
    return _close_window(progress, least)


def return_to_best(progress: Progress, here: Rollback) -> tuple[Progress, Rollback]:
    """Return the memory with the best pass so far, and this pass, or the best one again if h has risen.

    After a return x is frozen until the next pass, whose estimate of h, with z nearer to z*(x), replaces the old one.
    """
    best, now = progress.best_reading, progress.reading
    upper, moved = best.h + best.error, progress.first[0] == 0
    remeasured = ~moved | (progress.returned > 0)
    risen = ~remeasured & (now.h - now.error > upper + _RISE * jnp.abs(upper))
    better = remeasured | (progress.x_moves & (now.h + now.error < upper))
    pick = partial(jax.tree.map, partial(jnp.where, better))
    kept, reading = pick(here, progress.best), pick(now, best)
    pace = jnp.where(better, jnp.minimum(1, _REGAIN * progress.pace), progress.pace)
    progress = progress._replace(
        best=kept,
        best_reading=reading,
        pace=jnp.where(risen, jnp.maximum(progress.pace / 2, _LEAST_PACE), pace),
        quiet=jnp.where(risen, 0, progress.quiet),
        waited=jnp.where(risen, 1, progress.waited),
        returned=jnp.where(risen, jnp.ones_like(pace), 0),
    )
    back = here._replace(point=kept.point, estimate=kept.estimate, preconditioning=kept.preconditioning)
    return progress, jax.tree.map(partial(jnp.where, risen), back, here)


def _close_window(progress: Progress, least: Array | float) -> Progress:
    closes = progress.passes >= progress.end
    mean = progress.total / progress.number
    change = jnp.abs(mean - progress.mean) / jnp.maximum(jnp.abs(mean), jnp.finfo(mean.dtype).tiny)
    lag = jnp.abs(progress.behind) / jnp.maximum(jnp.abs(progress.total), jnp.finfo(mean.dtype).tiny)
    is_quiet = (change <= least) & (lag <= _LAG * least)
    return progress._replace(
        total=jnp.where(closes, 0, progress.total),
        behind=jnp.where(closes, 0, progress.behind),
        number=jnp.where(closes, 0, progress.number),
        end=jnp.where(closes, jnp.ceil(_GROWTH * progress.end), progress.end),
        mean=jnp.where(closes, mean, progress.mean),
        quiet=jnp.where(closes, jnp.where(is_quiet, progress.quiet + 1, 0), progress.quiet),
        change=jnp.where(closes, change, progress.change),
    )
