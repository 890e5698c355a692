"""The claims of the paper, each with a verdict, what was found, the command that shows it, and the evidence.

Verdicts on the experiments are computed from the kept results. Verdicts on the theory and on the published code are
kept in ``claims_*.toml`` next to the results, each with the test or the script that shows it.
"""

import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bilevel.bench.select import Contender, Section
from paper.contenders import cost_to, final_median, selected_median
from paper.markdown import format_value
from paper.parts import PUBLISHED, UNTUNED, WIDER

CONFIRMED, REFUTED, DEPENDS = "confirmed", "not confirmed", "depends"
PAPER = ("SRBA", "SABA", "AmIGO", "StocBiO", "MRBO", "VRBO", "F2SA")
NEUMANN = ("StocBiO", "MRBO", "VRBO")
CONVERGED = 1e-16  # squared gradient norm in double precision
_NEAR = 1.02  # values within this factor count as equal

Sections = Mapping[str, Section]
Solvers = tuple[str, ...]
Finding = tuple[str, str]  # the verdict, and a sentence with the numbers


class Claim(NamedTuple):
    """A statement of the paper in our words, with the verdict on it.

    Attributes
    ----------
    id : short name, unique within its group
    section : where the paper makes the claim
    claim : the claim
    verdict : `CONFIRMED`, `REFUTED` or `DEPENDS`
    finding : what was found
    command : command that shows it
    evidence : files with the evidence, separated by commas
    group : "experiments", or the file name of the kept claims without "claims_"
    """

    id: str
    section: str
    claim: str
    verdict: str
    finding: str
    command: str
    evidence: str
    group: str


class _ExperimentalClaim(NamedTuple):
    id: str
    part: str
    section: str
    claim: str
    find: Callable[[Section], Finding]


def contender(section: Section, solver: str, column: str = PUBLISHED) -> Contender:
    """Return a solver at the setting that was selected from one of its grids."""
    return next(one for one in section.contenders if one.label == f"{solver} ({column})")


def list_claims(sections: Sections, kept: Path) -> list[Claim]:
    """Return all claims for which there are results, those on the experiments first.

    Parameters
    ----------
    sections : results of each part, as :func:`paper.protocol.read_kept` returns them
    kept : folder with the files ``claims_*.toml``
    """
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


def _at_end(section: Section, metric: str, solvers: Solvers = PAPER, column: str = PUBLISHED) -> dict[str, float]:
    """Return the median of each solver at the end of the timed runs, the best first."""
    found = {name: final_median(contender(section, name, column), metric) for name in solvers}
    return dict(sorted(found.items(), key=lambda pair: pair[1]))


def _at_horizon(section: Section, solvers: Solvers, column: str = PUBLISHED) -> dict[str, float]:
    """Return the median of each solver at the end of the sweep, the best first.

    The timed runs are longer, and some settings diverge only there.
    """
    found = {name: selected_median(contender(section, name, column), section.metric) for name in solvers}
    return dict(sorted(found.items(), key=lambda pair: pair[1]))


def _times_to(section: Section, solvers: Solvers, metric: str, target: float) -> dict[str, float]:
    return {name: cost_to(contender(section, name), metric, target) for name in solvers}


def _horizon(section: Section) -> str:
    return f"{contender(section, 'SRBA').swept['epochs'].max():.0f} epochs"


def _list(values: Mapping[str, float], unit: str = "", missing: str = "diverged") -> str:
    words = (f"{format_value(value)}{unit}" if np.isfinite(value) else missing for value in values.values())
    return ", ".join(f"{name} {word}" for name, word in zip(values, words, strict=True))


def _confirmed_if(confirmed: bool) -> str:
    return CONFIRMED if confirmed else REFUTED


def _fastest_on_quadratics(section: Section) -> Finding:
    ends = _at_end(section, "hypergrad_norm_sq")
    return _confirmed_if(set(list(ends)[:2]) == {"SRBA", "SABA"}), f"‖∇h‖² at the end: {_list(ends)}."


