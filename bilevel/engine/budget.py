"""When a run ends, and when it is looked at."""

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np

from bilevel._types import INT32_MAX

# Evaluations per doubling of the calls, from 1/64 of an epoch on.
_PER_DOUBLING = 4


@dataclass(frozen=True)
class Budget:
    """Limits on a whole run, resumed or not. The calls never exceed theirs: a step that would is not taken."""

    max_steps: int | None = None
    max_calls: int | None = None
    max_seconds: float | None = None
    tolerance: float | None = None
    certified_tolerance: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_steps", "max_calls"):
            _check(name, getattr(self, name), Integral, "an integer of at least 0")
        for name in ("max_seconds", "tolerance", "certified_tolerance"):
            _check(name, getattr(self, name), Real, "a finite number of at least 0")
        if self.max_steps is not None and self.max_steps > INT32_MAX:
            raise ValueError(f"`max_steps={self.max_steps}`: steps are counted in 32 bits, at most {INT32_MAX}.")
        if self.max_steps is None and self.max_calls is None and self.max_seconds is None:
            raise ValueError("no budget: give at least one of `max_steps`, `max_calls`, `max_seconds`.")

    @property
    def last_step(self) -> int:
        """The step at which a run ends at the latest."""
        return INT32_MAX if self.max_steps is None else int(self.max_steps)

    def seconds_left(self, seconds: float) -> float:
        """Return how long the run may still step."""
        return math.inf if self.max_seconds is None else self.max_seconds - seconds

    def fraction(self, step: int, calls: int, seconds: float) -> float:
        """Return the share of the tightest budget that is used."""
        used = ((step, self.max_steps), (calls, self.max_calls), (seconds, self.max_seconds))
        return max(now / limit if limit else 1.0 for now, limit in used if limit is not None)


def _check(name: str, value: Any, kind: type, what: str) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, kind) or not 0 <= value < math.inf:  # type: ignore[operator]
        raise ValueError(f"`{name}={value!r}`: must be {what}, or None for no limit.")


@dataclass(frozen=True)
class EvaluationSchedule:
    """At which steps a run is evaluated: each ``every`` steps, or evenly on a log scale of calls.

    The second makes curves of different solvers comparable. Neither looks at the clock, so the rows of a
    history are the same in every run.
    """

    every: int | None
    epoch: int

    def __post_init__(self) -> None:
        if self.every is None:
            return
        if isinstance(self.every, bool) or not isinstance(self.every, Integral) or self.every < 1:
            raise ValueError(f"`eval_every={self.every!r}`: must be an integer of at least 1, or None.")

    def next_position(self, step: int, calls: int, page_first: int, calls_after: np.ndarray) -> int:
        """Return the position on the page at whose end the next evaluation is due; it may lie beyond the page.

        ``calls_after[i]`` is the ledger's total after position i of the page.
        """
        if self.every is not None:
            return step - step % self.every + self.every - page_first
        return int(np.searchsorted(calls_after, self._next_target(calls))) + 1

    def _next_target(self, calls: int) -> float:
        first = self.epoch / 64
        if calls < first:
            return first
        target = first * 2 ** (math.floor(math.log2(calls / first) * _PER_DOUBLING) / _PER_DOUBLING)
        while target <= calls:
            target *= 2 ** (1 / _PER_DOUBLING)
        return target
