"""A step of SOBA on a convolutional network on a CPU, with rearranged convolutions and with those of JAX.

    python benchmarks/convolutions.py [--batch 512] [--rounds 3]

The network of `examples/label_noise.py` on random images of 28 × 28, with a weight for each of 4096 rows. Both kinds
take turns in one process. Times are processor times, which depend less on other work on the machine.
"""

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from markdown import number, table

import bilevel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import label_noise

N_ROWS, STEPS = 4096, 8


def random_images():
    rng = np.random.default_rng(0)
    images = rng.random((N_ROWS, 28, 28), dtype=np.float32), rng.integers(0, 10, N_ROWS).astype(np.int32)
    few = tuple(part[:1024] for part in images)
    return label_noise.Images(images, few, few, images[1])


def contender(problem, batch):
    """Return a function that returns the processor milliseconds of a step."""
    run = bilevel.Run(problem, bilevel.SOBA(0.1, batch_size=batch), exact=False)
    run.advance(1)  # compiles

    def millis():
        began = time.process_time()
        run.advance(STEPS)
        return 1e3 * (time.process_time() - began) / STEPS

    return millis


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    problem = label_noise.build(random_images())
    plain = replace(problem, oracles=replace(problem.oracles, convolves=False))
    kinds = [contender(kind, options.batch) for kind in (problem, plain)]
    found = np.median([[kind() for kind in kinds] for _ in range(options.rounds)], axis=0)
    columns = ["batch", "rearranged, ms", "as in JAX, ms", "ratio"]
    print(table(columns, [[str(options.batch), *map(number, found), number(found[1] / found[0])]]))


if __name__ == "__main__":
    main()
