"""Outer variables that need no solver: where a run starts, and how far of its way to keep."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from bilevel.problems import BilevelProblem
from bilevel.types import Point

_PARTS = np.linspace(0, 1, 5)


class Start(NamedTuple):
    """A problem to solve from where it starts, and an x to improve on, with h there."""

    problem: BilevelProblem
    outer_var: np.ndarray
    value: float


def started(problem: BilevelProblem, candidates: list[np.ndarray], lead: int = 0) -> Start:
    """Start a problem near the best of some outer variables, with z and v exact there.

    Parameters
    ----------
    problem : with a referee
    candidates : outer variables to try
    lead : how many places before the best of them to start
    """
    assert problem.referee is not None
    references = [problem.referee(candidates[0], None)]
    for outer_var in candidates[1:]:
        references.append(problem.referee(outer_var, references[-1]))
    best = int(np.argmin([reference.value for reference in references]))
    first = max(0, best - lead)
    point = references[first].inner_var, candidates[first], references[first].v
    moved = replace(problem, start=Point(*(part.astype(problem.dtype) for part in point)))
    return Start(moved, candidates[best], references[best].value)


def shrunk(exchanged: BilevelProblem, start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the best x between two, and how far from the first it is, by rows that did not judge the second.

    Parameters
    ----------
    exchanged : the problem with training and validation rows in each other's place
    start, end : where x came from, and what the validation rows made of it; they may have made too much of it
    """
    assert exchanged.referee is not None
    reference, values = None, []
    for part in _PARTS:
        reference = exchanged.referee((1 - part) * start + part * end, reference)
        values.append(reference.value)
    part = float(_PARTS[int(np.argmin(values))])
    return (1 - part) * start + part * end, part
