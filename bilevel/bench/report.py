"""The benchmark as one page that needs no network."""

import base64
import hashlib
import json
import textwrap
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from bilevel._io import replacing
from bilevel._optional import require
from bilevel.bench.cells import SWEEP
from bilevel.bench.curves import Curve, calls_to_reach, final_values, quantiles
from bilevel.bench.palette import Look, looks
from bilevel.bench.sections import METRICS, Contender, Section, sections
from bilevel.bench.select import Frame

EPSILONS = tuple(10.0**-power for power in range(1, 9))
_FINAL_METRICS = ("value_gap", "value", "hypergrad_norm_sq", "test_error", "weight_auc", "outer_value")
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
    metric : by whose final value settings are selected; see :func:`bilevel.bench.sections.sections`
    budgets : what a cell was allowed to use, in words: a store only knows what was used
    commands : the lines that make the page again
    """
    shown = sections(table, metric)
    faces = looks(table["solver"])
    plotly, script = require("plotly.offline", "bench").get_plotlyjs(), _asset("report.js")
    page = Template(_asset("report.html")).substitute(
        title=escape(title),
        policy=_policy(plotly, script),
        style=_asset("report.css"),
        contents=_contents(shown),
        sections="\n".join(_section(place, section, faces) for place, section in enumerate(shown)),
        origin=_origin(table, budgets, commands),
        data=embedded(_payload(shown, faces)),
        plotly=plotly,
        script=script,
    )
    path = Path(out) / "index.html"
    with replacing(path) as file:
        file.write(page.encode())
    return path


def _asset(name: str) -> str:
    return files("bilevel.bench").joinpath(name).read_text(encoding="utf-8")


def _policy(*scripts: str) -> str:
    """Allow these scripts by their digests and no other, and nothing from anywhere else."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def embedded(data: Any) -> str:
    """Return JSON that no parser of HTML takes for markup; what is not ASCII is escaped as well."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


# What the script draws.


def _payload(shown: Sequence[Section], faces: dict[str, Look]) -> dict[str, Any]:
    places = {solver: place for place, solver in enumerate(faces)}
    return {
        "solvers": [
            {"name": solver, "color": look.color, "dash": _dash(look, "px,") or "solid"}
            for solver, look in faces.items()
        ],
        "sections": [_drawing(place, section, places) for place, section in enumerate(shown)],
    }


def _drawing(place: int, section: Section, places: dict[str, int]) -> dict[str, Any]:
    return {
        "id": _identifier(place),
        "metrics": [_offer(section, metric) for metric in section.drawn(0)],
        "settings": {places[one.solver]: textwrap.wrap(one.setting, 44) for one in section.contenders},
        "curves": [
            {"metric": metric, "axis": axis, "solver": places[solver], **_numbers(curve)}
            for (metric, axis, solver), curve in section.curves.items()
        ],
    }


def _offer(section: Section, metric: str) -> dict[str, Any]:
    medians = np.concatenate([curve.median for key, curve in section.curves.items() if key[0] == metric])
    log = metric.endswith(("_sq", "_gap")) and bool(np.all(medians > 0))
    return {"name": metric, "label": METRICS[metric], "log": log}


def _numbers(curve: Curve) -> dict[str, list[float | None]]:
    return {name: _rounded(getattr(curve, name)) for name in ("x", "low", "median", "high")}


def _rounded(values: np.ndarray) -> list[float | None]:
    return [float(f"{value:.5g}") if np.isfinite(value) else None for value in values]


def _dash(look: Look, separator: str) -> str:
    lengths = separator.join(f"{length * _LINE_WIDTH:.4g}" for length in look.dashes)
    return lengths + separator.rstrip(",") if lengths else ""


# What stands in the page itself.


def _identifier(place: int) -> str:
    return f"section-{place + 1}"


def _contents(shown: Sequence[Section]) -> str:
    links = (
        f'<li><a href="#{_identifier(place)}">{escape(_heading(section))}</a></li>'
        for place, section in enumerate(shown)
    )
    return f'<ul>{"".join(links)}<li><a href="#origin">How it was made</a></li></ul>'


def _heading(section: Section) -> str:
    return f"{section.problem} ({section.experiment})"


def _arguments(section: Section) -> str:
    pairs = ", ".join(f"{name} {value}" for name, value in section.arguments.items())
    return f"Called with {pairs}. " if pairs else ""


def _section(place: int, section: Section, faces: dict[str, Look]) -> str:
    name = _identifier(place)
    return f"""<section id="{name}" aria-labelledby="{name}-title">
