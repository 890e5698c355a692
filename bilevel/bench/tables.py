"""The tables of a report: comparisons of solvers, final values, cost to reach targets, and heat maps.

Solvers are compared by their medians over seeds, and the best one with each other solver seed by seed.
"""

from collections.abc import Mapping, Sequence
from math import comb
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from bilevel.bench.config import TIMING
from bilevel.bench.select import AXES, Contender, Section, count_diverged, final_values, reach, worst_value
from bilevel.bench.store import PARAMETER, Frame, list_metrics
from bilevel.engine.curves import quantiles
from bilevel.engine.metrics import Metric

BySeed: TypeAlias = dict[Any, float]  # a number for each seed; infinite if it diverged or did not reach a target

# Number formats.


def format_number(value: float, digits: int = 3) -> str:
    """Return a number with three digits, "diverged" if it is infinite, a dash for NaN."""
    return "–" if np.isnan(value) else f"{value:.{digits}g}" if np.isfinite(value) else "diverged"


def format_quantity(value: float) -> str:
    """Return a small number with three digits, and a large one in words, as "2.77 million"."""
    for size, word in ((1e9, " billion"), (1e6, " million")):
        if size <= value < np.inf:
            return f"{value / size:.3g}{word}"
    return f"{float(f'{value:.2g}'):,.0f}" if 1000 <= abs(value) < np.inf else format_number(value)


# Comparisons of solvers.

_SIGNIFICANT = 0.05  # largest p-value of a significant difference


class Verdict(NamedTuple):
    """The solver with the best median, the second best, and in how many seeds the best is ahead."""

    winner: str
    median: float
    better: str  # "lower" or "higher"
    second: str | None  # None if no other median is finite
    second_median: float
    wins: int  # seeds in which the winner is ahead of the solver with the largest p-value
    n_seeds: int  # that these two have in common, without ties
    n_others: int

    @property
    def chance(self) -> float:
        """The probability of at least as many wins if both solvers were equally good."""
        ways = sum(comb(self.n_seeds, wins) for wins in range(self.wins, self.n_seeds + 1))
        return float(ways / 2**self.n_seeds)

    @property
    def p_value(self) -> float:
        """The p-value of the sign test: two-sided, and corrected for the number of other solvers (Bonferroni)."""
        return min(1.0, 2 * max(1, self.n_others) * self.chance)

    @property
    def level(self) -> str:
        """Return "significant" or "open"."""
        return "significant" if self.second is not None and self.p_value <= _SIGNIFICANT else "open"

    @property
    def margin(self) -> str:
        """The difference of the medians, as "6.8 % lower" or "3.1 times lower"."""
        return describe_margin(self.median, self.second_median, self.better)


def decide(values: Mapping[str, BySeed], better: str = "lower") -> Verdict | None:
    """Compare the best solver with each other one; the result has the largest p-value. None without a finite median."""
    sign = -1.0 if better == "higher" else 1.0
    medians = {label: float(quantiles(np.array([*own.values()]))[1]) for label, own in values.items() if own}
    ranked = sorted((label for label in medians if np.isfinite(medians[label])), key=lambda one: sign * medians[one])
    if not ranked:
        return None
    first, (second, *_) = ranked[0], (*ranked[1:], None)
    alone = Verdict(first, medians[first], better, second, medians.get(second or "", np.nan), 0, 0, len(medians) - 1)
    counts = [_count_wins(values[first], values[other], sign) for other in medians if other != first]
    verdicts = [alone._replace(wins=wins, n_seeds=n_seeds) for wins, n_seeds in counts]
    return max(verdicts, key=lambda one: one.chance, default=alone)


def _count_wins(ours: BySeed, theirs: BySeed, sign: float) -> tuple[int, int]:
    pairs = [(ours[seed], theirs[seed]) for seed in ours if seed in theirs and ours[seed] != theirs[seed]]
    return sum(bool(sign * (other - own) > 0) for own, other in pairs), len(pairs)


