"""SHINE with dense inverse Hessians: L-BFGS on z to a tolerance, v = -H f_z, and the outer steps of HOAG."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from .problems import Array, Problem
from .qnbo import updated

EPS = np.finfo(float).eps


class Memory:
    """The last accepted pairs."""

    def __init__(self, size: int, scale: float, p: int) -> None:
        self.size, self.first, self.pairs, self.length = size, scale * np.eye(p), [], 0.0

    def inverse(self) -> Array:
        h = self.first
        for z, s, y in self.pairs:
            h = updated("bfgs", h, z, s, y)
        return h

    def add(self, z: Array, s: Array, y: Array) -> None:
        self.length = float(np.linalg.norm(s))
        if s @ y > EPS * (y @ y) and self.length > np.sqrt(EPS) * np.linalg.norm(z):
            self.pairs = [*self.pairs, (z, s, y)][-self.size :]

    def add_outer(self, problem: Problem, z: Array, x: Array, grad: Array, f_z: Array) -> None:
        """Add the pair of outer-problem awareness (OPA)."""
        e = self.inverse() @ f_z
        e = e / np.linalg.norm(e) * max(self.length, 1e-6 * (1 + np.linalg.norm(z)))
        self.add(z, e, problem.gz(z + e, x) - grad)


def line_search(problem: Problem, z: Array, x: Array, d: Array, value: float, grad: Array) -> Any:
    """Halve the step until G falls, or is level to rounding with a small slope; return None without such a step."""
    t = 1.0
    for _ in range(30):
        new_value, new_grad = problem.inner_value(z + t * d, x), problem.gz(z + t * d, x)
        if new_value <= value + 1e-4 * t * (grad @ d):
            return z + t * d, new_value, new_grad
        if new_value <= value + 10 * EPS * abs(value) and new_grad @ d <= -0.9998 * (grad @ d):
            return z + t * d, new_value, new_grad
        t = t / 2
        if t * np.linalg.norm(d) <= 10 * EPS * np.linalg.norm(z):
            return None
    return None


def refined(problem: Problem, z: Array, x: Array, f_z: Array, v: Array, tolerance: float) -> Array:
    """Return v after conjugate gradient steps on H v = -f_z."""
    limit = int(0.01 / np.sqrt(tolerance))
    if limit == 0:
        return v
    residual = -f_z - problem.hv(z, x, v)
    direction = residual
    for _ in range(limit):
        if np.linalg.norm(residual) < tolerance * np.linalg.norm(f_z):
            break
        product = problem.hv(z, x, direction)
        a = residual @ residual / (direction @ product)
        v, new = v + a * direction, residual - a * product
        direction, residual = new + new @ new / (residual @ residual) * direction, new
    return v


def shine(
    problem: Problem,
    z: Array,
    x: Array,
    draws: Iterable[Any],
    *,
    scale: float = 1.0,
    memory: int = 30,
    first_tolerance: float = 1e-3,
    decay: float = 0.78,
    opa: int | None = None,
    refine: bool = False,
    decrease: float = 0.5,
) -> list[dict[str, Any]]:
    """Take one step per element of ``draws``; the elements are not used."""
    pairs, history = Memory(memory, scale, len(z)), []
    first_norm, c, step, last_value, move = 0.0, 0.0, 0.0, 0.0, 0.0
    for k, _ in enumerate(draws):
        tolerance, before = first_tolerance * decay**k, first_tolerance * decay ** (k - 1)
        pairs.length, value, grad = 0.0, problem.inner_value(z, x), problem.gz(z, x)
        first_norm = first_norm or float(np.linalg.norm(grad))
        taken = 0
        while np.linalg.norm(grad) > tolerance * first_norm:
            if opa and taken and taken % opa == 0:
                pairs.add_outer(problem, z, x, grad, problem.fz(z, x))
            found = line_search(problem, z, x, -pairs.inverse() @ grad, value, grad)
            if found is None:
                break
            pairs.add(z, found[0] - z, found[2] - grad)
            z, value, grad = found
            taken += 1
        f_z, f_x, outer_value = problem.fz(z, x), problem.fx(z, x), problem.outer_value(z, x)
        if opa:
            pairs.add_outer(problem, z, x, grad, f_z)
        v = -pairs.inverse() @ f_z
        v = refined(problem, z, x, f_z, v, tolerance) if refine else v
        gradient = problem.cr(z, x, v) + f_x
        c = max(c, float(np.sqrt(f_z @ f_z + f_x @ f_x)))
        if k == 0:
            step = 1.0 / float(np.linalg.norm(gradient))
        else:
            allowed = last_value + c * tolerance + before * (c + 1) * move
            step *= 1.05 if outer_value <= allowed - decrease * move**2 / step else 0.5
        x = x - step * gradient
        move, last_value = step * float(np.linalg.norm(gradient)), outer_value
        history.append({"inner_var": z, "v": v, "outer_var": x, "step": step})
    return history
