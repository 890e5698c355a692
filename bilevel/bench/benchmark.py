"""The benchmark from Python: the tables of a config, with classes and functions in the place of names."""

import json
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from bilevel.bench.config import load_config
from bilevel.bench.execute import Watcher, Where, execute
from bilevel.bench.live import Console, watch
from bilevel.bench.plugins import name_of
from bilevel.bench.store import Store


def benchmark(
    config: Mapping[str, Any] | str | Path, store: str | Path, *, jobs: int = 1, progress: bool = False
) -> Store:
    """Run an experiment, and return the store of its results; what is in it is not run again.

    Parameters
    ----------
    config : a TOML file, the name of one of the package, or the tables of such a file as a dict. In a dict, a solver's
        ``name`` may be its class, and a problem's the function that builds it
    store : folder of the results, for ``bilevel report`` too
    jobs : processes; your own classes must then be in a module that these can import
    progress : show a bar, or lines where there is no terminal

    Raises
    ------
    RuntimeError : a task failed; all else is in the store

    Examples
    --------
    >>> import tempfile
    >>> import bilevel
    >>> problem = {"name": bilevel.problems.quadratic, "n_inner": 64, "n_outer": 32, "dim_inner": 4, "dim_outer": 2}
    >>> solvers = [{"name": bilevel.SOBA, "step_size": [0.05, 0.1], "batch_size": 8}]
    >>> tables = {"problem": problem, "budget": {"epochs": 5}, "solvers": solvers}
    >>> config = {"name": "little", "metric": "value_gap", "seeds": 1, **tables}
    >>> store = bilevel.benchmark(config, tempfile.mkdtemp())
    >>> int(store.read()["final"].sum())
    2
    """
    kept: dict[str, Any] = {"config": config}
    if isinstance(config, Mapping):
        tables = _with_names(config)
        experiment = load_config(tables)
        kept = {"config": experiment.name, "text": _as_toml(tables).encode()}
    else:
        experiment = load_config(config)
    results, watcher = Store(store), _Failures()
    shown: Any = nullcontext()
    if progress:
        shown = watch(experiment.metric, Console(stderr=True))
    with shown as watcher.shown:
        execute(experiment, results, watcher, where=Where(jobs), **kept)
    if watcher.found:
        count, first = len(watcher.found), watcher.found[0]
        raise RuntimeError(f"{count} task{'s' * (count > 1)} failed; all else is in `{store}`. The first: {first}")
    return results


class _Failures:
    """A watcher that keeps what failed, and passes everything else on to the watcher that is shown, if any."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.shown: Watcher | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.shown, name, lambda *_: None)

    def failed(self, title: str, error: str) -> None:
        self.found.append(f"{title}: {error}")


def _with_names(config: Mapping[str, Any]) -> dict[str, Any]:
    tables = dict(config)
    if isinstance(tables.get("problem"), Mapping):
        tables["problem"] = _named(tables["problem"])
    if isinstance(tables.get("solvers"), list | tuple):
        tables["solvers"] = [_named(entry) for entry in tables["solvers"]]
    return tables


def _named(table: Any) -> Any:
    return {**table, "name": name_of(table["name"])} if isinstance(table, Mapping) and "name" in table else table


def _as_toml(tables: dict[str, Any]) -> str:
    """Return the text of a config file; what JSON writes of numbers, texts and lists is TOML too."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in tables.items() if not _is_table(value)]
    for key, value in tables.items():
        entries, head = ([value], f"[{key}]") if isinstance(value, dict) else (value, f"[[{key}]]")
        for entry in entries if _is_table(value) else ():
            lines += ["", head, *(f"{name} = {json.dumps(one)}" for name, one in entry.items())]
    return "\n".join(lines) + "\n"


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(isinstance(one, dict) for one in value))
