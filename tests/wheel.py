"""The wheel, a new environment with it, and the code of the pages, run there without access to the source tree."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUILT_FROM = ("bilevel", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff")
BUILT_FROM += ("SECURITY.md", "constraints", "tests")
CONSTRAINTS = ROOT / "constraints" / f"{sys.version_info.major}.{sys.version_info.minor}.txt"
# Variables that the tests set for speed, or that would give access to the source tree.
NOT_A_USERS = ("PYTHONPATH", "XLA_FLAGS", "JAX_ENABLE_X64", "JAX_COMPILATION_CACHE_DIR", "OMP_NUM_THREADS")
NOT_A_USERS += ("PYTHONDONTWRITEBYTECODE",)  # compiled modules are reused by the next process


def copy_source(folder):
    """Copy the source, so that nothing is written into the source tree."""
    for name in BUILT_FROM:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    return folder


def build_wheel(folder):
    """Build the wheel from a copy of the source, and return its path."""
    source = folder / "source"
    source.mkdir(parents=True)
    call(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, copy_source(source))
    (wheel,) = folder.glob("*.whl")
    return wheel


def make_environment(folder, *wanted, in_haste=False):
    """Create an environment, install the tested versions of the dependencies, and return the folder of its programs.

    For speed the pip of this environment installs them, and modules are compiled when they are first imported.
    """
    call(sys.executable, "-m", "venv", *(["--without-pip"] if in_haste else []), folder)
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python) if in_haste else (python, "-m", "pip")
    constraints = ["--constraint", CONSTRAINTS] if CONSTRAINTS.exists() else []
    options = ["--quiet", *constraints, *(["--no-compile"] if in_haste else [])]
    call(*pip, "install", *options, *wanted)
    return folder / "bin"


def call(*words, cwd=None, code=0, **changes):
    """Return the output of a program that runs with the environment variables of a user."""
    environment = {name: value for name, value in os.environ.items() if name not in NOT_A_USERS} | changes
    words = [str(word) for word in words]
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == code, f"{' '.join(words)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def blocks(page, language):
    """Return the fenced blocks of a page in a language."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)


def commands(page):
    """Return the commands of a page: lines of indented blocks that start with the name of a program."""
    lines = re.findall(r"^    ((?:\w+=\S+ )*(?:bilevel|pip|make|python) .*)$", (ROOT / page).read_text(), re.MULTILINE)
    return [re.split(r"\s+#", line)[0].strip() for line in lines]
