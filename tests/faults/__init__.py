"""Fault injection: kills, signals, full disks, damaged files, invalid input, long runs.

The tests are slow. Each one repeats its fault a few times. If ``BILEVEL_CAMPAIGN`` is "long", as ``make campaign`` sets
it, the fault is repeated many times. ``BILEVEL_CAMPAIGN_SEED`` changes the random moments, bits and inputs.
"""

import os
import random

LONG = os.environ.get("BILEVEL_CAMPAIGN") == "long"
SEED = int(os.environ.get("BILEVEL_CAMPAIGN_SEED", "0"))


def repeats(few, many):
    """Return how often to repeat a fault."""
    return many if LONG else few


def rng():
    return random.Random(SEED)
