"""The example with Flax: decays that are learned lower the validation loss, decays that are fixed stay."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[1] / "examples" / "flax_weight_decay.py"
STEPS = 1000


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("flax_weight_decay", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def problem(example):
    return example.build(300, 0.3)


def test_its_derivatives_are_right(problem):
    assert max(problem.check().values()) < 1e-4


def test_learned_decays_lower_the_validation_loss_of_their_start(example, problem):
    fixed = example.fixed(problem, 3e-2, STEPS)
    learned = example.run(problem, 3e-2, (1e-8, 1.0), STEPS)
    jax.tree.map(lambda log: np.testing.assert_allclose(np.exp(log), 3e-2, rtol=1e-6), fixed.point.outer_var)
    kernel = learned.point.outer_var["hidden"]["kernel"]
    assert np.exp(kernel) < 2.5e-2, "a decay this strong is too strong"
    assert learned.history["outer_value"][-1] < fixed.history["outer_value"][-1] - 0.02


def test_the_metric_is_the_error_of_the_network_written_out(example, problem):
    result = example.fixed(problem, 1e-2, 200)
    _, _, (images, labels) = example.digits(300, 0.3)
    first, last = (result.point.inner_var[name] for name in ("hidden", "scores"))
    hidden = np.tanh(images @ first["kernel"] + first["bias"])
    wrong = np.argmax(hidden @ last["kernel"] + last["bias"], axis=1) != labels
    assert result.history["test_error"][-1] == pytest.approx(wrong.mean(), abs=2e-3)
    assert wrong.mean() < 0.5


def test_it_prints_every_baseline(tmp_path):
    command = [sys.executable, str(EXAMPLE), "--steps", "300"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=150, cwd=tmp_path, check=False)
    assert run.returncode == 0, run.stderr
    rows = re.findall(r"^(no decay|best of 5|learned from [\d.]+).*test error (0\.\d+)$", run.stdout, re.MULTILINE)
    assert [name for name, _ in rows] == [
        "no decay",
        "best of 5",
        *(f"learned from {s}" for s in ("0.003", "0.01", "0.03")),
    ]
    assert all(0 < float(error) < 0.5 for _, error in rows)