def describe_margin(best: float, other: float, better: str) -> str:
    """Return the difference of two values, relative if both are positive."""
    if not np.isfinite(other):
        return ""
    low, high = sorted((best, other))
    if low <= 0:
        return f"{high - low:.3g} {better}"
    if high / low >= 2:
        return f"{high / low:.2g} times {better}"
    percent = 100 * abs(best - other) / other
    return f"{percent:.2g} % {better}" if percent >= 0.05 else "the same to 0.1 %"


def seed_finals(section: Section, metric: str) -> dict[str, BySeed]:
    """Return the last value of each seed of each solver at its selected setting."""
    found = {}
    for one in section.contenders:
        if one.parameters is not None and metric in one.rows:
            values = one.by_seed(final_values(one.rows, metric))
            found[one.label] = {seed: value for seed, value in values.items() if not np.isnan(value)}
    return found


# Final values.


def make_row(one: Contender, metrics: Sequence[str]) -> dict[str, Any]:
    """Return the setting, the final values, the costs and the outcomes of a solver."""
    finals = one.rows[one.rows["final"].astype(bool)]
    ends = one.rows.groupby("cell")["status"].last().value_counts() if one.parameters is not None else {}
    return {
        "solver": one.label,
        "setting": one.setting,
        "edges": one.edges,
        "spreads": [quantiles(final_values(one.rows, metric)) for metric in metrics],
        **{name: finals[name].median() for name in ("calls", "seconds", "memory_bytes")},
        "statuses": {name.replace("_", " "): int(count) for name, count in dict(ends).items()},
        "n_swept": one.swept["cell"].nunique(),
        "n_diverged": count_diverged(one.swept),
    }


# The cost to reach targets.

_SHARES = (0.5, 0.8, 0.9, 0.95, 0.99, 0.999)  # of the way from the start to the best median at the end
_MOST_TARGETS = 6
_LEAST_GAP = 1e-3  # smallest target for a gap, relative to its value at the start
COSTS = ("seconds", "calls")


class Target(NamedTuple):
    """A value to reach, and the cost for each seed of timed solvers by axis and label; infinite if it does not."""

    title: str  # as an inequality
    note: str  # its meaning, unless it is clear by itself
    value: float
    costs: Mapping[str, Mapping[str, BySeed]]

    def medians(self, axis: str) -> dict[str, float]:
        return {label: float(np.median([*own.values()])) for label, own in self.costs[axis].items()}

    def n_arrived(self, label: str) -> int:
        return int(np.isfinite([*self.costs["calls"][label].values()]).sum())


def make_targets(section: Section, metric: str) -> list[Target]:
    """Choose targets for a metric, and measure the cost to reach them; unreachable and trivial targets are dropped."""
    timed = [
        one
        for one in section.contenders
        if one.parameters and (one.rows["phase"] == TIMING).any() and metric in list_metrics(one.rows)
    ]
    found, sign = [], "≥" if section.metrics[metric].better == "higher" else "≤"
    for value, note in choose_targets(section, metric) if timed else []:
        costs = {
            axis: {one.label: one.by_seed(reach(one.rows, metric, value, axis)) for one in timed} for axis in COSTS
        }
        target = Target(f"{sign} {value:.4g}", note, value, costs)
        medians = [*target.medians("calls").values()]
        if np.isfinite(medians).any() and max(medians) > 0:
            found.append(target)
    return found


def choose_targets(section: Section, metric: str) -> list[tuple[float, str]]:
    """Return powers of ten if the metric falls over orders of magnitude, otherwise shares of the way to the best."""
    about = section.metrics[metric]
    sign = -1.0 if about.better == "higher" else 1.0
    curves = section.curves_of(metric, "calls").values()
    medians = [sign * one.median[np.isfinite(one.median)] for one in curves]
    if not medians:
        return []
    start, best = max(one[0] for one in medians), min(one.min() for one in medians)
    if metric in section.own:  # the gap to the lowest value seen, which is 0 for one solver
        best = max(best, _LEAST_GAP * start)
    if about.log_scale and sign > 0 and best > 0 and start / best >= 100:
        return [(value, "") for value in _list_decades(start, best)]
    if not start > best:
        return []
    ways = ((share, best + (1 - share) * (start - best)) for share in _SHARES)
    return [(sign * float(f"{value:.4g}"), f"{100 * share:g} % of the way") for share, value in ways]


