"""Solvers and problems defined by users: by name in a config, or as objects from Python."""

import doctest
import json
import os
import sys
import tomllib

import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

import bilevel
from bilevel.bench import config as names
from bilevel.bench.config import ConfigError, load_config
from bilevel.bench.select import select
from bilevel.bench.store import Store
from bilevel.cli.app import app
from bilevel.solvers.fields import fraction
from tests.bench import tiny

MODULE = '''
"""A solver of a user."""

import bilevel
from bilevel.solvers import Solver, solver
from bilevel.solvers.fields import flag, fraction, one_of

IMPORTED = print("imported")


def little_problem(n_inner, n_outer: int = 32, scales=()):
    return bilevel.problems.quadratic(n_inner, n_outer, 5, 3, dtype="float64")


@solver
class Mine(bilevel.SOBA):
    """SOBA under another name, with parameters of every kind."""

    share: float = fraction(default=0.5, off=True)
    tricks: bool = flag(default=False)
    way: str = one_of(("this", "that"), default="this")


class Half(Solver):
    """Not finished."""


def wrong_problem():
    return 3
'''
HEAD = """
name = "open"
metric = "value_gap"
seeds = 1
[problem]
name = "NAME:little_problem"
n_inner = 64
[budget]
epochs = 10
seconds = 0
"""
SOLVERS = """
[[solvers]]
name = "NAME:Mine"
step_size = [0.02, 0.05]
outer_ratio = 2.0
share = 0
tricks = [false, true]
batch_size = 8
[[solvers]]
name = "SOBA"
step_size = [0.02, 0.05]
outer_ratio = 2.0
batch_size = 8
"""


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """The name of a module of its own, importable in its folder alone."""
    folder = tmp_path_factory.mktemp("theirs")
    name = f"theirs_{os.getpid()}"
    (folder / f"{name}.py").write_text(MODULE)
    (folder / "open.toml").write_text((HEAD + SOLVERS).replace("NAME", name))
    yield name, folder
    sys.path[:] = [path for path in sys.path if path != str(folder)]
    sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def finished(theirs):
    name, folder = theirs
    before = os.getcwd()
    os.chdir(folder)
    try:
        done = CliRunner().invoke(app, ["run", "open.toml", "--store", "store"])
    finally:
        os.chdir(before)
    assert done.exit_code == 0, done.output
    return name, folder


def test_a_config_may_name_a_solver_and_a_problem_of_a_user(finished):
    name, folder = finished
    rows = Store(folder / "store").read()
    assert set(rows["solver"]) == {f"{name}:Mine", "SOBA"} and set(rows["problem"]) == {f"{name}:little_problem"}
    assert set(rows["phase"]) == {"sweep"}, "seconds = 0 turns timing off"
    mine = rows[(rows["solver"] == f"{name}:Mine") & rows["final"]]
    assert set(mine["param_tricks"]) == {True, False} and set(mine["param_way"]) == {"this"}
    assert set(mine["param_share"]) == {0.0}
    same = rows[(rows["solver"] == "SOBA") & rows["final"]]
    for step_size, ours in same.groupby("param_step_size"):
        for value in mine[mine["param_step_size"] == step_size]["value_gap"]:
            assert value == pytest.approx(ours["value_gap"].iloc[0])


def test_reading_a_store_imports_nothing(finished, monkeypatch):
    name, folder = finished
    monkeypatch.setattr(names, "_user_objects", {})
    monkeypatch.setattr(names, "_import", lambda name: pytest.fail(f"imported {name}"))
    for words in (["select", "--format", "json"], ["check"], ["report", "--out", str(folder / "page")]):
        done = CliRunner().invoke(app, [words[0], str(folder / "store"), *words[1:]])
        assert done.exit_code == 0, done.output
    assert f"{name}:Mine" in (folder / "page" / "index.html").read_text()


@pytest.mark.filterwarnings("default")
def test_a_changed_solver_gives_a_warning_and_its_results_are_kept(finished, monkeypatch):
    name, folder = finished
    monkeypatch.chdir(folder)
    again = ["run", "open.toml", "--store", "store"]
    assert "was changed" not in CliRunner().invoke(app, again).output
    monkeypatch.setattr("bilevel.bench.config.digest_source", lambda name: "another")
    done = CliRunner().invoke(app, again)
    assert f"`{name}:Mine` was changed after results of it were put into `store`" in " ".join(done.output.split())
    assert done.exit_code == 0


def test_a_selected_setting_has_its_own_types(finished):
    name, folder = finished
    experiment = load_config(folder / "open.toml")
    rows = select(Store(folder / "store").read(), "value_gap")
    (row,) = rows[rows["solver"] == f"{name}:Mine"].to_dict("records")
    from bilevel.bench.select import read_setting

    setting = dict(read_setting(row))
    assert isinstance(setting["tricks"], bool) and isinstance(setting["batch_size"], int)
    assert any(dict(one.parameters).items() <= setting.items() for one in experiment.settings)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (":Mine", ":Mime", "has no `Mime`; did you mean `Mine`?"),
        (":Mine", ":Half", "is no solver; it must be a class with `@bilevel.solvers.solver`"),
        (":Mine", ":little_problem", "is no solver"),
        ("NAME:Mine", "no_such_module_at_all:Mine", "there is no module `no_such_module_at_all`; it must be installed"),
        ("NAME:Mine", "a b:Mine", "must be a name of the package, or `module:name`."),
        (":little_problem", ":IMPORTED", "is no function"),
        ("n_inner = 64", "", "`n_inner` is missing"),
        ("n_inner = 64", "n_inner = 64\nscales = 3", "unknown argument `scales`"),
        ("seeds = 1", "seeds = 1\nnew_problem_per_seed = true", "needs a problem with an argument `seed`"),
        ("share = 0", "share = -1", "must be a number in (0, 1], or 0 to turn it off"),
    ],
)
def test_errors_in_a_name_are_reported_with_their_place(theirs, tmp_path, monkeypatch, old, new, message):
    name, folder = theirs
    monkeypatch.syspath_prepend(folder)
    path = tmp_path / "wrong.toml"
    path.write_text((HEAD + SOLVERS).replace(old, new, 1).replace("NAME", name))
    with pytest.raises(ConfigError, match=r"wrong\.toml: ") as caught:
        load_config(path)
    assert message in str(caught.value)


