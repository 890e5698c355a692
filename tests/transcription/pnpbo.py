"""PnPBO: one loop, with a separate estimator for the terms of each direction."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from .directions import ball
from .handover import DrawnRows, blocks
from .problems import Array, Problem, Rows
from .saba import Table

TERMS = {"z": ["gz"], "v": ["hv", "fz"], "x": ["cr", "fx"]}


def term(problem: Problem, kind: str, u: dict[str, Array], rows: Rows) -> Array:
    """Return one of the five derivatives."""
    if kind in ("hv", "cr"):
        return getattr(problem, kind)(u["z"], u["x"], u["v"], rows)
    return getattr(problem, kind)(u["z"], u["x"], rows)


def pnpbo(
    problem: Problem,
    z: Array,
    x: Array,
    draws: Sequence[Any],
    *,
    step_size: float,
    outer_ratio: float,
    estimators: dict[str, str],
    lam: float = 0.1,
    rho: float | None = None,
    v_radius: float | None = None,
    n_inner_blocks: int = 1,
    n_outer_blocks: int = 1,
) -> list[dict[str, Any]]:
    """Draws: inner, outer (rows), inner_block, outer_block (their numbers), refresh (whether page reads all rows)."""
    u = {"z": z, "v": np.zeros_like(z), "x": x}
    last = dict(u)
    d = {name: np.zeros_like(part) for name, part in u.items()}
    counts = {"gz": n_inner_blocks, "hv": n_inner_blocks, "cr": n_inner_blocks}
    tables: dict[str, Table] = {}
    for name, kinds in TERMS.items():
        for kind in kinds:
            tables[kind] = Table(np.ones(counts.get(kind, n_outer_blocks)), len(u[name]))
    h = np.zeros_like(x)
    history = []
    for k, draw in enumerate(draws):
        new_d = {}
        for name, kinds in TERMS.items():
            how = estimators[name]
            if how == "page" and (k == 0 or draw.refresh):
                new_d[name] = sum(term(problem, kind, u, None) for kind in kinds)
                continue
            fresh, difference, saga = 0.0, 0.0, 0.0
            for kind in kinds:
                outer = kind in ("fz", "fx")
                rows, block = (draw.outer, draw.outer_block) if outer else (draw.inner, draw.inner_block)
                g = term(problem, kind, u, rows)
                fresh = fresh + g
                if how in ("page", "zerosarah"):
                    difference = difference + g - term(problem, kind, last, rows)
                if how in ("saga", "zerosarah"):
                    tables[kind].weights[block] = len(rows) / (problem.m if outer else problem.n)
                    saga = saga + tables[kind].saga(block, g)
            if how == "zerosarah":
                # As in its own paper, with the tables at the last point: g_old - Y + M = saga - (g - g_old).
                lam_k = 1.0 if k == 0 else lam
                new_d[name] = difference + (1 - lam_k) * d[name] + lam_k * (saga - difference)
            else:
                new_d[name] = {"sgd": fresh, "saga": saga, "page": d[name] + difference}[how]
        d, last = new_d, dict(u)
        h = d["x"] if rho is None else (1 - rho) * h + rho * d["x"]
        u = {
            "z": u["z"] - step_size * d["z"],
            "v": ball(u["v"] - step_size * d["v"], v_radius),
            "x": u["x"] - step_size / outer_ratio * h,
        }
        history.append({"inner_var": u["z"], "v": u["v"], "outer_var": u["x"]})
    return history


def transcribe(problem: Problem, run: Any, z: Array, x: Array, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Repeat a run of the library on the same draws."""
    rows, solver = DrawnRows(run), run.solver
    has_blocks = solver.sampling == "blocks"
    draws = [
        SimpleNamespace(
            inner=rows.inner(d.inner),
            outer=rows.outer(d.outer),
            inner_block=int(d.inner) if has_blocks else 0,
            outer_block=int(d.outer) if has_blocks else 0,
            refresh=bool(d.coin),
        )
        for d in run.draws
    ]
    options = {
        "estimators": {"z": solver.inner_estimator, "v": solver.v_estimator, "x": solver.outer_estimator},
        "lam": float(solver.mixing),
        "rho": None if solver.momentum is None else float(solver.momentum),
        "n_inner_blocks": len(blocks(run.oracles.inner_samples)) if has_blocks else 1,
        "n_outer_blocks": len(blocks(run.oracles.outer_samples)) if has_blocks else 1,
    }
    return pnpbo(problem, z, x, draws, **options, **settings)
