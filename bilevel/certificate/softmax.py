"""How far softmax probabilities and their derivatives move with the scores.

Derivatives of a cross-entropy are cumulants of variables on the classes, under the probabilities p at the scores s:
its Hessian is the covariance S = diag(p) - pp', its third derivative κ(t, u, w) a third cumulant.

    S <= C      with C = min(½, 2 max p (1 - p) exp(√2 reach)) for scores within ``reach``: 2 p (1 - p) is a sum of
                |entries| of a row of S, and S grows along u by κ(u, w, w) <= range(u) S(w, w), range(u) <= √2 ||u||
    |κ(t, u, w)| <= k ||u|| ||w||      with k = min(√2³/(6√3) ||t - mean t||, C range(t)): a symmetric form is largest
                where its arguments agree, and there it is the third cumulant of a variable of range up to √2 ||u||
"""

from math import sqrt

import jax.numpy as jnp

from bilevel.constants.suprema import SIGMOID
from bilevel.types import Array

_THIRD = sqrt(2) ** 3 * SIGMOID[2]
_FAR = 40.0  # beyond this reach the bound ½ is the smaller one, and exp may overflow


def largest_curvatures(chances: Array, reach: Array) -> Array:
    """Return C of each row."""
    here = 2 * jnp.max(chances * (1 - chances), axis=1)
    grown = here * jnp.exp(sqrt(2) * jnp.minimum(reach, _FAR))
    return jnp.where(reach < _FAR, jnp.minimum(grown, 0.5), 0.5)


def centred_norms(tangents: Array) -> Array:
    """Return ||t - mean t|| of each row: shifts of all scores change nothing."""
    return jnp.sqrt(jnp.sum((tangents - jnp.mean(tangents, axis=1, keepdims=True)) ** 2, axis=1))


def bends(tangents: Array, curvatures: Array) -> Array:
    """Return k of each row."""
    width = jnp.max(tangents, axis=1) - jnp.min(tangents, axis=1)
    return jnp.minimum(_THIRD * centred_norms(tangents), curvatures * width)
