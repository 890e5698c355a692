"""qNBO with dense inverse Hessians: BFGS or SR1 steps on z, then on v, then one outer step."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .handover import single
from .problems import Array, Problem

EPS = np.finfo(float).eps


def updated(form: str, h: Array, z: Array, s: Array, g: Array) -> Array:
    """Return H updated by the pair (s, g) of a move from z, or unchanged if the pair is rejected."""
    if np.linalg.norm(s) <= np.sqrt(EPS) * np.linalg.norm(z):
        return h
    if form == "sr1":
        w = s - h @ g
        fit = abs(w @ g) > 1e-8 * np.linalg.norm(w) * np.linalg.norm(g) and w @ w > EPS * (s @ s)
        return h + np.outer(w, w) / (w @ g) if fit else h
    if s @ g <= EPS * (g @ g):
        return h
    left = np.eye(len(s)) - np.outer(s, g) / (s @ g)
    return left @ h @ left.T + np.outer(s, s) / (s @ g)


def qnbo(
    problem: Problem,
    z: Array,
    x: Array,
    draws: Sequence[Any],
    *,
    step_size: float,
    outer_ratio: float,
    n_gradient_steps: int = 1,
    n_inner_steps: int = 3,
    n_v_steps: int = 4,
    form: str = "bfgs",
    warm: bool = False,
    gamma: float = 1.0,
    xi: float = 1e-3,
) -> list[dict[str, Any]]:
    """Draws: inner, outer."""
    v = np.zeros_like(z)
    history = []
    for draw in draws:
        for _ in range(n_gradient_steps):
            z = z - step_size * problem.gz(z, x, draw.inner)
        h, gradient = step_size * np.eye(len(z)), problem.gz(z, x, draw.inner)
        for _ in range(n_inner_steps):
            s, old = -gamma * h @ gradient, gradient
            gradient = problem.gz(z + s, x, draw.inner)
            h, z = updated(form, h, z, s, gradient - old), z + s
        f_z, f_x = problem.fz(z, x, draw.outer), problem.fx(z, x, draw.outer)
        s, residual, delta = v, f_z, xi * (1 + np.linalg.norm(z))
        for i in range(n_v_steps + 1):
            if i == 0 and not (warm and n_v_steps):
                v = s = -h @ f_z
            elif i > 0:
                s = -h @ residual
                v = v + s
            if i < n_v_steps:
                e = delta * s / np.linalg.norm(s) if np.any(s) else s
                g = problem.gz(z + e, x, draw.inner) - gradient
                h, residual = updated(form, h, z, e, g), residual + np.linalg.norm(s) / delta * g
        x = x - step_size / outer_ratio * (problem.cr(z, x, v, draw.inner) + f_x)
        history.append({"inner_var": z, "v": v, "outer_var": x})
    return history


def transcribe(problem: Problem, run: Any, z: Array, x: Array, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Repeat a run of the library on the same draws."""
    solver = run.solver
    names = ("n_gradient_steps", "n_inner_steps", "n_v_steps", "form")
    loops = {name: getattr(solver, name) for name in names}
    scales = {"warm": solver.warm_start_v, "gamma": float(solver.damping), "xi": float(solver.difference)}
    return qnbo(problem, z, x, single(run), **loops, **scales, **settings)
