"""Closed-form oracles of penalty selection for least squares: l = ½ (d'z - t)²."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from bilevel.oracles.linear import LinearOracles
from bilevel.types import AnyArray, Array


class Regression(NamedTuple):
    """Features, (features, samples), and one target per sample."""

    features: AnyArray
    targets: AnyArray


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["inner_samples", "outer_samples", "outer_bounds", "groups"],
    meta_fields=[],
)
@dataclass(frozen=True)
class RidgeOracles(LinearOracles):
    """Features and targets on each level."""

    def _features(self, data: Regression) -> Array:
        return data.features

    def _losses(self, scores: Array, data: Regression) -> Array:
        return (scores - data.targets) ** 2 / 2

    def _slopes(self, scores: Array, data: Regression) -> tuple[Array, Array]:
        return scores - data.targets, jnp.ones_like(scores)
