"""The tables of a report: final values, comparisons of solvers, cost to reach targets, changes, and heat maps.

Solvers are compared by their medians over seeds, and the best one with each other solver seed by seed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import comb
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from bilevel._core.extras import require
from bilevel.bench.config import TIMING
from bilevel.bench.select import AXES, Contender, Section, count_diverged, final_values, quantiles, reach, worst_value
from bilevel.bench.store import PARAMETER, Frame, list_metrics
from bilevel.engine.metrics import Metric

BySeed: TypeAlias = dict[Any, float]  # a number for each seed; infinite if it diverged or did not reach a target

# Number formats.


def format_number(value: float, digits: int = 3) -> str:
    """Return a number with three digits, "diverged" if it is infinite, a dash for NaN."""
    return "–" if np.isnan(value) else f"{value:.{digits}g}" if np.isfinite(value) else "diverged"


def format_quantity(value: float) -> str:
    """Return a small number with three digits, and a large one in words."""
    return round_count(value) if np.isfinite(value) and abs(value) >= 1000 else format_number(value)


def format_count(value: float) -> str:
    """Return all digits in groups of three, a dash for infinity and NaN."""
    return f"{value:,.0f}" if np.isfinite(value) else "–"


def round_count(count: float) -> str:
    """Return a count with two or three digits, as "2.8 million"."""
    for size, word in ((1e9, " billion"), (1e6, " million")):
        if count >= size:
            return f"{count / size:.3g}{word}"
    return f"{float(f'{count:.2g}'):,.0f}"


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

    @property
    def confidence(self) -> str:
        """The result of the sign test, in a sentence."""
        if self.second is None:
            return "No other solver has a finite median."
        if not self.n_seeds:
            return "Equal to another solver in all seeds."
        ahead, least, test = "Ahead", "", "two-sided"
        if self.n_others > 1:
            ahead, least, test = f"{ahead} of each other solver", "at least ", f"{test}, {self.n_others} comparisons"
        all_of_them = self.wins == self.n_seeds > 1
        seeds = f"all {self.n_seeds} seeds" if all_of_them else f"{least}{self.wins} of {self.n_seeds} seeds"
        return f"{ahead} in {seeds}: sign test p = {self.p_value:.2g} ({test})."


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


def decide_finals(section: Section, metric: str) -> Verdict | None:
    """Compare the solvers of a section by their final values of a metric."""
    return decide(seed_finals(section, metric), section.metrics[metric].better or "lower")


def describe_winner(verdict: Verdict | None, metric: Metric) -> str:
    """Return a sentence with the best solver and the margin."""
    if verdict is None:
        return f"No solver ends with a finite {metric.label}."
    best = "highest" if verdict.better == "higher" else "lowest"
    text = f"{verdict.winner} ends with the {best} {metric.label}: {verdict.median:.3g}"
    if verdict.second is None:
        return f"{text}, the only finite one."
    margin = verdict.margin
    compared = f"{margin} as" if margin.startswith("the same") else f"{margin} than"
    return f"{text}, {compared} {verdict.second} ({verdict.second_median:.3g})."


# The lead along the runs.

_SHORT = 0.1  # shorter leads, as a fraction of the logarithmic axis, are left out
_MOST_LEADS = 4


def describe_leads(section: Section) -> str:
    """Return a sentence with the solvers that lead, by their medians, along the runs; "" if the lead never changes."""
    leads = find_leads(section)
    if len(leads) < 2:
        return ""
    (first, end), *others = [(label, f"{round_count(end)} oracle calls") for label, end in leads[:-1]]
    parts = [f"{first} leads up to {end}", *(f"{label} up to {until}" for label, until in others)]
    return f"On the way there, {', '.join(parts)}, then {leads[-1][0]}."


def find_leads(section: Section) -> list[tuple[str, float]]:
    """Return (leader, oracle calls at the end of the lead) in the range that all curves share, without short leads."""
    curves = {label: one for label, one in section.curves_of(section.metric, "calls").items() if len(one.x) > 1}
    if len(curves) < 2:
        return []
    first, last = max(one.x[0] for one in curves.values()), min(one.x[-1] for one in curves.values())
    points = np.unique(np.concatenate([one.x for one in curves.values()]))
    grid = points[(points >= first) & (points <= last) & (points > 0)]
    if len(grid) < 2:
        return []
    sign = -1.0 if section.metrics[section.metric].better == "higher" else 1.0
    labels, heights = [*curves], np.array([sign * np.interp(grid, one.x, one.median) for one in curves.values()])
    leaders = [labels[place] for place in np.argmin(heights, axis=0)]
    return _drop_short([*zip(leaders, grid.tolist(), strict=True)])[-_MOST_LEADS:]


def _drop_short(leaders: Sequence[tuple[str, float]]) -> list[tuple[str, float]]:
    """Merge consecutive points with one leader, and drop short leads; their range goes to the leader before."""
    begin, last = leaders[0][1], leaders[-1][1]
    span = np.log(last / begin)
    leads: list[tuple[str, float]] = []
    for (leader, end), (next_leader, _) in zip(leaders, [*leaders[1:], ("", 0.0)], strict=True):
        if leader == next_leader:
            continue
        is_long = np.log(end / begin) >= _SHORT * span or end == last
        if leads and (not is_long or leads[-1][0] == leader):
            leads[-1] = leads[-1][0], end
        elif is_long:
            leads.append((leader, end))
        begin = end
    return leads


# Final values.


def make_final_row(one: Contender, metrics: Sequence[str]) -> dict[str, Any]:
    """Return the final values, the costs and the outcomes of a solver."""
    ends = one.rows.groupby("cell")["status"].last().value_counts() if one.parameters is not None else {}
    return {
        "solver": one.label,
        "spreads": [quantiles(final_values(one.rows, metric)) for metric in metrics],
        **{name: one.finals[name].median() for name in ("calls", "seconds", "memory_bytes")},
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
    """A value to reach, and its meaning unless the value is clear by itself."""

    value: float
    note: str


class Reached(NamedTuple):
    """The cost for each seed of a solver to reach one target, by axis; infinite if it does not."""

    seeds: dict[str, BySeed]

    def median(self, axis: str) -> float:
        return float(np.median([*self.seeds[axis].values()]))

    @property
    def n_arrived(self) -> int:
        return int(np.isfinite([*self.seeds["calls"].values()]).sum())


class TargetTable(NamedTuple):
    """The cost of timed solvers to reach the targets of a metric."""

    metric: str
    targets: tuple[Target, ...]
    reached: dict[str, tuple[Reached, ...]]  # by label, one for each target


def make_target_table(section: Section, metric: str) -> TargetTable:
    """Choose targets for a metric, and measure the cost to reach them; unreachable and trivial targets are dropped."""
    timed = [
        one
        for one in section.contenders
        if one.parameters and (one.rows["phase"] == TIMING).any() and metric in list_metrics(one.rows)
    ]
    targets, reached = choose_targets(section, metric) if timed else [], {}
    for one in timed:
        reached[one.label] = [_reach(one, metric, target.value) for target in targets]
    useful = [place for place in range(len(targets)) if _is_useful([own[place] for own in reached.values()])]
    kept = {label: tuple(own[place] for place in useful) for label, own in reached.items()}
    return TargetTable(metric, tuple(targets[place] for place in useful), kept)


def _reach(one: Contender, metric: str, target: float) -> Reached:
    return Reached({axis: one.by_seed(reach(one.rows, metric, target, axis)) for axis in COSTS})


def _is_useful(reached: list[Reached]) -> bool:
    medians = [one.median("calls") for one in reached]
    return bool(np.isfinite(medians).any() and np.any(np.array(medians) > 0))


def choose_targets(section: Section, metric: str) -> list[Target]:
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
        return [Target(value, "") for value in _list_decades(start, best)]
    if not start > best:
        return []
    ways = ((share, best + (1 - share) * (start - best)) for share in _SHARES)
    return [Target(sign * float(f"{value:.4g}"), f"{100 * share:g} % of the way") for share, value in ways]


def _list_decades(start: float, best: float) -> list[float]:
    """Return powers of ten between two values, largest first; if they are few, also three times each."""
    powers = range(int(np.floor(np.log10(start))), int(np.floor(np.log10(best))) - 1, -1)
    digits = (3, 1) if 2 * len(powers) <= _MOST_TARGETS + 2 else (1,)
    values = [float(f"{digit}e{power}") for power in powers for digit in digits]
    inside = [value for value in values if best <= value < start]
    few = np.unique(np.linspace(0, len(inside) - 1, min(_MOST_TARGETS, len(inside))).round().astype(int))
    return [inside[place] for place in few]


def decide_costs(section: Section, table: TargetTable) -> dict[str, Verdict | None]:
    """Compare the cost to reach the hardest target that two solvers reach, or the hardest one if there is none."""
    places = range(len(table.targets))
    n_arrived = [sum(np.isfinite(own[place].median("calls")) for own in table.reached.values()) for place in places]
    hardest = max((place for place, count in enumerate(n_arrived) if count > 1), default=len(n_arrived) - 1)
    at = f"{section.metrics[table.metric].label} {describe_target(section, table, hardest)}"
    return {
        f"{AXES[axis]} to {at}": decide({label: own[hardest].seeds[axis] for label, own in table.reached.items()})
        for axis in COSTS
    }


def describe_target(section: Section, table: TargetTable, place: int) -> str:
    """Return a target as an inequality."""
    sign = "≥" if section.metrics[table.metric].better == "higher" else "≤"
    return f"{sign} {table.targets[place].value:.4g}"


def list_target_rows(table: TargetTable, labels: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Return the cells of the table by label, which mark the least cost of each target."""
    best = {
        (axis, place): min(own[place].median(axis) for own in table.reached.values())
        for axis in COSTS
        for place in range(len(table.targets))
    }
    rows: dict[str, list[dict[str, Any]]] = {label: [] for label in labels if label in table.reached}
    for label, row in rows.items():
        for place, one in enumerate(table.reached[label]):
            medians = {axis: one.median(axis) for axis in COSTS}
            is_best = {f"best_{axis}": np.isfinite(m) and m == best[axis, place] for axis, m in medians.items()}
            row.append(medians | is_best | {"arrived": one.n_arrived, "of": len(one.seeds["calls"])})
    return rows


