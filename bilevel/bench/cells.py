"""One run of an experiment, stated in full."""

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, TypeAlias

Pairs: TypeAlias = tuple[tuple[str, Any], ...]

SWEEP, TIMING = "sweep", "timing"


@dataclass(frozen=True)
class Cell:
    """What is run: a solver with a setting and a seed, on a problem, under a budget.

    Attributes
    ----------
    experiment : the name of the experiment it belongs to
    problem, problem_arguments : a name in ``bilevel.problems.PROBLEMS``, and what it is called with, sorted
    solver, parameters : a name in ``bilevel.SOLVERS``, and what it is called with, sorted
    seed : of the batches
    phase : "sweep", many cells in one program, or "timing", alone on the machine
    max_calls, max_seconds : the budget; one of them may be None
    """

    experiment: str
    problem: str
    problem_arguments: Pairs
    solver: str
    parameters: Pairs
    seed: int
    phase: str = SWEEP
    max_calls: int | None = None
    max_seconds: float | None = None

    @cached_property
    def id(self) -> str:
        """A digest of all the above: the same cell has the same one everywhere."""
        stated = asdict(self) | {
            "problem_arguments": dict(self.problem_arguments),
            "parameters": dict(self.parameters),
        }
        return hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest()[:16]
