"""One file per algorithm. The files of this folder are found and imported; their solvers register themselves."""

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

from bilevel.solvers.base import REGISTRY, Solver, SolverBase, solver
from bilevel.solvers.host import HostSolver

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)

# In the order of tables.
SOLVERS = dict(sorted(REGISTRY.items(), key=lambda item: (item[1].table_order, item[0])))
globals().update(SOLVERS)

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Tell a type checker that the classes of `SOLVERS` are attributes."""


__all__ = ["SOLVERS", "HostSolver", "Solver", "SolverBase", "solver", *SOLVERS]
