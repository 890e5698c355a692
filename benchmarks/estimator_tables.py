"""Tables and a figure of the comparison: the loss of every model relative to the reference, for each set."""

from typing import NamedTuple

import numpy as np
from estimator_models import REFERENCE, every_name
from estimator_sets import MOST, SHARE, SPLITS, entries
from markdown import number, table
from scipy import stats

LEVEL = 0.05
OVERLAP = (1 - SHARE) / SHARE  # test rows per training row


class Change(NamedTuple):
    """The mean relative change of the loss over splits, and the p-value of the corrected paired t-test."""

    mean: float
    p: float
    splits: int

    def __str__(self):
        return f"{100 * self.mean:+.1f} %" + ("*" if self.p < LEVEL else "")


def corrected_t_test(differences, ratio):
    """Return the two-sided p-value of mean 0 over splits that share rows (Nadeau and Bengio, 2003).

    Differences over J splits are correlated, so the variance of their mean has the factor 1/J + ``ratio`` instead of
    1/J, where ``ratio`` is the number of test rows per training row.
    """
    count, mean = len(differences), np.mean(differences)
    if count < 2:
        return float("nan")
    variance = (1 / count + ratio) * np.var(differences, ddof=1)
    if variance == 0:
        return 1.0 if mean == 0 else 0.0
    return float(2 * stats.t.sf(abs(mean) / np.sqrt(variance), count - 1))


def losses(rows):
    """Return the loss of successful fits by set, model and split; a later row replaces an earlier one."""
    found = {}
    for row in rows:
        cell = found.setdefault(row["set"], {}).setdefault(row["model"], {})
        cell.pop(row["split"], None)
        if row["status"] == "ok":
            cell[row["split"]] = float(row["loss"])
    return found


def reference(by_model):
    """Return the name of the reference of a set, or None if it was not fitted."""
    return next((name for name in REFERENCE.values() if by_model.get(name)), None)


def change(losses, base):
    """Return the relative change of losses over the common splits, or None without common splits."""
    shared = sorted(set(losses) & set(base))
    if not shared:
        return None
    relative = np.array([losses[split] / base[split] - 1 for split in shared])
    return Change(float(relative.mean()), corrected_t_test(relative, OVERLAP), len(shared))


def changes(rows):
    """Return the change of the loss by set and model, for models with all splits."""
    found = {}
    for name, by_model in losses(rows).items():
        if (base := reference(by_model)) is None:
            continue
        compared = {model: change(cell, by_model[base]) for model, cell in by_model.items() if model != base}
        found[name] = {model: one for model, one in compared.items() if one and one.splits == SPLITS}
    return found


def in_order(there):
    return [name for name in every_name() if name in there]


def models_of(found):
    return in_order({model for compared in found.values() for model in compared})


def summary(rows):
    """Return a table with a row per model: wins, median, best and worst change over sets, and seconds."""
    found, lines = changes(rows), []
    for model in models_of(found):
        by_set = {name: compared[model] for name, compared in found.items() if model in compared}
        means = {name: one.mean for name, one in by_set.items()}
        best, worst = min(means, key=means.get), max(means, key=means.get)
        clear = [one.mean for one in by_set.values() if one.p < LEVEL]
        lines.append([
            model, f"{len(means)}", f"{sum(mean < 0 for mean in means.values())}",
            f"{sum(mean < 0 for mean in clear)}, {sum(mean > 0 for mean in clear)}",
            percent(np.median(list(means.values()))), f"{percent(means[best])} ({best})",
            f"{percent(means[worst])} ({worst})", *seconds(rows, model),
        ])  # fmt: skip
    columns = ["model", "sets", "better", "significantly better, worse", "median", "best", "worst"]
    return table([*columns, "first fit, s", "later fit, s"], lines)


def percent(value):
    return f"{100 * value:+.1f} %"


def seconds(rows, model):
    """Return the medians over sets of the first fit of a process and of later ones."""
    fits = [row for row in rows if row["model"] == model and row["status"] == "ok"]
    columns = [[float(row[key]) for row in fits if row[key]] for key in ("first", "second")]
    return [number(float(np.median(column)), 2) if column else None for column in columns]


