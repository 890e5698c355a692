"""Fused loops are optional, give the same results as loops in parts, and respect flags of the user."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import bilevel
from bilevel._core.compilation import arithmetic
from bilevel._process import may_be_fused
from bilevel.engine.loop import IN_ORDER, IN_PLACE, compiler_options, options_together
from bilevel.solvers import Solver
from tests import cases

ROOT = Path(__file__).parents[2]
FUSED = "--xla_backend_extra_options=xla_cpu_small_while_loop_byte_threshold=1048576"
HASTY = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
IN_PIECES = "--xla_backend_extra_options=xla_cpu_small_while_loop_byte_threshold=0"


def printed(script, environment, given=None):
    kept = {name: value for name, value in os.environ.items() if name.startswith("JAX_COMPILATION_CACHE")}
    command = [sys.executable, "-c", script]
    environment = kept | {"PATH": "", "JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu"} | environment
    return subprocess.run(command, input=given, capture_output=True, check=True, env=environment, cwd=ROOT).stdout


def flags_after(call, environment):
    """Return the flags after a call, in a process in which JAX has not started: else it would refuse the setting."""
    script = f"import os, bilevel, jax; {call}; jax.config.update('jax_num_cpu_devices', 3)\n"
    script += "print(os.environ.get('XLA_FLAGS'), jax.device_count())"
    return printed(script, environment).decode().strip()


def test_importing_the_library_sets_no_flag_and_starts_no_backend():
    assert flags_after("pass", {}) == "None 3"
    assert flags_after("pass", {"XLA_FLAGS": "--xla_cpu_enable_fast_math=false"}).startswith("--xla_cpu_enable_fast_m")


def test_fuse_cpu_loops_sets_a_flag_and_starts_no_backend():
    assert flags_after("bilevel.fuse_cpu_loops()", {}) == f"{FUSED} 3"


def test_a_second_call_of_fuse_cpu_loops_has_no_effect():
    assert flags_after("bilevel.fuse_cpu_loops(); bilevel.fuse_cpu_loops()", {}) == f"{FUSED} 3"


def test_other_flags_of_the_user_are_kept():
    found = flags_after("bilevel.fuse_cpu_loops()", {"XLA_FLAGS": "--xla_cpu_enable_fast_math=false"})
    assert found == f"--xla_cpu_enable_fast_math=false {FUSED} 3"


def test_extra_options_of_the_user_are_kept():
    own = {"XLA_FLAGS": "--xla_backend_extra_options=xla_cpu_other=1"}
    expected = FUSED.replace("options=", "options=xla_cpu_other=1,")
    assert flags_after("bilevel.fuse_cpu_loops()", own) == f"{expected} 3"


def test_a_threshold_of_the_user_is_kept():
    assert flags_after("bilevel.fuse_cpu_loops()", {"XLA_FLAGS": IN_PIECES}) == f"{IN_PIECES} 3"


def test_fuse_cpu_loops_refuses_flags_from_a_file():
    script = """
import bilevel
try:
    bilevel.fuse_cpu_loops()
except RuntimeError as error:
    print(error)
