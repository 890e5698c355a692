"""SUSTAIN: STORM on the inner gradient and on the random-length Neumann hypergradient, simultaneous moves."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from .bio_bred import asbio_bred, plain_step, sbio_bred
from .handover import DrawnRows, storm_settings
from .neumann import hyp2
from .problems import Array, Problem


def sustain(
    problem: Problem,
    z: Array,
    x: Array,
    draws: Sequence[Any],
    *,
    step_size: float,
    outer_ratio: float,
    n_neumann: int,
    neumann_step: float = 0.5,
    momentum: float = 0.5,
    outer_momentum: float | None = None,
) -> list[dict[str, Any]]:
    """Draws: inner, outer, neumann, length (P, shared by both points), cross."""
    c_z, c_x = momentum, momentum if outer_momentum is None else outer_momentum
    z_prev, x_prev, dz, dh = z, x, None, None
    history = []
    for t, draw in enumerate(draws, start=1):
        rest = (draw.outer, draw.neumann, draw.length, n_neumann, draw.cross, neumann_step)
        new_z = problem.gz(z, x, draw.inner)
        new_h = hyp2(problem, z, x, *rest)
        if t == 1:
            dz, dh = new_z, new_h
        else:
            a_z = min(1.0, c_z * (t - 1) ** (-2 / 3))
            a_x = min(1.0, c_x * (t - 1) ** (-2 / 3))
            dz = new_z + (1.0 - a_z) * (dz - problem.gz(z_prev, x_prev, draw.inner))
            dh = new_h + (1.0 - a_x) * (dh - hyp2(problem, z_prev, x_prev, *rest))
        z_prev, x_prev = z, x
        z = z - step_size * t ** (-1 / 3) * dz
        x = x - step_size / outer_ratio * t ** (-1 / 3) * dh
        history.append({"inner_var": z, "outer_var": x, "dz": dz, "dh": dh})
    return history


def bred(problem: Problem, run: Any, z: Array, x: Array, draws: Sequence[Any], sizes: dict[str, float]) -> list[Any]:
    """Repeat a run of the estimators "sgd" and "spider", which are SBiO-BreD and ASBiO-BreD without an outer term."""
    size, solver = sizes["step_size"], run.solver
    common = {"inner_step": size, "outer_step": plain_step(size / sizes["outer_ratio"]), "n_neumann": solver.n_neumann}
    common["neumann_step"] = float(solver.neumann_step)
    if solver.estimator == "sgd":
        return sbio_bred(problem, z, x, draws, **common)
    return asbio_bred(problem, z, x, draws, period=solver.period, **common)


def transcribe(problem: Problem, run: Any, z: Array, x: Array, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Repeat a run of the library on the same draws."""
    rows, n_neumann = DrawnRows(run), run.solver.n_neumann
    draws = [SimpleNamespace(inner=rows.inner(d.inner), **rows.series(d.neumann, n_neumann - 1)) for d in run.draws]
    if run.solver.estimator != "storm":
        return bred(problem, run, z, x, draws, settings)
    return sustain(problem, z, x, draws, n_neumann=n_neumann, **storm_settings(run, settings))
