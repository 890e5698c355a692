"""Compiled programs are freed with the problems they belong to; programs of the user are not affected."""

import gc
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevel
from bilevel import _process, theory
from bilevel._core import compilation
from bilevel._core.compilation import Compiled, compiled
from tests import cases


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(compilation, "_programs", type(compilation._programs)())
    monkeypatch.setattr(compilation, "MAX_PROGRAMS", 3)


def own_problem(number, n_features=3, strongly_convex=False):
    """Return a problem with losses of its own."""
    X = np.random.default_rng(number).standard_normal((30, n_features))

    def outer(z, x, row):
        return jnp.cosh(row @ z - 1.0)

    def inner(z, x, row):
        return (row @ z - 0.5) ** 2 + jnp.exp(x[0]) * (z @ z)

    start, kind = (np.zeros(n_features), np.zeros(1)), {"strongly_convex": strongly_convex, "dtype": "float32"}
    return bilevel.BilevelProblem.from_losses(inner, outer, X, X, *start, **kind)


def n_programs_after(function, sizes):
    counts = []
    for size in sizes:
        function(np.zeros(size, np.float32))
        counts.append(len(compilation._programs))
    return counts


@pytest.mark.usefixtures("few")
def test_the_least_recently_used_programs_are_freed():
    traced = []
    function = Compiled(lambda x: traced.append(x.size) or x + 1)
    assert n_programs_after(function, [1, 2, 3, 1, 4, 5]) == [1, 2, 3, 3, 3, 3]
    assert traced == [1, 2, 3, 4, 5]
    n_programs_after(function, [1, 2])  # 1 was used after 2 and 3
    assert traced == [1, 2, 3, 4, 5, 2]


@pytest.mark.usefixtures("few")
def test_programs_depend_on_structure_shape_dtype_and_constants_but_not_on_values():
    function = compiled("name")(lambda tree, name: tree)
    vector = np.zeros(2, np.float32)
    for tree, name in ((vector, "a"), (vector + 1, "a"), ([vector], "a"), (vector, "b")):
        function(tree, name=name)
    assert len(compilation._programs) == 3


def test_a_function_called_within_a_trace_is_part_of_the_larger_program():
    inner = Compiled(lambda x: x * 2)
    before = len(compilation._programs)
    assert jax.jit(lambda x: inner(x) + 1)(3.0) == 7.0
    assert jax.grad(lambda x: inner(x) ** 2)(3.0) == 24.0
    assert len(compilation._programs) == before


@pytest.fixture
def no_programs(monkeypatch):
    monkeypatch.setattr(compilation, "_programs", type(compilation._programs)())


SOBA = bilevel.SOBA(0.05, 1.0, 8)
USES = {
    "SOBA": lambda problem: bilevel.run(problem, SOBA, max_steps=5),
    "AutoSRBA": lambda problem: bilevel.run(problem, bilevel.AutoSRBA(), max_steps=5),
    "HOAG": lambda problem: bilevel.run(problem, bilevel.HOAG(), max_steps=5),
    "hypergradient": bilevel.hypergradient,
    "check": lambda problem: problem.check(),
    "exact_solver": lambda problem: problem.exact_solver(np.zeros(1)),
    "exact evaluations": lambda problem: bilevel.run(problem, SOBA, max_steps=5).history,
    "lyapunov": lambda problem: theory.lyapunov(problem, problem.start, SimpleNamespace(psi_z=1.0, psi_v=1.0)),
}
CONVEX = {"exact_solver", "exact evaluations", "lyapunov"}


@pytest.mark.usefixtures("no_programs")
@pytest.mark.parametrize("use", USES)
def test_a_loop_over_problems_frees_their_programs_and_keeps_those_of_the_user(use):
    traces = []
    users = jax.jit(lambda x: traces.append(1) or 2 * x)
    users(1.0)
    losses, counts = [], []
    for number in range(3):
        problem = own_problem(number, strongly_convex=use in CONVEX)
        losses.append(weakref.ref(problem.oracles.inner_loss))
        USES[use](problem)
        counts.append(len(compilation._programs))
    users(2.0)
    assert traces == [1]
    assert counts == [counts[0]] * 3
    gc.collect()
    assert [loss() is None for loss in losses] == [True] * 2 + [False]


