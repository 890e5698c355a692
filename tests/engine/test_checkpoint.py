"""Saving and resuming runs."""

import importlib
import io
import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import bilevel
from tests import cases

SOLVERS = cases.SOLVERS
OTHERS = [pytest.param(name, "float32", marks=pytest.mark.slow) for name in SOLVERS if name not in cases.QUICK]


@pytest.mark.filterwarnings("ignore:AutoSRBA")  # after so few steps z is far from its solution
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*itertools.product(cases.QUICK, ["float32", "float64"]), *OTHERS],
)
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


def test_budgets_include_the_steps_before_the_save(tmp_path):
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


def penalized(penalty, scale=1.0, at=0.0):
    """Return a problem that starts at z = 0, where most penalties agree."""
    rng = np.random.default_rng(4)
    rows = scale * rng.standard_normal((40, 3)), rng.standard_normal(40)

    def outer_loss(z, x, row):
        return (row[0] @ z - row[1]) ** 2 / 2

    def inner_loss(z, x, row):
        return outer_loss(z, x, row) + penalty(z, x)

    start = {"inner_var": np.zeros(3), "outer_var": np.full(3, at)}
    return bilevel.BilevelProblem.from_losses(inner_loss, outer_loss, rows, rows, **start)


PENALTIES = {
    "saved": lambda z, x: jnp.exp(x) @ z**2 / 2,
    "no half": lambda z, x: jnp.exp(x) @ z**2,
    "a third": lambda z, x: jnp.exp(x) @ z**2 / 3,
    "softplus": lambda z, x: jax.nn.softplus(x) @ z**2 / 2,
    "twice x": lambda z, x: jnp.exp(2 * x) @ z**2 / 2,
    "fourth powers": lambda z, x: jnp.exp(x) @ z**2 / 2 + jnp.sum(z**4),
    "plain squares": lambda z, x: jnp.exp(x) @ z**2 / 2 + z @ z / 2,
    "exchanged": lambda z, x: jnp.exp(x)[::-1] @ z**2 / 2,
    "absolute values": lambda z, x: jnp.exp(x) @ jnp.abs(z) ** 3 / 2,
    "a product": lambda z, x: jnp.exp(x) @ z**2 / 2 + 1e-3 * z[0] * z[1],
    "no penalty": lambda z, x: 0.0 * jnp.sum(z),
}


