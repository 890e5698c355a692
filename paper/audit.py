"""The claims of the paper, each with its verdict, what was found, the command, and the evidence.

Verdicts on the experiments are computed from the kept results. Those on the theory and on the published code are kept
beside them, in ``claims_*.toml``, with the test or the script that shows them.
"""

import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bilevel.bench.sections import Contender, Section
from paper.contenders import final_median, number, seconds_to, selected_median
from paper.parts import PUBLISHED, UNTUNED, WIDER

CONFIRMED, REFUTED, DEPENDS = "confirmed", "not confirmed", "depends"
PAPER = ("SRBA", "SABA", "AmIGO", "StocBiO", "MRBO", "VRBO", "F2SA")
NEUMANN = ("StocBiO", "MRBO", "VRBO")
CONVERGED = 1e-16  # of the squared gradient norm, in double precision
_NEAR = 1.02  # of values that count as equal

Sections = Mapping[str, Section]
Finding = tuple[str, str]  # verdict and sentence


class Claim(NamedTuple):
    """A sentence of the paper in our words, and what became of it."""

    id: str
    section: str
    claim: str
    verdict: str
    finding: str
    command: str
    evidence: str
    group: str  # the experiments, or the name of a file of kept claims


class _Experimental(NamedTuple):
    id: str
    part: str
    section: str
    claim: str
    find: Callable[[Section], Finding]


def contender(section: Section, solver: str, column: str = PUBLISHED) -> Contender:
    """Return a solver at the setting selected in a column."""
    return next(one for one in section.contenders if one.label == f"{solver} ({column})")


def list_claims(sections: Sections, kept: Path) -> list[Claim]:
    """Return every claim whose results are kept, experiments first."""
    return [*_experimental(sections), *_kept_claims(kept)]


def _experimental(sections: Sections) -> Iterator[Claim]:
    for one in EXPERIMENTS:
        if one.part in sections:
            command, evidence = f"python -m paper reproduce {one.part}", f"reports/reproduction/{one.part}.parquet"
            found = one.find(sections[one.part])
            yield Claim(one.id, one.section, one.claim, *found, command, evidence, "experiments")


def _kept_claims(kept: Path) -> Iterator[Claim]:
    for path in sorted(kept.glob("claims_*.toml")):
        for entry in tomllib.loads(path.read_text(encoding="utf-8"))["claim"]:
            texts = {name: " ".join(str(entry[name]).split()) for name in Claim._fields[:-1]}
            yield Claim(**texts, group=path.stem.removeprefix("claims_"))


def _ends(section: Section, metric: str, solvers: tuple[str, ...] = PAPER, column: str = PUBLISHED) -> dict[str, float]:
    """Return the final median of each solver, best first."""
    found = {name: final_median(contender(section, name, column), metric) for name in solvers}
    return dict(sorted(found.items(), key=lambda pair: pair[1]))


def _at_horizon(section: Section, solvers: tuple[str, ...], column: str = PUBLISHED) -> dict[str, float]:
    """Return the selected median of each solver at the end of the sweep, best first: settings may diverge later."""
    found = {name: selected_median(contender(section, name, column), section.metric) for name in solvers}
    return dict(sorted(found.items(), key=lambda pair: pair[1]))


def _horizon(section: Section) -> str:
    return f"{contender(section, 'SRBA').swept['epochs'].max():.0f} epochs"


def _listed(values: Mapping[str, float], unit: str = "", missing: str = "diverged") -> str:
    words = {name: f"{number(value)}{unit}" if np.isfinite(value) else missing for name, value in values.items()}
    return ", ".join(f"{name} {word}" for name, word in words.items())


def _fastest_on_quadratics(section: Section) -> Finding:
    ends = _ends(section, "hypergrad_norm_sq")
    verdict = CONFIRMED if set(list(ends)[:2]) == {"SRBA", "SABA"} else REFUTED
    return verdict, f"‖∇h‖² at the end: {_listed(ends)}."


