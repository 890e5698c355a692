"""Running a solver on a problem: to its end, step by step, or from a saved run."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from bilevel._core import trees
from bilevel._core.compilation import arithmetic
from bilevel._core.extras import compiling_bar
from bilevel._core.files import as_path
from bilevel._core.types import INT32_MAX, Calls, Point, is_number
from bilevel.engine.driver import Budget, Criterion, Driver
from bilevel.engine.logs import About, Log, Recorder, warn_user
from bilevel.engine.metrics import inner_complaint
from bilevel.engine.result import Checkpoints, CheckpointWriter, RunResult, Status, identify, latest, load, write
from bilevel.engine.steps import CompiledSteps, HostSteps, Position, prepare
from bilevel.engine.stopping import Presses, StepError, counting_interrupts, find_failure, reads_can_be_interrupted
from bilevel.oracles.sharding import digest, gather_texts
from bilevel.problems import BilevelProblem
from bilevel.problems.base import NOT_SOLVED
from bilevel.problems.certificate import Certifier
from bilevel.solvers import AutoSRBA
from bilevel.solvers.base import Solver, SolverBase


class Run:
    """A run that is advanced step by step. `bilevel.run` does all of it in one call.

    Creating the object compiles the program of the steps.

    Parameters
    ----------
    problem : the problem to solve
    solver : the solver; ``run.solver`` has its defaults filled in
    seed : seed of all random draws
    exact : if True, each evaluation computes h and its gradient by an exact solution of the inner problem

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
            problem.fingerprint()  # now, so that a result can be saved even if rows or other processes are lost
            _check_agreement(problem, digest_of_the_problem=problem.fingerprint())
        for reader in problem.oracles.readers:
            reader.held_back = None  # from an earlier run
        with reads_can_be_interrupted(problem.oracles):
            prepared = prepare(problem, solver)
            self.problem, self.solver, self.seed, self._exact = problem, prepared.solver, seed, exact
            with arithmetic(prepared.dtype):
                began = time.perf_counter()
                self._steps = CompiledSteps(prepared, [seed]) if isinstance(solver, Solver) else HostSteps(prepared)
                self._steps.advance(0, None)
                if not problem.oracles.is_on_host:  # a pass over these rows may take minutes
                    self._steps.evaluate({})
                self.compile_seconds = time.perf_counter() - began
                self._steps.begin()
                self._driver = Driver(problem, self._steps, exact=exact)

    @classmethod
    def load(cls, path: str | Path, problem: BilevelProblem, *, solver: SolverBase | None = None) -> Self:
        """Return a run at the last step of a saved run.

        Parameters
        ----------
        path : file written by ``result.save``, or a folder of checkpoints, of which the latest is used
        problem : the problem of the saved run; data, start and values of the losses are compared
        solver : required only if it is not in ``bilevel.SOLVERS``, or has an optax transformation
        """
        _check_problem(problem)
        if solver is not None:
            _check_solver(solver)
            solver = prepare(problem, solver).solver  # saved runs contain it with its defaults filled in
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
        if rows and np.isnan(rows[-1].get("outer_value", np.nan)):  # an evaluation that failed may succeed now
            run._driver.evaluates_first = bool(rows.pop())
        run._driver.rows[0][0], run._driver.best = rows, best
        return run

    @property
    def state(self) -> Any:
        """The state of the solver, which contains everything that the next step needs."""
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
        """The number of steps taken."""
        return self._steps.position.step

    @property
    def calls(self) -> Calls:
        """The oracle calls so far, by kind."""
        return Calls(*(int(count) for count in self._steps.position.calls[0]))

    @property
    def diverged(self) -> bool:
        """True if the iterates became non-finite; the run is then at its last finite point, and stays there."""
        self._driver.finite &= self._steps.finite
        return self._driver.status(0, 0) is Status.diverged

    def restart(self) -> None:
        """Return to the start, without compiling again."""
        with arithmetic(self._steps.dtype):
            self._steps.begin()
            self._driver = Driver(self.problem, self._steps, exact=self._exact)

    def advance(self, n_steps: int) -> None:
        """Take ``n_steps`` steps without an evaluation, or fewer if the iterates become non-finite."""
        if not is_number(n_steps, Integral) or not 0 <= n_steps <= INT32_MAX - self.step:
            raise ValueError(
                f"`n_steps={n_steps!r}`: must be an integer of at least 0, and less than 2**31 steps in total."
            )
        stop = self.step + int(n_steps)
        with arithmetic(self._steps.dtype), reads_can_be_interrupted(self._steps.oracles):
            while self.step < stop and not self.diverged:
                self._steps.advance(stop, None)

    def evaluate(self) -> dict[str, float]:
        """Evaluate the point, with the clock stopped, and return the new row of the history."""
        with arithmetic(self._steps.dtype), reads_can_be_interrupted(self._steps.oracles):
            self._driver.evaluate(np.ones((1, 1), bool))
        return dict(self._driver.rows[0][0][-1])

    def result(self) -> RunResult:
        """Return the run as `bilevel.run` does; the point is evaluated if it has not been."""
        if not self._driver.failed:
            self.evaluate()
        status = self._driver.status(0, 0) or Status.out_of_budget
        if status not in (Status.diverged, Status.failed):
            self._warn(is_complete=status is not Status.interrupted)
        return self._gather(status)

    def _warn(self, is_complete: bool) -> None:
        """Show the warnings of the solver, and those about z and about exact solutions."""
        rows, monitor = self._driver.rows[0][0], self.solver.monitor
        if sentence := monitor.warning(rows[-1], self.problem.dtype):
            warn_user(sentence)
        if is_complete and monitor.checks_inner_solution(self.step):
            with arithmetic(self._steps.dtype):
                if sentence := inner_complaint(self._steps.oracles, self._point(), rows[-1]):
                    warn_user(f"{type(self.solver).__name__}: {sentence}")
        self._driver.warn_unsolved(rows)

    def _gather(self, status: Status) -> RunResult:
        rows, best = self._driver.rows[0][0], self._driver.best
        ran = self.solver, self.seed, self.compile_seconds, self.problem, self.state
        # A metric is NaN in the rows that do not have it.
        names = dict.fromkeys(name for row in rows for name in row)
        history = {name: np.array([row.get(name, np.nan) for row in rows]) for name in names}
        return RunResult(status, self.point, history, *ran, *best, self._reason(status, rows[-1]))

    def _reason(self, status: Status, row: dict[str, Any]) -> str:
        """Return why the run ended, as the solver explains it or else the status."""
        if status is Status.converged:
            reached = "The squared norm of the hypergradient, or its certified bound, fell to the tolerance."
            return self.solver.monitor.end(row) or reached
        if status is Status.out_of_budget:
            return " ".join(filter(None, [status.sentence, self.solver.monitor.unfinished(row)]))
        return status.sentence

    def _checkpoint_to(self, writer: CheckpointWriter) -> None:
        """Make the driver write checkpoints; of several processes, only the first one writes."""
        if writer.settings is None:
            return
        identity = identify(self.problem)  # once, since it is a pass over all rows of all processes

        def save(path: Path) -> None:
            _, step, calls, seconds = self._steps.position
            write(self._gather(Status.interrupted), path, identity, (step, calls[0].tolist(), seconds))

        writer.save = save if self._is_first_process else None
        self._driver.checkpoints = writer

    @property
    def _is_first_process(self) -> bool:
        return self._steps.oracles.n_processes == 1 or jax.process_index() == 0

    @contextmanager
    def _driven(
        self, certifier: Certifier | None, log: Log | None, writer: CheckpointWriter, presses: Presses
    ) -> Iterator[Driver]:
        """Give the driver its log and checkpoints, and turn Ctrl-C and failed steps into a result."""
        self._checkpoint_to(writer)
        driver, rows = self._driver, self._driver.rows[0][0]
        about = About(self.problem.name, type(self.solver).__name__, self.solver.parameters(), self.seed)
        driver.certifier = certifier
        with arithmetic(self._steps.dtype):
            for row in [row for row in rows[-1:] if row["step"] == self.step]:
                row |= driver.certified(self._point())
            recorder = Recorder(log if self._is_first_process else None, about, tuple(rows))
            with closing(recorder) as driver.recorder:
                try:
                    yield driver
                except KeyboardInterrupt:
                    if presses.forced() or self._steps.oracles.n_processes > 1:
                        raise
                    driver.evaluate(np.ones((1, 1), bool))
                    driver.interrupted = True
                except Exception as error:
                    if presses.forced() or (failure := find_failure(self._steps, error)) is None:
                        raise
                    driver.fail()
                    raise StepError(failure, self.step, error, self.result()) from error
                driver.interrupted |= presses.any()


