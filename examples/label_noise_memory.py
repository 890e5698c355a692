"""Peak memory of `label_noise.py` with a weight per row, compared with plain training of the same network.

    python examples/label_noise_memory.py [--quick]

Each is measured in its own process: on a GPU the peak of the device, on a CPU the size of the rows plus the growth of
the process in a second run.
"""

import argparse
import ctypes
import gc
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from label_noise import LEARNED, PLAIN, SIZES, build, decay, entropies, fit, inner_optimizer, load, weights_of

STEPS = 2  # with an evaluation after each
REACH, NOISE = 100.0, 0.5


def train_plainly(data, steps, batch, seed=0):
    """Return compiled steps of the same network and optimizer without the library, and their arguments."""
    images, labels = (jnp.asarray(part) for part in data.train)
    optimizer, weights = inner_optimizer(steps), jax.tree.map(jnp.asarray, weights_of(images.shape[1], seed))

    def loss(weights, images, labels):
        return jnp.mean(entropies(weights, images, labels)) + decay(weights)

    def step(index, carry):
        weights, state, images, labels = carry
        first = index * batch % (len(images) - batch + 1)
        part = [jax.lax.dynamic_slice_in_dim(whole, first, batch) for whole in (images, labels)]
        change, state = optimizer.update(jax.grad(loss)(weights, *part), state, weights)
        return optax.apply_updates(weights, change), state, images, labels

    def train(weights, state, images, labels, steps):
        return jax.lax.fori_loop(0, steps, step, (weights, state, images, labels))[0]

    return jax.jit(train), (weights, optimizer.init(weights), images, labels, steps)


def peak_memory(kind, data, steps, reach, batch):
    """Return the bytes, as described above."""
    if kind == PLAIN:
        program, arguments = train_plainly(data, steps, batch)
        train = partial(program, *arguments)
    else:
        train = partial(fit, build(data), steps, reach, batch)
    _wait(train())  # excludes the memory of compilation
    between = _reset_peak() if jax.devices()[0].memory_stats() is None else 0
    _wait(train())
    stats = jax.devices()[0].memory_stats()
    rows = sum(part.nbytes for part in (*data.train, *data.validation))
    return stats["peak_bytes_in_use"] if stats else _status("VmHWM") - between + rows


def _wait(result):
    jax.block_until_ready(jax.tree.leaves(result))


def _reset_peak():
    """Reset the peak memory of the process and return its current memory."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="digits of scikit-learn instead of MNIST")
    parser.add_argument("--of", choices=(PLAIN, LEARNED), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.of:
        name = "digits" if options.quick else "mnist"
        rows, clean, _, batch = SIZES[name]
        return print(peak_memory(options.of, load(name, rows, clean, NOISE), STEPS, REACH, batch))
    peaks = {}
    for kind in (PLAIN, LEARNED):
        command = [sys.executable, __file__, *sys.argv[1:], "--of", kind]
        peaks[kind] = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])
        print(f"{kind:18} {peaks[kind] / 2**20:.1f} MiB", flush=True)
    return print(f"ratio {peaks[LEARNED] / peaks[PLAIN]:.2f}")


if __name__ == "__main__":
    main()
