"""Damaged files.

A file is cut short, or one of its bits is flipped, at random places. What is read must then be what was written, or the
file must be refused by its name; nothing else is passed over, and nothing is renamed, changed or deleted.
"""

import hashlib
import random
import shutil
import warnings
from unittest import mock

import numpy as np

import bilevel
from benchmarks.campaign import workshop
from benchmarks.campaign.table import Counter
from benchmarks.campaign.written import KINDS, STEPS, check_same, command, problem, solve
from bilevel.bench.config import load_config
from bilevel.bench.store import Store
from bilevel.datasets import loading
from tests.bench.tiny import assert_same_table, table

RULE = "the same as before, or refused by the name of the file; nothing else changes"


def rows(seed, quick):
    rng = random.Random(seed)
    counts = (20,) * 4 if quick else (400, 400, 400, 400, 3)
    kinds = (damage_store, damage_config, damage_checkpoint, damage_data)
    return [row for kind, count in zip(kinds, counts, strict=True) for row in kind(rng, count)]


def cut(content, rng):
    return content[: rng.randrange(len(content))]


def flip(content, rng):
    place = rng.randrange(len(content))
    return content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :]


DAMAGES = {"cut short": cut, "one bit flipped": flip}


def refusal(read):
    """What a reader says that refuses a file; None where it does not."""
    try:
        read()
    except ValueError as error:
        return str(error)
    return None


def damage(what, path, n_times, rng, check, rule=RULE):
    """Damage a file again and again; ``check`` reads it, and is told whether it is."""
    content = path.read_bytes()
    for fault, change in DAMAGES.items():
        counter = Counter(f"{fault}: {what}", rule)
        for number in range(n_times):
            path.write_bytes(changed := change(content, rng))
            with counter.case(f"{number}, {hashlib.sha256(changed).hexdigest()[:8]}"):
                check()
                assert path.read_bytes() == changed, "the file was changed"
        yield counter.row()
    path.write_bytes(content)


def damage_store(rng, n_times):
    """One of two files of a store: the other is read whole, and the cells of this one are there or count as not run."""
    source, folder = workshop.undisturbed()[0], workshop.new_folder("damaged")
    paths = sorted(source.folder.glob("*.parquet"))[:2]
    for path in paths:
        shutil.copy(path, folder)
    store = Store(folder)
    expected = table(store)

    def check():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found, done = table(store), store.finished()
        gone = set(expected["cell"]) - set(found["cell"])
        assert_same_table(found, expected[~expected["cell"].isin(gone)].reset_index(drop=True))
        assert done == set(found["cell"]), "cells are done but not there"
        assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in paths)
        if gone:
            assert all(paths[0].name in str(one.message) and "damaged" in str(one.message) for one in caught)
            assert len(caught) == 2 and list(store.damaged()) == [folder / paths[0].name]

    with mock.patch("bilevel.bench.store._PAUSES", (0.0, 0.0)):
        yield from damage("store", folder / paths[0].name, n_times, rng, check)
    yield from repair_store(rng, max(1, n_times // 100))


def repair_store(rng, n_times):
    """A whole store with one damaged file: run again, it is complete beside the file, which `check` sets aside."""
    rule = "`bilevel check` names it, `run` computes its cells again, `check --set-aside` moves it out of the way"
    counter = Counter("a damaged file in a store, to the end", rule)
    for number in range(n_times):
        folder = workshop.new_folder("repaired")
        shutil.copytree(workshop.undisturbed()[0].folder, folder, dirs_exist_ok=True)
        path = rng.choice(sorted(folder.glob("*.parquet")))
        with counter.case(f"{number}, {path.name}"):
            path.write_bytes(cut(path.read_bytes(), rng))
            content = path.read_bytes()
            said, code = command("check", folder)
            assert code == 1 and path.name in said and "1 damaged files" in said, said
            said = workshop.start_run(folder).end()
            assert path.name in said and "is damaged" in " ".join(said.split()), said
            assert path.read_bytes() == content, "the damaged file was changed"
            said, code = command("check", folder, "--set-aside")
            assert code == 0 and "set aside as" in said, said
            (folder / f"_{path.name}.damaged").unlink()
            workshop.check_finished(folder)
    return [counter.row()]


def damage_config(rng, n_times):
    """A config is text of the user's: another number in it is no damage that can be seen."""
    path = workshop.new_folder("config") / "steady.toml"
    path.write_text(workshop.CONFIG)

    def check():
        said = refusal(lambda: load_config(path))
        assert said is None or said.startswith(f"{path}: "), said
        said, code = command("run", path, "--store", path.parent / "store", "--only", "NoSuchSolver")
        assert code == 2 and "error: " in said, said

    yield from damage("config", path, n_times, rng, check, "an experiment, or refused with the name of the file")


def damage_checkpoint(rng, n_times):
    path = workshop.new_folder("checkpoint") / "run.npz"
    solve(max_steps=30).save(path)

    def check():
        if (said := refusal(lambda: runs.append(bilevel.Run.load(path, problem())))) is not None:
            assert str(path) in said, said
            return
        run = runs.pop()
        run.advance(STEPS["max_steps"] - run.step)
        np.testing.assert_array_equal(run.point.outer_var, whole.point.outer_var)

    runs = []
    whole = solve()
    check_same(bilevel.resume(path, problem(), **STEPS))
    yield from damage("checkpoint", path, n_times, rng, check)


def damage_data(rng, n_times):
    kind = KINDS["data"](workshop.new_folder("data"))
    kind.before()
    loading.write(path := kind.folder / "made_up.npz", kind.arrays)

    def check():
        loaded = []
        if (said := refusal(lambda: loaded.append(kind.load()))) is not None:
            assert str(path) in said, said
            return
        np.testing.assert_array_equal(loaded[0].X_train, kind.arrays["X_train"])
        np.testing.assert_array_equal(loaded[0].y_train, kind.arrays["y_train"])

    yield from damage("data", path, n_times, rng, check)
