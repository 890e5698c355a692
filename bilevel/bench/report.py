"""The benchmark as one page that needs no network, from ``templates/``, and as figures for print, a column wide."""

import base64
import hashlib
import itertools
import json
import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bilevel._io import replacing
from bilevel._optional import require
from bilevel.bench.cells import TIMING
from bilevel.bench.sections import AXES, Contender, Section, final_values, first_reach, make_sections
from bilevel.bench.select import quantiles, worst_value
from bilevel.bench.store import Frame, list_metrics
from bilevel.engine.metrics import metric as describe

EPSILONS = tuple(10.0**-power for power in range(1, 9))
_REACHED = "hypergrad_norm_sq"
_LINE_WIDTH, _PRINT_LINE_WIDTH = 2.25, 1.2
# At least 3:1 against white and against the dark page, and apart for red-green blind eyes: `test_figures.py` measures.
COLORS = ("#782dff", "#ff5a00", "#4ba578", "#c31e2d", "#6996d2", "#4b6978", "#8778ff")
# Lengths of marks and gaps, in widths of the line; their number has no divisor in common with that of colors.
DASHES: tuple[tuple[float, ...], ...] = ((), (4, 1.5), (1, 1.2), (5, 1.5, 1, 1.5), (8, 2))
WIDTH, FONT_SIZE = 3.3, 8  # inches, a column of most journals, and points
_PANEL_HEIGHT, _LEGEND_ROW_HEIGHT, _LEGEND_COLUMNS = 1.9, 0.17, 3
# Type 42 keeps letters as letters, which journals ask for.
_STYLE = {"font.size": FONT_SIZE, "axes.titlesize": FONT_SIZE, "pdf.fonttype": 42, "axes.linewidth": 0.6}
# A date would make each file different from the one before.
_METADATA = {"pdf": {"CreationDate": None}, "png": {"Software": None}}


class Look(NamedTuple):
    """Color and dashes of a line."""

    color: str
    dashes: tuple[float, ...]


def assign_looks(labels: Iterable[str]) -> dict[str, Look]:
    """Give each name a look; up to 35 names get different ones."""
    return dict(zip(sorted(set(labels)), map(Look, itertools.cycle(COLORS), itertools.cycle(DASHES)), strict=False))


def write_report(
    table: Frame,
    out: Path,
    *,
    title: str = "Benchmark",
    select: str | None = None,
    budgets: str = "",
    commands: Sequence[str] = (),
) -> Path:
    """Write ``index.html``, from all rows of a store, to a folder, and return its path.

    `select` is the metric that selects settings; `budgets` says in words what a cell was allowed to use, for a store
    only knows what was used; `commands` are the lines that make the page again.
    """
    shown = make_sections(table, select)
    solvers: list[dict[str, Any]] = []
    looks = assign_looks(one.label for section in shown for one in section.contenders)
    for name, look in looks.items():
        dash = ",".join(f"{length * _LINE_WIDTH:.4g}px" for length in look.dashes) or "solid"
        solvers.append({"place": len(solvers), "name": name, "color": look.color, "dash": dash})
    names = [*looks]
    drawings = [_drawing(f"section-{place}", section, names) for place, section in enumerate(shown, start=1)]
    given = {"title": title, "budgets": budgets, "commands": commands, "line_width": _LINE_WIDTH, "solvers": solvers}
    sections = [_describe(section) | drawing for section, drawing in zip(shown, drawings, strict=True)]
    facts = [_facts(str(name), rows) for name, rows in table.groupby("experiment")]
    data = embed_json({"axes": AXES, "solvers": solvers, "sections": drawings})
    page = _render(**given, sections=sections, facts=facts, data=data)
    path = Path(out) / "index.html"
    with replacing(path) as file:
        file.write(page.encode())
    return path


