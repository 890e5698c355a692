"""How the published code differs from the paper or from the algorithm it names, at equal oracle calls.

    python -m paper.studies.published [--from-kept] [--resume] [--quick --folder FOLDER]

Results are kept in reports/reproduction/published.csv, from which tables and figure are drawn. The differences are the
solvers of examples/published_differences.py. Every variant runs over the same grid of step sizes and ratios with the
same batches: three seeds on the small quadratics, one on the others. `bilevel.datasets` loads IJCNN1.
"""

import functools
import sys
import time
from itertools import product

import jax
import numpy as np

import bilevel
from benchmarks.markdown import number
from bilevel._core.compilation import arithmetic
from bilevel.engine.loop import advance, draw_page, for_one_run, initial_state, run_key
from bilevel.engine.steps import prepare
from paper.markdown import markdown_table as table
from paper.studies.common import (
    QUADRATIC,
    ROOT,
    draw,
    epochs,
    ijcnn1,
    paper_quadratic,
    run_cells,
    small_quadratic,
    study,
)
from paper.studies.common import tables as write_tables

sys.path.append(str(ROOT / "examples"))
import published_differences as published

# A part of the grids that contains every published winner; the stated grid has steps up to 0.25.
WIDE = {"step_size": (0.0625, 0.125, 0.25, 0.5, 2.0), "outer_ratio": (10**-1.5, 0.1, 1.0)}
SMALL, PAPER, REAL = "small quadratics", "quadratics", "IJCNN1"
EPOCHS = {SMALL: 1000, PAPER: 100, REAL: 50}
SHORT, SEED, CLOCK = "a last short batch", "the seed in the first pass", "the clock"
SAYS, DOES = "as stated", "as published"
PERIODS = {SMALL: {"short": 6, "long": 96}, PAPER: {"short": 5, "long": 264}, REAL: {"short": 22, "long": 1106}}
# The winners that the published configurations name: step size and outer ratio.
WINNERS = {
    (PAPER, "VRBO"): (0.1, 1.0),
    (PAPER, "MRBO"): (0.1, 0.1),
    (PAPER, "StocBiO"): (0.1, 1.0),
    (PAPER, "SRBA"): (0.1, 1.0),
    (PAPER, "F2SA"): (0.1, 1.0),
    (REAL, "VRBO"): (0.0625, 10**-1.5),
    (REAL, "MRBO"): (0.5, 10**-1.5),
    (REAL, "StocBiO"): (0.25, 1.0),
    (REAL, "SRBA"): (0.5, 1.0),
    (REAL, "SABA"): (0.25, 1.0),
    (REAL, "AmIGO"): (0.125, 0.1),
}


def parts(quick):
    builders = {SMALL: small_quadratic} | ({} if quick else {PAPER: paper_quadratic, REAL: ijcnn1})
    problems = {name: functools.cache(build) for name, build in builders.items()}
    for name, problem in problems.items():
        for difference, variant, make, grid in comparisons(name, quick):
            common = {"kind": "cell", "problem": name, "difference": difference, "variant": variant}
            yield common, functools.partial(cells, name, problem, make, grid, quick)
        yield fact(name, SHORT), functools.partial(biases, name, problem)
        yield fact(name, SEED), functools.partial(seeds_apart, name, problem)
    # The clock comes last, because nothing else may run at the same time.
    for name, problem in problems.items():
        yield fact(name, CLOCK), functools.partial(clocks, problem, 3 if quick else 30)


def fact(problem, difference):
    return {"kind": "fact", "problem": problem, "difference": difference}