@pytest.mark.usefixtures("no_programs")
def test_programs_of_certificates_belong_to_their_problem():
    problem = cases.logistic_selection()
    problem.certifier()(problem.start)
    of_oracles = [kind for kind in compilation._programs if "Oracles" in str(kind)]
    assert of_oracles and all(compilation._programs[kind].owners[0]() is problem for kind in of_oracles)


@pytest.mark.usefixtures("no_programs")
def test_programs_of_problems_in_use_are_kept():
    problems, counts = [own_problem(number) for number in range(3)], []
    for problem in [*problems, *problems]:
        bilevel.run(problem, bilevel.SOBA(0.05, 1.0, 8), max_steps=5)
        counts.append(len(compilation._programs))
    assert counts[0] < counts[1] < counts[2] == counts[3] == counts[4] == counts[5]


@pytest.mark.usefixtures("no_programs")
def test_a_problem_of_equal_structure_finds_the_programs_of_one_that_is_gone():
    traced = []

    def outer(z, x, row):
        traced.append(row)
        return (row @ z - x[0]) ** 2

    for number in range(3):
        X = np.random.default_rng(number).standard_normal((30, 2))
        problem = bilevel.BilevelProblem.from_losses(outer, outer, X, X, np.zeros(2), np.zeros(1), dtype="float32")
        traced.clear()
        bilevel.run(problem, bilevel.SOBA(0.05, 1.0, 8), max_steps=5)
        assert bool(traced) == (number == 0)
        del problem


@pytest.mark.usefixtures("no_programs")
def test_problems_of_equal_structure_share_their_programs():
    kinds = []
    for seed in (0, 1):
        X = np.random.default_rng(seed).standard_normal((30, 3))
        y = np.where(X[:, 0] > 0, 1, -1)
        problem = bilevel.problems.penalty_selection(X, y, X, y, dtype="float32")
        bilevel.run(problem, bilevel.SOBA(0.01, 1.0, 8), max_steps=5)
        kinds.append(set(compilation._programs))
    assert kinds[0] == kinds[1]


def test_a_run_whose_programs_are_freed_continues_bit_for_bit():
    problem, solver = cases.quadratic("float32"), cases.SOLVERS["SRBA"]
    run = bilevel.Run(problem, solver)
    run.advance(20)
    for program in compilation._programs.values():
        program.jitted.clear_cache()
    compilation._programs.clear()
    run.advance(20)
    cases.assert_trees_equal(run.point, bilevel.run(problem, solver, max_steps=40).point)


LOOP = """
import json, os, sys
import numpy as np
import bilevel
from tests.engine.test_programs import own_problem
from pathlib import Path

maps, megabytes = [], []
for number in range(int(sys.argv[2])):
    if sys.argv[1] == "own":
        problem = own_problem(number)
    else:
        problem = bilevel.problems.quadratic(40 + number, 30, 3 + number % 9, 2 + number % 7, dtype="float32")
    solver = bilevel.AutoSRBA() if sys.argv[3] == "untuned" else bilevel.SOBA(0.01, 1.0, 8)
    bilevel.run(problem, solver, max_steps=5)
    maps.append(Path("/proc/self/maps").read_bytes().count(b"\\n"))
    megabytes.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6)
print(json.dumps([maps, megabytes]))
"""


def memory_in_a_loop(kind, n_problems, solver):
    """Return the memory maps and the resident megabytes of a process after each problem."""
    command = [sys.executable, "-c", LOOP, kind, str(n_problems), solver]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="memory maps are counted on Linux")
