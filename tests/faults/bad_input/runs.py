"""`run`, `resume`, `Run`, logs and results with unusual arguments on one small problem."""

import shutil
import warnings
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

import bilevel
from tests.faults.bad_input import problems, tables, values
from tests.faults.bad_input.judge import Case
from tests.faults.bad_input.losses import complaint, good

FOLDER = Path("folder").absolute()
SOLVER = bilevel.SOBA(0.05, 1.0, 4)


def _quadratic(**changes):
    sizes = {"n_inner": 32, "n_outer": 32, "dim_inner": 4, "dim_outer": 2, "smallest_eigenvalue": 0.5}
    return bilevel.problems.quadratic(**sizes | {"dtype": "float32"} | changes)


def _own():
    data, start = (problems.X, problems.X_VAL), (np.zeros(tables.P), np.zeros(1))
    return bilevel.BilevelProblem.from_losses(good, good, *data, *start, dtype="float32")


PROBLEM, OTHER, OWN = _quadratic(), _quadratic(seed=1), _own()


class FailingLog(bilevel.Log):
    """A log that fails in one of its methods."""

    def __init__(self, where, error):
        self.where, self.error = where, error

    def __repr__(self):
        return f"FailingLog({self.where!r}, {self.error!r})"

    def _maybe(self, where):
        if where == self.where:
            raise self.error

    def open(self, about, past):
        self._maybe("open")

    def write(self, row):
        self._maybe("write")

    def close(self):
        self._maybe("close")


_errors = st.sampled_from([OSError(28, "No space left on device"), RuntimeError("x"), KeyError("x"), MemoryError()])
_paths = [str(FOLDER), "/dev/full", "/proc/x/y", "/", "", "\x00", "a" * 300, str(FOLDER / "no" / "such"), 3, None, b"x"]
_logs = st.one_of(
    st.builds(FailingLog, st.sampled_from(["open", "write", "close"]), _errors),
    values.among(_paths).map(lambda path: lambda: bilevel.CSVLog(path)),
    values.anything,
)
ARGUMENTS = {
    "problem": st.sampled_from([OTHER, OWN, bilevel.BilevelProblem, bilevel.problems.quadratic]) | values.anything,
    "solver": values.anything | st.sampled_from([bilevel.SRBA, "SRBA", bilevel.Exact(), bilevel.SOBA(batch_size=33)]),
    "seed": values.anything,
    "max_steps": st.sampled_from([0, 1, 2, 3, np.int8(3)]) | values.anything.filter(lambda v: not _is_long(v)),
    "max_calls": st.sampled_from([0, 1, 50]) | values.anything,
    "max_seconds": st.sampled_from([0, 1e-9, 0.01]) | values.anything,
    "stop": values.anything,
    "eval_every": values.integers | values.anything,
    "exact": values.anything,
    "progress": values.anything,
    "log": _logs,
}
SIZES = st.sampled_from([1, 2, 31, 33, 10**4, 10**9, 2**31 - 1])
SETTINGS = {"step_size": st.sampled_from([1e-50, 1e-30, 1e10, 1e30, 1e39, 1e300]), "batch_size": SIZES}


def _is_long(value):
    """Return True for a large budget of steps, which is valid."""
    return isinstance(value, int | np.integer) and value > 1000


@st.composite
def cases(draw):
    """Return a case of one kind."""
    return draw(draw(st.sampled_from([_runs(), _runs(), _by_hand(), _resumed(), _settings(), _shown()])))


