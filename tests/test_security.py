"""The promises of `SECURITY.md`: nothing is unpickled or evaluated, archives are bounded, names are only names."""

import ast
import io
import json
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import bilevel
from bilevel._core.extras import progress_lines
from bilevel.bench import config, live
from bilevel.bench.page import file_names, write_figures, write_report
from bilevel.bench.select import make_sections
from bilevel.bench.store import Store
from bilevel.cli.app import app
from bilevel.datasets import loading
from paper.markdown import markdown_table
from tests import cases
from tests.bench import fake_store, test_store
from tests.datasets import tiny

ROOT = Path(__file__).parents[1]
PACKAGE = sorted((ROOT / "bilevel").rglob("*.py"))
SCRIPTS = [path for folder in ("tests", "examples", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]

UNSAFE_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "yaml", "xml", "telnetlib", "ftplib"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__", "input", "literal_eval", "system", "popen", "read_pickle"}
UNSAFE_LOADS = {("np", "load"), ("numpy", "load"), ("joblib", "load"), ("yaml", "load"), ("torch", "load")}
UNSAFE_OPTIONS = {"shell": True, "allow_pickle": True, "verify": False, "autoescape": False}


def found(source):
    """Return the calls of a module that could execute the content of a file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from (f"import {name}" for name in names if name.split(".")[0] in UNSAFE_MODULES)
        if not isinstance(node, ast.Call):
            continue
        call = node.func
        name = call.id if isinstance(call, ast.Name) else call.attr if isinstance(call, ast.Attribute) else ""
        owner = call.value.id if isinstance(call, ast.Attribute) and isinstance(call.value, ast.Name) else ""
        # re.compile and the compile method of a lowered program differ from the built-in.
        if name in UNSAFE_CALLS and not (name == "compile" and isinstance(call, ast.Attribute)):
            yield name
        if (owner, name) in UNSAFE_LOADS:
            yield f"{owner}.{name}"
        for option in node.keywords:
            if option.arg in UNSAFE_OPTIONS and not is_safe(option):
                yield f"{option.arg}={ast.unparse(option.value)}"


def is_safe(option):
    return isinstance(option.value, ast.Constant) and option.value.value is not UNSAFE_OPTIONS[option.arg]


def test_the_package_unpickles_and_evaluates_nothing():
    unsafe = {str(path.relative_to(ROOT)): list(found(path.read_text())) for path in PACKAGE}
    assert {path: what for path, what in unsafe.items() if what} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import yaml",
        "eval(text)",
        "builtins.exec(text)",
        "ast.literal_eval(text)",
        "np.load(path)",
        "np.lib.format.read_array(file, allow_pickle=True)",
        "np.lib.format.read_array(file, allow_pickle=allowed)",
        "pd.read_pickle(path)",
        "joblib.load(path)",
        "subprocess.run(text, shell=True)",
        "requests.get(url, verify=False)",
        "jinja2.Environment(autoescape=False)",
    ],
)
def test_calls_that_could_execute_a_file_are_recognized(source):
    assert list(found(source))


def test_no_template_marks_a_name_as_safe():
    for path in (ROOT / "bilevel").rglob("templates/*.html"):
        assert not re.search(r"\|\s*safe\b|autoescape\s+false", path.read_text()), path.name


def listens_everywhere(call):
    name, options = ast.unparse(call.func), {option.arg for option in call.keywords}
    if name.endswith("distributed.initialize"):  # the coordinator of JAX listens at all addresses by default
        return "coordinator_bind_address" not in options
    is_server = re.search(r"HTTPServer$|LocalCluster$|\w+\.bind$|create_server$", name)
    return is_server and "inspect" not in name and "127.0.0.1" not in ast.unparse(call)


def test_servers_of_tests_and_examples_listen_on_the_loopback_interface():
    for path in SCRIPTS:
        calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
        assert [ast.unparse(call) for call in calls if listens_everywhere(call)] == [], path.name


# --- archives


def packed(members, compression=zipfile.ZIP_DEFLATED):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def array_bytes(array, claimed=None):
    buffer = io.BytesIO()
    header = {"descr": np.lib.format.dtype_to_descr(array.dtype), "fortran_order": False}
    np.lib.format.write_array_header_1_0(buffer, header | {"shape": claimed or array.shape})
    return buffer.getvalue() + array.tobytes()


ABOUT = array_bytes(np.array(json.dumps({"format": 3})))
# Members of an archive may overlap: here ten names refer to the same bytes.
SAVED_BOMBS = {
    "compressed": packed({"about.npy": ABOUT, "state_0.npy": array_bytes(np.zeros(10**6))}),
    "claims memory": packed({"about.npy": ABOUT, "state_0.npy": array_bytes(np.zeros(2), (10**9, 10**6))}, 0),
    "without header": packed({"about.npy": b"\x93NUMPY\x03\x00" + bytes(100)}, 0),
    "objects": packed({"about.npy": array_bytes(np.array([1], "<i8")).replace(b"'<i8'", b"'|O' ")}, 0),
    "nothing": packed({}, 0),
    "no JSON": packed({"about.npy": array_bytes(np.array("[" * 10**5))}, 0),
    "no keys": packed({"about.npy": ABOUT}, 0),
}


def overlapping(times):
    body = array_bytes(np.zeros(10**4))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("about.npy", ABOUT)
        archive.writestr("state_0.npy", body)
        first = archive.infolist()[1]
        for number in range(1, times):
            again = zipfile.ZipInfo(f"state_{number}.npy")
            for field in ("header_offset", "file_size", "compress_size", "CRC", "flag_bits"):
                setattr(again, field, getattr(first, field))
            archive.filelist.append(again)
    return buffer.getvalue()


@pytest.mark.parametrize("case", [*SAVED_BOMBS, "overlapping"])
def test_a_malicious_saved_run_is_refused_before_it_is_unpacked(case, tmp_path, monkeypatch):
    path = tmp_path / "run.npz"
    path.write_bytes(overlapping(50) if case == "overlapping" else SAVED_BOMBS[case])
    read = []
    monkeypatch.setattr(np.lib.format, "read_array", lambda *args, **kw: read.append(1) or np.array("{}"))
    if case in ("objects", "no JSON", "no keys"):
        monkeypatch.undo()
    with pytest.raises(ValueError, match=rf"`{re.escape(str(path))}` is not a saved run, or is damaged"):
        bilevel.resume(path, cases.quadratic("float32"), max_steps=5)
    assert len(read) <= 1, "more than the description was unpacked"


def test_a_data_set_of_another_size_is_refused_by_its_header(tmp_path, monkeypatch):
    known = tiny.libsvm_set("http://127.0.0.1:9")
    members = {f"{name}.npy": array_bytes(array) for name, array in tiny.SPLIT.items()}
    (tmp_path / "tiny.npz").write_bytes(packed(members | {"X_train.npy": array_bytes(np.zeros((10**6, 3)))}))
    monkeypatch.setattr(np.lib.format, "read_array", lambda *args, **kw: pytest.fail("unpacked"))
    with pytest.raises(loading.DamagedFileError, match=r"an array claims to be float64 \(1000000, 3\)"):
        loading.read(tmp_path / "tiny.npz", known)


# --- names

HOSTILE_NAMES = ["../../up", "/etc/passwd", "..", "a/b", "a\\b", "con\x00", "", "日本", "<b>x</b>", "a\nb", "." * 300]


@pytest.fixture(scope="module")
def table():
    whole = fake_store.store()
    return whole[(whole["problem"] == "quadratic") & whole["solver"].isin(["SRBA", "StocBiO"])]


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_a_name_in_a_store_never_leaves_the_folder_of_figures(name, table):
    hostile = table.assign(experiment=name, problem=name)
    (stem,) = file_names(make_sections(hostile))
    assert re.fullmatch(r"[a-z0-9_-]{1,90}", stem)


def test_figures_with_hostile_names_are_written_only_into_their_folder(table, tmp_path):
    hostile = table.assign(experiment="../../up", problem="/etc/x")
    paths = write_figures(hostile, tmp_path / "deep" / "figures")
    assert {path.parent for path in paths} == {tmp_path / "deep" / "figures"}
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == sorted(paths)


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_the_name_of_an_experiment_is_never_a_path(name, tmp_path):
    text = (ROOT / "bilevel" / "bench" / "configs" / "demo.toml").read_text()
    path = tmp_path / "config.toml"
    path.write_text(re.sub(r'^name = ".*"', lambda _: f"name = {json.dumps(name)}", text, count=1, flags=re.MULTILINE))
    if name == "日本":  # letters of any alphabet
        assert config.load_config(path).name == name
    else:
        with pytest.raises(config.ConfigError):
            config.load_config(path)


def test_a_config_is_kept_in_the_folder_of_its_store(tmp_path):
    source = tmp_path / "..." / "..hidden.toml"
    source.parent.mkdir()
    source.write_bytes((ROOT / "bilevel" / "bench" / "configs" / "demo.toml").read_bytes())
    Store(tmp_path / "store").keep_config(config.load_config(source))
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["_demo.toml"]


def test_no_name_of_a_store_becomes_markup_in_the_report(table, tmp_path):
    source = write_report(
        fake_store.hostile(table),
        tmp_path,
        budgets=fake_store.TAG,
        commands=[fake_store.TAG],
    ).read_text()
    document, _, scripts = source.partition('<script type="application/json"')
    assert "<img" not in document and "javascript:1" in document
    assert document.count("<a ") == document.count('<a href="#')
    data, _, _ = scripts.partition("</script>")
    assert "<" not in data


def test_no_name_of_a_store_becomes_markup_in_the_page_of_the_paper():
    text = markdown_table(["a"], [[fake_store.TAG], ["[x](javascript:1)"], ["|I| <= m"]])
    assert "<img" not in text and "<a" not in text and r"\[x](" in text
    assert r"| \|I\| <= m |" in text


# --- terminals

ESCAPES = "\x1b[2J \x1b]0;title\x07 \x9b31m a\rb a\x08b \u202eabc \x1b]8;;http://x.test\x1b\\link"
ORDERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
STYLES = re.compile(r"\x1b\[[\d;]*m")  # colors, which the library prints only to a terminal


@pytest.fixture
def commanding(tmp_path):
    """Return a store in which every text contains escape sequences."""
    text = ESCAPES
    changes = {name: text for name in ("experiment", "problem", "solver", "columns", "machine", "revision")}
    store = Store(tmp_path / "store")
    store.write(test_store.group(1, 2, 3, **changes, **{f"param_{text}": 0.5, text: 1.0}))
    (tmp_path / "store" / f"{text.replace('/', '')}.parquet").write_bytes(b"damaged")
    return store.folder


@pytest.mark.parametrize("command", ["select", "csv", "json", "report", "check", "metric"])
@pytest.mark.filterwarnings("default")
def test_no_name_of_a_store_sends_escape_sequences_to_a_terminal_or_a_pipe(command, commanding, tmp_path):
    folder = commanding
    words = {
        "csv": ["select", folder, "--format", "csv"],
        "json": ["select", folder, "--format", "json"],
        "report": ["report", folder, "--out", tmp_path / "page"],
        "metric": ["select", folder, "--metric", f"{ESCAPES}x"],
    }
    words = [*map(str, words.get(command, [command, folder]))]
    metric = [] if command in ("report", "check", "metric") else ["--metric", "outer_value"]
    piped = CliRunner().invoke(app, words + metric)
    assert isinstance(piped.exception, SystemExit | None)
    assert not ORDERS.search(piped.output), repr(piped.output)
    assert (r"\u001b" if command == "json" else r"\x1b") in piped.output or command == "report"
    if command == "report":
        page, _, _ = (tmp_path / "page" / "index.html").read_text().partition("<script>")
        assert not ORDERS.search(page)


def test_progress_of_a_run_sends_no_escape_sequences_of_names_to_a_terminal(capsys):
    with progress_lines("\x1b[2Jtitle", True) as report:
        report(0.5, "\x1b]0;half\x07")
    lines = live.Watcher()
    lines.begin("sweep", 0, 2)
    lines.failed("\x9b31m", "RuntimeError: \x1b[2J")
    out, err = capsys.readouterr()
    assert "[2Jtitle" in out and "[2J" in err and not ORDERS.search(out + err)
