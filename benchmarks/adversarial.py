"""The untuned solver on difficult problems, compared with a multi-start of L-BFGS-B by SciPy.

    python benchmarks/adversarial.py [names of problems] [--seconds 20] [--folder results/adversarial]

Counts, units, few rows, wide scales, polynomial columns, distillation and user-defined losses, most of them in float32.
Each run of ``AutoSRBA()`` has a time limit and writes a JSON file; a problem with a file is not run again. The
reference shares no code with the solvers: dense Newton steps for z in float64, the implicit gradient by a dense solve,
and L-BFGS-B over x from several starts, one of which is the end of the untuned run. The table is written to
reports/adversarial.md after each problem.
"""

import argparse
import json
import time
import warnings
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from markdown import number, table
from scipy.optimize import minimize
from sklearn import datasets
from sklearn.preprocessing import StandardScaler

import bilevel

REPORT = Path(__file__).parents[1] / "reports" / "adversarial.md"
REFERENCE_SECONDS, NEAR = 60, 1e-3

# Losses of a row (features, target) as functions of the weights z.


def poisson(z, row, target):
    return jnp.exp(row @ z) - target * (row @ z)


def logistic(z, row, target):
    return jax.nn.softplus(-target * (row @ z))


def squared(z, row, target):
    return (row @ z - target) ** 2 / 2


def exponential(z, row, target):
    return jnp.exp(-target * (row @ z))


def gamma(z, row, target):
    return target * jnp.exp(-(row @ z)) + row @ z


def log_cosh(z, row, target):
    rest = row @ z - target
    return rest + jax.nn.softplus(-2 * rest)


def pseudo_huber(z, row, target):
    return jnp.sqrt(1 + (row @ z - target) ** 2)


def quartic(z, row, target):
    return (row @ z - target) ** 4


def asymmetric(z, row, target):
    rest = row @ z - target
    return 0.1 * rest + jax.nn.softplus(-rest)


def softmax(z, row, target):
    scores = row @ z
    return jax.nn.logsumexp(scores) - scores[target]


def penalized(loss, data, val, x=0.0, dim=None, dtype="float32", of_outer=1.0, of_inner=1.0, shift=0.0):
    """Return a problem with penalties exp(x), one for all columns or one for each."""
    features = data[0].shape[1]

    def outer(z, x, sample):
        return of_outer * (loss(z, *sample) + shift)

    def inner(z, x, sample):
        return of_inner * (loss(z, *sample) + jnp.sum(jnp.exp(x) * z**2) / 2)

    start = np.zeros(features), np.full(features if dim is None else dim, float(x))
    return inner, outer, data, val, *start, dtype


def halves(X, y):
    return (X[::2], y[::2]), (X[1::2], y[1::2])


def counts(mean, effect, rows=160, shared=False, seed=3, loss=poisson):
    rng = np.random.default_rng(seed)
    X = np.c_[np.ones(rows), rng.standard_normal((rows, 4))]
    rate = mean * np.exp(effect * (X[:, 1] - 0.5 * X[:, 2]))
    y = rng.poisson(rate) if loss is poisson else rng.gamma(2, rate / 2) + 1e-3 * mean
    return penalized(loss, *halves(X, y.astype(float)), dim=1 if shared else None)


def linear(of_y=1.0, of_X=1.0, rows=180, columns=7, loss=squared, seed=4, noise=0.5, **more):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((rows, columns))
    y = X @ (rng.standard_normal(columns) * (np.arange(columns) < 4)) + noise * rng.standard_t(3, rows)
    return penalized(loss, *halves(X * of_X, y * of_y), **more)


def signs(X, seed=5, loss=logistic, **more):
    rng = np.random.default_rng(seed)
    scores = (X - X.mean(0)) / np.maximum(X.std(0), 1e-9) @ rng.standard_normal(X.shape[1])
    y = np.where(scores + 2 * rng.logistic(size=len(X)) > 0, 1.0, -1.0)
    return penalized(loss, *halves(X, y), **more)


