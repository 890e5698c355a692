"""Would a kernel that keeps the state of a cell on chip for a whole period of SRBA win over the loop of a sweep?

    python benchmarks/persistent_kernel.py            # on an NVIDIA GPU; elsewhere a tiny case, interpreted: no time

A step of SRBA on penalty selection, as `bilevel.solvers.recursive` and `bilevel.problems.linear` have it, written for
Pallas: one program of the grid is one cell, whose nine vectors stay in registers from step to step. The loop of the
engine takes the same steps on the same blocks, and the points are compared. Data are of the shape of IJCNN1, batch 64,
float32; features are padded with zeros to a power of two, which Triton asks for.
"""

import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import shapes
from jax.experimental import pallas
from markdown import number, table

import bilevel
from bilevel._precision import arithmetic
from bilevel.engine.loop import ONE_RUN, SEEDS_AND_SETTINGS, run_key
from bilevel.problems.losses import sigmoid

STEPS, CELLS, WARPS, ROUNDS = 1000, ((1, 1), (25, 10), (200, 10)), (1, 2, 4), 5
TINY = {"n_train": 330, "n_val": 200, "dim": 5}


def steps_of_cell(
    n_settings, n_steps, step_sizes, draws, outer_draws, inner, outer, weights, outer_weights, state, out
):
    """The kernel: so many steps of one cell; its vectors are z, v, x, those of the step before, and the estimate."""
    cell = pallas.program_id(0)
    seed = cell // n_settings
    step_size, outer_step = step_sizes[cell, 0], step_sizes[cell, 1]

    def terms(z, v, rows):
        residuals = sigmoid(-jnp.sum(rows * z[:, None], axis=0))
        return -residuals, residuals * (1 - residuals) * jnp.sum(rows * v[:, None], axis=0)

    def slopes(z, rows):
        return -sigmoid(-jnp.sum(rows * z[:, None], axis=0))

    def step(i, vectors):
        z, v, x, old_z, old_v, old_x, d_z, d_v, d_x = vectors
        block, outer_block = draws[seed, i], outer_draws[seed, i]
        rows, outer_rows = inner[block], outer[outer_block]
        (slope, bend), (old_slope, old_bend) = terms(z, v, rows), terms(old_z, old_v, rows)
        penalty, old_penalty = jnp.exp(x), jnp.exp(old_x)
        change = weights[block] * (slope - old_slope)
        d_z += jnp.sum(rows * change[None, :], axis=1) + penalty * z - old_penalty * old_z
        change = weights[block] * (bend - old_bend)
        d_v += jnp.sum(rows * change[None, :], axis=1) + penalty * v - old_penalty * old_v
        change = outer_weights[outer_block] * (slopes(z, outer_rows) - slopes(old_z, outer_rows))
        d_v += jnp.sum(outer_rows * change[None, :], axis=1)
        d_x += penalty * z * v - old_penalty * old_z * old_v
        return z - step_size * d_z, v - step_size * d_v, x - outer_step * d_x, z, v, x, d_z, d_v, d_x

    vectors = jax.lax.fori_loop(0, n_steps, step, tuple(state[cell, k] for k in range(9)))
    for k, vector in enumerate(vectors):
        out[cell, k] = vector


@partial(jax.jit, static_argnames=("n_settings", "n_steps", "warps"))
def persistent(n_settings, n_steps, warps, arguments):
    """The vectors of all cells after the steps; interpreted where ``warps`` is None."""
    if warps is None:
        options = {"interpret": True}
    else:
        from jax.experimental.pallas import triton

        options = {"compiler_params": triton.CompilerParams(num_warps=warps, num_stages=1)}
    state = arguments[-1]
    shape = jax.ShapeDtypeStruct(state.shape, state.dtype)
    kernel = partial(steps_of_cell, n_settings, n_steps)
    return pallas.pallas_call(kernel, shape, grid=(len(state),), **options)(*arguments)


