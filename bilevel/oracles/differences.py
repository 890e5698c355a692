"""Oracles of losses whose gradients JAX cannot differentiate: products as central differences of gradients.

    (∇²zz G) v ≈ (∇z G(z + δ v, x) - ∇z G(z - δ v, x)) / 2δ,   δ ||v|| = ε^⅓ (1 + ||z||),   ε the unit of rounding

and (∇²xz G) v likewise. The relative error is of the order of ε^⅔: 1e-10 in float64, 1e-5 in float32. A product stands
for two gradients and counts as the product that it is asked for.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from bilevel import _tree as trees
from bilevel._types import Array, InnerPass, Point, PyTree
from bilevel.oracles.autodiff import AutodiffOracles


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DifferenceOracles(AutodiffOracles):
    """First derivatives of ``loss(inner_var, outer_var, sample) -> scalar``, and second ones by differences."""

    def _inner_rows(self, point: Point, data: PyTree, weights: Array) -> InnerPass:
        z, x, v = point
        gradients = jax.grad(self._mean("inner", data, weights), argnums=(0, 1))
        length, reach = jnp.sqrt(trees.norm_sq(v)), 1 + jnp.sqrt(trees.norm_sq(z))
        # Along v = 0 any step will do.
        step = jnp.finfo(length.dtype).eps ** (1 / 3) * reach / jnp.where(length > 0, length, 1)
        shift = trees.scale(step, v)
        change = trees.subtract(gradients(trees.add(z, shift), x), gradients(trees.subtract(z, shift), x))
        return InnerPass(gradients(z, x)[0], *trees.scale(1 / (2 * step), change))
