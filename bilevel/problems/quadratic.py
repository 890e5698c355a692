"""Random quadratics with everything in closed form.

On both levels a sample is

    ½ (a'z)² + ½ (c'x)² + (e'x)(f'z) + d_z'z + d_x'x

so that A_z = a a', A_x = c c', B = e f'. Only the factors are stored: 3 (p + d) numbers per row.

Exact solutions. With the mean matrices, z*(x) = J x + z*(0) where J = -(A_z^G)^-1 (B^G)', and h is the quadratic with
Hessian A_x^F + J'A_z^F J + B^F J + (B^F J)'. Constants are exact, everywhere.

Certificates. M = A_z^G, so that μ = 1, δ = ||D_z||' and a = 0,

    b = ||A_z^F||  from the metric to its dual      c = ||B^F||      e = ||B^G||
"""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from bilevel._core import trees
from bilevel._core.compilation import Compiled, arithmetic, resolve_dtype
from bilevel._core.types import Array, InnerPass, OuterPass, Point, Rows
from bilevel.oracles import Oracles, Samples, join
from bilevel.oracles.samples import STATIC
from bilevel.problems.base import BilevelProblem
from bilevel.problems.certificate import Bounds, Found, Region, Values, WeightedNorm, box_around
from bilevel.problems.checks import check_memory, check_outer, check_positive, check_reals, check_sizes, make_rng
from bilevel.problems.exact import ExactSolution, System, cholesky, newton, solve_adjoint

_CHUNK = 1024  # rows that are drawn at a time, so that building a problem needs little more memory than the problem


def quadratic(
    n_inner: int = 32768,
    n_outer: int = 1024,
    dim_inner: int = 100,
    dim_outer: int = 10,
    seed: int = 0,
    *,
    smallest_eigenvalue: float = 0.1,
    largest_eigenvalue: float = 1.0,
    coupling: float = 0.1,
    common_linear: float = 0.0,
    dtype: DTypeLike | None = None,
) -> BilevelProblem:
    """Draw a quadratic problem.

    Each sample is ½ z'A_z z + ½ x'A_x x + x'B z + d_z'z + d_x'x with random matrices of rank one. Their means converge
    to matrices whose eigenvalues are evenly spaced on a log scale, and to a B whose singular values are all
    ``coupling``. A draw that is not strongly convex on both levels raises ValueError.

    Parameters
    ----------
    n_inner, n_outer : number of samples of each level
    dim_inner, dim_outer : sizes of the two variables
    seed : seed of the draw
    smallest_eigenvalue, largest_eigenvalue : eigenvalues of the limits of A_z and A_x. Their ratio is the condition
        number of the inner problem
    coupling : singular values of the limit of B
    common_linear : linear terms are N(0, I) for each sample, plus this factor times one N(0, I) common to all samples
    dtype : "float32" or "float64", in which runs compute; by default the one that JAX gives to float64 data
    """
    rng = make_rng(seed)
    dtype = resolve_dtype(dtype, drawn=np.float64(0))  # as the drawn numbers
    sizes = {"n_inner": n_inner, "n_outer": n_outer, "dim_inner": dim_inner, "dim_outer": dim_outer}
    n_inner, n_outer, dim_inner, dim_outer = check_sizes(**sizes)
    check_memory(3 * (n_inner + n_outer) * (dim_inner + dim_outer), dtype, *sizes)
    check_memory(4 * (dim_inner**2 + dim_outer**2), np.float64, "dim_inner", "dim_outer")
    low, high = check_positive(smallest_eigenvalue=smallest_eigenvalue, largest_eigenvalue=largest_eigenvalue)
    coupling, common_linear = check_reals(coupling=coupling, common_linear=common_linear)
    if low > high:
        raise ValueError("`smallest_eigenvalue` must be above 0 and at most `largest_eigenvalue`.")
    spectra = [np.geomspace(low, high, size) for size in (dim_inner, dim_outer)]
    with arithmetic(dtype):
        factors = [_draw_factors(rng, n, spectra, coupling, common_linear, dtype) for n in (n_inner, n_outer)]
        inner_samples, outer_samples = (Samples(level, len(level.a), axes=(0,) * 6, dtype=dtype) for level in factors)
    solver = QuadraticExactSolver(*map(Means.of, factors))
    (mu, curvature), (mu_h, smoothness) = (
        np.linalg.eigvalsh(matrix)[[0, -1]].tolist() for matrix in (solver.inner.a_inner, solver.hessian)
    )
    info = {"mu_G": mu, "mu_h": mu_h, "L_h": smoothness}
    oracles = QuadraticOracles(inner_samples, outer_samples, largest_curvature=curvature)
    start = Point(np.zeros(dim_inner, dtype), np.full(dim_outer, -2, dtype), np.zeros(dim_inner, dtype))
    return BilevelProblem(oracles, start, solver, "quadratic", {}, info, quadratic_constants, QuadraticBounds)


