"""What a type checker and an editor see of the public names."""

import ast
import os
import subprocess
import sys
from pathlib import Path

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


def check(folder, text):
    """What `mypy --strict` prints about a program, with the sources of the library as an installed package."""
    (folder / "program.py").write_text(text)
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--no-incremental", "program.py"]
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True).stdout


@pytest.mark.slow
def test_a_program_that_uses_the_public_names_passes_strict_type_checks(tmp_path):
    assert check(tmp_path, PROGRAM).startswith("Success")


@pytest.mark.slow
def test_a_type_checker_finds_misspelled_names_and_wrong_arguments(tmp_path):
    shown = check(tmp_path, "\n".join(["import bilevel", *MISTAKES]))
    assert f"Found {len(MISTAKES)} errors" in shown
    for message in MISTAKES.values():
        assert message in shown


def test_the_stub_lists_the_public_names():
    tree = ast.parse((ROOT / "bilevel" / "__init__.pyi").read_text())
    listed = {alias.asname for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert listed >= {*bilevel.__all__, "benchmark"}
    assert all(hasattr(bilevel, name) for name in listed)
