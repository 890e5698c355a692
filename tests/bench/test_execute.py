"""An experiment: nothing is run twice, nothing that fails takes the rest down, and the best is timed alone."""

import contextlib
import dataclasses
import math
import os
import re
import signal
import threading

import pytest

import bilevel
from bilevel.bench import distribution
from bilevel.bench import execute as module
from bilevel.bench.config import ConfigError
from bilevel.bench.distribution import Where
from bilevel.bench.execute import execute
from bilevel.bench.live import Watcher
from bilevel.bench.page import assign_looks, draw_figure, write_report
from bilevel.bench.select import make_sections
from bilevel.bench.store import Store
from tests.bench import tiny
from tests.cases import N_INNER, N_OUTER

BOTH = tiny.SOBA + tiny.SRBA


in_worker = module._in_worker


def dying(task, where):
    """A worker that is killed, as if memory were exhausted, after other tasks have ended."""
    if ("period", 7) in task.cells[0].parameters and task.cells[0].seed == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return in_worker(task, where)


def telling(task, where):
    """A worker that returns whether Ctrl-C is blocked."""
    return task, [], f"held back: {signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])}"


def ran(experiment, store, **kwargs):
    watcher = tiny.Watcher()
    return execute(experiment, store, watcher, **kwargs), watcher


@pytest.fixture
def pretence(monkeypatch):
    return tiny.Pretence().install(monkeypatch)


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


def test_what_is_in_the_store_is_not_run_again(tmp_path, store, pretence):
    experiment = tiny.experiment(tmp_path, BOTH, tiny.SECONDS)
    failures, watcher = ran(experiment, store)
    cells = tiny.cells(experiment)
    assert failures == 0 and sorted(pretence.cells) == sorted(cell.id for cell in cells)
    assert watcher.begun == [("sweep", 0, 12), ("timing", 0, 4)]
    assert sum(n for n, *_ in watcher.advanced) == 12 + 4
    before = sorted(path.name for path in store.folder.iterdir())
    pretence.swept.clear()
    pretence.timed.clear()
    failures, watcher = ran(experiment, store)
    assert (failures, pretence.swept, pretence.timed, watcher.advanced) == (0, [], [], [])
    assert watcher.begun == [("sweep", 12, 12), ("timing", 4, 4)]
    assert sorted(path.name for path in store.folder.iterdir()) == before


def test_a_new_seed_runs_alone(tmp_path, store, pretence):
    ran(tiny.experiment(tmp_path), store)
    pretence.swept.clear()
    longer = tiny.experiment(tmp_path, seeds=3)
    ran(longer, store)
    assert {cell.seed for task in pretence.swept for cell in task.cells} == {2} and len(pretence.cells) == 2
    assert store.finished() == {cell.id for cell in tiny.cells(longer)}


def test_a_new_setting_runs_alone(tmp_path, store, pretence):
    ran(tiny.experiment(tmp_path), store)
    pretence.swept.clear()
    wider = tiny.experiment(tmp_path, tiny.SOBA.replace("0.02]", "0.02, 0.01]"))
    ran(wider, store)
    assert {dict(cell.parameters)["step_size"] for task in pretence.swept for cell in task.cells} == {0.01}
    assert len(pretence.cells) == 2
    assert store.finished() == {cell.id for cell in tiny.cells(wider)}


@pytest.mark.parametrize("broken", [("SOBA", 0), ("SRBA", 1)])
def test_a_failed_task_is_reported_and_only_that_task_is_repeated(tmp_path, store, monkeypatch, broken):
    experiment = tiny.experiment(tmp_path, BOTH)
    pretence = tiny.Pretence([broken]).install(monkeypatch)
    failures, watcher = ran(experiment, store)
    lost = [cell.id for cell in tiny.cells(experiment) if (cell.solver, cell.seed) == broken]
    title = f"{broken[0]} on quadratic, seed {broken[1]}"
    assert failures == len(watcher.failures) >= 1
    assert set(watcher.failures) == {(title, f"RuntimeError: no {broken[0]} today")}
    assert store.finished() == {cell.id for cell in tiny.cells(experiment)} - set(lost)
    pretence.broken.clear()
    pretence.swept.clear()
    failures, _ = ran(experiment, store)
    assert failures == 0 and sorted(pretence.cells) == sorted(lost)
    assert store.finished() == {cell.id for cell in tiny.cells(experiment)}


