"""Where tasks run: in this process, in other processes of this machine (by joblib), or on a Dask cluster."""

import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeAlias

import jax

from bilevel._core.extras import require

_PATIENCE = 20  # seconds, for a scheduler and its first worker
_POLL_PAUSE = 0.05  # seconds between two checks for finished tasks of a cluster
Outcome: TypeAlias = tuple[Any, Any, str | None]  # a task, its rows, and the error message if it failed
Worker: TypeAlias = Callable[[Any, "Where"], Outcome]


@dataclass(frozen=True)
class Where:
    """The processes and the device that run an experiment.

    Parameters
    ----------
    jobs : number of processes on this machine
    dask : address of a Dask scheduler, whose workers run the tasks instead
    device : "cpu" or "gpu"; by default the choice of JAX
    """

    jobs: int = 1
    dask: str | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        if self.jobs < 1:
            raise ValueError(f"`jobs={self.jobs}`: must be at least 1.")
        if self.dask is not None and self.jobs != 1:
            raise ValueError("`jobs` and `dask` exclude each other: a cluster has its own workers.")

    @property
    def seeds_together(self) -> bool:
        """Whether one program runs all seeds, for which a GPU has enough memory."""
        return (self.device or jax.default_backend()) == "gpu"

    def on_device(self) -> AbstractContextManager[Any]:
        """Return a context in which JAX uses the device; ValueError if this machine has no such device."""
        try:
            return nullcontext() if self.device is None else jax.default_device(jax.devices(self.device)[0])
        except RuntimeError as error:
            raise ValueError(f"`device={self.device!r}`: JAX has no such device here: {error}") from error


def distribute(work: Worker, tasks: Sequence[Any], where: Where) -> Iterator[Outcome]:
    """Yield the outcomes of ``work(task, where)`` in other processes, in the order in which they end.

    A worker that dies, or a scheduler that is lost, gives failed outcomes of the tasks that it leaves unfinished.
    """
    return _run_locally(work, tasks, where) if where.dask is None else _run_on_cluster(work, tasks, where, where.dask)


def _run_locally(work: Worker, tasks: Sequence[Any], where: Where) -> Iterator[Outcome]:
    joblib, unfinished = require("joblib", "bench"), dict.fromkeys(tasks)
    parallel = joblib.Parallel(n_jobs=where.jobs, backend="loky", return_as="generator_unordered")
    # The processes inherit the blocked signal. Otherwise Ctrl-C would reach them too, and not only this process.
    with _ctrl_c_later():
        results = parallel(joblib.delayed(work)(task, where) for task in tasks)
    try:
        for outcome in results:
            del unfinished[outcome[0]]
            yield outcome
    except Exception as error:  # a worker that dies ends the whole pool
        for task in unfinished:
            yield task, [], _describe(error)


@contextmanager
def _ctrl_c_later() -> Iterator[None]:
    """Delay Ctrl-C until the end of the block; processes that are started in the block never receive it."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    # These trackers unblock the signal when they start, so they are started before.
    for tracker in ("multiprocessing", "joblib.externals.loky.backend"):
        import_module(f"{tracker}.resource_tracker").ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run_on_cluster(work: Worker, tasks: Sequence[Any], where: Where, address: str) -> Iterator[Outcome]:
    # The Dask backend of joblib is not used: with a single worker it would run everything in this process.
    with _connect(address) as client:
        futures = {client.submit(work, task, where, pure=False): task for task in tasks}
        waiting = require("distributed", "bench").as_completed(futures)
        while not waiting.is_empty():
            for future in _next_batch(waiting, client, address):
                try:
                    yield future.result()
                except Exception as error:  # the task killed several workers, or the scheduler is lost
                    yield futures[future], [], _describe(error)


def _connect(address: str) -> Any:
    distributed = require("distributed", "bench")
    try:
        client = distributed.Client(address, timeout=_PATIENCE)
    except OSError as error:
        raise ConnectionError(f"no Dask scheduler answers at `{address}`: {error}") from error
    try:
        client.wait_for_workers(1, timeout=_PATIENCE)
    except OSError as error:
        client.close()
        lost = f"no Dask scheduler answers at `{address}` any more"
        what = f"the Dask scheduler at `{address}` has no workers" if isinstance(error, TimeoutError) else lost
        raise ConnectionError(f"{what}: {error}") from error
    return client


def _next_batch(waiting: Any, client: Any, address: str) -> Any:
    """Return at least one finished future; while waiting, warn if all workers are gone or do not respond."""
    seen: dict[str, float] | None = None
    deadline, pause = time.monotonic() + _PATIENCE, _PATIENCE
    while not (batch := waiting.next_batch(block=False)):
        time.sleep(_POLL_PAUSE)
        if time.monotonic() > deadline:
            signs = _last_signs(client)
            if client.status == "running" and (problem := _describe_silence(signs, seen, pause)):
                left = f"{waiting.count()} tasks wait; Ctrl-C ends the waiting, and loses nothing done"
                warnings.warn(f"the Dask cluster at `{address}` {problem}. {left}.", stacklevel=2)
            pause = _PATIENCE if seen is None else 10 * _PATIENCE
            seen, deadline = signs or {}, time.monotonic() + pause
    return batch


def _last_signs(client: Any) -> dict[str, float] | None:
    """Return when the scheduler last heard from each worker, by its own clock, or None if it does not answer."""
    try:
        found = client.sync(client.scheduler.identity, callback_timeout=_PATIENCE)
    except OSError:
        return None
    return {name: worker["last_seen"] for name, worker in found["workers"].items()}


def _describe_silence(signs: dict[str, float] | None, seen: dict[str, float] | None, seconds: float) -> str:
    """Return what is wrong with a cluster, if anything; `seen` are the last signs of ``seconds`` ago."""
    if signs is None:
        return "does not answer"
    if not signs:
        return "has no workers left; start one"
    silent = [name for name, last in signs.items() if (seen or {}).get(name) == last]
    names = f"{', '.join(silent[:3])}{', …' * (len(silent) > 3)}"
    what = f"has not heard of {len(silent)} of its {len(signs)} workers for {seconds:g} seconds ({names})"
    return f"{what}; if they were stopped, continue or end them, and others take over their tasks" if silent else ""


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
