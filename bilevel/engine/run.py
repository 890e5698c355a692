"""Running a solver on a problem: to its end, by hand, or on from where a saved run stopped."""

import json
from contextlib import AbstractContextManager, closing
from dataclasses import fields, replace
from numbers import Integral
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from bilevel import _tree as trees
from bilevel._io import as_path
from bilevel._precision import arithmetic
from bilevel._progress import Reporter, compiling_bar
from bilevel._types import INT32_MAX, Calls, Point, is_number
from bilevel.engine.checkpoints import Checkpoints, latest
from bilevel.engine.driver import Budget, Driver, EarlyStopping
from bilevel.engine.logs import About, Log, Recorder, warn_user
from bilevel.engine.metrics import inner_complaint
from bilevel.engine.result import RunResult, Status, identify, load, write
from bilevel.engine.steps import CompiledSteps, HostSteps, Position, prepare
from bilevel.engine.stopping import Presses, StepError, find_failure, first_interrupt_asks, reads_can_be_interrupted
from bilevel.oracles.sharding import digest, gather_texts
from bilevel.problems import BilevelProblem
from bilevel.problems.base import NOT_SOLVED
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
        _check_input(problem, solver, seed, exact=exact)
        _check_agreement(problem, solver=solver, seed=seed, exact=exact)
        if problem.oracles.is_on_host or problem.oracles.n_processes > 1:
            problem.fingerprint()  # now: a result can then be saved where rows or other processes are lost
            _check_agreement(problem, digest_of_the_problem=problem.fingerprint())
        for reader in problem.oracles.readers:
            reader.held_back = None  # of an earlier run
        with reads_can_be_interrupted(problem.oracles):
            prepared = prepare(problem, solver)
            self.problem, self.solver, self.seed, self._exact = problem, prepared.solver, seed, exact
            with arithmetic(prepared.dtype):
                self._steps = CompiledSteps(prepared, [seed]) if isinstance(solver, Solver) else HostSteps(prepared)
                self._driver = Driver(problem, self._steps, exact=exact)
        self.compile_seconds = self._steps.compile_seconds

    @classmethod
    def load(cls, path: str | Path, problem: BilevelProblem, *, solver: SolverBase | None = None) -> Self:
        """Return a run where a saved one stopped; parameters as for `bilevel.resume`."""
        _check_problem(problem)
        if solver is not None:
            _check_solver(solver)
            solver = prepare(problem, solver).solver  # saved runs know it with its defaults filled in
        solver, seed, leaves, history, best, position = load(latest(as_path("path", path)), problem, solver)
        _check_agreement(problem, path=f"a run of {position[0]} steps")
        run = cls(problem, solver, seed=seed)
        expected, structure = jax.tree.flatten(run.state)
        if [(a.shape, a.dtype) for a in expected] != [(a.shape, a.dtype) for a in leaves]:
            raise ValueError("the saved state does not fit this solver and problem.")
        state, columns = jax.tree.unflatten(structure, leaves), [column.tolist() for column in history.values()]
        rows = [dict(zip(history, values, strict=True)) for values in zip(*columns, strict=True)]
        step, calls, seconds = position
        run._steps.position = Position(state, step, np.array([calls], np.int64), seconds)
        if rows and np.isnan(rows[-1].get("outer_value", np.nan)):  # what failed may succeed now
            run._driver.evaluates_first = bool(rows.pop())
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
            return trees.to_numpy(self._point(), self.problem.dtype)

    def _point(self) -> Point:
        return jax.tree.map(lambda leaf: leaf[0, 0], self._steps.points())

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
        if not is_number(n_steps, Integral) or not 0 <= n_steps <= INT32_MAX - self.step:
            raise ValueError(f"`n_steps={n_steps!r}`: must be an integer of at least 0, for less than 2**31 in all.")
        stop = self.step + int(n_steps)
        with arithmetic(self._steps.dtype), reads_can_be_interrupted(self._steps.oracles):
            while self.step < stop and not self.diverged:
                self._steps.advance(stop, None)

    def evaluate(self) -> dict[str, float]:
        """Evaluate the point, off the clock, and return the new row of the history."""
        with arithmetic(self._steps.dtype), reads_can_be_interrupted(self._steps.oracles):
            self._driver.evaluate(np.ones((1, 1), bool))
        return dict(self._driver.rows[0][0][-1])

    def result(self) -> RunResult:
        """Return the run as `bilevel.run` does; the point is evaluated if it is not yet."""
        if not self._driver.failed:
            self.evaluate()
        rows, status = self._driver.rows[0][0], self._driver.status(0, 0)
        ended = status not in (Status.diverged, Status.failed)
        if ended and (sentence := self.solver.warning(rows[-1], self.problem.dtype)):
            warn_user(sentence)
        if ended and status is not Status.interrupted and self.solver.may_leave_inner_behind(self.step):
            with arithmetic(self._steps.dtype):
                if sentence := inner_complaint(self._steps.oracles, self._point(), rows[-1]):
                    warn_user(f"{type(self.solver).__name__}: {sentence}")
        if ended:
            self._driver.warn_unsolved(rows)
        return self._gather(status)

    def _gather(self, status: Status) -> RunResult:
        rows, best = self._driver.rows[0][0], self._driver.best
        ran = self.solver, self.seed, self.compile_seconds, self.problem, self.state
        # A metric missing from a row is NaN there.
        names = dict.fromkeys(name for row in rows for name in row)
        history = {name: np.array([row.get(name, np.nan) for row in rows]) for name in names}
        return RunResult(status, self.point, history, *ran, *best, self._reason(status, rows[-1]))

    def _reason(self, status: Status, row: dict[str, Any]) -> str:
        """Return why the run ended, in the words of the solver where it has any."""
        if status is Status.converged:
            reached = "The squared norm of the hypergradient, or its certified bound, fell to the tolerance."
            return self.solver.end(row) or reached
        if status is Status.out_of_budget:
            return " ".join(filter(None, [status.sentence, self.solver.shortfall(row)]))
        return status.sentence

    def _checkpoint_to(self, checkpoints: Checkpoints) -> None:
        """Have the driver write checkpoints; of several processes only the first does."""
        if checkpoints.folder is None:
            return
        identity = identify(self.problem)  # once: it takes a pass over all rows, of all processes

        def save(path: Path) -> None:
            _, step, calls, seconds = self._steps.position
            write(self._gather(Status.interrupted), path, identity, (step, calls[0].tolist(), seconds))

        first = self._steps.oracles.n_processes == 1 or jax.process_index() == 0
        checkpoints.save = save if first else None
        self._driver.checkpoints = checkpoints

    def _finish(
        self,
        budget: Budget,
        certifier: Certifier | None,
        report: Reporter,
        log: Log | None,
        checkpoints: Checkpoints,
        presses: Presses,
    ) -> RunResult:
        self._checkpoint_to(checkpoints)
        driver, steps = self._driver, self._steps
        about = About(self.problem.name, type(self.solver).__name__, self.solver.parameters(), self.seed)
        log = log if steps.oracles.n_processes == 1 or jax.process_index() == 0 else None
        driver.certifier = certifier
        rows = driver.rows[0][0]
        with arithmetic(steps.dtype):
            for row in [row for row in rows[-1:] if row["step"] == self.step]:
                row |= driver.certified(self._point())
            # Several processes take the same steps: none of them may end after a step of its own choice.
            alone = steps.oracles.n_processes == 1
            with closing(Recorder(log, about, tuple(rows))) as driver.recorder:
                try:
                    driver.drive(budget, report, presses.asked if alone else None)
                except KeyboardInterrupt:
                    if presses.forced() or not alone:
                        raise
                    driver.interrupted = True
                    driver.evaluate(np.ones((1, 1), bool))
                except Exception as error:
                    if presses.forced() or (failure := find_failure(steps, error)) is None:
                        raise
                    driver.fail()
                    raise StepError(failure, self.step, error, self.result()) from error
                driver.interrupted |= presses.asked()
        result = self.result()
        checkpoints.write(self.step)
        return result


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
    metrics_every: int | None = None,
    early_stopping: EarlyStopping | None = None,
    exact: bool = True,
    progress: bool = False,
    log: Log | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int | float | None = None,
    keep: int = 3,
) -> RunResult:
    """Run a solver on a problem until a budget is used up or a tolerance is reached.

    There is a result also when the iterates diverge (status "diverged"), and after Ctrl-C (status "interrupted"), which
    ends the run after the step that it is in; pressed twice, it raises KeyboardInterrupt at once. If a loss raises,
    rows cannot be read or another process is lost, `bilevel.StepError` says so, and has the result so far.

    Parameters
    ----------
    problem, solver : what to solve, and how
    seed : of all random draws
    max_steps, max_calls, max_seconds : budgets, at least one, save for a solver that ends by itself, such as
        ``SRBA("auto")``, after 300 000 steps at the latest. Oracle calls never exceed theirs (save by the last step
        of a `HostSolver`, whose cost is known once it is taken). Seconds leave compilation and evaluation out,
        and a step of a `HostSolver` that is not done by twice the limit is given up
    tolerance : on ‖∇h‖²: stop at the first evaluation where it is at most this; needs a problem with exact solutions
    certified_tolerance : on ‖∇h‖² too, but proved without an exact solve (:mod:`bilevel.problems.certificate`); adds
        the columns ``certified_error``, the bound of ‖D_x - ∇h‖, and ``certified_norm_sq``, that of ‖∇h‖². Needs a
        problem whose constants are known
    eval_every : evaluate each so many steps; by default four times per doubling of the calls
    metrics_every : evaluate the problem's own metrics, as those of held-out rows, each so many steps, at the start and
        at the end; by default at each evaluation
    early_stopping : a :class:`bilevel.EarlyStopping`: stop where a metric has not improved for some evaluations
    exact : evaluate h and its gradient too, by an exact solution at each evaluation, which may cost seconds
    progress : show a bar with the time left; plain lines where there is no terminal, as in a log
    log : gets each row of the history as soon as it is evaluated, off the clock: :class:`bilevel.CSVLog`,
        :class:`bilevel.TensorBoardLog`, or your own :class:`bilevel.Log`. Should it fail, the run warns and goes on
    checkpoint : folder to write the run to as it goes on, and at its end; `bilevel.resume` goes on from its last file
    checkpoint_every : steps where it is an integer, seconds where it is a float, as 60.0
    keep : how many of the files stay
    """
    checkpoints = Checkpoints(checkpoint, checkpoint_every, keep)
    checkpoints.check_owner()
    _check_input(problem, solver, seed, exact=exact, progress=progress)
    if max_steps is None and max_calls is None and max_seconds is None:
        max_steps = solver.own_max_steps()
    limits = max_steps, max_calls, max_seconds, tolerance, certified_tolerance
    budget = Budget(*limits, eval_every, metrics_every, early_stopping)
    certifier = _check_limits(problem, budget, log)
    if tolerance is not None and not exact:
        raise ValueError("`tolerance` needs `exact=True`: it is a bound on the exact gradient.")
    when = {"checkpoint": checkpoint is not None, "checkpoint_every": checkpoint_every}
    _check_agreement(problem, call="run", solver=solver, seed=seed, **vars(budget), **when)
    with (
        compiling_bar(f"{type(solver).__name__} on {problem.name}", progress) as report,
        _interrupts(problem) as presses,
    ):
        begun = Run(problem, solver, seed=seed, exact=exact)
        return begun._finish(budget, certifier, report, log, checkpoints, presses)