def test_the_log_names_the_values_of_the_cells_that_have_just_ended(tmp_path, store, pretence, capsys):
    experiment = tiny.experiment(tmp_path, tiny.SRBA.replace("0.05, 0.02", "0.4, 0.3") + tiny.SOBA, tiny.SECONDS)
    assert execute(experiment, store, Watcher()) == 0
    line = r"^(\w+): (\w+) on quadratic, seed (\d): done, value_gap ([\d.]+)(?: to ([\d.]+))?;"
    printed = re.findall(line, capsys.readouterr().err, flags=re.MULTILINE)
    finals = store.read().query("final").groupby(["phase", "solver", "seed"])["value_gap"]
    expected = {key: (gaps.min(), gaps.max()) for key, gaps in finals}
    found = {(phase, solver, int(seed)): (float(a), float(b or a)) for phase, solver, seed, a, b in printed}
    assert found == expected and len({gaps for gaps in found.values()}) == 4


def test_cells_that_diverged_are_counted_and_their_values_left_out():
    def rows(*ends):
        common = {"final": False, "status": "out_of_budget", "h": 9.0}
        return [row for end in ends for row in (common, common | {"final": True} | end)]

    gone = {"h": 1e9, "status": "diverged"}
    assert module.describe_values(rows({"h": 0.25}, gone, {"h": 0.125}, {"h": math.nan}), "h") == (
        "h 0.125 to 0.25, 1 diverged"
    )
    assert module.describe_values(rows(gone, gone), "h") == "h nan, 2 diverged"
    assert module.describe_values(rows({}), "h") == "h 9"


class Thief(tiny.Watcher):
    """Deletes files of a store, oldest first, each time a certain number of tasks of a phase have ended."""

    def __init__(self, store, phase, after):
        super().__init__()
        self.store, self.phase, self.after = store, phase, after

    def advance(self, n_cells, title, values):
        super().advance(n_cells, title, values)
        if self.begun[-1][0] == self.phase and len(self.advanced) % self.after == 0:
            min(self.store.folder.glob("[!_.]*.parquet"), key=lambda path: path.stat().st_mtime_ns).unlink()


def test_results_that_vanish_during_a_sweep_are_a_failure_and_nothing_is_selected(tmp_path, store, pretence):
    experiment = tiny.experiment(tmp_path, BOTH, tiny.SECONDS)
    watcher = Thief(store, "sweep", after=2)
    assert execute(experiment, store, watcher) == 1
    lost = {cell.id for cell in tiny.cells(experiment)} - store.finished()
    assert lost and pretence.timed == []
    expected = f"{len(lost)} of 12 cells were stored, and are no longer in `{store.folder}`: files were deleted"
    assert [(title, text[: len(expected)]) for title, text in watcher.failures] == [("sweep", expected)]
    pretence.swept.clear()
    assert ran(experiment, store)[0] == 0
    assert sorted(pretence.cells) == sorted(lost) and len(pretence.timed) == 4


@pytest.mark.parametrize("victim", ["timing", "sweep"])
def test_results_that_vanish_during_the_timing_are_a_failure(victim, tmp_path, store, pretence):
    experiment = tiny.experiment(tmp_path, BOTH, tiny.SECONDS)
    if victim == "sweep":
        watcher = Thief(store, "timing", after=4)
    else:
        ran(experiment, store, phases=["sweep"])
        for path in [*store.folder.glob("[!_.]*.parquet")]:
            os.utime(path, (2e9, 2e9))  # younger than what is timed
        watcher = Thief(store, "timing", after=3)
    assert execute(experiment, store, watcher) == 1
    assert [title for title, _ in watcher.failures] == [victim]


def test_lost_results_and_failed_tasks_are_counted_separately(tmp_path, store, monkeypatch):
    tiny.Pretence([("SOBA", 1)]).install(monkeypatch)
    watcher = Thief(store, "sweep", after=3)
    assert execute(tiny.experiment(tmp_path, BOTH), store, watcher) == 2
    assert [title for title, _ in watcher.failures] == ["SOBA on quadratic, seed 1", "sweep"]


