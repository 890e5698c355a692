"""Ask XLA to compile the hot loop of a solver into one kernel.

On a CPU XLA runs the body of a loop as some dozens of pieces, each launched by its runtime: for small batches that
costs more than the arithmetic. Loops that touch few bytes are compiled whole instead; XLA's own limit is 1 kB, and a
step of a linear model touches a hundred. The limit can be raised only through the environment, before JAX starts its
backends.
"""

import os

_OPTION = "--xla_backend_extra_options"
# Above a step of a linear model or of the quadratics; below a step on rows of hundreds of features and several classes,
# whose products XLA's library computes faster than its own loops, and below a pass over a large data set.
_LIMIT_BYTES = 2**20


def compile_small_loops_whole() -> None:
    """Raise XLA's limit, unless XLA_FLAGS sets extra options already; without effect once JAX has started."""
    flags = os.environ.get("XLA_FLAGS", "")
    if _OPTION not in flags:
        option = f"{_OPTION}=xla_cpu_small_while_loop_byte_threshold={_LIMIT_BYTES}"
        os.environ["XLA_FLAGS"] = f"{flags} {option}".strip()
