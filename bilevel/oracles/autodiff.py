"""Oracles of per-sample losses, by automatic differentiation."""

from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from bilevel import _tree as trees
from bilevel._types import Array, InnerPass, OuterPass, Point, PyTree
from bilevel.oracles.base import Oracles
from bilevel.oracles.samples import STATIC

Loss = Callable[[PyTree, PyTree, PyTree], Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class AutodiffOracles(Oracles):
    """Derivatives of ``loss(inner_var, outer_var, sample) -> scalar`` on any pytrees."""

    inner_loss: Loss = field(metadata=STATIC)
    outer_loss: Loss = field(metadata=STATIC)

    holds_only_rows = True

    def _inner(self, point: Point, data: PyTree, weights: Array) -> InnerPass:
        def gradients(inner_var: PyTree, outer_var: PyTree) -> tuple[PyTree, PyTree]:
            return jax.grad(self._mean_inner_loss, argnums=(0, 1))(inner_var, outer_var, data, weights)

        # Moving z along v gives the Hessian-vector and the cross product with the gradient.
        (grad, _), (hvp, cross) = jax.jvp(
            gradients, (point.inner_var, point.outer_var), (point.v, trees.zeros_like(point.outer_var))
        )
        return InnerPass(grad, hvp, cross)

    def _inner_grad_outer(self, point: Point, data: PyTree, weights: Array) -> PyTree:
        return jax.grad(self._mean_inner_loss, argnums=1)(point.inner_var, point.outer_var, data, weights)

    def _outer(self, point: Point, data: PyTree, weights: Array) -> OuterPass:
        gradients = jax.grad(self._mean_outer_loss, argnums=(0, 1))
        return OuterPass(*gradients(point.inner_var, point.outer_var, data, weights))

    def _inner_value(self, point: Point, data: PyTree, weights: Array) -> Array:
        return self._mean_inner_loss(point.inner_var, point.outer_var, data, weights)

    def _outer_value(self, point: Point, data: PyTree, weights: Array) -> Array:
        return self._mean_outer_loss(point.inner_var, point.outer_var, data, weights)

    def _mean_inner_loss(self, inner_var: PyTree, outer_var: PyTree, data: PyTree, weights: Array) -> Array:
        losses = jax.vmap(self.inner_loss, in_axes=(None, None, self.inner_samples.vmap_axes))
        return jnp.sum(weights * losses(inner_var, outer_var, data))

    def _mean_outer_loss(self, inner_var: PyTree, outer_var: PyTree, data: PyTree, weights: Array) -> Array:
        losses = jax.vmap(self.outer_loss, in_axes=(None, None, self.outer_samples.vmap_axes))
        return jnp.sum(weights * losses(inner_var, outer_var, data))
