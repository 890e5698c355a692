from typing import ClassVar

from benchmark_utils.stretches import StretchSolver

import bilevel


class Solver(StretchSolver):
    """A solver of bilevel that works on all rows and finds its own steps, by its name."""

    name = "deterministic"
    parameters: ClassVar = {"algorithm": ["Exact", "HOAG"], "steps_per_iteration": [1]}

    def chosen(self):
        return bilevel.SOLVERS[self.algorithm]()
