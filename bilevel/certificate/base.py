"""A bound on the error of a hypergradient, from residuals and constants.

Fix x and write H, g for ∇²zz G and ∇z F at z, and H*, g* for them at z* = z*(x), so that D_z = ∇z G, D_v = H v + g and
H* v* = -g*. Lengths are taken in a metric M that is positive definite: ||w|| = √(w'Mw) for z and v, and
||r||' = √(r'M⁻¹r) for residuals. Where H* >= μ M and

    ||z - z*||     <= δ
    ||(H - H*) v||' <= a δ        ||g - g*||' <= b δ
    ||D_x(z, v, x) - D_x(z*, v, x)||_2 <= c δ        ||(∇²xz G)(z*, x) w||_2 <= e ||w||  for all w

it follows from  H* (v - v*) = H* v + g* = D_v - (H - H*) v - (g - g*)  that

    ||v - v*|| <= ε = (||D_v||' + (a + b) δ) / μ

and from  D_x(z, v, x) - ∇h(x) = [D_x(z, v, x) - D_x(z*, v, x)] + (∇²xz G)(z*, x) (v - v*)  that

    ||D_x(z, v, x) - ∇h(x)||_2 <= c δ + e ε.

With M = I and constants of the whole space this is δ = ||D_z||/μ, a = L2_G ||v||, b = L1_F, c = L2_G ||v|| + L1_F,
e = L1_G. The files beside this one give sharper ones, of the point.
"""

from dataclasses import dataclass
from math import inf, isfinite, sqrt
from typing import NamedTuple


class Bounds(NamedTuple):
    """The numbers of the proof, named as there, and the smallest eigenvalue of M."""

    delta: float
    mu: float
    v_residual: float
    a: float
    b: float
    c: float
    e: float
    least: float = 1.0

    @property
    def epsilon(self) -> float:
        """The bound of ||v - v*|| in the metric."""
        return (self.v_residual + (self.a + self.b) * self.delta) / self.mu

    @property
    def error(self) -> float:
        """The bound of the error of D_x, infinite where a number is."""
        error = self.c * self.delta + self.e * self.epsilon
        return error if isfinite(error) else inf

    @property
    def distances(self) -> tuple[float, float]:
        """The bounds of the Euclidean ||z - z*|| and ||v - v*||."""
        root = sqrt(self.least)
        return self.delta / root, self.epsilon / root


NOTHING = Bounds(inf, 1.0, inf, 0.0, 0.0, 1.0, 1.0)


@dataclass(frozen=True)
class Certificate:
    """How far the direction D_x at a point (z, x, v) can be from ∇h(x), without z*(x) or v*(x) being known.

    Residuals are those of all rows as the problem holds them, in float64; the rounding of that arithmetic, relative
    errors of about 1e-14, is not part of the bounds.

    Attributes
    ----------
    error_bound : of ||D_x(z, v, x) - ∇h(x)||
    hypergrad_norm_bound : of ||∇h(x)||: ||D_x|| + error_bound. Where x is at a bound, components of either that push
        against it do not count
    inner_distance_bound, v_distance_bound : of ||z - z*(x)|| and ||v - v*(x)||
    certified : whether all of this is proved; else `why` says what is missing, and infinite bounds say nothing
    why : where the constants come from, or why there are none
    """

    error_bound: float
    hypergrad_norm_bound: float
    inner_distance_bound: float
    v_distance_bound: float
    certified: bool
    why: str

    @classmethod
    def of(cls, bounds: Bounds, direction_norm: float, certified: bool, why: str) -> "Certificate":
        """Put together what a proof and the norm of D_x give."""
        return cls(bounds.error, direction_norm + bounds.error, *bounds.distances, certified, why)

    def __str__(self) -> str:
        if not isfinite(self.error_bound):
            return f"No bound: {self.why}"
        kind = "certified" if self.certified else "estimated, not certified"
        return (
            f"||∇h(x)|| <= {self.hypergrad_norm_bound:.3g}, {kind}: D_x is within {self.error_bound:.3g} of ∇h(x), "
            f"z within {self.inner_distance_bound:.3g} of z*(x), v within {self.v_distance_bound:.3g} of v*(x). "
            f"{self.why}"
        )