@pytest.mark.parametrize(("kind", "solver", "n_problems"), [("ready-made", "SOBA", 40), ("own", "untuned", 20)])
def test_memory_maps_stop_growing_in_a_loop_over_problems(kind, solver, n_problems):
    maps, _ = memory_in_a_loop(kind, n_problems, solver)
    assert maps[-1] <= 1.1 * maps[n_problems // 2] < 20_000


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read on Linux")
def test_resident_memory_stops_growing_in_a_loop_over_problems():
    maps, megabytes = memory_in_a_loop("own", 200, "SOBA")
    assert maps[199] <= 1.1 * maps[49] < 20_000
    assert megabytes[199] <= 1.2 * megabytes[49] + 20  # kept programs would take 14 MB per problem


SETTINGS = """
import logging, os, pickle, random, signal, sys, threading, warnings
import jax, numpy as np
import jax.numpy

def settings():
    return {
        "JAX": dict(jax.config.values),
        "environment": dict(os.environ),
        "warning filters": list(warnings.filters),
        "logging": {name: (log.level, log.disabled, len(log.handlers)) for name, log in loggers().items()},
        "random state": (random.getstate(), pickle.dumps(np.random.get_state())),
        "NumPy": (np.geterr(), np.get_printoptions()),
        "signals": signal.getsignal(signal.SIGINT),
        "folder": os.getcwd(),
        "hooks": (sys.excepthook, threading.excepthook, sys.displayhook),
    }

def loggers():
    known = logging.root.manager.loggerDict
    return {"": logging.root} | {name: known[name] for name in NAMES if isinstance(known.get(name), logging.Logger)}

jax.block_until_ready(jax.numpy.ones(3) + 1)  # JAX sets its own loggers and handlers at its first use
NAMES = list(logging.root.manager.loggerDict)
before = settings()
import bilevel
bilevel.run(bilevel.problems.quadratic(40, 30, 4, 2), bilevel.SOBA(0.01, 1.0, 8), max_steps=5)
bilevel.run(bilevel.problems.quadratic(40, 30, 4, 2), max_steps=5)
after = settings()
changed = [name for name in before if before[name] != after[name]]
assert not changed, [(name, before[name], after[name]) for name in changed]
"""


def run_python(script, folder, **changes):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment |= {"HOME": str(folder), "BILEVEL_CACHE": str(folder / "cache")} | changes
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)


def test_import_and_runs_change_no_setting_of_the_process_and_write_no_file(tmp_path):
    done = run_python(SETTINGS, tmp_path)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []


KEEP = """
import bilevel, jax
folder = bilevel.keep_programs()
jax.jit(lambda x: x * 3 + 1)(2.0)
print(folder, jax.config.jax_compilation_cache_dir, len(list(folder.glob("*-cache"))))
"""


def test_keep_programs_stores_programs_in_a_private_folder(tmp_path):
    folder, setting, n_files = run_python(KEEP, tmp_path).stdout.split()
    assert folder == setting and folder.startswith(str(tmp_path / "cache" / "programs")) and int(n_files) >= 1
    assert Path(folder).stat().st_mode & 0o777 == 0o700


def test_a_cache_folder_set_by_the_user_is_kept(tmp_path):
    done = run_python(KEEP, tmp_path, JAX_COMPILATION_CACHE_DIR=str(tmp_path / "theirs"))
    assert done.stdout.split()[:2] == [str(tmp_path / "theirs")] * 2


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="files have no owners on this system")
def test_a_folder_that_others_can_write_to_is_refused(tmp_path):
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(PermissionError, match="others can write to it"):
        bilevel.keep_programs(folder)


def test_the_oldest_programs_of_a_large_folder_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(_process, "_MAX_FOLDER_BYTES", 250)
    for age in range(4):
        (tmp_path / f"{age}-cache").write_bytes(bytes(100))
        os.utime(tmp_path / f"{age}-cache", (1e9 - age, 1e9 - age))
    _process._remove_oldest(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0-cache", "1-cache"]
