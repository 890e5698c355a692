"""Running a solver on a problem: to its end, step by step, or from a saved run."""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from bilevel._core import trees
from bilevel._core.compilation import arithmetic
from bilevel._core.extras import Reporter, progress_lines
from bilevel._core.files import as_path
from bilevel._core.types import INT32_MAX, Calls, Point, is_number
from bilevel.engine.driver import Budget, CertifiedTolerance, Criterion, Driver
from bilevel.engine.logs import About, Log, Recorder, warn_user
from bilevel.engine.result import Checkpoints, CheckpointWriter, RunResult, Status, identify, latest, load, write
from bilevel.engine.steps import CompiledSteps, HostSteps, Position, prepare
from bilevel.engine.stopping import Presses, StepError, counting_interrupts, find_failure
from bilevel.oracles.sharding import digest, gather_texts
from bilevel.problems import BilevelProblem
from bilevel.problems.base import NOT_SOLVED
from bilevel.problems.certificate import Certifier
from bilevel.problems.checks import check_flag
from bilevel.solvers import DEFAULT_SOLVER
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
        with counting_interrupts(problem.oracles, limit=1):
            prepared = prepare(problem, solver)
            self.problem, self.solver, self.seed, self._exact = problem, prepared.solver, seed, exact
            with arithmetic(prepared.dtype, problem):
                began = time.perf_counter()
                self._steps = CompiledSteps(prepared, [seed]) if isinstance(solver, Solver) else HostSteps(prepared)
                self._steps.advance(0)
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
        solver : required only if its module is not yet imported, or if it has an optax transformation
        """
        _check_problem(problem)
        if solver is not None:
            _check_input(problem, solver)
            solver = prepare(problem, solver).solver  # saved runs contain it with its defaults filled in
        solver, seed, leaves, rows, best, position = load(latest(as_path("path", path)), problem, solver)
        _check_agreement(problem, path=f"a run of {position[0]} steps")
        run = cls(problem, solver, seed=seed)
        expected, structure = jax.tree.flatten(run.state)
        if [(a.shape, a.dtype) for a in expected] != [(a.shape, a.dtype) for a in leaves]:
            raise ValueError("the saved state does not fit this solver and problem.")
        state, (step, calls, seconds) = jax.tree.unflatten(structure, leaves), position
        run._steps.position = Position(state, step, np.array([calls], np.int64), seconds)
        if rows and np.isnan(rows[-1].get("outer_value", np.nan)):  # an evaluation that failed may succeed now
            run._driver.evaluates_first = bool(rows.pop())
        run._driver.rows[0], run._driver.best = rows, best
        return run

    @property
    def state(self) -> Any:
        """The state of the solver, which contains everything that the next step needs."""
        return self._steps.position.state

    @property
    def point(self) -> Point:
        """The evaluation point: NumPy arrays in the problem's dtype."""
        with arithmetic(self._steps.dtype, self.problem):
            return trees.to_numpy(jax.tree.map(lambda leaf: leaf[0], self._steps.points()), self.problem.dtype)

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
        return self._driver.status() is Status.diverged

    def restart(self) -> None:
        """Return to the start, without compiling again."""
        with arithmetic(self._steps.dtype, self.problem):
            self._steps.begin()
            self._driver = Driver(self.problem, self._steps, exact=self._exact)

    def advance(self, n_steps: int) -> None:
        """Take ``n_steps`` steps without an evaluation, or fewer if the iterates become non-finite."""
        if not is_number(n_steps, Integral) or not 0 <= n_steps <= INT32_MAX - self.step:
            raise ValueError(
                f"`n_steps={n_steps!r}`: must be an integer of at least 0, and less than 2**31 steps in total."
            )
        stop = self.step + int(n_steps)
        with arithmetic(self._steps.dtype, self.problem), counting_interrupts(self._steps.oracles, limit=1):
            while self.step < stop and not self.diverged:
                self._driver.advance(stop)

    def evaluate(self) -> dict[str, float]:
        """Evaluate the point, with the clock stopped, and return the new row of the history."""
        with arithmetic(self._steps.dtype, self.problem), counting_interrupts(self._steps.oracles, limit=1):
            self._driver.evaluate(np.ones(1, bool))
        return dict(self._driver.rows[0][-1])

    def result(self) -> RunResult:
        """Return the run as `bilevel.run` does; the point is evaluated if it has not been."""
        driver, rows, monitor = self._driver, self._driver.rows[0], self.solver.monitor
        if driver.status() is not Status.failed:
            self.evaluate()
        if (status := driver.status()) not in (Status.diverged, Status.failed):
            sentences = [monitor.warning(rows, self.problem.dtype)]
            if status is not Status.interrupted:
                with arithmetic(self._steps.dtype, self.problem):
                    sentences.append(monitor.inner_warning(self._steps.oracles, self.point, rows[-1]))
            for sentence in filter(None, sentences):
                warn_user(sentence)
            driver.warn_unsolved(rows)
        return self._gather(status)

    def _gather(self, status: Status) -> RunResult:
        rows, best = self._driver.rows[0], self._driver.best
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

    @contextmanager
    def _driven(
        self, certifier: Certifier | None, log: Log | None, writer: CheckpointWriter, presses: Presses, report: Reporter
    ) -> Iterator[Driver]:
        """Give the driver its log and checkpoints, and turn Ctrl-C and failed steps into a result."""
        driver, rows, n_processes = self._driver, self._driver.rows[0], self._steps.oracles.n_processes
        writes = n_processes == 1 or jax.process_index() == 0  # of several processes, only the first one
        if writer.settings is not None:
            identity = identify(self.problem)  # once, since it is a pass over all rows of all processes

            def save(path: Path) -> None:
                _, step, calls, seconds = self._steps.position
                write(self._gather(Status.interrupted), path, identity, (step, calls[0].tolist(), seconds))

            writer.save = save if writes else None
        driver.certifier, driver.checkpoints, driver.report = certifier, writer, report
        if n_processes == 1:  # several processes must all take the same steps
            driver.stopped = presses.any
        about = About(self.problem.name, type(self.solver).__name__, self.solver.parameters(), self.seed)
        with arithmetic(self._steps.dtype, self.problem):
            for row in [row for row in rows[-1:] if row["step"] == self.step]:
                row |= driver.certified(self.point)
            with closing(Recorder(log if writes else None, about, tuple(rows))) as driver.recorder:
                try:
                    yield driver
                except KeyboardInterrupt:
                    if presses.forced() or n_processes > 1:
                        raise
                    driver.interrupt()
                except Exception as error:
                    if presses.forced() or (failure := find_failure(self._steps, error)) is None:
                        raise
                    driver.fail()
                    raise StepError(*failure, self.step, error, self.result()) from error
                if presses.any():
                    driver.interrupt()

    def _finish(self, writer: CheckpointWriter) -> RunResult:
        result = self.result()
        writer.write(self.step)
        return result


