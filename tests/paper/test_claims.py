"""The list of theoretical claims names tests and files that exist."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CLAIMS = tomllib.loads((ROOT / "reports" / "reproduction" / "claims_theory.toml").read_text())["claim"]
KEYS = ["id", "section", "claim", "verdict", "finding", "command", "evidence"]


def functions(path):
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim["id"])
def test_a_claim_has_a_verdict_and_evidence_that_exists(claim):
    assert list(claim) == KEYS and all(claim.values())
    assert claim["verdict"] in ("confirmed", "not confirmed", "depends")
    assert (ROOT / claim["evidence"]).exists()
    if claim["command"].startswith("python "):
        assert claim["command"].startswith("python -m paper complexity --out ")
        return
    path, name = re.fullmatch(r"pytest (\S+)::(\w+)", claim["command"]).groups()
    assert name in functions(ROOT / path)


def test_claims_have_different_ids():
    assert len({claim["id"] for claim in CLAIMS}) == len(CLAIMS)


def test_every_slip_of_the_report_is_a_claim():
    report = (ROOT / "reports" / "theory.md").read_text().partition("## Slips of the paper")[2]
    rows = [line for line in report.split("\n") if line.startswith("| ") and "| printed |" not in line]
    slips = [claim for claim in CLAIMS if claim["id"].startswith("slip_")]
    assert len(slips) == len([row for row in rows if not row.startswith("| ---")]) > 15
