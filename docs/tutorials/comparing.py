# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Comparing solvers fairly
#
# Which solver is faster? That depends on what is counted. A run counts two things: **oracle calls**, the rows that were
# read, by kind of derivative, which are the same on every machine; and **seconds** of stepping, without compilation
# and without evaluations, which are what you wait for. A step is no measure: a step of one solver reads 64 rows where
# a step of another uses a full batch.
#
# The problem is a small quadratic, for which everything is known exactly.

# %%
import matplotlib.pyplot as plt
import numpy as np

import bilevel

# %matplotlib inline
# %config InlineBackend.figure_formats = ["svg"]

problem = bilevel.problems.quadratic(512, 256, 8, 4, common_linear=0.5, dtype="float64")
n, m = problem.n_inner, problem.n_outer
print(n, "inner samples,", m, "outer samples, an epoch is", n + m, "calls")

# %% [markdown]
# ## Each at its best setting
#
# Solvers compared at one step size tell nothing. Each gets the same grid and the same budget of calls; the
# setting that ends with the lowest `value_gap`, h(x) - min h, is kept. Float parameters are traced, so a solver is
# compiled once for all its settings.

# %%
BUDGET = 300_000
GRID = [(step, ratio) for step in (0.1, 0.2, 0.4, 0.8, 1.6, 3.2) for ratio in (0.3, 1.0, 3.0, 10.0, 30.0, 100.0)]


def final_gap(result):
    return np.inf if result.status == "diverged" else result.history["value_gap"][-1]


def tune(cls):
    runs = [bilevel.run(problem, cls(step, ratio, 16), max_calls=BUDGET) for step, ratio in GRID]
    diverged = sum(run.status == "diverged" for run in runs)
    best = min(runs, key=final_gap).solver
    print(f"{cls.__name__:<5}  step {best.step_size}, ratio {best.outer_ratio}; {diverged} of {len(GRID)} diverged")
    return best


solvers = [tune(bilevel.SRBA), tune(bilevel.SABA), tune(bilevel.SOBA), tune(bilevel.AmIGO), bilevel.Exact()]

# %% [markdown]
# None of them lies at the edge of the grid, which was widened until that was so: on narrower ones SRBA's curve ended
# far above SABA's. The order of solvers is a statement about the grid, too.
#
# ## Calls and seconds
#
# The selected settings run again, on three seeds that were not used to select them. An evaluation happens four times
# per doubling of the calls, off the clock, so the curves have points at comparable places.

# %%
figure, panels = plt.subplots(1, 2, figsize=(9, 3.8), sharey=True, layout="constrained")
for number, solver in enumerate(solvers):
    name = type(solver).__name__
    for seed in (1, 2, 3):
        history = bilevel.run(problem, solver, seed=seed, max_calls=BUDGET).history
        for axes, scale in zip(panels, ("calls", "seconds"), strict=True):
            axes.loglog(history[scale], history["value_gap"], color=f"C{number}", label=name if seed == 1 else None)
for axes, scale in zip(panels, ("calls", "seconds"), strict=True):
    axes.set_xlabel(scale)
    axes.grid(alpha=0.3)
panels[0].set_ylabel("h(x) - min h")
panels[0].legend()
plt.show()

# %% [markdown]
# The seconds are those of the machine that built this page, in float64, on rows of eight numbers; on other shapes the
# order may change ([measurements](../performance.md)). The calls do not depend on it.
#
# ## Oracle calls
#
# `result.calls` has the calls by kind. The documentation of SRBA says that a period of q steps costs 3n + 2m calls
# for the full-batch pass and 10 b for each of the other steps, with batches of b rows. The count is exact:

# %%
period, batch = 20, 16
result = bilevel.run(problem, bilevel.SRBA(0.1, 1.0, batch, period=period), max_steps=10 * period)
print(result.calls)
print(sum(result.calls), "=", 10 * (3 * n + 2 * m + 10 * batch * (period - 1)))
assert sum(result.calls) == 10 * (3 * n + 2 * m + 10 * batch * (period - 1))

# %% [markdown]
# `max_calls` is never exceeded: a step that would go beyond it is not taken. (Exact and HOAG, which learn the cost of
# a step by taking it, may exceed it by their last one.)
#
# ## A run that diverges
#
# With a step size that is too large the iterates become non-finite. That is a result, not an error: the status says so,
# the sentence says what to do, and the point is the last finite one.

# %%
result = bilevel.run(problem, bilevel.SRBA(step_size=5.0, outer_ratio=1.0, batch_size=16), max_calls=BUDGET)
print(result.status)
print(result.status.sentence)
print("finite:", np.isfinite(result.point.outer_var).all(), "- steps taken:", result.history["step"][-1])

# %% [markdown]
# A comparison should say how many of its runs ended like this. For whole grids over many seeds, kept in a store and
# shown as a page, there is [the benchmark](../benchmark.md).