def run(
    problem: BilevelProblem,
    solver: SolverBase | None = None,
    *,
    seed: int = 0,
    max_steps: int | None = None,
    max_calls: int | None = None,
    max_seconds: float | None = None,
    stop: Criterion | Sequence[Criterion] | None = None,
    eval_every: int | None = None,
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
        a :class:`bilevel.EarlyStopping` when a metric no longer improves. With a tuple the run
        stops as soon as one of its criteria is met
    eval_every : number of steps between two evaluations; by default there are four per doubling of the calls
    exact : if True, each evaluation computes h and its gradient by an exact solution, which may take seconds
    progress : print lines with the progress and the remaining time
    log : receives each row of the history as soon as it is evaluated: :class:`bilevel.CSVLog` or your own
        :class:`bilevel.Log`. If it fails, the run warns and continues
    checkpoint : folder to write the run to at its end, or a :class:`bilevel.Checkpoints` to write it also while it
        continues; `bilevel.resume` reads the last file
    """
    solver = DEFAULT_SOLVER() if solver is None else solver
    writer = CheckpointWriter(checkpoint)
    _check_input(problem, solver, seed, exact=exact, progress=progress)
    if max_steps is None and max_calls is None and max_seconds is None:
        max_steps = solver.monitor.max_steps
    budget = Budget(max_steps, max_calls, max_seconds, stop, eval_every)
    certifier = _check_limits(problem, budget, log, exact=exact)
    _check_agreement(problem, call="run", solver=solver, seed=seed, **vars(budget), checkpoint=writer.settings)
    shown = progress_lines(f"{type(solver).__name__} on {problem.name}", progress)
    with shown as report, counting_interrupts(problem.oracles) as presses:
        report(0.0, "compiling")
        begun = Run(problem, solver, seed=seed, exact=exact)
        with begun._driven(certifier, log, writer, presses, report) as driver:
            driver.drive(budget)
        return begun._finish(writer)


def resume(
    path: str | Path,
    problem: BilevelProblem,
    *,
    solver: SolverBase | None = None,
    max_steps: int | None = None,
    max_calls: int | None = None,
    max_seconds: float | None = None,
    stop: Criterion | Sequence[Criterion] | None = None,
    eval_every: int | None = None,
    progress: bool = False,
    log: Log | None = None,
    checkpoint: str | Path | Checkpoints | None = None,
) -> RunResult:
    """Continue a saved run as if it had never stopped.

    Parameters
    ----------
    path : file written by ``result.save``, or a folder of checkpoints, of which the latest is used
    problem : the problem of the saved run; data, start and values of the losses are compared
    solver : required only if its module is not yet imported, or if it has an optax transformation
    max_steps, max_calls, max_seconds : budgets of the whole run, including its saved part. At least one is required,
        except for a run of `AutoSRBA`, which continues until it ends by itself
    stop, eval_every : the same as for :func:`bilevel.run`
    progress : print lines with the progress and the remaining time
    log : receives each row of the history; the log of the saved run is continued, and a new log first receives the
        rows of the saved run
    checkpoint : folder to write the run to, or a :class:`bilevel.Checkpoints`; it may be the folder of the saved run
    """
    has_budget = not (max_steps is None and max_calls is None and max_seconds is None)
    budget = Budget(max_steps if has_budget else 0, max_calls, max_seconds, stop, eval_every)
    _check_problem(problem)
    certifier = _check_limits(problem, budget, log, exact=True)
    writer = CheckpointWriter(checkpoint, resumed=as_path("path", path))
    _check_agreement(problem, call="resume", solver=solver, **vars(budget), checkpoint=writer.settings)
    shown = progress_lines(f"{path} on {problem.name}", progress)
    with shown as report, counting_interrupts(problem.oracles) as presses:
        report(0.0, "compiling")
        saved = Run.load(path, problem, solver=solver)
        if not has_budget:
            budget = replace(budget, max_steps=saved.solver.monitor.max_steps)
        with saved._driven(certifier, log, writer, presses, report) as driver:
            driver.drive(budget)
        return saved._finish(writer)


def _check_problem(problem: Any) -> None:
    if not isinstance(problem, BilevelProblem):
        raise TypeError(f"`problem` must be a BilevelProblem, got {type(problem).__name__}.")


def _check_input(problem: Any, solver: Any, seed: Any = 0, **flags: Any) -> None:
    _check_problem(problem)
    if not isinstance(solver, SolverBase):
        raise TypeError(f"`solver` must be a solver such as bilevel.SRBA(), got {solver!r}.")
    check_flag(**flags)
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
    texts = gather_texts(json.dumps({name: str(value) for name, value in given.items()}))
    first = json.loads(texts[0])
    for process, there in enumerate(map(json.loads, texts)):
        for name in first | there:
            mine, theirs = (known.get(name, "not given") for known in (first, there))
            if mine != theirs:
                differs = f"`{name}` is {mine} in process 0 and {theirs} in process {process}"
                raise ValueError(f"{differs}: the processes of one run must be started alike.")


def _check_limits(problem: BilevelProblem, budget: Budget, log: Log | None, *, exact: bool) -> Certifier | None:
    if log is not None and not isinstance(log, Log):
        raise TypeError(f"`log` must be a bilevel.Log such as bilevel.CSVLog('run.csv'), got {log!r}.")
    if budget.max_seconds is not None and problem.oracles.n_processes > 1:
        given = f"`max_seconds={budget.max_seconds!r}`"
        raise ValueError(f"{given}: each process has its own clock; use `max_steps` or `max_calls`.")
    if budget.tolerance is not None:
        given = f"`stop={budget.tolerance!r}`"
        if problem.oracles.is_on_host:
            raise ValueError(f"{given}: {NOT_SOLVED}; leave it out.")
        if problem.exact_solver is None:
            declare = "Build the problem with strongly_convex=True if its inner loss is strongly convex."
            raise ValueError(f"{given}: a tolerance needs exact hypergradients. {declare}")
        if not exact:
            raise ValueError(f"{given} needs `exact=True`: a tolerance is a bound of the exact gradient.")
    if budget.certified_tolerance is None:
        return None
    if not (certifier := Certifier(problem)).certified:
        given = f"`stop={CertifiedTolerance(budget.certified_tolerance)!r}`"
        raise ValueError(f"{given}: nothing is proved about this problem. {certifier.why}")
    return certifier
