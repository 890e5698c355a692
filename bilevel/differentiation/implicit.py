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

from bilevel._core import trees
from bilevel._core.types import Array, PyTree, is_number
from bilevel.differentiation.linear import LARGEST_MATRIX, METHODS, SPARE, Multiply, is_solution
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
    ``scan``.

    Parameters
    ----------
    solver : ``solver(*arguments, **options) -> z``, where z is an array or a pytree of arrays
    residual : ``residual(z, *arguments)``, a tree like z that is 0 at the solution, such as the gradient of a loss
    fixed_point : ``fixed_point(z, *arguments)``, a tree like z that equals z at the solution; instead of `residual`
    linear_solver : "dense" for a matrix, "cg" for a symmetric and definite ∂r/∂z such as a Hessian, "gmres" or
        "bicgstab" for any other, "neumann" for the series of a contracting `fixed_point`. By default "dense" for z of
        at most 256 numbers; for others "gmres" with `fixed_point`, and "cg" with `residual`, followed by "gmres" if
        that fails
    tolerance : relative residual of the linear system above which derivatives are NaN; the square root of the unit of
        rounding by default. Iterative methods aim at a hundredth of it
    max_products : largest number of products with ∂r/∂z in a solve
    has_aux : the solver returns ``(z, aux)``, and derivatives of aux are 0
    on_failure : what happens if z does not solve the equations, or the linear system is not solved. Derivatives are NaN
        in either case. "nan" does nothing else; "raise" raises RuntimeError if z is wrong and no transformation but
        ``grad`` is active; "flag" returns ``(z, is_solved)``, or ``(z, aux, is_solved)``
    residual_tolerance : z is accepted if ||r|| <= this (1 + ||(∂r/∂z) z||)

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
    rule = _Rule(residual, fixed_point, linear_solver, tolerance, limit, float(residual_tolerance))

    @functools.wraps(solver)
    def solved(*arguments: Any, **options: Any) -> Any:
        found, aux = rule.solve(solver if has_aux else _without_aux(solver), arguments, options)
        if on_failure == "nan":
            return (found, aux) if has_aux else found
        ok = rule.is_solved(*jax.lax.stop_gradient((found, *jax.tree.map(_as_array, arguments))))
        if on_failure == "flag":
            return (found, aux, ok) if has_aux else (found, ok)
        if not isinstance(ok, jax.core.Tracer) and not ok:
            raise RuntimeError(
                "`implicit`: the solver's result does not solve the equations, so it has no derivative by them; give "
                "the solver more steps, check `residual` or `fixed_point`, or raise `residual_tolerance`."
            )
        return (found, aux) if has_aux else found

    return solved


def _without_aux(solver: Callable[..., PyTree]) -> Callable[..., tuple[PyTree, None]]:
    return lambda *arguments, **options: (solver(*arguments, **options), None)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def _as_array(leaf: Any) -> Any:
    """Return a number with a fraction as an array, so that it has a derivative, and anything else as it is."""
    return jnp.asarray(leaf) if is_number(leaf) and not isinstance(leaf, int) else leaf