def gaussian(rows, scales, mean=0.0, seed=6):
    return np.random.default_rng(seed).standard_normal((rows, len(scales))) * scales + mean


def noise(rows, scales):
    """Return a problem whose targets are independent of the columns."""
    return penalized(squared, *halves(gaussian(rows, scales), gaussian(rows, [1.0], seed=1)[:, 0]))


def powers(low, high, degree, rows=240, seed=7):
    return np.random.default_rng(seed).uniform(low, high, rows)[:, None] ** np.arange(degree + 1)


def wavy(low, high, degree, loss=squared, **more):
    X = powers(low, high, degree)
    y = np.sin(3 * X[:, 1]) + 0.3 * np.random.default_rng(8).standard_normal(len(X))
    if loss is poisson:
        y = np.random.default_rng(8).poisson(np.exp(1 + y)).astype(float)
    return penalized(loss, *halves(X, y), **more)


def distilled(data, per_class, penalty=0.1, noise=0.0, seed=9):
    """Return data distillation: x contains the features of a few rows, to which a softmax model is fitted."""
    X, y = data
    rng, k = np.random.default_rng(seed), y.max() + 1
    chosen = np.concatenate([rng.choice(np.flatnonzero(y == c), per_class, replace=False) for c in range(k)])

    def outer(z, x, sample):
        return softmax(z, *sample)

    def inner(z, x, sample):
        return softmax(z, x[sample[0]], sample[1]) + penalty * jnp.sum(z**2) / 2

    start = np.zeros((X.shape[1], k)), X[chosen] + noise * rng.standard_normal((len(chosen), X.shape[1]))
    return inner, outer, (np.arange(len(chosen)), y[chosen]), (X, y), *start, "float32"


def real(name, scaled=True):
    X, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    return StandardScaler().fit_transform(X) if scaled else X, y


def digits(rows=600):
    X, y = datasets.load_digits(return_X_y=True)
    return X[:rows] / 16, y[:rows]


def blobs(classes, columns, seed=10):
    return datasets.make_blobs(60 * classes, columns, centers=classes, cluster_std=3.0, random_state=seed)


def cleaned(weight, flips=0.3, rows=120, seed=11):
    """Return a problem with a weight for each training row, some of which have wrong labels."""
    rng = np.random.default_rng(seed)
    X, y = rng.standard_normal((2 * rows, 5)), np.ones(2 * rows)
    y[X @ rng.standard_normal(5) + 0.5 * rng.logistic(size=2 * rows) < 0] = -1
    wrong = np.where(rng.random(rows) < flips, -1, 1) * y[:rows]

    def inner(z, x, sample):
        return weight(x[sample[0]]) * logistic(z, *sample[1:]) + 0.01 * z @ z / 2

    def outer(z, x, sample):
        return logistic(z, *sample)

    return (
        inner,
        outer,
        (np.arange(rows), X[:rows], wrong),
        (X[rows:], y[rows:]),
        np.zeros(5),
        np.zeros(rows),
        "float32",
    )


def scaled_features(rows=200, seed=12):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((rows, 6))
    y = np.sign(X[:, 0] + 0.5 * X[:, 1] + rng.logistic(size=rows))

    def outer(z, x, sample):
        return logistic(z * jnp.exp(x), *sample)

    def inner(z, x, sample):
        return outer(z, x, sample) + z @ z / 20

    return inner, outer, *halves(X, y), np.zeros(6), np.zeros(6), "float32"


def prior_mean(of_y=1.0, seed=13):
    """Return a problem in which x is the center of the penalty of z, in the units of y."""
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((80, 4))
    y = of_y * (X @ np.array([3.0, -2.0, 1.0, 0.5]) + rng.standard_normal(80))

    def inner(z, x, sample):
        return squared(z, *sample) + 5 * (z - x) @ (z - x)

    def outer(z, x, sample):
        return squared(z, *sample)

    return inner, outer, (X[:20], y[:20]), (X[20:], y[20:]), np.zeros(4), np.zeros(4), "float32"


