"""Configs: what they say is what is run, and what they say wrong is refused with its place."""

import inspect
import itertools
import re
from collections import Counter

import pytest

from bilevel.bench.config import ConfigError, load_config
from bilevel.engine.metrics import METRICS
from bilevel.problems import PROBLEMS
from bilevel.solvers import SOLVERS

SHIPPED = {"demo": (341, 228), "smoke": (256, 64), "quadratic": (32768, 1024), "ijcnn1": (49990, 91701)} | {
    **{"cleaning": (20000, 5000), "equal_cleaning": (1000, 500)},
    **{"equal_quadratic": (32768, 1024), "equal_ijcnn1": (49990, 91701), "equal_small": (256, 128)},
}
HEAD = """
name = "x"
metric = "value"
seeds = 2
[problem]
name = "quadratic"
[budget]
epochs = 10
seconds = 1
"""
SRBA = """
[[solvers]]
name = "SRBA"
step_size = [0.1, 1.0]
"""
GOOD = HEAD + SRBA


def config(folder, text):
    path = folder / "x.toml"
    path.write_text(text)
    return path


def cells(folder, text, **kwargs):
    return load_config(config(folder, text)).narrow(**kwargs).cells(60, 40)


def test_cells_are_the_product_of_the_lists_and_the_seeds(tmp_path):
    found = cells(tmp_path, GOOD + "outer_ratio = [1, 2, 4]\nbatch_size = 8\n")
    expected = set(itertools.product([0.1, 1.0], [1.0, 2.0, 4.0], [0, 1]))
    assert {(dict(c.parameters)["step_size"], dict(c.parameters)["outer_ratio"], c.seed) for c in found} == expected
    assert len({cell.id for cell in found}) == len(found) == len(expected)


def test_a_cell_can_be_run_as_it_stands(tmp_path):
    (cell, *_) = cells(tmp_path, GOOD.replace("[budget]", "n_inner = 60\ncoupling = 0\n[budget]"))
    assert (cell.experiment, cell.problem, cell.phase, cell.max_seconds) == ("x", "quadratic", "sweep", None)
    assert cell.max_calls == 10 * (60 + 40)
    assert SOLVERS[cell.solver](**dict(cell.parameters)) == SOLVERS["SRBA"](step_size=0.1)
    bound = inspect.signature(PROBLEMS[cell.problem]).bind(**dict(cell.problem_arguments))
    assert bound.arguments["n_inner"] == 60 and bound.arguments["seed"] == 0
    assert list(cell.parameters) == sorted(cell.parameters)
    assert list(cell.problem_arguments) == sorted(cell.problem_arguments)


def test_cross_validation_can_be_named(tmp_path):
    (cell, *_) = cells(tmp_path, GOOD.replace('"quadratic"', '"breast_cancer_folds"\nfolds = 3'))
    problem = PROBLEMS[cell.problem](**dict(cell.problem_arguments))
    assert problem.start.inner_var.shape == (3, 30)


def test_calls_are_taken_as_given(tmp_path):
    assert {cell.max_calls for cell in cells(tmp_path, GOOD.replace("epochs = 10", "calls = 12_345"))} == {12345}


@pytest.mark.parametrize(
    "same",
    [
        GOOD.replace("[0.1, 1.0]", "[0.1, 1]"),
        GOOD.replace("[0.1, 1.0]", "[0.1, 1.0, 1, 0.1]"),
        GOOD + "batch_size = 64\nsampling = 'blocks'\n",
        GOOD + SRBA,
        HEAD + SRBA.replace("[0.1, 1.0]", "0.1") + SRBA.replace("[0.1, 1.0]", "[1, 0.1]"),
        GOOD.replace("[budget]", "dtype = 'float32'\nseed = 0\ncoupling = 0.1\n[budget]"),
        GOOD.replace("seeds = 2", "seeds = [0, 1]"),
        GOOD.replace("epochs = 10", "epochs = 10.0"),
    ],
)
def test_the_same_experiment_in_other_words_has_the_same_cells(tmp_path, same):
    assert [cell.id for cell in cells(tmp_path, same)] == [cell.id for cell in cells(tmp_path, GOOD)]


