"""Write what the pages say of each solver from the solvers themselves, while the site is built.

python docs/solver_pages.py            # print the tables of docs/solvers.md
"""

import inspect
import re
import sys

from inserted import format_table

import bilevel
from bilevel._core.types import Calls
from bilevel.engine.loop import run_key
from bilevel.solvers import HostSolver

COSTS = ("solver", "asks for", "calls per step", "memory", "adaptive")
ORIGINS = ("solver", "what it is, from where", "year", "calls to ε", "proved for", "confidence")
# What the docstring of a solver's file must hold, and how it is found there. A year is no part of an arXiv number.
STATED = {
    "reference": r"\A[^\n]*\n\n(.+?)(?:\s*Confidence:|\n\n|\Z)",
    "year": r"\b((?:19|20)\d\d)\b(?!\.\d)",
    "calls per step": r"Cost:?\s+(.+?)\.?\s+Memory",
    "memory": r"Memory:?\s+(.+?)\.(?:\s|\Z)",
    "adaptive": r"Adaptive:\s+(.+?)\.(?:\s|\Z)",
    "confidence": r"Confidence:\s+(high|medium|low)\b",
}
MARKS = "<!-- costs of all solvers -->", "<!-- origins of all solvers -->", "<!-- reference of all solvers -->"


def describe(cls):
    """Return what a solver says of itself, by name; raise where something is missing."""
    text = inspect.getdoc(sys.modules[cls.__module__])
    found = {"title": text.split("\n")[0].split(": ", 1)[1].rstrip(".")}
    for name, pattern in STATED.items():
        match = re.search(pattern, found["reference"] if name == "year" else text, flags=re.DOTALL)
        if match is None:
            raise ValueError(f"`{cls.__name__}`: its file's docstring has no {name}; see docs/add-a-solver.md.")
        found[name] = " ".join(match[1].split())
    if cls.complexity is None:
        way_out = 'give `Complexity("none")` where nothing is proved.'
        raise ValueError(f"`{cls.__name__}`: `complexity` is missing; {way_out}")
    return found | {"proved": cls.complexity}


def ask(cls):
    """Return what a solver asks the oracles for at its defaults, from the calls that it counts."""
    problem = bilevel.problems.quadratic(10_007, 5_003, 2, 2)
    if issubclass(cls, HostSolver):
        steps = [bilevel.run(problem, cls(), max_steps=2, exact=False).calls]
    else:
        solver = cls().configure(problem)
        oracles = problem.oracles.with_batches(1, solver.sampling)
        draw = solver.draw(oracles, run_key(0), 0)
        steps = [solver.calls(oracles, draw, refresh) for refresh in {False, solver.refreshes(0, draw) is not None}]
    kinds = {kind for kind in Calls._fields if any(getattr(step, kind) for step in steps)}
    parts = {"gradients": True, "HVP": "hvp" in kinds, "JVP": "cross" in kinds, "values": "outer_value" in kinds}
    parts["full batches"] = any(count >= problem.n_outer for step in steps for count in step)
    return ", ".join(name for name, asked in parts.items() if asked)


def make_table(header, rows):
    """Return a table in Markdown, with escaped bars."""
    return format_table(header, [[cell.replace("|", "\\|") for cell in row] for row in rows])


def costs():
    """Return the table of what each solver asks for and costs."""
    rows = []
    for name, cls in bilevel.SOLVERS.items():
        found = describe(cls)
        rows.append((f"`{name}`", ask(cls), *(found[key] for key in ("calls per step", "memory", "adaptive"))))
    return make_table(COSTS, rows)


def origins():
    """Return the table of where each solver is from and what is proved of it."""
    rows = []
    for name, cls in bilevel.SOLVERS.items():
        found = describe(cls)
        proved, source = found["proved"], f"{found['title']}. {found['reference']}"
        smooth = f"; F {proved.outer}, G {proved.inner}" if proved.inner else ""
        rows.append((f"`{name}`", source, found["year"], proved.calls, proved.setting + smooth, found["confidence"]))
    return make_table(ORIGINS, rows)


def reference():
    """Return the entries of docs/reference/solvers.md, which mkdocstrings fills."""
    entry = "::: {0.__module__}.{0.__name__}\n    options:\n      members: false\n"
    return "\n".join(entry.format(cls) for cls in bilevel.SOLVERS.values())


def on_page_markdown(markdown, **_):
    """Put tables and entries in the place of their marks; MkDocs calls this for each page."""
    for mark, text in zip(MARKS, (costs, origins, reference), strict=True):
        markdown = markdown.replace(mark, text()) if mark in markdown else markdown
    return markdown


if __name__ == "__main__":
    print(costs(), origins(), sep="\n\n")
