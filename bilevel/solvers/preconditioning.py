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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bilevel import _tree as trees
from bilevel._types import Array, Calls, Count, Point, PyTree, Scalar
from bilevel.oracles import Oracles
from bilevel.solvers.base import Solver
from bilevel.solvers.directions import descend, spread
from bilevel.solvers.parameters import bounds, positive, transformation

PRECONDITIONERS = ("diagonal",)
OPTIMIZERS = ("adam",)

# Adam's step is _RATE (1 + t / _DELAY)^-½: it falls without an end, so that no budget has to be known.
_RATE, _DELAY = 1e-2, 1000.0
_FLOOR_EXACT = 1e-12  # scales of columns from 1e-3 to 1e3 span 12 orders: only what is nearly 0 is lifted
_FLOOR_PROBED = 0.1  # what probes say of a coordinate far below the others is noise


class Preconditioning(NamedTuple):
    """What a preconditioned move needs: the diagonal and the state of the transformation, () for what is off."""

    diagonal: PyTree = ()
    optimizer: Any = ()


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
    outer_optimizer: str | Any | None = transformation(OPTIMIZERS, default=None, kw_only=True)  # noqa: RUF009
    outer_bounds: str | tuple[Any, Any] | None = bounds(default=None, kw_only=True)

    def check_start(self, start: Point) -> None:
        if self.outer_bounds is not None:
            _check_bounds(self, start.outer_var)
        if self.outer_optimizer is None:
            return
        optimizer = _transformation(self.outer_optimizer)
        try:
            with jax.numpy_dtype_promotion("standard"):
                jax.eval_shape(lambda x: optimizer.update(x, optimizer.init(x), x), start.outer_var)
        except TypeError as error:
            raise ValueError(
                f"`{type(self).__name__}(outer_optimizer=…)`: it is given gradients, its state and parameters, and "
                f"asks for more ({error}); take a transformation that does not."
            ) from error

    def init_preconditioning(self, start: Point, diagonal: PyTree = ()) -> Preconditioning:
        if self.outer_optimizer is None:
            return Preconditioning(diagonal)
        with jax.numpy_dtype_promotion("standard"):
            return Preconditioning(diagonal, _transformation(self.outer_optimizer).init(start.outer_var))

    def descend(
        self,
        oracles: Oracles,
        point: Point,
        direction: Point,
        preconditioning: Preconditioning,
        step: Scalar,
        outer_step: Scalar,
        outer_scale: Scalar = 1,
    ) -> tuple[Point, Preconditioning]:
        """Move all variables; updates of a transformation are taken ``outer_scale`` times, not ``outer_step`` times."""
        if self.outer_optimizer is not None:
            old = preconditioning.optimizer
            # optax promotes its integer counts to floats, which strict promotion would refuse.
            with jax.numpy_dtype_promotion("standard"):
                updates, new = _transformation(self.outer_optimizer).update(direction.outer_var, old, point.outer_var)
            updates, new = _cast_like(updates, point.outer_var), _cast_like(new, old)
            # Updates are added where directions are subtracted.
            direction = direction._replace(outer_var=trees.scale(-1, updates))
            preconditioning, outer_step = preconditioning._replace(optimizer=new), outer_scale
        diagonal, parts = preconditioning.diagonal, (direction.inner_var, direction.v)
        if jax.tree.leaves(diagonal):
            z, v = (jax.tree.map(lambda leaf, d: leaf / d, part, diagonal) for part in parts)
            direction = direction._replace(inner_var=z, v=v)
        return descend(oracles, point, direction, step, outer_step, self.v_radius, self.outer_bounds), preconditioning


def _cast_like(tree: PyTree, template: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf, old: jnp.asarray(leaf, jnp.asarray(old).dtype), tree, template)


def metric_diagonal(oracles: Oracles, point: Point, index: Count) -> PyTree:
    """Return d, lifted where it is too small to divide by."""
    batch = oracles.n_inner if oracles.inner_samples.sampling == "full" else oracles.inner_samples.batch_size
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


def diagonal_calls(oracles: Oracles) -> Calls:
    """Return the cost of a diagonal: a product per inner row and pass."""
    return Calls(hvp=oracles.diagonal_passes * oracles.n_inner)


def _transformation(optimizer: Any) -> Any:
    return _adam() if isinstance(optimizer, str) else optimizer


@functools.cache
def _adam() -> Any:
    def rate(count: Array) -> Array:
        return _RATE / jnp.sqrt(1 + count / _DELAY)

    import optax

    return optax.adam(rate)


def _check_bounds(solver: PreconditionedSolver, outer_var: PyTree) -> None:
    named = f"`{type(solver).__name__}(outer_bounds={solver.parameters()['outer_bounds']})`"
    assert isinstance(solver.outer_bounds, tuple), "a text is converted when the solver is made"
    sides = [spread(bound, outer_var) for bound in solver.outer_bounds]
    if not all(_fits(side, outer_var) for side in sides):
        raise ValueError(f"{named}: a bound does not have the shape of the outer variable.")
    for start, lower, upper in zip(*map(jax.tree.leaves, (outer_var, *sides)), strict=True):
        if not np.all(lower <= upper):
            raise ValueError(f"{named}: a lower bound exceeds its upper bound.")
        if not np.all((lower <= np.asarray(start)) & (np.asarray(start) <= upper)):
            raise ValueError(f"{named}: the outer variable starts outside; move the start or widen the bounds.")


def _fits(side: PyTree, outer_var: PyTree) -> bool:
    """Tell whether a bound is a tree like the outer variable, a number or an array in the place of each leaf."""
    if jax.tree.map(lambda _: 0, side) != jax.tree.map(lambda _: 0, outer_var):
        return False
    pairs = zip(jax.tree.leaves(side), jax.tree.leaves(outer_var), strict=True)
    return all(np.shape(bound) in ((), np.shape(leaf)) for bound, leaf in pairs)
