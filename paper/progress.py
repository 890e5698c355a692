"""How far runs come on :func:`paper.worst_case.worst_case`, compared with what the lower bound allows (th:lower_bound).

Every point that a linear method computes from 0 lies in the span of the gradients of F it has used; gradients of G only
carry coordinates from one variable to another. A query of row j at a point that has reached k coordinates of chain j
reveals coordinate k + 1 of this chain and no coordinate of another (app:prop:span). Hence after n_j queries of row j

    the nonzero coordinates of chain j, in z, x and v together, are among its first n_j,

for any order of moves and of rows. So t queries reach at most t coordinates in all and complete at most t / T chains. A
chain is incomplete while the last two of its T + 1 coordinates are 0 in x. With |I| incomplete chains

    ||∇h(x)||²  >=  λ² α^(3/2) |I| / (16 β² m²)  =  2 ε |I| / m                        (lemma:lower_bound_grad_h),

which keeps ||∇h||² above ε as long as t <= m T / 2, since then |I| >= m/2 (and a single chain satisfies its bound with
room to spare).
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from bilevel._core import trees
from bilevel._core.types import Point
from bilevel.engine.run import run
from bilevel.problems import BilevelProblem
from bilevel.solvers import SolverBase
from paper.worst_case import CoordinateChains, WorstCaseOracles

# Solvers that leave the span of gradients, with the reason. The bound does not apply to them.
OUTSIDE = {"PZOBO": "moves x along Gaussians, which reach all coordinates at once"}


def reach(point: Point, problem: BilevelProblem) -> Point:
    """Return the number of coordinates that a point has reached in each chain of the worst case.

    Parameters
    ----------
    point : any point of a run
    problem : a problem of :func:`paper.worst_case.worst_case` with ``rotation="coordinates"``, in which the chains lie
        along the axes, so that coordinates that have not been reached are exactly 0

    Returns
    -------
    reached : arrays of shape (m,) for z, x and v, with the number of the last nonzero coordinate of each chain, or 0
    """
    if not isinstance(problem.oracles, WorstCaseOracles):
        raise ValueError(f"`problem={problem.name!r}`: must be made by paper.worst_case.worst_case.")
    if not isinstance(problem.oracles, CoordinateChains):
        reason = "its chains lie along a random basis, where rounding errors reach every coordinate"
        raise ValueError(f"`problem`: {reason}; build it with rotation='coordinates': equal up to the rotation.")
    places, m = np.arange(1, int(problem.info["T"]) + 2), problem.n_outer
    return Point(*(np.max(places * (np.asarray(part).reshape(m, -1) != 0), axis=1) for part in point))


def n_completed(point: Point, problem: BilevelProblem) -> int:
    """Return m - |I|, the number of chains with a nonzero value in x at one of their last two coordinates."""
    return int(np.sum(reach(point, problem).outer_var >= problem.info["T"]))


def gradient_floor(problem: BilevelProblem, completed: np.ndarray | int) -> np.ndarray:
    """Return λ² α^(3/2) |I| / (16 β² m²) = 2 ε |I| / m for |I| = m - completed (lemma:lower_bound_grad_h)."""
    if not isinstance(problem.oracles, WorstCaseOracles):
        raise ValueError(f"`problem={problem.name!r}`: must be made by paper.worst_case.worst_case.")
    known, m = problem.info, problem.n_outer
    if np.any(np.less(completed, 0)) or np.any(np.greater(completed, m)):
        raise ValueError(f"`completed={completed!r}`: must lie between 0 and the {m} chains.")
    scale = (known["lambda"] / (known["beta"] * m)) ** 2
    return scale * known["alpha"] ** 1.5 / 16 * (m - np.asarray(completed))


class Progress(NamedTuple):
    """A run on the worst case; each field is an array with one entry per evaluation.

    Attributes
    ----------
    step : steps taken
    queries : rows of F read, that is, oracle calls of the kind `outer_grad`
    reached : number of coordinates reached in all chains, each counted in the variable that is furthest
    allowed : upper bound of `reached` for this number of queries
    completed : number of completed chains, in x
    completed_allowed : upper bound of `completed` for this number of queries
    hypergrad_norm_sq : ||∇h||²
    floor : lower bound of ||∇h||² for this number of completed chains
    """

    step: np.ndarray
    queries: np.ndarray
    reached: np.ndarray
    allowed: np.ndarray
    completed: np.ndarray
    completed_allowed: np.ndarray
    hypergrad_norm_sq: np.ndarray
    floor: np.ndarray

    @property
    def is_within(self) -> bool:
        """Whether the run respects the lower bound at every evaluation."""
        in_reach = np.all(self.reached <= self.allowed) and np.all(self.completed <= self.completed_allowed)
        return bool(in_reach and np.all(self.hypergrad_norm_sq >= self.floor))

    def queries_to(self, epsilon: float) -> float:
        """Return the queries at the first evaluation with ||∇h||² <= epsilon, or infinity."""
        return float(min(self.queries[self.hypergrad_norm_sq <= epsilon], default=np.inf))  # queries never decrease


def measure_progress(
    problem: BilevelProblem, solver: SolverBase, *, seed: int = 0, max_calls: int, every: int = 1
) -> Progress:
    """Run a solver on the worst case and compare it with the lower bound at every evaluation.

    Parameters
    ----------
    problem : made by :func:`paper.worst_case.worst_case` with ``rotation="coordinates"``
    solver : a solver; the bound holds for all but those in `OUTSIDE`
    seed : seed of the run
    max_calls : budget, in oracle calls of all kinds
    every : steps between two evaluations
    """
    reach(problem.start, problem)  # raises ValueError for other problems
    meters = {
        "reached": lambda point: np.sum(np.max(reach(point, problem), axis=0)),
        "completed": lambda point: n_completed(point, problem),
    }
    history = run(replace(problem, metrics=meters), solver, seed=seed, max_calls=max_calls, eval_every=every).history
    queries, completed = history["calls_outer_grad"], history["completed"].astype(int)
    reached, allowed = history["reached"].astype(int), np.minimum(queries, trees.flat(problem.start.outer_var).size)
    completed_allowed = np.minimum(queries // int(problem.info["T"]), problem.n_outer)
    norms, floor = history["hypergrad_norm_sq"], gradient_floor(problem, completed)
    return Progress(history["step"], queries, reached, allowed, completed, completed_allowed, norms, floor)