def _render(**data: Any) -> str:
    jinja2 = require("jinja2", "bench")
    options = {"autoescape": True, "undefined": jinja2.StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    environment = jinja2.Environment(loader=jinja2.PackageLoader("bilevel.bench"), **options)
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
    return "–" if np.isnan(value) else f"{value:.3g}" if np.isfinite(value) else "diverged"


def _format_count(value: float) -> str:
    return f"{value:,.0f}" if np.isfinite(value) else "–"


def _drawing(name: str, section: Section, solvers: list[str]) -> dict[str, Any]:
    """Return what the script draws of a section; a solver is known by its place in the list."""
    curves = []
    for (metric, axis, solver), curve in section.curves.items():
        key: dict[str, Any] = {"metric": metric, "axis": axis, "solver": solvers.index(solver)}
        for part, values in curve._asdict().items():
            key[part] = [float(f"{value:.5g}") if np.isfinite(value) else None for value in values]
        curves.append(key)
    metrics: list[dict[str, Any]] = []
    for one in (section.metrics[name] for name in section.with_curves(0)):
        positive = all(np.all(curve.median > 0) for key, curve in section.curves.items() if key[0] == one.name)
        metrics.append({"name": one.name, "label": one.title, "log": one.log_scale and positive})
    settings = {solvers.index(one.label): textwrap.wrap(one.setting, 44) for one in section.contenders}
    return {"id": name, "metrics": metrics, "settings": settings, "curves": curves}


def _describe(section: Section) -> dict[str, Any]:
    timed = (one for one in section.contenders if (one.rows["phase"] == TIMING).any())
    reached = {one.label: one.rows for one in timed if _REACHED in list_metrics(one.rows)}
    tabled = [name for name, one in section.metrics.items() if one.in_tables and np.isfinite(section.rows[name]).any()]
    finals = [_final_row(one, tabled, section) for one in section.contenders]
    return {
        "heading": f"{section.problem} ({section.experiment})",
        "arguments": ", ".join(f"{name} {value}" for name, value in section.arguments.items()),
        "selected_by": describe(section.metric).label,
        "axes": {axis: AXES[axis] for axis in section.with_curves(1)},
        "tabled_metrics": [section.metrics[name].label for name in tabled],
        "finals": sorted(finals, key=lambda row: row["rank"]),
        "reached": describe(_REACHED).label,
        "epsilons": [f"≤ {epsilon:.0e}".replace("e-0", "e−") for epsilon in EPSILONS],
        "calls_to_reach": {solver: first_reach(rows, _REACHED, EPSILONS) for solver, rows in reached.items()},
        "selected": {one.label: (one.setting, one.edges) for one in section.contenders},
    }


def _final_row(one: Contender, metrics: Sequence[str], section: Section) -> dict[str, Any]:
    last = one.rows[one.rows["final"].astype(bool)]
    ends = one.rows.groupby("cell")["status"].last().value_counts() if one.parameters is not None else {}
    swept = one.swept.groupby("cell")["status"].last()
    median = quantiles(final_values(one.rows, section.metric))[1]
    return {
        "solver": one.label,
        "rank": np.inf if np.isnan(median) else median * np.sign(worst_value(section.metric)),
        "spreads": [quantiles(final_values(one.rows, metric)) for metric in metrics],
        **{name: last[name].median() for name in ("calls", "seconds", "memory_bytes")},
        "statuses": ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in ends.items()),
        "n_swept": len(swept),
        "n_diverged": int((swept == "diverged").sum()),
    }


def _facts(experiment: str, rows: Frame) -> dict[str, str]:
    times, phases = sorted(rows["written_at"].dropna()), []
    for name, own in rows.groupby("phase"):
        cells, seeds, calls = own["cell"].nunique(), own["seed"].nunique(), _format_count(own["calls"].max())
        seconds = "" if own["seconds"].isna().all() else f" and {_format_number(own['seconds'].max())} seconds"
        phases += [f"{cells:,} of the {name} phase, with {seeds} seeds, each up to {calls} oracle calls{seconds}"]
    return {
        "Experiment": experiment,
        "Cells": "; ".join(phases),
        "Machine": _join(rows["machine"]),
        "Versions": ", ".join(f"{label} {_join(rows[label.lower()])}" for label in ("Python", "JAX", "bilevel")),
        "Revision": _join(rows["revision"]),
        "Written": " to ".join(dict.fromkeys([*times[:1], *times[-1:]])) or "not recorded",
    }


def _join(column: Any) -> str:
    return " and ".join(sorted({str(value) for value in column.dropna()} - {""})) or "not recorded"


