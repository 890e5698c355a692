"""Command lines with wrong, missing or additional words, passed to `main` in this process."""

import contextlib
import io
import sys
from pathlib import Path
from unittest import mock

from hypothesis import strategies as st

from bilevel import cli
from tests.faults.bad_input import values
from tests.faults.bad_input.judge import Case

CONFIG = """name = "tiny"
metric = "value_gap"
seeds = 1
[problem]
name = "quadratic"
n_inner = 64
n_outer = 64
dim_inner = 4
dim_outer = 2
[budget]
epochs = 2
[[solvers]]
name = "SOBA"
batch_size = 16
"""
COMMANDS = ["list", "run", "select", "report", "figure", "check", "doctor"]
WORDS = [
    "",
    "-",
    "--",
    "--help",
    "-h",
    "--version",
    "nothing",
    "tiny.toml",
    "../tiny.toml",
    "empty",
    "store",
    "/",
    ".",
    "broken",
]
WORDS += [
    "solvers",
    "problems",
    "metrics",
    "datasets",
    "smoke.tomll",
    "quadratics",
    "\udc80",
    "--store",
    "--out",
    "x" * 300,
]
OPTIONS = ["--store", "--only", "--seeds", "--jobs", "--phase", "--out", "--select", "--draw", "--metric", "--nonsense"]
OPTION_VALUES = [
    "",
    "0",
    "-1",
    "1",
    "a",
    "SOBA",
    "srba",
    "0:1",
    "1:0",
    "0:",
    ":",
    "0:10000000000",
    "-1:2",
    "0:1:2",
    "²:3",
    "1e3",
]
OPTION_VALUES += [
    "value",
    "value_gap",
    "test_error",
    "store",
    "empty",
    "broken",
    "tiny.toml",
    "/proc/x",
    "/dev/null",
    "sweep",
    "both",
]


class Refused(Exception):
    """The command line was refused with a message."""


@st.composite
def cases(draw):
    """Return a case: a command, one or two words and up to two options."""
    command = draw(st.sampled_from(COMMANDS[:6]) | st.sampled_from(COMMANDS) | st.sampled_from(WORDS) | values.texts)
    words = [command, *draw(st.lists(st.sampled_from(WORDS) | values.texts, max_size=2))]
    for _ in range(draw(st.integers(0, 2))):
        words += [draw(st.sampled_from(OPTIONS)), draw(st.sampled_from(OPTION_VALUES))]
    return Case(f"bilevel {words}", lambda: _call(words), (), _complaint, own=Refused)


def _call(words):
    """Return the exit status and the output."""
    _prepare()
    said, status = io.StringIO(), 0
    with (
        mock.patch.object(sys, "argv", ["bilevel", *words]),
        contextlib.redirect_stderr(said),
        contextlib.redirect_stdout(said),
    ):
        try:
            cli.main()
        except SystemExit as end:
            status = end.code
    answer = status, said.getvalue()
    if status == 2 and _complaint(answer) is None:
        raise Refused(said.getvalue())
    return answer


def _prepare():
    for name in ("empty", "broken"):
        Path(name).mkdir(exist_ok=True)
    Path("tiny.toml").write_text(CONFIG, encoding="utf-8")
    Path("broken", "0123.parquet").write_bytes(b"PAR1 no table PAR1")
    Path("broken", "_x.toml").write_bytes(b"\xff = ")


def _complaint(answer):
    status, said = answer
    if status not in (0, 1, 2, None):
        return f"exit status {status!r}"
    if "Traceback" in said:
        return f"a traceback: {said[-300:]}"
    return None if status in (0, None) or said.strip() else f"exit status {status} without a word"
