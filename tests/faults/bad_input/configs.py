"""Configs: valid files in which a value, a key, a line or a byte is changed."""

import re
from pathlib import Path

from hypothesis import strategies as st

from bilevel.bench.config import Experiment, load_config
from tests.faults.bad_input import values
from tests.faults.bad_input.judge import Case

FOLDER = Path(__file__).parents[3] / "bilevel" / "bench" / "configs"
VALID = {path.name: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.toml"))}
# Values as written in a file; some are not TOML.
VALUES = ["0", "-1", "1", "true", "nan", "inf", "-inf", "1e400", "1e-320", "0.5", "[]", "[1, 2]", "[1, 1]", '[1, "a"]']
VALUES += [str(2**31), str(2**63), str(2**64), "1" * 400, '""', '"a"', '"../../x"', '"/etc"', '"\\u0000"', '"<b>"']
VALUES += [
    "{}",
    "{a = 1}",
    "[[1], [2]]",
    "1979-05-27",
    "1979-05-27T07:32:00Z",
    "07:32:00",
    "null",
    "None",
    "'''a",
    '"a',
]
VALUES += ['"SRBA"', '"value"', '"test_error"', '"quadratic"', '["SRBA", "SOBA"]', '"float16"', "[0.1, nan]", "[[]]"]
VALUES += ['"' + "a" * 300 + '"', "1_000", "0x10", "1__0", "+5", "0.1.2", "1 2", "", "[" * 500, "{" * 300]
LINES = [
    "[problem]",
    "[[solvers]]",
    "[budget]",
    "x = 1",
    "name = 'x'",
    "[problem.x]",
    "[[problem]]",
    "[solvers]",
    "= 1",
]
LINES += ["seeds = 3", "columns = 3", "[", "\x00", "\ufeff", "a.b.c = 1", "metric = 'loss'", "# ü", "step_size = 0.1"]
SETTING = re.compile(r"^(\w+)\s*=\s*(.+)$")


@st.composite
def cases(draw):
    """Return a case: a file, changed once or twice."""
    name = draw(st.sampled_from([*VALID]))
    content, told = VALID[name].encode(), []
    for _ in range(draw(st.sampled_from([1, 1, 1, 2]))):
        content, what = draw(_changed(content))
        told.append(what)

    def act():
        path = Path("config.toml").absolute()
        path.write_bytes(content)
        return load_config(path)

    return Case(f"{name}: {'; '.join(told)}", act, ("config.toml",), _complaint)


@st.composite
def _changed(draw, content):
    lines = content.decode("utf-8", "surrogateescape").split("\n")
    settings = [i for i, line in enumerate(lines) if SETTING.match(line)]
    kinds = ["value", "value", "value", "key", "line", "gone", "twice", "cut", "byte", "swapped"]
    kind = draw(st.sampled_from(kinds if settings else kinds[4:]))
    at = draw(st.sampled_from(settings)) if settings else 0
    if kind in ("cut", "byte"):
        place = draw(st.integers(0, max(0, len(content) - 1)))
        if kind == "cut":
            return content[:place], f"cut at {place}"
        byte = draw(st.integers(0, 255))
        return content[:place] + bytes([byte]) + content[place + 1 :], f"byte {place} is {byte:#x}"
    if kind == "value":
        new = draw(st.sampled_from(VALUES))
        told = f"line {at}: {SETTING.match(lines[at])[1]} = {new[:60]}"
        lines[at] = f"{SETTING.match(lines[at])[1]} = {new}"
    elif kind == "key":
        old, value = SETTING.match(lines[at]).groups()
        new = draw(
            st.sampled_from(
                [old.upper(), f"{old}s", old[:-1], "name", "x", f'"{old} "', "", "a-b", "seed", (2 * old)[:40]]
            )
        )
        told, lines[at] = f"line {at}: key {new!r}", f"{new} = {value}"
    elif kind == "line":
        new = draw(st.sampled_from(LINES) | values.texts)
        told = f"{new!r} before line {at}"
        lines.insert(at, new)
    elif kind == "gone":
        told = f"without line {at}"
        del lines[at]
    elif kind == "twice":
        told = f"line {at} twice"
        lines.insert(at, lines[at])
    else:
        other = draw(st.integers(0, len(lines) - 1))
        lines[at], lines[other], told = lines[other], lines[at], f"lines {at} and {other} swapped"
    return "\n".join(lines).encode("utf-8", "surrogateescape" if kind != "line" else "replace"), told


def _complaint(experiment):
    """Return what is wrong with an experiment, or None."""
    if not isinstance(experiment, Experiment):
        return f"a {type(experiment).__name__}"
    if not experiment.settings or not experiment.seeds:
        return "nothing to run"
    return None
