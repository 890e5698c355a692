"""Measurements in other processes: one answer per process, or processes that take turns.

The peak memory of a process never decreases, so a measurement of memory needs a process of its own. Processes that take
turns live through a whole comparison, so that a slow phase of the machine affects all of them.
"""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path


def answer(script, *arguments):
    """Run a script of this folder with arguments and return the last line that it prints, as JSON."""
    command = [sys.executable, str(Path(__file__).with_name(script)), *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def peak_bytes():
    """Return the peak memory of this process; that of `getrusage` includes the size of its parent."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def peak_with_jax():
    """Return the peak after JAX has run one operation, which is subtracted from later peaks."""
    import jax

    jax.block_until_ready(jax.numpy.zeros(3) + 1)
    return peak_bytes()


class Turns:
    """A process that prints "ready" and then answers each line of its standard input with one line of JSON."""

    def __init__(self, words, python=sys.executable, **changes):
        options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": os.environ | changes}
        self.process = subprocess.Popen([str(python), *map(str, words)], **options)
        if not any(line.strip() == "ready" for line in self.process.stdout):
            self.end()
            raise RuntimeError(f"{' '.join(map(str, words))} did not start.")

    def take(self):
        """Return the answer of one round."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def end(self):
        self.process.communicate()


def answer_turns(contenders):
    """Run as such a process: in each round call every contender and print the results by name."""
    print("ready", flush=True)
    for _ in sys.stdin:
        print(json.dumps({name: contender() for name, contender in contenders.items()}), flush=True)
