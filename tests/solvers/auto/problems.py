"""Problems and settings that the tests of the untuned solver share."""

import jax
import jax.numpy as jnp
import numpy as np

import bilevel
from tests import cases
from tests.transcription.adaptive import Adam

BATCH, PERIOD = cases.BATCH, 7
PLAIN = bilevel.SRBA(0.1, 1.0, BATCH, period=PERIOD)
DIAGONAL = bilevel.AutoSRBA(0.1, 1.0, BATCH, period=PERIOD, preconditioner="diagonal")
BOUNDED = bilevel.AutoSRBA(0.1, 1.0, BATCH, period=PERIOD, preconditioner="diagonal", outer_bounds=(-0.5, 0.35))
AUTO = bilevel.AutoSRBA(batch_size=BATCH)
DIM = 12


def adam_of_the_library():
    """Steps of 1e-2 (1 + t/1000)^-½, as documented, and no ε, which would make them depend on units."""
    return Adam(1e-2, 1000.0, least=0.0)


def selection(outer_var=None, **kwargs):
    start = np.full(4, -0.2) if outer_var is None else outer_var
    return cases.logistic_selection(outer_var=start, **kwargs)


def wide_selection(**kwargs):
    start = {"outer_var": np.full(DIM, -2.0), "inner_var": np.linspace(-1, 1, DIM)}
    return bilevel.problems.penalty_selection(*cases.logistic_data(dim=DIM), **start, **({"dtype": "float64"} | kwargs))


def tree_problem(**kwargs):
    """Own losses, of variables that are dictionaries."""
    rows, signs, val, val_signs = cases.logistic_data(dim=12)

    def loss(z, x, sample):
        row, sign = sample
        return jnp.log1p(jnp.exp(-sign * (row[:6] @ z["left"] + row[6:] @ z["right"])))

    def inner(z, x, sample):
        return loss(z, x, sample) + jnp.sum(jnp.exp(x["pen"]) * (z["left"] ** 2 + z["right"] ** 2)) / 2

    signs, val_signs = (s.astype(float) for s in (signs, val_signs))
    start = {"left": np.ones(6), "right": -np.ones(6)}
    return bilevel.BilevelProblem.from_losses(
        inner, loss, (rows, signs), (val, val_signs), start, {"pen": np.zeros(6)}, **({"dtype": "float32"} | kwargs)
    )


def badly_scaled(strongly_convex):
    """Own losses on columns from 1e-2 to 1e2, whose curvatures eight probes cannot distinguish."""
    rng, p = np.random.default_rng(0), 10
    X, y = rng.standard_normal((200, p)), np.sign(rng.standard_normal(200))
    X = (X + y[:, None] * rng.standard_normal(p)) * np.geomspace(1e-2, 1e2, p)

    def outer(z, x, row):
        return jax.nn.softplus(-row[0] * (row[1:] @ z))

    def inner(z, x, row):
        return outer(z, x, row) + 0.5 * jnp.exp(x[0]) * (z @ z)

    data = np.column_stack([y, X])
    start = {"inner_var": np.zeros(p), "outer_var": np.full(1, -6.0), "strongly_convex": strongly_convex}
    return bilevel.BilevelProblem.from_losses(inner, outer, data[:100], data[100:], **start, dtype="float32")


def drawn_rows(run):
    """The rows of each step of a trajectory, as positions in the layout."""
    levels = ("inner", "outer")
    samples = {"inner": run.oracles.inner_samples, "outer": run.oracles.outer_samples}
    return [{level: cases.indices(samples[level], getattr(draw, level)) for level in levels} for draw in run.draws]


def penalized(loss, data, val, *, of_outer=1.0, of_inner=1.0, dtype="float32", columns=None):
    """A linear model with an own loss, and a penalty exp(x) for each column."""

    def outer(z, x, sample):
        return of_outer * loss(sample[0] @ z, sample[1])

    def inner(z, x, sample):
        return of_inner * (loss(sample[0] @ z, sample[1]) + jnp.sum(jnp.exp(x) * z**2) / 2)

    start = np.zeros(data[0].shape[1]), np.zeros(columns or data[0].shape[1])
    return bilevel.BilevelProblem.from_losses(inner, outer, data, val, *start, dtype=dtype, strongly_convex=True)


def squared(score, target):
    return (score - target) ** 2


def table(rows=70, columns=4, seed=21):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((rows, columns))
    return X, X @ np.arange(columns) + rng.standard_normal(rows)


def halves(X, y):
    return (X[::2], y[::2]), (X[1::2], y[1::2])


def regression(of_y=1.0, **more):
    X, y = table()
    return penalized(squared, *halves(X, of_y * y), **more)


def shifted(mean):
    """Logistic selection on columns that share a mean."""
    rng = np.random.default_rng(5)
    rows, truth = rng.standard_normal((600, 10)), rng.standard_normal(10)
    signs = np.where(rows @ truth + rng.logistic(size=600) > 0, 1, -1)
    data = rows[:400] + mean, signs[:400], rows[400:] + mean, signs[400:]
    return bilevel.problems.penalty_selection(*data, dtype="float32")
