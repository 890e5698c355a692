"""Oracles of per-sample losses, by automatic differentiation."""

from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from bilevel import _tree as trees
from bilevel._types import Array, InnerPass, OuterPass, Point, PyTree
from bilevel.oracles.base import Oracles
from bilevel.oracles.samples import STATIC, Samples

Loss = Callable[[PyTree, PyTree, PyTree], Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class AutodiffOracles(Oracles):
    """Derivatives of ``loss(inner_var, outer_var, sample) -> scalar`` on any pytrees."""

    inner_loss: Loss = field(metadata=STATIC)
    outer_loss: Loss = field(metadata=STATIC)

    holds_only_rows = True

    def _inner(self, point: Point, data: PyTree, weights: Array) -> InnerPass:
        gradients = jax.grad(_mean(self.inner_loss, self.inner_samples, data, weights), argnums=(0, 1))
        # Moving z along v gives the Hessian-vector and the cross product with the gradient.
        (grad, _), (hvp, cross) = jax.jvp(
            gradients, (point.inner_var, point.outer_var), (point.v, trees.zeros_like(point.outer_var))
        )
        return InnerPass(grad, hvp, cross)

    def _inner_grad_outer(self, point: Point, data: PyTree, weights: Array) -> PyTree:
        loss = _mean(self.inner_loss, self.inner_samples, data, weights)
        return jax.grad(loss, argnums=1)(point.inner_var, point.outer_var)

    def _outer(self, point: Point, data: PyTree, weights: Array) -> OuterPass:
        loss = _mean(self.outer_loss, self.outer_samples, data, weights)
        return OuterPass(*jax.grad(loss, argnums=(0, 1))(point.inner_var, point.outer_var))

    def _inner_value(self, point: Point, data: PyTree, weights: Array) -> Array:
        return _mean(self.inner_loss, self.inner_samples, data, weights)(point.inner_var, point.outer_var)

    def _outer_value(self, point: Point, data: PyTree, weights: Array) -> Array:
        return _mean(self.outer_loss, self.outer_samples, data, weights)(point.inner_var, point.outer_var)


def _mean(loss: Loss, samples: Samples, data: PyTree, weights: Array) -> Callable[[PyTree, PyTree], Array]:
    losses = jax.vmap(loss, in_axes=(None, None, samples.vmap_axes))
    return lambda inner_var, outer_var: jnp.sum(weights * losses(inner_var, outer_var, data))
