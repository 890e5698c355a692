"""Each solver's best setting, by the median over seeds of a metric at the end of the sweep."""

import json
import math
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np

from bilevel._optional import require
from bilevel.bench.cells import SWEEP, Pairs
from bilevel.bench.config import METRICS, nearest, parameter_types
from bilevel.engine.result import Status
from bilevel.solvers import SOLVERS

Frame: TypeAlias = Any  # a pandas.DataFrame

LARGER_IS_BETTER = ("weight_auc",)
SELECTED, DIVERGED = "selected", "diverged"
_TASK = ["experiment", "problem", "problem_arguments"]
_PARAMETER = "param_"


def select(table: Frame, metric: str) -> Frame:
    """Return one row per experiment, problem and solver: its best setting, and how the setting did.

    The best is the one of least median, or of the largest where larger is better; of equal ones, that of the least
    spread, then the first in the order of the parameters. A diverged cell and one without a number count as infinitely
    bad.

    Parameters
    ----------
    table : rows of a store; of these, the final ones of the sweep are looked at
    metric : a metric of the store

    Returns
    -------
    pandas.DataFrame
        ``status`` is "selected", or "diverged" where no setting has a finite median: such a row claims no setting, and
        counts all cells of the solver. ``median``, ``p20`` and ``p80`` are those of the metric; ``n_seeds`` counts
        seeds, ``n_settings`` settings tried, ``n_<status>`` cells by how they ended; ``median_calls`` is their cost.
        ``problem_arguments`` are without the seed.
    """
    finals = _finals(table, metric)
    parameters = [name for name in table.columns if name.startswith(_PARAMETER)]
    rows = [
        dict(zip([*_TASK, "solver"], key, strict=True)) | _best(cells, metric, parameters)
        for key, cells in finals.groupby([*_TASK, "solver"])
    ]
    return require("pandas", "bench").DataFrame(rows)


def settings(selected: Frame) -> tuple[tuple[str, Pairs], ...]:
    """Return (solver, parameters) of each selected setting, parameters sorted and of their own types."""
    claimed = selected[selected["status"] == SELECTED]
    return tuple((row["solver"], _pairs(row)) for row in claimed.to_dict("records"))


def _pairs(row: dict[str, Any]) -> Pairs:
    # A column of integers with gaps comes back as floats.
    types = sorted(parameter_types(SOLVERS[row["solver"]]).items())
    values = [(name, kind, row.get(_PARAMETER + name)) for name, kind in types]
    return tuple((name, kind(value)) for name, kind, value in values if not _missing(value))


def _missing(value: Any) -> bool:
    return value is None or value != value


def _finals(table: Frame, metric: str) -> Frame:
    """Return the last row of each sweep cell, with a column ``loss`` of which less is better."""
    if metric not in METRICS:
        raise ValueError(f"`metric={metric!r}`: unknown; {nearest(metric, METRICS)}")
    if not len(table):
        raise ValueError("the store is empty; run the sweep first.")
    if metric not in table.columns:
        raise ValueError(f"`metric={metric!r}`: the table has no such column.")
    finals = table[table["final"].astype(bool) & (table["phase"] == SWEEP)]
    if not len(finals):
        raise ValueError("the store holds no finished cell of the sweep; run the sweep first.")
    finals = finals.assign(problem_arguments=finals["problem_arguments"].map(_without_seed))
    _check_measured(finals, metric)
    counts = (finals["status"] != Status.diverged.value) & np.isfinite(finals[metric])
    loss = -finals[metric] if metric in LARGER_IS_BETTER else finals[metric]
    return finals.assign(loss=loss.where(counts, math.inf))


def _without_seed(arguments: str) -> str:
    return json.dumps({name: value for name, value in json.loads(arguments).items() if name != "seed"}, sort_keys=True)


def _check_measured(finals: Frame, metric: str) -> None:
    for (experiment, problem, _), cells in finals.groupby(_TASK):
        ended = cells[cells["status"] != Status.diverged.value]
        if len(ended) and ended[metric].isna().all():
            there = [name for name in METRICS if name in ended and ended[name].notna().any()]
            raise ValueError(
                f"`metric={metric!r}`: no cell of `{experiment}` on {problem} has it; there are: {', '.join(there)}."
            )


def _best(cells: Frame, metric: str, parameters: list[str]) -> dict[str, Any]:
    tried = [(_summary(group), group.iloc[0]) for group in _settings_of(cells, parameters)]
    summary, example = min(tried, key=lambda one: _rank(one[0]))
    claimed = math.isfinite(summary["median"])
    return {
        "status": SELECTED if claimed else DIVERGED,
        "metric": metric,
        **_in_metric(summary if claimed else _summary(cells), metric),
        "n_settings": len(tried),
        **{name: example[name] if claimed else None for name in parameters},
    }


def _rank(summary: dict[str, Any]) -> tuple[float, float]:
    spread = summary["p80"] - summary["p20"] if math.isfinite(summary["p80"]) else math.inf
    return summary["median"], spread


def _in_metric(summary: dict[str, Any], metric: str) -> dict[str, Any]:
    """Turn losses back into values of the metric."""
    if metric not in LARGER_IS_BETTER:
        return summary
    return summary | {"median": -summary["median"], "p20": -summary["p80"], "p80": -summary["p20"]}


def _settings_of(cells: Frame, parameters: list[str]) -> Iterator[Frame]:
    used = [name for name in parameters if cells[name].notna().any()]
    for _, group in cells.groupby(used, dropna=False):
        if group["seed"].duplicated().any():
            raise ValueError(
                f"{group['solver'].iloc[0]} of `{group['experiment'].iloc[0]}` has several cells with one setting and "
                "seed, as after a change of the budget; keep those of one budget, or start another store."
            )
        yield group


def _summary(cells: Frame) -> dict[str, Any]:
    loss = np.sort(cells["loss"].to_numpy(np.float64))
    return {
        "median": _quantile(loss, 50),
        "p20": _quantile(loss, 20),
        "p80": _quantile(loss, 80),
        "n_seeds": cells["seed"].nunique(),
        **{f"n_{status}": int((cells["status"] == status.value).sum()) for status in Status},
        "median_calls": float(cells["calls"].median()),
    }


def _quantile(values: np.ndarray, percent: int) -> float:
    """Interpolate between sorted values; NumPy's own makes NaN of neighbors that are infinite."""
    low, rest = divmod(percent * (len(values) - 1), 100)
    if rest == 0 or values[low] == math.inf:
        return float(values[low])
    share = rest / 100
    return float((1 - share) * values[low] + share * values[low + 1])
