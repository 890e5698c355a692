# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # A penalty for each feature
#
# Logistic regression with an L2 penalty has one number to tune, and a grid does that. With one penalty per feature
# there are thirty, and no grid does. A bilevel problem does: the inner level fits the model for given penalties, the
# outer level moves the penalties to lower the loss on validation rows.
#
# The data are the breast-cancer set of scikit-learn, split in three: rows to fit on, rows to choose penalties by, and
# rows that neither level sees.

# %%
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_breast_cancer

import bilevel

# %matplotlib inline
# %config InlineBackend.figure_formats = ["svg"]

source = load_breast_cancer()
order = np.random.default_rng(0).permutation(len(source.data))
train, val, test = np.split(order, [285, 427])
X = (source.data - source.data[train].mean(0)) / source.data[train].std(0)
y = np.where(source.target == 1, 1.0, -1.0)
print(len(train), "to fit,", len(val), "to validate,", len(test), "to test;", X.shape[1], "features")

# %% [markdown]
# ## From two losses
#
# Write the loss of one sample on each level. The variables are the weights `w` and the logarithms of the penalties,
# which may then take any value.


# %%
def outer_loss(w, log_penalty, sample):
    features, label = sample
    return jnp.logaddexp(0.0, -label * (features @ w))


def inner_loss(w, log_penalty, sample):
    return outer_loss(w, log_penalty, sample) + jnp.sum(jnp.exp(log_penalty) * w**2) / 2


problem = bilevel.BilevelProblem.from_losses(
    inner_loss,
    outer_loss,
    (X[train], y[train]),
    (X[val], y[val]),
    inner_var=np.zeros(30),
    outer_var=np.full(30, -2.0),
    outer_bounds=(-12.0, 12.0),
    strongly_convex=True,
)
problem.check()

# %% [markdown]
# `check` compares every derivative with finite differences and returns the relative errors: the losses are as the
# library takes them to be. `strongly_convex=True` holds because every penalty is above 0; it lets a run be evaluated at
# the exact inner solution. `outer_bounds` keeps the penalties between exp(-12) and exp(12): one of no use would grow
# without end.
#
# `AutoSRBA` needs no tuning ([how](../auto.md)).

# %%
result = bilevel.run(problem, bilevel.AutoSRBA(), max_steps=5_000)
print(result.summary())

# %% [markdown]
# Read it from the top: the solver with the parameters that it chose; how the run ended; steps and the seconds that they
# took; calls, which are rows read, by kind of derivative. Then each metric at the start and at the end: `value` is
# the validation loss h of the exactly fitted model, `hypergrad_norm_sq` the squared norm of its gradient with respect
# to the penalties.

# %%
result.plot("value")

# %% [markdown]
# ## The ready problem
#
# `bilevel.problems.penalty_selection` is the same problem in closed form. Here it starts at the same point.

# %%
ready = bilevel.problems.penalty_selection(
    X[train],
    y[train],
    X[val],
    y[val],
    inner_var=np.zeros(30),
    outer_var=np.full(30, -2.0),
    outer_bounds=(-12.0, 12.0),
)
per_feature = bilevel.run(ready, bilevel.AutoSRBA(), max_steps=5_000)
for name, run in {"own losses": result, "ready": per_feature}.items():
    print(f"{name:<10}  h = {run.history['value'][-1]:.5f}  in {run.history['seconds'][-1]:.3f} s of stepping")

# %% [markdown]
# The two runs differ: rows are shuffled differently, and the closed form gives curvatures that the first run estimates.
#
# ## One penalty instead
#
# `groups` says which features share a penalty; here all do.

# %%
shared = bilevel.problems.penalty_selection(
    X[train],
    y[train],
    X[val],
    y[val],
    groups=np.zeros(30, int),
    inner_var=np.zeros(30),
    outer_var=np.full(1, -2.0),
    outer_bounds=(-12.0, 12.0),
)
one = bilevel.run(shared, bilevel.AutoSRBA(), max_steps=5_000)


def report(name, run):
    w = run.point.inner_var
    margins = y[test] * (X[test] @ w)
    print(
        f"{name:<22}  validation loss {run.history['value'][-1]:.4f}"
        f"  test loss {np.logaddexp(0, -margins).mean():.4f}  test errors {np.sum(margins < 0)} of {len(test)}"
    )


report("one penalty", one)
report("one for each feature", per_feature)

# %% [markdown]
# The validation loss is what was minimized, and there thirty penalties are far ahead of one. On the test rows they
# are not: with 142 validation rows and thirty numbers to choose, it is easy to choose too well. Keep rows that
# neither level sees, and look at them.
#
# ## What was chosen
#
# A large penalty switches a feature off; a small one leaves it free.

# %%
names = source.feature_names
ranks = np.argsort(per_feature.point.outer_var)
figure, axes = plt.subplots(figsize=(7, 6), layout="constrained")
axes.barh(names[ranks], per_feature.point.outer_var[ranks])
axes.axvline(one.point.outer_var[0], color="k", linestyle=":", label="one penalty for all")
axes.set_xlabel("log penalty")
axes.legend()
plt.show()

# %% [markdown]
# ## Where it pays
#
# One penalty cannot tell useful features from useless ones. Here are a hundred features, of which the label depends
# on the first ten, and 500 rows on each level: data made to suit one penalty per feature, drawn once.

# %%
rng = np.random.default_rng(0)
X = rng.standard_normal((6000, 100))
y = np.where(rng.random(6000) < 1 / (1 + np.exp(-X[:, :10] @ rng.standard_normal(10))), 1.0, -1.0)
train, val, test = np.split(np.arange(6000), [500, 1000])


def select(groups, n_penalties):
    start = {"inner_var": np.zeros(100), "outer_var": np.full(n_penalties, -2.0)}
    problem = bilevel.problems.penalty_selection(
        X[train], y[train], X[val], y[val], groups=groups, outer_bounds=(-12.0, 12.0), dtype="float64", **start
    )
    return bilevel.run(problem, bilevel.AutoSRBA(), max_steps=5_000)


one, per_feature = select(np.zeros(100, int), 1), select(None, 100)
report("one penalty", one)
report("one for each feature", per_feature)
useful, useless = np.split(per_feature.point.outer_var, [10])
print(f"median log penalty: {np.median(useful):.1f} of the useful, {np.median(useless):.1f} of the useless features")

# %% [markdown]
# Next: [how to compare solvers](comparing.py), and [a weight for each row](cleaning.py) instead of a penalty for each
# feature.
