"""Iterates and costs against the NumPy transcriptions of the papers, on the same drawn rows."""

from dataclasses import replace

import numpy as np
import pytest

import bilevel
from bilevel import trees
from tests import cases
from tests.solvers.transcribed import KIND_NAMES, TRANSCRIPTIONS, start_of

STEPS = 50
COMMON = {"step_size": 0.2, "outer_ratio": 2.0}
SETTINGS = {
    "SRBA q=1": bilevel.SRBA(**COMMON, batch_size=cases.BATCH, period=1),
    "SRBA q=2": bilevel.SRBA(**COMMON, batch_size=cases.BATCH, period=2),
    "SRBA q=7": bilevel.SRBA(**COMMON, batch_size=cases.BATCH, period=7),
    "SRBA iid": bilevel.SRBA(**COMMON, batch_size=cases.BATCH, period=7, sampling="iid"),
    "SRBA full": bilevel.SRBA(**COMMON, batch_size=cases.BATCH, period=7, sampling="full"),
    "SABA zero": bilevel.SABA(**COMMON, batch_size=cases.BATCH),
    "SABA full": bilevel.SABA(**COMMON, batch_size=cases.BATCH, tables="full", rebuild_every=9),
    "SOBA": bilevel.SOBA(**COMMON, batch_size=cases.BATCH),
}


def both(name, solver, bounds=None, v_radius=None):
    """The library's trajectory and the transcription's, with the transcription's problem for its counts."""
    problem = cases.PROBLEMS[name]()
    if bounds is not None:
        problem = bounded(problem, bounds)
    run = cases.trajectory(problem, solver, STEPS)
    settings = COMMON | {"bounds": bounds, "v_radius": v_radius}
    plain = cases.in_numpy(name, problem)
    transcribe = TRANSCRIPTIONS[type(solver).__name__]
    return run, transcribe(plain, run, *start_of(problem), settings), plain


def bounded(problem, bounds):
    limits = tuple(np.full_like(problem.start.outer_var, bound) for bound in bounds)
    return replace(problem, oracles=replace(problem.oracles, outer_bounds=limits))


def assert_same_path(run, expected):
    for t, (state, step) in enumerate(zip(run.states, expected, strict=True)):
        for part in ("inner_var", "outer_var", "v"):
            actual, wanted = np.asarray(getattr(state.point, part)), step[part]
            assert np.linalg.norm(actual - wanted) <= 1e-10 * np.linalg.norm(wanted), (t, part)


@pytest.mark.parametrize("name", cases.PROBLEMS)
@pytest.mark.parametrize("case", SETTINGS)
def test_first_iterates_equal_the_transcription(name, case):
    run, expected, _ = both(name, SETTINGS[case])
    assert_same_path(run, expected)


@pytest.mark.parametrize("case", ["SRBA q=7", "SABA zero", "SOBA"])
def test_projections_equal_the_transcription(case):
    problem = cases.quadratic()
    free = trees.to_numpy(cases.trajectory(problem, SETTINGS[case], STEPS).states[-1].point)
    radius = 0.5 * float(np.linalg.norm(free.v))
    bounds = (-2.5, float(np.median(free.outer_var)))
    run, expected, _ = both("quadratic", replace(SETTINGS[case], v_radius=radius), bounds, radius)
    assert_same_path(run, expected)
    last = trees.to_numpy(run.states[-1].point)
    assert np.isclose(np.linalg.norm(last.v), radius), "the ball was meant to be active"
    assert np.max(last.outer_var) == bounds[1], "a bound was meant to be active"


@pytest.mark.parametrize("case", SETTINGS)
def test_declared_cost_equals_what_the_transcription_asked_for(case):
    solver = SETTINGS[case]
    run, _, plain = both("quadratic", solver)
    declared = {kind: int(np.sum(getattr(run.page.calls, kind)[:STEPS])) for kind in KIND_NAMES}
    initial = run.solver.init_calls(run.oracles)._asdict()
    for kind, name in KIND_NAMES.items():
        assert declared[kind] + initial[kind] == plain.calls[name], kind


def test_tables_of_saba_hold_what_the_transcription_holds():
    run, expected, _ = both("quadratic", SETTINGS["SABA full"])
    inner, outer = run.states[-1].inner, run.states[-1].outer
    for memory, kinds in ((inner, ("gz", "hv", "cr")), (outer, ("fz", "fx"))):
        table = np.concatenate([expected[-1]["tables"][kind] for kind in kinds], axis=1)
        mean = np.concatenate([expected[-1]["means"][kind] for kind in kinds])
        np.testing.assert_allclose(memory.table, table, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(memory.mean, mean, rtol=1e-10, atol=1e-12)
