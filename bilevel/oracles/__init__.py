"""Derivatives on rows: by automatic differentiation, or in closed form."""

from bilevel.oracles.autodiff import AutodiffOracles
from bilevel.oracles.base import Oracles, joined
from bilevel.oracles.logistic import LogisticOracles
from bilevel.oracles.quadratic import Factors, QuadraticOracles
from bilevel.oracles.samples import Samples
from bilevel.oracles.sampling import SAMPLINGS

__all__ = [
    "SAMPLINGS",
    "AutodiffOracles",
    "Factors",
    "LogisticOracles",
    "Oracles",
    "QuadraticOracles",
    "Samples",
    "joined",
]
