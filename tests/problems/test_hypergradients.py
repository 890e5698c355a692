"""Hypergradients against closed forms, dense Hessians and refitted inner levels; and `problem.check`."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import bilevel
from bilevel._core import trees
from bilevel._core.compilation import arithmetic
from tests import cases


def relu(scores):
    return jnp.maximum(scores, 0)


def network_problem(activation=jnp.tanh, second_derivatives=True, width=4, n=30, dtype="float64"):
    rng = np.random.default_rng(3)
    z = {"first": rng.normal(size=(3, width)) / 2, "last": rng.normal(size=width)}
    x = {"log_decay": np.array([-4.0, -3.0]), "shift": np.array(0.3)}

    def score(z, row):
        return activation(row @ z["first"]) @ z["last"]

    def inner_loss(z, x, sample):
        row, target = sample
        decays = jnp.exp(x["log_decay"]) * jnp.stack([jnp.sum(z["first"] ** 2), jnp.sum(z["last"] ** 2)])
        return (score(z, row) - target - x["shift"]) ** 2 / 2 + jnp.sum(decays) / 2

    def outer_loss(z, x, sample):
        row, target = sample
        return (score(z, row) - target) ** 2 / 2

    def rows(n):
        row = rng.normal(size=(n, 3))
        return row, np.sin(row @ np.ones(3))

    given = inner_loss, outer_loss, rows(n), rows(n // 2), z, x
    differentiation = bilevel.Differentiation(second_derivatives=second_derivatives)
    return bilevel.BilevelProblem.from_losses(*given, differentiation=differentiation, dtype=dtype)


def derivatives(problem, level):
    """Of a level at the start, in flat variables: first ones, second ones in z, mixed ones."""
    oracles, point = problem.oracles, problem.start
    with arithmetic("float64"):
        (z, unravel_z), (x, unravel_x) = ravel_pytree(point.inner_var), ravel_pytree(point.outer_var)

        def value(z, x):
            return getattr(oracles, f"{level}_value")(bilevel.Point(unravel_z(z), unravel_x(x), point.v))

        def all_of_them(z, x):
            return (
                jax.grad(value, argnums=(0, 1))(z, x),
                jax.hessian(value)(z, x),
                jax.jacobian(jax.grad(value), 1)(z, x),
            )

        return jax.tree.map(np.asarray, jax.jit(all_of_them)(z, x))


def dense(parts, damping):
    """The gradient at the start, from the whole Hessian of the mean inner loss."""
    (_, hessian, cross), ((grad_z, grad_x), _, _) = parts
    return grad_x + cross.T @ np.linalg.solve(hessian + damping * np.eye(len(hessian)), -grad_z)


def test_the_closed_form_of_a_quadratic():
    problem = cases.quadratic()
    closed = problem.exact_solver(problem.start.outer_var, None)
    point = problem.start._replace(inner_var=closed.inner_var)
    # By a matrix, and by conjugate gradients.
    for one in (problem, replace(problem, exact_solver=None)):
        found = bilevel.hypergradient(one, point)
        np.testing.assert_allclose(found.gradient, closed.hypergrad, rtol=1e-6, atol=1e-9)
        assert found.damping == 0 and found.inner_residual < 1e-10 and found.residual < 1e-8
        np.testing.assert_allclose(found.v, closed.v, rtol=1e-6, atol=1e-9)


def test_the_exact_hypergradient_is_the_slope_of_refitted_values():
    problem = cases.logistic_selection()
    x = np.linspace(-3.0, -1.0, 4)
    point = problem.start._replace(inner_var=problem.exact_solver(x).inner_var, outer_var=x)
    found = bilevel.hypergradient(problem, point)
    values = [[problem.exact_solver(x + s * 1e-4 * e, None).value for s in (1, -1)] for e in np.eye(4)]
    np.testing.assert_allclose(found.gradient, [(up - down) / 2e-4 for up, down in values], rtol=1e-5)


@pytest.fixture(scope="module")
def network():
    problem = network_problem()
    parts = derivatives(problem, "inner"), derivatives(problem, "outer")
    least = np.linalg.eigvalsh(parts[0][1])[0]
    assert least < -0.01, "the inner level is to be non-convex at the start"
    return problem, parts, -least


def test_a_damped_network_matches_its_dense_hessian(network):
    problem, parts, negative = network
    damping = 2 * negative
    expected = dense(parts, damping)
    found = bilevel.hypergradient(problem, damping=damping)
    np.testing.assert_allclose(trees.flat(found.gradient), expected, rtol=1e-6, atol=1e-8)
    assert jax.tree.structure(found.gradient) == jax.tree.structure(problem.start.outer_var)
    assert found.residual < 1e-8 and found.damping == damping and found.inner_residual > 0.01


def test_damping_is_found_where_curvature_is_negative(network):
    problem, parts, negative = network
    found = bilevel.hypergradient(problem)
    assert found.residual <= 1e-10
    assert 0 < found.damping < 10 * negative
    np.testing.assert_allclose(trees.flat(found.gradient), dense(parts, found.damping), rtol=1e-6)


def test_few_products_leave_a_residual_that_is_told(network):
    problem, _, negative = network
    settings = {"damping": 2 * negative, "max_products": 3}
    with pytest.warns(
        RuntimeWarning, match=r"`hypergradient`: the residual is .*above `tolerance=1e-10`.*`max_products`"
    ):
        found = bilevel.hypergradient(problem, **settings)
    assert found.residual > 1e-3 and found.products == 3


def test_gradients_alone_suffice():
    damping = 2.0
    whole, alone = (network_problem(second_derivatives=flag) for flag in (True, False))
    expected = bilevel.hypergradient(whole, damping=damping).gradient
    found = bilevel.hypergradient(alone, damping=damping, tolerance=1e-6)
    np.testing.assert_allclose(trees.flat(found.gradient), trees.flat(expected), rtol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"damping": -1.0}, "`damping=-1.0`: must be a finite number of at least 0"),
        ({"tolerance": 0}, "`tolerance=0`: must be above 0"),
        ({"max_products": 0}, "`max_products=0`"),
        ({"point": 3}, "`point=3`: must be a bilevel.Point"),
        ({"point": bilevel.Point(np.zeros(4), np.zeros(3), None)}, "must have the structure and shapes"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        bilevel.hypergradient(cases.quadratic(), **arguments)


def test_check_passes_networks_with_kinks():
    assert max(network_problem(relu, width=64, n=400).check().values()) < 1e-5


def in_float32(scores):
    return relu(scores.astype(jnp.float32)).astype(scores.dtype)


@pytest.mark.slow
def test_check_passes_networks_with_kinks_that_round_to_float32():
    problem = network_problem(in_float32, width=64, n=400)
    assert 1e-7 < max(problem.check().values()) < 1e-2
    with pytest.raises(ValueError, match=r"differs from finite differences.*`check\(tolerance=…\)` accepts larger"):
        problem.check(tolerance=1e-9)


def test_check_refuses_a_wrong_second_derivative():
    @jax.custom_jvp
    def slope(score):
        return jnp.cos(score)

    slope.defjvps(lambda tangent, _, score: -1.1 * jnp.sin(score) * tangent)

    @jax.custom_jvp
    def sine(score):
        return jnp.sin(score)

    sine.defjvps(lambda tangent, _, score: slope(score) * tangent)
    with pytest.raises(ValueError, match=r"`(hvp|cross)` differs from finite differences"):
        network_problem(sine).check()


def test_a_problem_is_shown_in_one_line():
    shown = "<BilevelProblem 'custom': 30 + 15 rows, z of 16 and x of 3 numbers, float64>"
    assert repr(network_problem()) == shown
