"""Libraries of extras: a missing library and a broken one are distinguished."""

import subprocess
import sys
from pathlib import Path

import pytest

from bilevel._core.extras import require


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """An installed package whose import fails."""

    def install(name, source):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)

    return install


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import compiled_part_of_it", "No module named 'compiled_part_of_it'"),
        ("from math import quadrature", "cannot import name 'quadrature'"),
        ("raise ImportError('libcu.so.12: cannot open shared object file')", "libcu.so.12"),
        ("import parrot_of_nobody", "No module named 'parrot_of_nobody'"),
    ],
)
def test_an_installed_package_that_fails_to_import_is_not_called_missing(source, said, broken):
    broken("parrot", source)
    with pytest.raises(ImportError, match=rf"`parrot` is installed, but importing it failed: .*{said}") as caught:
        require("parrot", "bench")
    assert "pip install" not in str(caught.value)


@pytest.mark.parametrize("module", ["no_such_parrot", "no_such_parrot.part", "heron.part"])
def test_a_missing_package_or_part_of_one_says_how_to_install_it(module, broken):
    broken("heron", "")
    with pytest.raises(ImportError, match=rf"needs `{module}`: pip install 'bilevel\[bench\]'"):
        require(module, "bench")


WITHOUT_JAX = """
import sys

sys.modules["jax"] = sys.modules["optax"] = None
import bilevel
from bilevel.estimators import BilevelRidge

assert {"run", "problems", "BilevelProblem"} <= set(dir(bilevel))
for statement in ("bilevel.run", "from bilevel import *", "bilevel.problems"):
    try:
        exec(statement)
    except ImportError as error:
        print(error)
BilevelRidge().fit([[0.0], [1.0], [2.0], [3.0], [4.0]], [0.0, 1.0, 2.0, 3.0, 5.0])
"""


def test_without_jax_estimators_work_and_the_rest_says_how_to_install_it():
    done = subprocess.run([sys.executable, "-c", WITHOUT_JAX], capture_output=True, text=True, check=True)
    assert done.stdout.count("pip install jax optax") == 3


WITHOUT_UNIX = """
import os, pkgutil, signal, sys
import jax, joblib, numpy, pandas, pyarrow.parquet, requests, scipy.optimize, sklearn.linear_model, typer

sys.modules["fcntl"] = sys.modules["resource"] = None
unix = {os: ("fork", "getuid", "sysconf"), signal: ("pthread_sigmask", "pthread_kill", "SIGKILL")}
for module, names in unix.items():
    for name in names:
        delattr(module, name)
import bilevel
for found in pkgutil.walk_packages(bilevel.__path__, "bilevel."):
    __import__(found.name)
folder = sys.argv[1]
problem, log = bilevel.problems.quadratic(40, 30, 4, 2), bilevel.CSVLog(folder + "/run.csv")
bilevel.run(problem, bilevel.SOBA(0.01, 1.0, 8), max_steps=5, log=log, checkpoint=folder)
print(bilevel.resume(folder, problem, max_steps=9).status, bilevel.keep_programs(folder + "/kept").name)
"""


def test_no_module_needs_what_only_unix_has(tmp_path):
    command = [sys.executable, "-c", WITHOUT_UNIX, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["out_of_budget", "kept"]