PROBLEMS = (
    {f"counts, mean {mean:g}, effect {e}": partial(counts, mean, e) for mean in (2, 40, 700, 12000) for e in (0.2, 0.9)}
    | {f"counts, one penalty, mean {mean:g}": partial(counts, mean, 0.5, shared=True) for mean in (15, 500, 40000)}
    | {f"gamma, mean {mean:g}": partial(counts, mean, 0.5, loss=gamma) for mean in (1e-4, 30, 1e4)}
    | {f"targets times {c:g}": partial(linear, c) for c in (1e-12, 1e-8, 1e-4, 1e-2, 1e2, 1e4, 1e8, 1e12)}
    | {f"columns times {c:g}": partial(linear, 1, c) for c in (0.03, 30)}
    | {f"outer loss times {c:g}": partial(linear, of_outer=c) for c in (1e-33, 1e-18, 1e18, 1e33)}
    | {f"inner loss times {c:g}": partial(linear, of_inner=c) for c in (1e-25, 1e-12, 1e12, 1e25)}
    | {f"outer loss plus {c:g}": partial(linear, shift=c) for c in (-0.7, -30, 30)}
    | {f"{n} rows, squared": partial(linear, rows=n, columns=3) for n in (8, 14)}
    | {f"{n} rows, log_cosh": partial(linear, rows=n, columns=3, loss=log_cosh) for n in (8, 14)}
    | {f"{n} rows, logistic": lambda n=n: signs(gaussian(n, np.ones(3))) for n in (10, 18)}
    | {f"{n} rows, counts": partial(counts, 50, 0.5, n) for n in (12,)}
    | {
        "scales 1e-3 to 1e3": lambda: signs(gaussian(300, np.geomspace(1e-3, 1e3, 9))),
        "scales 1e-2 to 1e4": lambda: signs(gaussian(300, np.geomspace(1e-2, 1e4, 12))),
        "scales, 60 columns": lambda: signs(gaussian(800, np.geomspace(1e-2, 1e2, 60)), x=-3),
        "means of 300": lambda: signs(gaussian(300, np.ones(8), 300.0)),
        "scales, squared": lambda: noise(240, np.geomspace(1e-3, 1e2, 8)),
        "scales, float64": lambda: signs(gaussian(300, np.geomspace(1e-4, 1e4, 9)), dtype="float64"),
        "powers to 8 on [0, 2.5]": lambda: signs(powers(0, 2.5, 8)),
        "powers to 9 on [-2, 2]": lambda: signs(powers(-2, 2, 9)),
        "powers to 6 on [0, 4]": lambda: signs(powers(0, 4, 6)),
        "squared powers to 7 on [0, 3]": lambda: wavy(0, 3, 7),
        "squared powers to 9 on [-1, 1]": lambda: wavy(-1, 1, 9),
        "counts, powers to 5 on [0, 2]": lambda: wavy(0, 2, 5, poisson),
        "powers to 8, float64": lambda: signs(powers(0, 3, 8), dtype="float64"),
        "digits in 10 rows": lambda: distilled(digits(), 1),
        "digits in 20 rows": lambda: distilled(digits(), 2, 0.03),
        "wine in 3 rows": lambda: distilled(real("wine"), 1),
        "iris in 3 rows": lambda: distilled(real("iris"), 1, 0.02),
        "iris in 6 rows, raw": lambda: distilled(real("iris", scaled=False), 2, 0.05),
        "breast cancer in 4 rows": lambda: distilled(real("breast_cancer"), 2),
        "blobs in 5 rows": lambda: distilled(blobs(5, 8), 1, 0.05, 2.0),
        "exponential loss": lambda: signs(gaussian(200, np.ones(6)), loss=exponential),
        "exponential loss, scales": lambda: signs(gaussian(200, np.geomspace(0.1, 10, 6)), loss=exponential),
        "pseudo-Huber": lambda: linear(10, loss=pseudo_huber),
        "log cosh, targets times 1000": lambda: linear(1000, loss=log_cosh),
        "fourth powers": lambda: linear(3, loss=quartic),
        "fourth powers, targets times 0.01": lambda: linear(0.01, loss=quartic, x=-8),
        "asymmetric": lambda: linear(3, loss=asymmetric),
        "more columns than rows": lambda: linear(rows=60, columns=45, x=-1),
        "start at penalties of e^8": lambda: linear(x=8),
        "start at penalties of e^-12": lambda: linear(x=-12),
        "no signal": lambda: noise(90, np.ones(5)),
        "no noise": lambda: linear(noise=1e-3),
        "weights of rows": lambda: cleaned(jax.nn.sigmoid),
        "weights of rows, softplus": lambda: cleaned(jax.nn.softplus),
        "weights of rows, exp": lambda: cleaned(jnp.exp, 0.45),
        "scales of features": scaled_features,
        "prior mean": prior_mean,
        "prior mean, targets times 100": lambda: prior_mean(100.0),
    }
)  # fmt: skip