def comparisons(name, quick):
    """Yield (difference, variant, function from step and ratio to solver, grid)."""
    batch, grid = (24 if name == SMALL else 64), (WIDE if name == REAL else QUADRATIC)
    if quick:
        grid = {"step_size": (0.1,), "outer_ratio": (1.0,)}
        yield "SRBA's batches", SAYS, lambda a, r: sampled(a, r, batch, False, False), grid
        yield "SRBA's batches", DOES, lambda a, r: sampled(a, r, batch, True, True), grid
        return
    for length, period in PERIODS[name].items():
        title = f"VRBO loses the move of x, {length} period"
        yield title, SAYS, lambda a, r, q=period: published.LossyVRBO(a, r, batch, q, lost_move=False), grid
        yield title, DOES, lambda a, r, q=period: published.LossyVRBO(a, r, batch, q), grid
    title = "MRBO's previous iterate starts at 0"
    yield title, SAYS, lambda a, r: published.ZeroMRBO(a, r, batch, previous_at_zero=False), grid
    yield title, DOES, lambda a, r: published.ZeroMRBO(a, r, batch), grid
    yield "SRBA's batches", SAYS, lambda a, r: sampled(a, r, batch, False, False), grid
    yield "SRBA's batches", "in passes", lambda a, r: sampled(a, r, batch, True, False), grid
    yield "SRBA's batches", "short batch re-reads", lambda a, r: sampled(a, r, batch, False, True), grid
    yield "SRBA's batches", DOES, lambda a, r: sampled(a, r, batch, True, True), grid
    for cls in (bilevel.StocBiO, bilevel.MRBO):
        title = f"{cls.__name__}'s Neumann step is the inner step"
        yield title, SAYS, lambda a, r, cls=cls: cls(a, r, batch), grid
        yield title, DOES, lambda a, r, cls=cls: cls(a, r, batch, neumann_step=a), grid
    for delta in (0.01, 1.0):
        title = f"F2SA's schedule, δ_0 = {delta:g}"
        yield title, SAYS, lambda a, r, d=delta: published.PartsF2SA(a, r, batch, delta_0=d), grid
        yield title, DOES, lambda a, r, d=delta: published.PartsF2SA(a, r, batch, delta_0=d, **published.PRINTED), grid
    if name == REAL:
        for cls in (bilevel.SABA, bilevel.AmIGO):
            yield f"{cls.__name__}'s grid", SAYS, lambda a, r, cls=cls: cls(a, r, batch), grid


def sampled(step_size, ratio, batch, passes, reread):
    return published.PassSRBA(step_size, ratio, batch, ordered_passes=passes, reread=reread)


def cells(name, build, make, grid, quick):
    problem = build()
    solvers = [make(step, ratio) for step, ratio in product(grid["step_size"], grid["outer_ratio"])]
    calls, seeds = epochs(problem, 20 if quick else EPOCHS[name]), (0, 1, 2) if name == SMALL else (0,)
    rows = []
    for solver, seed, cell in run_cells(problem, solvers, seeds, calls):
        last = cell.rows[-1]
        row = {
            "seed": seed,
            "step_size": solver.step_size,
            "outer_ratio": solver.outer_ratio,
            "status": cell.status.value,
        }
        kept = ("step", "calls", "value", "hypergrad_norm_sq", "largest_x", "largest_z")
        rows.append(row | {key: last[key] for key in kept})
    return rows


def found(variant, quantity, value):
    return {"variant": variant, "quantity": quantity, "result": float(value)}


def biases(name, build):
    """Return the relative bias of the mean over all batches of D at the start."""
    problem, batch = build(), 24 if name == SMALL else 64
    with arithmetic(np.float64):
        oracles = problem.oracles.astype(np.float64).with_batches(batch, "blocks")
        point = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), problem.start)
        exact = oracles.direction(point)
        means = {SAYS: mean_direction(oracles, point, weighted=True)}
        means["counts as a whole one"] = mean_direction(oracles, point, weighted=False)
        means["re-reads"] = mean_direction(published.with_reread_rows(oracles), point, weighted=False)
    size = norm(exact)
    off = {variant: norm(jax.tree.map(np.subtract, mean, exact)) / size for variant, mean in means.items()}
    return [found(variant, "relative bias of D", value) for variant, value in off.items()]


