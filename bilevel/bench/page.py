"""The report of a store: a page that needs no network, from ``templates/``, and figures for print, one column wide."""

import base64
import hashlib
import inspect
import io
import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bilevel._core.extras import printable, require
from bilevel._core.files import replacing
from bilevel.bench import tables
from bilevel.bench.config import TIMING
from bilevel.bench.select import AXES, Contender, Section, add_gap, final_values, make_sections, worst_value
from bilevel.bench.store import SIZES, Frame
from bilevel.engine.curves import quantiles
from bilevel.engine.show import draw_panels
from bilevel.problems import PROBLEMS
from bilevel.solvers import SOLVERS

_STATIONARITY = "hypergrad_norm_sq"
_LOG_RATIO = 10  # of the highest to the lowest value of a curve; larger ratios are drawn on a log scale
_LINE_WIDTH, _PRINT_LINE_WIDTH = 2.25, 1.2
# Contrast of at least 3:1 with both page colors, and distinct for red-green blindness; `test_figures.py` measures it.
COLORS = ("#782dff", "#ff5a00", "#4ba578", "#c31e2d", "#6996d2", "#4b6978", "#8778ff")
# Lengths of dashes and gaps, in line widths. The number of patterns and that of colors have no common divisor.
DASHES: tuple[tuple[float, ...], ...] = ((), (4, 1.5), (1, 1.2), (5, 1.5, 1, 1.5), (8, 2))
WIDTH, FONT_SIZE = 3.3, 8  # inches, one column of most journals, and points
_LEGEND_ROW_HEIGHT, _LEGEND_COLUMNS = 0.17, 2
# Font type 42 keeps text as text, which journals require.
_STYLE = {"font.size": FONT_SIZE, "axes.titlesize": FONT_SIZE, "pdf.fonttype": 42, "axes.linewidth": 0.6}
# Without dates and versions, equal figures are equal files.
_METADATA = {"pdf": {"CreationDate": None}, "png": {"Software": None}}


def write_report(
    table: Frame,
    out: Path,
    *,
    select: str | None = None,
    budgets: str = "",
    commands: Sequence[str] = (),
    notices: Sequence[str] = (),
) -> Path:
    """Write ``index.html`` to a folder and return its path.

    Parameters
    ----------
    table : all rows of a store
    out : folder to write to
    select : metric that selects the settings
    budgets : budget of a run, in words; a store only knows what was used
    commands : command lines that reproduce the page
    notices : warnings shown at the top
    """
    sections = [add_gap(section) for section in make_sections(table, select)]
    labels = order_labels(sections)
    in_order = [sorted(section.contenders, key=lambda one: labels.index(one.label)) for section in sections]
    sections = [replace(one, contenders=tuple(own)) for one, own in zip(sections, in_order, strict=True)]
    looks = assign_looks(labels)
    solvers = [_describe_look(place, label, looks[label]) for place, label in enumerate(labels)]
    drawings = [draw_section(f"section-{place}", one, labels) for place, one in enumerate(sections, start=1)]
    page = _render(
        title=f"Benchmark: {', '.join(dict.fromkeys(one.experiment for one in sections))}",
        budgets=budgets,
        commands=commands,
        notices=notices,
        line_width=_LINE_WIDTH,
        solvers=solvers,
        sections=[describe_section(*pair) for pair in zip(sections, drawings, strict=True)],
        origins=[describe_origin(name, rows) for name, rows in table.groupby("experiment")],
        data=embed_json({"axes": AXES, "solvers": solvers, "sections": drawings}),
    )
    path = Path(out) / "index.html"
    with replacing(path) as file:
        file.write(page.encode())
    return path


def make_environment() -> Any:
    """Return the environment of the templates, which escape markup and control characters in every text."""
    jinja2 = require("jinja2", "bench")
    options = {"autoescape": True, "undefined": jinja2.StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    options["finalize"] = lambda value: printable(value) if type(value) is str else value
    environment = jinja2.Environment(loader=jinja2.PackageLoader("bilevel.bench"), **options)
    environment.filters |= {"number": tables.format_number, "quantity": tables.format_quantity}
    return environment


def _render(**data: Any) -> str:
    environment = make_environment()
    script, _, _ = environment.loader.get_source(environment, "report.js")
    scripts = {"plotly": require("plotly.offline", "bench").get_plotlyjs(), "script": script}
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts.values()]
    trusted = {name: require("markupsafe", "bench").Markup(text) for name, text in scripts.items()}
    return str(environment.get_template("report.html").render(**data, **trusted, digests=digests))


