"""Running a solver on a problem: to its end, by hand, or on from where a saved run stopped."""

from contextlib import closing
from dataclasses import fields
from numbers import Integral
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from bilevel import _tree as trees
from bilevel._optional import progress_bar
from bilevel._precision import arithmetic
from bilevel._types import Calls, Point
from bilevel.engine.driver import Budget, Driver
from bilevel.engine.logs import About, Log, Recorder, warn_user
from bilevel.engine.result import RunResult, Status, load
from bilevel.engine.steps import CompiledSteps, HostSteps, Position, prepare
from bilevel.problems import BilevelProblem
from bilevel.problems.certificate import Certifier
from bilevel.solvers.base import Solver, SolverBase, State


class Run:
    """A run by hand: take steps, look, go on. Making it compiles; `bilevel.run` does all of it in one call.

    Parameters
    ----------
    problem, solver : what to solve, and how; ``run.solver`` has its defaults filled in
    seed : of all random draws
    exact : evaluate h and its gradient too, by an exact solution at each evaluation

    Examples
    --------
    >>> import bilevel
    >>> problem = bilevel.problems.quadratic(100, 50, 5, 3)
    >>> run = bilevel.Run(problem, bilevel.SRBA(batch_size=10))
    >>> run.advance(30)
    >>> run.step, run.evaluate()["step"]
    (30, 30)
    >>> run.advance(20)
    >>> run.result().history["step"].tolist()
    [30, 50]
    """

    def __init__(self, problem: BilevelProblem, solver: SolverBase, *, seed: int = 0, exact: bool = True) -> None:
        _check_input(problem, solver, seed)
        prepared = prepare(problem, solver)
        self.problem, self.solver, self.seed, self._exact = problem, prepared.solver, seed, exact
        with arithmetic(prepared.dtype):
            self._steps = CompiledSteps(prepared, [seed]) if isinstance(solver, Solver) else HostSteps(prepared)
            self._driver = Driver(problem, self._steps, exact=exact)
        self.compile_seconds = self._steps.compile_seconds

    @classmethod
    def load(cls, path: str | Path, problem: BilevelProblem, *, solver: SolverBase | None = None) -> Self:
        """Return a run where a saved one stopped; parameters as for `bilevel.resume`."""
        solver, seed, leaves, history, best = load(Path(path), problem, solver)
        run = cls(problem, solver, seed=seed)
        expected, structure = jax.tree.flatten(run.state)
        if [(a.shape, a.dtype) for a in expected] != [(a.shape, a.dtype) for a in leaves]:
            raise ValueError("the saved state does not fit this solver and problem.")
        state, columns = jax.tree.unflatten(structure, leaves), [column.tolist() for column in history.values()]
        rows = [dict(zip(history, values, strict=True)) for values in zip(*columns, strict=True)]
        calls = np.array([[rows[-1][f"calls_{kind}"] for kind in Calls._fields]], np.int64)
        run._steps.position = Position(state, rows[-1]["step"], calls, rows[-1]["seconds"])
        run._driver.rows[0][0], run._driver.best = rows, best
        return run

    @property
    def state(self) -> State:
        """The state of the solver, which holds all that the next step needs."""
        return self._steps.position.state

    @property
    def point(self) -> Point:
        """The evaluation point: NumPy arrays in the problem's dtype."""
        with arithmetic(self._steps.dtype):
            return trees.to_numpy(self.solver.evaluation_point(self.state), self.problem.dtype)

    @property
    def step(self) -> int:
        """How many steps were taken."""
        return self._steps.position.step

    @property
    def calls(self) -> Calls:
        """The oracle calls so far, by kind."""
        return Calls(*(int(count) for count in self._steps.position.calls[0]))

    @property
    def diverged(self) -> bool:
        """Whether the iterates became non-finite; the run is then at its last finite point, and stays there."""
        return bool(self._driver.diverged[0, 0]) or self._steps.diverged

    def restart(self) -> None:
        """Go to the start once more, without compiling."""
        with arithmetic(self._steps.dtype):
            self._steps.begin()
            self._driver = Driver(self.problem, self._steps, exact=self._exact)

    def advance(self, n_steps: int) -> None:
        """Take ``n_steps`` steps without an evaluation; fewer where the iterates become non-finite before."""
        if isinstance(n_steps, bool) or not isinstance(n_steps, Integral) or n_steps < 0:
            raise ValueError(f"`n_steps={n_steps!r}`: must be an integer of at least 0.")
        stop = self.step + int(n_steps)
        with arithmetic(self._steps.dtype):
            while self.step < stop and not self.diverged:
                self._steps.advance(stop, None)

    def evaluate(self) -> dict[str, float]:
        """Evaluate the point, off the clock, and return the new row of the history."""
        with arithmetic(self._steps.dtype):
            self._driver.evaluate(np.ones((1, 1), bool))
        return dict(self._driver.rows[0][0][-1])

    def result(self) -> RunResult:
        """Return the run as `bilevel.run` does; the point is evaluated if it is not yet."""
        self.evaluate()
        rows, best, status = self._driver.rows[0][0], self._driver.best, self._driver.status(0, 0)
        sentence = self.solver.warning(rows[-1], self.problem.dtype)
        if sentence and status is not Status.diverged:
            warn_user(sentence)
        ran = self.solver, self.seed, self.compile_seconds, self.problem, self.state
        # A metric missing from a row is NaN there.
        names = dict.fromkeys(name for row in rows for name in row)
        history = {name: np.array([row.get(name, np.nan) for row in rows]) for name in names}
        return RunResult(status, self.point, history, *ran, *best)

    def _finish(self, budget: Budget, certifier: Certifier | None, progress: bool, log: Log | None) -> RunResult:
        driver, steps = self._driver, self._steps
        about = About(self.problem.name, type(self.solver).__name__, self.solver.parameters(), self.seed)
        log = log if steps.oracles.n_processes == 1 or jax.process_index() == 0 else None
        driver.certifier = certifier
        title, rows = f"{about.solver} on {about.problem}", driver.rows[0][0]
        with arithmetic(steps.dtype):
            for row in rows[-1:]:
                row |= driver.certified(jax.tree.map(lambda leaf: leaf[0, 0], steps.points()))
            with closing(Recorder(log, about, tuple(rows))) as driver.recorder, progress_bar(title, progress) as report:
                try:
                    # Looks at the clock would make the processes of one run go apart.
                    driver.drive(budget, report, watched=progress and steps.oracles.n_processes == 1)
                except KeyboardInterrupt:
                    driver.interrupted = True
                    driver.evaluate(np.ones((1, 1), bool))
        return self.result()


