"""The pages say what the code says."""

import dataclasses
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.linalg import lstsq
from scipy.optimize import approx_fprime

import bilevel
from bilevel._precision import arithmetic
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


def in_a_copy_of_the_package(folder, added, program):
    """Run a program where text was added to files, new or not; return what it prints."""
    for name in ("bilevel", "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path, text in added.items():
        with (folder / path).open("a") as file:
            file.write(text)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": "."}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_solver_is_one_file(tmp_path):
    file, _ = code_blocks("docs/add-a-solver.md")
    program = "import sys; sys.path.insert(0, 'docs'); import bilevel, solver_pages; print(solver_pages.table())"
    shown = in_a_copy_of_the_package(tmp_path, {"bilevel/solvers/heavy_ball.py": file}, program)
    assert shown.strip().split("\n")[-1].startswith("| `HeavyBall` | SOBA with a heavy ball")


def test_a_model_family_is_one_file_and_one_line(tmp_path):
    text = (ROOT / "docs/add-a-problem.md").read_text()
    (line,) = re.findall(r"^    (from bilevel\.problems\.shrinkage import .*)$", text, flags=re.MULTILINE)
    file, _ = code_blocks("docs/add-a-problem.md")
    added = {"bilevel/problems/shrinkage.py": file, "bilevel/problems/__init__.py": line}
    program = "import bilevel, numpy; print(bilevel.problems.shrinkage(numpy.ones((3, 2)), numpy.ones((3, 2))).name)"
    assert in_a_copy_of_the_package(tmp_path, added, program) == "shrinkage\n"


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


@pytest.fixture(scope="module")
def shrinkage(tmp_path_factory):
    file, usage = code_blocks("docs/add-a-problem.md")
    path = tmp_path_factory.mktemp("family") / "shrinkage.py"
    path.write_text(file)
    return load(path, "shrinkage"), usage


@pytest.fixture(scope="module")
def means():
    rng = np.random.default_rng(1)
    return 1 + rng.standard_normal((23, 3)), 0.5 + rng.standard_normal((17, 3))


def test_the_page_on_adding_a_problem_works_as_written(shrinkage, capsys):
    module, usage = shrinkage
    scope = {"shrinkage": module.shrinkage}
    exec(usage, scope)
    assert "certified: D_x is within" in capsys.readouterr().out
    assert scope["result"].status == "converged"
    hypergrad = scope["problem"].exact_solver(scope["result"].point.outer_var).hypergrad
    assert np.linalg.norm(hypergrad) <= scope["result"].certificate.hypergrad_norm_bound <= 1e-3


def test_the_family_of_the_page_has_the_derivatives_of_its_losses(shrinkage, means):
    problem = shrinkage[0].shrinkage(*means, dtype="float64")

    def outer_loss(z, x, row):
        return jnp.sum((z - row) ** 2) / 2

    def inner_loss(z, x, row):
        return outer_loss(z, x, row) + jnp.sum(jnp.exp(x) * z**2) / 2

    start = np.zeros(3)
    own = bilevel.BilevelProblem.from_losses(inner_loss, outer_loss, *means, start, start, dtype="float64")
    rng = np.random.default_rng(2)
    point = bilevel.Point(*rng.standard_normal((3, 3)))
    for name in ("direction", "inner", "outer", "inner_grad_outer", "inner_value", "outer_value"):
        with arithmetic(np.float64):
            cases.assert_trees_close(getattr(problem.oracles, name)(point), getattr(own.oracles, name)(point))


def test_the_family_of_the_page_is_solved_as_scipy_solves_it(shrinkage, means):
    train, validation = means
    problem, x = shrinkage[0].shrinkage(*means, dtype="float64"), np.array([-1.0, 0.3, 2.0])

    def h(x):
        rows = np.vstack([np.tile(np.eye(3), (len(train), 1)) / np.sqrt(len(train)), np.diag(np.exp(x / 2))])
        z = lstsq(rows, np.concatenate([train.ravel() / np.sqrt(len(train)), np.zeros(3)]))[0]
        return np.sum((validation - z) ** 2) / (2 * len(validation))

    solution = problem.exact_solver(x)
    assert solution.value == pytest.approx(h(x), abs=1e-13)
    assert solution.hypergrad == pytest.approx(approx_fprime(x, h, 1e-5), abs=1e-4)
    assert max(solution.inner_residual, solution.v_residual) < 1e-14


def test_the_constants_of_the_family_of_the_page_bound_every_difference_quotient(shrinkage, means):
    problem = shrinkage[0].shrinkage(*means, dtype="float64")
    known = problem.constants(radius=2.0, box=(-1, 1))
    sampled = dataclasses.replace(problem, find_constants=None).constants(radius=2.0, box=(-1, 1))
    assert sampled.how["L1_G"] == "estimate" and known.mu_G <= sampled.mu_G * (1 + 1e-9)
    for name in ("L0_F", "L1_F", "L2_F", "L1_G", "L2_G", "L3_G"):
        assert getattr(sampled, name) <= getattr(known, name) * (1 + 1e-9) + 1e-9, name


def test_certificates_of_the_family_of_the_page_hold_at_many_points(shrinkage, means):
    problem = shrinkage[0].shrinkage(*means, dtype="float64")
    certifier, rng = problem.certifier(), np.random.default_rng(3)
    for size in np.geomspace(1e-6, 10, 60):
        x = 2 * rng.standard_normal(3)
        solution = problem.exact_solver(x)
        z, v = (part + size * rng.standard_normal(3) for part in (solution.inner_var, solution.v))
        found = certifier(bilevel.Point(z, x, v))
        assert found.certified and np.isfinite(found.error_bound)
        assert np.linalg.norm(np.exp(x) * z * v - solution.hypergrad) <= found.error_bound
        assert np.linalg.norm(z - solution.inner_var) <= found.inner_distance_bound * (1 + 1e-9)
        assert np.linalg.norm(v - solution.v) <= found.v_distance_bound * (1 + 1e-9)


def test_the_readmes_examples_run(capsys):
    estimator, own_problem = code_blocks("README.md")
    exec(estimator, {})
    score, structure, *table = capsys.readouterr().out.split()
    assert float(score) > 0.9 and structure == "single" and "worst" in table
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


def test_the_example_of_the_page_on_estimators_runs(capsys):
    (example,) = code_blocks("docs/estimators.md")
    exec(example, {})
    printed = capsys.readouterr().out.strip().splitlines()
    page = (ROOT / "docs/estimators.md").read_text()
    assert [line for line in printed if line.rstrip() not in page] == []


@pytest.mark.slow
def test_the_neural_example_tells_clean_rows_from_corrupted_ones():
    command = [sys.executable, str(ROOT / "examples" / "neural_cleaning.py"), "--steps", "6000"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    errors = {line.split("  ")[0]: float(re.search(r"test error (\S+)", line)[1]) for line in lines}
    assert max(errors["SRBA"], errors["SRBA, auto"]) < errors["plain fit"] / 2
    assert float(re.search(r"SRBA.*AUC of the weights (\S+)", lines[-1])[1]) > 0.9


def test_the_report_on_the_theory_names_tests_that_exist():
    named = set(re.findall(r"`(test_[a-z_A-Z0-9]+)`", (ROOT / "reports" / "theory.md").read_text()))
    files = [*(ROOT / "tests" / "theory").glob("*.py"), *(ROOT / "tests" / "problems").glob("*.py")]
    assert len(named) > 10
    assert named <= set(re.findall(r"def (test_\w+)", "".join(file.read_text() for file in files)))
