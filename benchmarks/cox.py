"""BilevelCoxPH compared with models of scikit-survival tuned by GridSearchCV, on public survival tables.

    python benchmarks/cox.py --kept results/cox.csv        # about ten minutes on one core
    python benchmarks/cox.py --kept reports/cox.csv --show

Tables are read from the wheels of scikit-survival and lifelines, downloaded by pip as in `estimator_sets.py`, with the
same encoding, splits and scaling. scikit-survival must be installed, lifelines need not be. Kept results are not
measured again.
"""

import argparse
import csv
import os
import time
import warnings
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from estimator_files import Unavailable, read
from estimator_sets import SPLITS, columns_of, default_folder, digest, group, split_rows, standardize
from markdown import number, table

from bilevel.estimators import BilevelCoxPH
from bilevel.estimators.survival import Cox, concordance_index

COLUMNS = ["set", "split", "model", "concordance", "loss", "seconds", "structure"]
ALPHAS = np.logspace(-2, 4, 13)
REFERENCE = "CoxPH, by concordance"
WHEELS = {
    "arff": ("scikit-survival", "0.28.0", "sksurv/datasets/data/{}.arff"),
    "csv": ("lifelines", "0.30.3", "lifelines/datasets/{}.csv"),
}


class Entry(NamedTuple):
    """A table: its file, the columns of time and event, the label of an event, and columns to drop.

    Dropped are names, other outcomes, and measurements after the start.
    """

    reader: str
    file: str
    time: str
    event: str
    digest: str
    happened: str = "1"
    drop: tuple[str, ...] = ()
    groups: str | dict = "source"


SETS = {
    "gbsg2": Entry("arff", "GBSG2", "time", "cens", "c6e659043bea7149"),
    "actg320": Entry("arff", "actg320", "time", "censor", "8fd16444e12439d8", drop=("time_d", "censor_d")),
    "breast_cancer": Entry(
        "arff", "breast_cancer_GSE7390-metastasis", "t.tdm", "e.tdm", "e9f79bfd8e20a33f", groups={"pattern": "^X"}
    ),  # genes and other columns
    "flchain": Entry("arff", "flchain", "futime", "death", "fe7799f7990dba81", "dead", ("chapter",)),
    "veteran": Entry("arff", "veteran", "Survival_in_days", "Status", "0c465a01283a95d1", "dead"),
    "whas500": Entry("arff", "whas500", "lenfol", "fstat", "2e6d9182232f8a0f"),
    "rossi": Entry("csv", "rossi", "week", "arrest", "a67467254d5759a4"),
    "kidney_transplant": Entry("csv", "kidney_transplant", "time", "death", "52ede24b8c78b035"),
    "actg175": Entry(
        "csv",
        "ACTG175",
        "days",
        "cens",
        "55a047372a32ad2b",
        "1",
        ("Unnamed: 0", "pidnum", "treat", "offtrt", "cd420", "cd496", "r", "cd820"),
    ),
    "lung": Entry("csv", "lung", "time", "status", "b2e5234df073c45d", drop=("inst",)),
    "larynx": Entry("csv", "larynx", "time", "death", "00165031267763f1"),
    "dd": Entry(
        "csv",
        "dd",
        "duration",
        "observed",
        "bf2f402fda49e060",
        "1",
        ("ctryname", "cowcode2", "politycode", "ehead", "leaderspellreg"),
    ),
}


class Survival(NamedTuple):
    """Encoded columns with NaN for gaps, targets, and the group of each column or None."""

    X: np.ndarray
    y: np.ndarray
    groups: np.ndarray | None


def load(name, folder):
    """Return the table of a set after comparing its digest."""
    entry = SETS[name]
    wheel, version, path = WHEELS[entry.reader]
    source = {"wheel": wheel, "version": version, "files": [path.format(entry.file)], "reader": entry.reader}
    found = encode(read(source, folder), entry)
    if (known := digest(found.X, found.y["event"], found.y["time"])) != entry.digest:
        raise Unavailable(f"its digest is {known}, not {entry.digest}")
    return found


def encode(frame, entry):
    frame = frame[frame[entry.time].notna() & frame[entry.event].notna()]
    events = frame[entry.event].astype(str).eq(entry.happened)
    y = np.array(list(zip(events, frame[entry.time], strict=True)), [("event", bool), ("time", float)])
    frame = frame.drop(columns=[entry.time, entry.event, *entry.drop])
    blocks = {str(name): columns_of(frame[name]) for name in frame}
    sources = [name for name, block in blocks.items() for _ in range(block.shape[1])]
    return Survival(np.hstack(list(blocks.values())), y, group(sources, entry.groups))


def loss_per_event(y, risk):
    """Return the negative log partial likelihood of some rows per event."""
    order = np.argsort(-y["time"], kind="stable")
    events, weights = y["event"][order].astype(float), np.ones((len(y), 1))
    total = Cox(y["time"][order], weights[:, 0]).total(events[:, None, None], risk[order][:, None, None], weights)
    return float(total[0] / events.sum())