def write_figures(table: Frame, out: Path, *, select: str | None = None, draw: str | None = None) -> list[Path]:
    """Draw a metric for each problem with a finite curve of it, as PDF and PNG, and return their paths.

    ``draw`` is the metric to draw, by default the one that selects settings, ``select``.
    """
    shown = [section for section in make_sections(table, select) if section.curves]
    drawable = {name for section in shown for name in section.with_curves(0)}
    if draw is not None and draw not in drawable:
        raise ValueError(f"`draw={draw!r}`: no curve of it; there are: {', '.join(sorted(drawable))}.")
    shown = [section for section in shown if draw is None or draw in section.with_curves(0)]
    looks = assign_looks(one.label for section in shown for one in section.contenders)
    paths: list[Path] = []
    for section, name in zip(shown, file_names(shown), strict=True):
        with require("matplotlib", "bench").rc_context(_STYLE):
            figure = draw_figure(section, looks, draw)
            for kind, metadata in _METADATA.items():
                paths.append(Path(out) / f"{name}.{kind}")
                with replacing(paths[-1]) as file:
                    figure.savefig(file, format=kind, dpi=300, metadata=metadata)
    return paths


def file_names(shown: Sequence[Section]) -> list[str]:
    """Return experiment and problem of each section as a file name, with a digest where two would have the same."""
    slugs = [re.sub(r"[^a-z0-9_]+", "-", f"{one.experiment}-{one.problem}".lower()).strip("-")[:80] for one in shown]
    keys = (json.dumps([one.experiment, one.problem, one.arguments], sort_keys=True).encode() for one in shown)
    pairs = zip(slugs, (hashlib.sha256(key).hexdigest()[:8] for key in keys), strict=True)
    return [slug if slugs.count(slug) == 1 else f"{slug}-{digest}" for slug, digest in pairs]


def draw_figure(section: Section, looks: dict[str, Look], metric: str | None = None) -> Any:
    """Draw one metric against seconds and against oracle calls, where each is known, one panel below the other."""
    metric = metric or section.metric
    metric = metric if metric in section.with_curves(0) else section.with_curves(0)[0]
    known = {axis for name, axis, _ in section.curves if name == metric}
    panels = [axis for axis in ("seconds", "calls") if axis in known]
    solvers = [solver for solver in looks if any(key[0] == metric and key[2] == solver for key in section.curves)]
    height = _PANEL_HEIGHT * len(panels) + (_LEGEND_ROW_HEIGHT * -(-len(solvers) // _LEGEND_COLUMNS) + 0.25)
    figure = require("matplotlib.figure", "bench").Figure(figsize=(WIDTH, height), layout="constrained")
    for axes, axis in zip(np.ravel(figure.subplots(len(panels), 1)), panels, strict=True):
        _panel(axes, section, metric, axis, looks)
    figure.axes[0].set_title(section.problem, parse_math=False)
    handles = [require("matplotlib.lines", "bench").Line2D([], [], **_style(looks[solver])) for solver in solvers]
    place = {"loc": "outside lower center", "ncols": _LEGEND_COLUMNS, "frameon": False, "handlelength": 2.8}
    for text in figure.legend(handles, solvers, **place).get_texts():
        text.set_parse_math(False)
    return figure


def _panel(axes: Any, section: Section, metric: str, axis: str, looks: dict[str, Look]) -> None:
    own = {solver: curve for (name, along, solver), curve in section.curves.items() if (name, along) == (metric, axis)}
    finite = [edge[np.isfinite(edge)] for curve in own.values() for edge in (curve.low, curve.median, curve.high)]
    top, bottom = np.max(np.concatenate(finite)), np.min(np.concatenate(finite))
    for solver, curve in own.items():
        style = _style(looks[solver]) | ({"marker": "."} if len(curve.x) == 1 else {})
        median = np.where(np.isfinite(curve.median), curve.median, np.nan)
        axes.plot(curve.x, median, **style)
        # Where a fifth of the seeds diverged, the band has no edge of its own and goes to that of the panel.
        edges = (np.clip(edge, bottom, top) for edge in (curve.low, curve.high))
        axes.fill_between(curve.x, *edges, where=~np.isnan(median), color=style["color"], alpha=0.15, linewidth=0)
    if bottom > 0 and section.metrics[metric].log_scale:
        axes.set_yscale("log")
    axes.set(xlabel=AXES[axis], ylabel=section.metrics[metric].title)
    axes.grid(alpha=0.3, linewidth=0.5)


def _style(look: Look) -> dict[str, Any]:
    return {"color": look.color, "linestyle": (0, look.dashes) if look.dashes else "-", "linewidth": _PRINT_LINE_WIDTH}
