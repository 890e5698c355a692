"""The command line: output, files, and error messages of one line."""

import csv
import html
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time

import pandas
import pytest
from typer.testing import CliRunner

import bilevel
from bilevel.bench.store import Store
from bilevel.cli import doctor, main, terminal
from bilevel.cli.app import app
from tests.bench import tiny

COMMAND = "import sys; sys.argv[0] = 'bilevel'; from bilevel.cli import main; main()"
TEXT = tiny.HEAD + tiny.BUDGET + tiny.SECONDS + tiny.SOBA


def said(*arguments, code=0):
    """Return the output of a command without line breaks; only an exit may end it."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return " ".join(result.output.split())


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return a config, the store that it filled, and the output."""
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
        ("problems", ["quadratic", "ijcnn1", "breast_cancer"]),
        ("datasets", bilevel.datasets.names()),
        ("metrics", ["value_gap", "hypergrad_norm_sq", "rollbacks"]),
    ],
)
def test_each_kind_can_be_listed_alone_or_with_the_others(kind, names):
    assert all(name in said("list", kind) for name in names)
    assert all(name in said("list") for name in names)


def test_a_run_fills_a_store_and_names_the_next_command(finished):
    config, folder, shown = finished
    store = Store(folder)
    experiment = tiny.load_config(config)
    assert {cell.id for cell in tiny.cells(experiment)} <= store.finished()
    assert set(store.read("timing")["seed"]) == {0, 1}
    assert f"next: bilevel report {folder} --out {folder}-report" in shown
    assert (folder / "_tiny.toml").read_text() == config.read_text()


def test_a_run_ends_with_the_selected_setting_of_each_solver(finished):
    selected = said("select", finished[1]).replace(" ", "")
    assert "problem" in selected and selected in finished[2].replace(" ", "")


def test_piped_output_has_a_line_per_event_with_place_and_time(finished):
    _, folder, shown = finished
    assert f"in the timing phase; results go to {folder} sweep: 4 cells; 0 cells were there" in shown
    assert "sweep: SOBA on quadratic, seed 0: compiling, running sweep: SOBA on quadratic, seed 0: done" in shown
    assert re.search(r"2 of 4 cells, about 0:\d\d left", shown) and "timing: 2 cells" in shown


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


def test_the_selected_setting_is_shown_with_its_results(finished):
    shown = said("select", finished[1]).replace(" ", "")  # a narrow table folds
    best = Store(finished[1]).read("timing")["param_step_size"].iloc[0]
    assert "SOBA" in shown and "value_gap" in shown
    assert f"step_size={best:g}" in shown and "batch_size" in shown


def test_selected_settings_are_available_as_csv_and_json(finished):
    best = Store(finished[1]).read("timing")["param_step_size"].iloc[0]
    result = CliRunner().invoke(app, ["select", str(finished[1]), "--format", "csv"])
    (row,) = csv.DictReader(result.stdout.splitlines())
    assert (row["solver"], row["metric"], float(row["param_step_size"])) == ("SOBA", "value_gap", best)
    result = CliRunner().invoke(app, ["select", str(finished[1]), "--format", "json"])
    (record,) = json.loads(result.stdout)
    assert record["param_step_size"] == best and record["median"] == float(row["median"])


@pytest.mark.parametrize(
    ("width", "first"), [(60, "parameters: period step_size"), (80, "parameters        what it is")]
)
def test_a_table_that_does_not_fit_into_the_terminal_is_printed_as_paragraphs(width, first, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((width, 24)))
    words = "period step_size", "an estimate that restarts with each full-batch pass"
    terminal.print_table(("parameters", "what it is"), [words], "solvers")
    shown = capsys.readouterr().out.splitlines()
    assert shown[:2] == ["solvers:", first]


@pytest.mark.parametrize("command", ["reproduce", "audit", "complexity"])
def test_commands_about_the_paper_are_not_installed(command):
    assert f"No such command '{command}'" in said(command, code=2)


def test_the_version_is_printed():
    assert said("--version") == f"bilevel {bilevel.__version__}"


def test_the_help_lists_the_exit_codes_and_the_shell_completes():
    assert "Exit codes: 0 done, 1 some of the work failed, 2 refused" in said("--help")
    assert "--install-completion" in said("--help")
    asked = {"_BILEVEL_COMPLETE": "complete_bash", "COMP_WORDS": "bilevel run de", "COMP_CWORD": "2"}
    done = subprocess.run([sys.executable, "-c", COMMAND], env={**os.environ, **asked}, capture_output=True, text=True)
    assert done.stdout.split() == ["demo"]