def test_a_period_fraction_is_turned_into_a_period_by_the_size_of_the_problem(tmp_path):
    text = GOOD + "batch_size = 8\nperiod_fraction = [0.5, 0.55, 0.001, 8]\n"
    # 0.5 * 100 / 8 = 6.25 and 0.55 * 100 / 8 = 6.875: the same period, so one cell.
    periods = Counter(dict(cell.parameters)["period"] for cell in cells(tmp_path, text, seeds=1))
    assert periods == {6: 2, 1: 2, 100: 2}
    assert {dict(cell.parameters)["period"] for cell in load_config(tmp_path / "x.toml").cells(800, 0)} == {
        50,
        55,
        1,
        800,
    }


def test_a_star_stands_for_every_solver_but_those_that_need_constants(tmp_path):
    found = cells(tmp_path, GOOD.replace('"SRBA"', '"*"'))
    assert list(dict.fromkeys(cell.solver for cell in found)) == [name for name in SOLVERS if name != "AccBiO"]
    assert len({dict(cell.parameters)["step_size"] for cell in found if cell.solver == "SOBA"}) == 2
    with pytest.raises(ConfigError, match=r"\[\[solvers\]\] 1 \(\*\): unknown parameter `momentum`"):
        cells(tmp_path, GOOD.replace('"SRBA"', '"*"') + "momentum = 0.5\n")


def test_seeds_may_draw_new_problems(tmp_path):
    found = cells(tmp_path, GOOD.replace("[problem]", "new_problem_per_seed = true\n[problem]"), seeds=[5, 7])
    assert {(cell.seed, dict(cell.problem_arguments)["seed"]) for cell in found} == {(5, 5), (7, 7)}


def test_cells_can_be_restricted_to_some_solvers_and_seeds(tmp_path):
    text = GOOD + "[[solvers]]\nname = 'SOBA'\n"
    assert {(c.solver, c.seed) for c in cells(tmp_path, text, seeds=[3], only=["SOBA"])} == {("SOBA", 3)}
    with pytest.raises(ConfigError, match="unknown solver `soba`; did you mean `SOBA`"):
        cells(tmp_path, text, only=["soba"])
    with pytest.raises(ConfigError, match="unknown solver `SABA`"):
        cells(tmp_path, text, only=["SABA"])
    with pytest.raises(ConfigError, match="a seed occurs twice"):
        cells(tmp_path, text, seeds=[3, 3])


def test_timing_cells_have_seconds_and_let_solvers_take_turns(tmp_path):
    experiment = load_config(config(tmp_path, GOOD))
    settings = [("SRBA", (("period", 3), ("step_size", 1.0))), ("SOBA", (("step_size", 0.5),))]
    timed = experiment.timing_cells(settings, 640, 64)
    assert [(cell.solver, cell.seed) for cell in timed] == [("SRBA", 0), ("SOBA", 0), ("SRBA", 1), ("SOBA", 1)]
    swept = experiment.cells(640, 64)[0].max_calls
    assert {(cell.phase, cell.max_seconds, cell.max_calls) for cell in timed} == {("timing", 1.0, swept)}
    assert dict(timed[0].parameters)["period"] == 3


def test_without_seconds_there_is_no_timing(tmp_path):
    experiment = load_config(config(tmp_path, GOOD.replace("seconds = 1", "")))
    with pytest.raises(ConfigError, match="`x` has no timing phase; give `seconds`"):
        experiment.timing_cells([], 640, 64)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_config_is_found_by_its_bare_name_and_each_of_its_cells_can_be_built(name):
    experiment = load_config(name)
    found = experiment.cells(*SHIPPED[name])
    assert experiment.name == name
    assert len({cell.id for cell in found}) == len(found)
    for cell in found:
        SOLVERS[cell.solver](**dict(cell.parameters))


