"""One run over two processes, each with its own rows and its own devices, here on one machine.

    python examples/two_processes.py [--whole] [--out run.npz]

The script starts itself twice on the loopback interface. On a cluster the scheduler starts the processes, and only the
body of `work` is needed. Each process reads its half of the rows. With ``--whole`` each process builds the complete
problem and places only its half, which gives exactly the run of one process.
"""

import argparse
import socket
import subprocess
import sys
import time

import jax
import numpy as np

import bilevel

N_TRAIN = 400
SOLVER, STEPS = bilevel.SRBA(step_size=0.1, outer_ratio=1.0, batch_size=32), 100


def breast_cancer(part):
    """Return training and validation rows of one process, given by the slice ``part``."""
    data = bilevel.datasets.load("breast_cancer")
    X = (data.X_train - data.X_train.mean(axis=0)) / data.X_train.std(axis=0)
    y = 2 * data.y_train.astype(int) - 1
    return X[:N_TRAIN][part], y[:N_TRAIN][part], X[N_TRAIN:][part], y[N_TRAIN:][part]


def work(address, n_processes, process, whole):
    """Run the part of one process."""
    # By default the first process would listen at every address of this machine.
    jax.distributed.initialize(address, n_processes, process, coordinator_bind_address=address)
    part = slice(None) if whole else slice(process, None, n_processes)
    problem = bilevel.problems.penalty_selection(*breast_cancer(part), dtype="float64")
    return bilevel.run(problem.sharded(own_rows=not whole), SOLVER, max_steps=STEPS)


def free_address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def start_all(file, arguments, n_processes, timeout):
    """Run a file once per process, stop all if one fails or time is up, and return the worst status."""
    command = [sys.executable, file, *arguments, "--address", free_address(), "--process"]
    # The transport of JAX prints a line in each process; the output of the first one is enough.
    outputs = [None, *[subprocess.DEVNULL] * (n_processes - 1)]
    processes = [subprocess.Popen([*command, str(i)], stdout=output) for i, output in enumerate(outputs)]
    deadline = time.monotonic() + timeout
    try:
        while None in (statuses := [process.poll() for process in processes]) and not any(statuses):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not done after {timeout} s")
            time.sleep(0.05)
        return max(abs(status or 0) for status in statuses)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--whole", action="store_true", help="every process builds the complete problem")
    parser.add_argument("--out", help="file to which the first process writes point and history")
    parser.add_argument("--timeout", type=float, default=300.0)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.process is None:
        sys.exit(start_all(__file__, sys.argv[1:], 2, options.timeout))
    result = work(options.address, 2, options.process, options.whole)
    if options.process == 0:
        print(result.summary())
        if options.out:
            np.savez(options.out, **result.point._asdict(), **result.history)


if __name__ == "__main__":
    main()
