"""Problems with one inner variable per task, against NumPy and against loops written by hand."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import bilevel
from bilevel._core.compilation import arithmetic
from bilevel._core.types import Calls
from bilevel.oracles.tasks import takes_start_key
from bilevel.solvers.tasks import Adapting

RNG = np.random.default_rng(0)
N, ROWS, P = 7, 5, 3
TASKS = {
    "A": RNG.standard_normal((N, ROWS, P)),
    "a": RNG.standard_normal((N, ROWS)),
    "B": RNG.standard_normal((N, ROWS, P)),
    "b": RNG.standard_normal((N, ROWS)),
}
X = RNG.standard_normal(P)
STEP, RATIO, T, STEPS = 0.1, 0.5, 3, 20


def slow(*values):
    """Return parameters of tests that are run with the slow ones."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


SETTINGS = {"step_size": STEP, "outer_ratio": RATIO}


def inner_loss(z, x, task):
    return jnp.mean((task["A"] @ z - task["a"]) ** 2) / 2


def outer_loss(z, x, task):
    return jnp.mean((task["B"] @ z - task["b"]) ** 2) / 2


def penalized_loss(z, x, task):
    return inner_loss(z, x, task) + jnp.exp(x) @ z**2 / 2


def from_x(x, task):
    return x


def restarted(inner=inner_loss, tasks=TASKS, start=from_x, outer_var=X, **options):
    options = {"dtype": "float64", "n_evaluated": N} | options
    return bilevel.BilevelProblem.from_task_losses(inner, outer_loss, tasks, start, outer_var, **options)


def kept(**options):
    return restarted(penalized_loss, start=np.full(P, 0.1), keep=True, **options)


def order_of(problem):
    """Return the tasks in the order of the problem, which shuffles them."""
    return jax.tree.map(np.asarray, problem.oracles.inner_samples.leaves)


def of(tasks, t):
    return {name: leaf[t] for name, leaf in tasks.items()}


def inner_parts(task, x=None):
    """Return Hessian and linear part of the inner loss of a task, with penalties exp(x) if x is given."""
    penalty = 0 if x is None else np.diag(np.exp(x))
    return task["A"].T @ task["A"] / ROWS + penalty, task["A"].T @ task["a"] / ROWS


def outer_grad(task, z):
    return task["B"].T @ (task["B"] @ z - task["b"]) / ROWS


def drawn_tasks(problem, solver, seed=0):
    """Return the places of the tasks of each step."""
    oracles = problem.oracles.with_batches(solver.batch_size, solver.sampling)
    with arithmetic(np.float64):
        key = jax.random.key(seed, impl="threefry2x32")
        return [np.asarray(oracles.places(oracles.draw(key, jnp.int32(i)).inner)) for i in range(STEPS)], oracles


def maml_gradient(task, x):
    """Return the derivative of F(z_T(x)) with z_0 = x, by the product of the Jacobians of the steps."""
    hessian, linear = inner_parts(task)
    z, jacobian = x, np.eye(P)
    for _ in range(T):
        z, jacobian = z - STEP * (hessian @ z - linear), (np.eye(P) - STEP * hessian) @ jacobian
    return jacobian.T @ outer_grad(task, z)


@pytest.mark.parametrize("sampling", ["iid", *slow("full", "reshuffle")])
def test_itd_from_x_is_maml(sampling):
    problem = restarted()
    solver = bilevel.ITD(**SETTINGS, n_inner_steps=T, batch_size=4 if sampling == "iid" else N, sampling=sampling)
    tasks, (places, _) = order_of(problem), drawn_tasks(problem, solver)
    x = X
    for step in range(STEPS):
        x = x - STEP / RATIO * np.mean([maml_gradient(of(tasks, t), x) for t in places[step]], axis=0)
    result = bilevel.run(problem, solver, max_steps=STEPS)
    np.testing.assert_allclose(result.point.outer_var, x, rtol=0, atol=1e-12)
    count = solver.batch_size * STEPS
    due = {"inner_grad": T * count, "hvp": (T - 1) * count, "cross": T * count}
    assert result.calls._asdict() == Calls(**due, outer_grad=count, outer_grad_outer=count)._asdict()


