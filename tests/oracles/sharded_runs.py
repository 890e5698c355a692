"""One device compared with several, in a process of its own with simulated devices.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m tests.oracles.sharded_runs CASE…

A case is "problem devices sampling" for all oracles, "problem devices sampling solver" for a run, "problem devices
evaluate" for exact metrics from the shards, or "gathered" for a program that does what a step must not do. The largest
relative differences are printed as JSON, with the communication of the compiled program.
"""

import json
import re
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import bilevel
from bilevel._core import trees
from bilevel._core.compilation import arithmetic
from bilevel._core.types import Calls, Rows
from bilevel.engine.loop import advance, draw_page, for_one_run, initial_state, run_key
from bilevel.oracles.curvature import inner_diagonal
from bilevel.solvers import HostSolver
from tests import cases
from tests.problems import small

STEPS = 12


def from_losses():
    """Pytrees of variables, an integer leaf, leaves with samples last and first, a loop in the loss."""
    rng = np.random.default_rng(4)
    data = [
        {"x": rng.standard_normal((n, 3)), "wide": rng.standard_normal((n, 70)), "i": np.arange(n) % 5}
        for n in (cases.N_INNER, cases.N_OUTER)
    ]
    start = {"w": rng.standard_normal(3), "b": np.zeros(())}, {"scale": rng.uniform(-0.4, 0.4, 5)}

    def outer_loss(z, x, row):
        target = jax.lax.fori_loop(0, 2, lambda _, total: total + row["wide"][0], 0.1 * row["wide"][1])
        return (row["x"] @ z["w"] + z["b"] - target) ** 2 / 2

    def inner_loss(z, x, row):
        penalty = trees.norm_sq(z) / 2 * jax.numpy.exp(x["scale"][row["i"]] / 4)
        return outer_loss(z, x, row) + penalty

    return bilevel.BilevelProblem.from_losses(
        inner_loss, outer_loss, *data, *start, outer_bounds=(-0.5, 0.5), strongly_convex=True, dtype="float64"
    )


SMALL = small.PROBLEMS | small.FOLDED
PROBLEMS = cases.PROBLEMS | {name: lambda make=make: make(dtype="float64") for name, make in SMALL.items()}
PROBLEMS |= {"from_losses": from_losses}


