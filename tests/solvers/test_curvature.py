"""Negative curvature at the start: seen by a few products as by all eigenvalues, and answered by "auto"."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevel
from bilevel._precision import arithmetic
from bilevel.solvers.curvature import has_negative_curvature
from bilevel.solvers.preconditioning import metric_norm
from tests import cases
from tests.solvers.test_networks import problems


def with_curvatures(curvatures, dtype="float64", seed=0):
    """Inner losses whose mean is a quadratic with these eigenvalues."""
    size, rng = len(curvatures), np.random.default_rng(seed)
    basis = np.linalg.qr(rng.standard_normal((size, size)))[0]
    hessian = (basis * curvatures) @ basis.T

    def inner_loss(z, x, row):
        return z @ hessian.astype(dtype) @ z / 2 + row @ z + x @ x

    rows = rng.standard_normal((6, size))
    build = bilevel.BilevelProblem.from_losses
    return build(inner_loss, inner_loss, rows, rows, np.zeros(size), np.zeros(2), dtype=dtype), hessian


def seen(problem, dtype="float64"):
    with arithmetic(dtype):
        return has_negative_curvature(problem.oracles, problem.start)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", [1, 3, 12, 60])
def test_negative_curvature_is_seen_and_none_is_made_up(size, dtype):
    positive = np.geomspace(1e-4, 1, size)
    assert not seen(with_curvatures(positive, dtype)[0], dtype)
    assert not seen(with_curvatures(np.where(positive < 1e-2, 0, positive), dtype)[0], dtype)
    for least in (-2.0, -0.1):
        assert seen(with_curvatures(np.append(least, positive[1:]), dtype)[0], dtype)


def test_no_curvature_at_all_is_not_negative():
    assert not seen(with_curvatures(np.zeros(3))[0])


def test_products_that_are_not_finite_tell_nothing():
    assert not seen(with_curvatures(np.array([np.nan, 1.0]))[0])


def test_the_norm_is_that_of_frobenius_on_average_and_never_below_the_largest_curvature_by_much():
    problem, hessian = with_curvatures(np.array([-1.0, 0.5, 2.0, 4.0]))
    with arithmetic("float64"):
        found = np.array([metric_norm(problem.oracles, problem.start, index) for index in range(400)])
    squares, wanted = found**2, np.sum(hessian**2)
    assert abs(squares.mean() - wanted) < 4 * squares.std() / 20 and squares.std() > 0


def test_a_network_gets_adam_and_one_number_for_a_metric_and_a_convex_loss_the_low_rank():
    network, _ = problems()
    solver = bilevel.SRBA("auto", batch_size=cases.BATCH)
    run = bilevel.Run(network, solver, exact=False)
    chosen = run.solver
    assert (chosen.step_size, chosen.preconditioner, chosen.inner_optimizer) == (0.1, "norm", "adam")
    assert (chosen.outer_optimizer, chosen.least_progress) == ("adam", None)
    run.advance(3)
    assert all(np.shape(leaf) == () for leaf in jax.tree.leaves(run.state.preconditioning.diagonal))
    convex, _ = with_curvatures(np.array([0.5, 1.0]))
    assert bilevel.Run(convex, bilevel.SRBA("auto", batch_size=3), exact=False).solver.preconditioner == "low_rank"


def test_what_is_chosen_by_hand_is_not_looked_at(monkeypatch):
    def fail(*_):
        raise AssertionError("looked")

    monkeypatch.setattr("bilevel.solvers.srba.has_negative_curvature", fail)
    network, _ = problems()
    for solver in (bilevel.SRBA(0.1), bilevel.SRBA("auto", preconditioner="diagonal"), bilevel.SOBA()):
        assert solver.fit_start(network.oracles, network.start) == solver
    claimed = cases.logistic_selection()
    bilevel.Run(claimed, bilevel.SRBA("auto", batch_size=cases.BATCH), exact=False)
    with pytest.raises(AssertionError, match="looked"):
        bilevel.SRBA("auto").fit_start(network.oracles, network.start)


def test_auto_trains_a_network_without_a_rollback_or_a_warning():
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((64, 3))
    data = rows, np.sin(rows.sum(axis=1))

    def outer_loss(z, x, sample):
        return (jnp.tanh(sample[0] @ z["in"]) @ z["out"] - sample[1]) ** 2 / 2

    def inner_loss(z, x, sample):
        return outer_loss(z, x, sample) + sum(jnp.exp(x[name]) * jnp.sum(z[name] ** 2) for name in z) / 2

    start = {"in": rng.standard_normal((3, 8)) / 2, "out": rng.standard_normal(8) / 2}
    logs = {name: np.array(-4.0) for name in start}
    problem = bilevel.BilevelProblem.from_losses(inner_loss, outer_loss, data, data, start, logs, dtype="float32")
    history = bilevel.run(problem, bilevel.SRBA("auto", batch_size=16), max_steps=1500, eval_every=1500).history
    assert history["outer_value"][-1] < history["outer_value"][0] / 2 and history["rollbacks"][-1] == 0
