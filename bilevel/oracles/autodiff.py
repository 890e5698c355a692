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
        gradients = jax.grad(self._mean("inner", data, weights), argnums=(0, 1))
        # Moving z along v gives the Hessian-vector and the cross product with the gradient.
        (grad, _), (hvp, cross) = jax.jvp(gradients, point[:2], (point.v, trees.zeros_like(point.outer_var)))
        return InnerPass(grad, hvp, cross)

    def _inner_grad_outer(self, point: Point, data: PyTree, weights: Array) -> PyTree:
        return jax.grad(self._mean("inner", data, weights), argnums=1)(*point[:2])

    def _outer(self, point: Point, data: PyTree, weights: Array) -> OuterPass:
        return OuterPass(*jax.grad(self._mean("outer", data, weights), argnums=(0, 1))(*point[:2]))

    def _inner_value(self, point: Point, data: PyTree, weights: Array) -> Array:
        return self._mean("inner", data, weights)(*point[:2])

    def _outer_value(self, point: Point, data: PyTree, weights: Array) -> Array:
        return self._mean("outer", data, weights)(*point[:2])

    def _mean(self, level: str, data: PyTree, weights: Array) -> Callable[[PyTree, PyTree], Array]:
        is_inner = level == "inner"
        loss, samples = (self.inner_loss, self.inner_samples) if is_inner else (self.outer_loss, self.outer_samples)
        axes = jax.tree.unflatten(jax.tree.structure(samples.leaves), samples.axes)
        losses = jax.vmap(loss, in_axes=(None, None, axes))
        return lambda inner_var, outer_var: jnp.sum(weights * losses(inner_var, outer_var, data))
