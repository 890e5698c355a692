"""How far runs come on :func:`bilevel.problems.worst_case`, next to what the lower bound allows them (th:lower_bound).

Every point a linear method computes from 0 lies in the span of the gradients of F it has seen: G only carries
coordinates from one variable to another. A query of row j, at a point that has reached k coordinates of chain j, sees
coordinate k + 1 and no coordinate of another chain (app:prop:span). Hence after n_j queries of row j

    the coordinates of chain j that are not 0, in z, x and v together, are among its first n_j

whatever the order of moves and of rows: at most t coordinates in all after t queries, and at most t / T chains
completed, a chain being incomplete while the last two of its T + 1 coordinates are 0 in x. With |I| incomplete chains,

    ||∇h(x)||²  >=  λ² α^(3/2) |I| / (16 β² m²)  =  2 ε |I| / m                        (lemma:lower_bound_grad_h)

which keeps ||∇h||² above ε as long as t <= m T / 2, for then |I| >= m/2 (and a single chain stays clear of its bound).
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from bilevel import _tree as trees
from bilevel._types import Point
from bilevel.engine.run import run
from bilevel.problems import BilevelProblem
from bilevel.problems.worst_case import WorstCaseOracles
from bilevel.solvers import SolverBase
from bilevel.theory import reach

# Methods that leave the span of gradients, and how: the bound is not for them.
OUTSIDE = {"PZOBO": "moves x along Gaussians, which reach all coordinates at once"}


def n_completed(point: Point, problem: BilevelProblem) -> int:
    """Return m - |I|: how many chains have one of their last two coordinates other than 0 in x."""
    return int(np.sum(reach(point, problem).outer_var >= problem.info["T"]))


def gradient_floor(problem: BilevelProblem, completed: np.ndarray | int) -> np.ndarray:
    """Return λ² α^(3/2) |I| / (16 β² m²) = 2 ε |I| / m with |I| = m - completed (lemma:lower_bound_grad_h)."""
    if not isinstance(problem.oracles, WorstCaseOracles):
        raise ValueError(f"`problem={problem.name!r}`: must be made by bilevel.problems.worst_case.")
    known, m = problem.info, problem.n_outer
    if np.any(np.less(completed, 0)) or np.any(np.greater(completed, m)):
        raise ValueError(f"`completed={completed!r}`: must lie between 0 and the {m} chains.")
    scale = (known["lambda"] / (known["beta"] * m)) ** 2
    return scale * known["alpha"] ** 1.5 / 16 * (m - np.asarray(completed))


class Progress(NamedTuple):
    """A run on the worst case, one entry per evaluation."""

    step: np.ndarray
    queries: np.ndarray  # rows of F read: the oracle calls `outer_grad`
    reached: np.ndarray  # coordinates in all, of each chain in that of z, x and v which is furthest
    allowed: np.ndarray  # how many the queries allow
    completed: np.ndarray  # chains, in x
    completed_allowed: np.ndarray  # how many the queries allow
    hypergrad_norm_sq: np.ndarray
    floor: np.ndarray  # what it is at least, with so many chains completed

    @property
    def is_within(self) -> bool:
        """Whether the run is nowhere ahead of the bound."""
        in_reach = np.all(self.reached <= self.allowed) and np.all(self.completed <= self.completed_allowed)
        return bool(in_reach and np.all(self.hypergrad_norm_sq >= self.floor))

    def queries_to(self, epsilon: float) -> float:
        """Return the queries at the first evaluation with ||∇h||² <= epsilon, infinity where there is none."""
        return float(min(self.queries[self.hypergrad_norm_sq <= epsilon], default=np.inf))  # they never fall


def measure_progress(
    problem: BilevelProblem, solver: SolverBase, *, seed: int = 0, max_calls: int, every: int = 1
) -> Progress:
    """Run a solver on the worst case and measure it against the bound of th:lower_bound.

    The chains of the problem lie along the axes. What is allowed is for solvers that stay in the span of gradients, see
    `OUTSIDE`. All kinds of derivatives count together in `max_calls`; `every` so many steps there is an evaluation.
    """
    reach(problem.start, problem)  # raises ValueError for another problem, or a random basis
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
