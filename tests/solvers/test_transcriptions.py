"""Iterates and costs equal those of NumPy transcriptions of the papers, on the same drawn rows."""

import dataclasses
import functools
from dataclasses import replace

import numpy as np
import pytest

import bilevel
from bilevel._core import trees
from tests import cases
from tests.solvers.transcribed import HOST_TRANSCRIPTIONS, KIND_NAMES, TRANSCRIBED, TRANSCRIPTIONS, start_of

COMMON = {"step_size": 0.2, "outer_ratio": 2.0, "batch_size": cases.BATCH}
# The loop lengths of the shared cases, so that their compiled programs are reused.
LOOPS = {"n_inner_steps": cases.SHORT["n_inner_steps"]}
SERIES = {"n_neumann": cases.SHORT["n_neumann"], "neumann_step": 0.3}
PRODUCTS = {"n_products": cases.SHORT["n_products"]}
PERIOD = {"period": cases.SHORT["period"]}
# Settings in addition to the defaults of each solver.
CHOSEN = {
    "SRBA q=1": bilevel.SRBA(**COMMON, period=1),
    "SRBA q=2": bilevel.SRBA(**COMMON, period=2),
    "SRBA q=5": bilevel.SRBA(**COMMON, **PERIOD),
    "SRBA iid": bilevel.SRBA(**COMMON, **PERIOD, sampling="iid"),
    "SRBA full": bilevel.SRBA(**COMMON, **PERIOD, sampling="full"),
    "SABA zero": bilevel.SABA(**COMMON),
    "SABA full": bilevel.SABA(**COMMON, tables="full", rebuild_every=9),
    "AmIGO normal": bilevel.AmIGO(**COMMON, **LOOPS, normal_equations=True, v_step=0.1, sampling="iid"),
    "AmIGO full": bilevel.AmIGO(**COMMON, **LOOPS, sampling="full"),
    "MRBO": bilevel.MRBO(**COMMON, **SERIES, momentum=0.7),
    "SUSTAIN sgd": bilevel.SUSTAIN(**COMMON, **SERIES, estimator="sgd"),
    "SUSTAIN spider": bilevel.SUSTAIN(**COMMON, **SERIES, **PERIOD, estimator="spider"),
    "VRBO": bilevel.VRBO(**COMMON, **LOOPS, **SERIES, **PERIOD),
    "VRBO full": bilevel.VRBO(**COMMON, **LOOPS, **SERIES, **PERIOD, sampling="full"),
    "F2SA": bilevel.F2SA(**COMMON, **LOOPS, lambda_0=2.0, delta_0=0.5),
    "F2SA two batches": bilevel.F2SA(**COMMON, **LOOPS, shared_batch=False),
    "F2SA printed": bilevel.F2SA(**COMMON, **LOOPS, schedule="printed", shared_batch=False),
    "F2SA constant": bilevel.F2SA(**COMMON, **LOOPS, schedule="constant", lambda_0=5.0),
    "F2SAp p=3": bilevel.F2SAp(**COMMON, **LOOPS, order=3, perturbation=0.2, normalized=False),
    "F2SAp p=4": bilevel.F2SAp(**COMMON, **LOOPS, order=4, normalized=False, sampling="iid"),
    "BSA cold": bilevel.BSA(**COMMON, **LOOPS, **SERIES, warm_start=False),
    "BSA iid": bilevel.BSA(**COMMON, **LOOPS, **SERIES, sampling="iid"),
    "PZOBO": bilevel.PZOBO(**COMMON, **LOOPS, n_directions=2),
    "ITD cold": bilevel.ITD(**COMMON, **LOOPS, warm_start=False),
    "FSLA share": bilevel.FSLA(**COMMON, momentum=None),
    "BOME value": bilevel.BOME(**COMMON, **LOOPS, barrier=3.0, barrier_of="value", z_step=0.03),
    "ITD momentum": bilevel.ITD(**COMMON, **LOOPS, momentum=0.6),
    "ITD checkpoints": bilevel.ITD(**COMMON, n_inner_steps=11, momentum=0.6, checkpoints=True),
    "ITD checkpoints of batches of rows": bilevel.ITD(**COMMON, n_inner_steps=8, checkpoints=True, sampling="iid"),
    "ForwardMode cold": bilevel.ForwardMode(**COMMON, **LOOPS, warm_start=False, sampling="iid"),
    "ForwardMode random": bilevel.ForwardMode(**COMMON, **LOOPS, n_directions=2),
    "ForwardMode in real time": bilevel.ForwardMode(**COMMON, **LOOPS, reset=False),
    "MASOBA": bilevel.MASOBA(**COMMON, momentum=0.8),
    "SPABA": bilevel.SPABA(**COMMON, **PERIOD),
    "SBOLSVRG": bilevel.SBOLSVRG(**COMMON, **PERIOD),
    "AccBiO general": bilevel.AccBiO(**COMMON, **LOOPS, **cases.CONVEX, n_v_steps=3, form="general"),
    "NBO iid": bilevel.NBO(**COMMON, n_inner_steps=5, sampling="iid"),
    "NBO T=1": bilevel.NBO(**COMMON, n_inner_steps=1),
    "NBO full": bilevel.NBO(**COMMON, **LOOPS, sampling="full"),
    "QNBO cold": bilevel.QNBO(**COMMON, **LOOPS, warm_start_v=False, damping=0.8),
    "QNBO shared": bilevel.QNBO(**COMMON, **LOOPS, n_v_steps=0, sampling="iid"),
    # SR1 is stable if a step has enough pairs and no move is short.
    "QNBO sr1": bilevel.QNBO(**COMMON, **LOOPS, form="sr1", n_gradient_steps=0, difference=1.0, sampling="blocks"),
    "AdaBiO": bilevel.AdaBiO(**COMMON, **SERIES, noise_scale=0.5, slope_scale=2.0),
    "FdeHBO ball": bilevel.FdeHBO(**COMMON, v_radius=0.3, momentum=0.8, perturbation=0.1),
    "FdeHBO iid": bilevel.FdeHBO(**COMMON, sampling="iid"),
    "LancBiO": bilevel.LancBiO(**COMMON, **LOOPS, **PERIOD),
    "LancBiO blocks": bilevel.LancBiO(**COMMON, **LOOPS, period=3, sampling="blocks"),
    "LancBiO growth": bilevel.LancBiO(**COMMON, **LOOPS, period=4, growth_period=3, growth_percent=40),
    "SubBiO blocks": bilevel.SubBiO(**COMMON, **LOOPS, plane_step=0.5, sampling="blocks"),
    "LancBiO from 0": bilevel.LancBiO(**COMMON, **LOOPS, **PERIOD, warm_start=False, sampling="iid"),
    "NeumannAID as iDARTS": bilevel.NeumannAID(**COMMON, n_inner_steps=5, n_neumann=2, finite_difference=True),
    "DARTS far": bilevel.DARTS(**COMMON, perturbation=1.0, sampling="iid"),
    "SAMA nudged": bilevel.SAMA(**COMMON, **LOOPS, perturbation=1.0, response_scale=5.0, nudge=True),
    "SAMA adam": bilevel.SAMA(**COMMON, **LOOPS, inner_optimizer="adam", sampling="iid"),
    "AIDCG warm": bilevel.AIDCG(**COMMON, **LOOPS, **PRODUCTS, warm_start_v=True, damping=0.3),
    "AIDCG cold": bilevel.AIDCG(**COMMON, **LOOPS, n_products=7, warm_start=False, tolerance=1e-3, sampling="iid"),
    "VPBGD stochastic": bilevel.VPBGD(**COMMON, **LOOPS, w_step_size=0.3, w_decay=True, sampling="iid"),
    "VPBGD as coded": bilevel.VPBGD(**COMMON, n_inner_steps=1, ramp=7, penalty=4.0),
    "VPBGD unscaled": bilevel.VPBGD(**COMMON, **LOOPS, penalty=3.0, scaled=False, warm_start=False, sampling="blocks"),
    "GPBGD batches": bilevel.GPBGD(**COMMON, ramp=7, penalty=4.0, sampling="blocks"),
    "GPBGD unscaled": bilevel.GPBGD(**COMMON, penalty=0.5, scaled=False, sampling="iid"),
    "MEHA blocks": bilevel.MEHA(**COMMON, y_step_size=0.3, gamma=2.0, c_0=3.0, c_power=0.25, sampling="blocks"),
    "MEHA constant": bilevel.MEHA(**COMMON, c_0=5.0, c_power=0, sampling="iid"),
    "AccBO warm": bilevel.AccBO(**COMMON, **SERIES, warm_up=7, extrapolation=0.3, averaging=0.8, momentum=0.2),
    "AccBO plain": bilevel.AccBO(**COMMON, **SERIES, extrapolation=0, averaging=1.0, momentum=1.0, sampling="iid"),
    "PnPBO as MSEBA": bilevel.PnPBO(**COMMON, **PERIOD, v_estimator="page", outer_estimator="page", mixing=0.3),
    "PnPBO mixed": bilevel.PnPBO(
        **COMMON,
        **PERIOD,
        inner_estimator="page",
        v_estimator="saga",
        outer_estimator="saga",
        momentum=0.7,
    ),
    "PnPBO sgd": bilevel.PnPBO(
        **COMMON, inner_estimator="page", v_estimator="sgd", outer_estimator="sgd", sampling="iid"
    ),
}


