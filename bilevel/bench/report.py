"""The benchmark as one page that needs no network: the data of the templates in ``templates/``."""

import base64
import hashlib
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bilevel._io import replacing
from bilevel._optional import require
from bilevel.bench.cells import SWEEP
from bilevel.bench.figures import Look, assign_looks
from bilevel.bench.sections import AXES, Contender, Section, calls_to_reach, final_values, make_sections
from bilevel.bench.select import quantiles
from bilevel.bench.store import Frame
from bilevel.engine.metrics import metric as describe

EPSILONS = tuple(10.0**-power for power in range(1, 9))
_LINE_WIDTH = 2.25


class Text(NamedTuple):
    """A cell of a table: a text, and a smaller one below it."""

    text: str
    below: str = ""


class Column(NamedTuple):
    """The head of a column, and the style of its cells: "number", "setting", "status" or none."""

    title: str
    kind: str = ""


def write_report(
    table: Frame,
    out: Path,
    *,
    title: str = "Benchmark",
    metric: str | None = None,
    budgets: str = "",
    commands: Sequence[str] = (),
) -> Path:
    """Write ``index.html`` and return its path.

    Parameters
    ----------
    table : all rows of a store
    out : the folder to write to
    title : of the page
    metric : by whose final value settings are selected; see :func:`bilevel.bench.sections.make_sections`
    budgets : what a cell was allowed to use, in words: a store only knows what was used
    commands : the lines that make the page again
    """
    shown = make_sections(table, metric)
    looks = assign_looks(table["solver"])
    page = _render(
        title=title,
        sections=[_describe(place, section, looks) for place, section in enumerate(shown)],
        line_width=_LINE_WIDTH,
        budgets=budgets,
        facts=[_facts(str(name), rows) for name, rows in table.groupby("experiment")],
        commands=commands,
        data=embed_json(_drawings(shown, looks)),
    )
    path = Path(out) / "index.html"
    with replacing(path) as file:
        file.write(page.encode())
    return path


def _render(**data: Any) -> str:
    jinja2 = require("jinja2", "bench")
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("bilevel.bench"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script, _, _ = environment.loader.get_source(environment, "report.js")
    scripts = {"plotly": require("plotly.offline", "bench").get_plotlyjs(), "script": script}
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts.values()]
    trusted = {name: require("markupsafe", "bench").Markup(text) for name, text in scripts.items()}
    return str(environment.get_template("report.html").render(**data, **trusted, digests=digests))


def embed_json(data: Any) -> Any:
    """Return JSON, marked as safe, that no parser of HTML takes for markup; what is not ASCII is escaped as well."""
    return require("jinja2.utils", "bench").htmlsafe_json_dumps(data, allow_nan=False, separators=(",", ":"))


# What the script draws.


def _drawings(shown: Sequence[Section], looks: dict[str, Look]) -> dict[str, Any]:
    places = {solver: place for place, solver in enumerate(looks)}
    return {
        "axes": AXES,
        "solvers": [
            {"name": solver, "color": look.color, "dash": _dashes(look, "px,") or "solid"}
            for solver, look in looks.items()
        ],
        "sections": [_drawing(place, section, places) for place, section in enumerate(shown)],
    }


def _drawing(place: int, section: Section, places: dict[str, int]) -> dict[str, Any]:
    return {
        "id": _identifier(place),
        "metrics": [
            {"name": name, "label": section.metrics[name].label, "log": section.on_log_scale(name)}
            for name in section.drawn(0)
        ],
        "settings": {places[one.solver]: textwrap.wrap(one.setting, 44) for one in section.contenders},
        "curves": [
            {"metric": metric, "axis": axis, "solver": places[solver]}
            | {name: _round(getattr(curve, name)) for name in ("x", "low", "median", "high")}
            for (metric, axis, solver), curve in section.curves.items()
        ],
    }


def _round(values: np.ndarray) -> list[float | None]:
    return [float(f"{value:.5g}") if np.isfinite(value) else None for value in values]


def _dashes(look: Look, separator: str) -> str:
    lengths = separator.join(f"{length * _LINE_WIDTH:.4g}" for length in look.dashes)
    return lengths + separator.rstrip(",") if lengths else ""


# What stands in the page itself.


def _identifier(place: int) -> str:
    return f"section-{place + 1}"


def _describe(place: int, section: Section, looks: dict[str, Look]) -> dict[str, Any]:
    pairs = ", ".join(f"{name} {value}" for name, value in section.arguments.items())
    here = {one.solver for one in section.contenders}
    return {
        "id": _identifier(place),
        "heading": f"{section.problem} ({section.experiment})",
        "arguments": f"Called with {pairs}. " if pairs else "",
        "metric": describe(section.metric).label,
        "metrics": [section.metrics[name].label for name in section.drawn(0)],
        "axes": {axis: AXES[axis] for axis in section.drawn(1)},
        "solvers": [
            {"place": place, "name": name, "color": look.color, "dashes": _dashes(look, " ")}
            for place, (name, look) in enumerate(looks.items())
            if name in here
        ],
        "finals": _finals(section),
        "reached": _reached(section),
        "settings": _table(
            [Column("Setting", "setting")], ((one.solver, [Text(one.setting)]) for one in section.contenders)
        ),
    }


