"""Handing rows to a log, whatever becomes of it."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from bilevel.logs.base import About, Log, Row


class Recorder:
    """Hands the rows of a history to a log, each once, and lets go of a log that fails."""

    def __init__(self, log: Log | None, done: int) -> None:
        self._log, self._done = log, done

    def catch_up(self, rows: Sequence[Row]) -> None:
        """Hand over the rows that the log has not got yet."""
        try:
            while self._log is not None and self._done < len(rows):
                self._log.write(dict(rows[self._done]))
                self._done += 1
        except Exception as error:
            self._let_go(error)

    def close(self) -> None:
        """Close the log, unless it has failed."""
        try:
            if self._log is not None:
                self._log.close()
        except Exception as error:
            self._let_go(error)

    def _let_go(self, error: Exception) -> None:
        failed, self._log = self._log, None
        assert failed is not None
        with suppress(Exception):
            failed.close()
        name = type(failed).__name__
        sentence = f"`log`: {name} failed ({error!r}). The run goes on without it; `result.history` has every row."
        warnings.warn(sentence, RuntimeWarning, stacklevel=7)


@contextmanager
def recording(log: Log | None, about: About, past: Sequence[Row]) -> Iterator[Recorder]:
    """Open a log, yield what hands rows over to it, and close it however the block ends."""
    if log is not None:
        log.open(about, past)
    recorder = Recorder(log, len(past))
    try:
        yield recorder
    finally:
        recorder.close()
