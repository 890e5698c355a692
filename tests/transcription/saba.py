"""SABA: SAGA on the five terms of the three directions, with one table entry per block of rows."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from .directions import ball, box
from .handover import blocks
from .problems import Array, Problem


class Table:
    """The last estimate of each block, and the weighted mean."""

    def __init__(self, weights: Array, dim: int) -> None:
        self.weights = weights
        self.entries = np.zeros((len(weights), dim))
        self.mean = np.zeros(dim)

    def fill(self, entries: Sequence[Array]) -> None:
        """Replace all estimates."""
        self.entries = np.array(entries)
        self.mean = self.weights @ self.entries

    def saga(self, i: int, new: Array) -> Array:
        """Return new - old + mean, with the mean before the update, and store the new estimate."""
        change = new - self.entries[i]
        direction = change + self.mean
        self.mean = self.mean + self.weights[i] * change
        self.entries[i] = new
        return direction


def saba(
    problem: Problem,
    z: Array,
    x: Array,
    draws: Sequence[Any],
    *,
    step_size: float,
    outer_ratio: float,
    inner_blocks: Sequence[Array],
    outer_blocks: Sequence[Array],
    init: str = "zero",
    bounds: Sequence[float] | None = None,
    v_radius: float | None = None,
) -> list[dict[str, Any]]:
    """Draws: inner_block, outer_block (block i has probability and weight len(block i) / number of rows)."""
    v = np.zeros_like(z)
    w_in = np.array([len(block) for block in inner_blocks]) / problem.n
    w_out = np.array([len(block) for block in outer_blocks]) / problem.m
    p, d = len(z), len(x)
    tables = {
        "gz": Table(w_in, p),
        "hv": Table(w_in, p),
        "cr": Table(w_in, d),
        "fz": Table(w_out, p),
        "fx": Table(w_out, d),
    }
    if init == "full":
        tables["gz"].fill([problem.gz(z, x, block) for block in inner_blocks])
        tables["hv"].fill([problem.hv(z, x, v, block) for block in inner_blocks])
        tables["cr"].fill([problem.cr(z, x, v, block) for block in inner_blocks])
        tables["fz"].fill([problem.fz(z, x, block) for block in outer_blocks])
        tables["fx"].fill([problem.fx(z, x, block) for block in outer_blocks])
    elif init != "zero":
        raise ValueError(f"init must be 'zero' or 'full', not {init!r}")
    history = []
    for draw in draws:
        i, j = draw.inner_block, draw.outer_block
        s_gz = tables["gz"].saga(i, problem.gz(z, x, inner_blocks[i]))
        s_hv = tables["hv"].saga(i, problem.hv(z, x, v, inner_blocks[i]))
        s_cr = tables["cr"].saga(i, problem.cr(z, x, v, inner_blocks[i]))
        s_fz = tables["fz"].saga(j, problem.fz(z, x, outer_blocks[j]))
        s_fx = tables["fx"].saga(j, problem.fx(z, x, outer_blocks[j]))
        z = z - step_size * s_gz
        v = ball(v - step_size * (s_hv + s_fz), v_radius)
        x = box(x - step_size / outer_ratio * (s_cr + s_fx), bounds)
        history.append(
            {
                "inner_var": z,
                "v": v,
                "outer_var": x,
                "means": {kind: table.mean for kind, table in tables.items()},
                "tables": {kind: table.entries.copy() for kind, table in tables.items()},
            }
        )
    return history


def transcribe(problem: Problem, run: Any, z: Array, x: Array, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Repeat a run of the library on the same draws."""
    draws = [SimpleNamespace(inner_block=int(d.inner), outer_block=int(d.outer)) for d in run.draws]
    tables = {
        "inner_blocks": blocks(run.oracles.inner_samples),
        "outer_blocks": blocks(run.oracles.outer_samples),
    }
    return saba(problem, z, x, draws, init=run.solver.tables, **tables, **settings)
