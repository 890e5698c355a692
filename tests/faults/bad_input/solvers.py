"""Constructors of all solvers: unusual values for one to three parameters, unknown names, positions."""

import dataclasses
import math

import jax
import optax
from hypothesis import strategies as st

import bilevel
from tests.faults.bad_input import values
from tests.faults.bad_input.judge import Case

PLAUSIBLE = {
    "step_size": [0.1, 1],
    "outer_ratio": [1.0, 10],
    "batch_size": [1, 8, 64],
    "sampling": ["iid", "full", "reshuffle"],
    "outer_optimizer": ["adam", None, optax.sgd(0.1)],
    "outer_bounds": [(-1, 1), (None, 0.5), "(-5, 5)"],
}
BOUNDS = st.tuples(values.anything, values.anything) | values.anything
UNKNOWN = ["stepsize", "lr", "z", "", "self", "batch-size", "Period"]


@st.composite
def cases(draw):
    """Return a case: a class and keywords, or positions."""
    cls = draw(st.sampled_from(list(bilevel.SOLVERS.values())))
    names = [field.name for field in dataclasses.fields(cls)]
    if draw(st.integers(0, 15)) == 7:
        given = draw(st.lists(values.anything, min_size=1, max_size=len(names) + 2))
        shown = ", ".join(map(values.text, given))
        return Case(f"{cls.__name__}({shown})", lambda: cls(*given), (*names, "argument"), _complaint)
    first, *others = draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))
    if draw(st.integers(0, 19)) == 9:
        first = draw(st.sampled_from(UNKNOWN))
    keywords = {first: draw(BOUNDS if first == "outer_bounds" else values.anything)}
    keywords |= {name: draw(st.sampled_from(PLAUSIBLE[name])) for name in others if name in PLAUSIBLE}
    shown = ", ".join(f"{name}={values.text(value)}" for name, value in keywords.items())
    return Case(f"{cls.__name__}({shown})", lambda: cls(**keywords), tuple(keywords), _complaint)


def _complaint(solver):
    """Return what is wrong with a solver, or None."""
    repr(solver), hash(type(solver))
    for name, value in solver.parameters().items():
        if isinstance(value, float) and not math.isfinite(value):
            return f"{name} is {value}"
        if value is not None and not isinstance(value, int | float | str):
            return f"{name} is of type {type(value).__name__}"
    leaves = jax.tree.leaves(solver.cast("float64"))
    if any(leaf.dtype != "float64" for leaf in leaves):
        return "a traced parameter is no float"
    named = {k: v for k, v in solver.parameters().items() if not str(v).startswith(("optax", "like the outer"))}
    again = dataclasses.replace(solver, **named)
    return None if again.parameters() == solver.parameters() else "its parameters do not make it again"
