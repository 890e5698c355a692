"""Moves that several solvers share."""

import jax
import jax.numpy as jnp

from bilevel import trees
from bilevel.oracles import Oracles
from bilevel.types import Array, Calls, Count, Point, PyTree, Scalar


def descend(
    oracles: Oracles,
    point: Point,
    direction: Point,
    step: Scalar,
    outer_step: Scalar,
    v_radius: Scalar | None = None,
    bounds: tuple[PyTree, PyTree] | None = None,
) -> Point:
    """Move the three variables at once, v back into its ball and the outer variable into its bounds."""
    return Point(
        inner_var=moved(point.inner_var, direction.inner_var, step),
        outer_var=into_box(oracles.project(moved(point.outer_var, direction.outer_var, outer_step)), bounds),
        v=into_ball(moved(point.v, direction.v, step), v_radius),
    )


def moved(variable: PyTree, direction: PyTree, step: Scalar) -> PyTree:
    """Return variable - step * direction."""
    return trees.subtract(variable, trees.scale(step, direction))


def into_ball(v: PyTree, radius: Scalar | None) -> PyTree:
    """Return the nearest tree of norm at most ``radius``; None is no bound."""
    if radius is None:
        return v
    norm = jnp.sqrt(trees.norm_sq(v))
    return trees.scale(jnp.where(norm > radius, radius / norm, 1), v)


def into_box(outer_var: PyTree, bounds: tuple[PyTree, PyTree] | None) -> PyTree:
    """Return the nearest tree within the bounds, each a number or a tree; None is no bound."""
    if bounds is None:
        return outer_var
    lower, upper = (spread(bound, outer_var) for bound in bounds)
    return jax.tree.map(jnp.clip, outer_var, lower, upper)


def spread(bound: PyTree, like: PyTree) -> PyTree:
    """Return the bound as a tree like another, where one number stands for all."""
    one = jax.tree_util.treedef_is_leaf(jax.tree.structure(bound)) and jnp.ndim(bound) == 0
    return jax.tree.map(lambda _: bound, like) if one else bound


def decayed(step_size: Scalar, index: Array, power: float) -> Array:
    """Return step_size * t^-power with t = index + 1."""
    return step_size * (index + 1).astype(jnp.result_type(step_size)) ** -power


def decayed_share(scale: Scalar, index: Array, power: float) -> Array:
    """Return min(1, scale * t^-power) with t = index + 1."""
    return jnp.minimum(decayed(scale, index, power), jnp.ones_like(scale))


def storm(momentum: Array, new: PyTree, estimate: PyTree, old: PyTree) -> PyTree:
    """Return new + (1 - momentum)(estimate - old): STORM's estimate, with both gradients on one sample."""
    return jax.tree.map(lambda new, estimate, old: new + (1 - momentum) * (estimate - old), new, estimate, old)


def direction_calls(inner_rows: Count, outer_rows: Count) -> Calls:
    """Return the cost of one direction D on so many rows of each level."""
    return Calls(
        inner_grad=inner_rows,
        hvp=inner_rows,
        cross=inner_rows,
        outer_grad=outer_rows,
        outer_grad_outer=outer_rows,
    )
