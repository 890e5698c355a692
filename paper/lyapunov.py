"""The coefficients that bound the change of the Lyapunov function of the convergence theorem (th:cvg_rate)."""

from typing import NamedTuple

from bilevel.problems.certificate import Constants
from bilevel.theory import StepSizes, descent_constants


class Coefficients(NamedTuple):
    """Coefficients of the sums over a period in the bound of E[L] at its end minus L at its beginning."""

    hypergrad: float
    phi_z: float
    phi_v: float
    V_z: float
    V_v: float
    V_x: float


def lyapunov_coefficients(constants: Constants, steps: StepSizes) -> Coefficients:
    """Return the coefficients of app:eq:lyap_ineq_2.

    The theorem holds if the first is at most -γ/4 and no other is positive. The descent lemmas give these coefficients
    for any steps with γ <= min(C_z, C_v) ρ, γ <= ρ and ρ <= B_v:

        ||∇h||²   -γ/2 + 2w γ²/ρ                                         w = ψ_z β̄_zx + ψ_v β̄_vx
        φ_z       2 L_x² γ/μ - ψ_z μ ρ/2 + ψ_v α_vz ρ + 4w L_x² γ²/(μ ρ)
        φ_v       2 L_x² γ/μ - ψ_v μ ρ/16 + 4w L_x² γ²/(μ ρ)
        V_z       -ψ_z ρ/2 (1 - Λ_z ρ) + q (β_hz γ ρ² + ψ_z β_zz ρ³ + ψ_v β_vz ρ³)
        V_v       -ψ_v β̃_vv ρ + q (β_hv γ ρ² + ψ_z β_zv γ² ρ + ψ_v β_vv ρ³)
        V_x       -γ/2 (1 - (L_h + ψ_z Λ_z + ψ_v Λ_v) γ) + q (β_hx γ³ + (ψ_z β_zx + ψ_v β_vx) γ² ρ)
    """
    d, mu, q = descent_constants(constants), constants.mu_G, steps.q
    rho, gamma, psi_z, psi_v = steps.rho, steps.gamma, steps.psi_z, steps.psi_v
    weight = psi_z * d.bar_zx + psi_v * d.bar_vx
    error = 2 * d.L_x**2 * gamma / mu + 4 * weight * d.L_x**2 * gamma**2 / (mu * rho)
    assert constants.L_h is not None
    curvature = constants.L_h + psi_z * d.Lambda_z + psi_v * d.Lambda_v
    noise_z = d.beta_hz * gamma * rho**2 + (psi_z * d.beta_zz + psi_v * d.beta_vz) * rho**3
    noise_v = d.beta_hv * gamma * rho**2 + psi_z * d.beta_zv * gamma**2 * rho + psi_v * d.beta_vv * rho**3
    noise_x = d.beta_hx * gamma**3 + (psi_z * d.beta_zx + psi_v * d.beta_vx) * gamma**2 * rho
    return Coefficients(
        hypergrad=-gamma / 2 + 2 * weight * gamma**2 / rho,
        phi_z=error - psi_z * mu * rho / 2 + psi_v * d.alpha_vz * rho,
        phi_v=error - psi_v * mu * rho / 16,
        V_z=-psi_z * rho / 2 * (1 - d.Lambda_z * rho) + q * noise_z,
        V_v=-psi_v * d.tilde_vv * rho + q * noise_v,
        V_x=-gamma / 2 * (1 - curvature * gamma) + q * noise_x,
    )
