"""When data cleaning pays: exact fits on MNIST with wrong labels, over C, corruption and number of validation rows.

    python -m paper.studies.cleaning [--from-kept] [--resume] [--quick --folder FOLDER]

Results are kept in reports/reproduction/cleaning.csv. Each fit minimizes its loss by L-BFGS in float32. The bilevel fit
is L-BFGS on h with exact hypergradients, stopped after 15 steps; inner problems are solved to a relative error of 1e-5
(1e-4 for the kept results). `bilevel.datasets` loads MNIST. To stay within 20 minutes on one core, the size of the
paper (20 000 training rows) is used with a corruption of 0.5 only; other cases have 10 000 training rows and fewer
values of C. There is one seed.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

import bilevel
from benchmarks.markdown import number
from bilevel._core.compilation import arithmetic
from bilevel.datasets import load
from bilevel.problems import real_data
from bilevel.problems.exact import IterativeExactSolver, norm_sq
from bilevel.problems.softmax import cross_entropies
from bilevel.solvers.hoag import lbfgs
from paper.markdown import markdown_table as table
from paper.studies.common import draw, study
from paper.studies.common import tables as write_tables

PLAIN = "plain"  # pixels scaled by their standard deviation, as published; otherwise by at least 0.1 of the full range
PENALTIES, FEW = (1e-2, 0.05, 0.2), (1e-2, 0.2)
# Training rows, corruption, validation rows, values of C, and how pixels are scaled.
GRID = (
    (20_000, 0.5, 5000, (*PENALTIES, 1.0), None),
    (10_000, 0.9, 5000, PENALTIES, None),
    (10_000, 0.5, 500, PENALTIES, None),
    (10_000, 0.7, 5000, FEW, None),
    (10_000, 0.9, 500, FEW, None),
    (20_000, 0.5, 5000, FEW, PLAIN),
)
STEPS = 15
NOISY, ORACLE, VALIDATION = "noisy rows", "clean rows only", "validation rows"
BOTH, BILEVEL, REFIT = "noisy and validation rows", "bilevel", "kept and validation rows"
FITS = (NOISY, ORACLE, VALIDATION, BOTH, BILEVEL, REFIT)
SHOWN = {NOISY: "C3o-", ORACLE: "C2o:", VALIDATION: "C4s-", BOTH: "C1s-", BILEVEL: "C0D-", REFIT: "C0D:"}


def parts(quick):
    """Yield the parts from the largest C to the smallest; each fit starts from the previous one."""
    if quick:
        problem = bilevel.problems.digits_cleaning(n_train=200, n_val=60, dtype="float32")
        yield common(200, 0.5, 60, 1e-2), lambda: measure(problem, 1e-2, {}, 3)
        return
    for n_train, corruption, n_val, penalties, scaling in GRID:
        problem, last = functools.cache(functools.partial(build, n_train, corruption, n_val, scaling)), {}
        for penalty in sorted(penalties, reverse=True):
            work = functools.partial(lambda problem, *rest: measure(problem(), *rest), problem, penalty, last, STEPS)
            yield common(n_train, corruption, n_val, penalty) | ({} if scaling is None else {"scaling": scaling}), work


def build(n_train, corruption, n_val, scaling):
    """Return the problem of the library; without the lower bound of the scale, rows and labels are the same."""
    full_range = 0 if scaling == PLAIN else 255
    return real_data._cleaning(load("mnist"), full_range, corruption, (n_train, n_val), "float32", 0)


def common(n_train, corruption, n_val, penalty):
    return {"n_train": n_train, "n_val": n_val, "corruption": corruption, "C": penalty}


def measure(problem, penalty, last, steps):
    rows = []
    for name, z, x, more in fits(problem, penalty, last, steps):
        last[name] = z
        rows.append({"fit": name} | measures(problem, z, x) | more)
    print(", ".join(f"{row['fit']} {row['test_error']:.4f}" for row in rows), flush=True)
    return rows


def fits(problem, penalty, last, steps):
    """Yield the name of each fit, z, the logits of the weights or None, and additional columns."""
    train, validation = (level.leaves for level in (problem.oracles.inner_samples, problem.oracles.outer_samples))
    X, y, clean = np.asarray(train.features), np.asarray(train.labels), is_clean(problem)
    X_val, y_val = np.asarray(validation.features), np.asarray(validation.labels)
    X_both, y_both = np.concatenate([X, X_val]), np.concatenate([y, y_val])
    ones = np.ones(len(y), np.float32)
    start = problem.start.inner_var
    yield NOISY, minimize(X, y, ones, penalty, last.get(NOISY, start)), None, {}
    yield ORACLE, minimize(X, y, clean.astype(np.float32), penalty, last.get(ORACLE, start)), None, {}
    yield VALIDATION, minimize(X_val, y_val, ones[: len(y_val)], penalty, last.get(VALIDATION, start)), None, {}
    yield BOTH, minimize(X_both, y_both, np.ones(len(y_both), np.float32), penalty, last.get(BOTH, start)), None, {}
    z, x, more = bilevel_fit(problem, penalty, steps)
    yield BILEVEL, z, x, more
    # Rows whose weights have increased, together with the validation rows, with equal weights.
    kept = np.concatenate([x[np.asarray(train.index)] > problem.start.outer_var[0], np.ones(len(y_val), bool)])
    yield REFIT, minimize(X_both[kept], y_both[kept], np.ones(kept.sum(), np.float32), penalty, z), None, {}


def is_clean(problem):
    """Return True for each training row with its correct label, in the order of the samples."""
    clean, _ = problem.metrics["weight_auc"].args
    return np.isin(np.asarray(problem.oracles.inner_samples.leaves.index), np.asarray(clean))


@jax.jit
def _loss(z, X, y, weights, penalty):
    def loss(z):
        return jnp.mean(weights * cross_entropies(z @ X.T, y)) + penalty * jnp.sum(z**2)

    return jax.value_and_grad(loss)(z)


def minimize(X, y, weights, penalty, start):
    """Return the weighted softmax fit, the minimizer of mean(w CE) + C ||z||²."""
    data = [jnp.asarray(part) for part in (X, y, weights, np.float32(penalty))]

    def flat_loss(z):
        value, grad = _loss(jnp.asarray(z.reshape(start.shape), jnp.float32), *data)
        return float(value), np.asarray(grad, np.float64).ravel()

    found = lbfgs(flat_loss, np.asarray(start, np.float64).ravel(), ftol=1e-8, gtol=1e-6, maxiter=300)
    return found.x.reshape(start.shape)


def bilevel_fit(problem, penalty, steps):
    """Return z*(x), x after L-BFGS steps on h, and columns with h and ||∇h||² at both ends."""
    with arithmetic(problem.dtype):
        oracles = replace(problem.oracles, regularization=jnp.asarray(penalty, problem.dtype))
    solve = IterativeExactSolver(oracles, problem.start, accuracy=1e-5)
    solutions = [solve(np.asarray(problem.start.outer_var, np.float64))]
    first = solutions[0]

    def value_and_grad(x):
        solutions.append(solve(x, solutions[-1]))
        return solutions[-1].value, np.asarray(solutions[-1].hypergrad)

    x = lbfgs(value_and_grad, np.asarray(problem.start.outer_var, np.float64), maxiter=steps, gtol=0.0).x
    end = solve(x, solutions[-1])
    more = {"h_start": first.value, "h": end.value, "evaluations": len(solutions)}
    more |= {"stationarity": norm_sq(end.hypergrad) / norm_sq(first.hypergrad)}
    return end.inner_var, x, more


def measures(problem, z, x):
    """Return test error, validation loss and error, and the AUC of the weights if there are weights."""
    validation, metrics = problem.oracles.outer_samples.leaves, problem.metrics
    point = problem.start._replace(inner_var=np.asarray(z, np.float32))
    scores = point.inner_var @ np.asarray(validation.features).T
    loss = float(jnp.mean(cross_entropies(jnp.asarray(scores), validation.labels)))
    error = float(np.mean(scores.argmax(0) != np.asarray(validation.labels)))
    row = {"test_error": float(metrics["test_error"](point)), "validation_loss": loss, "validation_error": error}
    if x is not None:
        row["weight_auc"] = float(metrics["weight_auc"](point._replace(outer_var=np.asarray(x, np.float32))))
    return row


# Tables and figure


def panel_of(row):
    return row["n_train"], row["corruption"], row["n_val"], row.get("scaling")


def panels(rows):
    return list(dict.fromkeys(map(panel_of, rows)))


def of_panel(rows, panel, fit):
    return [row for row in rows if panel_of(row) == panel and row["fit"] == fit]


def head(panel):
    return [f"{panel[0]:.0f}{', plain scaling' if panel[3] == PLAIN else ''}", f"{panel[1]:g}", f"{panel[2]:.0f}"]


def percent(value):
    return f"{100 * value:.1f}"


def test_table(rows):
    """Return the test error of each fit in percent, at C = 0.2 and at the C with the lowest test error."""
    lines = []
    for panel in panels(rows):
        line = head(panel)
        for fit in FITS:
            here = of_panel(rows, panel, fit)
            best = min(here, key=lambda row: row["test_error"])
            at_paper = next((percent(row["test_error"]) for row in here if row["C"] == 0.2), "–")
            line.append(f"{at_paper} / {percent(best['test_error'])} ({best['C']:g})")
        lines.append(line)
    return table(["training rows", "corruption", "validation rows", *FITS], lines)


def weight_table(rows):
    """Return a table of the bilevel fit: AUC, decrease of h, and validation loss next to that of the noisy fit."""
    lines = []
    for panel in panels(rows):
        plain = {row["C"]: row for row in of_panel(rows, panel, NOISY)}
        for row in sorted(of_panel(rows, panel, BILEVEL), key=lambda row: row["C"]):
            values = [row["weight_auc"], row["h_start"], row["h"], row["stationarity"]]
            losses = [plain[row["C"]]["validation_loss"], row["validation_loss"]]
            errors = [percent(each["test_error"]) for each in (plain[row["C"]], row)]
            lines.append([*head(panel), f"{row['C']:g}", *map(number, [*values, losses[0]]), *errors])
    columns = ["training rows", "corruption", "validation rows", "C", "AUC", "h at the start", "h at the end"]
    columns += ["‖∇h‖² end/start", "validation loss, noisy rows", "test error % noisy", "bilevel"]
    return table(columns, lines)


def show(rows, folder):
    write_tables(folder, "cleaning", errors=test_table(rows), weights=weight_table(rows))
    shown = [panel for panel in panels(rows) if panel[3] is None]
    draw(folder, "cleaning", len(shown), lambda axes: plot(rows, shown, axes), size=(2.9, 3.2))


def plot(rows, shown, axes):
    """Draw test error against C, with a panel for each corruption and number of validation rows."""
    for axis, panel in zip(axes, shown, strict=True):
        for fit, style in SHOWN.items():
            here = sorted(of_panel(rows, panel, fit), key=lambda row: row["C"])
            axis.plot([r["C"] for r in here], [r["test_error"] for r in here], style, label=fit, markersize=3)
        title = f"corruption {panel[1]:g}\n{panel[0]:.0f} and {panel[2]:.0f} validation rows"
        axis.set(title=title, xscale="log", xlabel="C")
    axes[0].set_ylabel("test error")
    axes[0].legend(fontsize=6)


if __name__ == "__main__":
    study(__doc__, "cleaning", parts, show)