# Changes from an earlier store to a later one.

BEFORE, AFTER = "before", "after"


def join_sections(before: Sequence[Section], after: Sequence[Section]) -> list[Section]:
    """Return the sections that both stores have, each with the contenders of both."""
    earlier = {_identify(section): section for section in before}
    pairs = [(earlier[_identify(section)], section) for section in after if _identify(section) in earlier]
    if not pairs:
        known = ", ".join(f"{one.problem} of `{one.experiment}`" for one in before)
        raise ValueError(f"`before`: the two stores share no problem of an experiment; it has {known}.")
    return [_join(*pair) for pair in pairs]


def _identify(section: Section) -> tuple[str, str, str]:
    return section.experiment, section.problem, str(sorted(section.arguments.items()))


def _join(before: Section, after: Section) -> Section:
    if before.metric != after.metric:
        raise ValueError(f"`before`: {before.metric} selects there, and {after.metric} here; give `select`.")
    sides = (BEFORE, before), (AFTER, after)
    contenders = (one._replace(label=_mark(one.label, when)) for when, side in sides for one in side.contenders)
    rows = require("pandas", "bench").concat([before.rows, after.rows], ignore_index=True)
    return replace(after, rows=rows, contenders=tuple(sorted(contenders, key=lambda one: one.label)))


