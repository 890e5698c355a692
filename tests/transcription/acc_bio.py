"""AccBiO: Nesterov's method for z, the heavy ball for v, and either of two accelerated steps for x; full batches."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from .problems import Array, Problem


def acc_bio(
    problem: Problem,
    z: Array,
    x: Array,
    draws: Iterable[Any],
    *,
    step_size: float,
    outer_ratio: float,
    mu_y: float,
    mu_x: float,
    n_inner_steps: int,
    n_v_steps: int,
    form: str,
) -> list[dict[str, Any]]:
    """Take one step per element of ``draws``, which are not used. L_y and L_h are the inverses of the steps."""
    smooth_y, smooth_h = 1 / step_size, outer_ratio / step_size
    root = np.sqrt(smooth_y / mu_y)
    theta = (root - 1) / (root + 1)
    lam = 4 / (np.sqrt(smooth_y) + np.sqrt(mu_y)) ** 2
    ball = max((1 - np.sqrt(lam * mu_y)) ** 2, (1 - np.sqrt(lam * smooth_y)) ** 2)
    a = 1 / (2 * smooth_h)
    share = np.sqrt(a * mu_x)
    eta, tau, beta = share / (share + 2), share / 2, np.sqrt(a / mu_x)
    root_x = np.sqrt(smooth_h / mu_x)
    theta_x = (root_x - 1) / (root_x + 1)
    v = np.zeros_like(z)
    y, first = x, x
    history = []
    for _ in draws:
        at = first if form == "bg" else eta * first + (1 - eta) * y
        s = z
        for _ in range(n_inner_steps):
            new = s - problem.gz(s, at) / smooth_y
            s, z = new + theta * (new - z), new
        f_z, last = problem.fz(z, at), v
        for _ in range(n_v_steps):
            v, last = v - lam * (problem.hv(z, at, v) + f_z) + ball * (v - last), v
        g = problem.fx(z, at) + problem.cr(z, at, v)
        if form == "bg":
            new = at - g / smooth_h
            first, y = new + theta_x * (new - y), new
        else:
            first, y = tau * at + (1 - tau) * first - beta * g, at - a * g
        history.append({"inner_var": z, "v": v, "outer_var": y})
    return history


def transcribe(problem: Problem, run: Any, z: Array, x: Array, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Repeat a run of the library on the same draws."""
    fixed = {name: getattr(run.solver, name) for name in ("n_inner_steps", "n_v_steps", "form")}
    fixed |= {"mu_y": float(run.solver.strong_convexity), "mu_x": float(run.solver.outer_strong_convexity)}
    return acc_bio(problem, z, x, run.states, **fixed, **settings)
