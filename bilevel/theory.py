"""Step sizes and Lyapunov function of the convergence theorem of SRBA (th:cvg_rate).

The theorem is not proved with the constants that the paper prints in lemma:descent_z, lemma:descent_v, lemma:descent_h
and th:cvg_rate. This module uses the same proof with corrected arithmetic; `reports/theory.md` lists the differences
from the paper, with a test of each. μ, R and L_z* are those of `problem.constants()`.
"""

from dataclasses import dataclass
from math import inf, sqrt
from typing import NamedTuple

import numpy as np

from bilevel._core import trees
from bilevel._core.compilation import Compiled, arithmetic
from bilevel._core.types import Array, Point, PyTree
from bilevel.oracles import Oracles
from bilevel.problems import BilevelProblem
from bilevel.problems.certificate import Constants
from bilevel.problems.checks import check_sizes
from bilevel.solvers.srba import SRBA

__all__ = ["Lyapunov", "StepSizes", "lyapunov", "step_sizes"]


class DescentConstants(NamedTuple):
    """The constants of the three descent lemmas, with the names of the paper.

    L_x satisfies ||D_x(z, v, x) - ∇h(x)||² <= L_x² (||z - z*||² + ||v - v*||²). Lambda_z and Lambda_v are Lipschitz
    constants of ∇φ_z and ∇φ_v. The lemmas require ρ <= B_v and γ <= min(C_z, C_v) ρ. The other fields are coefficients:
    beta of the sums of squared moves, bar of ||D_x(u)||², tilde_vv of the decrease by the move of v, and alpha_vz of
    φ_z in the descent on φ_v.
    """

    L_x: float
    Lambda_z: float
    Lambda_v: float
    B_v: float
    C_z: float
    C_v: float
    beta_zz: float
    beta_zv: float
    beta_zx: float
    bar_zx: float
    beta_vz: float
    beta_vv: float
    beta_vx: float
    bar_vx: float
    tilde_vv: float
    alpha_vz: float
    beta_hz: float
    beta_hv: float
    beta_hx: float


@dataclass(frozen=True)
class StepSizes:
    """Step sizes of SRBA with which E[L] decreases in every period by at least γ/4 times the sum of E||∇h||².

    The Lyapunov function is L = h + ψ_z φ_z + ψ_v φ_v with φ_z = G(z, x) - G(z*(x), x) and
    φ_v = ½ (v - v*)'∇²zz G(z*(x), x) (v - v*).

    Attributes
    ----------
    rho : step of z and v, the largest that is proved: ρ̄
    gamma : step of x, the largest that is proved: min(γ̄, ξ ρ̄)
    gamma_bar : γ̄ of th:cvg_rate. Like ρ̄, it includes the factor q^(-1/2), which cor:sample_complexity has twice
    xi : largest ratio γ/ρ
    psi_z, psi_v : weights of φ_z and φ_v in L
    q : steps per period
    calls_per_period : oracle calls of a period, 3n + 2m + 10 (q - 1)
    v_radius : radius R of the ball of v; None if v is not projected
    """

    rho: float
    gamma: float
    gamma_bar: float
    xi: float
    psi_z: float
    psi_v: float
    q: int
    calls_per_period: int
    v_radius: float | None

    def solver(self) -> SRBA:
        """Return SRBA as in the theorem: one row of each level per step, drawn independently with replacement."""
        ratio = self.rho / self.gamma
        return SRBA(self.rho, ratio, batch_size=1, period=self.q, v_radius=self.v_radius, sampling="iid")


