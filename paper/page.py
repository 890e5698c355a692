"""The page on the paper: claims, tables and figures, all of it from kept results."""

import os
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from bilevel._io import replacing
from bilevel._optional import require
from bilevel.bench.sections import Section
from paper.audit import Claim, list_claims
from paper.contenders import escape, markdown_table, part_table
from paper.figures import draw_part, is_grid
from paper.parts import PARTS
from paper.protocol import read_kept


def write_page(kept: Path, page: Path) -> list[Path]:
    """Draw the figures into the folder of kept results, write the page, and return all paths."""
    sections = read_kept(kept)
    drawn = [path for name, section in sections.items() for path in draw_part(name, section, kept)]
    with replacing(page) as file:
        file.write(render(sections, kept, os.path.relpath(kept, page.parent)).encode())
    return [*drawn, page]


def render(sections: dict[str, Section], kept: Path, link: str) -> str:
    """Return the page in Markdown; ``link`` leads from it to the kept results."""
    jinja2 = require("jinja2", "bench")
    options = {"undefined": jinja2.StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    # Markdown: names from files pass through `escape`.
    environment = jinja2.Environment(loader=jinja2.PackageLoader("paper"), keep_trailing_newline=True, **options)
    claims = list_claims(sections, kept)
    tables = {group: _claims_table(own) for group, own in groupby(claims, key=lambda one: one.group)}
    parts = [_describe(name, section) for name, section in sections.items()]
    counts = {
        verdict: sum(one.verdict == verdict for one in claims) for verdict in ("confirmed", "depends", "not confirmed")
    }
    template = environment.get_template("page.md")
    wall_times = kept / "wall_times.txt"
    wall = wall_times.read_text(encoding="utf-8").strip() if wall_times.exists() else ""
    return str(template.render(parts=parts, claims=tables, counts=counts, link=link, wall_times=wall))


def _claims_table(claims: Iterable[Claim]) -> str:
    head = ["", "claim", "verdict", "what was found", "command", "evidence"]
    rows = [[one.id, one.claim, one.verdict, one.finding, f"`{one.command}`", f"`{one.evidence}`"] for one in claims]
    return markdown_table(head, rows)


def _describe(name: str, section: Section) -> dict[str, Any]:
    rows = section.rows
    swept, timed = (rows[rows["phase"] == phase] for phase in ("sweep", "timing"))
    machines = {
        phase: ", ".join(sorted(set(own["machine"].dropna()))) for phase, own in (("sweep", swept), ("timing", timed))
    }
    return {
        "name": name,
        "is_grid": is_grid(section),
        "title": PARTS[name].title,
        "table": part_table(section, PARTS[name].draws),
        "cells": f"{swept['cell'].nunique():,}",
        "timed": f"{timed['cell'].nunique():,}",
        **{f"{phase}_machine": escape(machine) or "not run" for phase, machine in machines.items()},
    }
