"""Methods of papers that are settings of a solver, compared with NumPy transcriptions of the papers' steps."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import optax
import pytest

import bilevel
from bilevel._core.compilation import arithmetic
from bilevel._core.types import Rows
from tests import cases
from tests.solvers.transcribed import start_of
from tests.transcription.bio_bred import asbio_bred, bio_bred, diagonal_step, entropic_step, sbio_bred, soft_step
from tests.transcription.directions import directions
from tests.transcription.handover import DrawnRows, single
from tests.transcription.neumann import hyp1

STEPS, Q = 20, 3


def assert_same_path(run, expected):
    for t, (state, step) in enumerate(zip(run.states, expected, strict=True)):
        for part, wanted in step.items():
            actual = np.asarray(getattr(state.point, part))
            assert np.linalg.norm(actual - wanted) <= 1e-10 * np.linalg.norm(wanted), (t, part)


def adam_bo(problem, z, x, draws, inner_step, neumann_step, rate, betas=(0.9, 0.999), least=1e-8):
    """Take one step of z along a batch, then Adam's step of x along the Neumann hypergradient at the new z."""
    mean = square = np.zeros_like(x)
    for t, draw in enumerate(draws, start=1):
        z = z - inner_step * problem.gz(z, x, draw.inner)
        gradient = hyp1(problem, z, x, draw.outer, draw.neumann, draw.cross, neumann_step)
        mean = betas[0] * mean + (1 - betas[0]) * gradient
        square = betas[1] * square + (1 - betas[1]) * gradient**2
        corrected = mean / (1 - betas[0] ** t), square / (1 - betas[1] ** t)
        x = x - rate * corrected[0] / (np.sqrt(corrected[1]) + least)
        yield {"inner_var": z, "outer_var": x}


@pytest.mark.parametrize("name", ["quadratic", pytest.param("logistic", marks=pytest.mark.slow)])
def test_adam_bo_is_stocbio_with_one_inner_step_and_adam_for_x(name):
    problem = cases.PROBLEMS[name]()
    solver = bilevel.StocBiO(
        0.1, 1.0, cases.BATCH, n_inner_steps=1, n_neumann=Q, neumann_step=0.2, outer_optimizer=optax.adam(5e-3)
    )
    run = cases.trajectory(problem, solver, STEPS)
    rows = DrawnRows(run)
    draws = [
        SimpleNamespace(inner=rows.inner_list(draw.inner_loop, 1)[0], **rows.series(draw.neumann, Q))
        for draw in run.draws
    ]
    assert_same_path(run, adam_bo(cases.in_numpy(name, problem), *start_of(problem), draws, 0.1, 0.2, 5e-3))


def wior_bo(problem, z, x, draws, inner_step, outer_step):
    """Move z, v and x together by constant steps, on rows that are drawn without replacement."""
    v = np.zeros_like(z)
    for draw in draws:
        d_z, d_v, d_x = directions(problem, (z, v, x), draw.inner, draw.outer)
        z, v, x = z - inner_step * d_z, v - inner_step * d_v, x - outer_step * d_x
        yield {"inner_var": z, "v": v, "outer_var": x}


def test_wior_bo_is_pnpbo_with_sampled_directions_on_reshuffled_batches():
    # A shorter last block would have a smaller weight, which the paper does not treat.
    problem = cases.quadratic(n_inner=6 * cases.BATCH, n_outer=4 * cases.BATCH)
    estimators = "inner_estimator", "v_estimator", "outer_estimator"
    solver = bilevel.PnPBO(
        0.2, 2.0, cases.BATCH, **dict.fromkeys(estimators, "sgd"), momentum=1.0, sampling="reshuffle"
    )
    run = cases.trajectory(problem, solver, STEPS)
    assert_same_path(run, wior_bo(cases.in_numpy("quadratic", problem), *start_of(problem), single(run), 0.2, 0.1))
    n_blocks = run.oracles.inner_samples.n_blocks
    assert sorted(int(draw.inner) for draw in run.draws[:n_blocks]) == list(range(n_blocks)), "a pass reads each block"


# BiO-BreD, SBiO-BreD and ASBiO-BreD. Steps of z and of x:
Z_STEP, X_STEP, STRENGTH = 0.2, 0.1, 0.4
CONSTANT, LOWER, UPPER = 1.0, -0.1, 0.6  # of the diagonal metric, and of the box
DIAGONAL = optax.rmsprop(X_STEP, decay=0.99, eps=CONSTANT, eps_in_sqrt=False)
STEPS_OF_X = {
    "l1": (np.array([-0.2, 0.3, 0.1]), lambda: soft_step(X_STEP, STRENGTH)),
    "simplex": (np.array([0.2, 0.5, 0.3]), lambda: entropic_step(X_STEP)),
    "diagonal": (np.array([0.2, 0.5, 0.3]), lambda: diagonal_step(X_STEP, CONSTANT, LOWER, UPPER)),
}
COMMON = {"step_size": Z_STEP, "outer_ratio": Z_STEP / X_STEP}
SERIES = {"n_neumann": Q, "neumann_step": 0.3}