def test_a_function_that_returns_no_problem_and_a_module_that_raises_are_refused(theirs, tmp_path, monkeypatch):
    name, folder = theirs
    monkeypatch.syspath_prepend(folder)
    (folder / f"{name}_broken.py").write_text("1 / 0\n")
    with pytest.raises(ValueError, match=r"importing `\w+` failed: ZeroDivisionError: division by zero"):
        names.find_solver(f"{name}_broken:Mine")
    text = (HEAD + SOLVERS).replace("NAME:little_problem", "NAME:wrong_problem").replace("n_inner = 64", "")
    path = tmp_path / "none.toml"
    path.write_text(text.replace("NAME", name))
    shown = CliRunner().invoke(app, ["run", str(path), "--store", str(tmp_path / "store")])
    assert shown.exit_code == 2 and "returned int; it must return a BilevelProblem." in " ".join(shown.output.split())


def test_a_parameter_of_another_type_than_in_the_package_is_refused(tmp_path):
    from bilevel.solvers import solver

    @solver
    class Other(bilevel.solvers.SOBA):
        """SOBA with a period that is no integer."""

        period: float = fraction(default=0.5)

    with pytest.raises(ValueError, match=r"Other`: its parameter `period` must be int64, as in other solvers; rename"):
        bilevel.benchmark(tables([{"name": Other}]), tmp_path / "store")


def tables(solvers, **more):
    head = tomllib.loads(tiny.HEAD)
    return {**head, "seeds": 1, "budget": {"epochs": 5}, "solvers": solvers, **more}


def little(n_inner: int = 64):
    return bilevel.problems.quadratic(n_inner, 32, 5, 3, dtype="float64")


def test_from_python_classes_and_functions_replace_names(tmp_path, capsys):
    config = tables([{"name": bilevel.SOBA, "step_size": [0.02, 0.05], "batch_size": 8}], problem={"name": little})
    store = bilevel.benchmark(config, tmp_path / "store", progress=True)
    assert set(store.read()["problem"]) == {f"{__name__}:little"} and set(store.read()["solver"]) == {"SOBA"}
    assert "sweep: 2 cells" in capsys.readouterr().err
    (kept,) = store.configs()
    assert tomllib.loads(kept.read_text())["solvers"] == [{"name": "SOBA", "step_size": [0.02, 0.05], "batch_size": 8}]
    assert store.experiments()[0].metric == config["metric"]
    again = CliRunner().invoke(app, ["select", str(store.folder), "--format", "json"])
    assert json.loads(again.stdout)[0]["solver"] == "SOBA"


def test_from_python_a_function_may_be_redefined(tmp_path):
    def build(sizes):
        def mine(n_inner: int = sizes):
            return little(n_inner)

        return mine

    solvers = [{"name": "SOBA", "batch_size": 8}]
    for sizes in (64, 48):
        store = bilevel.benchmark(tables(solvers, problem={"name": build(sizes)}), tmp_path / str(sizes))
        assert json.loads(store.read()["problem_arguments"].iloc[0]) == {"n_inner": sizes}


def test_from_python_a_task_that_fails_is_raised_and_the_rest_is_kept(tmp_path, monkeypatch):
    tiny.Pretence([("SOBA", 0)]).install(monkeypatch)
    config = tables([{"name": "SOBA", "batch_size": 8}, {"name": "SRBA", "batch_size": 8}])
    with pytest.raises(RuntimeError, match=r"1 task failed; .* SOBA on quadratic, seed 0: RuntimeError: no SOBA today"):
        bilevel.benchmark(config, tmp_path / "store")
    assert set(Store(tmp_path / "store").read()["solver"]) == {"SRBA"}
    with pytest.raises(ConfigError, match=r"`config`: \[\[solvers\]\] 1: unknown solver `SORBA`; did you mean `SRBA`"):
        bilevel.benchmark(tables([{"name": "SORBA"}]), tmp_path / "other")
    with pytest.raises(ValueError, match=r"`name=3`: must be a name, the class of a solver, or a function"):
        bilevel.benchmark(tables([{"name": 3}]), tmp_path / "other")


def test_zero_turns_the_growth_of_the_penalty_off():
    assert bilevel.F2SA(delta_0=0).growth(jnp.asarray(3)) == 0
    with pytest.raises(ValueError, match="must be a finite number above 0, or 0 to turn it off"):
        bilevel.F2SA(delta_0=-1)


def test_the_example_of_the_docstring_runs():
    (example,) = doctest.DocTestFinder(recurse=False).find(bilevel.benchmark, "benchmark")
    assert doctest.DocTestRunner().run(example) == (0, 8)