def embed_json(data: Any) -> Any:
    """Return JSON that no HTML parser interprets as markup, marked as safe; non-ASCII characters are escaped too."""
    return require("jinja2.utils", "bench").htmlsafe_json_dumps(data, allow_nan=False, separators=(",", ":"))


def order_labels(sections: Sequence[Section]) -> list[str]:
    """Return the labels in the order of the whole page: by final values, the best first, in the first section."""
    ranked = (one for section in sections for one in sorted(section.contenders, key=lambda one: _score(one, section)))
    return list(dict.fromkeys(one.label for one in ranked))


def _score(one: Contender, section: Section) -> tuple[float, str]:
    median = quantiles(final_values(one.rows, section.metric))[1]
    return np.inf if np.isnan(median) else float(median * np.sign(worst_value(section.metric))), one.label


def describe_section(section: Section, drawing: dict[str, Any]) -> dict[str, Any]:
    """Return the data of a section for the template."""
    metrics, main = section.metrics, section.metric
    tabled = [key for key, one in metrics.items() if one.in_tables and np.isfinite(section.rows[key]).any()]
    finals = {name: tables.seed_finals(section, name) for name in dict.fromkeys([main, *tabled])}
    verdicts = {name: tables.decide(values, metrics[name].better or "lower") for name, values in finals.items()}
    has_several_problems = section.rows["problem_arguments"].nunique() > 1
    # A value of the metric is not comparable between several problems, but its gap to the lowest value is.
    raced = dict.fromkeys((next(iter(section.own), main) if has_several_problems else main, _STATIONARITY))
    found = {name: tables.make_targets(section, name) for name in raced if name in metrics}
    races = [(metrics[name], targets) for name, targets in found.items() if targets]
    winners = {f"final {metrics[name].label}": verdicts[name] for name in tabled if metrics[name].better}
    for race in races[:1]:
        winners |= tables.decide_costs(*race)
    known = [section.rows[name].dropna() for name in SIZES if name in section.rows]
    rows = [tables.make_row(one, tabled) for one in section.contenders]
    return {
        "drawing": drawing,
        "name": section.problem,
        "experiment": section.experiment,
        "verdict": verdicts[main],
        "title": _read_title(section.problem),
        "sizes": [int(one.iloc[0]) for one in known if len(one)],
        "arguments": {name: value for name, value in section.arguments.items() if value is not None},
        "metrics": [metrics[name] for name in verdicts],
        "is_timed": bool((section.rows["phase"] == TIMING).any()),
        "has_gap": bool(section.own),
        "has_several_problems": has_several_problems,
        "metric": metrics[main],
        "axes": {axis: AXES[axis] for axis in section.with_curves(1)},
        "tabled": [metrics[name].label for name in tabled],
        "rows": rows,
        "warnings": [(row["solver"], text) for row in rows for text in _list_warnings(row)],
        "winners": {title: one for title, one in winners.items() if one is not None},
        "races": races,
    }


def _list_warnings(row: dict[str, Any]) -> Iterator[str]:
    if not row["statuses"]:
        yield "no setting of its grid has a finite median."
    elif n_diverged := row["statuses"].get("diverged"):
        yield f"{n_diverged} of {sum(row['statuses'].values())} seeds diverged at the selected setting."
    if row["edges"]:
        yield f"{row['edges']}, an end of its grid. A better setting may lie beyond."


def _read_title(problem: str) -> str:
    title = (inspect.getdoc(PROBLEMS[problem]) or "").partition("\n")[0] if problem in PROBLEMS else ""
    title = title.removeprefix("Build ").removeprefix("Draw ")
    return (title[:1].upper() + title[1:]).replace("`", "")


def describe_origin(experiment: str, rows: Frame) -> dict[str, str]:
    """Return machine, versions, time and number of runs of an experiment."""
    times, phases = sorted(rows["written_at"].dropna()), []
    for name, own in rows.groupby("phase"):
        cells, seeds, calls = own["cell"].nunique(), own["seed"].nunique(), own["calls"].max()
        seconds = "" if own["seconds"].isna().all() else f" and {tables.format_number(own['seconds'].max())} seconds"
        phases += [f"{cells:,} of the {name} phase, with {seeds} seeds, each up to {calls:,} oracle calls{seconds}"]
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


# The data that the script of the page draws.


