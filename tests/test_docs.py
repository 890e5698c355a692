"""The pages agree with the code."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.linalg import lstsq
from scipy.optimize import approx_fprime

import bilevel
from bilevel._core.compilation import arithmetic
from bilevel.bench.config import load_config
from tests import cases
from tests.problems.sampling import sample_constants

ROOT = Path(__file__).parents[1]


def code_blocks(page):
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)


def load(path, name):
    """Load a script, which may import those next to it."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path.parent)
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def solver_pages():
    return load(ROOT / "docs" / "solver_pages.py", "solver_pages")


def table_rows(page, header):
    lines = page[page.index("| " + " | ".join(header)) :].partition("\n\n")[0].split("\n")[2:]
    return {cells[0].strip("`"): cells[1:] for cells in (line.strip("| ").split(" | ") for line in lines)}


def test_every_solver_states_reference_guarantees_cost_and_adaptivity(solver_pages):
    page = solver_pages.on_page_markdown((ROOT / "docs" / "solvers.md").read_text().replace(solver_pages.MARKS[0], ""))
    origins = table_rows(page, solver_pages.ORIGINS)
    assert list(origins) == list(bilevel.SOLVERS)
    assert all(len(cells) == 5 and all(cells[:3]) for cells in origins.values())
    assert {cells[-1] for cells in origins.values()} <= {"high", "medium", "low"}
    assert all(1950 < int(cells[1]) < 2100 for cells in origins.values())
    told = [solver_pages.describe(cls) for cls in bilevel.SOLVERS.values()]
    assert all(one[name] for one in told for name in solver_pages.STATED)


def test_the_table_of_bounds_agrees_with_the_rates_that_solvers_state():
    page = (ROOT / "docs" / "solvers.md").read_text()
    section = page.partition("## What is optimal, and what is open")[2].partition("\n## ")[0]
    rates = {name: re.findall(r"ε\^-[\d/]+(?:-1/p)?", cls.complexity.calls) for name, cls in bilevel.SOLVERS.items()}
    found = []
    for line in section.split("\n"):
        assumptions, bound, solvers, _ = line.strip("| ").split(" | ") if line.startswith("| ") else [""] * 4
        for name in set(re.findall(r"\w+", solvers)) & set(rates):
            # Some solvers also appear with full batches, for which they state no rate.
            if assumptions.startswith("full") == bilevel.SOLVERS[name].complexity.setting.startswith("full"):
                found.append(name)
                assert all(rate in bound for rate in rates[name][:1]), (name, bound)
    assert len(found) >= 20 and set(found) <= set(re.findall(r"\w+", section))
    assert {name for name, rate in rates.items() if rate} <= set(re.findall(r"\w+", section))


SECOND, EVERY = "gradients, HVP, JVP", "full batches"
ASKED = {"SOBA": SECOND, "SRBA": f"{SECOND}, {EVERY}", "F2SA": "gradients", "BOME": f"gradients, {EVERY}"}


def test_the_required_derivatives_of_a_solver_follow_from_its_calls(solver_pages):
    assert {name: solver_pages.ask(bilevel.SOLVERS[name]) for name in ASKED} == ASKED


@pytest.mark.slow
def test_the_page_on_solvers_lists_the_required_derivatives(solver_pages):
    rows = table_rows(solver_pages.costs(), solver_pages.COSTS)
    assert list(rows) == list(bilevel.SOLVERS) and all(len(cells) == 4 and all(cells) for cells in rows.values())
    known = ASKED | {"Exact": f"{SECOND}, values, {EVERY}", "DTFBO": f"{SECOND}, {EVERY}", "FSLA": SECOND}
    assert {name: rows[name][0] for name in known} == known


def test_a_solver_without_a_complete_header_fails_with_a_sentence(solver_pages, monkeypatch):
    soba = sys.modules[bilevel.SOBA.__module__]
    monkeypatch.setattr(soba, "__doc__", soba.__doc__.replace("Adaptive: nothing.", ""))
    with pytest.raises(ValueError, match=r"`SOBA`: its file's docstring has no adaptive"):
        solver_pages.describe(bilevel.SOBA)
    monkeypatch.setattr(bilevel.AmIGO, "complexity", None)
    with pytest.raises(ValueError, match=r"`AmIGO`: `complexity` is missing"):
        solver_pages.describe(bilevel.AmIGO)


