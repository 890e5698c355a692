"""Each solver beside its NumPy transcription: how draws and parameters are handed over."""

from types import SimpleNamespace

import numpy as np

from tests.cases import indices
from tests.transcription.saba import saba
from tests.transcription.soba import soba
from tests.transcription.srba import srba


def _rows(run):
    inner, outer = run.oracles.inner_samples, run.oracles.outer_samples
    return [SimpleNamespace(inner=indices(inner, d.inner), outer=indices(outer, d.outer)) for d in run.draws]


def _blocks(samples):
    return [indices(samples, block) for block in range(samples.n_blocks)]


def transcribe_srba(problem, run, z, x, settings):
    return srba(problem, z, x, _rows(run), period=run.solver.period, **settings)


def transcribe_soba(problem, run, z, x, settings):
    return soba(problem, z, x, _rows(run), **settings)


def transcribe_saba(problem, run, z, x, settings):
    draws = [SimpleNamespace(inner_block=int(d.inner), outer_block=int(d.outer)) for d in run.draws]
    blocks = {
        "inner_blocks": _blocks(run.oracles.inner_samples),
        "outer_blocks": _blocks(run.oracles.outer_samples),
    }
    return saba(problem, z, x, draws, init=run.solver.tables, **blocks, **settings)


TRANSCRIPTIONS = {"SRBA": transcribe_srba, "SABA": transcribe_saba, "SOBA": transcribe_soba}

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