def draw_section(name: str, section: Section, labels: list[str]) -> dict[str, Any]:
    """Return the curves and heat maps of a section; solvers are given by their position in the labels."""
    curves = [
        {"metric": metric, "axis": axis, "solver": labels.index(label)}
        | {part: [_shorten(value) for value in getattr(curve, part)] for part in ("x", "low", "median", "high")}
        for (metric, axis, label), curve in section.curves.items()
    ]
    # The first metric is the one that selects; if it is a loss, as its gap to the lowest value, on a log scale.
    order = sorted(section.with_curves(0), key=lambda key: (key not in section.own, key != section.metric))
    main, maps = section.metrics[section.metric], tables.make_heat_maps(section)
    unswept = sorted({one.label for one in section.contenders} - {one.label for one in maps}, key=labels.index)
    heat = {"label": main.label, "better": main.better, "maps": [_draw_map(one, labels) for one in maps]}
    return {
        "id": name,
        "metrics": [{"name": key, "label": section.metrics[key].label, "log": _is_log(section, key)} for key in order],
        "settings": {labels.index(one.label): textwrap.wrap(one.setting, 44) for one in section.contenders},
        "curves": curves,
        "heat": heat | {"unswept": unswept},
    }


def _shorten(value: float) -> float | None:
    return float(f"{value:.6g}") if np.isfinite(value) else None


def _is_log(section: Section, metric: str) -> bool:
    medians = np.concatenate([one.median for key, one in section.curves.items() if key[0] == metric])
    known = medians[np.isfinite(medians)]
    if metric in section.own:  # the gap of the lowest value is 0, which a log scale leaves out
        return bool((known > 0).any())
    return bool(known.min() > 0 and (section.metrics[metric].log_scale or known.max() / known.min() > _LOG_RATIO))


def _draw_map(one: tables.HeatMap, labels: list[str]) -> dict[str, Any]:
    spots = [[one.spots.get((x, y)) for x in one.xs] for y in one.ys]
    x, y = one.selected
    return {
        "solver": labels.index(one.label),
        "x": one.x,
        "y": one.y,
        "selected": (one.xs.index(x), one.ys.index(y if one.y else None)) if x in one.xs else None,
        "xs": [f"{x:g}" for x in one.xs],
        "ys": ["" if y is None else f"{y:g}" for y in one.ys],
        "spots": [[spot and (_shorten(spot.median), spot.n_diverged, spot.n_seeds) for spot in row] for row in spots],
    }


# Colors and dashes.


class Look(NamedTuple):
    """Color and dashes of a line."""

    color: str
    dashes: tuple[float, ...]


def assign_looks(labels: Iterable[str]) -> dict[str, Look]:
    """Assign a color and dashes to each label, all different for up to 35 labels.

    Grids of one solver share its color. The color follows from the position of the solver in the registry, so it is the
    same on every page unless another solver already has it.
    """
    names, colors, looks = [*SOLVERS], dict[str, str](), dict[str, Look]()

    def place(label: str) -> tuple[int, str]:
        solver = label.partition(" (")[0]
        return names.index(solver) if solver in SOLVERS else len(names), label

    for label in sorted(set(labels), key=place):
        first = place(label)[0] % len(COLORS)
        least_used = min(COLORS[first:] + COLORS[:first], key=[*colors.values()].count)
        color = colors.setdefault(label.partition(" (")[0], least_used)
        taken = [look.dashes for look in looks.values() if look.color == color]
        free = [dashes for dashes in DASHES if dashes not in taken] or DASHES
        looks[label] = Look(color, min(free, key=[look.dashes for look in looks.values()].count))
    return looks


def _describe_look(place: int, name: str, look: Look) -> dict[str, Any]:
    dash = ",".join(f"{length * _LINE_WIDTH:.4g}px" for length in look.dashes) or "solid"
    return {"place": place, "name": name, "color": look.color, "dash": dash}


# Figures for print.


class Layout(NamedTuple):
    """How figures look: width and height of a panel in inches, and which axes have a log scale.

    ``log`` has the letters of these axes, as "xy", and none of them if it is empty; None leaves the choice to the
    metric. ``labels`` are texts for the legend by solver.
    """

    width: float = WIDTH
    height: float = 1.9
    log: str | None = None
    labels: Mapping[str, str] = {}


