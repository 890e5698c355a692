"""Implicit differentiation of a function that solves equations.

If z(θ) solves r(z, θ) = 0, then with J = ∂r/∂z, along a tangent θ' of θ,

    J z' = -(∂r/∂θ) θ'

The rule is given to JAX in forward mode, as a linear system that JAX transposes for reverse mode. It is itself
differentiable, because z in it is again the solution.
"""

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.flatten_util import ravel_pytree

from bilevel._core import trees
from bilevel._core.types import Array, PyTree, is_number
from bilevel.differentiation.linear import LARGEST_MATRIX, Multiply, safe_norm, solve_linear
from bilevel.problems.checks import check_choice, check_positive, check_sizes

ON_FAILURE = ("nan", "raise", "flag")
LINEAR_SOLVERS = ("dense", "cg", "gmres", "bicgstab", "neumann")


def implicit(
    solver: Callable[..., Any],
    *,
    residual: Callable[..., PyTree] | None = None,
    fixed_point: Callable[..., PyTree] | None = None,
    linear_solver: str | None = None,
    tolerance: float | None = None,
    max_products: int = 1000,
    has_aux: bool = False,
    on_failure: str = "nan",
    residual_tolerance: float = 1e-3,
) -> Callable[..., Any]:
    """Return a solver that can be differentiated with respect to its positional arguments.

    The solver itself is never differentiated, so it may contain loops of unknown length, or call code without
    derivatives. The returned function works under ``jit``, ``vmap``, ``grad``, ``jvp``, ``grad`` of ``grad`` and inside
    ``scan``. Values that ``residual`` or ``fixed_point`` use from an enclosing function are differentiated too.

    Parameters
    ----------
    solver : ``solver(*arguments, **options) -> z``, where z is an array or a pytree of arrays
    residual : ``residual(z, *arguments)``, a tree like z that is 0 at the solution, such as the gradient of a loss
    fixed_point : ``fixed_point(z, *arguments)``, a tree like z that equals z at the solution; instead of `residual`
    linear_solver : "dense" for a matrix, "cg" for a symmetric and definite ∂r/∂z such as a Hessian, "gmres" or
        "bicgstab" for any other, "neumann" for the series of a contracting `fixed_point`. By default "dense" for z of
        at most 256 numbers; for others "gmres" with `fixed_point`, and with `residual` "cg" if ∂r/∂z seems to be
        symmetric, followed by "gmres" if that fails
    tolerance : relative residual of the linear system above which derivatives are NaN; by default the square root of
        the machine epsilon. Iterative methods aim at a much smaller one
    max_products : largest number of products with ∂r/∂z in a solve, which is repeated at most twice to refine it
    has_aux : the solver returns ``(z, aux)``, and derivatives of aux are 0
    on_failure : what happens if z does not solve the equations, or the linear system is not solved. Derivatives are NaN
        in either case. "nan" does nothing else; "raise" raises RuntimeError if z is wrong and no transformation but
        ``grad`` is active; "flag" returns ``(z, is_solved)``, or ``(z, aux, is_solved)``
    residual_tolerance : z is accepted if ||r|| is at most this times the larger one of ||(∂r/∂z) z|| and the norm of r
        at z = 0, so that scaling the equations changes nothing

    Returns
    -------
    function
        It is called as the solver is. Keyword arguments, such as a warm start, are passed to the solver alone, and
        derivatives with respect to them are 0.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, bilevel
    >>> X, y = jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 7.0]]), jnp.array([1.0, 0.0, 2.0])
    >>> def gradient(w, penalty):
    ...     return X.T @ (X @ w - y) + penalty * w
    >>> def ridge(penalty):
    ...     return jnp.linalg.solve(X.T @ X + penalty * jnp.eye(2), X.T @ y)
    >>> slope = jax.grad(lambda penalty: jnp.sum(bilevel.implicit(ridge, residual=gradient)(penalty) ** 2))
    >>> round(float(slope(1.0)), 3)
    -0.185
    """
    if (residual is None) == (fixed_point is None):
        raise ValueError("`implicit`: give either `residual`, which is 0 at the solution, or `fixed_point`.")
    for name, function in (("solver", solver), ("residual", residual), ("fixed_point", fixed_point)):
        if not (callable(function) or (function is None and name != "solver")):
            raise TypeError(f"`{name}={function!r}`: must be a function.")
    check_choice("on_failure", on_failure, ON_FAILURE)
    if linear_solver is not None:
        check_choice("linear_solver", linear_solver, LINEAR_SOLVERS)
    if linear_solver == "neumann" and fixed_point is None:
        raise ValueError("`linear_solver='neumann'`: requires `fixed_point`, whose iteration gives the series.")
    check_positive(residual_tolerance=residual_tolerance, **({} if tolerance is None else {"tolerance": tolerance}))
    [limit] = check_sizes(max_products=max_products)
    equations = _Equations(residual, fixed_point, linear_solver, tolerance, limit, float(residual_tolerance))

    @functools.wraps(solver)
    def solved(*arguments: Any, **options: Any) -> Any:
        arguments = jax.tree.map(_as_array, arguments)
        constants, options = jax.tree.map(_without_tangent, (arguments, options))
        found = solver(*constants, **options)
        if has_aux and not (isinstance(found, tuple) and len(found) == 2):
            raise ValueError(f"`has_aux=True`: the solver must return a pair (z, aux), not {type(found).__name__}.")
        z, aux = jax.tree.map(_without_tangent, found if has_aux else (found, None))
        z = jax.tree.map(_check_solution, z)
        result = (equations.differentiate(z, arguments), aux) if has_aux else equations.differentiate(z, arguments)
        if on_failure == "nan":
            return result
        ok = equations.are_solved(z, *constants)
        if on_failure == "flag":
            return (*result, ok) if has_aux else (result, ok)
        if not isinstance(ok, jax.core.Tracer) and not ok:
            raise RuntimeError(
                "`implicit`: the solver's result does not solve the equations, so it has no derivatives; give the "
                "solver more steps, check `residual` or `fixed_point`, or raise `residual_tolerance`."
            )
        return result

    return solved


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def _is_traced(leaf: Any) -> bool:
    """Return True for arrays that may have a derivative, and for those that JAX has traced."""
    return isinstance(leaf, jax.core.Tracer) or (_is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact))


