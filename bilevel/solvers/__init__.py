"""One file per algorithm. To add a solver, write a file in this folder and list its class in this module."""

from bilevel.solvers.ada_bio import AdaBiO
from bilevel.solvers.alset import ALSET
from bilevel.solvers.amigo import AmIGO
from bilevel.solvers.auto import AutoSRBA
from bilevel.solvers.base import Solver, SolverBase, solver
from bilevel.solvers.bome import BOME
from bilevel.solvers.bsa import BSA
from bilevel.solvers.d_tfbo import DTFBO
from bilevel.solvers.exact import Exact
from bilevel.solvers.f2sa import F2SA
from bilevel.solvers.f2sa_p import F2SAp
from bilevel.solvers.fde_hbo import FdeHBO
from bilevel.solvers.fsla import FSLA
from bilevel.solvers.hoag import HOAG
from bilevel.solvers.host import HostSolver
from bilevel.solvers.itd import ITD
from bilevel.solvers.lanc_bio import LancBiO
from bilevel.solvers.ma_soba import MASOBA
from bilevel.solvers.mrbo import MRBO
from bilevel.solvers.nbo import NBO
from bilevel.solvers.neumann_aid import NeumannAID
from bilevel.solvers.pnpbo import PnPBO
from bilevel.solvers.pzobo import PZOBO
from bilevel.solvers.qnbo import QNBO
from bilevel.solvers.s_tfbo import STFBO
from bilevel.solvers.saba import SABA
from bilevel.solvers.shine import SHINE
from bilevel.solvers.soba import SOBA
from bilevel.solvers.spaba import SPABA
from bilevel.solvers.srba import SRBA
from bilevel.solvers.stocbio import StocBiO
from bilevel.solvers.sustain import SUSTAIN
from bilevel.solvers.ttsa import TTSA
from bilevel.solvers.vrbo import VRBO

_IN_TABLE_ORDER = (
    AutoSRBA,
    SRBA,
    SABA,
    SOBA,
    StocBiO,
    AmIGO,
    MRBO,
    VRBO,
    F2SA,
    BSA,
    TTSA,
    ALSET,
    SUSTAIN,
    FSLA,
    BOME,
    PZOBO,
    ITD,
    HOAG,
    Exact,
    MASOBA,
    SPABA,
    F2SAp,
    PnPBO,
    STFBO,
    DTFBO,
    AdaBiO,
    QNBO,
    NBO,
    SHINE,
    NeumannAID,
    FdeHBO,
    LancBiO,
)

SOLVERS = {cls.__name__: cls for cls in _IN_TABLE_ORDER}

__all__ = [
    "ALSET",
    "BOME",
    "BSA",
    "DTFBO",
    "F2SA",
    "FSLA",
    "HOAG",
    "ITD",
    "MASOBA",
    "MRBO",
    "NBO",
    "PZOBO",
    "QNBO",
    "SABA",
    "SHINE",
    "SOBA",
    "SOLVERS",
    "SPABA",
    "SRBA",
    "STFBO",
    "SUSTAIN",
    "TTSA",
    "VRBO",
    "AdaBiO",
    "AmIGO",
    "AutoSRBA",
    "Exact",
    "F2SAp",
    "FdeHBO",
    "HostSolver",
    "LancBiO",
    "NeumannAID",
    "PnPBO",
    "Solver",
    "SolverBase",
    "StocBiO",
    "solver",
]