class Case:
    """Cells after their first step, the full-batch pass, and the steps that follow it, for the loop and the kernel."""

    def __init__(self, n_settings, n_seeds, n_steps, **sizes):
        self.sizes, self.n_cells = (n_settings, n_steps), n_settings * n_seeds
        problem, steps = shapes.logistic_problem(**sizes), np.geomspace(0.03, 0.5, n_settings)
        self.dtype, self._dim = problem.dtype, problem.start.inner_var.size
        self._width = 1 << (self._dim - 1).bit_length()
        with arithmetic(self.dtype):
            oracles = problem.oracles.with_batches(shapes.BATCH, "blocks")
            solvers = [bilevel.SRBA(step, 2.0, shapes.BATCH, period=10**6).cast(self.dtype) for step in steps]
            keys = tuple(run_key(seed) for seed in range(n_seeds))
            self._advance, first = self._program(solvers, oracles, problem.start, n_seeds)
            draw, keys = (ONE_RUN.draw, keys[0]) if self.n_cells == 1 else (SEEDS_AND_SETTINGS.draw, keys)
            self._page = draw(solvers[0], oracles, keys, np.int32(0), n_steps + 1)
            self._start = self._advance(first, self._page, np.int32(0), np.int32(1))
        self.arguments = self._arguments(oracles, n_seeds, np.tile(steps, n_seeds))

    def _program(self, solvers, oracles, start, n_seeds):
        """The loop as the engine has it for one run or for many, and the first state."""
        if self.n_cells == 1:
            return partial(ONE_RUN.advance, solvers[0], oracles), ONE_RUN.init(solvers[0], oracles, start)
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *solvers)
        first = SEEDS_AND_SETTINGS.init(stacked, oracles, start)
        first = jax.tree.map(lambda leaf: jnp.stack([leaf] * n_seeds), first)
        return partial(SEEDS_AND_SETTINGS.advance, stacked, oracles), first

    def _arguments(self, oracles, n_seeds, steps):
        levels = oracles.inner_samples, oracles.outer_samples
        pad = (0, 0), (0, self._width - self._dim), (0, 0)
        blocks = [jnp.pad(level.blocks, pad) for level in levels]
        equal = [jnp.full((level.n_blocks, shapes.BATCH), 1 / shapes.BATCH, self.dtype) for level in levels]
        weights = [
            even if level.row_weights is None else level.row_weights.reshape(even.shape)
            for level, even in zip(levels, equal, strict=True)
        ]
        draws = [part.reshape(n_seeds, -1)[:, 1:] for part in self._page.draws]
        sizes = jnp.asarray(np.stack([steps, steps / 2], axis=1), self.dtype)
        return sizes, *draws, *blocks, *weights, self.vectors(self._start)

    def vectors(self, state):
        """The nine vectors of each cell."""
        points = state.point, state.previous, state.estimate
        parts = [part for point in points for part in (point.inner_var, point.v, point.outer_var)]
        flat = [jnp.reshape(part, (self.n_cells, self._dim)) for part in parts]
        return jnp.stack([jnp.pad(part, ((0, 0), (0, self._width - self._dim))) for part in flat], axis=1)

    def loop(self):
        with arithmetic(self.dtype):
            return self._advance(self._start, self._page, np.int32(1), np.int32(self.sizes[1] + 1))

    def kernel(self, warps):
        return persistent(*self.sizes, warps, self.arguments)


def micros(function, cell_steps):
    """Microseconds per cell-step, best of some rounds, without compilation."""
    jax.block_until_ready(function())
    seconds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        jax.block_until_ready(function())
        seconds.append(time.perf_counter() - began)
    return 1e6 * min(seconds) / cell_steps


def gap(case, warps):
    """The largest difference of any entry, relative to the largest entry."""
    expected, found = np.asarray(case.vectors(case.loop())), np.asarray(case.kernel(warps))
    return np.abs(found - expected).max() / np.abs(expected).max()


def main():
    if jax.default_backend() != "gpu":
        print(f"No GPU: 20 interpreted steps of 6 cells differ by {gap(Case(3, 2, 20, **TINY), None):.1e}.")
        return
    rows = []
    for n_settings, n_seeds in CELLS:
        case = Case(n_settings, n_seeds, STEPS)
        cell_steps = case.n_cells * STEPS
        loop = micros(case.loop, cell_steps)
        for warps in WARPS:
            kernel = micros(partial(case.kernel, warps), cell_steps)
            cells = [f"{n_settings} × {n_seeds}", str(warps), *map(number, (loop, kernel, loop / kernel))]
            rows.append([*cells, f"{gap(case, warps):.1e}"])
            print(*rows[-1], flush=True)
    print(table(["settings × seeds", "warps", "loop, µs per cell-step", "kernel", "loop / kernel", "difference"], rows))


if __name__ == "__main__":
    main()
