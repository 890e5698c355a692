"""The pages say what the code says."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import bilevel
from bilevel.bench.config import load_config
from tests import cases

ROOT = Path(__file__).parents[1]


def code_blocks(page):
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)


def load(path, name):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_on_solvers_has_a_row_for_each():
    page = load(ROOT / "docs" / "solver_pages.py", "solver_pages").on_page_markdown(
        (ROOT / "docs" / "solvers.md").read_text()
    )
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (Cost.+? Memory.+?) \|", page, flags=re.MULTILINE)
    assert [name for name, _, _ in rows] == list(bilevel.SOLVERS)
    assert "| finite sum | C^{2,2} | C^{3,3} |" in page


def test_table_1_of_the_paper_is_carried_by_its_seven_solvers():
    proved = {name for name, cls in bilevel.SOLVERS.items() if cls.complexity is not None}
    assert proved == {"StocBiO", "AmIGO", "MRBO", "VRBO", "SABA", "F2SA", "SRBA"}
    assert bilevel.SRBA.complexity.calls == "O((n+m)^1/2 ε^-1)"


def test_the_page_on_adding_a_solver_works_as_written(tmp_path, capsys):
    file, usage = code_blocks("docs/add-a-solver.md")
    (tmp_path / "heavy_ball.py").write_text(file)
    module = load(tmp_path / "heavy_ball.py", "heavy_ball")
    scope = {"HeavyBall": module.HeavyBall}
    exec(usage, scope)
    assert "HeavyBall(step_size=0.1" in capsys.readouterr().out
    history = scope["result"].history
    assert history["hypergrad_norm_sq"][-1] < history["hypergrad_norm_sq"][0] / 10
    first = bilevel.run(cases.quadratic(), module.HeavyBall(0.05, 20.0, 8), max_steps=1)
    same = bilevel.run(cases.quadratic(), bilevel.SOBA(0.05, 20.0, 8), max_steps=1)
    cases.assert_trees_close(first.point, same.point)


def test_the_readmes_examples_run(capsys):
    estimator, own_problem = code_blocks("README.md")
    exec(estimator, {})
    score, status, *penalties, shrinkage = capsys.readouterr().out.replace("[", " ").replace("]", " ").split()
    assert float(score) > 0.9 and status == "converged" and len(penalties) == 30
    assert float(shrinkage) == 1
    exec(own_problem.replace("max_seconds=5", "max_steps=2000"), {})
    assert "out_of_budget" in capsys.readouterr().out


def test_the_example_of_the_page_on_problems_runs(capsys):
    (example,) = code_blocks("docs/problems.md")
    exec(example, {})
    error, auc = map(float, capsys.readouterr().out.split())
    assert error < 0.2 and auc > 0.8


def test_the_example_of_the_page_on_the_theory_runs(capsys):
    (example,) = code_blocks("docs/theory.md")
    exec(example, {})
    smoothness, how, rho, gamma = capsys.readouterr().out.split()
    assert how == "exact" and 0 < float(gamma) < float(rho) < 1 < float(smoothness) < 100


def test_the_example_of_the_page_on_certificates_runs(capsys):
    (example,) = code_blocks("docs/certificates.md")
    exec(example, {})
    status, sentence = capsys.readouterr().out.splitlines()
    bound = float(re.match(r"\|\|∇h\(x\)\|\| <= (\S+), certified", sentence)[1])
    assert status == "converged" and 0 < bound <= 0.01


def test_the_example_of_the_page_on_the_untuned_setting_runs(capsys):
    example = code_blocks("docs/auto.md")[0].replace("max_seconds=1", "max_steps=300")
    exec(example, {"bilevel": bilevel, "problem": bilevel.problems.breast_cancer()})
    assert "preconditioner=diagonal" in capsys.readouterr().out


def test_the_config_of_the_page_on_the_benchmark_is_accepted(tmp_path):
    (text,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/benchmark.md").read_text(), flags=re.DOTALL)
    (tmp_path / "shown.toml").write_text(text)
    assert len(load_config(tmp_path / "shown.toml").cells(49_990, 91_701)) == 6 * 3


@pytest.mark.slow
def test_the_neural_example_tells_clean_rows_from_corrupted_ones():
    command = [sys.executable, str(ROOT / "examples" / "neural_cleaning.py"), "--steps", "6000"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    errors = {line.split("  ")[0]: float(re.search(r"test error (\S+)", line)[1]) for line in lines}
    assert max(errors["SRBA"], errors["SRBA, auto"]) < errors["plain fit"] / 2
    assert float(re.search(r"SRBA.*AUC of the weights (\S+)", lines[-1])[1]) > 0.9


def test_the_page_on_the_theory_names_tests_that_exist():
    named = set(re.findall(r"`(test_[a-z_A-Z0-9]+)`", (ROOT / "docs" / "theory.md").read_text()))
    files = [*(ROOT / "tests" / "theory").glob("*.py"), *(ROOT / "tests" / "problems").glob("*.py")]
    assert len(named) > 10
    assert named <= set(re.findall(r"def (test_\w+)", "".join(file.read_text() for file in files)))
