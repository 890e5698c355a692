"""One run of `bilevel`, whose stretches benchopt asks for and times."""

from benchopt import BaseSolver

from bilevel import _tree as trees
from bilevel._precision import arithmetic
from bilevel._types import INT32_MAX
from bilevel.engine.budget import Budget
from bilevel.engine.driver import PAGE_LENGTH, Runner
from bilevel.solvers import HostSolver


class Stretches(Runner):
    """A run without evaluations. Making it compiles."""

    def __init__(self, problem, solver, seed):
        super().__init__(problem, solver, seed, Budget(max_steps=INT32_MAX), None)
        self.stayed_finite = True

    def begin(self):
        """Go to the start once more: what a solver computes there belongs on the clock."""
        with arithmetic(self.dtype):
            self.position = self._begin()

    def advance(self, steps):
        """Take so many steps, or those up to the last finite point."""
        stop = self.position.step + steps
        with arithmetic(self.dtype):
            while self.stayed_finite and self.position.step < stop:
                self.stayed_finite = self._advance_towards(stop)

    def _advance_towards(self, stop):
        if isinstance(self.solver, HostSolver):
            return self._take_step()[0]
        page = self._page_at(self.position.step)
        return self._advance_to(min(stop, page.first + PAGE_LENGTH))

    def result(self):
        with arithmetic(self.dtype):
            point = trees.to_numpy(self._point(), self.dtype)
        return {
            "point": point,
            "diverged": not self.stayed_finite,
            "steps": self.position.step,
            "calls": int(self.position.calls.sum()),
            "seed": self.seed,
        }


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
        self.stretches = Stretches(self.problem, self.chosen(), self.seed)

    def run(self, callback):
        self.stretches.begin()
        while callback():
            self.stretches.advance(self.steps_per_iteration)

    def get_result(self):
        return self.stretches.result()
