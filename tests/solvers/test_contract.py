"""The contract of a solver: exact costs, one compilation for all floats, checked parameters."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevel
from bilevel._core import compilation
from bilevel._core.compilation import arithmetic
from bilevel._core.types import Calls
from bilevel.engine.loop import advance, draw_page, initial_state, run_key
from bilevel.engine.steps import PAGE_LENGTH
from bilevel.oracles import Oracles
from tests import cases

SOLVERS = cases.SOLVERS
STEPS = 6  # the shortest period is 5


class CountingOracles(Oracles):
    """Oracles that count the requested rows of each kind of derivative."""

    def __init__(self, oracles):
        for name in ("inner_samples", "outer_samples", "outer_bounds"):
            object.__setattr__(self, name, getattr(oracles, name))
        object.__setattr__(self, "wrapped", oracles)
        object.__setattr__(self, "counted", dict.fromkeys(Calls._fields, 0))

    def _count(self, rows, *kinds):
        for kind in kinds:
            samples = self.outer_samples if kind.startswith("outer") else self.inner_samples
            self.counted[kind] += int(samples.count(rows))

    def inner(self, point, rows=None):
        self._count(rows, "inner_grad", "hvp", "cross")
        return self.wrapped.inner(point, rows)

    def inner_tangents(self, point, v, u, rows=None):
        pairs = len(jax.tree.leaves(v)[0])
        self._count(rows, "inner_grad", *pairs * ("hvp", "cross"))
        return self.wrapped.inner_tangents(point, v, u, rows)

    def outer(self, point, rows=None):
        self._count(rows, "outer_grad", "outer_grad_outer")
        return self.wrapped.outer(point, rows)

    _inner = _inner_grad_outer = _outer = _inner_value = _outer_value = None


def _single(kind):
    def method(self, point, rows=None):
        self._count(rows, kind)
        return getattr(self.wrapped, kind)(point, rows)

    return method


for _kind in Calls._fields:
    setattr(CountingOracles, _kind, _single(_kind))
CountingOracles.__abstractmethods__ = frozenset()


@pytest.mark.parametrize("name", cases.marked(SOLVERS))
@pytest.mark.parametrize("sampling", ["blocks", "iid", "full"])
def test_declared_cost_equals_counted_cost(name, sampling):
    problem = cases.logistic_selection()
    try:
        solver = replace(SOLVERS[name], sampling=sampling)
    except ValueError:
        pytest.skip(f"{name} does not draw {sampling}")
    with arithmetic("float64"):
        # Closed forms of the metric of AutoSRBA count as one product, but evaluate several.
        oracles = cases.by_autodiff("logistic", problem) if name == "AutoSRBA" else problem.oracles
        oracles = oracles.with_batches(cases.BATCH, sampling)
        solver = solver.configure(problem).cast("float64")
        page = draw_page(solver, oracles, run_key(0), np.int32(0), PAGE_LENGTH)
        counting = CountingOracles(oracles)
        with jax.disable_jit():
            state = solver.init(counting, problem.start)
            starts_at_zero = "tables" in solver.parameters() and solver.tables == "zero"
            for kind, declared in solver.init_calls(oracles)._asdict().items():
                # If tables start at zero, the compiled `init` does not evaluate derivatives, but only their shapes.
                assert counting.counted[kind] * (not starts_at_zero) == declared
            for position in range(STEPS):
                before = dict(counting.counted)
                draw = jax.tree.map(lambda leaf, i=position: leaf[i], page.draws)
                refreshes = page.refreshes is not None and bool(page.refreshes[position])
                method = solver.refresh if refreshes else solver.step
                state = method(counting, state, np.int32(position), draw)
                for kind in Calls._fields:
                    declared = int(getattr(page.calls, kind)[position])
                    assert counting.counted[kind] - before[kind] == declared, (position, kind)


# Sweeps of all others but AutoSRBA: tests/engine/test_sweep.py
@pytest.mark.parametrize("name", [*cases.QUICK, pytest.param("AutoSRBA", marks=pytest.mark.slow)])
def test_a_vmapped_sweep_over_step_sizes_equals_a_loop(name):
    problem = cases.quadratic()
    steps = np.array([0.01, 0.03, 0.05])
    with arithmetic("float64"):
        oracles = problem.oracles.with_batches(cases.BATCH, SOLVERS[name].sampling)
        solver = SOLVERS[name].configure(problem).cast("float64")
        page = draw_page(solver, oracles, run_key(0), np.int32(0), PAGE_LENGTH)

        def final_point(step_size):
            leaves, structure = jax.tree.flatten(solver)
            tuned = jax.tree.unflatten(structure, [step_size, *leaves[1:]])
            state = initial_state(tuned, oracles, problem.start)
            return advance(tuned, oracles, state, page, np.int32(0), np.int32(40)).point

        together = jax.vmap(final_point)(steps)
        for i, step_size in enumerate(steps):
            alone = final_point(step_size)
            cases.assert_trees_close(jax.tree.map(lambda leaf, i=i: leaf[i], together), alone, rtol=1e-11)


def n_compiled():
    """Return the number of compiled programs of each function."""
    return {kind: program.jitted._cache_size() for kind, program in compilation._programs.items()}


@pytest.mark.filterwarnings("ignore:AutoSRBA")  # after so few steps z is far from its solution
@pytest.mark.parametrize("name", cases.marked(SOLVERS))
def test_step_sizes_share_one_compiled_program(name):
    problem = cases.quadratic("float32")
    bilevel.run(problem, SOLVERS[name], max_steps=5)
    programs = n_compiled()
    for step_size in (0.02, 1, np.float64(0.05)):
        solver = replace(SOLVERS[name], step_size=step_size, outer_ratio=np.float32(300))
        bilevel.run(problem, solver, max_steps=9, seed=3)
    assert n_compiled() == programs


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"step_size": 0.0}, r"`SRBA\(step_size=0.0\)`: must be a finite number above 0"),
        ({"step_size": -1}, "step_size=-1"),
        ({"step_size": np.nan}, "step_size=nan"),
        ({"step_size": np.inf}, "step_size=inf"),
        ({"step_size": "fast"}, "step_size='fast'"),
        ({"step_size": True}, "step_size=True"),
        ({"outer_ratio": 0}, "outer_ratio=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 6.4}, "batch_size=6.4"),
        ({"period": 0}, r"`SRBA\(period=0\)`: must be an integer of at least 1; use None for the default"),
        ({"period": 2.0}, "period=2.0"),
        ({"v_radius": -1.0}, "v_radius=-1.0.*use None for no projection"),
        ({"sampling": "random"}, "sampling='random'.*'blocks', 'iid'"),
    ],
)
def test_bad_parameters_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        bilevel.SRBA(**arguments)


def test_saba_draws_blocks_only():
    with pytest.raises(ValueError, match=r"sampling='iid'"):
        bilevel.SABA(sampling="iid")


def test_unknown_parameters_get_a_suggestion():
    with pytest.raises(TypeError, match=r"`SRBA` has no parameter `stepsize`; did you mean `step_size`\?"):
        bilevel.SRBA(stepsize=0.1)
    with pytest.raises(TypeError, match=r"it takes step_size, outer_ratio"):
        bilevel.SOBA(zzz=1)


def test_a_field_without_a_rule_is_not_checked():
    @bilevel.solvers.solver
    class Plain(bilevel.SOBA):
        """SOBA with two more fields."""

        label: str = "plain"
        weight: float = 0.5

    assert Plain(0.1, label="other").parameters()["label"] == "other"
    assert len(jax.tree.leaves(Plain())) == len(jax.tree.leaves(bilevel.SOBA())) + 1, "floats are traced"


def test_the_default_period_is_half_an_epoch():
    problem = bilevel.problems.quadratic(300, 200, 4, 2, dtype="float32")
    assert bilevel.run(problem, bilevel.SRBA(batch_size=16), max_steps=1).solver.period == 500 // 32
    assert bilevel.run(problem, bilevel.SRBA(batch_size=200), max_steps=1).solver.period == 1


@pytest.mark.parametrize(("memory", "table"), [("blocks", "f32[128,18]"), ("rows", "f32[128,5]")])
def test_sabas_tables_are_not_copied_in_the_loop(memory, table):
    data = cases.logistic_data(640, 320, dim=6)
    problem = bilevel.problems.penalty_selection(*data, dtype="float32")
    with arithmetic("float32"):
        oracles = problem.oracles.with_batches(5, "blocks")
        solver = bilevel.SABA(batch_size=5, memory=memory).configure(problem).cast("float32")
        program = cases.lowered_steps(problem, solver, oracles).compile().as_text()
    bodies = [text for text in program.split("\n\n") if "dynamic-update-slice" in text and table in text]
    loops = [text for text in bodies if "while/body/while/body" in text and "ROOT" in text]
    assert loops, "the loop over steps was not found"
    assert not [line for text in loops for line in text.split("\n") if " copy(" in line and "f32[128," in line]


@pytest.mark.parametrize("name", cases.marked(cases.SOLVERS))
def test_draws_do_not_depend_on_traced_parameters(name):
    """The settings of a sweep share their draws."""
    problem, solver = cases.quadratic(), cases.SOLVERS[name]
    with arithmetic("float64"):
        oracles = problem.oracles.with_batches(solver.batch_size, solver.sampling)
        resolved = solver.configure(problem).cast("float64")
        leaves, structure = jax.tree.flatten(resolved)
        other = jax.tree.unflatten(structure, [0.7 * leaf for leaf in leaves])
        pages = [draw_page(setting, oracles, run_key(0), np.int32(0), PAGE_LENGTH) for setting in (resolved, other)]
    cases.assert_trees_equal(*(jax.tree.map(plain, page) for page in pages))


def plain(leaf):
    return np.asarray(jax.random.key_data(leaf)) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
