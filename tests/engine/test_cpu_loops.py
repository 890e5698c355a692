"""The hot loop is one kernel that computes what its pieces do, and the environment of the user is respected."""

import pickle
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import bilevel
from bilevel._precision import arithmetic
from bilevel.engine.loop import advance, draw_page, initial_state, run_key
from tests import cases


def flags_after_import(environment):
    script = "import os, bilevel; from jax._src import xla_bridge; print(os.environ['XLA_FLAGS'], xla_bridge._backends)"
    out = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env={"PATH": ""} | environment
    )
    return out.stdout.strip()


def test_importing_the_library_raises_the_limit_and_starts_no_backend():
    assert flags_after_import({}) == ("--xla_backend_extra_options=xla_cpu_small_while_loop_byte_threshold=1048576 {}")


def test_other_flags_of_the_user_are_kept():
    found = flags_after_import({"XLA_FLAGS": "--xla_force_host_platform_device_count=2"})
    assert found.startswith("--xla_force_host_platform_device_count=2 --xla_backend_extra_options=")


def test_extra_options_of_the_user_are_left_alone():
    own = "--xla_backend_extra_options=xla_cpu_small_while_loop_byte_threshold=0"
    assert flags_after_import({"XLA_FLAGS": own}) == f"{own} {{}}"


@pytest.mark.parametrize("name", ["SRBA", "SABA", "SOBA"])
def test_steps_of_a_linear_model_run_as_one_kernel(name):
    problem = bilevel.problems.logistic_selection(*cases.logistic_data(4000, 3000, dim=22))
    with arithmetic(problem.dtype):
        oracles = problem.oracles.batched(64, "blocks")
        solver = bilevel.SOLVERS[name]().resolve(oracles).cast(problem.dtype)
        page = draw_page(solver, oracles, run_key(0), np.int32(0), 64)
        state = initial_state(solver, oracles, problem.start)
        program = advance.of(solver).lower(solver, oracles, state, page, np.int32(0), np.int32(9)).compile().as_text()
    assert "xla_cpu_small_call" in program


SETTINGS = cases.SOLVERS | {
    "PZOBO, two directions": cases.short(bilevel.PZOBO, 0.05, 20.0, cases.BATCH, n_directions=2),
    "SABA, full tables": bilevel.SABA(0.05, 20.0, cases.BATCH, tables="full", rebuild_every=7),
    "SRBA, auto": bilevel.SRBA("auto", batch_size=cases.BATCH, period=6),
}


def ends():
    """The last state of every solver on two small problems, whose loops are compiled whole with their passes."""
    found = {}
    for problem_name, problem_of in cases.PROBLEMS.items():
        for name, solver in SETTINGS.items():
            states = cases.trajectory(problem_of(), solver, 20).states
            found[problem_name, name] = [np.asarray(leaf) for leaf in jax.tree.leaves(states[-1])]
    rows = bilevel.SABA(0.05, 20.0, cases.BATCH, memory="rows", rebuild_every=7)
    last = cases.trajectory(cases.logistic_selection(), rows, 20).states[-1]
    found["logistic", "SABA, rows"] = [np.asarray(leaf) for leaf in jax.tree.leaves(last)]
    return found


@pytest.mark.slow
def test_whole_loops_compute_what_their_pieces_compute():
    """XLA has been seen to miscompile nested loops when they are compiled whole and copies are placed differently."""
    script = f"import pickle, sys; from {__name__} import ends; pickle.dump(ends(), sys.stdout.buffer)"
    environment = {
        "XLA_FLAGS": "--xla_backend_extra_options=xla_cpu_small_while_loop_byte_threshold=0",
        "JAX_ENABLE_X64": "1",
        "PATH": "",
    }
    out = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, check=True, env=environment, cwd=Path(__file__).parents[2]
    )
    in_pieces = pickle.loads(out.stdout)
    whole = ends()
    assert whole.keys() == in_pieces.keys()
    for name, leaves in whole.items():
        for ours, theirs in zip(leaves, in_pieces[name], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-11, err_msg=str(name))
