"""The report on fault injection names tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_each_defect_of_the_report_names_a_test_that_exists():
    defects = (ROOT / "reports" / "campaign.md").read_text().partition("## Defects")[2]
    lines = [line for line in defects.splitlines() if line.startswith("| ")][2:]
    assert len(lines) > 30
    for line in lines:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", line)
        assert named, line
        for path, test in named:
            assert f"def {test}(" in (ROOT / path).read_text(), line
