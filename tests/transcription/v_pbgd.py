"""V-PBGD and V-PBSGD: gradient steps on F + gam (G - min_w G), with w from an inner loop."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from .handover import DrawnRows
from .problems import Array, Problem


def v_pbgd(
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
    beta: float | None = None,
    beta_decays: bool = False,
    from_last_w: bool = False,
) -> list[dict[str, Any]]:
    """Draws: inner_loop (T), inner, outer. The scale is min(1/gam, 1), as in the authors' code."""
    w = z
    history = []
    for k, draw in enumerate(draws):
        gam = gam_max if k >= ramp else gam_max * k / ramp
        scale = 1.0 / gam if scaled and gam > 1.0 else 1.0
        w = w if from_last_w else z
        for t, rows in enumerate(draw.inner_loop, start=1):
            size = step_size if beta is None else beta
            w = w - (size / t**0.5 if beta_decays else size) * problem.gz(w, x, rows)
        d_x = problem.fx(z, x, draw.outer) + gam * (problem.gx(z, x, draw.inner) - problem.gx(w, x, draw.inner))
        d_z = problem.fz(z, x, draw.outer) + gam * problem.gz(z, x, draw.inner)
        z, x = z - step_size * scale * d_z, x - step_size / outer_ratio * scale * d_x
        history.append({"inner_var": z, "outer_var": x, "w": w})
    return history


def penalty_settings(run: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of V-PBGD and G-PBGD."""
    solver = run.solver
    return settings | {"gam_max": float(solver.penalty), "ramp": solver.ramp, "scaled": solver.scaled}


def transcribe(problem: Problem, run: Any, z: Array, x: Array, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Repeat a run of the library on the same draws."""
    rows, solver = DrawnRows(run), run.solver
    draws = [
        SimpleNamespace(
            inner_loop=rows.inner_list(d.inner_loop, solver.n_inner_steps),
            inner=rows.inner(d.inner),
            outer=rows.outer(d.outer),
        )
        for d in run.draws
    ]
    beta = None if solver.w_step_size is None else float(solver.w_step_size)
    loop = {"beta": beta, "beta_decays": solver.w_decay, "from_last_w": solver.warm_start}
    return v_pbgd(problem, z, x, draws, **loop, **penalty_settings(run, settings))
