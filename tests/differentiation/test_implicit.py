"""Implicit differentiation, against closed forms and finite differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import bilevel
from bilevel._core.compilation import arithmetic
from bilevel.differentiation.implicit import LINEAR_SOLVERS
from bilevel.differentiation.linear import solve_linear

RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((12, 4)), RNG.standard_normal(12)
SYSTEM = RNG.standard_normal((4, 4)) / 6  # not symmetric, and a contraction
PENALTIES = np.array([0.5, 1.0, 2.0, 0.1])


@pytest.fixture(autouse=True)
def in_float64():
    with arithmetic(np.float64):
        yield


def ridge_gradient(w, penalties, X, y):
    return X.T @ (X @ w - y) + penalties * w


def ridge(penalties, X, y):
    return jnp.linalg.solve(X.T @ X + jnp.diag(penalties), X.T @ y)


def ridge_by_steps(penalties, X, y, start=None, n_steps=4000):
    """Solve by a loop, which has no derivative in reverse mode."""

    def step(_, w):
        return w - 0.02 * ridge_gradient(w, penalties, X, y)

    return jax.lax.while_loop(lambda s: s[0] < n_steps, lambda s: (s[0] + 1, step(*s)), (0, jnp.zeros(4)))[1]


def loss_of(solver):
    return lambda *arguments: jnp.sum(jnp.sin(solver(*arguments)))


SOLVED = bilevel.implicit(ridge_by_steps, residual=ridge_gradient)
ARGUMENTS = PENALTIES, X, Y


def assert_close(found, expected, rtol=1e-9):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol), found, expected)


@pytest.mark.parametrize("wrap", [pytest.param(lambda f: f, marks=pytest.mark.slow, id="eager"), jax.jit])
@pytest.mark.parametrize("method", [None, "dense", "cg", "gmres", "bicgstab"])
def test_the_gradient_with_respect_to_every_argument_is_that_of_the_closed_form(method, wrap):
    solved = bilevel.implicit(ridge_by_steps, residual=ridge_gradient, linear_solver=method, tolerance=1e-9)
    found = wrap(jax.grad(loss_of(solved), argnums=(0, 1, 2)))(*ARGUMENTS)
    assert_close(found, jax.grad(loss_of(ridge), argnums=(0, 1, 2))(*ARGUMENTS), rtol=1e-8)


@pytest.mark.parametrize("method", LINEAR_SOLVERS)
def test_a_fixed_point_is_differentiated_by_every_linear_solver(method):
    def fixed_point(z, theta):
        return jnp.tanh(SYSTEM @ z + theta)

    def iterate(theta):
        return jax.lax.while_loop(lambda s: s[0] < 200, lambda s: (s[0] + 1, fixed_point(s[1], theta)), (0, theta))[1]

    def unrolled(theta):
        return jax.lax.fori_loop(0, 200, lambda _, z: fixed_point(z, theta), theta)

    theta = jnp.asarray(RNG.standard_normal(4))
    solved = bilevel.implicit(iterate, fixed_point=fixed_point, linear_solver=method)
    if method == "cg":  # the matrix is not symmetric
        assert np.all(np.isnan(jax.jacrev(solved)(theta)))
    else:
        expected = jax.jacfwd(unrolled)(theta)
        assert_close(jax.jacrev(solved)(theta), expected, rtol=1e-7)
        assert_close(jax.jacfwd(solved)(theta), expected, rtol=1e-7)


@pytest.mark.parametrize("is_symmetric", [True, False])
def test_a_system_too_large_for_a_matrix_is_solved_whatever_its_form(is_symmetric):
    size = 300
    matrix = RNG.standard_normal((size, size)) / 20
    matrix = np.eye(size) + (matrix @ matrix.T if is_symmetric else matrix)

    def solver(theta):
        return jnp.linalg.solve(matrix, theta)

    theta = jnp.asarray(RNG.standard_normal(size))
    solved = bilevel.implicit(solver, residual=lambda z, theta: matrix @ z - theta)
    assert_close(jax.grad(loss_of(solved))(theta), jax.grad(loss_of(solver))(theta), rtol=1e-7)


@pytest.mark.slow
def test_derivatives_of_higher_order_equal_those_of_the_closed_form():
    for transform in (jax.hessian, lambda f: jax.jacrev(jax.grad(f)), lambda f: jax.grad(lambda p: jax.grad(f)(p)[0])):
        found = transform(lambda p: loss_of(SOLVED)(p, X, Y))(PENALTIES)
        assert_close(found, transform(lambda p: loss_of(ridge)(p, X, Y))(PENALTIES), rtol=1e-7)
    check_grads(lambda p: SOLVED(p, X, Y), (PENALTIES,), order=2, modes=["fwd", "rev"], atol=1e-4, rtol=1e-4)


def test_the_hessian_is_that_of_the_closed_form():
    found = jax.jit(jax.hessian(lambda p: loss_of(SOLVED)(p, X, Y)))(PENALTIES)
    assert_close(found, jax.hessian(lambda p: loss_of(ridge)(p, X, Y))(PENALTIES), rtol=1e-7)


def test_it_can_be_batched_and_put_into_loops():
    many = jnp.stack([PENALTIES, 2 * PENALTIES, 3 * PENALTIES])

    def slope(solver):
        return jax.grad(lambda p: loss_of(solver)(p, X, Y))

    expected = jnp.stack([slope(ridge)(one) for one in many])
    assert_close(jax.jit(jax.vmap(slope(SOLVED)))(many), expected)
    assert_close(jax.lax.map(slope(SOLVED), many), expected)

    def descend(solver):
        def step(p, _):
            value, grad = jax.value_and_grad(lambda p: loss_of(solver)(p, X, Y))(p)
            return p - 0.1 * grad, value

        return jax.lax.scan(step, PENALTIES, None, length=5)

    assert_close(descend(SOLVED), descend(ridge))


def test_trees_auxiliary_output_and_integers_are_carried_along():
    def residual(z, theta, rows):
        error = X[rows] @ z["w"] + z["b"] - Y[rows]
        return {"w": X[rows].T @ error + theta["w"] * z["w"], "b": error.sum() + theta["b"] * z["b"]}

    def solver(theta, rows):
        table = jnp.concatenate([X[rows], jnp.ones((len(rows), 1))], 1)
        matrix = table.T @ table + jnp.diag(jnp.append(theta["w"], theta["b"]))
        w = jnp.linalg.solve(matrix, table.T @ Y[rows])
        return {"w": w[:4], "b": w[4]}, {"n": rows.size, "sum": w.sum(), "name": jnp.int32(3)}

    theta, rows = {"w": jnp.asarray(PENALTIES), "b": jnp.asarray(0.3)}, np.arange(0, 12, 2)
    solved = bilevel.implicit(solver, residual=residual, has_aux=True)

    def value(run):
        def of(theta):
            z, aux = run(theta, rows)
            return jnp.sum(z["w"] ** 2) + z["b"], aux

        return jax.grad(of, has_aux=True)

    (found, aux), (expected, _) = value(solved)(theta), value(solver)(theta)
    assert_close(found, expected)
    assert int(aux["n"]) == 6 and aux["name"] == 3
    assert_close(jax.grad(lambda theta: solved(theta, rows)[1]["sum"])(theta)["w"], np.zeros(4))


def test_keyword_arguments_are_for_the_solver_alone():
    calls = []

    def solver(penalties, *, start, n_steps):
        calls.append(type(n_steps))
        return jax.lax.fori_loop(0, n_steps, lambda _, w: w - 0.02 * ridge_gradient(w, penalties, X, Y), start)

    solved = bilevel.implicit(solver, residual=lambda w, penalties: ridge_gradient(w, penalties, X, Y))

    def loss(penalties, start):
        return jnp.sum(solved(penalties, start=start, n_steps=3000) ** 2)

    found = jax.jit(jax.grad(loss, argnums=(0, 1)))(PENALTIES, jnp.ones(4))
    assert_close(found[0], jax.grad(lambda p: jnp.sum(ridge(p, X, Y) ** 2))(PENALTIES))
    assert_close(found[1], np.zeros(4))
    assert set(calls) == {int}
    starts = jnp.ones((2, 4))
    assert_close(jax.vmap(jax.grad(loss), in_axes=(None, 0))(PENALTIES, starts), jnp.stack([found[0]] * 2))


def test_values_of_an_enclosing_function_are_differentiated():
    def slope_of(solver):
        def loss(scale, penalties):
            solved = solver(scale)
            return jnp.sum(jnp.sin(solved(penalties)))

        return jax.grad(loss, argnums=(0, 1))

    def by_rule(scale):
        return bilevel.implicit(
            lambda penalties: ridge_by_steps(penalties, scale * X, Y),
            residual=lambda w, penalties: ridge_gradient(w, penalties, scale * X, Y),
        )

    def in_closed_form(scale):
        return lambda penalties: ridge(penalties, scale * X, Y)

    scales = jnp.array([0.7, 0.9])
    for transform in (lambda f: jax.vmap(f, in_axes=(0, None)), lambda f: jax.jit(lambda s, p: f(s[0], p))):
        found, expected = (transform(slope_of(solver))(scales, PENALTIES) for solver in (by_rule, in_closed_form))
        assert_close(found, expected)
    found, expected = (jax.grad(lambda s, f=f: slope_of(f)(s, PENALTIES)[0])(0.8) for f in (by_rule, in_closed_form))
    assert_close(found, expected, rtol=1e-8)


def test_a_solver_in_numpy_is_differentiated():
    solved = bilevel.implicit(
        lambda penalties: np.linalg.solve(X.T @ X + np.diag(penalties), X.T @ Y),
        residual=lambda w, penalties: ridge_gradient(w, penalties, X, Y),
    )
    assert_close(jax.grad(loss_of(solved))(PENALTIES), jax.grad(lambda p: loss_of(ridge)(p, X, Y))(PENALTIES))


def test_the_solver_runs_once_for_a_gradient():
    runs = []

    def solver(penalties):
        jax.debug.callback(lambda: runs.append(1))
        return ridge(penalties, X, Y)

    solved = bilevel.implicit(solver, residual=lambda w, penalties: ridge_gradient(w, penalties, X, Y))
    jax.block_until_ready(jax.jit(jax.value_and_grad(loss_of(solved)))(PENALTIES))
    jax.effects_barrier()
    assert len(runs) == 1


# Failures are seen.


@pytest.mark.parametrize(
    "transform",
    ["grad", "jit", *(pytest.param(name, marks=pytest.mark.slow) for name in ("vmap", "jvp", "grad of grad", "scan"))],
)
def test_a_solver_that_fails_has_derivatives_that_are_nan(transform):
    failing = bilevel.implicit(lambda *a: ridge(*a) + 0.1, residual=ridge_gradient)

    def loss(penalties):
        return loss_of(failing)(penalties, X, Y)

    found = {
        "grad": lambda: jax.grad(loss)(PENALTIES),
        "jit": lambda: jax.jit(jax.grad(loss))(PENALTIES),
        "vmap": lambda: jax.vmap(jax.grad(loss))(jnp.stack([PENALTIES] * 2)),
        "jvp": lambda: jax.jvp(loss, (PENALTIES,), (np.ones(4),))[1],
        "grad of grad": lambda: jax.hessian(loss)(PENALTIES),
        "scan": lambda: jax.lax.scan(lambda p, _: (p - jax.grad(loss)(p), None), PENALTIES, None, length=2)[0],
    }[transform]()
    assert np.all(np.isnan(found))
    assert np.all(np.isfinite(failing(*ARGUMENTS))), "the value itself is unchanged"


def test_a_failure_is_raised_or_returned_if_that_is_chosen():
    def wrong(*arguments):
        return ridge(*arguments) + 0.1

    raising = bilevel.implicit(wrong, residual=ridge_gradient, on_failure="raise")
    with pytest.raises(RuntimeError, match="does not solve the equations"):
        raising(*ARGUMENTS)
    with pytest.raises(RuntimeError, match="does not solve the equations"):
        jax.grad(loss_of(raising))(*ARGUMENTS)
    assert np.all(np.isnan(jax.jit(jax.grad(loss_of(raising)))(*ARGUMENTS)))
    right = bilevel.implicit(ridge, residual=ridge_gradient, on_failure="raise")
    assert_close(jax.grad(loss_of(right))(*ARGUMENTS), jax.grad(loss_of(SOLVED))(*ARGUMENTS))
    for solver, expected in ((wrong, False), (ridge, True)):
        flagged = bilevel.implicit(solver, residual=ridge_gradient, on_failure="flag")
        z, ok = jax.jit(flagged)(*ARGUMENTS)
        assert bool(ok) is expected
        assert_close(z, solver(*ARGUMENTS))


def test_a_linear_system_without_a_solution_gives_nan():
    def residual(z, theta):
        return jnp.array([z[0] - theta, 0.0 * z[1]])

    for method in ("dense", "gmres", "cg"):
        solved = bilevel.implicit(
            lambda theta: jnp.stack([theta, theta]), residual=residual, linear_solver=method, max_products=40
        )
        slope = jax.grad(lambda theta, solved=solved: solved(theta)[1])(1.0)
        assert np.isnan(slope), method


@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e100])
def test_what_counts_as_a_solution_does_not_depend_on_the_scale_of_the_equations(scale):
    def residual(w, penalties):
        return scale * ridge_gradient(w, penalties, 1e-2 * X, Y)

    for solver, expected in ((lambda p: jnp.zeros(4), False), (lambda p: ridge(p, 1e-2 * X, Y), True)):
        flagged = bilevel.implicit(solver, residual=residual, on_failure="flag")
        assert bool(flagged(PENALTIES)[1]) is expected
        slope = jax.grad(lambda p, flagged=flagged: jnp.sum(flagged(p)[0]))(PENALTIES)
        assert bool(np.isfinite(slope).all()) is expected


@pytest.mark.parametrize("n_steps", [12, 400, pytest.param(40, marks=pytest.mark.slow)])
def test_a_solver_that_diverges_has_no_derivatives(n_steps):
    with arithmetic(np.float32):
        curvatures = np.array([1, 10, 100], np.float32)

        def solver(theta):  # ends at 1e18, 1e63, which is infinite, or NaN
            return jax.lax.fori_loop(0, n_steps, lambda _, z: z - 0.5 * (curvatures * z - theta), theta)

        flagged = bilevel.implicit(solver, residual=lambda z, theta: curvatures * z - theta, on_failure="flag")
        theta = np.ones(3, np.float32)
        assert not flagged(theta)[1]
        assert np.all(np.isnan(jax.grad(lambda theta: jnp.sum(flagged(theta)[0]))(theta)))


@pytest.mark.parametrize(
    "method", ["gmres", *(pytest.param(name, marks=pytest.mark.slow) for name in ("cg", "bicgstab", "dense"))]
)
def test_systems_of_condition_1000_are_solved_in_single_precision(method):
    rotation = np.linalg.qr(np.random.default_rng(2).standard_normal((20, 20)))[0]
    matrix = rotation @ np.diag(np.logspace(-3, 0, 20)) @ rotation.T
    exact = np.linalg.solve(matrix.T, np.ones(20))
    with arithmetic(np.float32):
        low = np.asarray(matrix, np.float32)
        solved = bilevel.implicit(
            lambda theta: np.asarray(np.linalg.solve(matrix, theta), np.float32),
            residual=lambda z, theta: low @ z - theta,
            linear_solver=method,
        )
        theta = np.ones(20, np.float32)
        found = jax.grad(lambda theta: jnp.sum(solved(theta)))(theta)
    assert np.linalg.norm(np.asarray(found) - exact) < 0.005 * np.linalg.norm(exact)


@pytest.mark.parametrize("dtypes", [(jnp.bfloat16, jnp.bfloat16), (np.float32, np.float64)])
def test_leaves_of_low_and_of_different_precision_are_solved_for_together(dtypes):
    def residual(z, theta):
        first, second = z
        return (3 * first - theta).astype(dtypes[0]), 2.0 * second - jnp.asarray(first, dtypes[1])

    def solver(theta):
        first = (theta / 3).astype(dtypes[0])
        return first, (jnp.asarray(first, dtypes[1]) / 2).astype(dtypes[1])

    solved = bilevel.implicit(solver, residual=residual, residual_tolerance=0.05)
    with jax.numpy_dtype_promotion("standard"):
        theta = jnp.asarray(1.5, dtypes[0])
        (first, second), z = jax.jacobian(solved)(theta), solved(theta)
    assert [leaf.dtype for leaf in z] == list(map(np.dtype, dtypes))
    np.testing.assert_allclose([float(first), float(second)], [1 / 3, 1 / 6], rtol=1e-2)


def test_conjugate_gradients_are_tried_only_on_systems_that_seem_to_be_symmetric():
    size, products = 300, []
    matrix = np.eye(size) + RNG.standard_normal((size, size)) / (4 * np.sqrt(size))

    def multiply(vector):
        jax.debug.callback(lambda: products.append(1))
        return matrix @ vector

    right = jnp.asarray(RNG.standard_normal(size))
    found = solve_linear("cg or gmres", multiply, right, 1e-8, 1000)
    jax.effects_barrier()
    assert_close(found, np.linalg.solve(matrix, right), rtol=1e-7)
    assert len(products) < 200, "conjugate gradients would have taken all 1000"


def test_single_precision_is_kept():
    with arithmetic(np.float32):
        arguments = [np.asarray(one, np.float32) for one in ARGUMENTS]
        found = jax.jit(jax.grad(loss_of(bilevel.implicit(ridge, residual=ridge_gradient))))(*arguments)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, jax.grad(loss_of(ridge))(*arguments), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give either `residual`"),
        ({"residual": ridge_gradient, "fixed_point": ridge_gradient}, "give either `residual`"),
        ({"residual": ridge_gradient, "linear_solver": "lu"}, "`linear_solver='lu'`: must be one of 'dense', 'cg'"),
        ({"residual": ridge_gradient, "linear_solver": "neumann"}, "requires `fixed_point`"),
        ({"residual": ridge_gradient, "on_failure": "warn"}, "`on_failure='warn'`: must be one of"),
        ({"residual": ridge_gradient, "tolerance": 0.0}, "`tolerance=0.0`: must be above 0"),
        ({"residual": ridge_gradient, "max_products": 0}, "`max_products=0`"),
    ],
)
def test_wrong_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        bilevel.implicit(ridge, **options)


def test_what_the_functions_return_is_checked():
    with pytest.raises(TypeError, match="`residual=3`: must be a function"):
        bilevel.implicit(ridge, residual=3)
    with pytest.raises(ValueError, match="`solver` must return real numbers, got int"):
        bilevel.implicit(lambda theta: jnp.arange(3), residual=lambda z, theta: z)(1.0)
    with pytest.raises(ValueError, match=r"must return a pair \(z, aux\), not"):
        bilevel.implicit(ridge, residual=ridge_gradient, has_aux=True)(*ARGUMENTS)
    short = bilevel.implicit(ridge, residual=lambda w, *arguments: ridge_gradient(w, *arguments)[:2])
    with pytest.raises(ValueError, match=r"`residual` must return a tree like z, of shapes \(4,\)"):
        jax.grad(loss_of(short))(*ARGUMENTS)
