"""VRBO: SARAH estimates in an inner loop, restarted by a full-batch pass every `period` outer steps."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from .handover import DrawnRows
from .neumann import hyp1
from .problems import Array, Problem


def vrbo(
    problem: Problem,
    z: Array,
    x: Array,
    draws: Sequence[Any],
    *,
    step_size: float,
    outer_ratio: float,
    period: int,
    n_inner_steps: int,
    n_neumann: int,
    neumann_step: float = 0.5,
) -> list[dict[str, Any]]:
    """Draws, as lists over k = 0..T: inner, outer, neumann (lists of Q), cross."""
    dz, dh = None, None
    history = []
    for s, draw in enumerate(draws):
        if s % period == 0:
            dz = problem.gz(z, x)
            dh = hyp1(problem, z, x, None, [None] * n_neumann, None, neumann_step)
        z_prev, x_prev = z, x
        x = x - step_size / outer_ratio * dh
        for k in range(n_inner_steps + 1):
            rest = (draw.outer[k], draw.neumann[k], draw.cross[k], neumann_step)
            dz = dz + problem.gz(z, x, draw.inner[k]) - problem.gz(z_prev, x_prev, draw.inner[k])
            dh = dh + hyp1(problem, z, x, *rest) - hyp1(problem, z_prev, x_prev, *rest)
            z_prev, x_prev = z, x
            if k < n_inner_steps:
                z = z - step_size * dz
        history.append({"inner_var": z, "outer_var": x, "dz": dz, "dh": dh})
    return history


def transcribe(problem: Problem, run: Any, z: Array, x: Array, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Repeat a run of the library on the same draws."""
    rows, n_neumann = DrawnRows(run), run.solver.n_neumann
    differences = run.solver.n_inner_steps + 1

    def one(d):
        inner = [[None] * (n_neumann + 2)] * differences if d.inner is None else d.inner
        return SimpleNamespace(
            inner=[rows.inner(batches[0]) for batches in inner],
            neumann=[[rows.inner(b) for b in batches[1:-1]] for batches in inner],
            cross=[rows.inner(batches[-1]) for batches in inner],
            outer=rows.outer_list(d.outer, differences),
        )

    fixed = {"period": run.solver.period, "n_inner_steps": differences - 1, "n_neumann": n_neumann}
    step = {"neumann_step": float(run.solver.neumann_step)}
    return vrbo(problem, z, x, [one(d) for d in run.draws], **fixed, **step, **settings)
