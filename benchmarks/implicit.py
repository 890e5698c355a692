"""Implicit differentiation, compared with jaxopt and optimistix: seconds and accuracy of a gradient, in one process.

    pip install jaxopt optimistix
    python benchmarks/implicit.py [--rounds 30] [--out reports/implicit.md]

Every library differentiates F(z*(x)) for the same equations, from the same solution z*, which is computed beforehand
and given to it, so that only differentiation is timed. All are compiled, in double precision, and take turns; seconds
are the minimum over the rounds. The error is the relative distance from a gradient computed with a dense matrix in
NumPy. Each library has its own defaults, and the same linear solver with the same tolerance in a second row.
"""

import argparse
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from machine import facts
from markdown import number, table

import bilevel

TOLERANCE = 1e-8
TEXT = """Gradients of F(z*(x)) by bilevel, jaxopt and optimistix in one process, compiled, in double precision,
from the same solution z*. Each library has its default linear solver, and then the same method with the
same tolerance. Times are the minimum of all rounds, and errors are relative to a gradient by dense
matrices. Products in each of our gradients check that the equations and the linear system are solved."""


def ridge(size):
    """Return the equations of ridge regression with a penalty per feature, their arguments, z*, and a linear solver."""
    rng = np.random.default_rng(0)
    X, y, x = rng.standard_normal((2 * size, size)), rng.standard_normal(2 * size), rng.uniform(1, 9, size)
    z = np.linalg.solve(X.T @ X / len(y) + np.diag(x), X.T @ y / len(y))
    return f"ridge regression, {size} features", ridge_equations, (x, X, y), z, "cg"


def ridge_equations(z, x, X, y):
    return X.T @ (X @ z - y) / len(y) + x * z


def logistic(size):
    """Return the same of logistic regression, solved by Newton's method."""
    rng = np.random.default_rng(1)
    X, x = rng.standard_normal((4 * size, size)) / np.sqrt(size), rng.uniform(0.01, 0.1, size)
    y = np.sign(X @ rng.standard_normal(size) + 0.1 * rng.standard_normal(len(X)))
    z = np.zeros(size)
    for _ in range(30):
        share = 1 / (1 + np.exp(y * (X @ z)))
        hessian = (X.T * (share * (1 - share))) @ X / len(y) + np.diag(x)
        z = z - np.linalg.solve(hessian, -X.T @ (y * share) / len(y) + x * z)
    return f"logistic regression, {size} features", logistic_equations, (x, X, y), z, "cg"


def logistic_equations(z, x, X, y):
    return -X.T @ (y * jax.nn.sigmoid(-y * (X @ z))) / len(y) + x * z


def fixed_point(size):
    """Return the same of a contraction whose matrix is not symmetric, as in an equilibrium model."""
    rng = np.random.default_rng(2)
    matrix, x = 0.4 * rng.standard_normal((size, size)) / np.sqrt(size), rng.standard_normal(size)
    z = np.zeros(size)
    for _ in range(200):
        z = np.tanh(matrix @ z + x)
    return f"fixed point, {size} numbers", fixed_point_equations, (x, matrix), z, "gmres"


def fixed_point_equations(z, x, matrix):
    return z - jnp.tanh(matrix @ z + x)


def outer(z):
    return jnp.sum(jnp.sin(z))


def reference(equations, arguments, z):
    """Return the gradient by dense matrices."""
    by_z, by_x = (np.asarray(jax.jacobian(equations, argnum)(z, *arguments)) for argnum in (0, 1))
    return -by_x.T @ np.linalg.solve(by_z.T, np.asarray(jax.grad(outer)(z)))


def with_ours(equations, method):
    options = {} if method is None else {"linear_solver": method, "tolerance": TOLERANCE * 2**13}
    solved = bilevel.implicit(lambda *_, start: start, residual=equations, **options)
    return lambda z, *arguments: outer(solved(*arguments, start=z))