@pytest.mark.parametrize(
    "kind", ["l1", *(pytest.param(one, marks=pytest.mark.slow) for one in ("simplex", "diagonal"))]
)
@pytest.mark.parametrize("name", ["BiO-BreD", pytest.param("SBiO-BreD", marks=pytest.mark.slow), "ASBiO-BreD"])
def test_bregman_methods_are_settings(name, kind):
    x, outer_step = STEPS_OF_X[kind]
    problem = cases.quadratic()
    plain = cases.in_numpy("quadratic", problem)
    problem, common = replace(problem, start=problem.start._replace(outer_var=x)), COMMON
    if kind == "diagonal":
        bounds = np.full(3, LOWER), np.full(3, UPPER)
        problem = replace(problem, oracles=replace(problem.oracles, outer_bounds=bounds))
        common = COMMON | {"outer_optimizer": DIAGONAL}
    else:
        problem = problem.with_outer_term(bilevel.L1(STRENGTH) if kind == "l1" else bilevel.Simplex())
    solver = {
        "BiO-BreD": bilevel.ITD(**common, n_inner_steps=3, sampling="full"),
        "SBiO-BreD": bilevel.SUSTAIN(**common, **SERIES, batch_size=cases.BATCH, estimator="sgd"),
        "ASBiO-BreD": bilevel.SUSTAIN(**common, **SERIES, batch_size=cases.BATCH, estimator="spider", period=6),
    }[name]
    run = cases.trajectory(problem, solver, STEPS)
    rows, common = DrawnRows(run), {"inner_step": Z_STEP, "outer_step": outer_step()}
    if name == "BiO-BreD":
        draws = [SimpleNamespace(inner_loop=3 * [None], outer=None)] * STEPS
        expected = bio_bred(plain, problem.start.inner_var, x, draws, **common)
    else:
        draws = [SimpleNamespace(inner=rows.inner(d.inner), **rows.series(d.neumann, Q - 1)) for d in run.draws]
        common |= {"period": 6} if name == "ASBiO-BreD" else {}
        method = asbio_bred if name == "ASBiO-BreD" else sbio_bred
        expected = method(plain, problem.start.inner_var, x, draws, **common, **SERIES)
    assert_same_path(run, expected)
    assert np.any(expected[-1]["outer_var"] == 0) == (kind == "l1"), "the soft threshold must be active"
    path = np.array([step["outer_var"] for step in expected])
    assert np.isin(path, (LOWER, UPPER)).any() == (kind == "diagonal"), "a bound must be active"


def test_zerosarah_of_pnpbo_is_that_of_its_paper():
    """d ← g - g' + (1 - λ) d + λ (g' - Y + M), with Y and M before their update."""
    share, problem = 0.3, cases.quadratic()
    run = cases.trajectory(problem, bilevel.PnPBO(0.1, 2.0, cases.BATCH, mixing=share), STEPS)

    def derivatives(point, draw):
        """Return those of each level on its block, with the parts of D_z first, then D_x and D_v."""
        found = cases.every_kind(run.oracles, point, Rows(draw.inner, draw.outer))
        names = ("inner_grad", "cross", "hvp"), ("outer_grad_outer", "outer_grad")
        return [np.concatenate([np.asarray(found[name]) for name in level]) for level in names]

    for last, state, draw in zip(run.states, run.states[1:], run.draws[1:], strict=False):
        with arithmetic(np.float64):
            new, old = (derivatives(point, draw) for point in (last.point, last.previous))
        tables = [(np.asarray(one.table), np.asarray(one.mean)) for one in last.memory]
        blocks = draw.inner, draw.outer
        parts = [
            g - g_old + share * (g_old - table[block] + mean)
            for g, g_old, (table, mean), block in zip(new, old, tables, blocks, strict=True)
        ]
        total = parts[0] + np.concatenate([np.zeros_like(last.point.inner_var), parts[1]])
        before, found = (
            np.concatenate(list(map(np.asarray, estimate))) for estimate in (last.estimate, state.estimate)
        )
        np.testing.assert_allclose(found, total + (1 - share) * before, rtol=1e-10, atol=1e-13)