class Reference:
    """h and its gradient in float64 by dense linear algebra, without the library."""

    def __init__(self, inner, outer, data, val, z, x, _):
        (z, unravel_z), (self.start, unravel_x) = ravel_pytree(jnp.asarray(z)), ravel_pytree(jnp.asarray(x))

        def mean(loss, rows):
            over_rows = jax.vmap(loss, (None, None, 0))
            return lambda z, x: jnp.mean(over_rows(unravel_z(z), unravel_x(x), rows))

        G, F = mean(inner, data), mean(outer, val)
        self.G, self.slopes = jax.jit(G), jax.jit(lambda z, x: (G(z, x), jax.grad(G)(z, x), jax.hessian(G)(z, x)))
        self.F = jax.jit(jax.value_and_grad(F, (0, 1)))
        self.cross = jax.jit(lambda z, x, v: jax.grad(lambda x: jax.grad(G)(z, x) @ v)(x))
        self.first, self.seen, self.deadline = np.array(z), (np.inf, None), np.inf

    def solve(self, x, z):
        """Return z after damped Newton steps, the last Hessian and its scale."""
        for _ in range(300):
            value, slope, hessian = map(np.array, self.slopes(z, x))
            scale = 1 / np.sqrt(np.maximum(np.diag(hessian), 1e-300))
            step = -scale * np.linalg.lstsq(hessian * scale * scale[:, None], scale * slope, rcond=1e-15)[0]
            gain = -slope @ step
            if not gain > 1e-15 * abs(value):
                break
            t = 1.0
            while not (moved := float(self.G(z + t * step, x))) <= value - 1e-4 * t * gain and t > 1e-12:
                t /= 2
            if t <= 1e-12 or moved >= value:
                break
            z = z + t * step
        return z, hessian, scale

    def __call__(self, x):
        if time.perf_counter() > self.deadline:
            raise StopIteration
        with np.errstate(all="ignore"):
            z, hessian, scale = self.solve(x, self.first)
            value, (over_z, over_x) = self.F(z, x)
            if not np.isfinite(value):
                return 1e300, np.zeros_like(x)
            v = -scale * np.linalg.lstsq(hessian * scale * scale[:, None], scale * np.array(over_z), rcond=1e-15)[0]
        if value < self.seen[0]:
            self.first, self.seen = z, (float(value), np.array(x))
        return float(value), np.array(over_x) + np.array(self.cross(z, x, v))

    def best(self, starts):
        """Return the lowest h that L-BFGS-B finds from the starts within a common time limit."""
        self.deadline = time.perf_counter() + REFERENCE_SECONDS
        unit = abs(self(np.array(self.start))[0]) or 1.0
        for x in starts:
            bounds = [(min(-25, 1.1 * min(x)), max(25, 1.1 * max(x)))] * len(x)
            try:
                minimize(
                    lambda x: [part / unit for part in self(x)], x, jac=True, method="L-BFGS-B", bounds=bounds,
                    options={"maxiter": 500, "ftol": 1e-12, "gtol": 1e-12},
                )  # fmt: skip
            except StopIteration:
                break
        return self.seen[0]


