"""Saving and going on."""

import io

import numpy as np
import pytest

import bilevel
from tests import cases

SOLVERS = cases.SOLVERS


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", cases.marked(SOLVERS))
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(name, dtype, tmp_path):
    path = tmp_path / "deep" / "run.npz"
    whole = bilevel.run(cases.quadratic(dtype), SOLVERS[name], seed=5, max_steps=150)
    bilevel.run(cases.quadratic(dtype), SOLVERS[name], seed=5, max_steps=61).save(path)
    resumed = bilevel.resume(path, cases.quadratic(dtype), max_steps=150)
    cases.assert_trees_equal(resumed.point, whole.point)
    cases.assert_trees_equal(resumed.state, whole.state)
    assert resumed.calls == whole.calls
    assert resumed.solver == whole.solver and resumed.seed == 5
    shared = [i for i, step in enumerate(resumed.history["step"]) if step in whole.history["step"]]
    np.testing.assert_array_equal(resumed.history["step"][shared], whole.history["step"])
    np.testing.assert_allclose(resumed.history["value"][shared], whole.history["value"], rtol=1e-12)
    assert np.all(np.diff(resumed.history["seconds"]) > 0)


def test_budgets_count_the_whole_run(tmp_path):
    path = tmp_path / "run.npz"
    problem = cases.quadratic("float32")
    first = bilevel.run(problem, SOLVERS["SRBA"], max_seconds=0.2)
    first.save(path)
    again = bilevel.resume(path, problem, max_seconds=0.1)
    assert again.history["step"][-1] == first.history["step"][-1]
    further = bilevel.resume(path, problem, max_seconds=0.3)
    assert first.history["step"][-1] < further.history["step"][-1]
    assert further.history["seconds"][-1] >= 0.3
    spent = sum(first.calls)
    assert sum(bilevel.resume(path, problem, max_calls=spent + 2000).calls) <= spent + 2000


def test_resume_keeps_every_parameter(tmp_path):
    path = tmp_path / "run.npz"
    solver = bilevel.SRBA(0.2, 2.0, cases.BATCH, period=9, v_radius=5.0, sampling="iid")
    bilevel.run(cases.quadratic("float32"), solver, max_steps=5).save(path)
    assert bilevel.resume(path, cases.quadratic("float32"), max_steps=6).solver == solver


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "run.npz"
    bilevel.run(cases.quadratic("float32"), SOLVERS["SRBA"], max_steps=5).save(path)
    return path


def test_another_problem_is_refused(saved):
    for other in (
        cases.quadratic("float64"),
        cases.quadratic("float32", seed=2),
        cases.logistic_selection("float32"),
    ):
        with pytest.raises(ValueError, match=r"saved from another problem"):
            bilevel.resume(saved, other, max_steps=9)


def test_other_losses_on_the_same_data_are_refused(tmp_path):
    def made(scale):
        data = np.random.default_rng(0).standard_normal((30, 2))

        def loss(z, x, row):
            return scale * ((row @ z - 1) ** 2 + (z @ z) * (x @ x))

        start = {"inner_var": np.ones(2), "outer_var": np.ones(2)}
        return bilevel.BilevelProblem.from_losses(loss, loss, data, data, **start, dtype="float32")

    path = tmp_path / "run.npz"
    bilevel.run(made(1.0), bilevel.SRBA(0.01, 1.0, 8), max_steps=5).save(path)
    bilevel.resume(path, made(1.0), max_steps=6)
    with pytest.raises(ValueError, match=r"losses differ"):
        bilevel.resume(path, made(1.1), max_steps=6)


def test_a_damaged_or_foreign_file_is_refused(saved, tmp_path):
    problem = cases.quadratic("float32")
    with pytest.raises(FileNotFoundError, match=r"result\.save"):
        bilevel.resume(tmp_path / "missing.npz", problem, max_steps=9)
    whole = saved.read_bytes()
    saved.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"not a saved run, or is damaged"):
        bilevel.resume(saved, problem, max_steps=9)
    saved.write_text("text")
    with pytest.raises(ValueError, match=r"not a saved run, or is damaged"):
        bilevel.resume(saved, problem, max_steps=9)
    with np.load(io.BytesIO(whole)) as archive:
        kept = {name: archive[name] for name in archive.files}
    for lost in ("history_1", "best_2"):
        np.savez(saved, **{name: array for name, array in kept.items() if name != lost})
        with pytest.raises(ValueError, match=r"run.npz` is damaged: it has not the arrays that were saved"):
            bilevel.resume(saved, problem, max_steps=9)
    np.savez(saved, about=np.array({"format": 1}, dtype=object))
    with pytest.raises(ValueError, match=r"not a saved run, or is damaged"):
        bilevel.resume(saved, problem, max_steps=9)


def test_a_file_of_another_format_is_refused(saved, monkeypatch):
    monkeypatch.setattr("bilevel.engine.result._FORMAT", 2)
    with pytest.raises(ValueError, match="has format 1; this version reads format 2"):
        bilevel.resume(saved, cases.quadratic("float32"), max_steps=5)


def test_a_failed_write_leaves_the_old_file_and_no_other(saved, monkeypatch):
    before = saved.read_bytes()

    def broken(file, **arrays):
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez", broken)
    with pytest.raises(OSError, match=r"disk full"):
        bilevel.run(cases.quadratic("float32"), SOLVERS["SRBA"], max_steps=6).save(saved)
    assert saved.read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == ["run.npz"]


def test_a_name_that_no_disk_takes_is_told_as_such(tmp_path):
    result = bilevel.run(cases.quadratic("float32"), SOLVERS["SRBA"], max_steps=5)
    with pytest.raises(OSError, match=r"a` cannot be written \(File name too long\)\.$"):
        result.save(tmp_path / ("a" * 300))


def test_a_solver_of_the_users_own_is_handed_over(tmp_path):
    @bilevel.solvers.solver
    class Lazy(bilevel.SOBA):
        """SOBA under another name."""

    path = tmp_path / "run.npz"
    problem = cases.quadratic("float32")
    solver = Lazy(0.1, 1.0, 8)
    bilevel.run(problem, solver, max_steps=5).save(path)
    with pytest.raises(ValueError, match=r"not in SOLVERS; pass it as `solver=`"):
        bilevel.resume(path, problem, max_steps=9)
    with pytest.raises(ValueError, match=r"was made by Lazy"):
        bilevel.resume(path, problem, solver=Lazy(0.2, 1.0, 8), max_steps=9)
    resumed = bilevel.resume(path, problem, solver=solver, max_steps=9)
    cases.assert_trees_equal(resumed.point, bilevel.run(problem, solver, max_steps=9).point)
