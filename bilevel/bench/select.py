"""Each solver's best setting, by the median over seeds of a metric at the end of the sweep."""

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from bilevel._optional import require
from bilevel.bench.cells import SWEEP, Pairs, parameter_types
from bilevel.bench.config import check_selects
from bilevel.bench.plugins import known_solver, suggest
from bilevel.bench.store import PARAMETER, Frame, list_metrics
from bilevel.engine.metrics import METRICS
from bilevel.engine.metrics import metric as describe
from bilevel.engine.result import Status

LEVELS = (0.2, 0.5, 0.8)
SELECTED, DIVERGED = "selected", "diverged"
_TASK = ["experiment", "problem", "problem_arguments"]


def select(table: Frame, metric: str) -> Frame:
    """Return one row per experiment, problem, solver and column of its grid: the best setting, and how it did.

    Of the rows of a store, the final ones of the sweep count. The best setting is the one of least median, or of the
    largest where higher is better; of equal ones, that of the least spread, then the first in the order of the
    parameters. A diverged cell and one without a number count as infinitely bad.

    ``status`` is "selected", or "diverged" where no setting has a finite median: such a row claims no setting, and
    counts all cells of the solver. ``median``, ``p20`` and ``p80`` are those of the metric; ``n_seeds``, ``n_settings``
    and ``n_<status>`` are counts; ``median_calls`` is the cost. ``problem_arguments`` are without the seed. ``label``
    names the row; ``edges`` the parameters that have their least or largest value, where a better one may lie beyond.
    """
    finals, keys = split_columns(_finals(table, metric)), [*_TASK, "solver", "column"]
    parameters = [name for name in table.columns if name.startswith(PARAMETER)]
    rows = [dict(zip(keys, key, strict=True)) | _best(one, metric, parameters) for key, one in finals.groupby(keys)]
    for row in rows:
        row["label"] = f"{row['solver']} ({row['column']})" if row["column"] else row["solver"]
    return require("pandas", "bench").DataFrame(rows)


def split_columns(rows: Frame) -> Frame:
    """Return each row once for each column of the grids that it belongs to, in a column ``column``; "" for none."""
    names = rows["columns"] if "columns" in rows.columns else rows["solver"].map(lambda _: None)
    return rows.assign(column=names.map(lambda text: text.split(", ") if isinstance(text, str) else [""])).explode(
        "column"
    )


def list_settings(selected: Frame) -> tuple[tuple[str, Pairs], ...]:
    """Return (solver, parameters) of each selected setting, once each."""
    rows = selected[selected["status"] == SELECTED].to_dict("records")
    return tuple(dict.fromkeys((row["solver"], read_setting(row)) for row in rows))


def read_setting(row: dict[str, Any]) -> Pairs:
    """Return the parameters of a row, sorted and of their own types."""
    # A column of integers with gaps comes back as floats; a parameter that the solver has no more stays as it is.
    solver = known_solver(row["solver"])
    types = {} if solver is None else parameter_types(solver)
    given = {name.removeprefix(PARAMETER): value for name, value in row.items() if name.startswith(PARAMETER)}
    known = sorted((name, value) for name, value in given.items() if value is not None and value == value)
    return tuple((name, types[name](value) if name in types else value) for name, value in known)


def worst_value(metric: str) -> float:
    """Return what a diverged seed counts as."""
    return -np.inf if describe(metric).better == "higher" else np.inf


def quantiles(values: np.ndarray, levels: Sequence[float] = LEVELS) -> np.ndarray:
    """Return NumPy's quantiles along the first axis, leaving out NaN, and infinite between a number and infinity."""
    columns = values.reshape(len(values), -1)
    known = np.sum(~np.isnan(columns), axis=0)
    result = np.full((len(levels), columns.shape[1]), np.nan)
    for count in np.unique(known[known > 0]):
        group = np.sort(columns[:, known == count], axis=0)[:count]  # NaN comes last
        lower, upper = (np.quantile(group, levels, axis=0, method=method) for method in ("lower", "higher"))
        with np.errstate(invalid="ignore"):
            between = np.where(np.isfinite(lower + upper), np.quantile(group, levels, axis=0), lower + upper)
        result[:, known == count] = np.where(lower == upper, lower, between)
    return result.reshape(len(levels), *values.shape[1:])


