"""The constants of the lemmas and of the theorem, compared with a second implementation that follows the proof."""

import dataclasses
from itertools import product
from math import inf, sqrt

import numpy as np
import pytest

from bilevel.problems.certificate import Constants, Region
from bilevel.theory import (
    DescentConstants,
    StepSizes,
    descent_constants,
    phi_v_smoothness,
    step_sizes,
)
from paper.lyapunov import lyapunov_coefficients


def made_up(seed):
    """Return random constants of very different magnitudes, so that each term of a formula matters in some case."""
    rng = np.random.default_rng(seed)
    names = ("mu_G", "L0_F", "L1_F", "L2_F", "L1_G", "L2_G", "L3_G", "R", "L_z_star", "L_v_star", "L_h")
    values = dict(zip(names, np.exp(3 * rng.standard_normal(len(names))).tolist(), strict=True))
    return Constants(**values, how={}, region=Region())


MADE_UP = [made_up(seed) for seed in range(60)]


def smoothness_of_phi_v(c):
    """Return Λ_1 + Λ_2 of the paper: each factor of ∇x φ_v has a Lipschitz constant, times bounds of the others."""
    s = 1 + c.L_z_star
    of_jacobian = c.L2_G * s**2 / c.mu_G
    first = c.L1_F * s + 2 * c.L1_G + c.L2_G * s * c.R
    moving_v = s * c.L2_G * c.R + s * c.L1_F
    moving_v_star = moving_v * c.L_v_star
    moving_hessian = (s**2 * c.L3_G + of_jacobian * c.L2_G) * (c.R**2 + c.R**2) / 2
    moving_slope = (s**2 * c.L2_F + of_jacobian * c.L1_F) * (c.R + c.R)
    return first + moving_v + moving_v_star + moving_hessian + moving_slope


def lemmas(c):
    """Return the constants of the three descent lemmas, derived in the order of their proofs."""
    mu, g1, slope = c.mu_G, c.L1_G, c.L2_G * c.R + c.L1_F
    Lambda_v = smoothness_of_phi_v(c)
    # app:lemma:bound_error_directions: the errors of D_z, and of D_v and D_x, per squared move of z, v, x.
    of_z, far, own = g1**2, 4 * ((c.L2_G * c.R) ** 2 + c.L1_F**2), 4 * g1**2
    # lemma:descent_z: Young gives L'γ²/(μρ) ||E D_x||² <= 2 L'γ²/(μρ) (||D_x||² + error), which takes half of β_zz.
    bar_zx = 2 * (g1**2 / mu) / mu
    C_z = sqrt(of_z / 2 / (bar_zx * far))
    # lemma:descent_v: 2 α ρ and the two Young inequalities of app:eq:phi_v_4 make e; ρ <= B_v triples it.
    tilde = mu / (32 * g1)
    e = g1 / mu + 2 * tilde
    B_v = min(1 / Lambda_v, 2 * e / Lambda_v, sqrt(e / (2 * g1 / mu)) / Lambda_v)
    split = 2 * 3 * e
    # app:eq:9, and c = μρ/(16 L''γ) in app:eq:8, with the same factor 2.
    bar_vx = 2 * 16 * (2 * (c.L_z_star + 1) ** 2 * slope**2 / mu) / mu
    # The term from app:eq:exp_norm_exp_d_x may increase 24 to 32.
    C_v = sqrt(2 * e / bar_vx)
    return {
        "L_x": sqrt(g1**2 + slope**2),
        "Lambda_z": g1 + g1 * (c.L_z_star + 2),
        "Lambda_v": Lambda_v,
        "B_v": B_v,
        "C_z": C_z,
        "C_v": C_v,
        "beta_zz": of_z / 2 + bar_zx * far * C_z**2,
        "beta_zv": bar_zx * own,
        "beta_zx": of_z / 2 + bar_zx * far * C_z**2,
        "bar_zx": bar_zx,
        "beta_vz": split * far + bar_vx * far * C_v**2,
        "beta_vv": split * own + bar_vx * own * C_v**2,
        "beta_vx": split * far + bar_vx * far * C_v**2,
        "bar_vx": bar_vx,
        "tilde_vv": tilde,
        "alpha_vz": split * 2 * slope**2 / mu,
        "beta_hz": far,
        "beta_hv": own,
        "beta_hx": far,
    }


@pytest.mark.parametrize("c", MADE_UP[:10])
def test_constants_of_the_lemmas_equal_those_derived_from_the_proof(c):
    found, expected = descent_constants(c)._asdict(), lemmas(c)
    assert set(found) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-12, err_msg=name)


