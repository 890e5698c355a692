"""What was learned, as tables and as a figure."""

from typing import Any

import numpy as np

from bilevel._optional import require
from bilevel.estimators.comparison import Comparison
from bilevel.estimators.groups import Groups


def candidates(comparison: Comparison | None) -> Any:
    """Return a DataFrame of the structures that were compared, one row each."""
    columns: dict[str, Any] = {"structure": [], "prior_scale": [], "loss": [], "difference": [], "standard_error": []}
    if comparison is not None:
        columns["structure"] = [item.name for item in comparison.structures]
        columns["prior_scale"] = [item.prior_scale for item in comparison.structures]
        columns |= {"loss": comparison.losses, "difference": comparison.differences}
        columns |= {"standard_error": comparison.standard_errors}
        columns["chosen"] = np.arange(len(comparison.structures)) == comparison.chosen
        columns["by"] = comparison.how
    return require("pandas", "estimators").DataFrame(columns)


def penalty_table(names: np.ndarray, groups: Groups, penalties: np.ndarray, coef: np.ndarray, scale: np.ndarray) -> Any:
    """Return a DataFrame of features, the least penalized first; an effect is a coefficient times the deviation."""
    labels = np.full(len(names), "unpenalized", dtype=object)
    labels[groups.penalized] = groups.labels[groups.numbers]
    size = np.linalg.norm(coef, axis=0) if np.ndim(coef) > 1 and len(coef) > 1 else np.ravel(coef)
    columns = {"feature": names, "group": labels, "penalty": penalties, "coefficient": size, "effect": size * scale}
    return require("pandas", "estimators").DataFrame(columns).sort_values("penalty", kind="stable", ignore_index=True)


def plot(table: Any, most: int) -> Any:
    """Draw penalties, and effects beside them, of the features with the largest effects."""
    pyplot, ticker = require("matplotlib.pyplot", "plot"), require("matplotlib.ticker", "plot")
    shown = table.loc[np.sort(np.argsort(-np.abs(table["effect"].to_numpy()), kind="stable")[:most])][::-1]
    figure, axes = pyplot.subplots(1, 2, sharey=True, figsize=(8, 1 + 0.22 * len(shown)), layout="constrained")
    places, codes = np.arange(len(shown)), {label: k for k, label in enumerate(dict.fromkeys(shown["group"][::-1]))}
    colors = [f"C{codes[label] % 10}" for label in shown["group"]]
    axes[0].scatter(np.where(shown["penalty"] > 0, shown["penalty"], np.nan), places, c=colors)
    axes[0].set(xscale="log", xlabel="penalty", yticks=places, yticklabels=shown["feature"])
    axes[0].xaxis.set_minor_formatter(ticker.NullFormatter())
    axes[1].barh(places, shown["effect"], color=colors)
    axes[1].set(xlabel="coefficient × deviation")
    if len(codes) > 1:
        for label, code in codes.items():
            axes[1].bar(0, 0, color=f"C{code % 10}", label=str(label))
        figure.legend(loc="outside right upper", title="group")
    return figure
