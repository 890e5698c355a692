"""Preconditioned moves: a diagonal for z and v, an optax transformation for x.

With T a transformation, P the projections, and d from the diagonals h_i of the rows' ∇²zz G_i at the last refresh,

    z ← z - ρ D_z / d        v ← P(v - ρ D_v / d)        x ← P(x + T(D_x))
    d = H + mean(h_i²) / (b H),    H the diagonal of ∇²zz G

so that d H bounds the mean square of a batch's diagonal, up to what is no sum over rows. The second part is small but
for features that few rows have: they are curved very much in a batch that meets such a row and not at all in others,
and one that none meets for long would overshoot.

Each part may be off, and then leaves nothing in the state and nothing in the compiled program.
"""

import functools
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from bilevel import _tree as trees
from bilevel._types import Array, Calls, Count, Point, PyTree, Scalar
from bilevel.oracles import Oracles
from bilevel.oracles.diagonal import probe_signs
from bilevel.solvers import low_rank
from bilevel.solvers.base import Solver, State
from bilevel.solvers.directions import descend, inner_batch, move
from bilevel.solvers.low_rank import LowRank
from bilevel.solvers.parameters import bounds, positive, transformation
from bilevel.solvers.transformations import check_transformation, find_move, init_state, inner_transformation

_FLOOR_EXACT = 1e-12  # scales of columns from 1e-3 to 1e3 span 12 orders: only what is nearly 0 is lifted
N_NORM_PROBES = 2  # steps of a tenth are far from the limit, and bear an estimate that is a tenth of the norm
_FLOOR_PROBED = 0.1  # what probes say of a coordinate far below the others is noise


class Preconditioning(NamedTuple):
    """What a preconditioned move needs: the metric's diagonal and low rank, and the transformation's state, or ()."""

    diagonal: PyTree = ()
    optimizer: Any = ()
    inner: Any = ()  # of the transformation of z
    low_rank: LowRank | tuple[()] = ()

    def solve(self, part: PyTree) -> PyTree:
        """Return a direction of z or v, divided by the metric."""
        if isinstance(self.low_rank, LowRank):
            return low_rank.solve(self.low_rank, self.diagonal, part)
        return jax.tree.map(lambda leaf, d: leaf / d, part, self.diagonal)

    def length_sq(self, part: PyTree) -> Array:
        """Return the squared norm of z or v in the metric."""
        if isinstance(self.low_rank, LowRank):
            return low_rank.length_sq(self.low_rank, self.diagonal, part)
        return trees.dot(part, jax.tree.map(lambda leaf, d: leaf * d, part, self.diagonal))


@dataclass(frozen=True)
class PreconditionedSolver(Solver):
    """A solver that moves by `descend`.

    Parameters
    ----------
    v_radius : radius of the ball v is kept in; None means no projection
    outer_optimizer : "adam" or an optax transformation of D_x, which moves the outer variable in the place of the step
        divided by `outer_ratio`; None keeps that step
    outer_bounds : (lower, upper), numbers or like the outer variable, which is kept inside; None means only the bounds
        of the problem
    """

    v_radius: float | None = positive(default=None, optional=True, hint="; use None for no projection")
    outer_optimizer: str | Any | None = transformation(("adam",), default=None, kw_only=True)  # noqa: RUF009
    outer_bounds: str | tuple[Any, Any] | None = bounds(default=None, kw_only=True)
    needs_plain_step: ClassVar[str | None] = None

    def check_start(self, start: Point) -> None:
        if self.outer_bounds is not None:
            _check_bounds(self, start.outer_var)
        check_transformation(self, "outer_optimizer", start.outer_var)
        check_transformation(self, "inner_optimizer", start.inner_var)

    def init_preconditioning(self, start: Point, diagonal: PyTree = ()) -> Preconditioning:
        outer, inner = (self.outer_optimizer, start.outer_var), (inner_transformation(self), start.inner_var)
        return Preconditioning(diagonal, init_state(*outer), init_state(*inner))

    def descend(
        self,
        oracles: Oracles,
        state: State,
        direction: Point,
        step: Scalar,
        scale: Scalar | None = None,
        outer_scale: Scalar | None = None,
    ) -> State:
        """Move all variables; ``scale`` shortens every move, and ``outer_scale`` those of x even more."""
        point, preconditioning, original = state.point, state.preconditioning, direction
        outer_step = step / self.outer_ratio
        outer_scale = scale if outer_scale is None or scale is None else scale * outer_scale
        if scale is not None:
            step, outer_step = scale * step, outer_scale * outer_step
        if self.outer_optimizer is not None:
            old, given = preconditioning.optimizer, direction.outer_var
            change, new = find_move(self.outer_optimizer, given, old, point.outer_var)
            direction = direction._replace(outer_var=change)
            preconditioning, outer_step = (
                preconditioning._replace(optimizer=new),
                1 if outer_scale is None else outer_scale,
            )
        diagonal, parts = preconditioning.diagonal, (direction.inner_var, direction.v)
        if jax.tree.leaves(diagonal):
            z, v = (preconditioning.solve(part) for part in parts)
            direction = direction._replace(inner_var=z, v=v)
        moved = self._project(descend(oracles, point, direction, step, outer_step))
        if self.inner_optimizer is not None:
            # In the place of the plain step, which is then not computed.
            old, given = preconditioning.inner, original.inner_var
            change, new = find_move(inner_transformation(self), given, old, point.inner_var)
            moved = moved._replace(inner_var=move(point.inner_var, change, 1 if scale is None else scale))
            preconditioning = preconditioning._replace(inner=new)
        return state._replace(point=moved, preconditioning=preconditioning)

    def _project(self, point: Point) -> Point:
        if self.outer_bounds is not None:
            lower, upper = (_spread(bound, point.outer_var) for bound in self.outer_bounds)
            point = point._replace(outer_var=jax.tree.map(jnp.clip, point.outer_var, lower, upper))
        if self.v_radius is not None:
            norm = jnp.sqrt(trees.norm_sq(point.v))
            point = point._replace(v=trees.scale(jnp.where(norm > self.v_radius, self.v_radius / norm, 1), point.v))
        return point


