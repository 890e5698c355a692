"""The judge of bad input tells a refusal from an accident, and a few inputs of each area end well."""

import re
import time

import numpy as np
import pytest

hypothesis = pytest.importorskip("hypothesis")

from benchmarks.campaign import inputs  # noqa: E402
from benchmarks.campaign.bad_input.judge import Case, judge  # noqa: E402
from bilevel._precision import as_float_dtype  # noqa: E402
from bilevel.problems.checks import make_rng  # noqa: E402


def verdict(act, **about):
    return judge(Case("what", act, **about), seconds=0.5).kind


def spin():
    while True:
        time.perf_counter()


@pytest.mark.parametrize(
    ("kind", "act", "about"),
    [
        ("result", lambda: make_rng(3), {}),
        ("refused", lambda: make_rng(-1), {"names": ("seed",)}),
        ("refused", lambda: make_rng(), {"names": ("seed",)}),
        ("vague", lambda: make_rng(-1), {"names": ("period",)}),
        ("raw", lambda: np.zeros(-1), {}),
        ("raw", lambda: as_float_dtype("f4").names[0], {}),
        ("nonsense", lambda: np.nan, {"check": lambda value: "it is NaN" if np.isnan(value) else None}),
        ("hung", spin, {}),
    ],
)
def test_what_becomes_of_an_input_is_told(kind, act, about):
    assert verdict(act, **about) == kind


def test_what_c_code_raises_in_the_library_is_no_refusal(monkeypatch):
    # The innermost frame is of the library, but no `raise` of it made the error.
    monkeypatch.setattr("bilevel.problems.checks.is_number", lambda value, kind: True)
    assert verdict(lambda: make_rng("a"), names=("a",)) == "raw"


def test_the_refusal_of_another_package_counts_only_where_it_may():
    from sklearn.utils import check_array

    assert verdict(lambda: check_array([[np.nan]]), others=("sklearn",)) == "refused"
    assert verdict(lambda: check_array([[np.nan]])) == "raw"


@pytest.mark.slow
def test_a_process_that_dies_or_hangs_is_a_verdict(monkeypatch, tmp_path):
    script = "import json, os, sys, time; print(json.dumps({'begun': 'x'}), flush=True); "
    for end, kind in (("os._exit(3)", "crashed"), ("time.sleep(60)", "hung")):
        path = tmp_path / "python"
        path.write_text(f'#!/bin/sh\nexec {inputs.sys.executable} -c "{script}{end}"\n')
        path.chmod(0o755)
        with monkeypatch.context() as patch:
            patch.setattr(inputs.sys, "executable", str(path))
            patch.setattr(inputs, "PATIENCE", 5)
            (found,) = inputs.collect("solvers", 0, 1)
        assert (found["kind"], found["what"]) == (kind, "x")


def test_inputs_that_are_drawn_twice_count_once_and_the_note_counts_them(monkeypatch):
    def collect(area, seed, cases):
        yield from ({"kind": "refused" if k % 2 else "result", "what": str(k)} for k in range(seed, seed + cases))

    monkeypatch.setattr(inputs, "collect", collect)
    monkeypatch.setattr(inputs, "AREAS", {"solvers": ("constructors", 600)})
    (row,) = inputs.rows(0, quick=False)
    assert (row.tried, row.survived, row.lost) == (600, 600, 0)
    assert re.match(r"300 refused .* 300 with a result", row.note)


@pytest.mark.slow
def test_a_few_inputs_end_in_a_result_or_a_sentence():
    found = inputs.judge_area("solvers", 0, 100)
    assert len(found) == 100 and [verdict for verdict in found if verdict["kind"] not in inputs.FINE] == []
