"""The example with weight decay: learned decays select the useful image, and searches are as described."""

import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.scripts import EXAMPLES, load_example

pytestmark = pytest.mark.slow

EXAMPLE = EXAMPLES / "weight_decay.py"
STEPS = 600


@pytest.fixture(scope="module")
def example():
    return load_example("weight_decay")


@pytest.fixture(scope="module")
def parts(example):
    return example.digits(400)


@pytest.fixture(scope="module")
def problem(example, parts):
    return example.build(parts)


def test_its_derivatives_are_right(problem):
    assert max(problem.check().values()) < 1e-4


def test_learned_decays_select_the_useful_image_and_lower_the_test_error(example, problem, parts):
    learned = example.learn(problem, STEPS)
    image, *others = (float(np.exp(learned.point.outer_var[f"image {place}"]["kernel"])) for place in range(5))
    assert image < example.START < min(others)
    with jax.numpy_dtype_promotion("standard"):  # optax promotes its counts
        weights, loss = example.trainer(problem, parts, STEPS)(jax.tree.map(jnp.float32, problem.start.outer_var))
        error = example.error_of(weights, parts[2])
    assert learned.history["outer_value"][-1] < float(loss) and learned.history["test_error"][-1] < float(error)


def test_the_metric_is_the_error_of_the_network_written_out(example, problem, parts):
    result = example.learn(problem, 100)
    images, labels = parts[2]
    kernels = [result.point.inner_var[f"image {place}"]["kernel"] for place in range(5)]
    hidden = np.tanh(sum(images[:, place] @ kernel for place, kernel in enumerate(kernels)))
    last = result.point.inner_var["scores"]
    wrong = np.argmax(hidden @ last["kernel"] + last["bias"], axis=1) != labels
    assert result.history["test_error"][-1] == pytest.approx(wrong.mean(), abs=2e-3)


@pytest.mark.parametrize("n_decays", [1, 7])
def test_without_optuna_decays_are_drawn_within_bounds(example, n_decays, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    ask, tell = example.suggestions(n_decays, 0)
    drawn = np.array([ask()[1] for _ in range(50)])
    tell(None, 0.0)
    assert drawn.shape == (50, n_decays) and np.ptp(drawn) > 5
    assert np.all((np.log(1e-6) <= drawn) & (drawn <= 0)) and "not installed" in example.searcher()


def test_it_prints_every_baseline(tmp_path):
    command = [sys.executable, str(EXAMPLE), "--steps", "100"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=150, cwd=tmp_path, check=False)
    assert run.returncode == 0, run.stderr
    rows = re.findall(r"^(learned|searched|no decay)(.*?) +validation loss .*test error (0\.\d+)$", run.stdout, re.M)
    assert [name + rest for name, rest, _ in rows] == [
        "learned, one for each array",
        "searched, one for all",
        "searched, one for each",
        "no decay",
    ]
    assert all(0 < float(error) < 1 for *_, error in rows)
