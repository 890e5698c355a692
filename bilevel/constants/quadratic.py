"""Constants of quadratics: exact, everywhere."""

from typing import Any

import numpy as np

from bilevel.constants.base import Found, Values
from bilevel.constants.region import Region, box_of
from bilevel.oracles import Factors, Samples
from bilevel.problems import BilevelProblem
from bilevel.problems.quadratic import Means, QuadraticReferee


def quadratic(problem: BilevelProblem, radius: float | None, box: Any, seed: int) -> Found:
    """All derivatives above the second are 0; Hessians are those of the rows and of the mean."""
    inner, outer = (_factors64(level) for level in (problem.oracles.inner_samples, problem.oracles.outer_samples))
    referee = QuadraticReferee(Means.of(inner), Means.of(outer))
    outer_norms = _hessian_norms(outer)
    v_jacobian = np.linalg.solve(referee.inner.a_inner, referee.outer.a_inner @ referee.jacobian + referee.outer.b.T)
    values: Values = {
        "mu_G": float(np.linalg.eigvalsh(referee.inner.a_inner)[0]),
        "L1_F": float(outer_norms.max()),
        "L1_G": float(_hessian_norms(inner).max()),
        "L2_F": 0.0,
        "L2_G": 0.0,
        "L3_G": 0.0,
        "L_z_star": float(np.linalg.norm(referee.jacobian, 2)),
        "L_v_star": float(np.linalg.norm(v_jacobian, 2)),
        "L_h": float(np.linalg.norm(referee.hessian, 2)),
    }
    how = dict.fromkeys(values, "exact")
    if radius is None:
        return values | {"L0_F": None}, how | {"L0_F": "exact", "R": "exact"}, Region()
    region = Region(radius, *box_of(problem, box))
    linear = np.hypot(*(np.linalg.norm(part, axis=1) for part in (outer.linear_inner, outer.linear_outer)))
    farthest = np.hypot(radius, region.outer_radius)
    return values | {"L0_F": float((outer_norms * farthest + linear).max())}, how | {"L0_F": "bound"}, region


def _factors64(samples: Samples) -> Factors:
    parts: list[Any] = [np.asarray(leaf, np.float64) for leaf in samples.leaves]
    return Factors(*parts)


def _hessian_norms(rows: Factors) -> np.ndarray:
    """Return the spectral norm of the Hessian [[aa', fe'], [ef', cc']] of each row, from products of its factors.

    It is W M W' with W = [[a, f, 0, 0], [0, 0, c, e]], whose eigenvalues other than 0 are those of √K M √K, K = W'W.
    """
    gram = np.zeros((len(rows.a), 4, 4))
    for first, pair in ((0, (rows.a, rows.f)), (2, (rows.c, rows.e))):
        for i, j in np.ndindex(2, 2):
            gram[:, first + i, first + j] = np.einsum("nk,nk->n", pair[i], pair[j])
    middle = np.eye(4)[[0, 3, 2, 1]]
    eigenvalues, vectors = np.linalg.eigh(gram)
    roots = (vectors * np.sqrt(np.maximum(eigenvalues, 0))[:, None, :]) @ np.swapaxes(vectors, 1, 2)
    return np.abs(np.linalg.eigvalsh(roots @ middle @ roots)).max(axis=1)