@cache
def drop_seed(arguments: str) -> str:
    """Return the arguments of a problem, in JSON, without the seed."""
    return json.dumps({name: value for name, value in json.loads(arguments).items() if name != "seed"}, sort_keys=True)


def _finals(table: Frame, metric: str) -> Frame:
    """Return the last row of each sweep cell, with a column ``outcome``: the metric, or the worst where it diverged."""
    check_selects(metric)
    if not len(table):
        raise ValueError("the store is empty; run the sweep first.")
    if metric not in table.columns or table[metric].dtype.kind not in "fiu":
        known = METRICS | dict.fromkeys(list_metrics(table))
        problem = "the table has no such column." if metric in known else f"unknown; {suggest(metric, known)}"
        raise ValueError(f"`metric={metric!r}`: {problem}")
    finals = table[table["final"].astype(bool) & (table["phase"] == SWEEP)]
    if not len(finals):
        raise ValueError("the store holds no finished cell of the sweep; run the sweep first.")
    finals = finals.assign(problem_arguments=finals["problem_arguments"].map(drop_seed))
    diverged = finals["status"] == Status.diverged.value
    for (experiment, problem, _), ended in finals[~diverged].groupby(_TASK):
        there = list_metrics(ended)
        if metric not in there:
            place = f"no cell of `{experiment}` on {problem} has it; there are: {', '.join(there)}."
            raise ValueError(f"`metric={metric!r}`: {place}")
    counts = ~diverged & np.isfinite(finals[metric])
    return finals.assign(outcome=finals[metric].where(counts, worst_value(metric)))


def _best(cells: Frame, metric: str, parameters: list[str]) -> dict[str, Any]:
    used = [name for name in parameters if cells[name].notna().any()]
    tried: list[tuple[Any, ...]] = []
    outcomes, seeds = cells["outcome"].to_numpy(np.float64), cells["seed"].to_numpy()
    setting = cells.groupby(used, dropna=False).ngroup().to_numpy()
    for number in range(setting.max() + 1):
        rows = np.flatnonzero(setting == number)
        if len(set(seeds[rows])) < len(rows):
            first = cells.iloc[rows[0]]
            problem = (
                f"{first['solver']} of `{first['experiment']}` has several cells with one setting and seed, as after"
            )
            raise ValueError(f"{problem} a change of the budget; keep those of one budget, or start another store.")
        p20, median, p80 = quantiles(outcomes[rows]).tolist()
        spread = p80 - p20 if np.isfinite(p80 - p20) else np.inf
        tried.append((median * np.sign(worst_value(metric)), spread, len(tried), rows))
    best = cells.iloc[min(tried)[-1]]
    summary, example = _summarize(best), best.iloc[0]
    claimed = np.isfinite(summary["median"])
    return {
        "status": SELECTED if claimed else DIVERGED,
        "metric": metric,
        **(summary if claimed else _summarize(cells)),
        "n_settings": len(tried),
        "edges": _edges(cells, example, used) if claimed else "",
        **{name: example[name] if claimed else None for name in parameters},
    }


def _edges(cells: Frame, example: Any, parameters: list[str]) -> str:
    found = []
    for name in parameters:
        tried = cells[name].dropna().unique()
        if len(tried) > 1 and cells[name].dtype.kind in "fiu":
            least, largest = min(tried), max(tried)
            found += [f"least {name.removeprefix(PARAMETER)}"] if example[name] == least else []
            found += [f"largest {name.removeprefix(PARAMETER)}"] if example[name] == largest else []
    return ", ".join(found)


def _summarize(cells: Frame) -> dict[str, Any]:
    p20, median, p80 = quantiles(cells["outcome"].to_numpy(np.float64)).tolist()
    return {
        **{"median": median, "p20": p20, "p80": p80, "n_seeds": cells["seed"].nunique()},
        **{f"n_{status}": int((cells["status"] == status.value).sum()) for status in Status},
        "median_calls": float(cells["calls"].median()),
    }
