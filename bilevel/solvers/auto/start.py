"""Checks at the start of a run: the range of the numbers, and negative curvature of the inner loss.

Curvature is measured by the Lanczos process. With H = ∇²zz G and q a vector of random signs with norm 1, k products
with H give the tridiagonal matrix of H on the Krylov space of q. Its eigenvalues lie between those of H, and its
extreme eigenvalues approach those of H first. Negative curvature that it shows is therefore real, and negative
curvature of a few directions may be missed.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from scipy.linalg import eigvalsh_tridiagonal

from bilevel._core import trees
from bilevel._core.compilation import Compiled, arithmetic
from bilevel._core.types import Array, Point
from bilevel.oracles import Oracles
from bilevel.oracles.curvature import probe_signs

N_PRODUCTS = 12
_MARGIN = 16.0  # sums of a few numbers of the size of a loss must not overflow
_NEGATIVE = 1e-3  # relative to the largest curvature; a thousand times the rounding errors of float32


def check_range(oracles: Oracles, point: Point) -> None:
    """Raise ValueError if the losses or their derivatives at a point leave the range of the arithmetic."""
    dtype = jnp.result_type(*jax.tree.leaves(point.inner_var))
    least, most = float(jnp.finfo(dtype).tiny) / float(jnp.finfo(dtype).eps), float(jnp.finfo(dtype).max) / _MARGIN
    way = f"in {dtype}: scale the loss or the data, start elsewhere, or build the problem with dtype='float64'"
    sizes = jax.tree.map(float, _sizes(oracles, point))
    if any(size == 0 for size in sizes.values()):  # underflow, or a true 0
        with arithmetic(np.float64):
            sizes = jax.tree.map(float, _sizes(oracles.astype(np.float64), trees.to_numpy(point, np.float64)))
    for name, size in sizes.items():
        if not np.isfinite(size):
            raise ValueError(f"{name} is not finite at the start, {way}.")
        if size > most:
            raise ValueError(f"{name} is {size:.2g} at the start, too large {way}.")
        if 0 < size < least:
            raise ValueError(f"{name} is {size:.2g} at the start, too small {way}.")


@Compiled
def _sizes(oracles: Oracles, point: Point) -> dict[str, Array]:
    """Return the sizes of values and derivatives by name, the product with ∇²zz G being that of a vector of ones."""
    outer, inner = oracles.outer(point), oracles.inner(point._replace(v=trees.ones_like(point.inner_var)))
    parts: dict[str, Any] = {"the outer loss": oracles.outer_value(point), "the inner loss": oracles.inner_value(point)}
    parts |= {"the gradient of the outer loss": outer, "the gradient of the inner loss": inner.grad}
    parts["the second derivative of the inner loss"] = inner.hvp
    return {name: trees.largest(part) for name, part in parts.items()}


def has_negative_curvature(oracles: Oracles, point: Point) -> bool:
    """Return True if a few products with ∇²zz G show a negative eigenvalue beyond rounding errors."""
    diagonal, beside = (np.asarray(part, float) for part in _tridiagonal(oracles, point))
    if not (np.isfinite(diagonal).all() and np.isfinite(beside).all()):
        return False  # a run from this point reports that it diverged
    curvatures = eigvalsh_tridiagonal(diagonal, beside[:-1])
    return bool(curvatures[0] < -_NEGATIVE * np.abs(curvatures).max())


@Compiled
def _tridiagonal(oracles: Oracles, point: Point) -> tuple[Array, Array]:
    """Return the diagonal and the off-diagonal of the matrix."""
    flat, unravel = ravel_pytree(point.inner_var)
    first = probe_signs(flat.size, 0)[0].astype(flat.dtype) / flat.size**0.5

    def once(carry: tuple[Array, Array, Array], _: Any) -> tuple[tuple[Array, Array, Array], tuple[Array, Array]]:
        before, beside, vector = carry
        product = ravel_pytree(oracles.hvp(point._replace(v=unravel(vector))))[0] - beside * before
        along = vector @ product
        left = product - along * vector
        length = jnp.linalg.norm(left)
        # If only rounding errors remain, the Krylov space is exhausted.
        over = length <= jnp.finfo(flat.dtype).eps ** 0.5 * jnp.abs(along)
        length = jnp.where(over, 0, length)
        return (vector, length, jnp.where(over, 0, left / length)), (along, length)

    return jax.lax.scan(once, (jnp.zeros_like(first), jnp.zeros((), flat.dtype), first), length=N_PRODUCTS)[1]
