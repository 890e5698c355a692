"""Hypergradients against closed forms, dense Hessians and refitted inner levels."""

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
from tests.problems.networks import network_problem


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


@pytest.mark.parametrize("dtype", ["float64", pytest.param("float32", marks=pytest.mark.slow)])
def test_it_can_be_traced(dtype):
    """Under jit, vmap and grad it is what it is outside, and the gradient of a fit by `implicit`."""
    with arithmetic(dtype):
        problem = cases.logistic_selection(dtype=dtype)
        x = np.linspace(-3.0, -1.0, 4).astype(dtype)
        z = jax.tree.map(lambda leaf: leaf.astype(dtype), problem.exact_solver(x).inner_var)
        point = problem.start._replace(inner_var=z, outer_var=x)
        outside, tolerance = bilevel.hypergradient(problem, point), 1e-8 if dtype == "float64" else 1e-3
        found = jax.jit(lambda point: bilevel.hypergradient(problem, point))(point)
        np.testing.assert_allclose(found.gradient, outside.gradient, rtol=tolerance, atol=tolerance / 100)
        np.testing.assert_allclose(found.v, outside.v, rtol=tolerance, atol=tolerance / 100)
        assert found.gradient.dtype == dtype and found.residual < tolerance and found.products is None
        many = jax.vmap(lambda x: bilevel.hypergradient(problem, point._replace(outer_var=x)).gradient)
        np.testing.assert_allclose(
            many(jnp.stack([x, x - 1]))[0], outside.gradient, rtol=tolerance, atol=tolerance / 100
        )


def test_its_derivative_is_that_of_the_closed_form():
    problem = cases.quadratic()
    with arithmetic(np.float64):
        oracles, start = problem.oracles, problem.start

        def by_matrix(x):
            point = start._replace(outer_var=x)
            hessian = jax.jacobian(lambda z: oracles.inner_grad(point._replace(inner_var=z)))(point.inner_var)
            v = -jnp.linalg.solve(hessian, oracles.outer_grad(point))
            return oracles.direction(point._replace(v=v)).outer_var

        found = jax.jacobian(lambda x: bilevel.hypergradient(problem, start._replace(outer_var=x)).gradient)
        x = jnp.asarray(start.outer_var)
        np.testing.assert_allclose(found(x), jax.jacobian(by_matrix)(x), rtol=1e-7, atol=1e-9)


def test_a_traced_solve_that_fails_gives_nan():
    problem = cases.quadratic()
    with arithmetic(np.float64):
        found = jax.jit(lambda point: bilevel.hypergradient(problem, point, max_products=1))(problem.start)
        found = trees.to_numpy(found._replace(products=0))
    assert np.all(np.isnan(found.gradient)) and not found.residual < 1e-3
    refused = pytest.raises(ValueError, match=r"computes in float64, and 64-bit types are off; set `jax_enable_x64`")
    with refused, arithmetic(np.float32):
        jax.jit(lambda point: bilevel.hypergradient(problem, point))(problem.start)