def leaves():
    """Return the three lines of code of each answer on the page on choosing, by the anchor of its heading."""
    page = (ROOT / "docs" / "choosing.md").read_text().partition("## Besides")[0]
    parts = re.findall(r"^### (.+?)\n(.*?)(?=^### |\Z)", page, flags=re.MULTILINE | re.DOTALL)
    return {re.sub(r"[^\w ]", "", title).lower().replace(" ", "-"): text for title, text in parts}


def test_each_question_on_choosing_ends_in_a_leaf_with_three_lines_of_code():
    tree = (ROOT / "docs" / "choosing.md").read_text().partition("## Questions")[2].partition("`problem` below")[0]
    assert re.findall(r"\]\(#([\w-]+)\)", tree) == list(leaves())
    for text in leaves().values():
        (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
        assert len([line for line in code.split("\n") if line]) == 3


def in_a_copy_of_the_package(folder, added, program):
    """Run a program in a copy with text appended to files, and return its output."""
    for name in ("bilevel", "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path, text in added.items():
        with (folder / path).open("a") as file:
            file.write(text)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": "."}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_solver_is_one_file_and_its_name(tmp_path):
    file, *_ = code_blocks("docs/add-a-solver.md")
    program = "import sys; sys.path.insert(0, 'docs'); import bilevel, solver_pages; print(solver_pages.origins())"
    name = 'from bilevel.solvers.heavy_ball import HeavyBall\nSOLVERS["HeavyBall"] = HeavyBall\n'
    added = {"bilevel/solvers/heavy_ball.py": file, "bilevel/solvers/__init__.py": name}
    shown = in_a_copy_of_the_package(tmp_path, added, program)
    assert shown.strip().split("\n")[-1].startswith("| `HeavyBall` | SOBA with momentum on the outer variable")


def test_a_model_family_is_one_file_and_one_line(tmp_path):
    text = (ROOT / "docs/add-a-problem.md").read_text()
    (line,) = re.findall(r"^    (from bilevel\.problems\.shrinkage import .*)$", text, flags=re.MULTILINE)
    file, _ = code_blocks("docs/add-a-problem.md")
    added = {"bilevel/problems/shrinkage.py": file, "bilevel/problems/__init__.py": line}
    program = "import bilevel, numpy; print(bilevel.problems.shrinkage(numpy.ones((3, 2)), numpy.ones((3, 2))).name)"
    assert in_a_copy_of_the_package(tmp_path, added, program) == "shrinkage\n"


def test_the_page_on_adding_a_solver_works_as_written(tmp_path, capsys, monkeypatch):
    file, usage, compare = code_blocks("docs/add-a-solver.md")
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
    monkeypatch.chdir(tmp_path)
    (config,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/add-a-solver.md").read_text(), flags=re.DOTALL)
    (tmp_path / "mine.toml").write_text(config)
    monkeypatch.syspath_prepend(tmp_path)
    in_file = load_config(tmp_path / "mine.toml")
    exec(compare.replace('"epochs": 20', '"epochs": 1'), scope)
    rows = scope["store"].read()
    assert len(rows[rows["final"]]) == len(in_file.cells(512, 256)) == 2 * (9 + 3)


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
    sampled = sample_constants(problem, radius=2.0, box=(-1, 1))
    assert known.mu_G <= sampled["mu_G"] * (1 + 1e-9)
    for name in ("L0_F", "L1_F", "L2_F", "L1_G", "L2_G", "L3_G"):
        assert sampled[name] <= getattr(known, name) * (1 + 1e-9) + 1e-9, name


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


def test_the_stated_number_of_solvers_is_correct():
    count = len(set(bilevel.SOLVERS) - {"AutoSRBA"})  # which is of this library
    readme, index = (re.sub("<!--.*?-->", "", (ROOT / name).read_text()) for name in ("README.md", "docs/index.md"))
    assert f"{count} solvers from papers" in readme
    assert f"one of {count} algorithms" in index
    assert f"{count} published solvers" in (ROOT / "CHANGELOG.md").read_text()


def test_the_example_of_the_page_on_the_theory_runs(capsys):
    (example,) = code_blocks("docs/theory.md")
    exec(example, {})
    smoothness, how, rho, gamma = capsys.readouterr().out.split()
    assert how == "exact" and 0 < float(gamma) < float(rho) < 1 < float(smoothness) < 100


def test_the_page_on_networks_lists_the_solvers_that_accept_an_option():
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", (ROOT / "docs/networks.md").read_text(), flags=re.MULTILINE)
    told = {option: re.findall(r"`(\w+)`", solvers) for option, solvers in rows}
    compiled = {name: cls for name, cls in bilevel.SOLVERS.items() if issubclass(cls, bilevel.solvers.Solver)}
    assert told["`inner_optimizer`"] == [name for name, cls in compiled.items() if cls.needs_plain_step is None]
    assert told["losses with a `key`"] == [name for name, cls in compiled.items() if cls.needs_finite_sum]
    assert told["`outer_optimizer`"] == [name for name, cls in compiled.items() if cls.needs_plain_outer_step]


def test_the_example_of_the_page_on_certificates_runs(capsys):
    example, *descent = code_blocks("docs/certificates.md")
    exec(example, scope := {})
    status, sentence = capsys.readouterr().out.splitlines()
    bound = float(re.match(r"\|\|∇h\(x\)\|\| <= (\S+), certified", sentence)[1])
    assert status == "converged" and 0 < bound <= 0.01
    for block in descent:
        exec(block, scope)
    page = (ROOT / "docs/certificates.md").read_text()
    shown = textwrap.dedent(re.search(r"```\n\n((?:    .*\n)+)", page)[1])
    number = re.compile(r"-?\d[\d.]*(?:e-?\d+)?")
    printed = capsys.readouterr().out
    assert number.sub("", printed) == number.sub("", shown)
    ours, theirs = ([float(found) for found in number.findall(text)] for text in (printed, shown))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-8)  # the last gap is of rounding size


def test_the_page_on_implicit_differentiation_works_as_written():
    found = {}
    exec("\n".join(code_blocks("docs/implicit.md")), found)
    value, gradient, x = found["validation_loss"], found["gradient"], np.full(5, -2.0, np.float32)
    slopes = [float(value(x + 0.05 * unit) - value(x - 0.05 * unit)) / 0.1 for unit in np.eye(5, dtype=np.float32)]
    np.testing.assert_allclose(gradient, slopes, rtol=0.02, atol=2e-5)
    np.testing.assert_allclose(found["many"][1], gradient, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(found["hessian"], found["hessian"].T, rtol=1e-3, atol=1e-5)
    momentum = np.array([-0.1, 0.1], np.float32)
    losses = [
        found["loss_after"](
            found["train_loop"](found["state"], found["hyper"] | {"momentum": m}, found["batches"]), None
        )
        for m in momentum
    ]
    np.testing.assert_allclose(found["slopes"]["momentum"], (losses[1] - losses[0]) / 0.2, rtol=0.02)


def test_the_example_of_the_page_on_the_untuned_setting_runs(capsys):
    example = code_blocks("docs/auto.md")[0].replace("max_seconds=1", "max_steps=3000")
    exec(example, {"bilevel": bilevel, "problem": bilevel.problems.breast_cancer()})
    assert "preconditioner=low_rank" in capsys.readouterr().out


def test_the_config_of_the_page_on_the_benchmark_is_accepted(tmp_path):
    (text,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/benchmark.md").read_text(), flags=re.DOTALL)
    (tmp_path / "shown.toml").write_text(text)
    assert len(load_config(tmp_path / "shown.toml").cells(49_990, 91_701)) == 6 * 3


@pytest.mark.slow
def test_the_neural_example_separates_clean_rows_from_corrupted_ones():
    command = [sys.executable, str(ROOT / "examples" / "neural_cleaning.py"), "--steps", "6000"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    errors = {line.split("  ")[0]: float(re.search(r"test error (\S+)", line)[1]) for line in lines}
    assert max(errors["SRBA"], errors["AutoSRBA"]) < errors["plain fit"] / 2
    assert float(re.search(r"SRBA.*AUC of the weights (\S+)", lines[-1])[1]) > 0.9


def test_the_report_on_the_theory_names_tests_that_exist():
    named = set(re.findall(r"`(test_[a-z_A-Z0-9]+)`", (ROOT / "reports" / "theory.md").read_text()))
    files = [file for folder in ("theory", "problems", "paper") for file in (ROOT / "tests" / folder).glob("*.py")]
    assert len(named) > 10
    assert named <= set(re.findall(r"def (test_\w+)", "".join(file.read_text() for file in files)))


def test_printed_commands_name_tests_that_exist_and_that_also_run_without_64_bit_types():
    named = re.findall(r"`pytest (tests/\S+?\.py)::(\w+)`", (ROOT / "docs" / "reproduction.md").read_text())
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    (files,) = re.findall(r"^PRINTED := (.*)$", makefile, flags=re.MULTILINE)
    files = re.sub(r"\$\(addprefix (\S+?),(.*?)\)", expand_prefix, files).split()
    assert len(named) > 20 and {file for file, _ in named} == set(files)
    assert re.search(r"^\tJAX_ENABLE_X64=0 .* \$\(PRINTED\)$", makefile, flags=re.MULTILINE)
    assert all(f"def {test}(" in (ROOT / file).read_text() for file, test in named)


def expand_prefix(found):
    return " ".join(found[1] + name for name in found[2].split())


def test_the_readme_has_only_absolute_links_whose_targets_exist():
    """It is also the description on PyPI, where relative links are dead."""
    markdown = pytest.importorskip("readme_renderer.markdown", exc_type=ImportError)
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    repository = urls["Homepage"]
    assert all(url.startswith(repository) for name, url in urls.items() if name not in ("Documentation", "Paper"))
    links = re.findall(r'(?:href|src)="([^"]+)"', markdown.render((ROOT / "README.md").read_text()))
    assert all(link.startswith(("https://", "#")) for link in links)
    raw = repository.replace("https://github.com", "https://raw.githubusercontent.com")
    paths = [link.split("/main/")[1] for link in links if link.startswith((f"{repository}/blob/", f"{raw}/"))]
    assert len(paths) > 5 and [path for path in paths if not (ROOT / path).is_file()] == []


INSERTED = load(ROOT / "docs" / "inserted.py", "inserted")


@pytest.mark.parametrize("page", INSERTED.PAGES)
def test_numbers_that_a_page_takes_from_a_report_are_those_of_the_report(page):
    text = (ROOT / page).read_text()
    emptied = re.sub(r"(<!-- inserted: \w+ -->\n?)[^<]*?(\n?<!-- end -->)", r"\1?\2", text)
    assert emptied != text
    assert INSERTED.insert(emptied) == text
    # Python-Markdown ends a paragraph at a line that begins with a comment.
    assert not re.search(r"^ *<!-- inserted: \w+ -->.", text, flags=re.MULTILINE)


def test_every_inserted_text_is_on_a_listed_page():
    pages = {
        path.relative_to(ROOT).as_posix(): set(re.findall(r"<!-- inserted: (\w+) -->", path.read_text()))
        for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    }
    assert {page for page, names in pages.items() if names} == set(INSERTED.PAGES)
    assert set.union(*pages.values()) == set(INSERTED.TEXTS)


def test_cells_and_sentences_of_a_report_are_found_by_name(tmp_path, monkeypatch):
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports" / "a.md").write_text(
        "## Times\n\nIt took\n12 s.\n\n"
        "| set | model | s |\n| --- | --- | --- |\n| one | A | 1,200 s |\n| one | B | 3 s |\n\n"
        "| set | s |\n| --- | --- |\n| one | 5 |\n\n**Errors**\n\n| set | e |\n| --- | --- |\n| \\|x\\| | 0.1 |\n"
    )
    monkeypatch.setattr(INSERTED, "ROOT", tmp_path)
    assert INSERTED.cells("a.md", "Times", "s", "one / B", "one / A") == ["3 s", "1,200 s"]
    assert INSERTED.cells("a.md", "Times", "s", "one", which=1) == ["5"]
    assert INSERTED.column("a.md", "Times", "s") == [1200, 3]
    assert INSERTED.read_table("a.md", "Errors") == [{"set": r"\|x\|", "e": "0.1"}]
    assert INSERTED.quote("a.md", r"It took (\d+) s") == ("12",)
    for wrong in (lambda: INSERTED.cells("a.md", "Times", "s", "one"), lambda: INSERTED.quote("a.md", "(absent)")):
        with pytest.raises(ValueError, match="unpack"):  # not one row or one sentence
            wrong()


@pytest.mark.slow
def test_the_page_on_tasks_works_as_written(capsys):
    found = {}
    exec("\n".join(code_blocks("docs/tasks.md")), found)
    after = dict(re.findall(r"^([15]) (\S+)$", capsys.readouterr().out, flags=re.MULTILINE))
    assert float(after["5"]) < float(after["1"])