def difference(one, other):
    """The largest distance of two leaves, relative to the size of the first."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return max(float(np.linalg.norm(np.subtract(a, b)) / (np.linalg.norm(a) + 1e-12)) for a, b in pairs)


@jax.jit
def every_estimate(oracles, point, previous, key):
    """All kinds on all rows and on several draws, the draws and their counts."""

    def on(rows):
        levels = {kind: rows.outer if kind.startswith("outer") else rows.inner for kind in Calls._fields}
        singly = [getattr(oracles, kind)(point, level) for kind, level in levels.items()]
        return singly, oracles.direction(point, rows), oracles.difference(point, previous, rows)

    def drawn(index):
        rows = oracles.draw(key, index)
        return on(rows), rows, oracles.count_inner(rows.inner), oracles.count_outer(rows.outer)

    return on(Rows()), inner_diagonal(oracles, point), jax.lax.map(drawn, jax.numpy.arange(STEPS, dtype=np.int32))


def oracles_case(problem, sharded, sampling):
    rng = np.random.default_rng(3)
    point, previous = (
        jax.tree.map(lambda leaf: leaf + rng.standard_normal(leaf.shape), problem.start) for _ in range(2)
    )
    both = (level.oracles.with_batches(cases.BATCH, sampling) for level in (problem, sharded))
    return {"estimates": difference(*(every_estimate(oracles, point, previous, run_key(5)) for oracles in both))}


def steps(problem, solver):
    """The state after some steps, their oracle calls, and the compiled program."""
    oracles = problem.oracles.with_batches(solver.batch_size, solver.sampling)
    traced = solver.configure(problem).cast(problem.dtype)
    page = draw_page(traced, oracles, run_key(0), np.int32(0), STEPS)
    state = initial_state(traced, oracles, problem.start)
    arguments = traced, for_one_run(oracles), state, page, np.int32(0), np.int32(STEPS)
    program, leaves = advance.find(*arguments)
    compiled = program.lower(leaves).compile()
    return compiled(leaves), page.calls, compiled.as_text()


def collectives(program):
    """The operations between devices, and the sizes of what they send."""
    found = re.findall(r"= (.*?) (all-\w+|collective-\w+|reduce-scatter)(?:-start)?\(", program)
    sizes = {int(np.prod([int(n) for n in shape.split(",") if n])) for shapes, _ in found for shape in sizes_of(shapes)}
    return {"kinds": sorted({kind for _, kind in found}), "largest": max(sizes, default=0)}


def sizes_of(shapes):
    return re.findall(r"\[([\d,]*)\]", shapes)


def solver_case(problem, sharded, sampling, name):
    settings = {} if sampling == "blocks" else {"sampling": sampling}
    solver = cases.short(bilevel.SOLVERS[name], 0.05, 20.0, cases.BATCH, **settings)
    state, calls, _ = steps(problem, solver)
    sharded_state, sharded_calls, program = steps(sharded, solver)
    return {
        "state": difference(state, sharded_state),
        "calls": difference(calls, sharded_calls),
        "moved": difference(problem.start, state.point),
        "variables": max(leaf.size for leaf in jax.tree.leaves(problem.start)),
        **collectives(program),
    }


def evaluation_case(problem, devices):
    """Exact solutions by the solver of the problem and from shards, a whole run, and a run that is resumed half-way."""
    sharded = problem.sharded(devices, own_rows=True)
    solver = cases.short(bilevel.SRBA, 0.05, 20.0, cases.BATCH)
    solutions = [level.exact_solver(level.start.outer_var, None) for level in (problem, sharded)]
    point, value, hypergrad = ([getattr(r, name) for r in solutions] for name in ("inner_var", "value", "hypergrad"))
    whole, again = bilevel.run(problem, solver, max_steps=STEPS), bilevel.run(sharded, solver, max_steps=STEPS // 2)
    with tempfile.TemporaryDirectory() as folder:
        again.save(Path(folder) / "run.npz")
        again = bilevel.resume(Path(folder) / "run.npz", sharded, max_steps=STEPS)
    return {
        "solution": max(difference(*point), difference(*value), difference(*hypergrad)),
        "run": difference(whole.point, again.point),
        "measured": abs(whole.history["hypergrad_norm_sq"][-1] / again.history["hypergrad_norm_sq"][-1] - 1),
        "derivatives": max(sharded.check().values()),
    }


def in_python_case(problem, sharded, name):
    """Solvers that are not compiled."""
    solver = bilevel.SOLVERS[name]()
    one, other = (bilevel.run(level, solver, max_steps=2) for level in (problem, sharded))
    return {"state": difference(one.point, other.point), "calls": difference(one.calls, other.calls)}


def gathered():
    array = jax.device_put(np.zeros(64, np.float32), NamedSharding(Mesh(jax.devices(), "rows"), PartitionSpec("rows")))
    everywhere = array.sharding.update(spec=PartitionSpec())
    return collectives(jax.jit(lambda x: x, out_shardings=everywhere).lower(array).compile().as_text())


def outcome(case):
    if case == "gathered":
        return gathered()
    name, devices, sampling, *solver = case.split()
    problem = PROBLEMS[name]()
    if sampling == "evaluate":
        return evaluation_case(problem, jax.devices()[: int(devices)])
    sharded = problem.sharded(jax.devices()[: int(devices)])
    if solver and issubclass(bilevel.SOLVERS[solver[0]], HostSolver):
        return in_python_case(problem, sharded, *solver)
    with arithmetic(problem.dtype):
        return (solver_case if solver else oracles_case)(problem, sharded, sampling, *solver)


def main():
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    print(json.dumps({case: outcome(case) for case in sys.argv[1:]}))


if __name__ == "__main__":
    main()