def descent_constants(constants: Constants) -> DescentConstants:
    """Return the constants of lemma:descent_z, lemma:descent_v and lemma:descent_h.

    With L' = L1_G²/μ, L'' = 2 (1 + L_z*)² (L2_G R + L1_F)²/μ, a = (L2_G R)² + L1_F² and e = L1_G/μ + μ/(16 L1_G):

        β_zz = β_zx = L1_G²    β_zv = 8 L1_G² L'/μ    β̄_zx = 2 L'/μ     C_z = √(μ L1_G² / (16 L' a))
        β_vz = β_vx = 32 a e   β_vv = 32 L1_G² e      β̄_vx = 32 L''/μ   C_v = √(μ e / (16 L''))
        β_hz = β_hx = 4 a      β_hv = 4 L1_G²         β̃_vv = μ/(32 L1_G)   α_vz = 12 e (L2_G R + L1_F)²/μ
        Λ_z = L1_G (L_z* + 3)  B_v = min(1, √(μ e / (2 L1_G))) / Λ_v      L_x² = L1_G² + (L2_G R + L1_F)²

    Λ_v is that of `phi_v_smoothness`.
    """
    c, mu, g1 = constants, constants.mu_G, constants.L1_G
    hessian_change = _hessian_change(c)
    slope = hessian_change + c.L1_F
    a, e = hessian_change**2 + c.L1_F**2, g1 / mu + mu / (16 * g1)
    first, second = g1**2 / mu, 2 * (1 + c.L_z_star) ** 2 * slope**2 / mu
    L_x, Lambda_z, Lambda_v = sqrt(g1**2 + slope**2), g1 * (c.L_z_star + 3), phi_v_smoothness(c)
    steps = min(1, sqrt(mu * e / (2 * g1))) / Lambda_v  # B_v
    ratios = sqrt(_over(mu * g1**2, 16 * first * a)), sqrt(_over(mu * e, 16 * second))  # C_z, C_v
    of_z = g1**2, 8 * g1**2 * first / mu, g1**2, 2 * first / mu  # β_zz, β_zv, β_zx, β̄_zx
    of_v = 32 * a * e, 32 * g1**2 * e, 32 * a * e, 32 * second / mu  # β_vz, β_vv, β_vx, β̄_vx
    more_of_v = mu / (32 * g1), 12 * e * slope**2 / mu  # β̃_vv, α_vz
    of_h = 4 * a, 4 * g1**2, 4 * a  # β_hz, β_hv, β_hx
    return DescentConstants(L_x, Lambda_z, Lambda_v, steps, *ratios, *of_z, *of_v, *more_of_v, *of_h)


def phi_v_smoothness(constants: Constants) -> float:
    """Return Λ_v = Λ_1 + Λ_2, a Lipschitz constant of ∇φ_v where ||v|| <= R.

        Λ_1 = 2 L1_G + s (L2_G R + L1_F),   s = 1 + L_z*
        Λ_2 = s (L2_G R + L1_F) (1 + L_v*) + R² (s² L3_G + L_J L2_G) + 2 R (s² L2_F + L_J L1_F)

    with L_J = L2_G s²/μ the Lipschitz constant of Dz*. Λ_1 is that of the paper. Λ_2 follows from

        <∇x φ_v, u> = ½ DH[u](v, v) - ½ DH[u](v*, v*) + D(∇z F)[u](v - v*),   H = ∇²zz G(z*(x), x),

    whose factors are bounded and Lipschitz.
    """
    c, s = constants, 1 + constants.L_z_star
    slope = s * (_hessian_change(c) + c.L1_F)
    jacobian = c.L2_G * s**2 / c.mu_G
    third, second = s**2 * c.L3_G + jacobian * c.L2_G, s**2 * c.L2_F + jacobian * c.L1_F
    far = 0.0 if third == second == 0 else _needed(c.R, "R")
    return 2 * c.L1_G + slope * (2 + _needed(c.L_v_star, "L_v_star")) + far**2 * third + 2 * far * second