def _to_the_floor(section: Section) -> Finding:
    columns = (PUBLISHED, WIDER)
    ends = {
        f"{n} ({c})": final_median(contender(section, n, c), "hypergrad_norm_sq")
        for n in ("SRBA", "SABA")
        for c in columns
    }
    reached = all(value <= CONVERGED for value in ends.values())
    return CONFIRMED if reached else REFUTED, f"‖∇h‖² at the end, with constant steps: {_listed(ends)}."


def _neumann_floors(section: Section) -> Finding:
    ends, wide = _ends(section, "hypergrad_norm_sq", NEUMANN), _ends(section, "hypergrad_norm_sq", NEUMANN, WIDER)
    amigo = final_median(contender(section, "AmIGO"), "hypergrad_norm_sq")
    text = f"‖∇h‖² at the end: {_listed(ends)}; with longer series and other steps of them {_listed(wide)}."
    if min(ends.values()) <= 1e-8:
        return REFUTED, text
    text += f" AmIGO, which has no series, ends at {number(amigo)}."
    # VRBO's noise vanishes: what another series changes is its bias. The others are also as noisy as AmIGO.
    if wide["VRBO"] < ends["VRBO"] / 2:
        return DEPENDS, f"{text} VRBO, whose noise vanishes, ends lower with another series: the bias stops it."
    return REFUTED, f"{text} VRBO, whose noise vanishes, does not end lower with another series."


def _slow_down(section: Section) -> Finding:
    early, late = {}, {}
    for name in ("AmIGO", "StocBiO"):
        rows = contender(section, name).rows
        half = rows["epochs"] <= rows["epochs"].max() / 8
        early[name] = float(rows[half].sort_values("step").groupby("cell")["hypergrad_norm_sq"].last().median())
        late[name] = final_median(contender(section, name), "hypergrad_norm_sq")
    slow = all(late[name] > early[name] / 100 for name in early)
    text = f"‖∇h‖² after an eighth of the run: {_listed(early)}; at its end: {_listed(late)}."
    return CONFIRMED if slow else REFUTED, text


def _srba_before_saba(section: Section) -> Finding:
    found = {}
    for axis, unit in (("seconds", " s"), ("calls", "")):
        times = {n: seconds_to(contender(section, n), "hypergrad_norm_sq", 1e-10, axis) for n in ("SRBA", "SABA")}
        found[axis] = times["SRBA"] < times["SABA"], _listed(times, unit, "never")
    faster = [one for one, _ in found.values()]
    text = f"To ‖∇h‖² ≤ 1e-10, in seconds: {found['seconds'][1]}; in oracle calls: {found['calls'][1]}."
    return CONFIRMED if all(faster) else DEPENDS if any(faster) else REFUTED, text


def _competitive(section: Section) -> Finding:
    three = ("SRBA", "SABA", "AmIGO")
    ends, wide = _at_horizon(section, three), _at_horizon(section, three, WIDER)
    untuned = selected_median(contender(section, "SRBA", UNTUNED), section.metric)
    text = f"h after {_horizon(section)}: {_listed(ends)}; on the wider grids {_listed(wide)};"
    text += f" SRBA untuned {number(untuned)}."
    text += f" Going on with the published settings: {_listed(_ends(section, 'value', three))}."
    near = [values["SRBA"] <= _NEAR * min(values.values()) for values in (ends, wide)]
    return CONFIRMED if all(near) else DEPENDS if any(near) else REFUTED, text


def _faster_than_amigo(section: Section) -> Finding:
    target = 1.001 * max(_at_horizon(section, ("SRBA", "AmIGO")).values())
    times = {n: seconds_to(contender(section, n), "value", target) for n in ("SRBA", "AmIGO")}
    text = f"To h ≤ {number(target)}, which both reach within the horizon: {_listed(times, ' s', 'never')}."
    return CONFIRMED if times["SRBA"] < times["AmIGO"] else REFUTED, text


def _less_memory(section: Section) -> Finding:
    state = {n: float(contender(section, n).rows["memory_bytes"].median()) / 1e3 for n in ("SRBA", "SABA")}
    return CONFIRMED if state["SRBA"] < state["SABA"] else REFUTED, f"State of the solver: {_listed(state, ' kB')}."