class _Rule(NamedTuple):
    """The rule of differentiation, with the settings of `implicit`."""

    residual: Callable[..., PyTree] | None
    fixed_point: Callable[..., PyTree] | None
    linear_solver: str | None
    tolerance: float | None
    max_products: int
    residual_tolerance: float

    def solve(self, solver: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Return z and aux of a solver, to which this rule is attached."""
        leaves, structure = jax.tree.flatten((jax.tree.map(_as_array, arguments), options))
        places = [place for place, leaf in enumerate(leaves) if _is_array(leaf)]
        n_arguments = len(jax.tree.leaves(arguments))

        def rebuild(arrays: Any) -> Any:
            filled = dict(enumerate(leaves)) | dict(zip(places, arrays, strict=True))
            return jax.tree.unflatten(structure, filled.values())

        @jax.custom_jvp
        def root(*arrays: Array) -> Any:
            arguments, options = rebuild(arrays)
            found, aux = solver(*arguments, **options)
            return jax.tree.map(_check_solution, found), aux

        @partial(root.defjvp, symbolic_zeros=True)
        def differentiate(primals: Any, tangents: Any) -> Any:
            z, aux = root(*primals)
            moving = [i for i, t in enumerate(tangents) if places[i] < n_arguments and not isinstance(t, SymbolicZero)]

            def equations(z: PyTree, moved: Any) -> PyTree:
                arrays = [*primals]
                for i, array in zip(moving, moved, strict=True):
                    arrays[i] = array
                return self.equations(z, *rebuild(arrays)[0])

            moved = [primals[i] for i in moving]
            right = jax.jvp(lambda moved: equations(z, moved), (moved,), ([tangents[i] for i in moving],))[1]
            value, multiply = jax.linearize(lambda z: equations(z, moved), z)
            tangent = trees.scale(-1, self.solve_linear(multiply, right))
            tangent = trees.scale(jnp.where(self.is_small(value, multiply(z)), 1.0, jnp.nan), tangent)
            tangent = jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), tangent, z)
            return (z, aux), (tangent, jax.tree.map(_no_tangent, aux))

        return root(*(leaves[place] for place in places))

    def equations(self, z: PyTree, *arguments: Any) -> PyTree:
        """Return what is 0 at the solution, as a tree like z."""
        if self.residual is not None:
            name, found = "residual", self.residual(z, *arguments)
        else:
            assert self.fixed_point is not None
            name, found = "fixed_point", self.fixed_point(z, *arguments)
        shapes = [jax.tree.map(jnp.shape, tree) for tree in (found, z)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"`{name}` must return a tree like z, of shapes {shapes[1]}; it returned {shapes[0]}.")
        return found if self.residual is not None else trees.subtract(z, found)

    def is_solved(self, z: PyTree, *arguments: Any) -> Array:
        """Return whether z solves the equations up to the tolerance."""
        return self.is_small(*jax.jvp(lambda z: self.equations(z, *arguments), (z,), (z,)))

    def is_small(self, value: PyTree, scale: PyTree) -> Array:
        """Return whether the residual is small, compared with (∂r/∂z) z."""
        value, scale = jax.lax.stop_gradient((value, scale))
        return jnp.sqrt(trees.norm_sq(value)) <= self.residual_tolerance * (1 + jnp.sqrt(trees.norm_sq(scale)))

    def solve_linear(self, multiply: Multiply, right: PyTree) -> PyTree:
        """Return the solution of a linear system, NaN if its residual is not small."""
        leaves = jax.tree.leaves(right)
        dtype = jnp.result_type(*leaves)
        name = self.linear_solver or self._default(sum(leaf.size for leaf in leaves))
        tolerance = float(jnp.finfo(dtype).eps) ** 0.5 if self.tolerance is None else self.tolerance

        def solve(multiply: Multiply, right: PyTree) -> PyTree:
            found = METHODS[name](multiply, right, tolerance / SPARE, self.max_products)
            return trees.scale(jnp.where(is_solution(multiply, found, right, tolerance), 1.0, jnp.nan), found)

        return jax.lax.custom_linear_solve(multiply, right, solve, solve, symmetric=name == "cg")

    def _default(self, size: int) -> str:
        if size <= LARGEST_MATRIX:
            return "dense"
        return "cg or gmres" if self.fixed_point is None else "gmres"


def _check_solution(leaf: Any) -> Array:
    array = jnp.asarray(leaf)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        way = "return counts and flags as auxiliary output, with `has_aux=True`"
        raise ValueError(f"`solver` must return real numbers, got {array.dtype}; {way}.")
    return array


def _no_tangent(leaf: Any) -> Any:
    array = jnp.asarray(leaf)
    if jnp.issubdtype(array.dtype, jnp.inexact):
        return jnp.zeros_like(array)
    return np.zeros(array.shape, jax.dtypes.float0)