def write_figures(
    table: Frame,
    out: Path,
    *,
    select: str | None = None,
    draw: str | None = None,
    only: Sequence[str] = (),
    layout: Layout = Layout(),  # noqa: B008
) -> list[Path]:
    """Draw a metric for each problem that has a finite curve of it, as PDF and PNG, and return the paths.

    Parameters
    ----------
    table : all rows of a store
    out : folder to write to
    select : metric that selects the settings
    draw : metric to draw, by default the one that selects
    only : solvers to draw, in the order of the legend; by default all
    layout : size, scales and labels
    """
    shown = [section for section in make_sections(table, select) if section.curves]
    known = list(dict.fromkeys(one.label for section in shown for one in section.contenders))
    for name, chosen in (("only", only), ("labels", layout.labels)):
        if unknown := [one for one in chosen if one not in known]:
            raise ValueError(f"`{name}`: no curve of {unknown[0]!r}; there are: {', '.join(sorted(known))}.")
    drawable = {name for section in shown for name in section.with_curves(0)}
    if draw is not None and draw not in drawable:
        raise ValueError(f"`draw={draw!r}`: no curve of it; there are: {', '.join(sorted(drawable))}.")
    shown = [section for section in shown if draw is None or draw in section.with_curves(0)]
    looks = assign_looks(known)
    looks = {one: looks[one] for one in only} if only else looks
    shown = [one for one in shown if looks.keys() & {key[2] for key in one.curves if key[0] == _drawn(one, draw)}]
    paths: list[Path] = []
    for section, name in zip(shown, file_names(shown), strict=True):
        with require("matplotlib", "bench").rc_context(_STYLE):
            figure = draw_figure(section, looks, draw, layout)
            for kind, metadata in _METADATA.items():
                paths.append(Path(out) / f"{name}.{kind}")
                drawn = io.BytesIO()  # on a full disk the PDF writer of Matplotlib would not raise OSError
                figure.savefig(drawn, format=kind, dpi=300, metadata=metadata)
                with replacing(paths[-1]) as file:
                    file.write(drawn.getvalue())
    return paths


def file_names(shown: Sequence[Section]) -> list[str]:
    """Return a file name for each section from its experiment and problem, with a digest if two names are equal."""
    names = (re.sub(r"[^a-z0-9_]+", "-", f"{one.experiment}-{one.problem}".lower()) for one in shown)
    slugs = [name.strip("-")[:80] or "figure" for name in names]  # empty for names without ASCII letters
    keys = (json.dumps([one.experiment, one.problem, one.arguments], sort_keys=True).encode() for one in shown)
    pairs = zip(slugs, (hashlib.sha256(key).hexdigest()[:8] for key in keys), strict=True)
    return [slug if slugs.count(slug) == 1 else f"{slug}-{digest}" for slug, digest in pairs]


def draw_figure(
    section: Section,
    looks: dict[str, Look],
    metric: str | None = None,
    layout: Layout = Layout(),  # noqa: B008
) -> Any:
    """Draw one metric against seconds and against oracle calls, as far as these are known, in panels."""
    metric = _drawn(section, metric)
    known = {axis: section.curves_of(metric, axis) for axis in ("seconds", "calls")}
    drawn = {axis: {one: curves[one] for one in looks if one in curves} for axis, curves in known.items()}
    panels = {AXES[axis]: curves for axis, curves in drawn.items() if curves}
    solvers = [solver for solver in looks if any(key[0] == metric and key[2] == solver for key in section.curves)]
    styles = {solver: _line_style(looks[solver]) for solver in solvers}
    height = layout.height * len(panels) + _LEGEND_ROW_HEIGHT * -(-len(solvers) // _LEGEND_COLUMNS) + 0.25
    figure = require("matplotlib.figure", "bench").Figure(figsize=(layout.width, height), layout="constrained")
    draw_panels(figure.subplots(len(panels), 1), panels, section.metrics[metric], styles, layout.log)
    figure.axes[0].set_title(section.problem, parse_math=False)
    handles = [require("matplotlib.lines", "bench").Line2D([], [], **styles[solver]) for solver in solvers]
    place = {"loc": "outside lower center", "ncols": _LEGEND_COLUMNS, "frameon": False, "handlelength": 2.8}
    for text in figure.legend(handles, [layout.labels.get(one, one) for one in solvers], **place).get_texts():
        text.set_parse_math(False)
    return figure


def _drawn(section: Section, metric: str | None) -> str:
    metrics = section.with_curves(0)
    return next((one for one in (metric, section.metric) if one in metrics), metrics[0])


def _line_style(look: Look) -> dict[str, Any]:
    return {"color": look.color, "linestyle": (0, look.dashes) if look.dashes else "-", "linewidth": _PRINT_LINE_WIDTH}