def _mark(label: str, when: str) -> str:
    return f"{label.removesuffix(')')}, {when})" if label.endswith(")") else f"{label} ({when})"


def compare(section: Section) -> list[dict[str, Any]]:
    """Return the final metric, before and after, of each solver that a joined section has twice."""
    finals, better = seed_finals(section, section.metric), section.metrics[section.metric].better or "lower"
    seconds = {one.label: float(one.finals["seconds"].median()) for one in section.contenders}
    pairs = {label: label.removesuffix(f"{AFTER})") + f"{BEFORE})" for label in seconds if label.endswith(f"{AFTER})")}
    rows = []
    for after, before in pairs.items():
        if before in seconds:
            sides = {BEFORE: finals.get(before, {}), AFTER: finals.get(after, {})}
            verdict = decide(sides, better)
            medians = {when: quantiles(np.array([*own.values()] or [np.nan]))[1] for when, own in sides.items()}
            # The inverse of `_mark`.
            solver = after.removesuffix(f" ({AFTER})")
            solver = solver if solver != after else after.removesuffix(f", {AFTER})") + ")"
            row = {"solver": solver, "seconds": {BEFORE: seconds[before], AFTER: seconds[after]}, "verdict": verdict}
            rows.append(row | medians | {"change": _describe_change(verdict, **sides)})
    return sorted(rows, key=lambda row: row["solver"])


