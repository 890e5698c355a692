"""Which labels are wrong: DataCleaningClassifier against confidence out of fold and cleanlab's CleanLearning.

    python benchmarks/cleaning_classifiers.py --data FOLDER --kept results/cleaning_classifiers.csv

FOLDER has mnist.npz and covtype.npz; sets that are not there are left out, and so is cleanlab where it is not
installed. What is kept is not measured again.
"""

import argparse
import csv
import time
import warnings
from pathlib import Path

import numpy as np
from markdown import number, table
from sklearn.datasets import load_breast_cancer, load_digits, load_wine, make_classification
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import StratifiedKFold, cross_val_predict, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from bilevel.estimators import DataCleaningClassifier

COLUMNS = ["set", "noise", "rate", "seed", "model", "auc", "error", "seconds"]
SEEDS = {"mnist": 1}  # of other sets there are three
TRUSTED = 0.1  # of the training rows
CS = [1e-4, 1e-3, 1e-2, 1e-1, 1.0]
ROWS = {"mnist": 10_000, "covtype": 3000}


def load(name, folder):
    """Features and classes from 0 on, or None where the file is missing."""
    if name == "made":
        return make_classification(
            3000, 20, n_informative=10, n_redundant=0, n_classes=4, class_sep=1.5, random_state=0
        )
    if name in ROWS:
        path = folder / f"{name}.npz"
        if not path.exists():
            return None
        with np.load(path) as arrays:
            X, y = (arrays["x_train"], arrays["y_train"]) if name == "mnist" else (arrays["X"], arrays["y"])
        rows = np.random.default_rng(0).permutation(len(y))[: ROWS[name]]
        return X[rows].reshape(len(rows), -1).astype(float), np.unique(y[rows], return_inverse=True)[1]
    return {"digits": load_digits, "breast_cancer": load_breast_cancer, "wine": load_wine}[name](return_X_y=True)


def corrupt(y, noise, rate, rng):
    """Labels of which some are wrong.

    symmetric: any other class. by class: the next class, and the first after the last; of two classes, only the second
    is mistaken.
    """
    n_classes = y.max() + 1
    shift = rng.integers(1, n_classes, len(y)) if noise == "symmetric" else np.ones(len(y), int)
    wrong = rng.random(len(y)) < rate
    if noise == "by class" and n_classes == 2:
        wrong &= y == 1
    return np.where(wrong, (y + shift) % n_classes, y)


def regression(C=1.0):
    return make_pipeline(StandardScaler(), LogisticRegression(C=C, max_iter=300))


def out_of_fold(X, given, C=1.0):
    """Confidence in the given label, and a model of all rows as they are."""
    folds, model = StratifiedKFold(5, shuffle=True, random_state=0), regression(C)
    probabilities = cross_val_predict(model, X, given, cv=folds, method="predict_proba")
    return probabilities[np.arange(len(given)), given], model.fit(X, given)


def tuned_out_of_fold(X, given):
    """The same at the C with the least log-loss out of fold."""
    return max((out_of_fold(X, given, C) for C in CS), key=lambda found: np.log(np.maximum(found[0], 1e-15)).sum())


def clean_learning(X, given):
    """cleanlab's scores of labels, and its model of the rows that it keeps."""
    from cleanlab.classification import CleanLearning

    model = CleanLearning(regression(), seed=0, find_label_issues_kwargs={"n_jobs": 1})
    issues = model.find_label_issues(X, given)
    return issues["label_quality"].to_numpy(), model.fit(X, given, label_issues=issues)


def ours(X, given, *trusted):
    model = DataCleaningClassifier(random_state=0).fit(X, given, *trusted)
    return model.sample_weights_, model


