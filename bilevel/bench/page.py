"""The report of a store: a page that needs no network, from ``templates/``, and figures for print, one column wide."""

import base64
import hashlib
import inspect
import io
import json
import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bilevel._core.extras import printable, require
from bilevel._core.files import replacing
from bilevel.bench.config import TIMING
from bilevel.bench.select import (
    AXES,
    Contender,
    Section,
    add_gap,
    count_diverged,
    final_values,
    make_sections,
    quantiles,
    worst_value,
)
from bilevel.bench.store import SIZES, Frame
from bilevel.bench.tables import (
    HeatMap,
    TargetTable,
    Verdict,
    compare,
    decide_costs,
    decide_finals,
    describe_changes,
    describe_leads,
    describe_target,
    describe_winner,
    format_count,
    format_number,
    format_quantity,
    join_sections,
    list_target_rows,
    make_final_row,
    make_heat_maps,
    make_target_table,
    round_count,
)
from bilevel.problems import PROBLEMS
from bilevel.solvers import SOLVERS

_MEANINGS = {
    "value_gap": "how far h(x) is above its minimum",
    "value": "the outer loss F(z*(x), x), where the inner problem is solved exactly",
    "hypergrad_norm_sq": "the squared length of the gradient of h, 0 at a stationary point",
    "test_error": "the share of test rows, which no solver sees, that z gets wrong",
    "validation_error": "the share of validation rows that z gets wrong",
    "weight_auc": "how well the learned weights separate clean rows from corrupted ones, at best 1",
    "outer_value": "the outer loss at the z of the solver, which is close to h(x) if z is close to z*(x)",
}
_STATIONARITY = "hypergrad_norm_sq"
_LOG_RATIO = 10  # of the highest to the lowest value of a curve; larger ratios are drawn on a log scale
_LINE_WIDTH, _PRINT_LINE_WIDTH = 2.25, 1.2
# Contrast of at least 3:1 with both page colors, and distinct for red-green blindness; `test_figures.py` measures it.
COLORS = ("#782dff", "#ff5a00", "#4ba578", "#c31e2d", "#6996d2", "#4b6978", "#8778ff")
# Lengths of dashes and gaps, in line widths. The number of patterns and that of colors have no common divisor.
DASHES: tuple[tuple[float, ...], ...] = ((), (4, 1.5), (1, 1.2), (5, 1.5, 1, 1.5), (8, 2))
WIDTH, FONT_SIZE = 3.3, 8  # inches, one column of most journals, and points
_PANEL_HEIGHT, _LEGEND_ROW_HEIGHT, _LEGEND_COLUMNS = 1.9, 0.17, 3
_LONG_LABEL = 11  # letters; with longer labels the legend has one column less
# Font type 42 keeps text as text, which journals require.
_STYLE = {"font.size": FONT_SIZE, "axes.titlesize": FONT_SIZE, "pdf.fonttype": 42, "axes.linewidth": 0.6}
# Without dates and versions, equal figures are equal files.
_METADATA = {"pdf": {"CreationDate": None}, "png": {"Software": None}}


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
    """Write ``index.html`` to a folder and return its path.

    Parameters
    ----------
    table : all rows of a store
    out : folder to write to
    title : title of the page; by default it names the experiments
    select : metric that selects the settings
    budgets : budget of a run, in words; a store only knows what was used
    commands : command lines that reproduce the page
    notices : warnings shown at the top
    before : all rows of an earlier store; the page then compares both
    """
    sections = make_sections(table, select)
    if before is not None:
        sections = join_sections(make_sections(before, select), sections)
    sections = [add_gap(section) for section in sections]
    labels = order_labels(sections)
    looks = assign_looks(labels)
    solvers = [_describe_look(place, label, looks[label]) for place, label in enumerate(labels)]
    names = [f"section-{place}" for place in range(1, len(sections) + 1)]
    drawings = [draw_section(name, section, labels) for name, section in zip(names, sections, strict=True)]
    shown = [describe_section(name, section, labels) for name, section in zip(names, sections, strict=True)]
    for one, section, drawing in zip(shown, sections, drawings, strict=True):
        changes = compare(section) if before is not None else []
        headline = describe_changes(changes) if before is not None else ""
        one |= {"drawing": drawing, "changes": changes, "change_headline": headline}
    origins = {"": table} if before is None else {"before, ": before, "after, ": table}
    experiments = ((when, *group) for when, rows in origins.items() for group in rows.groupby("experiment"))
    page = _render(
        title=title or f"Benchmark: {', '.join(dict.fromkeys(one.experiment for one in sections))}",
        budgets=budgets,
        commands=commands,
        notices=notices,
        line_width=_LINE_WIDTH,
        solvers=solvers,
        sections=shown,
        facts=[describe_origin(f"{when}{name}", rows) for when, name, rows in experiments],
        data=embed_json({"axes": AXES, "solvers": solvers, "sections": drawings}),
    )
    path = Path(out) / "index.html"
    with replacing(path) as file:
        file.write(page.encode())
    return path