def measure(name, seconds):
    """Run the untuned solver on a problem, and compare it with the reference."""
    inner, outer, data, val, z, x, dtype = PROBLEMS[name]()
    problem = bilevel.BilevelProblem.from_losses(inner, outer, data, val, z, x, strongly_convex=True, dtype=dtype)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = bilevel.run(problem, bilevel.AutoSRBA(), max_steps=300_000, max_seconds=seconds, exact=False)
        except ValueError as error:
            return {"name": name, "status": "refused", "said": str(error), "seconds": 0.0, "steps": 0}
    said = " ".join([result.reason, *(str(one.message) for one in caught)])
    with jax.enable_x64(True):
        reference = Reference(*PROBLEMS[name]())
        reference.deadline = np.inf
        end = np.ravel(np.asarray(result.point.outer_var, float))
        at_start, at_end = (reference(np.array(at))[0] for at in (reference.start, end))
        F_end = float(reference.F(np.ravel(np.asarray(result.point.inner_var, float)), end)[0])
        best = reference.best(
            [end, reference.start, reference.start - 4.0, reference.start + 3.0, reference.start - 9.0]
        )
    return {"name": name, "status": str(result.status), "said": said, "start": at_start, "end": at_end, "best": best,
            "outer": F_end, "seconds": float(result.history["seconds"][-1]), "steps": int(result.history["step"][-1]),
            "dtype": dtype}  # fmt: skip


def gap(found):
    """Return the relative gap of h to the best h."""
    return (found["end"] - found["best"]) / abs(found["best"]) if "end" in found else None


def report(everything):
    """Return the report."""
    ran = [found for found in everything if "end" in found]
    near = sum(gap(found) <= NEAR for found in ran)
    above = sum(found["end"] > found["start"] + 1e-6 * abs(found["start"]) for found in ran)
    failed = sum(found["status"] == "diverged" for found in ran)
    text = (
        f"{len(everything)} problems: {near} within 0.1 % of the best h of a multi-start; {above} above their start; "
    )
    text += f"{failed} diverged; {len(everything) - len(ran)} refused."
    columns = ["problem", "status", "steps", "seconds", "h at the start", "h at the end", "best h", "gap"]
    columns += ["of the initial gap", "messages"]
    rows = []
    for found in everything:
        cells = [number(found[key], 6) if key in found else None for key in ("start", "end", "best")]
        off = None if gap(found) is None else f"{100 * gap(found):.2g} %"
        part = None if off is None else (found["end"] - found["best"]) / max(found["start"] - found["best"], 1e-300)
        said = "" if off is not None and gap(found) <= NEAR else found["said"].replace("|", "/")
        rows.append(
            [
                found["name"],
                found["status"],
                str(found["steps"]),
                number(found["seconds"]),
                *cells,
                off,
                part if part is None else f"{100 * part:.2g} %",
                said,
            ]
        )
    return f"# Adversarial problems\n\n{__doc__.strip()}\n\n{text}\n\n{table(columns, rows)}\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="problems to run, all by default; 'list' prints them")
    parser.add_argument("--seconds", type=float, default=20.0, help="limit of the steps of a run")
    parser.add_argument("--folder", type=Path, default=Path("results/adversarial"))
    arguments = parser.parse_args()
    if arguments.names == ["list"]:
        return print("\n".join(PROBLEMS))
    if unknown := set(arguments.names) - set(PROBLEMS):
        raise SystemExit(f"unknown: {', '.join(sorted(unknown))}; 'list' prints the names.")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    files = {name: arguments.folder / f"{name.replace(',', '').replace(' ', '-')}.json" for name in PROBLEMS}
    for name in arguments.names or PROBLEMS:
        if not files[name].exists():
            found = measure(name, arguments.seconds)
            files[name].write_text(json.dumps(found))
            jax.clear_caches()  # frees the programs of the reference
            off = gap(found)
            print(f"{name}: {found['status']}, {found['steps']} steps, gap {off}: {found['said']}", flush=True)
        everything = [json.loads(file.read_text()) for file in files.values() if file.exists()]
        REPORT.write_text(report(everything))


if __name__ == "__main__":
    main()
