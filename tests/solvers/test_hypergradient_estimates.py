"""The hypergradients of AID-CG against dense solves, and against the bound of conjugate gradients."""

import jax.numpy as jnp
import numpy as np
import pytest

import bilevel
from bilevel._core.compilation import arithmetic
from bilevel._core.conjugate_gradients import conjugate_gradients
from tests import cases
from tests.transcription.aid_cg import solve_by_cg


def exact_point(problem, seed=5):
    """Return a point with the exact z and v at a random x."""
    x = 0.5 * np.random.default_rng(seed).standard_normal(problem.start.outer_var.shape)
    found = problem.exact_solver(x)
    return bilevel.Point(*(np.asarray(part) for part in (found.inner_var, x, found.v)))


def hessian_of(problem, point):
    """Return the dense matrix of the inner level, by products with the unit vectors."""
    units = np.eye(point.inner_var.size)
    return np.stack([np.asarray(problem.oracles.hvp(point._replace(v=unit))) for unit in units])


def solve_v(problem, point, **settings):
    with arithmetic("float64"):
        grad = problem.oracles.outer_grad(point)
        return np.asarray(bilevel.AIDCG(**settings).solve(problem.oracles, point, grad, None))


@pytest.mark.parametrize("name", cases.PROBLEMS)
@pytest.mark.parametrize("warm", [False, True])
def test_conjugate_gradients_with_one_product_per_coordinate_solve_the_system(name, warm):
    problem = cases.PROBLEMS[name]()
    point = exact_point(problem)
    first = point._replace(v=np.linspace(-1, 1, point.v.size))
    found = solve_v(problem, first, n_products=point.v.size, warm_start_v=warm)
    np.testing.assert_allclose(found, point.v, rtol=1e-8)


@pytest.mark.parametrize("warm", [False, True])
def test_the_error_of_v_is_below_the_bound_of_conjugate_gradients(warm):
    problem = cases.quadratic(dim_inner=25, n_inner=400)
    point = exact_point(problem)
    with arithmetic("float64"):
        curvatures = np.linalg.eigvalsh(hessian_of(problem, point))
    root = np.sqrt(curvatures[-1] / curvatures[0])
    first = point._replace(v=10 * np.cos(np.arange(25.0)))
    distance = np.linalg.norm((first.v if warm else 0) - point.v)
    bounds = [2 * root * ((root - 1) / (root + 1)) ** n * distance for n in (3, 8, 12)]
    found = [solve_v(problem, first, n_products=n, warm_start_v=warm) for n in (3, 8, 12)]
    errors = [np.linalg.norm(v - point.v) for v in found]
    assert all(0 < error <= bound for error, bound in zip(errors, bounds, strict=True)), (errors, bounds)
    assert bounds[-1] < distance / 10, "the bound is not informative"


def test_the_error_of_v_with_damping_is_that_of_the_damped_matrix():
    problem = cases.quadratic()
    point = exact_point(problem)
    with arithmetic("float64"):
        matrix, grad = hessian_of(problem, point), np.asarray(problem.oracles.outer_grad(point))
    expected = -np.linalg.solve(matrix + 0.7 * np.eye(5), grad)
    np.testing.assert_allclose(solve_v(problem, point, n_products=5, damping=0.7), expected, rtol=1e-8)


@pytest.mark.parametrize(
    ("curvatures", "products", "moves"), [((3.0, 2.0, -1.0), 1, True), ((1.0, -5.0, -2.0), 0, False)]
)
def test_v_is_kept_once_the_curvature_is_not_positive(curvatures, products, moves):
    matrix, right = np.diag(curvatures), np.array([1.0, 0.5, 0.3])
    with arithmetic("float64"):
        found, limited = (
            np.asarray(conjugate_gradients(lambda s: jnp.asarray(matrix) @ s, right, 0.0, times).solution)
            for times in (8, products)
        )
    np.testing.assert_array_equal(found, limited)
    np.testing.assert_allclose(found, solve_by_cg(lambda s: matrix @ s, right, None, 8, 0.0), rtol=1e-12)
    assert bool(np.any(found)) == moves


