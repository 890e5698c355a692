"""The command line: what it shows, what it writes, and one line for what it cannot do."""

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import bilevel
from bilevel.bench.store import Store
from bilevel.cli import app
from tests.bench import tiny

ROOT = Path(__file__).parents[1]
TEXT = tiny.HEAD + tiny.BUDGET + tiny.SECONDS + tiny.SOBA


def said(*arguments, code=0):
    """What a command prints, without its line breaks; anything but an exit would be a traceback."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return " ".join(result.output.split())


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A config, the store it filled, and what was said."""
    folder = tmp_path_factory.mktemp("run")
    config = tiny.write(folder, TEXT)
    return config, folder / "store", said("run", config, "--store", folder / "store")


@pytest.fixture
def config(tmp_path):
    return tiny.write(tmp_path, TEXT)


def test_without_arguments_it_shows_its_commands():
    result = CliRunner().invoke(app, [])
    assert result.exit_code in (0, 2), "it depends on the version of click"
    shown = result.output
    assert "Usage" in shown and all(name in shown for name in ("list", "run", "select", "report", "figure", "check"))


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("solvers", list(bilevel.SOLVERS)),
        ("problems", ["quadratic", "ijcnn1", "worst_case"]),
        ("datasets", bilevel.datasets.names()),
        ("metrics", ["value_gap", "hypergrad_norm_sq", "rollbacks"]),
    ],
)
def test_each_kind_can_be_listed_alone_or_with_the_others(kind, names):
    assert all(name in said("list", kind) for name in names)
    assert all(name in said("list") for name in names)


def test_a_run_fills_a_store_and_says_what_is_next(finished):
    config, folder, shown = finished
    store = Store(folder)
    experiment = tiny.load_config(config)
    assert {cell.id for cell in tiny.cells(experiment)} <= store.finished()
    assert set(store.read("timing")["seed"]) == {0, 1}
    assert f"next: bilevel report {folder} --out {folder}-report" in shown
    assert (folder / "_tiny.toml").read_text() == config.read_text()


def test_a_second_run_has_nothing_to_do(finished):
    config, folder, _ = finished
    before = sorted(folder.iterdir())
    assert "4 cells were there" in said("run", config, "--store", folder)
    assert sorted(folder.iterdir()) == before


def test_the_default_store_is_named_after_the_experiment(config, tmp_path, monkeypatch):
    tiny.Pretence().install(monkeypatch)
    monkeypatch.chdir(tmp_path)
    said("run", config, "--only", "SOBA", "--seeds", "3:5")
    assert set(Store(tmp_path / "results" / "tiny").read()["seed"]) == {3, 4}


def test_the_selected_setting_is_shown_with_its_numbers(finished):
    shown = said("select", finished[1]).replace("│", "").replace(" ", "")  # a narrow table folds
    best = Store(finished[1]).read("timing")["param_step_size"].iloc[0]
    assert "SOBA" in shown and "value_gap" in shown
    assert f"step_size={best:g}" in shown and "batch_size" in shown


def test_the_report_is_one_page(finished, tmp_path):
    shown = said("report", finished[1], "--out", tmp_path / "page")
    page = tmp_path / "page" / "index.html"
    assert f"report: {page}" in shown and "SOBA" in page.read_text()


def test_figures_are_written_for_print(finished, tmp_path):
    shown = said("figure", finished[1], "--out", tmp_path / "figures")
    kinds = {path.suffix: path for path in (tmp_path / "figures").iterdir()}
    assert kinds.keys() == {".pdf", ".png"} and all(str(path) in shown for path in kinds.values())
    assert kinds[".pdf"].read_bytes().startswith(b"%PDF") and kinds[".png"].read_bytes().startswith(b"\x89PNG")


def test_the_machine_is_described():
    shown = said("check")
    assert "JAX" in shown and "cpu" in shown and "digits" in shown and "pyarrow" in shown


def test_a_name_that_looks_like_markup_is_printed_as_it_is(config, tmp_path, monkeypatch):
    tiny.Pretence().install(monkeypatch)
    folder = tmp_path / "a[red]b[" / "]c[" / "bold]"
    assert f"results in {folder};" in said("run", config, "--store", folder)