@st.composite
def _runs(draw):
    odd = draw(st.lists(st.sampled_from([*ARGUMENTS]), min_size=1, max_size=2, unique=True))
    given = {"problem": PROBLEM, "solver": SOLVER, "max_steps": 3} | {name: draw(ARGUMENTS[name]) for name in odd}
    made = callable(given.get("log"))
    shown = ", ".join(f"{name}={values.text(given[name])}" for name in odd if not (made and name == "log"))

    def act():
        arguments = given | ({"log": given["log"]()} if made else {})
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            return bilevel.run(**arguments), said

    names = (*ARGUMENTS, "CSVLog", "path", "folder")
    own = type(given["log"].error) if isinstance(given.get("log"), FailingLog) else None
    return Case(f"run({shown}{', log of an odd path' if made else ''})", act, names, complaint, own=own)


@st.composite
def _settings(draw):
    """A valid solver that may not fit the problem."""
    cls = draw(st.sampled_from([bilevel.SOBA, bilevel.SRBA, bilevel.StocBiO, bilevel.VRBO]))
    name = draw(st.sampled_from([*SETTINGS, *(["n_inner_steps"] if cls is bilevel.StocBiO else [])]))
    value = draw(SETTINGS.get(name, st.sampled_from([10**8, 2**31 - 1])))

    def act():
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            return bilevel.run(PROBLEM, cls(**{"batch_size": 4, name: value}), max_steps=3), said

    return Case(f"run(problem, {cls.__name__}({name}={value!r}))", act, (name,), complaint)


@st.composite
def _by_hand(draw):
    steps = draw(values.anything.filter(lambda value: not _is_long(value)))

    def act():
        run = bilevel.Run(PROBLEM, SOLVER, exact=False)
        run.advance(steps)
        return run.result(), []

    return Case(f"Run.advance({values.text(steps)})", act, ("n_steps",), complaint)


def _saved():
    path = FOLDER / "saved.npz"
    if not path.exists():
        FOLDER.mkdir(exist_ok=True)
        bilevel.run(PROBLEM, SOLVER, max_steps=3).save(path)
    return path


@st.composite
def _resumed(draw):
    """A saved run with an unusual argument or a damaged file."""
    how = draw(st.sampled_from(["cut", "flipped", "other problem", "other solver", "path", "limit", "unknown limit"]))
    at, odd = draw(st.floats(0, 1)), draw(values.anything)

    def act():
        path = FOLDER / "resumed.npz"
        shutil.copy(_saved(), path)
        given = {"path": path, "problem": PROBLEM, "max_steps": 5}
        content = bytearray(path.read_bytes())
        if how == "cut":
            path.write_bytes(content[: int(at * len(content))])
        elif how == "flipped":
            content[int(at * (len(content) - 1))] ^= 1 << int(8 * at) % 8
            path.write_bytes(content)
        given |= {"other problem": {"problem": OTHER}, "other solver": {"solver": odd}}.get(how, {})
        given |= {"path": {"path": odd}, "limit": {"max_calls": odd}, "unknown limit": {"max_stepz": 1}}.get(how, {})
        return bilevel.resume(**given), []

    odd_text = f"{at:.4f}" if how in ("cut", "flipped") else values.text(odd)
    names = ("resumed.npz", "path", "problem", "solver", "max_calls", "max_stepz", "saved run")
    return Case(f"resume, {how}: {odd_text}", act, names, complaint)


@st.composite
def _shown(draw):
    """Methods of results and problems."""
    what, odd = draw(st.sampled_from(["plot", "save", "constants", "check"])), draw(values.anything)
    odd = draw(values.among(_paths)) if what == "save" and draw(st.booleans()) else odd
    acts = {
        "plot": lambda: bilevel.run(PROBLEM, SOLVER, max_steps=3, exact=False).plot(odd),
        "save": lambda: FOLDER.mkdir(exist_ok=True) or bilevel.run(PROBLEM, SOLVER, max_steps=3, exact=False).save(odd),
        "constants": lambda: PROBLEM.constants(radius=odd),
        "check": lambda: PROBLEM.check(seed=odd),
    }
    names = ("metric", "path", "radius", "seed", "`", "file name", ".part", "directory")
    return Case(f"{what}({values.text(odd)})", acts[what], names)
