"""The example with a mixture of sources: its parts are as described, and bad sources lose their weight."""

import re
import subprocess
import sys

import numpy as np
import pytest

from tests.scripts import EXAMPLES, load_example

pytestmark = pytest.mark.slow

EXAMPLE = EXAMPLES / "data_mixture.py"


@pytest.fixture(scope="module")
def example():
    return load_example("data_mixture")


def test_the_inner_loss_is_the_mixture_of_the_means_of_the_sources(example):
    sources = example.digits("digits", 200)
    problem, logits = example.build(sources), np.log([0.4, 0.3, 0.2, 0.1]).astype(np.float32)
    weights = {name: array.astype(np.float64) for name, array in problem.start.inner_var.items()}

    def mean(rows, labels):
        scores = np.tanh(rows @ weights["hidden"]) @ weights["scores"]
        return np.mean(np.log(np.exp(scores).sum(axis=1)) - scores[np.arange(len(labels)), labels])

    # Repeating a source does not change its mean.
    assert [600 % len(labels) for _, labels in sources.train] == [0, 0, 0, 0]
    expected = np.dot([0.4, 0.3, 0.2, 0.1], [mean(*source) for source in sources.train])
    found = problem.oracles.inner_value(problem.start._replace(outer_var=logits))
    np.testing.assert_allclose(float(found), expected, rtol=1e-5)


def test_bad_sources_lose_their_weight_and_the_loss_falls(example):
    problem = example.build(example.digits("digits", 200))
    learned, uniform = (example.fit(problem, 500, mixture) for mixture in (None, np.full(4, 0.25)))
    clean, wrong, off, _ = learned.point.outer_var
    assert clean > max(wrong, off) + 1
    assert learned.history["test_loss"][-1] < uniform.history["test_loss"][-1]


def test_a_row_of_text_is_a_context_and_the_letter_after_it(example):
    alphabet = {letter: number for number, letter in enumerate("abcdefghijkl", start=1)}
    contexts, after = example.windows("abcdefghijkl", alphabet, 20, np.random.default_rng(0))
    assert np.all(np.diff(contexts, axis=1) == 1) and np.all(after == contexts[:, -1] + 1)


def test_it_prints_every_mixture_of_text():
    command = [sys.executable, str(EXAMPLE), "--text", "--rows", "100", "--steps", "10"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert run.returncode == 0, run.stderr
    names = re.findall(r"^(uniform|best of 7 mixtures|learned) .*test loss \d", run.stdout, re.MULTILINE)
    assert names == ["uniform", "best of 7 mixtures", "learned"]