def test_runs_are_evaluated_after_the_inner_steps():
    problem, solver = restarted(), bilevel.ITD(**SETTINGS, n_inner_steps=T, batch_size=N)
    result = bilevel.run(problem, solver, max_steps=3)
    x = result.point.outer_var
    adapted = bilevel.adapt(problem, solver, x, TASKS)
    for t in range(N):
        hessian, linear = inner_parts(of(TASKS, t))
        z = x
        for _ in range(T):
            z = z - STEP * (hessian @ z - linear)
        np.testing.assert_allclose(adapted[t], z, atol=1e-12)
    value = np.mean([outer_loss(adapted[t], x, of(TASKS, t)) for t in range(N)])
    np.testing.assert_allclose(result.history["outer_value"][-1], value, rtol=1e-12)


def test_a_learned_start_of_a_part_is_anil():
    """Adapt only the head of a network; x is the body and the start of the head."""
    x = {"body": RNG.standard_normal((P, 4)), "head": RNG.standard_normal(4)}

    def fit(head, body, rows, targets):
        return jnp.mean((jnp.tanh(rows @ body) @ head - targets) ** 2)

    problem = bilevel.BilevelProblem.from_task_losses(
        lambda head, x, task: fit(head, x["body"], task["A"], task["a"]),
        lambda head, x, task: fit(head, x["body"], task["B"], task["b"]),
        *(TASKS, lambda x, task: x["head"], x),
        dtype="float64",
    )
    adam = optax.adam(0.01)
    solver = bilevel.ITD(**SETTINGS, n_inner_steps=T, sampling="full", batch_size=N, outer_optimizer=adam)
    result = bilevel.run(problem, solver, max_steps=STEPS)

    def by_hand(x, task):
        head = x["head"]
        for _ in range(T):
            head = head - STEP * jax.grad(fit)(head, x["body"], task["A"], task["a"])
        return fit(head, x["body"], task["B"], task["b"])

    with arithmetic(np.float64), jax.numpy_dtype_promotion("standard"):
        state = adam.init(x)
        for _ in range(STEPS):
            gradient = jax.grad(lambda x: jnp.mean(jax.vmap(by_hand, (None, 0))(x, TASKS)))(x)
            updates, state = adam.update(gradient, state, x)
            x = optax.apply_updates(x, updates)
    jax.tree.map(lambda found, due: np.testing.assert_allclose(found, due, atol=1e-10), result.point.outer_var, x)


@pytest.mark.parametrize("checkpoints", [True, *slow(False)])
def test_itd_differentiates_through_adam(checkpoints):
    adam = optax.adam(0.05)
    problem = restarted()
    solver = bilevel.ITD(
        **SETTINGS, n_inner_steps=T, sampling="full", batch_size=N, inner_optimizer=adam, checkpoints=checkpoints
    )
    result = bilevel.run(problem, solver, max_steps=4)

    def by_hand(x, task):
        z, state = x, adam.init(x)
        for _ in range(T):
            updates, state = adam.update(jax.grad(inner_loss)(z, x, task), state, z)
            z = z + updates
        return outer_loss(z, x, task)

    with arithmetic(np.float64), jax.numpy_dtype_promotion("standard"):
        x = jnp.asarray(X)
        for _ in range(4):
            x = x - STEP / RATIO * jax.grad(lambda x: jnp.mean(jax.vmap(by_hand, (None, 0))(x, TASKS)))(x)
    np.testing.assert_allclose(result.point.outer_var, x, atol=1e-12)


def test_aid_cg_with_a_proximal_term_is_imaml():
    strength = 2.0

    def proximal(z, x, task):
        return inner_loss(z, x, task) + strength * jnp.sum((z - x) ** 2) / 2

    problem = restarted(proximal)
    solver = bilevel.AIDCG(**SETTINGS, n_inner_steps=T, n_products=P, sampling="full", batch_size=N)
    result = bilevel.run(problem, solver, max_steps=STEPS)
    x = X
    for _ in range(STEPS):
        total = np.zeros(P)
        for t in range(N):
            hessian, linear = inner_parts(of(TASKS, t))
            z = x
            for _ in range(T):
                z = z - STEP * (hessian @ z - linear + strength * (z - x))
            total += strength * np.linalg.solve(hessian + strength * np.eye(P), outer_grad(of(TASKS, t), z))
        x = x - STEP / RATIO * total / N
    np.testing.assert_allclose(result.point.outer_var, x, atol=1e-9)