def _list_decades(start: float, best: float) -> list[float]:
    """Return at most six powers of ten between two values, largest first."""
    powers = range(int(np.floor(np.log10(start))), int(np.floor(np.log10(best))) - 1, -1)
    inside = [value for value in (float(f"1e{power}") for power in powers) if best <= value < start]
    few = np.unique(np.linspace(0, len(inside) - 1, min(_MOST_TARGETS, len(inside))).round().astype(int))
    return [inside[place] for place in few]


def decide_costs(metric: Metric, targets: Sequence[Target]) -> dict[str, Verdict | None]:
    """Compare the cost to reach the hardest target that two solvers reach, or the hardest one if there is none."""
    shared = [one for one in targets if np.isfinite([*one.medians("calls").values()]).sum() > 1]
    hardest = (shared or targets)[-1]
    return {f"{AXES[axis]} to {metric.label} {hardest.title}": decide(hardest.costs[axis]) for axis in COSTS}


# Heat maps: the final metric of a sweep over two parameters of its grid.

_FIRST = ("step_size", "outer_ratio")  # preferred among parameters


class Spot(NamedTuple):
    """One setting of the two parameters, with the best values of the others."""

    median: float  # over seeds; infinite if too many diverged
    n_diverged: int
    n_seeds: int


class HeatMap(NamedTuple):
    """The final metric of one solver over two parameters; `y` is "" if only one has several values."""

    label: str
    x: str
    y: str
    spots: dict[tuple[Any, Any], Spot]
    selected: tuple[Any, Any]

    @property
    def xs(self) -> tuple[Any, ...]:
        return tuple(sorted({x for x, _ in self.spots}))

    @property
    def ys(self) -> tuple[Any, ...]:
        return tuple(sorted({y for _, y in self.spots}))


def make_heat_maps(section: Section) -> list[HeatMap]:
    """Return the map of each solver that was swept over several values of a number."""
    maps = (_make_heat_map(one, section.metric) for one in section.contenders)
    return [one for one in maps if one is not None]


def _make_heat_map(one: Contender, metric: str) -> HeatMap | None:
    counts = {name: one.swept[name].nunique() for name in one.swept if name.startswith(PARAMETER)}
    varied = [name for name, count in counts.items() if count > 1]
    numbers = [name for name in varied if one.swept[name].dtype.kind in "fiu"]
    if not numbers:
        return None
    order = {PARAMETER + name: place for place, name in enumerate(_FIRST)}
    shown = sorted(numbers, key=lambda name: (order.get(name, len(order)), -counts[name]))[:2]
    sign, spots = np.sign(worst_value(metric)), dict[tuple[Any, Any], Spot]()
    for _, own in one.swept.dropna(subset=shown).groupby(varied, dropna=False):
        place = (*(own[name].iloc[0] for name in shown), None)[:2]
        others = [spots[place]] if place in spots else []
        spots[place] = min([*others, _make_spot(own, metric)], key=lambda spot: (sign * spot.median, spot.n_diverged))
    x, y = (*(name.removeprefix(PARAMETER) for name in shown), "")[:2]
    selected = one.parameters or {}
    return HeatMap(one.label, x, y, spots, (selected.get(x), selected.get(y)))


def _make_spot(rows: Frame, metric: str) -> Spot:
    values = final_values(rows, metric)
    known = np.where(np.isnan(values), worst_value(metric), values)
    return Spot(float(quantiles(known)[1]), count_diverged(rows), len(known))