def test_informative_commands_do_not_import_jax():
    told = "import atexit; atexit.register(lambda: print('jax' in sys.modules))"
    script = f"import sys; sys.argv[1:] = ['--help']; {told}; {COMMAND}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "False"


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (["--help"], 0, "The command line needs typer, msgspec: pip install 'bilevel[bench]'"),
        (["run", "demo"], 2, "The command line needs typer, msgspec: pip install 'bilevel[bench]'"),
        (["--version"], 0, f"bilevel {bilevel.__version__}\n"),
        (["doctor"], 0, "extra bench: "),
    ],
)
def test_without_its_extra_the_command_line_says_how_to_install_it(words, code, expected, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["bilevel", *words])
    monkeypatch.setattr("bilevel.cli.find_spec", lambda name: None if name in ("typer", "msgspec") else name)
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code or 0) == code and expected in capsys.readouterr().out


def test_the_doctor_names_what_an_extra_lacks(monkeypatch):
    known = doctor.installed_version
    monkeypatch.setattr(
        doctor, "installed_version", lambda name: None if name in ("matplotlib", "optuna") else known(name)
    )
    found = dict(doctor.examine())
    assert found["extra compare"] == "matplotlib, optuna missing: pip install 'bilevel[compare]'"
    assert found["extra data"] == "installed"


def test_the_report_is_one_page(finished, tmp_path):
    shown = said("report", finished[1], "--out", tmp_path / "page")
    page = tmp_path / "page" / "index.html"
    assert f"open in a browser: {page}" in shown and "SOBA" in page.read_text()


@pytest.mark.slow
def test_figures_are_written_as_files(finished, tmp_path):
    look = "--width", 6.9, "--log", "xy", "--only", "SOBA", "--label", "SOBA=the method we compare with"
    shown = said("figure", finished[1], "--out", tmp_path / "figures", *look)
    kinds = {path.suffix: path for path in (tmp_path / "figures").iterdir()}
    assert kinds.keys() == {".pdf", ".png"} and all(str(path) in shown for path in kinds.values())
    assert kinds[".pdf"].read_bytes().startswith(b"%PDF") and kinds[".png"].read_bytes().startswith(b"\x89PNG")


def test_the_machine_is_described():
    shown = said("doctor")
    assert f"bilevel {bilevel.__version__}" in shown and "jax" in shown and "extra bench installed" in shown
    assert "cpu" in shown and "digits" in shown and "cache" in shown


def test_a_name_that_looks_like_markup_is_printed_literally(config, tmp_path, monkeypatch):
    tiny.Pretence().install(monkeypatch)
    folder = tmp_path / "a[red]b[" / "]c[" / "bold]"
    assert f"results in {folder};" in said("run", config, "--store", folder)


def test_a_task_that_fails_is_named_and_the_exit_code_is_1(config, tmp_path, monkeypatch):
    pretence = tiny.Pretence([("SOBA", 1)]).install(monkeypatch)
    folder = tmp_path / "store"
    shown = said("run", config, "--store", folder, "--only", "SOBA", code=1)
    assert "SOBA on quadratic, seed 1 failed: RuntimeError: no SOBA today" in shown
    again = f"To try again: bilevel run {config} --store {folder} --only SOBA"
    assert f"1 task failed or lost results; all other results are in {folder}. {again}" in shown
    pretence.broken.clear()
    said("run", config, "--store", folder, "--only", "SOBA")


