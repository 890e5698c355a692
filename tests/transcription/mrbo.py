"""MRBO: STORM on the inner gradient and on the truncated-Neumann hypergradient, simultaneous moves."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from .handover import DrawnRows, storm_settings
from .neumann import hyp1
from .problems import Array, Problem


def mrbo(
    problem: Problem,
    z: Array,
    x: Array,
    draws: Sequence[Any],
    *,
    step_size: float,
    outer_ratio: float,
    neumann_step: float = 0.5,
    momentum: float = 0.5,
) -> list[dict[str, Any]]:
    """Draws: inner, outer, neumann (Q), cross."""
    z_prev, x_prev, dz, dh = z, x, None, None
    history = []
    for t, draw in enumerate(draws, start=1):
        new_z = problem.gz(z, x, draw.inner)
        new_h = hyp1(problem, z, x, draw.outer, draw.neumann, draw.cross, neumann_step)
        if t == 1:
            dz, dh = new_z, new_h
        else:
            a = min(1.0, momentum * (t - 1) ** (-2 / 3))
            old_z = problem.gz(z_prev, x_prev, draw.inner)
            old_h = hyp1(problem, z_prev, x_prev, draw.outer, draw.neumann, draw.cross, neumann_step)
            dz = new_z + (1.0 - a) * (dz - old_z)
            dh = new_h + (1.0 - a) * (dh - old_h)
        z_prev, x_prev = z, x
        z = z - step_size * t ** (-1 / 3) * dz
        x = x - step_size / outer_ratio * t ** (-1 / 3) * dh
        history.append({"inner_var": z, "outer_var": x, "dz": dz, "dh": dh})
    return history


def transcribe(problem: Problem, run: Any, z: Array, x: Array, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Repeat a run of the library on the same draws."""
    rows, n_neumann = DrawnRows(run), run.solver.n_neumann
    draws = [SimpleNamespace(inner=rows.inner(d.inner), **rows.series(d.neumann, n_neumann)) for d in run.draws]
    return mrbo(problem, z, x, draws, **storm_settings(run, settings))
