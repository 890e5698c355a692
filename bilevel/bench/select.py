"""The best setting of each solver, by the median over seeds of a metric at the end of the sweep, and its results."""

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np

from bilevel._core.extras import require
from bilevel.bench.config import SWEEP, TIMING, Pairs, check_selects, find_loaded_solver, parameter_types, suggest
from bilevel.bench.store import PARAMETER, Frame, list_metrics
from bilevel.engine.curves import Curve, SeedCurve, median_curve, quantiles
from bilevel.engine.metrics import METRICS, Metric
from bilevel.engine.metrics import metric as describe
from bilevel.engine.result import Status

SELECTED, DIVERGED = "selected", "diverged"
AXES = {"seconds": "seconds", "calls": "oracle calls", "epochs": "epochs"}  # columns and their labels
_TASK = ["experiment", "problem", "problem_arguments"]


# Selection.


def select(table: Frame, metric: str) -> Frame:
    """Return the best setting for each experiment, problem, solver and column of its grid.

    The best setting has the lowest median of the metric in the final rows of the sweep, or the highest if higher values
    are better. Ties are broken by the smaller spread, then by the order of the parameters. Cells that diverged, or that
    have no value, count as infinitely bad.

    Returns
    -------
    A table with one row per selection and the columns

    - ``experiment``, ``problem``, ``problem_arguments`` (without the seed), ``solver``, ``column``, and ``label``
    - ``status``: "selected", or "diverged" if no setting has a finite median. Such a row has no setting, and its
      numbers are of all cells of the solver
    - ``metric``, its ``median``, ``p20`` and ``p80``, the counts ``n_seeds``, ``n_settings`` and ``n_<status>``, and
      the cost ``median_calls``
    - ``param_<name>``, and ``edges``: those at an end of their grid, so that better values may lie beyond
    """
    finals, keys = split_columns(_final_rows(table, metric)), [*_TASK, "solver", "column"]
    parameters = [name for name in table.columns if name.startswith(PARAMETER)]
    groups = finals.groupby(keys)
    rows = [dict(zip(keys, key, strict=True)) | _select_setting(one, metric, parameters) for key, one in groups]
    for row in rows:
        row["label"] = f"{row['solver']} ({row['column']})" if row["column"] else row["solver"]
    return require("pandas", "bench").DataFrame(rows)


def split_columns(rows: Frame) -> Frame:
    """Repeat each row for each column of the config that it belongs to, named in `column`; "" for none."""
    names = rows["columns"] if "columns" in rows.columns else rows["solver"].map(lambda _: None)
    listed = names.map(lambda text: text.split(", ") if isinstance(text, str) else [""])
    return rows.assign(column=listed).explode("column")


def list_settings(selected: Frame) -> tuple[tuple[str, Pairs], ...]:
    """Return (solver, parameters) of each selected setting, without duplicates."""
    rows = selected[selected["status"] == SELECTED].to_dict("records")
    return tuple(dict.fromkeys((row["solver"], read_setting(row)) for row in rows))


def read_setting(row: dict[str, Any]) -> Pairs:
    """Return the parameters of a row with the types that the solver declares."""
    # Integers with missing values come back from the store as floats. Parameters that no longer exist are kept as is.
    solver = find_loaded_solver(row["solver"])
    types = {} if solver is None else parameter_types(solver)
    given = {name.removeprefix(PARAMETER): value for name, value in row.items() if name.startswith(PARAMETER)}
    known = sorted((name, value) for name, value in given.items() if value is not None and value == value)
    return tuple((name, types[name](value) if name in types else value) for name, value in known)


def worst_value(metric: str) -> float:
    """Return the value of a diverged seed."""
    return -np.inf if describe(metric).better == "higher" else np.inf


@cache
def drop_seed(arguments: str) -> str:
    """Return the arguments of a problem, in JSON, without the seed."""
    return json.dumps({name: value for name, value in json.loads(arguments).items() if name != "seed"}, sort_keys=True)


def _final_rows(table: Frame, metric: str) -> Frame:
    """Return the last row of each cell of the sweep, with the metric, or the worst value, in a column `outcome`."""
    check_selects(metric)
    if table.empty:
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
        available = list_metrics(ended)
        if metric not in available:
            place = f"no cell of `{experiment}` on {problem} has it; there are: {', '.join(available)}."
            raise ValueError(f"`metric={metric!r}`: {place}")
    counts = ~diverged & np.isfinite(finals[metric])
    return finals.assign(outcome=finals[metric].where(counts, worst_value(metric)))