def score_loss(model, X, y):
    return -loss_per_event(y, model.predict(X)) if y["event"].any() else 0.0


def grid(model, name, values, scoring=None):
    from sklearn.model_selection import GridSearchCV, KFold

    return GridSearchCV(model, {name: values}, cv=KFold(5, shuffle=True, random_state=0), scoring=scoring)


def ridge(scoring=None):
    from sksurv.linear_model import CoxPHSurvivalAnalysis

    return lambda table, X, y: grid(CoxPHSurvivalAnalysis(ties="breslow"), "alpha", ALPHAS, scoring).fit(X, y)


def elastic_net(ratio):
    from sksurv.linear_model import CoxnetSurvivalAnalysis

    def fit(table, X, y):
        path = CoxnetSurvivalAnalysis(l1_ratio=ratio, alpha_min_ratio=0.01, n_alphas=30).fit(X, y).alphas_
        return grid(CoxnetSurvivalAnalysis(l1_ratio=ratio), "alphas", [[alpha] for alpha in path]).fit(X, y)

    return fit


def ours(structure):
    return lambda table, X, y: BilevelCoxPH(structure, groups=table.groups, random_state=0).fit(X, y)


def models():
    return {
        REFERENCE: ridge(),
        "CoxPH, by likelihood": ridge(score_loss),
        "Coxnet, l1_ratio 0.5": elastic_net(0.5),
        "Coxnet, l1_ratio 0.9": elastic_net(0.9),
        "BilevelCoxPH, single": ours("single"),
        "BilevelCoxPH": ours("auto"),
    }


def measure(found, split, fit):
    """Return concordance and loss per event on the test rows, processor seconds, and the chosen structure."""
    train, test = split_rows(len(found.y), split)
    X, X_test = standardize(found.X[train], found.X[test])
    before = time.process_time()
    model = fit(found, X, found.y[train])
    seconds = time.process_time() - before
    y, risk = found.y[test], model.predict(X_test)
    return [
        concordance_index(y["event"], y["time"], risk),
        loss_per_event(y, risk),
        seconds,
        getattr(model, "penalty_structure_", ""),
    ]


def read_kept(path):
    if not path.exists():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return {tuple(row[key] for key in COLUMNS[:3]): [row[key] for key in COLUMNS[3:]] for row in rows}


def run(path, folder, names):
    """Run the missing fits, with one line of the file for each."""
    kept = read_kept(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        if not kept:
            writer.writerow(COLUMNS)
        for name in names:
            try:
                found = load(name, folder)
            except Unavailable as reason:
                print(f"{name} is skipped: {reason}", flush=True)
                continue
            for split in range(SPLITS):
                for model, fit in models().items():
                    if (key := (name, str(split), model)) not in kept:
                        *numbers, structure = measure(found, split, fit)
                        kept[key] = [*(f"{value:.6g}" for value in numbers), structure]
                        writer.writerow([*key, *kept[key]])
                        file.flush()
    return kept


def summarize(kept):
    """Return tables of means over splits, with the differences of concordance and loss from the reference."""
    names, kinds = (list(dict.fromkeys(key[k] for key in kept)) for k in (0, 2))
    means = {
        (name, kind): np.mean([list(map(float, kept[key][:3])) for key in kept if key[::2] == (name, kind)], axis=0)
        for name in names
        for kind in kinds
    }
    parts = []
    for k, title in enumerate(["Concordance", "Loss per event"]):
        rows = [[name, *(f"{means[name, kind][k]:.4f}" for kind in kinds)] for name in names]
        gains = [
            [(1 - 2 * k) * (means[name, kind][k] - means[name, REFERENCE][k]) for name in names] for kind in kinds[1:]
        ]
        rows.append(["better than the first", None, *(f"{sum(x > 0 for x in row)} of {len(row)}" for row in gains)])
        rows.append(["median gain", None, *(f"{np.median(row):+.4f}" for row in gains)])
        rows.append(["smallest gain", None, *(f"{min(row):+.4f}" for row in gains)])
        parts.append(f"**{title}**\n\n" + table(["set", *kinds], rows))
    rows = [[name, *(number(means[name, kind][2]) for kind in kinds)] for name in names]
    return "\n\n".join([*parts, "**Seconds**\n\n" + table(["set", *kinds], rows)])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kept", type=Path, default=Path("results/cox.csv"))
    parser.add_argument("--folder", type=Path, default=default_folder(), help="folder of wheels")
    parser.add_argument("--sets", type=lambda text: text.split(","), default=list(SETS))
    parser.add_argument("--show", action="store_true", help="print kept results and measure nothing")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # about convergence
    print(summarize(read_kept(options.kept) if options.show else run(options.kept, options.folder, options.sets)))


if __name__ == "__main__":
    main()
