"""Insert numbers of the reports into README.md and the pages.

    python docs/inserted.py

A page names the number or table that it needs in a comment: the text between ``<!-- inserted: NAME -->`` and
``<!-- end -->`` is replaced by what the function of that name returns. A test fails if a page differs from its report.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/performance.md")
_REGION = re.compile(r"(<!-- inserted: (\w+) -->)(\n?)[^<]*(<!-- end -->)")


def read_table(report, heading):
    """Return the rows of the first table below a heading, or below a line in bold, as dicts by column."""
    text = (ROOT / "reports" / report).read_text(encoding="utf-8")
    below = re.split(rf"^(?:#+ {heading}|\*\*{heading}\*\*)$", text, maxsplit=1, flags=re.MULTILINE)[1]
    lines = re.search(r"^\|.*\n(?:\|.*\n)+", below, re.MULTILINE).group().splitlines()
    names, _, *rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return [dict(zip(names, row, strict=True)) for row in rows]


def format_table(header, rows):
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [header, ["---"] * len(header), *rows])


def _read_steps():
    return read_table("performance.md", "Beside the field's reference")


def _read_default():
    lists = ("Sets used during development", "Later sets, used only once")
    return [row for name in lists for row in read_table("estimators.md", name) if row["model"] == "bilevel"]


def steps_with_reference():
    """The times per step of all solvers and problems, ours and those of the reference benchmark."""
    columns = "problem", "solver", "ours, best µs", "reference, best µs", "reference / ours, best"
    header = ["problem", "solver", "ours, µs", "reference, µs", "reference / ours"]
    return format_table(header, [[row[name] for name in columns] for row in _read_steps()])


def _read_plain():
    return read_table("performance.md", "Plain scripts")


def speed():
    """Two rows per problem: a plain script, and fused loops with how many times as long the reference takes."""
    found = {}
    for row in _read_plain():
        found.setdefault(f"{row['problem']}, plain", {})[row["solver"]] = row["plain, JAX 0.12"]
        found.setdefault(f"{row['problem']}, fused", {})
    for row in _read_steps():
        cell = f"{row['ours, best µs']} ({float(row['reference / ours, best']):.3g} ×)"
        found[f"{row['problem']}, fused"][row["solver"]] = cell
    solvers = list(next(iter(found.values())))
    rows = [[problem, *(cells[solver] for solver in solvers)] for problem, cells in found.items()]
    return format_table(["µs per step", *solvers], rows)


def plain_steps():
    """The times per step of a plain script with two versions of JAX, and with fused loops."""
    rows = _read_plain()
    return format_table(list(rows[0]), [list(row.values()) for row in rows])


def n_tables():
    return str(sum(int(row["sets"]) for row in _read_default()))


def n_better():
    return str(sum(int(row["better"]) for row in _read_default()))


def worst_table():
    """The largest increase of the test loss, such as 1.7 %."""
    return max((row["worst"].split(" (")[0].lstrip("+") for row in _read_default()), key=lambda text: float(text[:-2]))


def insert(text):
    """Return the text of a page with its regions filled from the reports."""
    return _REGION.sub(lambda found: found[1] + found[3] + globals()[found[2]]() + found[3] + found[4], text)


if __name__ == "__main__":
    for name in PAGES:
        path = ROOT / name
        path.write_text(insert(path.read_text(encoding="utf-8")), encoding="utf-8")
