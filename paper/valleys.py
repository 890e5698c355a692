"""A problem whose h is not strongly convex, with valleys of many widths: ||∇h||² decreases no faster than 1/t.

    G_i = ½ (z - x)'A(z - x) + b_G s_i cos(ω_i'z + η_i'x + θ_i)        A diagonal, eigenvalues log-spaced in [μ, 1]
    F_j = sum_k ψ(z_k / r_k)  + b_F s_j cos(ω_j'z + η_j'x + θ_j)       ψ(t) = √(1 + t²) - 1

Rows come in pairs with opposite signs s, so that the cosines cancel exactly in the means, while single rows are not
convex and differ everywhere as much as at the start. Hence z*(x) = x, h(x) = sum_k ψ(x_k / r_k), v* = -A^-1 ∇h, for any
n and m. With unit vectors (ω, η), all assumptions of the theory hold in the whole space, and each G_i is strongly
convex.

Valley k has the curvature λ_k = 1 / r_k² at its bottom, log-spaced in [λ_min, 1], and almost none far from it. Runs
start at x_k = r_k. Gradient flow reaches the bottom of valley k within a time of about 1/λ_k, and all valleys have the
same share of h: -dh/dt = ||∇h||² behaves like 1/t until t = 1/λ_min. For a strongly convex h it would decrease like
exp(-t). ∇h does not vanish far from the minimum, so that noise that carries x away does not look like progress.
"""

from dataclasses import dataclass
from math import sqrt
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from bilevel._core import trees
from bilevel._core.compilation import arithmetic, resolve_dtype
from bilevel._core.types import Array, InnerPass, OuterPass, Point
from bilevel.oracles import Oracles, Samples
from bilevel.problems.base import BilevelProblem
from bilevel.problems.certificate import Found, Region, Values
from bilevel.problems.checks import check_memory, check_outer, check_positive, check_reals, check_sizes, make_rng
from bilevel.problems.exact import ExactSolution

SHARPEST = 1.5 * 0.8**2.5  # the maximum of |ψ'''|, at ½; those of |ψ'| and |ψ''| are 1


def valleys(
    n_inner: int = 1024,
    n_outer: int = 1024,
    dim: int = 12,
    seed: int = 0,
    *,
    flattest: float = 1e-4,
    inner_curvature: float = 0.5,
    inner_ripple: float = 0.25,
    outer_ripple: float = 1.0,
    dtype: DTypeLike | None = None,
) -> BilevelProblem:
    """Build a problem with an h that is not strongly convex; its closed form does not depend on n and m.

    Parameters
    ----------
    n_inner, n_outer : number of samples of each level; even, since rows come in pairs
    dim : size of both variables, and number of valleys
    seed : seed of the rows
    flattest : the smallest curvature of a valley; the largest is 1
    inner_curvature : μ, the smallest eigenvalue of A; the largest is 1
    inner_ripple : b_G, the height of the cosines in G. It must be below ``inner_curvature``, so that all rows are
        strongly convex; larger values increase the variance of gradients
    outer_ripple : b_F, the height of the cosines in F
    dtype : "float32" or "float64", in which runs compute; by default the one that JAX gives to float64 data
    """
    dtype, rng = resolve_dtype(dtype, drawn=np.float64(0)), make_rng(seed)
    n_inner, n_outer, dim = check_sizes(n_inner=n_inner, n_outer=n_outer, dim=dim)
    check_memory(2 * (n_inner + n_outer) * (dim + 1), dtype, "n_inner", "n_outer", "dim")
    flattest, inner_curvature = check_positive(flattest=flattest, inner_curvature=inner_curvature)
    inner_ripple, outer_ripple = check_reals(inner_ripple=inner_ripple, outer_ripple=outer_ripple)
    _check_shape(n_inner, n_outer, flattest, inner_curvature, inner_ripple, outer_ripple)
    curvatures = np.geomspace(inner_curvature, 1.0, dim)[::-1]  # wide valleys get the small eigenvalues
    widths = np.geomspace(1.0, flattest, dim) ** -0.5
    with arithmetic(dtype):
        rows = [_draw_cosines(rng, n, dim, b, dtype) for n, b in ((n_inner, inner_ripple), (n_outer, outer_ripple))]
        inner, outer = (Samples(level, len(level.phase), axes=(0,) * 4, dtype=dtype) for level in rows)
        shape = trees.put(curvatures, dtype), trees.put(widths, dtype)
    oracles = ValleyOracles(inner, outer, curvatures=shape[0], widths=shape[1])
    start = Point(*(np.asarray(part, dtype) for part in (np.zeros(dim), widths, np.zeros(dim))))
    info = {"inner_ripple": inner_ripple, "outer_ripple": outer_ripple, "mu_G": inner_curvature}
    solver = ValleyExactSolver(*trees.to_numpy(shape, np.float64))
    return BilevelProblem(oracles, start, solver, "valleys", {}, info, valley_constants)


def _check_shape(n: int, m: int, flattest: float, curvature: float, inner_ripple: float, outer_ripple: float) -> None:
    if n % 2 or m % 2:
        raise ValueError(f"`n_inner={n}` and `n_outer={m}`: must be even; rows come in pairs.")
    for name, value in (("flattest", flattest), ("inner_curvature", curvature)):
        if not 0 < value <= 1:
            raise ValueError(f"`{name}={value!r}`: must be above 0 and at most 1.")
    if not 0 <= inner_ripple < curvature:
        raise ValueError(f"`inner_ripple={inner_ripple!r}`: must be at least 0 and below `inner_curvature`.")
    if not 0 <= outer_ripple < np.inf:
        raise ValueError(f"`outer_ripple={outer_ripple!r}`: must be at least 0 and finite.")


