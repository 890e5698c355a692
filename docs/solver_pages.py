"""Write what the pages say of each solver from the solvers themselves, while the site is built.

python docs/solver_pages.py            # print the table of docs/solvers.md
"""

import inspect
import re
import sys

import bilevel

HEADER = ("solver", "what it is", "cost and memory", "calls to ε", "setting", "F", "G")
TABLE, REFERENCE = "<!-- table of all solvers -->", "<!-- reference of all solvers -->"


def row(cls):
    """Return the cells of one solver, from the docstring of its file and what it carries."""
    text = inspect.getdoc(sys.modules[cls.__module__])
    title = text.split("\n")[0].split(": ", 1)[1].rstrip(".")
    cost = re.search(r"(Cost.*?)(\n\n|\Z)", text, flags=re.DOTALL).group(1).replace("\n", " ")
    proved = cls.complexity or ("", "", "", "")
    return (f"`{cls.__name__}`", title, cost, *proved)


def table():
    """Return the table of docs/solvers.md in Markdown."""
    rows = [HEADER, ["---"] * len(HEADER), *(row(cls) for cls in bilevel.SOLVERS.values())]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in rows)


def reference():
    """Return the entries of docs/reference/solvers.md, which mkdocstrings fills."""
    entry = "::: {0.__module__}.{0.__name__}\n    options:\n      members: false\n"
    return "\n".join(entry.format(cls) for cls in bilevel.SOLVERS.values())


def on_page_markdown(markdown, **_):
    """Put the table and the entries in the place of their marks; MkDocs calls this for each page."""
    for mark, text in ((TABLE, table), (REFERENCE, reference)):
        markdown = markdown.replace(mark, text()) if mark in markdown else markdown
    return markdown


if __name__ == "__main__":
    print(table())
