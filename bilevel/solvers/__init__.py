"""One file per algorithm, one line here."""

from bilevel.solvers.base import Solver, solver
from bilevel.solvers.saba import SABA
from bilevel.solvers.soba import SOBA
from bilevel.solvers.srba import SRBA

SOLVERS: dict[str, type[Solver]] = {cls.__name__: cls for cls in (SRBA, SABA, SOBA)}

__all__ = ["SABA", "SOBA", "SOLVERS", "SRBA", "Solver", "solver"]
