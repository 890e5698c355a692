"""Statistics of one solver in the results of an experiment, and the table that compares all of them.

A contender is a solver together with one of the grids of its config, called a column: "SRBA (published)".
"""

from collections.abc import Iterator

import numpy as np

from bilevel.bench.select import Contender, Section, final_values, reach
from bilevel.bench.store import PARAMETER, Frame
from bilevel.engine.curves import quantiles
from bilevel.engine.metrics import metric as describe
from paper.markdown import format_bytes, format_value, markdown_table

_SHOWN = ("step_size", "outer_ratio", "period", "n_neumann", "neumann_step", "lambda_0", "delta_0", "schedule")
# A setting is good if its median is within this factor of the best: on a logarithmic scale (True), on a linear one.
GOOD = {True: 10.0, False: 1.02}
_HEAD = "seconds", "calls", "state", "cells diverged", "good settings", "selected setting", "at an end of its grid"


def median_by_setting(swept: Frame, metric: str) -> Frame:
    """Return the median over seeds of the final metric for each setting, infinite if the median run diverged."""
    names = [name for name in swept.columns if name.startswith(PARAMETER) and swept[name].notna().any()]
    finals = swept[swept["final"].astype(bool)]
    values = finals[metric].where(finals["status"] != "diverged", np.inf).fillna(np.inf)
    return finals.assign(median=values).groupby(names, dropna=False)["median"].median().reset_index()


def selected_median(one: Contender, metric: str) -> float:
    """Return the lowest median of a sweep, that of the selected setting."""
    return float(median_by_setting(one.swept, metric)["median"].min())


def final_median(one: Contender, metric: str) -> float:
    """Return the median over seeds at the end of the timed runs, infinite if no setting was selected."""
    return float(quantiles(final_values(one.rows, metric))[1]) if one.parameters is not None else np.inf


def cost_to(one: Contender, metric: str, target: float, axis: str = "seconds") -> float:
    """Return the median over seeds of the seconds (or calls) until the metric is at most the target."""
    return float(np.median(reach(one.rows, metric, target, axis))) if one.parameters is not None else np.inf


def good_share(one: Contender, metric: str) -> float:
    """Return the share of settings whose median is within a factor of the best median; see `GOOD`."""
    medians = median_by_setting(one.swept, metric)["median"].to_numpy(np.float64)
    return float(np.mean(medians <= medians.min() * GOOD[describe(metric).log_scale]))


def part_table(section: Section, draws: str) -> str:
    """Return a Markdown table with one row per contender, the best first.

    Parameters
    ----------
    section : results of one experiment
    draws : metric whose final value is shown next to the metric that selects
    """
    head = ["solver (column)", f"{describe(section.metric).label} selected by", f"{describe(draws).label}, 20–80 %"]
    ranked = sorted(section.contenders, key=lambda one: selected_median(one, section.metric))
    return markdown_table([*head, *_HEAD], [_row(one, section.metric, draws) for one in ranked])


def _row(one: Contender, metric: str, draws: str) -> list[str]:
    swept = one.swept[one.swept["final"].astype(bool)]
    diverged = f"{(swept['status'] == 'diverged').sum():,} of {len(swept):,}"
    if one.parameters is None:
        return [one.label, "diverged", "", "", "", "", diverged, "", "", ""]
    low, median, high = map(format_value, quantiles(final_values(one.rows, draws)))
    last = one.rows[one.rows["final"].astype(bool)]
    costs = format_value(last["seconds"].median()), f"{last['calls'].median() / 1e6:.3g} M"
    return [
        *(one.label, format_value(selected_median(one, metric)), f"{median} ({low} to {high})"),
        *(*costs, format_bytes(last["memory_bytes"].median()), diverged),
        *(f"{100 * good_share(one, metric):.0f} %", ", ".join(_setting(one)), one.edges),
    ]


def _setting(one: Contender) -> Iterator[str]:
    for name, value in (one.parameters or {}).items():
        if name in _SHOWN and value is not None:
            yield f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
