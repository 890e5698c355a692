"""Steps of the field's reference benchmark, benchopt/benchmark_bilevel, imported from a checkout of it.

Its data sets and solvers are its own; only where it would download, it is given the arrays of `bilevel.datasets`.
"""

import importlib.util
import os
import pickle
import sys
import tempfile
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

import jax

from bilevel.datasets import load

SETS = {"IJCNN1": "ijcnn1", "quadratics": "simulated", "cleaning": "mnist"}
# An eighth of the paper's inner samples: it has p × p numbers for each, as constants of every program that it compiles.
QUADRATICS = {"n_samples_inner": 4_096, "n_samples_outer": 1_024, "dim_inner": 100, "dim_outer": 10}


class Reference:
    """One of its problems, and its solvers on it."""

    def __init__(self, checkout, problem):
        self.checkout = Path(checkout).resolve()
        if not (self.checkout / "solvers" / "srba.py").exists():
            raise FileNotFoundError(f"`--reference {checkout}`: holds no solvers/srba.py; name a checkout of it.")
        sys.path.insert(0, str(self.checkout))
        os.chdir(tempfile.mkdtemp())  # it writes beside itself
        module = self._module("datasets", SETS[problem])
        give_data(problem, module)
        settings = QUADRATICS if problem == "quadratics" else {}
        with redirect_stdout(sys.stderr):
            self.objective = self._module("", "objective").Objective.get_instance()
            self.objective.set_data(**module.Dataset.get_instance(**settings).get_data())

    def _module(self, folder, name):
        spec = importlib.util.spec_from_file_location(f"reference_{name}", self.checkout / folder / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def contender(self, name, step_size, period_fraction, at_once):
        """A function that takes a period of steps, or so many, several times; and how many these are."""
        cls, settings = self._module("solvers", name.lower()).Solver, {"step_size": step_size, "batch_size": 64}
        if period_fraction is not None:
            settings["period_frac"] = period_fraction
            at_once = int((self.objective.n_samples_inner + self.objective.n_samples_outer) * period_fraction / 64)
        solver = cls.get_instance(**settings, eval_freq=at_once)
        with redirect_stdout(sys.stderr):
            solver.set_objective(**self.objective.get_objective())
        return partial(take, solver), at_once


def take(solver, times):
    """Let its loop run so many times."""
    left = iter(range(times))
    solver.run(lambda: next(left, None) is not None)
    jax.block_until_ready((solver.inner_var, solver.outer_var))


def give_data(problem, module):
    """Put what it would download, or keep on disk, where it looks for it."""
    if problem == "IJCNN1":
        data = load("ijcnn1")
        found = {"ijcnn1": (data.X_train, data.y_train), "ijcnn1_test": (data.X_test, data.y_test)}
        module.fetch_libsvm = found.__getitem__
    elif problem == "quadratics":
        module.gen_matrices = module.gen_matrices.func
    else:
        data = load("mnist")
        names = "training_images", "training_labels", "test_images", "test_labels"
        images = (part.reshape(len(part), -1) for part in (data.X_train, data.X_test))
        arrays = next(images), data.y_train, next(images), data.y_test
        Path("mnist.pkl").write_bytes(pickle.dumps(dict(zip(names, arrays, strict=True))))
