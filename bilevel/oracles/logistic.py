"""Closed-form oracles of logistic penalty selection: l = log(1 + exp(-y d'z)).

The rows held are y d: the label is part of the data.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from bilevel.losses import logistic, sigmoid
from bilevel.oracles.linear import LinearOracles
from bilevel.types import Array


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["inner_samples", "outer_samples", "outer_bounds", "groups"],
    meta_fields=[],
)
@dataclass(frozen=True)
class LogisticOracles(LinearOracles):
    """One array per level: signed rows, (features, samples)."""

    def _features(self, data: Array) -> Array:
        return data

    def _losses(self, scores: Array, data: Array) -> Array:
        return logistic(scores)

    def _slopes(self, scores: Array, data: Array) -> tuple[Array, Array]:
        missed = sigmoid(-scores)
        return -missed, missed * (1 - missed)

    def _cautious(self, slopes: Array, curvatures: Array) -> Array:
        # Both are alike in the mean where the model is right; where a row is missed by far only the first is not 0.
        return jnp.maximum(slopes**2, curvatures)