def mean_direction(oracles, point, weighted):
    """Return the mean of D over all pairs of blocks; D is a sum over the levels, so each is averaged separately."""

    def level(samples, direction):
        blocks = np.arange(samples.n_blocks, dtype=np.int32)
        share = np.asarray(samples.share(blocks)) if weighted else np.full(len(blocks), 1 / len(blocks))
        values = jax.jit(lambda blocks: jax.lax.map(direction, blocks))(blocks)
        return jax.tree.map(lambda leaf: np.tensordot(share, np.asarray(leaf), 1), values)

    inner = level(oracles.inner_samples, lambda block: oracles.inner(point, block))
    outer = level(oracles.outer_samples, lambda block: oracles.outer(point, block))
    return bilevel.oracles.join(inner, outer)


def norm(tree):
    return float(np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(tree))))


def seeds_apart(name, build):
    """Return the distance of two seeds after half a pass, relative to the distance from the start."""
    problem, batch = build(), 24 if name == SMALL else 64
    steps = min(problem.n_inner, problem.n_outer) // batch // 2
    rows = []
    for variant, passes in ((SAYS, False), (DOES, True)):
        solver = sampled(0.05, 1.0, batch, passes, reread=False)
        one, other = (bilevel.run(problem, solver, seed=seed, max_steps=steps, eval_every=steps) for seed in (0, 1))
        apart = norm(jax.tree.map(np.subtract, one.point, other.point))
        way = norm(jax.tree.map(np.subtract, one.point, problem.start))
        rows.append(found(variant, "distance of two seeds", apart / way))
    return rows


def clocks(build, rounds):
    """Return the median time per step of SRBA by a clock that waits for the result and by one that does not."""
    rows = []
    for steps in (128, 2048):
        waits, hurries = clock(build(), steps, rounds)
        for variant, seconds in ((SAYS, waits), (DOES, hurries)):
            rows.append(found(variant, f"µs per step, {steps} steps at once", 1e6 * seconds / steps))
    return rows


def clock(problem, steps, rounds):
    batch = 24 if problem.n_inner < 1000 else 64
    solver, oracles, *_ = prepare(problem, bilevel.SRBA(0.05, 1.0, batch))
    with arithmetic(problem.dtype):
        solver = solver.cast(problem.dtype)
        page = draw_page(solver, oracles, run_key(0), np.int32(0), steps)
        state = initial_state(solver, oracles, problem.start)
        limits, seconds = (np.int32(0), np.int32(steps)), []
        jax.block_until_ready(advance(solver, for_one_run(oracles), state, page, *limits))
        for _ in range(rounds):
            began = time.perf_counter()
            later = advance(solver, for_one_run(oracles), state, page, *limits)
            handed_over = time.perf_counter()
            jax.block_until_ready(later)
            seconds.append((time.perf_counter() - began, handed_over - began))
    return np.median(seconds, axis=0)


# Tables and figure


def metric_of(problem):
    return "value" if problem == REAL else "hypergrad_norm_sq"


def medians(rows, stated_only=False):
    """Return the median of the metric over seeds for each setting, infinite if most seeds diverged."""
    by_setting = {}
    for row in rows:
        setting = row["step_size"], row["outer_ratio"]
        bad = row["status"] == "diverged" or row["value"] is None or not np.isfinite(row["value"])
        by_setting.setdefault(setting, []).append(np.inf if bad else row[metric_of(row["problem"])])
    found = {setting: float(np.median(values)) for setting, values in by_setting.items()}
    return {s: v for s, v in found.items() if not stated_only or s[0] <= 0.25}


def at_winner(rows, found):
    """Return the median at the setting that the published configuration names for this solver, with δ_0 = 0.01."""
    difference = rows[0]["difference"]
    solver = difference.split("'")[0].split(" ")[0]
    winner = None if difference.endswith("δ_0 = 1") else WINNERS.get((rows[0]["problem"], solver))
    near = [s for s in found if winner is not None and np.allclose(s, winner, rtol=1e-4)]
    return found[near[0]] if near else None


