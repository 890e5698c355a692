"""Constants of the worst case of the lower bound: exact, everywhere."""

from math import sqrt
from typing import Any

import numpy as np

from bilevel.constants.base import Found, Values
from bilevel.constants.region import Region
from bilevel.oracles import WorstCaseOracles
from bilevel.problems import BilevelProblem


def worst_case(problem: BilevelProblem, radius: float | None, box: Any, seed: int) -> Found:
    """z* = x and v* = -∇F / μ; the Hessian of each G_i is μ [[I, -I], [-I, I]]."""
    oracles = problem.oracles
    assert isinstance(oracles, WorstCaseOracles)
    mu, smoothness = oracles.curvature, problem.constants["outer_smoothness"]
    slope = oracles.amplitude / oracles.width
    values: Values = {
        "mu_G": mu,
        "L1_F": smoothness,
        "L2_F": slope / oracles.width**2 * oracles.alpha * _largest_third_derivative(),
        "L1_G": 2 * mu,
        "L2_G": 0.0,
        "L3_G": 0.0,
        "L_z_star": 1.0,
        "L_v_star": problem.constants["value_smoothness"] / mu,
        "L_h": problem.constants["value_smoothness"],
    }
    how = dict.fromkeys(values, "exact")
    if radius is None:
        return values | {"L0_F": None}, how | {"L0_F": "exact", "R": "exact"}, Region()
    at_0 = slope * sqrt(oracles.alpha)
    return values | {"L0_F": smoothness * radius + at_0}, how | {"L0_F": "bound"}, Region(radius)


def _largest_third_derivative() -> float:
    """Return max |Γ'''|, with Γ''' = -240 (t³ - 3t² - 3t + 1) / (1 + t²)³."""
    top, below = np.poly1d([1, -3, -3, 1]), np.poly1d([1, 0, 1])
    critical = (top.deriv() * below - 3 * top * below.deriv()).roots
    real = critical[abs(critical.imag) < 1e-9].real
    return float(240 * np.max(abs(top(real)) / below(real) ** 3))