def test_a_store_lists_planned_cells_that_are_missing(tmp_path, store, monkeypatch):
    def unfinished():
        return [text.partition("; ")[0] for text in store.list_unfinished(store.finished())]

    pretence = tiny.Pretence([("SOBA", 0)]).install(monkeypatch)
    ran(tiny.experiment(tmp_path, tiny.SOBA), store)
    assert unfinished() == ["`tiny` is unfinished: 2 of the 4 cells of its sweep are stored"]
    ran(tiny.experiment(tmp_path, tiny.SOBA), store, seeds=[1])
    assert unfinished() == ["`tiny` is unfinished: 2 of the 4 cells of its sweep are stored"], "the plan is the same"
    pretence.broken = {("SOBA", "timing")}
    ran(tiny.experiment(tmp_path, tiny.SOBA, tiny.SECONDS), store)
    assert unfinished() == ["`tiny` is unfinished: 0 of the 2 cells of its timing are stored"]
    pretence.broken = {("SRBA", 0), ("SRBA", 1)}
    ran(tiny.experiment(tmp_path, BOTH, tiny.SECONDS), store)
    assert unfinished()[0] == "`tiny` is unfinished: 4 of the 12 cells of its sweep are stored"
    pretence.broken.clear()
    ran(tiny.experiment(tmp_path, tiny.SOBA, tiny.SECONDS), store)
    assert unfinished() == [], "a solver that is not in the config any more is not planned"


def test_a_failed_timing_is_reported_and_the_others_are_timed(tmp_path, store, monkeypatch):
    experiment = tiny.experiment(tmp_path, BOTH, tiny.SECONDS)
    pretence = tiny.Pretence([("SOBA", "timing")]).install(monkeypatch)
    failures, watcher = ran(experiment, store)
    assert failures == 2 and {title for title, _ in watcher.failures} == {
        "SOBA on quadratic, seed 0",
        "SOBA on quadratic, seed 1",
    }
    assert set(store.read("timing")["solver"]) == {"SRBA"}
    pretence.broken.clear()
    assert ran(experiment, store)[0] == 0
    assert set(store.read("timing")["solver"]) == {"SOBA", "SRBA"}


def test_solvers_and_seeds_can_be_chosen(tmp_path, store, pretence):
    experiment = tiny.experiment(tmp_path, BOTH, tiny.SECONDS)
    ran(experiment, store, only=["SRBA"], seeds=range(4, 6))
    swept = [cell for task in pretence.swept for cell in task.cells]
    assert {(cell.solver, cell.seed) for cell in swept} == {("SRBA", 4), ("SRBA", 5)}
    assert {(cell.solver, cell.seed) for cell in pretence.timed} == {("SRBA", 4), ("SRBA", 5)}
    with pytest.raises(ConfigError, match="unknown solver `SORBA`; did you mean `SRBA`"):
        ran(experiment, store, only=["SORBA"])
    with pytest.raises(ConfigError, match="must be a number of at least 1"):
        ran(experiment, store, seeds=[-1])


def test_the_best_setting_of_each_solver_is_timed_alone(tmp_path, store, pretence):
    ran(tiny.experiment(tmp_path, BOTH, tiny.SECONDS), store)
    timed = [(cell.solver, dict(cell.parameters)["step_size"], cell.seed) for cell in pretence.timed]
    assert sorted(timed) == [(solver, 0.02, seed) for solver in ("SOBA", "SRBA") for seed in (0, 1)]
    assert all(cell.phase == "timing" and cell.max_seconds == 0.05 for cell in pretence.timed)
    assert set(store.read("timing")["seconds"]) == {0.5}
    assert store.read("sweep")["seconds"].isna().all()


def test_nothing_is_timed_without_seconds(tmp_path, store, pretence):
    _, watcher = ran(tiny.experiment(tmp_path), store)
    assert pretence.timed == [] and [phase for phase, *_ in watcher.begun] == ["sweep"]


def test_nothing_is_timed_after_a_failed_sweep(tmp_path, store, monkeypatch):
    pretence = tiny.Pretence([("SOBA", 0), ("SOBA", 1)]).install(monkeypatch)
    failures, _ = ran(tiny.experiment(tmp_path, seconds=tiny.SECONDS), store)
    assert failures == 2 and pretence.timed == []