def resume(
    path: str | Path,
    problem: BilevelProblem,
    *,
    solver: SolverBase | None = None,
    progress: bool = False,
    log: Log | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int | float | None = None,
    keep: int = 3,
    **limits: Any,
) -> RunResult:
    """Go on with a saved run, as if it had never stopped.

    Parameters
    ----------
    path : written by ``result.save``, or a folder of checkpoints, of which the latest counts
    problem : the same problem; data, start and values of the losses are compared
    solver : needed only for one that is not in ``bilevel.SOLVERS``, or that has a transformation of optax
    progress, log : as for `run`; the log of the saved run goes on, a new one gets the rows of the saved run first
    checkpoint, checkpoint_every, keep : as for `run`; the folder may be that of the saved run
    **limits : budgets, tolerances, ``eval_every``, ``metrics_every``, ``early_stopping``, as for `run`; budgets count
        the whole run. Without a budget, a solver that ends by itself continues until it does
    """
    unknown = limits.keys() - {field.name for field in fields(Budget)}
    if unknown:
        raise TypeError(f"`{min(unknown)}`: unknown; limits are {', '.join(field.name for field in fields(Budget))}.")
    has_budget = any(limits.get(name) is not None for name in ("max_steps", "max_calls", "max_seconds"))
    budget = Budget(**limits if has_budget else limits | {"max_steps": 0})
    _check_problem(problem)
    certifier, checkpoints = _check_limits(problem, budget, log), Checkpoints(checkpoint, checkpoint_every, keep)
    checkpoints.check_owner(as_path("path", path))
    when = {"checkpoint": checkpoint is not None, "checkpoint_every": checkpoint_every}
    _check_agreement(problem, call="resume", solver=solver, **vars(budget), **when)
    with compiling_bar(f"{path} on {problem.name}", progress) as report, _interrupts(problem) as presses:
        saved = Run.load(path, problem, solver=solver)
        if not has_budget:
            budget = replace(budget, max_steps=saved.solver.own_max_steps())
        return saved._finish(budget, certifier, report, log, checkpoints, presses)


