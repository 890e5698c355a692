from typing import ClassVar

from benchmark_utils.stretches import StretchSolver

import bilevel


class Solver(StretchSolver):
    """A stochastic solver of bilevel, by its name."""

    name = "stochastic"
    parameters: ClassVar = {
        "algorithm": ["SRBA", "SABA", "SOBA"],
        "step_size": [0.1],
        "outer_ratio": [1.0],
        "batch_size": [32],
        "steps_per_iteration": [64],
    }

    def chosen(self):
        return bilevel.SOLVERS[self.algorithm](self.step_size, self.outer_ratio, self.batch_size)
