"""Constants of data cleaning: proved on a ball of z, for all x."""

from math import comb, log, sqrt
from typing import Any

import numpy as np

from bilevel.constants.base import Found, Values
from bilevel.constants.region import Region, holding_start
from bilevel.constants.suprema import SIGMOID, SIGMOID_FOURTH, Moments, largest_on_circle
from bilevel.oracles import CleaningOracles
from bilevel.problems import BilevelProblem


def cleaning(problem: BilevelProblem, radius: float | None, box: Any, seed: int) -> Found:
    """Bound σ(x_i) CE_i(z) + C ||z||² on a ball of z, for all x.

    Derivatives of the cross-entropy along a are cumulants of a variable with a range of √2 ||d|| ||a||. A variable of
    range r has a variance up to r²/4 and a third and fourth cumulant up to r³/(6√3) and r⁴/8.
    """
    oracles = problem.oracles
    assert isinstance(oracles, CleaningOracles)
    ridge, n_classes = float(oracles.regularisation), problem.start.inner_var.shape[1]
    radius = radius or holding_start(problem, sqrt(log(n_classes) / ridge))
    train, validation = (
        Moments.of(np.asarray(level.leaves.features, np.float64))
        for level in (oracles.inner_samples, oracles.outer_samples)
    )
    values: Values = {"mu_G": 2 * ridge}
    values |= {f"L{k - 1}_F": _cumulant(k, validation.longest) for k in (1, 2, 3)}
    loss = float(np.logaddexp(0, log(n_classes - 1) + sqrt(2) * train.longest * radius))
    slopes = [loss, *(_cumulant(k, train.longest) for k in (1, 2, 3, 4))]
    weights = (*SIGMOID, SIGMOID_FOURTH)
    for order in (2, 3, 4):
        terms = np.array([comb(order, j) * weights[j] * slopes[order - j] for j in range(order + 1)])
        terms[0] += 2 * ridge if order == 2 else 0
        values[f"L{order - 1}_G"] = largest_on_circle(terms)
    values |= _cleaning_solution(2 * ridge, train, validation)
    # Those of F are approached as z goes to infinity only.
    return values, dict.fromkeys(values, "bound") | {"mu_G": "exact"}, Region(radius)


def _cumulant(order: int, longest: float) -> float:
    return (sqrt(2) * longest) ** order * SIGMOID[order - 1]


def _cleaning_solution(mu: float, train: Moments, validation: Moments) -> Values:
    """Bound z*, v* and ∇²h: x_i enters the mean G through row i alone, with the weight 1/n."""
    R = sqrt(2) * validation.longest / mu
    spread = sqrt(train.second / train.n)  # the norm of the table of rows, over n
    L_z_star = SIGMOID[1] * sqrt(2) * spread / mu
    curvature = validation.second / 2 + train.third * _cumulant(3, 1) * R
    mixed = SIGMOID[1] / 2 * spread * train.longest * R
    pure = SIGMOID[2] * sqrt(2) * train.longest * R / train.n
    return {
        "L_z_star": L_z_star,
        "L_v_star": (curvature * L_z_star + mixed) / mu,
        "L_h": curvature * L_z_star**2 + 2 * mixed * L_z_star + pure,
    }
