"""Learned weights of training rows with wrong labels, compared with betty: seconds, memory, test error.

    python benchmarks/beside_betty.py --betty-python PATH [--steps 1000] [--width 100]

PATH is the Python of an environment with betty (`pip install betty-ml`, with PyTorch); without it only this library is
measured. Each side runs in its own process on one thread, with the same rows, network, start, batches, number of steps
and inner optimizer (gradient steps with a momentum of 0.9), and takes one step of the network for each step of the
weights. The data are the digits of scikit-learn with half of the labels redrawn, and one weight per row. The step size
of the weights is that of 10, 100, 1000 and 10 000 with the lowest validation error at the last step. Betty has its
default hypergradient, a difference of gradients. Memory is the peak of the process minus that after importing the
libraries. Seconds are processor seconds of the steps after a warm-up, the minimum of four runs.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from markdown import table
from processes import peak_bytes

ROWS, CLEAN, CLASSES, BATCH = 960, 256, 10, 64  # multiples of the batch size
RATE, MOMENTUM, DECAY, WARM = 0.1, 0.9, 1e-4, 20
POWERS = range(1, 5)


def make_task(width, seed=0):
    """Return rows, labels and the start."""
    import bilevel

    data, rng = bilevel.datasets.load("digits"), np.random.default_rng(seed)
    order = rng.permutation(len(data.X_train))
    rows = (data.X_train[order].reshape(len(order), -1) / 16).astype(np.float32)
    labels = data.y_train[order].astype(np.int32)
    noisy = bilevel.problems.corrupted_labels(labels[:ROWS], CLASSES, 0.5, rng)
    shapes = {"first": (rows.shape[1], width), "bias": (width,), "last": (width, CLASSES)}
    task = {name: (rng.normal(size=shape) / shape[0] ** 0.5).astype(np.float32) for name, shape in shapes.items()}
    for name, part in (
        ("train", slice(ROWS)),
        ("validation", slice(ROWS, ROWS + CLEAN)),
        ("test", slice(ROWS + CLEAN, None)),
    ):
        task |= {f"{name}_rows": rows[part], f"{name}_labels": labels[part]}
    return task | {"train_labels": noisy}


def draw_batches(task, steps):
    """Return the indices of the rows that a run of this library draws."""
    import jax

    from bilevel._core.compilation import arithmetic
    from bilevel.engine.loop import run_key

    with arithmetic("float32"):
        oracles = build(task).oracles.with_batches(BATCH, "blocks")

        @jax.vmap
        def numbers(index):
            drawn, levels = oracles.draw(run_key(0), index), (oracles.inner_samples, oracles.outer_samples)
            return [samples.take(rows)[0][2] for samples, rows in zip(levels, drawn, strict=True)]

        inner, outer = numbers(np.arange(steps, dtype=np.int32))
    return {"inner": np.asarray(inner, np.int64), "outer": np.asarray(outer, np.int64)}


def error(task, name, weights):
    hidden = np.tanh(task[f"{name}_rows"] @ weights["first"] + weights["bias"])
    return float(np.mean(np.argmax(hidden @ weights["last"], axis=1) != task[f"{name}_labels"]))


def answer(task, weights, seconds, before):
    """Return the results of a run."""
    errors = {name: error(task, name, weights) for name in ("validation", "test")}
    return errors | {"seconds": seconds, "bytes": peak_bytes() - before}


def build(task):
    """Return the problem for this library; rows contain their indices."""
    import jax
    import jax.numpy as jnp

    import bilevel

    def entropies(weights, rows, labels):
        scores = jnp.tanh(rows @ weights["first"] + weights["bias"]) @ weights["last"]
        return jax.nn.logsumexp(scores, axis=1) - jnp.take_along_axis(scores, labels[:, None], axis=1)[:, 0]

    def inner_loss(weights, logits, batch):
        rows, labels, number = batch
        decay = DECAY * sum(jnp.sum(array**2) for array in weights.values())
        return jax.nn.sigmoid(logits[number]) * entropies(weights, rows, labels) + decay

    def outer_loss(weights, logits, batch):
        return entropies(weights, *batch[:2])

    train, validation = (
        (task[f"{name}_rows"], task[f"{name}_labels"], np.arange(len(task[f"{name}_rows"]), dtype=np.int32))
        for name in ("train", "validation")
    )
    start = {name: task[name] for name in ("first", "bias", "last")}
    losses = bilevel.BatchLoss(inner_loss), bilevel.BatchLoss(outer_loss)
    given = train, validation, start, np.zeros(ROWS, np.float32)
    return bilevel.BilevelProblem.from_losses(*losses, *given, dtype="float32")


def with_bilevel(task, power):
    """Run SOBA, which keeps its estimate of v from step to step."""
    import jax
    import optax

    import bilevel

    jax.block_until_ready(jax.numpy.zeros(3) + 1)
    before = peak_bytes()
    optimizers = {"inner_optimizer": optax.sgd(RATE, MOMENTUM), "outer_optimizer": optax.sgd(10.0**power)}
    run = bilevel.Run(build(task), bilevel.SOBA(RATE, batch_size=BATCH, **optimizers))
    run.advance(WARM)
    run.restart()
    steps, began = len(task["inner"]), time.process_time()
    run.advance(steps)
    seconds = (time.process_time() - began) / steps
    return answer(task, run.point.inner_var, seconds, before)


def with_betty(task, power):
    """Run the same task with betty."""
    import torch
    from betty.configs import Config, EngineConfig
    from betty.engine import Engine
    from betty.problems import ImplicitProblem

    torch.set_num_threads(1)
    before = peak_bytes()

    class Network(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for name in ("first", "bias", "last"):
                setattr(self, name, torch.nn.Parameter(torch.tensor(task[name])))

        def forward(self, rows):
            return torch.tanh(rows @ self.first + self.bias) @ self.last

    class Weights(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.logits = torch.nn.Parameter(torch.zeros(ROWS))

        def forward(self, row):
            return torch.sigmoid(self.logits[row])

    class Outer(ImplicitProblem):
        def training_step(self, batch):
            return torch.nn.functional.cross_entropy(self.inner(batch[0]), batch[1])

    class Inner(ImplicitProblem):
        def training_step(self, batch):
            rows, labels, row = batch
            losses = torch.nn.functional.cross_entropy(self.forward(rows), labels, reduction="none")
            decay = DECAY * sum((array**2).sum() for array in self.module.parameters())
            return (self.outer(row) * losses).mean() + decay

    class Batches:
        """Batches that are made on demand, because a list of all batches would count as memory."""

        def __init__(self, name, drawn):
            self.rows = torch.tensor(task[f"{name}_rows"])
            self.labels = torch.tensor(task[f"{name}_labels"].astype(np.int64))
            self.drawn = torch.tensor(drawn)

        def __iter__(self):
            return ((self.rows[numbers], self.labels[numbers], numbers) for numbers in self.drawn)

    def run(steps):
        network, weights = Network(), Weights()
        given = {"module": weights, "optimizer": torch.optim.SGD(weights.parameters(), 10.0**power)}
        loader = {"train_data_loader": Batches("validation", task["outer"][:steps])}
        outer = Outer(name="outer", config=Config(), **given, **loader)
        given = {"module": network, "optimizer": torch.optim.SGD(network.parameters(), RATE, MOMENTUM)}
        loader = {"train_data_loader": Batches("train", task["inner"][:steps])}
        inner = Inner(name="inner", config=Config(type="darts", unroll_steps=1), **given, **loader)
        paths = {"u2l": {outer: [inner]}, "l2u": {inner: [outer]}}
        engine = Engine([outer, inner], EngineConfig(train_iters=steps, valid_step=10**9), paths)
        began = time.process_time()
        engine.run()
        return network, (time.process_time() - began) / steps

    run(WARM)
    network, seconds = run(len(task["inner"]))
    weights = {name: array.detach().numpy() for name, array in network.named_parameters()}
    return answer(task, weights, seconds, before)


SIDES = {"bilevel": with_bilevel, "betty": with_betty}


def measure(python, side, path, power):
    """Return the results of a side from its own process."""
    command = [python, __file__, "--side", side, "--task", str(path), "--power", str(power)]
    threads = {"OMP_NUM_THREADS": "1", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | threads)
    return json.loads(done.stdout.splitlines()[-1]) | {"power": power}


def describe(side, found):
    """Return a row of the table: the step with the lowest validation error, and the minimal seconds of all runs."""
    best, seconds = min(found, key=lambda one: one["validation"]), min(one["seconds"] for one in found)
    errors = (f"{best[name]:.3f}" for name in ("validation", "test"))
    return [side, f"{1e6 * seconds:.0f}", f"{best['bytes'] / 2**20:.0f} MiB", *errors, f"1e{best['power']}"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--betty-python", help="the Python of an environment with betty")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--width", type=int, default=100, help="hidden units")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--task", help=argparse.SUPPRESS)
    parser.add_argument("--power", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        with np.load(arguments.task) as task:
            return print(json.dumps(SIDES[arguments.side](dict(task), arguments.power)))
    pythons = {"bilevel": sys.executable} | ({"betty": arguments.betty_python} if arguments.betty_python else {})
    with tempfile.TemporaryDirectory() as folder:
        task, path = make_task(arguments.width), Path(folder) / "task.npz"
        np.savez(path, **task, **draw_batches(task, arguments.steps))
        rounds = [{side: measure(python, side, path, power) for side, python in pythons.items()} for power in POWERS]
    columns = [
        "",
        "processor µs per outer step",
        "peak memory",
        "validation error",
        "test error",
        "step of the weights",
    ]
    print(table(columns, [describe(side, [one[side] for one in rounds]) for side in pythons]))
    return None


if __name__ == "__main__":
    main()
