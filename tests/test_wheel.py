"""The wheel in a new environment: README and pages run as written, and the command line works.

All tests are slow, because they create and fill an environment.
"""

import importlib.util
import os
import re
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import jedi
import numpy as np
import parso
import pytest

import bilevel
from tests import test_types, wheel

pytestmark = pytest.mark.slow

# The blocks and the commands of the README are the steps of a new user.
PAGES = sorted(
    str(path.relative_to(wheel.ROOT))
    for path in (wheel.ROOT / "docs").rglob("*.md")
    if "```python" in path.read_text() or wheel.commands(path)
)
A_RUN = "import bilevel as b; b.run(b.problems.quadratic(60, 40, 5, 3), b.SOBA(batch_size=10), max_steps=1)"
PATIENCE = 1200  # seconds to wait for another worker
IMPORTS = "import jax\nimport numpy as np\n\nimport bilevel\n"
DATA = IMPORTS + "X = np.random.default_rng(0).standard_normal((60, 3))\ny = np.where(X[:, 0] > 0, 1, -1)\n"
READY = "problem = bilevel.problems.breast_cancer()\n"
# Variables that a page assumes: a problem of the reader, rows.
GIVEN = {
    "docs/auto.md": IMPORTS + READY,
    "docs/choosing.md": DATA + READY,
    "docs/scale.md": DATA
    + READY
    + "X_train, X_val, y_train, y_val, solver = X, X, y, y, bilevel.SOBA(batch_size=8)\n"
    + "jax.distributed.initialize = lambda: None  # one process; two are in test_two_processes.py\n",
    "docs/solvers.md": IMPORTS + READY,
}
# Files that the reader of a page writes, each a separate block.
FILES = {"docs/add-a-solver.md": {"heavy_ball.py": ("python", 0), "mine.toml": ("toml", 0)}}
# Assertions after a block of a page, by its position, in the same process.
CHECKS = {
    "docs/choosing.md": {
        0: "assert model.score(X, y) > 0.9",
        **dict.fromkeys((1, 3, 4, 5), "values = result.history['value']\nassert values[-1] < values[0]"),
        2: "values = result.history['outer_value']\nassert values[-1] < values[0]",
        **dict.fromkeys((6, 7), "values = best.history['value']\nassert values[-1] < values[0]"),
    },
    "docs/networks.md": {
        0: "before, after = result.history['outer_value'][[0, -1]]\nassert after < 0.8 * before",
        4: "assert found.residual < 1e-9",
    },
    "docs/problems.md": {
        0: "assert result.history['test_error'][-1] < 0.2 and result.history['weight_auc'][-1] > 0.8",
        1: "assert images.shape == (10, 8, 8) and abs(images).max() < 1e6",
        2: "assert penalties[0] < 0.3 * penalties[1:].min()\n"
        "assert np.linalg.norm(coef - truth) < 0.3 * np.linalg.norm(truth)",
    },
    "docs/quick-start.md": {
        0: "assert result.status == 'out_of_budget'\nassert result.history['value'][-1] < result.history['value'][0]",
        2: "assert result.status == 'out_of_budget'\nassert result.history['value'][-1] < result.history['value'][0]",
    },
    "docs/scale.md": {
        2: "import numpy\nalone = bilevel.run(problem, solver, max_steps=10_000)\n"
        "for one, other in zip(result.point, alone.point):\n"
        "    numpy.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)",
    },
}
SHOWN = ("docs/estimators.md",)  # pages with all that their code prints
# Commands of a checkout, of other tests, or of days; all others are run.
NOT_RUN = r"make |pip install |python (?:examples|benchmarks)/|python -m paper |XLA_FLAGS="