def _as_array(leaf: Any) -> Any:
    """Return a float as an array, so that it has a derivative, and anything else as it is."""
    return jnp.asarray(leaf) if is_number(leaf) and not isinstance(leaf, int) else leaf


def _without_tangent(leaf: Any) -> Any:
    return jax.lax.stop_gradient(leaf) if _is_array(leaf) else leaf


def _check_solution(leaf: Any) -> Array:
    array = jnp.asarray(leaf)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        way = "return counts and flags as auxiliary output, with `has_aux=True`"
        raise ValueError(f"`solver` must return real numbers, got {array.dtype}; {way}.")
    return array


class _Equations(NamedTuple):
    """The equations r(z, θ) = 0, and how linear systems with ∂r/∂z are solved; the fields are those of `implicit`."""

    residual: Callable[..., PyTree] | None
    fixed_point: Callable[..., PyTree] | None
    linear_solver: str | None
    tolerance: float | None
    max_products: int
    residual_tolerance: float

    def evaluate(self, z: PyTree, *arguments: Any) -> PyTree:
        """Return r, a tree of the shapes and dtypes of z."""
        if self.residual is not None:
            name, found = "residual", self.residual(z, *arguments)
        else:
            assert self.fixed_point is not None
            name, found = "fixed_point", self.fixed_point(z, *arguments)
        shapes = [jax.tree.map(jnp.shape, tree) for tree in (found, z)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"`{name}` must return a tree like z, of shapes {shapes[1]}; it returned {shapes[0]}.")
        found = _cast_like(found, z)
        return found if self.residual is not None else trees.subtract(z, found)

    def are_solved(self, z: PyTree, *arguments: Any) -> Array:
        """Return whether z solves the equations up to the tolerance."""
        flat, residual_of, _ = _as_vector(z, lambda z: self.evaluate(z, *arguments))
        residual, product = jax.jvp(residual_of, (flat,), (flat,))
        return self._is_small(residual, product, residual_of(jnp.zeros_like(flat)))

    def _is_small(self, residual: Array, product: Array, at_zero: Array) -> Array:
        """Return whether r is small compared with (∂r/∂z) z or with r at z = 0."""
        size, *scales = safe_norm(jax.lax.stop_gradient(jnp.stack([residual, product, at_zero])))
        scale = functools.reduce(jnp.maximum, [jnp.where(jnp.isfinite(one), one, 0) for one in scales])
        return jnp.isfinite(size) & (size <= self.residual_tolerance * scale)

    def differentiate(self, z: PyTree, arguments: tuple[Any, ...]) -> PyTree:
        """Return z with derivatives with respect to the arrays among the arguments, and those that r closes over."""
        leaves, structure = jax.tree.flatten(arguments)
        # Other arrays, such as indices, stay concrete where they are.
        places = [place for place, leaf in enumerate(leaves) if _is_traced(leaf)]

        def equations(z: PyTree, arrays: list[Array]) -> PyTree:
            filled = dict(enumerate(leaves)) | dict(zip(places, arrays, strict=True))
            return self.evaluate(z, *jax.tree.unflatten(structure, filled.values()))

        arrays = [leaves[place] for place in places]
        closed, enclosed = jax.closure_convert(equations, z, arrays)
        n_arrays = len(arrays)

        @jax.custom_jvp
        def attach(z: PyTree, inputs: list[Array]) -> PyTree:
            return z

        @partial(attach.defjvp, symbolic_zeros=True)
        def differentiate(primals: Any, tangents: Any) -> Any:
            inputs, z = primals[1], attach(*primals)
            moving = [place for place, tangent in enumerate(tangents[1]) if not isinstance(tangent, SymbolicZero)]

            def along(z: PyTree, moved: list[Array]) -> PyTree:
                filled = list((dict(enumerate(inputs)) | dict(zip(moving, moved, strict=True))).values())
                return closed(z, filled[:n_arrays], *filled[n_arrays:])

            moved, directions = [inputs[place] for place in moving], [tangents[1][place] for place in moving]
            right = jax.jvp(lambda moved: along(z, moved), (moved,), (directions,))[1]
            tangent = trees.scale(-1, self._solve(lambda z: along(z, moved), z, right))
            return z, tangent

        return attach(z, [*arrays, *enclosed])

    def _solve(self, equations: Callable[[PyTree], PyTree], z: PyTree, right: PyTree) -> PyTree:
        """Solve the linear system of the derivative; NaN if it is not solved or z does not solve the equations."""
        flat, residual_of, tree_of = _as_vector(z, equations)
        dtype = flat.dtype
        residual, multiply = jax.linearize(residual_of, flat)
        ok = self._is_small(residual, multiply(flat), residual_of(jnp.zeros_like(flat)))
        name = self.linear_solver or self._default_solver(flat.size)
        tolerance = float(jnp.finfo(dtype).eps) ** 0.5 if self.tolerance is None else self.tolerance

        def solve(multiply: Multiply, right: Array) -> Array:
            return solve_linear(name, multiply, right, tolerance, self.max_products)

        found = jax.lax.custom_linear_solve(multiply, _concatenate(right, dtype), solve, solve, symmetric=name == "cg")
        return tree_of(jnp.where(ok, 1, jnp.nan).astype(dtype) * found)

    def _default_solver(self, size: int) -> str:
        if size <= LARGEST_MATRIX:
            return "dense"
        return "cg or gmres" if self.fixed_point is None else "gmres"


def _as_vector(
    z: PyTree, equations: Callable[[PyTree], PyTree]
) -> tuple[Array, Callable[..., Array], Callable[..., Any]]:
    """Return z as one vector, the equations as a function of it, and the function that returns the tree of a vector.

    JAX transposes a linear system only if all leaves of its right-hand side depend on the tangents; a single vector
    does. Leaves of different precision are solved for in one, which is at least float32.
    """
    dtype = functools.reduce(np.promote_types, (leaf.dtype for leaf in jax.tree.leaves(z)), np.dtype(np.float32))
    flat, unravel = ravel_pytree(jax.tree.map(lambda leaf: leaf.astype(dtype), z))

    def tree_of(vector: Array) -> PyTree:
        return _cast_like(unravel(vector), z)

    return flat, lambda vector: _concatenate(equations(tree_of(vector)), dtype), tree_of


def _cast_like(tree: PyTree, template: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf, like: jnp.asarray(leaf, like.dtype), tree, template)


def _concatenate(tree: PyTree, dtype: np.dtype) -> Array:
    return jnp.concatenate([jnp.ravel(leaf).astype(dtype) for leaf in jax.tree.leaves(tree)])