def _draw_factors(
    rng: np.random.Generator, n: int, spectra: list[np.ndarray], coupling: float, common_linear: float, dtype: np.dtype
) -> "Factors":
    p, d = map(len, spectra)
    rotations = [_random_rotation(rng, size) for size in (p, d)]
    root_inner, root_outer = ((q * np.sqrt(values)) @ q.T for q, values in zip(rotations, spectra, strict=True))
    left, right = _random_rotation(rng, d), _random_rotation(rng, p)
    singular = np.zeros((d, p))
    np.fill_diagonal(singular, coupling)

    def rows(size: int, *maps: np.ndarray, shift: Any = 0) -> list[Array]:
        """Draw n standard normal vectors and return their images under each map."""
        images = [np.empty((n, matrix.shape[0]), dtype) for matrix in maps]
        for begin in range(0, n, _CHUNK):
            noise = rng.standard_normal((min(_CHUNK, n - begin), size))
            for image, matrix in zip(images, maps, strict=True):
                image[begin : begin + len(noise)] = noise @ matrix.T + shift
        return [trees.put(images.pop(0)) for _ in maps]  # so that only one of them is in memory twice

    def linear(size: int) -> Array:
        return rows(size, np.eye(size), shift=common_linear * rng.standard_normal(size))[0]

    (a,), (c,) = rows(p, root_inner), rows(d, root_outer)
    e, f = rows(p, left @ singular, right)
    return Factors(a, c, e, f, linear(p), linear(d))


def _random_rotation(rng: np.random.Generator, size: int) -> np.ndarray:
    rotation, triangle = np.linalg.qr(rng.standard_normal((size, size)))
    return rotation * np.sign(np.diag(triangle))


class Factors(NamedTuple):
    """Per-sample vectors: a, f, d_z of size p; c, e, d_x of size d; (samples, size)."""

    a: Array
    c: Array
    e: Array
    f: Array
    linear_inner: Array
    linear_outer: Array


def _sum_linear(data: Factors, weights: Array) -> OuterPass:
    """Return the weighted sums of the linear terms d_z and d_x."""
    return OuterPass(weights @ data.linear_inner, weights @ data.linear_outer)


@Compiled
def _sum_linear_of_blocks(samples: Samples) -> OuterPass:
    blocks = jnp.arange(samples.n_blocks, dtype=jnp.int32)
    return jax.vmap(lambda block: _sum_linear(*samples.take(block)))(blocks)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuadraticOracles(Oracles):
    """Factors on each level, rows first.

    Attributes
    ----------
    largest_curvature : largest eigenvalue of the mean A_z of G, or None if it is unknown
    inner_linear, outer_linear : the sums of linear terms of each block if batches are blocks, so that a step reads a
        third less
    """

    largest_curvature: float | None = field(default=None, metadata=STATIC)
    inner_linear: OuterPass | None = None
    outer_linear: OuterPass | None = None

    has_row_diagonals = True

    def with_batches(self, batch_size: int, sampling: str, outer_batch_size: int | None = None) -> Self:
        with arithmetic(self.inner_samples.dtype):
            batched = super().with_batches(batch_size, sampling, outer_batch_size)
            levels = batched.inner_samples, batched.outer_samples
            in_blocks = sampling in ("blocks", "reshuffle") and all(type(level) is Samples for level in levels)
            inner, outer = map(_sum_linear_of_blocks, levels) if in_blocks else (None, None)
            return replace(batched, inner_linear=inner, outer_linear=outer)

    def inner(self, point: Point, rows: Any = None) -> InnerPass:
        if rows is None or self.inner_linear is None:
            return super().inner(point, rows)
        return _block_derivatives(point, self.inner_samples, self.inner_linear, rows)[0]

    def inner_grad_outer(self, point: Point, rows: Any = None) -> Array:
        if rows is None or self.inner_linear is None:
            return super().inner_grad_outer(point, rows)
        return _block_derivatives(point, self.inner_samples, self.inner_linear, rows)[1].grad_outer

    def outer(self, point: Point, rows: Any = None) -> OuterPass:
        if rows is None or self.outer_linear is None:
            return super().outer(point, rows)
        return _block_derivatives(point, self.outer_samples, self.outer_linear, rows)[1]

    def _row_diagonals(self, point: Point, data: Factors, weights: Array, *, power: int, majorize: bool) -> Array:
        return weights @ data.a ** (2 * power)

    def _inner(self, point: Point, data: Factors, weights: Array) -> InnerPass:
        return _derivatives(point, data, weights, _sum_linear(data, weights))[0]

    def _inner_grad_outer(self, point: Point, data: Factors, weights: Array) -> Array:
        return self._outer(point, data, weights).grad_outer

    def _outer(self, point: Point, data: Factors, weights: Array) -> OuterPass:
        return _derivatives(point, data, weights, _sum_linear(data, weights))[1]

    def _inner_value(self, point: Point, data: Factors, weights: Array) -> Array:
        z, x, _ = point
        squares = ((data.a @ z) ** 2 + (data.c @ x) ** 2) / 2
        return weights @ (squares + (data.e @ x) * (data.f @ z) + data.linear_inner @ z + data.linear_outer @ x)

    _outer_value = _inner_value

    def difference(self, point: Point, previous: Point, rows: Rows) -> Point:
        """Return D(point) - D(previous): D is affine, so one product with the move gives it."""
        move = trees.subtract(point, previous)
        inner, _ = _products(move, *self.inner_samples.take(rows.inner))
        _, outer = _products(move, *self.outer_samples.take(rows.outer))
        return join(inner, outer)