def step_sizes(constants: Constants, n: int, m: int, q: int | None = None) -> StepSizes:
    """Return the largest step sizes for which the convergence theorem of SRBA (th:cvg_rate) is proved.

    They are usually far too small to be used in practice; see the page on the theory.

    Parameters
    ----------
    constants : constants of the problem, from `problem.constants()`
    n, m : numbers of samples of the inner and of the outer level
    q : steps per period; n + m by default, as in cor:sample_complexity

    Notes
    -----
        ψ_z = 1/(16 β̄_zx)    ψ_v = min(1/(16 β̄_vx), μ ψ_z/(12 α_vz))
        ξ = min(C_z, C_v, 1, ψ_v μ²/(40 L_x²), ψ_z μ²/(24 L_x²))
        ρ̄ = min(1/(6 Λ_z), B_v, √(r/q))   r the least of   ψ_z/(12 (ψ_z β_zz + ψ_v β_vz)),   ψ_z/(12 ξ β_hz),
             β̃_vv/(6 β_vv),   ψ_v β̃_vv/(6 ξ β_hv),   1/(12 ξ (ψ_z β_zx + ψ_v β_vx))
        γ̄ = min(1/(6 (L_h + ψ_z Λ_z + ψ_v Λ_v)), √(g/q))   g the lesser of   1/(12 β_hx),   ψ_v β̃_vv/(6 ψ_z β_zv)

    and ρ = ρ̄, γ = min(γ̄, ξ ρ).
    """
    n, m, q = check_sizes(n=n, m=m, q=n + m if q is None else q)
    d, mu = descent_constants(constants), constants.mu_G
    psi_z = 1 / (16 * d.bar_zx)
    psi_v = min(_over(1, 16 * d.bar_vx), _over(mu * psi_z, 12 * d.alpha_vz))
    xi = min(d.C_z, d.C_v, 1, psi_v * mu**2 / (40 * d.L_x**2), psi_z * mu**2 / (24 * d.L_x**2))
    squared_rho = min(
        psi_z / (12 * (psi_z * d.beta_zz + psi_v * d.beta_vz)),
        _over(psi_z, 12 * xi * d.beta_hz),
        d.tilde_vv / (6 * d.beta_vv),
        psi_v * d.tilde_vv / (6 * xi * d.beta_hv),
        1 / (12 * xi * (psi_z * d.beta_zx + psi_v * d.beta_vx)),
    )
    rho = min(1 / (6 * d.Lambda_z), d.B_v, sqrt(squared_rho / q))
    curvature = _needed(constants.L_h, "L_h") + psi_z * d.Lambda_z + psi_v * d.Lambda_v
    squared_gamma = min(_over(1, 12 * d.beta_hx), psi_v * d.tilde_vv / (6 * psi_z * d.beta_zv))
    gamma_bar = min(1 / (6 * curvature), sqrt(squared_gamma / q))
    gamma, calls = min(gamma_bar, xi * rho), 3 * n + 2 * m + 10 * (q - 1)
    return StepSizes(rho, gamma, gamma_bar, xi, psi_z, psi_v, q, calls, constants.R)


class Lyapunov(NamedTuple):
    """The function L = h + ψ_z φ_z + ψ_v φ_v (`total`) and its parts, with ||∇h||²."""

    total: float
    value: float
    phi_z: float
    phi_v: float
    hypergrad_norm_sq: float


def lyapunov(problem: BilevelProblem, point: Point, steps: StepSizes) -> Lyapunov:
    """Return the Lyapunov function of th:cvg_rate at a point, in float64.

        L = h(x) + ψ_z φ_z + ψ_v φ_v
        φ_z = G(z, x) - G(z*(x), x)                 φ_v = Ψ(v) - Ψ(v*) = ½ (v - v*)'H (v - v*)

    with Ψ(v) = ½ v'H v + ∇z F'v and H, ∇z F at z*(x). φ_z >= μ/2 ||z - z*||² and φ_v >= μ/2 ||v - v*||².

    Parameters
    ----------
    problem : a problem with an exact solution
    point : where to evaluate, as `Run.point` or `RunResult.point`
    steps : the step sizes, which contain ψ_z and ψ_v
    """
    if problem.exact_solver is None:
        raise ValueError("`problem` has no exact solution, so h and z* are unknown; say `strongly_convex=True`.")
    point = trees.to_numpy(point, np.float64)
    solution = problem.exact_solver(point.outer_var, None)
    with arithmetic(np.float64, problem):
        gaps = _gaps(problem.oracles.in_float64(), trees.cast(point, np.float64), solution.inner_var, solution.v)
    phi_z, phi_v = (float(gap) for gap in gaps)
    total = solution.value + steps.psi_z * phi_z + steps.psi_v * phi_v
    hypergrad = trees.flat(solution.hypergrad)
    return Lyapunov(total, solution.value, phi_z, phi_v, float(hypergrad @ hypergrad))


@Compiled
def _gaps(oracles: Oracles, point: Point, inner_star: PyTree, v_star: PyTree) -> tuple[Array, Array]:
    solution = point._replace(inner_var=inner_star)
    off = trees.subtract(point.v, v_star)
    phi_z = oracles.inner_value(point) - oracles.inner_value(solution)
    return phi_z, trees.dot(off, oracles.hvp(solution._replace(v=off))) / 2


def _hessian_change(c: Constants) -> float:
    """Return L2_G R, which is 0 if the Hessians of G are constant; then R may be unknown."""
    return 0.0 if c.L2_G == 0 else c.L2_G * _needed(c.R, "R")


def _needed(value: float | None, name: str) -> float:
    if value is None:
        raise ValueError(f"`constants.{name}` is None, but the proof needs it; give `constants` a `radius`.")
    return value


def _over(a: float, b: float) -> float:
    return a / b if b > 0 else inf
