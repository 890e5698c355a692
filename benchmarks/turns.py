"""Processes that live through a whole measurement and take turns, so that what slows the machine slows all of them."""

import json
import os
import subprocess
import sys


class Turns:
    """A process that says "ready", and answers each line of its standard input with one line of JSON."""

    def __init__(self, words, python=sys.executable, **changes):
        options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": os.environ | changes}
        self.process = subprocess.Popen([str(python), *map(str, words)], **options)
        if not any(line.strip() == "ready" for line in self.process.stdout):
            self.end()
            raise RuntimeError(f"{' '.join(map(str, words))} did not start.")

    def take(self):
        """One round."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def end(self):
        self.process.communicate()


def answer_turns(contenders):
    """Be such a process: each round is a call of every contender, by name."""
    print("ready", flush=True)
    for _ in sys.stdin:
        print(json.dumps({name: contender() for name, contender in contenders.items()}), flush=True)
