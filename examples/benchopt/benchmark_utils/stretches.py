"""Solvers of `bilevel`, which benchopt asks for stretches of one run, and times."""

import jax
import numpy as np
from benchopt import BaseSolver

import bilevel


class StretchSolver(BaseSolver):
    """Base of the solvers: runs `chosen()`, one stretch per iteration of benchopt."""

    sampling_strategy = "callback"

    def chosen(self):
        """The solver of `bilevel` that the parameters stand for."""
        raise NotImplementedError

    def set_objective(self, problem):
        self.problem, self.seed = problem, self.get_seed(use_repetition=True)

    def pre_run_hook(self, callback):
        # Not in `warm_up`, which benchopt calls for the first data set alone: shapes change with the data.
        self.bilevel_run = bilevel.Run(self.problem, self.chosen(), seed=self.seed)

    def run(self, callback):
        # What a solver computes at its start belongs on the clock.
        self.bilevel_run.restart()
        while callback():
            self.bilevel_run.advance(self.steps_per_iteration)

    def get_result(self):
        run = self.bilevel_run
        return {
            # In the arithmetic of the solver, which may be finer than the problem's.
            "point": jax.tree.map(np.asarray, run.solver.monitor.evaluation_point(run.state)),
            "diverged": run.diverged,
            "steps": run.step,
            "calls": sum(run.calls),
            "seed": run.seed,
        }