# Of the published column: steps, ratios, periods.
PROTOCOL = {"quadratic": (2, 4, 5), "ijcnn1": (4, 5, 6), "cleaning": (4, 6, 5)}


@pytest.mark.parametrize("name", PROTOCOL)
def test_the_published_column_has_the_grids_of_the_protocol_and_the_wider_one_contains_it(name):
    steps, ratios, periods = PROTOCOL[name]
    found = load_config(name).cells(*SHIPPED[name])
    published = [cell for cell in found if "published" in cell.columns]
    alone = dict.fromkeys(("SABA", "AmIGO", "StocBiO", "MRBO"), steps * ratios)
    expected = alone | dict.fromkeys(("SRBA", "VRBO"), steps * ratios * periods) | {"F2SA": steps * ratios * 3}
    assert Counter(cell.solver for cell in published) == {solver: 10 * n for solver, n in expected.items()}
    assert all("wider" in cell.columns for cell in published)
    assert {dict(cell.parameters)["schedule"] for cell in published if cell.solver == "F2SA"} == {"printed"}
    assert {cell.solver for cell in found if "later" in cell.columns} == {"SOBA", "MASOBA", "SPABA"}
    tuned = [cell for cell in found if cell.solver != "Exact" and "untuned" not in cell.columns]
    assert {dict(cell.parameters)["batch_size"] for cell in tuned} == {64}


def test_columns_name_settings_and_are_no_part_of_a_cell(tmp_path):
    plain = cells(tmp_path, GOOD)
    both = SRBA.replace("[0.1, 1.0]", '0.1\ncolumn = ["a", "b"]')
    named = cells(tmp_path, HEAD + both + SRBA + 'column = "b"\n')
    assert [cell.id for cell in plain] == [cell.id for cell in named]
    assert [cell.columns for cell in named] == [("a", "b")] * 2 + [("b",)] * 2


def test_the_horizon_of_selection_may_be_shorter_than_the_timed_runs(tmp_path):
    experiment = load_config(config(tmp_path, GOOD.replace("epochs = 10", "epochs = 10\ntiming_epochs = 25")))
    assert experiment.cells(60, 40)[0].max_calls == 10 * 100
    assert experiment.timing_cells([("SOBA", ())], 60, 40)[0].max_calls == 25 * 100