def table_of_sets(rows, regression):
    """Return a table with a row per set: the loss of the reference and the changes; stars mark p < 0.05."""
    found, everything = changes(rows), losses(rows)
    base = REFERENCE[not regression]
    found = {name: compared for name, compared in found.items() if reference(everything[name]) == base}
    columns = models_of(found)
    lines = [
        [name, number(float(np.mean(list(everything[name][base].values()))), 4)]
        + [str(compared[model]) if model in compared else why_not(rows, name, model) for model in columns]
        for name, compared in found.items()
    ]
    return table(["set", f"{base}, {'RMSE' if regression else 'log-loss'}", *columns], lines)


def why_not(rows, name, model):
    """Return the status of a missing model in one word."""
    there = [row["status"] for row in rows if (row["set"], row["model"]) == (name, model) and row["status"] != "ok"]
    return there[-1].partition(":")[0] if there else None


def sets():
    """Return a table with source and sizes of each set."""
    lines = [
        [name, known.get("wheel", "scikit-learn"), f"{known['rows']}", f"{min(MOST, round(SHARE * known['rows']))}",
         f"{known['columns']}", f"{known['classes']}" if known["classes"] else None,
         f"{known['n_groups']}" if known["n_groups"] else None]
        for name, known in entries().items()
    ]  # fmt: skip
    return table(["set", "wheel", "rows", "to train", "columns", "classes", "groups"], lines)


def is_later(name):
    return entries().get(name, {}).get("later", False)


def versions(rows):
    return sorted({row["version"] for row in rows if row["version"]})


def page(rows):
    """Return all tables as Markdown."""
    first, later = ([row for row in rows if is_later(row["set"]) is wanted] for wanted in (False, True))
    parts = [
        f"Fitted with {', '.join(versions(rows))}.",
        "**Sets used during development**", summary(first),
        "**Later sets, used only once**", summary(later),
        "**Classes**", table_of_sets(rows, regression=False),
        "**Numbers**", table_of_sets(rows, regression=True),
        "**Sets**", sets(),
    ]  # fmt: skip
    return "\n\n".join(parts)


def draw(rows, path):
    """Draw the relative change of the loss, with a line per model and a mark per set."""
    import matplotlib
    from matplotlib.figure import Figure

    found = changes(rows)
    names = sorted(models_of(found), key=lambda model: (not model.startswith("bilevel"), model))
    matplotlib.rcParams["svg.hashsalt"] = "estimators"  # equal results give equal bytes
    figure = Figure(figsize=(9, 1.2 + 0.45 * len(names)), layout="constrained")
    axis = figure.subplots()
    for line, model in enumerate(names):
        draw_model(axis, line, [compared[model] for compared in found.values() if model in compared])
    axis.axvline(0, color="black", lw=0.8)
    axis.set_xscale("symlog", linthresh=1)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_yticks(range(len(names)), names)
    axis.set(xlabel="test loss relative to LogisticRegressionCV or RidgeCV, %; one mark per table; left is better")
    axis.invert_yaxis()
    axis.grid(axis="x", lw=0.3)
    figure.savefig(path, metadata={"Date": None})


def draw_model(axis, line, column):
    """Draw a model: filled marks are significant, and the bar is the median."""
    means = np.array([100 * one.mean for one in column])
    shift = 0.3 * (np.argsort(np.argsort(means)) % 5 / 4 - 0.5)  # separates similar marks
    for clear in (True, False):
        shown = np.array([(one.p < LEVEL) is clear for one in column])
        style = {"ls": "", "marker": "o", "ms": 5, "mfc": None if clear else "none", "alpha": 0.8}
        for better, color in ((True, "C0"), (False, "C1")):
            chosen = shown & ((means < 0) == better)
            axis.plot(means[chosen], line + shift[chosen], color=color, **style)
    axis.plot([np.median(means)] * 2, [line - 0.3, line + 0.3], color="black", lw=2)
    text = f"{np.sum(means < 0)} of {len(means)} better, median {np.median(means):+.1f} %"
    axis.annotate(text, (1.01, line), xycoords=("axes fraction", "data"), va="center", fontsize=8)
