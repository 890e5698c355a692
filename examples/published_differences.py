"""Differences of the code published with the SRBA paper from the paper, or from the algorithm that it names.

    python examples/published_differences.py

Each class is a solver of the library with an option that switches a difference on; without it the steps are those of
the library. The differences were found in benchopt/benchmark_bilevel (as of February 2024, the date of the
configurations of the paper, and of May 2025) and are implemented independently here. `paper/studies/published.py` and
`paper/studies/f2sa_parts.py` measure their effect.

| class | option | what the published code does |
|---|---|---|
| LossyVRBO | lost_move | both gradients of a difference are taken at the new x, so it lacks the move of x |
| ZeroMRBO | previous_at_zero | the first STORM difference uses the point (0, 0) instead of the start |
| PassSRBA | ordered_passes | blocks in passes, the first in order for every seed, each last block twice |
| PassSRBA | reread | a short last batch is filled with rows of the previous block, all with equal weights |
| PartsF2SA | growth_power | λ grows by δ_0 t^-1/7, so like t^6/7, as the paper prints |
| PartsF2SA | outer_power | x moves with steps of t^-4/7; the F²SA paper has t^-5/7 |
| PartsF2SA | y_with_penalty | y moves by α t^-5/7 (∇z F + λ ∇z G), regardless of λ |
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

import bilevel
from bilevel._core import trees
from bilevel._core.types import Rows
from bilevel.oracles.samples import permute
from bilevel.solvers.base import solver
from bilevel.solvers.fields import flag, fraction
from bilevel.solvers.moves import batch, decay, decay_share, move, move_outer, split, storm
from bilevel.solvers.mrbo import StormState
from bilevel.solvers.neumann import NeumannDraw, hypergradient_calls


@solver
class LossyVRBO(bilevel.VRBO):
    """VRBO whose estimates ignore the move of x.

    Parameters
    ----------
    lost_move : omit the difference over the move of x
    """

    lost_move: bool = flag(default=True)

    def step(self, oracles, state, index, draw):
        if not self.lost_move:
            return bilevel.VRBO.step(self, oracles, state, index, draw)
        moved = move_outer(oracles, state.point, state.outer_estimate, self.step_size / self.outer_ratio)

        def inner_move(k, state):
            z = move(state.point.inner_var, state.inner_estimate, self.step_size)
            next_state = state._replace(point=state.point._replace(inner_var=z))
            return self._correct(oracles, next_state, state.point, draw, k)

        return jax.lax.fori_loop(1, self.n_inner_steps + 1, inner_move, state._replace(point=moved))

    def calls(self, oracles, draw, refresh):
        every = bilevel.VRBO.calls(self, oracles, draw, refresh)
        if not self.lost_move:
            return every
        first, products, cross = split(batch(draw.inner, 0), None, self.n_neumann, None)
        hyper = NeumannDraw(products, cross, batch(draw.outer, 0))
        one = hypergradient_calls(oracles, hyper, self.n_neumann)._replace(inner_grad=oracles.count_inner(first))
        return trees.subtract(every, trees.scale(2, one))


@solver
class ZeroMRBO(bilevel.MRBO):
    """MRBO whose first difference starts at zero.

    Parameters
    ----------
    previous_at_zero : use (0, 0) as the point before the start, and 0 as its estimates
    """

    previous_at_zero: bool = flag(default=True)

    def refresh(self, oracles, state, index, draw):
        if not self.previous_at_zero:
            return bilevel.MRBO.refresh(self, oracles, state, index, draw)
        here = self._gradients(oracles, state.point, draw)
        there = self._gradients(oracles, trees.zeros_like(state.point), draw)
        nothing, share = trees.zeros_like(here), decay_share(self.momentum, index, 2 / 3)
        estimate = storm(share, here, nothing, there)._replace(v=here.v)
        z = move(state.point.inner_var, estimate.inner_var, self.step_size)
        point = state.point._replace(inner_var=z, v=here.v)
        point = move_outer(oracles, point, estimate.outer_var, self.step_size / self.outer_ratio)
        return StormState(point, state.point, estimate.inner_var, estimate.outer_var, state.moves)

    def calls(self, oracles, draw, refresh):
        return bilevel.MRBO.calls(self, oracles, draw, refresh and not self.previous_at_zero)


@solver
class PassSRBA(bilevel.SRBA):
    """SRBA with the published sampler and batches.

    Parameters
    ----------
    ordered_passes : draw blocks in passes, the first one in order, and the last block of each pass twice
    reread : fill a short last batch with rows of the previous block
    """

    ordered_passes: bool = flag(default=True)
    reread: bool = flag(default=True)

    def draw(self, oracles, key, index):
        if not self.ordered_passes:
            return bilevel.SRBA.draw(self, oracles, key, index)
        keys = jax.random.fold_in(key, 0), jax.random.fold_in(key, 1)
        levels = oracles.inner_samples, oracles.outer_samples
        return Rows(*(block_of_pass(level.n_blocks, each, index) for level, each in zip(levels, keys, strict=True)))

    def step(self, oracles, state, index, draw):
        return bilevel.SRBA.step(self, with_reread_rows(oracles) if self.reread else oracles, state, index, draw)


def block_of_pass(n_blocks, key, index):
    """Return the block of step ``index``: in order in the first pass, permuted by the key in later passes."""
    turn, place = jnp.divmod(index, n_blocks + 1)
    place = jnp.minimum(place, n_blocks - 1)
    return jnp.where(turn == 0, place, permute(jax.random.fold_in(key, turn), place, n_blocks))


def with_reread_rows(oracles):
    """Return oracles whose short last block is filled with earlier rows; all of its rows have equal weights."""
    levels = oracles.inner_samples, oracles.outer_samples
    inner, outer = (replace(samples, blocks=None, row_weights=None) for samples in levels)
    return replace(oracles, inner_samples=inner, outer_samples=outer)


@solver
class PartsF2SA(bilevel.F2SA):
    """F²SA with traced variants of its parts, so that one program runs every combination. The default equals F2SA.

    Parameters
    ----------
    growth_power : λ grows by δ_0 t^-growth_power
    outer_power : the step of x decreases like t^-outer_power
    y_with_penalty : if 1, the step of y along ∇z F/λ + ∇z G is α λ t^-5/7, as published; otherwise (α/2) t^-4/7
    """

    growth_power: float = fraction(default=6 / 7)
    outer_power: float = fraction(default=5 / 7)
    y_with_penalty: float = 0.0

    def outer_step(self, index):
        return decay(self.step_size / self.outer_ratio, index, self.outer_power)

    def growth(self, index):
        return decay(self.delta_0, index, self.growth_power)

    def y_step(self, penalty, index):
        published = decay(self.step_size, index, 5 / 7) * penalty
        return jnp.where(self.y_with_penalty > 0.5, published, decay(self.step_size, index, 4 / 7) / 2)


PRINTED = {"growth_power": 1 / 7, "outer_power": 4 / 7, "y_with_penalty": 1.0, "shared_batch": False}

PAIRS = {
    "VRBO loses the move of x": (bilevel.VRBO(0.1, 1.0, 16), LossyVRBO(0.1, 1.0, 16)),
    "MRBO's previous iterate is 0": (bilevel.MRBO(0.1, 1.0, 16), ZeroMRBO(0.1, 1.0, 16)),
    "SRBA's batches in passes": (bilevel.SRBA(0.1, 1.0, 24), PassSRBA(0.1, 1.0, 24)),
    "F²SA as printed": (bilevel.F2SA(0.1, 1.0, 16, delta_0=1.0), PartsF2SA(0.1, 1.0, 16, delta_0=1.0, **PRINTED)),
}


def main():
    problem = bilevel.problems.quadratic(512, 256, 8, 4, common_linear=0.5, dtype="float64")
    print("||∇h||² after 500 000 oracle calls, quadratics with 512 and 256 samples")
    for title, pair in PAIRS.items():
        ours, published = (bilevel.run(problem, solver, max_calls=500_000) for solver in pair)
        ends = [f"{run.history['hypergrad_norm_sq'][-1]:.2g} ({run.status.value})" for run in (ours, published)]
        print(f"{title}: ours {ends[0]}, with the difference {ends[1]}")


if __name__ == "__main__":
    main()
