"""The page ``docs/reproduction.md`` with its claims, tables and figures, all made from kept results."""

import os
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Any

from bilevel._core.extras import require
from bilevel._core.files import replacing
from bilevel.bench.select import Section
from paper.audit import Claim, list_claims
from paper.contenders import part_table
from paper.figures import draw_part
from paper.markdown import escape, markdown_table
from paper.parts import PARTS, read_notice
from paper.protocol import read_kept

_HEAD = ["", "claim", "verdict", "what was found", "command", "evidence"]


def write_page(kept: Path, page: Path) -> list[Path]:
    """Draw the figures into the folder of kept results, write the page, and return the paths of what was written."""
    sections = read_kept(kept)
    drawn = [path for name, section in sections.items() if (path := draw_part(name, section, kept))]
    with replacing(page) as file:
        file.write(render(sections, kept, os.path.relpath(kept, page.parent)).encode())
    return [*drawn, page]


def render(sections: dict[str, Section], kept: Path, link: str) -> str:
    """Return the page in Markdown.

    Parameters
    ----------
    sections : results of each part, as :func:`paper.protocol.read_kept` returns them
    kept : folder with the claims that are kept next to the results
    link : relative path from the page to that folder
    """
    jinja2 = require("jinja2", "bench")
    options = {"undefined": jinja2.StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    # The output is Markdown and not HTML: names that come from files are passed through `escape` instead.
    loader = jinja2.PackageLoader("paper")
    template = jinja2.Environment(loader=loader, keep_trailing_newline=True, **options).get_template("page.md")
    claims = list_claims(sections, kept)
    tables = {group: _claims_table(list(own)) for group, own in groupby(claims, key=lambda one: one.group)}
    wall_times = kept / "wall_times.txt"
    given = {
        "parts": [_describe(name, section) for name, section in sections.items()],
        "claims": tables,
        "counts": {"confirmed": 0, "depends": 0, "not confirmed": 0} | Counter(one.verdict for one in claims),
        "link": link,
        "notice": read_notice(kept),
        "wall_times": wall_times.read_text(encoding="utf-8").strip() if wall_times.exists() else "",
    }
    return str(template.render(**given))


def _claims_table(claims: list[Claim]) -> str:
    rows = [[one.id, one.claim, one.verdict, one.finding, f"`{one.command}`", f"`{one.evidence}`"] for one in claims]
    return markdown_table(_HEAD, rows)


def _describe(name: str, section: Section) -> dict[str, Any]:
    found: dict[str, Any] = {"name": name, "title": PARTS[name].title}
    for phase in ("sweep", "timing"):
        rows = section.rows[section.rows["phase"] == phase]
        found[f"{phase}_cells"] = f"{rows['cell'].nunique():,}"
        found[f"{phase}_machine"] = escape(", ".join(sorted(set(rows["machine"].dropna())))) or "not run"
    return found | {"table": part_table(section, PARTS[name].draws)}