def test_a_task_that_fails_is_named_and_the_exit_code_is_1(config, tmp_path, monkeypatch):
    pretence = tiny.Pretence([("SOBA", 1)]).install(monkeypatch)
    folder = tmp_path / "store"
    shown = said("run", config, "--store", folder, "--only", "SOBA", code=1)
    assert "SOBA on quadratic, seed 1 failed: RuntimeError: no SOBA today" in shown
    assert (
        f"1 task failed; all else is in {folder}. To try again: bilevel run {config} --store {folder} --only SOBA"
        in shown
    )
    pretence.broken.clear()
    said("run", config, "--store", folder, "--only", "SOBA")


def test_ctrl_c_says_how_to_go_on(config, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("bilevel.bench.execute.run_task", interrupted)
    folder = tmp_path / "a store"
    shown = said("run", config, "--store", folder, "--seeds", "0:1", code=130)
    assert f"To go on: bilevel run {config} --store '{folder}' --seeds 0:1" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--only", "SORBA"), "unknown solver `SORBA`; did you mean `SOBA`?"),
        (("--seeds", "3"), "`--seeds 3`: must be FIRST:STOP with FIRST below STOP"),
        (("--seeds", "3:3"), "`--seeds 3:3`: must be FIRST:STOP"),
        (("--seeds", "a:b"), "`--seeds a:b`: must be FIRST:STOP"),
        (("--seeds=-1:2",), "`--seeds -1:2`: must be FIRST:STOP"),
        (("--jobs", "2", "--dask", "tcp://127.0.0.1:1"), "`jobs` and `dask` exclude each other"),
        (("--jobs", "0"), "Invalid value for '--jobs'"),
        (("--device", "gpu"), "`device='gpu'`: JAX has no such device here"),
        (("--device", "abacus"), "Invalid value for '--device'"),
    ],
)
def test_a_bad_option_is_refused_in_a_line(config, tmp_path, monkeypatch, arguments, message):
    pretence = tiny.Pretence().install(monkeypatch)
    assert message in said("run", config, "--store", tmp_path / "store", *arguments, code=2)
    assert pretence.swept == []


def test_an_unknown_config_is_refused_with_the_nearest(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    assert "no such file; did you mean `smoke`?" in said("run", "smoek", code=2)
    assert "no such file" in said("run", tmp_path / "none.toml", code=2)
    (tmp_path / "bad.toml").write_text("name = ")
    assert "not TOML" in said("run", tmp_path / "bad.toml", code=2)
    assert "Missing argument" in said("run", code=2)


@pytest.mark.parametrize("command", ["select", "report", "figure"])
def test_a_store_that_is_not_there_or_empty_is_refused(command, tmp_path):
    missing = tmp_path / "none"
    assert f"`{missing}`: no such folder; `bilevel run CONFIG --store {missing}` makes it." in said(
        command, missing, code=2
    )
    assert not missing.exists()
    assert "error:" in said(command, tmp_path, code=2)
    (tmp_path / "file").write_text("")
    assert "is a file; a store is a folder" in said(command, tmp_path / "file", code=2)


@pytest.mark.parametrize("command", ["select", "report", "figure"])
def test_an_unknown_metric_is_refused_with_the_nearest(command, finished, tmp_path):
    options = ("--metric",) if command == "select" else ("--out", tmp_path, "--select")
    shown = said(command, finished[1], *options, "value_gab", code=2)
    assert "did you mean `value_gap`?" in shown


@pytest.mark.filterwarnings("default")
def test_a_damaged_file_is_told_and_its_cells_are_run_again(finished, tmp_path, monkeypatch):
    config, folder, _ = finished
    store = Store(shutil.copytree(folder, tmp_path / "store"))
    whole = store.finished()
    path = next(store.folder.glob("[!._]*.parquet"))
    path.write_bytes(path.read_bytes()[:-50])
    assert "is damaged" in said("select", store.folder)
    shown = said("check", store.folder, code=1)
    assert f"{path.name}: damaged" in shown and "1 damaged files" in shown and path.exists()
    assert "set aside as" in said("check", store.folder, "--set-aside") and not path.exists()
    assert store.finished() < whole
    tiny.Pretence().install(monkeypatch)
    said("run", config, "--store", store.folder)
    assert store.finished() >= whole


def test_a_refused_run_leaves_no_folder(config, tmp_path):
    said("run", config, "--store", tmp_path / "store", "--only", "SRB", code=2)
    assert not (tmp_path / "store").exists()
