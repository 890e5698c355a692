"""Constants of logistic selection: proved on a ball of z and a box of x."""

from math import exp, log, sqrt
from typing import Any

import numpy as np

from bilevel.constants.base import Found, Values
from bilevel.constants.region import Region, box_of, holding_start
from bilevel.constants.suprema import SIGMOID, Moments, largest_on_circle
from bilevel.oracles import Samples
from bilevel.problems import BilevelProblem


def logistic(problem: BilevelProblem, radius: float | None, box: Any, seed: int) -> Found:
    """Bound l(d'z) + ½ sum_k exp(x_g(k)) z_k² on a ball of z and a box of x."""
    lower, upper = box_of(problem, box)
    weakest, strongest = float(np.exp(lower.min())), float(np.exp(upper.max()))
    radius = radius or holding_start(problem, sqrt(2 * log(2) / weakest))
    train, validation = (_rows_of(level) for level in (problem.oracles.inner_samples, problem.oracles.outer_samples))
    longest, outer_longest = (float(np.linalg.norm(rows, axis=1).max()) for rows in (train, validation))
    values: Values = {
        "mu_G": weakest + _least_fit_curvature(train, radius),
        "L0_F": outer_longest / (1 + exp(-radius * outer_longest)),
        "L1_F": outer_longest**2 * SIGMOID[1],
        "L2_F": outer_longest**3 * _steepest_curvature(radius * outer_longest),
    }
    steepest = SIGMOID[1], _steepest_curvature(radius * longest), SIGMOID[3]
    for order, slope in zip((2, 3, 4), steepest, strict=True):
        terms = strongest * _penalty_terms(order, radius)
        terms[0] += longest**order * slope
        values[f"L{order - 1}_G"] = largest_on_circle(terms)
    exact = dict.fromkeys(("L0_F", "L1_F", "L2_F"), "exact")
    fitted = min(sqrt(2 * log(2)), sqrt(strongest) * radius)
    values |= _logistic_solution(values["mu_G"], fitted, Moments.of(train), Moments.of(validation))
    return values, dict.fromkeys(values, "bound") | exact, Region(radius, lower, upper)


def _logistic_solution(mu: Any, fitted: float, train: "Moments", validation: "Moments") -> Values:
    """Bound z*, v* and ∇²h with P = diag(exp(x)) <= H = ∇²zz G, and ||√P z*|| <= ``fitted`` as G(z*) <= G(0).

    J = -H^-1 P diag(z*) and √P v* = -√P H^-1 ∇F, where ||H^-1 √P|| <= 1/√μ.
    """
    L_z_star, slope = fitted / sqrt(mu), sqrt(validation.second)
    curvature = validation.second * SIGMOID[1] + train.third * SIGMOID[2] * slope / mu
    return {
        "L_z_star": L_z_star,
        "L_v_star": (curvature * L_z_star + slope) / mu,
        "L_h": curvature * L_z_star**2 + 3 * fitted * slope / sqrt(mu),
    }


def _rows_of(samples: Samples) -> np.ndarray:
    return np.asarray(samples.leaves, np.float64).T


def _least_fit_curvature(rows: np.ndarray, radius: float) -> float:
    """Return a lower bound of the eigenvalues of mean l''(d'z) dd' over ||z|| <= radius: l'' falls with |d'z|."""
    missed = 1 / (1 + np.exp(radius * np.linalg.norm(rows, axis=1)))
    return max(0.0, float(np.linalg.eigvalsh((rows.T * (missed * (1 - missed))) @ rows / len(rows))[0]))


def _steepest_curvature(margin: float) -> float:
    """Return max |l'''| over scores up to ``margin``."""
    if margin >= log(2 + sqrt(3)):
        return SIGMOID[2]
    missed = 1 / (1 + exp(margin))
    return missed * (1 - missed) * (1 - 2 * missed)


def _penalty_terms(order: int, radius: float) -> np.ndarray:
    """Return t_j: along (a, b), ½ sum exp(x) z² has derivatives up to sum_j t_j |b|^j |a|^(order - j) at x = 0."""
    terms = np.zeros(order + 1)
    terms[-3:] = order * (order - 1) / 2, order * radius, radius**2 / 2
    return terms
