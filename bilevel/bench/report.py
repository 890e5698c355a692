"""The benchmark as one page that needs no network, from ``templates/``, and as figures for print, a column wide."""

import base64
import hashlib
import io
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bilevel._io import replacing
from bilevel._optional import require
from bilevel._progress import printable
from bilevel.bench.compare import compare, headline, join_sections
from bilevel.bench.page import (
    describe_origin,
    describe_section,
    draw_section,
    format_count,
    format_number,
    format_quantity,
    order_labels,
)
from bilevel.bench.sections import AXES, Section, add_gap, make_sections
from bilevel.bench.store import Frame
from bilevel.bench.verdict import round_count
from bilevel.solvers import SOLVERS

_LINE_WIDTH, _PRINT_LINE_WIDTH = 2.25, 1.2
# At least 3:1 against white and against the dark page, and apart for red-green blind eyes: `test_figures.py` measures.
COLORS = ("#782dff", "#ff5a00", "#4ba578", "#c31e2d", "#6996d2", "#4b6978", "#8778ff")
# Lengths of marks and gaps, in widths of the line; their number has no divisor in common with that of colors.
DASHES: tuple[tuple[float, ...], ...] = ((), (4, 1.5), (1, 1.2), (5, 1.5, 1, 1.5), (8, 2))
WIDTH, FONT_SIZE = 3.3, 8  # inches, a column of most journals, and points
_PANEL_HEIGHT, _LEGEND_ROW_HEIGHT, _LEGEND_COLUMNS = 1.9, 0.17, 3
_LONG_LABEL = 11  # letters, of which three columns do not fit
# Type 42 keeps letters as letters, which journals ask for.
_STYLE = {"font.size": FONT_SIZE, "axes.titlesize": FONT_SIZE, "pdf.fonttype": 42, "axes.linewidth": 0.6}
# A date would make each file different from the one before.
_METADATA = {"pdf": {"CreationDate": None}, "png": {"Software": None}}


class Look(NamedTuple):
    """Color and dashes of a line."""

    color: str
    dashes: tuple[float, ...]


def assign_looks(labels: Iterable[str]) -> dict[str, Look]:
    """Give each name a look, up to 35 names different ones; grids of one solver share its color.

    The place of a solver in the registry decides, so that it has the same color on every page, unless another has it.
    """
    colors: dict[str, str] = {}
    looks: dict[str, Look] = {}
    for label in sorted(set(labels), key=_place):
        color = colors.setdefault(_solver_of(label), _pick(COLORS, _place(label)[0], [*colors.values()]))
        taken = [look.dashes for look in looks.values() if look.color == color]
        used = [look.dashes for look in looks.values()]
        free = [dashes for dashes in DASHES if dashes not in taken] or [*DASHES]
        looks[label] = Look(color, min(free, key=used.count))
    return looks


def _solver_of(label: str) -> str:
    return label.partition(" (")[0]


def _place(label: str) -> tuple[int, str]:
    names = [*SOLVERS]
    return names.index(_solver_of(label)) if _solver_of(label) in SOLVERS else len(names), label


def _pick(options: Sequence[str], first: int, used: Sequence[str]) -> str:
    """Return the least used option, of equal ones the next from a place on."""
    turned = [options[(first + step) % len(options)] for step in range(len(options))]
    return min(turned, key=used.count)


