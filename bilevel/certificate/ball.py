"""How far z* can be from z, by the curvature around z."""

from collections.abc import Callable

import numpy as np

from bilevel.certificate.metric import Metric

_TRIALS = 12
_LEAST = 1e-3  # so far from z, the metric of z is of no use
_SLACK = 1.02  # t f(t) would never reach ||D_z||' if the next t were just ||D_z||'/f(t)


def ball(metric: Metric, residual: float, least_hessian: Callable[[float], np.ndarray]) -> tuple[float, float] | None:
    """Return δ and μ with ||z - z*|| <= δ and H >= μ M within δ of z, or None where none is found.

    Let f(t) be the smallest eigenvalue of M⁻¹ times ``least_hessian(t)``, a lower bound of H within t of z. On the edge
    of that ball ∇z G has a part of at least t f(t) - ||D_z||' pointing outwards; where that is not negative, z* is
    inside. G is then f(t)-strongly convex between z and z*: δ = ||D_z||'/f(t), μ = f(t).
    """
    mu = 1.0
    for _ in range(_TRIALS):
        radius = _SLACK * residual / mu
        mu = metric.smallest(least_hessian(radius))
        if not mu > _LEAST:
            return None
        if radius * mu >= residual:
            return residual / mu, mu
    return None
