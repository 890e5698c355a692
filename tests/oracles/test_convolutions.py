"""Convolutions of a loss, rearranged for a CPU: the same derivatives, in the one form that XLA's library takes."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevel
from bilevel._core.compilation import arithmetic
from bilevel.oracles import autodiff
from bilevel.oracles.autodiff import channels_last, has_convolutions
from tests import cases

N_ROWS = 12
# Of images and kernels: sizes, order of the axes, and other parameters of a convolution.
KINDS = {
    "channels last": ((6, 5, 2), (3, 3, 2, 4), ("NHWC", "HWIO", "NHWC"), {"window_strides": (2, 2), "padding": "SAME"}),
    "channels first": (
        (2, 6, 5),
        (4, 2, 3, 2),
        ("NCHW", "OIHW", "NCHW"),
        {"window_strides": (1, 2), "padding": "SAME"},
    ),
    "dilated": ((7, 6, 2), (2, 2, 2, 3), ("NHWC", "HWIO", "NHWC"), {"padding": "VALID", "rhs_dilation": (2, 3)}),
    "transposed": (
        (3, 4, 2),
        (2, 3, 2, 3),
        ("NHWC", "HWIO", "NHWC"),
        {"padding": ((1, 2), (2, 0)), "lhs_dilation": (2, 2)},
    ),
    "one axis": ((9, 2), (3, 2, 4), ("NWC", "WIO", "NWC"), {"padding": "SAME"}),
    "three axes": ((4, 3, 3, 1), (2, 2, 2, 1, 2), ("NDHWC", "DHWIO", "NDHWC"), {"padding": "SAME"}),
    "groups": ((6, 5, 4), (3, 3, 2, 4), ("NHWC", "HWIO", "NHWC"), {"padding": "SAME", "feature_group_count": 2}),
}


def convolve(kind, images, kernel):
    *_, order, options = KINDS[kind]
    strides = options.get("window_strides", (1,) * (images.ndim - 2))
    return jax.lax.conv_general_dilated(
        images, kernel, **{"window_strides": strides, **options}, dimension_numbers=order
    )


def problem_of(kind, wrap=lambda layer: layer, **options):
    """A convolution, and a decay that is learned."""
    rng = np.random.default_rng(0)
    image, kernel = KINDS[kind][:2]

    def outputs(weights, images):
        return jnp.tanh(wrap(lambda images, kernel: convolve(kind, images, kernel))(images, weights["kernel"]))

    def inner_loss(weights, log_decay, batch):
        images, targets = batch
        fit = (outputs(weights, images).reshape(len(images), -1).sum(1) * weights["scale"] - targets) ** 2
        return fit + jnp.exp(log_decay) * sum(jnp.sum(leaf**2) for leaf in weights.values())

    def outer_loss(weights, log_decay, batch):
        return inner_loss(weights, -jnp.inf, batch)

    levels = [(rng.standard_normal((N_ROWS, *image)), rng.standard_normal(N_ROWS)) for _ in range(2)]
    weights = {"kernel": rng.standard_normal(kernel) / 3, "scale": np.ones(())}
    losses = bilevel.BatchLoss(inner_loss), bilevel.BatchLoss(outer_loss)
    v = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape), weights)
    differentiation = bilevel.Differentiation(**options)
    problem = bilevel.BilevelProblem.from_losses(
        *losses, *levels, weights, np.zeros(()), dtype="float64", differentiation=differentiation
    )
    return replace(problem, start=problem.start._replace(v=v))


def everything(oracles, point):
    names = "inner", "outer", "inner_grad", "hvp", "cross", "inner_grad_outer", "inner_value", "outer_value"
    return {name: getattr(oracles, name)(point) for name in names}


WRAPS = {
    "plain": lambda layer: layer,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "scan": lambda layer: lambda images, kernel: jax.lax.map(lambda image: layer(image[None], kernel)[0], images),
}


@pytest.mark.parametrize(
    ("kind", "wrap"), [*((kind, "plain") for kind in KINDS), *(("dilated", wrap) for wrap in WRAPS if wrap != "plain")]
)
def test_rearranged_convolutions_have_the_same_derivatives(kind, wrap):
    problem = problem_of(kind, WRAPS[wrap])
    assert problem.oracles.convolves
    with arithmetic(np.float64):
        found = jax.jit(everything)(problem.oracles, problem.start)
        plain = jax.jit(everything)(replace(problem.oracles, convolves=False), problem.start)
    jax.tree.map(lambda new, old: np.testing.assert_allclose(new, old, rtol=1e-12, atol=1e-12), found, plain)


def test_steps_of_many_settings_together_are_those_of_each():
    problem = problem_of("channels first")
    with arithmetic(np.float64):
        many = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf, -leaf]), problem.start.inner_var)

        def grad(z):
            return problem.oracles.inner_grad(problem.start._replace(inner_var=z))

        together = jax.jit(jax.vmap(grad))(many)
        for i in range(3):
            alone = grad(jax.tree.map(lambda leaf, i=i: leaf[i], many))
            jax.tree.map(lambda new, old, i=i: np.testing.assert_allclose(new[i], old, rtol=1e-11), together, alone)


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"second_derivatives": False}])
@pytest.mark.parametrize(("kind", "wrap"), [*(("channels last", wrap) for wrap in WRAPS), ("groups", "plain")])
def test_every_kind_of_oracles_rearranges_them_wherever_they_are(options, kind, wrap):
    problem = problem_of(kind, WRAPS[wrap], **options)
    with arithmetic(np.float64):
        kept = jax.make_jaxpr(lambda point: problem.oracles.with_batches(4, "blocks").inner(point, 0))(problem.start)
    assert orders_of(kept) == {((0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2))}


def orders_of(traced):
    """The orders of axes of all convolutions of a traced function."""
    found = set()
    for equation in traced.eqns:
        if equation.primitive is jax.lax.conv_general_dilated_p:
            found.add(tuple(map(tuple, equation.params["dimension_numbers"])))
        for called in jax.tree.leaves(equation.params, is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            found |= orders_of(called) if hasattr(called, "eqns") else set()
    return found


@pytest.mark.parametrize("kind", ["channels last", "channels first"])
def test_a_step_in_a_loop_has_convolutions_in_one_form(kind):
    """In a loop XLA leaves the order of axes as it is, and its library takes one order only."""
    problem = problem_of(kind)

    def steps(oracles, point):
        def step(_, z):
            found = oracles.inner(point._replace(inner_var=z), None)
            return jax.tree.map(lambda leaf, grad, hvp: leaf - 1e-3 * (grad + hvp), z, found.grad, found.hvp)

        return jax.lax.fori_loop(0, 3, step, point.inner_var)

    def forms(oracles):
        with arithmetic(np.float64):
            program = jax.jit(steps).lower(oracles, problem.start).compile().as_text()
        return {word for word in program.replace(",", " ").split() if word.startswith("dim_labels")}

    assert forms(problem.oracles) == {"dim_labels=b01f_01io->b01f"}
    assert len(forms(replace(problem.oracles, convolves=False))) > 1


def test_a_convolution_with_parameters_that_are_not_known_is_left_as_it_is(monkeypatch):
    problem = problem_of("channels first")

    def program():
        function = channels_last(lambda images, kernel: convolve("channels first", images, kernel))
        return str(jax.make_jaxpr(function)(np.zeros((3, 2, 6, 5)), np.zeros((4, 2, 3, 2))))

    assert "transpose" in program(), "this version of JAX has parameters that are not known"
    monkeypatch.setattr(autodiff, "_CONVOLUTION", {"window_strides": None}.keys())
    assert "transpose" not in program()
    with arithmetic(np.float64):
        expected = everything(replace(problem.oracles, convolves=False), problem.start)
        cases.assert_trees_close(everything(problem.oracles, problem.start), expected)


def test_losses_without_convolutions_are_left_alone():
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((8, 3))

    def loss(z, x, row):
        return (row @ z) ** 2 + jnp.exp(x) * z @ z

    problem = bilevel.BilevelProblem.from_losses(loss, loss, rows, rows, np.zeros(3), np.zeros(()))
    assert not problem.oracles.convolves


def test_a_function_is_traced_once_and_keeps_its_structure():
    traces = []

    def function(images, kernel):
        traces.append(images.shape)
        return {"out": convolve("channels first", images, kernel), "same": (kernel,)}

    rng = np.random.default_rng(0)
    images, kernel = rng.standard_normal((3, 2, 6, 5)), rng.standard_normal((4, 2, 3, 2))
    with arithmetic(np.float64):
        found = jax.jit(channels_last(function))(images, kernel)
        assert len(traces) == 1
        np.testing.assert_allclose(found["out"], function(images, kernel)["out"], rtol=1e-12, atol=1e-12)
        assert has_convolutions(jax.make_jaxpr(jax.jit(function))(images, kernel))
        assert not has_convolutions(jax.make_jaxpr(jnp.sin)(images))
    np.testing.assert_array_equal(found["same"][0], kernel)
