"""What the published code does otherwise, beside what the paper or the algorithm says, at equal oracle calls.

    python benchmarks/published.py [--from-kept] [--quick --folder FOLDER]

Numbers are kept in reports/reproduction/published.csv, from which table and figure are drawn. The differences are the
solvers of examples/published_differences.py. Every variant runs over the same grid of step sizes and ratios with the
same batches. IJCNN1 is looked for as `bilevel.datasets` does.
"""

import sys
import time
from itertools import product

import jax
import numpy as np
from markdown import number, table
from studies import QUADRATIC, ROOT, STATED, draw, epochs, ijcnn1, paper_quadratic, run_cells, small_quadratic, study
from studies import tables as write_tables

import bilevel
from bilevel._precision import arithmetic
from bilevel.engine.loop import advance, draw_page, initial_state, run_key

sys.path.append(str(ROOT / "examples"))
import published_differences as published

WIDE = STATED | {"step_size": (*STATED["step_size"], 0.5, 1.0, 2.0)}
SMALL, PAPER, REAL = "small quadratics", "quadratics", "IJCNN1"
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


def measure(quick):
    problems = {SMALL: small_quadratic()} if quick else {SMALL: small_quadratic(), PAPER: paper_quadratic()}
    if not quick:
        problems[REAL] = ijcnn1()
    rows = []
    for name, problem in problems.items():
        for difference, variant, make, grid in comparisons(name, quick):
            began = time.perf_counter()
            rows += cells(name, problem, difference, variant, make, grid, quick)
            print(f"{name}, {difference}, {variant}: {time.perf_counter() - began:.0f} s", flush=True)
        rows += biases(name, problem) + seeds_apart(name, problem)
    # The clock comes last: nothing else may run beside it.
    return rows + [row for name, problem in problems.items() for row in clocks(name, problem, 3 if quick else 30)]


def comparisons(name, quick):
    """Yield (difference, variant, function from step and ratio to solver, grid)."""
    batch, grid = (24 if name == SMALL else 64), (WIDE if name == REAL else QUADRATIC)
    if quick:
        grid = {"step_size": (0.1,), "outer_ratio": (1.0,)}
    for length, period in PERIODS[name].items():
        title = f"VRBO loses the move of x, {length} period"
        yield title, SAYS, lambda a, r, q=period: published.LossyVRBO(a, r, batch, q, lost_move=False), grid
        yield title, DOES, lambda a, r, q=period: published.LossyVRBO(a, r, batch, q), grid
    title = "MRBO's previous iterate starts at 0"
    yield title, SAYS, lambda a, r: published.ZeroMRBO(a, r, batch, previous_at_zero=False), grid
    yield title, DOES, lambda a, r: published.ZeroMRBO(a, r, batch), grid
    yield "SRBA's batches", SAYS, lambda a, r: sampled(a, r, batch, False, False), grid
    yield "SRBA's batches", "in passes", lambda a, r: sampled(a, r, batch, True, False), grid
    if quick:
        return
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


def cells(name, problem, difference, variant, make, grid, quick):
    solvers = [make(step, ratio) for step, ratio in product(grid["step_size"], grid["outer_ratio"])]
    calls = epochs(problem, 20 if quick else 1000 if name == SMALL else 100)
    rows = []
    for solver, seed, cell in run_cells(problem, solvers, [0] if quick else [0, 1, 2], calls):
        last = cell.rows[-1]
        row = {"kind": "cell", "problem": name, "difference": difference, "variant": variant, "seed": seed}
        row |= {"step_size": solver.step_size, "outer_ratio": solver.outer_ratio, "status": cell.status.value}
        kept = ("step", "calls", "value", "hypergrad_norm_sq", "largest_x", "largest_z")
        rows.append(row | {key: last[key] for key in kept})
    return rows


def fact(problem, difference, variant, quantity, value):
    row = {"kind": "fact", "problem": problem, "difference": difference, "variant": variant}
    return row | {"quantity": quantity, "result": float(value)}


def biases(name, problem):
    """How far the mean over all batches of the direction at the start is from the full-batch one, relative to it."""
    batch = 24 if name == SMALL else 64
    with arithmetic(np.float64):
        oracles = problem.oracles.astype(np.float64).with_batches(batch, "blocks")
        point = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), problem.start)
        exact = oracles.direction(point)
        found = {SAYS: mean_direction(oracles, point, weighted=True)}
        found["short batch counts as a whole one"] = mean_direction(oracles, point, weighted=False)
        found["short batch re-reads"] = mean_direction(published.with_reread_rows(oracles), point, weighted=False)
    size = norm(exact)
    off = {variant: norm(jax.tree.map(np.subtract, mean, exact)) / size for variant, mean in found.items()}
    return [fact(name, "a last short batch", variant, "relative bias of D", value) for variant, value in off.items()]


def mean_direction(oracles, point, weighted):
    """The mean of D over all pairs of blocks: both levels add up, so each is averaged alone."""

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


