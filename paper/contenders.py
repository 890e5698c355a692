"""Tables in Markdown from kept results, and the numbers that verdicts are made of."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from bilevel.bench.sections import Contender, Section, final_values, first_reach
from bilevel.bench.select import quantiles
from bilevel.bench.store import PARAMETER, Frame
from bilevel.engine.metrics import metric as describe

_SHOWN = ("step_size", "outer_ratio", "period", "n_neumann", "neumann_step", "lambda_0", "delta_0", "schedule")
GOOD = {True: 10.0, False: 1.02}  # of the best median, by whether the metric has a logarithmic scale


def median_by_setting(swept: Frame, metric: str) -> Frame:
    """Return one row per setting of a sweep: its parameters, and the median over seeds, infinite where it diverged."""
    names = [name for name in swept.columns if name.startswith(PARAMETER) and swept[name].notna().any()]
    finals = swept[swept["final"].astype(bool)]
    values = finals[metric].where(finals["status"] != "diverged", np.inf).fillna(np.inf)
    return finals.assign(median=values).groupby(names, dropna=False)["median"].median().reset_index()


def final_median(one: Contender, metric: str) -> float:
    """Return the median over seeds of a metric at the end of the timed runs; infinite where none was selected."""
    return float(quantiles(final_values(one.rows, metric))[1]) if one.parameters is not None else np.inf


def seconds_to(one: Contender, metric: str, target: float, axis: str = "seconds") -> float:
    """Return the median over seeds of the seconds, or calls, to a target."""
    return float(first_reach(one.rows, metric, [target], axis)[0]) if one.parameters is not None else np.inf


def good_share(one: Contender, metric: str) -> float:
    """Return the share of settings that are within a factor (see `GOOD`) of the best one."""
    medians = median_by_setting(one.swept, metric)["median"].to_numpy(np.float64)
    return float(np.mean(medians <= medians.min() * GOOD[describe(metric).log_scale]))


def part_table(section: Section, draws: str) -> str:
    """Return a row for each contender, best first: final values, cost, how many cells diverged, and the setting."""
    chosen, drawn = describe(section.metric), describe(draws)
    head = ["solver (column)", f"{chosen.label} selected by", f"{drawn.label}, 20–80 %", "seconds", "calls", "state"]
    head += ["cells diverged", "good settings", "selected setting", "at an end of its grid"]
    ranked = sorted(section.contenders, key=lambda one: selected_median(one, section.metric))
    return markdown_table(head, [_row(one, section.metric, draws) for one in ranked])


def selected_median(one: Contender, metric: str) -> float:
    """Return the best median of a sweep, which selected the setting."""
    return float(median_by_setting(one.swept, metric)["median"].min())


def _row(one: Contender, metric: str, draws: str) -> list[str]:
    swept = one.swept[one.swept["final"].astype(bool)]
    diverged = f"{(swept['status'] == 'diverged').sum():,} of {len(swept):,}"
    if one.parameters is None:
        return [one.label, "diverged", "", "", "", "", diverged, "", "", ""]
    low, median, high = quantiles(final_values(one.rows, draws))
    last = one.rows[one.rows["final"].astype(bool)]
    setting = {name: value for name, value in one.parameters.items() if name in _SHOWN and value is not None}
    words = (
        f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in setting.items()
    )
    return [
        *(one.label, number(selected_median(one, metric)), f"{number(median)} ({number(low)} to {number(high)})"),
        *(
            number(last["seconds"].median()),
            f"{last['calls'].median() / 1e6:.3g} M",
            _bytes(last["memory_bytes"].median()),
        ),
        *(diverged, f"{100 * good_share(one, metric):.0f} %", ", ".join(words), one.edges),
    ]


def _bytes(count: float) -> str:
    return "–" if not np.isfinite(count) else f"{count / 1e3:.0f} kB" if count < 1e6 else f"{count / 1e6:.1f} MB"


def number(value: float) -> str:
    """Return four significant digits, in words where there are none."""
    return "–" if np.isnan(value) else "diverged" if np.isinf(value) else f"{value:.4g}"


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table of cells, each escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(escape(str(cell)) for cell in line)} |" for line in lines)


def escape(text: str) -> str:
    """Return a text in which no bar ends a cell of a table, and no name from a file begins a tag or a link."""
    return re.sub(r"<(?=[a-zA-Z/!?])", "&lt;", re.sub(r"([|\[])", r"\\\1", " ".join(text.split())))