@pytest.mark.parametrize("times", [1, 20])
def test_conjugate_gradients_of_a_zero_system_return_zero(times):
    with arithmetic("float32"):
        zero = jnp.zeros(3, jnp.float32)
        np.testing.assert_array_equal(conjugate_gradients(lambda s: s, zero, 0.0, times).solution, 0)


@pytest.mark.slow
def test_aid_cg_with_few_products_converges_if_v_is_warm_and_is_biased_if_it_is_cold():
    problem = bilevel.problems.quadratic(512, 256, 8, 4, common_linear=0.5, dtype="float64")

    def final(n_products, warm):
        solver = bilevel.AIDCG(0.5, 0.5, n_products=n_products, warm_start_v=warm, sampling="full")
        return bilevel.run(problem, solver, max_steps=400, eval_every=400).history["hypergrad_norm_sq"][-1]

    assert final(8, False) < 1e-20 and final(2, True) < 1e-20
    assert final(2, False) > 1e-6


@pytest.mark.slow
def test_small_batches_bias_aid_cg_and_more_so_with_more_products():
    problem = bilevel.problems.quadratic(512, 256, 8, 4, common_linear=0.5, dtype="float64")

    def final(batch_size, n_products):
        solver = bilevel.AIDCG(0.3, 3.0, batch_size, n_products=n_products)
        history = bilevel.run(problem, solver, max_steps=5000, eval_every=500).history
        return np.median(history["hypergrad_norm_sq"][-4:])

    small = final(16, 10)
    assert small > 30 * final(128, 10) and small > 3 * final(16, 2)


N_TASKS = 2


def sigmoid(t):
    return 1 / (1 + np.exp(-t))


def task_rows(n, seed):
    """Return rows and labels with one example of each task per row."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((n, N_TASKS, 3))
    return rows, np.where(rows @ np.ones(3) + rng.logistic(size=(n, N_TASKS)) > 0, 1.0, -1.0)


def gradient(z, rows, labels):
    return rows.T @ (-labels * sigmoid(-labels * (rows @ z))) / len(rows)


def test_aid_cg_on_the_proximal_loss_is_imaml():
    """The inner steps start at z = x, since the variable of the inner level is z - x."""
    strength, step_size, outer_step, times = 0.8, 0.3, 0.5, 4
    train, validation = task_rows(12, 0), task_rows(9, 1)

    def losses(weights, sample):
        rows, labels = sample
        return jnp.logaddexp(0.0, -labels * jnp.sum(rows * weights, axis=1))

    def inner_loss(shifts, meta, sample):
        return jnp.sum(losses(meta + shifts, sample)) + strength / 2 * jnp.sum(shifts**2)

    def outer_loss(shifts, meta, sample):
        return jnp.mean(losses(meta + shifts, sample))

    start = np.array([0.5, -0.2, 0.1])
    data = train, validation, np.zeros((N_TASKS, 3)), start
    problem = bilevel.BilevelProblem.from_losses(inner_loss, outer_loss, *data, dtype="float64")
    settings = {"n_inner_steps": times, "n_products": 3 * N_TASKS, "warm_start": False, "sampling": "full"}
    solver = bilevel.AIDCG(step_size, step_size / outer_step, **settings)
    found = bilevel.run(problem, solver, max_steps=3).point

    meta = start
    for _ in range(3):
        shifts, hypergradients = [], []
        for task in range(N_TASKS):
            z = meta
            rows, labels = (part[:, task] for part in train)
            for _ in range(times):
                z = z - step_size * (gradient(z, rows, labels) + strength * (z - meta))
            s = sigmoid(labels * (rows @ z))
            hessian = rows.T @ ((s * (1 - s))[:, None] * rows) / len(rows)
            slope = gradient(z, *(part[:, task] for part in validation))
            shifts.append(z - meta)
            hypergradients.append(np.linalg.solve(np.eye(3) + hessian / strength, slope))
        meta = meta - outer_step * np.mean(hypergradients, axis=0)
    np.testing.assert_allclose(found.outer_var, meta, rtol=1e-8)
    np.testing.assert_allclose(found.inner_var, shifts, rtol=1e-8)
