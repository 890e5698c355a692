"""HOAG with exact inner and linear solves, so that only its rule for the outer step size remains."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from .problems import Array, Problem


def exponential(k: int) -> float:
    """Return the k-th tolerance of the default sequence."""
    return max(1e-12, 0.1 * 0.9**k)


def hoag(
    problem: Problem,
    z: Array,
    x: Array,
    draws: Iterable[Any],
    *,
    tolerance: Callable[[int], float] = exponential,
    lipschitz: float | None = None,
    slack: float = 1.0,
    decrease: float = 0.5,
) -> list[dict[str, Any]]:
    """Take one step per element of ``draws``. The elements and the start z are not used.

    `lipschitz` is C, by default the largest norm of the gradient of F so far; `slack` is M; the required decrease
    of h is `decrease` * D² / s, with 1/2 for the corrected rule and 1 for the printed one.
    """
    c, step, last_value, move = lipschitz or 0.0, 0.0, 0.0, 0.0
    history = []
    for k, _ in enumerate(draws, start=1):
        z, v, _, _ = problem.solve(x)
        f_z, f_x = problem.fz(z, x), problem.fx(z, x)
        gradient = problem.cr(z, x, v) + f_x
        value = problem.outer_value(z, x)
        if lipschitz is None:
            c = max(c, float(np.sqrt(f_z @ f_z + f_x @ f_x)))
        if k == 1:
            step = 1.0 / float(np.linalg.norm(gradient))
        else:
            allowed = last_value + c * tolerance(k) + tolerance(k - 1) * (c + slack) * move
            step *= 1.05 if value <= allowed - decrease * move**2 / step else 0.5
        new_x = x - step * gradient
        move = float(np.linalg.norm(new_x - x))
        last_value, x = value, new_x
        history.append({"inner_var": z, "v": v, "outer_var": x, "step": step, "value": value, "tol": tolerance(k)})
    return history
