"""What template and script of the page are given: words, rows of tables, curves and heat maps of each section."""

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np

from bilevel.bench.about import describe_problem, explain_ends, explain_metrics, list_warnings
from bilevel.bench.heat_maps import HeatMap, Spot, make_heat_maps
from bilevel.bench.sections import AXES, Contender, Section, final_values
from bilevel.bench.select import quantiles, worst_value
from bilevel.bench.store import Frame
from bilevel.bench.targets import Race, Reached, run_race
from bilevel.bench.verdict import Verdict, decide, describe_leads, headline, round_count, seed_finals

_STATIONARITY = "hypergrad_norm_sq"
_WIDE = 10  # from the lowest to the highest value of a curve or map: then a log scale shows more


def order_labels(sections: Sequence[Section]) -> list[str]:
    """Return the solvers of all sections, best first by their mean rank; everything on the page has this order."""
    ranks: dict[str, list[int]] = {}
    for section in sections:
        ranked = sorted(section.contenders, key=lambda one: (_rank(one, section.metric), one.label))
        for place, one in enumerate(ranked):
            ranks.setdefault(one.label, []).append(place)
    return sorted(ranks, key=lambda label: (np.mean(ranks[label]), label))


def _rank(one: Contender, metric: str) -> float:
    median = quantiles(final_values(one.rows, metric))[1]
    return np.inf if np.isnan(median) else float(median * np.sign(worst_value(metric)))


def describe_section(name: str, section: Section, labels: list[str]) -> dict[str, Any]:
    """Return what the template shows of a section."""
    tabled = [key for key, one in section.metrics.items() if one.in_tables and np.isfinite(section.rows[key]).any()]
    contenders = sorted(section.contenders, key=lambda one: labels.index(one.label))
    mapped = {one.label for one in make_heat_maps(section)}
    verdicts = {metric: _decide(section, metric) for metric in tabled}
    main, races = verdicts.get(section.metric) or _decide(section, section.metric), _run_races(section)
    return {
        "id": name,
        "heading": f"{section.problem} ({section.experiment})",
        "headline": headline(main, section.metrics[section.metric]),
        "level": main.level if main else "open",
        "confidence": main.confidence if main else "",
        "leads": describe_leads(section),
        "warnings": list_warnings(section),
        "problem": describe_problem(section),
        "meanings": explain_metrics(section, dict.fromkeys([section.metric, *tabled])),
        "ends": explain_ends(section),
        "gap": bool(section.own),
        "selected_by": section.metrics[section.metric].label,
        "best_word": "largest" if section.metrics[section.metric].better == "higher" else "least",
        "n_seeds": int(section.rows["seed"].nunique()),
        "one_problem": not _has_several_problems(section),
        "axes": {axis: AXES[axis] for axis in section.with_curves(1)},
        "unswept": [one.label for one in contenders if one.label not in mapped],
        "labels": [one.label for one in contenders],
        "tabled_metrics": [section.metrics[key].label for key in tabled],
        "finals": [_final_row(one, tabled) for one in contenders],
        "winners": _winner_rows(section, verdicts, races),
        "races": [_describe_race(section, race, labels) for race in races],
        "selected": {one.label: (one.setting, one.edges) for one in contenders},
    }


def _decide(section: Section, metric: str) -> Verdict | None:
    return decide(seed_finals(section, metric), section.metrics[metric].better or "lower")


def _run_races(section: Section) -> list[Race]:
    # One value is no target for several problems.
    main = next(iter(section.own), section.metric) if _has_several_problems(section) else section.metric
    metrics = dict.fromkeys(name for name in (main, _STATIONARITY) if name in section.metrics)
    return [race for race in (run_race(section, name) for name in metrics) if race.targets]


def _has_several_problems(section: Section) -> bool:
    return bool(section.rows["problem_arguments"].nunique() > 1)


def _winner_rows(section: Section, verdicts: dict[str, Verdict | None], races: list[Race]) -> list[dict[str, Any]]:
    finals = {
        f"final {section.metrics[name].label}": one for name, one in verdicts.items() if section.metrics[name].better
    }
    found = finals | {title: one for race in races[:1] for title, one in _race_verdicts(section, race).items()}
    return [{"title": title, "verdict": one} for title, one in found.items() if one is not None]


def _race_verdicts(section: Section, race: Race) -> dict[str, Verdict | None]:
    """Return who is first at the hardest target that at least two reach, or one where there is no such."""
    arrived = [
        sum(np.isfinite(own[place].median("calls")) for own in race.reached.values())
        for place in range(len(race.targets))
    ]
    hardest = max((place for place, count in enumerate(arrived) if count > 1), default=len(arrived) - 1)
    at = f"{section.metrics[race.metric].label} {_say_target(section, race, hardest)}"
    values = {
        axis: {label: own[hardest].seeds[axis] for label, own in race.reached.items()} for axis in ("seconds", "calls")
    }
    return {f"{AXES[axis]} to {at}": decide(own) for axis, own in values.items()}