def _vrbo_slow(section: Section) -> Finding:
    ends = _at_horizon(section, PAPER)
    verdict = CONFIRMED if list(ends).index("VRBO") >= 4 else REFUTED
    return verdict, f"Medians after equal oracle calls, best first: {_listed(ends)}."


def _neumann_slowest(section: Section) -> Finding:
    ends = _at_horizon(section, tuple(name for name in PAPER if name != "F2SA"))
    last = set(list(ends)[-3:]) == set(NEUMANN)
    return CONFIRMED if last else REFUTED, f"h after {_horizon(section)}, best first: {_listed(ends)}."


def _f2sa_diverges(section: Section) -> Finding:
    one = contender(section, "F2SA")
    finals = one.swept[one.swept["final"].astype(bool)]
    share = float(np.mean(finals["status"] == "diverged"))
    best = selected_median(one, "value")
    text = (
        f"By the printed schedule {100 * share:.0f} % of the runs diverged; the best setting ends at h {number(best)}."
    )
    return DEPENDS if share and np.isfinite(best) else CONFIRMED if share else REFUTED, text


def _best_test_error(section: Section) -> Finding:
    ends, shown = _ends(section, "test_error"), _ends(section, "validation_error")
    best, second = list(ends.values())[:2]
    clear = next(iter(ends)) == "SRBA" and best < second
    near = ends["SRBA"] <= 1.02 * best
    text = f"Test error: {_listed(ends)}; validation error, which selects: {_listed(shown)}."
    return CONFIRMED if clear else DEPENDS if near else REFUTED, text


def _saba_first(section: Section) -> Finding:
    target = 1.02 * max(final_median(contender(section, n), "test_error") for n in ("SRBA", "SABA"))
    times = {n: seconds_to(contender(section, n), "test_error", target) for n in PAPER}
    times = dict(sorted(times.items(), key=lambda pair: pair[1]))
    text = f"Seconds to a test error of {number(target)}: {_listed(times, missing='never')}."
    return CONFIRMED if list(times)[:2] == ["SABA", "SRBA"] else REFUTED, text


_MAIN, _EXTRA = "Numerical experiments", "Additional experiment"
EXPERIMENTS = [
    _Experimental(f"E{place}", *rest)
    for place, rest in enumerate(
        [
            ("quadratic", _MAIN, "On quadratics SRBA and SABA converge fastest of all", _fastest_on_quadratics),
            (
                "quadratic",
                _MAIN,
                "Variance reduction and warm starts: both converge with constant steps",
                _to_the_floor,
            ),
            ("quadratic", _MAIN, "Neumann methods fail to converge, by the bias of the series", _neumann_floors),
            ("quadratic", _MAIN, "AmIGO and StocBiO slow down after some iterations", _slow_down),
            ("quadratic", _MAIN, "SRBA is faster than SABA on quadratics", _srba_before_saba),
            ("quadratic", _MAIN, "VRBO is slower on all problems: quadratics", _vrbo_slow),
            ("ijcnn1", _MAIN, "On IJCNN1 SRBA is competitive with AmIGO and SABA", _competitive),
            ("ijcnn1", _MAIN, "SRBA goes faster than AmIGO", _faster_than_amigo),
            ("ijcnn1", _MAIN, "SRBA needs less memory than SABA", _less_memory),
            ("ijcnn1", _MAIN, "VRBO is slower on all problems: IJCNN1", _vrbo_slow),
            ("ijcnn1", _MAIN, "The slowest methods on IJCNN1 are those with Neumann series", _neumann_slowest),
            ("ijcnn1", _MAIN, "The iterates of F²SA go to infinity on IJCNN1", _f2sa_diverges),
            ("cleaning", _EXTRA, "On cleaning SRBA reaches the best final test error", _best_test_error),
            ("cleaning", _EXTRA, "SABA is the fastest on cleaning, SRBA the second, others slower", _saba_first),
            ("cleaning", _MAIN, "VRBO is slower on all problems: cleaning", _vrbo_slow),
        ],
        start=1,
    )
]