def _table(columns: Sequence[Column], rows: Iterable[tuple[str, Sequence[Text]]]) -> dict[str, Any]:
    return {"columns": [Column("Solver"), *columns], "rows": [[Text(solver), *cells] for solver, cells in rows]}


def _finals(section: Section) -> dict[str, Any]:
    metrics = [name for name, one in section.metrics.items() if one.in_tables and np.isfinite(section.rows[name]).any()]
    ranked = sorted(section.contenders, key=lambda one: _rank(one, section.metric))
    titles = [*(section.metrics[name].label for name in metrics), "Oracle calls", "Seconds", "Memory"]
    swept = section.rows[section.rows["phase"] == SWEEP]
    return _table(
        [*(Column(title, "number") for title in titles), Column("Seeds", "status")],
        (
            (one.solver, [*_final_cells(one, metrics), _statuses(one, swept[swept["solver"] == one.solver])])
            for one in ranked
        ),
    )


def _rank(one: Contender, metric: str) -> float:
    median = quantiles(final_values(one.rows, metric))[1]
    return np.inf if np.isnan(median) else -median if describe(metric).better == "higher" else median


def _final_cells(one: Contender, metrics: Sequence[str]) -> list[Text]:
    last = one.rows[one.rows["final"].astype(bool)]
    return [
        *(_spread(final_values(one.rows, metric)) for metric in metrics),
        Text(_count(last["calls"].median())),
        Text(_number(last["seconds"].median())),
        Text(_bytes(last["memory_bytes"].median())),
    ]


def _statuses(one: Contender, swept: Frame) -> Text:
    counts = one.rows.groupby("cell")["status"].last().value_counts()
    own = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items() if one.parameters is not None)
    all_settings = swept.groupby("cell")["status"].last()
    diverged = f"sweep: {(all_settings == 'diverged').sum():,} of {len(all_settings):,} cells diverged"
    return Text(own or "–", diverged if len(all_settings) else "")


def _spread(values: np.ndarray) -> Text:
    low, median, high = (_number(value) for value in quantiles(values))
    return Text(median, f"{low} to {high}" if low != high else "")


def _reached(section: Section) -> dict[str, Any]:
    metric = "hypergrad_norm_sq"
    timed = [one for one in section.contenders if metric in section.metrics and one.is_timed]
    titles = (f"≤ {epsilon:.0e}".replace("e-0", "e−") for epsilon in EPSILONS)
    rows = (
        (one.solver, [Text(_count(calls)) for calls in calls_to_reach(one.rows, metric, EPSILONS)])
        for one in timed
        if one.rows[metric].notna().any()
    )
    return {"metric": describe(metric).label} | _table([Column(title, "number") for title in titles], rows)


def _number(value: float) -> str:
    if np.isnan(value):
        return "–"
    return f"{value:.3g}" if np.isfinite(value) else "diverged"


def _count(value: float) -> str:
    return f"{value:,.0f}" if np.isfinite(value) else "–"


def _bytes(value: float) -> str:
    if np.isnan(value):
        return "–"
    power = min(max(int(value).bit_length() - 1, 0) // 10, 3)
    return f"{value / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB')[power]}"


# Where it comes from.


def _facts(experiment: str, rows: Frame) -> dict[str, str]:
    times = sorted(rows["written_at"].dropna())
    return {
        "Experiment": experiment,
        "Cells": "; ".join(_phase(str(name), own) for name, own in rows.groupby("phase")),
        "Machine": _all(rows, "machine"),
        "Versions": f"Python {_all(rows, 'python')}, JAX {_all(rows, 'jax')}, bilevel {_all(rows, 'bilevel')}",
        "Revision": _all(rows, "revision"),
        "Written": " to ".join(dict.fromkeys([*times[:1], *times[-1:]])) or "not recorded",
    }


def _phase(name: str, rows: Frame) -> str:
    cells, seeds = rows["cell"].nunique(), rows["seed"].nunique()
    seconds = "" if rows["seconds"].isna().all() else f" and {_number(rows['seconds'].max())} seconds"
    return (
        f"{cells:,} of the {name} phase, with {seeds} seeds, each up to {rows['calls'].max():,} oracle calls{seconds}"
    )


def _all(rows: Frame, column: str) -> str:
    return " and ".join(sorted({str(value) for value in rows[column].dropna()} - {""})) or "not recorded"