def _describe_change(verdict: Verdict | None, before: BySeed, after: BySeed) -> str:
    if verdict is None:
        return "diverges before and after"
    if verdict.second is None:
        return "diverged, and does no more" if verdict.winner == AFTER else "diverges now"
    if before == after:
        return "the same in every seed"
    if verdict.margin.startswith("the same"):
        return verdict.margin
    better = f"better: {verdict.margin} than before"
    return better if verdict.winner == AFTER else f"worse: before, it was {verdict.margin}"


def describe_changes(rows: list[dict[str, Any]]) -> str:
    """Return how many solvers became better or worse, in a sentence."""
    clear = [row["verdict"] for row in rows if row["verdict"] is not None and row["verdict"].level == "significant"]
    better, n_open = sum(one.winner == AFTER for one in clear), len(rows) - len(clear)
    counts = f"{better} better, {len(clear) - better} worse, {n_open} without a significant difference"
    return f"After against before, of {len(rows)} solvers: {counts}."


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
    xs: tuple[Any, ...]
    ys: tuple[Any, ...]
    spots: dict[tuple[Any, Any], Spot]
    selected: tuple[Any, Any]


def make_heat_maps(section: Section) -> list[HeatMap]:
    """Return the map of each solver that was swept over several values of a number."""
    maps = (_make_heat_map(one, section.metric) for one in section.contenders)
    return [one for one in maps if one is not None]


def _make_heat_map(one: Contender, metric: str) -> HeatMap | None:
    columns = [name for name in one.swept if name.startswith(PARAMETER) and one.swept[name].dtype.kind in "fiu"]
    counts = {name.removeprefix(PARAMETER): one.swept[name].nunique() for name in columns}
    varied = [name for name, count in counts.items() if count > 1]
    if not varied:
        return None
    order = {name: place for place, name in enumerate(_FIRST)}
    x, y = (*sorted(varied, key=lambda name: (order.get(name, len(order)), -counts[name])), "")[:2]
    shown = [PARAMETER + name for name in (x, y) if name]
    spots = {(*key, None)[:2]: _find_best_spot(own, metric, shown) for key, own in one.swept.groupby(shown)}
    xs, ys = ({key[place] for key in spots} for place in (0, 1))
    selected = one.parameters or {}
    place = selected.get(x), selected.get(y)
    return HeatMap(one.label, x, y, tuple(sorted(xs)), tuple(sorted(ys)) if y else (None,), spots, place)


def _find_best_spot(rows: Frame, metric: str, shown: list[str]) -> Spot:
    names = (name for name in rows.columns if name.startswith(PARAMETER))
    others = [name for name in names if name not in shown and rows[name].nunique() > 1]
    groups = [own for _, own in rows.groupby(others, dropna=False)] if others else [rows]
    sign = np.sign(worst_value(metric))
    return min((_make_spot(own, metric) for own in groups), key=lambda spot: (sign * spot.median, spot.n_diverged))


def _make_spot(rows: Frame, metric: str) -> Spot:
    values = final_values(rows, metric)
    known = np.where(np.isnan(values), worst_value(metric), values)
    return Spot(float(quantiles(known)[1]), count_diverged(rows), len(known))
