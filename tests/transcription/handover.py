"""Convert draws and parameters of a run of the library to those of a transcription."""

from types import SimpleNamespace

import jax
import numpy as np

from bilevel._core.compilation import arithmetic
from bilevel.solvers.pzobo import gaussian_like
from tests.cases import indices


class DrawnRows:
    """Converts drawn rows to index arrays."""

    def __init__(self, run):
        self.inner_samples, self.outer_samples = run.oracles.inner_samples, run.oracles.outer_samples

    def inner(self, rows):
        return indices(self.inner_samples, rows)

    def outer(self, rows):
        return indices(self.outer_samples, rows)

    def inner_list(self, rows, times):
        return [self.inner(None if rows is None else rows[i]) for i in range(times)]

    def outer_list(self, rows, times):
        return [self.outer(None if rows is None else rows[i]) for i in range(times)]

    def series(self, draw, n_products):
        """Return the batches of one Neumann hypergradient."""
        return {
            "neumann": self.inner_list(draw.products, n_products),
            "cross": self.inner(draw.cross),
            "outer": self.outer(draw.outer),
            "length": None if draw.length is None else int(draw.length),
        }


def single(run):
    rows = DrawnRows(run)
    return [SimpleNamespace(inner=rows.inner(d.inner), outer=rows.outer(d.outer)) for d in run.draws]


def blocks(samples):
    return [indices(samples, block) for block in range(samples.n_blocks)]


def storm_settings(run, settings):
    return settings | {"neumann_step": float(run.solver.neumann_step), "momentum": float(run.solver.momentum)}


def alternating(run, times):
    rows, n_neumann = DrawnRows(run), run.solver.n_neumann
    draws = [
        SimpleNamespace(inner_loop=rows.inner_list(d.inner_loop, times), **rows.series(d.neumann, n_neumann - 1))
        for d in run.draws
    ]
    return draws, {"n_neumann": n_neumann, "neumann_step": float(run.solver.neumann_step)}


def gaussians(run, draw, x):
    """Return the Gaussians of one step of PZOBO."""
    with arithmetic("float64"):
        template = jax.numpy.asarray(x)
        keys = [jax.random.fold_in(draw.key, k) for k in range(run.solver.n_directions)]
        return np.array([gaussian_like(key, template) for key in keys])


def signs(run, draw, x):
    """Return the random directions of one step of ForwardMode."""
    with arithmetic("float64"):
        return np.asarray(run.solver.directions(jax.numpy.asarray(x), draw.key)[0])
