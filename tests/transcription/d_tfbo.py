"""D-TFBO: norm-based AdaGrad steps of z and v to a tolerance, then a norm-based AdaGrad step of x."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .problems import Array, Problem


def to_tolerance(gradient: Callable[[Array], Array], w: Array, first: float, tolerance: float) -> Array:
    """Return w after steps w - gradient / b, until the squared norm of the gradient is at most the tolerance."""
    norms = [first]
    slope = gradient(w)
    while np.linalg.norm(slope) ** 2 > tolerance:
        norms.append(np.linalg.norm(slope))
        w = w - slope / np.linalg.norm(norms)
        slope = gradient(w)
    return w


def d_tfbo(
    problem: Problem,
    z: Array,
    x: Array,
    draws: Sequence[Any],
    *,
    step_size: float,
    outer_ratio: float,
    tolerance: float,
) -> list[dict[str, Any]]:
    """Take one step per element of ``draws``; the elements are not used."""
    v, norms, history = np.zeros_like(z), [outer_ratio / step_size], []
    for _ in draws:
        z = to_tolerance(lambda z, x=x: problem.gz(z, x, None), z, 1 / step_size, tolerance)
        f_z, f_x = problem.fz(z, x, None), problem.fx(z, x, None)
        v = to_tolerance(lambda v, z=z, x=x, f_z=f_z: problem.hv(z, x, v, None) + f_z, v, 1 / step_size, tolerance)
        d_x = problem.cr(z, x, v, None) + f_x
        norms.append(np.linalg.norm(d_x))
        x = x - d_x / np.linalg.norm(norms)
        history.append({"inner_var": z, "v": v, "outer_var": x})
    return history