def with_jaxopt(equations, method):
    import jaxopt

    chosen = {"cg": jaxopt.linear_solve.solve_cg, "gmres": jaxopt.linear_solve.solve_gmres}
    options = {} if method is None else {"solve": lambda *a, **k: chosen[method](*a, tol=TOLERANCE, **k)}
    solved = jaxopt.implicit_diff.custom_root(equations, **options)(lambda start, *_: start)
    return lambda z, *arguments: outer(solved(z, *arguments))


# Optimistix requires functions without closures, and appends a loop to their inputs.


def start_of(inputs):
    return inputs[0], None


def ridge_rewritten(z, _, inputs):
    return ridge_equations(z, *inputs[1:-1])


def logistic_rewritten(z, _, inputs):
    return logistic_equations(z, *inputs[1:-1])


def fixed_point_rewritten(z, _, inputs):
    return fixed_point_equations(z, *inputs[1:-1])


def with_optimistix(equations, method):
    import lineax
    import optimistix

    chosen = {"cg": lineax.CG, "gmres": lineax.GMRES}
    options = {"rtol": TOLERANCE, "atol": TOLERANCE}
    solver = lineax.AutoLinearSolver(well_posed=None) if method is None else chosen[method](**options)
    adjoint = optimistix.ImplicitAdjoint(linear_solver=solver)
    tags = frozenset({lineax.positive_semidefinite_tag} if method == "cg" else ())
    rewritten = globals()[equations.__name__.replace("equations", "rewritten")]
    return lambda *inputs: outer(adjoint.apply(start_of, rewritten, inputs, tags)[0])


LIBRARIES = {"bilevel": with_ours, "jaxopt": with_jaxopt, "optimistix": with_optimistix}


def measure(task, rounds):
    """Return rows of the table for a task."""
    name, equations, arguments, z, method = task
    truth = reference(equations, arguments, z)
    inputs = [jnp.asarray(array) for array in (z, *arguments)]
    programs = {
        (library, chosen): jax.jit(jax.grad(build(equations, chosen), argnums=1))
        for library, build in LIBRARIES.items()
        for chosen in (None, method)
    }
    found = {key: np.asarray(run(*inputs)) for key, run in programs.items()}
    errors = {key: np.linalg.norm(gradient - truth) / np.linalg.norm(truth) for key, gradient in found.items()}
    seconds = dict.fromkeys(programs, np.inf)
    for _ in range(rounds):
        for key, run in programs.items():
            begin = time.perf_counter()
            jax.block_until_ready(run(*inputs))
            seconds[key] = min(seconds[key], time.perf_counter() - begin)
    ours = {chosen: seconds["bilevel", chosen] for chosen in (None, method)}
    return [
        [name, library, chosen or "default", f"{1e6 * taken:.0f}", number(taken / ours[chosen]), f"{errors[key]:.1e}"]
        for key, taken in seconds.items()
        for library, chosen in [key]
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="timed repetitions of each gradient")
    parser.add_argument("--out", type=Path, help="page to write")
    options = parser.parse_args()
    try:
        import jaxopt  # noqa: F401
        import optimistix  # noqa: F401
    except ImportError as error:
        sys.exit(f"{error}: pip install jaxopt optimistix")
    jax.config.update("jax_enable_x64", True)
    rows = []
    for task in (ridge(30), ridge(1000), logistic(100), logistic(1000), fixed_point(100), fixed_point(1000)):
        rows += measure(task, options.rounds)
        print(table(["task", "library", "linear solver", "µs", "time / ours", "error"], rows[-6:]), flush=True)
    if options.out:
        head = "# Implicit differentiation, compared\n\n"
        text = table(["task", "library", "linear solver", "µs", "time / ours", "error"], rows)
        options.out.write_text("\n\n".join([f"{head}    python benchmarks/implicit.py", TEXT, text, *facts()]) + "\n")


if __name__ == "__main__":
    main()