def run(
    problem: BilevelProblem,
    solver: SolverBase | None = None,
    *,
    seed: int = 0,
    max_steps: int | None = None,
    max_calls: int | None = None,
    max_seconds: float | None = None,
    stop: Criterion | Sequence[Criterion] | None = None,
    eval_every: int | tuple[int | None, int] | None = None,
    exact: bool = True,
    progress: bool = False,
    log: Log | None = None,
    checkpoint: str | Path | Checkpoints | None = None,
) -> RunResult:
    """Run a solver on a problem until it converges or a budget is used up.

    A run whose iterates diverge returns a result with the status "diverged". Ctrl-C ends the run after the current step
    with the status "interrupted"; pressed twice, it raises KeyboardInterrupt at once. If a loss raises, rows cannot be
    read or another process is lost, `bilevel.StepError` is raised, which contains the result so far.

    Parameters
    ----------
    problem : the problem to solve
    solver : the solver; by default `AutoSRBA()`, which needs no tuning
    seed : seed of all random draws
    max_steps, max_calls, max_seconds : budgets of steps, oracle calls and seconds. At least one is required, except
        with `AutoSRBA`, which ends by itself, after 300 000 steps at the latest. The budget of calls is never exceeded,
        except by the last step of a `HostSolver`, whose cost is known only afterwards. Seconds do not include
        compilation and evaluations, and a step of a `HostSolver` is given up after twice the limit
    stop : when the run stops before its budget is used up. A number stops it at the first evaluation with ‖∇h‖² of at
        most this, which requires exact solutions; a :class:`bilevel.CertifiedTolerance` at a certified bound of ‖∇h‖²;
        a :class:`bilevel.EarlyStopping` when a metric no longer improves. A tuple combines them
    eval_every : number of steps between two evaluations; by default there are four per doubling of the calls. The
        second number of a pair is for the problem's own metrics, such as those of held-out rows, which are also
        evaluated at the start and at the end; by default they are part of each evaluation
    exact : if True, each evaluation computes h and its gradient by an exact solution, which may take seconds
    progress : show a progress bar with the remaining time, or plain lines if there is no terminal
    log : receives each row of the history as soon as it is evaluated: :class:`bilevel.CSVLog`,
        :class:`bilevel.TensorBoardLog`, or your own :class:`bilevel.Log`. If it fails, the run warns and continues
    checkpoint : folder to write the run to at its end, or a :class:`bilevel.Checkpoints` to write it also while it
        continues; `bilevel.resume` reads the last file
    """
    solver = AutoSRBA() if solver is None else solver
    writer = CheckpointWriter(checkpoint)
    writer.check_owner()
    _check_input(problem, solver, seed, exact=exact, progress=progress)
    if max_steps is None and max_calls is None and max_seconds is None:
        max_steps = solver.monitor.max_steps
    budget = Budget(max_steps, max_calls, max_seconds, stop, eval_every)
    certifier = _check_limits(problem, budget, log)
    if budget.tolerance is not None and not exact:
        raise ValueError(f"`stop={stop!r}` needs `exact=True`: a tolerance is a bound of the exact gradient.")
    _check_agreement(problem, call="run", solver=solver, seed=seed, **vars(budget), checkpoint=writer.settings)
    with (
        compiling_bar(f"{type(solver).__name__} on {problem.name}", progress) as report,
        _interrupts(problem) as presses,
    ):
        begun = Run(problem, solver, seed=seed, exact=exact)
        with begun._driven(certifier, log, writer, presses) as driver:
            driver.drive(budget, report, _stop_request(problem, presses))
        return _finish(begun, writer)