def _converge_with_constant_steps(section: Section) -> Finding:
    each = [(name, column) for name in ("SRBA", "SABA") for column in (PUBLISHED, WIDER)]
    ends = {f"{n} ({c})": final_median(contender(section, n, c), "hypergrad_norm_sq") for n, c in each}
    converged = all(value <= CONVERGED for value in ends.values())
    return _confirmed_if(converged), f"‖∇h‖² at the end, with constant steps: {_list(ends)}."


def _neumann_bias(section: Section) -> Finding:
    ends, wide = (_at_end(section, "hypergrad_norm_sq", NEUMANN, column) for column in (PUBLISHED, WIDER))
    amigo = final_median(contender(section, "AmIGO"), "hypergrad_norm_sq")
    text = f"‖∇h‖² at the end: {_list(ends)}; with longer series and other steps of them {_list(wide)}."
    if min(ends.values()) <= 1e-8:
        return REFUTED, text
    text += f" AmIGO, which has no series, ends at {format_value(amigo)}."
    # The noise of VRBO vanishes, so a longer series changes only its bias. The others are also as noisy as AmIGO.
    if wide["VRBO"] < ends["VRBO"] / 2:
        return DEPENDS, f"{text} VRBO, whose noise vanishes, ends lower with another series: the bias stops it."
    return REFUTED, f"{text} VRBO, whose noise vanishes, does not end lower with another series."


def _slow_down(section: Section) -> Finding:
    early, late = {}, {}
    for name in ("AmIGO", "StocBiO"):
        rows = contender(section, name).rows
        first = rows[rows["epochs"] <= rows["epochs"].max() / 8]
        early[name] = float(first.sort_values("step").groupby("cell")["hypergrad_norm_sq"].last().median())
        late[name] = final_median(contender(section, name), "hypergrad_norm_sq")
    slow = all(late[name] > early[name] / 100 for name in early)
    return _confirmed_if(slow), f"‖∇h‖² after an eighth of the run: {_list(early)}; at its end: {_list(late)}."


def _srba_before_saba(section: Section) -> Finding:
    found = {}
    for axis, unit in (("seconds", " s"), ("calls", "")):
        times = {n: cost_to(contender(section, n), "hypergrad_norm_sq", 1e-10, axis) for n in ("SRBA", "SABA")}
        found[axis] = times["SRBA"] < times["SABA"], _list(times, unit, "never")
    faster = [one for one, _ in found.values()]
    text = f"To ‖∇h‖² ≤ 1e-10, in seconds: {found['seconds'][1]}; in oracle calls: {found['calls'][1]}."
    return CONFIRMED if all(faster) else DEPENDS if any(faster) else REFUTED, text


def _competitive(section: Section) -> Finding:
    three = ("SRBA", "SABA", "AmIGO")
    ends, wide = _at_horizon(section, three), _at_horizon(section, three, WIDER)
    untuned = selected_median(contender(section, "AutoSRBA", UNTUNED), section.metric)
    text = f"h after {_horizon(section)}: {_list(ends)}; on the wider grids {_list(wide)};"
    text += f" AutoSRBA {format_value(untuned)}."
    text += f" Continuing with the published settings: {_list(_at_end(section, 'value', three))}."
    near = [values["SRBA"] <= _NEAR * min(values.values()) for values in (ends, wide)]
    return CONFIRMED if all(near) else DEPENDS if any(near) else REFUTED, text


def _faster_than_amigo(section: Section) -> Finding:
    both = ("SRBA", "AmIGO")
    target = 1.001 * max(_at_horizon(section, both).values())
    times = _times_to(section, both, "value", target)
    text = f"To h ≤ {format_value(target)}, which both reach within the horizon: {_list(times, ' s', 'never')}."
    return _confirmed_if(times["SRBA"] < times["AmIGO"]), text


def _less_memory(section: Section) -> Finding:
    state = {n: float(contender(section, n).rows["memory_bytes"].median()) / 1e3 for n in ("SRBA", "SABA")}
    return _confirmed_if(state["SRBA"] < state["SABA"]), f"State of the solver: {_list(state, ' kB')}."