def made_once(factory, name, make):
    """Return the folder that ``make`` fills, which all workers share; the first one creates it."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    done, deadline = folder.with_suffix(".done"), time.monotonic() + PATIENCE
    try:
        folder.mkdir()
    except FileExistsError:
        while not done.exists():
            assert time.monotonic() < deadline, f"another worker does not finish {folder}"
            time.sleep(1)
    else:
        make(folder)
        done.touch()
    return folder


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    (path,) = made_once(tmp_path_factory, "wheel", wheel.build_wheel).glob("*.whl")
    return path


def in_haste(programs):
    """Compile programs once for all pages, with the fast settings of the other tests."""
    kept = {name: os.environ[name] for name in ("XLA_FLAGS", "OMP_NUM_THREADS") if name in os.environ}
    return kept | {"JAX_COMPILATION_CACHE_DIR": str(programs.parent / "programs")}


def filled(folder, *wanted):
    return wheel.make_environment(folder, *wanted, in_haste=True)


@pytest.fixture(scope="session")
def minimal(built, tmp_path_factory):
    """Return the programs of an environment with only the wheel."""
    return made_once(tmp_path_factory, "minimal", lambda folder: filled(folder, built)) / "bin"


@pytest.fixture(scope="session")
def whole(built, tmp_path_factory):
    """Return the programs of an environment with the wheel, all extras, and DuckDB, which a page uses."""
    wanted = f"{built}[all]", "duckdb"
    return made_once(tmp_path_factory, "whole", lambda folder: filled(folder, *wanted)) / "bin"


def test_the_wheel_contains_every_module_config_and_template_and_nothing_else(built):
    with zipfile.ZipFile(built) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    package = wheel.ROOT / "bilevel"
    expected = {str(path.relative_to(wheel.ROOT)) for path in package.rglob("*") if path.is_file()}
    assert held == {name for name in expected if "__pycache__" not in name}


def test_wheel_and_sdist_pass_the_checks_of_pypi(tmp_path):
    for module in ("build", "twine"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed: pip install -e '.[dev]'")
    source = tmp_path / "source"
    source.mkdir()
    wheel.call(sys.executable, "-m", "build", "--outdir", tmp_path / "dist", wheel.copy_source(source))
    files = sorted((tmp_path / "dist").iterdir())
    assert [file.suffix for file in files] == [".whl", ".gz"]
    assert "PASSED" in wheel.call(sys.executable, "-m", "twine", "check", "--strict", *files)
    with tarfile.open(files[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"CHANGELOG.md", "LICENSE", "bilevel/bench/configs/demo.toml", "tests/test_wheel.py"} <= names
    assert not any(name.startswith("paper") for name in names)


def test_with_the_wheel_alone_the_library_works_and_the_command_line_names_its_extra(minimal, tmp_path):
    shown = wheel.call(minimal / "bilevel", "--help", cwd=tmp_path)
    assert "pip install 'bilevel[bench]'" in shown and "Traceback" not in shown
    assert "pip install 'bilevel[bench]'" in wheel.call(minimal / "bilevel", "run", "demo", cwd=tmp_path, code=2)
    assert wheel.call(minimal / "bilevel", "--version", cwd=tmp_path) == f"bilevel {bilevel.__version__}\n"
    assert "extra bench: " in wheel.call(minimal / "bilevel", "doctor", cwd=tmp_path)
    wheel.call(minimal / "python", "-c", "from bilevel import *; SRBA, run, plot", cwd=tmp_path)
    _, own_losses, _ = wheel.blocks("README.md", "python")
    (tmp_path / "own.py").write_text(own_losses)
    assert float(wheel.call(minimal / "python", "own.py", cwd=tmp_path, **in_haste(minimal))) == pytest.approx(
        0.95, abs=0.005
    )


@pytest.mark.parametrize(
    ("program", "extra"),
    [
        ("import bilevel.estimators; bilevel.estimators.BilevelRidge", "estimators"),
        ("import bilevel; bilevel.problems.breast_cancer()", "data"),
        ("import bilevel; bilevel.benchmark('demo', 'store')", "bench"),
        (f"{A_RUN}.plot()", "plot"),
        (f"{A_RUN}.to_dataframe()", "bench"),
    ],
)
def test_a_missing_library_is_named_with_its_extra(minimal, tmp_path, program, extra):
    caught = f"try:\n    {program}\nexcept ImportError as error:\n    print(error)\n"
    (tmp_path / "program.py").write_text(caught)
    assert f"pip install 'bilevel[{extra}]'" in wheel.call(minimal / "python", "program.py", cwd=tmp_path)


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_a_page_runs_as_written_from_the_wheel(whole, tmp_path, page):
    python, written = wheel.blocks(page, "python"), FILES.get(page, {})
    for name, (language, place) in written.items():
        (tmp_path / name).write_text(wheel.blocks(page, language)[place])
    own = in_haste(whole)
    for line in wheel.commands(page):
        if not re.match(NOT_RUN, line):
            path = f"{whole}:/usr/bin:/bin"
            wheel.call("/bin/sh", "-ec", line.replace("run demo", "run smoke"), cwd=tmp_path, PATH=path, **own)
    checks = CHECKS.get(page, {})
    assert checks.keys() <= set(range(len(python)))
    checked = [f"{block}\n{checks.get(place, '')}" for place, block in enumerate(python)]
    (tmp_path / "page.py").write_text("\n".join([GIVEN.get(page, ""), *checked]))
    printed = wheel.call(whole / "python", "page.py", cwd=tmp_path, **own)
    if page in SHOWN:
        text = (wheel.ROOT / page).read_text()
        assert [line for line in printed.splitlines() if line.rstrip() not in text] == []
    for text in wheel.blocks(page, "toml"):
        (tmp_path / "block.toml").write_text(text)
        wheel.call(
            whole / "python", "-c", "import bilevel.bench.config as c; c.load_config('block.toml')", cwd=tmp_path
        )


@pytest.fixture(scope="session")
def with_extra(built, tmp_path_factory):
    """Return a function that returns the programs of an environment with the wheel and one extra."""
    return lambda extra: (
        made_once(tmp_path_factory, f"only-{extra}", lambda folder: filled(folder, f"{built}[{extra}]")) / "bin"
    )


def test_the_code_of_the_wheel_is_run(whole, tmp_path):
    shown = wheel.call(whole / "python", "-c", "import bilevel; print(bilevel.__file__)", cwd=tmp_path)
    assert shown.startswith(str(whole.parent))


def test_type_checkers_and_editors_see_the_names_of_the_installed_wheel(minimal, tmp_path):
    python = minimal / "python"
    assert test_types.check(tmp_path, test_types.PROGRAM, python).startswith("Success")
    shown = test_types.check(tmp_path, "\n".join(["import bilevel", *test_types.MISTAKES]), python)
    assert all(message in shown for message in test_types.MISTAKES.values()), shown
    assert f"Found {len(test_types.MISTAKES)} errors" in shown
    assert test_types.mistakes_by_pyright(tmp_path, python) == list(test_types.MISTAKES)
    project = jedi.Project(str(tmp_path), environment_path=str(python), load_unsafe_extensions=False)
    names = jedi.Script("import bilevel\nbilevel.SR", project=project).complete(2, len("bilevel.SR"))
    (srba,) = [found for found in names if found.name == "SRBA"]
    assert str(srba.infer()[0].module_path).startswith(str(minimal.parent))
    for module in (jedi, parso):  # as in a notebook, whose kernel runs in the environment of the wheel
        (tmp_path / module.__name__).symlink_to(Path(module.__file__).parent)
    (tmp_path / "complete.py").write_text(
        "import bilevel, jedi\n"
        "(signature,) = jedi.Interpreter('bilevel.SRBA(', [{'bilevel': bilevel}]).get_signatures()\n"
        "print(*(parameter.name for parameter in signature.params))\n"
    )
    completed = wheel.call(python, "complete.py", cwd=tmp_path).split()
    assert {"step_size", "outer_ratio", "batch_size", "period"} <= set(completed)


def test_each_step_of_a_new_user_needs_one_extra_and_about_a_minute_and_prints_the_output_in_the_readme(
    minimal, with_extra, tmp_path
):
    from benchmarks.new_user import STEPS, take_step

    text = (wheel.ROOT / "README.md").read_text()
    assert "pip install 'bilevel[estimators]'" in text and "With the extra `bench`, the demo is a command" in text
    environments = with_extra("estimators"), minimal, with_extra("bench")

    assert [line for line in wheel.commands("README.md") if not re.match(NOT_RUN, line)] == [
        "bilevel run demo --store results/demo && bilevel report results/demo --out results"
    ]
    taken = {step: take_step(programs, step, tmp_path) for step, programs in zip(STEPS, environments, strict=True)}
    # Processor seconds, because the machine may be busy. The report has the numbers.
    assert max(of_processors for _, (_, of_processors) in taken.values()) < 100, taken
    estimator, own_losses, benchmark = (printed for printed, _ in taken.values())
    assert "".join(f"    {line}\n" for line in estimator.splitlines()) in text
    theirs, ours = map(float, estimator.split()[:2])
    assert ours < 0.98 * theirs
    assert float(own_losses) == pytest.approx(0.95, abs=0.005)
    assert list((tmp_path / "results").glob("*.html")), benchmark


def test_one_penalty_for_all_features_gives_the_error_in_the_readme():
    _, own_losses, _ = wheel.blocks("README.md", "python")
    names = {}
    exec(own_losses.partition("\n\n\ndef")[0], names)
    X, y, gram = names["X"], names["y"], names["X"].T @ names["X"] / 200
    fits = [np.linalg.solve(gram + penalty * np.eye(50), X.T @ y / 200) for penalty in np.logspace(-3, 1, 200)]
    best = min(fits, key=lambda fit: np.sum((names["X_val"] @ fit - names["y_val"]) ** 2))
    assert np.mean((names["X_test"] @ best - names["y_test"]) ** 2) == pytest.approx(1.07, abs=0.005)


def test_the_hypergradient_in_the_readme_equals_differences_of_closed_form_fits(minimal, tmp_path):
    _, own_losses, hypergradient = wheel.blocks("README.md", "python")
    compare = """
def h(x):
    w = np.linalg.solve(X.T @ X / 200 + np.diag(np.exp(x)), X.T @ y / 200)
    return np.mean((X_val @ w - y_val) ** 2) / 2

steps = 1e-4 * np.eye(50)
print(np.abs(found.gradient - [(h(step) - h(-step)) / 2e-4 for step in steps]).max(), found.inner_residual)
"""
    (tmp_path / "last.py").write_text(own_losses + hypergradient + compare)
    *_, error, residual = wheel.call(minimal / "python", "last.py", cwd=tmp_path, **in_haste(minimal)).split()
    assert float(error) < 1e-6 and float(residual) < 1e-6  # rows are in float32
