"""Two problems, three solvers: a table on the screen and a figure on disk.

    python examples/demo.py [--out demo]

The first problem is a random quadratic with a known solution. The second selects one penalty for each of the 30
features of scikit-learn's breast cancer data, so that the logistic model fitted to the training rows does best on
the validation rows.
"""

import argparse
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

import bilevel


def breast_cancer_problem():
    X, y = load_breast_cancer(return_X_y=True)
    X_train, X_val, y_train, y_val = train_test_split(X, 2 * y - 1, test_size=0.4, random_state=0, stratify=y)
    scaler = StandardScaler().fit(X_train)
    return bilevel.problems.logistic_selection(
        scaler.transform(X_train),
        y_train,
        scaler.transform(X_val),
        y_val,
        inner_var=np.zeros(30),
        outer_var=np.full(30, -2.0),
        outer_bounds=(-12.0, 12.0),
        dtype="float64",
    )


def experiments():
    quadratic = bilevel.problems.quadratic(dtype="float64")
    yield quadratic, 64, 120, {"SRBA": (0.1, 1.0), "SABA": (0.1, 1.0), "SOBA": (0.1, 1.0)}
    yield breast_cancer_problem(), 32, 50_000, {"SRBA": (0.5, 1.0), "SABA": (0.5, 1.0), "SOBA": (0.2, 0.01)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder of the figure")
    out = parser.parse_args().out
    table = Table("problem", "solver", "steps", "epochs", "seconds", "h", "||grad h||²", title="bilevel demo")
    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, (problem, batch_size, epochs, settings) in zip(figure.subplots(1, 2), experiments(), strict=True):
        for name, (step_size, outer_ratio) in settings.items():
            solver = bilevel.SOLVERS[name](step_size, outer_ratio, batch_size)
            budget = epochs * (problem.n_inner + problem.n_outer)
            result = bilevel.run(problem, solver, max_calls=budget, progress=True)
            last = {column: values[-1] for column, values in result.history.items()}
            numbers = (f"{last['step']:,}", f"{last['epochs']:.0f}", f"{last['seconds']:.2f}", f"{last['value']:.6f}")
            table.add_row(problem.name, name, *numbers, f"{last['hypergrad_norm_sq']:.1e}")
            axes.plot(result.history["epochs"], result.history["hypergrad_norm_sq"], marker=".", label=name)
        axes.set(title=problem.name, xlabel="epochs", ylabel="||grad h(x)||²", yscale="log")
        axes.grid(alpha=0.3)
        axes.legend()
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / "demo.png", dpi=150)
    console = Console()
    console.print(table)
    console.print(f"figure: {out / 'demo.png'}")


if __name__ == "__main__":
    main()
