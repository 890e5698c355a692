"""User-defined losses, some of which raise, return NaN, vectors or integers, or vary; and their other arguments."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

import bilevel
from tests.faults.bad_input import tables, values
from tests.faults.bad_input.judge import Case

X, X_OUTER = tables.rows(), tables.rows(tables.N_OTHER, seed=1)
P = tables.P


def good(z, x, row):
    return jnp.sum((row - z) ** 2) / 2 + jnp.exp(x[0]) * jnp.sum(z**2) / 2


def _raises(z, x, row):
    raise RuntimeError("a bug of the user's")


def _changes(answers):
    """Return a loss that differs from one trace to the next; the last one is repeated."""

    def make():
        left = list(answers)
        return lambda z, x, row: (left.pop(0) if len(left) > 1 else left[0])(z, x, row)

    return make


def _far(z, x, row):
    # A loss that is undefined at the iterates after some steps.
    return jnp.where(jnp.sum(z**2) > 1e-3, jnp.nan, good(z, x, row))


# Name -> function that returns a new loss.
LOSSES = {
    name: (lambda loss=loss: loss)
    for name, loss in {
        "good": good,
        "raises": _raises,
        "nan": lambda z, x, row: good(z, x, row) * jnp.nan,
        "inf": lambda z, x, row: good(z, x, row) + jnp.inf,
        "nan where it gets to": _far,
        "nan gradient at 0": lambda z, x, row: jnp.sqrt(jnp.sum(z**2)) + good(z, x, row),
        "vector": lambda z, x, row: (row - z) ** 2,
        "(1,)": lambda z, x, row: good(z, x, row)[None],
        "integer": lambda z, x, row: jnp.int32(3),
        "bool": lambda z, x, row: jnp.sum(z) > 0,
        "complex": lambda z, x, row: good(z, x, row) + 1j,
        "python float": lambda z, x, row: 1.0,
        "python int": lambda z, x, row: 1,
        "none": lambda z, x, row: None,
        "text": lambda z, x, row: "loss",
        "pair": lambda z, x, row: (good(z, x, row), 1.0),
        "dict": lambda z, x, row: {"loss": good(z, x, row)},
        "float16": lambda z, x, row: good(z, x, row).astype(jnp.float16),
        "numpy": lambda z, x, row: np.sum((np.asarray(row) - np.asarray(z)) ** 2),
        "branch": lambda z, x, row: good(z, x, row) if z[0] > 0 else 0.0,
        "two arguments": lambda z, x: 1.0,
        "four arguments": lambda z, x, row, more: 1.0,
        "huge": lambda z, x, row: 1e30 * good(z, x, row) ** 8,
        "concave": lambda z, x, row: -good(z, x, row),
        "no minimum": lambda z, x, row: jnp.sum(z),
        "constant": lambda z, x, row: jnp.zeros(()),
        "wrong shape": lambda z, x, row: jnp.sum(row.reshape(7, 7)),
        "unknown key": lambda z, x, row: row["features"],
        "callback that raises": lambda z, x, row: jax.pure_callback(
            _raises, jax.ShapeDtypeStruct((), z.dtype), z, x, row
        ),
        "sample ignored": lambda z, x, row: jnp.sum(z**2) + jnp.exp(x[0]),
        "tracer kept": lambda z, x, row: _kept.append(z) or good(z, x, row) + 0 * jnp.sum(_kept[0]),
    }.items()
}
_kept: list = []
LOSSES |= {
    "changes its shape": _changes([good, lambda z, x, row: (row - z) ** 2]),
    "changes its mind later": _changes([good] * 4 + [lambda z, x, row: (row - z) ** 2]),
    "raises the second time": _changes([good, _raises]),
    "raises later": _changes([good] * 4 + [_raises]),
    "changes its type": _changes([good, lambda z, x, row: jnp.int32(1)]),
}


def _hashes(value):
    try:
        return hash(value) is not None
    except TypeError:
        return False


_functions = values.among([len, lambda point: "a", lambda point: np.nan, lambda point: point, lambda: 1.0, 3])
_metrics = st.dictionaries(values.texts | values.scalars.filter(_hashes), _functions, max_size=2)
DATA = {
    "inner_data": (X, tables.table()),
    "outer_data": (X_OUTER, tables.table(tables.N_OTHER)),
    "inner_var": (np.zeros(P), tables.variable((P,))),
    "outer_var": (np.zeros(1), tables.variable((1,))),
    "outer_bounds": (None, tables.bounds((1,))),
    "strongly_convex": (True, values.anything),
    "metrics": (None, _metrics | values.anything),
    "dtype": ("float32", values.anything | st.sampled_from(["float64", None])),
    "seed": (0, values.anything),
}
SOLVERS = [bilevel.SOBA(0.1, 1.0, 4), bilevel.Exact(), bilevel.HOAG()]


@st.composite
def cases(draw):
    """Return a case: losses and data, one or two of them unusual, and a run of a few steps if they are accepted."""
    names = list(LOSSES)
    odd_losses = draw(st.booleans())
    inner, outer = (draw(st.sampled_from(names if odd_losses else ["good"])) for _ in range(2))
    odd = [] if odd_losses else draw(st.lists(st.sampled_from([*DATA]), min_size=1, max_size=2, unique=True))
    given = {name: draw(strategy) if name in odd else plain for name, (plain, strategy) in DATA.items()}
    if odd_losses:
        given["strongly_convex"] = draw(st.booleans())
    solver = draw(st.sampled_from(SOLVERS))

    def act():
        _kept.clear()
        problem = bilevel.BilevelProblem.from_losses(LOSSES[inner](), LOSSES[outer](), **given)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            return bilevel.run(problem, solver, max_steps=3), said

    shown = [f"{name}={values.text(given[name])}" for name in odd]
    shown += [f"strongly_convex={given['strongly_convex']}"] if odd_losses else []
    what = f"from_losses({', '.join([repr(inner), repr(outer), *shown])}), {type(solver).__name__}"
    return Case(what, act, ("inner_loss", "outer_loss", *DATA, "Exact", "batch_size"), complaint)


def complaint(result_and_warnings):
    """Return what is wrong with a run: numbers that are not finite without a warning."""
    result, said = result_and_warnings
    told = result.status == "diverged" or any(issubclass(one.category, RuntimeWarning) for one in said)
    last = {name: column[-1] for name, column in result.history.items()}
    known = [last[name] for name in ("value", "outer_value", "direction_norm_sq", "hypergrad_norm_sq") if name in last]
    if not told and not np.all(np.isfinite(known)):
        return f"ends {result.status} with {known}"
    leaves = jax.tree.leaves(result.point)
    return None if all(np.isfinite(leaf).all() for leaf in leaves) or told else "the point is not finite"
