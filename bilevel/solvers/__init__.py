"""One file per algorithm, one line here."""

from bilevel.solvers.alset import ALSET
from bilevel.solvers.amigo import AmIGO
from bilevel.solvers.base import Solver, SolverBase, solver
from bilevel.solvers.bome import BOME
from bilevel.solvers.bsa import BSA
from bilevel.solvers.exact import Exact
from bilevel.solvers.f2sa import F2SA
from bilevel.solvers.fsla import FSLA
from bilevel.solvers.hoag import HOAG
from bilevel.solvers.host import HostSolver
from bilevel.solvers.itd import ITD
from bilevel.solvers.ma_soba import MASOBA
from bilevel.solvers.mrbo import MRBO
from bilevel.solvers.pzobo import PZOBO
from bilevel.solvers.saba import SABA
from bilevel.solvers.soba import SOBA
from bilevel.solvers.spaba import SPABA
from bilevel.solvers.srba import SRBA
from bilevel.solvers.stocbio import StocBiO
from bilevel.solvers.sustain import SUSTAIN
from bilevel.solvers.ttsa import TTSA
from bilevel.solvers.vrbo import VRBO

_ALL: tuple[type[SolverBase], ...] = (
    *(SRBA, SABA, SOBA),
    *(StocBiO, AmIGO, MRBO, VRBO, F2SA),
    *(BSA, TTSA, ALSET, SUSTAIN, FSLA, BOME, PZOBO, ITD, HOAG),
    *(Exact, MASOBA, SPABA),
)
SOLVERS: dict[str, type[SolverBase]] = {cls.__name__: cls for cls in _ALL}

__all__ = [
    "ALSET",
    "BOME",
    "BSA",
    "F2SA",
    "FSLA",
    "HOAG",
    "ITD",
    "MASOBA",
    "MRBO",
    "PZOBO",
    "SABA",
    "SOBA",
    "SOLVERS",
    "SPABA",
    "SRBA",
    "SUSTAIN",
    "TTSA",
    "VRBO",
    "AmIGO",
    "Exact",
    "HostSolver",
    "Solver",
    "SolverBase",
    "StocBiO",
    "solver",
]