def _derivatives(point: Point, data: Factors, weights: Array, linear: OuterPass) -> tuple[InnerPass, OuterPass]:
    inner, outer = _products(point, data, weights)
    return inner._replace(grad=inner.grad + linear.grad), trees.add(outer, linear)


def _block_derivatives(point: Point, samples: Samples, linear: OuterPass, block: Array) -> tuple[InnerPass, OuterPass]:
    return _derivatives(point, *samples.take(block), OuterPass(*(part[block] for part in linear)))


def _products(point: Point, data: Factors, weights: Array) -> tuple[InnerPass, OuterPass]:
    """Return A_z z + B'x, A_z v and B v, and A_z z + B'x with A_x x + B z; under ``jit`` only one is computed."""
    z, x, v = point
    grad = (weights * (data.a @ z)) @ data.a + (weights * (data.e @ x)) @ data.f
    inner = InnerPass(grad, hvp=(weights * (data.a @ v)) @ data.a, cross=(weights * (data.f @ v)) @ data.e)
    return inner, OuterPass(grad, (weights * (data.c @ x)) @ data.c + (weights * (data.f @ z)) @ data.e)


class Means(NamedTuple):
    """The mean quadratic of one level, in float64."""

    a_inner: np.ndarray
    a_outer: np.ndarray
    b: np.ndarray
    linear_inner: np.ndarray
    linear_outer: np.ndarray

    @classmethod
    def of(cls, factors: Factors) -> "Means":
        n = len(factors.a)
        views, total = [np.asarray(leaf) for leaf in factors], cls(0, 0, 0, 0, 0)  # type: ignore[arg-type]
        for begin in range(0, n, _CHUNK):
            a, c, e, f, d_z, d_x = (view[begin : begin + _CHUNK].astype(np.float64) for view in views)
            total = trees.add(total, cls(a.T @ a, c.T @ c, e.T @ f, d_z.sum(0), d_x.sum(0)))
        return cls(*(part / n for part in total))


class QuadraticExactSolver:
    """z*, v*, h, ∇h and the minimizer of h, from the mean matrices."""

    def __init__(self, inner: Means, outer: Means) -> None:
        self.inner, self.outer = inner, outer
        _require_positive(inner.a_inner, "the inner problem")
        self._system = System.dense(inner.a_inner)
        self.jacobian = -self._system.solve(inner.b.T, 0.0)
        self.offset = -self._system.solve(inner.linear_inner, 0.0)
        mixed = outer.b @ self.jacobian
        self.hessian = outer.a_outer + self.jacobian.T @ outer.a_inner @ self.jacobian + mixed + mixed.T
        _require_positive(self.hessian, "h")
        self.minimizer = -cholesky(self.hessian)(self._solve(np.zeros(len(self.hessian))).hypergrad)

    def __call__(self, outer_var: np.ndarray, guess: ExactSolution | None = None) -> ExactSolution:
        x = check_outer(outer_var)
        move = x - self.minimizer
        return self._solve(x)._replace(value_gap=float(move @ self.hessian @ move / 2))

    def _solve(self, x: np.ndarray) -> ExactSolution:
        inner, outer = self.inner, self.outer
        constant = inner.b.T @ x + inner.linear_inner
        found = newton(lambda z: inner.a_inner @ z + constant, lambda _: self._system, self.jacobian @ x + self.offset)
        z = found.z
        value = z @ outer.a_inner @ z / 2 + x @ outer.a_outer @ x / 2 + x @ outer.b @ z
        value = float(value + outer.linear_inner @ z + outer.linear_outer @ x)
        v, left = solve_adjoint(found, value, outer.a_inner @ z + outer.b.T @ x + outer.linear_inner)
        hypergrad = inner.b @ v + outer.a_outer @ x + outer.b @ z + outer.linear_outer
        return ExactSolution(z, v, value, hypergrad, float(np.linalg.norm(found.grad)), float(np.linalg.norm(left)))