@pytest.mark.parametrize(("scale", "at"), [(1.0, 0.0), pytest.param(30.0, -3.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", list(PENALTIES))
def test_different_losses_are_refused_even_if_they_agree_at_the_start(name, scale, at, tmp_path):
    path = tmp_path / "run.npz"
    bilevel.run(penalized(PENALTIES["saved"], scale, at), bilevel.SOBA(1e-4, 1.0, 8), max_steps=3).save(path)
    other = penalized(PENALTIES[name], scale, at)
    if name == "saved":
        assert bilevel.resume(path, other, max_steps=4).history["step"][-1] == 4
        return
    with pytest.raises(ValueError, match="losses differ"):
        bilevel.resume(path, other, max_steps=4)


def test_losses_that_overflow_away_from_the_start_are_compared(tmp_path):
    def made(factor):
        return penalized(lambda z, x: jnp.exp(1e4 * z[0] ** 2) / 1e8 + factor * jnp.exp(x) @ z**2, scale=1.0)

    path = tmp_path / "run.npz"
    bilevel.run(made(1.0), bilevel.SOBA(1e-6, 1.0, 8), max_steps=3).save(path)
    bilevel.resume(path, made(1.0), max_steps=4)
    with pytest.raises(ValueError, match="losses differ"):
        bilevel.resume(path, made(1.01), max_steps=4)


OPTIMIZERS = [
    (optax.sgd(0.1), optax.sgd(0.11)),
    (optax.adam(1e-2), optax.adam(1e-2, b2=0.99)),
    (optax.adam(1e-2), optax.adam(1e-2, eps=1e-6)),
    (optax.sgd(0.1, momentum=0.9), optax.sgd(0.1, momentum=0.8)),
    (optax.sgd(optax.cosine_decay_schedule(0.1, 5000)), optax.sgd(optax.cosine_decay_schedule(0.1, 6000))),
    (
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
        optax.chain(optax.clip_by_global_norm(5.0), optax.sgd(0.1)),
    ),
    (optax.adamw(1e-2, weight_decay=1e-2), optax.adamw(1e-2, weight_decay=2e-2)),
    tuple(optax.sgd(optax.piecewise_constant_schedule(0.05, {step: 0.1})) for step in (300, 310)),
    tuple(optax.sgd(optax.join_schedules([lambda _: 0.1, lambda _: 0.2], [step])) for step in (20_000, 30_000)),
]


@pytest.mark.parametrize("field", ["inner_optimizer", pytest.param("outer_optimizer", marks=pytest.mark.slow)])
@pytest.mark.parametrize("pair", OPTIMIZERS, ids=range(len(OPTIMIZERS)))
def test_a_transformation_with_other_settings_is_refused(pair, field, tmp_path):
    path, problem = tmp_path / "run.npz", penalized(PENALTIES["saved"])
    saved, same, other = (bilevel.SOBA(1e-3, 1.0, 8, **{field: optimizer}) for optimizer in (pair[0], pair[0], pair[1]))
    bilevel.run(problem, saved, max_steps=3).save(path)
    bilevel.resume(path, problem, solver=same, max_steps=4)
    with pytest.raises(ValueError, match=rf"other settings, in `{field}`; pass the solver that it was made with"):
        bilevel.resume(path, problem, solver=other, max_steps=4)


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
        with pytest.raises(ValueError, match=r"run.npz` is damaged: arrays are missing"):
            bilevel.resume(saved, problem, max_steps=9)
    np.savez(saved, about=np.array({"format": 1}, dtype=object))
    with pytest.raises(ValueError, match=r"not a saved run, or is damaged"):
        bilevel.resume(saved, problem, max_steps=9)


def test_a_file_of_another_format_is_refused(saved, monkeypatch):
    monkeypatch.setattr("bilevel.engine.result._FORMAT", 4)
    message = (
        "has format 3, of another version of bilevel; this one reads format 4. Resume it with the version that wrote it"
    )
    with pytest.raises(ValueError, match=message):
        bilevel.resume(saved, cases.quadratic("float32"), max_steps=5)


def test_a_failed_write_keeps_the_old_file_and_leaves_no_other(saved, monkeypatch):
    before = saved.read_bytes()

    def broken(file, **arrays):
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez", broken)
    with pytest.raises(OSError, match=r"disk full"):
        bilevel.run(cases.quadratic("float32"), SOLVERS["SRBA"], max_steps=6).save(saved)
    assert saved.read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == ["run.npz"]


def test_an_invalid_file_name_is_reported_with_its_reason(tmp_path):
    result = bilevel.run(cases.quadratic("float32"), SOLVERS["SRBA"], max_steps=5)
    with pytest.raises(OSError, match=r"a` cannot be written \(File name too long\)\.$"):
        result.save(tmp_path / ("a" * 300))


def test_resuming_with_a_user_defined_solver_requires_that_solver(tmp_path):
    @bilevel.solvers.solver
    class Lazy(bilevel.SOBA):
        """SOBA under another name."""

    path = tmp_path / "run.npz"
    problem = cases.quadratic("float32")
    solver = Lazy(0.1, 1.0, 8)
    bilevel.run(problem, solver, max_steps=5).save(path)
    with pytest.raises(ValueError, match=r"not in SOLVERS; import `[\w.]+` first, or pass it as `solver=`"):
        bilevel.resume(path, problem, max_steps=9)  # a class in a function cannot be found by its name
    with pytest.raises(ValueError, match=r"was made by .*Lazy"):
        bilevel.resume(path, problem, solver=Lazy(0.2, 1.0, 8), max_steps=9)
    resumed = bilevel.resume(path, problem, solver=solver, max_steps=9)
    cases.assert_trees_equal(resumed.point, bilevel.run(problem, solver, max_steps=9).point)


def test_a_solver_of_a_module_that_is_imported_is_found_by_the_name_it_was_saved_with(tmp_path, monkeypatch):
    text = "import bilevel\n@bilevel.solvers.solver\nclass Lazy(bilevel.SOBA):\n    pass\n"
    (tmp_path / "lazy_solvers.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    path, problem = tmp_path / "run.npz", cases.quadratic("float32")
    solver = importlib.import_module("lazy_solvers").Lazy(0.1, 1.0, 8)
    try:
        bilevel.run(problem, solver, max_steps=5).save(path)
        resumed = bilevel.resume(path, problem, max_steps=9)
        cases.assert_trees_equal(resumed.point, bilevel.run(problem, solver, max_steps=9).point)
    finally:
        del sys.modules["lazy_solvers"]
    with pytest.raises(ValueError, match=r"was made by `lazy_solvers:Lazy`.* import `lazy_solvers` first"):
        bilevel.resume(path, problem, max_steps=9)
    assert "lazy_solvers" not in sys.modules, "a file that is read must not import code"