def _select_setting(cells: Frame, metric: str, parameters: list[str]) -> dict[str, Any]:
    used = [name for name in parameters if cells[name].notna().any()]
    candidates: list[tuple[float, float, int, Frame]] = []
    for number, (_, own) in enumerate(cells.groupby(used, dropna=False)):
        if own["seed"].duplicated().any():
            first = own.iloc[0]
            what = f"{first['solver']} of `{first['experiment']}` has several cells with one setting and seed"
            way = "as after a change of the budget; keep those of one budget, or start another store"
            raise ValueError(f"{what}, {way}.")
        p20, median, p80 = quantiles(own["outcome"].to_numpy(np.float64)).tolist()
        spread = p80 - p20 if np.isfinite(p80 - p20) else np.inf
        candidates.append((median * np.sign(worst_value(metric)), spread, number, own))
    best = min(candidates, key=lambda one: one[:3])[-1]
    summary, example = _summarize(best), best.iloc[0]
    is_selected = np.isfinite(summary["median"])
    return {
        "status": SELECTED if is_selected else DIVERGED,
        "metric": metric,
        **(summary if is_selected else _summarize(cells)),
        "n_settings": len(candidates),
        "edges": _describe_edges(cells, example, used) if is_selected else "",
        **{name: example[name] if is_selected else None for name in parameters},
    }


def _summarize(cells: Frame) -> dict[str, Any]:
    p20, median, p80 = quantiles(cells["outcome"].to_numpy(np.float64)).tolist()
    return {
        **{"median": median, "p20": p20, "p80": p80, "n_seeds": cells["seed"].nunique()},
        **{f"n_{status}": int((cells["status"] == status.value).sum()) for status in Status},
        "median_calls": float(cells["calls"].median()),
    }


def _describe_edges(cells: Frame, example: Any, parameters: list[str]) -> str:
    found = []
    for name in parameters:
        tried = cells[name].dropna().unique()
        if len(tried) > 1 and cells[name].dtype.kind in "fiu":
            ends = {"least": min(tried), "largest": max(tried)}
            found += [f"{end} {name.removeprefix(PARAMETER)}" for end, value in ends.items() if example[name] == value]
    return ", ".join(found)


# Curves.


def split_cells(rows: Frame) -> list[tuple[np.ndarray, str]]:
    """Return the positions of the rows of each cell, by step, and its last status; cells are in the order of ids."""
    cells = rows["cell"].astype("category").cat.codes.to_numpy()
    order = np.lexsort((rows["step"].to_numpy(np.float64, na_value=np.nan), cells))
    statuses = rows["status"].to_numpy(object)
    parts = np.split(order, np.flatnonzero(np.diff(cells[order])) + 1) if len(order) else []
    return [(places, str(statuses[places[-1]])) for places in parts]


def make_curve(rows: Frame, axis: str, metric: str, cells: list[tuple[np.ndarray, str]] | None = None) -> Curve:
    """Return the curve of one setting; `cells`, if known, is the result of `split_cells`."""
    x, y = (rows[name].to_numpy(np.float64, na_value=np.nan) for name in (axis, metric))
    found = split_cells(rows) if cells is None else cells
    seeds = [SeedCurve.from_evaluations(x[places], y[places], status) for places, status in found]
    return median_curve(seeds, worst_value(metric))


def final_values(rows: Frame, metric: str) -> np.ndarray:
    """Return the last value of each seed; cells are in the order of their ids."""
    cells = rows.sort_values("step", kind="stable").groupby("cell")
    has_diverged = cells["status"].last() == "diverged"
    return cells[metric].last().astype(float).mask(has_diverged, worst_value(metric)).to_numpy()


def reach(rows: Frame, metric: str, target: float, axis: str = "calls") -> np.ndarray:
    """Return the calls, or seconds, of each seed at its first value as good as the target; infinite if none is."""
    reached = rows[metric] >= target if worst_value(metric) < 0 else rows[metric] <= target
    return rows[axis].astype(float).where(reached).groupby(rows["cell"]).min().fillna(np.inf).to_numpy()


def count_diverged(rows: Frame) -> int:
    """Return the number of cells that diverged."""
    return int((rows.groupby("cell")["status"].last() == "diverged").sum())


# Sections: what is shown of a problem.


class Contender(NamedTuple):
    """A solver at its selected setting, or at all its settings if all diverged."""

    label: str  # the solver and the column of its grid
    parameters: dict[str, Any] | None  # None if no setting could be selected
    rows: Frame  # of the timing phase, if there are any, or else of the sweep
    swept: Frame  # rows of the sweep, all settings
    edges: str  # see `select`

    @property
    def setting(self) -> str:
        """The selected parameters in words."""
        if self.parameters is None:
            return "none: each has an infinite median"
        words = {name: f"{one:.4g}" if isinstance(one, float) else one for name, one in self.parameters.items()}
        return ", ".join(f"{name} {word}" for name, word in words.items())

    def by_seed(self, values: np.ndarray) -> dict[Any, float]:
        """Return the results of `final_values` or `reach` by seed."""
        return dict(zip(self.rows.groupby("cell")["seed"].first(), values, strict=True))


