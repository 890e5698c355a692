"""Whether z is at z*(x) at the end of a run of AutoSRBA, which follows the gradient of h only there."""

from collections.abc import Mapping

import jax.numpy as jnp
from jax.scipy.sparse.linalg import cg

from bilevel._core import trees
from bilevel._core.compilation import Compiled
from bilevel._core.types import Array, Point
from bilevel.oracles import Oracles

_REFIT_PRODUCTS = 5  # of the inner Hessian
_LARGEST_GAP = 0.05  # between F and h, relative; above it a run warns that z is far from z*(x)
_NEGATIVE = 1e-5  # curvature relative to the largest; rounding errors of float32 stay below


@Compiled
def refit_outer_value(oracles: Oracles, point: Point) -> Array:
    """Return F at the same x after a few conjugate-gradient steps of z, of the length at which G is smallest."""
    gradient = trees.scale(-1, oracles.inner_grad(point))
    move, _ = cg(lambda v: oracles.hvp(point._replace(v=v)), gradient, maxiter=_REFIT_PRODUCTS)
    moved = [point._replace(inner_var=trees.add(point.inner_var, trees.scale(t, move))) for t in (0, 1 / 16, 1 / 4, 1)]
    values = jnp.stack([oracles.inner_value(one) for one in moved])
    # Far from z*(x), G is not the quadratic that conjugate gradients assume.
    return jnp.stack([oracles.outer_value(one) for one in moved])[jnp.nanargmin(values)]


@Compiled
def curvature_along_v(oracles: Oracles, point: Point) -> tuple[Array, Array]:
    """Return v'Hv / v'v with H = ∇²zz G, and |HHv| / |Hv|, the size of the curvatures along v."""
    once = oracles.hvp(point)
    twice = oracles.hvp(point._replace(v=once))
    size, largest = trees.norm_sq(point.v), trees.norm_sq(once)
    return trees.dot(point.v, once) / size, jnp.sqrt(trees.norm_sq(twice) / largest)


def inner_complaint(oracles: Oracles, point: Point, row: Mapping[str, float]) -> str | None:
    """Return a sentence if F(z, x) differs from h(x), which is the exact value or, if unknown, a refit of z."""
    here, exact = row["outer_value"], "value" in row
    if not exact:
        along, largest = (float(number) for number in curvature_along_v(oracles, point))
        if along < -_NEGATIVE * largest:  # a refit by conjugate gradients would be meaningless
            return (
                f"the inner loss is not convex at the end: its curvature along v is {along:.2g}. So z is not at a "
                "minimum, and x did not follow a gradient of h; other step sizes may end much lower. Compare with "
                "solvers that follow the training, such as SOBA with `inner_optimizer` and a smaller `outer_ratio`."
            )
    there = row["value"] if exact else float(refit_outer_value(oracles, point))
    if not abs(here - there) > _LARGEST_GAP * max(abs(here), abs(there)):
        return None
    how = "at z*(x)" if exact else f"after {_REFIT_PRODUCTS} conjugate-gradient steps of z alone"
    way = "continue with `resume`, scale the columns of your data, or fit z at this x before you use it"
    return f"z is far from z*(x) at the end: F is {here:.4g} at z, and {there:.4g} {how}; {way}."
