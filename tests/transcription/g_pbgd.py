"""G-PBGD: gradient steps on F + (gam/2) |gz|^2; q on one batch, its products on another."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from .handover import DrawnRows
from .problems import Array, Problem
from .v_pbgd import penalty_settings


def g_pbgd(
    problem: Problem,
    z: Array,
    x: Array,
    draws: Sequence[Any],
    *,
    step_size: float,
    outer_ratio: float,
    gam_max: float = 10.0,
    ramp: int = 0,
    scaled: bool = True,
) -> list[dict[str, Any]]:
    """Draws: inner (q), cross (the products), outer."""
    history = []
    for k, draw in enumerate(draws):
        gam = gam_max if k >= ramp else gam_max * k / ramp
        scale = 1.0 / gam if scaled and gam > 1.0 else 1.0
        q = problem.gz(z, x, draw.inner)
        d_x = problem.fx(z, x, draw.outer) + gam * problem.cr(z, x, q, draw.cross)
        d_z = problem.fz(z, x, draw.outer) + gam * problem.hv(z, x, q, draw.cross)
        z, x = z - step_size * scale * d_z, x - step_size / outer_ratio * scale * d_x
        history.append({"inner_var": z, "outer_var": x})
    return history


def transcribe(problem: Problem, run: Any, z: Array, x: Array, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Repeat a run of the library on the same draws."""
    rows = DrawnRows(run)
    draws = [
        SimpleNamespace(inner=rows.inner(d.inner), cross=rows.inner(d.products), outer=rows.outer(d.outer))
        for d in run.draws
    ]
    return g_pbgd(problem, z, x, draws, **penalty_settings(run, settings))