@dataclass(frozen=True)
class Section:
    """A problem of an experiment with all its rows, and its contenders in the order of their labels."""

    experiment: str
    problem: str
    arguments: dict[str, Any]  # those shared by all rows: the seed may differ
    metric: str
    rows: Frame
    contenders: tuple[Contender, ...]
    own: Mapping[str, Metric] = field(default_factory=dict)  # metrics computed for this section, see `add_gap`

    @cached_property
    def metrics(self) -> dict[str, Metric]:
        """The metrics that have a number, in the order of the registry."""
        return {name: self.own.get(name) or describe(name) for name in list_metrics(self.rows)}

    @cached_property
    def curves(self) -> dict[tuple[str, str, str], Curve]:
        """The curves with a finite value, by metric, axis and label."""
        selected = [(one, split_cells(one.rows)) for one in self.contenders if one.parameters is not None]
        keys = itertools.product(self.metrics, AXES, selected)
        curves = {
            (metric, axis, one.label): make_curve(one.rows, axis, metric, cells) for metric, axis, (one, cells) in keys
        }
        return {key: curve for key, curve in curves.items() if curve.is_drawable}

    def with_curves(self, position: int) -> list[str]:
        """Return the metrics (0), axes (1) or labels (2) that have a curve, in their order."""
        return list(dict.fromkeys(key[position] for key in self.curves))

    def curves_of(self, metric: str, axis: str) -> dict[str, Curve]:
        """Return the curves of a metric along an axis, by label."""
        return {key[2]: curve for key, curve in self.curves.items() if key[:2] == (metric, axis)}


def make_sections(table: Frame, metric: str | None = None) -> list[Section]:
    """Split the rows of a store by experiment and problem, and select the setting of each solver.

    By default the selecting metric is h or, if h is not known, F.
    """
    if table.empty:
        raise ValueError("`table` has no rows; run the experiment first, or name the folder of its store.")
    keys = [table["experiment"], table["problem"], table["problem_arguments"].map(drop_seed)]
    return [_make_section(experiment, problem, rows, metric) for (experiment, problem, _), rows in table.groupby(keys)]


def _make_section(experiment: str, problem: str, rows: Frame, metric: str | None) -> Section:
    arguments = rows["problem_arguments"].unique()
    shared = json.loads(arguments[0] if len(arguments) == 1 else drop_seed(arguments[0]))
    known = (name for name in list_metrics(rows) if describe(name).selects and np.isfinite(rows[name]).any())
    selected = select(rows, metric or next(known, "outer_value"))
    contenders = (_make_contender(rows[rows["solver"] == row["solver"]], row) for row in selected.to_dict("records"))
    return Section(experiment, problem, shared, selected["metric"].iloc[0], rows, tuple(contenders))


def _make_contender(rows: Frame, selected: dict[str, Any]) -> Contender:
    swept = split_columns(rows[rows["phase"] == SWEEP])
    swept = swept[swept["column"] == selected["column"]]
    if selected["status"] != SELECTED:
        return Contender(selected["label"], None, swept, swept, "")
    parameters = dict(read_setting(selected))
    same = np.ones(len(rows), bool)
    for name in rows.filter(regex=f"^{PARAMETER}"):
        value = parameters.get(name.removeprefix(PARAMETER))
        equal = rows[name].isna() if value is None else rows[name] == value
        same &= equal.to_numpy(bool, na_value=False)
    timed = rows[same & (rows["phase"] == TIMING)]
    return Contender(selected["label"], parameters, timed if len(timed) else rows[same], swept, selected["edges"])


def add_gap(section: Section) -> Section:
    """Add the difference of the selecting loss to its lowest value on the problem as a metric.

    A section whose metric has a natural zero, such as a distance, is returned unchanged.
    """
    about = section.metrics[section.metric]
    if about.log_scale or about.better != "lower":
        return section
    name, rows = f"{section.metric}_above_lowest", section.rows
    # If each seed is a problem of its own, each has its own lowest value.
    finite = rows[np.isfinite(rows[section.metric])]
    lowest = finite.groupby("problem_arguments")[section.metric].min()

    def measure(own: Frame) -> Frame:
        return own.assign(**{name: own[section.metric] - own["problem_arguments"].map(lowest).astype(float)})

    contenders = tuple(one._replace(rows=measure(one.rows), swept=measure(one.swept)) for one in section.contenders)
    label = f"{about.label} − lowest seen"
    return replace(section, rows=measure(rows), contenders=contenders, own={name: Metric(name, label)})