def _say_target(section: Section, race: Race, place: int) -> str:
    sign = "≥" if section.metrics[race.metric].better == "higher" else "≤"
    return f"{sign} {race.targets[place].value:.4g}"


def _describe_race(section: Section, race: Race, labels: list[str]) -> dict[str, Any]:
    places = range(len(race.targets))
    best = {
        axis: [min(own[place].median(axis) for own in race.reached.values()) for place in places]
        for axis in ("seconds", "calls")
    }
    rows = {
        label: [_describe_reached(race.reached[label][place], best, place) for place in places]
        for label in labels
        if label in race.reached
    }
    titles = [(_say_target(section, race, place), race.targets[place].note) for place in places]
    return {"label": section.metrics[race.metric].label, "titles": titles, "rows": rows}


def _describe_reached(one: Reached, best: dict[str, list[float]], place: int) -> dict[str, Any]:
    medians = {axis: one.median(axis) for axis in best}
    is_best = {f"best_{axis}": np.isfinite(median) and median == best[axis][place] for axis, median in medians.items()}
    return medians | is_best | {"arrived": one.n_arrived, "of": len(one.seeds["calls"])}


def _final_row(one: Contender, metrics: Sequence[str]) -> dict[str, Any]:
    last = one.rows[one.rows["final"].astype(bool)]
    ends = one.rows.groupby("cell")["status"].last().value_counts() if one.parameters is not None else {}
    swept = one.swept.groupby("cell")["status"].last()
    return {
        "solver": one.label,
        "spreads": [quantiles(final_values(one.rows, metric)) for metric in metrics],
        **{name: last[name].median() for name in ("calls", "seconds", "memory_bytes")},
        "statuses": {name.replace("_", " "): int(count) for name, count in dict(ends).items()},
        "n_swept": len(swept),
        "n_diverged": int((swept == "diverged").sum()),
    }


def draw_section(name: str, section: Section, labels: list[str]) -> dict[str, Any]:
    """Return what the script draws of a section; a solver is known by its place among the labels."""
    curves = []
    for (metric, axis, solver), curve in section.curves.items():
        key: dict[str, Any] = {"metric": metric, "axis": axis, "solver": labels.index(solver)}
        for part, values in curve._asdict().items():
            key[part] = [_shorten(value) for value in values]
        curves.append(key)
    # What selects is shown first, on its natural scale where it is a loss.
    order = sorted(section.with_curves(0), key=lambda key: (key not in section.own, key != section.metric))
    metrics = [{"name": key, "label": section.metrics[key].title, "log": _is_log(section, key)} for key in order]
    settings = {labels.index(one.label): textwrap.wrap(one.setting, 44) for one in section.contenders}
    maps = [_draw_map(one, labels) for one in sorted(make_heat_maps(section), key=lambda one: labels.index(one.label))]
    heat = {
        "label": section.metrics[section.metric].title,
        "better": section.metrics[section.metric].better,
        "maps": maps,
    }
    return {
        "id": name,
        "metrics": metrics,
        "settings": settings,
        "curves": sorted(curves, key=lambda one: one["solver"]),
        "heat": heat,
    }


def _shorten(value: float) -> float | None:
    return float(f"{value:.6g}") if np.isfinite(value) else None


def _is_log(section: Section, metric: str) -> bool:
    medians = np.concatenate([one.median for key, one in section.curves.items() if key[0] == metric])
    known = medians[np.isfinite(medians)]
    if metric in section.own:  # the lowest value of all has a gap of 0, which a log scale leaves out
        return bool((known > 0).any())
    return bool(known.min() > 0 and (section.metrics[metric].log_scale or known.max() / known.min() > _WIDE))


def _draw_map(one: HeatMap, labels: list[str]) -> dict[str, Any]:
    spots = [[one.spots.get((x, y)) for x in one.xs] for y in one.ys]
    at = one.selected
    place = (one.xs.index(at[0]), one.ys.index(at[1] if one.y else None)) if at[0] in one.xs else None
    return {
        **{"solver": labels.index(one.label), "x": one.x, "y": one.y, "selected": place},
        **{"xs": [f"{x:g}" for x in one.xs], "ys": ["" if y is None else f"{y:g}" for y in one.ys]},
        "spots": [[spot and _draw_spot(spot) for spot in row] for row in spots],
    }


def _draw_spot(spot: Spot) -> list[float | None]:
    return [_shorten(spot.median), spot.n_diverged, spot.n_seeds]


def describe_origin(experiment: str, rows: Frame) -> dict[str, str]:
    """Return how the rows of an experiment came about."""
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


def format_number(value: float) -> str:
    """Return three digits, "diverged" where infinite, a dash where there is none."""
    return "–" if np.isnan(value) else f"{value:.3g}" if np.isfinite(value) else "diverged"


def format_quantity(value: float) -> str:
    """Return three digits of a small number, and a large one in words."""
    return f"{round_count(value)}" if np.isfinite(value) and abs(value) >= 1000 else format_number(value)


def format_count(value: float) -> str:
    """Return all digits in groups, a dash where there is none."""
    return f"{value:,.0f}" if np.isfinite(value) else "–"