def _render(**data: Any) -> str:
    jinja2 = require("jinja2", "bench")
    options = {"autoescape": True, "undefined": jinja2.StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    options["finalize"] = lambda value: printable(value) if type(value) is str else value  # escapes control characters
    environment = jinja2.Environment(loader=jinja2.PackageLoader("bilevel.bench"), **options)
    filters = {"number": format_number, "count": format_count, "short": round_count, "quantity": format_quantity}
    environment.filters |= filters
    script, _, _ = environment.loader.get_source(environment, "report.js")
    scripts = {"plotly": require("plotly.offline", "bench").get_plotlyjs(), "script": script}
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts.values()]
    trusted = {name: require("markupsafe", "bench").Markup(text) for name, text in scripts.items()}
    return str(environment.get_template("report.html").render(**data, **trusted, digests=digests))


def embed_json(data: Any) -> Any:
    """Return JSON that no HTML parser interprets as markup, marked as safe; non-ASCII characters are escaped too."""
    return require("jinja2.utils", "bench").htmlsafe_json_dumps(data, allow_nan=False, separators=(",", ":"))


def order_labels(sections: Sequence[Section]) -> list[str]:
    """Return the labels of all sections by their mean rank, the best first, which is their order on the whole page."""
    ranks: dict[str, list[int]] = {}
    for section in sections:
        ranked = sorted(section.contenders, key=lambda one: (_score(one, section.metric), one.label))
        for place, one in enumerate(ranked):
            ranks.setdefault(one.label, []).append(place)
    return sorted(ranks, key=lambda label: (np.mean(ranks[label]), label))


def _score(one: Contender, metric: str) -> float:
    median = quantiles(final_values(one.rows, metric))[1]
    return np.inf if np.isnan(median) else float(median * np.sign(worst_value(metric)))


# The words and tables of a section.


def describe_section(name: str, section: Section, labels: list[str]) -> dict[str, Any]:
    """Return the data of a section for the template."""
    metrics, main = section.metrics, section.metric
    tabled = [key for key, one in metrics.items() if one.in_tables and np.isfinite(section.rows[key]).any()]
    verdicts = {metric: decide_finals(section, metric) for metric in dict.fromkeys([main, *tabled])}
    contenders = sorted(section.contenders, key=lambda one: labels.index(one.label))
    mapped = {one.label for one in make_heat_maps(section)}
    targets, verdict = _make_target_tables(section), verdicts[main]
    return {
        "id": name,
        "heading": f"{section.problem} ({section.experiment})",
        "headline": describe_winner(verdict, metrics[main]),
        "level": verdict.level if verdict else "open",
        "confidence": verdict.confidence if verdict else "",
        "leads": describe_leads(section),
        "warnings": _list_warnings(section),
        "problem": _describe_problem(section),
        "meanings": [_explain_metric(section, metric) for metric in verdicts],
        "ends": _explain_ends(section),
        "gap": bool(section.own),
        "selected_by": metrics[main].label,
        "best_word": "largest" if metrics[main].better == "higher" else "least",
        "n_seeds": int(section.rows["seed"].nunique()),
        "one_problem": not _has_several_problems(section),
        "axes": {axis: AXES[axis] for axis in section.with_curves(1)},
        "unswept": [one.label for one in contenders if one.label not in mapped],
        "labels": [one.label for one in contenders],
        "tabled_metrics": [metrics[key].label for key in tabled],
        "finals": [make_final_row(one, tabled) for one in contenders],
        "winners": _list_winners(section, {metric: verdicts[metric] for metric in tabled}, targets),
        "races": [_describe_targets(section, table, labels) for table in targets],
        "selected": {one.label: (one.setting, one.edges) for one in contenders},
    }


def _make_target_tables(section: Section) -> list[TargetTable]:
    # A value of the metric is not comparable between several problems, but its gap to the lowest value is.
    main = next(iter(section.own), section.metric) if _has_several_problems(section) else section.metric
    metrics = dict.fromkeys(name for name in (main, _STATIONARITY) if name in section.metrics)
    return [table for table in (make_target_table(section, name) for name in metrics) if table.targets]


def _has_several_problems(section: Section) -> bool:
    return bool(section.rows["problem_arguments"].nunique() > 1)