def plain(cls):
    names = {field.name for field in dataclasses.fields(cls)}
    given = LOOPS | SERIES | PRODUCTS | cases.CONVEX
    return cls(**COMMON, **{name: value for name, value in given.items() if name in names})


SETTINGS = {name: plain(type(solver)) for name, solver in TRANSCRIBED.items()} | CHOSEN


def steps(solver):
    return 50 if isinstance(solver, bilevel.SRBA | bilevel.SABA) else 20


@functools.cache
def both(name, solver, bounds=None, v_radius=None):
    """Return the trajectory of the library, that of the transcription, and the problem that counted its calls."""
    problem = cases.PROBLEMS[name]()
    if bounds is not None:
        problem = bounded(problem, bounds)
    run = cases.trajectory(problem, solver, steps(solver))
    settings = {"step_size": solver.step_size, "outer_ratio": solver.outer_ratio}
    if bounds is not None or v_radius is not None:
        settings |= {"bounds": bounds, "v_radius": v_radius}
    plain = cases.in_numpy(name, problem)
    transcribe = TRANSCRIPTIONS[type(solver).__name__]
    return run, transcribe(plain, run, *start_of(problem), settings), plain


def bounded(problem, bounds):
    limits = tuple(np.full_like(problem.start.outer_var, bound) for bound in bounds)
    return replace(problem, oracles=replace(problem.oracles, outer_bounds=limits))


