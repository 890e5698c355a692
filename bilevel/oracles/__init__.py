"""Derivatives on rows: by automatic differentiation, or in closed form."""

from bilevel.oracles.autodiff import AutodiffOracles
from bilevel.oracles.base import Oracles, joined
from bilevel.oracles.cleaning import CleaningOracles
from bilevel.oracles.linear import LinearOracles
from bilevel.oracles.logistic import LogisticOracles
from bilevel.oracles.quadratic import Factors, QuadraticOracles
from bilevel.oracles.ridge import Regression, RidgeOracles
from bilevel.oracles.rowwise import RowwiseOracles
from bilevel.oracles.samples import Samples
from bilevel.oracles.sampling import SAMPLINGS
from bilevel.oracles.sharded import ShardedOracles
from bilevel.oracles.softmax import Labelled
from bilevel.oracles.softmax_selection import PENALTIES, SoftmaxSelectionOracles
from bilevel.oracles.worst_case import CoordinateChains, RotatedChains, WorstCaseOracles

__all__ = [
    "PENALTIES",
    "SAMPLINGS",
    "AutodiffOracles",
    "CleaningOracles",
    "CoordinateChains",
    "Factors",
    "Labelled",
    "LinearOracles",
    "LogisticOracles",
    "Oracles",
    "QuadraticOracles",
    "Regression",
    "RidgeOracles",
    "RotatedChains",
    "RowwiseOracles",
    "Samples",
    "ShardedOracles",
    "SoftmaxSelectionOracles",
    "WorstCaseOracles",
    "joined",
]
