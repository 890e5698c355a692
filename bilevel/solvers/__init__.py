"""One file per algorithm. To add a solver, write a file in this folder and import its class here."""

from bilevel.solvers.base import SOLVERS as SOLVERS
from bilevel.solvers.base import Solver as Solver
from bilevel.solvers.base import SolverBase as SolverBase
from bilevel.solvers.base import solver as solver
from bilevel.solvers.host import HostSolver as HostSolver

# isort: off
# The order of these imports is the order of the tables in docs and reports.
from bilevel.solvers.auto import AutoSRBA as AutoSRBA
from bilevel.solvers.srba import SRBA as SRBA
from bilevel.solvers.saba import SABA as SABA
from bilevel.solvers.soba import SOBA as SOBA
from bilevel.solvers.stocbio import StocBiO as StocBiO
from bilevel.solvers.amigo import AmIGO as AmIGO
from bilevel.solvers.mrbo import MRBO as MRBO
from bilevel.solvers.vrbo import VRBO as VRBO
from bilevel.solvers.f2sa import F2SA as F2SA
from bilevel.solvers.alset import ALSET as ALSET
from bilevel.solvers.bsa import BSA as BSA
from bilevel.solvers.ttsa import TTSA as TTSA
from bilevel.solvers.sustain import SUSTAIN as SUSTAIN
from bilevel.solvers.fsla import FSLA as FSLA
from bilevel.solvers.bome import BOME as BOME
from bilevel.solvers.pzobo import PZOBO as PZOBO
from bilevel.solvers.itd import ITD as ITD
from bilevel.solvers.hoag import HOAG as HOAG
from bilevel.solvers.exact import Exact as Exact
from bilevel.solvers.ma_soba import MASOBA as MASOBA
from bilevel.solvers.spaba import SPABA as SPABA
from bilevel.solvers.f2sa_p import F2SAp as F2SAp
from bilevel.solvers.pnpbo import PnPBO as PnPBO
from bilevel.solvers.s_tfbo import STFBO as STFBO
from bilevel.solvers.d_tfbo import DTFBO as DTFBO
from bilevel.solvers.ada_bio import AdaBiO as AdaBiO
from bilevel.solvers.qnbo import QNBO as QNBO
from bilevel.solvers.nbo import NBO as NBO
from bilevel.solvers.shine import SHINE as SHINE
from bilevel.solvers.darts import DARTS as DARTS
from bilevel.solvers.neumann_aid import NeumannAID as NeumannAID
from bilevel.solvers.fde_hbo import FdeHBO as FdeHBO
from bilevel.solvers.sub_bio import SubBiO as SubBiO
from bilevel.solvers.lanc_bio import LancBiO as LancBiO
from bilevel.solvers.sbo_lsvrg import SBOLSVRG as SBOLSVRG
from bilevel.solvers.aid_cg import AIDCG as AIDCG
from bilevel.solvers.v_pbgd import VPBGD as VPBGD
from bilevel.solvers.g_pbgd import GPBGD as GPBGD
from bilevel.solvers.forward_mode import ForwardMode as ForwardMode
from bilevel.solvers.acc_bio import AccBiO as AccBiO
from bilevel.solvers.sama import SAMA as SAMA
from bilevel.solvers.meha import MEHA as MEHA
from bilevel.solvers.acc_bo import AccBO as AccBO
from bilevel.solvers.maid import MAID as MAID
# isort: on

DEFAULT_SOLVER = AutoSRBA  # of `bilevel.run`