def run(
    problem: BilevelProblem,
    solver: SolverBase,
    *,
    seed: int = 0,
    max_steps: int | None = None,
    max_calls: int | None = None,
    max_seconds: float | None = None,
    tolerance: float | None = None,
    certified_tolerance: float | None = None,
    eval_every: int | None = None,
    exact: bool = True,
    progress: bool = False,
    log: Log | None = None,
) -> RunResult:
    """Run a solver on a problem until a budget is used up or a tolerance is reached.

    There is a result also when the iterates diverge (status "diverged"), and after Ctrl-C (status "interrupted").

    Parameters
    ----------
    problem, solver : what to solve, and how
    seed : of all random draws
    max_steps, max_calls, max_seconds : budgets, at least one. Oracle calls never exceed theirs (save by the last step
        of a `HostSolver`, whose cost is known once it is taken). Seconds leave compilation and evaluation out
    tolerance : on ‖∇h‖²: stop at the first evaluation where it is at most this; needs a problem with exact solutions
    certified_tolerance : on ‖∇h‖² too, but proved without an exact solve (:mod:`bilevel.problems.certificate`); adds
        the columns ``certified_error``, the bound of ‖D_x - ∇h‖, and ``certified_norm_sq``, that of ‖∇h‖². Needs a
        problem whose constants are known
    eval_every : evaluate each so many steps; by default four times per doubling of the calls
    exact : evaluate h and its gradient too, by an exact solution at each evaluation, which may cost seconds
    progress : show a bar
    log : gets each row of the history as soon as it is evaluated, off the clock: :class:`bilevel.CSVLog`,
        :class:`bilevel.TensorBoardLog`, or your own :class:`bilevel.Log`. Should it fail, the run warns and goes on
    """
    budget = Budget(max_steps, max_calls, max_seconds, tolerance, certified_tolerance, eval_every)
    _check_input(problem, solver, seed)
    certifier = _check_limits(problem, budget, log)
    if tolerance is not None and not exact:
        raise ValueError("`tolerance` needs `exact=True`: it is a bound on the exact gradient.")
    return Run(problem, solver, seed=seed, exact=exact)._finish(budget, certifier, progress, log)


def resume(
    path: str | Path,
    problem: BilevelProblem,
    *,
    solver: SolverBase | None = None,
    progress: bool = False,
    log: Log | None = None,
    **limits: Any,
) -> RunResult:
    """Go on with a saved run, as if it had never stopped.

    Parameters
    ----------
    path : written by ``result.save``
    problem : the same problem; data, start and values of the losses are compared
    solver : needed only for a solver that is not in ``bilevel.SOLVERS``
    progress, log : as for `run`; the log of the saved run goes on, a new one gets the rows of the saved run first
    **limits : budgets, tolerances and ``eval_every``, as for `run`; budgets count the whole run
    """
    unknown = limits.keys() - {field.name for field in fields(Budget)}
    if unknown:
        raise TypeError(f"`{min(unknown)}`: unknown; limits are {', '.join(field.name for field in fields(Budget))}.")
    budget = Budget(**limits)
    certifier = _check_limits(problem, budget, log)
    return Run.load(path, problem, solver=solver)._finish(budget, certifier, progress, log)


def _check_input(problem: BilevelProblem, solver: SolverBase, seed: int) -> None:
    if not isinstance(problem, BilevelProblem):
        raise TypeError(f"`problem` must be a BilevelProblem, got {type(problem).__name__}.")
    if not isinstance(solver, SolverBase):
        raise TypeError(f"`solver` must be a solver such as bilevel.SRBA(), got {solver!r}.")
    if isinstance(seed, bool) or not isinstance(seed, Integral) or not 0 <= seed < 2**32:
        raise ValueError(f"`seed={seed!r}`: must be an integer in [0, 2**32).")


def _check_limits(problem: BilevelProblem, budget: Budget, log: Log | None) -> Certifier | None:
    if log is not None and not isinstance(log, Log):
        raise TypeError(f"`log` must be a bilevel.Log such as bilevel.CSVLog('run.csv'), got {log!r}.")
    if budget.max_seconds is not None and problem.oracles.n_processes > 1:
        given = f"`max_seconds={budget.max_seconds!r}`"
        raise ValueError(f"{given}: each process has its own clock; use `max_steps` or `max_calls`.")
    if budget.tolerance is not None and problem.exact_solver is None:
        raise ValueError("`tolerance` needs exact hypergradients: strongly_convex=True, where the inner loss is.")
    certifier = None if budget.certified_tolerance is None else Certifier(problem)
    if certifier is not None and not certifier.certified:
        raise ValueError(f"`certified_tolerance`: nothing is proved of this problem. {certifier.why}")
    return certifier
