"""How rows are drawn: four ways, each a pure function of (key, step), so any step can be drawn at any time.

A *block* is one of the ceil(n/b) consecutive runs of b rows of the data, which are shuffled once when a
problem is built. The last block may be short; it is then drawn less often, never filled with other rows.

==============  ====================================================================================
``blocks``      one block, drawn with probability (its rows)/n, with replacement
``iid``         b rows, uniform, with replacement: what the theory assumes; 2 to 3 times slower
``reshuffle``   every block once per pass, in a new order each pass
``full``        every row, always: the deterministic version of a method
==============  ====================================================================================
"""

import jax
import jax.numpy as jnp

from bilevel.types import Array

SAMPLINGS = ("blocks", "iid", "reshuffle", "full")

_ROUNDS = 16  # of the Feistel network; with 4 the orders of few blocks are visibly uneven, with 8 hardly


def uniform_rows(key: Array, shape: tuple[int, ...], n: int) -> Array:
    """Draw rows of {0, …, n-1} uniformly; the dtype is named so that x64 on or off draws the same."""
    return jax.random.randint(key, shape, 0, n, dtype=jnp.int32)


def permuted(key: Array, position: Array, n: int) -> Array:
    """Return the image of ``position`` under a random permutation of {0, …, n-1} given by ``key``.

    A Feistel network on the next power of four, walked until it lands inside, is a bijection that can be
    evaluated at one place alone: no table of the permutation is carried from step to step.
    """
    half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = jnp.uint32(2**half_bits - 1)
    round_keys = jax.random.bits(key, (_ROUNDS,), dtype=jnp.uint32)

    def network(value: Array) -> Array:
        left, right = value >> half_bits, value & mask
        for i in range(_ROUNDS):
            left, right = right, left ^ (_mixed(right ^ round_keys[i]) & mask)
        return (left << half_bits) | right

    outside = network(position.astype(jnp.uint32))
    return jax.lax.while_loop(lambda value: value >= n, network, outside).astype(jnp.int32)


def _mixed(bits: Array) -> Array:
    """Scramble 32 bits (the finaliser of MurmurHash3)."""
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)