def _require_positive(matrix: np.ndarray, what: str) -> None:
    smallest = np.linalg.eigvalsh(matrix)[0]
    if smallest <= 1e-10 * np.linalg.norm(matrix, 2):
        found = f"the Hessian of {what} has the eigenvalue {smallest:.2g}"
        way_out = "take another `seed`, more samples, or a smaller `coupling`"
        raise ValueError(f"this draw is not strongly convex: {found}; {way_out}.")


def quadratic_constants(problem: BilevelProblem, radius: float | None, box: Any) -> Found:
    """Return exact constants from the Hessians of the rows and of the mean; higher derivatives are 0."""
    levels = problem.oracles.inner_samples, problem.oracles.outer_samples
    inner, outer = (Factors(*trees.to_numpy(level.leaves, np.float64)) for level in levels)
    exact = QuadraticExactSolver(Means.of(inner), Means.of(outer))
    outer_norms = _hessian_norms(outer)
    values: Values = {"mu_G": float(np.linalg.eigvalsh(exact.inner.a_inner)[0])}
    values |= {"L1_F": float(outer_norms.max()), "L1_G": float(_hessian_norms(inner).max())}
    values |= dict.fromkeys(("L2_F", "L2_G", "L3_G"), 0.0)
    v_jacobian = np.linalg.solve(exact.inner.a_inner, exact.outer.a_inner @ exact.jacobian + exact.outer.b.T)
    of_solution = {"L_z_star": exact.jacobian, "L_v_star": v_jacobian, "L_h": exact.hessian}
    values |= {name: float(np.linalg.norm(matrix, 2)) for name, matrix in of_solution.items()}
    how = dict.fromkeys(values, "exact")
    if radius is None:
        return values | {"L0_F": None}, how | {"L0_F": "exact", "R": "exact"}, Region()
    region = Region(radius, *box_around(problem, box))
    linear = np.hypot(*(np.linalg.norm(part, axis=1) for part in (outer.linear_inner, outer.linear_outer)))
    farthest = np.hypot(radius, region.outer_radius)
    return values | {"L0_F": float((outer_norms * farthest + linear).max())}, how | {"L0_F": "bound"}, region


def _hessian_norms(rows: Factors) -> np.ndarray:
    """Return the spectral norm of the Hessian [[aa', fe'], [ef', cc']] of each row, from products of its factors.

    It is W M W' with W = [[a, f, 0, 0], [0, 0, c, e]], whose eigenvalues other than 0 are those of √K M √K, K = W'W.
    """
    gram = np.zeros((len(rows.a), 4, 4))
    for first, pair in ((0, (rows.a, rows.f)), (2, (rows.c, rows.e))):
        for i, j in np.ndindex(2, 2):
            gram[:, first + i, first + j] = np.einsum("nk,nk->n", pair[i], pair[j])
    middle = np.eye(4)[[0, 3, 2, 1]]
    eigenvalues, vectors = np.linalg.eigh(gram)
    roots = (vectors * np.sqrt(np.maximum(eigenvalues, 0))[:, None, :]) @ np.swapaxes(vectors, 1, 2)
    return np.abs(np.linalg.eigvalsh(roots @ middle @ roots)).max(axis=1)


class QuadraticBounds:
    """Bounds at points of a quadratic, from the mean matrices, which are computed once."""

    why = "The mean Hessians are known."

    def __init__(self, problem: BilevelProblem) -> None:
        oracles = problem.oracles
        inner, outer = Means.of(oracles.inner_samples.leaves), Means.of(oracles.outer_samples.leaves)
        self._metric = WeightedNorm.dense(inner.a_inner)
        self._b = self._metric.operator_norm(self._metric.inverse_root @ outer.a_inner)
        self._c, self._e = self._metric.operator_norm(outer.b), self._metric.operator_norm(inner.b)

    def __call__(self, point: Point, direction: Point) -> Bounds:
        delta, v_residual = self._metric.dual_norm(direction.inner_var), self._metric.dual_norm(direction.v)
        return Bounds(delta, 1.0, v_residual, 0.0, self._b, self._c, self._e, self._metric)
