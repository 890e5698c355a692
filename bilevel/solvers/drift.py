"""How far a recursive estimate of D has drifted from D itself, measured at each full-batch pass.

The drift is relative to ||D|| at this pass or the one before, whichever is larger. A recursion that works stays well
below ½, however fast D itself goes to zero.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from bilevel._core import trees
from bilevel._core.types import Array, Point, Scalar
from bilevel.solvers.base import Monitor

_LARGE_DRIFT = 0.5  # recursions that work show 0 to 0.3, those at the floor of their arithmetic 0.4 to 1.1


class Drift(NamedTuple):
    """||D|| at the last full-batch pass, and the relative drift of the estimate there."""

    norm: Array
    relative: Array

    @classmethod
    def none(cls, like: Scalar) -> "Drift":
        """Return the drift before the first pass."""
        return cls(jnp.zeros_like(like), jnp.zeros_like(like))

    def measure(self, exact: Point, estimate: Point, index: Array) -> "Drift":
        """Return the drift at a full-batch pass; it is 0 at the first one."""
        norm = jnp.sqrt(trees.norm_sq(exact))
        gap = jnp.sqrt(trees.norm_sq(trees.subtract(exact, estimate)))
        return Drift(norm, jnp.where(index == 0, 0, gap / jnp.maximum(norm, self.norm)))


class DriftMonitor(Monitor):
    """Reports the drift in the column ``drift``, and warns if it is large at the end."""

    def __init__(self, solver: Any) -> None:
        self.solver = solver

    def diagnostics(self, state: Any) -> dict[str, Array]:
        return {"drift": state.drift.relative}

    def warning(self, rows: list[dict[str, Any]], dtype: DTypeLike) -> str | None:
        row = rows[-1]
        # The steps of a transformation of z do not shrink with D, so the drift says nothing about them.
        if np.dtype(dtype) != np.float32 or not row["drift"] > _LARGE_DRIFT or self.solver.inner_optimizer is not None:
            return None
        return (
            f"{type(self.solver).__name__}'s recursive estimate had drifted from the full-batch pass at the last "
            f"refresh, by {row['drift']:.2g} of the direction itself: rounding errors in float32 have accumulated, or "
            "the step size is too large for the period. Build the problem with dtype='float64', or give a smaller "
            "`period`."
        )
