"""The contract between solvers and problems: derivatives on rows, by automatic differentiation or in closed form."""

from bilevel.oracles.autodiff import AutodiffOracles, DifferenceOracles
from bilevel.oracles.base import Oracles, join
from bilevel.oracles.host_samples import HostData, HostSamples
from bilevel.oracles.outer_terms import OuterTerm
from bilevel.oracles.rowwise import RowwiseOracles
from bilevel.oracles.samples import SAMPLINGS, Samples
from bilevel.oracles.sharding import ShardedOracles
from bilevel.oracles.tasks import TaskOracles

__all__ = ["SAMPLINGS", "AutodiffOracles", "DifferenceOracles", "HostData", "HostSamples", "Oracles", "RowwiseOracles"]
__all__ += ["OuterTerm", "Samples", "ShardedOracles", "TaskOracles", "join"]
