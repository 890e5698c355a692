"""Quadratics with scalar variables, and all sequences of draws on them: expectations are finite sums."""

import dataclasses
import itertools
from math import sqrt

import jax
import numpy as np

from bilevel._core.compilation import arithmetic
from bilevel._core.types import Point
from bilevel.oracles import Samples
from bilevel.problems.base import BilevelProblem
from bilevel.problems.quadratic import Factors, Means, QuadraticExactSolver, QuadraticOracles, quadratic_constants

STARTS = [np.array(u) for u in ([1.0, 0.5, -1.0], [-2.0, 0.0, 0.3], [0.1, -1.0, 2.0], [5.0, 3.0, 0.0])]


def mild(n=3, m=2, inner_scale=1.0, outer_scale=1.0, seed=0, spread=0.3):
    """Return a quadratic with scalar variables and similar rows, for which the steps of the theory are large."""
    rng = np.random.default_rng(seed)

    def level(count, scale):
        def rows(mean):
            return mean + spread * rng.standard_normal((count, 1))

        factors = [rows(1.0), rows(1.0), rows(0.3), rows(0.3), rows(0.5), rows(-0.5)]
        return Factors(*(sqrt(scale) * part for part in factors[:4]), *(scale * part for part in factors[4:]))

    return from_factors(level(n, inner_scale), level(m, outer_scale))


def from_factors(inner, outer):
    """Return a quadratic with scalar variables and these rows on its levels."""
    with arithmetic(np.float64):
        levels = [
            Samples(jax.tree.map(jax.numpy.asarray, rows), len(rows.a), (0,) * 6, np.dtype(np.float64))
            for rows in (inner, outer)
        ]
    start = Point(np.array([1.0]), np.array([-1.0]), np.array([0.5]))
    solver = QuadraticExactSolver(Means.of(inner), Means.of(outer))
    return BilevelProblem(QuadraticOracles(*levels), start, solver, find_constants=quadratic_constants)


class Row:
    """A row of a mild quadratic as scalars: ½ a² z² + ½ c² x² + e f x z + linear terms."""

    def __init__(self, leaves, row):
        a, c, e, f, dz, dx = (np.asarray(leaf)[row, 0] for leaf in leaves)
        self.zz, self.xx, self.xz, self.dz, self.dx = a**2, c**2, e * f, dz, dx

    def grad(self, z, x):
        return self.zz * z + self.xz * x + self.dz, self.xx * x + self.xz * z + self.dx


class Scalars:
    """An independent implementation of a quadratic with scalar z, v and x."""

    def __init__(self, problem):
        self.problem = problem
        oracles = problem.oracles
        self.inner = [Row(oracles.inner_samples.leaves, i) for i in range(problem.n_inner)]
        self.outer = [Row(oracles.outer_samples.leaves, j) for j in range(problem.n_outer)]
        self.draws = list(itertools.product(range(problem.n_inner), range(problem.n_outer)))

    def sampled(self, u, i, j):
        """Return D of inner row i and outer row j."""
        z, v, x = u
        inner, (f_z, f_x) = self.inner[i], self.outer[j].grad(z, x)
        return np.array([inner.grad(z, x)[0], inner.zz * v + f_z, inner.xz * v + f_x])

    def full(self, u):
        """Return D of all rows."""
        return np.mean([self.sampled(u, i, j) for i, j in self.draws], axis=0)

    def measures(self, u):
        """Return φ_z, φ_v, h and ||∇h||²."""
        z, v, x = u
        solution = self.problem.exact_solver(np.array([x]))
        curvature = np.mean([row.zz for row in self.inner])
        off = np.array([z - solution.inner_var[0], v - solution.v[0]])
        return [*(curvature * off**2 / 2), solution.value, solution.hypergrad[0] ** 2]


@dataclasses.dataclass
class Path:
    """The iterates, the estimates of D and the exact D at each step of one sequence of draws."""

    points: list
    estimates: list
    true: list


def paths(scalars, u, rho, gamma, q):
    """Return the paths of all sequences of draws in a period of SRBA from u. They are equally likely."""
    step = np.array([rho, rho, gamma])
    found = [Path([u], [], [])]
    for k in range(q):
        longer = []
        for path in found:
            point = path.points[-1]
            true = scalars.full(point)
            for i, j in [(None, None)] if k == 0 else scalars.draws:
                estimate = true
                if k > 0:
                    change = scalars.sampled(point, i, j) - scalars.sampled(path.points[-2], i, j)
                    estimate = path.estimates[-1] + change
                moved = point - step * estimate
                longer.append(Path([*path.points, moved], [*path.estimates, estimate], [*path.true, true]))
        found = longer
    return found


class Expected:
    """Means over all paths of the quantities in the lemmas, as arrays over the steps of a period."""

    def __init__(self, scalars, u, rho, gamma, q):
        self.paths = paths(scalars, u, rho, gamma, q)
        measures = np.mean([[scalars.measures(point) for point in path.points] for path in self.paths], axis=0)
        self.phi_z, self.phi_v, self.h, self.g = measures.T
        estimates = np.array([path.estimates for path in self.paths])
        true = np.array([path.true for path in self.paths])
        self.V = np.mean(estimates**2, axis=0)
        self.sums = np.vstack([np.zeros(3), np.cumsum(self.V, axis=0)])[:-1]
        self.error = np.mean((estimates - true) ** 2, axis=0)
        self.true_sq = np.mean(true[:, :, 2] ** 2, axis=0)
