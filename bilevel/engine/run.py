"""Running a solver on a problem, and going on with a saved run."""

from pathlib import Path

from bilevel.engine.budget import Budget
from bilevel.engine.driver import Runner
from bilevel.engine.logs import Log
from bilevel.engine.result import RunResult
from bilevel.problems import BilevelProblem
from bilevel.solvers.base import SolverBase


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
    progress: bool = False,
    log: Log | None = None,
) -> RunResult:
    """Run a solver on a problem until a budget is used up or a tolerance is reached.

    Parameters
    ----------
    problem, solver : what to solve, and how
    seed : of all random draws
    max_steps, max_calls, max_seconds : budgets, at least one; calls are those of the ledger and are never
        exceeded (save by the last step of Exact and HOAG, whose cost is known once it is taken), seconds are those
        of stepping alone (no compilation, no evaluation)
    tolerance : stop at the first evaluation where ||∇h||² is at most this; needs a problem with a reference
    certified_tolerance : stop at the first evaluation where ||∇h||² is proved to be at most this, by a certificate
        (:mod:`bilevel.certificate`) and no exact solve; adds the columns ``certified_error``, the bound of
        ||D_x - ∇h||, and ``certified_norm_sq``, that of ||∇h||². Needs a problem whose constants are known
    eval_every : evaluate each so many steps; by default four times per doubling of the calls
    progress : show a bar
    log : gets each row of the history as soon as it is evaluated, off the clock: :class:`bilevel.CSVLog`,
        :class:`bilevel.TensorBoardLog`, or your own :class:`bilevel.Log`. Should it fail, the run warns and goes on

    Returns
    -------
    RunResult
        Also when the iterates diverge (status "diverged", the last finite point kept), and after Ctrl-C (status
        "interrupted").
    """
    budget = Budget(max_steps, max_calls, max_seconds, tolerance, certified_tolerance)
    runner = Runner(problem, solver, seed, budget, eval_every, log)
    return runner.finish(progress)


def resume(
    path: str | Path,
    problem: BilevelProblem,
    *,
    solver: SolverBase | None = None,
    max_steps: int | None = None,
    max_calls: int | None = None,
    max_seconds: float | None = None,
    tolerance: float | None = None,
    certified_tolerance: float | None = None,
    eval_every: int | None = None,
    progress: bool = False,
    log: Log | None = None,
) -> RunResult:
    """Go on with a saved run, as if it had never stopped.

    Parameters
    ----------
    path : written by ``result.save``
    problem : the same problem; data, start and values of the losses are compared
    solver : needed only for a solver that is not in ``bilevel.SOLVERS``
    max_steps, max_calls, max_seconds, tolerance, certified_tolerance, eval_every, progress : as for `run`; budgets
        count the whole run, with what the file already holds
    log : as for `run`; the log of the saved run goes on, one that is new gets the rows of the saved run first
    """
    from bilevel.engine.checkpoint import load

    budget = Budget(max_steps, max_calls, max_seconds, tolerance, certified_tolerance)
    saved = load(Path(path), problem, solver)
    runner = Runner(problem, saved.solver, saved.seed, budget, eval_every, log)
    runner.restore(saved.state_leaves, saved.rows)
    return runner.finish(progress)
