"""Verdicts on synthetic results, the page from the kept results, and a quick run of everything."""

import json
import os
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from bilevel.bench.config import load_config
from bilevel.bench.select import make_sections
from bilevel.bench.store import Store
from paper.audit import CONFIRMED, DEPENDS, EXPERIMENTS, PAPER, REFUTED, list_claims
from paper.commands import app
from paper.contenders import good_share, median_by_setting, part_table
from paper.parts import PARTS, QUICK_NOTICE
from paper.protocol import read_kept, shrink

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "reports" / "reproduction"
METRICS = {"quadratic": "value_gap", "ijcnn1": "value", "cleaning": "validation_error"}
DRAWN = ("hypergrad_norm_sq", "test_error", "value", "value_gap", "validation_error")


def evaluations(solver, step, seed, phase, end, columns):
    """Yield four rows that decrease by equal factors from 1 to the end, a second and 100 calls apart."""
    fixed = {"experiment": "e", "problem": "quadratic", "problem_arguments": json.dumps({}), "solver": solver}
    fixed |= {"cell": f"{solver} {step} {seed} {phase} {columns}", "seed": seed, "phase": phase, "columns": columns}
    fixed |= {"status": "diverged" if np.isinf(end) else "out_of_budget", "param_step_size": step}
    fixed |= {"param_outer_ratio": 1.0, "machine": "m", "memory_bytes": 9.0 if solver == "SABA" else 1.0}
    last = 3
    for place in range(last + 1):
        value = max(end, 1e-30) ** (place / last) if np.isfinite(end) else 1.0
        cost = {"step": place, "calls": 100 * place, "epochs": float(place), "seconds": float(place)}
        yield fixed | dict.fromkeys(DRAWN, value) | cost | {"final": place == last}


def section(part, ends, wider=None, untuned=0.1):
    """Return a part in which the published setting of each solver ends at a value, and another one at twice that."""
    rows = []
    for solver, end in ends.items():
        for seed in (0, 1):
            for phase in ("sweep", "timing"):
                rows += evaluations(solver, 0.1, seed, phase, end, "published, wider")
            rows += evaluations(solver, 0.2, seed, "sweep", 2 * end, "published, wider")
            if wider:
                rows += evaluations(solver, 0.3, seed, "sweep", wider[solver], "wider")
                rows += evaluations(solver, 0.3, seed, "timing", wider[solver], "wider")
    for phase in ("sweep", "timing"):
        rows += evaluations("AutoSRBA", 0.7, 0, phase, untuned, "untuned")
    (made,) = make_sections(pd.DataFrame(rows), METRICS[part])
    return made


def verdict(number, part, ends, **more):
    (one,) = (claim for claim in EXPERIMENTS if claim.id == f"E{number}")
    assert one.part == part
    return one.find(section(part, ends, **more))[0]


AS_PAPER = {"SRBA": 1e-20, "SABA": 1e-18, "AmIGO": 1e-4, "StocBiO": 1e-3, "MRBO": 2e-3, "VRBO": 3e-3, "F2SA": 4e-3}


@pytest.mark.parametrize(
    ("number", "part", "changes", "expected"),
    [
        (1, "quadratic", {}, CONFIRMED),
        (1, "quadratic", {"SABA": 1e-3}, REFUTED),
        (2, "quadratic", {}, CONFIRMED),
        (2, "quadratic", {"SABA": 1e-12}, REFUTED),
        (3, "quadratic", {}, REFUTED),
        (3, "quadratic", {"MRBO": 1e-12}, REFUTED),
        (4, "quadratic", {"AmIGO": 0.5, "StocBiO": 0.4}, CONFIRMED),
        (4, "quadratic", {}, REFUTED),
        (5, "quadratic", {"SRBA": 1e-30, "SABA": 1e-14}, CONFIRMED),
        (5, "quadratic", {"SRBA": 1e-14, "SABA": 1e-30}, REFUTED),
        (6, "quadratic", {}, CONFIRMED),
        (6, "quadratic", {"VRBO": 1e-5}, REFUTED),
        (7, "ijcnn1", {}, CONFIRMED),
        (7, "ijcnn1", {"SRBA": 0.5}, REFUTED),
        (8, "ijcnn1", {}, CONFIRMED),
        (8, "ijcnn1", {"SRBA": 0.1, "AmIGO": 0.001}, REFUTED),
        (9, "ijcnn1", {}, CONFIRMED),
        (11, "ijcnn1", {}, CONFIRMED),
        (11, "ijcnn1", {"StocBiO": 1e-30}, REFUTED),
        (12, "ijcnn1", {}, REFUTED),
        (12, "ijcnn1", {"F2SA": np.inf}, CONFIRMED),
        (13, "cleaning", {}, CONFIRMED),
        (
            13,
            "cleaning",
            {"SRBA": 0.1011, "SABA": 0.1, "AmIGO": 0.11, "StocBiO": 0.11, "MRBO": 0.11, "VRBO": 0.12, "F2SA": 0.2},
            DEPENDS,
        ),
        (13, "cleaning", {"SRBA": 0.2}, REFUTED),
        (14, "cleaning", {}, REFUTED),
        (14, "cleaning", {"SABA": 1e-30, "SRBA": 1e-14}, CONFIRMED),
    ],
)
def test_a_verdict_follows_the_numbers(number, part, changes, expected):
    assert verdict(number, part, AS_PAPER | changes) == expected


