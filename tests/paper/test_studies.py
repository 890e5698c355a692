"""The studies measure what they promise, and the pages in reports/reproduction agree with their CSV files."""

import shutil
import tomllib
from pathlib import Path

import pytest

from paper.studies import cleaning, common, f2sa_parts, published

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "reports" / "reproduction"
COMMON = {"problem", "step_size", "outer_ratio", "status", "calls", "value", "hypergrad_norm_sq", "largest_x"}
COLUMNS = {
    "published": COMMON | {"kind", "difference", "variant", "seed", "quantity", "result"},
    "f2sa": COMMON | {"growth", "y_step", "x_step", "batches", "delta_0", "largest_z"},
    "cleaning": {"n_train", "n_val", "corruption", "C", "fit", "test_error", "validation_loss", "weight_auc", "h"},
}
STUDIES = {"published": published, "f2sa": f2sa_parts, "cleaning": cleaning}


def run(name, folder, *arguments):
    module = STUDIES[name]
    common.study(module.__doc__, name, module.parts, module.show, [*arguments, "--folder", str(folder)])
    return common.read(folder / f"{name}.csv")


@pytest.mark.slow
@pytest.mark.parametrize("name", COLUMNS)
def test_a_quick_run_gives_the_promised_columns(tmp_path, name):
    rows = run(name, tmp_path, "--quick")
    assert COLUMNS[name] == COLUMNS[name] & set(rows[0])
    assert (tmp_path / f"{name}.svg").stat().st_size > 10_000
    assert "| --- |" in (tmp_path / f"{name}.md").read_text()
    if name == "published":
        apart = {row["variant"]: row["result"] for row in rows if row["quantity"] == "distance of two seeds"}
        assert apart["as published"] == 0 < apart["as stated"]
        biases = {row["variant"]: row["result"] for row in rows if row["quantity"] == "relative bias of D"}
        assert biases["as stated"] < 1e-12 < 1e-4 < biases["re-reads"]


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.slow
def test_pages_and_figures_are_those_of_the_kept_results(tmp_path, name):
    for ending in ("csv", "md"):
        shutil.copy(KEPT / f"{name}.{ending}", tmp_path)
    run(name, tmp_path, "--from-kept")
    first = (tmp_path / f"{name}.svg").read_bytes()
    run(name, tmp_path, "--from-kept")
    assert (tmp_path / f"{name}.md").read_text() == (KEPT / f"{name}.md").read_text()
    assert (tmp_path / f"{name}.svg").read_bytes() == first


def test_quick_results_cannot_replace_the_kept_ones(capsys):
    with pytest.raises(SystemExit):
        common.parse("A study.", ["--quick"])
    assert "pass another --folder" in capsys.readouterr().err


def test_every_claim_has_a_verdict_a_command_and_evidence_that_exist():
    claims = tomllib.loads((KEPT / "claims_published.toml").read_text())["claim"]
    assert len({claim["id"] for claim in claims}) == len(claims) >= 9
    for claim in claims:
        assert set(claim) == {"id", "section", "claim", "verdict", "finding", "command", "evidence"}
        assert claim["verdict"] in {"confirmed", "not confirmed", "depends"}
        module = claim["command"].removeprefix("python -m ").replace(".", "/")
        assert (ROOT / f"{module}.py").exists()
        assert (ROOT / claim["evidence"].split("#")[0]).exists()