TUNED, WITH_TRUSTED = "cross_val_predict, C tuned", "DataCleaningClassifier, 10 % trusted"
MODELS = {"cross_val_predict": out_of_fold, TUNED: tuned_out_of_fold, "CleanLearning": clean_learning}
MODELS |= {"DataCleaningClassifier": ours, WITH_TRUSTED: ours}
LEFT_OUT = {"mnist": [TUNED, WITH_TRUSTED]}  # for the time they take


def measure(data, noise, rate, seed, name):
    """AUC of wrong labels, test error, seconds of the processor."""
    X, X_test, y, y_test = train_test_split(*data, test_size=0.25, random_state=seed, stratify=data[1])
    given, trusted = corrupt(y, noise, rate, np.random.default_rng(seed)), ()
    if name == WITH_TRUSTED:
        rows, kept = train_test_split(np.arange(len(y)), test_size=TRUSTED, random_state=seed, stratify=y)
        trusted, X, y, given = (X[kept], y[kept]), X[rows], y[rows], given[rows]
    before = time.process_time()
    confidence, model = MODELS[name](X, given, *trusted)
    seconds = time.process_time() - before
    return roc_auc_score(given == y, confidence), np.mean(model.predict(X_test) != y_test), seconds


def tasks(quick):
    sets = ["digits", "wine"] if quick else ["digits", "breast_cancer", "wine", "covtype", "made", "mnist"]
    for name in sets:
        for rate, noise in [(0.2, "symmetric"), (0.4, "by class"), (0.4, "symmetric"), (0.2, "by class")]:
            for seed in range(1 if quick else SEEDS.get(name, 3)):
                for model in [model for model in MODELS if model not in LEFT_OUT.get(name, [])]:
                    yield name, noise, str(rate), str(seed), model


def read(path):
    if not path.exists():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        return {
            tuple(row[key] for key in COLUMNS[:5]): [float(row[key]) for key in COLUMNS[5:]]
            for row in csv.DictReader(file)
        }


def run(path, folder, quick):
    """Measure what is not kept yet, one line of the file for each fit."""
    kept, loaded = read(path), {}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        if not kept:
            writer.writerow(COLUMNS)
        for task in tasks(quick):
            name, noise, rate, seed, model = task
            if task in kept:
                continue
            if name not in loaded:
                loaded[name] = load(name, folder)
            if loaded[name] is None:
                continue
            try:
                found = measure(loaded[name], noise, float(rate), int(seed), model)
            except ImportError:
                continue
            kept[task] = [round(float(value), 6) for value in found]
            writer.writerow([*task, *kept[task]])
            file.flush()
    return kept


def summarize(kept):
    """A table for each quantity: a row for each set and noise, a column for each model, means over seeds."""
    models = [model for model in MODELS if any(key[4] == model for key in kept)]
    groups = list(dict.fromkeys(key[:3] for key in kept))
    parts = []
    for k, title in enumerate(["AUC of wrong labels", "Test error", "Seconds"]):
        rows = []
        for group in groups:
            cells = [
                [found[k] for key, found in kept.items() if key[:3] == group and key[4] == model] for model in models
            ]
            means = [float(np.mean(cell)) if cell else None for cell in cells]
            shown = [number(mean) if k == 2 or mean is None else f"{mean:.4f}" for mean in means]
            rows.append([group[0], f"{group[1]} {float(group[2]):.0%}".replace("%", " %"), *shown])
        parts.append(f"**{title}**\n\n" + table(["set", "noise", *models], rows))
    return "\n\n".join(parts)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder with mnist.npz and covtype.npz")
    parser.add_argument("--kept", type=Path, default=Path("results/cleaning_classifiers.csv"))
    parser.add_argument("--quick", action="store_true", help="two small sets, one seed")
    parser.add_argument("--show", action="store_true", help="print what is kept, and measure nothing")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # of iterations that do not suffice, and of rows that are not trusted
    kept = read(arguments.kept) if arguments.show else run(arguments.kept, arguments.data, arguments.quick)
    print(summarize(kept))


if __name__ == "__main__":
    main()