def _vrbo_slow(section: Section) -> Finding:
    ends = _at_horizon(section, PAPER)
    slow = list(ends).index("VRBO") >= 4
    return _confirmed_if(slow), f"Medians after equal oracle calls, best first: {_list(ends)}."


def _neumann_slowest(section: Section) -> Finding:
    ends = _at_horizon(section, tuple(name for name in PAPER if name != "F2SA"))
    last = set(list(ends)[-3:]) == set(NEUMANN)
    return _confirmed_if(last), f"h after {_horizon(section)}, best first: {_list(ends)}."


def _f2sa_diverges(section: Section) -> Finding:
    one = contender(section, "F2SA")
    share = float(np.mean(one.swept[one.swept["final"].astype(bool)]["status"] == "diverged"))
    best = selected_median(one, "value")
    text = f"By the printed schedule {100 * share:.0f} % of the runs diverged;"
    text += f" the best setting ends at h {format_value(best)}."
    return DEPENDS if share and np.isfinite(best) else _confirmed_if(share > 0), text


def _best_test_error(section: Section) -> Finding:
    ends, shown = _at_end(section, "test_error"), _at_end(section, "validation_error")
    best, second = list(ends.values())[:2]
    clear = next(iter(ends)) == "SRBA" and best < second
    text = f"Test error: {_list(ends)}; validation error, which selects: {_list(shown)}."
    return CONFIRMED if clear else DEPENDS if ends["SRBA"] <= _NEAR * best else REFUTED, text


def _saba_first(section: Section) -> Finding:
    target = _NEAR * max(final_median(contender(section, n), "test_error") for n in ("SRBA", "SABA"))
    times = dict(sorted(_times_to(section, PAPER, "test_error", target).items(), key=lambda pair: pair[1]))
    text = f"Seconds to a test error of {format_value(target)}: {_list(times, missing='never')}."
    return _confirmed_if(list(times)[:2] == ["SABA", "SRBA"]), text


_MAIN, _EXTRA = "Numerical experiments", "Additional experiment"
_CONSTANT_STEPS = "Variance reduction and warm starts: both converge with constant steps"
_BIAS = "Neumann methods fail to converge, by the bias of the series"
_SLOWEST = "The slowest methods on IJCNN1 are those with Neumann series"
_SECOND = "SABA is the fastest on cleaning, SRBA the second, others slower"
EXPERIMENTS = [
    _ExperimentalClaim(f"E{place}", *rest)
    for place, rest in enumerate(
        [
            ("quadratic", _MAIN, "On quadratics SRBA and SABA converge fastest of all", _fastest_on_quadratics),
            ("quadratic", _MAIN, _CONSTANT_STEPS, _converge_with_constant_steps),
            ("quadratic", _MAIN, _BIAS, _neumann_bias),
            ("quadratic", _MAIN, "AmIGO and StocBiO slow down after some iterations", _slow_down),
            ("quadratic", _MAIN, "SRBA is faster than SABA on quadratics", _srba_before_saba),
            ("quadratic", _MAIN, "VRBO is slower on all problems: quadratics", _vrbo_slow),
            ("ijcnn1", _MAIN, "On IJCNN1 SRBA is competitive with AmIGO and SABA", _competitive),
            ("ijcnn1", _MAIN, "SRBA goes faster than AmIGO", _faster_than_amigo),
            ("ijcnn1", _MAIN, "SRBA needs less memory than SABA", _less_memory),
            ("ijcnn1", _MAIN, "VRBO is slower on all problems: IJCNN1", _vrbo_slow),
            ("ijcnn1", _MAIN, _SLOWEST, _neumann_slowest),
            ("ijcnn1", _MAIN, "The iterates of F²SA go to infinity on IJCNN1", _f2sa_diverges),
            ("cleaning", _EXTRA, "On cleaning SRBA reaches the best final test error", _best_test_error),
            ("cleaning", _EXTRA, _SECOND, _saba_first),
            ("cleaning", _MAIN, "VRBO is slower on all problems: cleaning", _vrbo_slow),
        ],
        start=1,
    )
]