def test_ctrl_c_says_how_to_resume(config, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("bilevel.bench.execute.run_task", interrupted)
    folder = tmp_path / "a store"
    shown = said("run", config, "--store", folder, "--seeds", "0:1", code=130)
    assert f"To continue: bilevel run {config} --store '{folder}' --seeds 0:1" in shown


def test_a_stop_that_a_callback_swallows_is_repeated(config, tmp_path, monkeypatch):
    class Swallowing:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)

    def interrupted(*_, **__):
        Swallowing()
        time.sleep(30)

    monkeypatch.setattr(sys, "unraisablehook", terminal._stop_again)
    monkeypatch.setattr("bilevel.bench.execute.run_task", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        shown = said("run", config, "--store", tmp_path / "store", code=130)
    finally:
        signal.signal(signal.SIGINT, before)
    assert "To continue: bilevel run" in shown


def test_sigterm_stops_like_ctrl_c(config, finished, tmp_path, monkeypatch):
    def terminated(*_, **__):
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(terminal, "_last_signal", int(signal.SIGINT))
    monkeypatch.setattr("bilevel.bench.execute.run_task", terminated)
    monkeypatch.setattr("bilevel.bench.page.write_report", terminated)
    before = signal.signal(signal.SIGTERM, terminal._terminate)
    try:
        shown = said("run", config, "--store", tmp_path / "store", code=143)
        assert f"To continue: bilevel run {config} --store {tmp_path / 'store'}" in shown
        shown = said("report", finished[1], "--out", tmp_path / "page", code=143)
        assert shown == "stopped; no file is half written. Run the same command again to continue or to start over."
    finally:
        signal.signal(signal.SIGTERM, before)


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
def test_an_invalid_option_is_refused_in_one_line(config, tmp_path, monkeypatch, arguments, message):
    pretence = tiny.Pretence().install(monkeypatch)
    assert message in said("run", config, "--store", tmp_path / "store", *arguments, code=2)
    assert pretence.swept == []


def test_an_unknown_config_is_refused_with_a_suggestion(tmp_path):
    assert "no such config in the package; did you mean `smoke`?" in said("run", "smoek", code=2)
    assert "no such file" in said("run", tmp_path / "none.toml", code=2)
    (tmp_path / "bad.toml").write_text("name = ")
    assert "not TOML" in said("run", tmp_path / "bad.toml", code=2)
    assert "Missing argument" in said("run", code=2)


@pytest.mark.parametrize("command", ["select", "report", "figure"])
def test_a_missing_or_empty_store_is_refused(command, tmp_path):
    missing = tmp_path / "none"
    assert f"`{missing}`: no such folder; `bilevel run CONFIG --store {missing}` makes it." in said(
        command, missing, code=2
    )
    assert not missing.exists()
    assert "error:" in said(command, tmp_path, code=2)
    (tmp_path / "file").write_text("")
    assert "is a file; a store is a folder" in said(command, tmp_path / "file", code=2)


@pytest.mark.parametrize("command", ["select", "report", "figure"])
def test_an_unknown_metric_is_refused_with_a_suggestion(command, finished, tmp_path):
    options = ("--metric",) if command == "select" else ("--out", tmp_path, "--select")
    shown = said(command, finished[1], *options, "value_gab", code=2)
    assert "did you mean `value_gap`?" in shown


@pytest.mark.filterwarnings("default")
def test_a_damaged_file_is_reported_and_its_cells_are_run_again(finished, tmp_path, monkeypatch):
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


@pytest.mark.filterwarnings("default")
def test_results_that_disappear_are_reported_by_all_commands(finished, tmp_path, monkeypatch):
    config, folder, _ = finished
    store = Store(shutil.copytree(folder, tmp_path / "store"))
    said("run", config, "--store", store.folder)
    assert "unfinished" not in said("select", store.folder) + said("check", store.folder)
    rows = store.read("sweep")
    path = next(path for path in store.folder.glob("*.parquet") if set(pandas.read_parquet(path)["phase"]) == {"sweep"})
    n_lost = pandas.read_parquet(path)["cell"].nunique()
    path.unlink()
    text = f"`tiny` is unfinished: {rows['cell'].nunique() - n_lost} of the {rows['cell'].nunique()} cells of its sweep"
    assert text in said("select", store.folder) and text in said("check", store.folder)
    assert text in said("report", store.folder, "--out", tmp_path / "page")
    page = html.unescape((tmp_path / "page" / "index.html").read_text())
    assert page.count(text) == 1
    result = CliRunner().invoke(app, ["select", str(store.folder), "--format", "json"])
    assert text in result.stderr and json.loads(result.stdout)


def test_a_sweep_that_loses_results_ends_with_exit_code_1(config, tmp_path, monkeypatch):
    tiny.Pretence().install(monkeypatch)
    write = Store.write
    monkeypatch.setattr(Store, "write", lambda store, rows: write(store, rows).unlink())
    shown = said("run", config, "--store", tmp_path / "store", code=1)
    assert "sweep failed: 4 of 4 cells were stored, and are no longer in" in shown
    assert "1 task failed or lost results; all other results are in" in shown


@pytest.mark.filterwarnings("default")
def test_a_file_without_rows_is_damaged_for_all_commands(finished, tmp_path):
    folder = tmp_path / "store"
    folder.mkdir()
    empty = pandas.read_parquet(next(finished[1].glob("[!_]*.parquet"))).iloc[:0]
    empty.to_parquet(folder / "nothing.parquet")
    for command, code in [("select", 2), ("report", 2), ("check", 1)]:
        shown = said(command, folder, code=code)
        assert "nothing.parquet" in shown and "damaged (it has no rows)" in shown
    assert "0 finished cells, 1 damaged files" in said("check", folder, code=1)
    assert "error: the store is empty; run the sweep first." in said("select", folder, code=2)


def test_a_refused_run_leaves_no_folder(config, tmp_path):
    said("run", config, "--store", tmp_path / "store", "--only", "SRB", code=2)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("error", [None, PermissionError("others can write to it"), OSError("no space left")])
def test_the_command_line_starts_also_if_programs_cannot_be_kept(error, monkeypatch, capsys):
    def keep_programs():
        if error is not None:
            raise error

    monkeypatch.setattr("bilevel.cli.keep_programs", keep_programs)
    monkeypatch.setattr("bilevel.cli.fuse_cpu_loops", lambda: None)
    monkeypatch.setattr("bilevel.cli.terminal.handle_signals", lambda: None)
    monkeypatch.setattr("sys.argv", ["bilevel", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("bilevel.cli", run_name="__main__")
    shown = capsys.readouterr()
    assert ended.value.code == 0 and shown.out == f"bilevel {bilevel.__version__}\n"
    assert ("others can write to it" in shown.err) == isinstance(error, PermissionError)
