"""Draws of integers equal those of `jax.random`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bilevel._core import threefry


@pytest.mark.parametrize("x64", [False, True])
def test_keys_and_integers_are_bit_for_bit_those_of_jax_random(x64):
    cases = [(1, ()), (53, (3,)), (60_000, (2, 4)), (2**16 + 1, ()), (2**31 - 1, ())]

    @jax.jit
    def both(seed, index):
        key = jax.random.key(seed, impl="threefry2x32")
        ours, theirs = threefry.fold_in(key, index), jax.random.fold_in(key, index)
        pairs = [(jax.random.key_data(ours), jax.random.key_data(theirs))]
        for n, shape in cases:
            pairs.append((threefry.integers(ours, shape, n), jax.random.randint(ours, shape, 0, n, dtype=jnp.int32)))
        return pairs

    with jax.enable_x64(x64):
        for seed, index in ((0, 0), (1, 5), (2**31 - 1, 2**31 - 1)):
            for ours, theirs in both(np.int32(seed), np.int32(index)):
                assert ours.dtype == theirs.dtype
                np.testing.assert_array_equal(ours, theirs)
