"""The rows of coming steps, where they stay on the host: read and put on the device while it computes."""

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from threading import Semaphore
from typing import NamedTuple

import jax
import numpy as np

from bilevel._precision import arithmetic
from bilevel._types import Rows
from bilevel.oracles import HostSamples, Oracles, Samples
from bilevel.oracles.host_samples import in_thread

_PART_BYTES = 2**26  # of rows that are put on the device at once


class Part(NamedTuple):
    """Steps of a page, from one position to another, and oracles that hold their rows."""

    oracles: Oracles
    start: int
    stop: int


class Feed:
    """Gives out the steps of a page in parts, the rows of each on the device; a thread reads those of the next parts.

    Attributes
    ----------
    rows : what is drawn in each step of the page, of levels on the host; by seed, step and draw
    """

    def __init__(self, oracles: Oracles, dtype: np.dtype, page_length: int) -> None:
        self._oracles, self._dtype, self._page_length = oracles, dtype, page_length
        self._gate = Semaphore(1)  # one part is read at a time
        hosts = [level for level in (oracles.inner_samples, oracles.outer_samples) if isinstance(level, HostSamples)]
        self._ahead = max(level.reader.data.prefetch for level in hosts)
        self._parts: dict[int, Future[Oracles]] = {}
        self.rows = Rows()

    def open(self, rows: Rows, n_seeds: int) -> None:
        """Turn to a page with these draws."""
        for part in self._parts.values():
            part.cancel()
        self._parts = {}
        self.rows = jax.tree.map(lambda drawn: np.asarray(drawn).reshape(n_seeds, -1, drawn.shape[-1]), rows)
        sizes = [_unit_bytes(level) * drawn[:, 0].size for level, drawn in self._levels()]
        self._length = max(1, min(self._page_length, _PART_BYTES // max(1, sum(sizes))))

    def _levels(self) -> list[tuple[HostSamples, np.ndarray]]:
        pairs = zip((self._oracles.inner_samples, self._oracles.outer_samples), self.rows, strict=True)
        return [(level, drawn) for level, drawn in pairs if isinstance(level, HostSamples) and drawn is not None]

    def parts(self, start: int, stop: int) -> Iterator[Part]:
        """Give out the steps from start to stop, at least one part."""
        while True:
            number = start // self._length
            end = min(stop, (number + 1) * self._length)
            yield Part(self._held(number), start, end)
            start = end
            if start >= stop:
                return

    def _held(self, number: int) -> Oracles:
        last = -(-self._page_length // self._length) - 1
        for coming in range(number, min(number + self._ahead, last) + 1):
            if coming not in self._parts:
                self._parts[coming] = in_thread(self._hold, coming, gate=self._gate)
        self._parts = {coming: part for coming, part in self._parts.items() if coming >= number}
        return self._parts[number].result()

    def _hold(self, number: int) -> Oracles:
        """Return oracles that hold the rows of a part; settings of JAX are those of a thread."""

        def hold(level: Samples, drawn: np.ndarray | None) -> Samples:
            if not isinstance(level, HostSamples) or drawn is None:
                return level
            part = drawn[:, number * self._length : (number + 1) * self._length]
            units = level.n if level.sampling == "iid" else level.n_blocks
            return level.hold(np.unique(part), min(units, self._length * drawn[:, 0].size))

        with arithmetic(self._dtype):
            inner = hold(self._oracles.inner_samples, self.rows.inner)
            outer = hold(self._oracles.outer_samples, self.rows.outer)
            return replace(self._oracles, inner_samples=inner, outer_samples=outer)


def _unit_bytes(samples: HostSamples) -> int:
    """Return the bytes of a row where rows are drawn, else of a block."""
    row = sum(leaf.nbytes for leaf in jax.tree.leaves(samples.reader.data.head))
    return row if samples.sampling == "iid" else row * samples.batch_size
