"""Ada-BiO: normalized momentum steps on x, with the noise of two hypergradients; norm-based AdaGrad steps on z."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from .handover import DrawnRows
from .neumann import hyp1
from .problems import Array, Problem


def ada_bio(
    problem: Problem,
    z: Array,
    x: Array,
    draws: Sequence[Any],
    *,
    step_size: float,
    outer_ratio: float,
    neumann_step: float = 0.5,
    alpha: float = 1.0,
    gamma: float = 1.0,
) -> list[dict[str, Any]]:
    """Draws: inner; pair (two with outer, neumann, cross)."""
    eta_y, eta_x = step_size, step_size / outer_ratio
    differences: list[float] = []
    slopes: list[float] = []
    m = np.zeros_like(x)
    history = []
    for t, draw in enumerate(draws, start=1):
        g, g_tilde = (hyp1(problem, z, x, one.outer, one.neumann, one.cross, neumann_step) for one in draw.pair)
        g_y = problem.gz(z, x, draw.inner)
        differences.append(np.sum((g - g_tilde) ** 2))
        slopes.append(np.sum(g_y**2))
        alpha_t = alpha / np.sqrt(alpha**2 + np.sum(differences))
        alpha_prime = alpha / np.sqrt(alpha**2 + np.sum(differences) + np.sum(slopes))
        m = g if t == 1 else (1 - alpha_t) * m + alpha_t * g
        x = x - eta_x * np.sqrt(alpha_prime) / np.sqrt(t) * m / np.linalg.norm(m)
        z = z - eta_y / np.sqrt(gamma**2 + np.sum(slopes)) * g_y
        history.append({"inner_var": z, "outer_var": x})
    return history


def transcribe(problem: Problem, run: Any, z: Array, x: Array, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Repeat a run of the library on the same draws."""
    rows, solver = DrawnRows(run), run.solver
    draws = [
        SimpleNamespace(
            inner=rows.inner(d.inner),
            pair=[SimpleNamespace(**rows.series(series, solver.n_neumann)) for series in (d.first, d.second)],
        )
        for d in run.draws
    ]
    scales = {"alpha": float(solver.noise_scale), "gamma": float(solver.slope_scale)}
    return ada_bio(problem, z, x, draws, neumann_step=float(solver.neumann_step), **scales, **settings)