def seeds_apart(name, problem):
    """How far two seeds are apart after half a pass, relative to the way from the start."""
    batch = 24 if name == SMALL else 64
    steps = min(problem.n_inner, problem.n_outer) // batch // 2
    rows = []
    for variant, passes in ((SAYS, False), (DOES, True)):
        solver = sampled(0.05, 1.0, batch, passes, reread=False)
        one, other = (bilevel.run(problem, solver, seed=seed, max_steps=steps, eval_every=steps) for seed in (0, 1))
        apart = norm(jax.tree.map(np.subtract, one.point, other.point))
        way = norm(jax.tree.map(np.subtract, one.point, problem.start))
        rows.append(fact(name, "the seed in the first pass", variant, "distance of two seeds", apart / way))
    return rows


def clocks(name, problem, rounds):
    """Seconds per step of SRBA by a clock that waits for the result and by one that does not; medians."""
    rows = []
    for steps in (128, 2048):
        waits, hurries = clock(problem, steps, rounds)
        for variant, seconds in ((SAYS, waits), (DOES, hurries)):
            rows.append(fact(name, "the clock", variant, f"µs per step, {steps} steps at once", 1e6 * seconds / steps))
    return rows


def clock(problem, steps, rounds):
    batch = 24 if problem.n_inner < 1000 else 64
    with arithmetic(problem.dtype):
        oracles = problem.oracles.with_batches(batch, "blocks")
        solver = bilevel.SRBA(0.05, 1.0, batch).resolve(oracles).cast(problem.dtype)
        page = draw_page(solver, oracles, run_key(0), np.int32(0), steps)
        state = initial_state(solver, oracles, problem.start)
        limits, seconds = (np.int32(0), np.int32(steps)), []
        jax.block_until_ready(advance(solver, oracles, state, page, *limits))
        for _ in range(rounds):
            began = time.perf_counter()
            later = advance(solver, oracles, state, page, *limits)
            handed_over = time.perf_counter()
            jax.block_until_ready(later)
            seconds.append((time.perf_counter() - began, handed_over - began))
    return np.median(seconds, axis=0)


# What the table and the figure show of the rows.


def metric_of(problem):
    return "value" if problem == REAL else "hypergrad_norm_sq"


def medians(rows, stated_only=False):
    """Settings with the median over the seeds of the metric; infinite where most seeds diverged."""
    by_setting = {}
    for row in rows:
        setting = row["step_size"], row["outer_ratio"]
        bad = row["status"] == "diverged" or row["value"] is None or not np.isfinite(row["value"])
        by_setting.setdefault(setting, []).append(np.inf if bad else row[metric_of(row["problem"])])
    found = {setting: float(np.median(values)) for setting, values in by_setting.items()}
    return {s: v for s, v in found.items() if not stated_only or s[0] <= 0.25}


def at_winner(rows, found):
    solver = rows[0]["difference"].split("'")[0].split(" ")[0]
    winner = WINNERS.get((rows[0]["problem"], solver))
    near = [s for s in found if winner is not None and np.allclose(s, winner, rtol=1e-4)]
    return found[near[0]] if near else None


def groups(rows):
    """Rows of cells by (problem, difference), then by variant."""
    found = {}
    for row in rows:
        if row["kind"] == "cell":
            by_variant = found.setdefault((row["problem"], row["difference"]), {})
            by_variant.setdefault(row["variant"], []).append(row)
    return found


def shown(value):
    return "diverged" if value == np.inf else number(value)


def difference_table(rows):
    lines = []
    for (problem, difference), by_variant in groups(rows).items():
        if difference.endswith("grid"):
            continue
        for variant, of_variant in by_variant.items():
            found = medians(of_variant)
            diverged = sum(value == np.inf for value in found.values())
            winner = shown(at_winner(of_variant, found))
            lines.append([difference, problem, variant, winner, shown(min(found.values()))])
            lines[-1].append(f"{diverged} of {len(found)}")
    columns = ["difference", "problem", "variant", "at the published setting", "best of the grid", "settings diverged"]
    return table(columns, lines)


def grid_table(rows):
    """On IJCNN1, the best h within the stated grid and beyond it."""
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
    draw(folder, "published", len({row["problem"] for row in rows}), lambda axes: plot(rows, axes), size=(4.6, 4.2))


def plot(rows, axes):
    """Best of the grid and the published setting of each variant, a line per difference."""
    by_problem = {}
    for (problem, difference), by_variant in groups(rows).items():
        if not difference.endswith("grid"):
            by_problem.setdefault(problem, []).append((difference, by_variant))
    for axis, (problem, lines) in zip(axes, by_problem.items(), strict=True):
        for place, (_, by_variant) in enumerate(reversed(lines)):
            for variant, of_variant in by_variant.items():
                best = min(medians(of_variant).values())
                marker = {"color": "C0" if variant == SAYS else "C3" if variant == DOES else "C1"}
                axis.plot([best], [place], "o" if variant == SAYS else "x", **marker)
        axis.set_yticks(range(len(lines)), [difference for difference, _ in reversed(lines)])
        axis.set(title=problem, xlabel="h" if problem == REAL else "‖∇h‖²")
        if problem != REAL:
            axis.set_xscale("log")
    axes[0].plot([], [], "oC0", label=SAYS)
    axes[0].plot([], [], "xC3", label=DOES)
    axes[0].plot([], [], "xC1", label="one part of it")
    axes[0].legend(loc="lower left")


if __name__ == "__main__":
    bilevel.fuse_cpu_loops()
    study(__doc__, "published", measure, show)