@pytest.mark.parametrize("sampling", ["blocks", *slow("iid", "full", "reshuffle")])
def test_soba_keeps_z_and_v_of_each_task(sampling):
    """Seven tasks in blocks of three: the last block is short."""
    problem, solver = kept(), bilevel.SOBA(**SETTINGS, batch_size=3, sampling=sampling)
    tasks = order_of(problem)
    places, oracles = drawn_tasks(problem, solver)
    z, v, x = np.full((N, P), 0.1), np.zeros((N, P)), X
    with arithmetic(np.float64):
        key = jax.random.key(0, impl="threefry2x32")
        shares = [np.asarray(oracles.take(oracles.draw(key, jnp.int32(i)).inner)[1]) for i in range(STEPS)]
    count = 0
    for step in range(STEPS):
        step_size, total, new = STEP / np.sqrt(step + 1), np.zeros(P), {}
        for t, share in zip(places[step], shares[step], strict=True):
            if share == 0:
                continue
            hessian, linear = inner_parts(of(tasks, t), x)
            total += share * np.exp(x) * z[t] * v[t]
            grad = outer_grad(of(tasks, t), z[t])
            new[t] = z[t] - step_size * (hessian @ z[t] - linear), v[t] - step_size * (hessian @ v[t] + grad)
            count += 1
        for t, pair in new.items():
            z[t], v[t] = pair
        x = x - step_size / RATIO * total
    result = bilevel.run(problem, solver, max_steps=STEPS)
    for found, due in zip(result.point, (z, x, v), strict=True):
        np.testing.assert_allclose(found, due, atol=1e-12)
    assert set(result.calls._asdict().values()) == {0, count}
    assert sum(result.calls) == 5 * count
    value = np.mean([outer_loss(z[t], x, of(tasks, t)) for t in range(N)])
    np.testing.assert_allclose(result.history["outer_value"][-1], value, rtol=1e-12)


def test_the_hypergradient_of_kept_variables_is_the_mean_over_tasks():
    problem = kept()
    tasks = order_of(problem)
    z, gradient = np.zeros((N, P)), np.zeros(P)
    for t in range(N):
        hessian, linear = inner_parts(of(tasks, t), X)
        z[t] = np.linalg.solve(hessian, linear)
        v = -np.linalg.solve(hessian, outer_grad(of(tasks, t), z[t]))
        gradient += np.exp(X) * z[t] * v / N
    found = bilevel.hypergradient(problem, bilevel.Point(z, X, z))
    np.testing.assert_allclose(found.gradient, gradient, atol=1e-10)
    assert found.inner_residual < 1e-12


@pytest.mark.slow
def test_starts_may_be_random_and_tasks_may_be_made():
    """A line through the origin with a random slope; x is the mean of the start."""

    def make(key):
        slope, rows = jax.random.normal(key, ()), jnp.linspace(-1, 1, 2 * ROWS)
        return {"A": rows[::2, None], "a": 3 + slope * rows[::2], "B": rows[1::2, None], "b": 3 + slope * rows[1::2]}

    keys = []

    def start(x, task, key):
        keys.append(key)
        return x + 0.1 * jax.random.normal(key, x.shape)

    assert takes_start_key(start)
    problem = restarted(tasks=make, start=start, outer_var=np.zeros(1), n_evaluated=50)
    assert problem.n_inner == 2**16
    solver = bilevel.ITD(step_size=0.5, n_inner_steps=2, batch_size=16)
    first = bilevel.run(problem, solver, max_steps=5)
    again = bilevel.run(problem, solver, max_steps=5)
    other = bilevel.run(problem, solver, max_steps=5, seed=1)
    assert first.point.outer_var == again.point.outer_var != other.point.outer_var
    # The same values in every evaluation at the same x.
    assert first.history["outer_value"][0] == other.history["outer_value"][0]
    assert bilevel.adapt(problem, solver, np.zeros(1)).shape == (50, 1)
    assert np.unique(bilevel.adapt(problem, solver, np.zeros(1))).size == 50


