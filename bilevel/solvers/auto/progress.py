"""Measurements at full-batch passes: whether x may move, whether h has risen, and whether it still decreases.

**x is frozen** until z and v follow it. In the norms of :mod:`bilevel.solvers.auto.rollback` they do if, for z and
likewise for v,

    |D_z| <= max(½ |z|, size / 100)    and    |v'∇zG| <= h / 10,

and, before x has moved at all, |D_z| is below a tenth of its first value or below |z| / 1000. Here v'∇zG estimates
h - F. Otherwise D_x is a poor estimate of ∇h, and a transformation such as Adam would still make full steps of it. So x
and its transformation keep their values until the next pass, but at the start for at most fifty passes. With a diagonal
preconditioner, which is meant for short runs, x is frozen only after a return to the best pass.

**h is estimated** by F + v'∇zG, which has a second-order error if v is close to v*(x). If h has risen since its best
pass, the run returns to that pass and halves the steps of x.

**The run ends** when h no longer decreases: its mean over a window of passes is compared with that over the window
before, and each window is 1.25 times as long as the last one. A window is quiet if the means differ by at most
``least_progress`` times h, and F from h by at most ten times as much. Two quiet windows in a row end the run.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from bilevel._core import trees
from bilevel._core.types import Array
from bilevel.solvers.auto.rollback import Rollback

_LENGTH_FRACTION, _SIZE_FRACTION = 0.5, 0.01
_FIRST_LENGTH_FRACTION, _FIRST_REDUCTION = 1e-3, 0.1
_LARGEST_LAG = 0.1  # relative to h
_LONGEST_FREEZE = 50  # passes
_SMALLEST_RISE = 1e-3  # relative to h
_PACE_GROWTH, _SMALLEST_PACE = 1.05, 1e-2
_WINDOW_GROWTH = 1.25
_QUIET_LAG = 10  # relative to `least_progress`
QUIET_WINDOWS = 2  # in a row end the run


class Reading(NamedTuple):
    """The estimate of h at a full-batch pass and its error; and relative to h, the lag of F and the gain of moving x.

    ``lag`` is |F - h|, and ``gradient`` is the first-order decrease of h if each number of x moves by 1 against D_x,
    within its bounds.
    """

    h: Array
    error: Array
    lag: Array
    gradient: Array


class Progress(NamedTuple):
    """The state of these measurements.

    Attributes
    ----------
    waited : passes for which x has been frozen
    first : the first lengths of D_z and D_v; 0 once x has moved
    passes : number of passes
    total, behind, number, end : sums of h and of F - h over this window, its number of passes, and its last pass
    mean : mean of h over the window before
    quiet : quiet windows in a row
    change : relative change of h between the last two windows
    reading : the last pass
    held : passes after which x was frozen
    best, best_reading : the pass with the smallest upper bound of h; the last pass before x moves
    pace : factor of the steps of x
    returned : 1 after a return to ``best``
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
        """The fraction of passes after which x was frozen."""
        return self.held / jnp.maximum(self.passes, 1)

    @property
    def x_moves(self) -> Array:
        """True if x moves until the next pass."""
        return self.waited == 0


def init_progress(zero: Array, first_window: float, start: Rollback) -> Progress:
    """Return the state before the first pass, with the number of passes in the first window."""
    one = jnp.ones_like(zero)
    end, unknown = first_window * one, jnp.inf * one
    reading = Reading(unknown, zero, one, one)
    window = zero, zero, zero, zero, end, unknown, zero, unknown
    return Progress(one, (-one, -one), *window, reading, zero, start, reading, one, zero)


