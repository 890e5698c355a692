"""A file that is cut short or has a flipped bit is read as it was written, or refused by its name.

Nothing else is skipped, and no file is renamed, changed or deleted.
"""

import shutil
import warnings

import numpy as np
import pytest

import bilevel
from bilevel.bench.config import load_config
from bilevel.bench.store import Store
from tests.bench.tiny import assert_same_table, table
from tests.faults import repeats, rng, sweeps
from tests.faults.files import KINDS, STEPS, check_same, command, problem, solve

pytestmark = pytest.mark.slow


def cut(content, random):
    return content[: random.randrange(len(content))]


def flip(content, random):
    place = random.randrange(len(content))
    return content[:place] + bytes([content[place] ^ 1 << random.randrange(8)]) + content[place + 1 :]


@pytest.fixture(params=[cut, flip])
def damage(request):
    """Return a function that damages a file many times and calls ``check`` after each damage."""

    def damage_often(path, check):
        content, random = path.read_bytes(), rng()
        for _ in range(repeats(20, 400)):
            path.write_bytes(changed := request.param(content, random))
            check()
            assert path.read_bytes() == changed, "the file was changed"

    return damage_often


def refusal(read):
    """Return the message with which a reader refuses a file, or None."""
    try:
        read()
    except ValueError as error:
        return str(error)
    return None


def test_a_damaged_file_of_a_store_hides_no_other_file(damage):
    source, folder = sweeps.undisturbed()[0], sweeps.new_folder("damaged")
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
        assert done == set(found["cell"]), "cells count as finished but are missing"
        assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in paths)
        if gone:
            assert all(paths[0].name in str(one.message) and "damaged" in str(one.message) for one in caught)
            assert len(caught) == 2 and list(store.damaged()) == [folder / paths[0].name]

    damage(folder / paths[0].name, check)


def test_a_store_with_a_damaged_file_is_completed_and_the_file_can_be_set_aside():
    random = rng()
    for _ in range(repeats(1, 4)):
        folder = sweeps.new_folder("repaired")
        shutil.copytree(sweeps.undisturbed()[0].folder, folder, dirs_exist_ok=True)
        path = random.choice(sorted(folder.glob("*.parquet")))
        path.write_bytes(content := cut(path.read_bytes(), random))
        output, code = command("check", folder)
        assert code == 1 and path.name in output and "1 damaged files" in output, output
        output = sweeps.start_run(folder).end()
        assert path.name in output and "is damaged" in " ".join(output.split()), output
        assert path.read_bytes() == content, "the damaged file was changed"
        output, code = command("check", folder, "--set-aside")
        assert code == 0 and "set aside as" in output, output
        (folder / f"_{path.name}.damaged").unlink()
        sweeps.check_finished(folder)


def test_a_damaged_config_is_an_experiment_or_refused_with_its_name(damage):
    path = sweeps.new_folder("config") / "steady.toml"
    path.write_text(sweeps.CONFIG)

    def check():
        message = refusal(lambda: load_config(path))
        assert message is None or message.startswith(f"{path}: "), message
        output, code = command("run", path, "--store", path.parent / "store", "--only", "NoSuchSolver")
        assert code == 2 and "error: " in output, output

    damage(path, check)


def test_a_damaged_checkpoint_is_resumed_exactly_or_refused_with_its_name(damage):
    path = sweeps.new_folder("checkpoint") / "run.npz"
    solve(max_steps=30).save(path)
    complete, runs = solve(), []
    check_same(bilevel.resume(path, problem(), **STEPS))

    def check():
        if (message := refusal(lambda: runs.append(bilevel.Run.load(path, problem())))) is not None:
            assert str(path) in message, message
            return
        run = runs.pop()
        run.advance(STEPS["max_steps"] - run.step)
        np.testing.assert_array_equal(run.point.outer_var, complete.point.outer_var)

    damage(path, check)


def test_damaged_data_are_read_exactly_or_refused_with_the_name_of_the_file(damage):
    kind = KINDS["data"](sweeps.new_folder("data"))
    kind.before()
    np.savez_compressed(path := kind.folder / "made_up.npz", **kind.arrays)

    def check():
        loaded = []
        if (message := refusal(lambda: loaded.append(kind.load()))) is not None:
            assert str(path) in message, message
            return
        np.testing.assert_array_equal(loaded[0].X_train, kind.arrays["X_train"])
        np.testing.assert_array_equal(loaded[0].y_train, kind.arrays["y_train"])

    damage(path, check)
