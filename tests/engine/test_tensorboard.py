"""The TensorBoard log, and logs of several processes."""

import importlib.util
import struct

import numpy as np
import pytest

import bilevel
from tests import cases
from tests.engine.test_logs import ROOT, SRBA, table, with_metric


def events(folder):
    """Yield the events of all files of a folder, oldest file first, parsed by the definition of the format."""
    from tensorboardX.crc32c import crc32c
    from tensorboardX.proto.event_pb2 import Event

    def masked(data):
        crc = crc32c(data)
        return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF

    for file in sorted(folder.iterdir(), key=lambda entry: entry.stat().st_mtime_ns):
        data = file.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            body, rest = data[12 : 12 + length], data[12 + length :]
            assert struct.unpack("<II", data[8:12] + rest[:4]) == (masked(data[:8]), masked(body))
            yield Event.FromString(body)
            data = rest[4:]


def scalars(folder):
    """Return the rows of scalars by step, and their wall times."""
    found = [event for event in events(folder) if event.summary.value and not event.summary.value[0].HasField("tensor")]
    rows = {event.step: {value.tag: value.simple_value for value in event.summary.value} for event in found}
    return rows, [event.wall_time for event in found]


def assert_same_scalars(rows, history):
    assert list(rows) == history["step"].tolist()
    for name, column in history.items():
        np.testing.assert_array_equal([row[name] for row in rows.values()], column.astype(np.float32), err_msg=name)


def test_tensorboard_receives_every_scalar_with_its_step_and_time(tmp_path):
    folder = tmp_path / "board"
    result = bilevel.run(cases.quadratic("float32"), SRBA, max_steps=50, log=bilevel.TensorBoardLog(folder))
    rows, times = scalars(folder)
    assert_same_scalars(rows, result.history)
    seconds = result.history["seconds"]
    np.testing.assert_allclose(np.array(times) - times[0], seconds - seconds[0], atol=1e-6)


def test_tensorboard_shows_the_settings_of_the_run(tmp_path):
    bilevel.run(cases.quadratic("float32"), SRBA, seed=3, max_steps=5, log=bilevel.TensorBoardLog(tmp_path))
    (value,) = [value for event in events(tmp_path) for value in event.summary.value if value.HasField("tensor")]
    text = value.tensor.string_val[0].decode()
    assert value.metadata.plugin_data.plugin_name == "text"
    for line in (
        "| solver | SRBA |",
        "| problem | quadratic |",
        "| seed | 3 |",
        "| period | 5 |",
        "| step_size | 0.05 |",
    ):
        assert line in text


def test_a_row_is_in_the_event_file_before_the_run_continues(tmp_path):
    class Reading(bilevel.TensorBoardLog):
        def write(self, row):
            super().write(row)
            seen.append(list(scalars(tmp_path)[0]))

    seen = []
    bilevel.run(cases.quadratic("float32"), SRBA, max_steps=20, eval_every=10, log=Reading(tmp_path))
    assert seen == [[0], [0, 10], [0, 10, 20]]


def test_a_resumed_run_continues_in_its_folder_and_hides_events_after_the_saved_step(saved, tmp_path):
    folder = tmp_path / "board"
    first = bilevel.run(saved[1], SRBA, max_steps=50, eval_every=10, log=bilevel.TensorBoardLog(folder))
    first.save(tmp_path / "first.npz")
    with pytest.raises(FileExistsError, match=r"board'\)`: the folder has event files. Delete them"):
        bilevel.run(saved[1], SRBA, max_steps=50, log=bilevel.TensorBoardLog(folder))
    result = bilevel.resume(
        tmp_path / "first.npz", saved[1], max_steps=80, eval_every=10, log=bilevel.TensorBoardLog(folder)
    )
    assert len(list(folder.iterdir())) == 2
    assert_same_scalars(scalars(folder)[0], result.history)
    restarts = [event.step for event in events(folder) if event.HasField("session_log")]
    assert restarts == [51]


def test_a_resumed_run_writes_its_history_to_a_new_folder(saved, tmp_path):
    log = bilevel.TensorBoardLog(tmp_path / "board")
    result = bilevel.resume(*saved, max_steps=80, eval_every=10, log=log)
    assert_same_scalars(scalars(tmp_path / "board")[0], result.history)


def test_a_full_disk_under_tensorboard_does_not_stop_a_run(tmp_path, monkeypatch):
    from tensorboardX.record_writer import RecordWriter

    flush, times = RecordWriter.flush, iter(range(100))

    def full(writer):
        if next(times) == 2:
            raise OSError(28, "No space left on device")
        flush(writer)

    monkeypatch.setattr(RecordWriter, "flush", full)
    with pytest.warns(RuntimeWarning, match=r"TensorBoardLog failed.*No space left"):
        result = bilevel.run(cases.quadratic("float32"), SRBA, max_steps=20, log=bilevel.TensorBoardLog(tmp_path))
    assert result.history["step"][-1] == 20
    assert list(scalars(tmp_path)[0]) == result.history["step"][:3].tolist()


def test_numbers_beyond_float32_are_logged_as_infinite(tmp_path):
    problem = with_metric(lambda point: 1e300)
    bilevel.run(problem, SRBA, max_steps=5, eval_every=5, log=bilevel.TensorBoardLog(tmp_path))
    assert [row["m"] for row in scalars(tmp_path)[0].values()] == [np.inf, np.inf]


@pytest.mark.slow
def test_only_the_first_of_two_processes_writes_a_log(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("two_processes", ROOT / "examples" / "two_processes.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    work = tmp_path / "work.py"
    work.write_text(
        "import sys, jax, bilevel\nfrom tests import cases\nfrom tests.engine import test_logs\n"
        "address, process = sys.argv[2], int(sys.argv[4])\n"
        "jax.distributed.initialize(address, 2, process, coordinator_bind_address=address)\n"
        f"log = bilevel.CSVLog({str(tmp_path)!r} + f'/{{process}}.csv')\n"
        "bilevel.run(cases.logistic_selection().sharded(), test_logs.SRBA, max_steps=20, eval_every=10, log=log)\n"
    )
    assert example.start_all(str(work), [], 2, timeout=200) == 0
    assert sorted(file.name for file in tmp_path.glob("*.csv")) == ["0.csv"]
    assert table(tmp_path / "0.csv")["step"].tolist() == [0, 10, 20]
