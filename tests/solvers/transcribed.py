"""Each solver beside its NumPy transcription: how draws and parameters are handed over."""

from types import SimpleNamespace

import jax
import numpy as np

from bilevel._precision import arithmetic
from bilevel.solvers.pzobo import gaussian_like
from tests.cases import indices
from tests.transcription.alset import alset
from tests.transcription.amigo import amigo
from tests.transcription.bome import bome
from tests.transcription.bsa import bsa
from tests.transcription.f2sa import f2sa
from tests.transcription.fsla import fsla
from tests.transcription.itd import itd
from tests.transcription.ma_soba import ma_soba
from tests.transcription.mrbo import mrbo
from tests.transcription.pzobo import pzobo
from tests.transcription.saba import saba
from tests.transcription.soba import soba
from tests.transcription.spaba import spaba
from tests.transcription.srba import srba
from tests.transcription.stocbio import stocbio
from tests.transcription.sustain import sustain
from tests.transcription.ttsa import ttsa
from tests.transcription.vrbo import vrbo


class Rows:
    """Turns drawn rows into index arrays."""

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
        """The batches of one Neumann hypergradient."""
        return {
            "neumann": self.inner_list(draw.products, n_products),
            "cross": self.inner(draw.cross),
            "outer": self.outer(draw.outer),
            "length": None if draw.length is None else int(draw.length),
        }


def _single(run):
    rows = Rows(run)
    return [SimpleNamespace(inner=rows.inner(d.inner), outer=rows.outer(d.outer)) for d in run.draws]


def _blocks(samples):
    return [indices(samples, block) for block in range(samples.n_blocks)]


def transcribe_srba(problem, run, z, x, settings):
    return srba(problem, z, x, _single(run), period=run.solver.period, **settings)


def transcribe_soba(problem, run, z, x, settings):
    return soba(problem, z, x, _single(run), **settings)


def transcribe_masoba(problem, run, z, x, settings):
    return ma_soba(problem, z, x, _single(run), theta=float(run.solver.momentum), **settings)


def transcribe_spaba(problem, run, z, x, settings):
    draws = _single(run)
    for one, drawn in zip(draws, run.draws, strict=True):
        one.refresh = bool(drawn.coin)
    return spaba(problem, z, x, draws, **settings)


def transcribe_saba(problem, run, z, x, settings):
    draws = [SimpleNamespace(inner_block=int(d.inner), outer_block=int(d.outer)) for d in run.draws]
    blocks = {
        "inner_blocks": _blocks(run.oracles.inner_samples),
        "outer_blocks": _blocks(run.oracles.outer_samples),
    }
    return saba(problem, z, x, draws, init=run.solver.tables, **blocks, **settings)


def transcribe_stocbio(problem, run, z, x, settings):
    rows, times, n_neumann = Rows(run), run.solver.n_inner_steps, run.solver.n_neumann
    draws = [
        SimpleNamespace(inner_loop=rows.inner_list(d.inner_loop, times), **rows.series(d.neumann, n_neumann))
        for d in run.draws
    ]
    return stocbio(problem, z, x, draws, neumann_step=float(run.solver.neumann_step), **settings)


def transcribe_amigo(problem, run, z, x, settings):
    rows, times = Rows(run), run.solver.n_inner_steps
    draws = [
        SimpleNamespace(
            inner_loop=rows.inner_list(d.inner_loop, times),
            linear_loop=rows.inner_list(d.linear_loop, times),
            cross=rows.inner(d.cross),
            outer=rows.outer(d.outer),
        )
        for d in run.draws
    ]
    return amigo(problem, z, x, draws, **settings)


def _storm_settings(run, settings):
    return settings | {"neumann_step": float(run.solver.neumann_step), "momentum": float(run.solver.momentum)}


def transcribe_mrbo(problem, run, z, x, settings):
    rows, n_neumann = Rows(run), run.solver.n_neumann
    draws = [SimpleNamespace(inner=rows.inner(d.inner), **rows.series(d.neumann, n_neumann)) for d in run.draws]
    return mrbo(problem, z, x, draws, **_storm_settings(run, settings))


def transcribe_sustain(problem, run, z, x, settings):
    rows, n_neumann = Rows(run), run.solver.n_neumann
    draws = [SimpleNamespace(inner=rows.inner(d.inner), **rows.series(d.neumann, n_neumann - 1)) for d in run.draws]
    return sustain(problem, z, x, draws, n_neumann=n_neumann, **_storm_settings(run, settings))


def transcribe_vrbo(problem, run, z, x, settings):
    rows, n_neumann = Rows(run), run.solver.n_neumann
    differences = run.solver.n_inner_steps + 1

    def one(d):
        inner = [[None] * (n_neumann + 2)] * differences if d.inner is None else d.inner
        return SimpleNamespace(
            inner=[rows.inner(batches[0]) for batches in inner],
            neumann=[[rows.inner(b) for b in batches[1:-1]] for batches in inner],
            cross=[rows.inner(batches[-1]) for batches in inner],
            outer=rows.outer_list(d.outer, differences),
        )

    fixed = {"period": run.solver.period, "n_inner_steps": differences - 1, "n_neumann": n_neumann}
    step = {"neumann_step": float(run.solver.neumann_step)}
    return vrbo(problem, z, x, [one(d) for d in run.draws], **fixed, **step, **settings)


