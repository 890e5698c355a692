"""An experiment may be stopped at any moment, and goes on from there."""

import random
import signal
import time

import pytest

from bilevel.bench.store import Store
from tests.bench import commands, tiny

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return tiny.write(tmp_path_factory.mktemp("config"), commands.CONFIG)


@pytest.fixture(scope="module")
def undisturbed(cache, config, tmp_path_factory):
    return commands.completed(cache, config, tmp_path_factory.mktemp("undisturbed"))


def assert_same_results(found, expected):
    tiny.assert_same_table(tiny.table(found, "sweep"), tiny.table(expected, "sweep"))
    timed = [store.read("timing")[lambda frame: frame["final"]] for store in (found, expected)]
    cells = [dict(zip(frame["cell"], frame["status"], strict=True)) for frame in timed]
    assert cells[0] == cells[1] and len(cells[0]) == commands.N_TIMED


def test_killed_five_times_it_ends_as_if_it_had_not_been(cache, config, undisturbed, tmp_path):
    rng = random.Random(0)
    for _ in range(5):
        before = commands.n_files(tmp_path)
        process = commands.start(cache, "run", config, "--store", tmp_path)
        commands.wait_for(lambda before=before: commands.n_files(tmp_path) > before, process)
        time.sleep(rng.uniform(0.0, 0.5))
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        frame = Store(tmp_path).read()
        assert frame.groupby("cell")["final"].sum().eq(1).all(), "only whole cells are there"
    assert commands.n_files(tmp_path) < commands.N_TASKS + commands.N_TIMED, "or it was not killed in the middle"
    assert_same_results(commands.completed(cache, config, tmp_path), undisturbed)
    assert not list(tmp_path.glob("*.damaged"))


def test_killed_while_nothing_is_there_yet_it_begins_anew(cache, config, undisturbed, tmp_path):
    process = commands.start(cache, "run", config, "--store", tmp_path)
    time.sleep(1.0)
    process.kill()
    process.communicate()
    assert_same_results(commands.completed(cache, config, tmp_path), undisturbed)


# One long task, then its timing, as long; or many tasks, each short.
LONG = commands.CONFIG.replace("epochs = 400", "epochs = 40000").replace("seconds = 0.1", "seconds = 1e3")
PHASES = {"sweep": (commands.CONFIG, ("--only", "SRBA")), "timing": (LONG, ("--only", "SOBA", "--seeds", "0:1"))}


@pytest.mark.parametrize("phase", PHASES)
def test_ctrl_c_says_how_to_go_on_and_leaves_whole_cells(cache, tmp_path, phase):
    text, options = PHASES[phase]
    config, folder = tiny.write(tmp_path, text), tmp_path / "store"
    process = commands.start(cache, "run", config, "--store", folder, *options)
    commands.wait_for(lambda: commands.n_files(folder) >= 1, process)
    time.sleep(0.2 if phase == "sweep" else 2.0)
    process.send_signal(signal.SIGINT)
    said = commands.end(process)
    assert process.returncode == 130, said
    assert f"To go on: bilevel run {config} --store {folder} {' '.join(options)}" in said
    frame = Store(folder).read()
    assert set(frame["phase"]) == {"sweep"}, "half a timing is none"
    assert frame.groupby("cell")["final"].sum().eq(1).all()
    assert set(frame["status"]) == {"out_of_budget"}