def test_a_cell_without_exact_metrics_is_another_one(tmp_path):
    bare = cells(tmp_path, GOOD.replace("seeds = 2", "seeds = 2\nexact = false"))
    assert not {cell.id for cell in bare} & {cell.id for cell in cells(tmp_path, GOOD)}
    assert not any(cell.exact for cell in bare)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name = "x"', "", "x.toml: `name` is missing; it must be letters, digits, - and _."),
        ('name = "x"', 'name = "../x"', "x.toml: `name='../x'`: must be letters, digits, - and _."),
        ('metric = "value"', 'metric = "valeu"', "x.toml: unknown metric `valeu`; did you mean `value`?"),
        ('metric = "value"', 'metric = "test_error"', "x.toml: `metric='test_error'` is of test rows, which select"),
        (
            "epochs = 10\nseconds = 1",
            "epochs = 10\ntiming_epochs = 20",
            "x.toml: [budget]: `timing_epochs` needs `seconds`",
        ),
        (
            "step_size = [0.1",
            'column = "a,b"\nstep_size = [0.1',
            "x.toml: [[solvers]] 1 (SRBA): `column='a,b'`: must be",
        ),
        ('metric = "value"', "metric = 3", "x.toml: `metric=3`: must be the name of a metric."),
        ("seeds = 2", "", "x.toml: `seeds` is missing"),
        ("seeds = 2", "seeds = 0", "x.toml: `seeds=0`: must be"),
        ("seeds = 2", "seeds = true", "x.toml: `seeds=True`: must be"),
        ("seeds = 2", "seeds = []", "x.toml: `seeds=[]`: must be"),
        ("seeds = 2", "seeds = [0, -1]", "x.toml: `seeds=[0, -1]`: must be"),
        ("seeds = 2", "seeds = [0, 1.5]", "x.toml: `seeds=[0, 1.5]`: must be"),
        ("seeds = 2", "seeds = [4294967296]", "x.toml: `seeds=[4294967296]`: must be"),
        ("seeds = 2", "seeds = [1, 1]", "x.toml: `seeds=[1, 1]`: a seed occurs twice."),
        ("seeds = 2", "sede = 2", "x.toml: unknown key `sede`; did you mean `seeds`?"),
        ("[problem]", "new_problem_per_seed = 1\n[problem]", "`new_problem_per_seed=1`: must be true or false."),
        ("[problem]", "[problen]", "x.toml: unknown key `problen`; did you mean `problem`?"),
        ('[problem]\nname = "quadratic"', "", "x.toml: `problem` is missing; it must be a table [problem]."),
        (
            '[problem]\nname = "quadratic"',
            'problem = "quadratic"',
            "x.toml: `problem='quadratic'`: must be a table [problem].",
        ),
        ('"quadratic"', '"quadratics"', "x.toml: [problem]: unknown problem `quadratics`; did you mean `quadratic`?"),
        ('"quadratic"', '"quadratic"\nn_iner = 3', "[problem] (quadratic): unknown argument `n_iner`; did you mean"),
        ('"quadratic"', '"quadratic"\nn_inner = 3.0', "[problem] (quadratic): `n_inner=3.0`: must be an integer."),
        ('"quadratic"', '"quadratic"\nn_inner = [3]', "[problem] (quadratic): `n_inner=[3]`: must be a single value."),
        ('"quadratic"', '"quadratic"\ncoupling = nan', "`coupling=nan`: must be a finite number that fits in 64 bits."),
        ('"quadratic"', '"quadratic"\ndtype = "int32"', "`dtype='int32'`: must be 'float32' or 'float64'."),
        (
            '[problem]\nname = "quadratic"',
            'new_problem_per_seed = true\n[problem]\nname = "quadratic"\nseed = 1',
            "`seed` and `new_problem_per_seed = true` exclude each other; leave one out.",
        ),
        ("epochs = 10", "", "x.toml: [budget]: give exactly one of `calls` and `epochs`."),
        ("epochs = 10", "epochs = 10\ncalls = 3", "x.toml: [budget]: give exactly one of `calls` and `epochs`."),
        ("epochs = 10", "epochs = inf", "x.toml: [budget]: `epochs=inf`: must be a finite number above 0."),
        ("epochs = 10", "calls = 1e6", "x.toml: [budget]: `calls=1000000.0`: must be an integer above 0."),
        ("epochs = 10", "calls = true", "x.toml: [budget]: `calls=True`: must be an integer above 0."),
        (
            "seconds = 1",
            "seconds = -1",
            "x.toml: [budget]: `seconds=-1`: must be a finite number above 0, or 0",
        ),
        ("seconds = 1", "second = 1", "x.toml: [budget]: unknown key `second`; did you mean `seconds`?"),
        (SRBA, "", "x.toml: `solvers` is missing; it must be tables [[solvers]], one for each solver"),
        (
            "[[solvers]]",
            "[solvers]",
            ": must be tables [[solvers]], one for each solver.",
        ),
        (SRBA, SRBA + "[[solvers]]\n", "x.toml: [[solvers]] 2: `name` is missing; it must be the name of a solver."),
        ('"SRBA"', '"srba"', "x.toml: [[solvers]] 1: unknown solver `srba`; did you mean `SRBA`?"),
        ('"SRBA"', '"Adam"', "x.toml: [[solvers]] 1: unknown solver `Adam`; "),
        ("step_size", "step_sise", "[[solvers]] 1 (SRBA): unknown parameter `step_sise`; did you mean `step_size`?"),
        ("[0.1, 1.0]", "[]", "[[solvers]] 1 (SRBA): `step_size=[]`: an empty list leaves an empty grid"),
        ("[0.1, 1.0]", "[0.1, -1]", "[[solvers]] 1 (SRBA): `SRBA(step_size=-1.0)`: must be a finite number above 0."),
        ("[0.1, 1.0]", "[0.1, nan]", "[[solvers]] 1 (SRBA): `step_size=nan`: must be a finite number"),
        ("[0.1, 1.0]", "[[0.1]]", "[[solvers]] 1 (SRBA): `step_size=[0.1]`: must be a single value."),
        ("[0.1, 1.0]", '"0.1"', "[[solvers]] 1 (SRBA): `SRBA(step_size='0.1')`: must be a finite number above 0."),
        ("[0.1, 1.0]", "true", "[[solvers]] 1 (SRBA): `SRBA(step_size=True)`: must be a finite number above 0."),
        ("[0.1, 1.0]", f"{10**400}", f"`step_size={10**400}`: must be a finite number that fits in 64 bits."),
        ("[0.1, 1.0]", "0.1\nbatch_size = 8.0", "`SRBA(batch_size=8.0)`: must be an integer of at least 1."),
        ("[0.1, 1.0]", "0.1\nsampling = 'ful'", "`SRBA(sampling='ful')`: must be one of 'blocks'"),
        ("[0.1, 1.0]", "0.1\nperiod_fraction = 0", "(SRBA): `period_fraction=0.0`: must be a finite number above 0."),
        (
            "[0.1, 1.0]",
            "0.1\nperiod_fraction = true",
            "(SRBA): `period_fraction=True`: must be a finite number above 0.",
        ),
        ("[0.1, 1.0]", "0.1\nperiod = 2\nperiod_fraction = 1", "`period` and `period_fraction` exclude each other"),
        (
            SRBA,
            "[[solvers]]\nname = 'SABA'\nperiod_fraction = 1",
            "(SABA): unknown parameter `period_fraction`; ",
        ),
        ("seeds = 2", "seeds = = 2", "x.toml: not TOML: "),
        ("seeds = 2", f"seeds = {'[' * 2000}", "x.toml: not TOML: "),
        ("seeds = 2", "seeds = 2\nseeds = 3", "x.toml: not TOML: "),
    ],
)
def test_a_malformed_config_is_refused_with_its_place(tmp_path, old, new, message):
    assert old in GOOD
    path = config(tmp_path, GOOD.replace(old, new, 1))
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        load_config(path)
    assert str(caught.value).startswith(str(path))