def transcribe_f2sa(problem, run, z, x, settings):
    rows, solver, times = Rows(run), run.solver, run.solver.n_inner_steps
    draws = [
        SimpleNamespace(
            inner_loop=rows.inner_list(d.inner_loop, times),
            y_inner_loop=rows.inner_list(d.y_inner_loop, times),
            y_outer_loop=rows.outer_list(d.y_outer_loop, times),
            inner=rows.inner(d.inner),
            inner_at_z=rows.inner(d.inner_at_z),
            outer=rows.outer(d.outer),
        )
        for d in run.draws
    ]
    printed = solver.schedule == "printed"
    penalty = {
        "lambda_0": float(solver.lambda_0),
        "delta_0": float(solver.delta_0),
        "shared_batch": solver.shared_batch,
    }
    return f2sa(problem, z, x, draws, published=printed, published_y_step=printed, **penalty, **settings)


def _alternating(run, times):
    rows, n_neumann = Rows(run), run.solver.n_neumann
    draws = [
        SimpleNamespace(inner_loop=rows.inner_list(d.inner_loop, times), **rows.series(d.neumann, n_neumann - 1))
        for d in run.draws
    ]
    return draws, {"n_neumann": n_neumann, "neumann_step": float(run.solver.neumann_step)}


def transcribe_bsa(problem, run, z, x, settings):
    draws, fixed = _alternating(run, run.solver.n_inner_steps)
    return bsa(problem, z, x, draws, warm_start=run.solver.warm_start, **fixed, **settings)


def transcribe_alset(problem, run, z, x, settings):
    draws, fixed = _alternating(run, run.solver.n_inner_steps)
    return alset(problem, z, x, draws, **fixed, **settings)


def transcribe_ttsa(problem, run, z, x, settings):
    draws, fixed = _alternating(run, 1)
    for draw in draws:
        draw.inner = draw.inner_loop[0]
    return ttsa(problem, z, x, draws, **fixed, **settings)


def transcribe_fsla(problem, run, z, x, settings):
    rows = Rows(run)
    draws = [
        SimpleNamespace(
            inner=rows.inner(d.inner),
            v_inner=rows.inner(d.v_rows.inner),
            v_outer=rows.outer(d.v_rows.outer),
            x_inner=rows.inner(d.x_rows.inner),
            x_outer=rows.outer(d.x_rows.outer),
        )
        for d in run.draws
    ]
    return fsla(problem, z, x, draws, momentum=float(run.solver.momentum), **settings)


def transcribe_bome(problem, run, z, x, settings):
    fixed = {"n_inner_steps": run.solver.n_inner_steps, "eta_b": float(run.solver.barrier)}
    return bome(problem, z, x, run.states, **fixed, **settings)


def transcribe_pzobo(problem, run, z, x, settings):
    rows, solver = Rows(run), run.solver

    def gaussians(d):
        with arithmetic("float64"):
            template = jax.numpy.asarray(x)
            keys = [jax.random.fold_in(d.key, k) for k in range(solver.n_directions)]
            return np.array([gaussian_like(key, template) for key in keys])

    draws = [
        SimpleNamespace(
            inner_loop=rows.inner_list(d.inner_loop, solver.n_inner_steps),
            outer=rows.outer(d.outer),
            gaussians=gaussians(d),
        )
        for d in run.draws
    ]
    return pzobo(problem, z, x, draws, smoothing=float(solver.smoothing), **settings)


def transcribe_itd(problem, run, z, x, settings):
    rows, times = Rows(run), run.solver.n_inner_steps
    draws = [
        SimpleNamespace(inner_loop=rows.inner_list(d.inner_loop, times), outer=rows.outer(d.outer)) for d in run.draws
    ]
    return itd(problem, z, x, draws, warm_start=run.solver.warm_start, **settings)


TRANSCRIPTIONS = {
    "SRBA": transcribe_srba,
    "SABA": transcribe_saba,
    "SOBA": transcribe_soba,
    "StocBiO": transcribe_stocbio,
    "AmIGO": transcribe_amigo,
    "MRBO": transcribe_mrbo,
    "VRBO": transcribe_vrbo,
    "F2SA": transcribe_f2sa,
    "BSA": transcribe_bsa,
    "TTSA": transcribe_ttsa,
    "ALSET": transcribe_alset,
    "SUSTAIN": transcribe_sustain,
    "FSLA": transcribe_fsla,
    "BOME": transcribe_bome,
    "PZOBO": transcribe_pzobo,
    "ITD": transcribe_itd,
    "MASOBA": transcribe_masoba,
    "SPABA": transcribe_spaba,
}

KIND_NAMES = {
    "inner_grad": "gz",
    "inner_grad_outer": "gx",
    "hvp": "hv",
    "cross": "cr",
    "outer_grad": "fz",
    "outer_grad_outer": "fx",
    "inner_value": "inner_value",
    "outer_value": "outer_value",
}


def start_of(problem):
    return tuple(np.asarray(part, np.float64) for part in (problem.start.inner_var, problem.start.outer_var))