def resume(
    path: str | Path,
    problem: BilevelProblem,
    *,
    solver: SolverBase | None = None,
    max_steps: int | None = None,
    max_calls: int | None = None,
    max_seconds: float | None = None,
    stop: Criterion | Sequence[Criterion] | None = None,
    eval_every: int | tuple[int | None, int] | None = None,
    progress: bool = False,
    log: Log | None = None,
    checkpoint: str | Path | Checkpoints | None = None,
) -> RunResult:
    """Continue a saved run as if it had never stopped.

    Parameters
    ----------
    path : file written by ``result.save``, or a folder of checkpoints, of which the latest is used
    problem : the problem of the saved run; data, start and values of the losses are compared
    solver : required only if it is not in ``bilevel.SOLVERS``, or has an optax transformation
    max_steps, max_calls, max_seconds : budgets of the whole run, including its saved part. At least one is required,
        except for a run of `AutoSRBA`, which continues until it ends by itself
    stop, eval_every : the same as for :func:`bilevel.run`
    progress : show a progress bar with the remaining time, or plain lines if there is no terminal
    log : receives each row of the history; the log of the saved run is continued, and a new log first receives the
        rows of the saved run
    checkpoint : folder to write the run to, or a :class:`bilevel.Checkpoints`; it may be the folder of the saved run
    """
    has_budget = not (max_steps is None and max_calls is None and max_seconds is None)
    budget = Budget(max_steps if has_budget else 0, max_calls, max_seconds, stop, eval_every)
    _check_problem(problem)
    certifier, writer = _check_limits(problem, budget, log), CheckpointWriter(checkpoint)
    writer.check_owner(as_path("path", path))
    _check_agreement(problem, call="resume", solver=solver, **vars(budget), checkpoint=writer.settings)
    with compiling_bar(f"{path} on {problem.name}", progress) as report, _interrupts(problem) as presses:
        saved = Run.load(path, problem, solver=solver)
        if not has_budget:
            budget = replace(budget, max_steps=saved.solver.monitor.max_steps)
        with saved._driven(certifier, log, writer, presses) as driver:
            driver.drive(budget, report, _stop_request(problem, presses))
        return _finish(saved, writer)


