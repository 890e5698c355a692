"""The studies under reports/reproduction: what they promise to measure, and pages that say what their CSV says."""

import importlib
import shutil
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "reports" / "reproduction"
COMMON = {"problem", "step_size", "outer_ratio", "status", "calls", "value", "hypergrad_norm_sq", "largest_x"}
COLUMNS = {
    "published": COMMON | {"kind", "difference", "variant", "seed", "quantity", "result"},
    "f2sa": COMMON | {"growth", "y_step", "x_step", "batches", "delta_0", "largest_z"},
    "cleaning": {"n_train", "n_val", "corruption", "C", "fit", "test_error", "validation_loss", "weight_auc", "h"},
}
SCRIPTS = {"published": "published", "f2sa": "f2sa_parts", "cleaning": "cleaning"}


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(ROOT / "benchmarks") in str(getattr(sys.modules[name], "__file__", "")):
            sys.modules.pop(name)


def run(script, name, folder, *arguments):
    module = script(SCRIPTS[name])
    script("studies").study(module.__doc__, name, module.parts, module.show, [*arguments, "--folder", str(folder)])
    return script("studies").read(folder / f"{name}.csv")


@pytest.mark.slow
@pytest.mark.parametrize("name", COLUMNS)
def test_a_quick_run_gives_the_promised_columns(script, tmp_path, name):
    rows = run(script, name, tmp_path, "--quick")
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
def test_pages_and_figures_are_drawn_again_from_what_is_kept(script, tmp_path, name):
    for ending in ("csv", "md"):
        shutil.copy(KEPT / f"{name}.{ending}", tmp_path)
    run(script, name, tmp_path, "--from-kept")
    first = (tmp_path / f"{name}.svg").read_bytes()
    run(script, name, tmp_path, "--from-kept")
    assert (tmp_path / f"{name}.md").read_text() == (KEPT / f"{name}.md").read_text()
    assert (tmp_path / f"{name}.svg").read_bytes() == first


def test_quick_numbers_cannot_replace_those_that_are_kept(script, capsys):
    with pytest.raises(SystemExit):
        script("studies").parse("A study.", ["--quick"])
    assert "give a --folder of your own" in capsys.readouterr().err


def test_every_claim_is_decided_with_a_command_and_evidence_that_exist():
    claims = tomllib.loads((KEPT / "claims_published.toml").read_text())["claim"]
    assert len({claim["id"] for claim in claims}) == len(claims) >= 9
    for claim in claims:
        assert set(claim) == {"id", "section", "claim", "verdict", "finding", "command", "evidence"}
        assert claim["verdict"] in {"confirmed", "not confirmed", "depends"}
        assert (ROOT / claim["command"].split()[1]).exists()
        assert (ROOT / claim["evidence"].split("#")[0]).exists()