def _interrupts(problem: BilevelProblem) -> AbstractContextManager[Presses]:
    """Count presses of Ctrl-C, also while a run is compiled; of several processes none can end by itself."""
    return first_interrupt_asks(problem.oracles, 2 if problem.oracles.n_processes == 1 else 1)


def _check_problem(problem: Any) -> None:
    if not isinstance(problem, BilevelProblem):
        raise TypeError(f"`problem` must be a BilevelProblem, got {type(problem).__name__}.")


def _check_solver(solver: Any) -> None:
    if not isinstance(solver, SolverBase):
        raise TypeError(f"`solver` must be a solver such as bilevel.SRBA(), got {solver!r}.")


def _check_input(problem: Any, solver: Any, seed: Any, **flags: Any) -> None:
    _check_problem(problem)
    _check_solver(solver)
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ValueError(f"`{name}={value!r}`: must be True or False.")
    if not is_number(seed, Integral) or not 0 <= seed < 2**32:
        raise ValueError(f"`seed={seed!r}`: must be an integer in [0, 2**32).")


def _check_agreement(problem: BilevelProblem, /, solver: SolverBase | None = None, **given: Any) -> None:
    """Refuse to run over several processes that were started differently; all of them refuse."""
    if problem.oracles.n_processes == 1:
        return
    if solver is not None:
        given |= {"solver": type(solver).__name__, **solver.parameters()}
    if isinstance(solver, Solver):  # `parameters` leaves out what arrays hold
        given["arrays of `solver`"] = digest(solver.cast(problem.dtype)).hex()
    everywhere = [json.loads(text) for text in gather_texts(json.dumps({name: str(given[name]) for name in given}))]
    for process, there in enumerate(everywhere):
        for name in everywhere[0] | there:
            values = [known.get(name, "not given") for known in (everywhere[0], there)]
            if values[0] != values[1]:
                told = f"`{name}` is {values[0]} in process 0 and {values[1]} in process {process}"
                raise ValueError(f"{told}: the processes of one run must be started alike.")


def _check_limits(problem: BilevelProblem, budget: Budget, log: Log | None) -> Certifier | None:
    if log is not None and not isinstance(log, Log):
        raise TypeError(f"`log` must be a bilevel.Log such as bilevel.CSVLog('run.csv'), got {log!r}.")
    if budget.max_seconds is not None and problem.oracles.n_processes > 1:
        given = f"`max_seconds={budget.max_seconds!r}`"
        raise ValueError(f"{given}: each process has its own clock; use `max_steps` or `max_calls`.")
    if budget.tolerance is not None and problem.oracles.is_on_host:
        raise ValueError(f"`tolerance={budget.tolerance!r}`: {NOT_SOLVED}; leave it out.")
    if budget.tolerance is not None and problem.exact_solver is None:
        raise ValueError("`tolerance` needs exact hypergradients: strongly_convex=True, where the inner loss is.")
    certifier = None if budget.certified_tolerance is None else Certifier(problem)
    if certifier is not None and not certifier.certified:
        raise ValueError(f"`certified_tolerance`: nothing is proved of this problem. {certifier.why}")
    return certifier