def check_following(progress: Progress, lengths: list[Array], moves: list[Array], rollback: Rollback) -> Progress:
    """Return the state after deciding whether x is frozen, from the lengths of z and v and of their directions."""
    first = [jnp.where(old < 0, move, old) for old, move in zip(progress.first, moves, strict=True)]
    near = progress.reading.lag <= _LARGEST_LAG
    for move, length, size, before in zip(moves, lengths, rollback.sizes, first, strict=True):
        at_first = (before == 0) | (move <= jnp.maximum(_FIRST_REDUCTION * before, _FIRST_LENGTH_FRACTION * length))
        near &= at_first & (move <= jnp.maximum(_LENGTH_FRACTION * length, _SIZE_FRACTION * size))
    waited = jnp.where(near, 0, progress.waited + 1)
    over = near | ((waited > _LONGEST_FREEZE) & (first[0] > 0))
    waited, held = jnp.where(over, 0, waited), progress.held + jnp.where(over, 0, 1)
    first = [jnp.where(over, 0, one) for one in first]
    return progress._replace(waited=waited, held=held, first=(first[0], first[1]))


def keep_moving(progress: Progress) -> Progress:
    """Return the state in which x moves although z or v does not follow it."""
    return progress._replace(waited=jnp.zeros_like(progress.waited), held=jnp.zeros_like(progress.held))


def check_progress(
    progress: Progress, here: Rollback, outer_value: Array, gain: Array, moves: list[Array], least: Array | float
) -> Progress:
    """Return the state after a pass, where moving x gains ``gain`` and ``moves`` are |D_z| and |D_v|."""
    behind = trees.dot(here.point.v, here.estimate.inner_var)
    h = outer_value + behind
    size = jnp.maximum(jnp.abs(h), jnp.finfo(h.dtype).tiny)
    progress = progress._replace(
        passes=progress.passes + 1,
        total=progress.total + h,
        behind=progress.behind - behind,
        number=progress.number + 1,
        reading=Reading(h, jnp.abs(behind) + moves[0] * moves[1], jnp.abs(behind) / size, gain / size),
    )
    return _close_window(progress, least)


def return_to_best(progress: Progress, here: Rollback) -> tuple[Progress, Rollback]:
    """Return the state with the best pass so far; and this pass, or the best one if h has risen.

    After a return x is frozen until the next pass, whose estimate of h, with z closer to z*(x), replaces the old one.
    """
    best, now = progress.best_reading, progress.reading
    upper, moved = best.h + best.error, progress.first[0] == 0
    remeasured = ~moved | (progress.returned > 0)
    risen = ~remeasured & (now.h - now.error > upper + _SMALLEST_RISE * jnp.abs(upper))
    better = remeasured | (progress.x_moves & (now.h + now.error < upper))
    pick = partial(jax.tree.map, partial(jnp.where, better))
    kept, reading = pick(here, progress.best), pick(now, best)
    pace = jnp.where(better, jnp.minimum(1, _PACE_GROWTH * progress.pace), progress.pace)
    progress = progress._replace(
        best=kept,
        best_reading=reading,
        pace=jnp.where(risen, jnp.maximum(progress.pace / 2, _SMALLEST_PACE), pace),
        quiet=jnp.where(risen, 0, progress.quiet),
        waited=jnp.where(risen, 1, progress.waited),
        returned=jnp.where(risen, jnp.ones_like(pace), 0),
    )
    back = here._replace(point=kept.point, estimate=kept.estimate, preconditioner=kept.preconditioner, moves=kept.moves)
    return progress, jax.tree.map(partial(jnp.where, risen), back, here)


def _close_window(progress: Progress, least: Array | float) -> Progress:
    closes = progress.passes >= progress.end
    mean = progress.total / progress.number
    change = jnp.abs(mean - progress.mean) / jnp.maximum(jnp.abs(mean), jnp.finfo(mean.dtype).tiny)
    lag = jnp.abs(progress.behind) / jnp.maximum(jnp.abs(progress.total), jnp.finfo(mean.dtype).tiny)
    is_quiet = (change <= least) & (lag <= _QUIET_LAG * least)
    return progress._replace(
        total=jnp.where(closes, 0, progress.total),
        behind=jnp.where(closes, 0, progress.behind),
        number=jnp.where(closes, 0, progress.number),
        end=jnp.where(closes, jnp.ceil(_WINDOW_GROWTH * progress.end), progress.end),
        mean=jnp.where(closes, mean, progress.mean),
        quiet=jnp.where(closes, jnp.where(is_quiet, progress.quiet + 1, 0), progress.quiet),
        change=jnp.where(closes, change, progress.change),
    )
