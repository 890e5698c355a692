"""The benchmark as one page that needs no network: what the templates in ``templates/`` show."""

import base64
import hashlib
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bilevel._io import replacing
from bilevel._optional import require
from bilevel.bench.cells import SWEEP
from bilevel.bench.figures import Look, assign_looks
from bilevel.bench.sections import AXES, Contender, Section, calls_to_reach, final_values, make_sections
from bilevel.bench.select import quantiles, worst_value
from bilevel.bench.store import Frame, list_metrics
from bilevel.engine.metrics import metric as describe

EPSILONS = tuple(10.0**-power for power in range(1, 9))
_REACHED = "hypergrad_norm_sq"
_LINE_WIDTH = 2.25


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
    looks = assign_looks(table["solver"])
    shown = make_sections(table, metric)
    drawings = [_draw(f"section-{place}", section, [*looks]) for place, section in enumerate(shown, start=1)]
    solvers = [
        {"place": place, "name": solver, "color": look.color, "dash": _dash(look)}
        for place, (solver, look) in enumerate(looks.items())
    ]
    page = _render(
        title=title,
        solvers=solvers,
        sections=[_describe(section) | drawing for section, drawing in zip(shown, drawings, strict=True)],
        line_width=_LINE_WIDTH,
        budgets=budgets,
        facts=[_facts(str(name), rows) for name, rows in table.groupby("experiment")],
        commands=commands,
        data=embed_json({"axes": AXES, "solvers": solvers, "sections": drawings}),
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
    environment.filters |= {"number": _format_number, "count": _format_count}
    script, _, _ = environment.loader.get_source(environment, "report.js")
    scripts = {"plotly": require("plotly.offline", "bench").get_plotlyjs(), "script": script}
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts.values()]
    trusted = {name: require("markupsafe", "bench").Markup(text) for name, text in scripts.items()}
    return str(environment.get_template("report.html").render(**data, **trusted, digests=digests))


def embed_json(data: Any) -> Any:
    """Return JSON, marked as safe, that no parser of HTML takes for markup; what is not ASCII is escaped as well."""
    return require("jinja2.utils", "bench").htmlsafe_json_dumps(data, allow_nan=False, separators=(",", ":"))


def _format_number(value: float) -> str:
    if np.isnan(value):
        return "–"
    return f"{value:.3g}" if np.isfinite(value) else "diverged"


def _format_count(value: float) -> str:
    return f"{value:,.0f}" if np.isfinite(value) else "–"


def _dash(look: Look) -> str:
    return ",".join(f"{length * _LINE_WIDTH:.4g}px" for length in look.dashes) or "solid"


def _draw(name: str, section: Section, solvers: list[str]) -> dict[str, Any]:
    """Return what the script draws of a section; a solver is known by its place in the list."""
    return {
        "id": name,
        "metrics": [
            {"name": name, "label": section.metrics[name].label, "log": section.on_log_scale(name)}
            for name in section.drawn(0)
        ],
        "settings": {solvers.index(one.solver): textwrap.wrap(one.setting, 44) for one in section.contenders},
        "curves": [
            {"metric": metric, "axis": axis, "solver": solvers.index(solver)}
            | {name: _round(getattr(curve, name)) for name in ("x", "low", "median", "high")}
            for (metric, axis, solver), curve in section.curves.items()
        ],
    }


def _round(values: np.ndarray) -> list[float | None]:
    return [float(f"{value:.5g}") if np.isfinite(value) else None for value in values]


def _describe(section: Section) -> dict[str, Any]:
    """Return what stands in the page itself."""
    timed = [one for one in section.contenders if one.is_timed and _REACHED in list_metrics(one.rows)]
    tabled = [name for name, one in section.metrics.items() if one.in_tables and np.isfinite(section.rows[name]).any()]
    ranked = sorted(section.contenders, key=lambda one: _rank(one, section.metric))
    return {
        "heading": f"{section.problem} ({section.experiment})",
        "arguments": ", ".join(f"{name} {value}" for name, value in section.arguments.items()),
        "selected_by": describe(section.metric).label,
        "axes": {axis: AXES[axis] for axis in section.drawn(1)},
        "tabled_metrics": [section.metrics[name].label for name in tabled],
        "finals": [_final_row(one, tabled, section) for one in ranked],
        "reached": describe(_REACHED).label,
        "epsilons": [f"≤ {epsilon:.0e}".replace("e-0", "e−") for epsilon in EPSILONS],
        "calls_to_reach": {one.solver: calls_to_reach(one.rows, _REACHED, EPSILONS) for one in timed},
        "selected": {one.solver: one.setting for one in section.contenders},
    }


def _rank(one: Contender, metric: str) -> float:
    median = quantiles(final_values(one.rows, metric))[1]
    return np.inf if np.isnan(median) else median * np.sign(worst_value(metric))


def _final_row(one: Contender, metrics: Sequence[str], section: Section) -> dict[str, Any]:
    last = one.rows[one.rows["final"].astype(bool)]
    ends = one.rows.groupby("cell")["status"].last().value_counts() if one.parameters is not None else {}
    of_sweep = (section.rows["phase"] == SWEEP) & (section.rows["solver"] == one.solver)
    swept = section.rows[of_sweep].groupby("cell")["status"].last()
    return {
        "solver": one.solver,
        "spreads": [quantiles(final_values(one.rows, metric)) for metric in metrics],
        **{name: last[name].median() for name in ("calls", "seconds", "memory_bytes")},
        "statuses": ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in ends.items()),
        "n_swept": len(swept),
        "n_diverged": int((swept == "diverged").sum()),
    }


def _facts(experiment: str, rows: Frame) -> dict[str, str]:
    """Return where the rows of an experiment come from."""
    times = sorted(rows["written_at"].dropna())
    return {
        "Experiment": experiment,
        "Cells": "; ".join(_phase(str(name), own) for name, own in rows.groupby("phase")),
        "Machine": _join(rows["machine"]),
        "Versions": ", ".join(f"{label} {_join(rows[label.lower()])}" for label in ("Python", "JAX", "bilevel")),
        "Revision": _join(rows["revision"]),
        "Written": " to ".join(dict.fromkeys([*times[:1], *times[-1:]])) or "not recorded",
    }


def _phase(name: str, rows: Frame) -> str:
    cells, seeds, calls = rows["cell"].nunique(), rows["seed"].nunique(), _format_count(rows["calls"].max())
    seconds = "" if rows["seconds"].isna().all() else f" and {_format_number(rows['seconds'].max())} seconds"
    return f"{cells:,} of the {name} phase, with {seeds} seeds, each up to {calls} oracle calls{seconds}"


def _join(column: Any) -> str:
    return " and ".join(sorted({str(value) for value in column.dropna()} - {""})) or "not recorded"
