"""Random quadratics with everything in closed form."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from bilevel.oracles import Factors, QuadraticOracles, Samples
from bilevel.precision import arithmetic, as_float_dtype
from bilevel.problems.base import BilevelProblem
from bilevel.problems.reference import Reference
from bilevel.types import Array, Point

_CHUNK = 1024  # rows made at a time, so that building a problem needs little more than the problem


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
    dtype: DTypeLike = "float32",
) -> BilevelProblem:
    """Draw a quadratic problem.

    Each sample is ½ z'A_z z + ½ x'A_x x + x'B z + d_z'z + d_x'x with random matrices of rank one. Their
    means tend to matrices whose eigenvalues are spread evenly on a log scale between the two given, and
    to a B whose singular values are all ``coupling``.

    Parameters
    ----------
    n_inner, n_outer : samples of each level
    dim_inner, dim_outer : sizes of the two variables
    seed : of the draw
    smallest_eigenvalue, largest_eigenvalue : of the limits of A_z and A_x
    coupling : singular values of the limit of B
    common_linear : linear terms are N(0, I) per sample, plus this times one N(0, I) common to all
    dtype : "float32" or "float64"

    Raises
    ------
    ValueError
        When the drawn problem is not strongly convex on both levels; another seed, more samples or a
        smaller ``coupling`` will do.
    """
    dtype = as_float_dtype(dtype)
    for name, size in (
        ("n_inner", n_inner),
        ("n_outer", n_outer),
        ("dim_inner", dim_inner),
        ("dim_outer", dim_outer),
    ):
        if not isinstance(size, int | np.integer) or size < 1:
            raise ValueError(f"`{name}={size!r}`: must be an integer of at least 1.")
    if not 0 < smallest_eigenvalue <= largest_eigenvalue < np.inf:
        raise ValueError("`smallest_eigenvalue` must be above 0 and at most `largest_eigenvalue`.")
    if not (np.isfinite(coupling) and np.isfinite(common_linear)):
        raise ValueError("`coupling` and `common_linear` must be finite.")
    rng = np.random.default_rng(seed)
    spectrum = (smallest_eigenvalue, largest_eigenvalue)

    def level(n: int) -> tuple[Samples, Means]:
        factors = _draw_factors(rng, n, dim_inner, dim_outer, spectrum, coupling, common_linear, dtype)
        return Samples(factors, n, axes=(0,) * len(factors), dtype=dtype), Means.of(factors)

    with arithmetic(dtype):
        inner_samples, inner_means = level(n_inner)
        outer_samples, outer_means = level(n_outer)
    start = Point(np.zeros(dim_inner, dtype), np.full(dim_outer, -2, dtype), np.zeros(dim_inner, dtype))
    referee = QuadraticReferee(inner_means, outer_means)
    curvature = float(np.linalg.eigvalsh(inner_means.a_inner)[-1])
    oracles = QuadraticOracles(inner_samples, outer_samples, curvature=curvature)
    return BilevelProblem(oracles, start, referee, "quadratic")


def _draw_factors(
    rng: np.random.Generator,
    n: int,
    p: int,
    d: int,
    spectrum: tuple[float, float],
    coupling: float,
    common_linear: float,
    dtype: np.dtype,
) -> Factors:
    root_inner, root_outer = _random_root(rng, p, spectrum), _random_root(rng, d, spectrum)
    left, right = _random_rotation(rng, d), _random_rotation(rng, p)
    singular = np.zeros((d, p))
    np.fill_diagonal(singular, coupling)

    def linear(size: int) -> Array:
        common = common_linear * rng.standard_normal(size)
        return _normal_rows(rng, n, size, [np.eye(size)], dtype, common)[0]

    (a,) = _normal_rows(rng, n, p, [root_inner], dtype)
    (c,) = _normal_rows(rng, n, d, [root_outer], dtype)
    e, f = _normal_rows(rng, n, p, [left @ singular, right], dtype)
    return Factors(a, c, e, f, linear(p), linear(d))


def _normal_rows(
    rng: np.random.Generator,
    n: int,
    size: int,
    maps: list[np.ndarray],
    dtype: np.dtype,
    shift: float | np.ndarray = 0,
) -> list[Array]:
    """Draw n standard normal vectors and return their images under each map."""
    images = [np.empty((n, matrix.shape[0]), dtype) for matrix in maps]
    for begin in range(0, n, _CHUNK):
        noise = rng.standard_normal((min(_CHUNK, n - begin), size))
        for image, matrix in zip(images, maps, strict=True):
            image[begin : begin + len(noise)] = noise @ matrix.T + shift
    return [jnp.asarray(images.pop(0)) for _ in maps]  # one copy at a time lives twice


def _random_rotation(rng: np.random.Generator, size: int) -> np.ndarray:
    rotation, triangle = np.linalg.qr(rng.standard_normal((size, size)))
    return rotation * np.sign(np.diag(triangle))


def _random_root(rng: np.random.Generator, size: int, spectrum: tuple[float, float]) -> np.ndarray:
    """Return the square root of a symmetric matrix with log-spaced eigenvalues and random eigenvectors."""
    rotation = _random_rotation(rng, size)
    return (rotation * np.sqrt(np.geomspace(*spectrum, size))) @ rotation.T


class Means(NamedTuple):
    """The mean quadratic of one level, in float64."""

    a_inner: np.ndarray
    a_outer: np.ndarray
    b: np.ndarray
    linear_inner: np.ndarray
    linear_outer: np.ndarray

    @classmethod
    def of(cls, factors: Factors) -> "Means":
        """Average the samples of a level."""
        n = len(factors.a)
        total: list[Any] = [0.0] * 5
        for part in _float64_chunks(factors):
            sums = (
                part.a.T @ part.a,
                part.c.T @ part.c,
                part.e.T @ part.f,
                part.linear_inner.sum(0),
                part.linear_outer.sum(0),
            )
            total = [t + s for t, s in zip(total, sums, strict=True)]
        return cls(*(t / n for t in total))


def _float64_chunks(factors: Factors) -> Iterator[Factors]:
    views = [np.asarray(leaf) for leaf in factors]
    for begin in range(0, len(factors.a), _CHUNK):
        parts: list[Any] = [view[begin : begin + _CHUNK].astype(np.float64) for view in views]
        yield Factors(*parts)


class QuadraticReferee:
    """z*, v*, h, ∇h and the minimiser of h, from the mean matrices.

    z*(x) = J x + z*(0) with J = -(A_z^G)^-1 (B^G)', and h is the quadratic with Hessian
    A_x^F + J'A_z^F J + B^F J + (B^F J)'.
    """

    def __init__(self, inner: Means, outer: Means) -> None:
        self.inner, self.outer = inner, outer
        _require_positive(inner.a_inner, "the inner problem")
        self.jacobian = -np.linalg.solve(inner.a_inner, inner.b.T)
        self.offset = -np.linalg.solve(inner.a_inner, inner.linear_inner)
        mixed = outer.b @ self.jacobian
        self.hessian = outer.a_outer + self.jacobian.T @ outer.a_inner @ self.jacobian + mixed + mixed.T
        _require_positive(self.hessian, "h")
        dim_outer = len(self.hessian)
        self.minimiser = -np.linalg.solve(self.hessian, self._gradient(np.zeros(dim_outer)))

    def __call__(self, outer_var: np.ndarray, guess: Reference | None = None) -> Reference:
        """Return the solution at ``outer_var``; no guess is needed."""
        x = np.asarray(outer_var, np.float64)
        z, v = self._solutions(x)
        inner, outer = self.inner, self.outer
        value = z @ outer.a_inner @ z / 2 + x @ outer.a_outer @ x / 2 + x @ outer.b @ z
        move = x - self.minimiser
        return Reference(
            inner_var=z,
            v=v,
            value=float(value + outer.linear_inner @ z + outer.linear_outer @ x),
            hypergrad=self._gradient(x),
            inner_residual=float(np.linalg.norm(inner.a_inner @ z + inner.b.T @ x + inner.linear_inner)),
            v_residual=float(np.linalg.norm(inner.a_inner @ v + self._outer_grad(z, x))),
            value_gap=float(move @ self.hessian @ move / 2),
        )

    def _outer_grad(self, z: np.ndarray, x: np.ndarray) -> np.ndarray:
        return self.outer.a_inner @ z + self.outer.b.T @ x + self.outer.linear_inner

    def _solutions(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        z = self.jacobian @ x + self.offset
        return z, -np.linalg.solve(self.inner.a_inner, self._outer_grad(z, x))

    def _gradient(self, x: np.ndarray) -> np.ndarray:
        z, v = self._solutions(x)
        return self.inner.b @ v + self.outer.a_outer @ x + self.outer.b @ z + self.outer.linear_outer


def _require_positive(matrix: np.ndarray, what: str) -> None:
    smallest = np.linalg.eigvalsh(matrix)[0]
    if smallest <= 1e-10 * np.linalg.norm(matrix, 2):
        raise ValueError(
            f"this draw is not strongly convex: the Hessian of {what} has the eigenvalue {smallest:.2g}; "
            "take another `seed`, more samples, or a smaller `coupling`."
        )