def printed(c):
    """Return the constants as printed in the paper, except those whose printed form is inconsistent."""
    mu, g1 = c.mu_G, c.L1_G
    a, e = (c.L2_G * c.R) ** 2 + c.L1_F**2, g1 / mu**2 + mu**2 / (16 * g1)
    first, second = g1 / mu, 2 * (c.L_z_star + 1) ** 2 * (c.L2_G * c.R + c.L2_F) ** 2 / mu
    of_z = {"beta_zz": g1, "beta_zv": 4 * g1**2 * first / mu, "beta_zx": g1, "bar_zx": first / mu}
    of_v = {"beta_vz": 32 * a * e, "beta_vv": g1**2 * e, "bar_vx": 16 * second / mu, "tilde_vv": mu**2 / (32 * g1)}
    of_v |= {"alpha_vz": 12 * e * (c.L2_G * c.R + c.L1_F) ** 2 / mu, "beta_hv": 4 * g1**2}
    return of_z | of_v | {"C_z": sqrt(mu * g1 / (8 * first * a)), "C_v": sqrt(mu * e / (8 * second))}


def test_constants_equal_the_printed_ones_up_to_factors_in_a_case_without_other_corrections():
    """With μ = L1_G = 1 and L1_F = L2_F, only the factors that the paper omits differ: 2, and 32 in β_vv."""
    c = dataclasses.replace(MADE_UP[0], mu_G=1.0, L1_G=1.0, L2_F=MADE_UP[0].L1_F)
    times = {"beta_zv": 2, "bar_zx": 2, "bar_vx": 2, "beta_vv": 32, "C_z": sqrt(0.5), "C_v": sqrt(0.5)}
    for name, value in printed(c).items():
        np.testing.assert_allclose(getattr(descent_constants(c), name), times.get(name, 1) * value, err_msg=name)


def theorem(c, d, q):
    """Return ψ_z, ψ_v and ξ of th:cvg_rate, and the upper bounds of ρ and γ."""
    mu = c.mu_G
    psi_z = 1 / (16 * d.bar_zx)
    psi_v = min(1 / (16 * d.bar_vx), psi_z * mu / (12 * d.alpha_vz))
    xi = min(d.C_z, d.C_v, 1, psi_v * mu**2 / (40 * d.L_x**2), psi_z * mu**2 / (24 * d.L_x**2))
    limits_of_rho = (
        sqrt(psi_z / (12 * q * (psi_z * d.beta_zz + psi_v * d.beta_vz))),
        sqrt(psi_z / (12 * q * xi * d.beta_hz)),
        sqrt(d.tilde_vv / (6 * q * d.beta_vv)),
        sqrt(psi_v * d.tilde_vv / (6 * q * xi * d.beta_hv)),
        sqrt(1 / (12 * q * xi * (psi_z * d.beta_zx + psi_v * d.beta_vx))),
        1 / (6 * d.Lambda_z),
        d.B_v,
    )
    limits_of_gamma = (
        sqrt(1 / (12 * q * d.beta_hx)),
        sqrt(psi_v * d.tilde_vv / (6 * q * psi_z * d.beta_zv)),
        1 / (6 * (c.L_h + psi_z * d.Lambda_z + psi_v * d.Lambda_v)),
    )
    return psi_z, psi_v, xi, limits_of_rho, limits_of_gamma


def test_steps_are_those_of_the_theorem_and_each_bound_is_active_in_some_case(monkeypatch):
    """The constants of the lemmas are random as well, since three of the bounds are never active for derived ones."""
    active, rng = set(), np.random.default_rng(0)
    for q, c in product((1, 50, 10**9), 3 * MADE_UP):
        d = DescentConstants(*np.exp(3 * rng.standard_normal(len(DescentConstants._fields))).tolist())
        monkeypatch.setattr("bilevel.theory.descent_constants", lambda _, d=d: d)
        steps = step_sizes(c, 7, 5, q)
        psi_z, psi_v, xi, limits_of_rho, limits_of_gamma = theorem(c, d, q)
        rho, gamma = min(limits_of_rho), min(*limits_of_gamma, xi * min(limits_of_rho))
        expected = (rho, gamma, min(limits_of_gamma), xi, psi_z, psi_v)
        np.testing.assert_allclose(dataclasses.astuple(steps)[:6], expected, rtol=1e-12)
        assert (steps.q, steps.calls_per_period, steps.v_radius) == (q, 3 * 7 + 2 * 5 + 10 * (q - 1), c.R)
        active |= {("rho", int(np.argmin(limits_of_rho))), ("gamma", int(np.argmin(limits_of_gamma)))}
    assert len(active) == len(limits_of_rho) + len(limits_of_gamma)
    assert step_sizes(MADE_UP[0], 7, 5).q == 12


