"""BOME: a gradient step on F, corrected so that the inner gap also decreases; full batches, first order."""

from collections.abc import Iterable
from typing import Any

from .problems import Array, Problem


def bome(
    problem: Problem,
    z: Array,
    x: Array,
    draws: Iterable[Any],
    *,
    step_size: float,
    outer_ratio: float,
    n_inner_steps: int,
    eta_b: float = 0.5,
    of_value: bool = False,
    z_size: float | None = None,
) -> list[dict[str, Any]]:
    """Take one step per element of ``draws``, which are not used. w approximates argmin G and is then constant."""
    size = step_size / outer_ratio
    history = []
    for _ in draws:
        w = z
        for _ in range(n_inner_steps):
            w = w - step_size * problem.gz(w, x)
        q_z = problem.gz(z, x)
        q_x = problem.gx(z, x) - problem.gx(w, x)
        f_z, f_x = problem.fz(z, x), problem.fx(z, x)
        square, overlap = q_z @ q_z + q_x @ q_x, f_z @ q_z + f_x @ q_x
        if of_value:
            gap = problem.inner_value(z, x) - problem.inner_value(w, x)
            lam = max(0.0, (eta_b * gap - overlap) / (square + 1e-8))
        else:
            lam = 0.0 if square == 0.0 else max(0.0, eta_b - overlap / square)
        own = size if z_size is None else z_size
        z, x = z - own * (f_z + lam * q_z), x - size * (f_x + lam * q_x)
        history.append({"inner_var": z, "outer_var": x, "lam": lam})
    return history


def transcribe(problem: Problem, run: Any, z: Array, x: Array, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Repeat a run of the library on the same draws."""
    solver = run.solver
    fixed = {"n_inner_steps": solver.n_inner_steps, "eta_b": float(solver.barrier)}
    fixed |= {"of_value": solver.barrier_of == "value"}
    fixed |= {"z_size": None if solver.z_step is None else float(solver.z_step)}
    return bome(problem, z, x, run.states, **fixed, **settings)