<h2 id="{name}-title">{escape(_heading(section))}</h2>
<p class="about">{escape(_arguments(section))}Settings selected by the final {METRICS[section.metric]}.</p>
{_plot(section, faces) if section.curves else _NO_CURVE}
<h3>Final values</h3>
{_finals(section)}
<p class="note">Median over seeds, and 20 to 80&nbsp;% below it; from the timing phase where there is one.</p>
{_reached(section)}
<h3>Selected settings</h3>
{_settings(section)}
</section>"""


_NO_CURVE = '<p class="notice">No solver has a finite value to draw here: every seed diverged or was not evaluated.</p>'


def _plot(section: Section, faces: dict[str, Look]) -> str:
    metrics = _options((str(place), METRICS[name]) for place, name in enumerate(section.drawn(0)))
    axes = _options((axis, axis) for axis in section.drawn(1))
    here = {one.solver for one in section.contenders}
    buttons = "".join(_button(place, name, look) for place, (name, look) in enumerate(faces.items()) if name in here)
    return f"""<form class="controls" autocomplete="off">
<label>Metric <select name="metric">{metrics}</select></label>
<label>Against <select name="axis">{axes}</select></label>
<label><input type="checkbox" name="logx"> Logarithmic x</label>
<label><input type="checkbox" name="logy"> Logarithmic y</label>
</form>
<div class="plot" role="img" aria-label="Curves of {escape(_heading(section))}; the tables have the numbers"></div>
<div class="legend" role="group" aria-label="Solvers shown">{buttons}</div>
<p class="note missing" aria-live="polite"></p>"""


def _options(pairs: Iterable[tuple[str, str]]) -> str:
    return "".join(f'<option value="{escape(value)}">{escape(label)}</option>' for value, label in pairs)


def _button(place: int, solver: str, look: Look) -> str:
    sample = (
        f'<svg width="34" height="8" aria-hidden="true"><line x1="0" y1="4" x2="34" y2="4" stroke="{look.color}" '
        f'stroke-width="{_LINE_WIDTH}" stroke-dasharray="{_dash(look, " ")}"/></svg>'
    )
    return f'<button type="button" value="{place}" aria-pressed="true">{sample}{escape(solver)}</button>'


def _finals(section: Section) -> str:
    metrics = [name for name in _FINAL_METRICS if np.isfinite(section.rows[name]).any()]
    ranked = sorted(section.contenders, key=lambda one: _sortable(quantiles(final_values(one.rows, section.metric))[1]))
    head = ["Solver", *(METRICS[name] for name in metrics), "Calls", "Seconds", "Memory", "Seeds"]
    swept = section.rows[section.rows["phase"] == SWEEP]
    body = [[*_final_cells(one, metrics), _statuses(one, swept[swept["solver"] == one.solver])] for one in ranked]
    return _table(head, body, range(1, len(head) - 1))


def _settings(section: Section) -> str:
    body = [[_head(one.solver), _cell(one.setting, "setting")] for one in section.contenders]
    return _table(["Solver", "Setting"], body, range(0))


def _sortable(value: float) -> float:
    return np.inf if np.isnan(value) else value


def _final_cells(one: Contender, metrics: Sequence[str]) -> list[str]:
    last = one.rows[one.rows["final"].astype(bool)]
    return [
        _head(one.solver),
        *(_spread(final_values(one.rows, metric)) for metric in metrics),
        _cell(_count(last["calls"].median()), "number"),
        _cell(_number(last["seconds"].median()), "number"),
        _cell(_bytes(last["memory_bytes"].median()), "number"),
    ]


def _statuses(one: Contender, swept: Frame) -> str:
    counts = one.rows.groupby("cell")["status"].last().value_counts()
    own = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items() if one.parameters is not None)
    all_settings = swept.groupby("cell")["status"].last()
    diverged = f"sweep: {(all_settings == 'diverged').sum():,} of {len(all_settings):,} cells diverged"
    return f'<td class="status">{escape(own) or "–"}{_under(diverged) if len(all_settings) else ""}</td>'


def _spread(values: np.ndarray) -> str:
    low, median, high = (_number(value) for value in quantiles(values))
    return f'<td class="number">{median}{_under(f"{low} to {high}") if low != high else ""}</td>'


def _under(text: str) -> str:
    return f'<span class="under">{escape(text)}</span>'


def _reached(section: Section) -> str:
    metric = "hypergrad_norm_sq"
    timed = [one for one in section.contenders if one.is_timed and one.rows[metric].notna().any()]
    if not timed:
        return ""
    head = ["Solver", *(f"≤ {epsilon:.0e}".replace("e-0", "e−") for epsilon in EPSILONS)]
    body = [
        [_head(one.solver), *(_cell(_count(calls), "number") for calls in calls_to_reach(one.rows, metric, EPSILONS))]
        for one in timed
    ]
    return f"""<h3>Calls to reach {METRICS[metric]}</h3>
{_table(head, body, range(1, len(head)))}
<p class="note">Median over the seeds of the timing phase, at the first evaluation at or below;
– where half of the seeds or more did not get there.</p>"""


def _table(head: Sequence[str], body: Iterable[Sequence[str]], numbers: range) -> str:
    kinds = ("number" if place in numbers else "" for place in range(len(head)))
    titles = "".join(
        f'<th scope="col" class="{kind}">{escape(name)}</th>' for name, kind in zip(head, kinds, strict=True)
    )
    rows = "\n".join(f"<tr>{''.join(cells)}</tr>" for cells in body)
    return f"""<div class="scroll" tabindex="0"><table>