def test_a_metric_that_no_cell_has_is_refused_by_name(tmp_path, store, pretence):
    path = tiny.write(tmp_path, (tiny.HEAD + tiny.BUDGET + tiny.SECONDS + tiny.SOBA).replace("value_gap", "weight_auc"))
    with pytest.raises(ValueError, match="`metric='weight_auc'`: no cell of `tiny` on quadratic has it"):
        ran(tiny.load_config(path), store)


def own_problem(seed: int = 0, dtype: str = "float64") -> bilevel.BilevelProblem:
    """A problem with a metric that is in no registry."""
    quadratic = bilevel.problems.quadratic(N_INNER, N_OUTER, 5, 3, seed, dtype=dtype)
    return dataclasses.replace(quadratic, metrics={"squared_size": lambda point: (point.outer_var**2).sum()})


def test_a_metric_of_the_users_own_is_stored_selected_by_drawn_and_reported(tmp_path, store, monkeypatch):
    monkeypatch.setitem(bilevel.problems.PROBLEMS, "own", own_problem)
    budget = tiny.BUDGET + tiny.SECONDS
    head = 'name = "tiny"\nmetric = "squared_size"\nseeds = 2\n[problem]\nname = "own"\n'
    failures, watcher = ran(tiny.load_config(tiny.write(tmp_path, head + budget + tiny.SOBA)), store)
    assert failures == 0, watcher.failures
    table = store.read()
    assert table["squared_size"].notna().all()
    finals = table[table["final"] & (table["phase"] == "sweep")]
    best = finals.groupby("param_step_size")["squared_size"].median().idxmin()
    assert set(table[table["phase"] == "timing"]["param_step_size"]) == {best}
    (section,) = make_sections(table, "squared_size")
    assert ("squared_size", "seconds", "SOBA") in section.curves
    assert draw_figure(section, assign_looks(["SOBA"])).axes[0].get_ylabel() == "squared size"
    page = write_report(table, tmp_path / "page", select="squared_size").read_text()
    assert "Selected by the final squared size of the sweep" in page
    assert '<th scope="col" class="number">squared size</th>' in page


def test_a_metric_that_raises_is_nan_and_the_run_continues(tmp_path, monkeypatch):
    def broken_problem(seed: int = 0, dtype: str = "float64") -> bilevel.BilevelProblem:
        def divide(point):
            raise ZeroDivisionError("no such ratio")

        problem = own_problem(seed, dtype)
        return dataclasses.replace(problem, metrics={"ratio": divide, **problem.metrics})

    monkeypatch.setitem(bilevel.problems.PROBLEMS, "own", own_problem)
    monkeypatch.setitem(bilevel.problems.PROBLEMS, "broken", broken_problem)
    stores = {name: Store(tmp_path / name) for name in ("own", "broken")}
    for name, store in stores.items():
        head = f'name = "tiny"\nmetric = "squared_size"\nseeds = 2\n[problem]\nname = "{name}"\n'
        experiment = tiny.load_config(tiny.write(tmp_path, head + tiny.BUDGET + tiny.SECONDS + BOTH))
        told = pytest.warns(RuntimeWarning, match="'ratio' failed") if name == "broken" else contextlib.nullcontext()
        with told:
            assert ran(experiment, store)[0] == 0
    order = ["seed", "solver", "param_step_size", "param_period", "step"]
    swept = {name: tiny.table(store, "sweep").sort_values(order) for name, store in stores.items()}
    assert swept["broken"].pop("ratio").isna().all()
    unlike = ["problem", "cell"]
    tiny.assert_same_table(swept["broken"].drop(columns=unlike), swept["own"].drop(columns=unlike))
    assert len(stores["broken"].read("timing")) and stores["broken"].read("timing")["squared_size"].notna().all()


def test_a_metric_that_is_neither_known_nor_the_problems_own_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(bilevel.problems.PROBLEMS, "own", own_problem)
    text = 'name = "x"\nmetric = "squared_sise"\nseeds = 2\n[problem]\nname = "own"\n' + tiny.BUDGET + tiny.SOBA
    with pytest.raises(ConfigError, match=r"unknown metric `squared_sise`; did you mean `squared_size`\?"):
        tiny.load_config(tiny.write(tmp_path, text))


