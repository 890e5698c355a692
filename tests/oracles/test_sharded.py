"""Rows on several devices: the same estimates, iterates and oracle calls as on one, and no row that travels."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import pytest

import bilevel
from bilevel._core.compilation import arithmetic
from bilevel.oracles.sharding import ShardedOracles
from tests import cases
from tests.problems import small

ROOT = Path(__file__).parents[2]
# 53 and 31 rows in batches of 8: short last blocks; 3 divides neither the rows nor the batch.
ORACLES = ["logistic 8 blocks", "cleaning 2 reshuffle", "from_losses 3 iid"]
RUNS = ["logistic 8 blocks SRBA", "quadratic 2 blocks SABA"]
# Every problem, every sampling and every kind of solver, not each with each.
SLOW_ORACLES = ["logistic 3 iid", "quadratic 2 iid", "quadratic 8 full", "cleaning 8 blocks", "from_losses 2 reshuffle"]
SLOW_ORACLES += [
    f"{name} 8 blocks" for name in ("grouped_logistic", "ridge", "softmax_per_class", "softmax_per_feature")
]
SLOW_ORACLES += ["logistic_folds 3 blocks", "logistic_folds 2 reshuffle", "softmax_folds 8 iid"]
SLOW_RUNS = [f"quadratic 8 blocks {solver}" for solver in ("SRBA", "SOBA", "AmIGO", "StocBiO", "VRBO", "F2SA")]
SLOW_RUNS += ["logistic 2 blocks SABA", "cleaning 8 blocks SRBA", "cleaning 8 blocks SABA", "from_losses 2 blocks SRBA"]
SLOW_RUNS += [
    "from_losses 2 blocks VRBO",
    "quadratic 2 blocks ForwardMode",
    "logistic_folds 8 blocks SRBA",
    "softmax_folds 2 blocks SABA",
]
EVALUATED = ["logistic 8 evaluate", "from_losses 3 evaluate"]
IN_PYTHON = ["logistic 2 blocks Exact", "quadratic 8 blocks HOAG"]


def outcomes(names, timeout=900):
    """What `sharded_runs` says of each, on eight simulated devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.oracles.sharded_runs", *names]
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=timeout
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.fixture(scope="module")
def quick():
    return outcomes([*ORACLES, *RUNS, "gathered"])


def assert_same_estimates(outcome):
    assert outcome["estimates"] < 1e-13


def assert_same_run(outcome):
    assert outcome["state"] < 1e-11
    assert outcome["calls"] == 0


@pytest.mark.parametrize("case", ORACLES)
@pytest.mark.slow
def test_every_estimate_is_that_of_one_device(quick, case):
    assert_same_estimates(quick[case])


@pytest.mark.parametrize("case", RUNS)
@pytest.mark.slow
def test_iterates_and_oracle_calls_are_those_of_one_device(quick, case):
    assert_same_run(quick[case])
    assert quick[case]["moved"] > 0.01


@pytest.mark.parametrize("case", RUNS)
@pytest.mark.slow
def test_a_step_sends_nothing_but_sums_of_the_variables_sizes(quick, case):
    assert quick["gathered"]["kinds"] == ["all-gather"], "what the test looks for would be seen"
    assert quick[case]["kinds"] == ["all-reduce"]
    assert 0 < quick[case]["largest"] <= quick[case]["variables"]


@pytest.mark.slow
def test_every_problem_and_sampling_is_that_of_one_device():
    for outcome in outcomes(SLOW_ORACLES).values():
        assert_same_estimates(outcome)


@pytest.mark.slow
def test_every_kind_of_solver_is_that_of_one_device():
    found = outcomes([*SLOW_RUNS, *IN_PYTHON])
    for case, outcome in found.items():
        assert_same_run(outcome)
        assert case in IN_PYTHON or outcome["kinds"] == ["all-reduce"], case


@pytest.mark.slow
def test_exact_metrics_from_the_shards_are_those_of_the_problem():
    for outcome in outcomes(EVALUATED).values():
        assert outcome["solution"] < 1e-9
        assert outcome["measured"] < 1e-7
        assert outcome["derivatives"] < 1e-5
        assert outcome["run"] < 1e-11, "a sharded run, saved and resumed"


@pytest.mark.slow
def test_one_device_is_allowed_and_changes_nothing():
    problem = cases.quadratic("float32")
    sharded = problem.sharded(jax.devices()[:1])
    one, other = (bilevel.run(p, cases.SOLVERS["SOBA"], max_steps=10) for p in (problem, sharded))
    assert isinstance(sharded.oracles, ShardedOracles)
    cases.assert_trees_close(one.point, other.point, rtol=1e-5, atol=1e-6)
    assert one.calls == other.calls


def test_rows_cannot_be_taken_where_no_device_is_meant():
    oracles = cases.quadratic().sharded(jax.devices()[:1]).oracles
    with arithmetic("float64"), pytest.raises(NameError, match="rows"):
        oracles.inner_samples.take(None)


def test_own_rows_are_refused_where_a_part_of_the_rows_makes_another_problem():
    with pytest.raises(ValueError, match="leave `own_rows` out"):
        small.cleaning().sharded(own_rows=True)


def test_no_devices_are_refused():
    with pytest.raises(ValueError, match="at least one"):
        cases.quadratic().sharded([])


def test_a_run_of_several_processes_takes_no_budget_of_seconds(monkeypatch):
    monkeypatch.setattr(ShardedOracles, "n_processes", 2)
    problem = cases.quadratic().sharded(jax.devices()[:1])
    with pytest.raises(ValueError, match="use `max_steps`"):
        bilevel.run(problem, bilevel.SOBA(batch_size=8), max_seconds=1)


def test_constants_of_a_part_of_the_rows_are_not_passed_on():
    problem = small.softmax_per_class()
    sharded = replace(problem, info={"v_radius": 1.0}).sharded(jax.devices()[:1], own_rows=True)
    assert sharded.info == {}
