"""The examples of tasks: both sides of their comparisons are the same method."""

import jax
import numpy as np
import pytest

from bilevel._core.compilation import arithmetic
from tests.scripts import load_example

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def as_users_have_jax():
    with arithmetic(np.float32), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize("method", ["MAML", "ANIL"])
def test_few_shot_learning_equals_the_loop_by_hand(method):
    example = load_example("few_shot")
    found, due = (side(method, 1, 20)[0] for side in (example.train, example.train_by_hand))
    start = example.first_layers(1)
    for ours, theirs, first in zip(*map(jax.tree.leaves, (found, due, start)), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
        assert np.max(np.abs(ours - first)) > 1e-2, "20 steps of Adam move every leaf"


def test_few_shot_learning_lowers_the_error_on_new_tasks():
    example = load_example("few_shot")
    x, _ = example.train("MAML", 0, 500)
    assert example.test_error("MAML", x) < example.test_error("MAML", example.first_layers(0)) / 2


def test_a_learned_regularizer_equals_the_loop_by_hand():
    example = load_example("learned_regularizer")
    found, due = (side(0, 5)[0] for side in (example.train, example.train_by_hand))
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(due), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-3)
    assert np.max(np.abs(found["log_weights"] - example.first_filters(0)["log_weights"])) > 0.05
