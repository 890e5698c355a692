"""Convex terms R(x) of the objective h(x) + R(x), which solvers treat by their steps of x and not by derivatives."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bilevel._core import trees
from bilevel._core.types import PyTree, Scalar, is_number


class OuterTerm(ABC):
    """A convex function R of the outer variable. A subclass is a pytree, whose leaves are floats."""

    def value(self, x: PyTree) -> Scalar:
        """Return R(x) in its domain; 0 for an indicator function."""
        return 0.0

    @abstractmethod
    def prox(self, x: PyTree, step: Scalar) -> PyTree:
        """Return the minimizer of R(y) + ||y - x||²/(2 step)."""

    def move(self, x: PyTree, direction: PyTree, step: Scalar, scale: Scalar) -> PyTree:
        """Return x after a step along a direction, which is ``scale`` times an estimate of ∇h."""
        return self.prox(trees.subtract(x, trees.scale(step, direction)), step * scale)

    def check(self, x: PyTree, has_bounds: bool) -> str | None:
        """Return why a problem with this start cannot have the term, or None."""
        return None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class L1(OuterTerm):
    """R(x) = strength * sum |x_i|, which makes numbers of the outer variable exactly 0. Steps are soft thresholds.

    Parameters
    ----------
    strength : at least 0; larger values make more numbers 0
    """

    strength: Any

    def value(self, x: PyTree) -> Scalar:
        return self.strength * sum(abs(leaf).sum() for leaf in jax.tree.leaves(x))

    def prox(self, x: PyTree, step: Scalar) -> PyTree:
        least = step * self.strength
        return jax.tree.map(lambda leaf: leaf - jnp.clip(leaf, -least, least), x)

    def check(self, x: PyTree, has_bounds: bool) -> str | None:
        return (
            None if is_number(self.strength) and 0 <= self.strength < np.inf else "give a finite number of at least 0"
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Simplex(OuterTerm):
    """x is at least 0 and sums to 1 along its last axis. A step multiplies x by exp(-step * direction) and rescales it.

    This is the mirror step of the entropy. x stays positive, and its numbers tend to 0 without reaching it.
    """

    def prox(self, x: PyTree, step: Scalar) -> PyTree:
        def project(leaf: Any) -> Any:
            # The numbers above the largest of these levels sum to 1 above it.
            sums = jnp.cumsum(-jnp.sort(-leaf, axis=-1), axis=-1) - 1
            levels = sums / jnp.arange(1, leaf.shape[-1] + 1, dtype=leaf.dtype)
            return jnp.maximum(leaf - jnp.max(levels, axis=-1, keepdims=True), 0)

        return jax.tree.map(project, x)

    def move(self, x: PyTree, direction: PyTree, step: Scalar, scale: Scalar) -> PyTree:
        return jax.tree.map(lambda leaf, change: jax.nn.softmax(jnp.log(leaf) - step * change), x, direction)

    def check(self, x: PyTree, has_bounds: bool) -> str | None:
        leaves = [np.atleast_1d(leaf) for leaf in jax.tree.leaves(x)]
        inside = all(bool(np.all(leaf > 0)) and np.allclose(leaf.sum(axis=-1), 1) for leaf in leaves)
        return None if inside and not has_bounds else "start at positive numbers that sum to 1, without bounds"