def metric_diagonal(oracles: Oracles, point: Point, index: Count) -> PyTree:
    """Return d, lifted where it is too small to divide by."""
    batch = inner_batch(oracles)
    # Probes may say less than 0, as may a Hessian that is not positive: then its size counts.
    diagonal = jax.tree.map(jnp.abs, oracles.diagonal_majorizer(point, index))
    leaves = jax.tree.leaves(diagonal)
    if oracles.diagonal_passes == 1:
        floor = _FLOOR_EXACT * functools.reduce(jnp.maximum, [jnp.max(leaf) for leaf in leaves])
    else:
        floor = _FLOOR_PROBED * sum(jnp.sum(leaf) for leaf in leaves) / sum(leaf.size for leaf in leaves)
    tiny = np.finfo(leaves[0].dtype).tiny
    diagonal = jax.tree.map(lambda leaf: jnp.maximum(leaf, jnp.maximum(floor, tiny)), diagonal)
    return jax.tree.map(lambda h, square: h + square / (batch * h), diagonal, oracles.squared_diagonals(point))


def metric_norm(oracles: Oracles, point: Point, index: Count) -> PyTree:
    """Return an estimate of ‖∇²zz G‖ in Frobenius' norm, which bounds its largest eigenvalue, for every array of z.

    With random signs s, ‖∇²zz G s‖² is that norm squared on average.
    """
    flat, unravel = ravel_pytree(point.inner_var)

    def squared(signs: Array) -> Array:
        return trees.norm_sq(oracles.hvp(point._replace(v=unravel(signs))))

    signs = probe_signs(flat.size, index)[:N_NORM_PROBES].astype(flat.dtype)
    norm = jnp.sqrt(jnp.mean(jax.lax.map(squared, signs)))
    return jax.tree.map(lambda _: jnp.maximum(norm, np.finfo(norm.dtype).tiny), point.inner_var)


def diagonal_calls(oracles: Oracles) -> Calls:
    """Return the cost of a diagonal: a product per inner row and pass."""
    return Calls(hvp=oracles.diagonal_passes * oracles.n_inner)


def norm_calls(oracles: Oracles) -> Calls:
    """Return the cost of `metric_norm`."""
    return Calls(hvp=N_NORM_PROBES * oracles.n_inner)


def _spread(bound: PyTree, like: PyTree) -> PyTree:
    """Return the bound as a tree like another, where one number stands for all."""
    one = jax.tree_util.treedef_is_leaf(jax.tree.structure(bound)) and jnp.ndim(bound) == 0
    return jax.tree.map(lambda _: bound, like) if one else bound


def _check_bounds(solver: PreconditionedSolver, outer_var: PyTree) -> None:
    named = f"`{type(solver).__name__}(outer_bounds={solver.parameters()['outer_bounds']})`"
    assert isinstance(solver.outer_bounds, tuple), "a text is converted when the solver is made"
    sides = [_spread(bound, outer_var) for bound in solver.outer_bounds]
    for side in sides:
        alike = jax.tree.map(lambda _: 0, side) == jax.tree.map(lambda _: 0, outer_var)
        pairs = zip(jax.tree.leaves(side), jax.tree.leaves(outer_var), strict=False)
        if not alike or any(np.shape(bound) not in ((), np.shape(leaf)) for bound, leaf in pairs):
            raise ValueError(f"{named}: a bound does not have the shape of the outer variable.")
    for start, lower, upper in zip(*map(jax.tree.leaves, (outer_var, *sides)), strict=True):
        if not np.all(lower <= upper):
            raise ValueError(f"{named}: a lower bound exceeds its upper bound.")
        if not np.all((lower <= np.asarray(start)) & (np.asarray(start) <= upper)):
            raise ValueError(f"{named}: the outer variable starts outside; move the start or widen the bounds.")