def test_a_bare_name_is_of_the_package_in_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    assert load_config("demo").name == "demo", "a folder of this name does not stand in the way"
    with pytest.raises(ConfigError, match=r"demmo: no such config in the package; did you mean `demo`\?"):
        load_config("demmo")


def test_a_file_that_is_not_there_is_refused_with_its_neighbors(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    config(tmp_path / "mine", GOOD).rename("mine/own.toml")
    with pytest.raises(ConfigError, match=r"mine/owm.toml: no such file; did you mean `mine/own.toml`\?"):
        load_config("mine/owm.toml")
    config(tmp_path, GOOD).rename("own.toml")
    with pytest.raises(ConfigError, match=r"own: no such config in the package; did you mean `own.toml`\?"):
        load_config("own")


def test_a_folder_and_a_binary_file_are_no_configs(tmp_path):
    (tmp_path / "x.toml").mkdir()
    with pytest.raises(ConfigError, match=r"x.toml: cannot be read: it is not a regular file."):
        load_config(tmp_path / "x.toml")
    (tmp_path / "y.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"y.toml: not TOML"):
        load_config(tmp_path / "y.toml")


def test_every_solver_of_the_registry_can_be_named(tmp_path):
    text = HEAD + "".join(f"[[solvers]]\nname = '{name}'\n" for name in SOLVERS)
    assert load_config(config(tmp_path, text)).solvers == tuple(SOLVERS)


def test_metrics_of_runs_are_known(tmp_path):
    from bilevel.engine.metrics import cheap_metrics, exact_metrics

    problem = PROBLEMS["quadratic"](8, 8, 2, 2, dtype="float32", common_linear=0.5, coupling=0.01)
    exact, _ = exact_metrics(problem, problem.start, None)
    assert {*cheap_metrics(problem.oracles, problem.start), *exact} <= set(METRICS)


@pytest.mark.parametrize(
    ("old", "new", "settings", "seeds"),
    [
        ("seeds = 2", "seeds = 3_999_999_999", "2 settings", "3,999,999,999 seeds"),
        ("[0.1, 1.0]", f"{[*range(1, 1002)]}\nperiod = {[*range(1, 1001)]}", "1,001,000 settings", "1"),
        ("[0.1, 1.0]", f"{[*range(1, 252)]}", "251 settings", "2"),
    ],
    ids=["seeds", "lists", "both"],
)
def test_more_cells_than_can_be_listed_are_refused_with_their_number(old, new, settings, seeds, tmp_path, monkeypatch):
    if seeds == "2":  # a lower limit, to save time
        monkeypatch.setattr("bilevel.bench.config.MOST_CELLS", 500)
    with pytest.raises(ConfigError, match=rf"x\.toml: .*{settings} with {seeds} .*are [\d,]+ cells, more than [\d,]+"):
        load_config(config(tmp_path, GOOD.replace(old, new)))


@pytest.mark.parametrize("seeds", [2**31, range(10**12)], ids=["a number", "a range"])
def test_more_seeds_than_can_be_listed_are_refused_when_they_are_asked_for(seeds, tmp_path):
    with pytest.raises(ConfigError, match=r"`x`: 2 settings with [\d,]+ seeds are [\d,]+ cells, more than 1,000,000"):
        load_config(config(tmp_path, GOOD)).narrow(seeds=seeds)


@pytest.mark.parametrize(
    "line",
    [
        ".".join(["ab"] * 40) + " = 1",
        "[" + " . ".join(["x"] * 20) + "]",
        "t = {" + ".".join(['"a.b"', "'c'"] * 10) + " = 1}",
        "y" * 1200 + " = 1",
    ],
    ids=["dotted", "header", "quoted", "long"],
)
def test_a_key_of_many_parts_is_refused_before_it_is_parsed(line, tmp_path, monkeypatch):
    monkeypatch.setattr("bilevel.bench.config.tomllib.loads", lambda text: pytest.fail("was parsed"))
    with pytest.raises(ConfigError, match=r"x\.toml: not TOML: a key begins with `.{1,40}`, and at most 16") as told:
        load_config(config(tmp_path, f"{line}\n{GOOD}"))
    assert len(str(told.value)) < 500


def test_a_large_config_is_refused_unread(tmp_path):
    path = config(tmp_path, GOOD + "# more\n" * 50_000)
    with pytest.raises(ConfigError, match=r"x\.toml: cannot be read: it has 350,\d{3} bytes, and at most 262,144"):
        load_config(path)


def test_points_in_numbers_texts_and_comments_are_no_keys(tmp_path):
    values = ", ".join(f"{one / 100}" for one in range(1, 60))
    text = f"# {'.' * 80} a.b.c. 1.2.3\n{GOOD.replace('[0.1, 1.0]', f'[{values}]')}"
    few = len(load_config(config(tmp_path, GOOD)).settings)
    assert len(load_config(config(tmp_path, text)).settings) > few
