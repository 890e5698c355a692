"""LancBiO: v from a Krylov subspace that grows by one Lanczos vector per step, with restarts.

Yang, Gao, Yuan. LancBiO: Dynamic Lanczos-aided Bilevel Optimization via Krylov Subspace. ICLR 2025, arXiv 2404.03331.
Confidence: medium; only the opening of the text was available, and the formulas are those of the authors' code for a
synthetic problem. The system is H v = b with b = -∇z F:

    T times:  draw B;  z ← z - α ∇z G_B
    draw B, C;   every k steps:   v̄ = v;   w = H_B v̄;   e = b - w;   Q and S are empty
    β = ||e||;   q = e/β;   y = H_B q - β q_last, or H_B q if Q is empty;   a = q'y;   e = y - a q
    Q ← (Q, q);   S ← S with a row and a column more, a on the diagonal and β next to it;   v = v̄ + Q S⁻¹ Q'(b - w)
    draw B;   x ← x - (α/r)((∇²xz G_B) v + ∇x F_C)

Older columns of Q and S belong to older points. As the points converge, S tends to Q'HQ, and v to the solution. This
requires full batches and slow moves of x. On small batches, or if x moves far in k steps, the errors of v̄ accumulate
and v may diverge: use a smaller k, or `warm_start=False`, as the authors' code for batches does, where v̄ = w = 0 and
errors last for at most k steps. In the authors' code k grows: with `growth_period` l, k = 1 at first, and every l steps
k ← ceil((1 + c/100) k) up to `period`, here with a restart. An addition to their code, in which k is far below p: a
vector that consists of rounding errors (||e||² below ε ||y||², where ε is the unit roundoff), or that would be the
(p + 1)-th, is replaced by 0 and does not contribute to v until the restart.
Cost (T + 4) b, one b more at restarts. Memory (k + 4) p + d. Adaptive: nothing.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bilevel._core import trees
from bilevel._core.types import Array, Calls, OuterPass, Point, PyTree
from bilevel.oracles import SAMPLINGS, Oracles
from bilevel.solvers.base import Complexity, Solver, solver
from bilevel.solvers.fields import flag, one_of, whole
from bilevel.solvers.moves import MovesState, move, split
from bilevel.solvers.neumann import LoopDraw, NeumannDraw, hypergradient_calls
from bilevel.solvers.sub_bio import Subspace, solve, unit


class LancBiOState(NamedTuple):
    """The iterate, the states of transformations, v̄, w, the subspace and e."""

    point: Point
    moves: MovesState
    base: PyTree
    product: PyTree
    subspace: Subspace
    remainder: PyTree


@solver
class LancBiO(Solver[LancBiOState, LoopDraw]):
    """Lanczos-aided bilevel optimizer.

    Parameters
    ----------
    step_size : step of the inner loop
    period : k, steps from one restart to the next and largest dimension of the subspace
    growth_period, growth_percent : l and c; the authors take 20, 10 and `period=15`, or 50, 30 and 10. None keeps k
    warm_start : restart from the last v; False restarts from 0
    sampling : "full", for which it is designed, or "blocks", "iid", "reshuffle"
    """

    sampling: str = one_of(SAMPLINGS, default="full", kw_only=True)
    n_inner_steps: int = whole(default=10)
    period: int = whole(default=10)
    warm_start: bool = flag(default=True)
    growth_period: int | None = whole(default=None, optional=True, hint="; use None for a constant dimension")
    growth_percent: int = whole(default=10)
    complexity = Complexity("O((n+m) ε^-1)", "full batches")
    needs_plain_step = None

    def init(self, oracles: Oracles, start: Point) -> LancBiOState:
        zero = trees.zeros_like(start.v)
        return LancBiOState(start, self.moves.init(start), zero, zero, self._empty_subspace(zero), zero)

    def _empty_subspace(self, like: PyTree) -> Subspace:
        basis = jax.tree.map(lambda leaf: jnp.zeros((self.period, *leaf.shape), leaf.dtype), like)
        ones = jnp.ones((self.period,), jnp.result_type(*jax.tree.leaves(like)))
        return Subspace(basis, ones, jnp.zeros_like(ones))

    def _position(self, index: Array) -> Array:
        """Return the position of the Lanczos vector of a step, which is 0 at restarts."""
        if self.growth_period is None:
            return index % self.period
        sizes = [1]
        while sizes[-1] < self.period:
            sizes.append(min(self.period, -(-sizes[-1] * (100 + self.growth_percent) // 100)))
        phase = jnp.minimum(index // self.growth_period, len(sizes) - 1)
        return (index - self.growth_period * phase) % jnp.asarray(sizes, jnp.int32)[phase]

    def draw(self, oracles: Oracles, key: Array, index: Array) -> LoopDraw:
        rows = oracles.draw_inner(key, index, self.n_inner_steps + 2)
        inner_loop, products, cross = split(rows, self.n_inner_steps, None, None)
        return LoopDraw(inner_loop, NeumannDraw(products, cross, oracles.draw_outer(key, index)))

    def refreshes(self, index: Array, draw: LoopDraw) -> Array:
        return self._position(index) == 0

    def refresh(self, oracles: Oracles, state: LancBiOState, index: Array, draw: LoopDraw) -> LancBiOState:
        state, outer = self._solve_inner(oracles, state, draw)
        base = product = trees.zeros_like(state.point.v)
        if self.warm_start:
            base, product = state.point.v, oracles.hvp(state.point, draw.neumann.products)
        remainder = trees.scale(-1, trees.add(outer.grad, product))
        state = LancBiOState(state.point, state.moves, base, product, self._empty_subspace(base), remainder)
        return self._extend_and_move(oracles, state, outer, index, draw)

    def step(self, oracles: Oracles, state: LancBiOState, index: Array, draw: LoopDraw) -> LancBiOState:
        state, outer = self._solve_inner(oracles, state, draw)
        return self._extend_and_move(oracles, state, outer, index, draw)

    def _solve_inner(self, oracles: Oracles, state: LancBiOState, draw: LoopDraw) -> tuple[LancBiOState, OuterPass]:
        """Return the state after the steps of z, and the gradients of F there."""
        rows, times = draw.inner_loop, self.n_inner_steps
        point, moves = self.moves.inner_steps(oracles, state.point, state.moves, rows, times, self.step_size)
        return state._replace(point=point, moves=moves), oracles.outer(point, draw.neumann.outer)

    def _extend_and_move(
        self, oracles: Oracles, state: LancBiOState, outer: OuterPass, index: Array, draw: LoopDraw
    ) -> LancBiOState:
        """Return the state with a Lanczos vector more, the v that follows, and x moved."""
        point = state.point
        subspace, remainder = extend(oracles, state, self._position(index), draw.neumann.products)
        residual = trees.scale(-1, trees.add(outer.grad, state.product))
        point = point._replace(v=trees.add(state.base, solve(subspace, residual)))
        grad = trees.add(oracles.cross(point, draw.neumann.cross), outer.grad_outer)
        point, moves = self.moves.outer(oracles, point, state.moves, grad, self.step_size / self.outer_ratio)
        return state._replace(point=point, moves=moves, subspace=subspace, remainder=remainder)

    def calls(self, oracles: Oracles, draw: LoopDraw, refresh: bool) -> Calls:
        products = (2 if refresh and self.warm_start else 1) * oracles.count_inner(draw.neumann.products)
        loop = oracles.count_inner(draw.inner_loop, self.n_inner_steps)
        return hypergradient_calls(oracles, draw.neumann, 1)._replace(inner_grad=loop, hvp=products)


def extend(oracles: Oracles, state: LancBiOState, position: Array, rows: Any) -> tuple[Subspace, PyTree]:
    """Return the subspace with the normalized remainder as the vector at ``position``, and the new remainder."""
    point, subspace = state.point, state.subspace
    norm = jnp.sqrt(trees.norm_sq(state.remainder))
    has_room = position < sum(leaf.size for leaf in jax.tree.leaves(point.v))
    is_vector = (norm > 0) & has_room
    vector = unit(state.remainder, jnp.where(has_room, 0, jnp.inf))
    beta = jnp.where(is_vector & (position > 0), norm, 0)
    last = jax.tree.map(lambda rows: rows[position - 1], subspace.basis)
    image = move(oracles.hvp(point._replace(v=vector), rows), last, beta)
    curvature = trees.dot(vector, image)
    remainder = move(image, vector, curvature)
    is_rounding = trees.norm_sq(remainder) <= jnp.finfo(norm.dtype).eps * trees.norm_sq(image)
    remainder = trees.scale(jnp.where(is_rounding, 0, 1), remainder)
    basis = jax.tree.map(lambda rows, new: rows.at[position].set(new), subspace.basis, vector)
    diagonal = subspace.diagonal.at[position].set(jnp.where(is_vector, curvature, 1))
    return Subspace(basis, diagonal, subspace.off_diagonal.at[position].set(beta)), remainder
