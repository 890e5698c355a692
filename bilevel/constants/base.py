"""The constants of regularity that the analysis of SRBA assumes, and those it derives from them.

ass:regul_F, ass:regul_G. Each F_j is L0_F-Lipschitz, its gradient and Hessian are L1_F- and L2_F-Lipschitz in
(z, x); derivatives of order 1, 2, 3 of each G_i are L1_G-, L2_G-, L3_G-Lipschitz in (z, x). The paper asks each
G_i(., x) to be μ_G-strongly convex; its proofs use that of the mean G alone, and rows of rank one, as those of its
quadratics, have no more. So ``mu_G`` is that of G, all other constants are of each sample.

A Lipschitz constant of derivatives of order k - 1 is the supremum of |d^k/dt^k f(w + t u)| at t = 0 over points w and
unit vectors u.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

from bilevel.constants.region import Region

ASSUMED = ("mu_G", "L0_F", "L1_F", "L2_F", "L1_G", "L2_G", "L3_G")
DERIVED = ("R", "L_z_star", "L_v_star", "L_h")

Values = dict[str, float | None]
Found = tuple[Values, dict[str, str], Region]  # values and how each was obtained, by name


@dataclass(frozen=True)
class Constants:
    """Constants of ass:regul_F and ass:regul_G, and what follows from them; None where there is no finite one.

    Attributes
    ----------
    mu_G : strong convexity in z of the mean G
    L0_F, L1_F, L2_F : Lipschitz constants in (z, x) of each F_j, its gradient, its Hessian
    L1_G, L2_G, L3_G : of the gradient, the Hessian, the third derivative of each G_i
    R : bound of ||v*(x)||, see `implied`; like the next three it holds for x whose z*(x) is in the region
    L_z_star, L_v_star, L_h : Lipschitz constants of z*, v*, ∇h
    how : of each of them, "exact" (no smaller one holds; None with "exact" is infinite), "bound" (proved) or "estimate"
        (the largest of many samples: the constant itself is at least this, or for mu_G at most)
    region : where they hold
    """

    mu_G: float
    L0_F: float | None
    L1_F: float
    L2_F: float
    L1_G: float
    L2_G: float
    L3_G: float
    R: float | None
    L_z_star: float
    L_v_star: float | None
    L_h: float | None
    how: Mapping[str, str] = field(hash=False)
    region: Region

    def __str__(self) -> str:
        rows = [f"{name:<9} {_shown(getattr(self, name)):>10}  {self.how[name]}" for name in ASSUMED + DERIVED]
        return "\n".join([*rows, f"on {self.region}"])


def implied(mu_G: float, L0_F: float | None, L1_F: float, L1_G: float, L2_G: float) -> dict[str, float | None]:
    """Return R, L_z*, L_v* and L_h as they follow from the constants of the assumptions.

        R = L0_F / μ                                                       (prop:v_star_boundedness)
        L_z* = L1_G / μ,   L_v* = √(1 + L_z*²) (L1_F + L2_G R) / μ         (app:lemma:z_star_lipschitz)
        L_h = (1 + L_z*²) (L1_F + L2_G R)                                  (app:sec:smoothness_h)

    The paper has 1 + L_z* for the root. Its L_h is not linear in F, as a Lipschitz constant of ∇h must be; this one
    is read off ∇²h = [J; I]' ∇²F [J; I] + ∇z F · D²z*, with J = Dz* and ||D²z*|| <= L2_G (1 + L_z*²) / μ.
    """
    if not mu_G > 0:
        raise ValueError(f"`mu_G={mu_G!r}`: must be above 0, the inner problem is not strongly convex.")
    L_z_star = L1_G / mu_G
    R = None if L0_F is None else L0_F / mu_G
    stretch = 1 + L_z_star**2
    if L2_G > 0 and R is None:
        return {"R": None, "L_z_star": L_z_star, "L_v_star": None, "L_h": None}
    slope = L1_F + (L2_G * R if R is not None else 0.0)
    return {"R": R, "L_z_star": L_z_star, "L_v_star": sqrt(stretch) * slope / mu_G, "L_h": stretch * slope}


def completed(values: Values, how: dict[str, str], region: Region) -> Constants:
    """Add what follows from the assumed constants to what a rule found."""
    needed = ("mu_G", "L0_F", "L1_F", "L1_G", "L2_G")
    follows = implied(**{name: values[name] for name in needed})  # type: ignore[arg-type]
    worst = "estimate" if "estimate" in how.values() else "bound"
    merged: dict[str, Any] = follows | values
    return Constants(**merged, how=dict.fromkeys(follows, worst) | how, region=region)


def _shown(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"