def assert_same_path(run, expected):
    for t, (state, step) in enumerate(zip(run.states, expected, strict=True)):
        for part in set(step) & {"inner_var", "outer_var", "v"}:
            actual, wanted = np.asarray(getattr(state.point, part)), step[part]
            assert np.linalg.norm(actual - wanted) <= 1e-10 * np.linalg.norm(wanted), (t, part)


@pytest.mark.parametrize("case", cases.marked(SETTINGS, quick=TRANSCRIBED))
def test_first_iterates_and_calls_on_quadratics_equal_the_transcription(case):
    solver = SETTINGS[case]
    run, expected, plain = both("quadratic", solver)
    assert_same_path(run, expected)
    declared = {kind: int(np.sum(getattr(run.page.calls, kind)[: steps(solver)])) for kind in KIND_NAMES}
    initial = run.solver.init_calls(run.oracles)._asdict()
    for kind, name in KIND_NAMES.items():
        assert declared[kind] + initial[kind] == plain.calls[name], kind


@pytest.mark.parametrize("case", cases.marked(SETTINGS))
def test_first_iterates_on_logistic_selection_equal_the_transcription(case):
    run, expected, _ = both("logistic", SETTINGS[case])
    assert_same_path(run, expected)


@pytest.mark.parametrize("case", ["SRBA q=5", "SABA zero", "SOBA"])
def test_projections_equal_the_transcription(case):
    problem = cases.quadratic()
    free = trees.to_numpy(cases.trajectory(problem, SETTINGS[case], steps(SETTINGS[case])).states[-1].point)
    radius = 0.5 * float(np.linalg.norm(free.v))
    bounds = (-2.5, float(np.median(free.outer_var)))
    run, expected, _ = both("quadratic", replace(SETTINGS[case], v_radius=radius), bounds, radius)
    assert_same_path(run, expected)
    last = trees.to_numpy(run.states[-1].point)
    assert np.isclose(np.linalg.norm(last.v), radius), "the test requires an active ball"
    assert np.max(last.outer_var) == bounds[1], "the test requires an active bound"


def test_the_tables_of_saba_equal_those_of_the_transcription():
    run, expected, _ = both("quadratic", SETTINGS["SABA full"])
    inner, outer = run.states[-1].inner, run.states[-1].outer
    for memory, kinds in ((inner, ("gz", "hv", "cr")), (outer, ("fz", "fx"))):
        table = np.concatenate([expected[-1]["tables"][kind] for kind in kinds], axis=1)
        mean = np.concatenate([expected[-1]["means"][kind] for kind in kinds])
        np.testing.assert_allclose(memory.table, table, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(memory.mean, mean, rtol=1e-10, atol=1e-12)


def test_every_solver_has_a_transcription():
    assert set(TRANSCRIPTIONS) == {type(solver).__name__ for solver in SETTINGS.values()} == set(TRANSCRIBED)
    # AutoSRBA has transcriptions of its parts, and Exact calls the exact solver of the problem.
    assert set(TRANSCRIPTIONS) | set(HOST_TRANSCRIPTIONS) == set(bilevel.SOLVERS) - {"AutoSRBA", "Exact"}