def coefficients(c, s):
    """Return the coefficients of app:eq:lyapunov_ineq, where each squared move occurs in at most q sums."""
    d, mu, rho, gamma = descent_constants(c), c.mu_G, s.rho, s.gamma
    # ||D_x||² <= 2 ||∇h||² + 2 L_x² (2/μ) (φ_z + φ_v)
    through_D_x = (s.psi_z * d.bar_zx + s.psi_v * d.bar_vx) * gamma**2 / rho
    both = gamma * d.L_x**2 * 2 / mu + through_D_x * 2 * d.L_x**2 * 2 / mu
    decrease = s.psi_z * (1 - d.Lambda_z * rho) / 2 * rho
    smoothness = c.L_h + s.psi_z * d.Lambda_z + s.psi_v * d.Lambda_v
    return (
        2 * through_D_x - gamma / 2,
        both + s.psi_v * d.alpha_vz * rho - s.psi_z * mu / 2 * rho,
        both - s.psi_v * mu / 16 * rho,
        s.q * (gamma * rho**2 * d.beta_hz + rho**3 * (s.psi_z * d.beta_zz + s.psi_v * d.beta_vz)) - decrease,
        s.q * (gamma * rho**2 * d.beta_hv + s.psi_z * gamma**2 * rho * d.beta_zv + s.psi_v * rho**3 * d.beta_vv)
        - s.psi_v * d.tilde_vv * rho,
        s.q * (gamma**3 * d.beta_hx + gamma**2 * rho * (s.psi_z * d.beta_zx + s.psi_v * d.beta_vx))
        - gamma / 2
        + gamma**2 / 2 * smoothness,
    )


def test_coefficients_of_the_lyapunov_inequality_follow_from_the_lemmas():
    for seed, c in enumerate(MADE_UP[:20]):
        rho, gamma, psi_z, psi_v = np.exp(2 * np.random.default_rng(seed).standard_normal(4)).tolist()
        steps = StepSizes(rho, gamma, inf, inf, psi_z, psi_v, 7, 0, None)
        np.testing.assert_allclose(lyapunov_coefficients(c, steps), coefficients(c, steps), rtol=1e-9)


@pytest.mark.parametrize("q", [1, 1000])
def test_the_lyapunov_function_decreases_under_these_steps_for_all_constants(q):
    for c in MADE_UP:
        steps = step_sizes(c, 3, 3, q)
        first, *others = lyapunov_coefficients(c, steps)
        assert first <= -steps.gamma / 4 and max(others) <= 0


def test_much_larger_steps_violate_the_inequality():
    """Steps that are 30 times as large make a coefficient positive or exceed the bounds of the lemmas."""
    for c in MADE_UP:
        steps = step_sizes(c, 3, 3, 10**6)
        larger = dataclasses.replace(steps, rho=30 * steps.rho, gamma=30 * steps.gamma)
        assert max(lyapunov_coefficients(c, larger)[1:]) > 0 or larger.rho > descent_constants(c).B_v


def test_constant_hessians_require_no_radius():
    c = dataclasses.replace(MADE_UP[0], R=None, L2_F=0.0, L2_G=0.0, L3_G=0.0)
    zero = dataclasses.replace(c, R=0.0)
    assert descent_constants(c) == descent_constants(zero)
    assert phi_v_smoothness(c) == smoothness_of_phi_v(zero)
    for curved in ({"L2_G": 1.0}, {"L2_F": 1.0}, {"L3_G": 1.0}):
        with pytest.raises(ValueError, match=r"`constants\.R` is None"):
            step_sizes(dataclasses.replace(c, **curved), 3, 3)


def test_solver_returns_srba_with_the_steps_of_the_theorem():
    solver = step_sizes(MADE_UP[0], 3, 4, 5).solver()
    steps = step_sizes(MADE_UP[0], 3, 4, 5)
    assert (solver.step_size, solver.period, solver.batch_size, solver.sampling) == (steps.rho, 5, 1, "iid")
    np.testing.assert_allclose(solver.step_size / solver.outer_ratio, steps.gamma)
    assert solver.v_radius == MADE_UP[0].R