def write_report(
    table: Frame,
    out: Path,
    *,
    title: str | None = None,
    select: str | None = None,
    budgets: str = "",
    commands: Sequence[str] = (),
    notices: Sequence[str] = (),
    before: Frame | None = None,
) -> Path:
    """Write ``index.html``, from all rows of a store, to a folder, and return its path.

    `select` is the metric that selects settings; `budgets` says in words what a cell was allowed to use, for a store
    only knows what was used; `commands` are the lines that make the page again; `notices` are shown at its head. With
    the rows of an earlier store in `before` the page compares the two.
    """
    shown = make_sections(table, select)
    if before is not None:
        shown = join_sections(make_sections(before, select), shown)
    shown = [add_gap(section) for section in shown]
    labels, looks = order_labels(shown), assign_looks(one.label for section in shown for one in section.contenders)
    solvers = [_describe_look(place, name, looks[name]) for place, name in enumerate(labels)]
    names = [f"section-{place}" for place in range(1, len(shown) + 1)]
    drawings = [draw_section(name, section, labels) for name, section in zip(names, shown, strict=True)]
    sections = [describe_section(name, section, labels) for name, section in zip(names, shown, strict=True)]
    for one, section, drawing in zip(sections, shown, drawings, strict=True):
        one |= {"drawing": drawing, "changes": compare(section) if before is not None else []}
        one |= {"change_headline": headline(one["changes"]) if before is not None else ""}
    origins = {"": table} if before is None else {"before, ": before, "after, ": table}
    facts = [
        describe_origin(f"{when}{name}", own)
        for when, rows in origins.items()
        for name, own in rows.groupby("experiment")
    ]
    title = title or f"Benchmark: {', '.join(dict.fromkeys(one.experiment for one in shown))}"
    given: dict[str, Any] = {"title": title, "budgets": budgets, "commands": commands, "notices": notices}
    given |= {"line_width": _LINE_WIDTH, "solvers": solvers}
    data = embed_json({"axes": AXES, "solvers": solvers, "sections": drawings})
    page = _render(**given, sections=sections, facts=facts, data=data)
    path = Path(out) / "index.html"
    with replacing(path) as file:
        file.write(page.encode())
    return path


def _describe_look(place: int, name: str, look: Look) -> dict[str, Any]:
    dash = ",".join(f"{length * _LINE_WIDTH:.4g}px" for length in look.dashes) or "solid"
    return {"place": place, "name": name, "color": look.color, "dash": dash}


def _render(**data: Any) -> str:
    jinja2 = require("jinja2", "bench")
    options = {"autoescape": True, "undefined": jinja2.StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    options["finalize"] = lambda value: printable(value) if type(value) is str else value  # no control characters
    environment = jinja2.Environment(loader=jinja2.PackageLoader("bilevel.bench"), **options)
    environment.filters |= {
        "number": format_number,
        "count": format_count,
        "short": round_count,
        "quantity": format_quantity,
    }
    script, _, _ = environment.loader.get_source(environment, "report.js")
    scripts = {"plotly": require("plotly.offline", "bench").get_plotlyjs(), "script": script}
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts.values()]
    trusted = {name: require("markupsafe", "bench").Markup(text) for name, text in scripts.items()}
    return str(environment.get_template("report.html").render(**data, **trusted, digests=digests))


def embed_json(data: Any) -> Any:
    """Return JSON, marked as safe, that no parser of HTML takes for markup; what is not ASCII is escaped as well."""
    return require("jinja2.utils", "bench").htmlsafe_json_dumps(data, allow_nan=False, separators=(",", ":"))


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
                drawn = io.BytesIO()  # where the disk is full, Matplotlib's own writer of PDF raises something else
                figure.savefig(drawn, format=kind, dpi=300, metadata=metadata)
                with replacing(paths[-1]) as file:
                    file.write(drawn.getvalue())
    return paths


def file_names(shown: Sequence[Section]) -> list[str]:
    """Return experiment and problem of each section as a file name, with a digest where two would have the same."""
    names = (re.sub(r"[^a-z0-9_]+", "-", f"{one.experiment}-{one.problem}".lower()) for one in shown)
    slugs = [name.strip("-")[:80] or "figure" for name in names]  # in another alphabet nothing is left
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
    columns = _LEGEND_COLUMNS if max(map(len, solvers)) <= _LONG_LABEL else _LEGEND_COLUMNS - 1
    height = _PANEL_HEIGHT * len(panels) + (_LEGEND_ROW_HEIGHT * -(-len(solvers) // columns) + 0.25)
    figure = require("matplotlib.figure", "bench").Figure(figsize=(WIDTH, height), layout="constrained")
    for axes, axis in zip(np.ravel(figure.subplots(len(panels), 1)), panels, strict=True):
        _panel(axes, section, metric, axis, looks)
    figure.axes[0].set_title(section.problem, parse_math=False)
    handles = [require("matplotlib.lines", "bench").Line2D([], [], **_style(looks[solver])) for solver in solvers]
    place = {"loc": "outside lower center", "ncols": columns, "frameon": False, "handlelength": 2.8}
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