"""
    assert b"cannot add to XLA_FLAGS='flags.txt'" in printed(script, {"XLA_FLAGS": "flags.txt"})


def test_fuse_cpu_loops_raises_an_error_once_a_backend_has_started(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    jax.devices()
    with pytest.raises(RuntimeError, match=r"comes too late.*before the first array, or start Python with XLA_FLAGS="):
        bilevel.fuse_cpu_loops()


def programs():
    """Return the compiled steps on a linear model, by solver."""
    problem = bilevel.problems.penalty_selection(*cases.logistic_data(4000, 3000, dim=22), dtype="float32")
    found = {}
    for name in ("SRBA", "SABA", "SOBA"):
        with arithmetic(problem.dtype):
            oracles = problem.oracles.with_batches(64, "blocks")
            solver = bilevel.SOLVERS[name]().configure(problem).cast(problem.dtype)
            found[name] = cases.lowered_steps(problem, solver, oracles).compile().as_text()
    return found


def dumped(function, flags, *arguments):
    script = f"import pickle, sys; from tests.engine.test_cpu_loops import {function} as of\n"
    script += "pickle.dump(of(*pickle.load(sys.stdin.buffer)), sys.stdout.buffer)"
    return pickle.loads(printed(script, {"XLA_FLAGS": flags}, pickle.dumps(arguments)))


@pytest.mark.slow
def test_fused_steps_of_a_linear_model_run_as_one_kernel():
    assert all("xla_cpu_small_call" in program for program in dumped("programs", FUSED).values())


SETTINGS = cases.SOLVERS | {
    "PZOBO, two directions": cases.short(bilevel.PZOBO, 0.05, 20.0, cases.BATCH, n_directions=2),
    "SABA, full tables": bilevel.SABA(0.05, 20.0, cases.BATCH, tables="full", rebuild_every=7),
    "AutoSRBA, defaults": bilevel.AutoSRBA(batch_size=cases.BATCH, period=6),
    "PnPBO, page and saga": bilevel.PnPBO(
        0.05, 20.0, cases.BATCH, v_estimator="page", outer_estimator="saga", period=5
    ),
}


def narrow():
    """Return a linear model whose products are sums, and whose full-batch passes read blocks if loops are fused."""
    return bilevel.problems.penalty_selection(*cases.logistic_data(330, 220, dim=22), dtype="float64")


PROBLEMS = cases.PROBLEMS | {"narrow": narrow}
# All settings on a small problem, whose loops are fused with their full-batch passes; solvers with tables on a second.
CASES = {("quadratic", name): solver for name, solver in SETTINGS.items()}
CASES |= {("logistic", name): solver for name, solver in SETTINGS.items() if solver.keeps_tables}
CASES |= {("narrow", name): bilevel.SOLVERS[name](0.05, 20.0, 32) for name in ("SABA", "AmIGO")}
CASES |= {("narrow", name): bilevel.SOLVERS[name](0.05, 20.0, 32, period=7) for name in ("SRBA", "VRBO")}
CASES["logistic", "SABA, rows"] = bilevel.SABA(0.05, 20.0, cases.BATCH, memory="rows", rebuild_every=7)


def pages():
    """Return the draws of all cases without keys, since drawing again in each process would take compilations."""
    found = {}
    for (problem, name), solver in CASES.items():
        page = cases.trajectory(PROBLEMS[problem](), solver, 0).page
        if not any(jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in jax.tree.leaves(page)):
            found[problem, name] = jax.tree.map(np.asarray, page)
    return found


def ends(pages):
    """Return the last state of every case."""
    found = {}
    for (problem, name), solver in CASES.items():
        states = cases.trajectory(PROBLEMS[problem](), solver, 20, page=pages.get((problem, name))).states
        found[problem, name] = [np.asarray(leaf) for leaf in jax.tree.leaves(states[-1])]
    return found


@pytest.mark.slow
def test_fused_loops_and_loops_in_parts_give_equal_results():
    """XLA has miscompiled fused nested loops in combination with a different placement of copies."""
    drawn = pages()
    # Programs of this process are compiled with the flags of the test run: `make test` turns most optimizations off.
    # Loops in parts, as users have them, are compiled with all optimizations; whether loops are fused is decided before
    # those of LLVM, without which programs compile faster.
    here, whole, in_pieces = ends(drawn), dumped("ends", f"{FUSED} {HASTY}", drawn), dumped("ends", IN_PIECES, drawn)
    assert here.keys() == whole.keys() == in_pieces.keys() == CASES.keys()
    for name, leaves in here.items():
        for triple in zip(leaves, whole[name], in_pieces[name], strict=True):
            for other in triple[1:]:
                np.testing.assert_allclose(triple[0], other, rtol=1e-9, atol=1e-11, err_msg=str(name))


def test_every_compiled_solver_is_compared():
    compared = {type(solver) for solver in SETTINGS.values()}
    compiled = {cls for cls in bilevel.SOLVERS.values() if issubclass(cls, Solver)}
    assert compared == compiled
    assert {type(CASES[case]) for case in CASES if case[0] == "logistic"} == {c for c in compiled if c.keeps_tables}


def test_fused_loops_of_other_solvers_are_compiled_without_the_copy_analysis(monkeypatch):
    @bilevel.solvers.solver
    class Unknown(bilevel.SABA):
        """A user-defined solver with tables."""

    for flags, options in ((FUSED, {}), (IN_PIECES, IN_PLACE), ("", IN_PLACE)):
        monkeypatch.setenv("XLA_FLAGS", flags)
        assert may_be_fused() == (flags == FUSED)
        assert compiler_options(Unknown()) == options
        assert compiler_options(bilevel.SABA()) == IN_PLACE and compiler_options(bilevel.SRBA()) == {}
        assert options_together(bilevel.SRBA()) == ({} if flags == FUSED else IN_ORDER)


SWEEP = """
import sys
from pathlib import Path
from bilevel.bench.config import load_config
from bilevel.bench.distribution import Where
from bilevel.bench.execute import execute
from bilevel.bench.live import Watcher
from bilevel.bench.store import Store

store = Store(Path(sys.argv[1]))
where = Where(1, None, None)
failures = execute(load_config("equal_cleaning"), store, Watcher(), only=["AutoSRBA"], phases=["sweep"], where=where)
sys.exit(failures)
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("BILEVEL_DATA"), reason="BILEVEL_DATA names no folder with the data")
def test_a_sweep_that_once_never_ended_ends(tmp_path):
    plain = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_ENABLE_X64")}
    command = [sys.executable, "-c", SWEEP, str(tmp_path)]
    assert subprocess.run(command, env=plain, cwd=ROOT, timeout=200).returncode == 0