def groups(rows):
    """Group the rows of cells by (problem, difference), then by variant."""
    found = {}
    for row in rows:
        if row["kind"] == "cell":
            by_variant = found.setdefault((row["problem"], row["difference"]), {})
            by_variant.setdefault(row["variant"], []).append(row)
    return found


def shown(value):
    return "diverged" if value == np.inf else number(value)


def difference_table(rows):
    """Return a table of differences: best of the grid, published setting and diverged settings of both variants."""
    lines = []
    for (problem, difference), by_variant in groups(rows).items():
        said = cells_of(by_variant[SAYS])
        for variant, of_variant in by_variant.items():
            if variant != SAYS:
                title = difference if variant == DOES else f"{difference}: {variant}"
                pairs = zip(said, cells_of(of_variant), strict=True)
                lines.append([title, problem, *(cell for pair in pairs for cell in pair)])
    what = "best of the grid", "published setting", "diverged"
    return table(["difference", "problem", *(f"{w}, {v}" for w in what for v in (SAYS, DOES))], lines)


def cells_of(rows):
    found = medians(rows)
    diverged = sum(value == np.inf for value in found.values())
    return shown(min(found.values())), shown(at_winner(rows, found)), f"{diverged} of {len(found)}"


def grid_table(rows):
    """Return the best h on IJCNN1 within the stated grid and on a wider one."""
    lines = []
    for (problem, difference), by_variant in groups(rows).items():
        solver = difference.split("'")[0]
        if problem != REAL or not difference.endswith(("grid", "batches", "is 0", "Neumann step is the inner step")):
            continue
        wide, stated = medians(by_variant[SAYS]), medians(by_variant[SAYS], stated_only=True)
        best = min(wide, key=wide.get)
        cells = [shown(min(stated.values())), shown(wide[best]), f"{best[0]:g}, {best[1]:.3g}"]
        lines.append([solver, *cells, shown(at_winner(by_variant[SAYS], wide))])
    columns = [
        "solver",
        "best h, stated grid",
        "best h, wider grid",
        "its step and ratio",
        "h at the published setting",
    ]
    return table(columns, list({line[0]: line for line in lines}.values()))


def fact_table(rows):
    lines = {}
    for row in rows:
        if row["kind"] == "fact":
            key = row["difference"], row["problem"], row["quantity"]
            lines.setdefault(key, []).append(f"{row['variant']}: {number(row['result']) if row['result'] else '0'}")
    return table(["difference", "problem", "what", "found"], [[*key, "; ".join(said)] for key, said in lines.items()])


def show(rows, folder):
    write_tables(
        folder, "published", differences=difference_table(rows), grids=grid_table(rows), facts=fact_table(rows)
    )
    draw(folder, "published", len({row["problem"] for row in rows}), lambda axes: plot(rows, axes), size=(3.4, 3.0))


def plot(rows, axes):
    """Draw the best of the grid of each variant, one line per difference that changes it."""
    by_problem = {}
    for (problem, difference), by_variant in groups(rows).items():
        if DOES in by_variant and (not difference.startswith("SRBA") or problem == SMALL):
            by_problem.setdefault(problem, []).append((difference, by_variant))
    for axis, (problem, lines) in zip(axes, by_problem.items(), strict=True):
        lines = [line for line in reversed(lines) if len(lines) == 1 or not line[0].startswith("SRBA")]
        for variant, style in ((SAYS, "oC0"), (DOES, "xC3")):
            ends = [min(medians(by_variant[variant]).values()) for _, by_variant in lines]
            axis.plot(ends, range(len(lines)), style, label=variant)
        axis.set_yticks(range(len(lines)), [difference if axis is axes[0] else "" for difference, _ in lines])
        axis.set(title=problem, xlabel="h" if problem == REAL else "‖∇h‖²")
        axis.set_xscale("linear" if problem == REAL else "log")
    axes[-1].legend()


if __name__ == "__main__":
    bilevel.fuse_cpu_loops()
    study(__doc__, "published", parts, show)
