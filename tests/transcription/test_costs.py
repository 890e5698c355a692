"""The costs of the transcriptions per step."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.transcription.draws import (
    STEPS,
    B,
    D,
    K,
    M,
    N,
    P,
    Q,
    T,
    blocks,
    make_draw,
    make_draws,
    make_loop_draw,
    make_quadratic,
    point,
)

from .acc_bo import acc_bo
from .ada_bio import ada_bio
from .alset import alset
from .amigo import amigo
from .bome import bome
from .bsa import bsa
from .f2sa import f2sa
from .f2sa_p import f2sa_p
from .fde_hbo import fde_hbo
from .forward_mode import forward_mode
from .fsla import fsla
from .g_pbgd import g_pbgd
from .hoag import hoag
from .itd import itd
from .lanc_bio import lanc_bio
from .ma_soba import ma_soba
from .meha import meha
from .mrbo import mrbo
from .nbo import nbo
from .neumann_aid import neumann_aid
from .pnpbo import pnpbo
from .pzobo import pzobo
from .qnbo import qnbo
from .s_tfbo import s_tfbo
from .saba import saba
from .soba import soba
from .spaba import spaba
from .srba import srba
from .stocbio import stocbio
from .sub_bio import sub_bio
from .sustain import sustain
from .ttsa import ttsa
from .v_pbgd import v_pbgd
from .vrbo import vrbo

FULL = {"gz": N, "hv": N, "cr": N, "fz": M, "fx": M}
ONE = {"gz": B, "hv": B, "cr": B, "fz": B, "fx": B}
TWICE = {kind: 2 * B for kind in ONE}


def scaled(**units: int) -> dict[str, int]:
    return {kind: B * count for kind, count in units.items()}


def added(*costs: dict[str, int]) -> dict[str, int]:
    return {kind: sum(c.get(kind, 0) for c in costs) for kind in {k for c in costs for k in c}}


BLOCKS = {"inner_blocks": blocks(N), "outer_blocks": blocks(M)}
LENGTH = 2
HYP2 = scaled(hv=LENGTH, cr=1, fz=1, fx=1)
VRBO_STEP = scaled(gz=2 * (T + 1), hv=2 * (T + 1) * Q, cr=2 * (T + 1), fz=2 * (T + 1), fx=2 * (T + 1))
VRBO_FULL = {"gz": N, "hv": Q * N, "cr": N, "fz": M, "fx": M}
MRBO_ONE = scaled(gz=1, hv=Q, cr=1, fz=1, fx=1)
SUSTAIN_ONE = added(scaled(gz=1), HYP2)
F2SA_OPTIONS = {"delta_0": 0.1, "shared_batch": False}
BOME_STEP = {"gz": (T + 1) * N, "gx": 2 * N, "fz": M, "fx": M}
FDE_HBO_ONE = scaled(gz=3, gx=2, fz=1, fx=1)
LANC_BIO_STEP = scaled(gz=T, hv=1, cr=1, fz=1, fx=1)
HOAG_STEP = {"cr": N, "fz": M, "fx": M, "outer_value": M}

PNPBO_BLOCKS = {"n_inner_blocks": len(blocks(N)), "n_outer_blocks": len(blocks(M))}
SFFBA = {"estimators": dict.fromkeys("zvx", "zerosarah"), **PNPBO_BLOCKS}
MA_SABA = {"estimators": dict.fromkeys("zvx", "saga"), "rho": 0.1, **PNPBO_BLOCKS}
MIXED = {"estimators": {"z": "sgd", "v": "page", "x": "saga"}, **PNPBO_BLOCKS}

# name: (function, options, cost of the first step, cost of the third step)
COSTS: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, int], dict[str, int]]] = {
    "srba": (srba, {"period": 5}, FULL, TWICE),
    "srba, full pass": (srba, {"period": 2}, FULL, FULL),
    "spaba": (spaba, {}, FULL, TWICE),
    "soba": (soba, {}, ONE, ONE),
    "ma_soba": (ma_soba, {}, ONE, ONE),
    "saba, zero": (saba, BLOCKS, ONE, ONE),
    "saba, full": (saba, {**BLOCKS, "init": "full"}, added(FULL, ONE), ONE),
    "amigo": (amigo, {}, scaled(gz=T, hv=T, cr=1, fz=1, fx=1), scaled(gz=T, hv=T, cr=1, fz=1, fx=1)),
    "stocbio": (stocbio, {}, scaled(gz=T, hv=Q, cr=1, fz=1, fx=1), scaled(gz=T, hv=Q, cr=1, fz=1, fx=1)),
    "mrbo": (mrbo, {}, MRBO_ONE, added(MRBO_ONE, MRBO_ONE)),
    "sustain": (sustain, {"n_neumann": Q}, SUSTAIN_ONE, added(SUSTAIN_ONE, SUSTAIN_ONE)),
    "vrbo": (vrbo, {"period": 5, "n_inner_steps": T, "n_neumann": Q}, added(VRBO_FULL, VRBO_STEP), VRBO_STEP),
    "vrbo, full pass": (
        vrbo,
        {"period": 2, "n_inner_steps": T, "n_neumann": Q},
        added(VRBO_FULL, VRBO_STEP),
        added(VRBO_FULL, VRBO_STEP),
    ),
    "f2sa": (f2sa, F2SA_OPTIONS, scaled(gz=2 * T, fz=T, gx=2, fx=1), scaled(gz=2 * T, fz=T, gx=2, fx=1)),
    "f2sa_p": (f2sa_p, {}, scaled(gz=2 * T, fz=2 * T, gx=2, fx=2), scaled(gz=2 * T, fz=2 * T, gx=2, fx=2)),
    "f2sa_p, p=1": (f2sa_p, {"order": 1}, *[scaled(gz=2 * T, fz=T, gx=2, fx=1)] * 2),
    "bsa": (bsa, {"n_neumann": Q}, added(scaled(gz=T), HYP2), added(scaled(gz=T), HYP2)),
    "alset": (alset, {"n_neumann": Q}, added(scaled(gz=T), HYP2), added(scaled(gz=T), HYP2)),
    "ttsa": (ttsa, {"n_neumann": Q}, added(scaled(gz=1), HYP2), added(scaled(gz=1), HYP2)),
    "fsla": (fsla, {}, ONE, scaled(gz=1, hv=1, fz=1, cr=2, fx=2)),
    "bome": (bome, {"n_inner_steps": T}, BOME_STEP, BOME_STEP),
    "bome, value": (
        bome,
        {"n_inner_steps": T, "of_value": True},
        *[added(BOME_STEP, {"inner_value": 2 * N})] * 2,
    ),
    "pzobo": (pzobo, {}, scaled(gz=(K + 1) * T, fz=1, fx=1), scaled(gz=(K + 1) * T, fz=1, fx=1)),
    "itd": (itd, {}, scaled(gz=T, hv=T - 1, cr=T, fz=1, fx=1), scaled(gz=T, hv=T - 1, cr=T, fz=1, fx=1)),
    "forward_mode": (forward_mode, {}, *[scaled(gz=T, hv=T * D, cr=T * D, fz=1, fx=1)] * 2),
    "pnpbo, sffba": (pnpbo, SFFBA, TWICE, TWICE),
    "pnpbo, ma-saba": (pnpbo, MA_SABA, ONE, ONE),
    "pnpbo, mixed": (
        pnpbo,
        MIXED,
        {"gz": B, "hv": N, "fz": M, "cr": B, "fx": B},
        scaled(gz=1, hv=2, fz=2, cr=1, fx=1),
    ),
    "s_tfbo": (s_tfbo, {}, ONE, ONE),
    "ada_bio": (ada_bio, {}, *[scaled(gz=1, hv=2 * Q, cr=2, fz=2, fx=2)] * 2),
    "neumann_aid": (neumann_aid, {"terms": Q}, *[scaled(gz=T, hv=Q, cr=1, fz=1, fx=1)] * 2),
    "fde_hbo": (fde_hbo, {}, FDE_HBO_ONE, added(FDE_HBO_ONE, FDE_HBO_ONE)),
    "lanc_bio": (lanc_bio, {"m": 5}, added(LANC_BIO_STEP, scaled(hv=1)), LANC_BIO_STEP),
    "lanc_bio, restart": (lanc_bio, {"m": 2}, *[added(LANC_BIO_STEP, scaled(hv=1))] * 2),
    "sub_bio": (sub_bio, {}, *[scaled(gz=T, hv=3, cr=1, fz=1, fx=1)] * 2),
    "lanc_bio, from 0": (lanc_bio, {"m": 2, "residual": False}, LANC_BIO_STEP, LANC_BIO_STEP),
    "nbo": (nbo, {}, *[scaled(gz=1, hv=2 * T - 1, cr=1, fz=1, fx=1)] * 2),
    "qnbo": (qnbo, {}, *[scaled(gz=1 + 3 + 1 + 4, cr=1, fz=1, fx=1)] * 2),
    "hoag": (hoag, {}, HOAG_STEP, HOAG_STEP),
    "v_pbgd": (v_pbgd, {}, *[scaled(gz=T + 1, gx=2, fz=1, fx=1)] * 2),
    "g_pbgd": (g_pbgd, {}, ONE, ONE),
    "meha": (meha, {}, *[scaled(gz=2, gx=2, fz=1, fx=1)] * 2),
    "acc_bo": (acc_bo, {}, *[scaled(gz=1, hv=2 * Q, cr=2, fz=2, fx=2)] * 2),
    "acc_bo, warm-up": (acc_bo, {"warm_up": 2}, scaled(gz=1), scaled(gz=1, hv=2 * Q, cr=2, fz=2, fx=2)),
}

# total cost per step in units of b, as stated in the file of each solver
UNITS = {
    "srba": 10,
    "spaba": 10,
    "soba": 5,
    "ma_soba": 5,
    "saba, zero": 5,
    "amigo": 2 * T + 3,
    "stocbio": T + Q + 3,
    "mrbo": 2 * (Q + 4),
    "sustain": 2 * (LENGTH + 4),
    "vrbo": 2 * (T + 1) * (Q + 4),
    "f2sa": 3 * T + 3,
    "f2sa_p": 2 * 2 * (T + 1),
    "f2sa_p, p=1": 3 * (T + 1),
    "bsa": T + LENGTH + 3,
    "alset": T + LENGTH + 3,
    "ttsa": 1 + LENGTH + 3,
    "fsla": 7,
    "pzobo": (K + 1) * T + 2,
    "itd": 3 * T + 1,
    "forward_mode": (2 * D + 1) * T + 2,
    "s_tfbo": 5,
    "ada_bio": 2 * Q + 7,
    "neumann_aid": T + Q + 3,
    "fde_hbo": 14,
    "lanc_bio": T + 4,
    "lanc_bio, restart": T + 5,
    "sub_bio": T + 6,
    "lanc_bio, from 0": T + 4,
    "nbo": 2 * T + 3,
    "qnbo": (1 + 3 + 4) + 4,
    "pnpbo, sffba": 10,
    "pnpbo, ma-saba": 5,
    "pnpbo, mixed": 7,
    "v_pbgd": T + 5,
    "g_pbgd": 5,
    "meha": 6,
    "acc_bo": 2 * Q + 7,
}


def calls_of(name: str, steps: int) -> dict[str, int]:
    """Return the counts of a run of ``steps`` steps."""
    function, options, _, _ = COSTS[name]
    problem = make_quadratic()
    z, x, _ = point(problem)
    rng = np.random.default_rng(9)
    make = make_loop_draw if function is vrbo else make_draw
    draws = [make(problem, rng) for _ in range(steps)]
    history = function(problem, z, x, draws, **options, **({} if function is hoag else STEPS))
    assert len(history) == steps
    for record in history:
        assert record["inner_var"].shape == (P,) and record["outer_var"].shape == (D,)
    return problem.calls


@pytest.mark.parametrize("name", COSTS)
def test_the_cost_per_step_is_as_stated(name: str) -> None:
    _, _, first, later = COSTS[name]
    one, two, three = (calls_of(name, steps) for steps in (1, 2, 3))
    assert {k: c for k, c in one.items() if c} == first
    assert {k: three[k] - two[k] for k in three if three[k] > two[k]} == later
    if name in UNITS:
        assert sum(later.values()) == UNITS[name] * B


def test_the_cost_of_full_batch_passes_is_as_stated() -> None:
    assert sum(FULL.values()) == 3 * N + 2 * M
    assert sum(VRBO_FULL.values()) == (Q + 2) * N + 2 * M
    period, steps = 4, 8
    function, _, first, later = COSTS["srba"]
    problem = make_quadratic()
    z, x, _ = point(problem)
    function(problem, z, x, make_draws(problem, steps), period=period, **STEPS)
    per_period = sum(first.values()) + (period - 1) * sum(later.values())
    assert sum(problem.calls.values()) == steps // period * per_period
    assert per_period == 3 * N + 2 * M + 2 * (3 * B + 2 * B) * (period - 1)


@pytest.mark.parametrize("length", range(Q))
def test_the_number_of_products_is_the_random_length(length: int) -> None:
    problem = make_quadratic()
    z, x, _ = point(problem)
    draw = make_draw(problem, np.random.default_rng(4), length)
    for function in (bsa, alset, ttsa, sustain):
        problem.reset()
        function(problem, z, x, [draw], n_neumann=Q, **STEPS)
        assert problem.calls["hv"] == length * B
