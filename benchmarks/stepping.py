"""Steps of a solver without the rest of a run: drawn, compiled and taken one page at a time."""

from typing import Any, NamedTuple

import numpy as np

from bilevel._core.compilation import arithmetic
from bilevel.engine.loop import advance, draw_page, for_one_run, initial_state, run_key
from bilevel.engine.steps import prepare


class Steps(NamedTuple):
    """A solver with its defaults filled in, the oracles with its batches, and the point where it starts.

    Its methods must be called within `arithmetic(problem.dtype)`.
    """

    solver: Any
    oracles: Any
    start: Any

    def init(self):
        """Return the state before the first step."""
        return initial_state(self.solver, self.oracles, self.start)

    def draw(self, first, length):
        """Return the draws of some steps from ``first`` on."""
        return draw_page(self.solver, self.oracles, run_key(0), np.int32(first), length)

    def take(self, state, page, begin, end):
        """Return the state after the steps ``begin`` to ``end`` of a page."""
        return advance(self.solver, for_one_run(self.oracles), state, page, np.int32(begin), np.int32(end))


def steps_of(problem, solver):
    """Return the steps of a solver on a problem."""
    solver, oracles, start, dtype = prepare(problem, solver)
    with arithmetic(dtype):
        return Steps(solver.cast(dtype), oracles, start)
