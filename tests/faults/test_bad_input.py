"""Invalid input gives a result or a sentence that names the argument, and the judge recognizes what does not."""

import time

import numpy as np
import pytest

hypothesis = pytest.importorskip("hypothesis")

from bilevel._core.compilation import as_float_dtype  # noqa: E402
from bilevel.problems.checks import make_rng  # noqa: E402
from tests.faults import SEED, inputs, repeats  # noqa: E402
from tests.faults.bad_input.judge import Case, judge  # noqa: E402


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
def test_each_kind_of_outcome_is_recognized(kind, act, about):
    assert verdict(act, **about) == kind


def test_an_error_raised_by_c_code_in_the_library_is_not_a_refusal(monkeypatch):
    # The innermost frame belongs to the library, but no `raise` statement made the error.
    monkeypatch.setattr("bilevel.problems.checks.is_number", lambda value, kind: True)
    assert verdict(lambda: make_rng("a"), names=("a",)) == "raw"


def test_an_error_of_another_package_counts_as_a_refusal_only_if_the_case_allows_it():
    from sklearn.utils import check_array

    assert verdict(lambda: check_array([[np.nan]]), others=("sklearn",)) == "refused"
    assert verdict(lambda: check_array([[np.nan]])) == "raw"


@pytest.mark.slow
@pytest.mark.parametrize(("end", "kind"), [("os._exit(3)", "crashed"), ("time.sleep(60)", "hung")])
def test_a_process_that_crashes_or_hangs_gives_a_verdict(end, kind, monkeypatch, tmp_path):
    script = "import json, os, sys, time; print(json.dumps({'begun': 'x'}), flush=True); "
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nexec {inputs.sys.executable} -c "{script}{end}"\n')
    path.chmod(0o755)
    monkeypatch.setattr(inputs.sys, "executable", str(path))
    monkeypatch.setattr(inputs, "PATIENCE", 5)
    (found,) = inputs.collect("solvers", 0, 1)
    assert (found["kind"], found["what"]) == (kind, "x")


@pytest.mark.slow
@pytest.mark.parametrize("area", inputs.AREAS)
def test_generated_input_gives_a_result_or_a_sentence(area):
    many = inputs.AREAS[area]
    defects = inputs.describe_defects(inputs.judge_area(area, SEED, repeats(many // 20, many)))
    assert not defects, defects
