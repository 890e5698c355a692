"""AccBO: Nesterov steps of z with an average, normalized STORM for x."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from .handover import DrawnRows, storm_settings
from .neumann import hyp1
from .problems import Array, Problem


def acc_bo(
    problem: Problem,
    z: Array,
    x: Array,
    draws: Sequence[Any],
    *,
    step_size: float,
    outer_ratio: float,
    neumann_step: float = 0.5,
    momentum: float = 0.1,
    gam: float = 0.5,
    tau: float = 0.5,
    warm_up: int = 0,
) -> list[dict[str, Any]]:
    """Draws: inner, outer, neumann (Q), cross. beta of the paper is 1 - momentum."""
    beta = 1.0 - momentum
    z_prev, zh, m = z, z, None
    zh_prev, x_prev = z, x
    history = []
    for k, draw in enumerate(draws):
        if k < warm_up:
            z = z - step_size * problem.gz(z, x, draw.inner)
            z_prev, zh = z, z
        else:
            e = z + gam * (z - z_prev)
            z_prev = z
            z = e - step_size * problem.gz(e, x, draw.inner)
            zh = (1.0 - tau) * zh + tau * z
            rest = (draw.outer, draw.neumann, draw.cross, neumann_step)
            new, old = hyp1(problem, zh, x, *rest), hyp1(problem, zh_prev, x_prev, *rest)
            m = new if m is None else new + beta * (m - old)
            zh_prev, x_prev = zh, x
            x = x - step_size / outer_ratio * m / np.linalg.norm(m)
        history.append({"inner_var": z, "outer_var": x, "average": zh})
    return history


def transcribe(problem: Problem, run: Any, z: Array, x: Array, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Repeat a run of the library on the same draws."""
    rows, solver = DrawnRows(run), run.solver
    draws = [SimpleNamespace(inner=rows.inner(d.inner), **rows.series(d.neumann, solver.n_neumann)) for d in run.draws]
    fixed = {"gam": float(solver.extrapolation), "tau": float(solver.averaging), "warm_up": solver.warm_up}
    return acc_bo(problem, z, x, draws, **fixed, **storm_settings(run, settings))
