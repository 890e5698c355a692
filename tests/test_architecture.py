"""The line of rooms: a module imports only from rooms to its left."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "bilevel"
ROOMS = [
    ["_types", "_optional", "_io", "_cpu_loops"],
    ["_precision", "_threefry", "_tree"],
    ["datasets"],
    ["oracles"],
    ["problems"],
    ["solvers"],
    ["engine"],
    ["bench", "theory", "estimators"],
    ["cli"],
]
PLACE = {name: place for place, names in enumerate(ROOMS) for name in names}


def room(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "bilevel":
            parts = node.module.split(".")
            yield from [parts[1]] if len(parts) > 1 else [alias.name for alias in node.names]


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_to_the_left(path):
    here = room(path)
    if here == "__init__":
        return
    for name in imported(path):
        same = name == here
        assert same or PLACE[name] < PLACE[here], f"{here} imports {name}"


def test_importing_the_library_imports_no_extra_and_no_scipy():
    extras = (
        "scipy.optimize",
        "sklearn",
        "matplotlib",
        "rich",
        "pandas",
        "pyarrow",
        "plotly",
        "joblib",
        "typer",
        "optax",
        "tensorboardX",
    )
    script = f"import sys, bilevel; print([module for module in {extras} if module in sys.modules])"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_the_library_leaves_the_settings_of_jax_alone():
    script = "import jax, bilevel; print(jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision)"
    environment = {"JAX_ENABLE_X64": "0", "PATH": ""}
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    assert out.stdout.split() == ["False", "None"]


@pytest.mark.parametrize(
    ("module", "extra"),
    [("rich.progress", "progress"), ("matplotlib.figure", "plot"), ("tensorboardX.summary", "log")],
)
def test_a_missing_extra_says_how_to_install_it(module, extra, monkeypatch):
    from bilevel._optional import require

    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"pip install 'bilevel\[{extra}\]'"):
        require(module, extra)
