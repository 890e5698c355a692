"""What a type checker and an editor see of the public names."""

import ast
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import jedi
import pytest

import bilevel

ROOT = Path(__file__).parents[1]

PROGRAM = """
import numpy as np

import bilevel

problem = bilevel.problems.quadratic(100, 50, 5, 3)
result = bilevel.run(problem, bilevel.SRBA(step_size=0.1, batch_size=8), max_steps=10)
last: float = result.history["value"][-1]
steps = np.sum(result.history["step"])
result.save("run.npz")
reason: str = bilevel.run(problem).reason
again: bilevel.RunResult = bilevel.resume("run.npz", problem, max_steps=20)
"""
MISTAKES = {
    "bilevel.SRBA(stepsize=1)": 'Unexpected keyword argument "stepsize" for "SRBA"',
    "bilevel.NoSuch": 'Module has no attribute "NoSuch"',
    "bilevel.run(3)": 'Argument 1 to "run" has incompatible type "int"; expected "BilevelProblem"',
    'bilevel.SOBA(step_size="fast")': 'Argument "step_size" to "SOBA" has incompatible type "str"; expected "float"',
}


def check(folder, text, python=None):
    """Return what `mypy --strict` prints about a program: with the sources, or the packages of another Python."""
    (folder / "program.py").write_text(text)
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--no-incremental", "program.py"]
    if python is not None:
        command += ["--python-executable", str(python)]
    environment = os.environ | ({"MYPYPATH": str(ROOT)} if python is None else {})
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True).stdout


def mistakes_by_pyright(folder, python=None):
    """Return the lines that pyright reports of a program with mistakes at its end."""
    lines = [*PROGRAM.splitlines(), *MISTAKES]
    (folder / "program.py").write_text("\n".join(lines))
    paths = {"extraPaths": [str(ROOT)]} if python is None else {}
    (folder / "pyrightconfig.json").write_text(json.dumps({**paths, "typeCheckingMode": "standard"}))
    command = [sys.executable, "-m", "pyright", "--pythonpath", python or sys.executable, "--outputjson", "program.py"]
    shown = subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout
    return [lines[one["range"]["start"]["line"]] for one in json.loads(shown)["generalDiagnostics"]]


@pytest.mark.slow
def test_a_program_that_uses_the_public_names_passes_strict_type_checks(tmp_path):
    assert check(tmp_path, PROGRAM).startswith("Success")


@pytest.mark.slow
def test_a_type_checker_finds_misspelled_names_and_wrong_arguments(tmp_path):
    shown = check(tmp_path, "\n".join(["import bilevel", *MISTAKES]))
    assert f"Found {len(MISTAKES)} errors" in shown
    for message in MISTAKES.values():
        assert message in shown


@pytest.mark.slow
def test_pyright_finds_the_same_mistakes_and_no_others(tmp_path):
    assert mistakes_by_pyright(tmp_path) == list(MISTAKES)


def test_notebooks_complete_the_solvers_and_their_parameters():
    names = [{"bilevel": bilevel}]
    assert "SRBA" in {found.name for found in jedi.Interpreter("bilevel.SR", names).complete()}
    (signature,) = jedi.Interpreter("bilevel.SRBA(", names).get_signatures()
    assert [one.name for one in signature.params] == list(inspect.signature(bilevel.SRBA).parameters)
    assert {"step_size", "batch_size", "period", "outer_bounds"} <= {one.name for one in signature.params}


@pytest.mark.slow
def test_editors_complete_the_solvers_without_running_code():
    project = jedi.Project(str(ROOT))
    completed = jedi.Script("import bilevel\nbilevel.SR", project=project).complete(2, len("bilevel.SR"))
    assert "SRBA" in {found.name for found in completed}


def test_the_stub_lists_the_public_names():
    tree = ast.parse((ROOT / "bilevel" / "__init__.pyi").read_text())
    listed = {alias.asname for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert listed >= {*bilevel.__all__, "benchmark"}
    assert all(hasattr(bilevel, name) for name in listed)