def _list_winners(
    section: Section, finals: dict[str, Verdict | None], targets: list[TargetTable]
) -> list[dict[str, Any]]:
    metrics = section.metrics
    found = {f"final {metrics[name].label}": one for name, one in finals.items() if metrics[name].better}
    found |= decide_costs(section, targets[0]) if targets else {}
    return [{"title": title, "verdict": one} for title, one in found.items() if one is not None]


def _describe_targets(section: Section, table: TargetTable, labels: list[str]) -> dict[str, Any]:
    titles = [(describe_target(section, table, place), one.note) for place, one in enumerate(table.targets)]
    return {
        "label": section.metrics[table.metric].label,
        "titles": titles,
        "rows": list_target_rows(table, labels),
    }


def _describe_problem(section: Section) -> list[str]:
    """Return the title of the problem, its size, and the arguments that it was built with."""
    arguments = ", ".join(f"{name} {value}" for name, value in section.arguments.items() if value is not None)
    built = f"Built with {arguments}." if arguments else ""
    return [text for text in (_read_title(section.problem), _describe_size(section.rows), built) if text]


def _read_title(problem: str) -> str:
    title = (inspect.getdoc(PROBLEMS[problem]) or "").partition("\n")[0] if problem in PROBLEMS else ""
    title = title.removeprefix("Build ").removeprefix("Draw ")
    return (title[:1].upper() + title[1:]).replace("`", "")


def _describe_size(rows: Frame) -> str:
    known = [rows[name].dropna() for name in SIZES if name in rows]
    if len(known) == len(SIZES) and all(map(len, known)):
        n, m, p, d = (f"{int(sizes.iloc[0]):,}" for sizes in known)
        inner = f"The inner problem fits z, {p} number{'s' * (p != '1')}, to {n} rows"
        return f"{inner}; the outer one chooses x, {d} number{'s' * (d != '1')}, by a loss on {m} other rows."
    epochs = rows[rows["epochs"] > 0]
    if not len(epochs):
        return ""
    return f"{float(np.median(epochs['calls'] / epochs['epochs'])):,.0f} rows, inner and outer together."


def _explain_metric(section: Section, name: str) -> tuple[str, str]:
    """Return the label of a metric, and its meaning."""
    one = section.metrics[name]
    way = f"{one.better} is better" if one.better else "no measure of quality"
    meaning = _MEANINGS.get(one.name, "a metric of the problem")
    return one.label, f"{meaning[:1].upper()}{meaning[1:]}; {way}."


def _list_warnings(section: Section) -> list[str]:
    """Return warnings about seeds that diverged, and about settings at an end of their grid."""
    found = []
    for one in section.contenders:
        n_diverged, n_cells = count_diverged(one.rows), one.rows["cell"].nunique()
        if one.parameters is None:
            found.append(f"{one.label}: no setting of its grid has a finite median.")
        elif n_diverged:
            found.append(f"{one.label}: {n_diverged} of {n_cells} seeds diverged at the selected setting.")
        if one.edges:
            found.append(f"{one.label}: {one.edges}, an end of its grid. A better setting may lie beyond.")
    return found


def _explain_ends(section: Section) -> str:
    """Return why curves end where they do, and what is included in the seconds."""
    if not (section.rows["phase"] == TIMING).any():
        return "Curves end with the budget of oracle calls. Seconds are only measured in a timing phase."
    return (
        "Seconds are those of the steps alone: compilation and evaluation are left out. Every run ends with its "
        "budget of oracle calls or of seconds, whichever comes first; solvers differ in the seconds that a call takes, "
        "so their curves end at different places. A curve ends early if at least half of the seeds have diverged."
    )


def describe_origin(experiment: str, rows: Frame) -> dict[str, str]:
    """Return machine, versions, time and number of runs of an experiment."""
    times, phases = sorted(rows["written_at"].dropna()), []
    for name, own in rows.groupby("phase"):
        cells, seeds, calls = own["cell"].nunique(), own["seed"].nunique(), format_count(own["calls"].max())
        seconds = "" if own["seconds"].isna().all() else f" and {format_number(own['seconds'].max())} seconds"
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


# The data that the script of the page draws.


