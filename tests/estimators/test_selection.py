"""Folds of rows, and comparisons of structures on rows on which they were not learned."""

import numpy as np
import pytest
from sklearn.model_selection import KFold, RepeatedKFold, ShuffleSplit, TimeSeriesSplit

from bilevel.estimators.losses import Logistic
from bilevel.estimators.selection import Folds, SequentialComparison, find_shuffles


def test_some_folds_weigh_as_much_as_all():
    held_out = np.kron(np.eye(5), [1.0, 2.0]) / 2
    folds = Folds.of_rows(1.0 * (held_out == 0), held_out)
    part = folds.rescaled(np.array([1, 3]))
    assert part.sizes.sum() == part.held_out.sum() == folds.held_out.sum() == 7.5
    np.testing.assert_array_equal(part.held_out, 2.5 * held_out[[1, 3]])
    np.testing.assert_array_equal(part.fitted, folds.fitted[[1, 3]])


def test_a_structure_must_be_better_by_two_nats_and_by_a_standard_error():
    weights = np.ones(50)
    losses = np.zeros((3, 50))
    losses[1] = -0.039  # 1.95 nats in all
    losses[2, :2] = -1.1  # two rows alone: its standard error is 1.52
    assert decide(losses, weights) == 2
    losses[2, 2:4] = 0.3, 0.3
    assert decide(losses, weights) == 0


def decide(losses, weights):
    comparison = SequentialComparison([None] * len(losses), Logistic())
    comparison.add(losses, weights)
    return comparison.result().chosen


def test_structures_worse_by_a_standard_error_are_dropped():
    comparison, weights = SequentialComparison([None] * 4, Logistic()), np.ones(4)
    comparison.add(
        np.array([[1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.5], [3.0, 4.0, 5.0, 7.0], [0.0, 1.0, 2.0, 4.0]]), weights
    )
    assert comparison.open.tolist() == [0, 3] and not comparison.decided
    comparison.add(np.array([[1.0, 2.0, 3.0, 4.0], [3.0, 4.0, 5.0, 8.0]]), weights)
    assert comparison.decided
    found = comparison.result()
    assert found.differences == pytest.approx([0.0, 0.5, 9.0, (-3.0 + 10.0) / 2])
    assert found.losses == pytest.approx(10 + found.differences)
    each = np.array([0.5, 0.5, 0.5, 2.0])  # the last one: its mean over both shuffles
    assert found.standard_errors[3] == pytest.approx(np.sqrt(np.sum((each - each.mean()) ** 2)))


def test_folds_of_one_shuffle_are_found():
    def numbers(cv):
        held_out = np.zeros((cv.get_n_splits(), 12), bool)
        for k, (_, test) in enumerate(cv.split(np.zeros(12))):
            held_out[k, test] = True
        return find_shuffles(held_out).tolist()

    assert numbers(RepeatedKFold(n_splits=3, n_repeats=2, random_state=0)) == [0, 0, 0, 1, 1, 1]
    assert numbers(KFold(4)) == 4 * [0]
    assert numbers(ShuffleSplit(4, test_size=0.5, random_state=0)) == 4 * [0]
    assert numbers(TimeSeriesSplit(3)) == 3 * [0]