def test_a_bias_is_confirmed_if_another_series_reduces_it():
    assert verdict(3, "quadratic", AS_PAPER, wider=AS_PAPER | {"VRBO": 1e-4}) == DEPENDS


def test_a_claim_that_holds_on_only_one_grid_depends():
    ends = AS_PAPER | {"SRBA": 0.5}
    assert verdict(7, "ijcnn1", ends, wider=ends | {"SRBA": 1e-25}) == DEPENDS


def test_good_settings_are_those_near_the_best():
    made = section("quadratic", AS_PAPER)
    (srba, *_) = (one for one in made.contenders if one.label == "SRBA (published)")
    assert sorted(median_by_setting(srba.swept, "value_gap")["median"]) == pytest.approx([1e-20, 2e-20])
    assert good_share(srba, "value_gap") == 1.0
    assert good_share(srba._replace(swept=srba.swept.assign(value=srba.swept["value_gap"])), "value") == 0.5


def test_a_table_has_a_row_for_each_contender_best_first():
    ends = AS_PAPER | {"F2SA": np.inf}
    lines = part_table(section("quadratic", ends), "hypergrad_norm_sq").splitlines()
    assert len(lines) == 2 + 2 * len(PAPER) + 1
    assert lines[2].startswith("| SRBA (published) | 1e-20 |") and "4 of 4" in lines[-1]


@pytest.mark.parametrize("name", PARTS)
def test_the_quick_form_has_every_published_solver_once(name):
    small = shrink(load_config(name), PARTS[name].little)
    assert [setting.solver for setting in small.settings] == [*PAPER, "AutoSRBA"]
    assert small.seeds == (0, 1)


def test_an_empty_folder_is_refused(tmp_path):
    shown = CliRunner().invoke(app, ["audit", "--kept", str(tmp_path)])
    assert shown.exit_code == 2 and "has no kept results" in " ".join(shown.output.split())


@pytest.mark.slow
def test_page_and_figures_come_from_the_kept_results_and_are_the_committed_ones(tmp_path):
    kept, page = tmp_path / "reports" / "reproduction", tmp_path / "docs" / "reproduction.md"
    shutil.copytree(KEPT, kept, ignore=shutil.ignore_patterns("*.svg"))
    done = CliRunner().invoke(app, ["reproduce", "--from-kept", "--kept", str(kept), "--page", str(page)])
    assert done.exit_code == 0, done.output
    assert page.read_text() == (ROOT / "docs" / "reproduction.md").read_text()
    drawn = {path.name for path in kept.glob("*.svg")}
    assert {f"{name}-paper.svg" for name in PARTS} == drawn <= {path.name for path in KEPT.glob("*.svg")}


@pytest.mark.slow
def test_every_claim_has_a_verdict_a_command_and_evidence_that_is_there():
    for claim in list_claims(read_kept(KEPT), KEPT):
        assert claim.verdict in (CONFIRMED, REFUTED, DEPENDS) and claim.finding
        assert claim.command.startswith(("python ", "pytest "))
        for path in claim.evidence.split(", "):
            assert (ROOT / path.partition("::")[0]).exists(), claim.id


@pytest.mark.slow
def test_the_kept_results_are_small_and_no_cell_is_lost():
    assert sum(path.stat().st_size for path in KEPT.parent.rglob("*") if path.is_file()) < 3e6
    rows = Store(KEPT).read("sweep")
    for name, size in {"quadratic": (32768, 1024), "ijcnn1": (49990, 91701), "cleaning": (20000, 5000)}.items():
        kept = rows[(rows["experiment"] == name) & rows["final"]]["solver"].value_counts()
        due = Counter({cell.id: cell.solver for cell in load_config(name).cells(*size)}.values())
        assert all(kept[solver] >= count for solver, count in due.items())


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("BILEVEL_DATA"), reason="BILEVEL_DATA names no folder with the data")
def test_the_quick_form_runs_everything(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["reproduce", "all", "--quick"])
    assert done.exit_code == 0, done.output
    page = (tmp_path / "results" / "reproduce-quick" / "page.md").read_text()
    assert all(part.title in page for part in PARTS.values()) and "E15" in page
    assert page.startswith(f"# Reproducing the paper\n\n**{QUICK_NOTICE}**\n\nAfter this page")
    shown = CliRunner().invoke(app, ["audit", "--kept", "results/reproduce-quick/kept"])
    assert shown.output.startswith(QUICK_NOTICE)
