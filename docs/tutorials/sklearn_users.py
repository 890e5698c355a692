# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # scikit-learn users start here
#
# `bilevel.estimators` has scikit-learn-compatible estimators: `fit`, `predict`, `get_params`, pipelines,
# cross-validation. They need no grid search: penalties are learned over folds inside `fit`, and so is how many there
# are.

# %%
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from sklearn.compose import ColumnTransformer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, log_loss
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from bilevel.estimators import BilevelLogisticRegression

# %matplotlib inline
# %config InlineBackend.figure_formats = ["svg"]

rng = np.random.default_rng(0)
X = rng.standard_normal((6000, 100))
probability = 1 / (1 + np.exp(-X[:, :10] @ rng.standard_normal(10)))
y = np.where(rng.random(6000) < probability, "yes", "no")
X_train, X_test, y_train, y_test = train_test_split(X, y, train_size=3000, random_state=0)

# %% [markdown]
# Of these hundred features the label depends on the first ten: data made to suit a penalty per feature. Nothing has to
# be said of that.

# %%
model = BilevelLogisticRegression(random_state=0).fit(X_train, y_train)
print(model.penalty_structure_, "with prior_scale", model.prior_scale_)
model.candidates_.round(2)

# %% [markdown]
# `candidates_` has the structures that were tried: one penalty, and one for each feature, with log penalties that
# spread by `prior_scale` around their mean. Each was learned without a fold and compared on it; `difference` is the
# summed loss against that of a single penalty, in nats. Many penalties are taken where they are ahead by half a
# standard error.
#
# ## Against one penalty

# %%
grid = {"C": np.logspace(-4, 4, 10)}
models = {
    "GridSearchCV": GridSearchCV(LogisticRegression(max_iter=1000), grid, scoring="neg_log_loss").fit(X_train, y_train),
    "single": BilevelLogisticRegression("single", random_state=0).fit(X_train, y_train),
    "auto": model,
}
for name, fitted in models.items():
    loss = log_loss(y_test, fitted.predict_proba(X_test))
    accuracy = accuracy_score(y_test, fitted.predict(X_test))
    print(f"{name:<14} test loss {loss:.4f}  test accuracy {accuracy:.4f}")

# %% [markdown]
# ## What was learned

# %%
plt.figure(figsize=(7, 3), layout="constrained")
plt.semilogy(np.arange(100), model.penalties_, ".")
plt.axvspan(-0.5, 9.5, alpha=0.15, label="features that matter")
plt.xlabel("feature")
plt.ylabel("penalties_")
plt.legend()
plt.show()

# %% [markdown]
# ## Groups
#
# One-hot columns of one source are one group by their names: `groups="prefix"`. The transformer before has to pass the
# names on, by `set_output`.

# %%
table = pd.DataFrame({"city": rng.choice(list("abcdefghijkl"), 400), "plan": rng.choice(["basic", "full"], 400)})
table["age"] = rng.standard_normal(400)
bought = table["age"] + 2 * (table["plan"] == "full") + rng.logistic(size=400) > 1
columns = ColumnTransformer(
    [("cat", OneHotEncoder(sparse_output=False), ["city", "plan"]), ("num", StandardScaler(), ["age"])]
).set_output(transform="pandas")
pipeline = make_pipeline(columns, BilevelLogisticRegression("per_group", groups="prefix", random_state=0))
pipeline.fit(table, bought)
pipeline[-1].penalty_table_.groupby("group")["penalty"].first().round(2)

# %%
figure = pipeline[-1].plot_penalties()
plt.show()

# %% [markdown]
# Cities, which do not matter here, have the largest penalty.
#
# Rows to validate on can be given in the place of folds: `fit(X, y, X_val=…, y_val=…)`; `cv` takes any splitter.
# `BilevelRidge` does the same for regression, and `DataCleaningClassifier` learns a weight for each row; all are in the
# [reference](../reference/estimators.md). [When they pay](../estimators.md) says more, and [A penalty for each
# feature](penalties.py) shows the two levels themselves.
