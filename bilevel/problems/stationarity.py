"""How far an outer variable is from stationary, where it may be at a bound."""

import jax
import numpy as np

from bilevel.oracles import Oracles
from bilevel.types import Array, PyTree


def stationarity(oracles: Oracles, outer_var: PyTree, hypergrad: PyTree) -> float:
    """Return ||∇h||², without the components that push against an active bound.

    What is left is the projection of ∇h onto a cone that x alone decides, so that gradients at one x that are ε apart
    have norms that differ by at most ε.
    """
    if oracles.outer_bounds is None:
        return norm_sq(hypergrad)

    def free(x: np.ndarray, grad: np.ndarray, lower: Array, upper: Array) -> np.ndarray:
        blocked = ((x <= np.asarray(lower)) & (grad > 0)) | ((x >= np.asarray(upper)) & (grad < 0))
        return np.where(blocked, 0.0, grad)

    return norm_sq(jax.tree.map(free, outer_var, hypergrad, *oracles.outer_bounds))


def norm_sq(tree: PyTree) -> float:
    """Return the squared norm in NumPy's arithmetic: JAX's would be float32 where the user has x64 off."""
    return float(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(tree)))