@pytest.mark.parametrize("build", [kept, *slow(restarted)])
def test_runs_on_tasks_resume_bit_for_bit(build, tmp_path):
    solver = bilevel.AIDCG(**SETTINGS, batch_size=3)
    whole = bilevel.run(build(), solver, max_steps=30)
    bilevel.run(build(), solver, max_steps=12).save(tmp_path / "run.npz")
    resumed = bilevel.resume(tmp_path / "run.npz", build(), max_steps=30)
    for found, due in zip(jax.tree.leaves(resumed.state), jax.tree.leaves(whole.state), strict=True):
        np.testing.assert_array_equal(found, due)
    other = restarted(start=lambda x, task: 2 * x) if build is restarted else kept(seed=1)
    with pytest.raises(ValueError, match=r"losses differ|another problem"):
        bilevel.resume(tmp_path / "run.npz", other, max_steps=30)


@pytest.mark.parametrize("build", [restarted, *slow(kept)])
def test_settings_of_a_sweep_equal_their_single_runs(build):
    from bilevel.engine.driver import sweep

    solvers = [bilevel.ITD(step_size=step, batch_size=3, n_inner_steps=2) for step in (0.05, 0.1)]
    [cells] = sweep(build(), solvers, [0], max_calls=2000)
    for solver, cell in zip(solvers, cells, strict=True):
        alone = bilevel.run(build(), solver, max_calls=2000)
        np.testing.assert_allclose(cell.rows[-1]["outer_value"], alone.history["outer_value"][-1], rtol=1e-10)


def test_an_optimizer_of_z_has_a_state_for_each_task():
    result = bilevel.run(kept(), bilevel.StocBiO(**SETTINGS, batch_size=3, inner_optimizer="adam"), max_steps=10)
    [count] = [leaf for leaf in jax.tree.leaves(result.state.moves.inner) if leaf.dtype == np.int32]
    assert count.shape == (N,)
    assert len(set(np.asarray(count).tolist())) > 1, "tasks were drawn different numbers of times"


def test_derivatives_of_tasks_are_checked():
    assert max(restarted().check().values()) < 1e-6

    @jax.custom_jvp
    def wrong(z):
        return jnp.sum(z**2)

    wrong.defjvp(lambda primals, tangents: (wrong(*primals), jnp.sum(tangents[0])))
    with pytest.raises(ValueError, match="differs from finite differences"):
        restarted(lambda z, x, task: wrong(z)).check()


@pytest.mark.parametrize(
    ("solver", "reason"),
    [
        (bilevel.SRBA(batch_size=3), "sums over all rows"),
        (bilevel.HOAG(), "sums over all rows"),
        (bilevel.AutoSRBA(), "sums over all rows"),
        (bilevel.FSLA(batch_size=3), "each batch has other tasks"),
        (bilevel.ForwardMode(batch_size=3), "is not an average over tasks"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_solvers_that_do_not_fit_tasks_are_refused(solver, reason):
    with pytest.raises(ValueError, match=rf"`{type(solver).__name__}`: .*{reason}.*; use a solver such as SOBA"):
        bilevel.run(kept(), solver, max_steps=1)


def test_what_cannot_be_a_task_problem_is_refused():
    with pytest.raises(ValueError, match=r"`SOBA`: inner variables are restarted .* keep inner variables with `keep"):
        bilevel.run(restarted(), bilevel.SOBA(batch_size=3), max_steps=1)
    with pytest.raises(ValueError, match="`keep=True`: tasks from a function are new each time"):
        restarted(tasks=lambda key: TASKS, keep=True)
    with pytest.raises(ValueError, match=r"`inner_loss`: must be a function of one inner variable"):
        restarted(bilevel.BatchLoss(inner_loss))
    with pytest.raises(ValueError, match="`inner_loss` failed on one sample"):
        restarted(lambda z, x, task: task["C"])
    with pytest.raises(ValueError, match="`inner_start` returned an array of int"):
        restarted(start=lambda x, task: jnp.zeros(P, int))
    with pytest.raises(ValueError, match="`tasks`: leaves have"):
        restarted(tasks=TASKS | {"a": TASKS["a"][1:]})
    with pytest.raises(ValueError, match="`sharded`: problems of tasks"):
        restarted().sharded()
    with pytest.raises(ValueError, match="`adapt`: the problem has no inner variables that are restarted"):
        bilevel.adapt(kept(), bilevel.ITD(), X)
    with pytest.raises(ValueError, match=r"`adapt\(solver=SOBA\(…\)\)`: must be a solver that restarts"):
        bilevel.adapt(restarted(), bilevel.SOBA(), X)
    assert isinstance(bilevel.ITD(), Adapting) and not isinstance(bilevel.SOBA(), Adapting)
    assert replace(restarted(), name="meta").name == "meta"