class Cosines(NamedTuple):
    """The cosines of the rows: b s (n,), ω and η (n, dim), θ (n,)."""

    height: Array
    inner: Array
    outer: Array
    phase: Array


def _draw_cosines(rng: np.random.Generator, n: int, dim: int, height: float, dtype: np.dtype) -> Cosines:
    waves = rng.standard_normal((n // 2, 2 * dim))
    waves /= np.linalg.norm(waves, axis=1, keepdims=True)
    phases, order = rng.uniform(0, 2 * np.pi, n // 2), rng.permutation(n)  # otherwise blocks would contain whole pairs
    waves, phases = (np.concatenate([half, half])[order] for half in (waves, phases))
    heights = np.repeat([height, -height], n // 2)[order]
    return Cosines(*(trees.put(part, dtype) for part in (heights, waves[:, :dim], waves[:, dim:], phases)))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ValleyOracles(Oracles):
    """The eigenvalues of A, and the widths r of the valleys."""

    curvatures: Array
    widths: Array

    def _inner(self, point: Point, data: Cosines, weights: Array) -> InnerPass:
        z, x, v = point
        total, slopes = jnp.sum(weights), _slopes(point, data, weights)
        products = weights * data.height * jnp.cos(_angles(point, data)) * (data.inner @ v)
        grad, hvp = total * self.curvatures * (z - x), total * self.curvatures * v
        return InnerPass(grad - slopes @ data.inner, hvp - products @ data.inner, -hvp - products @ data.outer)

    def _inner_grad_outer(self, point: Point, data: Cosines, weights: Array) -> Array:
        mean = jnp.sum(weights) * self.curvatures * (point.outer_var - point.inner_var)
        return mean - _slopes(point, data, weights) @ data.outer

    def _outer(self, point: Point, data: Cosines, weights: Array) -> OuterPass:
        slopes = _slopes(point, data, weights)
        mean = jnp.sum(weights) * pseudo_huber_slope(point.inner_var / self.widths) / self.widths
        return OuterPass(mean - slopes @ data.inner, -slopes @ data.outer)

    def _inner_value(self, point: Point, data: Cosines, weights: Array) -> Array:
        z, x, _ = point
        return weights @ (jnp.sum(self.curvatures * (z - x) ** 2) / 2 + data.height * jnp.cos(_angles(point, data)))

    def _outer_value(self, point: Point, data: Cosines, weights: Array) -> Array:
        depth = jnp.sum(pseudo_huber(point.inner_var / self.widths))
        return weights @ (depth + data.height * jnp.cos(_angles(point, data)))


def _angles(point: Point, data: Cosines) -> Array:
    return data.inner @ point.inner_var + data.outer @ point.outer_var + data.phase


def _slopes(point: Point, data: Cosines, weights: Array) -> Array:
    return weights * data.height * jnp.sin(_angles(point, data))


def pseudo_huber(t: Any) -> Any:
    """Return ψ."""
    return t**2 / (1 + (1 + t**2) ** 0.5)  # without cancellation at 0


def pseudo_huber_slope(t: Any) -> Any:
    """Return ψ'."""
    return t / (1 + t**2) ** 0.5


class ValleyExactSolver:
    """Exact solutions in closed form."""

    def __init__(self, curvatures: np.ndarray, widths: np.ndarray) -> None:
        self.curvatures, self.widths = curvatures, widths

    def __call__(self, outer_var: np.ndarray, guess: ExactSolution | None = None) -> ExactSolution:
        x = check_outer(outer_var)
        t = x / self.widths
        length = np.hypot(1, t)  # does not overflow, so that the gradient far from the minimum is not 0
        value, grad = float(np.sum(t * (t / (1 + length)))), t / length / self.widths
        v = -grad / self.curvatures
        v_residual = float(np.linalg.norm(self.curvatures * v + grad))
        return ExactSolution(x, v, value, grad, inner_residual=0.0, v_residual=v_residual, value_gap=value)


def valley_constants(problem: BilevelProblem, radius: float | None, box: Any) -> Found:
    """Return constants for all z and x; a cosine adds at most its height, as (ω, η) is a unit vector."""
    oracles = problem.oracles
    assert isinstance(oracles, ValleyOracles)
    a, r = trees.to_numpy((oracles.curvatures, oracles.widths), np.float64)
    b_inner, b_outer = problem.info["inner_ripple"], problem.info["outer_ripple"]
    values: Values = {"mu_G": float(a.min()), "L0_F": sqrt(np.sum(1 / r**2)) + b_outer}
    values |= {"L1_F": 1 / r.min() ** 2 + b_outer, "L2_F": SHARPEST / r.min() ** 3 + b_outer}
    values |= {"L1_G": 2 * float(a.max()) + b_inner, "L2_G": b_inner, "L3_G": b_inner}
    how = dict.fromkeys(values, "bound") | {"mu_G": "exact", "L_z_star": "exact", "L_v_star": "exact", "L_h": "exact"}
    values |= {"L_z_star": 1.0, "L_v_star": float(np.max(1 / r**2 / a)), "L_h": 1 / r.min() ** 2}
    return values, how, Region(radius)