def draw_section(name: str, section: Section, labels: list[str]) -> dict[str, Any]:
    """Return the curves and heat maps of a section; solvers are given by their position in the labels."""
    curves = [
        {"metric": metric, "axis": axis, "solver": labels.index(label)}
        | {part: [_shorten(value) for value in values] for part, values in curve._asdict().items()}
        for (metric, axis, label), curve in section.curves.items()
    ]
    # The first metric is the one that selects; if it is a loss, as its gap to the lowest value, on a log scale.
    order = sorted(section.with_curves(0), key=lambda key: (key not in section.own, key != section.metric))
    maps = sorted(make_heat_maps(section), key=lambda one: labels.index(one.label))
    main = section.metrics[section.metric]
    return {
        "id": name,
        "metrics": [{"name": key, "label": section.metrics[key].title, "log": _is_log(section, key)} for key in order],
        "settings": {labels.index(one.label): textwrap.wrap(one.setting, 44) for one in section.contenders},
        "curves": sorted(curves, key=lambda one: one["solver"]),
        "heat": {"label": main.title, "better": main.better, "maps": [_draw_map(one, labels) for one in maps]},
    }


def _shorten(value: float) -> float | None:
    return float(f"{value:.6g}") if np.isfinite(value) else None


def _is_log(section: Section, metric: str) -> bool:
    medians = np.concatenate([one.median for key, one in section.curves.items() if key[0] == metric])
    known = medians[np.isfinite(medians)]
    if metric in section.own:  # the gap of the lowest value is 0, which a log scale leaves out
        return bool((known > 0).any())
    return bool(known.min() > 0 and (section.metrics[metric].log_scale or known.max() / known.min() > _LOG_RATIO))


def _draw_map(one: HeatMap, labels: list[str]) -> dict[str, Any]:
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


def write_figures(table: Frame, out: Path, *, select: str | None = None, draw: str | None = None) -> list[Path]:
    """Draw a metric for each problem that has a finite curve of it, as PDF and PNG, and return the paths.

    Parameters
    ----------
    table : all rows of a store
    out : folder to write to
    select : metric that selects the settings
    draw : metric to draw, by default the one that selects
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


def draw_figure(section: Section, looks: dict[str, Look], metric: str | None = None) -> Any:
    """Draw one metric against seconds and against oracle calls, as far as these are known, in panels."""
    metric = metric or section.metric
    metric = metric if metric in section.with_curves(0) else section.with_curves(0)[0]
    panels = {axis: curves for axis in ("seconds", "calls") if (curves := section.curves_of(metric, axis))}
    solvers = [solver for solver in looks if any(key[0] == metric and key[2] == solver for key in section.curves)]
    columns = _LEGEND_COLUMNS if max(map(len, solvers)) <= _LONG_LABEL else _LEGEND_COLUMNS - 1
    height = _PANEL_HEIGHT * len(panels) + (_LEGEND_ROW_HEIGHT * -(-len(solvers) // columns) + 0.25)
    figure = require("matplotlib.figure", "bench").Figure(figsize=(WIDTH, height), layout="constrained")
    for axes, (axis, curves) in zip(np.ravel(figure.subplots(len(panels), 1)), panels.items(), strict=True):
        _draw_panel(axes, curves, looks, log=section.metrics[metric].log_scale)
        axes.set(xlabel=AXES[axis], ylabel=section.metrics[metric].title)
    figure.axes[0].set_title(section.problem, parse_math=False)
    handles = [require("matplotlib.lines", "bench").Line2D([], [], **_line_style(looks[solver])) for solver in solvers]
    place = {"loc": "outside lower center", "ncols": columns, "frameon": False, "handlelength": 2.8}
    for text in figure.legend(handles, solvers, **place).get_texts():
        text.set_parse_math(False)
    return figure


def _draw_panel(axes: Any, curves: dict[str, Any], looks: dict[str, Look], log: bool) -> None:
    finite = [edge[np.isfinite(edge)] for curve in curves.values() for edge in (curve.low, curve.median, curve.high)]
    top, bottom = np.max(np.concatenate(finite)), np.min(np.concatenate(finite))
    for solver, curve in curves.items():
        style = _line_style(looks[solver]) | ({"marker": "."} if len(curve.x) == 1 else {})
        median = np.where(np.isfinite(curve.median), curve.median, np.nan)
        axes.plot(curve.x, median, **style)
        # If a fifth of the seeds diverged, an edge of the band is infinite and is clipped to the panel.
        edges = (np.clip(edge, bottom, top) for edge in (curve.low, curve.high))
        axes.fill_between(curve.x, *edges, where=~np.isnan(median), color=style["color"], alpha=0.15, linewidth=0)
    if bottom > 0 and log:
        axes.set_yscale("log")
    axes.grid(alpha=0.3, linewidth=0.5)


def _line_style(look: Look) -> dict[str, Any]:
    return {"color": look.color, "linestyle": (0, look.dashes) if look.dashes else "-", "linewidth": _PRINT_LINE_WIDTH}
