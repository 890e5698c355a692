"""Write the table of docs/solvers.md from the solvers themselves.

python docs/solver_table.py            # print it
"""

import inspect
import re
import sys

import bilevel

HEADER = ("solver", "what it is", "cost and memory", "calls to ε", "setting", "F", "G")


def row(cls):
    """Return the cells of one solver, from the docstring of its file and what it carries."""
    text = inspect.getdoc(sys.modules[cls.__module__])
    title = text.split("\n")[0].split(": ", 1)[1].rstrip(".")
    cost = re.search(r"(Cost.*?)(\n\n|\Z)", text, flags=re.DOTALL).group(1).replace("\n", " ")
    proved = cls.complexity or ("", "", "", "")
    return (f"`{cls.__name__}`", title, cost, *proved)


def table():
    """Return the whole table in Markdown."""
    rows = [HEADER, ["---"] * len(HEADER), *(row(cls) for cls in bilevel.SOLVERS.values())]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in rows)


if __name__ == "__main__":
    print(table())