<thead><tr>{titles}</tr></thead>
<tbody>
{rows}
</tbody></table></div>"""


def _head(text: str) -> str:
    return f'<th scope="row">{escape(text)}</th>'


def _cell(text: str, kind: str) -> str:
    return f'<td class="{kind}">{escape(text)}</td>'


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


def _origin(table: Frame, budgets: str, commands: Sequence[str]) -> str:
    facts = "\n".join(_facts(str(name), rows) for name, rows in table.groupby("experiment"))
    allowed = f"<p>Budget of a cell: {escape(budgets)}</p>" if budgets else ""
    again = f"<h3>To make it again</h3>\n<pre>{escape(chr(10).join(commands))}</pre>" if commands else ""
    return f"""<section id="origin" aria-labelledby="origin-title">
<h2 id="origin-title">How it was made</h2>
{allowed}
{facts}
{again}
</section>"""


def _facts(experiment: str, rows: Frame) -> str:
    pairs = {
        "Experiment": experiment,
        "Cells": "; ".join(_phase(str(name), own) for name, own in rows.groupby("phase")),
        "Machine": _all(rows, "machine"),
        "Versions": f"Python {_all(rows, 'python')}, JAX {_all(rows, 'jax')}, bilevel {_all(rows, 'bilevel')}",
        "Revision": _all(rows, "revision"),
        "Written": " to ".join(dict.fromkeys([rows["written_at"].min(), rows["written_at"].max()])),
    }
    return f"<dl>{''.join(f'<dt>{name}</dt><dd>{escape(text)}</dd>' for name, text in pairs.items())}</dl>"


def _phase(name: str, rows: Frame) -> str:
    cells, seeds = rows["cell"].nunique(), rows["seed"].nunique()
    seconds = "" if rows["seconds"].isna().all() else f" and {_number(rows['seconds'].max())} seconds"
    return f"{cells:,} of the {name} phase, with {seeds} seeds, each up to {rows['calls'].max():,} calls{seconds}"


def _all(rows: Frame, column: str) -> str:
    return " and ".join(sorted({str(value) for value in rows[column].dropna()} - {""})) or "not recorded"
