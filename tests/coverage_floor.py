"""Fail if a module has less line coverage than the floor, whatever the total.

python tests/coverage_floor.py .coverage.json     # `make coverage` writes this file
"""

import json
import sys
from pathlib import Path

FLOOR = 80  # percent of the lines of each module


def modules_below(report):
    """Return the coverage of the modules below the floor, from a JSON report of coverage.py."""
    found = {name: file["summary"]["percent_covered"] for name, file in report["files"].items()}
    return {name: percent for name, percent in sorted(found.items()) if percent < FLOOR}


if __name__ == "__main__":
    below = modules_below(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    sys.exit("\n".join(f"{name}: {percent:.1f} % is below {FLOOR} %" for name, percent in below.items()) or None)