def _interrupts(problem: BilevelProblem) -> AbstractContextManager[Presses]:
    """Count presses of Ctrl-C, even while a program is compiled. One of several processes cannot end by itself."""
    return counting_interrupts(problem.oracles, 2 if problem.oracles.n_processes == 1 else 1)


def _stop_request(problem: BilevelProblem, presses: Presses) -> Callable[[], bool] | None:
    """Return what the driver calls to see whether to stop; several processes must all take the same steps."""
    return presses.any if problem.oracles.n_processes == 1 else None


def _finish(run: Run, writer: CheckpointWriter) -> RunResult:
    result = run.result()
    writer.write(run.step)
    return result


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
    """Raise ValueError in every process if the processes of one run were started with different arguments."""
    if problem.oracles.n_processes == 1:
        return
    if solver is not None:
        given |= {"solver": type(solver).__name__, **solver.parameters()}
    if isinstance(solver, Solver):  # `parameters` does not contain the values of arrays
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
        raise ValueError(f"`stop={budget.stop!r}`: {NOT_SOLVED}; leave it out.")
    if budget.tolerance is not None and problem.exact_solver is None:
        raise ValueError(
            f"`stop={budget.stop!r}`: a tolerance needs exact hypergradients. Build the problem with "
            "strongly_convex=True if its inner loss is strongly convex."
        )
    certifier = None if budget.certified_tolerance is None else Certifier(problem)
    if certifier is not None and not certifier.certified:
        raise ValueError(f"`stop={budget.stop!r}`: nothing is proved about this problem. {certifier.why}")
    return certifier
