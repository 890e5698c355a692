"""The machine: processor, versions, load, and the speeds of memory and arithmetic."""

import os
import platform
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp

from bilevel.bench.execute import environment

BUSY = 0.5  # load of other processes that disturbs a measurement


def facts():
    """Return a description of machine and versions, line by line."""
    known = environment()
    return [
        f"machine: {known['machine']}, {platform.platform()}",
        f"Python {known['python']}, JAX {known['jax']}, bilevel {known['bilevel']} at {known['revision'] or '?'}",
        f"written at {known['written_at']}",
    ]


def load(own=0):
    """Return the load average over a minute, with a warning if other processes were running."""
    average = os.getloadavg()[0]
    return f"{average:.2f}" + (" **(busy machine: times are unreliable)**" if average > own + BUSY else "")


def load_after():
    """Return the load average after a part that used all cores."""
    return load(own=os.cpu_count() or 1)


class Speed(NamedTuple):
    """Bytes per second from rows and from the cache, and floating-point operations per second."""

    rows: float
    cache: float
    flops: float

    def __str__(self):
        return (
            f"{self.rows / 1e9:.1f} GB/s from an array as large as the rows, {self.cache / 1e9:.1f} GB/s from one of "
            f"128 kB, {self.flops / 1e9:.0f} GFLOP/s in products of 512 × 512 matrices (float32, all cores)"
        )


def speed(row_bytes):
    """Measure the speeds, the first one with an array as large as the rows."""
    matrix = jnp.full((512, 512), 1 / 512, jnp.float32)
    return Speed(_stream(row_bytes), _stream(2**17), _rate(lambda a: a @ matrix, matrix, 2 * 512**3, 20))


def _stream(size):
    """Return bytes read and written per second. A sum would be limited by the order of its additions."""
    array = jnp.ones(size // 4, jnp.float32)
    return _rate(lambda a: a * 0.999 + 1.0, array, 2 * array.nbytes, max(8, 2**29 // size))


def _rate(function, start, work, times, rounds=5):
    """Return the work per second of repeated application of ``function``, in the best of some rounds."""

    @jax.jit
    def repeated(array):
        return jax.lax.fori_loop(0, times, lambda _, array: function(array), array)

    jax.block_until_ready(repeated(start))
    best = float("inf")
    for _ in range(rounds):
        began = time.perf_counter()
        jax.block_until_ready(repeated(start))
        best = min(best, time.perf_counter() - began)
    return times * work / best
