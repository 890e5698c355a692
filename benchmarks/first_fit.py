"""Seconds of the first fit in a new process, compared with the estimator of scikit-learn for the same model.

    python benchmarks/first_fit.py                       # half an hour on a quiet machine
    python benchmarks/first_fit.py --sets digits --models BilevelRidge --processes 3

Each fit has its own process, and the processes of different models alternate. A process first reads the rows; the time
then includes the import of the estimator. Times are processor times with one BLAS thread, which depend little on other
work on the machine. Models are fitted to all rows of a table, standardized. The target of regressors is the number of
the class plus some noise; for the Cox model it is a time, which is observed for four of five rows. scikit-learn has no
cross-validated Poisson, gamma and Huber regression, so their reference is a search over ten strengths with five folds.
Ratios to `LogisticRegressionCV` are on the same table. Caravan and adult are read from wheels, as in
`estimator_sets.py`; covtype has the first 20 000 rows of the data set.
"""

import argparse
import os
import statistics
import time
import warnings

import estimator_sets
import numpy as np
from estimator_models import LOG_LOSS
from markdown import number, table
from processes import answer

SETS = ("breast cancer", "digits", "covtype")
LOGISTIC = "LogisticRegressionCV"
# Estimator -> reference.
REFERENCES = {
    "BilevelLogisticRegression": LOGISTIC,
    "BilevelSparseLogisticRegression": LOGISTIC,
    "DataCleaningClassifier": LOGISTIC,
    "BilevelRidge": "RidgeCV",
    "BilevelElasticNet": "ElasticNetCV",
    "BilevelPoissonRegressor": "PoissonRegressor",
    "BilevelGammaRegressor": "GammaRegressor",
    "BilevelHuberRegressor": "HuberRegressor",
    "BilevelCoxPH": None,
}
STRENGTHS = np.logspace(-4, 4, 10)
MANY_ROWS = 20_000


def read(name):
    """Return standardized columns, classes, and groups or None."""
    if name in ("caravan", "adult"):
        X, y, groups = estimator_sets.load(name)[1:]
    elif name == "covtype":
        from bilevel.datasets import load

        rows = load("covtype")
        X, y, groups = rows.X_train[:MANY_ROWS].astype(float), rows.y_train[:MANY_ROWS], None
    else:
        import sklearn.datasets

        X, y = getattr(sklearn.datasets, f"load_{name.replace(' ', '_')}")(return_X_y=True)
        groups = None
    return estimator_sets.standardize(X, X[:1])[0], y, groups


def target(model, y):
    """Return the target of a model, derived from the classes."""
    if model in (LOGISTIC, "DataCleaningClassifier") or "Logistic" in model:
        return y
    if "Poisson" in model:
        return np.unique(y, return_inverse=True)[1].astype(float)
    rng = np.random.default_rng(0)
    positive = 1.0 + np.unique(y, return_inverse=True)[1] + rng.uniform(0, 0.5, len(y))
    if model != "BilevelCoxPH":
        return positive
    seen = rng.uniform(size=len(y)) < 0.8
    return np.array(list(zip(seen, positive, strict=True)), [("event", bool), ("time", float)])


def make(model, groups):
    """Import and create an estimator."""
    if model in REFERENCES:
        import bilevel.estimators

        options = {} if groups is None else {"groups": groups}
        return getattr(bilevel.estimators, model)(random_state=0, **options)
    import sklearn.linear_model

    cls = getattr(sklearn.linear_model, model)
    if model == LOGISTIC:
        return cls(Cs=10, cv=5, scoring=LOG_LOSS, l1_ratios=(0.0,), use_legacy_attributes=False, max_iter=1000)
    if model == "RidgeCV":
        return cls(alphas=STRENGTHS)
    if model == "ElasticNetCV":
        return cls(l1_ratio=[0.1, 0.5, 0.9, 1.0], cv=5)
    from sklearn.model_selection import GridSearchCV

    return GridSearchCV(cls(max_iter=1000), {"alpha": STRENGTHS}, cv=5)


def fit(name, model):
    """Print the processor seconds of importing and fitting, as JSON."""
    warnings.simplefilter("ignore")
    X, y, groups = read(name)
    y = target(model, y)
    began = time.process_time()
    make(model, groups).fit(X, y)
    print(time.process_time() - began)


def measure(name, processes, ours):
    """Return rows of the table: sizes, seconds, and ratios to the references."""
    wanted = dict.fromkeys([LOGISTIC, *(model for one in ours for model in (REFERENCES[one], one) if model)])
    seconds = {model: [] for model in wanted}
    for _ in range(processes):
        for model, found in seconds.items():
            found.append(answer("first_fit.py", "--one", name, model))
    middle = {model: statistics.median(found) for model, found in seconds.items()}
    X, y, _ = read(name)
    size = f"{name}, {X.shape[0]} × {X.shape[1]}, {len(np.unique(y))} classes"
    return [row(size, model, middle) for model in ours]


def row(size, model, middle):
    reference, mine = REFERENCES[model], middle[model]
    theirs = (
        ["–", "–"] if reference is None else [f"{reference} {middle[reference]:.2f}", ratio(mine, middle[reference])]
    )
    return [size, model, number(mine, 2), *theirs, ratio(mine, middle[LOGISTIC])]


def ratio(mine, theirs):
    return f"{mine / theirs:.1f} ×"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", default=",".join(SETS), help="names, separated by commas")
    parser.add_argument("--processes", type=int, default=5, help="processes per model; the median is shown")
    parser.add_argument("--models", default=",".join(REFERENCES), help="estimators of bilevel, separated by commas")
    parser.add_argument("--one", nargs=2, metavar=("SET", "MODEL"), help="fit once and print the seconds")
    options = parser.parse_args()
    if options.one:
        fit(*options.one)
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = []
    for name in options.sets.split(","):
        found = measure(name, options.processes, options.models.split(","))
        for one in found:
            print(*one, sep="  ", flush=True)
        rows += found
    columns = ["table", "estimator", "s", "reference, s", "to the reference", f"to {LOGISTIC}"]
    print(table(columns, rows))


if __name__ == "__main__":
    main()
