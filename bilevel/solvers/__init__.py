"""One file per algorithm. The files of this folder are found and imported; their solvers register themselves."""

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

from bilevel.solvers.base import Solver, SolverBase, registered_solvers, solver
from bilevel.solvers.host import HostSolver

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)

SOLVERS: dict[str, type[SolverBase]] = registered_solvers()
globals().update(SOLVERS)

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Tell a type checker that the classes of `SOLVERS` are attributes."""


__all__ = ["SOLVERS", "HostSolver", "Solver", "SolverBase", "solver"]
__all__ += list(SOLVERS)
