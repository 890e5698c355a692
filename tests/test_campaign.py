"""The campaign counts what it tries, and fails where something is lost; each defect that it found has a test."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.campaign import __main__ as campaign
from benchmarks.campaign.table import Counter, Row, write

ROOT = Path(__file__).parents[1]


def test_a_case_that_raises_is_lost_and_told(capsys):
    counter = Counter("a fault", "done")
    for number in range(3):
        with counter.case(f"number {number}", weight=2):
            assert number != 1, "gone"
    assert counter.row() == Row("a fault", 6, 4, 2, "done")
    assert "LOST a fault, number 1: AssertionError('gone" in capsys.readouterr().err


def test_a_row_that_does_not_add_up_is_refused():
    with pytest.raises(ValueError, match="a fault: 3 tried, but 1 survived and 1 lost"):
        Row("a fault", 3, 1, 1, "done")


def test_the_table_sums_its_columns():
    lines = write([Row("one", 1200, 1200, 0, "x"), Row("other", 2, 1, 1, "y")]).splitlines()
    assert lines[2] == "| one | 1,200 | 1,200 | 0 | x |"
    assert lines[-1] == "| **all** | 1,202 | 1,201 | 1 | – |"


@pytest.mark.parametrize("lost", [0, 1])
def test_the_report_says_what_was_run_and_the_command_fails_where_something_was_lost(tmp_path, monkeypatch, lost):
    section = ModuleType("benchmarks.campaign.made_up", "Made up.\n\nMore.")
    section.rows = lambda seed, quick: [Row("a fault", 3, 3 - lost, lost, f"seed {seed}, quick {quick}")]
    monkeypatch.setitem(sys.modules, section.__name__, section)
    monkeypatch.setattr(campaign, "SECTIONS", ("made_up",))
    assert campaign.main(["--seed", "7", "--quick", "--rows", str(tmp_path / "made_up.json")]) == 0
    out = tmp_path / "below" / "page.md"
    assert campaign.main(["--quick", "--seed", "7", "--kept", str(tmp_path), "--out", str(out)]) == lost
    text = out.read_text()
    assert "## Made up\n" in text and "| a fault | 3 |" in text and "seed 7, quick True" in text
    assert f"python -m benchmarks.campaign --seed 7 --quick --out {out}" in text
    assert f"1 kinds of faults, 3 tried, {lost} lost" in text


def test_a_section_that_does_not_exist_is_refused(capsys):
    with pytest.raises(SystemExit):
        campaign.main(["--only", "no_such_section"])
    assert "'no_such_section' is not one of" in capsys.readouterr().err


def test_each_section_has_a_module_with_a_heading():
    for name in campaign.SECTIONS:
        source = (ROOT / "benchmarks" / "campaign" / f"{name}.py").read_text()
        assert source.startswith('"""') and "\ndef rows(seed, quick):" in source


def test_each_defect_names_a_test_that_exists():
    lines = [line for line in campaign.DEFECTS.read_text().splitlines() if line.startswith("| ")][2:]
    for line in lines:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", line)
        assert named, line
        for path, test in named:
            assert f"def {test}(" in (ROOT / path).read_text(), line
