# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Cleaning data
#
# Some labels of a training set are wrong, and nobody knows which. A few clean rows are enough to find out: give each
# training row a weight, fit the model with these weights, and move the weights to lower the loss on the clean rows.
#
# `digits_cleaning` does this on the digits of scikit-learn: 1000 training rows, each label redrawn among the ten
# classes with probability one half; 300 clean validation rows; test rows that neither level sees.

# %%
import matplotlib.pyplot as plt
import numpy as np

import bilevel

# %matplotlib inline
# %config InlineBackend.figure_formats = ["svg"]

problem = bilevel.problems.digits_cleaning(corruption=0.5)
result = bilevel.run(problem, bilevel.AutoSRBA(), max_steps=3_000)
print(result.summary())

# %% [markdown]
# ## Are the wrong labels found?
#
# The outer variable x has one entry per training row, whose weight is sigmoid(x). All begin at the same weight. The
# problem knows which labels were changed and follows two more metrics, which the solver never sees: `weight_auc`, the
# probability that a clean row has a larger weight than a corrupted one, and `test_error`.

# %%
history = result.history
for metric in ("weight_auc", "test_error"):
    print(f"{metric:<10}  {history[metric][0]:.3f} -> {history[metric][-1]:.3f}")

# %%
figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
for axes, metric in zip(panels, ("weight_auc", "test_error"), strict=True):
    axes.semilogx(history["epochs"][1:], history[metric][1:], marker=".")
    axes.set_xlabel("epochs")
    axes.set_ylabel(metric)
    axes.grid(alpha=0.3)
plt.show()

# %% [markdown]
# ## The weights
#
# An AUC of 1/2 is what equal weights have; 1 would separate the two kinds of rows without fault.

# %%
weights = 1 / (1 + np.exp(-result.point.outer_var))
figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
axes.hist(weights, bins=40)
axes.set_xlabel("weight of a training row")
axes.set_ylabel("rows")
plt.show()

# %% [markdown]
# ## Against no cleaning
#
# The baseline is the same model with a weight of 1 on every row: sigmoid(x) is 1 for x far above 0. The exact solver
# of a problem gives the exactly fitted model at any x, so that both are evaluated alike.


# %%
def exact_test_error(x):
    solution = problem.exact_solver(x)
    point = bilevel.Point(solution.inner_var.astype("float32"), x, solution.v)
    return float(problem.metrics["test_error"](point))


print(f"all rows count fully   {exact_test_error(np.full(1000, 20.0)):.3f}")
print(f"weights as learned     {exact_test_error(result.point.outer_var.astype(float)):.3f}")

# %% [markdown]
# On MNIST at full size the same problem is measured ([Problems](../problems.md) links to the tables): the weights lower
# the test error at some rates of corruption and not at others.