@pytest.mark.parametrize("full_for", [1, 2, 99])
def test_results_are_written_once_a_full_disk_has_space(full_for, tmp_path, store, pretence, monkeypatch):
    experiment, plain, tries = tiny.experiment(tmp_path), Store.write, []

    def full(self, rows):
        tries.append(1)
        if len(tries) <= full_for:
            raise OSError("`store` cannot be written to: No space left on device.")
        return plain(self, rows)

    monkeypatch.setattr(Store, "write", full)
    failures, watcher = ran(experiment, store)
    cells = {cell.id for cell in tiny.cells(experiment)}
    assert set(pretence.cells) == cells, "every task was run, and once"
    assert len(pretence.cells) == len(cells)
    assert all("No space left on device. Its results are" in error for _, error in watcher.failures)
    if full_for == 99:
        assert failures == len({cell.seed for cell in tiny.cells(experiment)}) and not store.finished()
        assert "are lost; run it again" in watcher.failures[-1][1]
    else:
        assert failures == 0 and store.finished() == cells
        assert sum(n for n, *_ in watcher.advanced) == len(cells)


def test_finished_results_survive_ctrl_c(tmp_path, store, monkeypatch):
    pretence = tiny.Pretence().install(monkeypatch)

    def interrupted(task, **_):
        if task.cells[0].seed == 1:
            raise KeyboardInterrupt
        return pretence.run_task(task)

    monkeypatch.setattr("bilevel.bench.execute.run_task", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ran(tiny.experiment(tmp_path), store)
    assert set(store.read()["seed"]) == {0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"jobs": 0}, "`jobs=0`: must be at least 1."),
        ({"jobs": 2, "dask": "tcp://127.0.0.1:1"}, "`jobs` and `dask` exclude each other"),
    ],
)
def test_where_to_run_is_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        Where(**arguments)


def test_a_device_that_is_not_there_is_refused(tmp_path, store):
    with pytest.raises(ValueError, match="`device='gpu'`: JAX has no such device here"):
        ran(tiny.experiment(tmp_path), store, where=Where(device="gpu"))


@pytest.mark.slow
def test_two_processes_give_the_run_task_one(tmp_path):
    experiment = tiny.experiment(tmp_path, BOTH, tiny.SECONDS)
    stores = [Store(tmp_path / str(jobs)) for jobs in (1, 2)]
    for jobs, store in enumerate(stores, start=1):
        failures, watcher = ran(experiment, store, where=Where(jobs=jobs))
        assert failures == 0 and watcher.failures == []
    one, two = (tiny.table(store, "sweep") for store in stores)
    tiny.assert_same_table(two, one)
    assert set(stores[0].read("timing")["cell"]) == set(stores[1].read("timing")["cell"])
    assert stores[1].read("timing")["seconds"].notna().all()


@pytest.mark.slow
def test_finished_tasks_survive_the_death_of_a_local_worker(tmp_path, store, monkeypatch):
    experiment = tiny.experiment(tmp_path, BOTH)
    cells = {cell.id for cell in tiny.cells(experiment)}
    with monkeypatch.context() as patch:
        patch.setattr(module, "_in_worker", dying)
        failures, watcher = ran(experiment, store, where=Where(jobs=2))
    assert failures == len(watcher.failures) >= 1
    assert all("TerminatedWorkerError" in error for _, error in watcher.failures)
    assert len(store.finished()) == sum(n for n, *_ in watcher.advanced) < len(cells)
    assert ran(experiment, store)[0] == 0
    assert store.finished() == cells


@pytest.mark.slow
def test_ctrl_c_is_left_to_the_first_process(tmp_path, store, monkeypatch):
    monkeypatch.setattr(module, "_in_worker", telling)
    _, watcher = ran(tiny.experiment(tmp_path), store, where=Where(jobs=2))
    assert {error for _, error in watcher.failures} == {"held back: True"}
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_ctrl_c_while_workers_are_started_is_answered_afterwards():
    reached = []

    def start():
        with distribution._ctrl_c_later():
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
            reached.append("the end")

    with pytest.raises(KeyboardInterrupt):
        start()
    assert reached == ["the end"]
